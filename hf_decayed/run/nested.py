"""What training nested diffusion needs besides its loop: latents of all levels, the monitor of a level, the whole chain."""

import dataclasses
import json
import math
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..data.keyed_random import sample_seed
from ..data.nested_latents import (
    LatentTable,
    NestedLatents,
    cache_nested_latents,
    held_out_latents,
    image_batches,
    load_latent_encoder,
)
from ..errors import UserError
from ..evaluation import frechet_distance
from ..evaluation.generation import pixel_features
from ..evaluation.nested import sample_groups
from ..hub.cards import write_card
from ..kinds import read_json
from ..models.modeling_hierarchical_latents import HierarchicalLatentEncoder
from ..models.unet_nested_uvit import NestedUViT2DModel
from ..plots import save_grid
from ..provenance import model_fingerprint
from .arguments import RunOptions
from .diffusion import DiffusionData
from .monitors import SampleMonitor, evaluation_mode
from .records import format_loss, replace_text
from .run import Run


PICTURE_ROWS = 6  # and columns; the images of a row share their top latent


def level_folder(output_dir: Path, level: int) -> Path:
    """Folder of the run of one level; `runs` is not published."""
    return output_dir / "runs" / f"level_{level}"


def level_options(options: RunOptions, level: int) -> RunOptions:
    """Options of the run of one level, which has its own folder; the chain is uploaded as a whole, by `publish`."""
    if options.push_to_hub:
        raise UserError(
            "--push_to_hub uploads single networks: train the chain, then `hf-decayed publish` its folder."
        )
    return dataclasses.replace(
        options,
        output_dir=level_folder(options.output_dir, level),
        signature={**options.signature, "level": level},
    )


@dataclasses.dataclass
class NestedData:
    """Images of a nested diffusion model, and their latents at all levels.

    Args:
        images_and_classes (`DiffusionData`): What level 1 samples.
        latent_encoder (`HierarchicalLatentEncoder`): Computes the latents above level 1.
        hierarchy (`list` of `(size, channels, patch_size)`): The latents above level 1, the highest first.
        patch_size (`int`): Patch size of level 1.
        encoder_name (`str`): Name of the frozen encoder, for results.
    """

    images_and_classes: DiffusionData
    latent_encoder: HierarchicalLatentEncoder
    hierarchy: list[tuple[int, int, int]]
    patch_size: int
    encoder_name: str
    table: LatentTable | None = None

    @property
    def num_levels(self) -> int:
        return len(self.hierarchy) + 1

    @property
    def levels(self) -> list[tuple[int, int, int]]:
        """Size, channels and patch size of the latents of all levels, level 1 first."""
        fields = self.images_and_classes.model_fields()
        return [(fields["sample_size"], fields["in_channels"], self.patch_size), *reversed(self.hierarchy)]

    def encode(self, run: Run, cache_dir: Path, horizontal_flip: bool, memory_limit: int) -> None:
        """Encodes the training images into the cache, unless they are there already."""
        splits, workers = self.images_and_classes.splits, run.num_workers
        shards = cache_nested_latents(
            self.latent_encoder, splits, cache_dir, run.accelerator, horizontal_flip, num_workers=workers
        )
        self.table = LatentTable(shards, memory_limit)

    def images(self, run: Run, level: int, horizontal_flip: bool, **settings) -> NestedLatents:
        """Training data of a level. `settings` are those of `DiffusionData.images`, for level 1."""
        assert self.table is not None
        own = self.images_and_classes.images(run, horizontal_flip, **settings) if level == 1 else None
        return NestedLatents(self.table, level, self.num_levels, run.options.seed, horizontal_flip, own)

    def monitor(
        self,
        run: Run,
        level: int,
        trained: Collection[int],
        num_images: int,
        num_eval_samples: int,
        num_inference_steps: int,
        guidance_scale: float,
    ) -> "ChainMonitor":
        """Monitor of a level; it samples from the `trained` levels above, else from latents of held-out images."""
        assert self.table is not None
        data, number = self.images_and_classes, max(num_eval_samples, 1)
        if level == 1:
            reference = torch.cat(list(image_batches(data.splits, data.image_size, data.image_channels, number)))
        else:
            order = np.random.default_rng(0).permutation(len(self.table))  # rows may be sorted by class
            reference = self.table.rows(level, order[:number].tolist())
        missing = [upper for upper in range(level + 1, self.num_levels + 1) if upper not in trained]
        fixed = {}
        if missing:
            latents = held_out_latents(self.latent_encoder, data.splits, max(number, num_images))
            fixed = {upper: latents[upper] for upper in range(min(missing), self.num_levels + 1)}
        classes = len(data.class_names)
        return ChainMonitor(run, level, reference, fixed, classes, num_images, num_inference_steps, guidance_scale)

    def signature(self) -> dict:
        """What a resumed run must share with its checkpoint."""
        splits = self.images_and_classes.splits
        return {
            "dataset": splits.name,
            "fingerprint": splits.fingerprint(),
            "latents": self.latent_encoder.config.fingerprint,
        }

    def describe(self) -> dict:
        """Data and latents, as results record them."""
        data = self.images_and_classes
        dataset = {
            "name": data.splits.name,
            "fingerprint": data.splits.fingerprint(),
            "number": len(data.splits.train),
            "held_out": data.splits.held_out_rule,
        }
        explained = {str(level): share for level, share in self.latent_encoder.explained_variance().items()}
        latents = {
            "encoder": self.encoder_name,
            "fingerprint": self.latent_encoder.config.fingerprint,
            "explained_variance": explained,
        }
        return {"dataset": dataset, "latents": latents, "vae": data.vae and model_fingerprint(data.vae)}


