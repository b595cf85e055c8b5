"""`evaluate` module: kernel distance (KID) between generated and real features.

    >>> import evaluate
    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> real_features, generated_features = torch.randn(200, 4), torch.randn(200, 4) + 1
    >>> metric = evaluate.load("hf_decayed/metrics/kernel_distance")
    >>> results = metric.compute(predictions=generated_features, real_features=real_features, subset_size=200, num_subsets=2)
    >>> {name: round(float(value), 3) for name, value in results.items()}
    {'kernel_distance': 9.483, 'kernel_distance_deviation': 0.0}

The work is done by `hf_decayed.evaluation.kernel_distance`.
"""

import datasets
import evaluate
import torch

from hf_decayed.evaluation import kernel_distance


DESCRIPTION = "Unbiased squared maximum mean discrepancy with a cubic kernel, over random subsets; on Inception's features it is KID."
INPUTS = """
predictions: features of generated images, (number, dim)
real_features: features of real images, any number of them
num_subsets (100), subset_size (1000)
"""


class KernelDistance(evaluate.Metric):
    def _info(self):
        feature = datasets.List(datasets.Value("float32"))
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="Bińkowski et al., Demystifying MMD GANs, ICLR 2018",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": feature}),
        )

    def _compute(self, predictions, real_features, num_subsets=100, subset_size=1000):
        real, generated = (torch.as_tensor(features, dtype=torch.float32) for features in (real_features, predictions))
        mean, deviation = kernel_distance(real, generated, num_subsets, subset_size)
        return {"kernel_distance": mean, "kernel_distance_deviation": deviation}
