"""Evaluation of an encoder's pooled features: kNN, linear probe, effective rank, with raw pixels as a baseline."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from accelerate import Accelerator

from ..data.datasets import EvaluationDataset
from ..data.shards import Encoder
from ..data.sources import ImageSplits
from ..errors import DataError
from ..provenance import model_fingerprint
from .clustering import NUM_RUNS, kmeans_metrics, linear_svm
from .effective_rank import effective_rank
from .features import Extraction, hash_json, transformer_encoder, with_pixels
from .knn import knn_accuracy, whiten
from .linear_probe import PROTOCOLS, linear_probe


FEATURE_METRICS = ("knn", "linear", "rank")
POOLED_METRICS = (*FEATURE_METRICS, "knn_whitened", "kmeans", "svm")
ENCODER_METRICS = (*POOLED_METRICS, "invariance")


@dataclass(frozen=True)
class FeatureMetrics:
    """Metrics of features, and their settings.

    Args:
        names (`Sequence[str]`): Some of `knn`, `linear`, `rank`, `knn_whitened`, `kmeans`, `svm` and `invariance`.
        k (`int`), temperature (`float`, *optional*): Arguments of [`knn_accuracy`].
        probe_protocol (`str`): Protocol of [`linear_probe`], a name in `PROTOCOLS`.
        seed (`int`): Seed of the linear probe.
    """

    names: Sequence[str] = FEATURE_METRICS
    k: int = 20
    temperature: float | None = 0.07
    probe_protocol: str = "ridge"
    seed: int = 0

    def compute(self, train, train_labels, test, test_labels, other_views=None) -> dict[str, float]:
        """Metrics of training and held-out features; the rank is that of the held-out ones.

        `other_views` are features of the held-out images in other views, in the same order.
        """
        splits = train, train_labels, test, test_labels
        results = {}
        if "knn" in self.names:
            results["knn_accuracy"] = knn_accuracy(*splits, k=self.k, temperature=self.temperature)
        if "knn_whitened" in self.names:
            whitened = whiten(train, test)
            results["knn_whitened_accuracy"] = knn_accuracy(
                whitened[0], train_labels, whitened[1], test_labels, k=self.k, temperature=self.temperature
            )
        if "linear" in self.names:
            results["linear_accuracy"] = linear_probe(*splits, protocol=self.probe_protocol, seed=self.seed)
        if "kmeans" in self.names:
            results |= kmeans_metrics(test, test_labels, seed=self.seed)
        if "svm" in self.names:
            results["svm_accuracy"] = linear_svm(*splits, seed=self.seed)
        if "rank" in self.names:
            results["effective_rank"] = effective_rank(test)
            results["effective_rank_exponential"] = effective_rank(test, "exponential")
        if "invariance" in self.names:
            images = torch.arange(len(test))  # every image is a class of its own
            results["invariance_accuracy"] = knn_accuracy(other_views, images, test, images, k=1)
        return results

    def protocol(self) -> dict:
        """The settings, as results record them."""
        protocol = {
            "knn": {"k": self.k, "similarity": "cosine", "temperature": self.temperature},
            "linear": {"name": self.probe_protocol, **asdict(PROTOCOLS[self.probe_protocol]), "augment": False},
            "rank": "entropy of the normalised eigenvalues of the centred covariance of held-out features",
            "seed": self.seed,
        }
        if "knn_whitened" in self.names:
            protocol["knn_whitened"] = "kNN after whitening by the covariance of the training features"
        if "kmeans" in self.names:
            protocol["kmeans"] = f"spherical k-means of held-out features, mean of {NUM_RUNS} runs, Hungarian matching"
        if "svm" in self.names:
            protocol["svm"] = "linear, one class against the rest, C = 1, features standardised"
        if "invariance" in self.names:
            protocol["invariance"] = "share of held-out images whose nearest neighbour among other views is their own"
        return protocol


@dataclass(frozen=True)
class FeatureSource:
    """A model as a source of features, and everything that its features depend on.

    Args:
        names (`list[str]`): Features that `encode` returns.
        processor: Prepares images; called as transformers' image processors are.
        num_channels (`int`): Channels of the images that the model takes.
        identity (`dict`): JSON-plain, with the fingerprint of the `model` in it: the key of cached features.
        description (`str`): What the features are, for readers of the results.
        dtype (`str`): dtype of the weights, such as `float32`.
    """

    encode: Encoder
    names: list[str]
    processor: Any
    num_channels: int
    identity: dict
    description: str
    dtype: str


def evaluate_encoder(
    model: torch.nn.Module,
    processor,
    splits: ImageSplits,
    features: Sequence[str] | str | None = None,
    metrics: FeatureMetrics | None = None,
    extraction: Extraction | None = None,
    accelerator: Accelerator | None = None,
    pixels: bool = True,
) -> dict:
    """Rows of metrics by feature, with protocol and data set, for a vision model of transformers and its processor.

    Args:
        features (`Sequence[str]` or `str`, *optional*):
            Names as [`transformer_encoder`] takes them, or `all_layers`: the model's own pooling at every depth. By default
            the model's own pooling of the last layer, and the class token if there is one.
        pixels (`bool`): Evaluates raw pixels too.
    """
    accelerator = accelerator or Accelerator()
    pooling = getattr(model.config, "pooling", "mean")
    if features is None:
        has_class_token = any("cls_token" in name or "class_embedding" in name for name, _ in model.named_parameters())
        features = [f"last.{pooling}"] + (["last.cls"] if has_class_token and pooling != "cls" else [])
    elif features == "all_layers":
        features = [f"{layer}.{pooling}" for layer in range(model.config.num_hidden_layers + 1)]
    source = encoder_source(model, processor, list(features), accelerator.device)
    return evaluate_features(source, splits, metrics, extraction, accelerator, pixels)


def encoder_source(model: torch.nn.Module, processor, features: list[str], device) -> FeatureSource:
    """A vision model of transformers as a source of features, named as [`transformer_encoder`] takes them."""
    return FeatureSource(
        encode=transformer_encoder(model.to(device), features),
        names=features,
        processor=processor,
        num_channels=getattr(model.config, "num_channels", 3),
        identity={"model": model_fingerprint(model), "features": features},
        description="whole images, as the model's processor prepares them",
        dtype=str(model.dtype).removeprefix("torch."),
    )


def evaluate_features(
    source: FeatureSource,
    splits: ImageSplits,
    metrics: FeatureMetrics | None = None,
    extraction: Extraction | None = None,
    accelerator: Accelerator | None = None,
    pixels: bool = True,
) -> dict:
    """Rows of metrics by feature, with protocol and data set; all processes call it, the main process gets the rows."""
    metrics, extraction = metrics or FeatureMetrics(), extraction or Extraction()
    accelerator = accelerator or Accelerator()
    if splits.label_column is None and set(metrics.names) - {"rank"}:
        raise DataError("kNN and probes need labels, and there is no label column: use --metrics rank, or name one.")
    if "invariance" in metrics.names and splits.other_views is None:
        raise DataError("Invariance needs data whose views are drawn, such as --dataset_name bundled:coloured.")
    identity = {
        **source.identity,
        "pixels": pixels,
        "processor": json.loads(source.processor.to_json_string()),
        "dtype": source.dtype,
        "columns": [splits.image_column, splits.label_column],
    }
    started = time.perf_counter()
    datasets, features = {"train": splits.train, "test": splits.held_out}, {}
    if "invariance" in metrics.names:
        datasets["other_views"] = splits.other_views
    for split, dataset in datasets.items():
        features[split] = extraction.extract(
            with_pixels(source.encode) if pixels else source.encode,
            EvaluationDataset(
                dataset,
                splits.image_column,
                splits.label_column,
                source.processor,
                source.num_channels,
                extraction.on_bad_image,
            ),
            {**identity, "split": split, "data": dataset._fingerprint},
            accelerator,
            f"features of {split.replace('_', ' ')}",
        )
    train, test = features["train"], features["test"]
    extracted = time.perf_counter()
    rows = {}
    if accelerator.is_main_process:
        # A support vector machine on as many features as there are pixels takes longer than everything else together.
        pixel_metrics = replace(metrics, names=[name for name in metrics.names if name != "svm"])
        for name in (["pixels"] if pixels and pixel_metrics.names else []) + source.names:
            other_views = features.get("other_views", {}).get(name)
            computed = pixel_metrics if name == "pixels" else metrics
            rows[name] = computed.compute(train[name], train["labels"], test[name], test["labels"], other_views)
    seconds = {"features": extracted - started, "metrics": time.perf_counter() - extracted}
    return {
        **describe_results(source, splits, metrics.protocol(), datasets, features, rows, accelerator),
        "seconds_by_part": {part: round(value, 1) for part, value in seconds.items()},
    }


def describe_results(
    source: FeatureSource,
    splits: ImageSplits,
    protocol: dict,
    datasets: dict,
    features: dict[str, dict[str, torch.Tensor]],
    rows: dict[str, dict[str, float]],
    accelerator: Accelerator,
) -> dict:
    """Rows of metrics with everything that they depend on; `datasets` and `features` are by split."""
    return {
        "model_fingerprint": source.identity["model"],
        "rows": rows,
        "protocol": {
            "features": source.description,
            **protocol,
            "dtype": source.dtype,
            "precision": accelerator.mixed_precision,
        },
        "dataset": {
            "name": splits.name,
            "held_out": splits.held_out_rule,
            "number": {split: len(features[split]["labels"]) for split in datasets},
            "fingerprint": {split: hash_json(features[split]["checksums"].tolist()) for split in datasets},
            **count_skipped({split: (len(datasets[split]), len(features[split]["labels"])) for split in datasets}),
        },
    }


def count_skipped(numbers: dict[str, tuple[int, int]]) -> dict[str, dict[str, int]]:
    """`skipped` images by split, from the numbers of images and of features; empty if there are none."""
    skipped = {split: total - encoded for split, (total, encoded) in numbers.items() if encoded < total}
    return {"skipped": skipped} if skipped else {}
