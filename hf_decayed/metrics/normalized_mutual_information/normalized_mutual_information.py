"""`evaluate` module: mutual information of clusters and classes.

    >>> import evaluate
    >>> metric = evaluate.load("path/to/hf_decayed/metrics/normalized_mutual_information")
    >>> metric.compute(predictions=clusters, references=labels)

The work is done by `hf_decayed.evaluation.normalized_mutual_information`.
"""

import datasets
import evaluate
import torch

from hf_decayed.evaluation import normalized_mutual_information


DESCRIPTION = "Mutual information of clusters and classes over the mean of their entropies."
INPUTS = """
predictions: clusters
references: labels
"""


class NormalizedMutualInformation(evaluate.Metric):
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
        clusters, labels = torch.as_tensor(predictions), torch.as_tensor(references)
        return {"normalized_mutual_information": normalized_mutual_information(clusters, labels)}
