"""Trains a residual network with decayed shortcuts to classify images, and follows the rank of its features.

    accelerate launch training/resnet.py
    accelerate launch training/resnet.py --shortcut_decay 1.0 --num_blocks 12
    accelerate launch training/resnet.py --recipe imagenet100 --dataset_path path/to/imagenet100
    accelerate launch training/resnet.py --resume_from_checkpoint latest

Without a data set: the bundled images, on a CPU in a minute or two. A recipe is a file in `training/recipes/resnet`; every
flag overrides it. The paper's study (its appendix B.2), depths and decays in one command: `training/sweep.py resnet_rank`.
Unlike the other scripts this one stands on transformers' Trainer: nothing here needs more.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from huggingface_hub.errors import StrictDataclassError
from torch.nn import functional as F
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from hf_decayed import DecayedResNetConfig, DecayedResNetForImageClassification
from hf_decayed.command_line import parse_field
from hf_decayed.data.datasets import EpochBatchSampler, TrainingImages, evaluation_images
from hf_decayed.data.transforms import Augmentation
from hf_decayed.errors import DataError, format_error
from hf_decayed.evaluation import effective_rank
from hf_decayed.hub.cards import write_card
from hf_decayed.models.modeling_decayed_vit_mae import image_processor
from hf_decayed.plots import save_curves
from hf_decayed.provenance import describe_hardware, sanitized_command, versions
from hf_decayed.run.arguments import add_data_arguments, boolean, list_recipes, load_labelled_images, parse_with_recipe
from hf_decayed.run.run import (
    StopSignal,
    check_signature,
    clear_finished_run,
    ignore_signals,
    run_signature,
    set_cpu_threads,
)


RECIPES = Path(__file__).parent / "recipes" / "resnet"


def parse_arguments(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="tiny", help=f"one of {list_recipes(RECIPES)}, or a YAML file")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/resnet"))
    parser.add_argument("--seed", type=int, default=0)

    data = add_data_arguments(parser)
    data.add_argument("--image_size", type=int, default=224)
    data.add_argument("--max_train_samples", type=int)
    data.add_argument("--max_eval_samples", type=int)
    data.add_argument("--memory_limit_gb", type=float, default=2.0, help="hold decoded images of one size up to this")
    data.add_argument("--crop_scale", type=float, nargs=2, default=[0.08, 1.0], help="areas of random resized crops")
    data.add_argument("--horizontal_flip", type=boolean, default=True)

    model = parser.add_argument_group("model")
    model.add_argument("--shortcut_decay", type=float, help="0.7 when neither recipe nor flag says otherwise")
    model.add_argument(
        "--num_blocks", type=int, default=8, help="8 is ResNet-18; more repeat those of its third stage"
    )
    model.add_argument(
        "--set", dest="fields", action="append", type=parse_field, metavar="FIELD=VALUE", help="any config field"
    )

    training = parser.add_argument_group("training")
    training.add_argument("--batch_size", type=int, default=256, help="images per step, over all processes")
    training.add_argument("--num_train_epochs", type=float, default=90)
    training.add_argument("--max_train_steps", type=int, help="instead of epochs")
    training.add_argument("--learning_rate", type=float, default=0.1, help="at its highest; SGD with momentum 0.9")
    training.add_argument("--warmup_epochs", type=float, default=5)
    training.add_argument("--weight_decay", type=float, default=1e-4)
    training.add_argument("--label_smoothing", type=float, default=0.0)
    training.add_argument("--mixed_precision", choices=["no", "bf16", "fp16"], default="no")
    training.add_argument("--cpu_threads", type=int)

    running = parser.add_argument_group("while it runs")
    running.add_argument("--checkpointing_steps", type=int, default=500)
    running.add_argument("--checkpoints_total_limit", type=int, default=2)
    running.add_argument("--resume_from_checkpoint", metavar="latest|PATH")
    running.add_argument("--log_every", type=int, default=10)
    running.add_argument("--eval_every", type=int, default=500, help="steps between looks at accuracy and rank")
    running.add_argument("--report_to", default="none", help="tensorboard, trackio, wandb")

    options, recipe = parse_with_recipe(parser, RECIPES, arguments)
    options.fields = {**recipe.get("fields", {}), **dict(options.fields or [])}
    if options.shortcut_decay is not None:
        options.fields["shortcut_decay"] = options.shortcut_decay
    return options


def main():
    options = parse_arguments()
    started = time.time()
    training_arguments = TrainingArguments(
        output_dir=options.output_dir / "checkpoints",
        max_steps=1,  # set once the number of images is known
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=64 * PartialState().num_processes,  # shared out, as training batches are
        average_tokens_across_devices=False,  # our loss is a mean over images already
        max_grad_norm=0.0,
        weight_decay=options.weight_decay,
        lr_scheduler_type="cosine",
        bf16=options.mixed_precision == "bf16",
        fp16=options.mixed_precision == "fp16",
        use_cpu=not torch.accelerator.is_available(),
        # Each process takes its part of every global batch, so that batches do not depend on how many there are.
        accelerator_config={"split_batches": True},
        eval_strategy="steps",
        eval_steps=options.eval_every,
        save_steps=options.checkpointing_steps,
        save_total_limit=options.checkpoints_total_limit,
        logging_steps=options.log_every,
        report_to=options.report_to,
        seed=options.seed,
        remove_unused_columns=False,
    )
    set_seed(options.seed)

    # Model.
    config = DecayedResNetConfig.from_num_blocks(options.num_blocks, **options.fields)
    processor = image_processor(argparse.Namespace(image_size=options.image_size, num_channels=config.num_channels))
    normalisation = {"mean": list(processor.image_mean), "std": list(processor.image_std)}
    size = (options.image_size, options.image_size)

    # Data.
    images, held_out, class_names, dataset_name = make_data(options, config, normalisation, size)
    config.id2label = dict(enumerate(class_names))
    config.label2id = {name: number for number, name in config.id2label.items()}
    model = DecayedResNetForImageClassification(config)
    steps_per_epoch = max(1, len(images) // options.batch_size)
    total_steps = options.max_train_steps or round(options.num_train_epochs * steps_per_epoch)
    training_arguments.max_steps = total_steps
    training_arguments.warmup_steps = min(round(options.warmup_epochs * steps_per_epoch), total_steps // 4)

    # Resume.
    identity = run_signature(options, dataset=dataset_name, images=images.fingerprint(), steps=total_steps)
    identity_file = options.output_dir / "identity.json"
    checkpoint = options.resume_from_checkpoint
    if checkpoint == "latest":
        # The Trainer writes this file last: without it the process was killed while it wrote.
        whole = Path(training_arguments.output_dir).glob("checkpoint-*/trainer_state.json")
        newest = max(whole, key=lambda path: int(path.parent.name.partition("-")[2]), default=None)
        checkpoint = str(newest.parent) if newest and identity_file.exists() else None
    if checkpoint:
        check_signature(Path(checkpoint).name, {"identity": json.loads(identity_file.read_text())}, identity)
        print(f"resuming from {checkpoint}")
    elif training_arguments.process_index == 0:
        if not options.resume_from_checkpoint:
            clear_finished_run(options.output_dir)
        options.output_dir.mkdir(parents=True, exist_ok=True)
        identity_file.write_text(json.dumps(identity, indent=2) + "\n")
    training_arguments.eval_on_start = not checkpoint

    stop = StopSignal()
    trainer = RankTrainer(
        model,
        training_arguments,
        train_dataset=images,
        eval_dataset=held_out,
        compute_metrics=judge,
        compute_loss_func=lambda outputs, labels, **_: F.cross_entropy(
            outputs.logits.float(), labels, label_smoothing=options.label_smoothing
        ),
        optimizer_cls_and_kwargs=(
            torch.optim.SGD,
            {"lr": options.learning_rate, "momentum": 0.9, "nesterov": True},
        ),
    )
    trainer.num_workers = 0 if images.memory is not None else options.num_workers
    trainer.add_callback(StopWhenAsked(trainer.accelerator, stop))
    set_cpu_threads(trainer.accelerator, options.cpu_threads)
    trainer.accelerator.print(
        f"{dataset_name}: {len(images)} images, {len(class_names)} classes; {options.num_blocks} blocks, "
        f"{model.num_parameters() / 1e6:.2f} M parameters, shortcut_decay {config.shortcut_decay}; {total_steps} steps of "
        f"{options.batch_size}"
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    if trainer.state.global_step < total_steps:
        trainer.accelerator.print(
            f"stopped by {stop.name} at step {trainer.state.global_step}; go on with --resume_from_checkpoint latest"
        )
        return

    # End.
    if not any(look["step"] == total_steps for look in evaluations(trainer.state)):
        trainer.evaluate()
    if trainer.is_world_process_zero():
        looks = evaluations(trainer.state)
        losses = [{"step": each["step"], "loss": each["loss"]} for each in trainer.state.log_history if "loss" in each]
        results = {
            **{name: value for name, value in looks[-1].items() if name != "step"},
            "loss": float(np.mean([each["loss"] for each in losses[-10:]])),
            "steps": total_steps,
            "images_seen": total_steps * options.batch_size,
            "num_blocks": sum(config.depths),
            "shortcut_decay": config.shortcut_decay,
            "seconds": round(time.time() - started, 1),  # since it was last resumed
            "command": " ".join(["accelerate launch", "training/resnet.py", *sanitized_command()]),
            "dataset": {"name": dataset_name, "fingerprint": images.fingerprint(), "number": len(images)},
            "seed": options.seed,
            "processes": training_arguments.world_size,
            "precision": options.mixed_precision,
            "hardware": describe_hardware(trainer.accelerator),
            "versions": versions(),
        }
        records = sorted(losses + looks, key=lambda each: each["step"])
        (options.output_dir / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
        model.save_pretrained(options.output_dir)
        processor.save_pretrained(options.output_dir)
        save_curves(options.output_dir / "curves.png", records)
        (options.output_dir / "results.json").write_text(json.dumps(results, indent=2) + "\n")
        write_card(options.output_dir)
        print(
            f"accuracy {100 * results['accuracy']:.1f} %, effective rank {results['effective_rank']:.2f}, "
            f"loss {results['loss']:.4f}, {results['seconds']:.0f} s"
        )
        print(f"model, results.json, curves.png: {options.output_dir}")


def make_data(options, config, normalisation: dict, size: tuple[int, int]):
    """Augmented training images, held-out images, the names of the classes, and the data's name."""
    train, held_out, name, image_column, label_column, class_names = load_labelled_images(options, PartialState())
    augmentation = Augmentation(
        size,
        config.num_channels,
        0,  # no patches are masked
        **normalisation,
        seed=options.seed,
        crop_scale=tuple(options.crop_scale),
        horizontal_flip=options.horizontal_flip,
    )
    images = TrainingImages(
        train,
        image_column,
        augmentation,
        memory_limit=int(options.memory_limit_gb * 2**30),
        on_bad_image=options.on_bad_image,
        label_column=label_column,
    )
    pixels, labels = evaluation_images(
        held_out, image_column, label_column, size, config.num_channels, options.on_bad_image
    )
    mean, std = (torch.tensor(normalisation[name]).view(-1, 1, 1) for name in ("mean", "std"))
    held_out = [
        {"pixel_values": (image.float() / 255 - mean) / std, "labels": label} for image, label in zip(pixels, labels)
    ]
    return images, held_out, class_names, name


