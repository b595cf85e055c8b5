"""Time and memory of the recipes for photos of `mae.py`: steps are measured, the time of a whole run is computed from them.

python training/benchmarks/photos.py
python training/benchmarks/photos.py --sizes tiny --rounds 3
"""

import argparse
import multiprocessing
import resource
import statistics
import sys
from pathlib import Path

import torch
import yaml
from models import pretraining_step
from timing import add_model_arguments, benchmark_parser, run_benchmark, summarize, time_call

from hf_decayed import DecayedViTMAEConfig, DecayedViTMAEForPreTraining


RECIPES = {"tiny": ["photos_small"], "base": ["photos_medium", "photos"]}
SIZES_HELP = "tiny: the recipe photos_small; base: photos_medium and photos"


def benchmark(options: argparse.Namespace) -> list[dict]:
    recipes = {name: load_recipe(name) for size in options.sizes for name in RECIPES[size]}
    batch_size = options.batch_size or next(iter(recipes.values()))["batch_size"]
    processes = multiprocessing.get_context("spawn")  # one for each recipe: memory is the largest of a process
    measured = {}
    for name, recipe in recipes.items():
        with processes.Pool(1) as pool:
            measured[name] = pool.apply(measure, (recipe, batch_size, options))
    rounds = [dict(zip(measured, times)) for times in zip(*(seconds for seconds, _ in measured.values()), strict=True)]
    table = summarize(f"Recipes for photos: pretraining step, batch {batch_size}", rounds, batch_size)
    for name, (seconds, megabytes) in measured.items():
        step = statistics.median(seconds)
        minutes = recipes[name]["max_train_steps"] * step / 60
        table["rows"][name] |= {"step (ms)": round(1000 * step), "all steps, computed (min)": round(minutes, 1)}
        table["rows"][name]["largest memory (MB)"] = megabytes
    return [table]


def load_recipe(name: str) -> dict:
    return yaml.safe_load((Path(__file__).parents[1] / "recipes" / "mae" / f"{name}.yaml").read_text())


def measure(recipe: dict, batch_size: int, options: argparse.Namespace) -> tuple[list[float], int]:
    """Seconds of the steps of a recipe, and the largest memory of this process in MB; decoding is not in it."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    config = DecayedViTMAEConfig.from_size(recipe["size"], **recipe["fields"])
    model = DecayedViTMAEForPreTraining(config).to(options.device)
    images = torch.randn(batch_size, config.num_channels, config.image_size, config.image_size, device=options.device)
    step = pretraining_step("ours", model, images, options, return_logits=False)
    step()
    seconds = [time_call(step, options.device, options.threads) for _ in range(options.rounds)]
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return seconds, round(largest / (2**20 if sys.platform == "darwin" else 2**10))


if __name__ == "__main__":
    parser = benchmark_parser(__doc__, SIZES_HELP)
    add_model_arguments(parser)
    run_benchmark(benchmark, parser)
