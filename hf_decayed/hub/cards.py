"""Model cards, written from the files of a folder: config, `results.json` of the training, evaluations under `results/`.

    hf-decayed evaluate outputs/mae --output outputs/mae/results/cifar100.json
    hf-decayed card outputs/mae --repo_id user/decayed-mae

All numbers come from those files. What only the author can say, such as what the model is good for, is taken from
`about.md`, if there is one.
"""

import math
import re
from pathlib import Path

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError, safe_open

from ..errors import UserError
from ..evaluation.tables import format_metric, protocol_text, rows_tables
from ..kinds import Kind, read_field, read_json, read_model_folder, read_text


TEMPLATE = Path(__file__).with_name("card_template.md")
PLACEHOLDER = "path/or/repository"  # in lines that load the model, until it has a name
STOCK_FOLDER = "stock"  # in a repository: the same network as a class of transformers
MARKER = "<!-- written by `hf-decayed card`, from the files beside it -->"  # cards with it may be overwritten

# Metrics that training scripts write to results.json; a kind may add its own.
TRAINING_METRICS = {
    "loss": "training loss, of the last steps",
    "knn_accuracy": "kNN accuracy on held-out images",
    "knn_accuracy_pixels": "the same of raw pixels",
    "knn_accuracy_untrained": "the same of the untrained network",
    "accuracy": "accuracy on held-out images",
    "accuracy_top5": "accuracy, first five",
    "effective_rank": "effective rank (entropy) of held-out features",
}
CURVES = "curves.png"
# Metrics of samples that a card compares with those of held-out images, in words.
COMPARED_SAMPLE_METRICS = {
    "precision": "fidelity: samples that lie among training images (precision)",
    "recall": "variety: training images that lie among samples (recall)",
}
# Metrics of features that a card compares with those of raw pixels, in words.
COMPARED_METRICS = {
    "knn_accuracy": "nearest neighbours of whole images",
    "linear_accuracy": "linear probe of whole images",
    "knn_whitened_accuracy": "nearest neighbours, whitened features",
    "invariance_accuracy": "the same image in another view",
    "cluster_miou": "unsupervised segmentation by patches",
    "patch_accuracy": "linear probe of a patch's class",
}
# Hub ids of data sets that people have in folders of these names, or that ship with the package.
HUB_DATASETS = {"cifar100": "uoft-cs/cifar100", "fashion_mnist": "zalando-datasets/fashion_mnist"}

METHOD = (
    "Of decayed shortcuts the paper reports that they are not for contrastive training, which needs features of high rank, "
    "and that a decay of 0.4 or less trains unstably."
)
BIAS = "It repeats the biases of its training data, which were not looked into."


def write_card(
    folder: str | Path, repo_id: str | None = None, licence: str | None = None, overwrite: bool = True
) -> Path:
    """Writes `README.md` of a folder; `licence` is that of the weights, by default the one of the present card.

    Without `overwrite`, a card written by hand or by `convert`, which records the origin of the weights, is kept.
    """
    folder = Path(folder)
    path = folder / "README.md"
    if repo_id:
        validate_repo_id(repo_id)
    if not overwrite and path.exists() and MARKER not in read_text(path):
        raise UserError(f"'{path}' was not written by this command: give --overwrite to replace it.")
    card = render_card(folder, repo_id, licence or read_licence(folder))
    path.write_text(str(card).rstrip() + "\n")
    return path


