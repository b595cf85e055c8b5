"""`evaluate` module: accuracy of a linear classifier on features.

    >>> import evaluate
    >>> bank, bank_labels = [[1.0, 0.1], [0.1, 1.0], [0.9, 0.0], [0.0, 0.8]], [0, 1, 0, 1]
    >>> test_features, test_labels = [[1.0, 0.0], [0.0, 1.0]], [0, 1]
    >>> metric = evaluate.load("hf_decayed/metrics/linear_probe")
    >>> results = metric.compute(predictions=test_features, references=test_labels, train_features=bank, train_labels=bank_labels)
    >>> {name: round(float(value), 3) for name, value in results.items()}
    {'linear_accuracy': 1.0}

The work is done by `hf_decayed.evaluation.linear_probe`.
"""

import datasets
import evaluate
import torch

from hf_decayed.evaluation import linear_probe


DESCRIPTION = (
    "Fraction of features that a linear classifier, trained on the training features by a named protocol, gets right."
)
INPUTS = """
predictions: test features, (number, dim)
references: test labels
train_features, train_labels: training set of the classifier
protocol: ridge (default), paper_imagenet100, mae_imagenet1k; seed (0)
"""


class LinearProbe(evaluate.Metric):
    def _info(self):
        feature = datasets.List(datasets.Value("float32"))
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="He et al., Masked Autoencoders Are Scalable Vision Learners, CVPR 2022",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": feature, "references": datasets.Value("int64")}),
        )

    def _compute(self, predictions, references, train_features, train_labels, protocol="ridge", seed=0):
        train, test = (torch.as_tensor(features, dtype=torch.float32) for features in (train_features, predictions))
        labels, test_labels = (torch.as_tensor(values) for values in (train_labels, references))
        return {"linear_accuracy": linear_probe(train, labels, test, test_labels, protocol=protocol, seed=seed)}
