"""`evaluate` module: Frechet distance between generated and real features.

    >>> import evaluate
    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> real_features, generated_features = torch.randn(500, 4), torch.randn(500, 4) + 1
    >>> metric = evaluate.load("hf_decayed/metrics/frechet_distance")
    >>> results = metric.compute(predictions=generated_features, real_features=real_features)
    >>> {name: round(float(value), 3) for name, value in results.items()}
    {'frechet_distance': 3.71}

The work is done by `hf_decayed.evaluation.frechet_distance`.
"""

import datasets
import evaluate
import torch

from hf_decayed.evaluation import frechet_distance


DESCRIPTION = (
    "Squared Frechet distance between Gaussians fitted to two sets of features; on Inception's features it is FID."
)
INPUTS = """
predictions: features of generated images, (number, dim)
real_features: features of real images, any number of them
"""


class FrechetDistance(evaluate.Metric):
    def _info(self):
        feature = datasets.List(datasets.Value("float32"))
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="Heusel et al., GANs Trained by a Two Time-Scale Update Rule Converge to a Local Nash Equilibrium, NeurIPS 2017",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": feature}),
        )

    def _compute(self, predictions, real_features):
        real, generated = (torch.as_tensor(features, dtype=torch.float32) for features in (real_features, predictions))
        return {"frechet_distance": frechet_distance(real, generated)}
