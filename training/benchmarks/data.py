"""Cost of reading images beside the model. Whole training scripts are in first_command.py.

python training/benchmarks/data.py
python training/benchmarks/data.py --sizes tiny --rounds 5 --steps 2
"""

import argparse
import itertools
import math
import tempfile
from pathlib import Path

import datasets
import numpy as np
import torch
from datasets import Dataset
from models import BATCH_SIZES, CONFIG_FIELDS, mae_parser, pretraining_step
from PIL import Image
from timing import compare, run_benchmark

from hf_decayed import DecayedViTMAEConfig, DecayedViTMAEForPreTraining
from hf_decayed.command_line import positive_int
from hf_decayed.data.datasets import EpochBatchSampler, TrainingImages, identity_collate
from hf_decayed.data.sources import load_image_splits
from hf_decayed.data.transforms import Augmentation
from hf_decayed.models.configuration_decayed_vit_mae import as_pair


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


def main() -> None:
    parser = mae_parser(__doc__)
    parser.add_argument("--steps", type=positive_int, default=4, help="training steps per round")
    run_benchmark(benchmark, parser)


if __name__ == "__main__":
    main()
