"""Checkpoints of U-ViT."""

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


SOURCE = "baofff/U-ViT"
NAMES = {
    r"^patch_embed\.proj\.": "patch_embedding.",
    r"^time_embed\.": "time_mlp.",
    r"^label_emb\.": "class_embedding.",
    r"^pos_embed$": "position_embedding",
    r"^norm\.": "norm_out.",
    r"^decoder_pred\.": "proj_out.",
    r"^final_layer\.": "conv_out.",
    r"\.skip_linear\.": ".skip_projection.",
}
HEADS_BY_WIDTH = {512: 8, 768: 12, 1024: 16, 1152: 16}  # of the published sizes; shapes do not tell


def config_fields() -> set[str]:
    from ...models.unet_decayed_uvit import DecayedUViT2DModel

    return constructor_fields(DecayedUViT2DModel)


def read_uvit(checkpoint: Path, fields: dict) -> tuple:
    """Pipeline with the network of a checkpoint, and notes for its owner."""
    from ...models.unet_decayed_uvit import DecayedUViT2DModel
    from ...pipelines.pipeline_decayed_uvit import DecayedUViTPipeline

    weights, _ = read_weights(checkpoint, wrappers=("ema", "model", "state_dict"))
    known = fields_from_shapes(weights) | fields
    check_known(known)
    renamed = rename_weights(weights, NAMES)
    null_class, notes = add_null_class(renamed, known["num_classes"])
    unet = load_weights(DecayedUViT2DModel(**known), renamed).eval()
    latent_scale, latent_notes = latent_settings(known["in_channels"])
    scheduler = published_scheduler(latent=latent_scale is not None)
    pipeline = DecayedUViTPipeline(unet, scheduler, latent_scale=latent_scale, null_class=null_class)
    return pipeline, [*notes, *latent_notes]


def fields_from_shapes(weights: dict[str, torch.Tensor]) -> dict:
    """Config fields that the shapes tell; `None` where they do not."""
    check_present(SOURCE, weights, ("patch_embed.proj.weight", "pos_embed", "mid_block.mlp.fc1.weight"))
    hidden_size, in_channels, patch_size, _ = patch_embedding_shape(weights, "patch_embed.proj.weight")
    # Official networks of latents have a null class, the last; those of pixels (ImageNet at 64) have none.
    classes = len(weights["label_emb.weight"]) - (1 if in_channels == 4 else 0) if "label_emb.weight" in weights else 0
    return {
        "sample_size": sample_side(weights["pos_embed"].shape[1] - (2 if classes else 1), patch_size),
        "patch_size": patch_size,
        "in_channels": in_channels,
        "hidden_size": hidden_size,
        "num_layers": 2 * count_blocks(weights, "in_blocks"),
        "num_attention_heads": HEADS_BY_WIDTH.get(hidden_size),
        "mlp_ratio": len(weights["mid_block.mlp.fc1.weight"]) / hidden_size,
        "qkv_bias": "mid_block.attn.qkv.bias" in weights,
        "num_classes": classes,
        "time_embedding_mlp": "time_embed.0.weight" in weights,
        "final_conv": "final_layer.weight" in weights,
        "time_input": "timestep_plus_one" if in_channels == 4 else "continuous",
        "shortcut_decay": 1.0,
        "zero_init_branches": False,
    }


def published_scheduler(latent: bool):
    """The noise levels that official models were trained with: Stable Diffusion's, or those of the VP SDE."""
    from diffusers import DPMSolverMultistepScheduler

    if latent:
        return DPMSolverMultistepScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)
    times = torch.arange(1001, dtype=torch.float64) / 1000
    signal = torch.exp(-(0.1 * times + 9.95 * times**2))  # the share of the data in the variance
    return DPMSolverMultistepScheduler(trained_betas=(1 - signal[1:] / signal[:-1]).tolist())


FORMATS = [Format(name="uvit", text=SOURCE, licence="mit", read=read_uvit, fields=config_fields, library="diffusers")]
