"""Command-line flags that scripts share, and recipes."""

import argparse
from pathlib import Path

import yaml
from accelerate import Accelerator, PartialState

from ..data.sources import find_columns, load_splits, read_class_names, split_validation, take_subset
from ..errors import DataError


def list_recipes(recipes: Path) -> str:
    return ", ".join(sorted(path.stem for path in recipes.glob("*.yaml")))


def parse_with_recipe(
    parser: argparse.ArgumentParser, recipes: Path, arguments=None
) -> tuple[argparse.Namespace, dict]:
    """Options: from the command line, else from the file that `--recipe` names, else the parser's; and that file.

    A recipe may hold `fields` of the model's config besides flags: a dictionary, which flags cannot be.
    """
    recipe = parser.parse_known_args(arguments)[0].recipe
    path = Path(recipe) if recipe.endswith((".yaml", ".yml")) else recipes / f"{recipe}.yaml"
    if not path.is_file():
        parser.error(f"there is no recipe '{recipe}'; there are {list_recipes(recipes)}")
    values = yaml.safe_load(path.read_text())
    flags = {name: value for name, value in values.items() if name != "fields"}
    unknown = flags.keys() - {action.dest for action in parser._actions}
    if unknown:
        parser.error(f"the recipe '{recipe}' sets what is no flag: {', '.join(sorted(unknown))}")
    parser.set_defaults(**flags)
    return parser.parse_args(arguments), values


def add_data_arguments(parser: argparse.ArgumentParser):
    """The flags by which every script finds its images."""
    data = parser.add_argument_group("data (none given: the bundled images)")
    data.add_argument("--dataset_name", help="data set on the Hub")
    data.add_argument("--dataset_config", help="its configuration")
    data.add_argument("--dataset_path", help="folder of images, parquet, arrow, WebDataset tar")
    data.add_argument("--train_split", default="train")
    data.add_argument("--eval_split", help="held-out split; found when not given")
    data.add_argument("--image_column_name", help="found by type when not given")
    data.add_argument("--label_column_name", help="found by type when not given")
    data.add_argument("--on_bad_image", choices=["stop", "skip"], default="stop")
    data.add_argument("--num_workers", type=int, default=4, help="processes that decode images not held in memory")
    return data


def load_images(
    options: argparse.Namespace, accelerator: Accelerator | PartialState, streaming: bool = False
) -> tuple:
    """What those flags name: training images, held-out images or `None`, the data's name, image and label column."""
    with accelerator.main_process_first():  # one process fills the cache, the others read it
        train, held_out, name = load_splits(
            options.dataset_name,
            options.dataset_config,
            options.dataset_path,
            options.train_split,
            options.eval_split,
            streaming,
        )
    return train, held_out, name, *find_columns(train, options.image_column_name, options.label_column_name)


def load_labelled_images(options: argparse.Namespace, accelerator: Accelerator | PartialState) -> tuple:
    """For classifiers: the same with held-out images in any case, no more of each than asked for; and class names."""
    train, held_out, name, image_column, label_column = load_images(options, accelerator)
    if label_column is None:
        raise DataError("Classifying needs labels, and there is no label column: name one with --label_column_name.")
    if held_out is None:
        held_out, train = split_validation(train, len(train) // 10)
    class_names = read_class_names(train, label_column)
    train, held_out = take_subset(train, options.max_train_samples), take_subset(held_out, options.max_eval_samples)
    for split, rows in (("training", train), ("held-out", held_out)):
        if not 0 <= min(rows[label_column]) <= max(rows[label_column]) < len(class_names):
            raise DataError(f"The {split} labels do not lie in [0, {len(class_names)}): is it the right split?")
    return train, held_out, name, image_column, label_column, class_names


def boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}")
    return text.lower() == "true"
