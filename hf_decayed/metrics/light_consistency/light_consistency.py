"""`evaluate` module: whether light codes of one light are alike in all scenes.

    >>> import evaluate
    >>> codes, lights = [[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]], [0, 0, 1, 1]
    >>> metric = evaluate.load("hf_decayed/metrics/light_consistency")
    >>> results = metric.compute(predictions=codes, references=lights)
    >>> {name: round(float(value), 3) for name, value in results.items()}
    {'same_light': 0.994, 'different_light': 0.11}

The work is done by `hf_decayed.evaluation.relighting`.
"""

import datasets
import evaluate
import torch

from hf_decayed.evaluation.relighting import light_consistency


DESCRIPTION = "Mean cosine similarity of light codes: of images with the same light, and with different lights."
INPUTS = """
predictions: light codes, (images, dim)
references: which light each image has, (images,)
"""


class LightConsistencyMetric(evaluate.Metric):
    def _info(self):
        codes = datasets.List(datasets.Value("float32"))
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="Zhang et al., Latent Intrinsics Emerge from Training to Relight, NeurIPS 2024",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": codes, "references": datasets.Value("int64")}),
        )

    def _compute(self, predictions, references):
        codes = torch.as_tensor(predictions, dtype=torch.float32)
        return light_consistency(codes, torch.as_tensor(references))._asdict()
