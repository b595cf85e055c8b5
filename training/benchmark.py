"""Speed against named peers, in one run.

    python training/benchmark.py models
    python training/benchmark.py models --sizes tiny --rounds 9 --output model_cards/results/benchmark_models.json

Variants take turns inside each round, so that a busy machine slows them alike; what counts is the ratio to the peer
within a round. Printed: images a second (median), ratio (median, smallest and largest), and where the time goes.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path

import torch
import transformers
from torch.profiler import ProfilerActivity, profile
from tqdm.auto import tqdm
from transformers import ViTMAEConfig, ViTMAEForPreTraining

import hf_decayed
from hf_decayed import DecayedViTMAEConfig, DecayedViTMAEForPreTraining
from hf_decayed.models.modeling_decayed_vit_mae import select_rows


PEER = "transformers ViTMAE"

# `tiny` is the size of the bundled run and of the published checkpoints.
SIZES = {
    "base": {"batch_size": 8, "fields": {}},
    "tiny": {
        "batch_size": 256,
        "fields": {
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
    },
}

# Operators of the profiler -> what a reader thinks of them as. First match wins.
KINDS_OF_WORK = {
    "attention": ("scaled_dot_product", "_softmax", "bmm"),
    "matrix products": ("mm", "linear", "mkldnn"),
    "convolution": ("convolution",),
    "GELU and SiLU": ("gelu", "silu"),
    "layer norm": ("layer_norm",),
    "optimizer": ("adamw", "adam"),
    "shortcut and other sums": ("add", "sum", "mul", "sub", "div", "mse", "mean"),
    "moving data": (
        "copy",
        "cat",
        "index",
        "gather",
        "clone",
        "fill",
        "zero",
        "slice",
        "empty",
        "contiguous",
        "im2col",
    ),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    models = commands.add_parser("models", help="MAE pretraining step and features against transformers' ViTMAE")
    models.add_argument("--sizes", default="tiny,base", help="comma-separated, of: tiny, base (ViT-B/16, 224 px)")
    models.add_argument("--batch_size", type=int, help="instead of each size's own")
    models.add_argument("--rounds", type=int, default=7, help="timed rounds; each runs every variant once")
    models.add_argument(
        "--threads", type=int, default=1, help="threads on CPU; 1 is timed in CPU seconds, the steadiest"
    )
    models.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    models.add_argument(
        "--dtype",
        default="float32",
        choices=["float32", "bfloat16", "float16"],
        help="ours: autocast in training, weights for features; the peer keeps float32",
    )
    models.add_argument("--compile", action="store_true", help="compile our variants")
    models.add_argument("--attention", default="sdpa", help="kernel of our variants; the peer keeps its default")
    models.add_argument("--output", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    unknown = set(arguments.sizes.split(",")) - SIZES.keys()
    if unknown:
        parser.error(f"--sizes knows {', '.join(SIZES)}, got {', '.join(sorted(unknown))}")
    torch.set_num_threads(arguments.threads)
    results = benchmark_models(arguments)
    print(render(results))
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(results, indent=2) + "\n")


def benchmark_models(arguments) -> dict:
    results = {
        "command": " ".join(["python", "training/benchmark.py", *(Path(word).name for word in sys.argv[1:])]),
        "machine": f"{platform.machine()} {arguments.device}, {arguments.threads} thread(s)",
        "dtype": arguments.dtype,
        "versions": {
            "hf_decayed": hf_decayed.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "seed": 0,
        "tables": [],
    }
    for name in arguments.sizes.split(","):
        torch.manual_seed(0)
        size = SIZES[name]
        batch_size = arguments.batch_size or size["batch_size"]
        models = build_models(size["fields"], arguments)
        side = size["fields"].get("image_size", 224)
        images = torch.randn(batch_size, 3, side, side, device=arguments.device)

        steps = {label: pretraining_step(label, model, images, arguments) for label, model in models.items()}
        # What each exact shortcut gives, by taking it away from the default preset.
        slower, loss_only = (build_models(size["fields"], arguments)["default, 0.6"] for _ in range(2))
        slower.vit.embeddings.patch_embeddings.projection.register_forward_hook(
            lambda *_: None
        )  # forces the module call
        steps["default, 0.6, all patches embedded"] = pretraining_step(
            "all patches embedded", slower, images, arguments
        )
        steps["default, 0.6, loss alone"] = pretraining_step(
            "loss alone", loss_only, images, arguments, return_logits=False
        )
        title = f"{name}: pretraining step, batch {batch_size}"
        results["tables"].append(take_turns(title, steps, batch_size, arguments))
        results["tables"][-1]["time goes to (%)"] = {label: where_time_goes(steps[label]) for label in models}

        encoders = {label: features(label, model, images, arguments) for label, model in models.items()}
        title = f"{name}: features of whole images, batch {batch_size}"
        results["tables"].append(take_turns(title, encoders, batch_size, arguments))

        tokens = torch.randn(
            batch_size, (side // models[PEER].config.patch_size) ** 2, 128, device=arguments.device, requires_grad=True
        )
        results["tables"].append(
            take_turns(f"{name}: choosing a quarter of the rows", rows(tokens), len(tokens), arguments)
        )
    return results


def build_models(fields: dict, arguments) -> dict[str, torch.nn.Module]:
    """The peer first, then our variants, all at the same sizes."""
    models = {PEER: ViTMAEForPreTraining(ViTMAEConfig(**fields))}
    ours = {
        "plain preset": DecayedViTMAEConfig.plain(**fields),
        "default, 1.0": DecayedViTMAEConfig(**fields, shortcut_decay=1.0),
        "default, 0.6": DecayedViTMAEConfig(**fields),
    }
    for label, config in ours.items():
        config._attn_implementation = arguments.attention
        models[label] = DecayedViTMAEForPreTraining(config)
    return {label: model.to(arguments.device) for label, model in models.items()}


def pretraining_step(label, model, images, arguments, **forward_arguments):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ours = label != PEER
    forward = torch.compile(model) if arguments.compile and ours else model
    dtype = getattr(torch, arguments.dtype)

    def step():
        with torch.autocast(images.device.type, dtype, enabled=ours and dtype != torch.float32):
            loss = forward(images, **forward_arguments).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def features(label, model, images, arguments):
    encoder = model.vit.eval()
    # The peer masks in evaluation too; its way to a whole image is a ratio of zero.
    encoder.config.mask_ratio = 0.0
    if label != PEER:
        encoder = encoder.to(getattr(torch, arguments.dtype))
        encoder = torch.compile(encoder) if arguments.compile else encoder
    return torch.no_grad()(lambda: encoder(images))


def rows(tokens):
    keep = torch.rand(tokens.shape[:2], device=tokens.device).argsort(1)[:, : tokens.shape[1] // 4]

    def gather():
        torch.gather(tokens, 1, keep.unsqueeze(-1).repeat(1, 1, tokens.shape[2])).sum().backward()

    def select():
        select_rows(tokens, keep).sum().backward()

    return {"gather, as ViTMAE": gather, "row selection": select}


def take_turns(title: str, runs: dict, batch_size: int, arguments) -> dict:
    """Times every run once per round; the first run is what the others are compared with."""

    def seconds(run):
        clock = time.process_time if arguments.device == "cpu" and arguments.threads == 1 else time.perf_counter
        start = clock()
        run()
        if arguments.device != "cpu":
            torch.accelerator.synchronize()
        return clock() - start

    for run in runs.values():
        run()
    rounds = []
    for index in tqdm(range(arguments.rounds), desc=title, leave=False):
        order = list(runs)[:: 1 if index % 2 == 0 else -1]
        times = {label: seconds(runs[label]) for label in order}
        rounds.append({label: times[label] for label in runs})
    peer = next(iter(runs))
    table = {"title": title, "peer": peer, "rows": {}}
    for label in runs:
        ratios = sorted(times[peer] / times[label] for times in rounds)
        table["rows"][label] = {
            "images per second": round(batch_size / statistics.median(times[label] for times in rounds), 2),
            "ratio": round(statistics.median(ratios), 3),
            "smallest": round(ratios[0], 3),
            "largest": round(ratios[-1], 3),
        }
    return table


def where_time_goes(step) -> dict[str, float]:
    """Share of the operators' own time by kind of work, in per cent."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=activities) as profiler:
        step()
    shares = dict.fromkeys([*KINDS_OF_WORK, "other"], 0.0)
    for event in profiler.key_averages():
        if not event.key.startswith(("aten::", "mkldnn")) and "dam" not in event.key:
            continue
        kind = next(
            (kind for kind, words in KINDS_OF_WORK.items() if any(word in event.key.lower() for word in words)),
            "other",
        )
        shares[kind] += event.self_device_time_total or event.self_cpu_time_total
    total = sum(shares.values())
    return {kind: round(100 * share / total, 1) for kind, share in shares.items()}


def render(results: dict) -> str:
    """The tables in Markdown."""
    lines = [f"`{results['command']}`", ""]
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines += [f"{results['machine']}, {results['dtype']}; {versions}", ""]
    for table in results["tables"]:
        lines += [f"**{table['title']}**", "", "| | images/s | times the first | spread |", "|---|---|---|---|"]
        for label, row in table["rows"].items():
            spread = f"{row['smallest']:.2f}-{row['largest']:.2f}"
            lines.append(f"| {label} | {row['images per second']:g} | {row['ratio']:.2f} | {spread} |")
        lines.append("")
        if shares := table.get("time goes to (%)"):
            kinds = [kind for kind in next(iter(shares.values())) if any(row[kind] >= 0.5 for row in shares.values())]
            lines += ["| time goes to (%) | " + " | ".join(kinds) + " |", "|---" * (1 + len(kinds)) + "|"]
            lines += [
                f"| {label} | " + " | ".join(f"{row[kind]:.0f}" for kind in kinds) + " |"
                for label, row in shares.items()
            ]
            lines.append("")
    return "\n".join(lines).rstrip()


if __name__ == "__main__":
    main()
