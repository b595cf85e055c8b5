"""Trains a SiT with decayed shortcuts to predict the velocity of a flow from noise to images, and samples from it.

    accelerate launch training/sit.py
    accelerate launch training/sit.py --size S --patch_size 2 --shortcut_decay 1.0 --set encoder_decoder_skips=false
    accelerate launch training/sit.py --resume_from_checkpoint latest

Without arguments, the script runs the recipe `tiny` on the bundled Fashion-MNIST images, on a CPU in about five
minutes, and saves a pipeline and a picture of samples. A recipe is a file in `training/recipes/sit`; flags override
it.
"""

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch.nn import functional as F

from hf_decayed.command_line import positive_int
from hf_decayed.models.transformer_decayed_sit import SIZES, DecayedSiTTransformer2DModel
from hf_decayed.pipelines.pipeline_decayed_sit import DecayedSiTPipeline
from hf_decayed.run import Run, adamw, linear_warmup, script_main
from hf_decayed.run import arguments as flags
from hf_decayed.run.decay_warmup import DecayWarmup
from hf_decayed.run.diffusion import finish_diffusion, load_diffusion_data


def parse_arguments(arguments=None):
    parser = flags.ScriptParser(__file__, __doc__)
    model, _ = flags.add_diffusion_arguments(parser, SIZES, "Euler's method", batch_size=256, ema_decay=0.9999)
    model.add_argument("--patch_size", type=positive_int, default=2)
    parser.set_defaults(max_train_steps=400_000, learning_rate=1e-4, warmup_steps=0, weight_decay=0.0, adam_beta1=0.9)
    return flags.parse_diffusion_arguments(parser, DecayedSiTTransformer2DModel, SIZES, arguments)


def main():
    options, run_options = parse_arguments()
    run = Run(run_options, kind="sit")

    # Data.
    data = load_diffusion_data(run, **flags.diffusion_data_arguments(options))

    # Model. Built before images are encoded, which may take hours, so that a wrong field fails early.
    size = f"{options.size}/{options.patch_size}"
    model = DecayedSiTTransformer2DModel.from_size(size, **{**options.fields, **data.model_fields()})
    images = data.images(run, **flags.diffusion_image_arguments(options))
    run.plan(images, options.max_train_steps)
    average, evaluated = run.average(model)
    decay_warmup = DecayWarmup([model, evaluated], run.schedule_steps, **flags.decay_warmup_arguments(options))

    # Optimizer.
    optimizer = adamw(model, options.learning_rate, (options.adam_beta1, options.adam_beta2), options.weight_decay)

    # Prepare.
    model, optimizer = run.prepare(model=model, optimizer=optimizer)

    # Resume.
    run.resume(dataset=data.splits.name, fingerprint=data.splits.fingerprint())
    monitor = data.monitor(run, **flags.sampling_arguments(options))

    def make_pipeline():
        scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
        null_class = options.class_dropout > 0
        return DecayedSiTPipeline(evaluated, scheduler, data.vae, id2label=data.id2label(), null_class=null_class)

    # Loop.
    for batch in run.batches(images):
        run.set_learning_rate(optimizer, options.learning_rate * linear_warmup(run.step + 1, options.warmup_steps))
        run.record(decay_warmup.set(run.step))
        # A straight line from noise at time 0 to data at time 1; its velocity is constant.
        times = batch["uniform"][:, 0].float()
        noisy = torch.lerp(batch["noise"], batch["pixel_values"], times.view(-1, 1, 1, 1))
        velocity = batch["pixel_values"] - batch["noise"]
        with run.accumulate(model):
            predicted = model(noisy, times, **data.conditions(batch, options.class_dropout)).sample
            run.backward(F.mse_loss(predicted.float(), velocity))
        run.update(optimizer, model, average)
        if run.due(options.eval_every):
            run.evaluate(monitor, make_pipeline(), "samples")

    # End.
    decay_warmup.finish(run.step)
    finish_diffusion(run, make_pipeline(), monitor, data, images)


if __name__ == "__main__":
    script_main(main)
