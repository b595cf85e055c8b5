"""Speed of U-ViT and SiT against the official arithmetic and diffusers' DiT, and of cached latents.

    python training/benchmarks/diffusion.py
    python training/benchmarks/diffusion.py --sizes tiny --rounds 5

The official arithmetic is that of U-ViT's and SiT's own code with our weights: one matrix product for queries, keys and
values, and attention in float32.
"""

import argparse
import gc
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import Accelerator
from data import save_photographs
from diffusers import AutoencoderKL, DiTTransformer2DModel
from timing import (
    add_model_arguments,
    benchmark_parser,
    compare,
    profile_shares,
    run_benchmark,
)
from torch.nn import functional as F

from hf_decayed.data.latents import latent_images
from hf_decayed.data.sources import ImageSplits
from hf_decayed.models.transformer_decayed_sit import DecayedSiTTransformer2DModel
from hf_decayed.models.unet_decayed_uvit import DecayedUViT2DModel


OFFICIAL, DIT = "the official arithmetic", "diffusers DiT"
SIZES_HELP = "tiny is U-ViT-S and SiT-S/2, base is U-ViT-M and SiT-XL/2"
UVIT_SIZES = {"tiny": ("S", 8), "base": ("M", 2)}  # name and batch size
SIT_SIZES = {"tiny": ("S/2", 4), "base": ("XL/2", 1)}


def benchmark(options: argparse.Namespace) -> list[dict]:
    tables = []
    for size in options.sizes:
        tables += benchmark_uvit(size, options)
        tables.append(benchmark_sit(size, options))
        gc.collect()  # the models of one size before those of the next
    return [*tables, cached_latents(options)]


