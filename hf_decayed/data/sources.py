"""Where images come from: the Hub, a folder, parquet, arrow, WebDataset tars, a stream, or the bundled images."""

import hashlib
import zlib
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

import numpy as np
from datasets import ClassLabel, Dataset, IterableDataset, Value, load_dataset, load_from_disk
from datasets import Image as ImageFeature
from datasets.exceptions import DatasetsError

from ..errors import DataError
from .decoding import open_image, read_content
from .procedural import HELD_OUT_SEED, OTHER_VIEW_SEED, TRAIN_SEED, VARIANTS, ProceduralViews, render_dataset
from .segmentation_folders import SegmentationFolder, find_segmentation_folder


BUNDLED = "fashion_mnist_subset"
MASK_COLUMNS = ("mask", "masks", "segmentation", "segmentation_mask", "annotation")
FROM_TRAINING = "held_out"  # an evaluation split of training images, even if the data has its own
HELD_OUT_ONE_IN = 10
HELD_OUT_RULE = (
    f"images whose bytes (in an image folder: folder and file name) have a CRC-32 divisible by {HELD_OUT_ONE_IN}"
)
FINGERPRINT_ROWS = 256


@dataclass(frozen=True)
class ImageSplits:
    """Training and held-out images of a data set.

    Args:
        name (`str`): Name of the data set, without a local path.
        held_out_rule (`str`): Which images are held out, in words: a split of the data, or the rule for data without one.
        mask_column (`str`, *optional*): Images of the class of every pixel; 255 is ignored.
        mask_zero_is_ignored (`bool`): Class numbers in masks start at 1, as in ADE20K; [`EvaluationDataset`] lowers them.
        mask_names (`list[str]`, *optional*): What the numbers in masks stand for, from 0 on.
        views (`ProceduralViews`, *optional*): Draws the training images anew in every epoch; `train` has fixed views.
        other_views (`Dataset`, *optional*): The held-out images in other views, row by row.
    """

    name: str
    train: Dataset | IterableDataset
    held_out: Dataset | IterableDataset
    held_out_rule: str
    image_column: str
    label_column: str | None
    mask_column: str | None = None
    mask_zero_is_ignored: bool = False
    mask_names: list[str] | None = None
    views: ProceduralViews | None = None
    other_views: Dataset | None = None

    def take(self, max_train_samples: int | None = None, max_eval_samples: int | None = None) -> "ImageSplits":
        """At most this many images of each split."""
        return replace(
            self,
            train=take_subset(self.train, max_train_samples),
            held_out=take_subset(self.held_out, max_eval_samples),
            views=self.views and replace(self.views, originals=take_subset(self.views.originals, max_train_samples)),
            other_views=self.other_views and take_subset(self.other_views, max_eval_samples),
        )

    def with_fixed_views(self) -> "ImageSplits":
        """Splits with the same view of an image in every epoch, for what is computed once, such as latents."""
        return replace(self, views=None)

    def class_names(self) -> list[str]:
        """Names of the classes, or their numbers; labels outside of them are an error."""
        if self.label_column is None:
            raise DataError(
                "A classifier needs labels, and there is no label column: name one with --label_column_name."
            )
        names = read_class_names(self.train, self.label_column)
        for split, rows in (("training", self.train), ("held-out", self.held_out)):
            if not 0 <= min(rows[self.label_column]) <= max(rows[self.label_column]) < len(names):
                raise DataError(f"The {split} labels do not lie in [0, {len(names)}): is it the right split?")
        return names

    def fingerprint(self) -> str:
        """Hash of the number of training images and up to 256 of their files, wherever they are stored.

        With views: of the originals, and of the kind and version of the views.
        """
        if self.views is None:
            return rows_fingerprint(self.train, self.image_column)
        originals = rows_fingerprint(self.views.originals, self.image_column)
        return hashlib.sha256(f"{originals} {self.views.identity}".encode()).hexdigest()[:16]


def load_image_splits(
    dataset_name: str | None = None,
    dataset_config: str | None = None,
    dataset_path: str | None = None,
    train_split: str = "train",
    eval_split: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    mask_column: str | None = None,
    streaming: bool = False,
) -> ImageSplits:
    """Training and held-out images; one in ten images is held out where the data has no split for evaluation."""
    variant = bundled_variant(dataset_name, dataset_path)
    if streaming and variant not in (None, "grey"):
        raise DataError(f"'{dataset_name}' is drawn in memory and cannot be streamed: leave out --streaming.")
    own_split = None if eval_split == FROM_TRAINING else eval_split
    train, held_out, name = load_splits(dataset_name, dataset_config, dataset_path, train_split, own_split, streaming)
    if eval_split == FROM_TRAINING:
        held_out = None
    image_column, label_column = find_columns(train, image_column, label_column, mask_column)
    rule = "the evaluation split"
    if held_out is None:
        held_out, train = split_validation(train, image_column)
        rule = HELD_OUT_RULE
    splits = ImageSplits(name, train, held_out, rule, image_column, label_column)
    if variant is not None and not streaming:
        return render_splits(splits, variant)
    folder = find_segmentation_folder(Path(dataset_path)) if dataset_path else None
    folder = folder or SegmentationFolder({})
    return replace(
        splits,
        mask_column=find_mask_column(train, image_column, mask_column),
        mask_zero_is_ignored=folder.zero_is_ignored,
        mask_names=folder.mask_names,
    )


