"""Crops, flips and normalisation, one image at a time or in batches."""

import json
import math

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from .augmentation import rand_augment
from .decoding import decode_reduced, upright_size, view_pixels
from .keyed_random import sample_generator


LOG_RATIOS = math.log(3 / 4), math.log(4 / 3)  # of the aspect ratio of a crop
DRAWS_BEFORE_NOISE = 24  # ten tries of (area, aspect ratio), place of the crop (two), flip, one to spare


def crop_box(draws: list[float], height: int, width: int, scale: tuple[float, float]) -> tuple[int, int, int, int]:
    """A random resized crop `(top, left, height, width)` from 22 draws in [0, 1), as torchvision draws it.

    Ten tries at an area in `scale` and an aspect ratio in [3/4, 4/3]; the first that fits is used, else the center.
    """
    for area_draw, ratio_draw in zip(draws[0:20:2], draws[1:20:2]):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * area_draw)
        ratio = math.exp(LOG_RATIOS[0] + (LOG_RATIOS[1] - LOG_RATIOS[0]) * ratio_draw)
        box_height, box_width = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 1 <= box_height <= height and 1 <= box_width <= width:
            top = math.floor(draws[20] * (height - box_height + 1))
            left = math.floor(draws[21] * (width - box_width + 1))
            return top, left, box_height, box_width
    box_height, box_width = min(height, round(width / (3 / 4))), min(width, round(height * (4 / 3)))
    return (height - box_height) // 2, (width - box_width) // 2, box_height, box_width


def crop_boxes(draws: np.ndarray, height: int, width: int, scale: tuple[float, float]) -> np.ndarray:
    """[`crop_box`] for every row of draws; one row, as for photos of many sizes, is ten times as fast as in NumPy."""
    boxes = [crop_box(row, height, width, scale) for row in draws[:, :22].tolist()]
    return np.array(boxes, dtype=float).reshape(-1, 4)


def center_box(height: int, width: int, size: tuple[int, int]) -> tuple[float, float, float, float]:
    """The largest box `(top, left, height, width)` in the middle of an image that has the shape of `size`."""
    scale = min(height / size[0], width / size[1])
    box_height, box_width = scale * size[0], scale * size[1]
    return (height - box_height) / 2, (width - box_width) / 2, box_height, box_width


class CenterCropProcessor:
    """Called as transformers' processors are: the middle of each image, resized; in [0, 1], or `signed` in [-1, 1]."""

    def __init__(self, height: int, width: int, signed: bool = False):
        self.size, self.signed = (height, width), signed

    def __call__(self, images, return_tensors: str = "pt", **_) -> dict[str, torch.Tensor]:
        pixels = torch.from_numpy(np.stack([center_crop(image, self.size) for image in images]))
        pixels = pixels.permute(0, 3, 1, 2).float() / 255
        return {"pixel_values": 2 * pixels - 1 if self.signed else pixels}

    def to_json_string(self) -> str:
        return json.dumps({"middle, bicubic": self.size, "signed": self.signed})


def center_crop(
    image: Image.Image | np.ndarray, size: tuple[int, int], resample: Image.Resampling = Image.Resampling.BICUBIC
) -> np.ndarray:
    """The middle of an image, resized: `(height, width, channels)` bytes."""
    if isinstance(image, np.ndarray):
        image = Image.fromarray(image.squeeze(2) if image.shape[2] == 1 else image)
    top, left, height, width = center_box(image.height, image.width, size)
    image = image.resize(tuple(size)[::-1], resample, (left, top, left + width, top + height))
    return np.asarray(image).reshape(*size, -1)


