"""Evaluation of a diffusion model's features: every block at every noise level, a grid whose best cell is reported."""

from collections.abc import Sequence

import torch
from accelerate import Accelerator

from ..data.latents import latent_scaling, vae_scale_factor
from ..data.shards import Encoder
from ..data.sources import ImageSplits
from ..data.transforms import CenterCropProcessor
from ..errors import UserError
from ..provenance import pipeline_fingerprint, public_config
from .dense import DenseMetrics, evaluate_dense
from .encoders import FeatureMetrics, FeatureSource, evaluate_features
from .features import NOISE_LEVELS, Extraction, diffusion_encoder, pipeline_network


def evaluate_blocks(
    pipeline,
    splits: ImageSplits,
    blocks: Sequence[str] | None = None,
    noise_levels: Sequence[float] = NOISE_LEVELS,
    metrics: FeatureMetrics | None = None,
    extraction: Extraction | None = None,
    accelerator: Accelerator | None = None,
    pixels: bool = True,
) -> dict:
    """Rows of metrics by `<block>@<noise level>`, the same as a `grid`, and the `best` cell for every accuracy.

    Args:
        pipeline (`DiffusionPipeline`): With a `unet` or a `transformer`; a network of latents needs a `vae` too.
        blocks (`Sequence[str]`, *optional*): Names of modules; by default all blocks of the network.
        noise_levels (`Sequence[float]`): From 0 (data) to 1 (noise); see [`diffusion_encoder`].
    """
    metrics, accelerator = metrics or FeatureMetrics(), accelerator or Accelerator()
    pipeline.to(accelerator.device)
    network = pipeline_network(pipeline)
    blocks, noise_levels = list(blocks or find_blocks(network)), list(noise_levels)
    source = block_features(pipeline, blocks, noise_levels, metrics.seed)
    results = evaluate_features(source, splits, metrics, extraction, accelerator, pixels)
    results["protocol"] |= {
        "scheduler": source.identity["scheduler"],
        "best": "of all cells, chosen on the held-out images",
    }
    if accelerator.is_main_process:
        results |= block_grid(results["rows"], blocks, noise_levels)
        results["grid"]["label"] = f"noise level: {noise_level_unit(network)}"
    return results


def evaluate_block_patches(
    pipeline,
    splits: ImageSplits,
    blocks: Sequence[str] | None = None,
    noise_levels: Sequence[float] = NOISE_LEVELS,
    metrics: DenseMetrics | None = None,
    extraction: Extraction | None = None,
    accelerator: Accelerator | None = None,
) -> dict:
    """As [`evaluate_blocks`], for the patches of every block: unsupervised segmentation, and how well they tell position."""
    metrics, accelerator = metrics or DenseMetrics(), accelerator or Accelerator()
    pipeline.to(accelerator.device)
    network = pipeline_network(pipeline)
    blocks, noise_levels = list(blocks or find_blocks(network)), list(noise_levels)
    source = block_features(pipeline, blocks, noise_levels, metrics.seed, pooling="patches")
    results = evaluate_dense(source, splits, metrics, extraction, accelerator)
    results["protocol"]["scheduler"] = source.identity["scheduler"]
    if accelerator.is_main_process:
        results |= block_grid(results["rows"], blocks, noise_levels)
        results["grid"]["label"] = f"noise level: {noise_level_unit(network)}"
    return results


def find_blocks(network: torch.nn.Module) -> list[str]:
    """Names of the modules that the network's class declares as its blocks."""
    classes = getattr(network, "_repeated_blocks", None) or network._no_split_modules or []
    blocks = [name for name, module in network.named_modules() if type(module).__name__ in classes]
    if not blocks:
        names = ", ".join(name for name, _ in network.named_children())
        raise UserError(f"{type(network).__name__} does not declare its blocks: name modules with --blocks ({names}).")
    return blocks


def noise_level_unit(network: torch.nn.Module) -> str:
    if hasattr(network, "time_of_noise_level"):
        return "share of the way from data (0) to noise (1)"
    return "share of the timesteps (0 data, 1 noise)"


def block_features(
    pipeline, blocks: list[str], noise_levels: list[float], seed: int = 0, pooling: str = "mean"
) -> FeatureSource:
    """The blocks of a pipeline's network as features, of images in the network's size, without a class."""
    network, vae = pipeline_network(pipeline), getattr(pipeline, "vae", None)
    if vae is None and network.config.in_channels not in (1, 3):
        raise UserError("The network takes latents, and the pipeline has no VAE to encode images with.")
    if not getattr(pipeline.config, "null_class", True) and network.config.num_classes > 0:
        raise UserError(
            "Blocks are evaluated without a class, and this network was trained with a class for every image."
        )
    encode = diffusion_encoder(network, pipeline.scheduler, blocks, noise_levels, seed, pooling)
    channels, height, width = image_shape(network, vae)
    names = [f"{block}@{level:g}" for block in blocks for level in noise_levels]
    return FeatureSource(
        encode=encode if vae is None else latent_encoder(encode, pipeline),
        names=names,
        processor=CenterCropProcessor(height, width, signed=True),
        num_channels=channels,
        identity={
            "model": pipeline_fingerprint(pipeline),
            "scheduler": public_config(pipeline.scheduler.config),
            "features": names,
            "seed": seed,
        },
        description=f"<block>@<noise level>, a {noise_level_unit(network)}: the "
        f"{'mean of a block' if pooling == 'mean' else 'block'}'s patches, without a class; "
        "the middle of each image",
        dtype=str(network.dtype).removeprefix("torch."),
    )


def latent_encoder(encode: Encoder, pipeline) -> Encoder:
    """An encoder of images, from one of latents and the pipeline's VAE."""
    vae, scaling = pipeline.vae, latent_scaling(pipeline.vae)
    for field, name in (("latent_scale", "scale"), ("latent_shift", "shift")):
        if getattr(pipeline.config, field, None) is not None:
            scaling[name] = getattr(pipeline.config, field)

    def encode_images(pixel_values, indices):
        with torch.autocast(pixel_values.device.type, enabled=False):  # as for the training latents
            latents = vae.encode(pixel_values.to(vae.dtype)).latent_dist.mode().float()
        return encode((latents - scaling["shift"]) * scaling["scale"], indices)

    return encode_images


def image_shape(network: torch.nn.Module, vae: torch.nn.Module | None) -> tuple[int, int, int]:
    """Channels, height and width of the images that a network was trained on."""
    size = network.config.sample_size
    height, width = (size, size) if isinstance(size, int) else size
    if vae is None:
        return network.config.in_channels, height, width
    return vae.config.in_channels, height * vae_scale_factor(vae), width * vae_scale_factor(vae)


def block_grid(rows: dict[str, dict[str, float]], blocks: list[str], noise_levels: list[float]) -> dict:
    """Metrics as a `grid` of blocks by noise levels, and the name of the `best` cell for every accuracy."""
    names = [f"{block}@{level:g}" for block in blocks for level in noise_levels]
    metrics = [
        metric
        for metric in rows[names[0]]
        if metric != "effective_rank_exponential" and not metric.endswith("_spread")
    ]
    cells = {
        metric: [[rows[f"{block}@{level:g}"][metric] for level in noise_levels] for block in blocks]
        for metric in metrics
    }
    best = {
        metric: max(names, key=lambda name: rows[name][metric])
        for metric in metrics
        if metric.endswith("accuracy") and not metric.startswith("position") or "miou" in metric
    }
    return {"grid": {"blocks": blocks, "noise_levels": noise_levels, "cells": cells}, "best": best}
