"""`evaluate` module: RMSE and SSIM of relit images, as they are and after colour correction.

    >>> import evaluate
    >>> metric = evaluate.load("path/to/hf_decayed/metrics/relighting_errors")
    >>> metric.compute(predictions=relit, references=images)

The work is done by `hf_decayed.evaluation.relighting`.
"""

import datasets
import evaluate
import torch

from hf_decayed.evaluation.relighting import relighting_errors


DESCRIPTION = (
    "RMSE and SSIM of relit images, as they are and after colour correction, which forgives one number per channel."
)
INPUTS = """
predictions: relit images in [-1, 1], (images, 3, height, width)
references: true images in [-1, 1], (images, 3, height, width)
correction ("scale", least squares; "shift", the mean of every channel)
"""


class RelightingErrors(evaluate.Metric):
    def _info(self):
        images = datasets.List(datasets.List(datasets.List(datasets.Value("float32"))))
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": images, "references": images}),
        )

    def _compute(self, predictions, references, correction="scale"):
        predicted, target = (torch.as_tensor(images, dtype=torch.float32) for images in (predictions, references))
        return relighting_errors(predicted, target, correction)
