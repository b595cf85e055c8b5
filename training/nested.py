"""Trains a nested diffusion model, all levels in turn or a single one, and samples from the chain.

    accelerate launch training/nested.py
    accelerate launch training/nested.py --level 2
    accelerate launch training/nested.py --resume_from_checkpoint latest

Without arguments, the script runs the recipe `tiny`: two levels on the bundled Fashion-MNIST images, on a CPU in about
six minutes. It saves a pipeline and a picture, in which the samples of a row share their top latent. Levels are
independent: with `--level`, each can be trained on its own machine, with one shared `--output_dir`; the last to finish
assembles the chain. A recipe is a file in `training/recipes/nested`; flags override it.
"""

import os
from pathlib import Path

from diffusers import DDPMScheduler, DPMSolverMultistepScheduler
from torch.nn import functional as F

from hf_decayed.command_line import fraction, latent_shape, non_negative_float, positive_int
from hf_decayed.errors import UserError
from hf_decayed.models.unet_nested_uvit import SIZES, NestedUViT2DModel
from hf_decayed.pipelines.pipeline_nested_diffusion import NestedDiffusionPipeline
from hf_decayed.run import Run, adamw, linear_warmup, script_main
from hf_decayed.run import arguments as flags
from hf_decayed.run.decay_warmup import DecayWarmup
from hf_decayed.run.diffusion import load_diffusion_data
from hf_decayed.run.nested import level_options, load_finished_levels, load_nested_data, measure_level, save_chain


# A thousand noise levels, as in U-ViT: DDPM's for pixels, Stable Diffusion's for latents.
PIXEL_BETAS = {"beta_schedule": "linear", "beta_start": 1e-4, "beta_end": 0.02}
LATENT_BETAS = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
# Config fields that follow from other flags.
DERIVED_FIELDS = ("condition_levels", "condition_sigmas", "level", "latent_fingerprint")


def parse_arguments(arguments=None):
    parser = flags.ScriptParser(__file__, __doc__)
    model, training = flags.add_diffusion_arguments(parser, SIZES, "DPM-Solver++", batch_size=512, ema_decay=0.9999)
    parser.add_argument("--level", type=positive_int, help="train only this level; by default all, the highest first")
    model.add_argument(
        "--encoder",
        help="folder or repository of the frozen encoder, with its image processor; or random_projection of pixels, "
        "a control",
    )
    model.add_argument(
        "--hierarchy",
        type=latent_shape,
        nargs="+",
        default=[(1, 256, 1), (2, 128, 1), (4, 64, 2), (8, 32, 2)],
        metavar="GRIDxCHANNELS[/PATCH]",
        help="latents above level 1, the highest first",
    )
    model.add_argument(
        "--min_crop_size",
        type=positive_int,
        default=64,
        help="levels with smaller crops use the encoder's feature map instead",
    )
    model.add_argument(
        "--svd_images", type=positive_int, default=50_000, help="number of images for fitting the SVD of the latents"
    )
    training.add_argument(
        "--sigmas",
        type=non_negative_float,
        nargs="+",
        default=[0.5],
        help="training noise on the latents above: one value for all levels, or one for each level of --hierarchy",
    )
    training.add_argument(
        "--condition_dropout", type=fraction, default=0.1, help="dropout of the latents above, for guidance"
    )
    training.add_argument(
        "--prediction_type",
        choices=["epsilon", "v_prediction", "sample"],
        default="epsilon",
        help="what is predicted: noise, velocity, or the image, which small networks with large patches learn fastest",
    )
    parser.set_defaults(
        max_train_steps=500_000,
        learning_rate=2e-4,
        warmup_steps=5000,
        weight_decay=0.03,
        adam_beta1=0.99,
        adam_beta2=0.99,
    )
    options, run_options = flags.parse_diffusion_arguments(parser, NestedUViT2DModel, SIZES, arguments)
    for name in DERIVED_FIELDS:
        if name in options.fields:
            parser.error(f"--set {name}: it follows from --hierarchy, --sigmas, --level and --encoder")
    options.num_levels = len(options.hierarchy) + 1
    options.sigmas = options.sigmas * len(options.hierarchy) if len(options.sigmas) == 1 else options.sigmas
    if len(options.sigmas) != len(options.hierarchy):
        parser.error(f"--sigmas must be one number or {len(options.hierarchy)}, got {len(options.sigmas)}")
    if options.level is not None and options.level > options.num_levels:
        parser.error(f"--level must be at most {options.num_levels}, the levels of --hierarchy and the first")
    if options.encoder is None:
        parser.error("--encoder must name the encoder whose latents the levels above the first are")
    if options.guidance_scale != 1 and options.condition_dropout == 0:
        parser.error("--guidance_scale needs --condition_dropout above 0, or give --guidance_scale 1")
    if options.on_bad_image == "skip":
        parser.error("--on_bad_image skip: the images of level 1 and the latents above must stay in step")
    return options, run_options


