"""`evaluate` module: precision and recall of generated features.

    >>> import evaluate
    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> real_features, generated_features = torch.randn(200, 4), 0.1 * torch.randn(200, 4)
    >>> metric = evaluate.load("hf_decayed/metrics/precision_recall")
    >>> results = metric.compute(predictions=generated_features, real_features=real_features)
    >>> {name: round(float(value), 3) for name, value in results.items()}
    {'precision': 1.0, 'recall': 0.005}

The work is done by `hf_decayed.evaluation.precision_recall`.
"""

import datasets
import evaluate
import torch

from hf_decayed.evaluation import precision_recall


DESCRIPTION = (
    "Fractions of generated features within the radius of real ones, and of real ones within that of generated ones."
)
INPUTS = """
predictions: features of generated images, (number, dim)
real_features: features of real images, any number of them
k (3): neighbour whose distance is the radius
"""


class PrecisionRecall(evaluate.Metric):
    def _info(self):
        feature = datasets.List(datasets.Value("float32"))
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="Kynkäänniemi et al., Improved Precision and Recall Metric for Assessing Generative Models, NeurIPS 2019",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": feature}),
        )

    def _compute(self, predictions, real_features, k=3):
        real, generated = (torch.as_tensor(features, dtype=torch.float32) for features in (real_features, predictions))
        precision, recall = precision_recall(real, generated, k)
        return {"precision": precision, "recall": recall}
