"""Other people's checkpoints -> ours, exactly, and the plain preset back to transformers' ViTMAE."""

import argparse
import dataclasses
import hashlib
import json
import math
import os
import pickle
import re
import shutil
import tempfile
from pathlib import Path

import torch
from huggingface_hub import ModelCard
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel, ViTMAEConfig, ViTMAEForPreTraining, ViTMAEModel

from ..command_line import check_fields
from ..models.configuration_decayed_vit_mae import PLAIN, DecayedViTMAEConfig, as_pair
from ..models.modeling_decayed_vit_mae import (
    VIT_MAE_KEY_MAPPING,
    DecayedViTMAEForImageClassification,
    DecayedViTMAEForPreTraining,
    DecayedViTMAEModel,
)
from .cards import read_licence
from .conversion_diffusion import DIFFUSION_KINDS, diffusion_fields, from_diffusion


# What each kind of checkpoint is, and under which licence its weights came into the world.
KINDS = {
    "released-mae": ("the authors' decayed MAE (xiao7199/decayed_Identity_shortcuts)", "cc-by-nc-4.0"),
    "fb-mae": ("facebookresearch/mae, pretraining or fine-tuning", "cc-by-nc-4.0"),
    "vit-mae": ("a folder of transformers' ViTMAE, old or new names", None),
    "decayed-mae": ("a folder of this package at the plain preset; becomes transformers' ViTMAE", None),
    **DIFFUSION_KINDS,
}


# timm's names, which both MAE code bases use -> ours. Fused matrices are split afterwards.
TIMM_NAMES = {
    r"^cls_token$": "vit.embeddings.cls_token",
    r"^pos_embed$": "vit.embeddings.position_embeddings",
    r"^patch_embed\.proj\.": "vit.embeddings.patch_embeddings.projection.",
    r"^blocks\.": "vit.layers.",
    r"^norm\.": "vit.layernorm.",
    r"^decoder_blocks\.": "decoder.decoder_layers.",
    r"^(mask_token$|decoder_)": r"decoder.\1",
    r"^skip\.": "decoder.skips.",
    r"^head\.": "classifier.",
    r"\.norm1\.": ".layernorm_before.",
    r"\.norm2\.": ".layernorm_after.",
    r"\.attn\.": ".attention.",
    r"\.attention\.proj\.": ".attention.o_proj.",
}


# Shapes do not tell the number of heads; these are the ones of the published widths.
HEADS_BY_WIDTH = {384: 6, 768: 12, 1024: 16, 1280: 16}


DECODER_HEADS_BY_WIDTH = {512: 16}


class ConversionError(ValueError):
    """A checkpoint that cannot become a model, with the reason and, where keys are at fault, all of them."""


def convert(kind: str, checkpoint: str | Path, output: str | Path, fields: dict | None = None) -> str:
    """Converts `checkpoint` into the new folder `output` and returns a summary of what was done.

    Args:
        kind (`str`): One of `KINDS`.
        checkpoint (`str` or `Path`): A file (`.pth`, `.safetensors`) for the MAE code bases, a folder for the others.
        output (`str` or `Path`): Folder to make. It must not exist yet, or be empty.
        fields (`dict`, *optional*): Config fields that shapes cannot tell, such as `shortcut_decay`.
    """
    checkpoint, output, fields = Path(checkpoint), Path(output), dict(fields or {})
    if kind not in KINDS:
        raise ConversionError(f"`kind` must be one of {sorted(KINDS)}, got {kind!r}.")
    if not checkpoint.exists():
        raise ConversionError(f"No checkpoint at '{checkpoint}'.")
    if output.exists() and (output.is_file() or any(output.iterdir())):
        raise ConversionError(f"The output '{output}' exists already; name a new folder.")
    known = {field.name for field in dataclasses.fields(DecayedViTMAEConfig)} | {"num_labels", "id2label", "label2id"}
    if kind in DIFFUSION_KINDS:
        known = diffusion_fields(kind)
    try:
        check_fields(fields, known)
    except ValueError as error:
        raise ConversionError(str(error)) from error

    notes = []
    if kind == "decayed-mae":
        if fields:
            raise ConversionError(f"Fields cannot be set on the way back to ViTMAE, got {sorted(fields)}.")
        model = to_vit_mae(load_decayed(checkpoint))
    elif kind == "vit-mae":
        model = from_vit_mae(checkpoint, fields)
    elif kind in DIFFUSION_KINDS:
        # SiT's training keeps an average of the weights, which is what it samples from.
        weights, _ = read_weights(checkpoint, wrappers=("ema", "model", "state_dict"))
        try:
            model, notes = from_diffusion(kind, weights, fields, load_weights)
        except ConversionError:
            raise
        except ValueError as error:
            raise ConversionError(str(error)) from error
    else:
        model, notes = from_timm_names(kind, *read_weights(checkpoint), fields)
    if fields:
        notes.append("Set by hand: " + ", ".join(f"{name}={value!r}" for name, value in fields.items()) + ".")

    licence = KINDS[kind][1] or read_licence(checkpoint) or "unknown"
    card = model_card(kind, checkpoint, model, licence, notes)
    processor = checkpoint / "preprocessor_config.json"
    # Written beside the target and renamed: a folder named `output` is a finished one.
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        model.save_pretrained(temporary)
        if processor.is_file():  # weights go with the pixels they were trained on
            shutil.copy(processor, temporary)
        card.save(temporary / "README.md")
        temporary.chmod(0o755)
        os.replace(temporary, output)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return "\n".join([f"{type(model).__name__} written to {output}", f"Licence of the weights: {licence}.", *notes])


