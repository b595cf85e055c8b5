"""Cost of reading images beside the model, and of the whole training script against transformers' `Trainer`.

python training/benchmarks/data.py
python training/benchmarks/data.py --sizes tiny --rounds 5 --steps 2
"""

import argparse
import contextlib
import itertools
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import datasets
import numpy as np
import torch
import transformers
from datasets import Dataset
from models import BATCH_SIZES, CONFIG_FIELDS, mae_parser, pretraining_step
from PIL import Image
from timing import Stopwatch, compare, run_benchmark
from transformers import ViTMAEConfig, ViTMAEForPreTraining

from hf_decayed import DecayedViTMAEConfig, DecayedViTMAEForPreTraining
from hf_decayed.command_line import positive_int
from hf_decayed.data.datasets import EpochBatchSampler, TrainingImages, identity_collate
from hf_decayed.data.sources import load_image_splits
from hf_decayed.data.transforms import Augmentation, crop_boxes
from hf_decayed.errors import UserError
from hf_decayed.models.configuration_decayed_vit_mae import as_pair


MAE_SCRIPT = Path(__file__).parents[1] / "mae.py"
WARMUP_STEPS = 4  # of a whole run, which are not timed


def benchmark(options: argparse.Namespace) -> list[dict]:
    tables = []
    train = load_image_splits().train
    if "tiny" in options.sizes:
        tables.append(real_against_synthetic("tiny", train, "bundled images, held in memory", options))
    if "base" in options.sizes:
        with tempfile.TemporaryDirectory() as folder:
            photographs = save_photographs(Path(folder), 64)
            title = "500 x 375 JPEGs, decoded and cropped in the same process"
            tables.append(real_against_synthetic("base", photographs, title, options, memory_limit=0))
    if "tiny" in options.sizes:
        tables.append(script_against_trainer(train, options))
    return tables


def real_against_synthetic(
    size: str, dataset: Dataset, title: str, options: argparse.Namespace, **image_settings
) -> dict:
    """Training on images of a data set against training on the same batch again and again; without loader workers."""
    channels = 1 if size == "tiny" else 3
    batch_size = options.batch_size or BATCH_SIZES[size]
    config = DecayedViTMAEConfig(**CONFIG_FIELDS[size], num_channels=channels)
    model = DecayedViTMAEForPreTraining(config).to(options.device)
    step = pretraining_step("ours", model, None, options, return_logits=False)
    augmentation = Augmentation(
        as_pair(config.image_size),
        channels,
        math.prod(config.grid_size),
        mean=[0.45] * channels,
        std=[0.22] * channels,
        seed=0,
    )
    images = TrainingImages(dataset, "image", augmentation, **image_settings)
    batches = EpochBatchSampler(len(images), batch_size, seed=0, first_step=0, last_step=10**9)
    loader = iter(torch.utils.data.DataLoader(images, batch_sampler=batches, collate_fn=identity_collate))
    synthetic = next(loader)

    def train(batches):
        for batch in itertools.islice(batches, options.steps):
            batch.pop("bad_images", None)
            step(**{name: tensor.to(options.device) for name, tensor in batch.items()})

    variants = {
        "real images": lambda: train(loader),
        "synthetic images": lambda: train(itertools.repeat(synthetic)),
    }
    return compare(f"{size}, batch {batch_size}: {title}", variants, options.steps * batch_size, options)


def save_photographs(folder: Path, number: int) -> Dataset:
    """JPEGs of the usual size in pixels and about the usual size in bytes: blurred noise."""
    random = np.random.default_rng(0)
    paths = []
    for index in range(number):
        image = Image.fromarray(random.integers(0, 256, (94, 125, 3), dtype=np.uint8)).resize((500, 375))
        paths.append(str(folder / f"{index}.jpg"))
        image.save(paths[-1], quality=90)
    return Dataset.from_dict({"image": paths}).cast_column("image", datasets.Image())


