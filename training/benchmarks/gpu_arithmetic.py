"""What training on 8 and 64 GPUs should take by arithmetic; nothing here is measured.

    python training/benchmarks/gpu_arithmetic.py --output model_cards/results/gpu_arithmetic.json

A step computes three forward passes (one forward, two backward) and sums the gradients of all GPUs by ring all-reduce, which
sends every gradient nearly twice. Without overlap the two follow one another; with overlap the sum hides behind the backward
pass as far as it fits.
"""

import argparse
import json
from pathlib import Path


PEAK_FLOPS = 312e12  # of an A100 in bfloat16
UTILISATION = 0.4  # of the peak, which good code of this size reaches
BANDWIDTH = {8: 250e9, 64: 25e9}  # bytes a second and GPU: NVLink within a machine, 200 Gbit/s between eight machines
GRADIENT_BYTES = 4  # autocast keeps gradients in float32

# Stacks of blocks as (layers, width, tokens, parameters of a block in squares of the width); images of a GPU in a step. The blocks
# of SiT have 6 squares more, which compute scales and shifts once per image.
Stack = tuple[int, int, int, int]
MODELS: dict[str, tuple[list[Stack], int]] = {
    "MAE, ViT-B/16": ([(12, 768, 50, 12), (8, 512, 197, 12)], 128),
    "MAE, ViT-L/16": ([(24, 1024, 50, 12), (8, 512, 197, 12)], 64),
    "SiT-XL/2, 256 pixels": ([(28, 1152, 256, 18)], 32),
}
COLUMNS = {
    "GPUs": "{:d}",
    "images of a step": "{:d}",
    "GFLOP of an image, with backward": "{:.0f}",
    "gradients sent by a GPU (MB)": "{:.0f}",
    "computing (ms)": "{:.0f}",
    "sending (ms)": "{:.0f}",
    "efficiency, no overlap (%)": "{:.0f}",
    "efficiency, overlap (%)": "{:.0f}",
    "images/s": "{:.0f}",
}


def forward_flops(stacks: list[Stack]) -> float:
    """Of an image: 24 width^2 for the linear layers of a token, 4 tokens width for its attention; each product counts two."""
    return sum(layers * tokens * (24 * width**2 + 4 * tokens * width) for layers, width, tokens, _ in stacks)


def parameters(stacks: list[Stack]) -> int:
    """Of the linear layers of all blocks, which are nearly all that a model has."""
    return sum(layers * squares * width**2 for layers, width, _, squares in stacks)


def estimate(stacks: list[Stack], images: int, gpus: int) -> dict:
    flops = 3 * forward_flops(stacks)
    sent = 2 * (gpus - 1) / gpus * GRADIENT_BYTES * parameters(stacks)
    computing, sending = images * flops / (PEAK_FLOPS * UTILISATION), sent / BANDWIDTH[gpus]
    hidden = min(sending, computing * 2 / 3)
    return {
        "GPUs": gpus,
        "images of a step": gpus * images,
        "GFLOP of an image, with backward": flops / 1e9,
        "gradients sent by a GPU (MB)": sent / 1e6,
        "computing (ms)": 1000 * computing,
        "sending (ms)": 1000 * sending,
        "efficiency, no overlap (%)": 100 * computing / (computing + sending),
        "efficiency, overlap (%)": 100 * computing / (computing + sending - hidden),
        "images/s": gpus * images / (computing + sending - hidden),
    }


def estimates() -> dict:
    rows = {f"{name}, {gpus} GPUs": estimate(*MODELS[name], gpus) for name in MODELS for gpus in BANDWIDTH}
    assumptions = {
        "peak of a GPU (FLOP/s)": PEAK_FLOPS,
        "utilisation": UTILISATION,
        "bytes a second and GPU": {str(gpus): rate for gpus, rate in BANDWIDTH.items()},
        "bytes of a gradient": GRADIENT_BYTES,
    }
    command = "python training/benchmarks/gpu_arithmetic.py --output model_cards/results/gpu_arithmetic.json"
    return {"command": command, "measured": False, "assumptions": assumptions, "rows": rows}


def render_estimates(results: dict) -> str:
    lines = [f"`{results['command']}`", "", "| by arithmetic | " + " | ".join(COLUMNS) + " |"]
    lines.append("|---" * (1 + len(COLUMNS)) + "|")
    for label, row in results["rows"].items():
        name = label.rpartition(", ")[0]
        lines.append(f"| {name} | " + " | ".join(text.format(row[column]) for column, text in COLUMNS.items()) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, prog="gpu_arithmetic.py", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    results = estimates()
    print(render_estimates(results))
    if options.output:
        options.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
