"""Trains a GAN whose discriminator becomes a representation: it tells batches of images apart by their structure.

    accelerate launch training/structural_gan.py
    accelerate launch training/structural_gan.py --dataset_name bundled:coloured --num_channels 3
    accelerate launch training/structural_gan.py --objective hinge
    accelerate launch training/structural_gan.py --recipe cifar10 --dataset_name uoft-cs/cifar10
    accelerate launch training/structural_gan.py --resume_from_checkpoint latest

Without arguments: the recipe `tiny` on the bundled images, on a CPU in about six minutes. It leaves a pipeline and a picture of
samples. Then it trains the ordinary GAN of the same networks (`--objective hinge`), and compares the features of both
discriminators with those of the untrained one and with pixels. `--cluster_weight 0` leaves the moments alone;
`training/structural_gan_report.py` compares objectives over seeds. A recipe is a file in `training/recipes/structural_gan`;
every flag overrides it.
"""

import copy
import dataclasses
import math
import os

import torch
from torch.nn import functional as F

from hf_decayed.command_line import (
    boolean,
    check_fields,
    constructor_fields,
    fraction,
    non_negative_float,
    parse_field,
    positive_float,
    positive_int,
)
from hf_decayed.data.arguments import add_data_arguments, data_arguments
from hf_decayed.data.datasets import AdversarialImages
from hf_decayed.data.sources import load_image_splits
from hf_decayed.data.transforms import Augmentation
from hf_decayed.errors import UserError
from hf_decayed.losses.adversarial import (
    NeighbourBank,
    check_jacobian_support,
    gather_rows,
    gaussian_divergence,
    hinge_discriminator_loss,
    hinge_generator_loss,
    jacobian_norm,
    neighbour_alignment,
    norm_hinge,
)
from hf_decayed.models.image_processing_decayed import default_image_processor
from hf_decayed.models.modeling_structural_discriminator import (
    SIZES,
    StructuralDiscriminatorConfig,
    StructuralDiscriminatorModel,
)
from hf_decayed.models.structural_generator import StructuralGenerator
from hf_decayed.pipelines.pipeline_structural_gan import StructuralGANPipeline
from hf_decayed.run import Run, adamw, script_main
from hf_decayed.run import arguments as flags
from hf_decayed.run.structural_gan import StructuralGANMonitor, format_comparison, runaway_warning


HINGE_FOLDER = "runs/hinge"  # in the output folder; `runs` is not published


