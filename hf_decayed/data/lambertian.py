"""Procedural scenes under known lights: matte surfaces whose albedo, normals and lights are known exactly.

    image = albedo * (ambient + max(0, normals . direction) * colour)

>>> scenes = LambertianScenes(num_scenes=300, num_lights=8, size=64)
>>> scenes.images([17], [3])  # scene 17 under light 3, linear and not clipped: (1, 3, 64, 64)

A scene or light depends only on the seed and its index. All scenes share one set of lights, so that a scene can be
relit with the light of another.
"""

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from .keyed_random import sample_generator


VERSION = 2  # part of fingerprints; increases when the same index gives another scene
SCENE_STREAM, LIGHT_STREAM = 4, 5  # of `sample_generator`
CELLS = (4, 9)  # regions of one albedo on the ground, from and to
DOMES, RADIUS, FLATNESS = (5, 10), (0.1, 0.26), (0.6, 1.0)  # number, radius in picture widths, height over radius
ALBEDO = (0.25, 0.95)
WAVES = 4  # of the ground
STEEPNESS = 0.25  # slope of the ground, as its root mean square
GOLDEN_ANGLE = math.pi * (3 - math.sqrt(5))  # between lights, so that any number of them is spread around the scene
ELEVATION = (20.0, 60.0)  # of lights above the picture plane, in degrees
INTENSITY, AMBIENT = (0.8, 1.2), (0.1, 0.2)
TINT = 0.35  # how far the colour of a light may be from white
SHADOW_STEPS = 12
SPECULAR, SHININESS = 0.4, 20.0


