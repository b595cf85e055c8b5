"""Measurements: tensors in, numbers out."""

from .effective_rank import effective_rank
from .frechet import frechet_distance, kernel_distance, precision_recall
from .knn import knn_accuracy


__all__ = ["effective_rank", "frechet_distance", "kernel_distance", "knn_accuracy", "precision_recall"]
