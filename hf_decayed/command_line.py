"""Command-line flags: one-line errors, numbers with ranges, and config fields given as FIELD=VALUE."""

import argparse
import ast
import ctypes
import difflib
import inspect
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path


MALLOC_TRIM_THRESHOLD, MALLOC_MMAP_THRESHOLD = -1, -3  # options of glibc's `mallopt`


class OneLineParser(argparse.ArgumentParser):
    """Reports a wrong argument in one line; `--help` explains the rest, with defaults.

    `--some-flag` is read as `--some_flag`. An unknown flag is refused, with the nearest known one.
    """

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message} (see `{self.prog} --help`)\n")

    def parse_known_args(self, args=None, namespace=None):
        known = self._option_string_actions
        words = []
        for word in sys.argv[1:] if args is None else args:
            flag, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
            underscored = "--" + flag[2:].replace("-", "_")
            words.append(underscored + equals + value if flag not in known and underscored in known else word)
        return super().parse_known_args(words, namespace)

    def parse_args(self, args=None, namespace=None):
        options, unknown = self.parse_known_args(args, namespace)
        self.refuse_unknown(unknown)
        return options

    def refuse_unknown(self, words: list[str]) -> None:
        """Ends with an error if there are words that no argument takes."""
        if not words:
            return
        flag = words[0].partition("=")[0]
        nearest = difflib.get_close_matches(flag, self._option_string_actions, 1) if flag.startswith("--") else []
        self.error(f"there is no argument {words[0]}" + (f"; did you mean {nearest[0]}?" if nearest else ""))

    def format_help(self) -> str:
        for action in self._actions:
            help = action.help or ""
            told = action.default in (None, argparse.SUPPRESS, False, []) or "default" in help
            if not told and help != argparse.SUPPRESS:
                action.help = f"{help} (default: %(default)s)".strip()
        return super().format_help()


class CommandParser(OneLineParser):
    """Parser of a subcommand: refuses unknown flags itself, because only it knows its own."""

    def parse_known_args(self, args=None, namespace=None):
        options, unknown = super().parse_known_args(args, namespace)
        self.refuse_unknown(unknown)
        return options, unknown


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
jpeg_quality = number(int, 1, 100)
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


def set_cpu_threads(accelerator, threads: int | None = None) -> str | None:
    """On a CPU, sets the threads of this process and returns their number and why, "1 thread: ..."; else `None`.

    The default is `OMP_NUM_THREADS`. If that is not set: the cores divided by the processes of `accelerator`, or, for
    one process, one thread if a short trial is faster with it, as on a busy machine.
    """
    if accelerator.device.type != "cpu":
        return None
    import torch  # here and below, because `hf-decayed --help` imports this module

    share, trial = max(1, count_cores() // accelerator.num_processes), {}
    if threads is not None:
        reason = "as asked for"
    elif (threads := threads_of_environment()) is not None:
        reason = "by OMP_NUM_THREADS"
    elif accelerator.num_processes > 1 or share == 1:
        threads, reason = share, "the cores divided by the processes"
    else:
        trial = time_thread_counts([1, share])
        threads = min(trial, key=lambda count: trial[count])
        reason = "by trial, " + ", ".join(f"{count}: {1000 * seconds:.1f} ms" for count, seconds in trial.items())
    torch.set_num_threads(threads)
    keep_freed_memory()
    return f"{threads} thread{'s' if threads > 1 else ''} ({reason})"


def keep_freed_memory() -> None:
    """Lets the C library keep the memory of freed tensors for the next step, instead of returning it to the system.

    The system clears every page that it hands out again, which takes up to a tenth of a small training step. Only
    glibc has this call.
    """
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library, or another system
        return
    set_option(MALLOC_TRIM_THRESHOLD, 2**31 - 1)
    set_option(MALLOC_MMAP_THRESHOLD, 2**25)  # the largest that it takes; larger tensors are returned as before


def count_loader_workers(accelerator) -> int:
    """Processes that decode images for this one: the cores that the model leaves free, at most 16.

    On a CPU the model has as many cores as PyTorch has threads. Workers beside them would only slow both down, so there may be
    none, and the training process decodes by itself.
    """
    import torch

    busy = torch.get_num_threads() if accelerator.device.type == "cpu" else 0
    return min(16, max(0, count_cores() // accelerator.num_processes - busy))


def model_names(models: list[str]) -> dict[str, str]:
    """A short name for every model, that of its folder; a name that two models share gets a number."""
    names: dict[str, str] = {}
    for model in models:
        name = Path(model).name
        taken = set(names.values())
        names[model] = name if name not in taken else f"{name}-{len(names) + 1}"
    return names


def count_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_of_environment() -> int | None:
    """`OMP_NUM_THREADS`, if the user has set it: launchers set it to 1 for the processes that they start."""
    launchers = {"ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"} & os.environ.keys()
    variables = dict(os.environ)
    if launchers:
        try:  # the environment that the launcher was started with; not every system has this file
            text = Path(f"/proc/{os.getppid()}/environ").read_text(errors="replace")
            variables = dict(line.split("=", 1) for line in text.split("\0") if "=" in line)
        except OSError:
            return None
    number = variables.get("OMP_NUM_THREADS", "")
    return int(number) if number.isdecimal() and int(number) > 0 else None


def time_thread_counts(counts: list[int], rounds: int = 5) -> dict[int, float]:
    """Median seconds of a small training step with each number of threads, measured in turns."""
    import torch

    with torch.random.fork_rng(devices=[]):
        layers = torch.nn.Sequential(torch.nn.Linear(128, 512), torch.nn.GELU(), torch.nn.Linear(512, 128))
        inputs = torch.randn(2048, 128)
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(rounds + 1):
        for count in counts:
            torch.set_num_threads(count)
            start = time.perf_counter()
            layers(inputs).square().mean().backward()
            seconds[count].append(time.perf_counter() - start)
    return {count: sorted(values[1:])[rounds // 2] for count, values in seconds.items()}  # the first warms up


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
    """Refuses names that are not fields of the config, and suggests the nearest one that is."""
    for name in set(fields) - known:
        nearest = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean '{nearest[0]}'?" if nearest else "."
        raise ValueError(f"'{name}' is not a field of the config{hint}")
