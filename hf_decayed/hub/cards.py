"""The card of a model, made of what lies in its folder: config, `results.json` of its training, evaluations under `results/`.

    python training/evaluate.py outputs/mae --output outputs/mae/results/cifar100.json
    hf-decayed card outputs/mae --repo_id user/decayed-mae

Numbers come from those files and from nowhere else. What only its maker can say, what the model is good for, goes into the
card from `about.md`, if there is one.
"""

import json
import math
import re
from pathlib import Path

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError, safe_open

from ..evaluation.tables import format_metric, markdown_table, protocol_text


TEMPLATE = Path(__file__).with_name("card_template.md")


PLACEHOLDER = "path/or/repository"  # in lines that load the model, as long as it has no name


MARKER = "<!-- written by `hf-decayed card`, from the files beside it -->"  # of cards that may be written anew


# Class in the config -> what it is, library, task.
KINDS = {
    "DecayedViTMAEForPreTraining": ("masked autoencoder", "transformers", "image-feature-extraction"),
    "DecayedViTMAEModel": ("encoder of a masked autoencoder", "transformers", "image-feature-extraction"),
    "DecayedViTMAEForImageClassification": ("image classifier", "transformers", "image-classification"),
    "DecayedResNetForImageClassification": ("residual image classifier", "transformers", "image-classification"),
    "DecayedUViTPipeline": ("U-ViT that generates images", "diffusers", "unconditional-image-generation"),
    "DecayedSiTPipeline": ("SiT that generates images", "diffusers", "unconditional-image-generation"),
}


# Figures that the training scripts write themselves.
TRAINING_METRICS = {
    "loss": "training loss, of the last steps",
    "knn_accuracy": "kNN accuracy on held-out images",
    "knn_accuracy_pixels": "the same of raw pixels",
    "knn_accuracy_untrained": "the same of the untrained network",
    "accuracy": "accuracy on held-out images",
    "accuracy_top5": "accuracy, first five",
    "effective_rank": "effective rank (entropy) of held-out features",
}


# Of them the card shows those that are there.
PICTURES = {
    "samples.png": "samples",
    "reconstructions.png": "images, what the encoder sees of them, and what is made of that",
    "curves.png": "over training",
}


LIMITS = {
    "image-feature-extraction": "Features for nearest neighbours, probes and fine-tuning of images like those it was trained "
    "on; nothing else was tried.",
    "image-classification": "It knows the classes and the kind of images that it was trained on; confident answers about "
    "other images mean nothing.",
    "unconditional-image-generation": "It draws images like those it was trained on, as well as the figures of this card say "
    "and no better. It may reproduce training images closely; do not take its images for photographs of anything.",
}


METHOD = (
    "Of decayed shortcuts the paper reports that they are not for contrastive training, which needs features of high rank, "
    "and that a decay of 0.4 or less trains unstably."
)


BIAS = "It repeats the biases of its training data, which were not looked into."


def write_card(
    folder: str | Path, repo_id: str | None = None, licence: str | None = None, overwrite: bool = True
) -> Path:
    """Writes `README.md` of a folder; `licence` is that of the weights, kept from an earlier card when not given.

    Without `overwrite` a card that was written by hand, or by a conversion, which says whose the weights are, stays.
    """
    folder = Path(folder)
    path = folder / "README.md"
    if repo_id:
        validate_repo_id(repo_id)
    if not overwrite and path.exists() and MARKER not in path.read_text():
        raise ValueError(f"'{path}' was not written by this command: give --overwrite if it may go.")
    card = render_card(folder, repo_id, licence or read_licence(folder))
    path.write_text(str(card).rstrip() + "\n")
    return path


def render_card(folder: Path, repo_id: str | None, licence: str | None) -> ModelCard:
    kind, config, index = describe(folder)
    noun, library, task = KINDS[kind]
    decay = config["shortcut_decay"]
    results = read_json(folder / "results.json")
    files, about = sorted((folder / "results").glob("*.json")), folder / "about.md"
    evaluations = [read_evaluation(file) for file in files]
    name = repo_id or PLACEHOLDER
    title = f"{noun[0].upper()}{noun[1:]}, shortcut_decay {decay:g}"
    data = ModelCardData(
        language=None,
        license=licence,
        library_name=library,
        pipeline_tag=task,
        tags=["hf_decayed", "decayed-identity-shortcuts"],
        model_name=repo_id.split("/")[-1] if repo_id else title,
        eval_results=card_metadata(evaluations, task) or None,
    )
    figures = [training_table(results)] if training_table(results) else []
    for file, evaluation in zip(files, evaluations):
        figures.append(evaluation_text(evaluation))
        if file.with_suffix(".png").exists():
            figures.append(f"![every cell](results/{file.stem}.png)")
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        title=title,
        mark=MARKER,
        description=f"{'An' if noun[0] in 'aeio' else 'A'} {noun}{trained_on(results)}.",
        shortcuts=shortcuts_text(config),
        about=about.read_text().strip() if about.exists() else "",
        parameters=count_parameters(folder),
        pictures={text: name for name, text in PICTURES.items() if (folder / name).exists()},
        usage=usage(kind, config, index, name, results),
        training=training_text(results),
        evaluations=figures,
        limits=f"{LIMITS[task]} {METHOD} {BIAS}",
        licence=f"Weights: {licence or 'no licence was given'}. Code: Apache-2.0.",
    )


