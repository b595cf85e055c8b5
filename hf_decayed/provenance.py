"""What a number depends on: versions, hardware, the command, and fingerprints of models."""

import hashlib
import json
import platform
import shlex
import sys
from pathlib import Path

import torch
import transformers
from accelerate import Accelerator

from . import __version__


def sanitized_command() -> list[str]:
    """The command line; of files and folders elsewhere than under this one it holds the name, not where they lie."""
    words = []
    for word in sys.argv[1:]:
        flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        elsewhere = Path(value).is_absolute() or value.startswith("~") or ".." in Path(value).parts
        words.append(shlex.quote(flag + equals + (Path(value).name if elsewhere else value)))
    return words


def describe_hardware(accelerator: Accelerator) -> str:
    """Of all processes, if they are alike."""
    number, device = accelerator.num_processes, accelerator.device
    if device.type == "cpu":
        threads = number * torch.get_num_threads()
        return f"{threads} thread{'s' if threads > 1 else ''} of a CPU ({platform.machine()})"
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{number} x {kind}"


def versions() -> dict[str, str]:
    return {
        "hf_decayed": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def model_fingerprint(model: torch.nn.Module) -> str:
    """Of weights and config: the same for the same model, wherever it lies."""
    digest = hashlib.sha256(type(model).__name__.encode())
    config = model.config.to_dict() if hasattr(model.config, "to_dict") else dict(model.config)
    meaning = {
        name: value for name, value in config.items() if not name.startswith("_") and name != "transformers_version"
    }
    digest.update(json.dumps(meaning, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def pipeline_fingerprint(pipeline) -> str:
    """Of weights and config of every network in it, and of its own config."""
    networks = {
        name: model_fingerprint(component)
        for name, component in pipeline.components.items()
        if isinstance(component, torch.nn.Module)
    }
    content = json.dumps([networks, public_config(pipeline.config)], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def public_config(config) -> dict:
    """Without what the library notes for itself, in whatever order."""
    return {name: value for name, value in config.items() if not name.startswith("_") or name == "_class_name"}
