"""Images as latents of an autoencoder, for training diffusion models: encoded once and kept, or as they come.

What is kept are the moments of the posterior, of every image and of its mirror image, in safetensors shards that outlive an
interruption. A sample is drawn from them anew in every epoch, so training on kept latents is training on latents.
"""

import json
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from diffusers import AutoencoderKL
from safetensors import safe_open
from torch.utils.data import Dataset
from tqdm.auto import tqdm

from ..errors import DataError
from ..provenance import model_fingerprint
from .datasets import DiffusionImages, EvaluationDataset
from .keyed_random import sample_generator
from .shards import read_shards, write_shards
from .transforms import Augmentation, CenterCropProcessor


class Latents(Dataset):
    """Latents by `(epoch, index)`, with what a diffusion step draws for them: `noise` and `uniform`.

    `moments(indices, flips)` gives mean and log-variance of each, one after the other in the channels.
    """

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
        draws = [sample_generator(self.seed, *key, stream=3) for key in keys]
        own_noise = np.stack([each.standard_normal(mean.shape[1:], dtype=np.float32) for each in draws])
        latents = mean + torch.exp(0.5 * log_variance.clamp(-30, 20)) * torch.from_numpy(own_noise)
        draws = [sample_generator(self.seed, *key, stream=2) for key in keys]
        batch = {
            "pixel_values": (latents - self.shift) * self.scale,
            "uniform": torch.from_numpy(np.stack([each.random(2, dtype=np.float32) for each in draws])),
            "noise": torch.from_numpy(
                np.stack([each.standard_normal(mean.shape[1:], dtype=np.float32) for each in draws])
            ),
        }
        return batch if self.labels is None else {**batch, "labels": self.labels[indices]}

    def moments(self, indices: list[int], flips: list[bool]) -> torch.Tensor:
        raise NotImplementedError


class CachedLatents(Latents):
    """From shards: in memory up to a limit, beyond it read from the disk as they are asked for."""

    def __init__(self, shards: list[Path], memory_limit: int, **settings):
        self.shards, self.memory, self.files = shards, None, {}
        sizes = []
        for shard in shards:
            with safe_open(shard, "pt") as file:
                sizes.append(file.get_slice("labels").get_shape()[0])
                labels = file.get_tensor("labels")
                settings["labels"] = torch.cat([settings["labels"], labels]) if "labels" in settings else labels
        self.starts = np.cumsum([0, *sizes])
        if settings["labels"].min() < 0:
            settings["labels"] = None
        super().__init__(number=int(self.starts[-1]), **settings)
        if sum(shard.stat().st_size for shard in shards) <= memory_limit:
            self.memory = read_shards(shards)

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
    """Encoded as they are asked for: slow, and what kept latents are checked against."""

    def __init__(self, vae: AutoencoderKL, images: EvaluationDataset, labels: torch.Tensor | None, **settings):
        super().__init__(number=len(images), labels=labels, **settings)
        self.vae, self.images, self.memory = vae, images, None

    @torch.no_grad()
    def moments(self, indices: list[int], flips: list[bool]) -> torch.Tensor:
        pixel_values = self.images.__getitems__(indices)["pixel_values"].to(self.vae.device, self.vae.dtype)
        turned = torch.tensor(flips, device=pixel_values.device).view(-1, 1, 1, 1)
        pixel_values = torch.where(turned, pixel_values.flip(-1), pixel_values)
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

    def encode(pixel_values, places):
        # In the autoencoder's own precision: what is kept is kept for good.
        with torch.autocast(pixel_values.device.type, enabled=False):
            moments = [
                vae.encode(each.to(vae.dtype)).latent_dist.parameters for each in (pixel_values, pixel_values.flip(-1))
            ]
        if not all(torch.isfinite(each).all() for each in moments):
            raise DataError(
                f"The autoencoder gives latents that are not finite, among images {places[0]} to {places[-1]}."
            )
        return dict(zip(("moments", "mirrored"), moments))

    identity = {**identity, "vae": model_fingerprint(vae), "kind": "latents"}
    settings = {"description": "encoding latents", "precision": str(vae.dtype)}
    return write_shards(encode, images, folder, identity, accelerator, batch_size, shard_size, num_workers, **settings)


