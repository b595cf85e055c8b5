"""The bookkeeping of a training run."""

import argparse
import json
import os
import shutil
import signal
from pathlib import Path

import torch
from accelerate import Accelerator

from ..errors import DataError
from .checkpoints import find_checkpoint, load_checkpoint


def ignore_signals(worker: int) -> None:
    """For loaders: a worker that dies of the signal would take the process down before it has written its checkpoint."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


# Flags that change how a run is watched or where it lies, but not what it is.
MAY_CHANGE = set(
    "output_dir features_dir latents_dir resume_from_checkpoint recipe dataset_path report_to push_to_hub checkpointing_steps "
    "checkpoints_total_limit log_every eval_every eval_train_samples eval_test_samples max_eval_samples num_workers "
    "memory_limit_gb cpu_threads max_skipped_steps sample_every sample_steps sample_images eval_samples "
    "guidance_scale".split()
)


def run_signature(options: argparse.Namespace, **more) -> dict:
    """All that decides what a run is: resumed under other values, it would be neither of the two."""
    flags = {name: value for name, value in vars(options).items() if name not in MAY_CHANGE}
    return json.loads(json.dumps({**flags, **more}, default=str))


def check_signature(name: str, state: dict, identity: dict) -> None:
    changed = [
        f"{flag} {state['identity'].get(flag)} -> {value}"
        for flag, value in identity.items()
        if state["identity"].get(flag) != value
    ]
    if changed:
        raise DataError(f"'{name}' belongs to another run ({', '.join(changed)}): resume with its flags.")


def prepare_output_dir(accelerator: Accelerator, options: argparse.Namespace, identity: dict) -> dict:
    """Puts back what `--resume_from_checkpoint` names and returns its state; a new run gets room, and an empty state."""
    checkpoints, state = options.output_dir / "checkpoints", {}
    if options.resume_from_checkpoint:
        path = find_checkpoint(options.resume_from_checkpoint, checkpoints)
        if path is None:
            accelerator.print(f"no checkpoint in {checkpoints}: starting afresh")
        else:
            state = load_checkpoint(accelerator, path)
            check_signature(path.name, state, identity)
            accelerator.print(f"resumed at step {state['step']} from {path}")
    elif accelerator.is_main_process:
        clear_finished_run(options.output_dir)
    accelerator.wait_for_everyone()
    return state


def set_cpu_threads(accelerator: Accelerator, threads: int | None = None) -> None:
    """On a CPU, shares its cores out over the processes: accelerate's launcher leaves each process one."""
    if accelerator.device.type == "cpu":
        torch.set_num_threads(threads or max(1, (os.cpu_count() or 1) // accelerator.num_processes))


def clear_finished_run(folder: Path) -> None:
    """Makes room for a new run; one that did not finish is not thrown away."""
    if any((folder / "checkpoints").glob("[!.]*")):  # hidden ones were being written when the run was killed
        if not (folder / "results.json").exists():
            raise DataError(
                f"'{folder}' holds a run that did not finish: go on with --resume_from_checkpoint latest, "
                "or name another --output_dir."
            )
        shutil.rmtree(folder / "checkpoints")
    (folder / "results.json").unlink(missing_ok=True)
    shutil.rmtree(folder / "results", ignore_errors=True)  # evaluations of the model that goes


class StopSignal:
    """Remembers SIGTERM and Ctrl-C until the step is done; a second one stops at once."""

    def __init__(self):
        self.asked, self.name = False, "another process"
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.receive)

    def receive(self, number, frame):
        self.asked, self.name = True, signal.Signals(number).name
        signal.signal(number, signal.SIG_DFL)