def parse_arguments(arguments=None):
    parser = flags.ScriptParser(__file__, __doc__)
    data = add_data_arguments(parser)
    flags.add_image_arguments(data, crop_scale=(0.5, 1.0))
    data.add_argument("--image_size", type=positive_int, default=32, help="height and width")
    data.add_argument("--num_channels", type=positive_int, default=3, help="of the images: 1 or 3")
    data.add_argument(
        "--short_side",
        type=positive_int,
        help="evaluate on the middle of images, resized to this short side; otherwise they are squeezed to a square",
    )

    model = parser.add_argument_group("model")
    model.add_argument("--size", choices=list(SIZES), default="cifar", help="of both networks")
    model.add_argument("--shortcut_decay", type=fraction, help="of the discriminator; 1 by default")
    flags.add_field_argument(model, "any config field of the discriminator")
    model.add_argument(
        "--set_generator",
        dest="generator_fields",
        action="append",
        default=[],
        type=parse_field,
        metavar="FIELD=VALUE",
        help="any config field of the generator",
    )

    training = flags.add_training_arguments(parser, batch_size=500, ema_decay=0.99)
    training.add_argument("--num_train_epochs", type=non_negative_float, default=1000)
    training.add_argument("--max_train_steps", type=positive_int, help="instead of epochs")
    training.add_argument("--learning_rate", type=non_negative_float, default=2e-4, help="constant, of both networks")
    training.add_argument("--adam_beta1", type=fraction, default=0.5)
    training.add_argument("--adam_beta2", type=fraction, default=0.999)
    training.add_argument("--probe_learning_rate", type=non_negative_float, default=1e-3, help="of the online probe")
    parser.set_defaults(weight_decay=0.1)

    objective = parser.add_argument_group("objective")
    objective.add_argument("--objective", choices=["structural", "hinge"], default="structural")
    objective.add_argument("--divergence", choices=["jsd", "bhattacharyya"], default="jsd", help="of the moments")
    objective.add_argument("--covariance", choices=["full", "diagonal"], default="full")
    objective.add_argument("--cluster_weight", type=non_negative_float, default=3.0, help="of nearest neighbours")
    objective.add_argument("--num_neighbours", type=positive_int, default=1)
    objective.add_argument("--bank_size", type=positive_int, default=10_240, help="real embeddings to search")
    objective.add_argument("--smoothness_weight", type=non_negative_float, default=5.0, help="of the Jacobian's norm")
    objective.add_argument(
        "--lipschitz", type=positive_float, default=1.0, help="that the Jacobian's norm should have"
    )
    objective.add_argument("--power_iterations", type=positive_int, default=1)
    objective.add_argument(
        "--smoothness_images", type=positive_int, help="real ones of a batch, and as many generated; all"
    )
    objective.add_argument("--norm_weight", type=non_negative_float, default=4.0, help="times --smoothness_weight")
    objective.add_argument("--hinge_side", choices=["below", "above"], default="below", help="norms it penalises")

    running = flags.add_run_arguments(parser, "samples and features")
    running.add_argument("--eval_train_samples", type=positive_int, default=5000, help="for kNN and probe")
    running.add_argument("--eval_test_samples", type=positive_int, default=2000)
    running.add_argument("--sample_images", type=positive_int, default=36, help="in a picture")
    running.add_argument(
        "--compare_hinge",
        type=boolean,
        default=False,
        help=f"train the hinge GAN too, in {HINGE_FOLDER} of the output folder, and compare the features of both",
    )
    options, recipe = parser.parse(arguments)
    options.fields = flags.merge_fields(options, recipe.get("fields", {}))
    options.generator_fields = dict(options.generator_fields)
    try:
        check_fields(options.generator_fields, constructor_fields(StructuralGenerator))
    except ValueError as error:
        parser.error(f"--set_generator: {error}")
    for name in {"num_channels", "sample_size", "out_channels"} & {*options.fields, *options.generator_fields}:
        parser.error(f"{name} follows from --image_size and --num_channels")
    if options.objective == "hinge":
        options.fields["projection_size"] = 1  # the embedding is a score
    options.smoothness_images = options.smoothness_images or options.batch_size
    check_sizes(parser, options)
    return options, parser.run_options(options)


def check_sizes(parser: flags.ScriptParser, options) -> None:
    if options.short_side is not None and options.short_side < options.image_size:
        parser.error(f"--short_side {options.short_side} is smaller than --image_size {options.image_size}")
    if options.gradient_accumulation_steps > 1:
        parser.error(
            "--gradient_accumulation_steps must be 1: moments and neighbours are of a whole batch, and those of its parts "
            "add up to something else; use more processes"
        )
    if options.bank_size % options.batch_size != 0:
        parser.error(
            f"--bank_size {options.bank_size} is not divisible by --batch_size {options.batch_size}: use "
            f"{max(1, options.bank_size // options.batch_size) * options.batch_size}"
        )
    if options.batch_size % options.smoothness_images != 0:
        parser.error(
            f"--batch_size {options.batch_size} is not divisible by --smoothness_images {options.smoothness_images}: use "
            f"{math.gcd(options.batch_size, options.smoothness_images)}"
        )


def build_networks(options) -> tuple[StructuralDiscriminatorModel, StructuralGenerator]:
    config = StructuralDiscriminatorConfig.from_size(options.size, num_channels=options.num_channels, **options.fields)
    discriminator = StructuralDiscriminatorModel(config)
    generator = StructuralGenerator.from_size(
        options.size,
        **{**options.generator_fields, "sample_size": options.image_size, "out_channels": options.num_channels},
    )
    structural = options.objective == "structural"
    if structural and options.covariance == "full" and options.batch_size < config.projection_size:
        raise ValueError(
            f"--batch_size {options.batch_size} is smaller than the embedding, {config.projection_size}, whose full "
            "covariance it cannot give: use a larger batch, --set projection_size=N, or --covariance diagonal."
        )
    check_jacobian_support(discriminator)
    return discriminator, generator