def script_against_trainer(train: Dataset, options: argparse.Namespace) -> dict:
    """Wall-clock time of the same steps, after a warm-up, in mae.py and in transformers' `Trainer`."""
    batch_size, num_steps = options.batch_size or 128, 2 * options.steps

    def in_folder(run, *arguments):
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
            return run(folder, batch_size, num_steps, *arguments, options)

    return compare(
        f"tiny, batch {batch_size}: {num_steps} whole steps (images, model, optimizer, logging)",
        {
            "transformers ViTMAE in Trainer": lambda: in_folder(run_trainer, train),
            "mae.py --preset plain": lambda: in_folder(run_script, "plain"),
            "mae.py": lambda: in_folder(run_script, "default"),
        },
        num_steps * batch_size,
        options,
        seconds=lambda run: run(),
    )


def run_trainer(folder: str, batch_size: int, num_steps: int, train: Dataset, options: argparse.Namespace) -> float:
    """Seconds of the steps after the warm-up."""
    stopwatch = Stopwatch(options.device)

    class StepTimer(transformers.TrainerCallback):
        def on_step_end(self, training_arguments, state, control, **_):
            if state.global_step == WARMUP_STEPS:
                stopwatch.start()
            elif state.global_step == WARMUP_STEPS + num_steps:
                stopwatch.stop()

    training_arguments = transformers.TrainingArguments(
        folder,
        max_steps=WARMUP_STEPS + num_steps,
        per_device_train_batch_size=batch_size,
        remove_unused_columns=False,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        use_cpu=options.device == "cpu",
    )
    config = ViTMAEConfig(**CONFIG_FIELDS["tiny"], num_channels=1, norm_pix_loss=True)
    transformers.Trainer(
        ViTMAEForPreTraining(config),
        training_arguments,
        train_dataset=train.with_transform(pillow_transform),
        callbacks=[StepTimer()],
    ).train()
    return stopwatch.seconds


def pillow_transform(rows: dict) -> dict:
    """mae.py's random crops and flips, one image at a time."""
    pixel_values = []
    for image in rows["image"]:
        draws = np.random.random((1, 24))
        top, left, height, width = crop_boxes(draws, image.height, image.width, (0.2, 1.0))[0]
        image = image.resize((32, 32), Image.Resampling.BICUBIC, (left, top, left + width, top + height))
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if draws[0, 22] < 0.5 else image
        pixel_values.append((torch.from_numpy(np.array(image, dtype=np.float32))[None] / 255 - 0.45) / 0.22)
    return {"pixel_values": pixel_values}


def run_script(folder: str, batch_size: int, num_steps: int, preset: str, options: argparse.Namespace) -> float:
    """Seconds of the steps after the warm-up, which mae.py itself writes to its metrics."""
    command = [sys.executable, MAE_SCRIPT, "--output_dir", folder, "--recipe", "tiny", "--preset", preset]
    command += ["--batch_size", batch_size, "--max_train_steps", WARMUP_STEPS + num_steps, "--log_every", WARMUP_STEPS]
    command += ["--eval_train_samples", 20, "--eval_test_samples", 20, "--cpu_threads", options.threads]
    command += ["--attn_implementation", options.attention, "--set", "norm_pix_loss=true"]
    process = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if process.returncode != 0:
        raise UserError(f"mae.py failed: {process.stderr.strip().splitlines()[-1]}")
    records = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    rates = [(record["step"], record["images_per_second"]) for record in records if "images_per_second" in record]
    return sum((step - start) * batch_size / rate for (start, _), (step, rate) in itertools.pairwise(rates))


def main() -> None:
    parser = mae_parser(__doc__)
    parser.add_argument(
        "--steps", type=positive_int, default=4, help="training steps per round; whole scripts do twice as many"
    )
    run_benchmark(benchmark, parser)


if __name__ == "__main__":
    main()
