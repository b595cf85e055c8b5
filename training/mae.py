"""Pretrains a masked autoencoder with decayed shortcuts.

    accelerate launch training/mae.py
    accelerate launch training/mae.py --recipe imagenet1k_vit_base --dataset_path path/to/imagenet --output_dir outputs/base
    accelerate launch training/mae.py --resume_from_checkpoint latest

Without arguments: the recipe `tiny` on the bundled Fashion-MNIST images, on a CPU in a few minutes. A recipe is a file in
`training/recipes`; every flag given on the command line overrides it.
"""

import argparse
import itertools
import json
import math
import sys
import time
import warnings
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration, DistributedDataParallelKwargs
from accelerate.utils import DistributedType, ProjectConfiguration, gather_object, set_seed
from huggingface_hub.errors import StrictDataclassError
from torch.optim.swa_utils import AveragedModel
from tqdm.auto import tqdm

from hf_decayed import DecayedViTMAEConfig, DecayedViTMAEForPreTraining
from hf_decayed.command_line import parse_field
from hf_decayed.data.datasets import (
    EpochBatchSampler,
    StreamedImages,
    TrainingImages,
    evaluation_images,
    identity_collate,
)
from hf_decayed.data.keyed_random import sample_generator
from hf_decayed.data.sources import split_validation, take_subset
from hf_decayed.data.transforms import Augmentation
from hf_decayed.errors import DataError, explain_loading_errors, format_error
from hf_decayed.evaluation import effective_rank, knn_accuracy, skip_ablation
from hf_decayed.evaluation.linear_probe import warmup_cosine
from hf_decayed.hub.cards import write_card
from hf_decayed.hub.upload import create_repository, upload_run
from hf_decayed.models.configuration_decayed_vit_mae import as_pair
from hf_decayed.models.modeling_decayed_vit_mae import image_processor
from hf_decayed.plots import reconstructions, save_curves, save_reconstructions
from hf_decayed.provenance import describe_hardware, sanitized_command, versions
from hf_decayed.run.arguments import add_data_arguments, boolean, list_recipes, load_images, parse_with_recipe
from hf_decayed.run.checkpoints import save_checkpoint
from hf_decayed.run.optimization import ema_with_warmup, is_scaler_warmup, parameter_groups, set_shortcut_progress
from hf_decayed.run.records import MetricsFile
from hf_decayed.run.run import StopSignal, ignore_signals, prepare_output_dir, run_signature, set_cpu_threads


RECIPES = Path(__file__).parent / "recipes"
# Token norms of a healthy encoder stay near the square root of its width; this many times that is the known failure.
BLOW_UP = 30.0
SKIP_USE_IMAGES = 256  # enough to tell which skips are used


