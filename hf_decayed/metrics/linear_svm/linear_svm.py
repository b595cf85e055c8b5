"""`evaluate` module: accuracy of a linear support vector machine on features.

    >>> import evaluate
    >>> bank, bank_labels = [[1.0, 0.1], [0.1, 1.0], [0.9, 0.0], [0.0, 0.8]], [0, 1, 0, 1]
    >>> test_features, test_labels = [[1.0, 0.0], [0.0, 1.0]], [0, 1]
    >>> metric = evaluate.load("hf_decayed/metrics/linear_svm")
    >>> results = metric.compute(predictions=test_features, references=test_labels, train_features=bank, train_labels=bank_labels)
    >>> {name: round(float(value), 3) for name, value in results.items()}
    {'linear_svm': 1.0}

The work is done by `hf_decayed.evaluation.linear_svm`.
"""

import datasets
import evaluate
import torch

from hf_decayed.evaluation import linear_svm


DESCRIPTION = "Fraction of features that a linear support vector machine, trained on other features, gets right."
INPUTS = """
predictions: test features, (number, dim)
references: test labels
train_features, train_labels: training set
regularization (1.0): scikit-learn's C
"""


class LinearSVM(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="Cortes and Vapnik, Support-Vector Networks, Machine Learning 1995",
            inputs_description=INPUTS,
            features=datasets.Features(
                {"predictions": datasets.List(datasets.Value("float32")), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions, references, train_features, train_labels, regularization=1.0):
        train, test = (torch.as_tensor(features, dtype=torch.float32) for features in (train_features, predictions))
        labels = torch.as_tensor(train_labels), torch.as_tensor(references)
        return {"linear_svm": linear_svm(train, labels[0], test, labels[1], regularization)}
