"""Speed of latent intrinsics against the same network of diffusers' residual blocks; memory of relighting large images.

    python training/benchmarks/relighting.py
    python training/benchmarks/relighting.py --sizes tiny --sides 256,1024

The peer has the blocks of diffusers' `UNet2DModel` (`ResnetBlock2D`) in the places of ours, with the light as their time
embedding; the rest of network and loss is the same.
"""

import argparse
from collections.abc import Callable

import torch
from diffusers.models.resnet import ResnetBlock2D
from timing import (
    Stopwatch,
    add_model_arguments,
    benchmark_parser,
    compare,
    extra_memory,
    profile_shares,
    run_benchmark,
    summarize,
)

from hf_decayed.losses.relighting import invariance_loss, pixel_loss, spread_loss
from hf_decayed.models.latent_intrinsics import LatentIntrinsicsBlock, LatentIntrinsicsModel
from hf_decayed.pipelines.pipeline_relighting import RelightingPipeline


BATCH_SIZES = {"tiny": 8, "base": 1}  # pairs of images


def benchmark(options: argparse.Namespace) -> list[dict]:
    tables = [training_steps(size, options) for size in options.sizes]
    return [*tables, large_images(options)] if options.sides else tables


class DiffusersBlock(ResnetBlock2D):
    """Diffusers' block with our block's arguments."""

    def forward(self, hidden_states, light=None, alpha=0.0):
        return super().forward(hidden_states, light)


def diffusers_block(block: LatentIntrinsicsBlock) -> DiffusersBlock:
    """A block of the same widths, resampling and dropout; the light scales and shifts, which is the nearest it offers."""
    projection = block.light_projection
    return DiffusersBlock(
        in_channels=block.conv1.in_channels,
        out_channels=block.conv1.out_channels,
        conv_shortcut=True,
        use_in_shortcut=not isinstance(block.shortcut, torch.nn.Identity),
        dropout=block.dropout.p,
        temb_channels=None if projection is None else projection.in_features,
        time_embedding_norm="default" if projection is None else "scale_shift",
        groups=block.norm1.num_groups,
        groups_out=block.norm2.num_groups,
        eps=1e-6,
        up=block.resample_mode == "up",
        down=block.resample_mode == "down",
    )


def with_diffusers_blocks(model: LatentIntrinsicsModel) -> LatentIntrinsicsModel:
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, LatentIntrinsicsBlock):
                setattr(parent, name, diffusers_block(child))
    return model


def training_steps(size: str, options: argparse.Namespace) -> dict:
    batch_size = options.batch_size or BATCH_SIZES[size]
    models = {"diffusers' blocks": with_diffusers_blocks(LatentIntrinsicsModel.from_size(size)).to(options.device)}
    ours = LatentIntrinsicsModel.from_size(size).to(options.device)
    models["LatentIntrinsicsModel"] = torch.compile(ours) if options.compile else ours
    side = ours.config.sample_size
    images = torch.rand(2 * batch_size, 3, side, side, device=options.device) * 2 - 1
    steps = {label: training_step(model, images, options) for label, model in models.items()}
    parameters = sum(parameter.numel() for parameter in ours.parameters()) / 1e6
    title = f"{size}, {parameters:.1f} M parameters, {side} pixels: training step, {batch_size} pairs"
    table = compare(title, steps, batch_size, options)
    table["time goes to (%)"] = {label: profile_shares(step) for label, step in steps.items()}
    return table


def training_step(model: torch.nn.Module, images: torch.Tensor, options: argparse.Namespace) -> Callable:
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4, fused=True)
    number, dtype = len(images) // 2, getattr(torch, options.dtype)
    second_light = torch.arange(number, 2 * number, device=images.device).repeat(2)
    target = images[number:]

    def step():
        with torch.autocast(options.device, dtype, enabled=dtype != torch.float32):
            output = model(images, light_index=second_light)
        first, second = zip(*(intrinsic.float().chunk(2) for intrinsic in output.intrinsics))
        loss = sum(pixel_loss(decoded, target) for decoded in output.sample.float().chunk(2))
        loss = loss + 0.1 * invariance_loss(first, second) + 1e-4 * (spread_loss(first) + spread_loss([output.light]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def large_images(options: argparse.Namespace) -> dict:
    """Square images of growing sides, relit in tiles and in one piece: wall-clock time and memory of one call each."""
    pipeline = RelightingPipeline(LatentIntrinsicsModel.from_size("tiny").to(options.device).eval())
    reference, variants = torch.rand(1, 3, 64, 64), {}
    for side in options.sides:
        image = torch.rand(1, 3, side, side)
        for name, tile_size in (("tiles of 64 pixels", None), ("one piece", side)):
            variants[f"{side} pixels, {name}"] = lambda image=image, tile_size=tile_size: pipeline(
                image, reference, tile_size=tile_size, output_type="pt"
            )
    pipeline(torch.rand(1, 3, 64, 64), reference)  # libraries keep memory of their first call
    seconds, memory = {}, {}
    for label, run in variants.items():  # once each: the largest takes as long as all others together
        stopwatch = Stopwatch(options.device)
        memory[label] = extra_memory(stopwatch.wrap(run))
        seconds[label] = stopwatch.seconds
    table = summarize("tiny: relighting of large images", [seconds], 1)
    for label in variants:
        side = int(label.split()[0])
        table["rows"][label]["extra memory (MB)"] = memory[label]
        table["rows"][label]["image and relit image (MB)"] = 2 * 3 * side**2 * 4 / 2**20  # both in float32
    return table


def image_sides(text: str) -> list[int]:
    """`256,1024` -> `[256, 1024]`, as a type for `add_argument`; an empty text leaves large images out."""
    try:
        sides = [int(side) for side in text.split(",") if side]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be sides in pixels such as 256,1024, got {text}") from error
    if any(side < 64 or side % 16 != 0 for side in sides):
        raise argparse.ArgumentTypeError(f"must be multiples of 16, at least 64, got {text}")
    return sides


if __name__ == "__main__":
    parser = benchmark_parser(__doc__, "the network of the recipe `tiny`, and the dissertation's")
    add_model_arguments(parser)
    parser.add_argument("--sides", type=image_sides, default=[256, 512, 1024], help="of large images, in pixels")
    run_benchmark(benchmark, parser)