def read_weights(path: Path, wrappers=("model", "state_dict")) -> tuple[dict[str, torch.Tensor], dict]:
    """State dict of a checkpoint file, under one of `wrappers` or as a whole, and the training arguments if it has them."""
    if path.is_dir():
        raise ConversionError(f"'{path}' is a folder; this kind of checkpoint is one file.")
    try:
        if path.suffix == ".safetensors":
            return load_file(path), {}
        # MAE's training scripts store their arguments beside the weights; nothing else but tensors is let in.
        with torch.serialization.safe_globals([argparse.Namespace]):
            contents = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        refused = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"it names {refused[1]}" if refused else (str(error).splitlines() or [type(error).__name__])[0]
        raise ConversionError(
            f"'{path.name}' is damaged, or holds Python objects, which are not loaded: {reason}"
        ) from error
    weights = contents if isinstance(contents, dict) else {}
    for wrapper in wrappers:
        weights = weights[wrapper] if isinstance(weights.get(wrapper), dict) else weights
    if not weights or not all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in weights.items()):
        raise ConversionError(
            f"'{path.name}' holds no state dict, neither as a whole nor under {' or '.join(map(repr, wrappers))}."
        )
    weights = {re.sub(r"^(module\.|_orig_mod\.)+", "", name): tensor for name, tensor in weights.items()}
    arguments = contents.get("args") or {}
    return weights, vars(arguments) if isinstance(arguments, argparse.Namespace) else dict(arguments)


def from_timm_names(
    kind: str, weights: dict[str, torch.Tensor], arguments: dict, fields: dict
) -> tuple[PreTrainedModel, list[str]]:
    """Model with the weights of a MAE code base, and what its owner should know about the conversion."""
    needed = {"cls_token": 3, "pos_embed": 3, "patch_embed.proj.weight": 4, "blocks.0.mlp.fc1.weight": 2}
    if "decoder_pred.weight" in weights:
        needed |= {"decoder_pred.weight": 2, "decoder_blocks.0.mlp.fc1.weight": 2}
    for name, dimensions in needed.items():
        if name not in weights:
            raise ConversionError(f"Not a checkpoint of kind '{kind}': '{name}' is missing.")
        if weights[name].ndim != dimensions:
            shape = tuple(weights[name].shape)
            raise ConversionError(f"'{name}' must have {dimensions} dimensions, got shape {shape}.")
    if ("skip.0.mask_token" in weights) != (kind == "released-mae"):
        raise ConversionError(
            f"Not a checkpoint of kind '{kind}': 'skip.0.mask_token' marks kind 'released-mae', and it is "
            f"{'there' if kind != 'released-mae' else 'missing'}."
        )
    config = timm_config(kind, weights, arguments, fields)
    # The released L and H models hold skips for decoder layers that do not exist; they were never trained.
    unused = re.compile(r"skip\.(\d+)\.")
    dropped = [name for name in weights if (match := unused.match(name)) and int(match[1]) >= config.num_skips]

    converted = {}
    for name, tensor in weights.items():
        if name in dropped:
            continue
        for pattern, replacement in TIMM_NAMES.items():
            name = re.sub(pattern, replacement, name)
        if ".qkv." in name:
            for part, piece in zip(("q_proj", "k_proj", "v_proj"), tensor.chunk(3)):
                converted[name.replace("qkv", part)] = piece.contiguous()
        elif name.endswith(".fc.0.weight"):
            # The released skip concatenates encoder tokens and decoder tokens, in this order.
            skip = name.removesuffix("fc.0.weight")
            converted[f"{skip}encoder_projection.weight"] = tensor[:, : config.hidden_size].contiguous()
            converted[f"{skip}decoder_projection.weight"] = tensor[:, config.hidden_size :].contiguous()
        else:
            name = name.replace(".fc.0.bias", ".encoder_projection.bias").replace(".fc.2.", ".output_projection.")
            converted[name] = tensor

    if "classifier.weight" in converted:
        model_class = DecayedViTMAEForImageClassification
    elif "decoder.decoder_pred.weight" in converted:
        model_class = DecayedViTMAEForPreTraining
    else:
        model_class = DecayedViTMAEModel
        converted = {name.removeprefix("vit."): tensor for name, tensor in converted.items()}
    notes = []
    if dropped:
        notes.append(f"Dropped, because no decoder layer uses them: {', '.join(dropped)}.")
    assumed = [name for name in ("norm_pix_loss", "mask_ratio") if name not in {**arguments, **fields}]
    if assumed and model_class is DecayedViTMAEForPreTraining:
        values = ", ".join(f"{name}={getattr(config, name)}" for name in assumed)
        notes.append(f"Assumed, because the file does not tell: {values}.")
    return load_weights(model_class(config), converted), notes


