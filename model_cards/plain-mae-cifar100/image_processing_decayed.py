"""The image processor that is saved with a model: how an image becomes `pixel_values`."""


def default_image_processor(image_size: int | tuple[int, int], num_channels: int = 3):
    """Bicubic resize to `image_size` (one number, or height and width), then ImageNet's mean and standard deviation.

    With other than three channels, every channel gets the averages of ImageNet's three.
    """
    # Imported on use: a model that gets tensors does not need PIL.
    from transformers import ViTImageProcessorPil
    from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, PILImageResampling

    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    mean, std = IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
    if num_channels != 3:
        mean, std = [sum(mean) / 3] * num_channels, [sum(std) / 3] * num_channels
    return ViTImageProcessorPil(
        size={"height": height, "width": width},
        resample=PILImageResampling.BICUBIC,
        image_mean=list(mean),
        image_std=list(std),
        do_convert_rgb=num_channels == 3,
    )
