"""Trains and judges a grid of models: the paper's ablations as one command, which can be stopped and resumed.

    python training/sweep.py bundled_decay
    python training/sweep.py resnet_rank
    python training/sweep.py cifar100_small_scale --dataset_path path/to/cifar100 --label_column_name fine_label
    python training/sweep.py cifar100_uvit --dataset_path path/to/cifar100 --label_column_name fine_label
    python training/sweep.py bundled_decay --report

GRID is a file in `training/recipes/sweeps`, or a path to one: flags and config fields of `training/mae.py` for all runs
(`flags`), by run (`runs`) or in every combination (`axes`), `seeds`, and flags of evaluate.py (`evaluation`). Each run is a
process of mae.py and one of evaluate.py, or one of resnet.py (`script: resnet`), or one of uvit.py or sit.py and two of
evaluate.py (`script: uvit`; `evaluation` has flags for `samples` and for `blocks`); what they find becomes a line of
`<output_dir>/results.jsonl`. Run the same command again to go on where it stopped, or with `--only` several at once, each for
runs of its own. `--report` makes tables (Markdown) and pictures of the lines that are there.
"""

import argparse
import hashlib
import importlib
import itertools
import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib
import numpy as np
import torch
import yaml
from PIL import Image, ImageDraw
from sklearn.manifold import TSNE
from torch.utils.flop_counter import FlopCounterMode

from hf_decayed import DecayedViTMAEForPreTraining
from hf_decayed.data.shards import read_shards
from hf_decayed.errors import DataError, format_error
from hf_decayed.models.configuration_decayed_vit_mae import as_pair
from hf_decayed.plots import draw_heat_map
from hf_decayed.run.arguments import list_recipes


matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402


SCRIPTS = Path(__file__).parent
GRIDS = SCRIPTS / "recipes" / "sweeps"
FEW_RUNS = 4  # more names would hide what is drawn