def images_and_labels(batch: dict) -> dict:
    """All that the model takes; a name, because workers may have to pickle it."""
    return {name: batch[name] for name in ("pixel_values", "labels")}


class RankTrainer(Trainer):
    """Takes the images in the order of the other scripts, and hands features to the metrics besides logits."""

    num_workers = 0

    def get_train_dataloader(self):
        # The whole run is one pass: draws and order belong to the step, and the Trainer skips to it when it resumes.
        batches = EpochBatchSampler(
            len(self.train_dataset), self.args.per_device_train_batch_size, self.args.seed, 0, self.args.max_steps
        )
        loader = torch.utils.data.DataLoader(
            self.train_dataset,
            batch_sampler=batches,
            collate_fn=images_and_labels,
            num_workers=self.num_workers,
            worker_init_fn=ignore_signals,
        )
        return self.accelerator.prepare(loader)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            outputs = model(**inputs, output_hidden_states=True)
        features = [state.float().mean(dim=(2, 3)) for state in outputs.hidden_states[1:]]  # 0 is the stem
        return outputs.loss, (outputs.logits, *features), inputs["labels"]


def judge(prediction) -> dict[str, float]:
    """Accuracy, and the effective rank of each stage's features, averaged over places; the last is the network's."""
    logits, *stages = prediction.predictions
    ranks = [effective_rank(torch.from_numpy(stage)) for stage in stages]
    return {
        "accuracy": float((logits.argmax(axis=1) == prediction.label_ids).mean()),
        "effective_rank": ranks[-1],
        **{f"effective_rank_stage{number}": rank for number, rank in enumerate(ranks, 1)},
    }


def evaluations(state) -> list[dict]:
    """What `judge` found so far, by step."""
    return [
        {
            "step": entry["step"],
            **{
                name.removeprefix("eval_"): value
                for name, value in entry.items()
                if name.startswith(("eval_accuracy", "eval_effective_rank"))
            },
        }
        for entry in state.log_history
        if "eval_accuracy" in entry
    ]


class StopWhenAsked(TrainerCallback):
    """Ends the run with a checkpoint after SIGTERM or Ctrl-C, in all processes at the same step."""

    def __init__(self, accelerator, stop: StopSignal):
        self.accelerator, self.stop = accelerator, stop

    def on_step_end(self, arguments, state, control, **_):
        asked = torch.tensor(float(self.stop.asked), device=self.accelerator.device)
        if self.accelerator.reduce(asked, "sum").item() > 0:
            control.should_save = control.should_training_stop = True


if __name__ == "__main__":
    try:
        main()
    except (DataError, StrictDataclassError, ValueError, OSError) as error:
        print(f"resnet.py: {format_error(error)}", file=sys.stderr)
        sys.exit(2)
