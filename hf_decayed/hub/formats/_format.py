"""The description of a format, and what its readers share."""

import argparse
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ...errors import UserError


class ConversionError(UserError):
    """A checkpoint that cannot be converted, with the reason and, where keys are at fault, all of them."""


@dataclass(frozen=True)
class Format:
    """A kind of checkpoint that can be converted.

    Args:
        name (`str`): As `hf-decayed convert --from` takes it.
        text (`str`): What it is and where it comes from.
        licence (`str`, *optional*): Licence that its weights were released under; by default that of the folder's card.
        read (`Callable`):
            `read(checkpoint, fields)` gives a model or pipeline, ready for `save_pretrained`, and notes for its owner.
        fields (`Callable`): Gives the config fields that `--set` may name.
        library (`str`): Library that loads the result.
        task (`str`): Of the result, as the Hub names it, if the library is diffusers.
        is_folder (`bool`): Whether it is a folder rather than one file.
    """

    name: str
    text: str
    licence: str | None
    read: Callable[[Path, dict], tuple]
    fields: Callable[[], set[str]]
    library: str = "transformers"
    task: str = "unconditional-image-generation"
    is_folder: bool = False


def read_weights(path: Path, wrappers=("model", "state_dict")) -> tuple[dict[str, torch.Tensor], dict]:
    """State dict of a checkpoint file, whole or under one of `wrappers`, and the training arguments if it has them."""
    if path.is_dir():
        raise ConversionError(f"'{path}' is a folder; a checkpoint of this format is one file.")
    try:
        if path.suffix == ".safetensors":
            return load_file(path), {}
        # MAE's training scripts store their arguments beside the weights; no other objects are loaded.
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
    arguments = contents.get("args")
    arguments = vars(arguments) if isinstance(arguments, argparse.Namespace) else arguments
    return weights, arguments if isinstance(arguments, dict) else {}


def load_weights(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> torch.nn.Module:
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


def check_known(fields: dict) -> None:
    """Refuses a config with fields that neither the checkpoint nor the user gave."""
    if unknown := [name for name, value in fields.items() if value is None]:
        options = " ".join(f"--set {name}=..." for name in unknown)
        raise ConversionError(f"The file does not tell {', '.join(unknown)}: give {options}")
