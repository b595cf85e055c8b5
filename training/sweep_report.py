"""Report of a sweep: the tables of sweep_tables.py, and plots of what the records hold."""

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from accelerate import Accelerator
from PIL import Image, ImageDraw
from sweep_tables import (
    Groups,
    classifiers,
    effect_table,
    encoders,
    format_tables,
    group_by_name,
    has_skip_ablation,
    layer_features,
    pipelines,
)
from transformers import AutoImageProcessor

from hf_decayed import DecayedViTMAEForPreTraining
from hf_decayed.data.shards import read_shards
from hf_decayed.data.sources import load_image_splits
from hf_decayed.errors import UserError, format_error
from hf_decayed.plots import draw_heat_map, require_matplotlib
from hf_decayed.run.monitors import PatchMonitor


MAX_INNER_LEGEND = 4  # runs; a longer legend would hide the curves
TSNE_IMAGES = 1000
METRIC_TITLES = {
    "knn_accuracy": "kNN accuracy",
    "linear_accuracy": "linear accuracy",
    "effective_rank": "effective rank",
}


SMALLEST_DISTANCE = 3e-8  # of two losses in float32: half a unit in the last place; equal losses are drawn there


def write_report(
    records: list[dict],
    output_dir: Path,
    tsne_runs: list[str] | None = None,
    reference: str | None = None,
    data: dict[str, str] | None = None,
    effects: Sequence[Sequence[str]] = (),
) -> str:
    """Writes `tables.md` and plots to `<output_dir>/report`; returns the tables, and which plots are missing and why.

    Args:
        output_dir (`Path`): Folder of the sweep, with the folders of its runs. Only samples, t-SNE and patches need these.
        tsne_runs (`list[str]`, *optional*): Names of the runs of the t-SNE plot, by default the first and the last.
        reference (`str`, *optional*): Name of the run that losses are compared with, on a logarithmic axis.
        data (`dict`, *optional*): Arguments of `load_image_splits`, for the picture of patches.
        effects (`Sequence[Sequence[str]]`, *optional*): Pairs of runs that are compared seed by seed: a run and its baseline.
    """
    if not records:
        raise UserError(f"There is nothing to report in {output_dir} yet.")
    names = list(group_by_name(records))
    if unknown := [name for name in tsne_runs or [] if name not in names]:
        raise UserError(f"There is no run {', '.join(unknown)}; there are {', '.join(names)}.")
    folder = output_dir / "report"
    folder.mkdir(parents=True, exist_ok=True)
    tables = "\n".join(
        [format_tables(records), *(table + "\n" for pair in effects if (table := effect_table(records, *pair)))]
    )
    (folder / "tables.md").write_text(tables)
    missing = defaultdict(list)
    for name, save in list_plots(records, output_dir, tsne_runs, reference, data).items():
        try:
            save(folder / name)
        except UserError as error:
            missing[format_error(error)].append(name)
    lines = [tables, f"tables.md and plots: {folder}"]
    return "\n".join(lines + [f"{', '.join(plots)} not drawn: {reason}" for reason, plots in missing.items()])


def list_plots(
    records: list[dict],
    output_dir: Path,
    tsne_runs: list[str] | None = None,
    reference: str | None = None,
    data: dict[str, str] | None = None,
) -> dict[str, Callable[[Path], None]]:
    """Functions that draw the plots of the records, by file name."""
    plots: dict[str, Callable[[Path], None]] = {}
    by_encoder, by_pipeline = group_by_name(encoders(records)), group_by_name(pipelines(records))
    classifier_records = classifiers(records)
    # A run of one step, at learning rate 0, stands for an untrained network: it has no curve.
    trained = [record for record in encoders(records) if record["steps"] > 1]
    if trained:
        plots["accuracy_against_decay.png"] = lambda path: save_decay(path, trained)
        plots["rank_and_accuracy.png"] = lambda path: save_training(path, group_by_name(trained))
        plots["losses.png"] = lambda path: save_losses(path, group_by_name(trained), reference)
    if by_encoder:
        plots["accuracy_by_layer.png"] = lambda path: save_layers(path, by_encoder)
        if any(has_skip_ablation(record) for record in encoders(records)):
            plots["use_of_skips.png"] = lambda path: save_skips(path, by_encoder)
        names = tsne_runs or dict.fromkeys([next(iter(by_encoder)), list(by_encoder)[-1]])
        plots["tsne.png"] = lambda path: save_tsne(path, [by_encoder[name][0] for name in names], output_dir)
        if data:
            plots["patches.png"] = lambda path: save_patches(path, by_encoder, output_dir, data)
    if by_pipeline:
        plots["over_training.png"] = lambda path: save_over_training(path, by_pipeline)
        plots["blocks.png"] = lambda path: save_blocks(path, by_pipeline)
        plots["samples.png"] = lambda path: save_samples(path, by_pipeline, output_dir)
    if classifier_records:
        plots["rank_against_depth.png"] = lambda path: save_rank(path, classifier_records)
    return plots


