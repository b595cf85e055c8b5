"""`hf-decayed report`: what the shortcuts of an encoder do, by depth; numbers, tables and a picture.

>>> report = report_encoder(model, processor, load_image_splits("bundled").take(1000, 500))
>>> report["additions"]  # alpha, norms of the stream and of the branch, for every residual addition
>>> report["rows"]       # rank, kNN, cluster mIoU and position accuracy, for every hidden state
"""

import json
import math
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from transformers import AutoImageProcessor, AutoModel

from ..command_line import set_cpu_threads
from ..data.datasets import EvaluationDataset
from ..data.sources import ImageSplits, load_image_splits, take_subset
from ..decay.carrier import decayed_stacks
from ..decay.shortcuts import decay_shortcuts
from ..errors import DataError, UserError, explain_loading_errors, format_error
from ..provenance import model_fingerprint, sanitized_command, versions
from .arguments import model_kind
from .branch_norms import find_shortcuts, measure_additions
from .dense import DENSE_METRICS, DenseMetrics, evaluate_dense, pixel_patches
from .encoders import FeatureMetrics, FeatureSource, encoder_source, evaluate_features
from .features import Extraction, dense_features, patch_grid, unmasked_inputs
from .segmentation import require_sklearn
from .tables import format_metric, protocol_text


# Metrics of the table and the picture, in this order; report.json has all of them.
SHOWN_METRICS = (
    "effective_rank",
    "knn_accuracy",
    "knn_whitened_accuracy",
    "cluster_miou",
    "patch_accuracy",
    "position_accuracy",
)
NORMS_TEXT = (
    "norms: of a token, mean over tokens and held-out images; the branch is all that is added to alpha times the stream, "
    "layer scale included; the ratio is branch over alpha times stream"
)


class DepthMetrics(FeatureMetrics):
    """Metrics of features; high-dimensional ones are not whitened: a small bank cannot tell their covariance."""

    def compute(self, train, train_labels, test, test_labels, other_views=None) -> dict[str, float]:
        names = [name for name in self.names if name != "knn_whitened" or len(train) >= 2 * train.shape[1]]
        return FeatureMetrics.compute(replace(self, names=names), train, train_labels, test, test_labels, other_views)


def report_encoder(
    model: nn.Module,
    processor,
    splits: ImageSplits,
    dense_images: int = 100,
    num_clusters: int = 27,
    seed: int = 0,
    pooling: str = "mean",
    extraction: Extraction | None = None,
    accelerator: Accelerator | None = None,
) -> dict:
    """What the shortcuts of an encoder do: `additions`, `effective_decay`, `rows` by depth, `notes` on what is left out.

    Args:
        model (`nn.Module`): Vision encoder of transformers or of this package, as it is or after `decay_shortcuts`.
        splits (`ImageSplits`): Training images are the bank of kNN. Without labels or masks their metrics are left out.
        dense_images (`int`): Images whose norms are measured, and images per split whose patches are evaluated.
        pooling (`str`): `mean` over tokens, `patch_mean` or `cls`. Not the model's own, because reports are compared, and
            because a class token is constant after the embedding.
    """
    extraction, accelerator = extraction or Extraction(), accelerator or Accelerator()
    fingerprint = model_fingerprint(model)  # before `unmasked_inputs` sets the mask ratio of ViTMAE
    model.to(accelerator.device).eval()
    images = EvaluationDataset(
        take_subset(splits.held_out, dense_images),
        splits.image_column,
        splits.label_column,
        processor,
        getattr(model.config, "num_channels", 3),
        extraction.on_bad_image,
    )
    num_states, has_patches = describe_hidden_states(model, images, accelerator)
    shortcuts, notes, additions = find_shortcuts(model), [], []
    if shortcuts is None:
        notes.append(
            f"Alphas and norms of branches are left out: {type(model).__name__} is not one stack of blocks of a family that "
            "`decay_shortcuts` knows."
        )
    else:
        additions = measure_additions(model, shortcuts, images, accelerator, extraction.batch_size)
    identity = {"model": fingerprint}
    settings = extraction, accelerator
    results = evaluate_features(
        depth_source(model, processor, num_states, pooling, identity, accelerator),
        splits,
        pooled_metrics(splits, seed, notes),
        *settings,
    )
    if has_patches:
        dense = evaluate_dense(
            depth_source(model, processor, num_states, "patches", identity, accelerator),
            splits,
            dense_metrics(splits, dense_images, num_clusters, seed, notes),
            *settings,
            pixel_patches(model.config),
        )
        results["protocol"] = {**dense["protocol"], **results["protocol"]}
        results["dense_dataset"] = dense["dataset"]
        for name, row in dense["rows"].items():
            layer = name.removesuffix(".patches")
            results["rows"][layer if layer == "pixels" else f"{layer}.{pooling}"].update(row)
    else:
        notes.append("What and where are left out: the hidden states are not on one grid of patches at all depths.")
    rows = {name.removesuffix(f".{pooling}"): row for name, row in results.pop("rows").items()}
    if "knn_accuracy" in rows["0"] and not all("knn_whitened_accuracy" in rows[str(n)] for n in range(num_states)):
        notes.append(
            "Whitened kNN is left out where the bank has fewer than two images for every dimension of the features: use more "
            "--max_train_samples."
        )
    return {
        "model_class": type(model).__name__,
        "pooling": pooling,
        # Hidden states of Swin and similar models are those of stages, which have several layers.
        "depth_unit": "stage" if additions and additions[-1]["layer"] != num_states - 1 else "layer",
        "effective_decay": shortcuts.effective_decay() if shortcuts else None,
        "additions": additions,
        "rows": rows,
        "notes": notes,
        **results,
    }


