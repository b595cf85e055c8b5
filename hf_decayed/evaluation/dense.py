"""Evaluation of dense features, a vector for every patch: "what" (classes of patches) against "where" (their position)."""

from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch
from accelerate import Accelerator

from ..data.datasets import EvaluationDataset
from ..data.shards import Encoder, encode_dataset
from ..data.sources import ImageSplits, take_subset
from ..errors import DataError, UserError
from .encoders import FeatureSource, describe_results, encoder_source
from .features import Extraction, dense_features, patch_grid
from .segmentation import cluster_miou, cluster_patches, coordinate_probe, patch_probe


DENSE_METRICS = ("segmentation", "where")


@dataclass(frozen=True)
class DenseMetrics:
    """Metrics of dense features, and their settings.

    Args:
        names (`Sequence[str]`): `segmentation` (needs masks), `where`, or both.
        num_clusters (`int`): Clusters of k-means over the patches of all images.
        num_seeds (`int`): Seeds of k-means; segmentation is their mean, with its deviation.
        max_images (`int`): Images per split: dense features are large.
        seed (`int`): First seed of k-means, and seed of the position probe's split.
    """

    names: Sequence[str] = DENSE_METRICS
    num_clusters: int = 27
    num_seeds: int = 3
    max_images: int = 2000
    seed: int = 0

    def compute(self, features: torch.Tensor, masks: torch.Tensor | None = None, train=None, train_masks=None) -> dict:
        """Metrics of held-out dense features; training features and masks are for the linear probe of patches."""
        results: dict[str, float] = {}
        if "segmentation" in self.names:
            assert masks is not None
            results |= self.segment(features, masks)
            if train is not None:
                results["patch_accuracy"] = patch_probe(train, train_masks, features, masks, seed=self.seed)
        if "where" in self.names:
            probe = coordinate_probe(features, seed=self.seed)
            results |= {"position_accuracy": probe.accuracy, "position_mse": probe.mse}
        return results

    def segment(self, features: torch.Tensor, masks: torch.Tensor) -> dict[str, float]:
        """Mean IoU of clusters, matched with classes in two ways: mean and deviation over the seeds of k-means."""
        seeds = range(self.seed, self.seed + self.num_seeds)
        clusters = [cluster_patches(features, self.num_clusters, seed) for seed in seeds]
        results = {}
        for name, match in (("cluster_miou", "hungarian"), ("cluster_miou_greedy", "greedy")):
            scores = torch.tensor([cluster_miou(labels, masks, match) for labels in clusters], dtype=torch.float64)
            results[name] = scores.mean().item()
            if len(scores) > 1:
                results[f"{name}_spread"] = scores.std().item()
        return results

    def protocol(self) -> dict:
        """The settings, as results record them."""
        return {
            "segmentation": {
                "clusters": self.num_clusters,
                "k_means_seeds": self.num_seeds,
                "features": "layer-normalised",
                "match": "Hungarian, or greedy: most frequent class",
                "patch_accuracy": "ridge probe of the class of most pixels of a patch",
            },
            "where": "ridge probe of a patch's position, trained on 80 % of the held-out images, tested on the others; squared "
            "error in cells of a 32 x 32 grid",
            "max_images": self.max_images,
            "seed": self.seed,
        }


def evaluate_patches(
    model: torch.nn.Module,
    processor,
    splits: ImageSplits,
    features: Sequence[str] | str | None = None,
    metrics: DenseMetrics | None = None,
    extraction: Extraction | None = None,
    accelerator: Accelerator | None = None,
    pixels: bool = True,
) -> dict:
    """Rows of metrics by layer, with protocol and data set, for a vision model of transformers and its processor.

    Args:
        features (`Sequence[str]` or `str`, *optional*):
            `<layer>.patches`, or `all_layers`; by default the last layer.
        pixels (`bool`): Evaluates the raw pixels of patches too.
    """
    accelerator = accelerator or Accelerator()
    if features == "all_layers":
        features = [f"{layer}.patches" for layer in range(model.config.num_hidden_layers + 1)]
    source = encoder_source(model, processor, list(features or ["last.patches"]), accelerator.device)
    baseline = pixel_patches(model.config) if pixels else None
    return evaluate_dense(source, splits, metrics, extraction, accelerator, baseline)


