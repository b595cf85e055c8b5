"""Training checkpoints that are complete or absent, and that load without running code.

A checkpoint is written under a temporary name, synced to disk, and renamed last. Its manifest lists every file with size
and checksum, so that a checkpoint damaged later is recognised and skipped. All files are safetensors or JSON.
"""

import json
import os
import random
import shutil
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from torch.distributed.checkpoint import state_dict as sharded_state

from ..errors import UserError
from .state_files import load_state, save_state


MANIFEST = "manifest.json"
STATE = "state.json"
# Errors of a full disk, from the operating system, PyTorch and safetensors.
WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)
# Errors of parts from another network or version, with unexpected names, shapes or types.
LOAD_ERRORS = (OSError, RuntimeError, SafetensorError, KeyError, ValueError, TypeError, AttributeError, IndexError)


def save_checkpoint(
    accelerator: Accelerator, folder: Path, step: int, state: dict, parts: dict, limit: int | None
) -> Path | None:
    """Saves a checkpoint as `folder/step-N`; all processes call it.

    On a full disk it warns, removes what it wrote and returns `None`: earlier checkpoints stay.

    Args:
        state (`dict`): JSON values.
        parts (`dict`): State dictionaries by name, the same on all processes; each becomes one file. The state of random
            number generators, which differs between processes, is added.
        limit (`int`, *optional*): Checkpoints to keep, this one in any case.
    """
    target, temporary = folder / f"step-{step:08d}", folder / f".writing-step-{step:08d}"
    error: Exception | None = None
    if accelerator.is_main_process:
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        except OSError as caught:
            error = caught
    accelerator.wait_for_everyone()  # outside of any `try`, where one process alone might not reach it
    try:
        if error is None:
            save_state(temporary / random_file(accelerator), random_state(accelerator.device))
        if error is None and accelerator.is_main_process:
            for name, part in parts.items():
                save_state(temporary / f"{name}.safetensors", part)
    except WRITE_ERRORS as caught:
        error = caught
    if not any_process(accelerator, error is not None) and accelerator.is_main_process:
        try:
            (temporary / STATE).write_text(json.dumps({**state, "step": step}))
            files = sorted(path for path in temporary.rglob("*") if path.is_file())
            manifest = {path.name: [path.stat().st_size, checksum(path)] for path in files}
            (temporary / MANIFEST).write_text(json.dumps(manifest))
            for path in [*files, temporary / MANIFEST, temporary]:
                sync_to_disk(path)
            shutil.rmtree(target, ignore_errors=True)
            os.replace(temporary, target)
            sync_to_disk(folder)
            # Others may be of later steps: damaged, or of before the run was taken back to an earlier step.
            others = sorted(path for path in folder.glob("step-*") if path != target)
            for old in others[: max(0, len(others) + 1 - limit)] if limit else []:
                shutil.rmtree(old, ignore_errors=True)
        except OSError as caught:
            error = caught
    if not any_process(accelerator, error is not None):
        return target
    if accelerator.is_main_process:
        shutil.rmtree(temporary, ignore_errors=True)
        reason = error or "another process could not write; do all machines share the folder?"
        warnings.warn(f"No checkpoint at step {step}: it could not be written ({reason}).", stacklevel=2)
    return None


def find_checkpoint(requested: str, folder: Path) -> Path | None:
    """The checkpoint at a path, or, for `latest`, the newest complete one in `folder`; `None` if there is none."""
    if requested != "latest":
        if problem := find_damage(Path(requested)):
            raise UserError(f"'{requested}' is not a complete checkpoint: {problem}.")
        return Path(requested)
    for path in sorted(folder.glob("step-*"), reverse=True):
        if problem := find_damage(path):
            warnings.warn(f"Skipping the checkpoint '{path.name}': {problem}.", stacklevel=2)
        else:
            return path
    return None


