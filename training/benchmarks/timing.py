"""What all benchmarks share: flags, interleaved timing, profiles, memory, tables and the JSON file of the results.

Variants take turns within each round, so that a busy machine slows all of them alike; what counts is the ratio to the first
variant within a round. Tables have the median of the images per second, and of the ratio, with its smallest and largest; and
the ratio of the fastest rounds, which other work on the machine disturbs least.
"""

import argparse
import ctypes
import gc
import json
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from torch.profiler import ProfilerActivity, profile
from tqdm.auto import tqdm

from hf_decayed.command_line import OneLineParser, positive_int
from hf_decayed.errors import UserError, format_error
from hf_decayed.provenance import sanitized_command, versions


SIZES = ("tiny", "base")

# Kinds of work, by parts of the names of the profiler's operators. The first match counts.
OPERATORS = {
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


def benchmark_parser(description: str | None, sizes: str) -> OneLineParser:
    """The flags that all benchmarks have; `sizes` says what `tiny` and `base` are."""
    parser = OneLineParser(
        prog=Path(sys.argv[0]).name,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sizes", type=model_sizes, default=list(SIZES), help=f"comma-separated; {sizes}")
    parser.add_argument("--batch_size", type=positive_int, help="by default each size has its own")
    parser.add_argument("--rounds", type=positive_int, default=7, help="timed rounds; each runs every variant once")
    parser.add_argument(
        "--threads", type=positive_int, default=1, help="on a CPU; 1 is timed in CPU seconds, which vary least"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    return parser


def model_sizes(text: str) -> list[str]:
    """`tiny,base` -> `["tiny", "base"]`, as a type for `add_argument`."""
    sizes = text.split(",")
    if unknown := sorted(set(sizes) - set(SIZES)):
        raise argparse.ArgumentTypeError(f"must be some of {', '.join(SIZES)}, got {', '.join(unknown)}")
    return sizes


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of how our models run; the peers keep their defaults."""
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=["float32", "bfloat16", "float16"],
        help="of our models: autocast in training, weights otherwise; peers run in float32",
    )
    parser.add_argument("--compile", action="store_true", help="compile our models")


def run_benchmark(benchmark: Callable[[argparse.Namespace], list[dict]], parser: argparse.ArgumentParser) -> None:
    """Parses the command line, runs `benchmark(options) -> tables`, prints the tables and writes the JSON file."""
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    script = Path(sys.argv[0])
    try:
        results = {
            "command": " ".join(["python", f"training/benchmarks/{script.name}", *sanitized_command()]),
            "machine": f"{platform.machine()} {options.device}, {options.threads} thread(s)",
            "dtype": getattr(options, "dtype", "float32"),
            "versions": versions(),
            "seed": 0,
            "tables": benchmark(options),
        }
    except UserError as error:
        parser.exit(2, f"{script.name}: {format_error(error)}\n")
    print(render(results))
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(results, indent=2) + "\n")


class Stopwatch:
    """Wall-clock seconds of the part of a run that counts: between `start` and `stop`, or in the calls of a function.

    >>> stopwatch = Stopwatch(device)
    >>> encode = stopwatch.wrap(encode)
    >>> extract_features(encode, images)
    >>> stopwatch.seconds
    """

    def __init__(self, device: str):
        self.device, self.seconds = device, 0.0

    def start(self) -> None:
        self.start_time = time.perf_counter()

    def stop(self) -> None:
        synchronize(self.device)
        self.seconds += time.perf_counter() - self.start_time

    def wrap(self, function: Callable) -> Callable:
        """The function, with the time of its calls measured."""

        def measured(*arguments, **settings):
            self.start()
            result = function(*arguments, **settings)
            self.stop()
            return result

        return measured


def synchronize(device: str) -> None:
    """Waits for what runs on an accelerator."""
    if device != "cpu":
        torch.accelerator.synchronize()


def time_call(run: Callable[[], object], device: str, threads: int) -> float:
    """Seconds of a call: CPU seconds of a single thread, which other processes do not change much, else wall-clock."""
    clock = time.process_time if device == "cpu" and threads == 1 else time.perf_counter
    start = clock()
    run()
    synchronize(device)
    return clock() - start


def compare(
    title: str,
    variants: dict[str, Callable[[], object]],
    num_images: int,
    options: argparse.Namespace,
    seconds: Callable[[Callable], float] | None = None,
) -> dict:
    """A table of variants, timed once per round; ratios are to the first one.

    Args:
        num_images (`int`): Images that a call of a variant processes.
        seconds (`Callable`, *optional*): `seconds(variant)` runs a variant and returns its time, by default that of the call.
    """
    seconds = seconds or (lambda run: time_call(run, options.device, options.threads))
    for run in variants.values():
        run()
    rounds = []
    for number in tqdm(range(options.rounds), desc=title, leave=False):
        order = list(variants)[:: 1 if number % 2 == 0 else -1]
        times = {label: seconds(variants[label]) for label in order}
        rounds.append({label: times[label] for label in variants})
    return summarize(title, rounds, num_images)


def compare_part(
    title: str,
    part: str,
    whole: str,
    run: Callable[[], object],
    stopwatch: Stopwatch,
    num_images: int,
    options: argparse.Namespace,
) -> dict:
    """A table of a part of a run, which `stopwatch` measures, and of the whole of the same run."""
    run()
    rounds = []
    for _ in tqdm(range(options.rounds), desc=title, leave=False):
        stopwatch.seconds, total = 0.0, Stopwatch(options.device)
        total.wrap(run)()
        rounds.append({part: stopwatch.seconds, whole: total.seconds})
    return summarize(title, rounds, num_images)


def summarize(title: str, rounds: list[dict[str, float]], num_images: int) -> dict:
    """A table from the seconds of each variant in every round."""
    peer, *_ = rounds[0]
    table = {"title": title, "peer": peer, "rows": {}}
    fastest = {label: min(times[label] for times in rounds) for label in rounds[0]}
    for label in rounds[0]:
        ratios = sorted(times[peer] / times[label] for times in rounds)
        table["rows"][label] = {
            "images per second": round(num_images / statistics.median(times[label] for times in rounds), 2),
            "ratio": round(statistics.median(ratios), 3),
            "smallest": round(ratios[0], 3),
            "largest": round(ratios[-1], 3),
            "fastest": round(fastest[peer] / fastest[label], 3),
        }
    return table


def profile_shares(run: Callable[[], object]) -> dict[str, float]:
    """Share of the operators' own time by kind of work, in percent."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=activities) as profiler:
        run()
    shares = dict.fromkeys([*OPERATORS, "other"], 0.0)
    for event in profiler.key_averages():
        if not event.key.startswith(("aten::", "mkldnn")) and "dam" not in event.key:
            continue
        matches = (kind for kind, words in OPERATORS.items() if any(word in event.key.lower() for word in words))
        shares[next(matches, "other")] += event.self_device_time_total or event.self_cpu_time_total
    total = sum(shares.values())
    return {kind: round(100 * share / total, 1) for kind, share in shares.items()}


def extra_memory(run: Callable[[], object]) -> int:
    """Largest growth of the process during a call, in MB."""
    process, largest, running = psutil.Process(), 0, True
    gc.collect()
    if sys.platform == "linux":  # memory that was freed earlier would be used again, and not be seen as growth
        ctypes.CDLL(None).malloc_trim(0)
    start = process.memory_info().rss

    def watch():
        nonlocal largest
        while running:
            largest = max(largest, process.memory_info().rss - start)
            time.sleep(0.005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    run()
    running = False
    watcher.join()
    return round(largest / 2**20)


def render(results: dict) -> str:
    """The tables in Markdown, below the command, the machine and the versions."""
    lines = [f"`{results['command']}`", ""]
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines += [f"{results['machine']}, {results['dtype']}; {versions}", ""]
    for table in results["tables"]:
        columns = ["images/s", "times the first", "spread"]
        if has_fastest := "fastest" in next(iter(table["rows"].values())):  # tables of earlier versions do not have it
            columns.append("fastest rounds")
        extra = [name for name in next(iter(table["rows"].values())) if "(" in name]
        columns += [f"{name} of {table['peak (GFLOP/s)']} GFLOP/s" if "MFU" in name else name for name in extra]
        lines += [f"**{table['title']}**", "", "| | " + " | ".join(columns) + " |", "|---" * (1 + len(columns)) + "|"]
        for label, row in table["rows"].items():
            spread = f"{row['smallest']:.2f}-{row['largest']:.2f}"
            cells = [f"{row['images per second']:g}", f"{row['ratio']:.2f}", spread]
            cells += [f"{row['fastest']:.2f}"] if has_fastest else []
            cells += [row[name] if isinstance(row[name], str) else f"{row[name]:.0f}" for name in extra]
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
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