def sample_shape(vae: AutoencoderKL | None, image_channels: int, image_size: int) -> tuple[int, int]:
    """Channels, and height and width, of what a diffusion model is trained on."""
    return (image_channels, image_size) if vae is None else (vae.config.latent_channels, latent_size(vae, image_size))


def diffusion_images(
    vae: AutoencoderKL | None, channels: int, train, image_column: str, label_column: str | None, options, accelerator
) -> Dataset:
    """What a diffusion script trains on: pixels in [-1, 1], of images with so many `channels`, or latents of a `vae`."""
    if vae is not None:
        return latent_images(vae, train, image_column, label_column, options, accelerator)
    augmentation = Augmentation(
        (options.image_size, options.image_size),
        channels,
        0,  # no patches are masked
        mean=[0.5] * channels,
        std=[0.5] * channels,
        seed=options.seed,
        crop_scale=None,  # the middle, as of latents, and as evaluate.py compares with
        horizontal_flip=options.horizontal_flip,
    )
    return DiffusionImages(
        train,
        image_column,
        augmentation,
        memory_limit=int(options.memory_limit_gb * 2**30),
        on_bad_image=options.on_bad_image,
        progress=partial(tqdm, disable=not accelerator.is_local_main_process, leave=False),
        label_column=label_column,
    )


def latent_images(
    vae: AutoencoderKL, train, image_column: str, label_column: str | None, options, accelerator: Accelerator
) -> Latents:
    """The latents of a data set as a script's options want them: the middle of each image, a square, brought to size."""
    processor = CenterCropProcessor(options.image_size, options.image_size, signed=True)
    images = EvaluationDataset(
        train, image_column, label_column, processor, vae.config.in_channels, options.on_bad_image
    )
    settings = {"seed": options.seed, "flip": options.horizontal_flip, **latent_scaling(vae)}
    if options.keep_latents:
        identity = {"data": train._fingerprint, "columns": [image_column, label_column]}
        identity["processor"] = json.loads(processor.to_json_string())
        shards = cache_latents(
            vae, images, options.latents_dir, identity, accelerator, num_workers=options.num_workers
        )
        return CachedLatents(shards, int(options.memory_limit_gb * 2**30), **settings)
    if options.on_bad_image == "skip":
        raise DataError("--on_bad_image skip needs --keep_latents true.")
    labels = torch.tensor(train[label_column][:]) if label_column else None
    return EncodedLatents(vae, images, labels, **settings)


def load_vae(path: str, device) -> AutoencoderKL:
    """A frozen autoencoder; a folder's place on this machine is not kept in what is saved with it."""
    vae = AutoencoderKL.from_pretrained(path).requires_grad_(False).to(device).eval()
    if Path(path).exists():
        vae.register_to_config(_name_or_path=Path(path).name)
    return vae


def latent_size(vae: AutoencoderKL, image_size: int) -> int:
    """Height and width of the latent of a square image."""
    factor = vae_scale_factor(vae)
    if image_size % factor != 0:
        raise DataError(
            f"--image_size must be divisible by {factor}, which the autoencoder shrinks by, got {image_size}."
        )
    return image_size // factor


def vae_scale_factor(vae: AutoencoderKL) -> int:
    """How many pixels of an image make one of its latent, each way."""
    return 2 ** (len(vae.config.block_out_channels) - 1)


def latent_scaling(vae: AutoencoderKL) -> dict[str, float]:
    """What training takes off and multiplies by, as the autoencoder says itself."""
    config = vae.config
    return {
        "scale": getattr(config, "scaling_factor", None) or 1.0,
        "shift": getattr(config, "shift_factor", None) or 0.0,
    }
