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


def sanitized_command(arguments: list[str] | None = None) -> list[str]:
    """The arguments of the command line without local paths: a path outside this folder is reduced to its name."""
    words = []
    for word in sys.argv[1:] if arguments is None else arguments:
        flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        outside = Path(value).is_absolute() or value.startswith("~") or ".." in Path(value).parts
        words.append(shlex.quote(flag + equals + (Path(value).name if outside else value)))
    return words


def describe_hardware(accelerator: Accelerator) -> str:
    """Devices of all processes, which are assumed to be alike."""
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
    """A hash of weights and config: the same for the same model, wherever it is stored."""
    digest = hashlib.sha256(type(model).__name__.encode())
    config = model.config.to_dict() if hasattr(model.config, "to_dict") else dict(model.config)
    # `custom_pipelines` says what code comes with a model, `decode_ratio` how fast it trains: not what the model is.
    unrelated = ("transformers_version", "custom_pipelines", "decode_ratio")
    meaning = {name: value for name, value in config.items() if not name.startswith("_") and name not in unrelated}
    digest.update(json.dumps(meaning, sort_keys=True, default=str).encode())
    # Weights and config do not show `decay_shortcuts`; its settings are in the blocks.
    settings = [
        str(vars(module)["decay_settings"]) for module in model.modules() if vars(module).get("decay_settings")
    ]
    digest.update("".join(settings).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def pipeline_fingerprint(pipeline) -> str:
    """A hash of the weights and configs of all networks in a pipeline, and of its own config."""
    networks = {
        name: model_fingerprint(component)
        for name, component in pipeline.components.items()
        if isinstance(component, torch.nn.Module)
    }
    content = json.dumps([networks, public_config(pipeline.config)], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def public_config(config) -> dict:
    """A diffusers config without the library's private entries."""
    return {name: value for name, value in config.items() if not name.startswith("_") or name == "_class_name"}
