"""Image processors that are saved with a model: how an image becomes `pixel_values`."""

import numpy as np
from PIL import ExifTags, Image, ImageOps
from transformers import ViTImageProcessorPil
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, PILImageResampling


__all__ = ["GreyImageProcessor"]

LUMA = np.array([0.299, 0.587, 0.114])  # ITU-R 601, as in Pillow's mode L


class GreyImageProcessor(ViTImageProcessorPil):
    """ViT's image processor for models with one channel: it makes colour images grey.

    Images of Pillow are read as in training: upright, 8 bits, on white where they are transparent. Arrays and tensors have
    1, 3 or 4 channels, or are `(height, width)`.
    """

    do_convert_rgb = False
    image_mean = [sum(IMAGENET_DEFAULT_MEAN) / 3]
    image_std = [sum(IMAGENET_DEFAULT_STD) / 3]

    def process_image(self, image, **kwargs) -> np.ndarray:
        if isinstance(image, Image.Image):
            return to_pixels(image, num_channels=1).transpose(2, 0, 1)
        pixels = super().process_image(image, **{**kwargs, "do_convert_rgb": False})  # (channels, height, width)
        if len(pixels) == 1:
            return pixels
        grey = np.tensordot(LUMA, pixels[:3], axes=1)[None]
        return grey.round().astype(pixels.dtype) if pixels.dtype.kind in "iu" else grey.astype(pixels.dtype)


def to_pixels(image: Image.Image, num_channels: int) -> np.ndarray:
    """An image of any kind as `(height, width, num_channels)` bytes: upright, 8 bits, on white where transparent."""
    pixels = np.asarray(to_plain_image(image, num_channels))
    return pixels.reshape(*pixels.shape[:2], num_channels)


def to_plain_image(image: Image.Image, num_channels: int) -> Image.Image:
    """An image of any kind in Pillow's mode L, for 1 channel, or RGB, as [`to_pixels`] has it; maybe the image itself."""
    if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:  # `exif_transpose` copies images that are upright
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith(("I", "F")):  # 16 bits and more would be clipped, not scaled
        values = np.asarray(image, dtype=np.float64)
        if not np.isfinite(values).all():
            raise ValueError("it holds NaN or infinity")
        brightest = values.max()
        if image.mode.startswith("I;16") or brightest > 255:
            top = 65535.0
        else:  # mode I does not tell its depth; floating point is often in [0, 1]
            top = 1.0 if image.mode == "F" and brightest <= 1 else 255.0
        image = Image.fromarray(np.clip(values * (255.0 / top), 0, 255).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    mode = "L" if num_channels == 1 else "RGB"
    return image if image.mode == mode else image.convert(mode)


def default_image_processor(
    image_size: int | tuple[int, int], num_channels: int = 3, center_crop: bool = False
) -> ViTImageProcessorPil:
    """Bicubic resize to `image_size` (one number, or height and width), then ImageNet's mean and standard deviation.

    For one channel it makes images grey. With other than three channels, every channel gets the averages of ImageNet's three.
    With `center_crop`, the short side is resized and the middle taken, so that no image is squeezed.
    """
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    mean, std = IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
    if num_channels != 3:
        mean, std = [sum(mean) / 3] * num_channels, [sum(std) / 3] * num_channels
    processor_class = GreyImageProcessor if num_channels == 1 else ViTImageProcessorPil
    size = {"height": height, "width": width}
    crop = {"size": {"shortest_edge": max(height, width)}, "crop_size": size, "do_center_crop": True}
    return processor_class(
        **(crop if center_crop else {"size": size}),
        resample=PILImageResampling.BICUBIC,
        image_mean=list(mean),
        image_std=list(std),
        do_convert_rgb=num_channels == 3,
    )


AUTO_MAP = {"AutoImageProcessor": "image_processing_decayed.GreyImageProcessor"}
GreyImageProcessor.register_for_auto_class()
