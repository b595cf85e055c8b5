"""Training checkpoints that are whole or not there.

A checkpoint is written under a temporary name, synced to disk, and renamed last. Its manifest lists every file with size
and checksum, so that one damaged later is recognised and passed over.
"""

import json
import os
import shutil
import warnings
import zlib
from pathlib import Path

import torch
from accelerate import Accelerator


MANIFEST = "manifest.json"


def save_checkpoint(accelerator: Accelerator, folder: Path, step: int, state: dict, keep: int | None) -> Path | None:
    """Saves all that accelerate knows, and `state`, as `folder/step-N`; all processes call it.

    On a full disk it warns, removes what it wrote and returns `None`: earlier checkpoints stay.
    """
    target = folder / f"step-{step:08d}"
    temporary = folder / f".writing-step-{step:08d}"
    failure = None
    try:
        if accelerator.is_main_process:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        accelerator.wait_for_everyone()
        accelerator.save_state(str(temporary))
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        failure = error
    if any_process(accelerator, failure is not None):
        if accelerator.is_main_process:
            shutil.rmtree(temporary, ignore_errors=True)
            warnings.warn(f"No checkpoint at step {step}: it could not be written ({failure}).", stacklevel=2)
        return None
    if accelerator.is_main_process:
        try:
            (temporary / "state.json").write_text(json.dumps({**state, "step": step}))
            files = sorted(path for path in temporary.rglob("*") if path.is_file())
            manifest = {
                path.relative_to(temporary).as_posix(): [path.stat().st_size, checksum(path)] for path in files
            }
            (temporary / MANIFEST).write_text(json.dumps(manifest))
            for path in [*files, temporary / MANIFEST, temporary]:
                sync_to_disk(path)
            shutil.rmtree(target, ignore_errors=True)
            os.replace(temporary, target)
            sync_to_disk(folder)
            for old in sorted(folder.glob("step-*"))[: -keep if keep else 0]:
                shutil.rmtree(old, ignore_errors=True)
        except OSError as error:
            failure = error
            shutil.rmtree(temporary, ignore_errors=True)
            warnings.warn(f"No checkpoint at step {step}: it could not be written ({error}).", stacklevel=2)
    return None if any_process(accelerator, failure is not None) else target


def find_checkpoint(wanted: str, folder: Path) -> Path | None:
    """The checkpoint at a path, or, for `latest`, the newest whole one in `folder`; `None` if there is none."""
    if wanted != "latest":
        if problem := find_damage(Path(wanted)):
            raise ValueError(f"'{wanted}' is not a whole checkpoint: {problem}.")
        return Path(wanted)
    for path in sorted(folder.glob("step-*"), reverse=True):
        if problem := find_damage(path):
            warnings.warn(f"Passing over the checkpoint '{path.name}': {problem}.", stacklevel=2)
        else:
            return path
    return None


def load_checkpoint(accelerator: Accelerator, path: Path) -> dict:
    """Puts everything back and returns the `state` that was saved with it."""
    accelerator.load_state(str(path))
    return json.loads((path / "state.json").read_text())


def find_damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, or `None`."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        for name, (size, expected) in manifest.items():
            if (path / name).stat().st_size != size or checksum(path / name) != expected:
                return f"{name} has changed"
    except (OSError, ValueError) as error:
        return str(error)
    return None


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
