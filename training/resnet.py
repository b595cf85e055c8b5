"""Trains a residual network with decayed shortcuts to classify images, and tracks the rank of its features.

    accelerate launch training/resnet.py
    accelerate launch training/resnet.py --shortcut_decay 1.0 --num_blocks 12
    accelerate launch training/resnet.py --recipe imagenet100 --dataset_path path/to/imagenet100
    accelerate launch training/resnet.py --resume_from_checkpoint latest

Without a data set, the script uses the bundled images, on a CPU in a minute or two. A recipe is a file in
`training/recipes/resnet`; flags override it. The paper's study over depths and decays (appendix B.2) is one command:
`training/sweep.py resnet_rank`.
"""

import torch
from torch.nn import functional as F

from hf_decayed import DecayedResNetConfig, DecayedResNetForImageClassification
from hf_decayed.command_line import fraction, non_negative_float, positive_int
from hf_decayed.data.arguments import add_data_arguments, data_arguments
from hf_decayed.data.datasets import TrainingImages
from hf_decayed.data.sources import load_image_splits
from hf_decayed.data.transforms import Augmentation
from hf_decayed.models.image_processing_decayed import default_image_processor
from hf_decayed.run import Run, format_loss, script_main, warmup_cosine
from hf_decayed.run.arguments import (
    ScriptParser,
    add_field_argument,
    add_image_arguments,
    add_run_arguments,
    add_training_arguments,
    augmentation_arguments,
    decoding_arguments,
    merge_fields,
)
from hf_decayed.run.monitors import ClassificationMonitor
from hf_decayed.run.optimization import parameter_groups


def parse_arguments(arguments=None):
    parser = ScriptParser(__file__, __doc__)
    data = add_data_arguments(parser)
    add_image_arguments(data, crop_scale=(0.08, 1.0))
    data.add_argument("--image_size", type=positive_int, default=224)

    model = parser.add_argument_group("model")
    model.add_argument("--shortcut_decay", type=fraction, help="by default the recipe's, or 0.7")
    model.add_argument(
        "--num_blocks", type=positive_int, default=8, help="8 is ResNet-18; further blocks extend its third stage"
    )
    add_field_argument(model)

    training = add_training_arguments(parser, batch_size=256)
    training.add_argument("--num_train_epochs", type=non_negative_float, default=90)
    training.add_argument("--max_train_steps", type=positive_int, help="instead of epochs")
    training.add_argument("--learning_rate", type=non_negative_float, default=0.1, help="peak; SGD with momentum 0.9")
    training.add_argument("--warmup_epochs", type=non_negative_float, default=5)
    training.add_argument("--label_smoothing", type=fraction, default=0.0)
    parser.set_defaults(weight_decay=1e-4)

    running = add_run_arguments(parser, "accuracy and rank")
    running.add_argument("--max_eval_samples", type=positive_int)
    parser.set_defaults(eval_every=500)
    options, recipe = parser.parse(arguments)
    options.fields = merge_fields(options, recipe.get("fields", {}))
    return options, parser.run_options(options)


def main():
    options, run_options = parse_arguments()
    run = Run(run_options, kind="resnet")

    # Data.
    with run.accelerator.main_process_first():
        splits = load_image_splits(**data_arguments(options))
    splits = splits.take(options.max_train_samples, options.max_eval_samples)
    class_names = splits.class_names()

    # Model.
    config = DecayedResNetConfig.from_num_blocks(options.num_blocks, **options.fields)
    config.id2label = dict(enumerate(class_names))
    config.label2id = {name: number for number, name in config.id2label.items()}
    model = DecayedResNetForImageClassification(config)
    processor = default_image_processor(options.image_size, config.num_channels)
    augmentation = Augmentation.from_processor(processor, config.num_channels, **augmentation_arguments(options))
    images = TrainingImages.from_splits(splits, augmentation, progress=run.progress, **decoding_arguments(options))
    run.print(f"{splits.name}: {len(images)} images, {len(class_names)} classes")
    run.plan(images, options.max_train_steps, options.num_train_epochs)
    monitor = ClassificationMonitor(
        run.accelerator, splits, processor, config.num_channels, on_bad_image=options.on_bad_image
    )
    untrained = monitor.evaluate(model.to(run.device))

    # Optimizer.
    warmup_steps = run.warmup_steps(options.warmup_epochs)
    groups = parameter_groups(model, options.weight_decay)
    optimizer = torch.optim.SGD(groups, lr=options.learning_rate, momentum=0.9, nesterov=True)
    average, evaluated = run.average(model, use_buffers=True)  # batch norm's statistics too

    # Prepare.
    model, optimizer = run.prepare(model=model, optimizer=optimizer)

    # Resume.
    run.resume(dataset=splits.name, fingerprint=splits.fingerprint(), decoded=images.source)
    if run.step == 0:
        run.record(untrained)

    # Loop.
    for batch in run.batches(images):
        run.set_learning_rate(
            optimizer, options.learning_rate * warmup_cosine(run.step + 1, warmup_steps, run.total_steps)
        )
        with run.accumulate(model):
            logits = model(batch["pixel_values"]).logits.float()
            run.backward(F.cross_entropy(logits, batch["labels"], label_smoothing=options.label_smoothing))
        run.update(optimizer, model, average)
        if run.due(options.eval_every):
            run.evaluate(monitor, evaluated)

    # End.
    run.save(evaluated)
    run.save(processor, "image processor")
    measured = run.evaluate(monitor, evaluated)
    dataset = {"name": splits.name, "fingerprint": images.fingerprint(), "number": len(images)}
    results = run.results(
        {
            **measured,
            "num_blocks": sum(config.depths),
            "shortcut_decay": config.shortcut_decay,
            "dataset": {**dataset, "held_out": splits.held_out_rule},
        }
    )
    if run.is_main_process:
        print(
            f"accuracy {100 * results['accuracy']:.1f} %, effective rank {results['effective_rank']:.2f}, "
            f"{format_loss(results)}, {results['seconds']:.0f} s"
        )
    run.finish(results, "model")


if __name__ == "__main__":
    script_main(main)