# Plots of encoders.


def save_decay(path: Path, records: list[dict]) -> None:
    """Metrics against `shortcut_decay`, one line for runs that differ in nothing else."""
    lines = defaultdict(lambda: defaultdict(list))
    shown = varying_settings(records)
    for record in records:
        others = [f"{name}={value}" for name, value in record["settings"].items() if name in shown]
        label = ", ".join(others) or "nothing else changed"
        lines[label][record["shortcut_decay"]].append(record["evaluation"][record["own_features"]])
    pyplot = require_matplotlib()
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.4))
    for axis, (metric, title) in zip(axes, METRIC_TITLES.items()):
        for label, rows in lines.items():
            values = {decay: [row[metric] for row in rows[decay] if metric in row] for decay in sorted(rows)}
            values = {decay: measured for decay, measured in values.items() if measured}
            means = [np.mean(measured) for measured in values.values()]
            axis.plot(list(values), means, marker="o", markersize=4, label=label)
            for decay, measured in values.items():
                axis.plot([decay] * len(measured), measured, "k.", markersize=3)
        axis.set(title=title, xlabel="shortcut_decay")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=7)
    save_figure(figure, path)


def save_losses(path: Path, groups: Groups, reference: str | None = None) -> None:
    """Training losses, and how far they are from those of a run with the same seed, which saw the same batches.

    That run is the first one, or `reference`: then distances are drawn on a logarithmic axis, without smoothing.
    """
    pyplot = require_matplotlib()
    figure, (loss_axis, difference_axis) = pyplot.subplots(1, 2, figsize=(11, 3.8))
    compared = reference if reference in groups else next(iter(groups))
    expected = {record["seed"]: read_losses(record) for record in groups[compared]}
    for number, (name, records) in enumerate(groups.items()):
        style = {"color": run_color(number, len(groups)), "linewidth": 1.2}
        for index, record in enumerate(records):
            losses, others = read_losses(record), expected.get(record["seed"], {})
            differences = {step: loss - others[step] for step, loss in losses.items() if step in others}
            label = name if index == 0 else None
            loss_axis.plot(list(losses), smooth(list(losses.values())), label=label, **style)
            if reference is None:
                difference_axis.plot(list(differences), smooth(list(differences.values())), **style)
            elif name != compared:
                distances = np.maximum(np.abs(list(differences.values())), SMALLEST_DISTANCE)
                difference_axis.semilogy(list(differences), distances, **style)
    loss_axis.set(xlabel="step", title="training loss, smoothed")
    word = "difference" if reference is None else "distance"
    difference_axis.set(xlabel="step", title=f"{word} to '{compared}' of the same seed")
    for axis in (loss_axis, difference_axis):
        axis.grid(alpha=0.3)
    loss_axis.legend(fontsize=8)
    save_figure(figure, path)


def read_losses(record: dict) -> dict[int, float]:
    return {point["step"]: point["loss"] for point in record["curve"] if "loss" in point}


