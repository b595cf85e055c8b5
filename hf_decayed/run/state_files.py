"""Training state as safetensors: nested dictionaries, lists, numbers, strings and tensors, never a pickle.

Tensors are stored as such; the structure around them is JSON in the file's metadata. Loading runs no code.
"""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file


def save_state(path: Path, state) -> None:
    """Writes a nested state, such as `optimizer.state_dict()`, to one safetensors file."""
    tensors: dict[str, torch.Tensor] = {}
    structure = encode(state, tensors)
    save_file(tensors, path, metadata={"structure": json.dumps(structure)})


def load_state(path: Path):
    """The state that `save_state` wrote, with tensors on the CPU."""
    with safe_open(path, "pt") as file:
        structure = json.loads((file.metadata() or {})["structure"])
        return decode(structure, file)


def encode(value, tensors: dict[str, torch.Tensor]):
    """JSON for a value; tensors and arrays in it are added to `tensors` and referred to by name."""
    if isinstance(value, np.ndarray):
        return {"array": encode(torch.from_numpy(value.copy()), tensors)["tensor"]}
    if isinstance(value, torch.Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().contiguous().clone()  # safetensors refuses tensors that share memory
        return {"tensor": name}
    if isinstance(value, dict):
        return {"items": [[encode(key, tensors), encode(item, tensors)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [encode(item, tensors) for item in value]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"A checkpoint holds tensors, numbers and strings, not {type(value).__name__}.")


def decode(structure, file):
    if not isinstance(structure, dict):
        return structure
    ((kind, content),) = structure.items()
    if kind in ("tensor", "array"):
        tensor = file.get_tensor(content)
        return tensor.numpy() if kind == "array" else tensor
    if kind == "items":
        return {decode(key, file): decode(item, file) for key, item in content}
    return {"list": list, "tuple": tuple}[kind](decode(item, file) for item in content)
