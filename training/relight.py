"""Trains latent intrinsics for relighting: of two images of a scene, the first is relit with the light of the second.

    accelerate launch training/relight.py
    accelerate launch training/relight.py --shadows true --highlights true
    accelerate launch training/relight.py --recipe multi_illumination --scenes_path path/to/multi_illumination_train_mip2_jpg
    accelerate launch training/relight.py --resume_from_checkpoint latest

Without arguments, the script runs the recipe `tiny` on procedural scenes of 64 pixels, on a CPU in about six minutes,
and saves a pipeline and a picture. A folder of scenes has one folder per scene, with one image per light. A recipe is
a file in `training/recipes/relight`; flags override it.
"""

import torch

from hf_decayed.command_line import (
    boolean,
    check_fields,
    constructor_fields,
    fraction,
    non_negative_float,
    non_negative_int,
    positive_fraction,
    positive_int,
)
from hf_decayed.data.relighting_folders import RelightingPairs
from hf_decayed.losses.relighting import invariance_loss, pixel_loss, spread_loss
from hf_decayed.models.latent_intrinsics import SIZES, LatentIntrinsicsModel
from hf_decayed.pipelines.pipeline_relighting import RelightingPipeline
from hf_decayed.run import Run, adamw, linear_warmup, script_main
from hf_decayed.run import arguments as flags
from hf_decayed.run.relighting import DensePrior, load_relighting_data


PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def parse_arguments(arguments=None):
    parser = flags.ScriptParser(__file__, __doc__)
    data = parser.add_argument_group("data (by default procedural scenes)")
    data.add_argument("--scenes_path", help="folder with one folder per scene and one image per light")
    data.add_argument("--image_size", type=positive_int, default=256, help="height and width of crops or scenes")
    data.add_argument("--num_scenes", type=positive_int, default=300, help="number of procedural scenes for training")
    data.add_argument(
        "--num_lights", type=positive_int, default=8, help="number of procedural lights, shared by all scenes"
    )
    data.add_argument("--shadows", type=boolean, default=False, help="render shadows in procedural scenes")
    data.add_argument("--highlights", type=boolean, default=False, help="render highlights in procedural scenes")
    data.add_argument("--crop_scale", type=positive_fraction, nargs=2, default=[0.2, 1.0], help="range of crop areas")
    data.add_argument("--horizontal_flip", type=boolean, default=True)
    data.add_argument("--pairs_per_scene", type=positive_int, default=1, help="image pairs of a scene in one epoch")

    model = parser.add_argument_group("model")
    model.add_argument("--size", choices=list(SIZES), default="base", help="`base` is the dissertation's")
    model.add_argument("--prior", metavar="FOLDER", help="frozen MAE whose dense features are an additional input")
    flags.add_field_argument(model)

    training = flags.add_training_arguments(parser, batch_size=256, ema_decay=0.999)
    training.add_argument("--max_train_steps", type=positive_int, default=115_700)
    training.add_argument("--learning_rate", type=non_negative_float, default=2e-4, help="constant after the warm-up")
    training.add_argument("--warmup_steps", type=non_negative_int, default=0)
    training.add_argument(
        "--noise_fraction", type=fraction, default=0.5, help="fraction of the steps with noise on the images"
    )
    training.add_argument(
        "--invariance_weight",
        type=non_negative_float,
        default=0.1,
        help="weight of the loss that makes the maps of two lights alike",
    )
    training.add_argument("--invariance_form", choices=["cosine", "distance"], default="cosine")
    training.add_argument(
        "--intrinsic_weight",
        type=non_negative_float,
        default=1e-4,
        help="weight of the loss on the spread of the maps",
    )
    training.add_argument(
        "--extrinsic_weight",
        type=non_negative_float,
        default=1e-4,
        help="weight of the loss on the spread of light codes",
    )
    training.add_argument(
        "--extrinsic_target", choices=["own", "max"], default="own", help="target spread of light codes"
    )
    parser.set_defaults(weight_decay=1e-2)

    running = flags.add_run_arguments(parser, "pictures and errors")
    running.add_argument("--eval_examples", type=positive_int, default=32, help="number of held-out images to relight")
    running.add_argument(
        "--num_workers",
        type=non_negative_int,
        help="processes that read folders; by default the cores that the model leaves free",
    )
    options, recipe = parser.parse(arguments)
    options.fields = {**recipe.get("fields", {}), **dict(options.fields)}
    try:
        check_fields(options.fields, constructor_fields(LatentIntrinsicsModel))
    except ValueError as error:
        parser.error(f"--set: {error}")
    for field, flag in (("sample_size", "--image_size"), ("prior_channels", "--prior")):
        if field in options.fields:
            parser.error(f"--set {field}: it is {flag}")
    if options.scenes_path is None and options.num_lights < 2:
        parser.error(f"--num_lights must be at least 2, because a pair needs two lights, got {options.num_lights}")
    if options.gradient_accumulation_steps > 1:
        parser.error(
            "--gradient_accumulation_steps must be 1: the coding rates are of a whole batch, and those of its parts add up "
            "to something else; use more processes or --gradient_checkpointing true"
        )
    return options, parser.run_options(options)


