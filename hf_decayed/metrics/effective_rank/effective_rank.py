"""`evaluate` module: effective rank of features.

    >>> import evaluate
    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> features = torch.randn(200, 3) @ torch.diag(torch.tensor([1.0, 1.0, 0.0]))
    >>> metric = evaluate.load("hf_decayed/metrics/effective_rank")
    >>> results = metric.compute(data=features)
    >>> {name: round(float(value), 3) for name, value in results.items()}
    {'effective_rank': 0.69}

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
            citation="Roy and Vetterli, The Effective Rank: A Measure of Effective Dimensionality, EUSIPCO 2007",
            inputs_description=INPUTS,
            features=datasets.Features({"data": feature}),
        )

    def _compute(self, data, kind="entropy"):
        return {"effective_rank": effective_rank(torch.as_tensor(data, dtype=torch.float32), kind)}
