"""Decoding of image files of any kind to pixels."""

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Image as ImageFeature
from PIL import ExifTags, Image

from ..errors import DataError
from ..models.image_processing_decayed import to_pixels, to_plain_image


def decode_image(
    record: dict,
    num_channels: int,
    index: int,
    on_bad_image: str = "stop",
    decode: Callable[[Image.Image, int], Any] = to_pixels,
) -> Any:
    """Decodes an image; one that cannot be decoded raises an error that names it, or is `None` if it may be skipped.

    `decode` takes an opened image, whose pixels are not read yet, and the number of channels; by default it returns
    all pixels.
    """
    if num_channels not in (1, 3):
        raise DataError(f"Images have 1 channel (grey) or 3 (RGB); the model takes {num_channels}.")
    try:
        return decode(open_image(record), num_channels)
    except Exception as error:  # Pillow raises many types for broken files
        if on_bad_image == "skip":
            return None
        raise DataError(
            f"The image {image_name(record, index)} cannot be decoded ({error}); `--on_bad_image skip` skips such images."
        ) from error


def image_name(record: dict, index: int) -> str:
    """Name of an undecoded image in errors: its file, if it has one, and its row."""
    return f"'{Path(record['path']).name}' (row {index})" if record.get("path") else f"in row {index}"


def open_image(record: dict) -> Image.Image:
    """Opens an undecoded image with Pillow, which reads the pixels lazily."""
    content = read_content(record)
    return ImageFeature().decode_example(record) if content is None else Image.open(io.BytesIO(content))


def read_content(record: dict) -> bytes | None:
    """The file of an undecoded image; `None` if it is in an archive or on a server, from where `datasets` reads it."""
    if record["bytes"] is not None:
        return record["bytes"]
    path = Path(record["path"])
    return path.read_bytes() if path.is_file() else None


def view_pixels(image: Image.Image, num_channels: int) -> np.ndarray | None:
    """The pixels `(height, width, channels)` of an opened, uncompressed PPM or PGM file, as they lie in its bytes.

    `None` for other images, and for those whose channels have to be converted.
    """
    mode = {1: "L", 3: "RGB"}[num_channels]
    if image.format != "PPM" or not isinstance(image.fp, io.BytesIO) or not image.tile:
        return None
    decoder, _, offset, arguments = image.tile[0]
    if (decoder, arguments) != ("raw", mode):
        return None
    shape = image.height, image.width, num_channels
    return np.frombuffer(image.fp.getvalue(), np.uint8, math.prod(shape), offset).reshape(shape)


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Height and width of an image after the rotation that its EXIF data asks for."""
    return image.size if orientation(image) >= 5 else image.size[::-1]


def is_grey(image: Image.Image) -> bool:
    """Whether an opened image has one channel, of any depth, besides transparency."""
    return image.mode in ("1", "L", "LA", "La") or image.mode.startswith(("I", "F"))


def orientation(image: Image.Image) -> int:
    """EXIF orientation of the image, 1 to 8; 1 is upright."""
    return image.getexif().get(ExifTags.Base.Orientation, 1)


def decode_reduced(
    image: Image.Image, num_channels: int, box: np.ndarray, size: tuple[int, int]
) -> tuple[Image.Image, np.ndarray, int]:
    """Decodes an opened image to L or RGB, at the scale that a `(top, left, height, width)` box needs to have `size`.

    A JPEG is decoded at 1/2, 1/4 or 1/8 if the box is that much larger than `size`: a reduced pixel is about the mean
    of a square of pixels, and the inverse transform skips high frequencies. Other formats are decoded at full size.
    Returns the image, the box in its pixels, and the factor.
    """
    (height, width), lies = upright_size(image), orientation(image)
    stored_width, stored_height = image.size
    factor = next(factor for factor in (8, 4, 2, 1) if factor <= max(1.0, min(box[2] / size[0], box[3] / size[1])))
    image.draft(None, (stored_width // factor, stored_height // factor))
    if image.size == (stored_width, stored_height):
        factor = 1
    image = to_plain_image(image, num_channels)
    # Sides that are not a multiple of the factor are padded, at the right and the bottom of the stored image.
    padding_top = image.height * factor - height if lies in (3, 4, 7, 8) else 0
    padding_left = image.width * factor - width if lies in (2, 3, 6, 7) else 0
    return image, (box + np.array([padding_top, padding_left, 0, 0])) / factor, factor
