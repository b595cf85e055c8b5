"""`evaluate` module: k-nearest-neighbour accuracy of features.

    >>> import evaluate
    >>> bank, bank_labels = [[1.0, 0.1], [0.1, 1.0]], [0, 1]
    >>> test_features, test_labels = [[1.0, 0.0], [0.0, 1.0]], [0, 1]
    >>> metric = evaluate.load("hf_decayed/metrics/knn_accuracy")
    >>> results = metric.compute(predictions=test_features, references=test_labels, train_features=bank, train_labels=bank_labels, k=1)
    >>> {name: round(float(value), 3) for name, value in results.items()}
    {'knn_accuracy': 1.0}

The work is done by `hf_decayed.evaluation.knn_accuracy`.
"""

import datasets
import evaluate
import torch

from hf_decayed.evaluation import knn_accuracy


DESCRIPTION = (
    "Fraction of features whose k nearest training features (cosine similarity, weighted votes) vote for their label."
)
INPUTS = """
predictions: test features, (number, dim)
references: test labels
train_features, train_labels: training set, whose features vote
k (20), temperature (0.07; None gives every neighbour one vote)
"""


class KNNAccuracy(evaluate.Metric):
    def _info(self):
        feature = datasets.List(datasets.Value("float32"))
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="Wu et al., Unsupervised Feature Learning via Non-Parametric Instance Discrimination, CVPR 2018",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": feature, "references": datasets.Value("int64")}),
        )

    def _compute(self, predictions, references, train_features, train_labels, k=20, temperature=0.07):
        bank, queries = (torch.as_tensor(features, dtype=torch.float32) for features in (train_features, predictions))
        bank_labels, labels = (torch.as_tensor(values) for values in (train_labels, references))
        return {"knn_accuracy": knn_accuracy(bank, bank_labels, queries, labels, k=k, temperature=temperature)}
