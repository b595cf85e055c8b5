"""From an image file of any kind to pixels."""

from pathlib import Path

import numpy as np
from datasets import Image as ImageFeature

from ..errors import DataError
from ..models.image_processing_decayed import to_pixels


def decode_image(record: dict, num_channels: int, index: int, on_bad_image: str = "stop") -> np.ndarray | None:
    """Pixels of an undecoded image; one that cannot be read is an error that names it, or `None` where it may be skipped."""
    if num_channels not in (1, 3):
        raise DataError(f"Images have 1 channel (grey) or 3 (RGB); the model takes {num_channels}.")
    try:
        return to_pixels(ImageFeature().decode_example(record), num_channels)
    except Exception as error:  # Pillow raises many types for broken files
        if on_bad_image == "skip":
            return None
        raise DataError(
            f"The image {image_name(record, index)} cannot be decoded ({error}); `--on_bad_image skip` skips such images."
        ) from error


def image_name(record: dict, index: int) -> str:
    """What an error calls an undecoded image: its file, if it has one, and its row."""
    return f"'{Path(record['path']).name}' (row {index})" if record.get("path") else f"in row {index}"