def parse_arguments(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grid", metavar="GRID", help=f"one of {list_recipes(GRIDS)}, or a YAML file")
    parser.add_argument("--output_dir", type=Path, help="outputs/sweep/<grid> when not given")
    parser.add_argument("--dataset_name")
    parser.add_argument("--dataset_path")
    parser.add_argument("--label_column_name")
    parser.add_argument("--feature_net", help="whose features samples of diffusion models are compared by; pixels")
    parser.add_argument("--only", help="regular expression: runs whose name matches")
    parser.add_argument("--accelerate_config", help="launch runs with this accelerate config file")
    parser.add_argument("--cpu_threads", help="of every process: 1 lets two sweeps share two cores")
    parser.add_argument("--report", action="store_true", help="make tables and pictures; train nothing")
    parser.add_argument("--tsne", nargs=2, metavar="RUN", help="runs to draw side by side; the first and the last")
    options = parser.parse_args(arguments)
    path = Path(options.grid) if options.grid.endswith((".yaml", ".yml")) else GRIDS / f"{options.grid}.yaml"
    if not path.is_file():
        parser.error(f"there is no grid '{options.grid}'; there are {list_recipes(GRIDS)}")
    options.output_dir = options.output_dir or Path("outputs/sweep") / path.stem
    return options, yaml.safe_load(path.read_text())


def main():
    options, grid = parse_arguments()
    records_file = options.output_dir / "results.jsonl"
    data = {name: getattr(options, name) for name in ("dataset_name", "dataset_path", "label_column_name")}
    data["dataset_path"] = data["dataset_path"] and Path(data["dataset_path"]).name
    runs = expand(grid, data)
    places = {run["name"]: place for place, run in enumerate(runs)}
    runs = [run for run in runs if re.search(options.only or "", run["name"])]

    def in_order() -> list[dict]:
        """What is there, as the grid has it, whoever finished first."""
        return sorted(read_records(records_file), key=lambda each: places.get(each["name"], len(places)))

    if options.report:
        report(in_order(), options)
        return
    options.output_dir.mkdir(parents=True, exist_ok=True)
    for number, run in enumerate(runs, 1):
        if run["key"] in {record["key"] for record in read_records(records_file)}:  # asked anew: others may write too
            continue
        print(f"run {number} of {len(runs)}: {run['name']}, seed {run['seed']}", flush=True)
        folder = options.output_dir / run["folder"]
        record = {**run, **train_and_judge(run, folder, grid.get("evaluation", {}), options)}
        with records_file.open("a") as file:
            file.write(json.dumps(record) + "\n")
    report(in_order(), options)


def expand(grid: dict, data: dict) -> list[dict]:
    """Runs of a grid on some data: the named ones and every combination of the axes, each with every seed."""
    named = dict(grid.get("runs", {}))
    axes = grid.get("axes", {})
    if axes:
        for values in itertools.product(*axes.values()):
            named[", ".join(f"{axis}={value}" for axis, value in zip(axes, values))] = dict(zip(axes, values))
    if not named:
        raise DataError("A grid needs `runs`, `axes`, or both.")
    runs = []
    for seed in grid.get("seeds", [0]):  # seeds outside: a sweep that is cut short has all runs once
        for name, settings in named.items():
            settings = {"recipe": grid.get("recipe", "tiny"), **grid.get("flags", {}), **(settings or {})}
            script = grid.get("script", "mae")
            identity = [settings, seed, grid.get("evaluation"), data] + ([script] if script != "mae" else [])
            identity = json.dumps(identity, sort_keys=True)
            key = hashlib.sha256(identity.encode()).hexdigest()[:12]
            folder = f"{re.sub(r'[^A-Za-z0-9.]+', '-', name).strip('-')}-seed{seed}-{key[:4]}"
            run = {"name": name, "seed": seed, "settings": settings, "key": key, "folder": folder}
            runs.append({**run, "script": script})
    return runs


def read_records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def train_and_judge(run: dict, folder: Path, evaluation: dict, options) -> dict:
    data = [
        word
        for name in ("dataset_name", "dataset_path", "label_column_name", "cpu_threads")
        if getattr(options, name)
        for word in (f"--{name}", getattr(options, name))
    ]
    if not (folder / "results.json").exists():
        launcher = [sys.executable]
        if options.accelerate_config:
            launcher = ["accelerate", "launch", "--config_file", options.accelerate_config]
        flags = as_flags(run) + ["--seed", str(run["seed"]), "--resume_from_checkpoint", "latest"]
        call([*launcher, str(SCRIPTS / f"{run['script']}.py"), *flags, *data, "--output_dir", str(folder)])
        if not (folder / "results.json").exists():
            print("stopped; run the same command to go on", flush=True)
            sys.exit(0)
    results = json.loads((folder / "results.json").read_text())
    curve = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    if run["script"] == "resnet":  # it judges itself
        return {"results": results, "curve": curve}
    if run["script"] in ("uvit", "sit"):
        return {"results": results, "curve": curve, **judge_pipeline(folder, evaluation, data, options)}
    model = DecayedViTMAEForPreTraining.from_pretrained(folder)
    pooling, layers = model.config.pooling, model.config.num_hidden_layers
    # Layers by the mean for all, so that presets can be compared.
    features = [f"last.{pooling}", "last.cls", "last.mean"] + [f"{layer}.mean" for layer in range(layers + 1)]
    judging = [sys.executable, str(SCRIPTS / "evaluate.py"), str(folder), *data]
    judging += [
        "--features",
        ",".join(dict.fromkeys(features)),
        "--features_dir",
        str(options.output_dir / "features"),
    ]
    judging += [word for name, value in evaluation.items() for word in (f"--{name}", text_of(value))]
    call([*judging, "--output", str(folder / "evaluation.json")])
    evaluation = json.loads((folder / "evaluation.json").read_text())
    return {
        "results": results,
        "steps": results["steps"],
        "images_seen": results["images_seen"],
        "training_flops": results["images_seen"] * flops_per_image(model),
        "shortcut_decay": model.config.shortcut_decay,
        "own_features": f"last.{pooling}",
        "evaluation": evaluation["rows"],
        "protocol": evaluation["protocol"],
        "dataset": evaluation["dataset"],
        "curve": [
            {
                name: each[name]
                for name in ("step", "loss", "encoder_norm", "knn_accuracy", "effective_rank")
                if name in each
            }
            | {name: value for name, value in each.items() if name.startswith("skip_use_")}
            for each in curve
        ],
    }


def judge_pipeline(folder: Path, evaluation: dict, data: list[str], options) -> dict:
    """Its samples and its blocks, by evaluate.py."""
    found = {}
    of_samples = ["--samples_dir", str(folder / "evaluated")]
    of_samples += ["--feature_net", options.feature_net] if options.feature_net else []
    for name, own in (("samples", of_samples), ("blocks", [])):
        output = folder / f"{name}.json"
        flags = [word for key, value in evaluation[name].items() for word in (f"--{key}", text_of(value))]
        flags += [*own, "--features_dir", str(options.output_dir / "features"), "--output", str(output)]
        call([sys.executable, str(SCRIPTS / "evaluate.py"), str(folder), *data, *flags])
        judged = json.loads(output.read_text())
        found[name] = {key: judged[key] for key in ("rows", "grid", "best", "protocol", "dataset") if key in judged}
    return found


def as_flags(run: dict) -> list[str]:
    """Flags of the script as they are; what is no flag of it is a field of the config."""
    script = importlib.import_module(run["script"])
    known = vars(script.parse_arguments(["--recipe", run["settings"]["recipe"]]))
    words = []
    for name, value in run["settings"].items():
        if name in known:
            words += [f"--{name}", *(map(str, value) if isinstance(value, list) else [text_of(value)])]
        else:
            words += ["--set", f"{name}={text_of(value)}"]
    return words


def text_of(value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def call(words: list[str]) -> None:
    process = subprocess.Popen(words)
    try:
        code = process.wait()
    except KeyboardInterrupt:  # it got the signal too, and writes its checkpoint
        code = process.wait()
    if code != 0:
        raise DataError(f"`{Path(words[1]).name}` ended with code {code}; what it said is above.")


def flops_per_image(model) -> int:
    """Of a training step: forward and backward, the decoder on all patches, attention written out to be counted."""
    model.set_attn_implementation("eager")
    height, width = as_pair(model.config.image_size)
    images = torch.zeros(2, model.config.num_channels, height, width)
    with FlopCounterMode(display=False) as counter:
        model.train()(images).loss.backward()
    return counter.get_total_flops() // 2


# Report.


def report(records: list[dict], options) -> None:
    if not records:
        raise DataError(f"There is nothing to report in {options.output_dir} yet.")
    folder = options.output_dir / "report"
    folder.mkdir(parents=True, exist_ok=True)
    by_name = defaultdict(list)
    for record in records:
        by_name[record["name"]].append(record)
    if records[0].get("script") == "resnet":
        (folder / "tables.md").write_text(supervised_table(by_name))
        save_supervised(folder / "rank_against_depth.png", records)
        print((folder / "tables.md").read_text())
        print(f"tables.md and picture: {folder}")
        return
    if records[0].get("script") in ("uvit", "sit"):
        (folder / "tables.md").write_text(diffusion_table(by_name))
        save_over_training(folder / "over_training.png", by_name)
        save_blocks(folder / "blocks.png", by_name)
        save_samples(folder / "samples.png", by_name, options.output_dir)
        print((folder / "tables.md").read_text())
        print(f"tables.md and pictures: {folder}")
        return
    (folder / "tables.md").write_text(tables(by_name))
    # A network as it starts, trained for one step at rate 0, has no course.
    trained = {name: runs for name, runs in by_name.items() if runs[0]["steps"] > 1}
    save_decay(folder / "accuracy_against_decay.png", [record for runs in trained.values() for record in runs])
    save_training(folder / "rank_and_accuracy.png", trained)
    save_layers(folder / "accuracy_by_layer.png", by_name)
    save_skips(folder / "use_of_skips.png", by_name)
    names = options.tsne or [next(iter(by_name)), list(by_name)[-1]]
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise DataError(f"There is no run {', '.join(unknown)}; there are {', '.join(by_name)}.")
    save_tsne(folder / "tsne.png", [by_name[name][0] for name in names], options.output_dir)
    print((folder / "tables.md").read_text())
    print(f"tables.md and pictures: {folder}")


def spread(values: list[float], percent: bool = False) -> str:
    """The mean, and the smallest and largest where there are several."""
    scale, digits = (100, 1) if percent else (1, 3)
    text = f"{scale * np.mean(values):.{digits}f}"
    return text if len(values) == 1 else f"{text} ({scale * min(values):.{digits}f}-{scale * max(values):.{digits}f})"


def tables(by_name: dict[str, list[dict]]) -> str:
    columns = ["run", "seeds", "steps", "loss", "kNN, mean (%)", "kNN, class token (%)", "kNN, best layer (%)"]
    columns += [
        "linear, mean (%)",
        "linear, class token (%)",
        "rank, mean",
        "rank, class token",
        "norm",
        "deepest skip",
        "TFLOP",
    ]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for name, records in by_name.items():
        rows = [record["evaluation"] for record in records]
        layers = [[row[each]["knn_accuracy"] for each in row if each[0].isdigit()] for row in rows]
        norms = [
            [each["encoder_norm"] for each in record["curve"] if "encoder_norm" in each][-1] for record in records
        ]
        cells = [name, str(len(records)), str(records[0]["steps"])]
        cells.append(spread([record["results"]["loss"] for record in records]))
        for metric, percent in (("knn_accuracy", True), ("linear_accuracy", True), ("effective_rank", False)):
            cells += [spread([row[name][metric] for row in rows], percent) for name in ("last.mean", "last.cls")]
            if metric == "knn_accuracy":
                cells.append(spread([max(each) for each in layers], percent=True))
        deepest = [next(iter(record["results"]["skip_use"].values())) for record in records if uses_skips(record)]
        deepest = [round(each, 3) + 0.0 for each in deepest]  # + 0: no minus before a zero
        cells += [spread(norms), spread(deepest) if deepest else "", f"{records[0]['training_flops'] / 1e12:.3g}"]
        lines.append("| " + " | ".join(cells) + " |")
    anyone = next(iter(by_name.values()))[0]
    untrained = {
        name: [record["results"]["knn_accuracy_untrained"] for record in group] for name, group in by_name.items()
    }
    pixels = anyone["evaluation"]["pixels"]
    cells = ["raw pixels", "", "", "", spread([pixels["knn_accuracy"]], percent=True), "", ""]
    cells += [spread([pixels["linear_accuracy"]], percent=True), "", spread([pixels["effective_rank"]])]
    cells += [""] * (len(columns) - len(cells))
    lines += ["| " + " | ".join(cells) + " |", ""]
    lines.append(
        "Untrained, kNN on the images that mae.py evaluates on: "
        + "; ".join(f"{name} {spread(values, percent=True)} %" for name, values in untrained.items())
        + "."
    )
    protocol, dataset = anyone["protocol"], anyone["dataset"]
    lines.append(
        f"{dataset['name']}: {dataset['number']['train']} training and {dataset['number']['test']} held-out images. kNN: "
        f"k = {protocol['knn']['k']}, cosine, temperature {protocol['knn']['temperature']}; linear: {protocol['linear']['name']}. "
        "Features are of the last layer, the mean of all tokens or the class token; norm: of its tokens; deepest skip: rise of "
        "the loss when the decoder gets its mean instead, where it was measured. Means over seeds, with the smallest and largest."
    )
    return "\n".join(lines) + "\n"


def uses_skips(record: dict) -> bool:
    """Whether there are skips, and it was measured what they are worth."""
    return bool(record["results"].get("skip_use"))


def supervised_table(by_name: dict[str, list[dict]]) -> str:
    lines = ["| shortcut_decay | blocks | seeds | accuracy (%) | effective rank | loss |", "|---" * 6 + "|"]
    for group in by_name.values():
        results = [record["results"] for record in group]
        cells = [str(results[0]["shortcut_decay"]), str(results[0]["num_blocks"]), str(len(group))]
        cells.append(spread([each["accuracy"] for each in results], percent=True))
        cells.append(spread([each["effective_rank"] for each in results]))
        cells.append(spread([each["loss"] for each in results]))
        lines.append("| " + " | ".join(cells) + " |")
    anyone = next(iter(by_name.values()))[0]["results"]
    lines += [
        "",
        f"{anyone['dataset']['name']}: {anyone['dataset']['number']} training images, {anyone['steps']} steps, "
        f"{anyone['images_seen']} images seen. Rank: entropy, of the last stage's features averaged over places, on "
        "held-out images. Means over seeds, with the smallest and largest.",
    ]
    return "\n".join(lines) + "\n"


def save_supervised(path: Path, records: list[dict]) -> None:
    """Of each decay: rank against depth at the end, rank over training and by stage for the shallowest network."""
    figure, (against_depth, over_training, by_stage, accuracy) = pyplot.subplots(1, 4, figsize=(15, 3.4))
    decays = sorted({record["results"]["shortcut_decay"] for record in records})
    shallowest = min(record["results"]["num_blocks"] for record in records)
    for number, decay in enumerate(decays):
        style = {"marker": ".", "color": f"C{number}", "label": f"{decay:g}"}
        mine = [record for record in records if record["results"]["shortcut_decay"] == decay]
        depths = sorted({record["results"]["num_blocks"] for record in mine})
        for axis, name in ((against_depth, "effective_rank"), (accuracy, "accuracy")):
            at = [[each["results"][name] for each in mine if each["results"]["num_blocks"] == d] for d in depths]
            axis.plot(depths, [np.mean(values) for values in at], **style)
            for depth, values in zip(depths, at):
                axis.plot([depth] * len(values), values, ".", color=f"C{number}", markersize=3)
        shallow = [record for record in mine if record["results"]["num_blocks"] == shallowest]
        looks = [[each for each in record["curve"] if "effective_rank" in each] for record in shallow]
        if looks:
            steps = [each["step"] for each in looks[0]]
            over_training.plot(
                steps, np.mean([[e["effective_rank"] for e in look] for look in looks], axis=0), **style
            )
            stages = [name for name in looks[0][-1] if name.startswith("effective_rank_stage")]
            ranks = [[look[-1][stage] for stage in stages] for look in looks]
            by_stage.plot(range(1, len(stages) + 1), np.mean(ranks, axis=0), **style)
    against_depth.set(title="effective rank at the end", xlabel="blocks")
    accuracy.set(title="accuracy at the end", xlabel="blocks")
    over_training.set(title=f"effective rank, {shallowest} blocks", xlabel="step")
    by_stage.set(title=f"effective rank, {shallowest} blocks", xlabel="stage")
    for axis in (against_depth, over_training, by_stage, accuracy):
        axis.grid(alpha=0.3)
        axis.xaxis.get_major_locator().set_params(integer=True)
    against_depth.legend(title="shortcut_decay", fontsize=7)
    finish(figure, path)


def diffusion_table(by_name: dict[str, list[dict]]) -> str:
    """Of each run: its samples, with their spread for one seed, and the best of its blocks and noise levels."""
    anyone = next(iter(by_name.values()))[0]
    sampled, others = list(anyone["samples"]["rows"])[0], list(anyone["samples"]["rows"])[1:]
    measures = [name for name in anyone["samples"]["rows"][sampled] if not name.endswith("_spread")]
    columns = ["run", "seeds", "loss", *(name.replace("_", " ") for name in measures)]
    columns += ["linear, best cell (%)", "at", "kNN, best cell (%)", "at"]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]

    def cells_of(rows):
        cells = []
        for name in measures:
            text = f"{np.mean([row[name] for row in rows]):.3g}"
            if f"{name}_spread" in rows[0]:
                text += f" +- {np.mean([row[f'{name}_spread'] for row in rows]):.2g}"
            cells.append(text)
        return cells

    for name, records in by_name.items():
        cells = [name, str(len(records)), spread([record["results"]["loss"] for record in records])]
        cells += cells_of([next(iter(record["samples"]["rows"].values())) for record in records])
        for metric in ("linear_accuracy", "knn_accuracy"):
            best = [record["blocks"]["best"][metric] for record in records]
            values = [record["blocks"]["rows"][cell][metric] for record, cell in zip(records, best)]
            cells += [spread(values, percent=True), ", ".join(dict.fromkeys(best))]
        lines.append("| " + " | ".join(cells) + " |")
    for other in others:
        lines.append(f"| {other} | | | " + " | ".join(cells_of([anyone["samples"]["rows"][other]])) + " | | | | |")
    pixels, blocks = anyone["blocks"]["rows"]["pixels"], anyone["blocks"]
    protocol, number = anyone["samples"]["protocol"], blocks["dataset"]["number"]
    lines += [
        "",
        f"{anyone['results']['dataset']['name']}: {anyone['results']['steps']} steps, {anyone['results']['images_seen']} "
        f"images seen. {sampled}, against {protocol['reference']}; features: {protocol['features']}; "
        f"+-: {protocol['frechet'].removeprefix('spread: ')}, and over subsets for the kernel distance. Blocks: {number['train']} training and "
        f"{number['test']} held-out images, ridge and 20 neighbours, the best cell of {len(blocks['grid']['blocks'])} blocks "
        f"by {len(blocks['grid']['noise_levels'])} noise levels, chosen on the held-out images. Raw pixels: linear "
        f"{100 * pixels['linear_accuracy']:.1f} %, kNN {100 * pixels['knn_accuracy']:.1f} %.",
    ]
    return "\n".join(lines) + "\n"


def save_over_training(path: Path, by_name: dict[str, list[dict]]) -> None:
    """Loss, in a running mean, and the distance that the script measures, over training."""
    figure, (loss, distance) = pyplot.subplots(1, 2, figsize=(8.4, 3.4))
    for number, (name, records) in enumerate(by_name.items()):
        for index, record in enumerate(records):
            losses = [(each["step"], each["loss"]) for each in record["curve"] if "loss" in each]
            width = max(1, len(losses) // 25)
            smooth = np.convolve([each for _, each in losses], np.ones(width) / width, mode="valid")
            label = name if index == 0 else None
            loss.plot([step for step, _ in losses][width - 1 :], smooth, color=f"C{number}", label=label, linewidth=1)
            key = next(key for each in record["curve"] for key in each if key.startswith("frechet_"))
            looks = {each["step"]: each[key] for each in record["curve"] if key in each}
            distance.plot(list(looks), list(looks.values()), color=f"C{number}", marker=".")
            distance.set(title=key.replace("_", " "), xlabel="step", yscale="log")
    loss.set(title="training loss, running mean", xlabel="step", yscale="log")
    loss.legend(fontsize=7)
    for axis in (loss, distance):
        axis.grid(alpha=0.3, which="both")
    finish(figure, path)


def save_blocks(path: Path, by_name: dict[str, list[dict]]) -> None:
    """Linear accuracy by block and noise level, one map a run, in one scale; means over seeds."""
    maps = {
        name: 100 * np.mean([record["blocks"]["grid"]["cells"]["linear_accuracy"] for record in records], axis=0)
        for name, records in by_name.items()
    }
    grid = next(iter(by_name.values()))[0]["blocks"]["grid"]
    low, high = min(each.min() for each in maps.values()), max(each.max() for each in maps.values())
    size = (3.6 * len(maps) + 1, 1.2 + 0.3 * len(grid["blocks"]))
    figure, axes = pyplot.subplots(1, len(maps), figsize=size, squeeze=False, sharey=True)
    for axis, (name, values) in zip(axes[0], maps.items()):
        draw_heat_map(axis, values, grid["noise_levels"], low, high)
        axis.set(title=f"{name}: linear accuracy (%)", xlabel="noise level (0 data, 1 noise)")
    axes[0][0].set_yticks(range(len(grid["blocks"])), grid["blocks"], fontsize=7)
    finish(figure, path)


def save_samples(path: Path, by_name: dict[str, list[dict]], output_dir: Path) -> None:
    """What each run has learnt to draw, from the same noise, pixel by pixel."""
    grids = {name: Image.open(output_dir / runs[0]["folder"] / "samples.png") for name, runs in by_name.items()}
    width, height = sum(grid.width + 12 for grid in grids.values()), max(grid.height for grid in grids.values())
    sheet, left = Image.new("RGB", (width, height + 18), "white"), 0
    for name, grid in grids.items():
        ImageDraw.Draw(sheet).text((left + 4, 3), name, fill="black")
        sheet.paste(grid.convert("RGB"), (left, 18))
        left += grid.width + 12
    sheet.save(path)


def save_decay(path: Path, records: list[dict]) -> None:
    """Accuracy against `shortcut_decay`, one line for runs that differ in nothing else."""
    groups = defaultdict(lambda: defaultdict(list))
    for record in records:
        others = {name: value for name, value in record["settings"].items() if name != "shortcut_decay"}
        label = (
            ", ".join(f"{name}={value}" for name, value in others.items() if name in differing(records))
            or "nothing else changed"
        )
        groups[label][record["shortcut_decay"]].append(record["evaluation"][record["own_features"]])
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.4))
    for axis, (name, title) in zip(
        axes,
        (
            ("knn_accuracy", "kNN accuracy"),
            ("linear_accuracy", "linear accuracy"),
            ("effective_rank", "effective rank"),
        ),
    ):
        for label, decays in groups.items():
            places = sorted(decays)
            means = [np.mean([row[name] for row in decays[place]]) for place in places]
            axis.plot(places, means, marker="o", markersize=4, label=label)
            for place in places:
                axis.plot([place] * len(decays[place]), [row[name] for row in decays[place]], "k.", markersize=3)
        axis.set(title=title, xlabel="shortcut_decay")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=7)
    finish(figure, path)


