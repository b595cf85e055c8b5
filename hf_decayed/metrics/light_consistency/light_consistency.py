"""`evaluate` module: whether light codes of one light are alike in all scenes.

    >>> import evaluate
    >>> metric = evaluate.load("path/to/hf_decayed/metrics/light_consistency")
    >>> metric.compute(predictions=codes, references=lights)

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
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": codes, "references": datasets.Value("int64")}),
        )

    def _compute(self, predictions, references):
        codes = torch.as_tensor(predictions, dtype=torch.float32)
        return light_consistency(codes, torch.as_tensor(references))._asdict()