def timm_config(kind: str, weights: dict[str, torch.Tensor], arguments: dict, fields: dict) -> DecayedViTMAEConfig:
    """Config read off the shapes and stored training arguments; `fields` adds or overrides."""

    def depth(prefix):
        numbers = [int(match[1]) for name in weights if (match := re.match(rf"{prefix}\.(\d+)\.", name))]
        return 1 + max(numbers)

    hidden_size, num_channels, *patch_size = weights["patch_embed.proj.weight"].shape
    known = {
        "hidden_size": hidden_size,
        "num_channels": num_channels,
        "patch_size": patch_size[0] if patch_size[0] == patch_size[1] else patch_size,
        "num_hidden_layers": depth("blocks"),
        "num_attention_heads": HEADS_BY_WIDTH.get(hidden_size),
        "intermediate_size": weights["blocks.0.mlp.fc1.weight"].shape[0],
        "qkv_bias": "blocks.0.attn.qkv.bias" in weights,
        "norm_pix_loss": arguments.get("norm_pix_loss", False),
        "mask_ratio": arguments.get("mask_ratio", 0.75),
    }
    side = math.isqrt(weights["pos_embed"].shape[1] - 1)
    known["image_size"] = [side * patch_size[0], side * patch_size[1]]
    if patch_size[0] == patch_size[1]:
        known["image_size"] = side * patch_size[0]
    if side**2 != weights["pos_embed"].shape[1] - 1:
        known["image_size"] = None
    if "decoder_pred.weight" in weights:
        decoder_hidden_size = weights["decoder_pred.weight"].shape[1]
        known |= {
            "decoder_hidden_size": decoder_hidden_size,
            "decoder_num_hidden_layers": depth("decoder_blocks"),
            "decoder_num_attention_heads": DECODER_HEADS_BY_WIDTH.get(decoder_hidden_size),
            "decoder_intermediate_size": weights["decoder_blocks.0.mlp.fc1.weight"].shape[0],
        }
    if kind == "released-mae":
        known["shortcut_decay"] = arguments.get("min_decay")
    else:
        known |= {**PLAIN, "layer_norm_eps": 1e-6}
    if "fc_norm.weight" in weights:  # fine-tuned with average pooling
        known |= {"final_norm": False, "pooling": "patch_mean"}
    if "head.weight" in weights:
        known["num_labels"] = weights["head.weight"].shape[0]

    known |= fields
    unknown = [name for name, value in known.items() if value is None]
    if unknown:
        options = " ".join(f"--set {name}=..." for name in unknown)
        raise ConversionError(f"The file does not tell {', '.join(unknown)}: give {options}")
    return DecayedViTMAEConfig(**known)


def from_vit_mae(folder: Path, fields: dict) -> PreTrainedModel:
    """Model with the weights of a ViTMAE folder, safetensors or pickled, old names or new."""
    config = read_config(folder, "vit_mae", fields)
    weights = {}
    for file in weight_files(folder):
        weights |= read_weights(file)[0]
    converted = {}
    for name, tensor in weights.items():
        for pattern, replacement in VIT_MAE_KEY_MAPPING.items():
            name = re.sub(pattern, replacement, name)
        converted[name] = tensor
    with_decoder = any(name.startswith("decoder.") for name in converted)
    if not with_decoder:
        converted = {name.removeprefix("vit."): tensor for name, tensor in converted.items()}
    return load_weights((DecayedViTMAEForPreTraining if with_decoder else DecayedViTMAEModel)(config), converted)


