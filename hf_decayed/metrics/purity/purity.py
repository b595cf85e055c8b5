"""`evaluate` module: purity of clusters.

    >>> import evaluate
    >>> clusters, labels = [0, 0, 0, 1], [1, 1, 0, 0]
    >>> metric = evaluate.load("hf_decayed/metrics/purity")
    >>> results = metric.compute(predictions=clusters, references=labels)
    >>> {name: round(float(value), 3) for name, value in results.items()}
    {'purity': 0.75}

The work is done by `hf_decayed.evaluation.purity`.
"""

import datasets
import evaluate
import torch

from hf_decayed.evaluation import purity


DESCRIPTION = "Share of samples that have the most frequent class of their cluster."
INPUTS = """
predictions: clusters
references: labels
"""


class Purity(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="Manning, Raghavan and Schütze, Introduction to Information Retrieval, Cambridge University Press 2008",
            inputs_description=INPUTS,
            features=datasets.Features(
                {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions, references):
        return {"purity": purity(torch.as_tensor(predictions), torch.as_tensor(references))}