def render_splits(splits: ImageSplits, variant: str) -> ImageSplits:
    """The bundled images with masks and, for a variant other than `grey`, with the views of that variant."""
    return replace(
        splits,
        train=render_dataset(splits.train, variant, TRAIN_SEED),
        held_out=render_dataset(splits.held_out, variant, HELD_OUT_SEED),
        mask_column="mask",
        mask_names=["background", *read_class_names(splits.train, "label")],
        views=None if variant == "grey" else ProceduralViews(variant, splits.train),
        other_views=None if variant == "grey" else render_dataset(splits.held_out, variant, OTHER_VIEW_SEED),
    )


def bundled_variant(dataset_name: str | None, dataset_path: str | None) -> str | None:
    """The variant of the bundled images that a name asks for; `None` for other data."""
    if dataset_path or (dataset_name and dataset_name.split(":")[0] != "bundled"):
        return None
    variant = (dataset_name or "").partition(":")[2] or "grey"
    if variant not in VARIANTS:
        raise DataError(f"'{dataset_name}' is not one of {', '.join(f'bundled:{name}' for name in VARIANTS)}.")
    return variant


def load_splits(
    dataset_name: str | None = None,
    dataset_config: str | None = None,
    dataset_path: str | None = None,
    train_split: str = "train",
    eval_split: str | None = None,
    streaming: bool = False,
) -> tuple[Dataset | IterableDataset, Dataset | IterableDataset | None, str]:
    """The training split, the evaluation split if there is one, and a name for both without a local path in it.

    With neither a name nor a path, or with the name `bundled`: the bundled Fashion-MNIST subset. For its variants,
    such as `bundled:coloured`, these are the originals that [`load_image_splits`] draws views of. A path may be a
    folder of images by class, a file or folder of parquet, arrow or WebDataset tars, images with masks (see
    `segmentation_folders.py`), or a folder that `save_to_disk` wrote.
    """
    splits, name = load_all_splits(dataset_name, dataset_config, dataset_path, streaming)
    if train_split not in splits:
        raise DataError(f"'{name}' has no split '{train_split}'; it has {', '.join(splits)}.")
    if eval_split == train_split:
        raise DataError(f"'{eval_split}' cannot be trained on and held out at once.")
    if eval_split is None:
        # Test splits last: those of benchmarks often come without their labels.
        candidates = [split for split in ("validation", "val", "test") if split in splits and split != train_split]
        eval_split = candidates[0] if candidates else None
    elif eval_split not in splits:
        raise DataError(f"'{name}' has no split '{eval_split}'; it has {', '.join(splits)}.")
    for split in filter(None, (train_split, eval_split)):
        if isinstance(splits[split], Dataset) and len(splits[split]) == 0:
            raise DataError(f"The split '{split}' of '{name}' is empty.")
    return splits[train_split], splits[eval_split] if eval_split else None, name


def load_all_splits(
    dataset_name: str | None = None,
    dataset_config: str | None = None,
    dataset_path: str | None = None,
    streaming: bool = False,
) -> tuple[dict[str, Dataset | IterableDataset], str]:
    """Every split of a data set as [`load_splits`] takes it, and its name without a local path in it."""
    if dataset_name and dataset_path:
        raise DataError(f"Give a data set's name or a path, not both; got '{dataset_name}' and '{dataset_path}'.")
    variant = bundled_variant(dataset_name, dataset_path)
    name = dataset_name or (Path(dataset_path).name if dataset_path else BUNDLED)
    if variant == "grey":
        name = BUNDLED
    try:
        if variant:
            folder = files("hf_decayed.data") / "bundled"
            data_files = {split: str(folder / f"fashion_mnist_{split}.parquet") for split in ("train", "test")}
            splits = load_dataset("parquet", data_files=data_files, streaming=streaming)
        elif dataset_path:
            splits = load_path(Path(dataset_path), streaming)
        else:
            splits = load_dataset(dataset_name, dataset_config, streaming=streaming)
    except DataError:
        raise
    except (ValueError, OSError, DatasetsError) as error:
        raise DataError(f"'{name}' could not be loaded, or is empty: {str(error).splitlines()[0]}") from error
    if not isinstance(splits, dict):
        splits = {"train": splits}
    return splits, name


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
        if folder := find_segmentation_folder(path):
            splits = folder.splits()
            return {name: rows.to_iterable_dataset() for name, rows in splits.items()} if streaming else splits
        return load_dataset(str(path), streaming=streaming)
    builders = {".parquet": "parquet", ".arrow": "arrow", ".tar": "webdataset"}
    if path.suffix not in builders:
        raise DataError(f"'{path.name}' is neither a folder nor a file of kind {', '.join(builders)}.")
    return load_dataset(builders[path.suffix], data_files={"train": str(path)}, streaming=streaming)