def evaluate_dense(
    source: FeatureSource,
    splits: ImageSplits,
    metrics: DenseMetrics | None = None,
    extraction: Extraction | None = None,
    accelerator: Accelerator | None = None,
    patch_pixels: Encoder | None = None,
) -> dict:
    """Rows of metrics by dense feature, with protocol and data set; all processes call it, the main process gets the rows.

    Args:
        source (`FeatureSource`): Whose encoder returns features `(batch, height, width, dim)`.
        patch_pixels (`Encoder`, *optional*): Returns the pixels of patches, a baseline that has learned nothing.
    """
    metrics, extraction = metrics or DenseMetrics(), extraction or Extraction()
    accelerator = accelerator or Accelerator()
    segmented = "segmentation" in metrics.names
    if segmented and splits.mask_column is None:
        raise DataError(
            "Segmentation needs masks, and there is no mask column: name one with --mask_column_name, or use --metrics where."
        )
    encode = source.encode if patch_pixels is None else merge_encoders(patch_pixels, source.encode)
    datasets = {"test": take_subset(splits.held_out, metrics.max_images)}
    if segmented:
        datasets["train"] = take_subset(splits.train, metrics.max_images)
    features = {}
    for split, dataset in datasets.items():
        images = EvaluationDataset(
            dataset,
            splits.image_column,
            splits.label_column,
            source.processor,
            source.num_channels,
            extraction.on_bad_image,
            mask_column=splits.mask_column if segmented else None,
            mask_zero_is_ignored=splits.mask_zero_is_ignored,
        )
        check_memory(encode, images, sum(map(len, datasets.values())), accelerator)
        features[split] = encode_dataset(
            encode, images, accelerator, extraction.batch_size, f"dense features of {split}"
        )
    rows = {}
    if accelerator.is_main_process:
        test, train = features["test"], features.get("train", {})
        names = [name for name in test if name not in ("labels", "checksums", "masks")]
        for name in names:
            rows[name] = metrics.compute(test[name], test.get("masks"), train.get(name), train.get("masks"))
    return describe_results(source, splits, metrics.protocol(), datasets, features, rows, accelerator)


def pixel_patches(config) -> Encoder:
    """An encoder that returns the pixels of every patch, under the name `pixels.patches`."""

    def encode(pixel_values, indices):
        grid = patch_grid(config, pixel_values)
        if grid is None:
            raise ValueError("The model does not say how large its patches are.")
        height, width = pixel_values.shape[2] // grid[0], pixel_values.shape[3] // grid[1]
        images = pixel_values[:, :, : grid[0] * height, : grid[1] * width]
        patches = images.unflatten(3, (grid[1], width)).unflatten(2, (grid[0], height))
        return {"pixels.patches": dense_features(patches.permute(0, 1, 3, 5, 2, 4).flatten(1, 3), None)}

    return encode


def merge_encoders(*encoders: Encoder) -> Encoder:
    def encode(pixel_values, indices):
        return {name: value for part in encoders for name, value in part(pixel_values, indices).items()}

    return encode


def check_memory(encode: Encoder, images: EvaluationDataset, number: int, accelerator: Accelerator) -> None:
    """Encodes one image to estimate how much memory all of them will take; too much is an error, of all processes."""
    batch = images.__getitems__([0])
    if "pixel_values" not in batch:  # the first image cannot be decoded
        return
    with torch.no_grad(), accelerator.autocast():
        encoded = encode(batch["pixel_values"].to(accelerator.device), [0])
    needed = 4 * number * sum(value.numel() for value in encoded.values())
    available = psutil.virtual_memory().available
    too_much = torch.tensor(float(needed > 0.7 * available), device=accelerator.device)
    if accelerator.reduce(too_much, "sum").item() > 0:
        raise UserError(
            f"Dense features of {number} images would take {needed / 2**30:.1f} GB of memory, and {available / 2**30:.1f} GB "
            "are free: use fewer --dense_images, or name fewer layers with --features."
        )


def split_features(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Names of pooled features, and of dense ones."""
    dense = [name for name in names if name.endswith(".patches")]
    return [name for name in names if name not in dense], dense
