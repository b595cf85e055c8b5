"""Images as latents of an autoencoder, for training diffusion models: cached, or encoded during training.

The cache holds the moments of the posterior, for every image and its mirror image, in safetensors shards. Every epoch
samples from them anew, so training on the cache equals training with the autoencoder in the loop.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from diffusers import AutoencoderKL
from safetensors import safe_open
from torch.utils.data import Dataset

from ..errors import DataError, UserError
from ..provenance import model_fingerprint
from .datasets import DiffusionImages, EvaluationDataset
from .keyed_random import sample_generator
from .shards import read_shards, write_shards
from .sources import ImageSplits
from .transforms import Augmentation, CenterCropProcessor


class Latents(Dataset):
    """Latents by `(epoch, index)`, with the random numbers of a diffusion step: `noise` and `uniform`.

    `moments(indices, flips)` returns mean and log-variance of each image, concatenated along the channels.
    """

    bad_images = 0  # the cache leaves them out, and encoding during training refuses them

    def __init__(self, number: int, labels: torch.Tensor | None, seed: int, scale: float, shift: float, flip: bool):
        self.number, self.labels, self.seed = number, labels, seed
        self.scale, self.shift, self.flip = scale, shift, flip

    def __len__(self) -> int:
        return self.number

    def __getitems__(self, keys: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
        indices = [index for _, index in keys]
        # Stream 0 is for crops and flips, 2 for the diffusion step, as for pixels; 3 is the autoencoder's own noise.
        flips = [self.flip and sample_generator(self.seed, *key).random(23)[22] < 0.5 for key in keys]
        mean, log_variance = self.moments(indices, flips).chunk(2, dim=1)
        shape = mean.shape[1:]
        generators = [sample_generator(self.seed, *key, stream=3) for key in keys]
        posterior_noise = np.stack([generator.standard_normal(shape, dtype=np.float32) for generator in generators])
        latents = mean + torch.exp(0.5 * log_variance.clamp(-30, 20)) * torch.from_numpy(posterior_noise)
        generators = [sample_generator(self.seed, *key, stream=2) for key in keys]
        uniform = np.stack([generator.random(2, dtype=np.float32) for generator in generators])
        noise = np.stack([generator.standard_normal(shape, dtype=np.float32) for generator in generators])
        batch = {
            "pixel_values": (latents - self.shift) * self.scale,
            "uniform": torch.from_numpy(uniform),
            "noise": torch.from_numpy(noise),
        }
        return batch if self.labels is None else {**batch, "labels": self.labels[indices]}

    def moments(self, indices: list[int], flips: list[bool]) -> torch.Tensor:
        raise NotImplementedError


class CachedLatents(Latents):
    """Latents from shards: in memory up to a limit, beyond it read from disk on demand."""

    def __init__(self, shards: list[Path], memory_limit: int, **settings):
        self.shards, self.memory, self.files = shards, None, {}
        sizes, labels = [], []
        for shard in shards:
            with safe_open(shard, "pt") as file:
                labels.append(file.get_tensor("labels"))
            sizes.append(len(labels[-1]))
        self.starts = np.cumsum([0, *sizes])
        all_labels = torch.cat(labels)
        settings["labels"] = None if all_labels.min() < 0 else all_labels
        super().__init__(number=int(self.starts[-1]), **settings)
        if sum(shard.stat().st_size for shard in shards) <= memory_limit:
            self.memory = read_shards(shards)

    @property
    def uses_workers(self) -> bool:
        return self.memory is None

    def moments(self, indices: list[int], flips: list[bool]) -> torch.Tensor:
        names = ["mirrored" if flipped else "moments" for flipped in flips]
        if self.memory is not None:
            return torch.stack([self.memory[name][index] for name, index in zip(names, indices)])
        rows = []
        for name, index in zip(names, indices):
            number = int(np.searchsorted(self.starts, index, side="right")) - 1
            if number not in self.files:  # each worker opens its own
                self.files[number] = safe_open(self.shards[number], "pt").__enter__()
            rows.append(self.files[number].get_slice(name)[index - int(self.starts[number])].unsqueeze(0))
        return torch.cat(rows)


class EncodedLatents(Latents):
    """Latents that are encoded during training: slow, and the reference that cached latents are checked against."""

    uses_workers = False  # the autoencoder is on the device of this process

    def __init__(self, vae: AutoencoderKL, images: EvaluationDataset, labels: torch.Tensor | None, **settings):
        super().__init__(number=len(images), labels=labels, **settings)
        self.vae, self.images = vae, images

    @torch.no_grad()
    def moments(self, indices: list[int], flips: list[bool]) -> torch.Tensor:
        pixel_values = self.images.__getitems__(indices)["pixel_values"].to(self.vae.device, self.vae.dtype)
        flipped = torch.tensor(flips, device=pixel_values.device).view(-1, 1, 1, 1)
        pixel_values = torch.where(flipped, pixel_values.flip(-1), pixel_values)
        return self.vae.encode(pixel_values).latent_dist.parameters.float().cpu()


def cache_latents(
    vae: AutoencoderKL,
    images: EvaluationDataset,
    folder: str | Path,
    identity: dict,
    accelerator: Accelerator,
    batch_size: int = 32,
    shard_size: int = 4096,
    num_workers: int = 0,
) -> list[Path]:
    """Encodes every image and its mirror image into shards under `folder`; all processes call it. Returns the files."""
    vae.eval()

    def encode(pixel_values, indices):
        # In the autoencoder's own precision: the cache is used for many runs.
        with torch.autocast(pixel_values.device.type, enabled=False):
            moments = [
                vae.encode(images.to(vae.dtype)).latent_dist.parameters
                for images in (pixel_values, pixel_values.flip(-1))
            ]
        if not all(torch.isfinite(tensor).all() for tensor in moments):
            raise DataError(
                f"The autoencoder gives latents that are not finite, among images {indices[0]} to {indices[-1]}."
            )
        return dict(zip(("moments", "mirrored"), moments))

    identity = {**identity, "vae": model_fingerprint(vae), "kind": "latents"}
    settings = {"description": "encoding latents", "precision": str(vae.dtype)}
    return write_shards(encode, images, folder, identity, accelerator, batch_size, shard_size, num_workers, **settings)


def pixel_images(
    splits: ImageSplits,
    image_size: int,
    channels: int,
    seed: int,
    horizontal_flip: bool = True,
    memory_limit: int = 2 * 2**30,
    on_bad_image: str = "stop",
    progress: Callable = lambda items, **_: items,
) -> DiffusionImages:
    """Training images of a diffusion model, center crops in [-1, 1]."""
    augmentation = Augmentation(
        (image_size, image_size),
        channels,
        0,  # no patches are masked
        mean=[0.5] * channels,
        std=[0.5] * channels,
        seed=seed,
        crop_scale=None,  # center crops, as for latents and for the images that samples are compared with
        horizontal_flip=horizontal_flip,
    )
    return DiffusionImages(
        splits.train,
        splits.image_column,
        augmentation,
        memory_limit=memory_limit,
        on_bad_image=on_bad_image,
        progress=progress,
        label_column=splits.label_column,
        views=splits.views,
    )


def latent_images(
    vae: AutoencoderKL,
    splits: ImageSplits,
    image_size: int,
    seed: int,
    accelerator: Accelerator,
    cache_dir: str | Path | None = None,
    horizontal_flip: bool = True,
    memory_limit: int = 2 * 2**30,
    on_bad_image: str = "stop",
    num_workers: int = 0,
) -> Latents:
    """Latents of center crops of training images: cached under `cache_dir`, or encoded during training without one."""
    if splits.views is not None:
        raise UserError(f"'{splits.name}' draws new views in every epoch, which latents cannot: train on pixels.")
    processor = CenterCropProcessor(image_size, image_size, signed=True)
    train, image_column, label_column = splits.train, splits.image_column, splits.label_column
    images = EvaluationDataset(train, image_column, label_column, processor, vae.config.in_channels, on_bad_image)
    settings = {"seed": seed, "flip": horizontal_flip, **latent_scaling(vae)}
    if cache_dir is not None:
        identity = {"data": train._fingerprint, "columns": [image_column, label_column]}
        identity["processor"] = json.loads(processor.to_json_string())
        shards = cache_latents(vae, images, cache_dir, identity, accelerator, num_workers=num_workers)
        return CachedLatents(shards, memory_limit, **settings)
    if on_bad_image == "skip":
        raise UserError("--on_bad_image skip needs --keep_latents true.")
    labels = torch.tensor(train[label_column][:]) if label_column else None
    return EncodedLatents(vae, images, labels, **settings)


def load_vae(path: str, device) -> AutoencoderKL:
    """A frozen autoencoder, whose config does not keep the local path that it was loaded from."""
    vae = AutoencoderKL.from_pretrained(path).requires_grad_(False).to(device).eval()
    if Path(path).exists():
        vae.register_to_config(_name_or_path=Path(path).name)
    return vae


def sample_shape(vae: AutoencoderKL | None, image_channels: int, image_size: int) -> tuple[int, int]:
    """Channels, and height and width, of the samples that a diffusion model is trained on."""
    if vae is None:
        return image_channels, image_size
    return vae.config.latent_channels, latent_size(vae, image_size)


def latent_size(vae: AutoencoderKL, image_size: int) -> int:
    """Height and width of the latent of a square image."""
    factor = vae_scale_factor(vae)
    if image_size % factor != 0:
        raise UserError(f"--image_size must be divisible by the autoencoder's factor of {factor}, got {image_size}.")
    return image_size // factor


def vae_scale_factor(vae: AutoencoderKL) -> int:
    """Pixels of an image per pixel of its latent, along each side."""
    return 2 ** (len(vae.config.block_out_channels) - 1)


def latent_scaling(vae: AutoencoderKL) -> dict[str, float]:
    """The shift that training subtracts and the scale that it multiplies by, from the autoencoder's config."""
    config = vae.config
    return {
        "scale": getattr(config, "scaling_factor", None) or 1.0,
        "shift": getattr(config, "shift_factor", None) or 0.0,
    }