def differing(records: list[dict]) -> set[str]:
    """Settings, but for the decay, that are not the same in all runs."""
    names = {name for record in records for name in record["settings"]} - {"shortcut_decay"}
    return {name for name in names if len({str(record["settings"].get(name)) for record in records}) > 1}


def save_training(path: Path, by_name: dict[str, list[dict]]) -> None:
    """Rank and kNN accuracy over training, and how they go together."""
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.4) if len(by_name) <= FEW_RUNS else (15, 4.4))
    over_rank, over_accuracy, together = axes
    every_rank, every_accuracy = [], []
    for number, (name, records) in enumerate(by_name.items()):
        for index, record in enumerate(records):
            points = [each for each in record["curve"] if "knn_accuracy" in each]
            steps, ranks, accuracies = (
                [each[key] for each in points] for key in ("step", "effective_rank", "knn_accuracy")
            )
            style = {"marker": ".", "color": colour(number, len(by_name))}  # one for all seeds of a run
            over_rank.plot(steps, ranks, **style, label=name if index == 0 else None)
            over_accuracy.plot(steps, accuracies, **style)
            trained = slice(1, None)  # the untrained network is another matter
            together.plot(ranks[trained], accuracies[trained], **style, linestyle="")
            every_rank += ranks[trained]
            every_accuracy += accuracies[trained]
    correlation = pearson(every_rank, every_accuracy)
    over_rank.set(title="effective rank, class token", xlabel="step")
    over_accuracy.set(title="kNN accuracy", xlabel="step")
    together.set(
        title="Pearson correlation " + ("not defined" if correlation is None else f"{correlation:.2f}"),
        xlabel="effective rank",
        ylabel="kNN accuracy",
    )
    name_runs(axes, len(by_name))
    finish(figure, path)