@torch.no_grad()
def describe_hidden_states(model: nn.Module, images: EvaluationDataset, accelerator: Accelerator) -> tuple[int, bool]:
    """Number of hidden states that a model returns, and whether all of them are on one grid of patches."""
    batches = (images.__getitems__([index]) for index in range(len(images)))
    pixel_values = next((batch["pixel_values"] for batch in batches if "pixel_values" in batch), None)
    if pixel_values is None:
        raise DataError("None of the held-out images could be decoded.")
    pixel_values = pixel_values.to(accelerator.device)
    states = model(pixel_values, output_hidden_states=True, **unmasked_inputs(model, pixel_values)).hidden_states
    if not states:
        raise UserError(f"{type(model).__name__} returns no hidden states: there is nothing to report by depth.")
    try:
        grids = {dense_features(state, patch_grid(model.config, pixel_values)).shape[1:3] for state in states}
    except ValueError:
        return len(states), False
    return len(states), len(grids) == 1 and math.prod(*grids) > 1


def depth_source(
    model: nn.Module, processor, num_states: int, pooling: str, identity: dict, accelerator: Accelerator
) -> FeatureSource:
    names = [f"{layer}.{pooling}" for layer in range(num_states)]
    source = encoder_source(model, processor, names, accelerator.device)
    return replace(source, identity={**source.identity, **identity})


def pooled_metrics(splits: ImageSplits, seed: int, notes: list[str]) -> FeatureMetrics:
    """Rank, and kNN if there are labels; what is left out is added to the notes."""
    if splits.label_column is None:
        notes.append("kNN is left out: the data has no label column.")
        return DepthMetrics(("rank",), seed=seed)
    return DepthMetrics(("knn", "knn_whitened", "rank"), k=min(20, len(splits.train)), seed=seed)


def dense_metrics(
    splits: ImageSplits, dense_images: int, num_clusters: int, seed: int, notes: list[str]
) -> DenseMetrics:
    """Position, and segmentation if there are masks and scikit-learn; what is left out is added to the notes."""
    names = DENSE_METRICS
    if splits.mask_column is None:
        notes.append("Cluster mIoU is left out: the data has no masks.")
        names = ("where",)
    else:
        try:
            require_sklearn()
        except UserError as error:
            notes.append(f"Cluster mIoU is left out: {format_error(error)}")
            names = ("where",)
    return DenseMetrics(names, num_clusters, max_images=dense_images, seed=seed)


