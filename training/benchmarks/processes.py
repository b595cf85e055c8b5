"""Training by one process and by two over gloo: whole steps of `mae.py` with the same batch, images and thread per process.

    python training/benchmarks/processes.py
    python training/benchmarks/processes.py --rounds 2 --steps 8

Needs two free cores. The efficiency of two processes is half of their ratio to one. Gradients are averaged through memory, so
this shows what the code costs; between machines their network counts, which the arithmetic in docs/speed.md estimates.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from data import MAE_SCRIPT, WARMUP_STEPS
from timing import benchmark_parser, compare, run_benchmark

from hf_decayed.command_line import positive_int
from hf_decayed.errors import UserError


CONFIGS = Path(MAE_SCRIPT).parent / "accelerate_configs"


def benchmark(options: argparse.Namespace) -> list[dict]:
    batch_size = options.batch_size or 128
    runs = {f"{number} process{'es' if number > 1 else ''}": number for number in (1, 2)}
    variants = {label: lambda number=number: train(number, batch_size, options) for label, number in runs.items()}
    title = f"tiny, batch {batch_size} in all, one thread per process: {options.steps} steps of mae.py"
    table = compare(title, variants, options.steps * batch_size, options, seconds=lambda run: run())
    for label, number in runs.items():
        table["rows"][label]["efficiency (%)"] = 100 * table["rows"][label]["ratio"] / number
    return [table]


def train(number: int, batch_size: int, options: argparse.Namespace) -> float:
    """Seconds of the steps after the warm-up, from the metrics that mae.py writes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "accelerate.commands.launch"]
        if number == 2:
            command += ["--config_file", CONFIGS / "two_cpu_processes.yaml"]
        else:
            command += ["--num_processes", 1]
        command += [MAE_SCRIPT, "--output_dir", folder, "--recipe", "tiny", "--batch_size", batch_size]
        command += ["--max_train_steps", WARMUP_STEPS + options.steps, "--log_every", WARMUP_STEPS, "--cpu_threads", 1]
        command += ["--eval_train_samples", 20, "--eval_test_samples", 20, "--mixed_precision", "no"]
        environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        process = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment)
        if process.returncode != 0:
            raise UserError(f"mae.py failed: {process.stderr.strip().splitlines()[-1]}")
        records = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    rates = [(record["step"], record["images_per_second"]) for record in records if "images_per_second" in record]
    return sum((step - start) * batch_size / rate for (start, _), (step, rate) in itertools.pairwise(rates))


def main() -> None:
    parser = benchmark_parser(__doc__, "not used")
    parser.add_argument("--steps", type=positive_int, default=8, help="timed training steps per round")
    run_benchmark(benchmark, parser)


if __name__ == "__main__":
    main()
