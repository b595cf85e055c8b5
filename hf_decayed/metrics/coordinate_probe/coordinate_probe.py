"""`evaluate` module: how well a linear probe reads the position of a patch from its features.

    >>> import evaluate
    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> features = torch.eye(16).view(1, 4, 4, 16).repeat(20, 1, 1, 1)
    >>> metric = evaluate.load("hf_decayed/metrics/coordinate_probe")
    >>> results = metric.compute(data=features)
    >>> {name: round(float(value), 3) for name, value in results.items()}
    {'position_accuracy': 1.0, 'position_mse': 0.0, 'position_r2': 1.0}

The work is done by `hf_decayed.evaluation.coordinate_probe`.
"""

import datasets
import evaluate
import torch

from hf_decayed.evaluation import coordinate_probe


DESCRIPTION = (
    'How much of "where" dense features hold: accuracy and squared error (in cells of a 32 x 32 grid) with which a ridge '
    "probe reads a patch's position."
)
INPUTS = """
data: dense features, (images, height, width, dim)
train_share (0.8) of the images for training, seed (0) of that split
"""


class CoordinateProbe(evaluate.Measurement):
    def _info(self):
        features = datasets.List(datasets.List(datasets.List(datasets.Value("float32"))))
        return evaluate.MeasurementInfo(
            description=DESCRIPTION,
            citation="Islam, Jia and Bruce, How Much Position Information Do Convolutional Neural Networks Encode?, ICLR 2020",
            inputs_description=INPUTS,
            features=datasets.Features({"data": features}),
        )

    def _compute(self, data, train_share=0.8, seed=0):
        probe = coordinate_probe(torch.as_tensor(data, dtype=torch.float32), train_share, seed)
        return {"position_accuracy": probe.accuracy, "position_mse": probe.mse, "position_r2": probe.r2}
