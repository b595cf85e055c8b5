"""Pretrains a masked autoencoder with decayed shortcuts.

    accelerate launch training/mae.py
    accelerate launch training/mae.py --dataset_path path/to/photos --output_dir outputs/photos
    accelerate launch training/mae.py --recipe imagenet1k_vit_base --dataset_path path/to/imagenet --output_dir outputs/base
    accelerate launch training/mae.py --resume_from_checkpoint latest

Without arguments, the script runs the recipe `tiny` on coloured views of the bundled garments, on a CPU in a few
minutes, and compares the result with the shipped checkpoints. For your own images it runs `photos_small`, with their
number of channels; `photos_medium` and `photos` are larger. A recipe is a file in `training/recipes/mae`; flags on the
command line override it.
"""

import copy
import json
import math
import warnings
from pathlib import Path

import torch

from hf_decayed import DecayedViTMAEConfig, DecayedViTMAEForPreTraining
from hf_decayed.command_line import (
    boolean,
    fraction,
    model_names,
    non_negative_float,
    positive_int,
    shortcut_decay,
)
from hf_decayed.data.arguments import add_data_arguments, data_arguments
from hf_decayed.data.datasets import StreamedImages, TrainingImages
from hf_decayed.data.sources import load_image_splits
from hf_decayed.data.transforms import Augmentation
from hf_decayed.decay.continuation import continue_with_decay
from hf_decayed.decay.own_models import has_fixed_alphas
from hf_decayed.errors import UserError, explain_loading_errors
from hf_decayed.models.image_processing_decayed import default_image_processor
from hf_decayed.run import Run, adamw, format_loss, script_main, warmup_cosine
from hf_decayed.run.arguments import (
    ScriptParser,
    add_decay_warmup_argument,
    add_field_argument,
    add_image_arguments,
    add_run_arguments,
    add_training_arguments,
    augmentation_arguments,
    check_decay_warmup,
    decay_warmup_arguments,
    decoding_arguments,
    merge_fields,
)
from hf_decayed.run.decay_warmup import DecayWarmup
from hf_decayed.run.monitors import PatchMonitor, RepresentationMonitor
from hf_decayed.run.optimization import equivalent_groups


SHIPPED = Path(__file__).resolve().parents[1] / "model_cards"
# Token norms of a healthy encoder stay near the square root of its width; beyond this multiple, training has diverged.
DIVERGED_NORM = 30.0
# Fields of a recipe that a --size on the command line replaces.
SIZE_FIELDS = {
    f"{part}{name}"
    for part in ("", "decoder_")
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
} | {"shortcut_decay"}
# Metrics that are printed at the end, with their titles.
SUMMARY = {
    "knn_accuracy": "kNN accuracy (%)",
    "knn_accuracy_cls": "kNN accuracy, class token (%)",
    "cluster_miou": "segmentation by patches (%)",
    "patch_accuracy": "class of a patch (%)",
    "position_accuracy": "position of a patch (%)",
    "effective_rank": "effective rank",
    "images_seen": "images seen in training",
}


