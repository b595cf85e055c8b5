"""Reads the files of a model folder; an error names the file and what is wrong with it."""

import json
from pathlib import Path
from typing import Any

from ..errors import UserError


TYPE_NAMES = {str: "text", dict: "an object", list: "a list", bool: "true or false", int: "a whole number"}
REQUIRED = object()
MAX_DEPTH = 100


def read_class_name(index: dict, file: str) -> str:
    """The class that a pipeline's index names: text, or a list of module and class for code that comes with it."""
    value = index.get("_class_name")
    names = value if isinstance(value, list) else [value]
    if len(names) not in (1, 2) or not all(isinstance(name, str) for name in names):
        raise UserError(f"`_class_name` in '{file}' must name a class, or a module and a class, got {value!r}.")
    return str(names[-1])


def read_json(path: Path) -> dict:
    """The fields of a JSON file; none if there is no such file."""
    if not path.exists():
        return {}
    content = parse_json(read_text(path), f"'{path.name}'")
    if not isinstance(content, dict):
        raise UserError(f"'{path.name}' must hold an object with fields, got {type(content).__name__}.")
    return content


def parse_json(text: str, name: str) -> Any:
    """JSON of moderate depth, so that functions may walk it recursively."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:  # besides syntax: numbers of too many digits, or too deep
        raise UserError(f"{name} is not JSON: {error}.") from error
    level, depth = [content], 0
    while level := [item for value in level if isinstance(value, (dict, list)) for item in children(value)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise UserError(f"{name} is nested more than {MAX_DEPTH} levels deep.")
    return content


def children(value: dict | list) -> list:
    return list(value.values()) if isinstance(value, dict) else value


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"'{path.name}' is not UTF-8 text: {error.reason} at byte {error.start}.") from error


def read_field(content: dict, name: str, kind: type, file: str, default: Any = REQUIRED) -> Any:
    """A field of the expected type; `float` takes whole numbers too, and `null` counts as not there."""
    value = content.get(name)
    if value is None:
        if default is REQUIRED:
            raise UserError(f"'{file}' has no '{name}'.")
        return default
    accepted = (int, float) if kind is float else kind
    if isinstance(value, bool) and kind is not bool or not isinstance(value, accepted):
        expected = "a number" if kind is float else TYPE_NAMES[kind]
        raise UserError(f"'{name}' in '{file}' must be {expected}, got {value!r}.")
    return value
