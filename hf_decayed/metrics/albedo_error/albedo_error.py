"""`evaluate` module: error of albedos, whatever their scale.

    >>> import evaluate
    >>> true_albedos = [[[[0.2, 0.4]], [[0.2, 0.4]], [[0.2, 0.4]]]]
    >>> albedos = [[[[0.4, 0.8]], [[0.4, 0.8]], [[0.4, 0.8]]]]
    >>> metric = evaluate.load("hf_decayed/metrics/albedo_error")
    >>> results = metric.compute(predictions=albedos, references=true_albedos)
    >>> {name: round(float(value), 3) for name, value in results.items()}
    {'albedo_error': 0.0}

The work is done by `hf_decayed.evaluation.relighting`.
"""

import datasets
import evaluate
import torch

from hf_decayed.evaluation.relighting import albedo_error


DESCRIPTION = "RMSE of albedos after the best factor for each image."
INPUTS = """
predictions: albedos, linear intensities, (images, 3, height, width)
references: true albedos, (images, 3, height, width)
"""


class AlbedoError(evaluate.Metric):
    def _info(self):
        images = datasets.List(datasets.List(datasets.List(datasets.Value("float32"))))
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="Grosse et al., Ground Truth Dataset and Baseline Evaluations for Intrinsic Image Algorithms, ICCV 2009",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": images, "references": images}),
        )

    def _compute(self, predictions, references):
        albedo, true_albedo = (torch.as_tensor(images, dtype=torch.float32) for images in (predictions, references))
        return {"albedo_error": albedo_error(albedo, true_albedo)}
