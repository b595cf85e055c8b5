"""Command-line flags: one-line errors, numbers with ranges, and config fields given as FIELD=VALUE."""

import argparse
import ast
import difflib
import inspect
import json
import math
import os
import re
from collections.abc import Callable, Collection

import torch


class OneLineParser(argparse.ArgumentParser):
    """Reports a wrong argument in one line; `--help` explains the rest."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message} (see `{self.prog} --help`)\n")


def number(
    kind: type[int] | type[float], low: float | None = None, high: float | None = None, above: bool = False
) -> Callable:
    """A type for `add_argument`: an `int` or `float` in [low, high]; with `above`, in (low, high]."""

    def parse(text: str):
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"must be {'a whole number' if kind is int else 'a number'}, got {text!r}"
            ) from None
        if not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"must be finite, got {text}")
        too_low = low is not None and (value <= low if above else value < low)
        if too_low or (high is not None and value > high):
            rule = f"above {low:g}" if above else f"at least {low:g}" if low is not None else ""
            rule += (" and " if rule and high is not None else "") + (f"at most {high:g}" if high is not None else "")
            raise argparse.ArgumentTypeError(f"must be {rule}, got {text}")
        return value

    return parse


positive_int = number(int, 1)
non_negative_int = number(int, 0)
positive_float = number(float, 0.0, above=True)
non_negative_float = number(float, 0.0)
fraction = number(float, 0.0, 1.0)
positive_fraction = number(float, 0.0, 1.0, above=True)


def latent_shape(text: str) -> tuple[int, int, int]:
    """`4x64/2` is a latent of 4 x 4 vectors with 64 channels, in patches of 2 x 2; `1x256` has patches of 1."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(?:/([1-9]\d*))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"must be GRIDxCHANNELS or GRIDxCHANNELS/PATCH, such as 1x256, got {text!r}")
    return int(match[1]), int(match[2]), int(match[3] or 1)


def boolean(text: str) -> bool:
    """`true` or `false`, as a type for `add_argument`."""
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}")
    return text.lower() == "true"


def set_cpu_threads(accelerator, threads: int | None = None) -> None:
    """On a CPU, sets the threads of this process; by default the cores divided by the processes of `accelerator`.

    Accelerate's launcher gives every process one thread.
    """
    if accelerator.device.type == "cpu":
        if threads is None:
            threads = max(1, (os.cpu_count() or 1) // accelerator.num_processes)
        torch.set_num_threads(threads)


def shortcut_decay(text: str) -> float | str:
    """`auto` or a number in [0, 1], as a type for `add_argument`."""
    return text if text == "auto" else fraction(text)


def parse_field(text: str) -> tuple[str, object]:
    """`shortcut_decay=0.6` -> `("shortcut_decay", 0.6)`; values are JSON or Python literals, anything else is a string."""
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise argparse.ArgumentTypeError(f"expected FIELD=VALUE, got {text!r}")
    for read in (json.loads, ast.literal_eval):
        try:
            return name, read(value)
        except (ValueError, SyntaxError):
            continue
    return name, value


def constructor_fields(model_class: type) -> set[str]:
    """Names of the config fields of a diffusers model: the arguments of its constructor."""
    return set(inspect.signature(model_class).parameters) - {"args", "kwargs"}


def check_fields(fields: Collection[str], known: set[str]) -> None:
    """Refuses names that are not fields of the config, with the nearest one that is."""
    for name in set(fields) - known:
        nearest = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean '{nearest[0]}'?" if nearest else "."
        raise ValueError(f"'{name}' is not a field of the config{hint}")
