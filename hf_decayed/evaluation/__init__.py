"""Measurements: tensors in, numbers out; `skip_ablation` takes a model."""

from .effective_rank import effective_rank
from .frechet import density_coverage, frechet_distance, kernel_distance, precision_recall
from .knn import knn_accuracy
from .linear_probe import PROTOCOLS, ProbeProtocol, linear_probe
from .skip_ablation import skip_ablation


__all__ = [
    "PROTOCOLS",
    "ProbeProtocol",
    "density_coverage",
    "effective_rank",
    "frechet_distance",
    "kernel_distance",
    "knn_accuracy",
    "linear_probe",
    "precision_recall",
    "skip_ablation",
]
