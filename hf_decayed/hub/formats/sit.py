"""Checkpoints of SiT, and of the authors' decayed SiT."""

import re
from functools import partial
from pathlib import Path

import torch

from ...command_line import constructor_fields
from ._diffusion import (
    add_null_class,
    check_present,
    count_blocks,
    latent_settings,
    patch_embedding_shape,
    rename_weights,
    sample_side,
)
from ._format import Format, check_known, load_weights, read_weights


SOURCES = {
    "sit": "willisma/SiT",
    "released-sit": "the authors' decayed SiT (xiao7199/decayed_Identity_shortcuts)",
}
NAMES = {
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
HEADS_BY_WIDTH = {384: 6, 768: 12, 1024: 16, 1152: 16}  # of the published sizes; shapes do not tell


def config_fields() -> set[str]:
    from ...models.transformer_decayed_sit import DecayedSiTTransformer2DModel

    return constructor_fields(DecayedSiTTransformer2DModel)


def read_sit(name: str, checkpoint: Path, fields: dict) -> tuple:
    """Pipeline with the network of a checkpoint, and notes for its owner."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    from ...models.transformer_decayed_sit import DecayedSiTTransformer2DModel
    from ...pipelines.pipeline_decayed_sit import DecayedSiTPipeline

    # SiT's training saves an EMA of the weights, which is what it samples from.
    weights, _ = read_weights(checkpoint, wrappers=("ema", "model", "state_dict"))
    known = fields_from_shapes(name, weights) | fields
    check_known(known)
    renamed = rename_weights(join_halves(weights, known["num_layers"]), NAMES)
    null_class, notes = add_null_class(renamed, known["num_classes"])
    transformer = load_weights(DecayedSiTTransformer2DModel(**known), renamed).eval()
    latent_scale, latent_notes = latent_settings(known["in_channels"])
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    pipeline = DecayedSiTPipeline(transformer, scheduler, latent_scale=latent_scale, null_class=null_class)
    return pipeline, [*notes, *latent_notes]


def join_halves(weights: dict[str, torch.Tensor], num_layers: int) -> dict[str, torch.Tensor]:
    """Numbers the blocks of the decayed SiT through: its second half is a list of its own, `dec_blocks`."""
    joined = {}
    for key, tensor in weights.items():
        if match := re.match(r"dec_blocks\.(\d+)\.", key):
            key = f"blocks.{int(match[1]) + num_layers // 2}.{key[match.end() :]}"
        joined[key] = tensor
    return joined


def fields_from_shapes(name: str, weights: dict[str, torch.Tensor]) -> dict:
    """Config fields that the shapes tell; `None` where they do not."""
    released = name == "released-sit"
    first = "enc_blocks.0" if released else "blocks.0"
    keys = ("x_embedder.proj.weight", "pos_embed", "final_layer.linear.weight", "y_embedder.embedding_table.weight")
    check_present(SOURCES[name], weights, (*keys, f"{first}.mlp.fc1.weight"))
    hidden_size, in_channels, patch_size, _ = patch_embedding_shape(weights, "x_embedder.proj.weight")
    return {
        "sample_size": sample_side(weights["pos_embed"].shape[1], patch_size),
        "patch_size": patch_size,
        "in_channels": in_channels,
        "hidden_size": hidden_size,
        "num_layers": count_blocks(weights, "blocks") or 2 * count_blocks(weights, "enc_blocks"),
        "num_attention_heads": HEADS_BY_WIDTH.get(hidden_size),
        "mlp_ratio": len(weights[f"{first}.mlp.fc1.weight"]) / hidden_size,
        "qkv_bias": f"{first}.attn.qkv.bias" in weights,
        "num_classes": len(weights["y_embedder.embedding_table.weight"]) - 1,
        "learned_sigma": len(weights["final_layer.linear.weight"]) == 2 * patch_size**2 * in_channels,
        "encoder_decoder_skips": released,
        "shortcut_decay": None if released else 1.0,
    }


FORMATS = [
    Format(
        name="sit",
        text=SOURCES["sit"],
        licence="mit",
        read=partial(read_sit, "sit"),
        fields=config_fields,
        library="diffusers",
    ),
    Format(
        name="released-sit",
        text=SOURCES["released-sit"],
        licence="unknown",
        read=partial(read_sit, "released-sit"),
        fields=config_fields,
        library="diffusers",
    ),
]
