"""Images per second and core, from JPEG files to batches for a network of 224 pixels, against torchvision's and timm's ways.

python training/benchmarks/images.py
python training/benchmarks/images.py --sizes tiny --images 16 --rounds 5
"""

import argparse
import contextlib
import io
import tempfile
from pathlib import Path

import numpy as np
import torch
from datasets import disable_progress_bars
from PIL import Image
from timing import benchmark_parser, compare, run_benchmark

from hf_decayed.command_line import positive_int
from hf_decayed.data.datasets import TrainingImages
from hf_decayed.data.prepare import prepare_images
from hf_decayed.data.sources import load_splits
from hf_decayed.data.transforms import Augmentation, crop_boxes


PIXELS = {"tiny": (375, 500), "base": (1500, 2000)}  # height and width of the originals
IMAGE_SIZE = 224
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def benchmark(options: argparse.Namespace) -> list[dict]:
    disable_progress_bars()
    return [compare_readers(*PIXELS[size], options) for size in options.sizes]


def compare_readers(height: int, width: int, options: argparse.Namespace) -> dict:
    """The ways of others and ours on the originals, and ours on what `hf-decayed prepare` made of them."""
    number = options.images
    with tempfile.TemporaryDirectory() as temporary:
        originals = Path(temporary) / "originals"
        kilobytes = save_photographs(originals, number, height, width)
        files = sorted(originals.rglob("*.jpg"))
        ours = {"ours": read_batch(originals, number)}
        for label, settings in (("JPEG", {}), ("uncompressed", {"uncompressed": True})):
            folder = Path(temporary) / label
            with contextlib.redirect_stderr(io.StringIO()):
                prepare_images(str(originals), folder, size=256, num_workers=1, **settings)
            ours[f"ours, prepared at 256 pixels, {label}"] = read_batch(folder, number)
        variants = {
            "torchvision's transforms": lambda: torchvision_batch(files),
            "timm's transforms": lambda: timm_batch(files),
            **ours,
        }
        title = f"{width} x {height} JPEGs of {kilobytes} kB, random crops of {IMAGE_SIZE} pixels"
        return compare(title, variants, number, options)


def save_photographs(folder: Path, number: int, height: int, width: int) -> int:
    """JPEGs with about as many bytes per pixel as photographs, one of them for evaluation; returns their mean size in kB."""
    random = np.random.default_rng(0)
    for index in range(number + 1):
        coarse = random.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
        pixels = np.asarray(Image.fromarray(coarse).resize((width, height))) * 0.9
        pixels = (pixels + random.normal(0, 8, pixels.shape)).clip(0, 255).astype(np.uint8)
        path = folder / ("train" if index < number else "test") / f"{index}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path, quality=85)
    files = list((folder / "train").glob("*.jpg"))
    return round(sum(path.stat().st_size for path in files) / len(files) / 1000)


def read_batch(folder: Path, number: int):
    """Reads all images of a folder as one batch, as the workers of a training script do."""
    train, _, _ = load_splits(dataset_path=str(folder))
    augmentation = Augmentation((IMAGE_SIZE, IMAGE_SIZE), 3, num_patches=196, mean=MEAN, std=STD, seed=0)
    images = TrainingImages(train, "image", augmentation, memory_limit=0)
    keys = [(0, index) for index in range(number)]
    return lambda: images.__getitems__(keys)


# torchvision and timm are not needed here: these are the calls that their transforms make on images of Pillow.


def random_crop(file: Path) -> Image.Image:
    """`RandomResizedCrop` with `F.crop` and `F.resize`, and `RandomHorizontalFlip`."""
    with open(file, "rb") as handle:
        image = Image.open(handle).convert("RGB")
    draws = np.random.random((1, 24))
    top, left, height, width = crop_boxes(draws, image.height, image.width, (0.2, 1.0))[0]
    image = image.crop((left, top, left + width, top + height))
    image = image.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BICUBIC)
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if draws[0, 22] < 0.5 else image


def torchvision_batch(files: list[Path]) -> torch.Tensor:
    """`ToTensor` and `Normalize` of every image, then `default_collate`."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    tensors = []
    for file in files:
        pixels = torch.from_numpy(np.array(random_crop(file))).permute(2, 0, 1).contiguous()
        tensors.append(pixels.to(torch.float32).div(255).clone().sub_(mean).div_(std))
    return torch.stack(tensors)


def timm_batch(files: list[Path]) -> torch.Tensor:
    """`ToNumpy` of every image and `fast_collate`; the loader then normalises the batch."""
    mean, std = (255 * torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, STD))
    arrays = [np.rollaxis(np.array(random_crop(file), dtype=np.uint8), 2) for file in files]
    batch = torch.zeros((len(arrays), *arrays[0].shape), dtype=torch.uint8)
    for index, array in enumerate(arrays):
        batch[index] += torch.from_numpy(array)
    return batch.float().sub_(mean).div_(std)


def main() -> None:
    parser = benchmark_parser(__doc__, "tiny: JPEGs of 500 x 375 pixels, base: 2000 x 1500")
    parser.add_argument("--images", type=positive_int, default=16, help="of each size")
    run_benchmark(benchmark, parser)


if __name__ == "__main__":
    main()
