"""Speed of `decay_shortcuts`: training step and inference of transformers' ViT and diffusers' DiT, plain, decayed, folded.

python training/benchmarks/decay.py
python training/benchmarks/decay.py --sizes tiny --rounds 9 --output model_cards/results/benchmark_decay.json
"""

import argparse
import copy
from collections.abc import Callable

import torch
from diffusers import DiTTransformer2DModel
from timing import benchmark_parser, compare, run_benchmark
from transformers import ViTConfig, ViTModel

from hf_decayed import decay_shortcuts, fold_shortcuts


SIZES_HELP = "tiny has a width of 128, base is ViT-S/16 at 224 pixels and DiT-S/2 on latents of 256 pixels"
BATCH_SIZES = {"tiny": 64, "base": 8}
HEADS = {"tiny": 4, "base": 6}
WIDTHS = {"tiny": 128, "base": 384}
NUM_LAYERS = 12


def benchmark(options: argparse.Namespace) -> list[dict]:
    return [
        table
        for size in options.sizes
        for name, build in (("ViT", build_vit), ("DiT", build_dit))
        for table in benchmark_model(name, build, size, options)
    ]


def benchmark_model(name: str, build: Callable, size: str, options: argparse.Namespace) -> list[dict]:
    batch_size = options.batch_size or BATCH_SIZES[size]
    model, inputs = build(size, batch_size)
    model = model.to(options.device)
    inputs = {key: value.to(options.device) for key, value in inputs.items()}
    decayed = decay_shortcuts(copy.deepcopy(model), 0.6)
    models = {"plain": model, "decay 1.0": decay_shortcuts(copy.deepcopy(model), 1.0), "decay 0.6": decayed}
    steps = {label: training_step(variant.train(), inputs) for label, variant in models.items()}
    training = compare(f"{size}: {name}, training step, batch {batch_size}", steps, batch_size, options)
    models = {"plain": model, "decay 0.6": decayed, "folded": fold_shortcuts(copy.deepcopy(decayed))}
    calls = {label: inference(variant.eval(), inputs) for label, variant in models.items()}
    return [training, compare(f"{size}: {name}, inference, batch {batch_size}", calls, batch_size, options)]


def build_vit(size: str, batch_size: int) -> tuple[torch.nn.Module, dict]:
    image_size, patch_size = (224, 16) if size == "base" else (32, 4)
    config = ViTConfig(
        image_size=image_size,
        patch_size=patch_size,
        hidden_size=WIDTHS[size],
        intermediate_size=4 * WIDTHS[size],
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=HEADS[size],
    )
    model = ViTModel(config, add_pooling_layer=False)
    return model, {"pixel_values": torch.randn(batch_size, 3, image_size, image_size)}


def build_dit(size: str, batch_size: int) -> tuple[torch.nn.Module, dict]:
    sample_size = 32 if size == "base" else 16
    model = DiTTransformer2DModel(
        num_attention_heads=HEADS[size],
        attention_head_dim=WIDTHS[size] // HEADS[size],
        in_channels=4,
        num_layers=NUM_LAYERS,
        sample_size=sample_size,
    )
    inputs = {
        "hidden_states": torch.randn(batch_size, 4, sample_size, sample_size),
        "timestep": torch.randint(0, 1000, (batch_size,)),
        "class_labels": torch.randint(0, 1000, (batch_size,)),
    }
    return model, inputs


def training_step(model: torch.nn.Module, inputs: dict) -> Callable:
    """Forward, backward and AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step():
        model(**inputs)[0].square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def inference(model: torch.nn.Module, inputs: dict) -> Callable:
    return torch.no_grad()(lambda: model(**inputs))


if __name__ == "__main__":
    run_benchmark(benchmark, benchmark_parser(__doc__, SIZES_HELP))