def saved_setting(requested: str, folder: Path, name: str, is_valid: Callable[[Any], bool]):
    """A setting of the resumed run, such as `cpu_threads`, which affects rounding and so must not change on resume.

    `None` without a readable checkpoint, or if its value is not valid.
    """
    for path in [Path(requested)] if requested != "latest" else sorted(folder.glob("step-*"), reverse=True):
        try:
            value = read_checkpoint_state(path)[name]
        except (OSError, ValueError, KeyError, TypeError):  # damaged, which is reported when it is loaded
            continue
        return value if is_valid(value) else None
    return None


def read_checkpoint_state(path: Path) -> dict:
    """The JSON values of a checkpoint: its step, the signature of its run, counters."""
    return json.loads((path / STATE).read_text())


def load_part(path: Path, name: str):
    """One of the state dictionaries of a checkpoint."""
    return load_state(path / f"{name}.safetensors")


def load_random_state(accelerator: Accelerator, path: Path) -> None:
    """Restores the random number generators of this process; a process without saved state starts from its seed."""
    file = path / random_file(accelerator)
    if file.exists():
        set_random_state(load_state(file), accelerator.device)


def find_damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, or `None`."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        if not isinstance(manifest, dict) or STATE not in manifest:
            return f"{MANIFEST} does not list its files"
        for file in sorted(path.rglob("*")):
            if file.suffix not in (".safetensors", ".json") or not file.is_file() or file.is_symlink():
                return f"{file.name} is neither safetensors nor JSON, and nothing else is loaded"
            if file.name not in (MANIFEST, *manifest):
                return f"{MANIFEST} does not list {file.name}"
        for name, (size, expected) in manifest.items():
            file = path / Path(name).name
            if file.stat().st_size != size or checksum(file) != expected:
                return f"{name} has changed"
        if not isinstance(read_checkpoint_state(path).get("step"), int):
            return f"{STATE} does not hold the state of a run"
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return " ".join(str(error).split())
    return None


def gather_state(part, models: list[torch.nn.Module]) -> dict:
    """The full state, on the CPU, of a model or optimizer that is sharded over processes; all processes call it.

    Args:
        models (`list`): All models of the run; entries of an optimizer are named after the parameters of its model.
    """
    options = sharded_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    if isinstance(part, torch.nn.Module):
        return sharded_state.get_model_state_dict(part, options=options)
    return sharded_state.get_optimizer_state_dict(*owner_and_optimizer(part, models), options=options)


def scatter_state(part, state: dict, models: list[torch.nn.Module]) -> None:
    """Loads a full state into a sharded model or optimizer; all processes call it."""
    options = sharded_state.StateDictOptions(full_state_dict=True)
    if isinstance(part, torch.nn.Module):
        sharded_state.set_model_state_dict(part, state, options=options)
    else:
        sharded_state.set_optimizer_state_dict(*owner_and_optimizer(part, models), state, options=options)


def owner_and_optimizer(optimizer, models: list[torch.nn.Module]) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The model whose parameters an optimizer updates, and the PyTorch optimizer inside accelerate's wrapper."""
    optimizer = getattr(optimizer, "optimizer", optimizer)
    optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return next(model for model in models if optimized & {id(p) for p in model.parameters()}), optimizer


def random_file(accelerator: Accelerator) -> str:
    return f"random-{accelerator.process_index}.safetensors"


def random_state(device: torch.device) -> dict:
    """State of the generators of Python, numpy, PyTorch and this process's device."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state()
    return state


def set_random_state(state: dict, device: torch.device) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "device" in state and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state["device"])


def any_process(accelerator: Accelerator, here: bool) -> bool:
    flag = torch.tensor([float(here)], device=accelerator.device)
    return accelerator.reduce(flag, "sum").item() > 0


def checksum(path: Path) -> int:
    value = 0
    with open(path, "rb") as file:
        while block := file.read(2**20):
            value = zlib.crc32(block, value)
    return value


def sync_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