def noise_sigma(draws: torch.Tensor, step: int, noise_steps: int) -> torch.Tensor:
    """Standard deviation of the noise on each pair of images, log-normal as in the release; 0 after `noise_steps`."""
    sigma = torch.exp(1.2 * draws - 1.2) * (step < noise_steps)
    return sigma.view(-1, 1, 1, 1)


def main():
    options, run_options = parse_arguments()
    run = Run(run_options, kind="relight")

    # Data.
    data = load_relighting_data(
        run,
        options.scenes_path,
        options.image_size,
        options.num_scenes,
        options.num_lights,
        options.shadows,
        options.highlights,
    )
    images = RelightingPairs(
        data.train,
        options.image_size,
        options.seed,
        tuple(options.crop_scale) if options.crop_scale != [1.0, 1.0] else None,
        options.horizontal_flip,
        options.pairs_per_scene,
    )

    # Model.
    prior = DensePrior(options.prior, run.device) if options.prior else None
    fields = {"sample_size": options.image_size, "prior_channels": prior.channels if prior else 0}
    model = LatentIntrinsicsModel.from_size(options.size, **{**options.fields, **fields})
    model.warn_about_rounding(dtype=PRECISIONS.get(run.accelerator.mixed_precision))
    run.plan(images, options.max_train_steps)
    average, evaluated = run.average(model)
    noise_steps = round(options.noise_fraction * run.total_steps)

    # Optimizer.
    optimizer = adamw(model, options.learning_rate, (0.9, 0.999), options.weight_decay)

    # Prepare.
    model, optimizer = run.prepare(model=model, optimizer=optimizer)

    # Resume.
    run.resume(dataset=data.name, fingerprint=data.train.fingerprint())
    monitor = data.monitor(run, options.image_size, options.eval_examples, prior)

    # Loop.
    for batch in run.batches(images):
        run.set_learning_rate(optimizer, options.learning_rate * linear_warmup(run.step + 1, options.warmup_steps))
        # Both images of a pair get noise of the same strength, drawn independently.
        sigma = noise_sigma(batch["sigma_draws"], run.step, noise_steps)
        noisy = torch.cat(
            [batch["pixel_values"] + sigma * batch["noise"], batch["target_values"] + sigma * batch["target_noise"]]
        )
        # Both scenes are decoded under the second light: the first image is relit, the second reconstructed (Eq. 6.4).
        number, target = len(batch["pixel_values"]), batch["target_values"]
        second_light = torch.arange(number, 2 * number, device=run.device).repeat(2)
        with run.accumulate(model):
            output = model(noisy, light_index=second_light, prior=prior(noisy) if prior else None)
            relit, reconstructed = output.sample.float().chunk(2)
            first_maps, second_maps = zip(*(intrinsic.float().chunk(2) for intrinsic in output.intrinsics))
            loss = (
                pixel_loss(relit, target)
                + pixel_loss(reconstructed, target)
                + options.invariance_weight * invariance_loss(first_maps, second_maps, options.invariance_form)
                + options.intrinsic_weight * spread_loss(first_maps)
                + options.extrinsic_weight * spread_loss([output.light], options.extrinsic_target)
            )
            run.backward(loss)
        run.update(optimizer, model, average)
        if run.due(options.eval_every):
            run.evaluate(monitor, RelightingPipeline(evaluated), "samples")

    # End.
    pipeline = RelightingPipeline(evaluated)
    run.save(pipeline, "pipeline")
    measured = run.evaluate(monitor, pipeline, "samples")
    settings = {
        "alpha": evaluated.config.alpha,
        "bounded_modulation": evaluated.config.bounded_modulation,
        "intrinsic_weight": options.intrinsic_weight,
        "extrinsic_weight": options.extrinsic_weight,
        "prior": prior.name if prior else None,
    }
    results = run.results({**measured, **settings, "dataset": data.describe()})
    if run.is_main_process:
        print(
            f"relit RMSE {results['relit_rmse']:.3f} (unchanged image {results['copy_rmse']:.3f}, wrong reference "
            f"{results['wrong_reference_rmse']:.3f}), {results['seconds']:.0f} s"
        )
    run.finish(results, "pipeline, samples.png")


if __name__ == "__main__":
    script_main(main)
