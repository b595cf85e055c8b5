"""Speed of masked autoencoders against transformers' ViTMAE: pretraining step, features, selection of visible patches.

python training/benchmarks/models.py
python training/benchmarks/models.py --sizes tiny --rounds 9 --output model_cards/results/benchmark_models.json
"""

import argparse
from collections.abc import Callable

import torch
from timing import add_model_arguments, benchmark_parser, compare, profile_shares, run_benchmark
from transformers import ViTMAEConfig, ViTMAEForPreTraining

from hf_decayed import DecayedViTMAEConfig, DecayedViTMAEForPreTraining
from hf_decayed.command_line import OneLineParser
from hf_decayed.models.modeling_decayed_vit_mae import select_rows


PEER = "transformers ViTMAE"
SIZES_HELP = "tiny is the size of the published checkpoints, base is ViT-B/16 at 224 pixels"

BATCH_SIZES = {"tiny": 256, "base": 8}
CONFIG_FIELDS = {
    "base": {},
    "tiny": {
        "image_size": 32,
        "patch_size": 4,
        "hidden_size": 128,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "intermediate_size": 512,
        "decoder_hidden_size": 64,
        "decoder_num_hidden_layers": 6,
        "decoder_num_attention_heads": 4,
        "decoder_intermediate_size": 256,
    },
}


def benchmark(options: argparse.Namespace) -> list[dict]:
    return [table for size in options.sizes for table in benchmark_size(size, options)]


def benchmark_size(size: str, options: argparse.Namespace) -> list[dict]:
    fields, batch_size = CONFIG_FIELDS[size], options.batch_size or BATCH_SIZES[size]
    models = build_models(fields, options)
    config = models[PEER].config
    images = torch.randn(batch_size, 3, config.image_size, config.image_size, device=options.device)

    steps = {label: pretraining_step(label, model, images, options) for label, model in models.items()}
    # What our two optimizations gain: the default preset without the first, and with the second.
    all_patches, loss_only = (build_models(fields, options)["default, 0.6"] for _ in range(2))
    # The model embeds all patches through the module if that has hooks.
    all_patches.vit.embeddings.patch_embeddings.projection.register_forward_hook(lambda *_: None)
    steps["default, 0.6, all patches embedded"] = pretraining_step("ours", all_patches, images, options)
    steps["default, 0.6, loss alone"] = pretraining_step("ours", loss_only, images, options, return_logits=False)
    training = compare(f"{size}: pretraining step, batch {batch_size}", steps, batch_size, options)
    training["time goes to (%)"] = {label: profile_shares(steps[label]) for label in models}

    encoders = {label: feature_extraction(label, model, images, options) for label, model in models.items()}
    features = compare(f"{size}: features of whole images, batch {batch_size}", encoders, batch_size, options)

    num_patches = (config.image_size // config.patch_size) ** 2
    tokens = torch.randn(batch_size, num_patches, 128, device=options.device, requires_grad=True)
    selection = compare(f"{size}: choosing a quarter of the rows", row_selections(tokens), batch_size, options)
    return [training, features, selection]


def build_models(fields: dict, options: argparse.Namespace) -> dict[str, torch.nn.Module]:
    """The peer, then our variants, all of the same size."""
    models = {PEER: ViTMAEForPreTraining(ViTMAEConfig(**fields))}
    configs = {
        "plain preset": DecayedViTMAEConfig.plain(**fields),
        "default, 1.0": DecayedViTMAEConfig(**fields, shortcut_decay=1.0),
        "default, 0.6": DecayedViTMAEConfig(**fields),
    }
    for label, config in configs.items():
        config._attn_implementation = options.attention
        models[label] = DecayedViTMAEForPreTraining(config)
    return {label: model.to(options.device) for label, model in models.items()}


def pretraining_step(
    label: str,
    model: torch.nn.Module,
    images: torch.Tensor | None,
    options: argparse.Namespace,
    **forward_arguments,
) -> Callable:
    """`step(**batch)`: forward, backward and AdamW, by default on `images`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ours = label != PEER
    forward = torch.compile(model) if options.compile and ours else model
    dtype = getattr(torch, options.dtype)

    def step(**batch):
        batch = batch or {"pixel_values": images}
        with torch.autocast(options.device, dtype, enabled=ours and dtype != torch.float32):
            loss = forward(**batch, **forward_arguments).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def feature_extraction(
    label: str, model: torch.nn.Module, images: torch.Tensor, options: argparse.Namespace
) -> Callable:
    encoder = model.vit.eval()
    encoder.config.mask_ratio = 0.0  # the peer masks in evaluation too
    if label != PEER:
        encoder = encoder.to(getattr(torch, options.dtype))
        encoder = torch.compile(encoder) if options.compile else encoder
    return torch.no_grad()(lambda: encoder(images))


def row_selections(tokens: torch.Tensor) -> dict[str, Callable]:
    """Two ways to select the visible patches, with their gradients."""
    indices = torch.rand(tokens.shape[:2], device=tokens.device).argsort(1)[:, : tokens.shape[1] // 4]

    def gather():
        torch.gather(tokens, 1, indices.unsqueeze(-1).repeat(1, 1, tokens.shape[2])).sum().backward()

    def select():
        select_rows(tokens, indices).sum().backward()

    return {"gather, as ViTMAE": gather, "row selection": select}


def mae_parser(description: str | None) -> OneLineParser:
    """The flags of benchmarks of masked autoencoders."""
    parser = benchmark_parser(description, SIZES_HELP)
    add_model_arguments(parser)
    parser.add_argument("--attention", default="sdpa", help="attention implementation of our models")
    return parser


if __name__ == "__main__":
    run_benchmark(benchmark, mae_parser(__doc__))
