"""What the readers of diffusion checkpoints share."""

import math
import re

import torch

from ._format import ConversionError


BLOCK_NAMES = {r"\.mlp\.fc": ".fc", r"\.attn\.proj\.": ".attn.to_out.0."}
SD_LATENT_SCALE = 0.18215  # of Stable Diffusion's VAE, whose latents all published latent models take


def rename_weights(weights: dict[str, torch.Tensor], names: dict[str, str]) -> dict[str, torch.Tensor]:
    """The same tensors under our names, with fused matrices split."""
    renamed = {}
    for key, tensor in weights.items():
        for pattern, replacement in {**names, **BLOCK_NAMES}.items():
            key = re.sub(pattern, replacement, key)
        if ".attn.qkv." in key:
            for letter, part in zip("qkv", tensor.chunk(3)):
                renamed[key.replace(".qkv.", f".to_{letter}.")] = part
        else:
            renamed[key] = tensor
    return renamed


def add_null_class(weights: dict[str, torch.Tensor], num_classes: int) -> tuple[bool, list[str]]:
    """Adds a row of zeros to a class table without a null class; returns whether the network has one, and notes.

    A network without it was trained without guidance; the row makes the shapes the same for all.
    """
    table = weights.get("class_embedding.weight")
    if table is None or len(table) > num_classes:
        return True, []
    weights["class_embedding.weight"] = torch.cat([table, table.new_zeros(1, table.shape[1])])
    return False, [
        f"The network has {len(table)} classes and no null class, so the pipeline refuses guidance; if the last class is "
        f"one, give --set num_classes={len(table) - 1}."
    ]


def latent_settings(in_channels: int) -> tuple[float | None, list[str]]:
    """The scale of latents, by which four channels are known, and a note for their owner."""
    if in_channels != 4:
        return None, []
    return SD_LATENT_SCALE, [
        "A network of latents: give the pipeline a VAE, as in `from_pretrained(..., vae=AutoencoderKL.from_pretrained("
        '"stabilityai/sd-vae-ft-ema"))`.'
    ]


def check_present(source: str, weights: dict, keys: tuple[str, ...]) -> None:
    if missing := [key for key in keys if key not in weights]:
        raise ConversionError(f"This is no checkpoint of {source}: it lacks {', '.join(missing)}.")


def patch_embedding_shape(weights: dict, name: str) -> torch.Size:
    """Shape of the convolution that turns patches into tokens."""
    shape = weights[name].shape
    if len(shape) != 4:
        raise ConversionError(f"'{name}' should be a convolution, and has shape {tuple(shape)}.")
    return shape


def count_blocks(weights: dict, prefix: str) -> int:
    return len({match[1] for name in weights if (match := re.match(rf"{prefix}\.(\d+)\.", name))})


def sample_side(num_patches: int, patch_size: int) -> int | None:
    side = math.isqrt(num_patches)
    return side * patch_size if side**2 == num_patches else None
