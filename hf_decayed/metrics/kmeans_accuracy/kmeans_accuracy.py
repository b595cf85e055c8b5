"""`evaluate` module: agreement of spherical k-means with classes.

    >>> import evaluate
    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> labels = torch.arange(40) % 2
    >>> features = torch.randn(40, 4) + 9 * labels[:, None] * torch.tensor([1.0, -1.0, 0.0, 0.0])
    >>> metric = evaluate.load("hf_decayed/metrics/kmeans_accuracy")
    >>> results = metric.compute(predictions=features, references=labels, runs=2)
    >>> {name: round(float(value), 3) for name, value in results.items()}
    {'kmeans_accuracy': 0.8, 'kmeans_nmi': 0.422, 'kmeans_purity': 0.8}

The work is done by `hf_decayed.evaluation.kmeans_metrics`.
"""

import datasets
import evaluate
import torch

from hf_decayed.evaluation import kmeans_metrics


DESCRIPTION = "Accuracy with Hungarian matching, mutual information and purity of spherical k-means, mean of runs."
INPUTS = """
predictions: features, (number, dim)
references: labels
num_clusters (the number of classes), runs (20), seed (0)
"""


class KMeansAccuracy(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="Zhang and Maire, Structural Adversarial Objectives for Self-Supervised Representation Learning, 2023",
            inputs_description=INPUTS,
            features=datasets.Features(
                {"predictions": datasets.List(datasets.Value("float32")), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions, references, num_clusters=None, runs=20, seed=0):
        features = torch.as_tensor(predictions, dtype=torch.float32)
        return kmeans_metrics(features, torch.as_tensor(references), num_clusters, runs, seed)
