"""`evaluate` module: mean IoU of clusters matched with classes.

    >>> import evaluate
    >>> clusters, masks = [[[0, 0], [1, 1]]], [[[1, 1], [0, 0]]]
    >>> metric = evaluate.load("hf_decayed/metrics/cluster_miou")
    >>> results = metric.compute(predictions=clusters, references=masks)
    >>> {name: round(float(value), 3) for name, value in results.items()}
    {'cluster_miou': 1.0}

The work is done by `hf_decayed.evaluation.cluster_miou`.
"""

import datasets
import evaluate
import torch

from hf_decayed.evaluation import cluster_miou


DESCRIPTION = (
    "Mean intersection over union of clusters that are matched with classes over all images: one cluster per class "
    "(Hungarian), or for every cluster its most frequent class (greedy)."
)
INPUTS = """
predictions: clusters of pixels or patches, (images, height, width)
references: classes of pixels, (images, height, width); 255 is ignored
match ("hungarian" or "greedy"), num_classes (the largest class + 1), ignore_index (255)
"""


class ClusterMIoU(evaluate.Metric):
    def _info(self):
        maps = datasets.List(datasets.List(datasets.Value("int64")))
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="Ji et al., Invariant Information Clustering for Unsupervised Image Classification and Segmentation, ICCV 2019",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": maps, "references": maps}),
        )

    def _compute(self, predictions, references, match="hungarian", num_classes=None, ignore_index=255):
        clusters, masks = (torch.as_tensor(maps, dtype=torch.long) for maps in (predictions, references))
        return {"cluster_miou": cluster_miou(clusters, masks, match, num_classes, ignore_index)}