def smooth(values: list[float], width: int = 15) -> np.ndarray:
    """Means over up to `width` points before and after."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    numbers = np.arange(len(values))
    begin, end = np.maximum(numbers - width, 0), np.minimum(numbers + width + 1, len(values))
    return (sums[end] - sums[begin]) / (end - begin)


def varying_settings(records: list[dict]) -> set[str]:
    """Settings, except for the decay, that are not the same in all runs."""
    names = {name for record in records for name in record["settings"]} - {"shortcut_decay"}
    return {name for name in names if len({str(record["settings"].get(name)) for record in records}) > 1}


def save_training(path: Path, groups: Groups) -> None:
    """Rank and kNN accuracy over training, and against one another."""
    pyplot = require_matplotlib()
    size = (12, 3.4) if len(groups) <= MAX_INNER_LEGEND else (15, 4.4)
    figure, axes = pyplot.subplots(1, 3, figsize=size)
    rank_axis, accuracy_axis, scatter = axes
    all_ranks, all_accuracies = [], []
    for number, (name, records) in enumerate(groups.items()):
        style = {"marker": ".", "color": run_color(number, len(groups))}  # one color for all seeds of a run
        for index, record in enumerate(records):
            points = [point for point in record["curve"] if "effective_rank" in point]
            rank_axis.plot(*series(points, "effective_rank"), **style, label=name if index == 0 else None)
            points = [point for point in points if "knn_accuracy" in point]
            accuracy_axis.plot(*series(points, "knn_accuracy"), **style)
            ranks, accuracies = (series(points[1:], metric)[1] for metric in ("effective_rank", "knn_accuracy"))
            scatter.plot(ranks, accuracies, **style, linestyle="")  # without the untrained network
            all_ranks += ranks
            all_accuracies += accuracies
    correlation = pearson(all_ranks, all_accuracies)
    rank_axis.set(title="effective rank, class token", xlabel="step")
    accuracy_axis.set(title="kNN accuracy", xlabel="step")
    title = "Pearson correlation " + ("not defined" if correlation is None else f"{correlation:.2f}")
    scatter.set(title=title, xlabel="effective rank", ylabel="kNN accuracy")
    add_legend(axes, len(groups))
    save_figure(figure, path)


def series(points: list[dict], metric: str) -> tuple[list[int], list[float]]:
    """Steps and values of a metric over training."""
    return [point["step"] for point in points], [point[metric] for point in points]


def pearson(left: list[float], right: list[float]) -> float | None:
    if len(left) < 3 or np.std(left) == 0 or np.std(right) == 0:
        return None
    return float(np.corrcoef(left, right)[0, 1])


def run_color(number: int, total: int):
    """Matplotlib's ten colors, or, for more runs, a rainbow."""
    return f"C{number}" if total <= 10 else require_matplotlib().get_cmap("turbo")(number / (total - 1))


def add_legend(axes, num_runs: int) -> None:
    """Inside the first plot, or beside the last one if it would hide the curves."""
    if num_runs <= MAX_INNER_LEGEND:
        axes[0].legend(fontsize=7)
        return
    handles, names = axes[0].get_legend_handles_labels()
    axes[-1].legend(handles, names, fontsize=7, loc="upper left", bbox_to_anchor=(1.02, 1.0))


def save_layers(path: Path, groups: Groups) -> None:
    """Accuracy by layer, with the mean of all tokens as the feature; means over seeds."""
    pyplot = require_matplotlib()
    size = (8.4, 3.4) if len(groups) <= MAX_INNER_LEGEND else (11.4, 4.4)
    figure, axes = pyplot.subplots(1, 2, figsize=size)
    for axis, metric in zip(axes, ("knn_accuracy", "linear_accuracy")):
        for number, (name, records) in enumerate(groups.items()):
            evaluations = [record["evaluation"] for record in records]
            layers = [layer for layer in layer_features(evaluations[0]) if metric in evaluations[0][layer]]
            means = [np.mean([evaluation[layer][metric] for evaluation in evaluations]) for layer in layers]
            style = {"marker": ".", "color": run_color(number, len(groups)), "label": name}
            axis.plot([int(layer.split(".")[0]) for layer in layers], means, **style)
        pixels = evaluations[0].get("pixels", {})
        if metric in pixels:
            axis.axhline(pixels[metric], color="grey", linestyle=":", label="pixels")
        axis.set(title=f"{METRIC_TITLES[metric]}, mean of tokens", xlabel="encoder layer (0: embedding)")
        axis.grid(alpha=0.3)
    add_legend(axes, len(groups))
    save_figure(figure, path)


def save_skips(path: Path, groups: Groups) -> None:
    """Increase of the loss without each encoder-decoder skip, one row per run; means over seeds."""
    ablations = {
        name: [record["results"]["skip_use"] for record in records if has_skip_ablation(record)]
        for name, records in groups.items()
    }
    ablations = {name: increases for name, increases in ablations.items() if increases}
    layers = sorted({int(layer) for increases in ablations.values() for layer in increases[0]})
    values = np.array(
        [
            [1000 * np.mean([increase.get(str(layer), np.nan) for increase in increases]) for layer in layers]
            for increases in ablations.values()
        ]
    )
    pyplot = require_matplotlib()
    figure, axis = pyplot.subplots(figsize=(1.6 + 0.75 * len(layers), 1.1 + 0.3 * len(ablations)))
    # Adding zero turns -0.0 into 0.0.
    draw_heat_map(axis, values.round(1) + 0.0, layers, 0.0, max(0.0, np.nanmax(values)))
    axis.set_yticks(range(len(ablations)), list(ablations), fontsize=8)
    axis.set(title="increase of the loss without a skip, x 1000", xlabel="encoder layer of the skip")
    save_figure(figure, path)


