"""Speed of pretraining steps, and the share of the machine's peak that they reach (MFU).

python training/benchmarks/training.py
python training/benchmarks/training.py --sizes tiny --rounds 5
"""

import argparse

import torch
from models import BATCH_SIZES, CONFIG_FIELDS, PEER, build_models, mae_parser, pretraining_step
from timing import compare, run_benchmark
from torch.utils.flop_counter import FlopCounterMode


MATRIX_SIZE = 2048  # of the product that the peak is measured by


def benchmark(options: argparse.Namespace) -> list[dict]:
    return [benchmark_size(size, options) for size in options.sizes]


def benchmark_size(size: str, options: argparse.Namespace) -> dict:
    batch_size = options.batch_size or BATCH_SIZES[size]
    models = build_models(CONFIG_FIELDS[size], options)
    image_size = models[PEER].config.image_size
    images = torch.randn(batch_size, 3, image_size, image_size, device=options.device)
    steps = {label: pretraining_step(label, model, images, options) for label, model in models.items()}
    table = compare(f"{size}: pretraining step, batch {batch_size}", steps, batch_size, options)
    peak = peak_flops(options)
    for label, step in steps.items():
        models[label].set_attn_implementation("eager")  # torch does not count the kernel of sdpa on a CPU
        with FlopCounterMode(display=False) as counter:
            step()
        row = table["rows"][label]
        row["MFU (%)"] = round(100 * row["images per second"] * counter.get_total_flops() / batch_size / peak, 1)
    table["peak (GFLOP/s)"] = round(peak / 1e9)
    return table


def peak_flops(options: argparse.Namespace) -> float:
    """Floating-point operations per second of a large matrix product."""
    dtype = getattr(torch, options.dtype)
    left, right = (torch.randn(MATRIX_SIZE, MATRIX_SIZE, device=options.device, dtype=dtype) for _ in range(2))
    table = compare("peak", {"matrix product": lambda: left @ right}, 2 * MATRIX_SIZE**3, options)
    return table["rows"]["matrix product"]["images per second"]


if __name__ == "__main__":
    run_benchmark(benchmark, mae_parser(__doc__))