def render_card(folder: Path, repo_id: str | None, licence: str | None) -> ModelCard:
    model = read_model_folder(folder)
    saved_class = model.kind.classes[model.class_name]
    noun, task = saved_class.noun, saved_class.task
    results = read_json(folder / "results.json")
    files, about = sorted((folder / "results").glob("*.json")), folder / "about.md"
    evaluations = [read_evaluation(file, task) for file in files]
    title = f"{noun[0].upper()}{noun[1:]}"
    if model.kind.has_shortcuts:
        title += f", shortcut_decay {model.config['shortcut_decay']:g}"
    data = ModelCardData(
        language=None,
        license=licence,
        library_name=model.kind.library,
        pipeline_tag=task,
        datasets=hub_dataset(results),
        tags=["hf_decayed", "decayed-identity-shortcuts"],
        model_name=repo_id.split("/")[-1] if repo_id else title,
        eval_results=[result for evaluation in evaluations for result in eval_results(evaluation, task)] or None,
    )
    table = training_table(results, model.kind)
    sections = [table] if table else []
    for file, evaluation in zip(files, evaluations):
        sections.append(evaluation_text(evaluation))
        if file.with_suffix(".png").exists():
            caption = "every cell" if "grid" in evaluation else "what and where against depth"
            sections.append(f"![{caption}](results/{file.stem}.png)")
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        title=title,
        marker=MARKER,
        description=f"{'An' if noun[0] in 'aeio' else 'A'} {noun}{trained_on(results)}.",
        shortcuts=shortcuts_text(model.config) if model.kind.has_shortcuts else "",
        about=read_text(about).strip() if about.exists() else "",
        parameters=count_parameters(folder),
        pictures={caption: name for name, caption in model.kind.pictures.items() if (folder / name).exists()},
        curves=CURVES if (folder / CURVES).exists() else "",
        comparison=comparison_table(evaluations) or samples_table(evaluations),
        usage=model.kind.usage(model, repo_id or PLACEHOLDER, results),
        stock=stock_usage(folder, repo_id or PLACEHOLDER),
        training=training_text(results),
        evaluations=sections,
        limits=f"{saved_class.limits} {METHOD} {BIAS}" if model.kind.has_shortcuts else f"{saved_class.limits} {BIAS}",
        paper=model.kind.paper,
        citation=model.kind.citation,
        licence=f"Weights: {licence or 'no licence was given'}. Code: Apache-2.0.",
    )


def shortcuts_text(config: dict) -> str:
    """What the residual blocks compute, in words."""
    decay, form = config["shortcut_decay"], config.get("residual_form", "decay")
    schedule = config.get("shortcut_schedule", "linear")
    curves = {"linear": "linearly", "cosine": "as a cosine", "constant": "", "learned": ""}
    formulas = {"decay": "", "scale_both": "sqrt(0.5) * (x + f(x))", "scale_branch": "x + sqrt(0.5) * f(x)"}
    for name, value, choices in (("residual_form", form, formulas), ("shortcut_schedule", schedule, curves)):
        if not isinstance(value, str) or value not in choices:
            raise UserError(f"`{name}` in 'config.json' must be one of {', '.join(choices)}, got {value!r}.")
    if form != "decay":
        return (
            f"Its residual blocks compute `{formulas[form]}`, an ablation of Zhang et al. (CVPR 2026); no shortcut is "
            "decayed."
        )
    if schedule == "learned":
        how = "with an alpha for each branch that was learned, from 1 on"
    elif decay == 1.0:
        return (
            "Its identity shortcuts are not decayed (`shortcut_decay` 1.0): the counterpart of networks in which they are "
            "(Zhang et al., CVPR 2026)."
        )
    elif schedule == "constant":
        how = f"with alpha {decay:g} everywhere"
    else:
        how = f"with alpha falling {curves[schedule]} with depth, from 1 to {decay:g}"
    scope = {"attention": " past attention", "mlp": " past the MLP"}.get(str(config.get("shortcut_scope")), "")
    return (
        f"Its identity shortcuts are decayed{scope}: residual blocks compute `alpha * x + f(x)`, {how} (Zhang et al., "
        "CVPR 2026)."
    )


