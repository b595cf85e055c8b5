"""What the run of a training script has: a recipe, a folder with metrics, a way to be stopped."""

import argparse
import json
import math
import os
import platform
import shlex
import shutil
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
import yaml
from accelerate import Accelerator, PartialState
from datasets import ClassLabel, Dataset
from huggingface_hub import HfApi
from huggingface_hub.errors import StrictDataclassError

from . import __version__
from .checkpoints import find_checkpoint, load_checkpoint
from .data import DataError, find_columns, hold_out, load_splits, some


def names_of(recipes: Path) -> str:
    return ", ".join(sorted(path.stem for path in recipes.glob("*.yaml")))


def parse_with_recipe(
    parser: argparse.ArgumentParser, recipes: Path, arguments=None
) -> tuple[argparse.Namespace, dict]:
    """Options: from the command line, else from the file that `--recipe` names, else the parser's; and that file.

    A recipe may hold `fields` of the model's config besides flags: a dictionary, which flags cannot be.
    """
    recipe = parser.parse_known_args(arguments)[0].recipe
    path = Path(recipe) if recipe.endswith((".yaml", ".yml")) else recipes / f"{recipe}.yaml"
    if not path.is_file():
        parser.error(f"there is no recipe '{recipe}'; there are {names_of(recipes)}")
    values = yaml.safe_load(path.read_text())
    flags = {name: value for name, value in values.items() if name != "fields"}
    unknown = flags.keys() - {action.dest for action in parser._actions}
    if unknown:
        parser.error(f"the recipe '{recipe}' sets what is no flag: {', '.join(sorted(unknown))}")
    parser.set_defaults(**flags)
    return parser.parse_args(arguments), values


def add_data_arguments(parser: argparse.ArgumentParser):
    """The flags by which every script finds its images."""
    data = parser.add_argument_group("data (none given: the bundled images)")
    data.add_argument("--dataset_name", help="data set on the Hub")
    data.add_argument("--dataset_config", help="its configuration")
    data.add_argument("--dataset_path", help="folder of images, parquet, arrow, WebDataset tar")
    data.add_argument("--train_split", default="train")
    data.add_argument("--eval_split", help="held-out split; found when not given")
    data.add_argument("--image_column_name", help="found by type when not given")
    data.add_argument("--label_column_name", help="found by type when not given")
    data.add_argument("--on_bad_image", choices=["stop", "skip"], default="stop")
    data.add_argument("--num_workers", type=int, default=4, help="processes that decode images not held in memory")
    return data


def load_images(
    options: argparse.Namespace, accelerator: Accelerator | PartialState, streaming: bool = False
) -> tuple:
    """What those flags name: training images, held-out images or `None`, the data's name, image and label column."""
    with accelerator.main_process_first():  # one process fills the cache, the others read it
        train, held_out, name = load_splits(
            options.dataset_name,
            options.dataset_config,
            options.dataset_path,
            options.train_split,
            options.eval_split,
            streaming,
        )
    return train, held_out, name, *find_columns(train, options.image_column_name, options.label_column_name)


def load_labelled_images(options: argparse.Namespace, accelerator: Accelerator | PartialState) -> tuple:
    """For classifiers: the same with held-out images in any case, no more of each than asked for; and class names."""
    train, held_out, name, image_column, label_column = load_images(options, accelerator)
    if label_column is None:
        raise DataError("Classifying needs labels, and there is no label column: name one with --label_column_name.")
    if held_out is None:
        held_out, train = hold_out(train, len(train) // 10)
    class_names = class_names_of(train, label_column)
    train, held_out = some(train, options.max_train_samples), some(held_out, options.max_eval_samples)
    for split, rows in (("training", train), ("held-out", held_out)):
        if not 0 <= min(rows[label_column]) <= max(rows[label_column]) < len(class_names):
            raise DataError(f"The {split} labels do not lie in [0, {len(class_names)}): is it the right split?")
    return train, held_out, name, image_column, label_column, class_names


def class_names_of(train: Dataset, label_column: str) -> list[str]:
    """What the data calls its classes, or their numbers."""
    feature = train.features[label_column]
    names = feature.names if isinstance(feature, ClassLabel) else None
    return names or [str(number) for number in range(1 + max(train[label_column]))]


def boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}")
    return text.lower() == "true"


def flags_without_paths() -> list[str]:
    """The command line; of files and folders elsewhere than under this one it holds the name, not where they lie."""
    words = []
    for word in sys.argv[1:]:
        flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        elsewhere = Path(value).is_absolute() or value.startswith("~") or ".." in Path(value).parts
        words.append(shlex.quote(flag + equals + (Path(value).name if elsewhere else value)))
    return words


def one_sentence(error: Exception) -> str:
    """What went wrong, without the traceback that torch wraps round an error of a worker process."""
    lines = str(error.__cause__ if isinstance(error, StrictDataclassError) else error).strip().splitlines()
    if lines and lines[0].startswith("Caught "):
        lines = [lines[-1].partition(": ")[2]]
    return " ".join(" ".join(lines).split())