def main(options, run_options) -> dict:
    """Trains one GAN, and returns its results."""
    run = Run(run_options, kind="structural_gan")
    if options.smoothness_images % run.num_processes != 0:
        raise UserError(
            f"--smoothness_images {options.smoothness_images} is not divisible by {run.num_processes} processes."
        )

    # Data.
    with run.accelerator.main_process_first():
        splits = load_image_splits(**data_arguments(options))
    splits = splits.take(options.max_train_samples)
    class_names = splits.class_names() if splits.label_column else []

    # Model.
    discriminator, generator = build_networks(options)
    config, latent_dim = discriminator.config, generator.config.latent_dim
    processor = default_image_processor(options.image_size, options.num_channels, options.short_side is not None)
    if options.short_side is not None:
        processor.size = {"shortest_edge": options.short_side}
    processor.image_mean = processor.image_std = [0.5] * options.num_channels  # the generator's images are in [-1, 1]
    augmentation = Augmentation.from_processor(
        processor, options.num_channels, **flags.augmentation_arguments(options)
    )
    images = AdversarialImages.from_splits(
        splits,
        augmentation,
        progress=run.progress,
        latent_dim=latent_dim,
        projection_size=config.projection_size,
        **flags.decoding_arguments(options),
    )
    run.print(f"{splits.name}: {len(images)} images, {len(class_names)} classes")
    run.plan(images, options.max_train_steps, options.num_train_epochs)
    bank = NeighbourBank(options.bank_size, config.projection_size, config.hidden_sizes[-1]).to(run.device)
    # Of the running statistics too: with those of its start, the averaged generator draws noise.
    discriminator_average, evaluated = run.average(discriminator, "discriminator_average", use_buffers=True)
    generator_average, evaluated_generator = run.average(generator, "generator_average", use_buffers=True)
    probe = torch.nn.Linear(config.hidden_sizes[-1], max(1, len(class_names)))

    # Optimizer.
    betas = (options.adam_beta1, options.adam_beta2)
    discriminator_optimizer = adamw(discriminator, options.learning_rate, betas, options.weight_decay)
    generator_optimizer = adamw(generator, options.learning_rate, betas, 0.0)
    probe_optimizer = adamw(probe, options.probe_learning_rate, (0.9, 0.999), 0.0)

    # Prepare.
    plain = discriminator
    discriminator, generator, probe, discriminator_optimizer, generator_optimizer, probe_optimizer = run.prepare(
        discriminator=discriminator,
        generator=generator,
        probe=probe,
        discriminator_optimizer=discriminator_optimizer,
        generator_optimizer=generator_optimizer,
        probe_optimizer=probe_optimizer,
    )
    run.track(bank=bank)
    pipeline = StructuralGANPipeline(evaluated_generator, evaluated)
    monitor = StructuralGANMonitor(
        run.accelerator,
        splits,
        processor,
        options.num_channels,
        options.eval_train_samples,
        options.eval_test_samples,
        options.sample_images,
        options.on_bad_image,
    )
    untrained, pixels = monitor.evaluate_features(evaluated), monitor.evaluate_pixels()

    # Resume.
    run.resume(dataset=splits.name, fingerprint=splits.fingerprint())
    if run.step == 0:
        run.record(untrained)

    def embed(pixel_values):
        return plain(pixel_values).raw_embeds

    @torch.no_grad()
    def neighbour_keys(pixel_values):
        with run.accelerator.autocast():
            features = evaluated(pixel_values).pooler_output
        return gather_rows(F.normalize(features.float(), dim=1))

    # Loop.
    warned = None
    for batch in run.batches(images):
        real, latents, directions = batch["pixel_values"], batch["latents"], batch["directions"]

        # The discriminator.
        with torch.no_grad():
            generated = generator(latents[:, 0]).sample
        with run.accumulate(discriminator):
            output = discriminator(torch.cat([real, generated]))
            every = options.batch_size // options.smoothness_images  # the same images, whoever holds them
            with torch.set_grad_enabled(options.smoothness_weight > 0):  # otherwise it is measured, which costs less
                sigma = jacobian_norm(
                    embed,
                    torch.cat([real[::every], generated[::every]]),
                    directions[::every].transpose(0, 1).flatten(0, 1),
                    options.power_iterations,
                )
            smoothness = (sigma - options.lipschitz).square().mean()
            if options.objective == "structural":
                real_embeds, generated_embeds = (gather_rows(rows) for rows in output.image_embeds.chunk(2))
                real_keys = neighbour_keys(real)
                candidates = bank.candidates(real_embeds, real_keys)
                divergence = gaussian_divergence(real_embeds, generated_embeds, options.divergence, options.covariance)
                alignment = neighbour_alignment(
                    real_embeds, real_keys, *candidates, options.num_neighbours, exclude_self=True
                ) - neighbour_alignment(
                    generated_embeds, neighbour_keys(generated), *candidates, options.num_neighbours
                )
                smoothness = smoothness + options.norm_weight * norm_hinge(
                    output.raw_embeds[: len(real)], options.hinge_side
                )
                loss = -divergence - options.cluster_weight * alignment
            else:
                loss = hinge_discriminator_loss(*output.raw_embeds.chunk(2))
            run.backward(loss + options.smoothness_weight * smoothness)
        run.update(discriminator_optimizer, discriminator, discriminator_average)

        # The generator, against the discriminator as it is now.
        plain.requires_grad_(False)
        with run.accumulate(generator):
            generated = generator(latents[:, 1]).sample
            with run.accelerator.autocast():
                generated_output = plain(generated)
            if options.objective == "structural":
                with torch.no_grad(), run.accelerator.autocast():
                    real_output = plain(real)
                real_embeds = gather_rows(real_output.image_embeds.float())
                generated_embeds = gather_rows(generated_output.image_embeds.float())
                generator_loss = gaussian_divergence(
                    real_embeds, generated_embeds, options.divergence, options.covariance
                ) - options.cluster_weight * neighbour_alignment(
                    generated_embeds,
                    neighbour_keys(generated),
                    *bank.candidates(real_embeds, real_keys),
                    options.num_neighbours,
                )
                bank.update(real_embeds, real_keys)
            else:
                generator_loss = hinge_generator_loss(generated_output.raw_embeds)
            run.backward(generator_loss, "generator_loss")
        run.update(generator_optimizer, generator, generator_average, "generator_loss")
        plain.requires_grad_(True)

        # A probe on features without gradients, which shows how training goes and does not touch it.
        if class_names:
            with run.accumulate(probe):
                logits = probe(output.pooler_output[: len(real)].detach())
                run.backward(F.cross_entropy(logits, batch["labels"]), "probe_loss")
            run.update(probe_optimizer, probe, loss="probe_loss")

        if run.logging:
            norm = torch.linalg.vector_norm(output.raw_embeds[: len(real)], dim=1).mean()
            means = run.accelerator.reduce(torch.stack([sigma.mean(), norm]).detach(), "mean").tolist()
            run.record({"jacobian_norm": means[0], "embedding_norm": means[1]})
            warning = runaway_warning(*means, options.lipschitz) if options.objective == "structural" else None
            if warning and warned is None:
                warned = warning
                run.print(f"warning: {warning}")
        if run.due(options.eval_every):
            run.evaluate(monitor, pipeline, "samples")

    # End.
    run.save(pipeline, "pipeline")
    if run.is_main_process:
        with run.writing("image processor"):
            processor.save_pretrained(run.options.output_dir / "discriminator")
    measured = run.evaluate(monitor, pipeline, "samples")
    dataset = {"name": splits.name, "fingerprint": images.fingerprint(), "number": len(images)}
    results = run.results(
        {
            **measured,
            **{f"{name}_untrained": value for name, value in untrained.items()},
            **{f"{name}_pixels": value for name, value in pixels.items()},
            "jacobian_norm": run.log.recent("jacobian_norm"),
            "objective": options.objective,
            "cluster_weight": options.cluster_weight,
            "dataset": {**dataset, "held_out": splits.held_out_rule},
        }
    )
    run.finish(results, "pipeline, samples.png")
    return results


