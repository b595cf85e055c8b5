"""`evaluate` module: effective rank of features.

    >>> import evaluate
    >>> metric = evaluate.load("path/to/hf_decayed/metrics/effective_rank")
    >>> metric.compute(data=features)

The work is done by `hf_decayed.evaluation.effective_rank`.
"""

import datasets
import evaluate
import torch

from hf_decayed.evaluation import effective_rank


DESCRIPTION = (
    "How many directions features use: the entropy of the normalised eigenvalues of their centred covariance."
)
INPUTS = """
data: features, (number, dim)
kind: entropy (the paper's, default), exponential, rankme
"""


class EffectiveRank(evaluate.Measurement):
    def _info(self):
        feature = datasets.List(datasets.Value("float32"))
        return evaluate.MeasurementInfo(
            description=DESCRIPTION,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features({"data": feature}),
        )

    def _compute(self, data, kind="entropy"):
        return {"effective_rank": effective_rank(torch.as_tensor(data, dtype=torch.float32), kind)}