def describe(folder: Path) -> tuple[str, dict, dict]:
    """The class, the config of the network, and a pipeline's index."""
    index = read_json(folder / "model_index.json")
    if index:
        kind = index["_class_name"][-1] if isinstance(index["_class_name"], list) else index["_class_name"]
        config = read_json(folder / ("unet" if "unet" in index else "transformer") / "config.json")
    else:
        config = read_json(folder / "config.json")
        kind = (config.get("architectures") or ["nothing"])[0]
    if kind not in KINDS or "shortcut_decay" not in config:
        raise ValueError(f"'{folder}' holds no model or pipeline of ours ({kind}), so there is no card to make.")
    return kind, config, index


def shortcuts_text(config: dict) -> str:
    """What happens on the way past the branches, in words."""
    decay, form = config["shortcut_decay"], config.get("residual_form", "decay")
    if form != "decay":
        factors = {"scale_both": "sqrt(0.5) * (x + f(x))", "scale_branch": "x + sqrt(0.5) * f(x)"}[form]
        return f"Its residual blocks compute `{factors}`, an ablation of Zhang et al. (CVPR 2026); no shortcut is decayed."
    if config.get("shortcut_schedule") == "learned":
        how = "with an alpha for each branch that was learned, from 1 on"
    elif decay == 1.0:
        return (
            "Its identity shortcuts are not decayed (`shortcut_decay` 1.0): the counterpart of networks in which they are "
            "(Zhang et al., CVPR 2026)."
        )
    elif config.get("shortcut_schedule") == "constant":
        how = f"with alpha {decay:g} everywhere"
    else:
        curve = {"linear": "linearly", "cosine": "as a cosine"}[config.get("shortcut_schedule", "linear")]
        how = f"with alpha falling {curve} with depth, from 1 to {decay:g}"
    scope = {"attention": " past attention", "mlp": " past the MLP"}.get(config.get("shortcut_scope"), "")
    return (
        f"Its identity shortcuts are decayed{scope}: residual blocks compute `alpha * x + f(x)`, {how} (Zhang et al., "
        "CVPR 2026)."
    )


def usage(kind: str, config: dict, index: dict, name: str, results: dict) -> str:
    """Three lines, and what they import."""
    if kind.endswith("Pipeline"):
        sampling = results.get("sampling", {"steps": 50, "guidance_scale": 1.0})
        names = list((index.get("id2label") or {}).values())
        wanted = f"[{names[0]!r}]" if names else "[0]" if config.get("num_classes") else ""
        guidance = (
            f", guidance_scale={sampling['guidance_scale']}" if wanted and sampling["guidance_scale"] != 1 else ""
        )
        arguments = f"{wanted}{guidance}{', ' if wanted else ''}num_inference_steps={sampling['steps']}"
        return (
            "from diffusers import DiffusionPipeline\n\n"
            f'pipeline = DiffusionPipeline.from_pretrained("{name}", trust_remote_code=True)  # pin `revision`\n'
            f"image = pipeline({arguments}).images[0]"
        )
    grey = config.get("num_channels") == 1
    imports = f"{'import numpy as np' + chr(10) if grey else ''}from PIL import Image\n"
    # The processor wants an axis of channels, which grey images lack.
    pixels = 'pixels = np.asarray(image.convert("L"))[..., None]\n' if grey else ""
    image = 'pixels, input_data_format="channels_last"' if grey else "image"
    colours = "" if grey else '.convert("RGB")'
    auto, output = (
        ("AutoModelForImageClassification", "logits") if "Classification" in kind else ("AutoModel", "pooler_output")
    )
    return (
        f"{imports}from transformers import AutoImageProcessor, {auto}\n\n"
        f'image = Image.open("picture.png"){colours}\n'
        f'processor = AutoImageProcessor.from_pretrained("{name}")\n'
        f'model = {auto}.from_pretrained("{name}", trust_remote_code=True)  # pin `revision`\n'
        f'{pixels}{output} = model(**processor({image}, return_tensors="pt")).{output}'
    )


