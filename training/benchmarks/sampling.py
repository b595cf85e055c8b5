"""Sampling: images per second against Frechet distance, over steps, solvers, diffusers' caches, precision and compilation.

    python training/benchmarks/sampling.py
    python training/benchmarks/sampling.py --models uvit --num 1000 --compile

The networks are those of `model_cards/`, guided as their cards say, and all variants start from the same noise and classes.
Features and training images of the Frechet distance are those of the cards; with fewer samples the distance is larger, so
compare rows of one table only. The spread is the deviation over bootstraps of the samples.
"""

import argparse
import ast
import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path

import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    FirstBlockCacheConfig,
    FlowMatchEulerDiscreteScheduler,
    MagCacheConfig,
    TaylorSeerCacheConfig,
)
from timing import Stopwatch, benchmark_parser, compare, compare_part, run_benchmark

from hf_decayed.command_line import positive_int
from hf_decayed.data.shards import encode_dataset
from hf_decayed.data.sources import load_image_splits
from hf_decayed.evaluation.features import pipeline_network
from hf_decayed.evaluation.generation import image_features, reference_sets, sample_scores
from hf_decayed.pipelines.pipeline_decayed_sit import DecayedSiTPipeline
from hf_decayed.pipelines.pipeline_decayed_uvit import DecayedUViTPipeline


MODEL_CARDS = Path(__file__).parents[2] / "model_cards"
FEATURES = "plain-mae-fashion-mnist"
STEPS, GUIDANCE_SCALE = 25, 2.0  # of the cards
PIPELINES = {"uvit": ("U-ViT", DecayedUViTPipeline), "sit": ("SiT", DecayedSiTPipeline)}
SOLVERS = {
    "uvit": {"DPM-Solver++": DPMSolverMultistepScheduler, "DDIM": DDIMScheduler},
    "sit": {"Euler": FlowMatchEulerDiscreteScheduler, "DPM-Solver++": DPMSolverMultistepScheduler},
}
# What a solver needs beside the settings of the card's solver.
SOLVER_FIELDS = {
    "uvit": {"timestep_spacing": "trailing"},  # DDIM subtracts equal steps
    "sit": {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 1.0},
}
SIZES_HELP = "the networks of model_cards/ have one size, so this changes nothing"


def benchmark(options: argparse.Namespace) -> list[dict]:
    encode, _ = image_features(str(MODEL_CARDS / FEATURES), options.device)
    images, _ = reference_sets(load_image_splits().take(options.reference), (1, 28, 28), "stop")["train"]
    real = encode_dataset(encode, images, batch_size=256)
    tables = []
    for model in options.models:
        tables += [compare_samplers(model, real, encode, options), pipeline_overhead(model, options)]
    return tables


def compare_samplers(model: str, real: dict, encode: Callable, options: argparse.Namespace) -> dict:
    """Speed of all variants, then the Frechet distance of their samples."""
    name, _ = PIPELINES[model]
    samplers = build_samplers(model, options)
    batch_size = options.batch_size or 16
    noise, classes = draw_noise(batch_size, options.device)
    runs = {label: lambda sampler=sampler: sampler(noise, classes) for label, sampler in samplers.items()}
    title = (
        f"{name}: sampling, batch {batch_size}, guidance {GUIDANCE_SCALE:g}; Frechet distance of {options.num} samples"
    )
    table = compare(title, runs, batch_size, options)
    noise, classes = draw_noise(options.num, options.device)
    for label, sampler in samplers.items():
        batches = zip(noise.split(50), classes.split(50))
        samples = torch.cat([sampler(*batch) for batch in batches])
        features = {"features": torch.cat([encode(part, [])["features"] for part in samples.split(50)])}
        scores = sample_scores(real, features, ["frechet"], name="mae")
        distance, spread = round(scores["frechet_mae"], 3), round(scores["frechet_mae_spread"], 3)
        table["rows"][label] |= {
            "frechet": distance,
            "frechet spread": spread,
            "Frechet distance (spread)": f"{distance:.2f} ({spread:.2f})",
        }
    return table


