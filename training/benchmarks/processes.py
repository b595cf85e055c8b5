"""Training by one process and by two over gloo: whole steps of `mae.py` with the same batch, images and thread per process.

    python training/benchmarks/processes.py
    python training/benchmarks/processes.py --rounds 2 --steps 20

Needs two free cores. The efficiency of two processes is half of their ratio to one. Gradients are averaged through memory, so
this shows what the code costs; between machines their network counts, which the arithmetic in docs/speed.md estimates.
"""

import argparse
import sys
import tempfile

from first_command import SCRIPTS, time_script
from timing import benchmark_parser, compare, run_benchmark

from hf_decayed.command_line import positive_int


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
    """Seconds of the steps after the warm-up."""
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", 1]
    if number == 2:
        launcher[3:] = ["--config_file", SCRIPTS / "accelerate_configs" / "two_cpu_processes.yaml"]
    flags = ["--cpu_threads", 1, "--mixed_precision", "no"]
    with tempfile.TemporaryDirectory() as folder:
        return time_script(
            launcher, flags, folder, batch_size, options.steps, ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1"
        )


def main() -> None:
    parser = benchmark_parser(__doc__, "not used")
    parser.add_argument("--steps", type=positive_int, default=10, help="timed steps of a run, a multiple of 10")
    run_benchmark(benchmark, parser)


if __name__ == "__main__":
    main()