def parse_arguments(arguments=None):
    parser = ScriptParser(__file__, __doc__)
    data = add_data_arguments(parser)
    add_image_arguments(data, crop_scale=(0.2, 1.0))
    data.add_argument(
        "--center_crop", type=boolean, default=False, help="processor center-crops images instead of squeezing them"
    )
    data.add_argument("--streaming", type=boolean, default=False, help="needs --max_train_steps")

    model = parser.add_argument_group("model")
    model.add_argument(
        "--preset", choices=["default", "plain"], default="default", help="released architecture, or ViTMAE"
    )
    model.add_argument("--size", default="base", help="small, base, large or huge")
    model.add_argument("--shortcut_decay", type=shortcut_decay)
    add_field_argument(model)
    model.add_argument(
        "--attn_implementation",
        help="sdpa, eager, flash_attention_2, ...; by default sdpa, or eager for bf16 on a CPU, where it is faster",
    )
    model.add_argument("--init_from", help="checkpoint folder or repository to start from")
    model.add_argument(
        "--keep_function",
        type=boolean,
        default=False,
        help="with --init_from (a ViTMAE) and --shortcut_decay: scale weights so that the decayed network starts as "
        "the same function, with skips that output zero",
    )

    training = add_training_arguments(parser, batch_size=1024)
    training.add_argument("--num_train_epochs", type=non_negative_float, default=800)
    training.add_argument("--max_train_steps", type=positive_int, help="instead of epochs")
    training.add_argument(
        "--schedule_steps",
        type=positive_int,
        help="length of the learning-rate and decay schedules, to train only the beginning of a longer run",
    )
    training.add_argument("--base_learning_rate", type=non_negative_float, default=1.5e-4, help="per 256 images")
    training.add_argument(
        "--warmup_epochs", type=non_negative_float, default=40, help="for a stream, a twentieth of the steps"
    )
    add_decay_warmup_argument(training)
    training.add_argument(
        "--equivalent_decay",
        type=shortcut_decay,
        help="control: train undecayed shortcuts with the learning rates that this decay is equivalent to under AdamW",
    )
    training.add_argument("--adam_beta1", type=fraction, default=0.9)
    training.add_argument("--adam_beta2", type=fraction, default=0.95)
    parser.set_defaults(weight_decay=0.05)

    running = add_run_arguments(parser, "kNN, rank, skip ablation and pictures")
    running.add_argument("--eval_train_samples", type=positive_int, default=10000, help="size of the kNN bank")
    running.add_argument("--eval_test_samples", type=positive_int, default=5000)
    running.add_argument(
        "--compare",
        nargs="*",
        default=[],
        metavar="MODEL",
        help="models (folders or repositories) to compare with on the same images; in a recipe, names in model_cards",
    )

    options, recipe = parser.parse(arguments)
    options.fields = merge_fields(options, recipe_fields(parser, options, recipe))
    try:
        DecayedViTMAEConfig.check_field_names(options.fields)
    except ValueError as error:
        parser.error(f"--set: {error}")
    if not can_lower_decay(options):  # the recipe's values do not apply to this network
        for name in {"decay_warmup", "decay_start"} - parser.named:
            setattr(options, name, None)
    check_combinations(parser, options)
    if options.compare == recipe.get("compare"):
        options.compare = shipped_checkpoints(options, recipe)
    return options, parser.run_options(options)


def recipe_fields(parser: ScriptParser, options, recipe: dict) -> dict:
    """Config fields of the recipe; a checkpoint brings its own config, and a size on the command line its own sizes."""
    if options.init_from:
        if named := {"preset", "size"} & parser.named:
            parser.error(f"--{named.pop()}: --init_from brings its own sizes and architecture")
        return {}
    fields = recipe.get("fields", {})
    if "size" in parser.named or options.size != recipe.get("size", parser.get_default("size")):
        fields = {name: value for name, value in fields.items() if name not in SIZE_FIELDS}
    return fields


def can_lower_decay(options) -> bool:
    """Whether the decay may start at 1 and fall: only in a new network with fixed alphas."""
    return has_fixed_alphas(options.fields) and not options.init_from


def check_combinations(parser: ScriptParser, options) -> None:
    if options.keep_function and not (options.init_from and options.shortcut_decay):
        parser.error("--keep_function needs --init_from and --shortcut_decay above 0")
    if options.keep_function and options.decay_warmup:
        parser.error("--keep_function begins with the whole decay, and --decay_warmup without: drop one")
    check_decay_warmup(parser, options)


