"""Fine-tunes an encoder to classify images, all of it trained, after He et al.'s recipe for masked autoencoders.

    accelerate launch training/finetune.py outputs/mae
    accelerate launch training/finetune.py path/or/repository --recipe imagenet1k_vit_base --dataset_path path/to/imagenet
    accelerate launch training/finetune.py outputs/mae --resume_from_checkpoint latest

MODEL is a pretrained folder or repository of ours, or a ViTMAE one of transformers. Without a data set: the bundled
images, on a CPU in a minute or two. A recipe is a file in `training/recipes`; every flag overrides it. The decay of the
shortcuts stays as it was pretrained.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator, DataLoaderConfiguration, DistributedDataParallelKwargs
from accelerate.utils import ProjectConfiguration, set_seed
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from tqdm.auto import tqdm

from hf_decayed import DecayedViTMAEForImageClassification
from hf_decayed.data.augmentation import mixup_cutmix, random_erasing
from hf_decayed.data.datasets import EpochBatchSampler, TrainingImages, evaluation_images, identity_collate
from hf_decayed.data.transforms import Augmentation
from hf_decayed.errors import DataError, explain_loading_errors, format_error
from hf_decayed.evaluation.linear_probe import warmup_cosine
from hf_decayed.hub.cards import write_card
from hf_decayed.models.configuration_decayed_vit_mae import as_pair
from hf_decayed.models.modeling_decayed_vit_mae import image_processor
from hf_decayed.plots import save_curves
from hf_decayed.provenance import describe_hardware, model_fingerprint, sanitized_command, versions
from hf_decayed.run.arguments import add_data_arguments, boolean, list_recipes, load_labelled_images, parse_with_recipe
from hf_decayed.run.checkpoints import save_checkpoint
from hf_decayed.run.optimization import ema_with_warmup, layerwise_groups
from hf_decayed.run.records import MetricsFile
from hf_decayed.run.run import StopSignal, ignore_signals, prepare_output_dir, run_signature, set_cpu_threads


RECIPES = Path(__file__).parent / "recipes" / "finetune"


def parse_arguments(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="folder or repository of a pretrained model")
    parser.add_argument("--recipe", default="tiny", help=f"one of {list_recipes(RECIPES)}, or a YAML file")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/finetune"))
    parser.add_argument("--seed", type=int, default=0)

    data = add_data_arguments(parser)
    data.add_argument("--max_train_samples", type=int)
    data.add_argument("--max_eval_samples", type=int)
    data.add_argument("--memory_limit_gb", type=float, default=2.0, help="hold decoded images of one size up to this")

    augmentation = parser.add_argument_group("augmentation")
    augmentation.add_argument("--crop_scale", type=float, nargs=2, default=[0.08, 1.0])
    augmentation.add_argument("--horizontal_flip", type=boolean, default=True)
    augmentation.add_argument("--rand_augment", type=float, default=9.0, help="RandAugment's magnitude; 0 for none")
    augmentation.add_argument("--mixup", type=float, default=0.8)
    augmentation.add_argument("--cutmix", type=float, default=1.0)
    augmentation.add_argument("--label_smoothing", type=float, default=0.1)
    augmentation.add_argument("--random_erasing", type=float, default=0.25, help="probability for each image")

    training = parser.add_argument_group("training")
    training.add_argument("--batch_size", type=int, default=1024, help="images per step, over all processes")
    training.add_argument("--num_train_epochs", type=float, default=100)
    training.add_argument("--max_train_steps", type=int, help="instead of epochs")
    training.add_argument("--base_learning_rate", type=float, default=5e-4, help="per 256 images of a batch")
    training.add_argument("--layer_decay", type=float, default=0.65, help="of the rate, per layer below the head")
    training.add_argument("--warmup_epochs", type=float, default=5)
    training.add_argument("--weight_decay", type=float, default=0.05)
    training.add_argument("--drop_path", type=float, default=0.1, help="in the last layer; rises from 0 with depth")
    training.add_argument("--max_grad_norm", type=float)
    training.add_argument("--ema_decay", type=float, help="keep an average of the weights, judge and save that")
    training.add_argument("--gradient_checkpointing", type=boolean, default=False)
    training.add_argument("--mixed_precision", choices=["no", "bf16", "fp16"])
    training.add_argument("--cpu_threads", type=int)
    training.add_argument("--compile", type=boolean, default=False)
    training.add_argument("--max_skipped_steps", type=int, default=20)

    running = parser.add_argument_group("while it runs")
    running.add_argument("--checkpointing_steps", type=int, default=500)
    running.add_argument("--checkpoints_total_limit", type=int, default=2)
    running.add_argument("--resume_from_checkpoint", metavar="latest|PATH")
    running.add_argument("--log_every", type=int, default=10)
    running.add_argument("--eval_every", type=int, help="steps between evaluations; always at the end")
    running.add_argument("--report_to", default="none", help="tensorboard, trackio, wandb")

    options, _ = parse_with_recipe(parser, RECIPES, arguments)
    for name in ("batch_size", "checkpointing_steps", "log_every"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    return options


def main():
    options = parse_arguments()
    started = time.time()
    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(),
        mixed_precision=options.mixed_precision,
        # Each process takes its part of every global batch, so that batches do not depend on how many there are.
        dataloader_config=DataLoaderConfiguration(split_batches=True, even_batches=False),
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
        log_with=None if options.report_to == "none" else options.report_to,
        project_config=ProjectConfiguration(project_dir=str(options.output_dir)),
    )
    set_cpu_threads(accelerator, options.cpu_threads)
    set_seed(options.seed)
    say = accelerator.print
    say(
        f"{accelerator.num_processes} process(es) on {accelerator.device.type}, precision {accelerator.mixed_precision}"
    )
    if options.batch_size % accelerator.num_processes != 0:
        raise DataError(
            f"--batch_size {options.batch_size} is not divisible by {accelerator.num_processes} processes."
        )

    # Data.
    train, held_out, dataset_name, image_column, label_column, class_names = load_labelled_images(options, accelerator)

    # Model.
    with explain_loading_errors(options.model):
        model = DecayedViTMAEForImageClassification.from_pretrained(
            options.model,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            id2label=dict(enumerate(class_names)),
            label2id={name: number for number, name in enumerate(class_names)},
        )
    config = model.config
    for layer, rate in zip(model.vit.layers, np.linspace(0, options.drop_path, config.num_hidden_layers)):
        layer.dropout = DropPath(float(rate))
    if options.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    pretrained = model_fingerprint(model.vit)
    # All processes have made the same model; their drop path differs from here on.
    set_seed(options.seed, device_specific=True)
    processor = image_processor(config)
    normalisation = {"mean": list(processor.image_mean), "std": list(processor.image_std)}
    augmentation = Augmentation(
        as_pair(config.image_size),
        config.num_channels,
        0,  # no patches are masked
        **normalisation,
        seed=options.seed,
        crop_scale=tuple(options.crop_scale),
        horizontal_flip=options.horizontal_flip,
        rand_augment_magnitude=options.rand_augment,
    )
    images = TrainingImages(
        train,
        image_column,
        augmentation,
        memory_limit=int(options.memory_limit_gb * 2**30),
        on_bad_image=options.on_bad_image,
        progress=lambda items, **bar: tqdm(items, disable=not accelerator.is_local_main_process, leave=False, **bar),
        label_column=label_column,
    )
    queries, query_labels = evaluation_images(
        held_out, image_column, label_column, as_pair(config.image_size), config.num_channels, options.on_bad_image
    )
    steps_per_epoch = max(1, len(images) // options.batch_size)
    total_steps = options.max_train_steps or round(options.num_train_epochs * steps_per_epoch)
    warmup_steps = min(round(options.warmup_epochs * steps_per_epoch), total_steps // 4)

    # Optimizer.
    peak_learning_rate = options.base_learning_rate * options.batch_size / 256
    optimizer = torch.optim.AdamW(
        layerwise_groups(
            model, config.num_hidden_layers, peak_learning_rate, options.layer_decay, options.weight_decay
        ),
        betas=(0.9, 0.999),
        fused=True,
    )
    average = None
    if options.ema_decay:
        average = AveragedModel(model, multi_avg_fn=ema_with_warmup(options.ema_decay)).to(accelerator.device)
        accelerator.register_for_checkpointing(average)
    plain_model = model
    if options.compile:
        model = torch.compile(model)
    model, optimizer = accelerator.prepare(model, optimizer)

    # Resume.
    checkpoints = options.output_dir / "checkpoints"
    identity = run_signature(options, model=pretrained, dataset=dataset_name, steps=total_steps)
    state = prepare_output_dir(accelerator, options, identity)
    step, skipped, earlier_seconds = (state.get(name, 0) for name in ("step", "skipped", "seconds"))
    log = MetricsFile(options.output_dir / "metrics.jsonl", step, accelerator.is_main_process)
    accelerator.init_trackers("finetune", config={name: str(value) for name, value in vars(options).items()})
    batches = EpochBatchSampler(len(images), options.batch_size, options.seed, step, total_steps)
    loader = torch.utils.data.DataLoader(
        images,
        batch_sampler=batches,
        collate_fn=identity_collate,
        num_workers=0 if images.memory is not None else options.num_workers,
        pin_memory=accelerator.device.type == "cuda",
        generator=torch.Generator(),  # its own: starting to iterate must not move the one that drop path draws from
        worker_init_fn=ignore_signals,
    )
    loader = accelerator.prepare(loader)
    if accelerator.is_main_process:
        (options.output_dir / "arguments.json").write_text(json.dumps(vars(options), indent=2, default=str))
    say(
        f"{dataset_name}: {len(images)} images, {len(class_names)} classes; {plain_model.num_parameters() / 1e6:.1f} M "
        f"parameters, shortcut_decay {config.shortcut_decay}; {total_steps} steps of {options.batch_size}, "
        f"peak learning rate {peak_learning_rate:.2g}"
    )

    # Loop.
    stop = StopSignal()
    bar = tqdm(
        total=total_steps, initial=step, disable=not accelerator.is_local_main_process, unit="step", dynamic_ncols=True
    )
    model.train()
    window_start, window_images = time.perf_counter(), 0
    for batch in loader:
        evaluating = options.eval_every and (step + 1) % options.eval_every == 0 and step + 1 < total_steps
        logging = evaluating or (step + 1) % options.log_every == 0 or step + 1 == total_steps
        for group in optimizer.param_groups:
            group["lr"] = group["peak_learning_rate"] * warmup_cosine(step + 1, warmup_steps, total_steps)
        # Draws for whole batches belong to the step and the process.
        draws = np.random.Generator(
            np.random.Philox(key=[options.seed, step], counter=[0, 0, 0, accelerator.process_index])
        )
        pixel_values, targets = mixup_cutmix(
            random_erasing(batch["pixel_values"], options.random_erasing, draws),
            batch["labels"],
            len(class_names),
            draws,
            options.mixup,
            options.cutmix,
            options.label_smoothing,
        )
        batch_loss = F.cross_entropy(model(pixel_values).logits.float(), targets)
        accelerator.backward(batch_loss)
        gradient_norm = accelerator.clip_grad_norm_(model.parameters(), options.max_grad_norm or math.inf)
        # One exchange per step tells every process the same: mean loss, and whether any was asked to stop.
        report = torch.stack([batch_loss.detach(), torch.tensor(float(stop.asked), device=accelerator.device)])
        loss, stopping = accelerator.reduce(report, "mean").tolist()
        # With fp16 the gradient scaler itself skips what overflows, and has to see it to lower its scale.
        finite = math.isfinite(loss) and math.isfinite(float(gradient_norm))
        if finite or accelerator.scaler is not None:
            optimizer.step()
        if finite and not accelerator.optimizer_step_was_skipped:
            if average is not None:
                average.update_parameters(plain_model)
        else:
            skipped += 1
        optimizer.zero_grad()

        step += 1
        window_images += options.batch_size
        bar.update()
        if skipped > options.max_skipped_steps:
            raise DataError(
                f"{skipped} steps without a finite loss, the last at {step}: try a lower --base_learning_rate, "
                "--max_grad_norm 1 or --mixed_precision no."
            )
        if logging:
            now = time.perf_counter()
            rate, window_start, window_images = window_images / (now - window_start), now, 0
            record = {
                "step": step,
                "epoch": step / steps_per_epoch,
                "loss": loss,
                "learning_rate": optimizer.param_groups[-1]["lr"],
                "gradient_norm": float(gradient_norm),
                "skipped_steps": skipped,
                "images_per_second": rate,
            }
            if evaluating:
                judged = plain_model if average is None else average.module
                record |= accuracy(judged, queries, query_labels, normalisation, accelerator)
                model.train()
                window_start = time.perf_counter()
            log.write(record)
            accelerator.log({name: value for name, value in record.items() if name != "step"}, step=step)
            bar.set_postfix(loss=f"{loss:.4f}", lr=f"{record['learning_rate']:.1e}", images=f"{rate:.0f}/s")
        if stopping or step % options.checkpointing_steps == 0:
            state = {"identity": identity, "skipped": skipped, "seconds": earlier_seconds + time.time() - started}
            written = save_checkpoint(accelerator, checkpoints, step, state, options.checkpoints_total_limit)
        if step == total_steps:
            break
        if stopping:
            bar.close()
            kept = "go on" if written else "its checkpoint could not be written; go on from an earlier one"
            say(f"stopped by {stop.name} at step {step}; {kept} with --resume_from_checkpoint latest")
            accelerator.end_training()
            return

    # End.
    bar.close()
    final = plain_model if average is None else average.module
    measured = accuracy(final, queries, query_labels, normalisation, accelerator)
    accelerator.log(measured, step=step)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        log.write({"step": step, **measured})
        results = {
            **measured,
            "loss": log.recent("loss"),
            "steps": step,
            "images_seen": step * options.batch_size,
            "skipped_steps": skipped,
            "seconds": round(earlier_seconds + time.time() - started, 1),
            "command": " ".join(["accelerate launch", "training/finetune.py", *sanitized_command()]),
            "dataset": {"name": dataset_name, "fingerprint": images.fingerprint(), "number": len(images)},
            "seed": options.seed,
            "processes": accelerator.num_processes,
            "precision": accelerator.mixed_precision,
            "hardware": describe_hardware(accelerator),
            "versions": versions(),
        }
        final.save_pretrained(options.output_dir)
        (options.output_dir / "results.json").write_text(json.dumps(results, indent=2) + "\n")
        save_curves(options.output_dir / "curves.png", log.records())
        write_card(options.output_dir)
        print(f"accuracy {100 * results['accuracy']:.1f} %, loss {results['loss']:.4f}, {results['seconds']:.0f} s")
        print(f"model, results.json, curves.png: {options.output_dir}")
    accelerator.end_training()


class DropPath(torch.nn.Module):
    """Stochastic depth: drops a branch for some images of a batch; takes the place of a layer's dropout."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, branch: torch.Tensor) -> torch.Tensor:
        if not self.training or self.rate == 0:
            return branch
        kept = torch.rand(len(branch), 1, 1, device=branch.device) >= self.rate
        return branch * kept / (1 - self.rate)


@torch.no_grad()
def accuracy(model, images, labels, normalisation: dict, accelerator) -> dict[str, float]:
    """Shares of held-out images whose class comes first, or among the first five; each process does its part."""
    model.eval()
    mean, std = (torch.tensor(normalisation[name]).view(1, -1, 1, 1) for name in ("mean", "std"))
    counts = torch.zeros(2, device=accelerator.device)
    mine = slice(accelerator.process_index, None, accelerator.num_processes)
    for batch, expected in zip(images[mine].split(64), labels[mine].split(64)):
        with accelerator.autocast():
            logits = model(((batch.float() / 255 - mean) / std).to(accelerator.device)).logits
        hits = logits.topk(min(5, logits.shape[1])).indices == expected.to(accelerator.device).unsqueeze(1)
        counts += torch.stack([hits[:, 0].sum(), hits.any(dim=1).sum()])
    first, five = (accelerator.reduce(counts, "sum") / len(labels)).tolist()
    return {"accuracy": first, "accuracy_top5": five}


if __name__ == "__main__":
    try:
        main()
    except (DataError, ValueError, OSError) as error:
        print(f"finetune.py: {format_error(error)}", file=sys.stderr)
        sys.exit(2)
