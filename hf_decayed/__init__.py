"""Decayed identity shortcuts for Hugging Face models.

>>> import hf_decayed  # registers the models with transformers' Auto classes, and "unsupervised-segmentation" as a task
>>> from transformers import AutoModel
>>> model = AutoModel.from_pretrained("path/or/repository")
"""

import ast as _ast
import importlib as _importlib
import sys as _sys
from pathlib import Path as _Path

from . import _deprecated


__version__ = "0.1.0"


def _read_constants(path: _Path) -> dict:
    """`__all__`, `AUTO_MAP` and `CUSTOM_PIPELINES` of a module without importing it: diffusers is imported on demand."""
    constants = {}
    for node in _ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, _ast.Assign) and isinstance(node.targets[0], _ast.Name):
            if node.targets[0].id in ("__all__", "AUTO_MAP", "CUSTOM_PIPELINES"):
                constants[node.targets[0].id] = _ast.literal_eval(node.value)
    return constants


def _register(auto_map: dict[str, str]) -> None:
    """Makes transformers' Auto classes know a family of models; `auto_map` is what its folders say of their code."""
    import transformers

    for auto_class, reference in auto_map.items():
        module, _, name = reference.rpartition(".")
        model_class = getattr(_importlib.import_module(f".models.{module}", __name__), name)
        if auto_class == "AutoConfig":
            transformers.AutoConfig.register(model_class.model_type, model_class, exist_ok=True)
        elif auto_class == "AutoImageProcessor":
            # By its own class: preprocessor_config.json names the processor of a folder, its config does not.
            transformers.AutoImageProcessor.register(
                model_class, image_processor_classes={"pil": model_class}, exist_ok=True
            )
        else:
            getattr(transformers, auto_class).register(model_class.config_class, model_class, exist_ok=True)


def _register_pipelines(custom_pipelines: dict[str, dict]) -> None:
    """Makes `transformers.pipeline` know tasks; `custom_pipelines` is what configs of published folders say of them."""
    import transformers
    from transformers.pipelines import PIPELINE_REGISTRY

    for task, entry in custom_pipelines.items():
        module, _, name = entry["impl"].rpartition(".")
        pipeline_class = getattr(_importlib.import_module(f".pipelines.{module}", __name__), name)
        auto_classes = tuple(getattr(transformers, auto_class) for auto_class in entry["pt"])
        PIPELINE_REGISTRY.register_pipeline(task, pipeline_class, pt_model=auto_classes)


# Transformers takes seconds to import, and `hf-decayed --version` and the help of its commands need no models.
_is_help = (_sys.argv and _Path(_sys.argv[0]).stem == "hf-decayed") and (
    all(word.startswith("-") for word in _sys.argv[1:]) or not {"-h", "--help"}.isdisjoint(_sys.argv)
)

_deprecated.install()
_modules: dict[str, str] = {}  # public name -> its module, from the `__all__` of the modules
_rooms = ("decay", "models", "pipelines", "spectral")
for _path in sorted(path for room in _rooms for path in _Path(__file__).parent.glob(f"{room}/*.py")):
    _constants = _read_constants(_path)
    _modules |= dict.fromkeys(_constants.get("__all__", []), f".{_path.parent.name}.{_path.stem}")
    if not _is_help:
        _register(_constants.get("AUTO_MAP", {}))
        _register_pipelines(_constants.get("CUSTOM_PIPELINES", {}))

__all__ = sorted(_modules)


def __getattr__(name: str):
    if name in _modules:
        return getattr(_importlib.import_module(_modules[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__})
