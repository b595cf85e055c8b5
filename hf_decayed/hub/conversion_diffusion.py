"""Checkpoints of U-ViT, SiT and the authors' decayed SiT -> pipelines of ours, exactly."""

import inspect
import math
import re

import torch
from diffusers import DiffusionPipeline, DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler, ModelMixin

from ..models.transformer_decayed_sit import DecayedSiTTransformer2DModel
from ..models.unet_decayed_uvit import DecayedUViT2DModel
from ..pipelines.pipeline_decayed_sit import DecayedSiTPipeline
from ..pipelines.pipeline_decayed_uvit import DecayedUViTPipeline


DIFFUSION_KINDS = {
    "uvit": ("baofff/U-ViT", "mit"),
    "sit": ("willisma/SiT", "mit"),
    "released-sit": ("the authors' decayed SiT (xiao7199/decayed_Identity_shortcuts)", "unknown"),
}


# Their names -> ours. Fused matrices are split afterwards.
UVIT_NAMES = {
    r"^patch_embed\.proj\.": "patch_embedding.",
    r"^time_embed\.": "time_mlp.",
    r"^label_emb\.": "class_embedding.",
    r"^pos_embed$": "position_embedding",
    r"^norm\.": "norm_out.",
    r"^decoder_pred\.": "proj_out.",
    r"^final_layer\.": "conv_out.",
    r"\.skip_linear\.": ".skip_projection.",
}


SIT_NAMES = {
    r"^x_embedder\.proj\.": "patch_embedding.",
    r"^t_embedder\.mlp\.": "time_mlp.",
    r"^y_embedder\.embedding_table\.": "class_embedding.",
    r"^pos_embed$": "position_embedding",
    r"^(enc_)?blocks\.": "transformer_blocks.",
    r"^final_layer\.linear\.": "proj_out.",
    r"^final_layer\.adaLN_modulation\.1\.": "modulation_out.",
    r"\.adaLN_modulation\.1\.": ".modulation.",
    r"\.skip\.": ".skip_projection.",
}


BLOCK_NAMES = {r"\.mlp\.fc": ".fc", r"\.attn\.proj\.": ".attn.to_out.0."}


# Shapes do not tell the number of heads; these are the ones of the published widths.
UVIT_HEADS = {512: 8, 768: 12, 1024: 16, 1152: 16}


SIT_HEADS = {384: 6, 768: 12, 1024: 16, 1152: 16}


SD_LATENT_SCALE = 0.18215  # of Stable Diffusion's VAE, whose latents all published latent models take


def model_class(kind: str) -> type[ModelMixin]:
    return DecayedUViT2DModel if kind == "uvit" else DecayedSiTTransformer2DModel


def diffusion_fields(kind: str) -> set[str]:
    return set(inspect.signature(model_class(kind).__init__).parameters) - {"self", "args", "kwargs"}


def from_diffusion(kind: str, weights: dict[str, torch.Tensor], fields: dict, fill) -> tuple[DiffusionPipeline, list]:
    """Pipeline with the network of a checkpoint, and what its owner should know; `fill` loads all weights or refuses."""
    known = (uvit_fields if kind == "uvit" else sit_fields)(kind, weights)
    known |= fields
    if missing := [name for name, value in known.items() if value is None]:
        options = " ".join(f"--set {name}=..." for name in missing)
        raise ValueError(f"The file does not tell {', '.join(missing)}: give {options}")
    notes = []
    renamed = rename_weights(kind, weights, known["num_layers"])
    table = renamed.get("class_embedding.weight")
    null_class = table is None or len(table) > known["num_classes"]
    if not null_class:
        # Trained without guidance; the row for the null class is there so that shapes are the same for all.
        renamed["class_embedding.weight"] = torch.cat([table, table.new_zeros(1, table.shape[1])])
        notes.append(
            f"The network has {len(table)} classes and no null class, so the pipeline refuses guidance; if its last is one, "
            f"give --set num_classes={len(table) - 1}."
        )
    model = fill(model_class(kind)(**known), renamed).eval()
    latent = known["in_channels"] == 4
    if latent:
        notes.append(
            "A network of latents: give the pipeline a VAE, as in `from_pretrained(..., vae=AutoencoderKL.from_pretrained("
            '"stabilityai/sd-vae-ft-ema"))`.'
        )
    latent_scale = SD_LATENT_SCALE if latent else None
    if kind == "uvit":
        scheduler, pipeline_class = uvit_scheduler(latent), DecayedUViTPipeline
    else:
        scheduler, pipeline_class = FlowMatchEulerDiscreteScheduler(shift=1.0), DecayedSiTPipeline
    return pipeline_class(model, scheduler, latent_scale=latent_scale, null_class=null_class), notes


