"""`evaluate` module: how often an albedo disagrees with people on which of two points is darker.

    >>> import evaluate
    >>> albedo = [[[0.2, 0.8]], [[0.2, 0.8]], [[0.2, 0.8]]]
    >>> judgement = {"x1": 0.1, "y1": 0.5, "x2": 0.9, "y2": 0.5, "darker": "1", "weight": 1.0}
    >>> metric = evaluate.load("hf_decayed/metrics/whdr")
    >>> results = metric.compute(predictions=[albedo], references=[[judgement]])
    >>> {name: round(float(value), 3) for name, value in results.items()}
    {'whdr': 0.0}

The work is done by `hf_decayed.evaluation.relighting`.
"""

import datasets
import evaluate
import torch

from hf_decayed.evaluation.relighting import Judgement, whdr


DESCRIPTION = "Weighted human disagreement rate of albedos, averaged over images; lower is better."
INPUTS = """
predictions: albedos, linear intensities, (images, 3, height, width)
references: for every image a list of judgements: points as fractions of width and height (x1, y1, x2, y2), darker ("1" or
    "2", the darker point, or "E" for equal) and weight
delta (0.1)
"""


class WHDR(evaluate.Metric):
    def _info(self):
        image = datasets.List(datasets.List(datasets.List(datasets.Value("float32"))))
        numbers = dict.fromkeys(("x1", "y1", "x2", "y2", "weight"), datasets.Value("float32"))
        judgements = datasets.List({**numbers, "darker": datasets.Value("string")})
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="Bell, Bala and Snavely, Intrinsic Images in the Wild, SIGGRAPH 2014",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": image, "references": judgements}),
        )

    def _compute(self, predictions, references, delta=0.1):
        rates = [
            whdr(torch.as_tensor(albedo), [as_judgement(row) for row in rows], delta)
            for albedo, rows in zip(predictions, references)
        ]
        return {"whdr": sum(rates) / len(rates)}


def as_judgement(row: dict) -> Judgement:
    return Judgement((row["x1"], row["y1"]), (row["x2"], row["y2"]), row["darker"], row["weight"])