def save_tsne(path: Path, records: list[dict], output_dir: Path) -> None:
    """Held-out features of each record in two dimensions, colored by class."""
    try:
        from sklearn.manifold import TSNE  # of the extra `training`
    except ImportError as error:
        raise UserError("t-SNE needs scikit-learn: pip install 'hf_decayed[training]'.") from error

    features_and_labels = [held_out_features(record, output_dir) for record in records]
    pyplot = require_matplotlib()
    figure, axes = pyplot.subplots(1, len(records), figsize=(4.6 * len(records), 4.4), squeeze=False)
    for axis, record, (features, labels) in zip(axes[0], records, features_and_labels):
        subset = np.random.default_rng(0).permutation(len(features))[:TSNE_IMAGES]
        tsne = TSNE(perplexity=min(30, (len(subset) - 1) / 3), init="pca", random_state=0)
        axis.scatter(*tsne.fit_transform(features[subset]).T, c=labels[subset], s=5, cmap="tab10")
        axis.set(title=f"{record['name']}, seed {record['seed']}", xticks=[], yticks=[])
    save_figure(figure, path)


def save_patches(path: Path, groups: Groups, output_dir: Path, data: dict[str, str]) -> None:
    """Held-out images, and the features of their patches as colours: of every run, with the first seed whose folders are all there."""
    folders = {
        name: output_dir / record["folder"] for name, record in records_with_folders(groups, output_dir).items()
    }
    processor = AutoImageProcessor.from_pretrained(list(folders.values())[-1])
    monitor = PatchMonitor(Accelerator(), load_image_splits(**data), processor, TSNE_IMAGES)
    monitor.models = {
        name: DecayedViTMAEForPreTraining.from_pretrained(folder).eval() for name, folder in folders.items()
    }
    monitor.picture(path)


def records_with_folders(groups: Groups, output_dir: Path) -> dict[str, dict]:
    """One record of every run, all of the same seed, whose models are in the folder of the sweep."""
    present = {
        name: {
            record["seed"]: record for record in records if (output_dir / record["folder"] / "config.json").exists()
        }
        for name, records in groups.items()
    }
    for name, records in present.items():
        if not records:
            raise UserError(f"The folder of the run '{name}' is not in {output_dir}.")
    seeds = set.intersection(*(set(records) for records in present.values()))
    if not seeds:
        raise UserError(f"No seed has the folders of all runs in {output_dir}.")
    return {name: records[min(seeds)] for name, records in present.items()}


def held_out_features(record: dict, output_dir: Path) -> tuple[np.ndarray, np.ndarray]:
    """Features and labels from the shards that the evaluation of a run has cached."""
    evaluation = output_dir / record["folder"] / "evaluation.json"
    if not evaluation.exists():
        raise UserError(f"The folder of the run '{record['name']}' is not in {output_dir}.")
    model = json.loads(evaluation.read_text())["model_fingerprint"]
    for path in sorted((output_dir / "features").glob("*/identity.json")):
        identity, shards = json.loads(path.read_text()), sorted(path.parent.glob("shard-*.safetensors"))
        if (identity["model"], identity.get("split")) == (model, "test") and shards:
            tensors = read_shards(shards)
            return tensors[record["own_features"]].numpy(), tensors["labels"].numpy()
    raise UserError(f"The features of the run '{record['name']}' are not in {output_dir / 'features'}.")


# Plots of pipelines and classifiers.


