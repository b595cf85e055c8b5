"""Speed of nested diffusion: a sampling step of all levels against the multiply-accumulates (MACs) of their networks, and
caching of latents against the encoder alone.

    python training/benchmarks/nested.py
    python training/benchmarks/nested.py --sizes tiny --rounds 5

The hierarchies are the dissertation's. Upper levels have few tokens, so with small batches the time to read their weights
from memory counts as well as their MACs.
"""

import argparse
import gc
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from data import save_photographs
from diffusers import DPMSolverMultistepScheduler
from timing import Stopwatch, benchmark_parser, compare, compare_part, run_benchmark
from transformers import ViTConfig, ViTModel

from hf_decayed.data.nested_latents import cache_nested_latents, image_batches
from hf_decayed.data.sources import ImageSplits
from hf_decayed.evaluation.nested import chain_macs
from hf_decayed.models.modeling_hierarchical_latents import HierarchicalLatentEncoder
from hf_decayed.models.unet_nested_uvit import NestedUViT2DModel, dissertation_levels
from hf_decayed.pipelines.pipeline_nested_diffusion import NestedDiffusionPipeline


SIZES_HELP = "of the networks: tiny is U-ViT-S, base the dissertation's M-12"
CHAIN_SIZES = {"tiny": ("S", 8), "base": ("M-12", 4)}  # name and batch size
NUM_LEVELS = (1, 2, 3, 5)


def benchmark(options: argparse.Namespace) -> list[dict]:
    tables = []
    for size in options.sizes:
        tables.append(sampling_step(size, options))
        gc.collect()  # the networks of one size before those of the next
    return [*tables, cached_latents(options)]


def sampling_step(size: str, options: argparse.Namespace) -> dict:
    """One sampling step of every level of chains, with what it should cost by MACs, and the share of the upper levels."""
    name, batch_size = CHAIN_SIZES[size]
    batch_size = options.batch_size or batch_size
    pipelines = {count: build_chain(count, name, options) for count in NUM_LEVELS}
    labels = {count: f"{count} level{'s' if count > 1 else ''}" for count in NUM_LEVELS}
    whole, upper, variants = {}, {}, {}
    for count, pipeline in pipelines.items():
        whole[count], upper[count] = Stopwatch(options.device), Stopwatch(options.device)
        for level, network in pipeline.networks.items():
            if level > 1:
                network.forward = upper[count].wrap(network.forward)
        settings = {"num_images": batch_size, "num_inference_steps": 1, "output_type": "latent"}
        variants[labels[count]] = whole[count].wrap(lambda pipeline=pipeline, settings=settings: pipeline(**settings))
    table = compare(f"U-ViT-{name}: a step of all levels, batch {batch_size}", variants, batch_size, options)
    costs = {count: chain_macs(pipeline) for count, pipeline in pipelines.items()}
    for count, label in labels.items():
        own = pipelines[count].networks[1].count_macs()
        table["rows"][label] |= {
            "times the first by MACs (%)": 100 * costs[1] / costs[count],
            "levels above 1 (% of the time)": 100 * upper[count].seconds / whole[count].seconds,
            "levels above 1 (% of the MACs)": 100 * (1 - own / costs[count]),
        }
    return table


def build_chain(num_levels: int, size: str, options: argparse.Namespace) -> NestedDiffusionPipeline:
    levels, networks = dissertation_levels(num_levels), {}
    for level in range(1, num_levels + 1):
        with torch.device("meta"):
            network = NestedUViT2DModel.for_level(levels, level, size)
        network.to_empty(device=options.device)
        for parameter in network.parameters():  # faster than the initial values of training, for a billion weights
            parameter.uniform_(-0.02, 0.02)
        networks[f"level_{level}"] = network.eval()
    pipeline = NestedDiffusionPipeline(DPMSolverMultistepScheduler(), **networks)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def cached_latents(options: argparse.Namespace) -> dict:
    """Latents of two levels of photographs and their mirror images, and the encoder's calls in it: 5 crops of each."""
    number = 16  # the SVD needs more than its channels
    config = ViTConfig(hidden_size=192, num_hidden_layers=12, num_attention_heads=3, intermediate_size=768)
    network = ViTModel(config, add_pooling_layer=False).eval()
    encoder = HierarchicalLatentEncoder.from_encoder(network, [(1, 8), (2, 4)], 224).to(options.device).eval()
    with tempfile.TemporaryDirectory() as folder:
        photographs = save_photographs(Path(folder), number)
        splits = ImageSplits("photographs", photographs, photographs, "none", "image", None)
        encoder.fit(image_batches(splits, 224, 3))
        stopwatch = Stopwatch(options.device)
        encoder.encoder.forward = stopwatch.wrap(encoder.encoder.forward)
        accelerator = Accelerator(cpu=options.device == "cpu")

        def run():
            with tempfile.TemporaryDirectory(dir=folder) as cache:
                cache_nested_latents(encoder, splits, cache, accelerator, batch_size=8)

        title = f"Caching latents of {number} photographs and mirror images, ViT-Ti/16 on 5 crops of each"
        return compare_part(
            title, "the encoder's calls", "decoding, encoding, SVD, files", run, stopwatch, number, options
        )


def main() -> None:
    run_benchmark(benchmark, benchmark_parser(__doc__, SIZES_HELP))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
