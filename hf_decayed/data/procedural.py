"""Procedural views of the bundled garments: random geometry and colours, with exact masks.

    >>> views = ProceduralViews("coloured", originals)
    >>> images, foreground = views.render(grey_images, keys=[(0, 17), (0, 4)], seed=0)

A view depends only on its `(epoch, index)` and the seed, so that processes, batches and resuming do not change it.
"""

import io
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from datasets import Dataset, Features
from datasets import Image as ImageFeature
from PIL import Image

from .decoding import decode_image
from .keyed_random import sample_generator


VARIANTS = ("grey", "coloured", "textured")  # after `bundled:`; `grey` is the data as it ships
VERSION = 1  # part of fingerprints; increases when the same key gives another view
FOREGROUND_THRESHOLD = 0.1  # a pixel whose intensity, in [0, 1], is above it belongs to the garment
SCALES = (0.8, 1.3)
MAX_SHIFT = 0.2  # of height and width, in both directions
MIN_COLOUR_DISTANCE = 0.4  # between the two colours of a view, in the unit cube of RGB
COLOUR_TRIES = 8
FIELD_SIZE = 4  # random colours along each side of a smooth colour field
FIELD_AMPLITUDE, GRATING_AMPLITUDE = 0.35, 0.2
GRATING_CYCLES = (2.0, 7.0)  # per image
VIEW_STREAM = 3  # of `sample_generator`: 0 to 2 are crops and masks, RandAugment, diffusion noise
# Seeds of the fixed renderings, above those that users choose.
TRAIN_SEED, HELD_OUT_SEED, OTHER_VIEW_SEED = 2**40, 2**40 + 1, 2**40 + 2

LUMA = (0.299, 0.587, 0.114)  # weights of red, green and blue in grey, as in Pillow
GEOMETRY_DRAWS = 4
COLOUR_DRAWS = 6 * COLOUR_TRIES
TEXTURE_DRAWS = 3 * FIELD_SIZE**2 + 6