def load_nested_data(
    run: Run,
    data: DiffusionData,
    encoder: str,
    hierarchy: list[tuple[int, int, int]],
    patch_size: int,
    min_crop_size: int,
    svd_images: int | None,
    cache_dir: str | Path,
) -> NestedData:
    """Data with a latent encoder built on `encoder`, whose SVD is fitted once and cached.

    Args:
        hierarchy (`list` of `(size, channels, patch_size)`): Latents above level 1, the highest first.
        patch_size (`int`): Patch size of level 1.
        svd_images (`int`, *optional*): Training images that the SVD is fitted on; all of them by default.
        cache_dir (`str` or `Path`): Folder of fitted encoders and of latents.
    """
    data = dataclasses.replace(data, splits=data.splits.with_fixed_views())
    levels = [(size, channels) for size, channels, _ in hierarchy]
    fitted = load_latent_encoder(
        encoder,
        data.splits,
        data.image_size,
        data.image_channels,
        levels,
        min_crop_size,
        svd_images,
        cache_dir,
        run.accelerator,
    )
    shares = ", ".join(f"level {level} {share:.0%}" for level, share in fitted.explained_variance().items())
    run.print(f"latents {fitted.config.fingerprint}, share of the features' variance: {shares}")
    return NestedData(data, fitted, hierarchy, patch_size, Path(encoder).name)


def load_finished_levels(output_dir: Path, levels: Iterable[int]) -> dict[int, NestedUViT2DModel]:
    """Networks of levels whose runs are finished, by level."""
    networks = {}
    for level in levels:
        folder = level_folder(output_dir, level)
        if (folder / "results.json").exists():
            networks[level] = NestedUViT2DModel.from_pretrained(folder).eval()
    return networks