def write_report(
    model: str,
    output: str | Path | None = None,
    data: dict | None = None,
    shortcut_decay: float | str | None = None,
    keep_function: bool = False,
    max_train_samples: int = 1000,
    max_eval_samples: int = 500,
    dense_images: int = 100,
    num_clusters: int = 27,
    seed: int = 0,
    pooling: str = "mean",
    extraction: Extraction | None = None,
    cpu_threads: int | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    command_words: list[str] | None = None,
) -> str:
    """Writes report.json, report.md and report.png to `output`; returns the tables and what they say.

    Args:
        model (`str`): Folder or repository of a vision encoder.
        output (`str` or `Path`, *optional*): Folder; by default `outputs/report/<name of the model>`.
        data (`dict`, *optional*): Arguments of [`load_image_splits`]; by default the bundled images.
        pooling (`str`): See [`report_encoder`].
        shortcut_decay (`float` or `"auto"`, *optional*): For a stock model: reports on it with this decay, without
            training.
        keep_function (`bool`): Applies the decay in the form that keeps the stock model's outputs.
        command_words (`list[str]`, *optional*): The command that report.json records; by default that of this process.
    """
    started = time.time()
    if keep_function and shortcut_decay is None:
        raise UserError("--keep_function says how a stock model is decayed: it needs --shortcut_decay.")
    accelerator = Accelerator(cpu=not torch.accelerator.is_available())
    set_cpu_threads(accelerator, cpu_threads)
    network, processor = load_encoder(model, revision, trust_remote_code)
    notes = []
    if shortcut_decay is not None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            decay_shortcuts(network, shortcut_decay, keep_function=keep_function)
        notes = [str(warning.message) for warning in caught]
    splits = load_image_splits(**(data or {})).take(max_train_samples, max_eval_samples)
    results = report_encoder(
        network, processor, splits, dense_images, num_clusters, seed, pooling, extraction, accelerator
    )
    name = Path(model).name if Path(model).exists() else model
    report = {
        "model": name,
        "shortcut_decay": applied_decay(network),
        "keep_function": keep_function,
        **results,
        "notes": notes + results["notes"],
        "seconds": round(time.time() - started, 1),
        "command": " ".join(["hf-decayed", *sanitized_command(command_words)]),
        "versions": versions(),
    }
    folder = Path(output) if output else Path("outputs/report") / Path(model).name
    return save_report_files(folder, report)


def load_encoder(model: str, revision: str | None = None, trust_remote_code: bool = False):
    """A vision encoder and its image processor; for CLIP and similar models the vision tower. Others are refused."""
    kind = model_kind(model, revision)
    if kind == "pipeline":
        raise UserError(
            f"'{model}' is a pipeline that generates images: `hf-decayed evaluate {model} --metrics knn,rank` measures the "
            "features of its blocks."
        )
    if kind == "samples":
        raise UserError(f"'{model}' has no config.json: it is not the folder of an encoder.")
    origin = {"revision": revision, "trust_remote_code": trust_remote_code}
    with explain_loading_errors(model):
        network = AutoModel.from_pretrained(model, dtype=torch.float32, **origin)
    network = getattr(network, "vision_model", network)
    if network.main_input_name != "pixel_values":
        raise UserError(
            f"'{model}' is a {type(network).__name__}, which takes {network.main_input_name}: a report needs an encoder of "
            "images."
        )
    try:
        return network, AutoImageProcessor.from_pretrained(model, **origin)
    except OSError as error:
        raise UserError(
            f"'{model}' has no preprocessor_config.json, which says how images are prepared for it."
        ) from error


def applied_decay(model: nn.Module) -> float | str | None:
    """The decay of a model, from `decay_shortcuts` or from its config; `None` for a stock model."""
    decayed = decayed_stacks(model)
    if decayed:
        return decayed[0][1].shortcut_decay
    return getattr(model.config, "shortcut_decay", None)