def main():
    options, run_options = parse_arguments()
    run = Run(run_options, kind="mae")

    # Data.
    with run.accelerator.main_process_first():  # one process fills the cache, the others read it
        splits = load_image_splits(**data_arguments(options), streaming=options.streaming)
    splits = splits.take(options.max_train_samples)

    # Model.
    model = build_model(options, slow_sdpa=run.device.type == "cpu" and run.accelerator.mixed_precision == "bf16")
    config = model.config
    others = load_compared_models(options.compare, config)
    if options.decay_warmup and not has_fixed_alphas(config.to_dict()):
        raise UserError(
            "--decay_warmup needs residual_form 'decay' and a shortcut_schedule that is not learned, got "
            f"'{config.residual_form}' and '{config.shortcut_schedule}'."
        )
    processor = default_image_processor(config.image_size, config.num_channels, options.center_crop)
    augmentation = Augmentation.from_processor(
        processor, config.num_channels, math.prod(config.grid_size), **augmentation_arguments(options)
    )
    images, source = load_training_images(options, run, splits, augmentation)
    run.print(f"{splits.name}: {source}")
    run.plan(images, options.max_train_steps, options.num_train_epochs, options.schedule_steps)
    monitor = RepresentationMonitor(
        run.accelerator,
        splits,
        processor,
        config,
        options.eval_train_samples,
        options.eval_test_samples,
        options.on_bad_image,
    )
    patch_monitor = PatchMonitor(run.accelerator, splits, processor, options.eval_test_samples, options.on_bad_image)
    untrained = monitor.evaluate(model)

    # Optimizer.
    peak_learning_rate = options.base_learning_rate * options.batch_size / 256
    warmup_steps = run.warmup_steps(options.warmup_epochs)
    betas = (options.adam_beta1, options.adam_beta2)
    groups = decayed_rates(model, options.equivalent_decay, options.weight_decay) if options.equivalent_decay else None
    optimizer = adamw(model, peak_learning_rate, betas, options.weight_decay, groups)
    average, evaluated = run.average(model)
    encoders = [network.vit for network in (model, evaluated)]
    decay_warmup = DecayWarmup(encoders, run.schedule_steps, **decay_warmup_arguments(options))

    # Prepare.
    model, optimizer = run.prepare(model=model, optimizer=optimizer)

    # Resume.
    run.resume(dataset=splits.name, fingerprint=splits.fingerprint(), decoded=source)
    if run.step == 0:
        run.record(untrained)

    # Loop.
    for batch in run.batches(images):
        run.set_learning_rate(
            optimizer, peak_learning_rate * warmup_cosine(run.step + 1, warmup_steps, run.schedule_steps)
        )
        run.record(decay_warmup.set(run.step))
        with run.accumulate(model):
            outputs = model(**batch, return_logits=False, output_hidden_states=run.logging)
            run.backward(outputs.loss)
        run.update(optimizer, model, average)
        if run.logging:
            norm = outputs.hidden_states[-1].detach().float().norm(dim=-1).mean()
            run.record({"encoder_norm": check_norm(run.accelerator.reduce(norm, "mean").item(), config, run.step)})
        if run.due(options.eval_every):
            run.evaluate(monitor, evaluated, "reconstructions")

    # End.
    decay_warmup.finish(run.step)
    run.save(processor, "image processor")
    run.save(evaluated)
    measured = run.evaluate(monitor, evaluated, "reconstructions")
    compared = {
        name: {
            **monitor.evaluate(other),
            **patch_monitor.evaluate(other, name),
            **read_images_seen(other.name_or_path),
        }
        for name, other in others.items()
    }
    patches = run.evaluate(patch_monitor, evaluated, "patches")
    results = run.results(
        {
            "knn_accuracy": measured.get("knn_accuracy"),
            "knn_accuracy_cls": measured.get("knn_accuracy_cls"),
            "knn_accuracy_pixels": monitor.evaluate_pixels(),
            "knn_accuracy_untrained": untrained.get("knn_accuracy"),
            "effective_rank": measured["effective_rank"],
            "effective_rank_untrained": untrained["effective_rank"],
            **patches,
            "skip_use": {name.removeprefix("skip_use_"): measured[name] for name in measured if "skip_use" in name},
            "started_from": options.init_from and Path(options.init_from).name,
            **({"compared": compared} if compared else {}),
            **({"kept_function": True} if options.keep_function else {}),
            "dataset": {
                "name": splits.name,
                "fingerprint": splits.fingerprint() if options.streaming else images.fingerprint(),
                "used": source,
                "held_out": splits.held_out_rule,
            },
        }
    )
    if run.is_main_process:
        print(summary(results))
    run.finish(results, "model, reconstructions.png, patches.png")


def build_model(options, slow_sdpa: bool) -> DecayedViTMAEForPreTraining:
    attention = options.attn_implementation or ("eager" if slow_sdpa else "sdpa")
    if options.init_from:
        fields = {} if options.keep_function else options.fields
        with explain_loading_errors(options.init_from):
            model = DecayedViTMAEForPreTraining.from_pretrained(
                options.init_from, dtype=torch.float32, attn_implementation=attention, **fields
            )
        return continue_with_decay(model, **options.fields) if options.keep_function else model
    make_config = DecayedViTMAEConfig.plain if options.preset == "plain" else DecayedViTMAEConfig.from_size
    config = make_config(options.size, **options.fields)
    return DecayedViTMAEForPreTraining._from_config(config, attn_implementation=attention)