def hinge_options(options, run_options):
    """Options of the ordinary GAN with the same networks, data and steps; it is not uploaded."""
    options = copy.copy(options)
    options.objective, options.fields = "hinge", {**options.fields, "projection_size": 1}  # the embedding is a score
    run_options = dataclasses.replace(
        run_options,
        output_dir=run_options.output_dir / HINGE_FOLDER,
        signature={**run_options.signature, "objective": "hinge"},
        resume_from_checkpoint="latest" if run_options.resume_from_checkpoint else None,  # a path is the other run's
        push_to_hub=None,
    )
    return options, run_options


def train_and_compare():
    options, run_options = parse_arguments()
    num_processes, is_main_process = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0)) == 0
    compares_hinge = options.compare_hinge and options.objective == "structural"
    results = {"this run": main(options, run_options)}
    if compares_hinge and num_processes == 1:
        print("the ordinary GAN of the same networks, to compare with")
        results["hinge GAN"] = main(*hinge_options(options, run_options))
        print("docs/structural_gan.md compares the two after longer training")
    elif compares_hinge and is_main_process:
        # The end of a run disconnects its processes.
        print("several processes do not train the hinge GAN in turn: start it with --objective hinge")
    if is_main_process:
        print(format_comparison(results))


if __name__ == "__main__":
    script_main(train_and_compare)
