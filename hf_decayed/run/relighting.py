"""What `training/relight.py` needs besides its loop: scenes under lights, and evaluation on held-out scenes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.nn import functional as F
from transformers import AutoImageProcessor

from ..data.lambertian import LambertianScenes
from ..data.relighting_folders import (
    ProceduralPairs,
    RelightingExamples,
    RelightingFolder,
    relighting_examples,
)
from ..errors import UserError, format_error
from ..evaluation.relighting import albedo_error, light_consistency, reference_leakage, relighting_errors
from ..losses.coding_rate import coding_rate, uniform_coding_rate
from ..losses.relighting import invariance_loss
from ..models.configuration_decayed_vit_mae import as_pair
from ..models.modeling_decayed_vit_mae import DecayedViTMAEBackbone
from ..plots import save_patch_colours
from .monitors import evaluation_mode
from .run import Run


NUM_HELD_OUT = 32  # procedural scenes
PICTURE_IMAGES = 6


@dataclass
class RelightingData:
    """Scenes for training and held-out ones."""

    train: RelightingFolder | ProceduralPairs
    held_out: RelightingFolder | ProceduralPairs
    name: str
    held_out_rule: str

    def monitor(
        self, run: Run, image_size: int, num_examples: int, prior: "DensePrior | None" = None
    ) -> "RelightingMonitor":
        examples = relighting_examples(self.held_out, image_size, num_examples)
        return RelightingMonitor(run.accelerator, examples, prior)

    def describe(self) -> dict:
        return {
            "name": self.name,
            "fingerprint": self.train.fingerprint(),
            "number": len(self.train),
            "used": f"{len(self.train)} scenes",
            "held_out": self.held_out_rule,
        }


def load_relighting_data(
    run: Run,
    scenes_path: str | None,
    image_size: int,
    num_scenes: int,
    num_lights: int,
    shadows: bool,
    highlights: bool,
) -> RelightingData:
    """Scenes of a folder, one in ten held out; without a folder, procedural scenes of `image_size` pixels."""
    train: RelightingFolder | ProceduralPairs
    held_out: RelightingFolder | ProceduralPairs
    if scenes_path is not None:
        train, held_out = RelightingFolder(Path(scenes_path)).split()
        name, rule = Path(scenes_path).resolve().name, "one scene in ten"
    else:
        # The same scenes for every run: a run's own seed changes pairs and noise only.
        settings: dict[str, Any] = {
            "num_lights": num_lights,
            "size": image_size,
            "shadows": shadows,
            "highlights": highlights,
        }
        train = ProceduralPairs(LambertianScenes(num_scenes, **settings))
        held_out = ProceduralPairs(LambertianScenes(NUM_HELD_OUT, first_scene=num_scenes, **settings))
        name, rule = "procedural Lambertian scenes", f"{NUM_HELD_OUT} other scenes under the same lights"
    run.print(f"{name}: {len(train)} scenes, {len(held_out)} held out")
    return RelightingData(train, held_out, name, rule)


class DensePrior:
    """Dense features of a frozen masked autoencoder, as an additional input of latent intrinsics.

    Args:
        path (`str`): Folder of a `DecayedViTMAE`, plain or decayed, with its image processor.
    """

    def __init__(self, path: str, device: torch.device):
        try:
            self.backbone = DecayedViTMAEBackbone.from_pretrained(path).eval().requires_grad_(False).to(device)
            processor = AutoImageProcessor.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise UserError(f"--prior {path}: {format_error(error)}") from error
        config = self.backbone.config
        if config.num_channels != 3:
            raise UserError(
                f"--prior {path}: it must take images in colour, and has {config.num_channels} channel(s)."
            )
        self.name = Path(path).resolve().name
        self.channels: int = self.backbone.channels[-1]
        self.size = as_pair(config.image_size)
        self.mean, self.std = (
            torch.tensor(values, device=device).view(3, 1, 1) for values in (processor.image_mean, processor.image_std)
        )

    @torch.no_grad()
    def __call__(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Features `(batch, channels, rows, columns)` of images in [-1, 1], layer-normalised at every position."""
        images = F.interpolate((pixel_values + 1) / 2, self.size, mode="bilinear", align_corners=False, antialias=True)
        features = self.backbone((images - self.mean) / self.std).feature_maps[-1]
        return F.layer_norm(features.movedim(1, -1), (self.channels,)).movedim(-1, 1)