@dataclass(frozen=True)
class ProceduralViews:
    """Views of grey garments on black: flipped half the time, scaled, shifted, in two random colours.

    Args:
        variant (`str`):
            `coloured`: one colour times intensity where the garment is, another colour elsewhere. `textured`: smooth colour
            fields and gratings are added to both colours, and intensity blends the first over the second, so that a garment is
            not given away by being darker than its background.
        originals (`Dataset`): The grey images that training draws views of, with the columns of the data set.
    """

    variant: str
    originals: Dataset

    def __post_init__(self):
        if self.variant not in VARIANTS[1:]:
            raise ValueError(f"`variant` must be one of {', '.join(VARIANTS[1:])}, got '{self.variant}'.")

    @property
    def identity(self) -> str:
        """Variant and version: together with the originals, all that views depend on besides their keys and seed."""
        return f"{self.variant} views, version {VERSION}"

    def render(
        self, images: torch.Tensor, keys: list[tuple[int, int]], seed: int, num_channels: int = 3
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One view of every image.

        Args:
            images (`torch.Tensor` of shape `(batch, 1, height, width)`): Grey bytes.
            keys (`list`): The `(epoch, index)` of every image.
            num_channels (`int`, defaults to 3): 1 gives the grey of the colours.

        Returns:
            Bytes `(batch, num_channels, height, width)`, and where the garment is, as booleans `(batch, height, width)`.
        """
        count = GEOMETRY_DRAWS + COLOUR_DRAWS + (2 * TEXTURE_DRAWS if self.variant == "textured" else 0)
        draws = np.stack(
            [sample_generator(seed, epoch, index, stream=VIEW_STREAM).random(count) for epoch, index in keys]
        )
        geometry, colours, textures = np.split(draws, [GEOMETRY_DRAWS, GEOMETRY_DRAWS + COLOUR_DRAWS], axis=1)
        intensity = transform_garments(images[:, 0].numpy() / 255, geometry)
        garment, shade = intensity > FOREGROUND_THRESHOLD, intensity[:, None]
        foreground, background = (colour[:, :, None, None] for colour in draw_colours(colours))
        if self.variant == "coloured":
            pixels = np.where(garment[:, None], shade * foreground, background)
        else:
            foreground_draws, background_draws = np.split(textures, 2, axis=1)
            foreground = np.clip(foreground + draw_textures(foreground_draws, *garment.shape[1:]), 0, 1)
            background = np.clip(background + draw_textures(background_draws, *garment.shape[1:]), 0, 1)
            pixels = shade * foreground + (1 - shade) * background
        if num_channels == 1:
            pixels = np.einsum("bchw,c->bhw", pixels, LUMA)[:, None]
        return torch.from_numpy(np.rint(255 * pixels).astype(np.uint8)), torch.from_numpy(garment)


def transform_garments(intensity: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Intensities `(batch, height, width)` flipped, scaled and shifted by four draws in [0, 1); gaps are black."""
    height, width = intensity.shape[1:]
    flips, scales = draws[:, 0] < 0.5, SCALES[0] + (SCALES[1] - SCALES[0]) * draws[:, 1]
    down, right = (MAX_SHIFT * (2 * draws[:, 2:4] - 1)).T
    rows = interpolation_weights(height, scales, down * height)
    columns = interpolation_weights(width, scales, right * width)
    columns = np.where(flips[:, None, None], columns[:, :, ::-1], columns)
    return np.clip(rows @ intensity @ columns.transpose(0, 2, 1), 0, 1)


def interpolation_weights(size: int, scales: np.ndarray, shifts: np.ndarray) -> np.ndarray:
    """Matrices `(batch, size, size)` that scale a row about its middle and shift it by pixels, bilinear, zero outside."""
    positions = np.arange(size) + 0.5
    sources = (positions - shifts[:, None] - size / 2) / scales[:, None] + size / 2
    return np.maximum(0, 1 - np.abs(sources[:, :, None] - positions))


def draw_colours(draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Foreground and background colours `(batch, 3)`: the first of eight uniform pairs that differ enough."""
    pairs = draws.reshape(len(draws), COLOUR_TRIES, 2, 3)
    differ = np.linalg.norm(pairs[:, :, 0] - pairs[:, :, 1], axis=2) >= MIN_COLOUR_DISTANCE
    chosen = pairs[np.arange(len(pairs)), differ.argmax(axis=1)]
    # Without such a pair (one view in a million) every channel of the background is half the range away.
    background = np.where(differ.any(axis=1)[:, None], chosen[:, 1], (chosen[:, 0] + 0.5) % 1)
    return chosen[:, 0], background


def draw_textures(draws: np.ndarray, height: int, width: int) -> np.ndarray:
    """Offsets `(batch, 3, height, width)` to a colour: a smooth random field, and a grating between two colours."""
    batch, cells = len(draws), FIELD_SIZE**2
    field = 2 * draws[:, : 3 * cells].reshape(batch, 3, FIELD_SIZE, FIELD_SIZE) - 1
    rows, columns = (upsampling_weights(FIELD_SIZE, size) for size in (height, width))
    smooth = rows @ field @ columns.T
    direction, cycles, phase = draws[:, 3 * cells : 3 * cells + 3].T[:, :, None, None]
    colour = 2 * draws[:, 3 * cells + 3 :, None, None] - 1
    angle = np.pi * direction
    frequency = GRATING_CYCLES[0] + (GRATING_CYCLES[1] - GRATING_CYCLES[0]) * cycles
    vertical, horizontal = (np.arange(size) / size for size in (height, width))
    distance = np.sin(angle) * vertical[:, None] + np.cos(angle) * horizontal  # along the grating
    grating = np.sin(2 * np.pi * (frequency * distance + phase))[:, None]
    return FIELD_AMPLITUDE * smooth + GRATING_AMPLITUDE * grating * colour


def upsampling_weights(size_in: int, size_out: int) -> np.ndarray:
    """The matrix `(size_out, size_in)` that interpolates equally spaced values linearly, from end to end."""
    positions = np.linspace(0, size_in - 1, size_out)
    return np.maximum(0, 1 - np.abs(positions[:, None] - np.arange(size_in)))


def render_dataset(originals: Dataset, variant: str, seed: int) -> Dataset:
    """The bundled images with a column `mask`, and for a variant other than `grey` with one fixed view as image.

    Masks have the class plus one where the garment is, and 0 for the background. The result is in the cache of `datasets`,
    so that only the first call renders.
    """
    views = None if variant == "grey" else ProceduralViews(variant, originals)

    def render_rows(records: list[dict], labels: list[int], indices: list[int]) -> dict[str, list]:
        decoded = [decode_image(record, 1, index) for record, index in zip(records, indices)]
        images = torch.from_numpy(np.stack([pixels for pixels in decoded if pixels is not None])).permute(0, 3, 1, 2)
        foreground, rendered = images[:, 0] > 255 * FOREGROUND_THRESHOLD, {}
        if views is not None:
            images, foreground = views.render(images, [(0, index) for index in indices], seed)
            rendered["image"] = [encode_png(image) for image in images.permute(0, 2, 3, 1).numpy()]
        masks = foreground * (1 + torch.tensor(labels, dtype=torch.uint8)).view(-1, 1, 1)
        return {**rendered, "mask": [encode_png(mask) for mask in masks.numpy()]}

    return originals.cast_column("image", ImageFeature(decode=False)).map(
        render_rows,
        input_columns=["image", "label"],
        with_indices=True,
        batched=True,
        features=Features({**originals.features, "mask": ImageFeature()}),
        # Contains a checksum of a rendering, so that changed code never reads an old cache.
        new_fingerprint=f"{originals._fingerprint}-{variant}-{rendering_checksum(render_rows)}-{seed}",
        desc="rendering",
    )


def rendering_checksum(render_rows: Callable) -> str:
    """Checksum of the image and mask that are drawn of one synthetic garment."""
    ramp = np.arange(28 * 28).reshape(28, 28) % 256
    rendered = render_rows([encode_png(ramp.astype(np.uint8))], [0], [0])
    pixels = [decode_image(records[0], 3, 0) for records in rendered.values()]
    return f"{zlib.crc32(b''.join(array.tobytes() for array in pixels if array is not None)):08x}"


def encode_png(pixels: np.ndarray) -> dict:
    """Bytes of an image file, as a row of a data set holds them."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=1)
    return {"bytes": buffer.getvalue(), "path": None}
