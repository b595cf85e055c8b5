"""`evaluate` module: RMSE and SSIM of relit images, as they are and after colour correction.

    >>> import evaluate
    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> images = torch.rand(2, 3, 16, 16)
    >>> metric = evaluate.load("hf_decayed/metrics/relighting_errors")
    >>> results = metric.compute(predictions=0.5 * images, references=images)
    >>> {name: round(float(value), 3) for name, value in results.items()}
    {'rmse': 0.289, 'ssim': 0.646, 'rmse_corrected': 0.117, 'ssim_corrected': 0.888}

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
            citation="Zhang et al., Latent Intrinsics Emerge from Training to Relight, NeurIPS 2024",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": images, "references": images}),
        )

    def _compute(self, predictions, references, correction="scale"):
        predicted, target = (torch.as_tensor(images, dtype=torch.float32) for images in (predictions, references))
        return relighting_errors(predicted, target, correction)
