"""Time of a pretraining step against `decode_ratio`, the share of the masked patches that the decoder predicts.

python training/benchmarks/decode_ratio.py
python training/benchmarks/decode_ratio.py --sizes tiny --batch_size 64 --rounds 5
"""

import argparse

import torch
from models import BATCH_SIZES, CONFIG_FIELDS, mae_parser, pretraining_step
from timing import compare, run_benchmark

from hf_decayed import DecayedViTMAEConfig, DecayedViTMAEForPreTraining


RATIOS = (1.0, 0.75, 0.5, 0.25)
PRESETS = {"default": DecayedViTMAEConfig, "plain": DecayedViTMAEConfig.plain}


def benchmark(options: argparse.Namespace) -> list[dict]:
    return [compare_ratios(size, preset, options) for size in options.sizes for preset in PRESETS]


def compare_ratios(size: str, preset: str, options: argparse.Namespace) -> dict:
    batch_size, steps = options.batch_size or BATCH_SIZES[size], {}
    for ratio in RATIOS:
        config = PRESETS[preset](**CONFIG_FIELDS[size], decode_ratio=ratio)
        config._attn_implementation = options.attention
        model = DecayedViTMAEForPreTraining(config).to(options.device)
        images = torch.randn(batch_size, 3, config.image_size, config.image_size, device=options.device)
        steps[f"decode_ratio {ratio}"] = pretraining_step("ours", model, images, options, return_logits=False)
    return compare(f"{size}, {preset} preset: pretraining step, batch {batch_size}", steps, batch_size, options)


if __name__ == "__main__":
    run_benchmark(benchmark, mae_parser(__doc__))