def save_over_training(path: Path, groups: Groups) -> None:
    """Running mean of the loss over training, and the Frechet distance where the script has measured it."""
    pyplot = require_matplotlib()
    figure, (loss_axis, distance_axis) = pyplot.subplots(1, 2, figsize=(8.4, 3.4))
    for number, (name, records) in enumerate(groups.items()):
        for index, record in enumerate(records):
            steps, losses = series([point for point in record["curve"] if "loss" in point], "loss")
            window = max(1, len(losses) // 25)
            means = np.convolve(losses, np.ones(window) / window, mode="valid")
            label = name if index == 0 else None
            loss_axis.plot(steps[window - 1 :], means, color=f"C{number}", label=label, linewidth=1)
            for metric in {key for point in record["curve"] for key in point if key.startswith("frechet_")}:
                points = [point for point in record["curve"] if metric in point]
                distance_axis.plot(*series(points, metric), color=f"C{number}", marker=".")
                distance_axis.set(title=metric.replace("_", " "), xlabel="step", yscale="log")
    loss_axis.set(title="training loss, running mean", xlabel="step", yscale="log")
    loss_axis.legend(fontsize=7)
    for axis in (loss_axis, distance_axis):
        axis.grid(alpha=0.3, which="both")
    save_figure(figure, path)


def save_blocks(path: Path, groups: Groups) -> None:
    """Linear accuracy by block and noise level, one heat map per run, on one scale; means over seeds."""
    grid = next(iter(groups.values()))[0]["blocks"]["grid"]
    if "linear_accuracy" not in grid["cells"]:
        raise UserError("The linear accuracy of the blocks was not measured.")
    maps = {
        name: 100 * np.mean([record["blocks"]["grid"]["cells"]["linear_accuracy"] for record in records], axis=0)
        for name, records in groups.items()
    }
    low, high = min(cells.min() for cells in maps.values()), max(cells.max() for cells in maps.values())
    pyplot = require_matplotlib()
    size = (3.6 * len(maps) + 1, 1.2 + 0.3 * len(grid["blocks"]))
    figure, axes = pyplot.subplots(1, len(maps), figsize=size, squeeze=False, sharey=True)
    for axis, (name, cells) in zip(axes[0], maps.items()):
        draw_heat_map(axis, cells, grid["noise_levels"], low, high)
        axis.set(title=f"{name}: linear accuracy (%)", xlabel="noise level (0 data, 1 noise)")
    axes[0][0].set_yticks(range(len(grid["blocks"])), grid["blocks"], fontsize=7)
    save_figure(figure, path)


def save_samples(path: Path, groups: Groups, output_dir: Path) -> None:
    """The samples that each run drew at its end, from the same noise, side by side."""
    files = {name: output_dir / records[0]["folder"] / "samples.png" for name, records in groups.items()}
    for name, file in files.items():
        if not file.exists():
            raise UserError(f"The samples of the run '{name}' are not in {output_dir}.")
    pictures = {name: Image.open(file) for name, file in files.items()}
    width = sum(picture.width + 12 for picture in pictures.values())
    height = max(picture.height for picture in pictures.values())
    sheet, left = Image.new("RGB", (width, height + 18), "white"), 0
    for name, picture in pictures.items():
        ImageDraw.Draw(sheet).text((left + 4, 3), name, fill="black")
        sheet.paste(picture.convert("RGB"), (left, 18))
        left += picture.width + 12
    sheet.save(path)


def save_rank(path: Path, records: list[dict]) -> None:
    """For each decay: final rank and accuracy against depth; of the shallowest network, rank over training and by stage."""
    pyplot = require_matplotlib()
    figure, axes = pyplot.subplots(1, 4, figsize=(15, 3.4))
    rank_axis, training_axis, stage_axis, accuracy_axis = axes
    shallowest = min(record["results"]["num_blocks"] for record in records)
    for number, decay in enumerate(sorted({record["results"]["shortcut_decay"] for record in records})):
        style = {"marker": ".", "color": f"C{number}", "label": f"{decay:g}"}
        results = [record["results"] for record in records if record["results"]["shortcut_decay"] == decay]
        for axis, metric in ((rank_axis, "effective_rank"), (accuracy_axis, "accuracy")):
            values = defaultdict(list)
            for result in results:
                values[result["num_blocks"]].append(result[metric])
            depths = sorted(values)
            axis.plot(depths, [np.mean(values[depth]) for depth in depths], **style)
            for depth in depths:
                axis.plot([depth] * len(values[depth]), values[depth], ".", color=f"C{number}", markersize=3)
        curves = [
            [point for point in record["curve"] if "effective_rank" in point]
            for record in records
            if (record["results"]["shortcut_decay"], record["results"]["num_blocks"]) == (decay, shallowest)
        ]
        if curves:
            ranks = [series(curve, "effective_rank")[1] for curve in curves]
            training_axis.plot(series(curves[0], "effective_rank")[0], np.mean(ranks, axis=0), **style)
            stages = [name for name in curves[0][-1] if name.startswith("effective_rank_stage")]
            ranks = [[curve[-1][stage] for stage in stages] for curve in curves]
            stage_axis.plot(range(1, len(stages) + 1), np.mean(ranks, axis=0), **style)
    rank_axis.set(title="effective rank at the end", xlabel="blocks")
    accuracy_axis.set(title="accuracy at the end", xlabel="blocks")
    training_axis.set(title=f"effective rank, {shallowest} blocks", xlabel="step")
    stage_axis.set(title=f"effective rank, {shallowest} blocks", xlabel="stage")
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.xaxis.get_major_locator().set_params(integer=True)
    rank_axis.legend(title="shortcut_decay", fontsize=7)
    save_figure(figure, path)


def save_figure(figure, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    require_matplotlib().close(figure)