def build_samplers(model: str, options: argparse.Namespace) -> dict[str, Callable]:
    """Functions from noise and classes to images in [0, 1], by label; each has a network of its own."""
    first, other = SOLVERS[model]
    taylor = {
        "max_order": 1,
        "disable_cache_before_step": 2,
        "taylor_factors_dtype": torch.float32,
        "use_lite_mode": True,
    }
    seers = {interval: TaylorSeerCacheConfig(cache_interval=interval, **taylor) for interval in (2, 3)}
    samplers = {
        f"{first}, {STEPS} steps": sampler(model, STEPS, options),
        f"{first}, {2 * STEPS} steps": sampler(model, 2 * STEPS, options),
        f"{first}, {STEPS // 2} steps": sampler(model, STEPS // 2, options),
        f"{other}, {STEPS} steps": sampler(model, STEPS, options, solver=other),
        f"{STEPS} steps, TaylorSeer, every 2nd step computed": sampler(model, STEPS, options, cache=seers[2]),
        f"{STEPS} steps, TaylorSeer, every 3rd step computed": sampler(model, STEPS, options, cache=seers[3]),
        f"{2 * STEPS} steps, TaylorSeer, every 3rd step computed": sampler(model, 2 * STEPS, options, cache=seers[3]),
    }
    for threshold in (0.1, 0.2):
        cache = FirstBlockCacheConfig(threshold=threshold)
        samplers[f"{STEPS} steps, FirstBlock, threshold {threshold}"] = sampler(model, STEPS, options, cache=cache)
    cache = MagCacheConfig(mag_ratios=magnitude_ratios(model, options), num_inference_steps=STEPS, threshold=0.06)
    samplers[f"{STEPS} steps, Mag, threshold 0.06"] = sampler(model, STEPS, options, cache=cache)
    samplers[f"{STEPS} steps, bfloat16 weights"] = sampler(model, STEPS, options, dtype=torch.bfloat16)
    samplers[f"{STEPS} steps, bfloat16 weights, TaylorSeer, every 2nd step"] = sampler(
        model, STEPS, options, cache=seers[2], dtype=torch.bfloat16
    )
    if options.compile:
        samplers[f"{STEPS} steps, compiled blocks"] = sampler(model, STEPS, options, compiled=True)
        samplers[f"{STEPS} steps, compiled blocks, bfloat16 weights"] = sampler(
            model, STEPS, options, dtype=torch.bfloat16, compiled=True
        )
    return samplers


def sampler(
    model: str, num_steps: int, options: argparse.Namespace, solver=None, cache=None, dtype=None, compiled=False
) -> Callable:
    pipeline = load_pipeline(model, options, dtype)
    if solver is not None:
        config, fields = pipeline.scheduler.config, SOLVER_FIELDS[model]
        pipeline.scheduler = SOLVERS[model][solver].from_config(config, **fields)
    network = pipeline_network(pipeline)
    if cache is not None:
        network.enable_cache(cache)
    if compiled:
        # Every block has its own alphas, which are constants of its compiled code: torch gives up after 8 of them.
        torch._dynamo.config.recompile_limit = 64
        network.compile_repeated_blocks()

    def sample(noise: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        settings = {"num_inference_steps": num_steps, "guidance_scale": GUIDANCE_SCALE, "output_type": "pt"}
        return pipeline(classes, latents=noise, **settings).images

    return sample


def load_pipeline(model: str, options: argparse.Namespace, dtype: torch.dtype | None = None):
    _, pipeline_class = PIPELINES[model]
    folder = MODEL_CARDS / f"decayed-{model}-fashion-mnist"
    pipeline = pipeline_class.from_pretrained(folder).to(options.device, dtype or torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def magnitude_ratios(model: str, options: argparse.Namespace) -> list[float]:
    """What MagCache has to know of a network and a solver; its calibration prints it."""
    cache = MagCacheConfig(calibrate=True, num_inference_steps=STEPS)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        sampler(model, STEPS, options, cache=cache)(*draw_noise(10, options.device))
    return ast.literal_eval(re.search(r"^\[[\d., e-]+\]$", output.getvalue(), re.MULTILINE)[0])


def draw_noise(number: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The same initial noise and classes for all variants."""
    noise = torch.randn(number, 1, 28, 28, generator=torch.Generator().manual_seed(0)).to(device)
    return noise, torch.arange(number) % 10


def pipeline_overhead(model: str, options: argparse.Namespace) -> dict:
    """A call of the pipeline, and the calls of the network in it."""
    pipeline, batch_size = load_pipeline(model, options), options.batch_size or 16
    network, stopwatch = pipeline_network(pipeline), Stopwatch(options.device)
    network.forward = stopwatch.wrap(network.forward)
    noise, classes = draw_noise(batch_size, options.device)

    def run():
        pipeline(classes, latents=noise, num_inference_steps=STEPS, guidance_scale=GUIDANCE_SCALE)

    title = f"{PIPELINES[model][0]}: {STEPS} steps, batch {batch_size}, from noise to PIL images"
    return compare_part(title, "its calls of the network", "pipeline", run, stopwatch, batch_size, options)


def models(text: str) -> list[str]:
    names = text.split(",")
    if unknown := sorted(set(names) - set(PIPELINES)):
        raise argparse.ArgumentTypeError(f"must be some of {', '.join(PIPELINES)}, got {', '.join(unknown)}")
    return names


def main() -> None:
    parser = benchmark_parser(__doc__, SIZES_HELP)
    parser.add_argument("--models", type=models, default=list(PIPELINES), help="comma-separated: uvit, sit")
    parser.add_argument("--num", type=positive_int, default=500, help="samples for the Frechet distance")
    parser.add_argument("--reference", type=positive_int, help="training images it is measured to; by default all")
    parser.add_argument("--compile", action="store_true", help="also with compiled blocks")
    run_benchmark(benchmark, parser)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