def parse_arguments(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="tiny", help=f"one of {list_recipes(RECIPES)}, or a YAML file")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/mae"))
    parser.add_argument("--seed", type=int, default=0)

    data = add_data_arguments(parser)
    data.add_argument("--streaming", type=boolean, default=False, help="read as it comes; needs --max_train_steps")
    data.add_argument("--max_train_samples", type=int)
    data.add_argument(
        "--memory_limit_gb", type=float, default=2.0, help="hold decoded images of one size in memory up to this"
    )
    data.add_argument("--crop_scale", type=float, nargs=2, default=[0.2, 1.0], help="areas of random resized crops")
    data.add_argument("--horizontal_flip", type=boolean, default=True)

    model = parser.add_argument_group("model")
    model.add_argument(
        "--preset", choices=["default", "plain"], default="default", help="released architecture, or ViTMAE"
    )
    model.add_argument("--size", default="base", help="small, base, large or huge")
    model.add_argument("--shortcut_decay", type=lambda text: text if text == "auto" else float(text))
    model.add_argument(
        "--set", dest="fields", action="append", type=parse_field, metavar="FIELD=VALUE", help="any config field"
    )
    model.add_argument(
        "--attn_implementation",
        help="sdpa, eager, flash_attention_2, ...; when not given sdpa, or eager for bf16 on a CPU, where it is faster",
    )
    model.add_argument("--init_from", help="checkpoint folder or repository to start from")

    training = parser.add_argument_group("training")
    training.add_argument(
        "--batch_size", type=int, default=1024, help="images per step, over all processes and accumulation"
    )
    training.add_argument("--gradient_accumulation_steps", type=int, default=1)
    training.add_argument("--num_train_epochs", type=float, default=800)
    training.add_argument("--max_train_steps", type=int, help="instead of epochs")
    training.add_argument("--base_learning_rate", type=float, default=1.5e-4, help="per 256 images of a batch")
    training.add_argument("--warmup_epochs", type=float, default=40, help="a stream: a twentieth of the steps")
    training.add_argument(
        "--decay_warmup",
        type=float,
        help="share of the steps over which shortcuts fall from 1 to their weights, which they have from the start when not given",
    )
    training.add_argument("--weight_decay", type=float, default=0.05)
    training.add_argument("--adam_beta1", type=float, default=0.9)
    training.add_argument("--adam_beta2", type=float, default=0.95)
    training.add_argument("--max_grad_norm", type=float, help="clip gradients to this norm")
    training.add_argument("--ema_decay", type=float, help="keep an average of the weights, and save that")
    training.add_argument("--gradient_checkpointing", type=boolean, default=False)
    training.add_argument(
        "--mixed_precision", choices=["no", "bf16", "fp16"], help="accelerate's choice when not given"
    )
    training.add_argument("--cpu_threads", type=int, help="per process; the machine's cores shared out when not given")
    training.add_argument("--compile", type=boolean, default=False)
    training.add_argument(
        "--max_skipped_steps", type=int, default=20, help="stop after this many steps without a finite loss"
    )

    running = parser.add_argument_group("while it runs")
    running.add_argument("--checkpointing_steps", type=int, default=500)
    running.add_argument("--checkpoints_total_limit", type=int, default=2)
    running.add_argument("--resume_from_checkpoint", metavar="latest|PATH")
    running.add_argument("--log_every", type=int, default=10, help="steps between lines of metrics.jsonl")
    running.add_argument(
        "--eval_every", type=int, help="steps between kNN, rank, use of skips and pictures; always at the end"
    )
    running.add_argument("--eval_train_samples", type=int, default=10000, help="size of the kNN bank")
    running.add_argument("--eval_test_samples", type=int, default=5000)
    running.add_argument("--report_to", default="none", help="tensorboard, trackio, wandb")
    running.add_argument("--push_to_hub", metavar="REPOSITORY", help="repository to upload the result to")

    options, recipe = parse_with_recipe(parser, RECIPES, arguments)
    # A checkpoint says itself what the model is: then only what the command line asks for changes it.
    fields = {} if options.init_from else recipe.get("fields", {})
    options.fields = {**fields, **dict(options.fields or [])}
    if options.shortcut_decay is not None:
        options.fields["shortcut_decay"] = options.shortcut_decay
    for name in ("batch_size", "gradient_accumulation_steps", "checkpointing_steps", "log_every"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    if options.decay_warmup is not None and not 0.0 < options.decay_warmup <= 1.0:
        parser.error(f"--decay_warmup is a share of the steps, above 0 and at most 1, got {options.decay_warmup}")
    if options.decay_warmup and options.compile:
        parser.error(
            "--decay_warmup changes the network at every step, and --compile would compile each: leave one out"
        )
    return options


def main():
    options = parse_arguments()
    started = time.time()
    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(),
        mixed_precision=options.mixed_precision,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
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
    parts = accelerator.num_processes * options.gradient_accumulation_steps
    if options.batch_size % parts != 0:
        raise DataError(
            f"--batch_size {options.batch_size} cannot be shared out: {accelerator.num_processes} process(es) times "
            f"{options.gradient_accumulation_steps} accumulation step(s) make {parts} parts."
        )

    repository = create_repository(options.push_to_hub, accelerator)

    # Model.
    slow_sdpa = accelerator.device.type == "cpu" and accelerator.mixed_precision == "bf16"
    attention = options.attn_implementation or ("eager" if slow_sdpa else "sdpa")
    if options.init_from:
        with explain_loading_errors(options.init_from):
            model = DecayedViTMAEForPreTraining.from_pretrained(
                options.init_from, dtype=torch.float32, attn_implementation=attention, **options.fields
            )
    else:
        make_config = DecayedViTMAEConfig.plain if options.preset == "plain" else DecayedViTMAEConfig.from_size
        model = DecayedViTMAEForPreTraining._from_config(
            make_config(options.size, **options.fields), attn_implementation=attention
        )
    config = model.config
    processor = image_processor(config)
    normalisation = {"mean": list(processor.image_mean), "std": list(processor.image_std)}
    if options.decay_warmup and (config.residual_form != "decay" or config.shortcut_schedule == "learned"):
        raise DataError(
            "--decay_warmup needs residual_form 'decay' and a shortcut_schedule that is not learned, got "
            f"'{config.residual_form}' and '{config.shortcut_schedule}'."
        )
    if options.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    sharded = accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    if sharded and options.ema_decay:
        raise DataError(
            "--ema_decay keeps a whole copy of the weights, which sharded training does not have: leave it out."
        )
    # All processes have made the same model; their dropout differs from here on.
    set_seed(options.seed, device_specific=True)

    # Data.
    train, held_out, dataset_name, image_column, label_column = load_images(options, accelerator, options.streaming)
    if held_out is None:
        held_out, train = split_validation(train, options.eval_test_samples)
    train = take_subset(train, options.max_train_samples)
    augmentation = Augmentation(
        as_pair(config.image_size),
        config.num_channels,
        math.prod(config.grid_size),
        **normalisation,
        seed=options.seed,
        crop_scale=tuple(options.crop_scale),
        horizontal_flip=options.horizontal_flip,
    )
    micro_batch = options.batch_size // options.gradient_accumulation_steps
    if options.streaming:
        if options.max_train_steps is None:
            raise DataError("A stream has no length: give --max_train_steps.")
        images = StreamedImages(train, image_column, augmentation, on_bad_image=options.on_bad_image)
        steps_per_epoch, total_steps = None, options.max_train_steps
        warmup_steps = total_steps // 20
        options.num_workers = min(options.num_workers, train.num_shards)  # more would have nothing to read
        source = f"streamed from {train.num_shards} file(s)"
    else:
        images = TrainingImages(
            train,
            image_column,
            augmentation,
            memory_limit=int(options.memory_limit_gb * 2**30),
            on_bad_image=options.on_bad_image,
            progress=lambda items, **bar: tqdm(
                items, disable=not accelerator.is_local_main_process, leave=False, **bar
            ),
        )
        steps_per_epoch = max(1, len(images) // options.batch_size)
        total_steps = options.max_train_steps or round(options.num_train_epochs * steps_per_epoch)
        # A short run may come with a long warm-up.
        warmup_steps = min(round(options.warmup_epochs * steps_per_epoch), total_steps // 4)
        source = f"{len(images)} images {'in memory' if images.memory is not None else 'decoded on demand'}"
    bad_images = images.bad_images
    if bad_images:
        say(f"passed over {bad_images} images that cannot be decoded")

    # Optimizer.
    peak_learning_rate = options.base_learning_rate * options.batch_size / 256
    optimizer = torch.optim.AdamW(
        parameter_groups(model, options.weight_decay),
        lr=peak_learning_rate,
        betas=(options.adam_beta1, options.adam_beta2),
        fused=True,
    )
    average = None
    if options.ema_decay:
        average = AveragedModel(model, multi_avg_fn=ema_with_warmup(options.ema_decay)).to(accelerator.device)
        accelerator.register_for_checkpointing(average)
    networks = [model] if average is None else [model, average.module]
    decayed_layers = [list(network.vit.layers) for network in networks]  # as they are before anything wraps them
    alphas = config.shortcut_alphas()
    probe = Probe(accelerator, train, held_out, image_column, label_column, config, normalisation, options)
    untrained = probe.measure(model)

    plain_model = model
    if options.compile:
        model = torch.compile(model)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:  # it asks for what it cannot see in the loader
        per_process = micro_batch // accelerator.num_processes
        accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = per_process
    model, optimizer = accelerator.prepare(model, optimizer)

    # Resume.
    checkpoints = options.output_dir / "checkpoints"
    identity = run_signature(options, dataset=dataset_name, steps=total_steps)
    state = prepare_output_dir(accelerator, options, identity)
    step, skipped, earlier_seconds = (state.get(name, 0) for name in ("step", "skipped", "seconds"))
    bad_images += state.get("bad_images", 0)
    log = MetricsFile(options.output_dir / "metrics.jsonl", step, accelerator.is_main_process)
    accelerator.init_trackers("mae", config={name: str(value) for name, value in vars(options).items()})
    if step == 0:
        log.write({"step": 0, **untrained})
        accelerator.log(untrained, step=0)

    loader_arguments = {
        "num_workers": 0 if images.memory is not None else options.num_workers,
        "pin_memory": accelerator.device.type == "cuda",
        "generator": torch.Generator(),  # its own: starting to iterate must not move the one that dropout draws from
        "worker_init_fn": ignore_signals,
    }
    parts = options.gradient_accumulation_steps
    if options.streaming:
        # Accelerate lets one process read a stream and hands out the parts. Resuming reads again what was seen.
        loader = torch.utils.data.DataLoader(images, batch_size=micro_batch, drop_last=True, **loader_arguments)
        loader = itertools.islice(accelerator.prepare(loader), step * parts, total_steps * parts)
    else:
        batches = EpochBatchSampler(len(images), options.batch_size, options.seed, step, total_steps, parts)
        loader = torch.utils.data.DataLoader(
            images, batch_sampler=batches, collate_fn=identity_collate, **loader_arguments
        )
        loader = accelerator.prepare(loader)
    if accelerator.is_main_process:
        (options.output_dir / "arguments.json").write_text(json.dumps(vars(options), indent=2, default=str))
    say(
        f"{dataset_name}: {source}; "
        f"{plain_model.num_parameters() / 1e6:.1f} M parameters, shortcut_decay {config.shortcut_decay}, effective decay "
        f"{config.effective_decay():.1e}; {total_steps} steps of {options.batch_size}, peak learning rate {peak_learning_rate:.2g}"
    )

    # Loop.
    stop = StopSignal()
    bar = tqdm(
        total=total_steps, initial=step, disable=not accelerator.is_local_main_process, unit="step", dynamic_ncols=True
    )
    model.train()
    window_start, window_images = time.perf_counter(), 0
    step_loss = torch.zeros((), device=accelerator.device)
    bad_here = torch.zeros((), dtype=torch.long, device=accelerator.device)
    for batch in loader:
        bad_here += batch.pop("bad_images", bad_here.new_zeros(1)).sum()
        evaluating = options.eval_every and (step + 1) % options.eval_every == 0 and step + 1 < total_steps
        logging = evaluating or (step + 1) % options.log_every == 0 or step + 1 == total_steps
        for group in optimizer.param_groups:
            group["lr"] = peak_learning_rate * warmup_cosine(step + 1, warmup_steps, total_steps)
        if options.decay_warmup:
            last = round(options.decay_warmup * total_steps) - 1  # the first step with all of the decay
            share = 1.0 if step >= last else step / last
            for layers in decayed_layers:
                set_shortcut_progress(layers, alphas, share)
        with accelerator.accumulate(model):
            outputs = model(**batch, return_logits=False, output_hidden_states=logging)
            accelerator.backward(outputs.loss)
            step_loss += outputs.loss.detach() / options.gradient_accumulation_steps
            window_images += micro_batch
            if not accelerator.sync_gradients:
                continue
            gradient_norm = accelerator.clip_grad_norm_(model.parameters(), options.max_grad_norm or math.inf)
            gradient_norm = float(gradient_norm or 0.0)  # DeepSpeed clips by itself and may tell nothing
            # One exchange per step tells every process the same: mean loss, and whether any was asked to stop.
            report = torch.stack([step_loss, torch.tensor(float(stop.asked), device=accelerator.device)])
            loss, stopping = accelerator.reduce(report, "mean").tolist()
            step_loss.zero_()
            # With fp16 the gradient scaler itself skips what overflows, and has to see it to lower its scale.
            finite = math.isfinite(loss) and math.isfinite(gradient_norm)
            if finite or accelerator.scaler is not None:
                optimizer.step()
            if finite and not accelerator.optimizer_step_was_skipped:
                if average is not None:
                    average.update_parameters(plain_model)
            elif not is_scaler_warmup(accelerator.scaler, loss):
                skipped += 1
            optimizer.zero_grad()

        step += 1
        bar.update()
        if skipped > options.max_skipped_steps:
            raise DataError(
                f"{skipped} steps without a finite loss, the last at {step}: try a lower --base_learning_rate, "
                "--max_grad_norm 1, --mixed_precision no, or a --shortcut_decay nearer to 1."
            )
        if logging:
            now = time.perf_counter()
            rate, window_start, window_images = window_images / (now - window_start), now, 0
            encoder_norm = outputs.hidden_states[-1].detach().float().norm(dim=-1).mean()
            encoder_norm = accelerator.reduce(encoder_norm, "mean").item()
            record = {
                "step": step,
                "epoch": step / steps_per_epoch if steps_per_epoch else None,
                "loss": loss,
                "learning_rate": optimizer.param_groups[0]["lr"],
                "gradient_norm": gradient_norm,
                "encoder_norm": encoder_norm,
                "skipped_steps": skipped,
                "bad_images": bad_images + accelerator.reduce(bad_here, "sum").item(),
                "images_per_second": rate,
            }
            if options.decay_warmup:
                record["decay_share"] = share
            if encoder_norm > BLOW_UP * math.sqrt(config.hidden_size):
                warnings.warn(
                    f"Step {step}: encoder tokens have norm {encoder_norm:.3g}, far above {math.sqrt(config.hidden_size):.3g}. "
                    "The network may be undoing the decay: keep zero_init_branches, or raise --shortcut_decay.",
                    stacklevel=1,
                )
            if evaluating:
                record |= probe.measure(plain_model if average is None else average.module)
                probe.picture(plain_model, options.output_dir / "reconstructions" / f"step-{step:08d}.png")
                model.train()
                window_start = time.perf_counter()
            log.write(record)
            accelerator.log({name: value for name, value in record.items() if name != "step"}, step=step)
            bar.set_postfix(loss=f"{loss:.4f}", lr=f"{record['learning_rate']:.1e}", images=f"{rate:.0f}/s")
        if stopping or step % options.checkpointing_steps == 0:
            state = {"identity": identity, "skipped": skipped, "seconds": earlier_seconds + time.time() - started}
            state["bad_images"] = bad_images - images.bad_images + accelerator.reduce(bad_here, "sum").item()
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
    measured = probe.measure(final)
    accelerator.log(measured, step=step)
    bad_images += accelerator.reduce(bad_here, "sum").item()
    probe.picture(final, options.output_dir / "reconstructions.png")
    whole_weights = accelerator.get_state_dict(model) if sharded else None  # gathered by all, saved by one
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        log.write({"step": step, **measured})
        results = {
            "loss": log.recent("loss"),
            "knn_accuracy": measured.get("knn_accuracy"),
            "knn_accuracy_pixels": probe.pixels(),
            "knn_accuracy_untrained": untrained.get("knn_accuracy"),
            "effective_rank": measured["effective_rank"],
            "effective_rank_untrained": untrained["effective_rank"],
            "skip_use": {name.removeprefix("skip_use_"): measured[name] for name in measured if "skip_use" in name},
            "steps": step,
            "images_seen": step * options.batch_size,
            "skipped_steps": skipped,
            "bad_images": bad_images,
            "started_from": options.init_from and Path(options.init_from).name,
            "seconds": round(earlier_seconds + time.time() - started, 1),
            "command": " ".join(["accelerate launch", "training/mae.py", *sanitized_command()]),
            "dataset": {
                "name": dataset_name,
                "fingerprint": None if options.streaming else images.fingerprint(),
                "used": source,
            },
            "seed": options.seed,
            "processes": accelerator.num_processes,
            "precision": accelerator.mixed_precision,
            "hardware": describe_hardware(accelerator),
            "versions": versions(),
        }
        final.save_pretrained(options.output_dir, state_dict=whole_weights)
        (options.output_dir / "results.json").write_text(json.dumps(results, indent=2) + "\n")
        save_curves(options.output_dir / "curves.png", log.records())
        write_card(options.output_dir)
        print(summary(results))
        print(f"model, results.json, reconstructions.png, curves.png: {options.output_dir}")
        if repository:
            upload_run(repository, options.output_dir, trackers="mae")
    accelerator.end_training()


class Probe:
    """Held-out measurements: kNN accuracy and effective rank of features, the use of skips, and reconstructions."""

    def __init__(self, accelerator, train, held_out, image_column, label_column, config, normalisation, options):
        self.accelerator, self.normalisation = accelerator, normalisation
        size, channels = as_pair(config.image_size), config.num_channels
        arguments = (image_column, label_column, size, channels, options.on_bad_image)
        self.bank = evaluation_images(take_subset(train, options.eval_train_samples), *arguments)
        self.queries = evaluation_images(take_subset(held_out, options.eval_test_samples), *arguments)
        # One class is like none; a test split whose labels are kept secret has -1.
        self.labelled = label_column is not None and len(self.bank[1].unique()) > 1 and self.queries[1].min() >= 0
        # Drawn once, and by chance: they may come by class.
        order = torch.randperm(len(self.queries[0]), generator=torch.Generator().manual_seed(0))
        self.mixed = order[:SKIP_USE_IMAGES]
        self.noise = torch.stack(
            [
                torch.from_numpy(sample_generator(0, 0, index).random(math.prod(config.grid_size))).float()
                for index in range(len(self.mixed))
            ]
        )

    def normalised(self, images: torch.Tensor) -> torch.Tensor:
        mean, std = (torch.tensor(self.normalisation[name]).view(1, -1, 1, 1) for name in ("mean", "std"))
        return (images.float() / 255 - mean) / std

    @torch.no_grad()
    def features(self, encoder, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Pooled features and class tokens of all images, shared out over the processes, in order."""
        count = math.ceil(len(images) / self.accelerator.num_processes)
        part = images[count * self.accelerator.process_index :][:count]
        pooled, tokens = [], []
        for batch in part.split(256):
            with self.accelerator.autocast():
                outputs = encoder(self.normalised(batch).to(self.accelerator.device))
            pooled.append(outputs.pooler_output.float().cpu())
            tokens.append(outputs.last_hidden_state[:, 0].float().cpu())
        gathered = gather_object([(torch.cat(pooled), torch.cat(tokens))] if pooled else [])
        return tuple(torch.cat(each) for each in zip(*gathered))

    def measure(self, model) -> dict[str, float]:
        model = model.to(self.accelerator.device).eval()
        encoder = model.vit
        queries, class_tokens = self.features(encoder, self.queries[0])
        results = {"effective_rank": effective_rank(class_tokens)}
        if self.labelled:
            bank, _ = self.features(encoder, self.bank[0])
            results["knn_accuracy"] = knn_accuracy(bank, self.bank[1], queries, self.queries[1], k=min(20, len(bank)))
        images = self.normalised(self.queries[0][self.mixed]).to(self.accelerator.device)
        with self.accelerator.autocast():
            used = skip_ablation(model, images, self.noise.to(images.device))
        return results | {f"skip_use_{layer}": rise for layer, rise in used.items()}

    def pixels(self) -> float | None:
        if not self.labelled:
            return None
        bank, queries = (self.normalised(images).flatten(1) for images in (self.bank[0], self.queries[0]))
        return knn_accuracy(bank, self.bank[1], queries, self.queries[1], k=min(20, len(bank)))

    def picture(self, model, path: Path) -> None:
        """All processes call it: a sharded model needs them all to run."""
        model.eval()
        pixel_values = self.normalised(self.queries[0][:8]).to(self.accelerator.device)
        rows = reconstructions(model, pixel_values, self.noise[: len(pixel_values)], **self.normalisation)
        if self.accelerator.is_main_process:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_reconstructions(path, *rows, normalised=model.config.norm_pix_loss)


def summary(results: dict) -> str:
    def percent(value):
        return "none (no labels)" if value is None else f"{100 * value:.1f} %"

    skips = ", ".join(f"{rise:+.4f} (layer {layer})" for layer, rise in results["skip_use"].items())
    return "\n".join(
        [
            f"loss                     {results['loss']:.4f}",
            f"knn_accuracy             {percent(results['knn_accuracy'])}",
            f"knn_accuracy_untrained   {percent(results['knn_accuracy_untrained'])}",
            f"knn_accuracy_pixels      {percent(results['knn_accuracy_pixels'])}",
            f"effective_rank           {results['effective_rank']:.3f} (untrained {results['effective_rank_untrained']:.3f})",
            f"loss without a skip      {skips or 'none (no skips)'}",
            f"time                     {results['seconds']:.0f} s, {results['steps']} steps",
        ]
    )


if __name__ == "__main__":
    try:
        main()
    except (DataError, StrictDataclassError, ValueError, OSError) as error:
        print(f"mae.py: {format_error(error)}", file=sys.stderr)
        sys.exit(2)
