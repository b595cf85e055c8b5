"""Checkpoints of other code bases, described once: name, text, licence, reader.

Each module of this folder without a leading underscore lists its formats in `FORMATS`, beside their readers; `hf-decayed
convert` and its `--help` read them from there. Diffusers is imported when a reader runs.
"""

import importlib
import pkgutil

from ._format import ConversionError, Format, load_weights, read_weights


__all__ = ["ConversionError", "Format", "format_fields", "list_formats", "load_weights", "read_weights"]


def list_formats() -> dict[str, Format]:
    """All formats by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return {entry.name: entry for module in modules for entry in module.FORMATS}


def format_fields(name: str) -> set[str]:
    """Config fields that can be set when a checkpoint of this format is converted."""
    return list_formats()[name].fields()
