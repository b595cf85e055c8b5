"""Folders of transformers' ViTMAE, and the plain preset of ours back to ViTMAE."""

import dataclasses
import re
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedModel, ViTMAEConfig, ViTMAEForPreTraining, ViTMAEModel

from ...errors import UserError, format_error
from ...kinds import read_json
from ...models.configuration_decayed_vit_mae import PLAIN, DecayedViTMAEConfig, as_pair
from ...models.modeling_decayed_vit_mae import (
    VIT_MAE_KEY_MAPPING,
    DecayedViTMAEForPreTraining,
    DecayedViTMAEModel,
)
from ._format import ConversionError, Format, load_weights, read_weights
from .mae import config_fields


def read_vit_mae(folder: Path, fields: dict) -> tuple[PreTrainedModel, list[str]]:
    """Model with the weights of a ViTMAE folder, safetensors or pickled, with old names or new."""
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
    return load_weights((DecayedViTMAEForPreTraining if with_decoder else DecayedViTMAEModel)(config), converted), []


def read_decayed_mae(folder: Path, fields: dict) -> tuple[PreTrainedModel, list[str]]:
    """The ViTMAE of one of our folders, of the class that was saved."""
    if fields:
        raise ConversionError(f"Fields cannot be set on the way back to ViTMAE, got {sorted(fields)}.")
    architecture = (read_config(folder, "decayed_vit_mae", {}).architectures or ["DecayedViTMAEModel"])[0]
    classes = {cls.__name__: cls for cls in (DecayedViTMAEModel, DecayedViTMAEForPreTraining)}
    if architecture not in classes:
        raise ConversionError(f"transformers has no ViTMAE counterpart of {architecture}.")
    return to_vit_mae(classes[architecture].from_pretrained(folder)), []


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
    vit_mae_config = ViTMAEConfig(
        **{
            field.name: getattr(config, field.name)
            for field in dataclasses.fields(ViTMAEConfig)
            if field.name not in ("architectures", "transformers_version")
        }
        | {name: as_pair(getattr(config, name))[0] for name in ("image_size", "patch_size")}
    )
    vit_mae_class = ViTMAEForPreTraining if isinstance(model, DecayedViTMAEForPreTraining) else ViTMAEModel
    return load_weights(vit_mae_class(vit_mae_config), model.state_dict())


def read_config(folder: Path, model_type: str, fields: dict) -> DecayedViTMAEConfig:
    if not (folder / "config.json").is_file():
        raise ConversionError(f"'{folder}' has no config.json; a checkpoint of this format is a folder.")
    try:
        actual_type = read_json(folder / "config.json").get("model_type")
    except UserError as error:
        raise ConversionError(f"The config.json of '{folder}' is damaged: {error}") from error
    if actual_type != model_type:
        raise ConversionError(f"'{folder}' holds a model of type '{actual_type}', not '{model_type}'.")
    try:
        return DecayedViTMAEConfig.from_pretrained(folder, **fields)
    except (ValueError, StrictDataclassError) as error:
        raise ConversionError(
            f"The config.json of '{folder}' is no config of a masked autoencoder: {format_error(error)}"
        ) from error


def weight_files(folder: Path) -> list[Path]:
    for pattern in ("model*.safetensors", "pytorch_model*.bin"):
        if files := sorted(folder.glob(pattern)):
            return files
    raise ConversionError(f"'{folder}' holds no weights (model*.safetensors or pytorch_model*.bin).")


FORMATS = [
    Format(
        name="vit-mae",
        text="transformers' ViTMAE, with old names or new",
        licence=None,
        read=read_vit_mae,
        fields=config_fields,
        is_folder=True,
    ),
    Format(
        name="decayed-mae",
        text="this package's MAE at the plain preset; becomes transformers' ViTMAE",
        licence=None,
        read=read_decayed_mae,
        fields=config_fields,
        is_folder=True,
    ),
]
