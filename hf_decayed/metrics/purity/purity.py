"""`evaluate` module: purity of clusters.

    >>> import evaluate
    >>> metric = evaluate.load("path/to/hf_decayed/metrics/purity")
    >>> metric.compute(predictions=clusters, references=labels)

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
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features(
                {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions, references):
        return {"purity": purity(torch.as_tensor(predictions), torch.as_tensor(references))}