def colour(number: int, total: int):
    """Of a run among so many: ten that are easy to tell apart, or one of a rainbow."""
    return f"C{number}" if total <= 10 else pyplot.get_cmap("turbo")(number / (total - 1))


def name_runs(axes, total: int) -> None:
    """A legend inside the first plot, or beside the last where it would hide the curves."""
    if total <= FEW_RUNS:
        axes[0].legend(fontsize=7)
        return
    handles, names = axes[0].get_legend_handles_labels()
    axes[-1].legend(handles, names, fontsize=7, loc="upper left", bbox_to_anchor=(1.02, 1.0))


def pearson(left: list[float], right: list[float]) -> float | None:
    if len(left) < 3 or np.std(left) == 0 or np.std(right) == 0:
        return None
    return float(np.corrcoef(left, right)[0, 1])


def save_layers(path: Path, by_name: dict[str, list[dict]]) -> None:
    figure, axes = pyplot.subplots(1, 2, figsize=(8.4, 3.4) if len(by_name) <= FEW_RUNS else (11.4, 4.4))
    for axis, (metric, title) in zip(axes, (("knn_accuracy", "kNN accuracy"), ("linear_accuracy", "linear accuracy"))):
        for number, (name, records) in enumerate(by_name.items()):
            layers = [each for each in records[0]["evaluation"] if each[0].isdigit()]
            means = [np.mean([record["evaluation"][layer][metric] for record in records]) for layer in layers]
            style = {"marker": ".", "color": colour(number, len(by_name)), "label": name}
            axis.plot([int(layer.split(".")[0]) for layer in layers], means, **style)
        axis.axhline(records[0]["evaluation"]["pixels"][metric], color="grey", linestyle=":", label="pixels")
        axis.set(title=f"{title}, mean of tokens", xlabel="encoder layer (0: embedding)")
        axis.grid(alpha=0.3)
    name_runs(axes, len(by_name))
    finish(figure, path)


