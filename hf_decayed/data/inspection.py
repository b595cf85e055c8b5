"""What the images of a data set are like: colour, height and width."""

from dataclasses import dataclass

import numpy as np
from datasets import Dataset, IterableDataset
from datasets import Image as ImageFeature

from ..models.image_processing_decayed import to_pixels


LOOKED_AT = 16  # images


@dataclass(frozen=True)
class ImageKind:
    """Median height and width of some images, and whether any of them has colours."""

    has_colours: bool
    height: int
    width: int

    @property
    def short_side(self) -> int:
        return min(self.height, self.width)

    def __str__(self) -> str:
        return f"{'RGB' if self.has_colours else 'grey'}, {self.width} x {self.height}"


def inspect_images(dataset: Dataset | IterableDataset, image_column: str) -> ImageKind | None:
    """Inspects 16 evenly spaced images, or the first of a stream; `None` if none of them can be decoded.

    Images that cannot be decoded are left out. RGB files without colours count as grey.
    """
    rows = dataset.select_columns(image_column).cast_column(image_column, ImageFeature(decode=False))
    if isinstance(rows, IterableDataset):
        rows = rows.take(LOOKED_AT)
    else:
        rows = rows.select(np.unique(np.linspace(0, len(rows) - 1, LOOKED_AT).astype(int)))
    sizes, has_colours = [], False
    for row in rows:
        try:
            pixels = to_pixels(ImageFeature().decode_example(row[image_column]), 3)
        except Exception:  # Pillow raises many types for broken files, which `--on_bad_image` is about
            continue
        sizes.append(pixels.shape[:2])
        has_colours = has_colours or bool(np.ptp(pixels, axis=2).max() > 8)  # JPEGs of grey images are not quite grey
    if not sizes:
        return None
    height, width = np.median(sizes, axis=0).round().astype(int).tolist()
    return ImageKind(has_colours, height, width)
