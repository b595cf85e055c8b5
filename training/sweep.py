"""Trains and evaluates a grid of models: the paper's ablations as one command, which can be stopped and resumed.

    python training/sweep.py bundled_decay
    python training/sweep.py resnet_rank
    python training/sweep.py cifar100_small_scale --dataset_path path/to/cifar100 --label_column_name fine_label
    python training/sweep.py cifar100_uvit --dataset_path path/to/cifar100 --label_column_name fine_label
    python training/sweep.py bundled_decay --report

GRID is a file in `training/recipes/sweeps`, or a path to one. It names a training script (`script`, by default `mae`; a run may
name another), its flags and config fields for all runs (`flags`), for single runs (`runs`) and in all combinations (`axes`),
`seeds`, and flags of `hf-decayed evaluate` (`evaluation`; for pipelines, one set for `samples` and one for `blocks`). The report
compares losses with those of the run `reference`, and, seed by seed, the features or samples of one run with those of another
(`effects`).

A run is one process of the training script, followed by the evaluation of the model that it saved: the features of an
encoder at all layers, or the samples and blocks of a pipeline. Classifiers are evaluated by their training script. The
results become a line of `<output_dir>/results.jsonl`. The same command continues a sweep that was stopped. Started several
times, its processes share the runs; `--only` selects runs. `--report` writes tables (Markdown) and plots of the finished runs (sweep_report.py).
"""

import argparse
import contextlib
import hashlib
import importlib
import io
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import torch
import yaml
from filelock import FileLock, Timeout
from sweep_report import write_report
from torch.utils.flop_counter import FlopCounterMode

from hf_decayed.command_line import OneLineParser, positive_int
from hf_decayed.errors import UserError, format_error
from hf_decayed.kinds import package_class, read_model_folder
from hf_decayed.models.configuration_decayed_vit_mae import as_pair
from hf_decayed.run.arguments import list_recipes


SCRIPTS = Path(__file__).parent
GRIDS = SCRIPTS / "recipes" / "sweeps"
GRID_KEYS = {"script", "recipe", "flags", "runs", "axes", "seeds", "evaluation", "reference", "effects"}
CURVE_METRICS = {"step", "loss", "encoder_norm", "knn_accuracy", "effective_rank"}  # that records of encoders keep


def parse_arguments(arguments=None) -> tuple[argparse.Namespace, dict]:
    parser = OneLineParser(prog="sweep.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grid", metavar="GRID", help=f"one of {list_recipes(GRIDS)}, or a YAML file")
    parser.add_argument("--output_dir", type=Path, help="by default outputs/sweep/<grid>")
    parser.add_argument("--dataset_name")
    parser.add_argument("--dataset_path")
    parser.add_argument("--label_column_name")
    parser.add_argument(
        "--feature_net", help="network whose features of samples are compared, for pipelines; by default pixels"
    )
    parser.add_argument("--only", default="", help="regular expression: train only runs whose name matches")
    parser.add_argument("--accelerate_config", help="launch training with this accelerate config file")
    parser.add_argument("--cpu_threads", type=positive_int, help="per process; 1 lets two sweeps share two cores")
    parser.add_argument(
        "--mixed_precision",
        help="of the training, instead of the grid's: `no` where the hardware has no bfloat16; the records say which it was",
    )
    parser.add_argument("--report", action="store_true", help="write tables and plots; train nothing")
    parser.add_argument("--tsne", nargs=2, metavar="RUN", help="runs of the t-SNE plot; by default the first and last")
    options = parser.parse_args(arguments)
    grid = read_grid(options.grid, parser)
    options.output_dir = options.output_dir or default_output_dir(options.grid)
    try:
        options.only = re.compile(options.only)
    except re.error as error:
        parser.error(f"--only is not a regular expression: {error}")
    return options, grid


def default_output_dir(name: str) -> Path:
    return Path("outputs/sweep") / Path(name).name.removesuffix(".yaml").removesuffix(".yml")


