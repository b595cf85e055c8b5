"""Images for training and evaluation, and the order in which training takes them."""

import hashlib
import itertools
import sys
import zlib

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from datasets import Image as ImageFeature
from PIL import Image

from ..errors import DataError
from .decoding import decode_image, image_name
from .keyed_random import sample_generator
from .masks import decode_mask, process_masks
from .procedural import ProceduralViews
from .sources import ImageSplits, rows_fingerprint
from .transforms import Augmentation


class TrainingImages(torch.utils.data.Dataset):
    """Augmented images by `(epoch, index)`: held in memory when they are of one size and fit, else decoded on demand.

    With a `label_column`, batches hold `labels` too. With `views`, every epoch augments a new view of each original,
    and `dataset` is not read; originals are always held in memory.
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
        views: ProceduralViews | None = None,
    ):
        self.views = views
        if views is not None:
            dataset, memory_limit = views.originals, sys.maxsize
        self.labels = torch.tensor(dataset[label_column][:]) if label_column else None
        self.num_channels = augmentation.num_channels if views is None else 1
        self.dataset = dataset.select_columns(image_column).cast_column(image_column, ImageFeature(decode=False))
        self.image_column, self.augmentation = image_column, augmentation
        self.on_bad_image, self.bad_images = on_bad_image, 0
        self.memory = None
        first = self.decode(0)
        if first is not None and first.nbytes * len(dataset) <= memory_limit:
            self.memory = self.decode_all(progress)

    @classmethod
    def from_splits(
        cls, splits: ImageSplits, augmentation: Augmentation, with_labels: bool = True, **settings
    ) -> "TrainingImages":
        """The training images of a data set. `settings` are those of the constructor."""
        return cls(
            splits.train,
            splits.image_column,
            augmentation,
            label_column=splits.label_column if with_labels else None,
            views=splits.views,
            **settings,
        )

    def __len__(self) -> int:
        return len(self.dataset) if self.memory is None else len(self.memory)

    @property
    def uses_workers(self) -> bool:
        """Whether data loader workers help: images in memory are faster without."""
        return self.memory is None

    @property
    def source(self) -> str:
        """How many images there are and how they are read, which decides in which precision they are cropped."""
        return f"{len(self)} images {'decoded on demand' if self.uses_workers else 'in memory'}"

    def decode(self, index: int) -> np.ndarray | None:
        record = self.dataset[index][self.image_column]
        return decode_image(record, self.num_channels, index, self.on_bad_image)

    def decode_all(self, progress) -> torch.Tensor | None:
        """All images as one tensor of bytes, or `None` if they are not of one size."""
        images, good = [], []
        for index, row in enumerate(progress(self.dataset, desc="decoding")):
            pixels = decode_image(row[self.image_column], self.num_channels, index, self.on_bad_image)
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
        """Hash of all pixels if they are in memory, else of the number of images and some of their files."""
        if self.memory is None:
            return rows_fingerprint(self.dataset, self.image_column)
        views = b"" if self.views is None else self.views.identity.encode()
        return hashlib.sha256(self.memory.numpy().tobytes() + views).hexdigest()[:16]

    def __getitems__(self, keys: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
        indices = [index for _, index in keys]
        if self.memory is not None:
            pixels = self.memory[indices]
            if self.views is not None:
                pixels, _ = self.views.render(pixels, keys, self.augmentation.seed, self.augmentation.num_channels)
            return self.with_labels(self.augmentation.batch(pixels, keys), indices)
        draws = self.augmentation.draw(keys)
        crops, bad_images = [], torch.zeros(len(indices), dtype=torch.long)
        records = self.dataset[indices][self.image_column]  # at once: row by row is far slower
        for position, record in enumerate(records):
            # The next image replaces a bad one.
            while (pixels := self.crop(record, indices[position], draws[position])) is None:
                bad_images[position] += 1
                indices[position] = (indices[position] + 1) % len(self.dataset)
                record = self.dataset[indices[position]][self.image_column]
            crops.append(pixels)
        # Part of the batch, because every worker has its own counter.
        return {**self.with_labels(self.augmentation.images(crops, draws, keys), indices), "bad_images": bad_images}

    def crop(self, record: dict, index: int, draws: np.ndarray) -> np.ndarray | None:
        return decode_image(
            record, self.num_channels, index, self.on_bad_image, lambda image, _: self.augmentation.crop(image, draws)
        )

    def with_labels(self, batch: dict[str, torch.Tensor], indices: list[int]) -> dict[str, torch.Tensor]:
        return batch if self.labels is None else {**batch, "labels": self.labels[indices]}


class DiffusionImages(TrainingImages):
    """Training images with the random numbers of a diffusion step: `noise`, and `uniform` for the time and class dropout."""

    def __getitems__(self, keys: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
        batch = super().__getitems__(keys)
        shape, seed = batch["pixel_values"].shape[1:], self.augmentation.seed
        generators = [sample_generator(seed, epoch, index, stream=2) for epoch, index in keys]
        batch["uniform"] = torch.from_numpy(
            np.stack([generator.random(2, dtype=np.float32) for generator in generators])
        )
        noise = np.stack([generator.standard_normal(shape, dtype=np.float32) for generator in generators])
        return {**batch, "noise": torch.from_numpy(noise)}


class AdversarialImages(TrainingImages):
    """Training images with the random numbers of a step of a GAN.

    `latents` are `(batch, 2, latent_dim)`, for the discriminator's update and for the generator's; `directions` are
    `(batch, 2, projection_size)`, the starts of power iterations for a real and for a generated image.
    """

    def __init__(self, *arguments, latent_dim: int, projection_size: int, **settings):
        super().__init__(*arguments, **settings)
        self.latent_dim, self.projection_size = latent_dim, projection_size

    def __getitems__(self, keys: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
        batch, seed = super().__getitems__(keys), self.augmentation.seed
        generators = [sample_generator(seed, epoch, index, stream=2) for epoch, index in keys]
        for name, dim in (("latents", self.latent_dim), ("directions", self.projection_size)):
            draws = np.stack([generator.standard_normal((2, dim), dtype=np.float32) for generator in generators])
            batch[name] = torch.from_numpy(draws)
        return batch


class StreamedImages(torch.utils.data.IterableDataset):
    """Images from a stream, epoch after epoch, each epoch shuffled by a buffer with its own seed.

    A larger buffer makes the order more random; the order also depends on the number of workers. Random numbers are
    keyed by epoch and position in the stream.
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
        self.on_bad_image, self.bad_images, self.uses_workers = on_bad_image, 0, True

    @property
    def num_shards(self) -> int:
        """Number of shards; workers beyond it would have nothing to read."""
        return self.dataset.num_shards

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        for epoch in itertools.count():
            # Not `set_epoch`: workers share that number and reach the end of an epoch at different times.
            seed = int(np.random.SeedSequence([self.augmentation.seed, epoch]).generate_state(1)[0])
            count, bad_images = -1, 0
            for count, row in enumerate(self.dataset.shuffle(seed=seed, buffer_size=self.buffer_size)):
                position = count * workers + number
                keys = [(epoch, position)]
                draws = self.augmentation.draw(keys)
                crop = decode_image(
                    row[self.image_column],
                    self.augmentation.num_channels,
                    position,
                    self.on_bad_image,
                    lambda image, _, draws=draws: self.augmentation.crop(image, draws[0]),
                )
                if crop is None:
                    bad_images += 1
                    continue
                sample = self.augmentation.images([crop], draws, keys)
                yield {**{name: tensor[0] for name, tensor in sample.items()}, "bad_images": torch.tensor(bad_images)}
                bad_images = 0
            if count < 0:
                raise DataError("The stream holds no images for one of the workers: use fewer --num_workers.")