class RelightingMonitor:
    """Errors of relit held-out images and of their albedo, beside those of the unchanged image, and a picture."""

    def __init__(self, accelerator: Accelerator, examples: RelightingExamples, prior: DensePrior | None = None):
        self.accelerator, self.examples, self.prior = accelerator, examples, prior
        self.baselines = named_errors("copy", examples.image, examples.target)
        if examples.mean_light is not None:
            self.baselines |= named_errors("mean_light", examples.mean_light, examples.target)
        self.relit: torch.Tensor | None = None  # by the pipeline that was evaluated last
        self.albedo: torch.Tensor | None = None

    def evaluate(self, pipeline) -> dict[str, float]:
        """Metrics by name: `relit_` with the reference, `wrong_reference_` with one of another light, `copy_` of the image
        itself, `mean_light_` of the best image that ignores the reference.
        """
        model, examples = pipeline.autoencoder.to(self.accelerator.device), self.examples
        image, reference, target = (
            images.to(self.accelerator.device) for images in (examples.image, examples.reference, examples.target)
        )
        with evaluation_mode(model), self.accelerator.autocast():
            codes = [
                model.encode(images, None if self.prior is None else self.prior(images))
                for images in (image, reference, target)
            ]
            self.relit = model.decode(codes[0].intrinsics, codes[1].light).float().cpu()
            wrong_light = codes[1].light[other_lights(examples.lights)]
            wrongly_relit = model.decode(codes[0].intrinsics, wrong_light).float().cpu()
            self.albedo, other_albedo = (
                model.decode(encoding.intrinsics, encoding.light, alpha=0.0).float().cpu()
                for encoding in (codes[0], codes[2])
            )
        metrics = self.baselines | named_errors("relit", self.relit, examples.target)
        metrics |= named_errors("wrong_reference", wrongly_relit, examples.target)
        metrics["reference_leakage"] = reference_leakage(self.relit, examples.target, examples.reference)
        if examples.albedo is not None:
            metrics["albedo_error"] = albedo_error(intensities(self.albedo), examples.albedo)
            metrics["albedo_error_of_input"] = albedo_error(intensities(examples.image), examples.albedo)
        # Albedos of one scene under two lights: without any light in them, they are the same.
        metrics["albedo_change"] = albedo_error(intensities(self.albedo), intensities(other_albedo))
        metrics["albedo_change_of_input"] = albedo_error(intensities(examples.image), intensities(examples.target))
        lights = torch.cat([codes[1].light, codes[2].light]).cpu()
        similarity = (
            light_consistency(lights, examples.lights.repeat(2)) if len(examples.lights.unique()) > 1 else None
        )
        if similarity is not None:
            metrics["light_similarity"], metrics["light_similarity_of_others"] = similarity
        metrics["intrinsic_similarity"] = -invariance_loss(codes[0].intrinsics, codes[2].intrinsics).item()
        metrics["intrinsic_similarity_of_others"] = -invariance_loss(codes[0].intrinsics, codes[1].intrinsics).item()
        metrics["intrinsic_spread"] = mean_spread(codes[0].intrinsics)
        return metrics

    def picture(self, path: Path) -> None:
        """Input, reference, relit, truth, albedo and true albedo of some examples."""
        if self.relit is None or self.albedo is None or not self.accelerator.is_main_process:
            return
        examples = self.examples
        rows = {
            "reference": intensities(examples.reference),
            "relit": intensities(self.relit),
            "truth": intensities(examples.target),
            "albedo": as_bright_as(intensities(self.albedo), examples.albedo),
        }
        if examples.albedo is not None:
            rows["true albedo"] = examples.albedo
        pictures = {name: as_pictures(images) for name, images in rows.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        save_patch_colours(path, as_pictures(intensities(examples.image)), pictures)


def named_errors(prefix: str, images: torch.Tensor, target: torch.Tensor) -> dict[str, float]:
    return {f"{prefix}_{name}": value for name, value in relighting_errors(images, target).items()}


def other_lights(lights: torch.Tensor) -> torch.Tensor:
    """For every example, the next one with another light; itself if there is none."""
    number, found = len(lights), []
    for index in range(number):
        candidates = ((index + step) % number for step in range(1, number))
        found.append(next((other for other in candidates if lights[other] != lights[index]), index))
    return torch.tensor(found)


def intensities(images: torch.Tensor) -> torch.Tensor:
    """Images in [-1, 1] as intensities in [0, 1]."""
    return ((images + 1) / 2).clamp(0, 1)


def as_bright_as(albedo: torch.Tensor, true_albedo: torch.Tensor | None) -> torch.Tensor:
    """Albedo, known only up to a factor, scaled to the mean of the true one, or else to a maximum of 1."""
    dims = (1, 2, 3)
    if true_albedo is None:
        return albedo / albedo.amax(dim=dims, keepdim=True).clamp(min=1e-6)
    return albedo * (true_albedo.mean(dim=dims, keepdim=True) / albedo.mean(dim=dims, keepdim=True).clamp(min=1e-6))


def as_pictures(images: torch.Tensor):
    return images[:PICTURE_IMAGES].clamp(0, 1).permute(0, 2, 3, 1).numpy()


def mean_spread(intrinsics: tuple[torch.Tensor, ...]) -> float:
    """Coding rate of maps relative to that of random vectors, averaged over scales; near 0 if they have collapsed."""
    parts = []
    for intrinsic in intrinsics:
        rows = intrinsic.movedim(1, -1).flatten(0, -2).float().cpu()
        # Rows of one process: all of them evaluate the same images, and repeated rows do not change the coding rate.
        parts.append(coding_rate(rows).item() / uniform_coding_rate(*rows.shape))
    return sum(parts) / len(parts)