def latent_arguments(options) -> dict:
    """Keyword arguments for `load_nested_data`."""
    path = Path(__file__).parents[1] / options.encoder  # so that recipes can name the encoders in `model_cards`
    return {
        "encoder": str(path) if not Path(options.encoder).exists() and path.exists() else options.encoder,
        "hierarchy": options.hierarchy,
        "patch_size": options.fields.get("patch_size", 2),
        "min_crop_size": options.min_crop_size,
        "svd_images": options.svd_images,
        "cache_dir": options.latents_dir,
    }


def network_fields(options, data, level: int) -> dict:
    """Config fields of the network of one level, besides those of its latents."""
    fields = {name: value for name, value in options.fields.items() if name not in ("patch_size", "in_channels")}
    return {
        **fields,
        "num_classes": len(data.images_and_classes.class_names),
        "condition_sigmas": options.sigmas[: data.num_levels - level],
        "latent_fingerprint": data.latent_encoder.config.fingerprint,
    }


def train_level(options, run_options, level: int, is_last: bool) -> bool:
    run = Run(level_options(run_options, level), kind="nested")
    run.print(f"level {level} of {options.num_levels}")

    # Data.
    images_and_classes = load_diffusion_data(run, **flags.diffusion_data_arguments(options))
    data = load_nested_data(run, images_and_classes, **latent_arguments(options))

    # Model. Built before images are encoded, which may take hours, so that a wrong field fails early.
    model = NestedUViT2DModel.for_level(data.levels, level, options.size, **network_fields(options, data, level))
    above = load_finished_levels(options.output_dir, range(level + 1, data.num_levels + 1))
    data.encode(run, options.latents_dir, options.horizontal_flip, int(options.memory_limit_gb * 2**30))
    images = data.images(run, level, **flags.diffusion_image_arguments(options))
    run.plan(images, options.max_train_steps)
    average, evaluated = run.average(model)
    decay_warmup = DecayWarmup([model, evaluated], run.schedule_steps, **flags.decay_warmup_arguments(options))
    betas = PIXEL_BETAS if images_and_classes.vae is None else LATENT_BETAS  # of training and sampling
    noise_schedule = DDPMScheduler(**betas, prediction_type=options.prediction_type)

    def make_pipeline(networks, latent_encoder=None):
        return NestedDiffusionPipeline(
            DPMSolverMultistepScheduler(**betas, prediction_type=options.prediction_type),
            **{f"level_{number}": network.to(run.device) for number, network in networks.items()},
            vae=images_and_classes.vae if 1 in networks else None,
            latent_encoder=latent_encoder,
            id2label=images_and_classes.id2label(),
            prediction_type=options.prediction_type,
            null_condition=trains_null_condition(options, model),
        )

    make_pipeline({level: evaluated, **above})  # levels that do not fit each other are refused before training

    # Optimizer.
    optimizer = adamw(model, options.learning_rate, (options.adam_beta1, options.adam_beta2), options.weight_decay)

    # Prepare.
    model, optimizer = run.prepare(model=model, optimizer=optimizer)

    # Resume.
    run.resume(**data.signature())
    monitor = data.monitor(run, level, above, **flags.sampling_arguments(options))

    # Loop.
    for batch in run.batches(images):
        run.set_learning_rate(optimizer, options.learning_rate * linear_warmup(run.step + 1, options.warmup_steps))
        run.record(decay_warmup.set(run.step))
        # DDPM: every sample gets a random noise level, keyed by the sample as its noise is.
        timesteps = (batch["uniform"][:, 0] * noise_schedule.config.num_train_timesteps).long()
        noisy = noise_schedule.add_noise(batch["sample"], batch["noise"], timesteps)
        target = batch["noise"]
        if options.prediction_type == "v_prediction":
            target = noise_schedule.get_velocity(batch["sample"], batch["noise"], timesteps)
        elif options.prediction_type == "sample":
            target = batch["sample"]
        # Noisy latents above. One draw drops both these and the class, so that the unconditional prediction, which
        # guidance starts from, is trained.
        conditions = [
            clean + sigma * noise
            for clean, noise, sigma in zip(batch["conditions"], batch["condition_noise"], options.sigmas)
        ]
        dropped = batch["uniform"][:, 1] < options.condition_dropout
        classes = images_and_classes.conditions(batch, options.class_dropout)
        with run.accumulate(model):
            predicted = model(noisy, timesteps, **classes, conditions=conditions, drop_conditions=dropped).sample
            run.backward(F.mse_loss(predicted.float(), target))
        run.update(optimizer, model, average)
        if run.due(options.eval_every):
            run.evaluate(monitor, make_pipeline({level: evaluated, **above}), "samples")

    # End.
    decay_warmup.finish(run.step)
    results = measure_level(run, evaluated, monitor, make_pipeline({level: evaluated, **above}), data, level)
    closing_words = f"level {level} is trained"
    if is_last:
        others = [number for number in range(1, data.num_levels + 1) if number != level]
        networks = {level: evaluated, **load_finished_levels(options.output_dir, others)}
        closing_words = join_levels(run, options, networks, make_pipeline, data, results)
    run.finish(results, "network", card=False)
    run.print(closing_words)
    return not run.signal.received


