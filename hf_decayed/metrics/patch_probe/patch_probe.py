"""`evaluate` module: how well a probe reads the class of a patch from its features.

    >>> import evaluate
    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> masks = torch.randint(0, 2, (20, 4, 4))
    >>> features = torch.nn.functional.one_hot(masks).float()
    >>> metric = evaluate.load("hf_decayed/metrics/patch_probe")
    >>> results = metric.compute(predictions=features, references=masks, train_features=features, train_masks=masks)
    >>> {name: round(float(value), 3) for name, value in results.items()}
    {'patch_accuracy': 1.0}

The work is done by `hf_decayed.evaluation.patch_probe`.
"""

import datasets
import evaluate
import torch

from hf_decayed.evaluation import patch_probe


DESCRIPTION = (
    'How much of "what" dense features hold: the fraction of patches whose class a linear or kNN probe gets right.'
)
INPUTS = """
predictions: dense features, (images, height, width, dim)
references: classes of pixels, (images, height, width); a patch has the class of most of its pixels, 255 is ignored
train_features, train_masks: the same of training images
method ("linear" or "knn"), ignore_index (255)
"""


class PatchProbe(evaluate.Metric):
    def _info(self):
        maps = datasets.List(datasets.List(datasets.Value("int64")))
        features = datasets.List(datasets.List(datasets.List(datasets.Value("float32"))))
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="Zhang et al., Residual Connections Harm Generative Representation Learning, CVPR 2026",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": features, "references": maps}),
        )

    def _compute(self, predictions, references, train_features, train_masks, method="linear", ignore_index=255):
        train, test = (torch.as_tensor(part, dtype=torch.float32) for part in (train_features, predictions))
        train_masks, masks = (torch.as_tensor(part, dtype=torch.long) for part in (train_masks, references))
        return {"patch_accuracy": patch_probe(train, train_masks, test, masks, method, ignore_index)}