def shipped_checkpoints(options, recipe: dict) -> list[str]:
    """Folders in model_cards that the recipe compares with; none outside a clone, or for images other than its own."""
    names = recipe.get("compare", [])
    same_images = options.dataset_name == recipe.get("dataset_name") and all(
        options.fields.get(name) == recipe["fields"].get(name) for name in ("image_size", "num_channels")
    )
    return [str(SHIPPED / name) for name in names if same_images and (SHIPPED / name).is_dir()]


def load_compared_models(sources: list[str], config) -> dict[str, DecayedViTMAEForPreTraining]:
    """The models of --compare by folder name; they must take images of this run's size and channels."""
    models = {}
    for source, name in model_names(sources).items():
        with explain_loading_errors(source):
            model = DecayedViTMAEForPreTraining.from_pretrained(source)
        for field in ("image_size", "num_channels"):
            if getattr(model.config, field) != getattr(config, field):
                raise UserError(
                    f"--compare: '{source}' has {field} {getattr(model.config, field)}, this run {getattr(config, field)}."
                )
        models[name] = model
    return models


def read_images_seen(folder: str) -> dict[str, int]:
    """Number of training images that a model has seen, if its folder records it."""
    try:
        return {"images_seen": json.loads(Path(folder, "results.json").read_text())["images_seen"]}
    except (OSError, ValueError, KeyError):  # a repository, or a model from elsewhere
        return {}


def decayed_rates(model, equivalent_decay: float | str, weight_decay: float) -> list[dict]:
    """Parameter groups with which a network without decay learns as one with this decay would."""
    if model.config.effective_decay() != 1 or model.config.residual_form != "decay":
        raise UserError("--equivalent_decay is for a network without decay: give --shortcut_decay 1.0.")
    config = copy.copy(model.config)
    config.shortcut_decay = equivalent_decay
    config.validate()
    return equivalent_groups(model, model.vit.layers, config.shortcut_alphas(), weight_decay)


def load_training_images(options, run, splits, augmentation):
    """Training images, and a description of how they are read."""
    if options.streaming:
        images = StreamedImages(splits.train, splits.image_column, augmentation, on_bad_image=options.on_bad_image)
        return images, f"streamed from {images.num_shards} file(s)"
    images = TrainingImages.from_splits(
        splits, augmentation, with_labels=False, progress=run.progress, **decoding_arguments(options)
    )
    if images.bad_images:
        run.print(f"skipped {images.bad_images} images that cannot be decoded")
    return images, images.source


def check_norm(norm: float, config, step: int) -> float:
    """Returns the norm of encoder tokens; warns if the network undoes the decay by growing them."""
    if norm > DIVERGED_NORM * math.sqrt(config.hidden_size):
        warnings.warn(
            f"Step {step + 1}: encoder tokens have norm {norm:.3g}, far above {math.sqrt(config.hidden_size):.3g}. "
            "The network may be undoing the decay: keep zero_init_branches, or raise --shortcut_decay.",
            stacklevel=2,
        )
    return norm


def summary(results: dict) -> str:
    """Metrics of the run beside those of the --compare models, the untrained network and raw pixels."""
    pixels, untrained = ({name: results.get(f"{name}_{kind}") for name in SUMMARY} for kind in ("pixels", "untrained"))
    columns = {"this run": results, **results.get("compared", {}), "untrained": untrained, "raw pixels": pixels}
    lines = [" " * 31 + "".join(f"  {label:>12}" for label in columns)]
    for name, title in SUMMARY.items():
        if all(metrics.get(name) is None for metrics in columns.values()):
            continue  # images without masks, or without labels
        line = f"{title:31}"
        for label, metrics in columns.items():
            value = metrics.get(name)
            form = {"effective_rank": "{:.3f}", "images_seen": "{:,}"}.get(name)
            number = "" if value is None else form.format(value) if form else f"{100 * value:.1f}"
            line += f"  {number:>{max(12, len(label))}}"
        lines.append(line.rstrip())
    skips = ", ".join(f"{increase:+.4f} (layer {layer})" for layer, increase in results["skip_use"].items())
    lines.append(f"{format_loss(results)}; its rise without a skip: {skips or 'none (no skips)'}")
    lines.append(f"{results['steps']} steps in {results['seconds']:.0f} s")
    return "\n".join(lines)


if __name__ == "__main__":
    script_main(main)