def stock_usage(folder: Path, name: str) -> str:
    """How to load the stock model of a folder; empty if there is none."""
    config = read_json(folder / STOCK_FOLDER / "config.json")
    if not config:
        return ""
    loader, class_name = stock_loader(config), config["architectures"][0]
    return (
        f"The folder `{STOCK_FOLDER}` holds the same {'classifier' if 'Classification' in class_name else 'encoder'} as "
        f"transformers' `{class_name}`, with any decay folded into its weights. It needs none of that code:\n\n```python\n"
        f"from transformers import {loader}\n\n"
        f'model = {loader}.from_pretrained("{name}", subfolder="{STOCK_FOLDER}")\n```'
    )


def stock_loader(config: dict) -> str:
    """The Auto class that loads a stock config as the class that it names."""
    name = config["architectures"][0]
    return "AutoModelForImageClassification" if name.endswith("ForImageClassification") else "AutoModel"


def trained_on(results: dict) -> str:
    dataset = read_field(results, "dataset", dict, "results.json", {})
    name = read_field(dataset, "name", str, "results.json", None)
    return f", trained on {name}" if name else ""


def hub_dataset(results: dict) -> str | None:
    """The Hub id of the training data, if it is known."""
    name = str(read_field(results, "dataset", dict, "results.json", {}).get("name", ""))
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return name
    name = "fashion_mnist" if name.startswith(("bundled", "fashion_mnist")) else name
    return HUB_DATASETS.get(name)


def comparison_table(evaluations: list[dict]) -> str:
    """What features of the last layer are better and worse at than raw pixels; empty if nothing was compared."""
    lines = []
    for evaluation in evaluations:
        rows = evaluation["rows"]
        pixels = {
            metric: value for name, row in rows.items() if name.startswith("pixels") for metric, value in row.items()
        }
        for metric in COMPARED_METRICS:
            name = own_row(evaluation, metric)
            if name is not None and metric in pixels:
                own = rows[name][metric]
                verdict = "better" if own > pixels[metric] else "worse"
                cells = [COMPARED_METRICS[metric], format_metric(metric, own), format_metric(metric, pixels[metric])]
                lines.append(f"| {' | '.join([*cells, verdict])} |")
    return "\n".join(["| | this model | raw pixels | |", "|---|---|---|---|", *lines]) if lines else ""


def own_row(evaluation: dict, metric: str | None = None) -> str | None:
    """The row that stands for the model, with this metric if one is named: the best cell of a grid, else the last layer."""
    if best := evaluation.get("best"):
        return best.get(metric) if metric else next(iter(best.values()))
    rows = evaluation["rows"]
    names = [name for name in rows if not name.startswith("pixels") and (metric is None or metric in rows[name])]
    # `last` comes first where it was asked for, and layers by number come in order; the poolings of a layer keep theirs.
    layers = [int(number) if (number := name.split(".")[0]).isdigit() else math.inf for name in names]
    return names[layers.index(max(layers))] if names else None


def samples_table(evaluations: list[dict]) -> str:
    """Samples of a generator beside held-out images, which are as good as samples can be; empty if nothing was compared."""
    for rows in (evaluation["rows"] for evaluation in evaluations):
        held_out = next((row for name, row in rows.items() if name.endswith("held-out images")), None)
        own: dict = next(iter(rows.values()), {})
        if held_out is None or own is held_out:
            continue
        titles = {metric: title for metric, title in COMPARED_SAMPLE_METRICS.items() if metric in held_out}
        distance = next((metric for metric in held_out if metric.startswith("frechet_")), None)
        if distance:
            titles[distance] = "distance to training images (Frechet, less is better)"
        lines = [
            f"| {title} | {format_metric(metric, own[metric])} | {format_metric(metric, held_out[metric])} |"
            for metric, title in titles.items()
        ]
        return "\n".join(["| | samples | held-out images |", "|---|---|---|", *lines])
    return ""


