"""Measurements: tensors in, numbers out."""

from .effective_rank import effective_rank
from .knn import knn_accuracy


__all__ = ["effective_rank", "knn_accuracy"]
