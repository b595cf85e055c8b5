"""Compares objectives of `training/structural_gan.py` on the bundled images: features and samples, over seeds.

    python training/structural_gan_report.py
    python training/structural_gan_report.py --data coloured --seeds 0 --only hinge
    python training/structural_gan_report.py --report

Trains with the full objective, its moments alone, and hinge loss with the same smoothness penalty, each with the same
networks, data and steps. The same command continues where it was stopped. The results of every run go to
`model_cards/results/structural_gan`; `--report` prints their tables, as in docs/structural_gan.md.
"""

import argparse
import json
import shlex
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from hf_decayed.command_line import OneLineParser


ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "model_cards" / "results" / "structural_gan"
# Results of whole recipes, with the hinge GAN of the same networks and steps: the first command, and the checkpoint that ships.
RECIPES = {
    "tiny": {"hinge": RESULTS / "tiny" / "hinge.json", "full": RESULTS / "tiny" / "full.json"},
    "fashion_mnist": {
        "hinge": RESULTS / "fashion_mnist" / "hinge.json",
        "full": ROOT / "model_cards" / "structural-gan-fashion-mnist" / "results.json",
    },
}
DATA = {
    "grey": ["--num_channels", "1"],
    "coloured": ["--dataset_name", "bundled:coloured", "--num_channels", "3"],
}
OBJECTIVES = {
    "full": [],
    "moments": ["--cluster_weight", "0"],
    "hinge": ["--objective", "hinge"],
}
FLAGS = ["--recipe", "tiny", "--image_size", "16", "--max_train_steps", "150", "--eval_every", "150"]
FLAGS += ["--max_train_samples", "4000", "--eval_train_samples", "1000", "--cpu_threads", "1", "--log_every", "25"]
ROWS = {
    "pixels": "raw pixels",
    "untrained": "untrained discriminator",
    "hinge": "hinge loss and smoothness",
    "moments": "moments and smoothness",
    "full": "full objective",
}
COMPARISONS = [("full", "untrained"), ("full", "hinge"), ("full", "moments"), ("moments", "hinge"), ("full", "pixels")]
COLUMNS = {
    "knn_accuracy": "kNN",
    "kmeans_accuracy": "k-means",
    "kmeans_nmi": "NMI",
    "kmeans_purity": "purity",
    "linear_accuracy": "linear probe",
    "svm_accuracy": "linear SVM",
}


def parse_arguments(arguments=None) -> argparse.Namespace:
    parser = OneLineParser(
        prog="structural_gan_report.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", choices=list(DATA), nargs="+", default=list(DATA))
    parser.add_argument("--only", choices=list(OBJECTIVES), nargs="+", default=list(OBJECTIVES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/structural_gan_report"))
    parser.add_argument("--report", action="store_true", help="print the tables; train nothing")
    return parser.parse_args(arguments)


def train(data: str, objective: str, seed: int, output_dir: Path) -> None:
    """Trains one run unless its results exist; copies its results and samples to `RESULTS`."""
    name = f"{data}-{objective}-seed{seed}"
    flags = [*FLAGS, *DATA[data], *OBJECTIVES[objective], "--seed", str(seed)]
    record = RESULTS / f"{name}.json"
    if record.exists() and shlex.join(flags) in json.loads(record.read_text())["command"]:
        return
    folder = output_dir / name
    print(name, flush=True)
    script = str(ROOT / "training" / "structural_gan.py")
    command = [sys.executable, script, *flags, "--compare_hinge", "false"]
    command += ["--output_dir", str(folder), "--resume_from_checkpoint", "latest"]
    subprocess.run(command, check=True)
    RESULTS.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(folder / "samples.png", RESULTS / f"{name}.png")
    shutil.copyfile(folder / "results.json", record)


def read_results(data: str) -> dict[str, list[dict]]:
    """Results of the finished runs by objective."""
    return {
        objective: [json.loads(file.read_text()) for file in sorted(RESULTS.glob(f"{data}-{objective}-seed*.json"))]
        for objective in OBJECTIVES
    }


def read_recipe(recipe: str) -> dict[str, list[dict]]:
    return {objective: [json.loads(file.read_text())] for objective, file in RECIPES[recipe].items()}


def table(results: dict[str, list[dict]]) -> str:
    """Markdown table of results by objective: means over seeds, with standard deviations if there are several."""
    # The untrained discriminators are those of the full objective's runs; pixels do not depend on the seed.
    runs = {**results, "untrained": results["full"], "pixels": results["full"][:1]}
    distance = next(name for name in results["full"][0] if name.startswith("frechet_pixels"))
    titles = ["", "seeds", *COLUMNS.values(), "distance of samples"]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for row, title in ROWS.items():
        suffix = f"_{row}" if row in ("pixels", "untrained") else ""
        if not runs.get(row):
            continue
        cells = [title, str(len(runs[row])) if row != "pixels" else ""]
        for name in COLUMNS:
            values = [100 * run[f"{name}{suffix}"] for run in runs[row] if f"{name}{suffix}" in run]
            cells.append(average(values))
        cells.append(average([run[distance] for run in runs[row]]) if not suffix else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def seed_table(data: str) -> str:
    """Markdown table: in how many seeds one row of [`table`] is above another."""
    results = read_results(data)
    runs = {**results, "untrained": results["full"], "pixels": results["full"]}
    lines = ["| seeds | " + " | ".join(COLUMNS.values()) + " |", "|---" * (1 + len(COLUMNS)) + "|"]
    for first, second in COMPARISONS:
        suffix = f"_{second}" if second in ("pixels", "untrained") else ""
        cells = []
        for name in COLUMNS:
            pairs = {run["seed"]: [run[name]] for run in runs[first]}
            for run in runs[second]:
                if run["seed"] in pairs and f"{name}{suffix}" in run:
                    pairs[run["seed"]].append(run[f"{name}{suffix}"])
            values = [pair for pair in pairs.values() if len(pair) == 2]
            cells.append(f"{sum(one > other for one, other in values)} of {len(values)}" if values else "")
        lines.append(f"| {ROWS[first]} above {ROWS[second]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def average(values: list[float]) -> str:
    """Mean and standard deviation; empty without values."""
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"


def main(arguments=None) -> None:
    options = parse_arguments(arguments)
    if not options.report:
        for seed in options.seeds:  # outermost, so that an unfinished comparison has every setting once
            for data in options.data:
                for objective in options.only:
                    train(data, objective, seed, options.output_dir)
    for data in options.data:
        if read_results(data)["full"]:
            print(f"{data}\n\n{table(read_results(data))}\n\n{seed_table(data)}\n")
    for recipe in RECIPES:
        print(f"recipe {recipe}\n\n{table(read_recipe(recipe))}\n")


if __name__ == "__main__":
    main()