def trains_null_condition(options, network) -> bool:
    """Whether the network learns what guidance starts from: images of any class, without the latents above."""
    return options.condition_dropout > 0 and (options.class_dropout > 0 or not network.config.num_classes)


def join_levels(run, options, networks, make_pipeline, data, results) -> str:
    """Saves and measures the chain of all levels, unless some are missing; returns the closing words."""
    if missing := [str(number) for number in range(1, data.num_levels + 1) if number not in networks]:
        return f"no pipeline yet: train level {', '.join(missing)}, with the same --output_dir"
    monitor = data.monitor(run, 1, networks, **flags.sampling_arguments(options))
    pipeline = make_pipeline(networks, data.latent_encoder)
    return save_chain(run, options.output_dir, pipeline, monitor, data, results)


def main():
    options, run_options = parse_arguments()
    levels = [options.level] if options.level else list(range(options.num_levels, 0, -1))
    if len(levels) > 1 and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        # The end of a run disconnects its processes.
        raise UserError("With several processes, train one level after the other, the highest first: give --level.")
    for level in levels:
        is_last = level == levels[-1]
        finished = (level_options(run_options, level).output_dir / "results.json").exists()
        if options.resume_from_checkpoint == "latest" and finished and not is_last:
            print(f"level {level} is trained already")
        elif not train_level(options, run_options, level, is_last):
            break  # stopped while the level was evaluated


if __name__ == "__main__":
    script_main(main)
