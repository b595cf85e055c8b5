"""`evaluate` module: mean IoU of regions that have the class of most of their pixels.

    >>> import evaluate
    >>> regions, masks = [[[0, 1], [2, 2]]], [[[1, 1], [0, 0]]]
    >>> metric = evaluate.load("hf_decayed/metrics/oracle_miou")
    >>> results = metric.compute(predictions=regions, references=masks)
    >>> {name: round(float(value), 3) for name, value in results.items()}
    {'oracle_miou': 1.0}

The work is done by `hf_decayed.evaluation.oracle_miou`.
"""

import datasets
import evaluate
import torch

from hf_decayed.evaluation import oracle_miou


DESCRIPTION = (
    "Mean intersection over union when every region of every image has the class that most of its pixels have: whether "
    "regions follow the borders of objects."
)
INPUTS = """
predictions: regions of pixels or patches, (images, height, width)
references: classes of pixels, (images, height, width); 255 is ignored
num_classes (the largest class + 1), ignore_index (255)
"""


class OracleMIoU(evaluate.Metric):
    def _info(self):
        maps = datasets.List(datasets.List(datasets.Value("int64")))
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="Arbeláez et al., Contour Detection and Hierarchical Image Segmentation, TPAMI 2011",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": maps, "references": maps}),
        )

    def _compute(self, predictions, references, num_classes=None, ignore_index=255):
        regions, masks = (torch.as_tensor(maps, dtype=torch.long) for maps in (predictions, references))
        return {"oracle_miou": oracle_miou(regions, masks, num_classes, ignore_index)}
