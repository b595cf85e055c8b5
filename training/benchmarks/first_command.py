"""Steps of `accelerate launch training/mae.py` against transformers' `Trainer`, and in float32 against `--mixed_precision auto`.

python training/benchmarks/first_command.py
python training/benchmarks/first_command.py --rounds 5 --steps 60

All runs have the network, the batch and the images of the recipe `tiny`. `Trainer` reads views that were rendered once; mae.py
draws new ones.
"""

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
import yaml
from datasets import Dataset
from timing import Stopwatch, benchmark_parser, compare, run_benchmark
from transformers import ViTMAEConfig, ViTMAEForPreTraining

from hf_decayed.command_line import positive_int
from hf_decayed.data.sources import load_image_splits
from hf_decayed.errors import UserError
from hf_decayed.models.image_processing_decayed import default_image_processor


SCRIPTS = Path(__file__).parents[1]
RECIPE = yaml.safe_load((SCRIPTS / "recipes" / "mae" / "tiny.yaml").read_text())
WARMUP_STEPS = 10  # that are not timed


def benchmark(options) -> list[dict]:
    train = load_image_splits(dataset_name=RECIPE["dataset_name"]).train
    batch_size = options.batch_size or RECIPE["batch_size"]

    def in_folder(run, *arguments):
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
            return run(folder, batch_size, *arguments, options)

    against_trainer = {
        "transformers ViTMAE in Trainer": lambda: in_folder(run_trainer, train, False),
        "the same, bf16": lambda: in_folder(run_trainer, train, True),
        "mae.py --preset plain, float32": lambda: in_folder(run_script, "plain", "no"),
        "mae.py --preset plain": lambda: in_folder(run_script, "plain", "auto"),
    }
    against_itself = {
        "mae.py, float32": lambda: in_folder(run_script, "default", "no"),
        "mae.py": lambda: in_folder(run_script, "default", "auto"),
    }
    what = f"{options.steps} steps of {batch_size} images (views, model, optimizer, logging)"
    return [
        compare(title, variants, options.steps * batch_size, options, seconds=lambda run: run())
        for title, variants in (
            (f"ViTMAE of the recipe tiny: {what}", against_trainer),
            (f"recipe tiny: {what}", against_itself),
        )
    ]


def run_trainer(folder: str, batch_size: int, train: Dataset, bf16: bool, options) -> float:
    """Seconds of the steps after the warm-up."""
    stopwatch = Stopwatch(options.device)

    class StepTimer(transformers.TrainerCallback):
        def on_step_end(self, training_arguments, state, control, **_):
            if state.global_step == WARMUP_STEPS:
                stopwatch.start()
            elif state.global_step == WARMUP_STEPS + options.steps:
                stopwatch.stop()

    training_arguments = transformers.TrainingArguments(
        folder,
        max_steps=WARMUP_STEPS + options.steps,
        per_device_train_batch_size=batch_size,
        remove_unused_columns=False,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        bf16=bf16,
        use_cpu=options.device == "cpu",
    )
    fields = {name: value for name, value in RECIPE["fields"].items() if name != "shortcut_decay"}
    processor = default_image_processor(fields["image_size"], fields["num_channels"])
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (processor.image_mean, processor.image_std))

    def transform(rows: dict) -> dict:
        images = [torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in rows["image"]]
        flips = torch.rand(len(images)) < 0.5
        images = [image.flip(2) if flip else image for image, flip in zip(images, flips)]
        return {"pixel_values": [(image / 255 - mean) / std for image in images]}

    transformers.Trainer(
        ViTMAEForPreTraining(ViTMAEConfig(**fields)),
        training_arguments,
        train_dataset=train.with_transform(transform),
        callbacks=[StepTimer()],
    ).train()
    return stopwatch.seconds


def run_script(folder: str, batch_size: int, preset: str, precision: str, options) -> float:
    flags = ["--preset", preset, "--cpu_threads", options.threads, "--mixed_precision", precision]
    flags += ["--set", "shortcut_decay=1.0"] if preset == "plain" else []
    return time_script([sys.executable], flags, folder, batch_size, options.steps)


def time_script(
    launcher: list, flags: list, folder: str, batch_size: int, num_steps: int, **environment: str
) -> float:
    """Seconds of the steps of mae.py after the warm-up, which it writes to its metrics."""
    command = [*launcher, SCRIPTS / "mae.py", "--output_dir", folder, "--recipe", "tiny", "--batch_size", batch_size]
    command += ["--max_train_steps", WARMUP_STEPS + num_steps, "--log_every", WARMUP_STEPS, "--compare"]
    command += ["--eval_train_samples", 20, "--eval_test_samples", 20, *flags]
    process = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env={**os.environ, **environment}
    )
    if process.returncode != 0:
        raise UserError(f"mae.py failed: {process.stderr.strip().splitlines()[-1]}")
    records = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    rates = [(record["step"], record["images_per_second"]) for record in records if "images_per_second" in record]
    return sum((step - start) * batch_size / rate for (start, _), (step, rate) in itertools.pairwise(rates))


def main() -> None:
    parser = benchmark_parser(__doc__, "not used here: the size is the recipe's")
    parser.add_argument("--steps", type=positive_int, default=60, help="timed steps of a run, a multiple of 10")
    run_benchmark(benchmark, parser)


if __name__ == "__main__":
    main()