def find_columns(
    dataset: Dataset | IterableDataset,
    image_column: str | None = None,
    label_column: str | None = None,
    mask_column: str | None = None,
) -> tuple[str, str | None]:
    """Names of the image column and, if there is one, of the label column; found by type if no name is passed.

    A mask column, which is passed or has a usual name, is not taken for the images.
    """
    if dataset.features is None:
        dataset = dataset._resolve_features()
    features = dataset.features
    for column in filter(None, (image_column, label_column)):
        if column not in features:
            raise DataError(f"There is no column '{column}'; the columns are {', '.join(features)}.")
    if label_column is not None and "string" in str(getattr(features[label_column], "dtype", "")):
        raise DataError(
            f"The column '{label_column}' holds text, and classes are numbers: encode it by `class_encode_column` of datasets."
        )
    if image_column is None:
        images = [name for name, feature in features.items() if isinstance(feature, ImageFeature)]
        if len(images) > 1:
            images = [name for name in images if name not in (mask_column, *MASK_COLUMNS)]
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


def find_mask_column(
    dataset: Dataset | IterableDataset, image_column: str, mask_column: str | None = None
) -> str | None:
    """The column of masks: the named one, or the only other column of images with a usual name, such as `mask`."""
    features = dataset.features if dataset.features is not None else dataset._resolve_features().features
    images = [name for name, feature in features.items() if isinstance(feature, ImageFeature) and name != image_column]
    if mask_column is not None:
        if mask_column not in images:
            raise DataError(
                f"'{mask_column}' is not a column of masks, which are images; there are {images or 'none'}."
            )
        return mask_column
    masks = [name for name in images if name in MASK_COLUMNS]
    if len(masks) > 1:
        raise DataError(f"Found the mask columns {', '.join(masks)}: name one with --mask_column_name.")
    return masks[0] if masks else None


def take_subset(dataset: Dataset | IterableDataset, number: int | None):
    """A fixed random subset of `number` rows, because rows may be sorted by class; the first rows of a stream."""
    if isinstance(dataset, IterableDataset):
        return dataset if number is None else dataset.take(number)
    if number is None or number >= len(dataset):
        return dataset
    return dataset.select(np.random.default_rng(0).permutation(len(dataset))[:number])


def split_validation(dataset: Dataset | IterableDataset, image_column: str) -> tuple:
    """Held-out and training images of data without an evaluation split, by a checksum of each image file.

    The rule depends on the image alone, not on the number or the order of rows, so every script, a stream and a subset hold
    out the same images, and exact duplicates stay on one side.
    """
    encoded = dataset.cast_column(image_column, ImageFeature(decode=False))
    if isinstance(dataset, IterableDataset):
        return (
            encoded.filter(lambda row: file_checksum(row[image_column]) % HELD_OUT_ONE_IN == 0),
            encoded.filter(lambda row: file_checksum(row[image_column]) % HELD_OUT_ONE_IN != 0),
        )
    if len(dataset) < 2:
        raise DataError("One image cannot be split into training and held-out images: name an evaluation split.")
    # `map` keeps its result in the cache of `datasets`, so that a second run does not read the files again.
    checksums = encoded.map(
        lambda images: {"checksum": [file_checksum(image) for image in images]},
        input_columns=image_column,
        batched=True,
        remove_columns=encoded.column_names,
        desc="choosing held-out images",
    )
    checksums = np.asarray(checksums["checksum"][:], dtype=np.int64)
    held_out = checksums % HELD_OUT_ONE_IN == 0
    if held_out.all() or not held_out.any():  # a handful of images
        held_out = checksums == checksums.min()
    if held_out.all():
        raise DataError("All images are the same file: there is nothing to hold out.")
    return dataset.select(np.flatnonzero(held_out)), dataset.select(np.flatnonzero(~held_out))


def file_checksum(record: dict) -> int:
    """CRC-32 of an undecoded image: of its bytes, or, for a file on disk, of the names of the file and its folder."""
    if record["bytes"] is not None:
        return zlib.crc32(record["bytes"])
    return zlib.crc32("/".join(Path(record["path"]).parts[-2:]).encode())


def rows_fingerprint(dataset: Dataset | IterableDataset, image_column: str) -> str:
    encoded = dataset.select_columns(image_column).cast_column(image_column, ImageFeature(decode=False))
    digest = hashlib.sha256()
    if isinstance(dataset, IterableDataset):
        rows = encoded.take(FINGERPRINT_ROWS)
    else:
        digest.update(str(len(dataset)).encode())
        rows = encoded.select(np.unique(np.linspace(0, len(dataset) - 1, FINGERPRINT_ROWS).astype(int)))
    for row in rows:
        record = row[image_column]
        content = read_content(record)
        if content is None:  # a stream from a server or an archive
            content = open_image(record).tobytes()
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()[:16]


def read_class_names(train: Dataset, label_column: str) -> list[str]:
    """What the data calls its classes, or their numbers."""
    feature = train.features[label_column]
    names = feature.names if isinstance(feature, ClassLabel) else None
    return names or [str(number) for number in range(1 + max(train[label_column]))]