def read_grid(name: str, parser: argparse.ArgumentParser) -> dict:
    """A grid of this repository by its name, or one by the path of its file; `parser` tells what is wrong with it."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else GRIDS / f"{name}.yaml"
    if not path.is_file():
        parser.error(f"there is no grid '{name}'; there are {list_recipes(GRIDS)}")
    try:
        grid = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        parser.error(f"the grid '{name}' is not YAML: {format_error(error)}")
    if not isinstance(grid, dict) or not (grid.get("runs") or grid.get("axes")):
        parser.error(f"the grid '{name}' needs `runs`, `axes`, or both")
    if unknown := grid.keys() - GRID_KEYS:
        parser.error(f"the grid '{name}' has unknown keys: {', '.join(sorted(unknown))}")
    names = {run["name"] for run in expand(grid, {})}
    for pair in grid.get("effects", []):
        if not (isinstance(pair, list) and len(pair) == 2 and names.issuperset(pair)):
            parser.error(
                f"`effects` of the grid '{name}' must be pairs of its runs, each a run and its baseline, got {pair}"
            )
    return grid


def main(arguments=None) -> None:
    options, grid = parse_arguments(arguments)
    records_file = options.output_dir / "results.jsonl"
    data = {name: getattr(options, name) for name in ("dataset_name", "dataset_path", "label_column_name")}
    source = None  # of the images in the report
    if options.dataset_name or options.dataset_path:
        source = {"dataset_name": options.dataset_name, "dataset_path": options.dataset_path}
        source["label_column"] = options.label_column_name
    data["dataset_path"] = data["dataset_path"] and Path(data["dataset_path"]).name
    runs = expand(grid, data)
    check_records(read_records(records_file), runs if not options.report else [], options)
    if not options.report:
        options.output_dir.mkdir(parents=True, exist_ok=True)
        selected = [run for run in runs if options.only.search(run["name"])]
        for number, run in enumerate(selected, 1):
            folder = options.output_dir / run["folder"]
            try:
                with FileLock(options.output_dir / f"{run['folder']}.lock", timeout=0):
                    # Read again before every run: other processes of the sweep may have finished it.
                    if run["key"] in {record["key"] for record in read_records(records_file)}:
                        continue
                    print(f"run {number} of {len(selected)}: {run['name']}, seed {run['seed']}", flush=True)
                    record = {**run, **train_and_evaluate(run, folder, grid.get("evaluation", {}), options)}
                    write_record(records_file, record)
            except Timeout:  # another process trains it
                continue
    order = {run["name"]: index for index, run in enumerate(runs)}  # of the grid, whichever run finished first
    records = sorted(read_records(records_file), key=lambda record: order.get(record["name"], len(order)))
    print(
        write_report(records, options.output_dir, options.tsne, grid.get("reference"), source, grid.get("effects", []))
    )


def expand(grid: dict, data: dict) -> list[dict]:
    """Runs of a grid on a data set: the named ones and all combinations of the axes, each with every seed."""
    named = {str(name): settings for name, settings in grid.get("runs", {}).items()}
    axes = grid.get("axes", {})
    if axes:
        for values in itertools.product(*axes.values()):
            named[", ".join(f"{axis}={value}" for axis, value in zip(axes, values))] = dict(zip(axes, values))
    runs = []
    for seed in grid.get("seeds", [0]):  # the outer loop: an unfinished sweep has every run once
        for name, run_settings in named.items():
            settings = {"recipe": grid.get("recipe", "tiny"), **grid.get("flags", {}), **(run_settings or {})}
            script = settings.pop("script", grid.get("script", "mae"))
            identity = [settings, seed, grid.get("evaluation"), data] + ([script] if script != "mae" else [])
            key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
            folder = f"{re.sub(r'[^A-Za-z0-9.]+', '-', name).strip('-')}-seed{seed}-{key[:4]}"
            run = {"name": name, "seed": seed, "settings": settings, "key": key, "folder": folder}
            runs.append({**run, "script": script})
    return runs


def read_records(path: Path) -> list[dict]:
    """The records of finished runs; a line that a killed process left half written is skipped, and its run done again."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return records