@dataclass(frozen=True)
class LambertianScenes:
    """Domes on a ground of gentle waves, with piecewise constant albedo.

    Domes show where the light comes from. Surfaces that are as often hollow as raised do not: seen from above, a hollow that
    is lit from the left looks like a hill that is lit from the right.

    Args:
        num_scenes, num_lights (`int`): Number of scenes and lights; lights are the same for all scenes.
        size (`int`, defaults to 64): Height and width in pixels.
        seed (`int`, defaults to 0): Seed of scenes and lights.
        shadows (`bool`, defaults to `False`): Surfaces cast shadows on each other.
        highlights (`bool`, defaults to `False`): Surfaces shine, which no albedo explains.
        first_scene (`int`, defaults to 0): Index of the first scene, so that held-out scenes differ from those of training.
    """

    num_scenes: int = 300
    num_lights: int = 8
    size: int = 64
    seed: int = 0
    shadows: bool = False
    highlights: bool = False
    first_scene: int = 0

    def __post_init__(self):
        for name, least in (("num_scenes", 1), ("num_lights", 2), ("size", 8)):
            if getattr(self, name) < least:
                raise ValueError(f"`{name}` must be at least {least}, got {getattr(self, name)}.")

    def fingerprint(self) -> str:
        """The same for the same scenes and lights."""
        return hashlib.sha256(f"{self!r}, version {VERSION}".encode()).hexdigest()[:16]

    @cached_property
    def lights(self) -> dict[str, torch.Tensor]:
        """`direction` `(lights, 3)` of length 1, from the surface to the light; `colour` `(lights, 3)`; `ambient` `(lights,)`."""
        draws = [sample_generator(self.seed, 0, index, LIGHT_STREAM).random(7) for index in range(self.num_lights)]
        azimuth, elevation, intensity, ambient, *tint = torch.from_numpy(np.stack(draws)).float().T
        elevation = torch.deg2rad(ELEVATION[0] + (ELEVATION[1] - ELEVATION[0]) * elevation)
        azimuth = GOLDEN_ANGLE * (torch.arange(self.num_lights) + 0.5 * azimuth)
        direction = [azimuth.cos() * elevation.cos(), azimuth.sin() * elevation.cos(), elevation.sin()]
        colour = 1 + TINT * (2 * torch.stack(tint, dim=1) - 1)
        return {
            "direction": torch.stack(direction, dim=1),
            "colour": colour * (INTENSITY[0] + (INTENSITY[1] - INTENSITY[0]) * intensity)[:, None],
            "ambient": AMBIENT[0] + (AMBIENT[1] - AMBIENT[0]) * ambient,
        }

    def scene(self, index: int) -> dict[str, torch.Tensor]:
        """`albedo` `(3, size, size)` in [0, 1], `normals` `(3, size, size)` of length 1, and `height` `(size, size)`."""
        if not 0 <= index < self.num_scenes:
            raise ValueError(f"`index` must lie in [0, {self.num_scenes}), got {index}.")
        generator = sample_generator(self.seed, 1, self.first_scene + index, SCENE_STREAM)
        axis = (np.arange(self.size) + 0.5) / self.size
        x, y = axis[None, :], axis[:, None]

        centres = generator.random((generator.integers(*CELLS), 2))
        colours = generator.uniform(*ALBEDO, (len(centres), 3))
        distances = (y[..., None] - centres[:, 0]) ** 2 + (x[..., None] - centres[:, 1]) ** 2
        albedo = colours[distances.argmin(axis=2)]  # Voronoi cells: (size, size, 3)

        frequency = generator.uniform(-3, 3, (WAVES, 2)) * 2 * np.pi
        amplitude = generator.uniform(0.2, 1.0, WAVES) / np.linalg.norm(frequency, axis=1)
        angles = (
            y[..., None] * frequency[:, 0] + x[..., None] * frequency[:, 1] + generator.uniform(0, 2 * np.pi, WAVES)
        )
        slopes = np.stack([(amplitude * frequency[:, i] * np.cos(angles)).sum(axis=2) for i in (1, 0)])  # right, down
        scale = STEEPNESS / np.sqrt(np.mean((slopes**2).sum(axis=0)))
        slopes, height = scale * slopes, scale * (amplitude * np.sin(angles)).sum(axis=2)

        for index in range(generator.integers(*DOMES)):
            centre, colour = generator.uniform(0, 1, 2), generator.uniform(*ALBEDO, 3)
            radius, flatness = generator.uniform(*RADIUS), generator.uniform(*FLATNESS)
            right, down = x - centre[1], y - centre[0]
            depth = np.sqrt(np.clip(radius**2 - right**2 - down**2, 1e-6, None))  # of a ball, above its equator
            higher = (right**2 + down**2 < radius**2) & (flatness * depth > height)
            slopes = np.where(higher, -flatness * np.stack(np.broadcast_arrays(right, down)) / depth, slopes)
            height = np.where(higher, flatness * depth, height)
            if index % 2 == 0:  # the others keep the colours of the ground
                albedo = np.where(higher[..., None], colour, albedo)
        normals = np.concatenate([-slopes, np.ones_like(slopes[:1])])
        normals /= np.linalg.norm(normals, axis=0)
        arrays = {
            "albedo": albedo.transpose(2, 0, 1),
            "normals": normals,
            "height": height,
        }
        return {name: torch.from_numpy(array.astype(np.float32)) for name, array in arrays.items()}

    def render(self, scene: dict[str, torch.Tensor], light: int) -> torch.Tensor:
        """A scene under a light: linear intensities `(3, size, size)`, not clipped."""
        if not 0 <= light < self.num_lights:
            raise ValueError(f"`light` must lie in [0, {self.num_lights}), got {light}.")
        direction, colour, ambient = (self.lights[name][light] for name in ("direction", "colour", "ambient"))
        shading = torch.einsum("chw,c->hw", scene["normals"], direction).clamp(min=0)
        if self.shadows:
            shading = shading * is_lit(scene["height"], direction)
        image = scene["albedo"] * (ambient + shading * colour[:, None, None])
        if self.highlights:
            halfway = torch.nn.functional.normalize(direction + torch.tensor([0.0, 0.0, 1.0]), dim=0)
            gloss = torch.einsum("chw,c->hw", scene["normals"], halfway).clamp(min=0) ** SHININESS
            image = image + SPECULAR * gloss * (shading > 0) * colour[:, None, None]
        return image

    def images(self, scenes: list[int], lights: list[int]) -> torch.Tensor:
        """Scenes under lights, pair by pair: `(number, 3, size, size)`."""
        return torch.stack([self.render(self.scene(scene), light) for scene, light in zip(scenes, lights)])


def is_lit(height: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
    """Where no higher ground blocks the light: a ray march over the height field, in whole pixels."""
    size = len(height)
    across = direction[:2] / direction[:2].norm().clamp(min=1e-6)
    rise = direction[2] / direction[:2].norm().clamp(min=1e-6)  # of a ray, over one picture width
    lit = torch.ones_like(height)
    for step in range(1, SHADOW_STEPS + 1):
        way = step / SHADOW_STEPS / 2
        right, down = (round(float(part) * way * size) for part in across)
        rows = (torch.arange(size) + down).clamp(0, size - 1)
        columns = (torch.arange(size) + right).clamp(0, size - 1)
        lit = lit * (height[rows][:, columns] <= height + rise * way)
    return lit