def identity_collate(batch):
    """Returns the batch that `__getitems__` has collated; a named function, because workers may have to pickle it."""
    return batch


class EpochBatchSampler(torch.utils.data.Sampler):
    """Global batches of `(epoch, index)` from any step on, each epoch in its own order.

    With `parts`, a batch is split into that many micro-batches: accumulating gradients does not change the order.
    """

    def __init__(self, num_samples: int, batch_size: int, seed: int, first_step: int, last_step: int, parts: int = 1):
        if batch_size > num_samples:
            raise DataError(f"A batch of {batch_size} images needs as many; there are {num_samples}.")
        self.num_samples, self.seed = num_samples, seed
        self.first_step, self.last_step, self.parts = first_step, last_step, parts
        self.steps_per_epoch = num_samples // batch_size
        self.batch_size = batch_size // parts  # of a micro-batch: accelerate reads it
        self.drop_last = True

    def __len__(self) -> int:
        return (self.last_step - self.first_step) * self.parts

    def __iter__(self):
        current_epoch, order = None, None
        for step in range(self.first_step, self.last_step):
            epoch, position = divmod(step, self.steps_per_epoch)
            if epoch != current_epoch:
                current_epoch = epoch
                order = np.random.Generator(np.random.Philox(key=[self.seed, epoch])).permutation(self.num_samples)
            for part in range(self.parts):
                start = (position * self.parts + part) * self.batch_size
                yield [(epoch, int(index)) for index in order[start : start + self.batch_size]]