def rename_weights(kind: str, weights: dict[str, torch.Tensor], num_layers: int) -> dict[str, torch.Tensor]:
    names = {**(UVIT_NAMES if kind == "uvit" else SIT_NAMES), **BLOCK_NAMES}
    renamed = {}
    for name, tensor in weights.items():
        if match := re.match(r"dec_blocks\.(\d+)\.", name):  # the second half of one list of blocks
            name = f"transformer_blocks.{int(match[1]) + num_layers // 2}.{name[match.end() :]}"
        for pattern, ours in names.items():
            name = re.sub(pattern, ours, name)
        if ".attn.qkv." in name:
            for letter, part in zip("qkv", tensor.chunk(3)):
                renamed[name.replace(".qkv.", f".to_{letter}.")] = part
        else:
            renamed[name] = tensor
    return renamed


def uvit_fields(kind: str, weights: dict[str, torch.Tensor]) -> dict:
    """What shapes tell of a U-ViT; `None` for what they do not."""
    needed = ("patch_embed.proj.weight", "pos_embed", "mid_block.mlp.fc1.weight")
    check_present(kind, weights, needed)
    hidden_size, in_channels, patch_size, _ = patch_embedding_shape(weights, "patch_embed.proj.weight")
    # Official networks of latents have a null class, the last; those of pixels (ImageNet at 64) have none.
    classes = len(weights["label_emb.weight"]) - (1 if in_channels == 4 else 0) if "label_emb.weight" in weights else 0
    return {
        "sample_size": sample_side(weights["pos_embed"].shape[1] - (2 if classes else 1), patch_size),
        "patch_size": patch_size,
        "in_channels": in_channels,
        "hidden_size": hidden_size,
        "num_layers": 2 * count_blocks(weights, "in_blocks"),
        "num_attention_heads": UVIT_HEADS.get(hidden_size),
        "mlp_ratio": len(weights["mid_block.mlp.fc1.weight"]) / hidden_size,
        "qkv_bias": "mid_block.attn.qkv.bias" in weights,
        "num_classes": classes,
        "time_embedding_mlp": "time_embed.0.weight" in weights,
        "final_conv": "final_layer.weight" in weights,
        "time_input": "timestep_plus_one" if in_channels == 4 else "continuous",
        "shortcut_decay": 1.0,
        "zero_init_branches": False,
    }


def sit_fields(kind: str, weights: dict[str, torch.Tensor]) -> dict:
    first = "enc_blocks.0" if kind == "released-sit" else "blocks.0"
    needed = ("x_embedder.proj.weight", "pos_embed", "final_layer.linear.weight", "y_embedder.embedding_table.weight")
    check_present(kind, weights, (*needed, f"{first}.mlp.fc1.weight"))
    hidden_size, in_channels, patch_size, _ = patch_embedding_shape(weights, "x_embedder.proj.weight")
    return {
        "sample_size": sample_side(weights["pos_embed"].shape[1], patch_size),
        "patch_size": patch_size,
        "in_channels": in_channels,
        "hidden_size": hidden_size,
        "num_layers": count_blocks(weights, "blocks") or 2 * count_blocks(weights, "enc_blocks"),
        "num_attention_heads": SIT_HEADS.get(hidden_size),
        "mlp_ratio": len(weights[f"{first}.mlp.fc1.weight"]) / hidden_size,
        "qkv_bias": f"{first}.attn.qkv.bias" in weights,
        "num_classes": len(weights["y_embedder.embedding_table.weight"]) - 1,
        "learned_sigma": len(weights["final_layer.linear.weight"]) == 2 * patch_size**2 * in_channels,
        "encoder_decoder_skips": kind == "released-sit",
        "shortcut_decay": None if kind == "released-sit" else 1.0,
    }


def check_present(kind: str, weights: dict, needed: tuple[str, ...]) -> None:
    if missing := [name for name in needed if name not in weights]:
        raise ValueError(f"This is no checkpoint of {DIFFUSION_KINDS[kind][0]}: it lacks {', '.join(missing)}.")


def patch_embedding_shape(weights: dict, name: str) -> torch.Size:
    """Of the convolution that makes tokens of patches."""
    shape = weights[name].shape
    if len(shape) != 4:
        raise ValueError(f"'{name}' should be a convolution, and has shape {tuple(shape)}.")
    return shape


def count_blocks(weights: dict, prefix: str) -> int:
    return len({match[1] for name in weights if (match := re.match(rf"{prefix}\.(\d+)\.", name))})


def sample_side(num_patches: int, patch_size: int) -> int | None:
    side = math.isqrt(num_patches)
    return side * patch_size if side**2 == num_patches else None


def uvit_scheduler(latent: bool) -> DPMSolverMultistepScheduler:
    """The noise levels that official models were trained with: Stable Diffusion's, or those of the VP SDE."""
    if latent:
        return DPMSolverMultistepScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)
    times = torch.arange(1001, dtype=torch.float64) / 1000
    signal = torch.exp(-(0.1 * times + 9.95 * times**2))  # the share of variance that is left of the data
    return DPMSolverMultistepScheduler(trained_betas=(1 - signal[1:] / signal[:-1]).tolist())