def crop_then_resize(
    image: Image.Image | np.ndarray, box: tuple[int, int, int, int], size: tuple[int, int]
) -> np.ndarray:
    """A box `(top, left, height, width)` of whole pixels as torchvision crops and resizes it, bicubic, antialiased; bytes.

    PyTorch resizes bytes 2 to 4 times as fast as Pillow, and differs from it by two of 255 levels at most.
    """
    top, left, height, width = box
    if isinstance(image, np.ndarray):
        crop = image[top : top + height, left : left + width].copy()
    else:
        crop = np.array(image.crop((left, top, left + width, top + height))).reshape(height, width, -1)
    pixels = torch.from_numpy(crop).permute(2, 0, 1).unsqueeze(0)
    return F.interpolate(pixels, size, mode="bicubic", antialias=True)[0].permute(1, 2, 0).numpy()


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

    Two batched products do what Pillow's `resize(box=...)` does image by image, except for its rounding after each
    pass.
    """
    height, width = images.shape[2:]
    rows = resize_weights(boxes[:, 0], boxes[:, 2], height, size[0]).unsqueeze(1)
    columns = resize_weights(boxes[:, 1], boxes[:, 3], width, size[1]).unsqueeze(1)
    columns = torch.where(flips[:, None, None, None], columns.flip(2), columns)
    across = (images.float() @ columns.transpose(2, 3)).clamp_(0, 255)
    return (rows @ across).clamp_(0, 255)


class Augmentation:
    """Crop, flip, normalise, and the noise for the mask, all drawn for one sample of one epoch.

    Without a `crop_scale`, the crop is the middle, and nothing is drawn for it.
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
        if crop_scale is not None and not 0 < crop_scale[0] <= crop_scale[1] <= 1:
            raise ValueError(
                f"`crop_scale` must be a range of areas in (0, 1], got {crop_scale[0]} to {crop_scale[1]}."
            )
        self.image_size, self.num_channels, self.num_patches = (*image_size,), num_channels, num_patches
        self.mean, self.std = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))
        self.seed, self.crop_scale, self.horizontal_flip = seed, crop_scale, horizontal_flip
        self.rand_augment_magnitude = rand_augment_magnitude  # 0: none

    @classmethod
    def from_processor(cls, processor, num_channels: int, num_patches: int = 0, **settings) -> "Augmentation":
        """Crops of the size, mean and deviation of an image processor; `num_patches` is the number that may be masked."""
        size = processor.to_dict().get("crop_size") or processor.size
        height = size.get("height") or size.get("shortest_edge")
        mean, std = list(processor.image_mean), list(processor.image_std)
        return cls((height, size.get("width") or height), num_channels, num_patches, mean, std, **settings)

    def draw(self, keys: list[tuple[int, int]]) -> np.ndarray:
        """Draws for crops, flips, and mask noise, one row per `(epoch, index)`."""
        count = DRAWS_BEFORE_NOISE + self.num_patches
        return np.stack([sample_generator(self.seed, epoch, index).random(count) for epoch, index in keys])

    def flips(self, draws: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(draws[:, 22] < 0.5) & self.horizontal_flip

    def boxes(self, draws: np.ndarray, height: int, width: int) -> np.ndarray:
        if self.crop_scale is None:
            return np.tile(center_box(height, width, self.image_size), (len(draws), 1))
        return crop_boxes(draws, height, width, self.crop_scale)

    def batch(self, images: torch.Tensor, keys: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
        """A batch of images of one size, as bytes `(batch, channels, height, width)`, at once."""
        draws = self.draw(keys)
        boxes = torch.from_numpy(self.boxes(draws, *images.shape[2:])).float()
        return self.finish(crop_and_resize(images, boxes, self.flips(draws), self.image_size), draws, keys)

    def images(
        self, crops: list[np.ndarray], draws: np.ndarray, keys: list[tuple[int, int]]
    ) -> dict[str, torch.Tensor]:
        """A batch from crops that [`crop`] made with the same draws."""
        pixels = torch.empty(len(crops), self.num_channels, *self.image_size)
        for row, crop, flip in zip(pixels, crops, self.flips(draws).tolist()):  # bytes to floats in one pass each
            channels = torch.from_numpy(crop).permute(2, 0, 1)
            row.copy_(channels.flip(2) if flip else channels)
        return self.finish(pixels, draws, keys)

    def crop(self, image: Image.Image, draws: np.ndarray) -> np.ndarray:
        """The crop of an image of any size for one row of draws, resized: `(height, width, channels)` bytes.

        A JPEG whose pixels were not read yet is decoded at the scale that the crop needs. Random crops at full scale are those
        of [`crop_then_resize`]; others start and end within pixels, and are resized by Pillow.
        """
        box = self.boxes(draws[None], *upright_size(image))[0]
        if self.crop_scale is not None and (pixels := view_pixels(image, self.num_channels)) is not None:
            return crop_then_resize(pixels, tuple(box.astype(int).tolist()), self.image_size)
        image, box, factor = decode_reduced(image, self.num_channels, box, self.image_size)
        if self.crop_scale is not None and factor == 1:
            return crop_then_resize(image, tuple(box.astype(int).tolist()), self.image_size)
        top, left, height, width = box
        sides = (left, top, left + width, top + height)
        resized = image.resize(self.image_size[::-1], Image.Resampling.BICUBIC, sides)
        return np.array(resized).reshape(*self.image_size, self.num_channels)

    def finish(self, pixels: torch.Tensor, draws: np.ndarray, keys: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
        if self.rand_augment_magnitude > 0:
            pixels = torch.stack([self.rand_augmented(image, *key) for image, key in zip(pixels, keys)])
        noise = torch.from_numpy(draws[:, DRAWS_BEFORE_NOISE:]).float()
        return {"pixel_values": pixels.div_(255).sub_(self.mean).div_(self.std), "noise": noise}

    def rand_augmented(self, pixels: torch.Tensor, epoch: int, index: int) -> torch.Tensor:
        """One image `(channels, height, width)` in [0, 255]; gaps at its sides are filled with the mean."""
        draws = sample_generator(self.seed, epoch, index, stream=1)
        as_bytes = pixels.round().to(torch.uint8).permute(1, 2, 0).numpy()
        image = Image.fromarray(as_bytes.squeeze(2) if self.num_channels == 1 else as_bytes)
        fill = tuple((255 * self.mean).round().int().flatten().tolist())
        image = rand_augment(image, draws, self.rand_augment_magnitude, fill=fill[0] if len(fill) == 1 else fill)
        return torch.from_numpy(np.array(image, dtype=np.float32).reshape(as_bytes.shape)).permute(2, 0, 1)
