"""Trains a U-ViT with decayed shortcuts to denoise images, and samples from it.

    accelerate launch training/uvit.py
    accelerate launch training/uvit.py --recipe cifar100_small --dataset_name uoft-cs/cifar100 --label_column_name fine_label
    accelerate launch training/uvit.py --resume_from_checkpoint latest

Without arguments, the script runs the recipe `tiny` on the bundled Fashion-MNIST images, on a CPU in about five
minutes, and saves a pipeline and a picture of samples. A recipe is a file in `training/recipes/uvit`; flags override
it.
"""

from diffusers import DDPMScheduler, DPMSolverMultistepScheduler
from torch.nn import functional as F

from hf_decayed.models.unet_decayed_uvit import SIZES, DecayedUViT2DModel
from hf_decayed.pipelines.pipeline_decayed_uvit import DecayedUViTPipeline
from hf_decayed.run import Run, adamw, linear_warmup, script_main
from hf_decayed.run import arguments as flags
from hf_decayed.run.decay_warmup import DecayWarmup
from hf_decayed.run.diffusion import finish_diffusion, load_diffusion_data


# A thousand noise levels, as in U-ViT: DDPM's for pixels, Stable Diffusion's for latents.
PIXEL_BETAS = {"beta_schedule": "linear", "beta_start": 1e-4, "beta_end": 0.02}
LATENT_BETAS = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}


def parse_arguments(arguments=None):
    parser = flags.ScriptParser(__file__, __doc__)
    _, training = flags.add_diffusion_arguments(parser, SIZES, "DPM-Solver++", batch_size=128, ema_decay=0.9999)
    training.add_argument(
        "--prediction_type",
        choices=["epsilon", "v_prediction", "sample"],
        default="epsilon",
        help="what is predicted: noise, velocity, or the image, which small networks with large patches learn fastest",
    )
    parser.set_defaults(
        max_train_steps=500_000, learning_rate=2e-4, warmup_steps=2500, weight_decay=0.03, adam_beta1=0.99
    )
    return flags.parse_diffusion_arguments(parser, DecayedUViT2DModel, SIZES, arguments)


def main():
    options, run_options = parse_arguments()
    run = Run(run_options, kind="uvit")

    # Data.
    data = load_diffusion_data(run, **flags.diffusion_data_arguments(options))

    # Model. Built before images are encoded, which may take hours, so that a wrong field fails early.
    model = DecayedUViT2DModel.from_size(options.size, **{**options.fields, **data.model_fields()})
    images = data.images(run, **flags.diffusion_image_arguments(options))
    run.plan(images, options.max_train_steps)
    average, evaluated = run.average(model)
    decay_warmup = DecayWarmup([model, evaluated], run.schedule_steps, **flags.decay_warmup_arguments(options))
    # The noise levels of training and sampling.
    levels = {**(PIXEL_BETAS if data.vae is None else LATENT_BETAS), "prediction_type": options.prediction_type}
    noise_schedule = DDPMScheduler(**levels)

    # Optimizer.
    optimizer = adamw(model, options.learning_rate, (options.adam_beta1, options.adam_beta2), options.weight_decay)

    # Prepare.
    model, optimizer = run.prepare(model=model, optimizer=optimizer)

    # Resume.
    run.resume(dataset=data.splits.name, fingerprint=data.splits.fingerprint())
    monitor = data.monitor(run, **flags.sampling_arguments(options))

    def make_pipeline():
        scheduler = DPMSolverMultistepScheduler(**levels)
        return DecayedUViTPipeline(
            evaluated,
            scheduler,
            data.vae,
            data.id2label(),
            prediction_type=options.prediction_type,
            null_class=options.class_dropout > 0,
        )

    # Loop.
    for batch in run.batches(images):
        run.set_learning_rate(optimizer, options.learning_rate * linear_warmup(run.step + 1, options.warmup_steps))
        run.record(decay_warmup.set(run.step))
        # DDPM: every sample gets a random noise level, keyed by the sample as its noise is.
        timesteps = (batch["uniform"][:, 0] * noise_schedule.config.num_train_timesteps).long()
        noisy = noise_schedule.add_noise(batch["pixel_values"], batch["noise"], timesteps)
        target = batch["noise"]
        if options.prediction_type == "v_prediction":
            target = noise_schedule.get_velocity(batch["pixel_values"], batch["noise"], timesteps)
        elif options.prediction_type == "sample":
            target = batch["pixel_values"]
        with run.accumulate(model):
            predicted = model(noisy, timesteps, **data.conditions(batch, options.class_dropout)).sample
            run.backward(F.mse_loss(predicted.float(), target))
        run.update(optimizer, model, average)
        if run.due(options.eval_every):
            run.evaluate(monitor, make_pipeline(), "samples")

    # End.
    decay_warmup.finish(run.step)
    finish_diffusion(run, make_pipeline(), monitor, data, images)


if __name__ == "__main__":
    script_main(main)
