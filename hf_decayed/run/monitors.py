"""Monitors, which evaluate a model while it trains: each has `evaluate(model) -> dict` and `picture(path)`.

All processes call both: they share the work, and a sharded model runs only on all of them.
"""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset, IterableDataset
from torch.nn import functional as F

from ..data.datasets import EvaluationDataset
from ..data.keyed_random import sample_generator, sample_seed
from ..data.shards import encode_dataset
from ..data.sources import ImageSplits, take_subset
from ..data.transforms import CenterCropProcessor
from ..errors import DataError, UserError, format_error
from ..evaluation import effective_rank, frechet_distance, knn_accuracy, skip_ablation
from ..evaluation.dense import DENSE_METRICS, DenseMetrics, evaluate_patches, merge_encoders
from ..evaluation.features import Extraction, pipeline_network, transformer_encoder, with_pixels
from ..evaluation.generation import pixel_features
from ..evaluation.sampling import class_titles
from ..evaluation.segmentation import principal_colours
from ..plots import denormalize, reconstructions, save_grid, save_patch_colours, save_reconstructions


ABLATION_IMAGES = 256  # enough to tell which skips are used
PICTURE_IMAGES = 8
PATCH_PICTURE_IMAGES = 12
MIN_PATCH_IMAGES = 200
MEMORY_LIMIT = 2 * 2**30  # bytes of decoded images to keep, because every evaluation reads them again
SAMPLES_PER_BATCH = 64