def write_record(path: Path, record: dict) -> None:
    """Appends a record as a line of its own, also after half a line."""
    half = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
    with path.open("a") as file:
        file.write(("\n" if half else "") + json.dumps(record) + "\n")


def check_records(records: list[dict], runs: list[dict], options: argparse.Namespace) -> None:
    """Refuses results of one run by other settings, on other data or by another feature network: tables would mix them."""
    keys: dict[tuple, str] = {(run["name"], run["seed"]): run["key"] for run in runs}
    for record in records:
        key = keys.setdefault((record["name"], record["seed"]), record["key"])
        if key != record["key"]:
            raise UserError(
                f"'{options.output_dir}' holds results of '{record['name']}' with other settings or data: name another "
                "--output_dir."
            )
        network = record.get("feature_net", options.feature_net)
        if runs and "samples" in record and network != options.feature_net:
            raise UserError(
                f"'{options.output_dir}' holds samples compared by the feature network {network}: give the same "
                "--feature_net, or name another --output_dir."
            )


def train_and_evaluate(run: dict, folder: Path, evaluation: dict, options: argparse.Namespace) -> dict:
    """The record of a run: results and curve of its training, and the evaluation of the model in its folder."""
    names = ("dataset_name", "dataset_path", "label_column_name", "cpu_threads")
    shared_flags = format_flags({name: getattr(options, name) for name in names if getattr(options, name)})
    if not (folder / "results.json").exists():
        train(run, folder, shared_flags, options.accelerate_config, options.mixed_precision)
    results = json.loads((folder / "results.json").read_text())
    curve = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    record = {"results": results, "curve": curve}
    model = read_model_folder(folder)
    shared_flags += ["--features_dir", str(options.output_dir / "features")]
    if model.index:
        if options.feature_net:
            samples = {**evaluation.get("samples", {}), "feature_net": options.feature_net}
            evaluation = {**evaluation, "samples": samples}
        record["feature_net"] = options.feature_net
        return {**record, **evaluate_pipeline(folder, evaluation, shared_flags)}
    if model.kind.classes[model.class_name].task == "image-classification":
        return record  # its training script has evaluated it
    network = package_class(model.class_name).from_pretrained(folder)
    record |= evaluate_encoder(folder, network.config, evaluation, shared_flags)
    return {
        **record,
        "steps": results["steps"],
        "images_seen": results["images_seen"],
        "training_flops": results["images_seen"] * flops_per_image(network),
        "shortcut_decay": network.config.shortcut_decay,
        "curve": [
            {name: value for name, value in point.items() if name in CURVE_METRICS or name.startswith("skip_use_")}
            for point in curve
        ],
    }


def train(
    run: dict,
    folder: Path,
    shared_flags: list[str],
    accelerate_config: str | None = None,
    mixed_precision: str | None = None,
) -> None:
    """Trains from the latest checkpoint; a signal that stops the training stops the sweep too."""
    launcher = [sys.executable]
    if accelerate_config:
        launcher = ["accelerate", "launch", "--config_file", accelerate_config]
    script = SCRIPTS / f"{run['script']}.py"
    flags = as_flags(run) + ["--seed", str(run["seed"]), "--resume_from_checkpoint", "latest"]
    if mixed_precision:  # the last one counts
        flags += ["--mixed_precision", mixed_precision]
    run_process([*launcher, str(script), *flags, *shared_flags, "--output_dir", str(folder)], script.name)
    if not (folder / "results.json").exists():
        print("stopped; run the same command to continue", flush=True)
        sys.exit(0)


