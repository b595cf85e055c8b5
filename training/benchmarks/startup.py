"""Start-up: CPU seconds of new processes that import the package, or run a command, against the libraries below it.

python training/benchmarks/startup.py
python training/benchmarks/startup.py --rounds 5

The first round only fills the disk cache, and is not counted.
"""

import argparse
import resource
import subprocess
import sys

from timing import benchmark_parser, compare, run_benchmark


IMPORTS = {
    "import torch": "import torch",
    "import hf_decayed": "import hf_decayed",
    "from transformers import AutoModel, pipeline": "from transformers import AutoModel, pipeline",
    "import hf_decayed, then the same": "import hf_decayed\nfrom transformers import AutoModel, pipeline",
}
COMMANDS = ("", "evaluate", "sample", "publish")


def benchmark(options: argparse.Namespace) -> list[dict]:
    runs = {label: process([sys.executable, "-c", code]) for label, code in IMPORTS.items()}
    cli = "import sys; sys.argv[0] = 'hf-decayed'; from hf_decayed.cli import main; sys.exit(main())"
    commands = {" ".join(["hf-decayed", command, "--help"]).replace("  ", " "): command for command in COMMANDS}
    helps = {
        label: process([sys.executable, "-c", cli, *([command] if command else []), "--help"])
        for label, command in commands.items()
    }
    return [
        with_seconds(compare("Imports (images/s: in 100 s)", runs, 100, options, child_seconds)),
        with_seconds(compare("Commands (images/s: in 100 s)", helps, 100, options, child_seconds)),
    ]


def process(command: list[str]):
    return lambda: subprocess.run(command, check=True, capture_output=True)


def child_seconds(run) -> float:
    """CPU seconds of the processes that a call starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def with_seconds(table: dict) -> dict:
    """The table with seconds beside the runs per second."""
    for row in table["rows"].values():
        row["time (s)"] = f"{100 / row['images per second']:.2f}"
    return table


def main() -> None:
    run_benchmark(benchmark, benchmark_parser(__doc__, "not used"))


if __name__ == "__main__":
    main()
