"""`evaluate` module: mutual information of clusters and classes.

    >>> import evaluate
    >>> clusters, labels = [0, 0, 1, 1], [1, 1, 0, 0]
    >>> metric = evaluate.load("hf_decayed/metrics/normalized_mutual_information")
    >>> results = metric.compute(predictions=clusters, references=labels)
    >>> {name: round(float(value), 3) for name, value in results.items()}
    {'normalized_mutual_information': 1.0}

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
            citation="Strehl and Ghosh, Cluster Ensembles, JMLR 2002",
            inputs_description=INPUTS,
            features=datasets.Features(
                {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions, references):
        clusters, labels = torch.as_tensor(predictions), torch.as_tensor(references)
        return {"normalized_mutual_information": normalized_mutual_information(clusters, labels)}