@contextmanager
def loading(model: str):
    """A model that is neither here nor on the Hub is said to be so, without the libraries' advice."""
    try:
        yield
    except OSError as error:
        if Path(model).exists():
            raise
        sentence = one_sentence(error)
        unreachable = "connect to" in sentence or "offline" in sentence
        reason = "the Hub cannot be reached" if unreachable else sentence
        raise DataError(f"'{model}' is no folder here, and no repository that could be had: {reason}") from error


def leave_signals_to_the_parent(worker: int) -> None:
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


def identity_of(options: argparse.Namespace, **more) -> dict:
    """All that decides what a run is: resumed under other values, it would be neither of the two."""
    flags = {name: value for name, value in vars(options).items() if name not in MAY_CHANGE}
    return json.loads(json.dumps({**flags, **more}, default=str))


def refuse_another_run(name: str, state: dict, identity: dict) -> None:
    changed = [
        f"{flag} {state['identity'].get(flag)} -> {value}"
        for flag, value in identity.items()
        if state["identity"].get(flag) != value
    ]
    if changed:
        raise DataError(f"'{name}' belongs to another run ({', '.join(changed)}): resume with its flags.")


def resume_or_clear(accelerator: Accelerator, options: argparse.Namespace, identity: dict) -> dict:
    """Puts back what `--resume_from_checkpoint` names and returns its state; a new run gets room, and an empty state."""
    checkpoints, state = options.output_dir / "checkpoints", {}
    if options.resume_from_checkpoint:
        path = find_checkpoint(options.resume_from_checkpoint, checkpoints)
        if path is None:
            accelerator.print(f"no checkpoint in {checkpoints}: starting afresh")
        else:
            state = load_checkpoint(accelerator, path)
            refuse_another_run(path.name, state, identity)
            accelerator.print(f"resumed at step {state['step']} from {path}")
    elif accelerator.is_main_process:
        clear_finished_run(options.output_dir)
    accelerator.wait_for_everyone()
    return state


def share_cores(accelerator: Accelerator, threads: int | None = None) -> None:
    """On a CPU, shares its cores out over the processes: accelerate's launcher leaves each process one."""
    if accelerator.device.type == "cpu":
        torch.set_num_threads(threads or max(1, (os.cpu_count() or 1) // accelerator.num_processes))


def hardware(accelerator: Accelerator) -> str:
    """Of all processes, if they are alike."""
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


class MetricsFile:
    """`metrics.jsonl`; a resumed run drops what an earlier one wrote after the step it resumes from."""

    def __init__(self, path: Path, step: int, writing: bool):
        self.path, self.writing = path, writing
        if writing:
            path.parent.mkdir(parents=True, exist_ok=True)
            kept = [record for record in self.records() if record["step"] <= step] if step and path.exists() else []
            path.write_text("".join(json.dumps(record) + "\n" for record in kept))

    def write(self, record: dict) -> None:
        if self.writing:
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def records(self) -> list[dict]:
        lines = self.path.read_text().splitlines()
        records = []
        for line in lines:
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:  # the line that a killed process was writing
                continue
        return records

    def recent(self, name: str, number: int = 10) -> float | None:
        """Mean of the last few finite values: one step's loss says little."""
        values = [record[name] for record in self.records() if math.isfinite(record.get(name, math.nan))][-number:]
        return sum(values) / len(values) if values else None


class StopSignal:
    """Remembers SIGTERM and Ctrl-C until the step is done; a second one stops at once."""

    def __init__(self):
        self.asked, self.name = False, "another process"
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.receive)

    def receive(self, number, frame):
        self.asked, self.name = True, signal.Signals(number).name
        signal.signal(number, signal.SIG_DFL)


def make_repository(name: str | None, accelerator: Accelerator) -> str | None:
    """A repository to upload to; made before training, so that a missing right is found out then."""
    if not name or not accelerator.is_main_process:
        return None
    try:
        return HfApi().create_repo(name, exist_ok=True).repo_id
    except Exception as error:  # the client raises whatever its HTTP library does
        raise DataError(f"The repository '{name}' cannot be made: {error}") from error


def upload_run(repository: str, folder: Path, trackers: str) -> None:
    """Uploads what a run has made, in one commit; not what belongs to this machine."""
    left_out = ["checkpoints/*", "arguments.json", f"{trackers}/*"]  # the last: what trackers wrote, with local paths
    try:
        HfApi().upload_folder(repo_id=repository, folder_path=folder, ignore_patterns=left_out)
    except Exception as error:
        again = " ".join(f"--exclude '{pattern}'" for pattern in left_out)
        raise DataError(
            f"Trained and saved, but not uploaded ({error}); try `hf upload {repository} {folder} . {again}`."
        ) from error
    print(f"uploaded to {repository}")