def evaluate_encoder(folder: Path, config, evaluation: dict, shared_flags: list[str]) -> dict:
    """Features of the last layer, and of every layer by the mean of its tokens, which all presets have in common."""
    own_features = f"last.{config.pooling}"
    features = [own_features, "last.cls", "last.mean"]
    features += [f"{layer}.mean" for layer in range(config.num_hidden_layers + 1)]
    flags = ["--features", ",".join(dict.fromkeys(features)), *shared_flags, *format_flags(evaluation)]
    evaluated = evaluate(folder, flags, folder / "evaluation.json")
    return {
        "own_features": own_features,
        "evaluation": evaluated["rows"],
        "protocol": evaluated["protocol"],
        "dataset": evaluated["dataset"],
    }


def evaluate_pipeline(folder: Path, evaluation: dict, shared_flags: list[str]) -> dict:
    """The samples of a pipeline, and the features of its blocks."""
    defaults = {"samples": {"samples_dir": folder / "evaluated"}, "blocks": {"metrics": "linear,knn"}}
    record = {}
    for name, flags in defaults.items():
        flags = format_flags({**flags, **evaluation.get(name, {})})
        evaluated = evaluate(folder, [*shared_flags, *flags], folder / f"{name}.json")
        record[name] = {
            key: evaluated[key] for key in ("rows", "grid", "best", "protocol", "dataset") if key in evaluated
        }
    return record


def evaluate(folder: Path, flags: list[str], output: Path) -> dict:
    command = [sys.executable, "-m", "hf_decayed.evaluation", str(folder), *flags, "--output", str(output)]
    run_process(command, "hf-decayed evaluate")
    return json.loads(output.read_text())


def as_flags(run: dict) -> list[str]:
    """The settings of a run on the command line of its script: flags as they are, all others as config fields."""
    known, words = script_flags(run["script"]), []
    for name, value in run["settings"].items():
        words += format_flags({name: value}) if name in known else ["--set", f"{name}={format_value(value)}"]
    return words


def script_flags(script: str) -> set[str]:
    """Names of a training script's flags, as its `--help` lists them; some have two names."""
    if not (SCRIPTS / f"{script}.py").is_file():
        raise UserError(f"The grid's script '{script}' is not in {SCRIPTS.name}/.")
    help_text = io.StringIO()
    with contextlib.redirect_stdout(help_text), contextlib.suppress(SystemExit):
        importlib.import_module(script).parse_arguments(["--help"])
    options = re.findall(r"^  (--\w.*?)(?:  |$)", help_text.getvalue(), re.MULTILINE)
    return {name for names in options for name in re.findall(r"--(\w+)", names)}


def format_flags(flags: dict) -> list[str]:
    """Command-line words for flags by name; a list gives a flag several values."""
    words = []
    for name, value in flags.items():
        words += [f"--{name}", *map(format_value, value if isinstance(value, list) else [value])]
    return words


def format_value(value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def run_process(command: list[str], name: str) -> None:
    process = subprocess.Popen(command)
    try:
        code, interrupted = process.wait(), False
    except KeyboardInterrupt:  # the process received the signal too, and writes its checkpoint or its results
        code, interrupted = process.wait(), True
    if code != 0:
        raise UserError(f"`{name}` ended with exit code {code}; its message is above.")
    if interrupted:
        print("stopped; run the same command to continue", flush=True)
        sys.exit(0)


def flops_per_image(model: torch.nn.Module) -> int:
    """Floating-point operations of a training step, forward and backward, with the decoder on all patches."""
    model.set_attn_implementation("eager")  # the kernel of sdpa on a CPU is not counted
    height, width = as_pair(model.config.image_size)
    images = torch.zeros(2, model.config.num_channels, height, width)
    with FlopCounterMode(display=False) as counter:
        model.train()(images).loss.backward()
    return counter.get_total_flops() // 2


if __name__ == "__main__":
    try:
        main()
    except (UserError, ValueError, OSError) as error:
        print(f"sweep.py: {format_error(error)}", file=sys.stderr)
        sys.exit(2)
