"""Trains a U-ViT with decayed shortcuts to denoise images, and samples from it.

    accelerate launch training/uvit.py
    accelerate launch training/uvit.py --recipe cifar100_small --dataset_name uoft-cs/cifar100 --label_column_name fine_label
    accelerate launch training/uvit.py --resume_from_checkpoint latest

Without arguments: the recipe `tiny` on the bundled Fashion-MNIST images, on a CPU in about five minutes; it leaves a
pipeline and a picture of samples. A recipe is a file in `training/recipes/uvit`; every flag overrides it.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration, DistributedDataParallelKwargs
from accelerate.utils import ProjectConfiguration, set_seed
from diffusers import DDPMScheduler, DPMSolverMultistepScheduler
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from tqdm.auto import tqdm

from hf_decayed.command_line import check_fields, parse_field
from hf_decayed.data.datasets import EpochBatchSampler, identity_collate
from hf_decayed.data.latents import EncodedLatents, diffusion_images, load_vae, sample_shape
from hf_decayed.data.sources import read_class_names, take_subset
from hf_decayed.errors import DataError, format_error
from hf_decayed.evaluation.sampling import SampleMonitor
from hf_decayed.hub.cards import write_card
from hf_decayed.hub.conversion_diffusion import diffusion_fields
from hf_decayed.hub.upload import create_repository, upload_run
from hf_decayed.models.unet_decayed_uvit import SIZES, DecayedUViT2DModel
from hf_decayed.pipelines.pipeline_decayed_uvit import DecayedUViTPipeline
from hf_decayed.plots import save_curves
from hf_decayed.provenance import describe_hardware, model_fingerprint, sanitized_command, versions
from hf_decayed.run.arguments import add_data_arguments, boolean, list_recipes, load_images, parse_with_recipe
from hf_decayed.run.checkpoints import save_checkpoint
from hf_decayed.run.optimization import ema_with_warmup, is_scaler_warmup, parameter_groups
from hf_decayed.run.records import MetricsFile
from hf_decayed.run.run import StopSignal, ignore_signals, prepare_output_dir, run_signature, set_cpu_threads


RECIPES = Path(__file__).parent / "recipes" / "uvit"
# A thousand noise levels: for pixels those of DDPM, for latents those of Stable Diffusion, as U-ViT has them.
BETAS = {
    False: {"beta_schedule": "linear", "beta_start": 1e-4, "beta_end": 0.02},
    True: {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012},
}


def parse_arguments(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="tiny", help=f"one of {list_recipes(RECIPES)}, or a YAML file")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/uvit"))
    parser.add_argument("--seed", type=int, default=0)

    data = add_data_arguments(parser)
    data.add_argument("--image_size", type=int, default=32, help="height and width that images are brought to")
    data.add_argument("--max_train_samples", type=int)
    data.add_argument("--memory_limit_gb", type=float, default=2.0, help="hold decoded images of one size up to this")
    data.add_argument("--horizontal_flip", type=boolean, default=True)

    latents = parser.add_argument_group("latents (none given: pixels)")
    latents.add_argument("--vae", help="folder or repository of an AutoencoderKL, whose latents the network takes")
    latents.add_argument("--keep_latents", type=boolean, default=True, help="encode every image once, before training")
    latents.add_argument("--latents_dir", type=Path, default=Path("outputs/latents"), help="where latents are kept")

    model = parser.add_argument_group("model")
    model.add_argument("--size", help=f"{', '.join(SIZES)}; S when neither flag nor recipe says")
    model.add_argument("--shortcut_decay", type=lambda text: text if text == "auto" else float(text))
    model.add_argument(
        "--set", dest="fields", action="append", type=parse_field, metavar="FIELD=VALUE", help="any argument"
    )
    model.add_argument("--conditional", type=boolean, default=True, help="on classes, where the data has labels")
    model.add_argument("--class_dropout", type=float, default=0.1, help="how often the class is kept from the network")

    training = parser.add_argument_group("training")
    training.add_argument(
        "--prediction_type", choices=["epsilon", "v_prediction"], default="epsilon", help="the noise, or the velocity"
    )
    training.add_argument(
        "--batch_size", type=int, default=128, help="images per step, over all processes and accumulation"
    )
    training.add_argument("--gradient_accumulation_steps", type=int, default=1)
    training.add_argument("--max_train_steps", type=int, default=500_000)
    training.add_argument("--learning_rate", type=float, default=2e-4, help="constant after the warm-up")
    training.add_argument("--warmup_steps", type=int, default=2500)
    training.add_argument("--weight_decay", type=float, default=0.03)
    training.add_argument("--adam_beta1", type=float, default=0.99)
    training.add_argument("--adam_beta2", type=float, default=0.999)
    training.add_argument("--max_grad_norm", type=float, help="clip gradients to this norm")
    training.add_argument("--ema_decay", type=float, default=0.9999, help="of the averaged weights, which are saved")
    training.add_argument("--gradient_checkpointing", type=boolean, default=False)
    training.add_argument("--mixed_precision", choices=["no", "bf16", "fp16"])
    training.add_argument("--cpu_threads", type=int, help="per process; the machine's cores shared out when not given")
    training.add_argument("--compile", type=boolean, default=False)
    training.add_argument("--max_skipped_steps", type=int, default=20, help="stop after so many losses not finite")

    running = parser.add_argument_group("while it runs")
    running.add_argument("--checkpointing_steps", type=int, default=500)
    running.add_argument("--checkpoints_total_limit", type=int, default=2)
    running.add_argument("--resume_from_checkpoint", metavar="latest|PATH")
    running.add_argument("--log_every", type=int, default=10, help="steps between lines of metrics.jsonl")
    running.add_argument("--sample_every", type=int, help="steps between pictures and distances; always at the end")
    running.add_argument("--sample_steps", type=int, default=50, help="of DPM-Solver++")
    running.add_argument("--sample_images", type=int, default=36, help="in a picture")
    running.add_argument("--eval_samples", type=int, default=500, help="for the Frechet distance; 0 for none")
    running.add_argument("--guidance_scale", type=float, default=1.0, help="of samples; 1 is none")
    running.add_argument("--report_to", default="none", help="tensorboard, trackio, wandb")

    running.add_argument("--push_to_hub", metavar="REPOSITORY", help="repository to upload the result to")

    options, recipe = parse_with_recipe(parser, RECIPES, arguments)
    fields = recipe.get("fields", {})
    if options.size not in (None, recipe.get("size")):  # asked for by name: the recipe's own sizes give way
        fields = {name: value for name, value in fields.items() if name not in SIZES["S"]}
    options.size = options.size or "S"
    options.fields = {**fields, **dict(options.fields or [])}
    for name in ("sample_size", "num_classes"):
        if name in options.fields:
            parser.error(f"--set {name}: it follows from the data, --image_size and --conditional")
    try:
        check_fields(options.fields, diffusion_fields("uvit"))
    except ValueError as error:
        parser.error(f"--set: {error}")
    if options.shortcut_decay is not None:
        options.fields["shortcut_decay"] = options.shortcut_decay
    if options.size not in SIZES:
        parser.error(f"--size must be one of {', '.join(SIZES)}, got {options.size}")
    at_least_one = ("batch_size", "gradient_accumulation_steps", "checkpointing_steps", "log_every", "max_train_steps")
    for name in (*at_least_one, "sample_images", "sample_steps"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
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
    micro_batch = options.batch_size // options.gradient_accumulation_steps
    repository = create_repository(options.push_to_hub, accelerator)

    # Data.
    train, _, dataset_name, image_column, label_column = load_images(options, accelerator)
    train = take_subset(train, options.max_train_samples)
    label_column = label_column if options.conditional else None
    if label_column and min(train[label_column]) < 0:
        raise DataError(
            "The labels hold numbers below 0: train without them (--conditional false), or name another column."
        )
    class_names = read_class_names(train, label_column) if label_column else []
    vae = load_vae(options.vae, accelerator.device) if options.vae else None
    image_channels = options.fields.get("in_channels", 3) if vae is None else vae.config.in_channels
    if options.guidance_scale != 1.0 and not class_names:
        options.guidance_scale = 1.0
        say("there are no classes, so samples are drawn without guidance")
    total_steps = options.max_train_steps

    # Model; before images are encoded, which may take hours, so that a wrong field costs nothing.
    channels, sample_size = sample_shape(vae, image_channels, options.image_size)
    sizes = {"sample_size": sample_size, "in_channels": channels, "num_classes": len(class_names)}
    model = DecayedUViT2DModel.from_size(options.size, **{**options.fields, **sizes})
    config = model.config
    images = diffusion_images(vae, image_channels, train, image_column, label_column, options, accelerator)
    if options.gradient_checkpointing:
        model.enable_gradient_checkpointing()
    # The levels that the network is trained on, and sampled with.
    levels = {**BETAS[vae is not None], "prediction_type": options.prediction_type}
    noise_levels = DDPMScheduler(**levels)
    average = AveragedModel(model, multi_avg_fn=ema_with_warmup(options.ema_decay)).to(accelerator.device)
    accelerator.register_for_checkpointing(average)

    # Optimizer.
    optimizer = torch.optim.AdamW(
        parameter_groups(model, options.weight_decay),
        lr=options.learning_rate,
        betas=(options.adam_beta1, options.adam_beta2),
        fused=True,
    )
    plain_model = model
    if options.compile:
        model = torch.compile(model)
    model, optimizer = accelerator.prepare(model, optimizer)

    # Resume.
    checkpoints = options.output_dir / "checkpoints"
    identity = run_signature(options, dataset=dataset_name)
    state = prepare_output_dir(accelerator, options, identity)
    step, skipped, earlier_seconds = (state.get(name, 0) for name in ("step", "skipped", "seconds"))
    log = MetricsFile(options.output_dir / "metrics.jsonl", step, accelerator.is_main_process)
    accelerator.init_trackers("uvit", config={name: str(value) for name, value in vars(options).items()})
    loader = torch.utils.data.DataLoader(
        images,
        batch_sampler=EpochBatchSampler(
            len(images), options.batch_size, options.seed, step, total_steps, options.gradient_accumulation_steps
        ),
        collate_fn=identity_collate,
        # What lies in memory, or is encoded on the device, is best made here.
        num_workers=0 if images.memory is not None or isinstance(images, EncodedLatents) else options.num_workers,
        pin_memory=accelerator.device.type == "cuda",
        generator=torch.Generator(),  # its own: starting to iterate must not move the global one
        worker_init_fn=ignore_signals,
    )
    loader = accelerator.prepare(loader)

    def pipeline_of(network):
        scheduler = DPMSolverMultistepScheduler(**levels)
        names = dict(enumerate(class_names)) or None
        return DecayedUViTPipeline(network, scheduler, vae, names, prediction_type=options.prediction_type)

    looks = SampleMonitor(accelerator, pipeline_of, train, image_column, image_channels, class_names, options)
    if accelerator.is_main_process:
        (options.output_dir / "arguments.json").write_text(json.dumps(vars(options), indent=2, default=str))
    say(
        f"{dataset_name}: {len(images)} images, {len(class_names)} classes; {plain_model.num_parameters() / 1e6:.1f} M "
        f"parameters, shortcut_decay {config.shortcut_decay}, effective decay {plain_model.effective_decay():.1e}; "
        f"{total_steps} steps of {options.batch_size}, learning rate {options.learning_rate:.2g}"
    )

    # Loop.
    stop = StopSignal()
    bar = tqdm(
        total=total_steps, initial=step, disable=not accelerator.is_local_main_process, unit="step", dynamic_ncols=True
    )
    model.train()
    window_start, window_images = time.perf_counter(), 0
    step_loss = torch.zeros((), device=accelerator.device)
    for batch in loader:
        looking = options.sample_every and (step + 1) % options.sample_every == 0 and step + 1 < total_steps
        logging = looking or (step + 1) % options.log_every == 0 or step + 1 == total_steps
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * min(1.0, (step + 1) / max(1, options.warmup_steps))
        # What is drawn belongs to the sample: its noise, its time, and whether its class is kept from the network.
        timesteps = (batch["uniform"][:, 0] * noise_levels.config.num_train_timesteps).long()
        noisy = noise_levels.add_noise(batch["pixel_values"], batch["noise"], timesteps)
        target = batch["noise"]
        if options.prediction_type == "v_prediction":
            target = noise_levels.get_velocity(batch["pixel_values"], batch["noise"], timesteps)
        conditions = {}
        if class_names:
            dropped = batch["uniform"][:, 1] < options.class_dropout
            conditions["class_labels"] = torch.where(dropped, len(class_names), batch["labels"])
        with accelerator.accumulate(model):
            predicted = model(noisy, timesteps, **conditions).sample
            batch_loss = F.mse_loss(predicted.float(), target)
            accelerator.backward(batch_loss)
            step_loss += batch_loss.detach() / options.gradient_accumulation_steps
            window_images += micro_batch
            if not accelerator.sync_gradients:
                continue
            gradient_norm = accelerator.clip_grad_norm_(model.parameters(), options.max_grad_norm or math.inf)
            # One exchange per step tells every process the same: mean loss, and whether any was asked to stop.
            report = torch.stack([step_loss, torch.tensor(float(stop.asked), device=accelerator.device)])
            loss, stopping = accelerator.reduce(report, "mean").tolist()
            step_loss.zero_()
            # With fp16 the gradient scaler itself skips what overflows, and has to see it to lower its scale.
            finite = math.isfinite(loss) and math.isfinite(float(gradient_norm))
            if finite or accelerator.scaler is not None:
                optimizer.step()
            if finite and not accelerator.optimizer_step_was_skipped:
                average.update_parameters(plain_model)
            elif not is_scaler_warmup(accelerator.scaler, loss):
                skipped += 1
            optimizer.zero_grad()

        step += 1
        bar.update()
        if skipped > options.max_skipped_steps:
            raise DataError(
                f"{skipped} steps without a finite loss, the last at {step}: try a lower --learning_rate, "
                "--max_grad_norm 1, --mixed_precision no, or a --shortcut_decay nearer to 1."
            )
        if logging:
            now = time.perf_counter()
            rate, window_start, window_images = window_images / (now - window_start), now, 0
            record = {
                "step": step,
                "epoch": step * options.batch_size / len(images),
                "loss": loss,
                "learning_rate": optimizer.param_groups[0]["lr"],
                "gradient_norm": float(gradient_norm),
                "skipped_steps": skipped,
                "images_per_second": rate,
            }
            if looking:
                record |= looks.look(average.module, options.output_dir / "samples" / f"step-{step:08d}.png")
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
    if accelerator.is_main_process:  # before the last look, which may fail
        pipeline_of(average.module).save_pretrained(options.output_dir)
    measured = looks.look(average.module, options.output_dir / "samples.png")
    accelerator.log(measured, step=step)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        log.write({"step": step, **measured})
        data_fingerprint = images.fingerprint() if vae is None else train._fingerprint
        results = {
            **measured,
            "loss": log.recent("loss"),
            "steps": step,
            "images_seen": step * options.batch_size,
            "skipped_steps": skipped,
            "seconds": round(earlier_seconds + time.time() - started, 1),
            "command": " ".join(["accelerate launch", "training/uvit.py", *sanitized_command()]),
            "dataset": {"name": dataset_name, "fingerprint": data_fingerprint, "number": len(images)},
            "latents": options.vae and model_fingerprint(vae),
            "sampling": {"steps": options.sample_steps, "guidance_scale": options.guidance_scale},
            "seed": options.seed,
            "processes": accelerator.num_processes,
            "precision": accelerator.mixed_precision,
            "hardware": describe_hardware(accelerator),
            "versions": versions(),
        }
        (options.output_dir / "results.json").write_text(json.dumps(results, indent=2) + "\n")
        save_curves(options.output_dir / "curves.png", log.records())
        write_card(options.output_dir)
        distances = "".join(f", {name} {value:.2f}" for name, value in measured.items())
        print(f"loss {results['loss']:.4f}{distances}, {results['seconds']:.0f} s")
        print(f"pipeline, results.json, samples.png, curves.png: {options.output_dir}")
        if repository:
            upload_run(repository, options.output_dir, trackers="uvit")
    accelerator.end_training()


if __name__ == "__main__":
    try:
        main()
    except (DataError, ValueError, OSError) as error:
        print(f"uvit.py: {format_error(error)}", file=sys.stderr)
        sys.exit(2)
