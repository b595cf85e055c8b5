"""Features of a folder of images as one file, for other programs; `hf-decayed features`."""

import json
import os
from pathlib import Path

import torch
from accelerate import Accelerator
from datasets import Dataset, concatenate_datasets
from datasets import Image as ImageFeature
from safetensors.torch import save_file
from transformers import AutoImageProcessor, AutoModel

from ..command_line import set_cpu_threads
from ..data.datasets import EvaluationDataset
from ..data.prepare import relative_name
from ..data.shards import encode_dataset
from ..data.sources import find_columns, load_path, read_class_names
from ..errors import DataError, UserError, explain_loading_errors
from .features import transformer_encoder


def write_features(
    images: str | os.PathLike,
    model: str,
    output: str | os.PathLike,
    feature: str | None = None,
    batch_size: int = 64,
    on_bad_image: str = "stop",
    cpu_threads: int | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> str:
    """Writes one feature of every image with names and labels; returns a summary.

    Args:
        images (`str` or `os.PathLike`): Folder of images, with or without a subfolder per class, or whatever
            `--dataset_path` takes.
        model (`str`): Folder or repository of a vision encoder with its image processor.
        output (`str` or `os.PathLike`):
            `*.safetensors`: `features` `(number, dim)`, `labels` (-1 without classes); names of images and classes are JSON in the
            metadata. `*.parquet`: a row per image with `name`, `label` and `feature`.
        feature (`str`, *optional*): As [`transformer_encoder`] takes it; by default the model's own pooling of the last layer.
    """
    output = Path(output)
    if output.suffix not in (".safetensors", ".parquet"):
        raise UserError(f"--output must end in .safetensors or .parquet, got '{output.name}'.")
    accelerator = Accelerator(cpu=not torch.accelerator.is_available())
    set_cpu_threads(accelerator, cpu_threads)
    with explain_loading_errors(model):
        origin = {"revision": revision, "trust_remote_code": trust_remote_code}
        network = AutoModel.from_pretrained(model, **origin).to(accelerator.device)
        processor = AutoImageProcessor.from_pretrained(model, **origin)
    rows, names, image_column, label_column = load_named_images(Path(images))
    feature = feature or f"last.{getattr(network.config, 'pooling', 'mean')}"
    encode_feature = transformer_encoder(network, [feature])

    def encode(pixel_values: torch.Tensor, indices: list[int]) -> dict[str, torch.Tensor]:
        rows_of_batch = torch.tensor(indices, dtype=torch.float64)  # those of images that can be decoded
        return {**encode_feature(pixel_values, indices), "rows": rows_of_batch}

    channels = getattr(network.config, "num_channels", 3)
    dataset = EvaluationDataset(rows, image_column, label_column, processor, channels, on_bad_image)
    encoded = encode_dataset(encode, dataset, accelerator, batch_size)
    kept = [names[int(row)] for row in encoded["rows"].tolist()]
    classes = read_class_names(rows, label_column) if label_column else []
    if accelerator.is_main_process:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_file(
            output, encoded[feature], encoded["labels"], kept, classes, {"model": Path(model).name, "feature": feature}
        )
    skipped = f", {len(names) - len(kept)} skipped" if len(kept) < len(names) else ""
    return f"{feature} of {len(kept)} images{skipped}, {encoded[feature].shape[1]} numbers each: {output}"


def load_named_images(path: Path) -> tuple[Dataset, list[str], str, str | None]:
    """All images of all splits, their names (of files, relative to the folder; else split and row), and the columns."""
    splits = load_path(path, streaming=False)
    splits = splits if isinstance(splits, dict) else {"train": splits}
    image_column, label_column = find_columns(next(iter(splits.values())))
    columns = [image_column] + ([label_column] if label_column else [])
    rows = concatenate_datasets([split.select_columns(columns) for split in splits.values()])
    records = rows.cast_column(image_column, ImageFeature(decode=False))[image_column]
    numbers = [f"{name}/{row}" for name, split in splits.items() for row in range(len(split))]
    if not numbers:
        raise DataError(f"There are no images in '{path}'.")
    names = []
    for record, number in zip(records, numbers):
        file = Path(record["path"]) if record["path"] and record["bytes"] is None else None
        name = relative_name(os.path.abspath(file), Path(os.path.abspath(path))) if file is not None else None
        names.append(name or number)
    return rows, names, image_column, label_column


def write_file(
    path: Path,
    features: torch.Tensor,
    labels: torch.Tensor,
    names: list[str],
    classes: list[str],
    origin: dict[str, str],
) -> None:
    if path.suffix == ".safetensors":
        metadata = {**origin, "names": json.dumps(names), "classes": json.dumps(classes)}
        save_file({"features": features.contiguous(), "labels": labels}, path, metadata=metadata)
        return
    labels_by_name = [classes[label] if classes and label >= 0 else None for label in labels.tolist()]  # -1: none
    columns = {"name": names, "label": labels_by_name, "feature": features.numpy()}
    Dataset.from_dict(columns).to_parquet(path)
