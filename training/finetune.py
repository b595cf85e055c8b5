"""Fine-tunes a whole encoder for image classification, following He et al.'s recipe for masked autoencoders.

    accelerate launch training/finetune.py outputs/mae
    accelerate launch training/finetune.py path/or/repository --recipe imagenet1k_vit_base --dataset_path path/to/imagenet
    accelerate launch training/finetune.py outputs/mae --resume_from_checkpoint latest

MODEL is the folder or repository of a pretrained model, ours or a ViTMAE of transformers. Without a data set, the
script uses the bundled images, on a CPU in a minute or two. A recipe is a file in `training/recipes/finetune`; flags
override it. The decay of the shortcuts and the image processor are those of pretraining.
"""

import numpy as np
import torch
from torch.nn import functional as F
from transformers import AutoImageProcessor

from hf_decayed import DecayedViTMAEForImageClassification
from hf_decayed.command_line import fraction, non_negative_float, positive_int
from hf_decayed.data.arguments import add_data_arguments, data_arguments
from hf_decayed.data.augmentation import mixup_cutmix, random_erasing
from hf_decayed.data.datasets import TrainingImages
from hf_decayed.data.sources import load_image_splits
from hf_decayed.data.transforms import Augmentation
from hf_decayed.errors import explain_loading_errors
from hf_decayed.models.image_processing_decayed import default_image_processor
from hf_decayed.provenance import model_fingerprint
from hf_decayed.run import Run, format_loss, script_main, warmup_cosine
from hf_decayed.run.arguments import (
    ScriptParser,
    add_image_arguments,
    add_run_arguments,
    add_training_arguments,
    augmentation_arguments,
    decoding_arguments,
)
from hf_decayed.run.monitors import ClassificationMonitor
from hf_decayed.run.optimization import layerwise_groups


def parse_arguments(arguments=None):
    parser = ScriptParser(__file__, __doc__)
    parser.add_argument("model", metavar="MODEL", help="folder or repository of a pretrained model")
    data = add_data_arguments(parser)
    add_image_arguments(data, crop_scale=(0.08, 1.0))

    augmentation = parser.add_argument_group("augmentation")
    augmentation.add_argument(
        "--rand_augment", type=non_negative_float, default=9.0, help="magnitude of RandAugment; 0: none"
    )
    augmentation.add_argument("--mixup", type=non_negative_float, default=0.8)
    augmentation.add_argument("--cutmix", type=non_negative_float, default=1.0)
    augmentation.add_argument("--label_smoothing", type=fraction, default=0.1)
    augmentation.add_argument("--random_erasing", type=fraction, default=0.25, help="probability for each image")

    training = add_training_arguments(parser, batch_size=1024)
    training.add_argument("--num_train_epochs", type=non_negative_float, default=100)
    training.add_argument("--max_train_steps", type=positive_int, help="instead of epochs")
    training.add_argument("--base_learning_rate", type=non_negative_float, default=5e-4, help="per 256 images")
    training.add_argument(
        "--layer_decay", type=fraction, default=0.65, help="learning-rate factor per layer below the head"
    )
    training.add_argument("--warmup_epochs", type=non_negative_float, default=5)
    training.add_argument(
        "--drop_path", type=fraction, default=0.1, help="rate in the last layer; it rises from 0 with depth"
    )
    parser.set_defaults(weight_decay=0.05)

    running = add_run_arguments(parser, "evaluations")
    running.add_argument("--max_eval_samples", type=positive_int)
    options, _ = parser.parse(arguments)
    return options, parser.run_options(options)


def main():
    options, run_options = parse_arguments()
    run = Run(run_options, kind="finetune")

    # Data.
    with run.accelerator.main_process_first():
        splits = load_image_splits(**data_arguments(options))
    splits = splits.take(options.max_train_samples, options.max_eval_samples)
    class_names = splits.class_names()

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
    pretrained = model_fingerprint(model.vit)
    processor = load_processor(options.model, config)
    augmentation = Augmentation.from_processor(
        processor, config.num_channels, **augmentation_arguments(options), rand_augment_magnitude=options.rand_augment
    )
    images = TrainingImages.from_splits(splits, augmentation, progress=run.progress, **decoding_arguments(options))
    run.print(f"{splits.name}: {len(images)} images, {len(class_names)} classes")
    run.plan(images, options.max_train_steps, options.num_train_epochs)
    monitor = ClassificationMonitor(
        run.accelerator, splits, processor, config.num_channels, on_bad_image=options.on_bad_image
    )

    # Optimizer.
    peak_learning_rate = options.base_learning_rate * options.batch_size / 256
    warmup_steps = run.warmup_steps(options.warmup_epochs)
    groups = layerwise_groups(model, config.num_hidden_layers, options.layer_decay, options.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=peak_learning_rate, betas=(0.9, 0.999), fused=True)
    average, evaluated = run.average(model)

    # Prepare.
    model, optimizer = run.prepare(model=model, optimizer=optimizer)

    # Resume.
    run.resume(model=pretrained, dataset=splits.name, fingerprint=splits.fingerprint(), decoded=images.source)

    # Loop.
    for batch in run.batches(images):
        run.set_learning_rate(
            optimizer, peak_learning_rate * warmup_cosine(run.step + 1, warmup_steps, run.total_steps)
        )
        pixel_values, targets = mixup_cutmix(
            random_erasing(batch["pixel_values"], options.random_erasing, run.batch_generator),
            batch["labels"],
            len(class_names),
            run.batch_generator,
            options.mixup,
            options.cutmix,
            options.label_smoothing,
        )
        with run.accumulate(model):
            run.backward(F.cross_entropy(model(pixel_values).logits.float(), targets))
        run.update(optimizer, model, average)
        if run.due(options.eval_every):
            run.evaluate(monitor, evaluated)

    # End.
    run.save(processor, "image processor")
    run.save(evaluated)
    measured = run.evaluate(monitor, evaluated)
    dataset = {"name": splits.name, "fingerprint": images.fingerprint(), "number": len(images)}
    results = run.results({**measured, "dataset": {**dataset, "held_out": splits.held_out_rule}})
    if run.is_main_process:
        print(f"accuracy {100 * results['accuracy']:.1f} %, {format_loss(results)}, {results['seconds']:.0f} s")
    run.finish(results, "model")


def load_processor(model: str, config):
    """The pretrained model's processor, so images are cropped or squeezed as in pretraining; else the default."""
    try:
        return AutoImageProcessor.from_pretrained(model)
    except OSError:
        return default_image_processor(config.image_size, config.num_channels)


class DropPath(torch.nn.Module):
    """Stochastic depth: drops a branch for some images of a batch; replaces a layer's dropout."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, branch: torch.Tensor) -> torch.Tensor:
        if not self.training or self.rate == 0:
            return branch
        mask = torch.rand(len(branch), 1, 1, device=branch.device) >= self.rate
        return branch * mask / (1 - self.rate)


if __name__ == "__main__":
    script_main(main)
