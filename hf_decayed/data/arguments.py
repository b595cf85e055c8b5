"""Command-line flags that name the images of a script or a command."""

import argparse

from ..command_line import non_negative_int


# In the titles of argument groups whose flags do not define a training run: a resumed run may change them.
MAY_CHANGE = "may change on resume"


def add_data_arguments(parser: argparse.ArgumentParser):
    """Adds the flags of the data set, for [`data_arguments`]; returns the group, for a script's own flags."""
    data = parser.add_argument_group("data (by default the bundled images)")
    data.add_argument(
        "--dataset_name",
        help="data set on the Hub, or bundled; bundled:coloured and bundled:textured are procedural views",
    )
    data.add_argument("--dataset_config", help="configuration of the data set")
    data.add_argument("--train_split", default="train")
    data.add_argument(
        "--eval_split",
        help="held-out split; by default the first of validation, val and test; `held_out` takes one in ten of the "
        "training images, to choose settings without using the evaluation split",
    )
    data.add_argument("--image_column_name", help="by default the only column of images")
    data.add_argument("--label_column_name", help="by default the only column of class labels")
    data.add_argument(
        "--on_bad_image",
        choices=["stop", "skip"],
        default="stop",
        help="what to do with an image that cannot be decoded",
    )
    storage = parser.add_argument_group(f"data storage ({MAY_CHANGE})")
    storage.add_argument("--dataset_path", help="folder of images, or parquet, arrow, WebDataset tar files")
    storage.add_argument("--mask_column_name", help="by default the column mask, segmentation or annotation")
    storage.add_argument(
        "--num_workers",
        type=non_negative_int,
        help="processes that decode images not held in memory; by default the cores that the model leaves free, or 4 "
        "for a stream",
    )
    return data


def data_arguments(options: argparse.Namespace) -> dict:
    """Keyword arguments for [`load_image_splits`] from parsed flags."""
    return {
        "dataset_name": options.dataset_name,
        "dataset_config": options.dataset_config,
        "dataset_path": options.dataset_path,
        "train_split": options.train_split,
        "eval_split": options.eval_split,
        "image_column": options.image_column_name,
        "label_column": options.label_column_name,
        "mask_column": options.mask_column_name,
    }