def benchmark_uvit(size: str, options: argparse.Namespace) -> list[dict]:
    name, batch_size = UVIT_SIZES[size]
    batch_size = options.batch_size or batch_size
    fields = {} if size == "tiny" else {"in_channels": 4, "num_classes": 1000}
    models = {OFFICIAL: build_official(DecayedUViT2DModel, name, options, **fields)}
    for decay in (1.0, 0.7):
        models[f"shortcut_decay {decay}"] = build(DecayedUViT2DModel, name, options, shortcut_decay=decay, **fields)
    inputs = {
        "sample": torch.randn(batch_size, fields.get("in_channels", 3), 32, 32, device=options.device),
        "timestep": torch.arange(batch_size, device=options.device),
    }
    forward_passes = {label: forward_pass(label, model, inputs, options) for label, model in models.items()}
    tables = [compare(f"U-ViT-{name}: denoising, batch {batch_size}", forward_passes, batch_size, options)]
    tables[-1]["time goes to (%)"] = {label: profile_shares(run) for label, run in forward_passes.items()}
    if size == "tiny":
        batch_size = max(1, batch_size // 2)
        inputs = {key: tensor[:batch_size] for key, tensor in inputs.items()}
        steps = {label: training_step(label, model.float(), inputs, options) for label, model in models.items()}
        tables.append(compare(f"U-ViT-{name}: training step, batch {batch_size}", steps, batch_size, options))
        tables[-1]["time goes to (%)"] = {label: profile_shares(step) for label, step in steps.items()}
    return tables


def benchmark_sit(size: str, options: argparse.Namespace) -> dict:
    name, batch_size = SIT_SIZES[size]
    batch_size = options.batch_size or batch_size
    sit, plain = DecayedSiTTransformer2DModel, {"num_classes": 1000, "encoder_decoder_skips": False}
    models = {OFFICIAL: build_official(sit, name, options, **plain)}
    config = models[OFFICIAL].config
    models[DIT] = DiTTransformer2DModel(
        num_attention_heads=config.num_attention_heads,
        attention_head_dim=config.hidden_size // config.num_attention_heads,
        num_layers=config.num_layers,
        patch_size=2,
        sample_size=32,
        in_channels=4,
        out_channels=4,
    ).to(options.device)
    models["1.0, no skips"] = build(sit, name, options, **plain, shortcut_decay=1.0)
    models["0.8, no skips"] = build(sit, name, options, **plain, shortcut_decay=0.8)
    models["0.8, skips (more work)"] = build(sit, name, options, num_classes=1000, shortcut_decay=0.8)
    inputs = {
        "sample": torch.randn(batch_size, 4, 32, 32, device=options.device),
        "timestep": torch.rand(batch_size, device=options.device),
        "class_labels": torch.arange(batch_size, device=options.device),
    }
    forward_passes = {label: forward_pass(label, model, inputs, options) for label, model in models.items()}
    table = compare(f"SiT-{name}: forward, batch {batch_size}", forward_passes, batch_size, options)
    table["time goes to (%)"] = {label: profile_shares(run) for label, run in forward_passes.items()}
    return table


def build(model_class: type, name: str, options: argparse.Namespace, **fields) -> torch.nn.Module:
    model = model_class.from_size(name, **fields).to(options.device)
    return torch.compile(model) if options.compile else model


def build_official(model_class: type, name: str, options: argparse.Namespace, **fields) -> torch.nn.Module:
    model = model_class.from_size(name, shortcut_decay=1.0, **fields).to(options.device)
    model.fuse_qkv_projections()
    model.set_attn_processor(OfficialAttention())
    return model


class OfficialAttention:
    """Attention of the official code: a fused projection, and float32 whatever the type of the rest."""

    def __call__(self, attn, hidden_states):
        query, key, value = (
            attn.to_qkv(hidden_states).unflatten(-1, (3, attn.heads, -1)).permute(2, 0, 3, 1, 4).float()
        )
        attention_output = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        return attn.to_out[0](attention_output.to(hidden_states.dtype))


def forward_pass(label: str, model: torch.nn.Module, inputs: dict, options: argparse.Namespace) -> Callable:
    model, dtype = model.eval(), getattr(torch, options.dtype)
    if label not in (OFFICIAL, DIT) and dtype != torch.float32:
        model, inputs = model.to(dtype), {**inputs, "sample": inputs["sample"].to(dtype)}
    if label == DIT:
        inputs = {"hidden_states" if name == "sample" else name: tensor for name, tensor in inputs.items()}
    return torch.no_grad()(lambda: model(**inputs))


def training_step(label: str, model: torch.nn.Module, inputs: dict, options: argparse.Namespace) -> Callable:
    model, dtype = model.train(), getattr(torch, options.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    use_autocast = label != OFFICIAL and dtype != torch.float32

    def step():
        with torch.autocast(options.device, dtype, enabled=use_autocast):
            predicted = model(**inputs).sample
        F.mse_loss(predicted.float(), inputs["sample"]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def cached_latents(options: argparse.Namespace) -> dict:
    """Training of U-ViT-S on latents of an autoencoder of Stable Diffusion's size: encoded in the loop, or cached."""
    image_size, batch_size = 256, 2
    vae = AutoencoderKL(
        block_out_channels=(128, 256, 512, 512),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
        latent_channels=4,
    )
    vae.requires_grad_(False).to(options.device).eval()
    model = DecayedUViT2DModel.from_size("S", in_channels=4).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    epochs = itertools.count()

    def step(images):
        epoch = next(epochs)
        batch = images.__getitems__([(epoch, index) for index in range(batch_size)])
        batch = {name: tensor.to(options.device) for name, tensor in batch.items()}
        timesteps = (1000 * batch["uniform"][:, 0]).long()
        F.mse_loss(model(batch["pixel_values"] + batch["noise"], timesteps).sample, batch["noise"]).backward()
        optimizer.step()
        optimizer.zero_grad()

    with tempfile.TemporaryDirectory() as folder:
        photographs = save_photographs(Path(folder), 2 * batch_size)
        splits = ImageSplits("photographs", photographs, photographs, "none", "image", None)
        accelerator = Accelerator(cpu=options.device == "cpu")
        cached, encoded = (
            latent_images(vae, splits, image_size, 0, accelerator, cache_dir)
            for cache_dir in (Path(folder) / "latents", None)
        )
        variants = {"the autoencoder in the loop": lambda: step(encoded), "latents kept": lambda: step(cached)}
        title = f"U-ViT-S: training on latents of {image_size} pixels, batch {batch_size}"
        return compare(title, variants, batch_size, options)


def main() -> None:
    parser = benchmark_parser(__doc__, SIZES_HELP)
    add_model_arguments(parser)
    run_benchmark(benchmark, parser)


if __name__ == "__main__":
    main()
