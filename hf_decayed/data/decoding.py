"""From an image file of any kind to pixels."""

from pathlib import Path

import numpy as np
from datasets import Image as ImageFeature
from PIL import Image, ImageOps

from ..errors import DataError


def to_pixels(image: Image.Image, num_channels: int) -> np.ndarray:
    """An image of any kind as `(height, width, num_channels)` bytes: upright, 8 bits, on white where transparent."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith(("I", "F")):  # 16 bits and more would be clipped, not scaled
        values = np.asarray(image, dtype=np.float64)
        if not np.isfinite(values).all():
            raise ValueError("it holds NaN or infinity")
        top = 65535.0 if values.max() > 255 else 255.0
        image = Image.fromarray(np.clip(values * (255.0 / top), 0, 255).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    if num_channels not in (1, 3):
        raise DataError(f"Images have 1 channel (grey) or 3 (RGB); the model takes {num_channels}.")
    pixels = np.asarray(image.convert("L" if num_channels == 1 else "RGB"))
    return pixels.reshape(*pixels.shape[:2], num_channels)


def decode_image(record: dict, num_channels: int, index: int, on_bad_image: str = "stop") -> np.ndarray | None:
    """Pixels of an undecoded image; one that cannot be read is an error that names it, or `None` where it may be skipped."""
    try:
        return to_pixels(ImageFeature().decode_example(record), num_channels)
    except DataError:
        raise
    except Exception as error:  # Pillow raises many types for broken files
        if on_bad_image == "skip":
            return None
        raise DataError(
            f"The image {image_name(record, index)} cannot be decoded ({error}); `--on_bad_image skip` skips such images."
        ) from error


def image_name(record: dict, index: int) -> str:
    """What an error calls an undecoded image: its file, if it has one, and its row."""
    return f"'{Path(record['path']).name}' (row {index})" if record.get("path") else f"in row {index}"
