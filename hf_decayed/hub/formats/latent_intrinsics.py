"""Checkpoints of the authors' latent intrinsics, which relight images."""

import re
from functools import partial
from pathlib import Path

import torch

from ...command_line import constructor_fields
from ._diffusion import check_present
from ._format import ConversionError, Format, load_weights, read_weights


SOURCE = "the authors' latent intrinsics (xiao7199/Latent_Intrinsics)"
LAYER = r"(enc|dec)\.(\d+)x\2_(conv|down|up|in\d|block\d+)(_final)?\.(.+)"  # `enc.128x128_block1_final.conv0.weight`
BLOCK_NAMES = {
    r"^norm1\.": "norm2.",
    r"^norm0\.": "norm1.",
    r"^conv1\.": "conv2.",
    r"^conv0\.": "conv1.",
    r"^affine\.": "light_projection.",
    r"^skip\.": "shortcut.",
}
ATTENTION_NAMES = {"norm2": "group_norm", "qkv": "qkv", "proj": "to_out.0"}
LAST_LAYERS = {"final.0": "decoder.norm_out", "final.2": "decoder.conv_out"}
RELEASED_ALPHA = 5e-3  # `affine_scale` of all of the release's scripts; its checkpoints do not store it


def config_fields() -> set[str]:
    from ...models.latent_intrinsics import LatentIntrinsicsModel

    return constructor_fields(LatentIntrinsicsModel)


def read_latent_intrinsics(wrapper: str, checkpoint: Path, fields: dict) -> tuple:
    """Pipeline with the network of a checkpoint, and notes for its owner."""
    from ...models.latent_intrinsics import LatentIntrinsicsModel, sinusoidal_positions
    from ...pipelines.pipeline_relighting import RelightingPipeline

    weights, _ = read_weights(checkpoint, wrappers=(wrapper,))
    check_present(SOURCE, weights, ("pos_embed", "light_encoder.2.weight", "light_decoder.0.weight", "final.2.weight"))
    weights = {name: tensor.float() for name, tensor in weights.items()}
    known = fields_from_shapes(weights) | {"alpha": RELEASED_ALPHA} | fields
    model = LatentIntrinsicsModel(**known)
    positions = weights.pop("pos_embed")
    _, channels, rows, columns = positions.shape
    ours = sinusoidal_positions(rows, columns, channels, positions.device)
    if not torch.allclose(positions, ours, atol=1e-5):
        raise ConversionError("'pos_embed' does not hold the positions of the release, which are the only ones known.")
    model = load_weights(model, rename_weights(weights)).eval()
    notes = [
        f"The file does not store alpha; {model.config.alpha:g} is assumed"
        + ("." if "alpha" in fields else ", that of the release's scripts; --set alpha=... sets another."),
        "The release computes albedo with averaged weights (`ema_state_dict`, --from latent-intrinsics) and relights with "
        f"those of the last step (`state_dict`, --from latent-intrinsics-last); these are its `{wrapper}`.",
        "The release states no licence for its weights. The network in its repository is NVIDIA's code under CC BY-NC-SA "
        "4.0, of which this folder holds nothing.",
    ]
    return RelightingPipeline(model), notes


def layers(weights: dict[str, torch.Tensor], pattern: str) -> list[re.Match]:
    return [match for name in weights if (match := re.fullmatch(pattern, name))]


def fields_from_shapes(weights: dict[str, torch.Tensor]) -> dict:
    """Config fields that names and shapes tell."""
    blocks = layers(weights, r"enc\.(\d+)x\1_block(\d+)(_final)?\.conv1\.weight")
    sides = sorted({int(match[1]) for match in blocks}, reverse=True)
    if len(sides) < 2 or any(fine != 2 * coarse for fine, coarse in zip(sides, sides[1:])):
        raise ConversionError(f"The scales of {SOURCE} halve; those of the encoder are {sides}.")
    scales = [[match for match in blocks if int(match[1]) == side] for side in sides]
    if [any(match[3] for match in scale) for scale in scales] != [False] + [True] * (len(sides) - 1):
        raise ConversionError("Every scale but the finest must have an intrinsic map (`_final`), and no other.")
    return {
        "sample_size": sides[0],
        "in_channels": len(weights["final.2.weight"]),
        "block_out_channels": [len(weights[scale[0].string]) for scale in scales],
        "layers_per_block": [len(scale) for scale in scales],
        "light_dim": len(weights["light_encoder.2.weight"]),
        "light_hidden_dim": len(weights["light_decoder.0.weight"]),
    }


def rename_weights(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors under our names, with the fused matrix of the attention split."""
    sides = sorted({int(match[2]) for match in layers(weights, LAYER)}, reverse=True)
    renamed = {}
    for name, tensor in weights.items():
        match = re.fullmatch(LAYER, name)
        if name.endswith(".resample_filter"):
            if not torch.equal(tensor, torch.full_like(tensor, 0.25)) or tensor.shape[2:] != (2, 2):
                raise ConversionError(f"'{name}' is no mean of 2 x 2 pixels, the only filter that is known.")
        elif match is None:
            prefix = name.rpartition(".")[0]
            renamed[name.replace(prefix, LAST_LAYERS.get(prefix, prefix), 1)] = tensor
        elif match[5].partition(".")[0] in ATTENTION_NAMES and match[3] == "in0":
            layer, _, parameter = match[5].partition(".")
            renamed |= attention_weights(ATTENTION_NAMES[layer], parameter, tensor)
        else:
            renamed[layer_name(match, sides)] = tensor
    return renamed


def layer_name(match: re.Match, sides: list[int]) -> str:
    """Our name of a layer of encoder or decoder."""
    part, side, layer, _, rest = match.groups()
    for pattern, replacement in BLOCK_NAMES.items():
        rest, changed = re.subn(pattern, replacement, rest)
        if changed:
            break
    fine_to_coarse = sides.index(int(side))
    number = int(layer.removeprefix("block")) if layer.startswith("block") else 0
    if part == "enc" and layer == "conv":
        return f"encoder.conv_in.{rest}"
    if part == "enc":  # the first layer of every scale but the finest is the one that halves
        number += layer.startswith("block") and fine_to_coarse > 0
        return f"encoder.scales.{fine_to_coarse}.{number}.{rest}"
    if layer.startswith("in"):
        return f"decoder.in_block{int(layer[2:]) + 1}.{rest}"
    coarse_to_fine = len(sides) - 1 - fine_to_coarse
    if layer == "up":
        return f"decoder.upsamplers.{coarse_to_fine}.{rest}"
    return f"decoder.scales.{coarse_to_fine}.{number}.{rest}"


def attention_weights(layer: str, parameter: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Weights of the attention: 1 x 1 convolutions are linear layers, and query, key and value take turns in the fused one."""
    tensor = tensor.flatten(1) if tensor.ndim == 4 else tensor
    if layer != "qkv":
        return {f"decoder.attention.{layer}.{parameter}": tensor}
    return {f"decoder.attention.to_{letter}.{parameter}": tensor[start::3] for start, letter in enumerate("qkv")}


FORMATS = [
    Format(
        name=name,
        text=f"{SOURCE}, {weights}",
        licence="unknown",
        read=partial(read_latent_intrinsics, wrapper),
        fields=config_fields,
        library="diffusers",
        task="image-to-image",
    )
    for name, wrapper, weights in (
        ("latent-intrinsics", "ema_state_dict", "averaged weights"),
        ("latent-intrinsics-last", "state_dict", "weights of the last step"),
    )
]
