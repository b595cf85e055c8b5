"""Images for training and evaluation, and the order in which training takes them."""

import hashlib
import itertools
import warnings
import zlib

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from datasets import Image as ImageFeature
from PIL import Image

from ..errors import DataError
from .decoding import decode_image
from .keyed_random import sample_generator
from .transforms import Augmentation, center_crop


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
        return decode_image(record, self.augmentation.num_channels, index, self.on_bad_image)

    def decode_all(self, progress) -> torch.Tensor | None:
        """All images as one tensor of bytes, or `None` if they are not of one size."""
        images, good = [], []
        for index, row in enumerate(progress(self.dataset, desc="decoding")):
            pixels = decode_image(row[self.image_column], self.augmentation.num_channels, index, self.on_bad_image)
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
                pixels = decode_image(row[self.image_column], self.augmentation.num_channels, place, self.on_bad_image)
                if pixels is None:
                    bad_images += 1
                    continue
                sample = self.augmentation.each([pixels], [(epoch, place)])
                yield {**{name: tensor[0] for name, tensor in sample.items()}, "bad_images": torch.tensor(bad_images)}
                bad_images = 0
            if count < 0:
                raise DataError("The stream holds no images for one of the workers: use fewer --num_workers.")


def identity_collate(batch):
    """Collates what `__getitems__` has put together already; a name, because workers may have to pickle it."""
    return batch


class EpochBatchSampler(torch.utils.data.Sampler):
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
        image = decode_image(row[image_column], num_channels, index, on_bad_image)
        if image is None:
            continue
        if middle:
            pixels.append(center_crop(image, image_size))
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


class EvaluationDataset(torch.utils.data.Dataset):
    """Images as a processor prepares them, with label, place and a checksum of the decoded pixels."""

    def __init__(
        self,
        dataset: Dataset,
        image_column: str,
        label_column: str | None,
        processor,
        num_channels: int = 3,
        on_bad_image: str = "stop",
    ):
        columns = [image_column] + ([label_column] if label_column else [])
        self.dataset = dataset.select_columns(columns).cast_column(image_column, ImageFeature(decode=False))
        self.image_column, self.label_column = image_column, label_column
        self.processor, self.num_channels, self.on_bad_image = processor, num_channels, on_bad_image

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, places: list[int]) -> dict[str, torch.Tensor]:
        images, labels, kept, checksums = [], [], [], []
        rows = self.dataset[places]  # at once: a table gives rows one by one far more slowly
        row_labels = rows[self.label_column] if self.label_column else [-1] * len(places)
        for place, record, label in zip(places, rows[self.image_column], row_labels):
            pixels = decode_image(record, self.num_channels, place, self.on_bad_image)
            if pixels is None:
                continue
            images.append(pixels if self.num_channels == 1 else Image.fromarray(pixels))
            labels.append(label)
            kept.append(place)
            checksums.append(zlib.crc32(pixels.tobytes()))
        batch = {"labels": torch.tensor(labels), "places": torch.tensor(kept), "checksums": torch.tensor(checksums)}
        if images:
            layout = {"input_data_format": "channels_last"} if self.num_channels == 1 else {}
            batch["pixel_values"] = self.processor(images, return_tensors="pt", **layout)["pixel_values"]
        return batch
