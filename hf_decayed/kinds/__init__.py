"""Every kind of model, described once: its script, its classes, the words of its card, how it is used, proved and loaded.

Each module of this folder without a leading underscore defines one `KIND`. A new system adds a file here, and `hf-decayed
card`, `sample` and `publish` know it. These files import no model code: classes are named by module, and imported on demand.
"""

import importlib
import pkgutil
from pathlib import Path

from ..errors import UserError
from ._files import parse_json, read_class_name, read_field, read_json, read_text
from ._kind import Kind, ModelFolder, SavedClass


__all__ = [
    "Kind",
    "ModelFolder",
    "SavedClass",
    "find_kind",
    "list_kinds",
    "package_class",
    "parse_json",
    "read_class_name",
    "read_field",
    "read_json",
    "read_model_folder",
    "read_text",
]


def list_kinds() -> dict[str, Kind]:
    """All kinds, by the name of the file that describes them."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
    return {name: importlib.import_module(f"{__name__}.{name}").KIND for name in names}


def find_kind(class_name: str) -> Kind | None:
    """The kind whose folders name this class in `config.json` or `model_index.json`."""
    return next((kind for kind in list_kinds().values() if class_name in kind.classes), None)


def package_class(name: str) -> type | None:
    """A class of this package by name, so that a folder is loaded without running the code that it holds."""
    for kind in list_kinds().values():
        if name in kind.modules:
            return getattr(importlib.import_module(kind.modules[name]), name)
    return None


def read_model_folder(folder: Path) -> ModelFolder:
    """The kind of model in a folder, with its configs."""
    index = read_json(folder / "model_index.json")
    if index:
        class_name = read_class_name(index, "model_index.json")
    else:
        architectures = read_field(read_json(folder / "config.json"), "architectures", list, "config.json", [])
        class_name = architectures[0] if architectures and isinstance(architectures[0], str) else "no class"
    kind = find_kind(class_name)
    if kind is None or bool(kind.network) != bool(index):
        raise UserError(f"'{folder}' holds no model or pipeline of this package ({class_name}).")
    name = f"{kind.network}/config.json" if index else "config.json"
    config = read_json(folder / name)
    if kind.has_shortcuts:
        decay = config.get("shortcut_decay")
        if isinstance(decay, bool) or not isinstance(decay, (int, float)):
            raise UserError(
                f"'{folder}' holds no model or pipeline of this package: `shortcut_decay` in '{name}' must be a number, "
                f"got {decay!r}."
            )
    return ModelFolder(kind, class_name, config, index)