class RepresentationMonitor:
    """kNN accuracy and effective rank of a masked autoencoder's features, skip ablation, and reconstructions.

    Features come from held-out images exactly as `hf-decayed evaluate` computes them.

    Args:
        processor: The image processor that is saved with the model.
        max_train_samples (`int`): Size of the kNN bank.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        splits: ImageSplits,
        processor,
        config,
        max_train_samples: int,
        max_eval_samples: int,
        on_bad_image: str = "stop",
    ):
        self.accelerator, self.processor, self.config = accelerator, processor, config
        subsets = (take_subset(splits.train, max_train_samples), take_subset(splits.held_out, max_eval_samples))
        self.bank, self.queries = (
            evaluation_dataset(rows, splits, processor, config.num_channels, on_bad_image) for rows in subsets
        )
        self.labelled = splits.label_column is not None and has_classes(self.bank, self.queries)
        # Drawn once, in random order: rows may be sorted by class.
        order = torch.randperm(len(self.queries), generator=torch.Generator().manual_seed(0))
        batch = self.queries.__getitems__(order[:ABLATION_IMAGES].tolist())
        self.images, self.shown = batch["pixel_values"], class_turns(batch["labels"].tolist())[:PICTURE_IMAGES]
        self.model = None

    def evaluate(self, model) -> dict[str, float]:
        self.model = model.to(self.accelerator.device)
        pooled = f"last.{self.config.pooling}"
        with evaluation_mode(model):
            encode = transformer_encoder(model.vit, list(dict.fromkeys([pooled, "last.cls"])))
            queries = encode_dataset(encode, self.queries, self.accelerator, description="held-out features")
            metrics = {"effective_rank": effective_rank(queries["last.cls"])}
            if self.labelled:
                bank = encode_dataset(encode, self.bank, self.accelerator, description="features of the bank")
                metrics["knn_accuracy"] = nearest_neighbours(bank, queries, pooled)
                metrics["knn_accuracy_cls"] = nearest_neighbours(bank, queries, "last.cls")
            images = self.images.to(self.accelerator.device)
            with self.accelerator.autocast():
                increases = skip_ablation(model, images, self.mask_noise(model).to(images.device))
        return metrics | {f"skip_use_{layer}": increase for layer, increase in increases.items()}

    def mask_noise(self, model) -> torch.Tensor:
        """Noise of the masks, always the same for as many patches as this model has."""
        patches = math.prod(model.config.grid_size)
        draws = [sample_generator(0, 0, index).random(patches) for index in range(len(self.images))]
        return torch.stack([torch.from_numpy(draw).float() for draw in draws])

    def evaluate_pixels(self) -> float | None:
        """kNN accuracy of raw pixels, the baseline that has learned nothing."""
        if not self.labelled:
            return None
        encode = with_pixels(lambda pixel_values, indices: {})
        bank, queries = (encode_dataset(encode, images, self.accelerator) for images in (self.bank, self.queries))
        return nearest_neighbours(bank, queries, "pixels")

    def picture(self, path: Path) -> None:
        """Reconstructions by the model that was evaluated last."""
        images = self.images[self.shown].to(self.accelerator.device)
        mean, std = list(self.processor.image_mean), list(self.processor.image_std)
        with evaluation_mode(self.model):
            rows = reconstructions(self.model, images, self.mask_noise(self.model)[self.shown], mean, std)
        if self.accelerator.is_main_process:
            path.parent.mkdir(parents=True, exist_ok=True)
            original, masked, reconstructed = rows
            save_reconstructions(path, original, masked, reconstructed, normalised=self.config.norm_pix_loss)


class PatchMonitor:
    """Segmentation and position metrics of the last layer's patches and of their pixels, as in `hf-decayed evaluate`.

    Segmentation needs masks. Streams, which can only be read in order, and sets too small for these metrics are not
    evaluated.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        splits: ImageSplits,
        processor,
        max_eval_samples: int,
        on_bad_image: str = "stop",
    ):
        self.accelerator, self.splits, self.processor = accelerator, splits, processor
        self.metrics = DenseMetrics(
            DENSE_METRICS if splits.mask_column else ["where"],
            max_images=min(max_eval_samples, DenseMetrics.max_images),
        )
        self.extraction = Extraction(on_bad_image=on_bad_image)
        self.models: dict[str, Any] = {}  # evaluated models, by their label in the picture

    def evaluate(self, model, label: str = "patch features") -> dict[str, float]:
        """Metrics by name; those of the pixels end in `_pixels`."""
        self.models[label] = model
        held_out = self.splits.held_out
        if isinstance(held_out, IterableDataset) or min(len(held_out), self.metrics.max_images) < MIN_PATCH_IMAGES:
            return {}
        try:
            with evaluation_mode(model):
                results = evaluate_patches(
                    model.vit, self.processor, self.splits, None, self.metrics, self.extraction, self.accelerator
                )
        except (UserError, ValueError) as error:  # must not cost a long run its other results
            if isinstance(error, DataError) and self.accelerator.num_processes > 1:
                raise  # an image of this process's share, for which the others wait
            self.accelerator.print(f"patches are not evaluated: {format_error(error)}")
            return {}
        rows = results["rows"]
        pixels = {f"{name}_pixels": value for name, value in rows.get("pixels.patches", {}).items()}
        return {**rows.get("last.patches", {}), **pixels}

    def picture(self, path: Path) -> None:
        """Held-out images above three components of their patch features as colours, with one row for every model."""
        rows = take_subset(self.splits.held_out, ABLATION_IMAGES)
        if isinstance(rows, IterableDataset):
            rows = rows.take(PATCH_PICTURE_IMAGES)
        else:
            labels = rows[self.splits.label_column] if self.splits.label_column else [0] * len(rows)
            rows = rows.select(class_turns(labels)[:PATCH_PICTURE_IMAGES])
        colours = {}
        for label, model in self.models.items():
            channels = model.config.num_channels
            images = evaluation_dataset(rows, self.splits, self.processor, channels, self.extraction.on_bad_image)
            encode = merge_encoders(
                lambda pixel_values, indices: {"images": pixel_values},
                transformer_encoder(model.vit, ["last.patches"]),
            )
            with evaluation_mode(model):
                encoded = encode_dataset(encode, images, self.accelerator, description="patches")
            if self.accelerator.is_main_process:
                colours[label] = principal_colours(encoded["last.patches"]).numpy()
        if self.accelerator.is_main_process:
            pictures = denormalize(encoded["images"], self.processor).numpy()
            path.parent.mkdir(parents=True, exist_ok=True)
            save_patch_colours(path, pictures, colours)


