"""Masks: the class of every pixel, resized and cropped like the image."""

import numpy as np
import torch
from datasets import Image as ImageFeature
from PIL import Image

from ..errors import DataError, UserError
from ..models.image_processing_decayed import GreyImageProcessor
from .transforms import CenterCropProcessor, center_crop


IGNORED = 255  # the class number of pixels that no metric counts


def decode_mask(
    record: dict, image_name: str, image_size: tuple[int, int], zero_is_ignored: bool = False
) -> np.ndarray:
    """Class numbers `(height, width)` of an undecoded mask, as bytes; 255 is ignored.

    Args:
        image_name (`str`): Name of the image in errors.
        image_size (`tuple`): Height and width of the image, which the mask must have too.
        zero_is_ignored (`bool`): Class numbers start at 1 in the file: they are lowered by one, and 0 becomes 255.
    """
    try:
        mask = np.asarray(ImageFeature().decode_example(record))
    except Exception as error:  # Pillow raises many types for broken files
        raise DataError(f"The mask of the image {image_name} cannot be decoded ({error}).") from error
    if mask.ndim != 2:
        raise DataError(f"The mask of the image {image_name} has colours; masks hold one class number per pixel.")
    if mask.shape != tuple(image_size):
        sizes = " x ".join(map(str, mask.shape)), " x ".join(map(str, image_size))
        raise DataError(
            f"The mask of the image {image_name} has another size ({sizes[0]}) than the image ({sizes[1]})."
        )
    if mask.dtype != bool and not 0 <= mask.min() <= mask.max() <= 255:
        raise DataError(f"The mask of the image {image_name} has class numbers outside of 0 to 255.")
    mask = mask.astype(np.uint8)
    return mask - 1 if zero_is_ignored else mask  # bytes: 0 becomes 255


def process_masks(masks: list[np.ndarray], processor) -> torch.Tensor:
    """Class numbers `(batch, height, width)`, resized and cropped as a processor does images, by nearest neighbour.

    The processor itself is called, one of transformers or [`CenterCropProcessor`], so that masks get the geometry of
    the images. Padding is ignored. A processor that does not return one image for each mask is refused.
    """
    if isinstance(processor, CenterCropProcessor):
        resized = np.stack([center_crop(mask[:, :, None], processor.size, Image.Resampling.NEAREST) for mask in masks])
        return torch.from_numpy(resized[..., 0]).long()
    # The second channel says which pixels come from the mask: padding is zero there.
    images = [np.stack([mask, np.ones_like(mask), np.ones_like(mask)], axis=2) for mask in masks]
    grey = isinstance(processor, GreyImageProcessor)
    if grey:  # it would mix the channels of one image
        images = [image[:, :, [channel]] for channel in range(3) for image in images]
    try:
        pixels = processor(
            images,
            resample=Image.Resampling.NEAREST,
            do_rescale=False,
            do_normalize=False,
            input_data_format="channels_last",
            return_tensors="pt",
        )["pixel_values"]
    except (TypeError, ValueError, KeyError) as error:
        raise UserError(f"{type(processor).__name__} cannot process masks: {error}") from error
    if grey:
        pixels = pixels.unflatten(0, (3, -1)).squeeze(2).transpose(0, 1)
    if pixels.ndim != 4 or pixels.shape[:2] != (len(masks), 3):
        raise UserError(f"{type(processor).__name__} cannot process masks: it does not return one image for each.")
    return torch.where(pixels[:, 1] > 0, pixels[:, 0], IGNORED).long()
