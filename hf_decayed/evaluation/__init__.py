"""Evaluation: metrics from tensors to numbers, features of models, samples of pipelines.

`hf-decayed evaluate` runs `__main__.py`; the metrics below take tensors, `skip_ablation` a model.
"""

import warnings

from .clustering import (
    cluster_accuracy,
    kmeans_metrics,
    linear_svm,
    normalized_mutual_information,
    purity,
    spherical_kmeans,
)
from .effective_rank import effective_rank
from .frechet import density_coverage, frechet_distance, kernel_distance, precision_recall
from .knn import knn_accuracy, whiten
from .linear_probe import PROTOCOLS, ProbeProtocol, linear_probe
from .segmentation import (
    CoordinateProbe,
    cluster_miou,
    cluster_patches,
    coordinate_probe,
    oracle_miou,
    patch_labels,
    patch_probe,
    spatial_labels,
)
from .skip_ablation import skip_ablation


__all__ = [
    "PROTOCOLS",
    "CoordinateProbe",
    "ProbeProtocol",
    "cluster_accuracy",
    "cluster_miou",
    "cluster_patches",
    "coordinate_probe",
    "density_coverage",
    "effective_rank",
    "frechet_distance",
    "kernel_distance",
    "kmeans_metrics",
    "knn_accuracy",
    "linear_probe",
    "linear_svm",
    "normalized_mutual_information",
    "oracle_miou",
    "patch_labels",
    "patch_probe",
    "precision_recall",
    "purity",
    "skip_ablation",
    "spatial_labels",
    "spherical_kmeans",
    "whiten",
]


def __getattr__(name: str):
    if name == "skip_use":
        warnings.warn("`skip_use` is now called `skip_ablation`.", FutureWarning, stacklevel=2)
        return skip_ablation
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