def to_vit_mae(model: DecayedViTMAEModel | DecayedViTMAEForPreTraining) -> ViTMAEModel | ViTMAEForPreTraining:
    """The same network as a transformers class; only the plain preset at `shortcut_decay=1.0` is one."""
    config = model.config
    needed = {name: PLAIN[name] for name in ("shortcut_decay", "encoder_decoder_skips", "decoder_input", "final_norm")}
    needed |= {"residual_form": "decay"}
    different = [
        f"{name}={getattr(config, name)!r}" for name, value in needed.items() if getattr(config, name) != value
    ]
    if config.shortcut_schedule == "learned":
        different.append("shortcut_schedule='learned'")
    for name in ("image_size", "patch_size"):
        if len(set(as_pair(getattr(config, name)))) > 1:
            different.append(f"{name}={getattr(config, name)!r}")
    if different:
        raise ConversionError(
            f"Only the plain preset at shortcut_decay=1.0 with square images is a ViTMAE; this model has {', '.join(different)}."
        )
    theirs = ViTMAEConfig(
        **{
            field.name: getattr(config, field.name)
            for field in dataclasses.fields(ViTMAEConfig)
            if field.name not in ("architectures", "transformers_version")
        }
        | {name: as_pair(getattr(config, name))[0] for name in ("image_size", "patch_size")}
    )
    vit_mae_class = ViTMAEForPreTraining if isinstance(model, DecayedViTMAEForPreTraining) else ViTMAEModel
    return load_weights(vit_mae_class(theirs), model.state_dict())


def load_weights(model: PreTrainedModel, weights: dict[str, torch.Tensor]) -> PreTrainedModel:
    """Loads all of `weights` into all of `model`, or raises with every key that has no counterpart."""
    state = model.state_dict()
    missing, unknown = sorted(state.keys() - weights.keys()), sorted(weights.keys() - state.keys())
    misfits = [
        f"{name} {tuple(weights[name].shape)} instead of {tuple(state[name].shape)}"
        for name in sorted(state.keys() & weights.keys())
        if state[name].shape != weights[name].shape
    ]
    if missing or unknown or misfits:
        raise ConversionError(
            f"The weights do not fit {type(model).__name__}. Missing: {missing or 'none'}. "
            f"Unknown: {unknown or 'none'}. Wrong shape: {misfits or 'none'}."
        )
    model.load_state_dict(weights)
    return model


def load_decayed(folder: Path) -> PreTrainedModel:
    """The model of one of our folders, of the class that saved it."""
    architecture = (read_config(folder, "decayed_vit_mae", {}).architectures or ["DecayedViTMAEModel"])[0]
    model_class = {cls.__name__: cls for cls in (DecayedViTMAEModel, DecayedViTMAEForPreTraining)}.get(architecture)
    if model_class is None:
        raise ConversionError(f"transformers has no ViTMAE counterpart of {architecture}.")
    return model_class.from_pretrained(folder)


def read_config(folder: Path, model_type: str, fields: dict) -> DecayedViTMAEConfig:
    if not (folder / "config.json").is_file():
        raise ConversionError(f"'{folder}' has no config.json; this kind of checkpoint is a folder.")
    try:
        found = dict(json.loads((folder / "config.json").read_text())).get("model_type")
    except (ValueError, TypeError) as error:
        raise ConversionError(f"The config.json of '{folder}' is damaged ({error}).") from error
    if found != model_type:
        raise ConversionError(f"'{folder}' holds a model of type '{found}', not '{model_type}'.")
    return DecayedViTMAEConfig.from_pretrained(folder, **fields)


def weight_files(folder: Path) -> list[Path]:
    for pattern in ("model*.safetensors", "pytorch_model*.bin"):
        if files := sorted(folder.glob(pattern)):
            return files
    raise ConversionError(f"'{folder}' holds no weights (model*.safetensors or pytorch_model*.bin).")


def model_card(kind: str, checkpoint: Path, model: PreTrainedModel, licence: str, notes: list[str]) -> ModelCard:
    """A card that says where the weights came from, under which licence, and what was decided on the way."""
    files = [checkpoint] if checkpoint.is_file() else weight_files(checkpoint)
    sources = [f"- `{file.name}`, SHA-256 `{hashlib.sha256(file.read_bytes()).hexdigest()}`" for file in files]
    metadata = [f"license: {licence}"] if licence != "unknown" else []
    family = ["library_name: transformers", "tags:", "- masked-autoencoder"]
    if kind in DIFFUSION_KINDS:
        family = ["library_name: diffusers", "pipeline_tag: unconditional-image-generation", "tags:"]
    lines = [
        *["---", *metadata, *family, "- hf_decayed", "---", ""],
        *[f"# {type(model).__name__}, converted", ""],
        *[f"The weights are those of {KINDS[kind][0]}:", "", *sources, ""],
        *[line for note in notes for line in (note, "")],
        f"Licence of the weights: {licence}. It is that of their source; converting them does not change it.",
    ]
    return ModelCard("\n".join(lines) + "\n")