def trained_on(results: dict) -> str:
    dataset = results.get("dataset") or {}
    return f", trained on {dataset['name']}" if dataset.get("name") else ""


def training_text(results: dict) -> str:
    if "command" not in results:
        return ""
    used = results["dataset"].get("used") or f"{results['dataset'].get('number')} images"
    facts = [f"{results['steps']} steps", f"{results['images_seen']} images seen"] if "images_seen" in results else []
    facts += [f"{results['seconds']:.0f} s" + (f" on {results['hardware']}" if "hardware" in results else "")]
    return f"On {results['dataset']['name']} ({used}): {', '.join(facts)}, seed {results.get('seed')}.\n\n    {results['command']}"


def training_table(results: dict) -> str:
    """What the training script measured at its end."""
    names = {**TRAINING_METRICS, **{name: name.replace("_", " ") for name in results if name.startswith("frechet_")}}
    rows = [
        f"| {text} | {format_metric(name, results[name])} |"
        for name, text in names.items()
        if results.get(name) is not None
    ]
    return "\n".join(["| measured at the end of training | |", "|---|---|", *rows]) if rows else ""


def evaluation_text(evaluation: dict) -> str:
    dataset = evaluation["dataset"]
    number = dataset["number"]
    number = (
        f"{number['train']} training and {number['test']} held-out images"
        if isinstance(number, dict)
        else f"{number} images"
    )
    rows = evaluation["rows"]
    if evaluation.get("best"):  # of a grid only what counts
        rows = {name: rows[name] for name in dict.fromkeys([*evaluation["best"].values(), "pixels"]) if name in rows}
    return (
        f"{dataset['name']}, {number}; {protocol_text(evaluation['protocol'], rows)}; protocol "
        f"`{evaluation['protocol_hash']}`:\n\n{markdown_table(rows)}\n\n    {evaluation['command']}"
    )


def card_metadata(evaluations: list[dict], task: str) -> list[EvalResult]:
    """For the Hub's leaderboards: the first row that is the model's own, of every evaluation."""
    found = []
    for evaluation in evaluations:
        own = [row for row in evaluation["rows"] if row != "pixels"]
        row = next(iter(evaluation["best"].values())) if evaluation.get("best") else own[0] if own else None
        for metric, value in evaluation["rows"].get(row, {}).items():
            if metric.endswith("_spread"):
                continue
            found.append(
                EvalResult(
                    task_type=task,
                    dataset_type=re.sub(r"[^\w./-]+", "-", evaluation["dataset"]["name"]),  # as the Hub takes it
                    dataset_name=evaluation["dataset"]["name"],
                    metric_type="accuracy" if metric.endswith("accuracy") else metric,
                    metric_name=f"{metric.replace('_', ' ')}, {row}",
                    metric_value=float(f"{value:.4g}"),
                )
            )
    return found


def count_parameters(folder: Path) -> str:
    """Of all networks but autoencoders, which others trained."""
    number = 0
    for file in folder.rglob("*.safetensors"):
        if {"vae", "checkpoints"} & set(file.relative_to(folder).parts):
            continue
        try:
            with safe_open(file, "pt") as weights:
                number += sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())
        except SafetensorError as error:
            raise ValueError(f"'{file}' cannot be read: {error}.") from error
    return f"{number / 1e6:.1f} million"


def read_licence(folder: Path) -> str | None:
    """The licence that a folder's own card gives its weights."""
    card = folder / "README.md"
    try:
        return ModelCard.load(card).data.license if card.is_file() else None
    except (ValueError, yaml.YAMLError):
        return None


def read_json(path: Path) -> dict:
    """A file of JSON, or nothing where there is none."""
    try:
        content = json.loads(path.read_text()) if path.exists() else {}
    except json.JSONDecodeError as error:
        raise ValueError(f"'{path.name}' is not JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"'{path.name}' holds no fields, but {type(content).__name__}.")
    return content


def read_evaluation(path: Path) -> dict:
    content = read_json(path)
    try:
        evaluation_text(content)
    except (KeyError, TypeError, AttributeError, StopIteration) as error:
        raise ValueError(
            f"'{path}' is nothing that training/evaluate.py wrote ({error!r}): move it elsewhere."
        ) from error
    return content
