"""Latents of all levels of a nested diffusion model, encoded once into shards, and the batches that train one level."""

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from accelerate import Accelerator
from safetensors import safe_open
from torch.utils.data import Dataset
from tqdm.auto import tqdm
from transformers import AutoImageProcessor, AutoModel, PreTrainedModel, ViTConfig, ViTModel

from ..command_line import count_loader_workers
from ..decay.stock import stock_model
from ..errors import DataError, UserError, explain_loading_errors, format_error
from ..models.modeling_decayed_vit_mae import DecayedViTMAEModel
from ..models.modeling_hierarchical_latents import HierarchicalLatentEncoder
from ..provenance import model_fingerprint
from .datasets import DiffusionImages, EvaluationDataset
from .keyed_random import sample_generator
from .latents import Latents, latent_images, load_vae
from .shards import read_shards, split_batches, write_shards
from .sources import ImageSplits, load_image_splits
from .transforms import CenterCropProcessor


logger = logging.getLogger(__name__)

RANDOM_PROJECTION = "random_projection"  # an `encoder` that is not a checkpoint
CONDITION_STREAM = 4  # for the noise on the latents above; 0 to 3 are for images, masks, diffusion and VAE


def hierarchy_images(
    splits: ImageSplits, image_size: int, num_channels: int, split: Literal["train", "held_out"] = "train"
) -> EvaluationDataset:
    """Images as the latent encoder takes them: center crops in [0, 1]."""
    processor = CenterCropProcessor(image_size, image_size)
    return EvaluationDataset(getattr(splits, split), splits.image_column, splits.label_column, processor, num_channels)


def image_batches(
    splits: ImageSplits,
    image_size: int,
    num_channels: int,
    number: int | None = None,
    split: Literal["train", "held_out"] = "train",
) -> Iterator[torch.Tensor]:
    """Batches `(batch, channels, height, width)` of up to `number` images in [0, 1], always the same ones."""
    images = hierarchy_images(splits.take(number, number), image_size, num_channels, split)
    for indices in split_batches(len(images), 64):
        yield images.__getitems__(indices)["pixel_values"]


def load_latent_encoder(
    encoder: str,
    splits: ImageSplits,
    image_size: int,
    num_channels: int,
    levels: list[tuple[int, int]],
    min_crop_size: int,
    svd_images: int | None,
    cache_dir: str | Path,
    accelerator: Accelerator,
) -> HierarchicalLatentEncoder:
    """The latent encoder built on `encoder`, whose SVD is fitted once and cached.

    All processes call it.

    Args:
        encoder (`str`): Folder or repository with an image processor, or `random_projection`.
        image_size (`int`), num_channels (`int`): Size and channels of the images.
        levels (`list` of `(grid, channels)`): Latents above level 1, the highest first.
        svd_images (`int`, *optional*): Training images that the SVD is fitted on; all of them by default.
        cache_dir (`str` or `Path`): Folder of fitted encoders.
    """
    if encoder == RANDOM_PROJECTION:
        network, half = random_projection(image_size, num_channels), [0.5] * num_channels
        fields = {"pooling": "patch_mean", "image_mean": half, "image_std": half}
    else:
        network, fields = load_encoder(encoder)
    model = HierarchicalLatentEncoder.from_encoder(network, levels, image_size, min_crop_size=min_crop_size, **fields)
    if model.config.num_channels != num_channels:
        raise UserError(
            f"'{encoder}' takes images of {model.config.num_channels} channels, and the data has {num_channels}."
        )
    identity = json.dumps([model_fingerprint(model), splits.fingerprint(), svd_images])
    folder = Path(cache_dir) / f"encoder-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    with accelerator.main_process_first():
        fitted = load_fitted(folder)
        if fitted is None:
            batches = image_batches(splits, image_size, num_channels, svd_images)
            hidden = not accelerator.is_main_process
            model.to(accelerator.device).fit(tqdm(batches, desc="fitting the SVD", leave=False, disable=hidden))
            save_whole(model, folder)
            # Loaded from the file, so that the first run and a resumed one are bit-equal.
            fitted = HierarchicalLatentEncoder.from_pretrained(folder)
    return fitted.to(accelerator.device).eval()


def load_fitted(folder: Path) -> HierarchicalLatentEncoder | None:
    """A fitted encoder from the cache. A damaged one is removed, with one line in the log."""
    if not (folder / "config.json").exists():
        return None
    try:
        fitted = HierarchicalLatentEncoder.from_pretrained(folder)
        if fitted.compute_fingerprint() == fitted.config.fingerprint:
            return fitted
        reason = "its weights do not have its fingerprint"
    except Exception as error:  # what a damaged file raises depends on where the damage is
        reason = format_error(error)
    logger.warning("Fitting the SVD again: '%s' is damaged: %s", folder.name, reason)
    shutil.rmtree(folder)
    return None


