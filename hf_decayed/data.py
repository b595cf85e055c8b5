"""Images for training: where they come from, what they become, and draws that do not depend on who makes them.

Every random number that a sample needs (crop, flip, mask) comes from a generator keyed by seed, epoch and the sample's
index. So one process or many, workers or none, a run begun or resumed: the same sample of the same epoch looks the same.
"""

import hashlib
import itertools
import json
import math
import warnings
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from datasets import ClassLabel, Dataset, IterableDataset, Value, load_dataset, load_from_disk
from datasets import Image as ImageFeature
from datasets.exceptions import DatasetsError
from PIL import Image, ImageOps

from .augmentation import rand_augment


BUNDLED = "fashion_mnist_subset"
DRAWS_BEFORE_NOISE = 24  # ten tries of (area, aspect ratio), place of the crop (two), flip, one to spare


class DataError(ValueError):
    """Something about the data that its owner has to mend, in one sentence."""


def sample_generator(seed: int, epoch: int, index: int, stream: int = 0) -> np.random.Generator:
    """Numbers that belong to one sample in one epoch, wherever and whenever they are drawn; streams are independent."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch], counter=[0, 0, stream, index]))


# Where images come from.


def load_splits(
    dataset_name: str | None = None,
    dataset_config: str | None = None,
    dataset_path: str | None = None,
    train_split: str = "train",
    eval_split: str | None = None,
    streaming: bool = False,
) -> tuple[Dataset | IterableDataset, Dataset | IterableDataset | None, str]:
    """Training images, held-out images if there are any, and a name for both without a local path in it.

    With neither a name nor a path: the bundled Fashion-MNIST subset. A path may be a folder of images by class, a file or
    folder of parquet, arrow or WebDataset tars, or what `save_to_disk` wrote.
    """
    if dataset_name and dataset_path:
        raise DataError(f"Give a data set's name or a path, not both; got '{dataset_name}' and '{dataset_path}'.")
    name = dataset_name or (Path(dataset_path).name if dataset_path else BUNDLED)
    try:
        if dataset_name:
            splits = load_dataset(dataset_name, dataset_config, streaming=streaming)
        elif dataset_path:
            splits = load_path(Path(dataset_path), streaming)
        else:
            folder = files("hf_decayed") / "bundled"
            data_files = {split: str(folder / f"fashion_mnist_{split}.parquet") for split in ("train", "test")}
            splits = load_dataset("parquet", data_files=data_files, streaming=streaming)
    except DataError:
        raise
    except (ValueError, OSError, DatasetsError) as error:
        raise DataError(f"'{name}' could not be loaded, or is empty: {str(error).splitlines()[0]}") from error
    if not isinstance(splits, dict):
        splits = {"train": splits}
    if train_split not in splits:
        raise DataError(f"'{name}' has no split '{train_split}'; it has {', '.join(splits)}.")
    if eval_split == train_split:
        raise DataError(f"'{eval_split}' cannot be trained on and held out at once.")
    if eval_split is None:
        # Test splits last: those of benchmarks often come without their labels.
        held_out = [split for split in ("validation", "val", "test") if split in splits and split != train_split]
        eval_split = held_out[0] if held_out else None
    elif eval_split not in splits:
        raise DataError(f"'{name}' has no split '{eval_split}'; it has {', '.join(splits)}.")
    for split in filter(None, (train_split, eval_split)):
        if isinstance(splits[split], Dataset) and len(splits[split]) == 0:
            raise DataError(f"The split '{split}' of '{name}' is empty.")
    return splits[train_split], splits[eval_split] if eval_split else None, name


def load_path(path: Path, streaming: bool) -> dict | Dataset:
    if not path.exists():
        raise DataError(f"There is nothing at '{path}'.")
    if path.is_dir():
        if (path / "dataset_dict.json").exists() or (path / "dataset_info.json").exists():
            saved = load_from_disk(str(path))
            if not streaming:
                return saved
            splits = saved if isinstance(saved, dict) else {"train": saved}
            return {name: split.to_iterable_dataset() for name, split in splits.items()}
        return load_dataset(str(path), streaming=streaming)
    builders = {".parquet": "parquet", ".arrow": "arrow", ".tar": "webdataset"}
    if path.suffix not in builders:
        raise DataError(f"'{path.name}' is neither a folder nor a file of kind {', '.join(builders)}.")
    return load_dataset(builders[path.suffix], data_files={"train": str(path)}, streaming=streaming)


def find_columns(
    dataset: Dataset | IterableDataset, image_column: str | None = None, label_column: str | None = None
) -> tuple[str, str | None]:
    """Names of the image column and, if there is one, of the label column; found by type when not given."""
    if dataset.features is None:
        dataset = dataset._resolve_features()
    features = dataset.features
    for given in filter(None, (image_column, label_column)):
        if given not in features:
            raise DataError(f"There is no column '{given}'; the columns are {', '.join(features)}.")
    if image_column is None:
        images = [name for name, feature in features.items() if isinstance(feature, ImageFeature)]
        if len(images) != 1:
            raise DataError(f"Found {len(images)} image columns among {', '.join(features)}: name one.")
        image_column = images[0]
    if label_column is None:
        labels = [name for name, feature in features.items() if isinstance(feature, ClassLabel)]
        labels = labels or [
            name
            for name in ("label", "labels", "cls")
            if isinstance(features.get(name), Value) and "int" in features[name].dtype
        ]
        if len(labels) > 1:
            raise DataError(f"Found the label columns {', '.join(labels)}: name one.")
        label_column = labels[0] if labels else None
    return image_column, label_column


def some(dataset: Dataset | IterableDataset, number: int | None):
    """So many rows, at random but always the same, for they may come sorted by class; of a stream the first."""
    if isinstance(dataset, IterableDataset):
        return dataset if number is None else dataset.take(number)
    if number is None or number >= len(dataset):
        return dataset
    return dataset.select(np.random.default_rng(0).permutation(len(dataset))[:number])


def hold_out(train, number: int):
    """Splits off images to evaluate on, where there is no split for it: a tenth at most; of a stream the first."""
    if isinstance(train, IterableDataset):
        return train.take(number), train.skip(number)
    split = train.train_test_split(test_size=min(0.1, number / len(train)), seed=0)
    return split["test"], split["train"]


# What an image becomes.


def as_pixels(image: Image.Image, num_channels: int) -> np.ndarray:
    """An image of any kind as `(height, width, num_channels)` bytes: upright, 8 bits, on white where transparent."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith(("I", "F")):  # 16 bits and more would be clipped, not scaled
        values = np.asarray(image, dtype=np.float64)
        top = 65535.0 if values.max() > 255 else 255.0
        image = Image.fromarray(np.clip(values * (255.0 / top), 0, 255).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    if num_channels not in (1, 3):
        raise DataError(f"Images become grey or RGB, 1 or 3 channels; the model wants {num_channels}.")
    pixels = np.asarray(image.convert("L" if num_channels == 1 else "RGB"))
    return pixels.reshape(*pixels.shape[:2], num_channels)


def crop_boxes(draws: np.ndarray, height: int, width: int, scale: tuple[float, float]) -> np.ndarray:
    """Random resized crops `(top, left, height, width)`, one per row of draws in [0, 1), as torchvision draws them.

    Ten tries at an area in `scale` and an aspect ratio in [3/4, 4/3]; the first that fits counts, else the centre.
    """
    areas = height * width * (scale[0] + (scale[1] - scale[0]) * draws[:, 0:20:2])
    ratios = np.exp(math.log(3 / 4) + (math.log(4 / 3) - math.log(3 / 4)) * draws[:, 1:20:2])
    widths, heights = np.rint(np.sqrt(areas * ratios)), np.rint(np.sqrt(areas / ratios))
    fits = (widths >= 1) & (widths <= width) & (heights >= 1) & (heights <= height)
    first = fits.argmax(axis=1)
    rows = np.arange(len(draws))
    box_height, box_width = heights[rows, first], widths[rows, first]
    whole_height, whole_width = min(height, round(width / (3 / 4))), min(width, round(height * (4 / 3)))
    box_height = np.where(fits.any(axis=1), box_height, whole_height)
    box_width = np.where(fits.any(axis=1), box_width, whole_width)
    top = np.floor(draws[:, 20] * (height - box_height + 1))
    left = np.floor(draws[:, 21] * (width - box_width + 1))
    top = np.where(fits.any(axis=1), top, (height - whole_height) // 2)
    left = np.where(fits.any(axis=1), left, (width - whole_width) // 2)
    return np.stack([top, left, box_height, box_width], axis=1)


def middle_box(height: int, width: int, size: tuple[int, int]) -> tuple[float, float, float, float]:
    """The largest box `(top, left, height, width)` in the middle of an image that has the shape of `size`."""
    scale = min(height / size[0], width / size[1])
    box_height, box_width = scale * size[0], scale * size[1]
    return (height - box_height) / 2, (width - box_width) / 2, box_height, box_width


class MiddleOfImages:
    """Called as transformers' processors are: the middle of each image, resized; in [0, 1], or `signed` in [-1, 1]."""

    def __init__(self, height: int, width: int, signed: bool = False):
        self.size, self.signed = (height, width), signed

    def __call__(self, images, return_tensors: str = "pt", **_) -> dict[str, torch.Tensor]:
        pixels = torch.from_numpy(np.stack([resized_middle(image, self.size) for image in images]))
        pixels = pixels.permute(0, 3, 1, 2).float() / 255
        return {"pixel_values": 2 * pixels - 1 if self.signed else pixels}

    def to_json_string(self) -> str:
        return json.dumps({"middle, bicubic": self.size, "signed": self.signed})


def resized_middle(image: Image.Image | np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """The middle of an image, brought to a size: `(height, width, channels)` bytes."""
    if isinstance(image, np.ndarray):
        image = Image.fromarray(image.squeeze(2) if image.shape[2] == 1 else image)
    top, left, height, width = middle_box(image.height, image.width, size)
    image = image.resize(tuple(size)[::-1], Image.Resampling.BICUBIC, (left, top, left + width, top + height))
    return np.asarray(image).reshape(*size, -1)


def resize_weights(start: torch.Tensor, length: torch.Tensor, size_in: int, size_out: int) -> torch.Tensor:
    """Matrices `(batch, size_out, size_in)` that resize `[start, start + length)` of each row, bicubic, antialiased."""
    step = (length / size_out).unsqueeze(1)  # input pixels per output pixel
    centres = start.unsqueeze(1) + step * (torch.arange(size_out) + 0.5)
    width = step.clamp(min=1.0)  # a step above one widens the kernel, which is what antialiasing means
    pixels = torch.arange(size_in) + 0.5
    distance = ((pixels - centres.unsqueeze(2)) / width.unsqueeze(2)).abs()
    near = (1.5 * distance - 2.5) * distance**2 + 1
    far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    weights = torch.where(distance < 1, near, torch.where(distance < 2, far, torch.zeros(())))
    return weights / weights.sum(dim=2, keepdim=True)


def crop_and_resize(
    images: torch.Tensor, boxes: torch.Tensor, flips: torch.Tensor, size: tuple[int, int]
) -> torch.Tensor:
    """Crops, flips and resizes a batch of bytes `(batch, channels, height, width)` at once; gives floats in [0, 255].

    Two batched products do what Pillow's `resize(box=...)` does image by image, but for its rounding after each pass.
    """
    height, width = images.shape[2:]
    rows = resize_weights(boxes[:, 0], boxes[:, 2], height, size[0]).unsqueeze(1)
    columns = resize_weights(boxes[:, 1], boxes[:, 3], width, size[1]).unsqueeze(1)
    columns = torch.where(flips[:, None, None, None], columns.flip(2), columns)
    across = (images.float() @ columns.transpose(2, 3)).clamp_(0, 255)
    return (rows @ across).clamp_(0, 255)


class Augmentation:
    """Crop, flip, normalise, and the noise for the mask, all drawn for one sample of one epoch.

    Without a `crop_scale` nothing is drawn for the crop: it is the middle.
    """

    def __init__(
        self,
        image_size: tuple[int, int],
        num_channels: int,
        num_patches: int,
        mean: list[float],
        std: list[float],
        seed: int,
        crop_scale: tuple[float, float] | None = (0.2, 1.0),
        horizontal_flip: bool = True,
        rand_augment_magnitude: float = 0.0,
    ):
        self.image_size, self.num_channels, self.num_patches = tuple(image_size), num_channels, num_patches
        self.mean, self.std = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))
        self.seed, self.crop_scale, self.horizontal_flip = seed, crop_scale, horizontal_flip
        self.rand_augment_magnitude = rand_augment_magnitude  # 0: none

    def draw(self, keys: list[tuple[int, int]]) -> tuple[np.ndarray, torch.Tensor, torch.Tensor]:
        """Draws for crops, flips, and mask noise, one row per `(epoch, index)`."""
        count = DRAWS_BEFORE_NOISE + self.num_patches
        draws = np.stack([sample_generator(self.seed, epoch, index).random(count) for epoch, index in keys])
        flips = torch.from_numpy(draws[:, 22] < 0.5) & self.horizontal_flip
        return draws, flips, torch.from_numpy(draws[:, DRAWS_BEFORE_NOISE:]).float()

    def boxes(self, draws: np.ndarray, height: int, width: int) -> np.ndarray:
        if self.crop_scale is None:
            return np.tile(middle_box(height, width, self.image_size), (len(draws), 1))
        return crop_boxes(draws, height, width, self.crop_scale)

    def batch(self, images: torch.Tensor, keys: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
        """A batch of images of one size, as bytes `(batch, channels, height, width)`, at once."""
        draws, flips, noise = self.draw(keys)
        boxes = torch.from_numpy(self.boxes(draws, *images.shape[2:])).float()
        return self.finish(crop_and_resize(images, boxes, flips, self.image_size), noise, keys)

    def each(self, images: list[np.ndarray], keys: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
        """Images of any size, `(height, width, channels)` bytes, one by one."""
        draws, flips, noise = self.draw(keys)
        pixels = []
        for image, row, flip in zip(images, draws, flips):
            top, left, height, width = self.boxes(row[None], *image.shape[:2])[0]
            pillow = Image.fromarray(image.squeeze(2) if self.num_channels == 1 else image)
            pillow = pillow.resize(
                self.image_size[::-1], Image.Resampling.BICUBIC, (left, top, left + width, top + height)
            )
            resized = np.array(pillow, dtype=np.float32).reshape(*self.image_size, self.num_channels)
            pixels.append(torch.from_numpy(resized).flip(1) if flip else torch.from_numpy(resized))
        return self.finish(torch.stack(pixels).permute(0, 3, 1, 2), noise, keys)

    def finish(
        self, pixels: torch.Tensor, noise: torch.Tensor, keys: list[tuple[int, int]]
    ) -> dict[str, torch.Tensor]:
        if self.rand_augment_magnitude > 0:
            pixels = torch.stack([self.rand_augmented(image, *key) for image, key in zip(pixels, keys)])
        return {"pixel_values": (pixels / 255 - self.mean) / self.std, "noise": noise}

    def rand_augmented(self, pixels: torch.Tensor, epoch: int, index: int) -> torch.Tensor:
        """One image `(channels, height, width)` in [0, 255]; what comes in at its sides is the mean."""
        draws = sample_generator(self.seed, epoch, index, stream=1)
        as_bytes = pixels.round().to(torch.uint8).permute(1, 2, 0).numpy()
        image = Image.fromarray(as_bytes.squeeze(2) if self.num_channels == 1 else as_bytes)
        fill = tuple((255 * self.mean).round().int().flatten().tolist())
        image = rand_augment(image, draws, self.rand_augment_magnitude, fill=fill[0] if len(fill) == 1 else fill)
        return torch.from_numpy(np.array(image, dtype=np.float32).reshape(as_bytes.shape)).permute(2, 0, 1)


class TrainingImages(torch.utils.data.Dataset):
    """Augmented images by `(epoch, index)`: held in memory when they are of one size and fit, else decoded on demand.

    With a `label_column`, batches hold `labels` too.
    """

    def __init__(
        self,
        dataset: Dataset,
        image_column: str,
        augmentation: Augmentation,
        memory_limit: int = 2 * 2**30,
        on_bad_image: str = "stop",
        progress=lambda items, **_: items,
        label_column: str | None = None,
    ):
        self.labels = torch.tensor(dataset[label_column][:]) if label_column else None
        self.dataset = dataset.select_columns(image_column).cast_column(image_column, ImageFeature(decode=False))
        self.image_column, self.augmentation = image_column, augmentation
        self.on_bad_image, self.bad_images = on_bad_image, 0
        self.memory = None
        first = self.decode(0)
        if first is not None and first.nbytes * len(dataset) <= memory_limit:
            self.memory = self.decode_all(progress)

    def __len__(self) -> int:
        return len(self.dataset) if self.memory is None else len(self.memory)

    def decode(self, index: int) -> np.ndarray | None:
        record = self.dataset[index][self.image_column]
        return decode(record, self.augmentation.num_channels, index, self.on_bad_image)

    def decode_all(self, progress) -> torch.Tensor | None:
        """All images as one tensor of bytes, or `None` if they are not of one size."""
        images, good = [], []
        for index, row in enumerate(progress(self.dataset, desc="decoding")):
            pixels = decode(row[self.image_column], self.augmentation.num_channels, index, self.on_bad_image)
            if pixels is None:
                self.bad_images += 1
            elif images and pixels.shape != images[0].shape:
                self.bad_images = 0
                return None
            else:
                images.append(pixels)
                good.append(index)
        if not images:
            raise DataError("None of the images could be decoded.")
        if self.labels is not None:
            self.labels = self.labels[good]
        return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()

    def fingerprint(self) -> str:
        """Of the pixels when in memory, else of the table."""
        if self.memory is None:
            return self.dataset._fingerprint
        return hashlib.sha256(self.memory.numpy().tobytes()).hexdigest()[:16]

    def __getitems__(self, keys: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
        indices = [index for _, index in keys]
        if self.memory is not None:
            return self.with_labels(self.augmentation.batch(self.memory[indices], keys), indices)
        images, bad_images = [], torch.zeros(len(indices), dtype=torch.long)
        for place, index in enumerate(indices):
            while (pixels := self.decode(index)) is None:  # a bad image gives way to its neighbour
                bad_images[place] += 1
                index = (index + 1) % len(self.dataset)
            images.append(pixels)
            indices[place] = index
        # With the batch, because workers count for themselves.
        return {**self.with_labels(self.augmentation.each(images, keys), indices), "bad_images": bad_images}

    def with_labels(self, batch: dict[str, torch.Tensor], indices: list[int]) -> dict[str, torch.Tensor]:
        return batch if self.labels is None else {**batch, "labels": self.labels[indices]}


class DiffusionImages(TrainingImages):
    """Training images with what a diffusion step draws for them: `noise`, and `uniform` numbers for time and dropping."""

    def __getitems__(self, keys: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
        batch = super().__getitems__(keys)
        shape, seed = batch["pixel_values"].shape[1:], self.augmentation.seed
        draws = [sample_generator(seed, epoch, index, stream=2) for epoch, index in keys]
        batch["uniform"] = torch.from_numpy(np.stack([each.random(2, dtype=np.float32) for each in draws]))
        noise = np.stack([each.standard_normal(shape, dtype=np.float32) for each in draws])
        return {**batch, "noise": torch.from_numpy(noise)}


class StreamedImages(torch.utils.data.IterableDataset):
    """Images from a stream, over and over, each epoch through a shuffle buffer in an order of its own.

    The order is as random as the buffer is large, and depends on the number of workers. Draws are keyed by epoch and place
    in the stream.
    """

    def __init__(
        self,
        dataset: IterableDataset,
        image_column: str,
        augmentation: Augmentation,
        buffer_size: int = 10_000,
        on_bad_image: str = "stop",
    ):
        self.dataset = dataset.select_columns(image_column).cast_column(image_column, ImageFeature(decode=False))
        self.image_column, self.augmentation, self.buffer_size = image_column, augmentation, buffer_size
        self.on_bad_image, self.bad_images, self.memory = on_bad_image, 0, None

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        for epoch in itertools.count():
            # A seed of its own, and not `set_epoch`: that number is shared by workers, who come to an epoch's end apart.
            seed = int(np.random.SeedSequence([self.augmentation.seed, epoch]).generate_state(1)[0])
            count, bad_images = -1, 0
            for count, row in enumerate(self.dataset.shuffle(seed=seed, buffer_size=self.buffer_size)):
                place = count * workers + number
                pixels = decode(row[self.image_column], self.augmentation.num_channels, place, self.on_bad_image)
                if pixels is None:
                    bad_images += 1
                    continue
                sample = self.augmentation.each([pixels], [(epoch, place)])
                yield {**{name: tensor[0] for name, tensor in sample.items()}, "bad_images": torch.tensor(bad_images)}
                bad_images = 0
            if count < 0:
                raise DataError("The stream holds no images for one of the workers: use fewer --num_workers.")


def decode(record: dict, num_channels: int, index: int, on_bad_image: str = "stop") -> np.ndarray | None:
    """Pixels of an undecoded image record; one that cannot be read is an error with its name, or `None`."""
    try:
        return as_pixels(ImageFeature().decode_example(record), num_channels)
    except DataError:
        raise
    except Exception as error:  # Pillow raises many kinds for broken files
        if on_bad_image == "skip":
            return None
        name = f"'{Path(record['path']).name}' (row {index})" if record.get("path") else f"in row {index}"
        raise DataError(
            f"The image {name} cannot be decoded ({error}); `--on_bad_image skip` passes over such images."
        ) from error


def as_it_is(batch):
    """Collates what `__getitems__` has put together already; a name, because workers may have to pickle it."""
    return batch


class EpochBatches(torch.utils.data.Sampler):
    """Endless global batches of `(epoch, index)`, each epoch in an order of its own, from any step on.

    With `parts` each comes in as many, one after the other: accumulating gradients changes nothing about the order.
    """

    def __init__(self, num_samples: int, batch_size: int, seed: int, first_step: int, last_step: int, parts: int = 1):
        if batch_size > num_samples:
            raise DataError(f"A batch of {batch_size} images needs as many; there are {num_samples}.")
        self.num_samples, self.seed = num_samples, seed
        self.first_step, self.last_step, self.parts = first_step, last_step, parts
        self.steps_per_epoch = num_samples // batch_size
        self.batch_size = batch_size // parts  # of what comes: accelerate looks here
        self.drop_last = True

    def __len__(self) -> int:
        return (self.last_step - self.first_step) * self.parts

    def __iter__(self):
        epoch_of_order, order = None, None
        for step in range(self.first_step, self.last_step):
            epoch, position = divmod(step, self.steps_per_epoch)
            if epoch != epoch_of_order:
                epoch_of_order, order = (
                    epoch,
                    np.random.Generator(np.random.Philox(key=[self.seed, epoch])).permutation(self.num_samples),
                )
            for part in range(self.parts):
                start = (position * self.parts + part) * self.batch_size
                yield [(epoch, int(index)) for index in order[start : start + self.batch_size]]


def evaluation_images(
    dataset: Dataset | IterableDataset,
    image_column: str,
    label_column: str | None,
    image_size: tuple[int, int],
    num_channels: int,
    on_bad_image: str = "stop",
    middle: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Images resized as bytes `(number, channels, height, width)`, whole, as the saved processor does it, or their
    `middle`; and labels."""
    columns = [image_column] + ([label_column] if label_column else [])
    dataset = dataset.select_columns(columns).cast_column(image_column, ImageFeature(decode=False))
    pixels, labels = [], []
    for index, row in enumerate(dataset):
        image = decode(row[image_column], num_channels, index, on_bad_image)
        if image is None:
            continue
        if middle:
            pixels.append(resized_middle(image, image_size))
        else:
            resized = Image.fromarray(image.squeeze(2) if num_channels == 1 else image)
            resized = resized.resize(tuple(image_size)[::-1], Image.Resampling.BICUBIC)
            pixels.append(np.asarray(resized).reshape(*image_size, num_channels))
        labels.append(row[label_column] if label_column else -1)
    if not pixels:
        raise DataError("There are no images to evaluate on.")
    if len(pixels) <= index:
        warnings.warn(f"Evaluating without {index + 1 - len(pixels)} images that cannot be decoded.", stacklevel=2)
    images = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous()
    return images, torch.tensor(labels) if label_column else None
