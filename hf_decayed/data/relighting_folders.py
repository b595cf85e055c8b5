"""Pairs of images of one scene under two lights, from a folder or from procedural scenes.

    path/scene/light.jpg          one folder per scene; the names of the files are those of the lights

MIT multi-illumination has this layout: `everett_dining1/dir_0_mip2.jpg` and so on. Where a scene has files with such names, the
others, such as `thumb.jpg` and `materials_mip2.png`, are no lights; subfolders, such as `probes/`, are ignored.
"""

import copy
import hashlib
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from ..errors import DataError
from .decoding import to_pixels
from .keyed_random import sample_generator
from .lambertian import LambertianScenes
from .transforms import center_box, crop_and_resize, crop_boxes


IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")
PAIR_STREAM = 6  # of `sample_generator`
CROP_DRAWS = 22  # of `crop_boxes`
DIRECTION = re.compile(r"dir_\d+")  # how MIT multi-illumination names a light
HELD_OUT_EVERY = 10  # one scene in this many, and at least two: references come from other scenes
MAX_LINEAR = 1.4  # intensity that is white in 8 bits: procedural scenes are seldom brighter


class RelightingFolder:
    """Images by scene and light, read from a folder.

    Args:
        path (`Path`): Holds a folder for every scene, with two or more images of one size.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        if not self.path.is_dir():
            raise DataError(f"'{path}' is no folder of scenes.")
        folders = sorted(
            folder for folder in self.path.iterdir() if folder.is_dir() and not folder.name.startswith(".")
        )
        self.files = [light_files(folder) for folder in folders]
        if not folders:
            raise DataError(f"'{self.path.name}' holds no scenes: it must have a folder for each of them.")
        for folder, files in zip(folders, self.files):
            if len(files) < 2:
                raise DataError(f"The scene '{folder.name}' has {len(files)} image(s): a pair needs two lights.")
        self.names = [folder.name for folder in folders]

    def __len__(self) -> int:
        return len(self.files)

    def fingerprint(self) -> str:
        """Hash of the names and sizes of all files."""
        lines = [
            f"{name}/{file.name} {file.stat().st_size}"
            for name, files in zip(self.names, self.files)
            for file in files
        ]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    def num_lights(self, scene: int) -> int:
        return len(self.files[scene])

    def light_names(self, scene: int) -> list[str]:
        return [file.stem for file in self.files[scene]]

    def split(self) -> tuple["RelightingFolder", "RelightingFolder"]:
        """Training scenes, and held-out scenes, one in ten."""
        if len(self) < 4:
            raise DataError(
                f"'{self.path.name}' has {len(self)} scenes: training and held-out scenes need at least 4."
            )
        step = min(HELD_OUT_EVERY, len(self) // 2)
        held_out = range(0, len(self), step)
        return self.select([index for index in range(len(self)) if index % step != 0]), self.select(list(held_out))

    def select(self, scenes: list[int]) -> "RelightingFolder":
        subset = copy.copy(self)
        subset.files, subset.names = [self.files[scene] for scene in scenes], [self.names[scene] for scene in scenes]
        return subset

    def pair(self, scene: int, lights: tuple[int, int]) -> torch.Tensor:
        """A scene under two lights, as bytes `(2, 3, height, width)`."""
        images = [read_pixels(self.files[scene][light]) for light in lights]
        if images[0].shape != images[1].shape:
            sizes = " and ".join(f"{image.shape[1]} x {image.shape[0]}" for image in images)
            raise DataError(f"Images of the scene '{self.names[scene]}' have different sizes, {sizes} pixels.")
        return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)


def light_files(scene: Path) -> list[Path]:
    """Images of a scene, one for every light."""
    files = sorted(file for file in scene.iterdir() if file.suffix.lower() in IMAGE_SUFFIXES)
    return [file for file in files if DIRECTION.match(file.name)] or files


class ProceduralPairs:
    """[`LambertianScenes`] as bytes by scene and light, all rendered once."""

    def __init__(self, scenes: LambertianScenes):
        self.scenes = scenes
        lights = range(scenes.num_lights)
        rendered = []
        for index in range(scenes.num_scenes):
            scene = scenes.scene(index)
            rendered.append(to_bytes(torch.stack([scenes.render(scene, light) for light in lights])))
        self.images = torch.stack(rendered)  # (scenes, lights, 3, size, size)

    def __len__(self) -> int:
        return len(self.images)

    def fingerprint(self) -> str:
        return self.scenes.fingerprint()

    def num_lights(self, scene: int) -> int:
        return self.scenes.num_lights

    def light_names(self, scene: int) -> list[str]:
        return [str(light) for light in range(self.scenes.num_lights)]

    def pair(self, scene: int, lights: tuple[int, int]) -> torch.Tensor:
        """A scene under two lights, as bytes `(2, 3, height, width)`."""
        return self.images[scene, list(lights)]


class RelightingPairs(torch.utils.data.Dataset):
    """Training pairs by `(epoch, index)`: two lights of a scene, cropped and flipped alike, with their noise.

    A batch has `pixel_values` and `target_values`, images `(batch, 3, size, size)` in [-1, 1] of the first and the second
    light, `noise` and `target_noise`, normal and of the same shape, and `sigma_draws` `(batch,)`, normal.

    Args:
        source ([`RelightingFolder`] or [`ProceduralPairs`]): Images by scene and light.
        image_size (`int`): Height and width of the crops.
        crop_scale (`tuple[float, float]`, *optional*): Range of crop areas; `None` takes whole images, square or not.
        pairs_per_scene (`int`, defaults to 1): Pairs of every scene in one epoch.
    """

    def __init__(
        self,
        source: RelightingFolder | ProceduralPairs,
        image_size: int,
        seed: int,
        crop_scale: tuple[float, float] | None = (0.2, 1.0),
        horizontal_flip: bool = True,
        pairs_per_scene: int = 1,
    ):
        self.source, self.image_size, self.seed = source, image_size, seed
        self.crop_scale, self.horizontal_flip, self.pairs_per_scene = crop_scale, horizontal_flip, pairs_per_scene
        self.bad_images = 0

    def __len__(self) -> int:
        return len(self.source) * self.pairs_per_scene

    @property
    def uses_workers(self) -> bool:
        """Whether data loader workers help: rendered scenes are in memory."""
        return isinstance(self.source, RelightingFolder)

    def fingerprint(self) -> str:
        return self.source.fingerprint()

    def pair(self, epoch: int, index: int) -> dict[str, torch.Tensor]:
        generator = sample_generator(self.seed, epoch, index, PAIR_STREAM)
        scene = index % len(self.source)
        first, second = generator.permutation(self.source.num_lights(scene))[:2]
        pixels = self.source.pair(scene, (int(first), int(second)))
        height, width = pixels.shape[2:]
        draws = generator.random((1, CROP_DRAWS + 1))
        box = np.array([[0, 0, height, width]])
        if self.crop_scale is not None:
            box = crop_boxes(draws, height, width, self.crop_scale)
        boxes = torch.from_numpy(box).float().expand(2, -1)  # one box for both lights
        flips = torch.tensor([self.horizontal_flip and draws[0, -1] < 0.5]).expand(2)
        images = crop_and_resize(pixels, boxes, flips, (self.image_size, self.image_size)) / 127.5 - 1
        noise = torch.from_numpy(generator.standard_normal((2, *images.shape[1:]), dtype=np.float32))
        return {
            "pixel_values": images[0],
            "target_values": images[1],
            "noise": noise[0],
            "target_noise": noise[1],
            "sigma_draws": torch.tensor(generator.standard_normal(), dtype=torch.float32),
        }

    def __getitems__(self, keys: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
        pairs = [self.pair(epoch, index) for epoch, index in keys]
        return {name: torch.stack([pair[name] for pair in pairs]) for name in pairs[0]}


class RelightingExamples(NamedTuple):
    """Held-out images with their relighting targets; images `(number, 3, size, size)` are in [-1, 1].

    Args:
        image: A scene under one light.
        reference: Another scene under another light.
        target: The first scene under the light of the reference.
        lights (`torch.Tensor` of shape `(number,)`): Number of the light of reference and target, among those that occur.
        albedo (`torch.Tensor`, *optional*): True albedo in [0, 1] of procedural scenes.
        mean_light (`torch.Tensor`, *optional*): Mean of a procedural scene over all lights: the best image that ignores the
            reference.
    """

    image: torch.Tensor
    reference: torch.Tensor
    target: torch.Tensor
    lights: torch.Tensor
    albedo: torch.Tensor | None
    mean_light: torch.Tensor | None


def relighting_examples(
    source: RelightingFolder | ProceduralPairs, image_size: int, number: int, seed: int = 0
) -> RelightingExamples:
    """`number` fixed examples of held-out scenes: the middle of every image, resized."""
    if len(source) < 2:
        raise DataError("Relighting is evaluated with references of other scenes: hold out at least two scenes.")
    images, lights, albedos, means = [], [], [], []
    for index in range(number):
        generator = sample_generator(seed, 0, index, PAIR_STREAM)
        scene = index % len(source)
        other = (scene + 1 + int(generator.integers(len(source) - 1))) % len(source)
        names, other_names = source.light_names(scene), source.light_names(other)
        common = sorted(set(names) & set(other_names))
        if not common:
            raise DataError(
                "Two held-out scenes have no light in common: name files of one light alike in all scenes."
            )
        name = common[int(generator.integers(len(common)))]
        first = int(generator.choice([light for light in range(len(names)) if names[light] != name]))
        image, target = source.pair(scene, (first, names.index(name)))
        reference = source.pair(other, (other_names.index(name),) * 2)[0]
        images.append([middle(pixels, image_size) for pixels in (image, reference, target)])
        lights.append(name)
        if isinstance(source, ProceduralPairs):
            albedos.append(source.scenes.scene(scene)["albedo"])
            means.append(middle(source.images[scene].float().mean(dim=0), image_size))
    numbers = {name: number for number, name in enumerate(sorted(set(lights)))}
    image, reference, target = (torch.stack(column) for column in zip(*images))
    number_of_light = torch.tensor([numbers[name] for name in lights])
    albedo = torch.stack(albedos) if albedos and albedos[0].shape[-1] == image_size else None
    return RelightingExamples(image, reference, target, number_of_light, albedo, torch.stack(means) if means else None)


def middle(pixels: torch.Tensor, image_size: int) -> torch.Tensor:
    """The middle of an image of bytes `(3, height, width)` as `(3, image_size, image_size)` in [-1, 1]."""
    height, width = pixels.shape[1:]
    box = torch.tensor([center_box(height, width, (image_size, image_size))])
    return crop_and_resize(pixels[None], box, torch.tensor([False]), (image_size, image_size))[0] / 127.5 - 1


def to_bytes(intensities: torch.Tensor) -> torch.Tensor:
    """Linear intensities as bytes; above `MAX_LINEAR` they are clipped, as a camera clips them."""
    return (intensities / MAX_LINEAR * 255).round().clamp(0, 255).to(torch.uint8)


def read_pixels(file: Path) -> np.ndarray:
    try:
        with Image.open(file) as image:
            return to_pixels(image, 3)
    except DataError:
        raise
    except Exception as error:  # Pillow raises many types for broken files
        raise DataError(f"The image '{file.parent.name}/{file.name}' cannot be decoded ({error}).") from error