class ClassificationMonitor:
    """Accuracy of a classifier on held-out images; for a convolutional network also the rank of its stages."""

    def __init__(
        self, accelerator: Accelerator, splits: ImageSplits, processor, num_channels: int, on_bad_image="stop"
    ):
        self.accelerator = accelerator
        self.images = evaluation_dataset(splits.held_out, splits, processor, num_channels, on_bad_image)

    def evaluate(self, model) -> dict[str, float]:
        def encode(pixel_values, indices):
            outputs = model(pixel_values, output_hidden_states=True)
            # 0 is the stem; tokens of a transformer are not stages.
            maps = [state for state in outputs.hidden_states[1:] if state.ndim == 4]
            stages = {f"stage{number}": state.mean(dim=(2, 3)) for number, state in enumerate(maps, 1)}
            return {"logits": outputs.logits, **stages}

        with evaluation_mode(model):
            outputs = encode_dataset(encode, self.images, self.accelerator, description="held-out images")
        logits, labels = outputs["logits"], outputs["labels"]
        hits = logits.topk(min(5, logits.shape[1])).indices == labels.unsqueeze(1)
        metrics = {
            "accuracy": hits[:, 0].double().mean().item(),
            "accuracy_top5": hits.any(dim=1).double().mean().item(),
        }
        ranks = {name: effective_rank(outputs[name]) for name in outputs if name.startswith("stage")}
        if ranks:
            metrics["effective_rank"] = list(ranks.values())[-1]
        return metrics | {f"effective_rank_{name}": rank for name, rank in ranks.items()}

    def picture(self, path: Path) -> None:
        """Draws nothing: a classifier has only its curves."""


