"""Time and memory against image size, batch size and the size of a kNN bank, with the slopes on logarithmic axes.

    python training/benchmarks/scaling.py
    python training/benchmarks/scaling.py --rounds 3 --output model_cards/results/benchmark_scaling.json

With `--output`, the picture is written beside the JSON file. A slope of 1 means in proportion, 2 with the square. Memory is
what the process grows by during a call.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from models import CONFIG_FIELDS
from timing import benchmark_parser, compare, extra_memory, run_benchmark

from hf_decayed import DecayedViTMAEConfig, DecayedViTMAEForPreTraining
from hf_decayed.evaluation import effective_rank, knn_accuracy
from hf_decayed.plots import require_matplotlib


IMAGE_SIZES = (32, 64, 96, 128)
BATCH_SIZES = (8, 16, 32, 64)
BANK_SIZES = (4_000, 16_000, 64_000, 256_000)
DIM = 128


def benchmark(options: argparse.Namespace) -> list[dict]:
    parts = [
        ("training step, batch 4", "image size (pixels)", {size: step(size, 4) for size in IMAGE_SIZES}),
        ("training step, 32 pixels", "batch size", {size: step(32, size) for size in BATCH_SIZES}),
        ("kNN of 500 queries", "bank size", {size: search(size) for size in BANK_SIZES}),
        ("effective rank", "number of features", {size: rank(size) for size in BANK_SIZES}),
    ]
    tables = [measure(*part, options) for part in parts]
    if options.output:
        save_picture(options.output.with_suffix(".png"), tables)
    return tables


def step(image_size: int, batch_size: int) -> Callable:
    config = DecayedViTMAEConfig(**{**CONFIG_FIELDS["tiny"], "image_size": image_size})
    model = DecayedViTMAEForPreTraining(config)
    images = torch.randn(batch_size, config.num_channels, image_size, image_size)

    def run():
        model(images, return_logits=False).loss.backward()
        model.zero_grad()

    return run


def search(number: int) -> Callable:
    bank, queries = torch.randn(number, DIM), torch.randn(500, DIM)
    labels, query_labels = torch.arange(number) % 10, torch.arange(500) % 10
    return lambda: knn_accuracy(bank, labels, queries, query_labels)


def rank(number: int) -> Callable:
    features = torch.randn(number, DIM)
    return lambda: effective_rank(features)


def measure(what: str, axis: str, runs: dict[int, Callable], options: argparse.Namespace) -> dict:
    """A table with seconds and memory of every size, and the slopes of both."""
    variants = {f"{size:,}": run for size, run in runs.items()}
    table = compare(what, variants, 1000, options)
    for label, run in variants.items():
        row = table["rows"][label]
        row["seconds"] = round(1000 / row["images per second"], 6)
        row["time (ms)"] = 1000 * row["seconds"]
        row["extra memory (MB)"] = extra_memory(run)
    rows, sizes = list(table["rows"].values()), list(runs)
    table |= {"title": f"{what} by {axis} (images/s: calls in 1000 s)", "what": what, "axis": axis, "sizes": sizes}
    for name, column in (("time", "seconds"), ("memory", "extra memory (MB)")):
        values = [row[column] for row in rows]
        table[f"slope of {name}"] = slope(sizes, values)
        texts = [f"all rows: {table[f'slope of {name}']}"]
        texts += [str(slope(sizes[end - 1 : end + 1], values[end - 1 : end + 1])) for end in range(1, len(rows))]
        for row, text in zip(rows, texts):
            row[f"slope of {name} (from the row above)"] = text
    return table


def slope(sizes, values: list[float]) -> float | None:
    """Of a straight line through the logarithms; `None` where memory is too small to be seen."""
    if min(values) < 1e-9:
        return None
    return round(float(np.polyfit([math.log(size) for size in sizes], [math.log(value) for value in values], 1)[0]), 2)


def save_picture(path: Path, tables: list[dict]) -> None:
    """Time and memory relative to the smallest size; a dashed line is in proportion to it."""
    pyplot = require_matplotlib()
    figure, axes = pyplot.subplots(1, len(tables), figsize=(3.4 * len(tables), 3.6))
    for axis, table in zip(axes, tables):
        rows, sizes = list(table["rows"].values()), table["sizes"]
        for column, name, unit in (("seconds", "time", "s"), ("extra memory (MB)", "memory", "MB")):
            values = np.array([row[column] for row in rows])
            label = f"{name}, slope {table[f'slope of {name}']}; first: {values[0]:.2g} {unit}"
            axis.plot(sizes, values / values[0], "o-", label=label)
        axis.plot(sizes, np.array(sizes) / sizes[0], "--", color="grey", linewidth=1, label="slope 1")
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xticks(sizes, [f"{size // 1000}k" if size >= 1000 else str(size) for size in sizes])
        axis.xaxis.minorticks_off()
        axis.set_title(table["what"], fontsize=10)
        axis.set_xlabel(table["axis"])
        axis.set_ylim(top=4 * axis.get_ylim()[1])  # room for the legend
        axis.legend(fontsize=7, loc="upper left")
    axes[0].set_ylabel("times the smallest size")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    run_benchmark(benchmark, benchmark_parser(__doc__, "not used"))


if __name__ == "__main__":
    main()