def load_encoder(encoder: str) -> tuple[PreTrainedModel, dict[str, Any]]:
    """An encoder of transformers, and the fields of the latent encoder that follow from it."""
    with explain_loading_errors(encoder):
        network = AutoModel.from_pretrained(encoder, dtype=torch.float32).eval()
        processor = AutoImageProcessor.from_pretrained(encoder)
        fields: dict[str, Any] = {"image_mean": list(processor.image_mean), "image_std": list(processor.image_std)}
        if network.config.model_type == "vit_mae":  # it masks and shuffles its patches; ours does not
            network = DecayedViTMAEModel.from_pretrained(encoder, dtype=torch.float32)
        if isinstance(network, DecayedViTMAEModel):
            fields["pooling"] = network.config.pooling
            network = stock_model(network)
    return network, fields


def random_projection(image_size: int, num_channels: int, width: int = 256) -> ViTModel:
    """A fixed random linear map of the pixels: an untrained encoder, as a baseline."""
    config = ViTConfig(
        hidden_size=width,
        num_hidden_layers=0,
        num_attention_heads=1,
        intermediate_size=1,
        image_size=image_size,
        patch_size=image_size,  # the only patch is the image
        num_channels=num_channels,
        layer_norm_eps=1e12,  # a ViT's final norm divides by sqrt(variance + eps), which this makes constant
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ViTModel(config, add_pooling_layer=False).eval()


def save_whole(model: HierarchicalLatentEncoder, folder: Path) -> None:
    """Saves a folder completely or not at all; a folder that another run has saved in the meantime stays."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".writing-") as temporary:
        model.save_pretrained(Path(temporary) / "encoder")
        try:
            os.replace(Path(temporary) / "encoder", folder)
        except OSError:
            if not (folder / "config.json").exists():
                raise


def cache_nested_latents(
    encoder: HierarchicalLatentEncoder,
    splits: ImageSplits,
    folder: str | Path,
    accelerator: Accelerator,
    mirrored: bool = True,
    batch_size: int = 64,
    shard_size: int = 8192,
    num_workers: int = 0,
) -> list[Path]:
    """Encodes every training image, and its mirror image if `mirrored`, into shards under `folder`; returns the files.

    All processes call it. A cache of the same encoder, images and preparation is reused.
    """
    if splits.views is not None:
        raise DataError(f"'{splits.name}' draws new views in every epoch, which latents cannot: use another data set.")
    images = hierarchy_images(splits, encoder.config.image_size, encoder.config.num_channels)

    def encode(pixel_values, indices):
        versions = {"": pixel_values, "_mirrored": pixel_values.flip(-1)} if mirrored else {"": pixel_values}
        with torch.autocast(pixel_values.device.type, enabled=False):  # the cache is used for many runs
            latents = {
                f"level_{level}{suffix}": tensor.contiguous()
                for suffix, version in versions.items()
                for level, tensor in encoder.encode(version).items()
            }
        if not all(torch.isfinite(tensor).all() for tensor in latents.values()):
            raise DataError(
                f"The encoder gives latents that are not finite, among images {indices[0]} to {indices[-1]}."
            )
        return latents

    identity = {
        "kind": "nested latents",
        "latent_encoder": encoder.config.fingerprint,
        "data": splits.train._fingerprint,
        "columns": [splits.image_column, splits.label_column],
        "processor": json.loads(images.processor.to_json_string()),
        "mirrored": mirrored,
    }
    settings = {"description": "encoding latents", "precision": str(encoder.dtype)}
    return write_shards(encode, images, folder, identity, accelerator, batch_size, shard_size, num_workers, **settings)


def precompute_latents(
    encoder: str,
    hierarchy: list[tuple[int, int, int]],
    image_size: int,
    num_channels: int,
    source: dict,
    latents_dir: str | Path,
    max_train_samples: int | None = None,
    conditional: bool = True,
    horizontal_flip: bool = True,
    vae: str | None = None,
    min_crop_size: int = 64,
    svd_images: int | None = 50_000,
    num_workers: int | None = None,
) -> str:
    """Caches the latents of all levels, where `training/nested.py` with the same settings finds them; all processes call it.

    Returns what the command prints. `source` are arguments of `load_image_splits`, `vae` is for level 1.
    """
    accelerator = Accelerator()
    num_workers = count_loader_workers(accelerator) if num_workers is None else num_workers
    with accelerator.main_process_first():
        splits = load_image_splits(**source).take(max_train_samples).with_fixed_views()
    if not conditional:
        splits = replace(splits, label_column=None)
    if vae is not None:
        with explain_loading_errors(vae):
            network = load_vae(vae, accelerator.device)
        num_channels = network.config.in_channels
        latent_images(network, splits, image_size, 0, accelerator, latents_dir, num_workers=num_workers)
    levels = [(size, channels) for size, channels, _ in hierarchy]
    latent_encoder = load_latent_encoder(
        encoder, splits, image_size, num_channels, levels, min_crop_size, svd_images, latents_dir, accelerator
    )
    shards = cache_nested_latents(
        latent_encoder, splits, latents_dir, accelerator, horizontal_flip, num_workers=num_workers
    )
    shares = [
        f"level {level}: {share:.0%} of the variance" for level, share in latent_encoder.explained_variance().items()
    ]
    shares += ["level 1: latents of the VAE"] if vae is not None else []
    listing = ", ".join(shares)
    return f"latents {latent_encoder.config.fingerprint} of {len(splits.train)} images ({listing}): {shards[0].parent}"


class LatentTable:
    """Latents of all levels by image, from shards: in memory up to a limit, beyond it read from disk on demand."""

    def __init__(self, shards: list[Path], memory_limit: int = 2 * 2**30):
        self.shards, self.files = shards, {}
        labels = []
        for shard in shards:
            with safe_open(shard, "pt") as file:
                labels.append(file.get_tensor("labels"))
        self.starts = np.cumsum([0, *map(len, labels)])
        self.labels = None if torch.cat(labels).min() < 0 else torch.cat(labels)
        fits = sum(shard.stat().st_size for shard in shards) <= memory_limit
        self.memory = read_shards(shards) if fits else None

    def __len__(self) -> int:
        return int(self.starts[-1])

    def rows(self, level: int, indices: list[int], flips: list[bool] | None = None) -> torch.Tensor:
        """Latents `(number, channels, size, size)` of images, or of their mirror images where `flips` says so."""
        flips = [False] * len(indices) if flips is None else flips
        names = [f"level_{level}_mirrored" if flipped else f"level_{level}" for flipped in flips]
        if self.memory is not None:
            return torch.stack([self.memory[name][index] for name, index in zip(names, indices)])
        rows = []
        for name, index in zip(names, indices):
            number = int(np.searchsorted(self.starts, index, side="right")) - 1
            if number not in self.files:  # each worker opens its own
                self.files[number] = safe_open(self.shards[number], "pt").__enter__()
            rows.append(self.files[number].get_slice(name)[index - int(self.starts[number])])
        return torch.stack(rows)


class NestedLatents(Dataset):
    """Training samples of one level, by `(epoch, index)`.

    Batches hold `sample` (clean latents of the level), `noise` and `uniform` of the diffusion step, `labels` if there are
    any, and, the highest level first, the clean `conditions` and their `condition_noise`.

    Args:
        images (`DiffusionImages` or `Latents`, *optional*): What level 1 samples, pixels or VAE latents; only for
            level 1.
    """

    bad_images = 0

    def __init__(
        self,
        table: LatentTable,
        level: int,
        num_levels: int,
        seed: int,
        flip: bool,
        images: DiffusionImages | Latents | None = None,
    ):
        if images is not None and len(images) != len(table):
            raise DataError(
                f"There are {len(images)} images, and latents of {len(table)}: remove the cache of latents."
            )
        self.table, self.level, self.num_levels = table, level, num_levels
        self.seed, self.flip, self.images = seed, flip, images

    def __len__(self) -> int:
        return len(self.table)

    @property
    def uses_workers(self) -> bool:
        return self.table.memory is None or (self.images is not None and self.images.uses_workers)

    def __getitems__(self, keys: list[tuple[int, int]]) -> dict[str, torch.Tensor | list[torch.Tensor]]:
        indices = [index for _, index in keys]
        # The same draw as for the images of level 1.
        flips = [self.flip and bool(sample_generator(self.seed, *key).random(23)[22] < 0.5) for key in keys]
        batch = self.own_latents(keys, indices, flips)
        batch["conditions"] = [self.table.rows(level, indices, flips) for level in self.upper_levels]
        generators = [sample_generator(self.seed, *key, stream=CONDITION_STREAM) for key in keys]
        batch["condition_noise"] = [draw_noise(generators, clean.shape[1:]) for clean in batch["conditions"]]
        return batch

    @property
    def upper_levels(self) -> range:
        return range(self.num_levels, self.level, -1)

    def own_latents(self, keys: list[tuple[int, int]], indices: list[int], flips: list[bool]) -> dict:
        if self.images is not None:
            batch = self.images.__getitems__(keys)
            return {"sample": batch.pop("pixel_values"), **batch}
        sample = self.table.rows(self.level, indices, flips)
        generators = [sample_generator(self.seed, *key, stream=2) for key in keys]
        uniform = np.stack([generator.random(2, dtype=np.float32) for generator in generators])
        batch = {"sample": sample, "uniform": torch.from_numpy(uniform)}
        batch["noise"] = draw_noise(generators, sample.shape[1:])
        return batch if self.table.labels is None else {**batch, "labels": self.table.labels[indices]}


def draw_noise(generators: list[np.random.Generator], shape: torch.Size) -> torch.Tensor:
    """Standard normal noise `(number, *shape)`, one generator per sample."""
    return torch.from_numpy(
        np.stack([generator.standard_normal(tuple(shape), dtype=np.float32) for generator in generators])
    )


def held_out_latents(encoder: HierarchicalLatentEncoder, splits: ImageSplits, number: int) -> dict[int, torch.Tensor]:
    """Latents by level of up to `number` held-out images."""
    config = encoder.config
    parts = [
        {level: tensor.float().cpu() for level, tensor in encoder.encode(pixel_values.to(encoder.device)).items()}
        for pixel_values in image_batches(splits, config.image_size, config.num_channels, number, "held_out")
    ]
    return {level: torch.cat([part[level] for part in parts]) for level in parts[0]}