class EvaluationDataset(torch.utils.data.Dataset):
    """Whole images as a processor prepares them, with label, index and a checksum of the decoded pixels.

    Args:
        processor: Called as transformers' image processors are.
        mask_column (`str`, *optional*):
            Batches hold `masks` too, class numbers `(batch, height, width)`, resized and cropped as the images are; 255 is
            ignored. See [`process_masks`].
        mask_zero_is_ignored (`bool`): Class numbers in the files start at 1: they are lowered by one, and 0 is ignored.
        memory_limit (`int`, defaults to 0): Bytes of decoded images to keep, for a data set that is read many times.
    """

    def __init__(
        self,
        dataset: Dataset,
        image_column: str,
        label_column: str | None,
        processor,
        num_channels: int = 3,
        on_bad_image: str = "stop",
        memory_limit: int = 0,
        mask_column: str | None = None,
        mask_zero_is_ignored: bool = False,
    ):
        columns = [column for column in (image_column, label_column, mask_column) if column is not None]
        self.dataset = dataset.select_columns(columns)
        for column in filter(None, (image_column, mask_column)):
            self.dataset = self.dataset.cast_column(column, ImageFeature(decode=False))
        self.image_column, self.label_column, self.mask_column = image_column, label_column, mask_column
        self.mask_zero_is_ignored = mask_zero_is_ignored
        self.processor, self.num_channels, self.on_bad_image = processor, num_channels, on_bad_image
        self.free_memory, self.decoded = memory_limit, {}

    def __len__(self) -> int:
        return len(self.dataset)

    def decode(self, indices: list[int]) -> dict[int, tuple[np.ndarray | None, int, np.ndarray | None]]:
        """Pixels, label and mask by index; `None` for the pixels of an image that cannot be decoded and may be skipped."""
        missing = [index for index in indices if index not in self.decoded]
        decoded = {index: self.decoded[index] for index in indices if index in self.decoded}
        rows = self.dataset[missing] if missing else {self.image_column: []}  # at once: row by row is far slower
        labels = rows[self.label_column] if self.label_column and missing else [-1] * len(missing)
        masks = rows[self.mask_column] if self.mask_column and missing else [None] * len(missing)
        for index, record, label, mask_record in zip(missing, rows[self.image_column], labels, masks):
            pixels = decode_image(record, self.num_channels, index, self.on_bad_image)
            mask = None
            if pixels is not None and mask_record is not None:
                mask = decode_mask(mask_record, image_name(record, index), pixels.shape[:2], self.mask_zero_is_ignored)
            decoded[index] = pixels, label, mask
            size = sum(array.nbytes for array in (pixels, mask) if array is not None)
            if pixels is not None and size <= self.free_memory:
                self.decoded[index] = decoded[index]
                self.free_memory -= size
        return decoded

    def __getitems__(self, indices: list[int]) -> dict[str, torch.Tensor]:
        decoded = self.decode(indices)
        good = [index for index in indices if decoded[index][0] is not None]
        pixels = [array for array, _, _ in (decoded[index] for index in good) if array is not None]
        batch = {
            "labels": torch.tensor([decoded[index][1] for index in good]),
            "indices": torch.tensor(good),
            "checksums": torch.tensor([zlib.crc32(array.tobytes()) for array in pixels]),
        }
        if good:
            grey = self.num_channels == 1
            images = pixels if grey else [Image.fromarray(array) for array in pixels]
            layout = {"input_data_format": "channels_last"} if grey else {}
            batch["pixel_values"] = self.processor(images, return_tensors="pt", **layout)["pixel_values"]
        if good and self.mask_column:
            masks = [mask for _, _, mask in (decoded[index] for index in good) if mask is not None]
            batch["masks"] = process_masks(masks, self.processor)
        return batch
