"""Augmentation for fine-tuning besides crops: RandAugment, mixup, CutMix, random erasing.

Written out because the usual libraries for it (torchvision, timm) would be needed for nothing else, and draw from global
state: here every draw comes from a generator that belongs to the sample or to the step.
"""

import math

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps


def rand_augment(
    image: Image.Image,
    generator: np.random.Generator,
    magnitude: float = 9.0,
    num_operations: int = 2,
    fill: int | tuple[int, ...] = 128,
) -> Image.Image:
    """RandAugment (Cubuk et al., 2020) as masked autoencoders are fine-tuned with it.

    Args:
        magnitude (`float`, defaults to 9): Strength out of 10; each operation draws its own, with a deviation of 0.5.
        num_operations (`int`, defaults to 2): Operations drawn per image; each is applied half the time.
        fill (`int` or `tuple`): Value per channel that fills the gaps when an image is moved.
    """
    for _ in range(num_operations):
        name = OPERATIONS[generator.integers(len(OPERATIONS))]
        skipped, negative = generator.random(2) < 0.5
        strength = float(np.clip(generator.normal(magnitude, 0.5), 0, 10)) / 10
        if not skipped:
            image = apply_operation(image, name, strength, -strength if negative else strength, fill)
    return image


OPERATIONS = ["autocontrast", "equalize", "invert", "rotate", "posterize", "solarize", "solarize_add", "color"]


OPERATIONS += ["contrast", "brightness", "sharpness", "shear_x", "shear_y", "translate_x", "translate_y"]


def apply_operation(image: Image.Image, name: str, strength: float, signed: float, fill) -> Image.Image:
    """One operation at a strength in [0, 1]; 0 leaves the image as it is, where the operation has a strength."""
    if name in ("autocontrast", "equalize", "invert"):
        return getattr(ImageOps, name)(image)
    if name == "posterize":
        # Four bits are the mildest setting: more bits look like no change.
        return ImageOps.posterize(image, max(1, 4 - int(4 * strength))) if strength > 0 else image
    if name == "solarize":
        return ImageOps.solarize(image, 256 - int(256 * strength))
    if name == "solarize_add":
        return image.point(
            [min(255, value + int(110 * strength)) if value < 128 else value for value in range(256)]
            * len(image.getbands())
        )
    if name in ("color", "contrast", "brightness", "sharpness"):
        return getattr(ImageEnhance, name.capitalize())(image).enhance(max(0.1, 1 + 0.9 * signed))
    if name == "rotate":
        return image.rotate(30 * signed, Image.Resampling.BICUBIC, fillcolor=fill)
    matrix = {
        "shear_x": (1, 0.3 * signed, 0, 0, 1, 0),
        "shear_y": (1, 0, 0, 0.3 * signed, 1, 0),
        "translate_x": (1, 0, 0.45 * signed * image.width, 0, 1, 0),
        "translate_y": (1, 0, 0, 0, 1, 0.45 * signed * image.height),
    }[name]
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC, fillcolor=fill)


def mixup_cutmix(
    images: torch.Tensor,
    labels: torch.Tensor,
    num_classes: int,
    generator: np.random.Generator,
    mixup: float = 0.8,
    cutmix: float = 1.0,
    label_smoothing: float = 0.1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch blended with itself in reverse order, and its soft labels `(batch, num_classes)`.

    Half of the batches use mixup (Zhang et al., 2018), half CutMix (Yun et al., 2019). The share is drawn from Beta(a,
    a), where a is `mixup` or `cutmix`; 0 turns one off, and with both off only labels change.
    """
    targets = torch.full((len(labels), num_classes), label_smoothing / num_classes, device=images.device)
    targets.scatter_(1, labels.unsqueeze(1), 1.0 - label_smoothing + label_smoothing / num_classes)
    if mixup <= 0 and cutmix <= 0:
        return images, targets
    paste = cutmix > 0 and (mixup <= 0 or generator.random() < 0.5)
    share = float(generator.beta(*[cutmix if paste else mixup] * 2))
    if paste:
        height, width = images.shape[2:]
        box_height, box_width = int(height * math.sqrt(1 - share)), int(width * math.sqrt(1 - share))
        centre_y, centre_x = generator.integers(height), generator.integers(width)
        rows = slice(max(0, centre_y - box_height // 2), min(height, centre_y + box_height // 2))
        columns = slice(max(0, centre_x - box_width // 2), min(width, centre_x + box_width // 2))
        mixed = images.clone()
        mixed[:, :, rows, columns] = images.flip(0)[:, :, rows, columns]
        share = 1 - (rows.stop - rows.start) * (columns.stop - columns.start) / (height * width)
    else:
        mixed = share * images + (1 - share) * images.flip(0)
    return mixed, share * targets + (1 - share) * targets.flip(0)


def random_erasing(images: torch.Tensor, probability: float, generator: np.random.Generator) -> torch.Tensor:
    """Fills a random box in some of the images with noise (Zhong et al., 2020): 2 to 33 per cent of the area."""
    images = images.clone()
    height, width = images.shape[2:]
    for index in range(len(images)):
        if generator.random() >= probability:
            continue
        area, ratio = (
            height * width * generator.uniform(0.02, 1 / 3),
            math.exp(generator.uniform(-1, 1) * math.log(3.3)),
        )
        box_height, box_width = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < box_height < height and 0 < box_width < width:
            top, left = generator.integers(height - box_height + 1), generator.integers(width - box_width + 1)
            noise = generator.standard_normal((images.shape[1], box_height, box_width), dtype=np.float32)
            images[index, :, top : top + box_height, left : left + box_width] = torch.from_numpy(noise).to(images)
    return images