class ChainMonitor(SampleMonitor):
    """Samples of a chain down to one level, and their Frechet distance to the latents or images of training.

    Sample i has its own seed. Levels without a network take the latents of held-out images.

    Args:
        reference (`torch.Tensor`): Latents of the level, or images in [0, 1] for level 1, of training images.
        fixed_latents (`dict[int, torch.Tensor]`): Latents of levels without a network, `(number, channels, size,
            size)`.
        guidance_weights (`float`): Guidance of all levels.
    """

    def __init__(
        self,
        run: Run,
        level: int,
        reference: torch.Tensor,
        fixed_latents: dict[int, torch.Tensor],
        num_classes: int,
        num_images: int,
        num_inference_steps: int,
        guidance_weights: float,
    ):
        shape = tuple(reference.shape[1:])
        super().__init__(run.accelerator, None, shape, num_classes, num_images, 0, num_inference_steps, 1.0)  # type: ignore[arg-type]
        self.level, self.fixed_latents = level, fixed_latents
        self.num_eval_samples = len(reference) if len(reference) > 1 else 0
        self.reference = self.features(reference) if self.num_eval_samples else None
        self.settings = {"num_inference_steps": num_inference_steps, "guidance_weights": guidance_weights}
        what = "pixels" if level == 1 else f"level_{level}"
        self.metric = f"frechet_{what}_{self.num_eval_samples}" + ("_oracle" if fixed_latents else "")

    def features(self, samples: torch.Tensor) -> torch.Tensor:
        return pixel_features(samples) if self.level == 1 else samples.float().flatten(1)

    def evaluate(self, pipeline) -> dict[str, float]:
        """The distance between samples and as many training images or latents."""
        with evaluation_mode(pipeline.unet):
            samples = self.draw(pipeline)
        self.samples = samples if torch.isfinite(samples).all() else None
        if self.samples is None or self.reference is None:
            return {}
        return {self.metric: frechet_distance(self.reference, self.features(samples[: self.num_eval_samples]))}

    def draw_batch(self, pipeline, indices: list[int]) -> torch.Tensor:
        labels = {"class_labels": [index % self.num_classes for index in indices]} if self.num_classes else {}
        generators = [torch.Generator().manual_seed(sample_seed(0, index)) for index in indices]
        fixed = {
            level: latents[[index % len(latents) for index in indices]]
            for level, latents in self.fixed_latents.items()
        }
        try:
            with self.accelerator.autocast():
                samples = pipeline(
                    **({} if labels else {"num_images": len(indices)}),
                    **labels,
                    fixed_latents=fixed,
                    generator=generators,
                    output_type="pt" if self.level == 1 else "latent",
                    **self.settings,
                ).images
        except ValueError as error:
            if "NaN or infinity" not in str(error):
                raise
            return torch.full((len(indices), *self.image_shape), math.nan)  # other processes wait for this share
        return samples.float().cpu()

    def picture(self, path: Path) -> None:
        """A grid of the images that were drawn last; latents have no picture."""
        if self.level == 1:
            super().picture(path)


def measure_level(
    run: Run, network: NestedUViT2DModel, monitor: ChainMonitor, pipeline, data: NestedData, level: int
) -> dict:
    """Saves the network of a level before the last evaluation, which may fail; returns the results of its run."""
    run.save(network, "network")
    measured = run.evaluate(monitor, pipeline, "samples" if level == 1 else None)
    results = run.results({**measured, "level": level, **data.describe()})
    if run.is_main_process:
        distances = "".join(f", {name} {value:.2f}" for name, value in measured.items())
        print(f"level {level}: {format_loss(results)}{distances}, {results['seconds']:.0f} s")
    return results


def save_chain(run: Run, folder: Path, pipeline, monitor: ChainMonitor, data: NestedData, last_results: dict) -> str:
    """Saves the whole chain, its picture, results and card in `folder`; all processes call it.

    `last_results` are those of the run that completes the chain; the other levels' are read from their folders.
    Returns the closing line of the script.
    """
    if run.is_main_process:
        shutil.rmtree(folder / "results", ignore_errors=True)  # evaluations of a chain that is replaced
        with run.writing("pipeline"):
            pipeline.save_pretrained(folder)
    measured = monitor.evaluate(pipeline)
    settings: dict[str, Any] = monitor.settings
    rows, _ = sample_groups(pipeline, PICTURE_ROWS, PICTURE_ROWS, monitor.num_classes, **settings)
    if run.is_main_process:
        with run.writing("samples.png"):
            save_grid(folder / "samples.png", rows.permute(0, 2, 3, 1).numpy())
        runs = {
            level: last_results
            if level == last_results["level"]
            else read_json(level_folder(folder, level) / "results.json")
            for level in pipeline.networks
        }
        macs = {f"macs_level_{level}": network.count_macs() for level, network in pipeline.networks.items()}
        sampling = {"steps": settings["num_inference_steps"]}
        results = run.results({**measured, **macs, **data.describe(), "sampling": sampling})
        results.pop("loss")  # belongs to the last level only
        results["seconds"] = round(sum(level_results["seconds"] for level_results in runs.values()), 1)
        fields = ("loss", "steps", "seconds", "hardware")
        results["levels"] = {str(level): {field: runs[level][field] for field in fields} for level in runs}
        with run.writing("results.json"):
            replace_text(folder / "results.json", json.dumps(results, indent=2) + "\n")
        if not run.unwritten:
            with run.writing("README.md"):
                write_card(folder)
    run.accelerator.wait_for_everyone()
    picture = f"the {PICTURE_ROWS} images in a row of samples.png share their top latent"
    return f"pipeline of {pipeline.num_levels} levels, samples.png, results.json: {folder}\n{picture}"
