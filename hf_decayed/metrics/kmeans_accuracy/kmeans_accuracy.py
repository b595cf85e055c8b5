"""`evaluate` module: agreement of spherical k-means with classes.

    >>> import evaluate
    >>> metric = evaluate.load("path/to/hf_decayed/metrics/kmeans_accuracy")
    >>> metric.compute(predictions=features, references=labels)

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
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features(
                {"predictions": datasets.List(datasets.Value("float32")), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions, references, num_clusters=None, runs=20, seed=0):
        features = torch.as_tensor(predictions, dtype=torch.float32)
        return kmeans_metrics(features, torch.as_tensor(references), num_clusters, runs, seed)
