"""Where images come from: the Hub, a folder, parquet, arrow, WebDataset tars, or the bundled images."""

from importlib.resources import files
from pathlib import Path

import numpy as np
from datasets import ClassLabel, Dataset, IterableDataset, Value, load_dataset, load_from_disk
from datasets import Image as ImageFeature
from datasets.exceptions import DatasetsError

from ..errors import DataError


BUNDLED = "fashion_mnist_subset"


def load_splits(
    dataset_name: str | None = None,
    dataset_config: str | None = None,
    dataset_path: str | None = None,
    train_split: str = "train",
    eval_split: str | None = None,
    streaming: bool = False,
) -> tuple[Dataset | IterableDataset, Dataset | IterableDataset | None, str]:
    """Training images, held-out images if there are any, and a name for both without a local path in it.

    With neither a name nor a path: the bundled Fashion-MNIST subset. A path may be a folder of images by class, a file or
    folder of parquet, arrow or WebDataset tars, or what `save_to_disk` wrote.
    """
    if dataset_name and dataset_path:
        raise DataError(f"Give a data set's name or a path, not both; got '{dataset_name}' and '{dataset_path}'.")
    name = dataset_name or (Path(dataset_path).name if dataset_path else BUNDLED)
    try:
        if dataset_name:
            splits = load_dataset(dataset_name, dataset_config, streaming=streaming)
        elif dataset_path:
            splits = load_path(Path(dataset_path), streaming)
        else:
            folder = files("hf_decayed.data") / "bundled"
            data_files = {split: str(folder / f"fashion_mnist_{split}.parquet") for split in ("train", "test")}
            splits = load_dataset("parquet", data_files=data_files, streaming=streaming)
    except DataError:
        raise
    except (ValueError, OSError, DatasetsError) as error:
        raise DataError(f"'{name}' could not be loaded, or is empty: {str(error).splitlines()[0]}") from error
    if not isinstance(splits, dict):
        splits = {"train": splits}
    if train_split not in splits:
        raise DataError(f"'{name}' has no split '{train_split}'; it has {', '.join(splits)}.")
    if eval_split == train_split:
        raise DataError(f"'{eval_split}' cannot be trained on and held out at once.")
    if eval_split is None:
        # Test splits last: those of benchmarks often come without their labels.
        held_out = [split for split in ("validation", "val", "test") if split in splits and split != train_split]
        eval_split = held_out[0] if held_out else None
    elif eval_split not in splits:
        raise DataError(f"'{name}' has no split '{eval_split}'; it has {', '.join(splits)}.")
    for split in filter(None, (train_split, eval_split)):
        if isinstance(splits[split], Dataset) and len(splits[split]) == 0:
            raise DataError(f"The split '{split}' of '{name}' is empty.")
    return splits[train_split], splits[eval_split] if eval_split else None, name


def load_path(path: Path, streaming: bool) -> dict | Dataset:
    if not path.exists():
        raise DataError(f"There is nothing at '{path}'.")
    if path.is_dir():
        if (path / "dataset_dict.json").exists() or (path / "dataset_info.json").exists():
            saved = load_from_disk(str(path))
            if not streaming:
                return saved
            splits = saved if isinstance(saved, dict) else {"train": saved}
            return {name: split.to_iterable_dataset() for name, split in splits.items()}
        return load_dataset(str(path), streaming=streaming)
    builders = {".parquet": "parquet", ".arrow": "arrow", ".tar": "webdataset"}
    if path.suffix not in builders:
        raise DataError(f"'{path.name}' is neither a folder nor a file of kind {', '.join(builders)}.")
    return load_dataset(builders[path.suffix], data_files={"train": str(path)}, streaming=streaming)


def find_columns(
    dataset: Dataset | IterableDataset, image_column: str | None = None, label_column: str | None = None
) -> tuple[str, str | None]:
    """Names of the image column and, if there is one, of the label column; found by type when not given."""
    if dataset.features is None:
        dataset = dataset._resolve_features()
    features = dataset.features
    for given in filter(None, (image_column, label_column)):
        if given not in features:
            raise DataError(f"There is no column '{given}'; the columns are {', '.join(features)}.")
    if image_column is None:
        images = [name for name, feature in features.items() if isinstance(feature, ImageFeature)]
        if len(images) != 1:
            raise DataError(f"Found {len(images)} image columns among {', '.join(features)}: name one.")
        image_column = images[0]
    if label_column is None:
        labels = [name for name, feature in features.items() if isinstance(feature, ClassLabel)]
        labels = labels or [
            name
            for name in ("label", "labels", "cls")
            if isinstance(features.get(name), Value) and "int" in features[name].dtype
        ]
        if len(labels) > 1:
            raise DataError(f"Found the label columns {', '.join(labels)}: name one.")
        label_column = labels[0] if labels else None
    return image_column, label_column


def take_subset(dataset: Dataset | IterableDataset, number: int | None):
    """So many rows, at random but always the same, for they may come sorted by class; of a stream the first."""
    if isinstance(dataset, IterableDataset):
        return dataset if number is None else dataset.take(number)
    if number is None or number >= len(dataset):
        return dataset
    return dataset.select(np.random.default_rng(0).permutation(len(dataset))[:number])


def split_validation(train, number: int):
    """Splits off images to evaluate on, where there is no split for it: a tenth at most; of a stream the first."""
    if isinstance(train, IterableDataset):
        return train.take(number), train.skip(number)
    split = train.train_test_split(test_size=min(0.1, number / len(train)), seed=0)
    return split["test"], split["train"]


def read_class_names(train: Dataset, label_column: str) -> list[str]:
    """What the data calls its classes, or their numbers."""
    feature = train.features[label_column]
    names = feature.names if isinstance(feature, ClassLabel) else None
    return names or [str(number) for number in range(1 + max(train[label_column]))]