def training_text(results: dict) -> str:
    """Data, length, hardware, seed and command of the training."""
    file = "results.json"
    command = read_field(results, "command", str, file, None)
    if command is None:
        return ""
    dataset = read_field(results, "dataset", dict, file)
    used = read_field(dataset, "used", str, file, None) or f"{dataset.get('number')} images"
    facts = []
    if "images_seen" in results:
        facts = [f"{read_field(results, 'steps', int, file)} steps", f"{results['images_seen']} images seen"]
    seconds, hardware = read_field(results, "seconds", float, file), read_field(results, "hardware", str, file, None)
    facts.append(f"{seconds:.0f} s" + (f" on {hardware}" if hardware else ""))
    name = read_field(dataset, "name", str, file)
    return f"On {name} ({used}): {', '.join(facts)}, seed {results.get('seed')}.\n\n    {command}"


def training_table(results: dict, kind: Kind) -> str:
    """Metrics that the training script measured at the end."""
    names = {**TRAINING_METRICS, **kind.metrics}
    names |= {name: name.replace("_", " ") for name in results if name.startswith("frechet_")}
    values = {name: read_field(results, name, float, "results.json", None) for name in names}
    rows = [
        f"| {text} | {format_metric(name, values[name])} |" for name, text in names.items() if values[name] is not None
    ]
    return "\n".join(["| measured at the end of training | |", "|---|---|", *rows]) if rows else ""


def evaluation_text(evaluation: dict) -> str:
    dataset = evaluation["dataset"]
    number = dataset["number"]
    if isinstance(number, dict):
        splits = {"train": "training", "test": "held-out"}
        number = " and ".join(f"{number[split]} {name}" for split, name in splits.items() if split in number)
    number = f"{number} images"
    rows = evaluation["rows"]
    if evaluation.get("best"):  # of a grid, the best cells and the pixels
        rows = {name: rows[name] for name in dict.fromkeys([*evaluation["best"].values(), "pixels"]) if name in rows}
    return (
        f"{dataset['name']}, {number}; {protocol_text(evaluation['protocol'], rows)}; protocol "
        f"`{evaluation['protocol_hash']}`:\n\n{rows_tables(rows)}\n\n    {evaluation['command']}"
    )


def eval_results(evaluation: dict, task: str) -> list[EvalResult]:
    """Metadata for the Hub's leaderboards: the row that stands for the model."""
    row = own_row(evaluation)
    return [
        EvalResult(
            task_type=task,
            dataset_type=re.sub(r"[^\w./-]+", "-", evaluation["dataset"]["name"]),  # characters that the Hub accepts
            dataset_name=evaluation["dataset"]["name"],
            metric_type="accuracy" if metric.endswith("accuracy") else metric,
            metric_name=f"{metric.replace('_', ' ')}, {row}",
            metric_value=float(f"{value:.4g}"),
        )
        for metric, value in evaluation["rows"].get(row, {}).items()
        # Less is better for a position, which leaderboards would not know.
        if not metric.endswith("_spread") and not metric.startswith("position_")
    ]


def count_parameters(folder: Path) -> str:
    """Parameters of all networks except autoencoders, which others trained, and stock copies."""
    number = 0
    for file in folder.rglob("*.safetensors"):
        if {"vae", "checkpoints", STOCK_FOLDER} & set(file.relative_to(folder).parts):
            continue
        try:
            with safe_open(file, "pt") as weights:
                number += sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())
        except SafetensorError as error:
            raise UserError(f"'{file}' cannot be read: {error}.") from error
    return f"{number / 1e6:.1f} million"


def read_licence(folder: Path) -> str | None:
    """The licence of the weights, from the card of a folder."""
    card = folder / "README.md"
    try:
        return ModelCard.load(card).data.license if card.is_file() else None
    except (ValueError, yaml.YAMLError):
        return None


def read_evaluation(path: Path, task: str) -> dict:
    content = read_json(path)
    try:
        evaluation_text(content)
        eval_results(content, task)
    except (KeyError, TypeError, AttributeError, StopIteration, ValueError) as error:
        raise UserError(
            f"'{path}' was not written by `hf-decayed evaluate` ({error!r}): move it out of the folder."
        ) from error
    return content
