"""Command-line flags of training scripts: recipes, the flags of a run, and which of them may change on resume."""

import argparse
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from ..command_line import (
    OneLineParser,
    boolean,
    check_fields,
    constructor_fields,
    fraction,
    non_negative_float,
    non_negative_int,
    parse_field,
    positive_float,
    positive_fraction,
    positive_int,
    shortcut_decay,
)
from ..data.arguments import MAY_CHANGE, add_data_arguments, data_arguments
from ..data.inspection import ImageKind, inspect_images
from ..data.sources import bundled_variant, load_image_splits
from ..errors import repeat_after_launcher
from ..models.configuration_decayed_vit_mae import SIZES, as_pair


PHOTOS = "photos_small"  # the recipe for the user's own images
SMALL_IMAGES = 48  # images with a short side below this are not enlarged to that recipe's 64 pixels


@dataclass
class RunOptions:
    """The flags of a script that [`Run`] needs.

    Args:
        flags (`dict`): All flags, for `arguments.json` and trackers.
        signature (`dict`): Flags that define the run; a checkpoint with another signature is refused.
        eval_every (`int`, *optional*): Steps between evaluations; `None` evaluates only at the end.
    """

    output_dir: Path
    flags: dict
    signature: dict
    seed: int = 0
    batch_size: int = 1
    gradient_accumulation_steps: int = 1
    mixed_precision: str | None = None
    cpu_threads: int | None = None
    compile: bool = False
    gradient_checkpointing: bool = False
    max_grad_norm: float | None = None
    ema_decay: float | None = None
    max_skipped_steps: int = 20
    num_workers: int | None = None
    checkpointing_steps: int = 500
    checkpoints_total_limit: int | None = 2
    resume_from_checkpoint: str | None = None
    overwrite_output_dir: bool = False
    log_every: int = 10
    eval_every: int | None = None
    report_to: str = "none"
    push_to_hub: str | None = None

    def block_shape(self) -> dict[str, int]:
        """Batch size, tokens, width and heads of the network by its flags; what they leave out is that of ViT-B/16."""
        config = {
            name: value for name, value in {**self.flags, **dict(self.flags.get("fields") or {})}.items() if value
        }
        width = config.get("hidden_size") or SIZES.get(config.get("size", "base"), {}).get("hidden_size", 768)
        (height, image_width), patch = as_pair(config.get("image_size", 224)), as_pair(config.get("patch_size", 16))
        return {
            "batch_size": max(1, self.batch_size // self.gradient_accumulation_steps),
            "tokens": max(1, (height // patch[0]) * (image_width // patch[1])),
            "width": width,
            "heads": config.get("num_attention_heads") or max(1, width // 64),
        }


class ScriptParser(OneLineParser):
    """Parser of a training script, with `--recipe`, `--output_dir` and `--seed`.

    Flags come from the command line, else from the recipe, else from the parser's defaults. A recipe is a YAML file of
    flags; `fields` in it are fields of the model's config. After `parse`, `named` holds the flags that the command
    line changed from their defaults.
    """

    def __init__(self, script: str, description: str | None):
        """`script` is the `__file__` of a script, `description` its docstring; recipes are in `recipes/<its name>`."""
        super().__init__(
            prog=Path(script).name,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        name = Path(script).stem
        self.recipes = Path(script).parent / "recipes" / name
        if self.recipes.is_dir():
            names = list_recipes(self.recipes)
            help = f"one of {names}, or a YAML file; by default tiny"
            if (self.recipes / f"{PHOTOS}.yaml").exists():
                help += f", or for images of your own {PHOTOS}, with their channels"
            self.add_argument("--recipe", help=help)
        self.add_argument("--output_dir", type=Path, default=Path("outputs") / name)
        self.add_argument("--seed", type=non_negative_int, default=0)

    def exit(self, status=0, message=None):
        if status and message:
            repeat_after_launcher(message.strip())
        super().exit(status, message)

    def parse(self, arguments=None) -> tuple[argparse.Namespace, dict]:
        """Options, and the content of the recipe."""
        known = self.parse_known_args(arguments)[0]
        self.named = {name for name, value in vars(known).items() if value != self.get_default(name)}
        if not self.recipes.is_dir():
            return self.parse_args(arguments), {}
        name, images = known.recipe or "tiny", None
        if known.recipe is None and (self.recipes / f"{PHOTOS}.yaml").exists():
            images = own_images(known)
            name = "tiny" if images is None else PHOTOS
        path = Path(name) if name.endswith((".yaml", ".yml")) else self.recipes / f"{name}.yaml"
        if not path.is_file():
            self.error(f"there is no recipe '{name}'; there are {list_recipes(self.recipes)}")
        recipe = yaml.safe_load(path.read_text())
        if images is not None:
            recipe = fit_recipe(recipe, images)
        if getattr(known, "dataset_path", None):  # replaces the recipe's own data
            recipe.pop("dataset_name", None)
        actions = {flag.removeprefix("--"): action for action in self._actions for flag in action.option_strings}
        flags = {flag: value for flag, value in recipe.items() if flag != "fields"}
        if unknown := flags.keys() - actions.keys():
            self.error(f"the recipe '{name}' sets what is not a flag: {', '.join(sorted(unknown))}")
        for flag, value in flags.items():
            self.set_defaults(**{actions[flag].dest: self.check_value(actions[flag], value)})
        options = self.parse_args(arguments)
        options.recipe = name
        if images is not None and os.environ.get("RANK", "0") == "0":  # printed once, not by every process
            print(f"{images} -> {describe_input(recipe, options)}; recipe {name}", flush=True)
        return options, recipe

    def check_value(self, action: argparse.Action, value):
        """A recipe's value, checked as a flag's would be."""
        if isinstance(value, list):
            return [self.check_value(action, item) for item in value]
        if not callable(action.type) or value is None:
            return value
        try:
            return action.type(str(value).lower() if isinstance(value, bool) else str(value))
        except (argparse.ArgumentTypeError, ValueError) as error:
            self.error(f"the recipe's {action.option_strings[0]}: {error}")

    def signature(self, options: argparse.Namespace) -> dict:
        """All flags except those of groups whose title says that they may change on resume."""
        changeable = {
            action.dest
            for group in self._action_groups
            if MAY_CHANGE in (group.title or "")
            for action in group._group_actions
        }
        changeable |= {"recipe", "output_dir", "help"}
        return {name: value for name, value in vars(options).items() if name not in changeable}

    def run_options(self, options: argparse.Namespace) -> RunOptions:
        """The options that `Run` needs; a flag that the script does not have keeps its default."""
        names = {field.name for field in fields(RunOptions)} & vars(options).keys()
        values: dict[str, Any] = {name: getattr(options, name) for name in names}
        return RunOptions(flags=vars(options), signature=self.signature(options), **values)


def own_images(options: argparse.Namespace) -> ImageKind | None:
    """The kind of images that a script's flags name; `None` for the bundled grey ones."""
    variant = bundled_variant(options.dataset_name, options.dataset_path)
    if variant is not None:  # their kind is known without drawing views
        return None if variant == "grey" else ImageKind(has_colours=True, height=28, width=28)
    splits = load_image_splits(**data_arguments(options), streaming=getattr(options, "streaming", False))
    return inspect_images(splits.train, splits.image_column)


def fit_recipe(recipe: dict, images: ImageKind) -> dict:
    """Adapts a photo recipe to the channels of these images; small ones keep the number of patches, now of 4 x 4."""
    changes = {} if images.has_colours else {"num_channels": 1, "in_channels": 1}
    if images.short_side < SMALL_IMAGES:
        changes |= {"image_size": 32, "patch_size": 4}

    def changed(settings: dict) -> dict:
        return {name: changes.get(name, value) for name, value in settings.items()}

    return {**changed(recipe), "fields": changed(recipe["fields"])}


def describe_input(recipe: dict, options: argparse.Namespace) -> str:
    """What the network sees of an image, in words: "64 x 64, crops"."""
    settings = {**recipe.get("fields", {}), **vars(options), **dict(options.fields)}
    size = settings["image_size"]
    height, width = (size, size) if isinstance(size, int) else size
    grey = 1 in (settings.get("num_channels"), settings.get("in_channels"))
    return f"{width} x {height}{' grey' if grey else ''}, {'crops' if 'crop_scale' in settings else 'the middle'}"


def list_recipes(recipes: Path) -> str:
    return ", ".join(sorted(path.stem for path in recipes.glob("*.yaml")))


def add_field_argument(group, help: str = "any config field") -> None:
    """Adds `--set FIELD=VALUE`, which may be repeated; see [`merge_fields`]."""
    group.add_argument(
        "--set", dest="fields", action="append", default=[], type=parse_field, metavar="FIELD=VALUE", help=help
    )


def merge_fields(options: argparse.Namespace, recipe_fields: dict) -> dict:
    """Config fields: the recipe's, then those of `--set`, then `--shortcut_decay`."""
    fields = {**recipe_fields, **dict(options.fields)}
    if getattr(options, "shortcut_decay", None) is not None:
        fields["shortcut_decay"] = options.shortcut_decay
    return fields


def add_image_arguments(group, crop_scale: tuple[float, float] | None = None) -> None:
    """Adds flags for the number of images and their augmentation."""
    group.add_argument("--max_train_samples", type=positive_int)
    group.add_argument("--horizontal_flip", type=boolean, default=True)
    if crop_scale is not None:
        group.add_argument(
            "--crop_scale",
            type=positive_fraction,
            nargs=2,
            default=list(crop_scale),
            help="range of the areas of random resized crops",
        )


def augmentation_arguments(options: argparse.Namespace) -> dict:
    """Keyword arguments for `Augmentation`, for scripts that have these flags."""
    return {
        "seed": options.seed,
        "crop_scale": tuple(options.crop_scale),
        "horizontal_flip": options.horizontal_flip,
    }


def decoding_arguments(options: argparse.Namespace) -> dict:
    """Keyword arguments for `TrainingImages`."""
    return {"memory_limit": int(options.memory_limit_gb * 2**30), "on_bad_image": options.on_bad_image}


def add_training_arguments(parser: argparse.ArgumentParser, batch_size: int, ema_decay: float | None = None):
    """Adds the optimization flags that every script has; returns the group, for the script's own flags."""
    training = parser.add_argument_group("training")
    training.add_argument(
        "--batch_size",
        type=positive_int,
        default=batch_size,
        help="images per optimizer step, over all processes and accumulation steps",
    )
    training.add_argument("--gradient_accumulation_steps", type=positive_int, default=1)
    training.add_argument("--weight_decay", type=non_negative_float)
    training.add_argument("--max_grad_norm", type=positive_float, help="clip gradients to this norm")
    training.add_argument(
        "--ema_decay",
        type=fraction,
        default=ema_decay,
        help="decay of an EMA of the weights, which is then evaluated and saved",
    )
    training.add_argument("--gradient_checkpointing", type=boolean, default=False)
    training.add_argument(
        "--mixed_precision",
        choices=["auto", "no", "bf16", "fp16"],
        help="auto: bf16 if a short trial is faster with it; if not given, accelerate's own setting",
    )
    training.add_argument(
        "--cpu_threads",
        type=positive_int,
        help="threads per process; by default OMP_NUM_THREADS, else chosen by a short trial",
    )
    training.add_argument("--compile", type=boolean, default=False)
    return training


def add_run_arguments(parser: argparse.ArgumentParser, evaluation: str | None, *aliases: str):
    """Adds flags for checkpoints, logs and uploads; returns the group, for the script's own that may change on resume.

    `evaluation` describes what happens every `--eval_every` steps; without it there is no such flag.
    """
    running = parser.add_argument_group(f"while it runs ({MAY_CHANGE})")
    running.add_argument("--checkpointing_steps", type=positive_int, default=500)
    running.add_argument("--checkpoints_total_limit", type=positive_int, default=2)
    running.add_argument("--resume_from_checkpoint", metavar="latest|PATH")
    running.add_argument(
        "--overwrite_output_dir", action="store_true", help="replace the finished model in --output_dir"
    )
    running.add_argument(
        "--max_skipped_steps", type=non_negative_int, default=20, help="stop after more non-finite steps than this"
    )
    running.add_argument("--log_every", type=positive_int, default=10, help="steps between lines of metrics.jsonl")
    if evaluation is not None:
        running.add_argument(
            "--eval_every",
            *aliases,
            dest="eval_every",
            type=positive_int,
            help=f"steps between {evaluation}; always at the end",
        )
    running.add_argument(
        "--memory_limit_gb",
        type=non_negative_float,
        default=2.0,
        help="keep decoded images in memory up to this limit, if they have one size; a resumed mae.py, finetune.py or "
        "resnet.py must read them as before",
    )
    running.add_argument("--report_to", default="none", help="tensorboard, trackio, wandb")
    running.add_argument("--push_to_hub", metavar="REPOSITORY", help="repository to upload the result to")
    return running


def add_decay_warmup_argument(training) -> None:
    training.add_argument(
        "--decay_warmup",
        type=fraction,
        help="shortcuts start at 1 and reach their final weights after this fraction of the steps; by default 0",
    )
    training.add_argument(
        "--decay_start",
        type=fraction,
        help="with --decay_warmup: keep shortcuts at 1 for this fraction of the steps; by default 0",
    )


def check_decay_warmup(parser: ScriptParser, options: argparse.Namespace) -> None:
    """Refuses a start that is not before the end; a recipe's start does not count where the command names an earlier end."""
    if options.decay_start and options.decay_start >= (options.decay_warmup or 0):
        if "decay_start" in parser.named:
            parser.error(
                f"--decay_start {options.decay_start:g} must be below --decay_warmup, got {options.decay_warmup:g}"
                if options.decay_warmup is not None
                else "--decay_start needs --decay_warmup, before which shortcuts fall"
            )
        options.decay_start = None
    options.decay_start = options.decay_start or None  # as in checkpoints of versions without this flag


def decay_warmup_arguments(options: argparse.Namespace) -> dict:
    """Keyword arguments for `DecayWarmup`."""
    return {"end": options.decay_warmup, "start": options.decay_start, "compiled": options.compile}


def add_diffusion_arguments(parser: ScriptParser, sizes: dict, sampler: str, batch_size: int, ema_decay: float):
    """Adds the flags of all diffusion scripts; returns the groups `model` and `training`, for the script's own."""
    data = add_data_arguments(parser)
    add_image_arguments(data)
    data.add_argument("--image_size", type=positive_int, default=32, help="height and width of the center crop")
    latents = parser.add_argument_group("latents (by default pixels)")
    latents.add_argument("--vae", help="folder or repository of an AutoencoderKL, whose latents the network models")
    latents.add_argument("--keep_latents", type=boolean, default=True, help="encode every image once, before training")

    model = parser.add_argument_group("model")
    model.add_argument("--size", help=f"{', '.join(sizes)}; by default the recipe's, or S")
    model.add_argument("--shortcut_decay", type=shortcut_decay)
    add_field_argument(model)
    model.add_argument("--conditional", type=boolean, default=True, help="condition on classes if the data has labels")
    model.add_argument("--class_dropout", type=fraction, default=0.1, help="dropout of the labels, for guidance")

    training = add_training_arguments(parser, batch_size, ema_decay)
    training.add_argument("--max_train_steps", type=positive_int)
    training.add_argument("--learning_rate", type=non_negative_float, help="constant after the warm-up")
    training.add_argument("--warmup_steps", type=non_negative_int)
    add_decay_warmup_argument(training)
    training.add_argument("--adam_beta1", type=fraction)
    training.add_argument("--adam_beta2", type=fraction, default=0.999)

    running = add_run_arguments(parser, "pictures and distances", "--sample_every")
    running.add_argument("--latents_dir", type=Path, default=Path("outputs/latents"), help="cache of latents")
    running.add_argument("--sample_steps", type=positive_int, default=50, help=f"steps of {sampler}")
    running.add_argument("--sample_images", type=positive_int, default=36, help="number of samples in a picture")
    running.add_argument(
        "--eval_samples",
        type=non_negative_int,
        default=500,
        help="number of samples for the Frechet distance; 0: none",
    )
    running.add_argument(
        "--guidance_scale", type=non_negative_float, default=1.0, help="guidance of samples; 1 is none"
    )
    return model, training


def parse_diffusion_arguments(
    parser: ScriptParser, model_class: type, sizes: dict, arguments=None
) -> tuple[argparse.Namespace, RunOptions]:
    """Options of a diffusion script, with config fields merged and checked, and the options of its run."""
    options, recipe = parser.parse(arguments)
    fields = recipe.get("fields", {})
    if options.size not in (None, recipe.get("size")):  # an explicit --size replaces the recipe's own sizes
        fields = {name: value for name, value in fields.items() if name not in sizes["S"]}
    options.size = options.size or "S"
    if options.size not in sizes:
        parser.error(f"--size must be one of {', '.join(sizes)}, got {options.size}")
    options.fields = merge_fields(options, fields)
    for name in ("sample_size", "num_classes"):
        if name in options.fields:
            parser.error(f"--set {name}: it follows from the data, --image_size and --conditional")
    try:
        check_fields(options.fields, constructor_fields(model_class))
    except ValueError as error:
        parser.error(f"--set: {error}")
    if options.decay_warmup and options.fields.get("shortcut_schedule") == "learned":
        parser.error("--decay_warmup lowers a decay that is set, and shortcut_schedule=learned learns it: drop one")
    check_decay_warmup(parser, options)
    if options.guidance_scale != 1 and options.conditional and options.class_dropout == 0:
        parser.error(
            "--guidance_scale needs a trained null class: give --class_dropout above 0, or --guidance_scale 1"
        )
    return options, parser.run_options(options)


def diffusion_data_arguments(options: argparse.Namespace) -> dict:
    """Keyword arguments for `load_diffusion_data`."""
    return {
        "source": data_arguments(options),
        "image_size": options.image_size,
        "image_channels": options.fields.get("in_channels", 3),
        "max_train_samples": options.max_train_samples,
        "conditional": options.conditional,
        "vae": options.vae,
        "on_bad_image": options.on_bad_image,
    }


def diffusion_image_arguments(options: argparse.Namespace) -> dict:
    """Keyword arguments for `DiffusionData.images`."""
    return {
        "horizontal_flip": options.horizontal_flip,
        "memory_limit": int(options.memory_limit_gb * 2**30),
        "latents_dir": options.latents_dir if options.keep_latents else None,
    }


def sampling_arguments(options: argparse.Namespace) -> dict:
    """Keyword arguments for `DiffusionData.monitor`."""
    return {
        "num_images": options.sample_images,
        "num_eval_samples": options.eval_samples,
        "num_inference_steps": options.sample_steps,
        "guidance_scale": options.guidance_scale,
    }
