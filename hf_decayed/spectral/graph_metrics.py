"""What the graphs of a model hold: regions of images against masks, and clusters of a data set, by graph.

`hf-decayed segment DATA --model MODEL --evaluate 200 --output DIR` prints the table.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from ..data.datasets import EvaluationDataset
from ..data.sources import ImageSplits, load_image_splits, take_subset
from ..errors import DataError
from ..evaluation.segmentation import cluster_miou, coordinate_probe, oracle_miou
from ..evaluation.tables import markdown_table
from ..provenance import model_fingerprint, versions
from .capture import record_attention
from .clustering import GRAPHS, DatasetSpectralClustering, LayerSpectralClustering
from .segmenter import RECORDED, Segmenter


BATCH_SIZE = 25


def evaluate_graphs(
    data: str,
    models: dict[str, str],
    output: str | os.PathLike,
    num_images: int,
    layers: list[int] | None = None,
    seed: int = 0,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> str:
    """Metrics of the query-key, value and feature graphs of models on held-out images with masks; returns the table.

    Args:
        data (`str`): `bundled`, `bundled:coloured`, `bundled:textured`, or a folder of images and masks.
        models (`dict[str, str]`): Names for the table, by folder or repository.
    """
    bundled = data.split(":")[0] == "bundled"
    splits = load_image_splits(dataset_name=data if bundled else None, dataset_path=None if bundled else data)
    if splits.mask_column is None:
        raise DataError(f"'{data}' has no masks, which --evaluate compares regions with.")
    num_images = min(num_images, len(splits.held_out))
    rows, fingerprints = {}, {}
    for model, name in models.items():
        for graph in GRAPHS:
            segmenter = Segmenter.from_pretrained(model, revision, trust_remote_code, graph=graph, layers=layers)
            fingerprints[name] = model_fingerprint(segmenter.model)
            rows[f"{name}, {graph}"] = graph_metrics(segmenter, splits, num_images, seed)
    table = markdown_table(rows)
    results = {
        "rows": rows,
        "models": fingerprints,
        "dataset": {"name": splits.name, "held_out": splits.held_out_rule, "number": num_images},
        "settings": {"layers": layers, "seed": seed, "clusters": DatasetSpectralClustering().n_clusters},
        "versions": versions(),
    }
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "graphs.json").write_text(json.dumps(results, indent=2) + "\n")
    return f"{table}\n{num_images} held-out images of {splits.name}; {folder / 'graphs.json'}"


def graph_metrics(segmenter: Segmenter, splits: ImageSplits, num_images: int, seed: int = 0) -> dict[str, float]:
    """Oracle mIoU of the regions of single images; mIoU of clusters of all images; position in the embedding of all."""
    images = EvaluationDataset(
        take_subset(splits.held_out, num_images),
        splits.image_column,
        splits.label_column,
        segmenter.processor,
        getattr(segmenter.model.config, "num_channels", 3),
        mask_column=splits.mask_column,
        mask_zero_is_ignored=splits.mask_zero_is_ignored,
    )
    records, masks, regions = [], [], []
    clustering = LayerSpectralClustering(graph=segmenter.graph, seed=seed)
    for start in tqdm(range(0, len(images), BATCH_SIZE), desc=segmenter.graph, unit="batch", leave=False):
        batch = images.__getitems__(list(range(start, min(start + BATCH_SIZE, len(images)))))
        with torch.no_grad(), record_attention(segmenter.model, segmenter.layers, RECORDED[segmenter.graph]) as record:
            segmenter.run(batch["pixel_values"])
        masks.append(batch["masks"])
        records.append([layer_tokens(layer, segmenter.graph) for layer in record.layers])
        grid = record.layers[0].grid
        for index in range(len(batch["masks"])):
            tokens = [select_image(layer, index) for layer in records[-1]]
            regions.append(clustering.fit_predict(tokens, grid=grid))
    dataset = DatasetSpectralClustering(graph=segmenter.graph, seed=seed)
    dataset.fit([concatenate(parts) for parts in zip(*records)], grid=grid)
    classes = torch.cat(masks)
    position = coordinate_probe(dataset.embedding_.unflatten(1, grid), seed=seed)
    return {
        "oracle_miou": oracle_miou(torch.stack(regions), classes),
        "cluster_miou": cluster_miou(dataset.labels_, classes),
        "cluster_miou_greedy": cluster_miou(dataset.labels_, classes, "greedy"),
        "position_accuracy": position.accuracy,
        "position_mse": position.mse,
    }


def layer_tokens(layer: Any, graph: str) -> Any:
    """Tensors of a record `(images, [heads,] patches, dim)` that a graph is made of."""
    if graph == "qk":  # the estimators divide by sqrt(dim); a layer may scale otherwise
        return layer.query * (layer.scaling * layer.query.shape[-1] ** 0.5), layer.key
    return layer.value if graph == "vv" else layer.hidden_states.float()


def select_image(tokens: Any, index: int) -> Any:
    return tuple(tensor[index] for tensor in tokens) if isinstance(tokens, tuple) else tokens[index]


def concatenate(parts: tuple) -> Any:
    if isinstance(parts[0], tuple):
        return tuple(torch.cat(tensors) for tensors in zip(*parts))
    return torch.cat(parts)