class SampleMonitor:
    """Samples of a diffusion pipeline, and their Frechet distance to training images.

    Sample i has the seed and the class that `hf-decayed sample` gives it.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        splits: ImageSplits,
        image_shape: tuple[int, int, int],
        num_classes: int,
        num_images: int,
        num_eval_samples: int,
        num_inference_steps: int,
        guidance_scale: float,
        on_bad_image: str = "stop",
    ):
        """`image_shape` is channels, height and width; `num_images` is the number of samples in a picture."""
        self.accelerator, self.image_shape, self.num_classes = accelerator, image_shape, num_classes
        self.num_images, self.num_eval_samples = num_images, num_eval_samples
        self.settings = {"num_inference_steps": num_inference_steps, "guidance_scale": guidance_scale}
        self.metric = f"frechet_pixels_{num_eval_samples}_guidance_{guidance_scale:g}"
        self.reference: torch.Tensor | None = None
        self.samples: torch.Tensor | None = None
        self.titles: list[str] | None = None  # names of classes
        if num_eval_samples > 1:
            processor = CenterCropProcessor(*image_shape[1:])
            rows = take_subset(splits.train, num_eval_samples)
            images = EvaluationDataset(rows, splits.image_column, None, processor, image_shape[0], on_bad_image)
            encode = lambda pixel_values, indices: {"features": pixel_features(pixel_values)}  # noqa: E731
            self.reference = encode_dataset(encode, images, accelerator, description="training images")["features"]

    def evaluate(self, pipeline) -> dict[str, float]:
        """Frechet distance between samples and as many training images; empty if a sample is not finite."""
        with evaluation_mode(pipeline_network(pipeline)):
            samples = self.draw(pipeline)
        self.titles = class_titles(pipeline, range(self.num_classes))
        self.samples = samples if torch.isfinite(samples).all() else None
        if self.samples is None:
            self.accelerator.print("no picture: some samples are not finite")
        if self.samples is None or self.reference is None:
            return {}
        features = pixel_features(samples[: self.num_eval_samples])
        return {self.metric: frechet_distance(self.reference, features)}

    def draw(self, pipeline) -> torch.Tensor:
        """Samples `(number, channels, height, width)` in [0, 1], in order; the processes share the work."""
        pipeline.set_progress_bar_config(disable=True)
        number, processes = max(self.num_images, self.num_eval_samples), self.accelerator.num_processes
        mine = list(range(self.accelerator.process_index, number, processes))
        batches = [torch.zeros(0, *self.image_shape)]
        for start in range(0, len(mine), SAMPLES_PER_BATCH):
            batches.append(self.draw_batch(pipeline, mine[start : start + SAMPLES_PER_BATCH]))
        # Process p draws samples p, p + n, ...; interleaving restores their order. Short shares are padded for
        # gathering.
        samples, longest = torch.cat(batches).to(self.accelerator.device), math.ceil(number / processes)
        samples = F.pad(samples, (0, 0, 0, 0, 0, 0, 0, longest - len(samples)))
        samples = self.accelerator.gather(samples).unflatten(0, (-1, longest)).transpose(0, 1).flatten(0, 1)
        return samples[:number].cpu()

    def draw_batch(self, pipeline, indices: list[int]) -> torch.Tensor:
        labels = [index % self.num_classes for index in indices] if self.num_classes else None
        settings = self.settings if labels else {**self.settings, "guidance_scale": 1.0}
        # On the CPU, so that every device draws the same.
        generators = [torch.Generator().manual_seed(sample_seed(0, index)) for index in indices]
        try:
            with self.accelerator.autocast():
                samples = pipeline(
                    class_labels=labels,
                    batch_size=len(indices),
                    generator=generators,
                    output_type="pt",
                    **settings,
                ).images
        except ValueError as error:
            if "NaN or infinity" not in str(error):
                raise
            return torch.full((len(indices), *self.image_shape), math.nan)  # other processes wait for this share
        return samples.float().cpu()

    def picture(self, path: Path) -> None:
        """A grid of the samples that were drawn last."""
        if self.samples is not None and self.accelerator.is_main_process:
            save_grid(path, self.samples[: self.num_images].permute(0, 2, 3, 1).numpy(), self.titles)


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Turns off gradients and dropout; restores the training mode afterwards."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def evaluation_dataset(
    rows, splits: ImageSplits, processor, num_channels: int, on_bad_image: str
) -> EvaluationDataset:
    """Images for repeated evaluation, decoded once; a stream is read to its end."""
    if isinstance(rows, IterableDataset):
        columns = [splits.image_column] + ([splits.label_column] if splits.label_column else [])
        rows = rows.select_columns(columns)
        rows = Dataset.from_list(list(rows), features=rows.features)
    return EvaluationDataset(
        rows, splits.image_column, splits.label_column, processor, num_channels, on_bad_image, MEMORY_LIMIT
    )


def has_classes(bank: EvaluationDataset, queries: EvaluationDataset) -> bool:
    """Whether labels are of use: there is more than one class, and no hidden labels, which benchmarks set to -1."""
    bank_labels, query_labels = (images.dataset[images.label_column] for images in (bank, queries))
    return len(set(bank_labels)) > 1 and min(query_labels) >= 0


def class_turns(labels: list[int]) -> list[int]:
    """Indices ordered so that classes take turns: every class comes once before any comes twice."""
    seen: Counter[int] = Counter()
    turns = []
    for index, label in enumerate(labels):
        turns.append((seen[label], index))
        seen[label] += 1
    return [index for _, index in sorted(turns)]


def nearest_neighbours(bank: dict, queries: dict, name: str) -> float:
    neighbours = min(20, len(bank["labels"]))
    return knn_accuracy(bank[name], bank["labels"], queries[name], queries["labels"], k=neighbours)