def save_report_files(folder: Path, report: dict) -> str:
    """Writes the three files; returns the text for the terminal."""
    from ..plots import save_shortcut_report

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    tables, sentences = report_tables(report), describe_report(report)
    files = "report.json, report.md"
    try:
        save_shortcut_report(folder / "report.png", report)
        picture, files = "![by depth](report.png)", f"{files}, report.png"
    except UserError as error:  # matplotlib is missing; the numbers are written
        picture, files = "", f"{files}; no picture: {format_error(error)}"
    texts = [
        f"{report['depth_unit']}s: hidden states, before a final norm",
        protocol_text(report["protocol"], report["rows"]),
    ]
    protocol = "; ".join([*texts, NORMS_TEXT] if report["additions"] else texts)
    parts = [f"# Shortcuts of {report['model']}", picture, sentences, tables, protocol, f"`{report['command']}`"]
    (folder / "report.md").write_text("\n\n".join(part for part in parts if part) + "\n")
    return "\n\n".join([tables, sentences, f"{folder}: {files}, {report['seconds']:.0f} s"])


def report_tables(report: dict) -> str:
    """Two tables: residual additions, and features by depth."""
    tables = [additions_table(report["additions"])] if report["additions"] else []
    rows, unit = report["rows"], report["depth_unit"]
    columns = [metric for metric in SHOWN_METRICS if any(metric in row for row in rows.values())]
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (1 + len(columns)) + "|"]
    for name, row in rows.items():
        cells = [
            format_metric(metric, row[metric], row.get(f"{metric}_spread")) if metric in row else "-"
            for metric in columns
        ]
        lines.append(f"| {f'{unit} {name}' if name.isdecimal() else name} | " + " | ".join(cells) + " |")
    return "\n\n".join([*tables, "\n".join(lines)])


def additions_table(additions: list[dict]) -> str:
    lines = [
        "| addition | alpha | running product | stream norm | branch norm | branch / (alpha * stream) |",
        "|---" * 6 + "|",
    ]
    for row in additions:
        numbers = [f"{row['alpha']:.4f}", *(format_number(row[name]) for name in list(row)[3:])]
        lines.append(f"| layer {row['layer']} {row['branch']} | " + " | ".join(numbers) + " |")
    return "\n".join(lines)


def format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def describe_report(report: dict) -> str:
    """Describes the numbers, with one sentence for each kind, and adds the notes."""
    return "\n".join([*additions_sentences(report), *depth_sentences(report), *report["notes"]])


def additions_sentences(report: dict) -> Iterator[str]:
    additions = report["additions"]
    if not additions:
        return
    if all(row["alpha"] == 1 for row in additions):
        yield "No shortcut is decayed: every alpha is 1."
    else:
        yield f"Effective decay, the product of all alphas: {report['effective_decay']:.2g}."
    last = [row for row in additions if row["layer"] == additions[-1]["layer"] and row["ratio"] is not None]
    if last:
        ratios = " and ".join(f"{format_number(row['ratio'])} ({row['branch']})" for row in last)
        yield f"In the last layer the branches have {ratios} times the norm of their weighted shortcut."


def depth_sentences(report: dict) -> Iterator[str]:
    layers = {int(name): row for name, row in report["rows"].items() if name.isdecimal()}
    last, unit = max(layers), report["depth_unit"]
    if "knn_accuracy" in layers[0]:
        best = max(layers, key=lambda layer: layers[layer]["knn_accuracy"])
        at_best, at_last = (layers[layer]["knn_accuracy"] for layer in (best, last))
        number = report["dataset"]["number"]["test"]
        error = math.sqrt(at_best * (1 - at_best) / number)
        yield (
            f"kNN accuracy is highest at {unit} {best} of {last}, {100 * at_best:.1f} %, and {100 * at_last:.1f} % at the last "
            f"(standard error {100 * error:.1f}, {number} images)."
        )
    ranks = [layers[layer]["effective_rank"] for layer in (0, last)]
    yield (
        f"The effective rank of features (pooling: {report['pooling']}) is {ranks[0]:.2f} after the embedding and "
        f"{ranks[1]:.2f} at the last {unit}."
    )
    for metric, text in (
        ("cluster_miou", "Clusters of patches match the masks with an mIoU of {:.1f} %"),
        ("position_accuracy", "A linear probe tells the position of {:.1f} % of the patches"),
    ):
        if metric in layers[0]:
            first, end = (100 * layers[layer][metric] for layer in (0, last))
            yield f"{text.format(first)} after the embedding and {end:.1f} % at the last {unit}."