def save_skips(path: Path, by_name: dict[str, list[dict]]) -> None:
    """What each encoder-decoder skip is worth to the decoder, a row a run; means over seeds."""
    rows = {
        name: [record["results"]["skip_use"] for record in records if uses_skips(record)]
        for name, records in by_name.items()
    }
    rows = {name: measured for name, measured in rows.items() if measured}
    if not rows:
        return
    layers = sorted({int(layer) for measured in rows.values() for layer in measured[0]})
    values = np.array(
        [
            [1000 * np.mean([each.get(str(layer), np.nan) for each in measured]) for layer in layers]
            for measured in rows.values()
        ]
    )
    figure, axis = pyplot.subplots(figsize=(1.6 + 0.75 * len(layers), 1.1 + 0.3 * len(rows)))
    draw_heat_map(axis, values.round(1) + 0.0, layers, 0.0, max(0.0, np.nanmax(values)))  # + 0: no minus before a zero
    axis.set_yticks(range(len(rows)), list(rows), fontsize=8)
    axis.set(title="rise of the loss without a skip, x 1000", xlabel="encoder layer that the skip leaves")
    finish(figure, path)


def save_tsne(path: Path, records: list[dict], output_dir: Path, number: int = 1000) -> None:
    """Held-out features of two runs in the plane, coloured by class."""
    figure, axes = pyplot.subplots(1, len(records), figsize=(4.6 * len(records), 4.4), squeeze=False)
    for axis, record in zip(axes[0], records):
        features, labels = held_out_features(record, output_dir)
        order = np.random.default_rng(0).permutation(len(features))[:number]
        places = TSNE(perplexity=min(30, (len(order) - 1) / 3), init="pca", random_state=0).fit_transform(
            features[order]
        )
        axis.scatter(*places.T, c=labels[order], s=5, cmap="tab10")
        axis.set(title=f"{record['name']}, seed {record['seed']}", xticks=[], yticks=[])
    finish(figure, path)


def held_out_features(record: dict, output_dir: Path) -> tuple[np.ndarray, np.ndarray]:
    """From the shards that evaluate.py kept for this run's model."""
    evaluation = json.loads((output_dir / record["folder"] / "evaluation.json").read_text())
    for identity in sorted((output_dir / "features").glob("*/identity.json")):
        content = json.loads(identity.read_text())
        if (content["model"], content.get("split")) == (evaluation["model_fingerprint"], "test"):
            tensors = read_shards(sorted(identity.parent.glob("shard-*.safetensors")))
            return tensors[record["own_features"]].numpy(), tensors["labels"].numpy()
    raise DataError(f"The features of the run '{record['name']}' are gone from {output_dir / 'features'}.")


def finish(figure, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    try:
        main()
    except (DataError, ValueError, OSError) as error:
        print(f"sweep.py: {format_error(error)}", file=sys.stderr)
        sys.exit(2)
