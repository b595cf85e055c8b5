"""`evaluate` module: Frechet distance between generated and real features.

    >>> import evaluate
    >>> metric = evaluate.load("path/to/hf_decayed/metrics/frechet_distance")
    >>> metric.compute(predictions=generated_features, real_features=real_features)

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
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": feature}),
        )

    def _compute(self, predictions, real_features):
        real, generated = (torch.as_tensor(features, dtype=torch.float32) for features in (real_features, predictions))
        return {"frechet_distance": frechet_distance(real, generated)}
