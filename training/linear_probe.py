"""Trains a linear classifier on the features of a frozen encoder.

    accelerate launch training/linear_probe.py outputs/mae
    accelerate launch training/linear_probe.py path/or/repository --protocol mae_imagenet1k --dataset_path path/to/imagenet
    accelerate launch training/linear_probe.py outputs/mae --augment true --resume_from_checkpoint latest

MODEL is a folder or a repository that `AutoModel` loads, ours or anybody's; it is frozen and in evaluation mode. The
protocols are the paper's: `mae_imagenet1k` (LARS, batch norm, random crops) and `paper_imagenet100` (AdamW, no
augmentation). Without augmentation, features are computed once and cached; with it, every epoch computes them anew.
Without a data set, the script uses the bundled images, on a CPU in a minute or two.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn import functional as F
from transformers import AutoImageProcessor, AutoModel

import hf_decayed  # noqa: F401, registers our classes with AutoModel
from hf_decayed.command_line import boolean, fraction, non_negative_float, positive_float, positive_int
from hf_decayed.data.arguments import MAY_CHANGE, add_data_arguments, data_arguments
from hf_decayed.data.datasets import EvaluationDataset, TrainingImages
from hf_decayed.data.sources import load_image_splits
from hf_decayed.data.transforms import Augmentation
from hf_decayed.errors import DataError, explain_loading_errors
from hf_decayed.evaluation import PROTOCOLS
from hf_decayed.evaluation.features import extract_features, transformer_encoder
from hf_decayed.evaluation.linear_probe import probe_classifier, probe_optimizer, train_probe
from hf_decayed.provenance import model_fingerprint
from hf_decayed.run import Run, script_main, warmup_cosine
from hf_decayed.run.arguments import ScriptParser, add_run_arguments, decoding_arguments


TRAINED = [name for name, protocol in PROTOCOLS.items() if protocol.optimizer != "ridge"]  # ridge has no steps
ENCODER_BATCH = 256  # images; batches of the classifier may be far larger


def parse_arguments(arguments=None):
    parser = ScriptParser(__file__, __doc__)
    parser.add_argument("model", metavar="MODEL", help="folder or repository")
    parser.add_argument("--revision", help="revision of the repository; pin it if its code runs")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that comes with the model")
    data = add_data_arguments(parser)
    data.add_argument("--max_train_samples", type=positive_int)
    probing = parser.add_argument_group("probing (by default as the protocol has it)")
    probing.add_argument("--protocol", choices=TRAINED, default="paper_imagenet100")
    probing.add_argument("--feature", help="<layer>.<pooling>; by default the last layer and the model's own pooling")
    probing.add_argument("--augment", type=boolean)
    probing.add_argument("--epochs", type=positive_int)
    probing.add_argument("--batch_size", type=positive_int)
    probing.add_argument("--learning_rate", type=non_negative_float)
    probing.add_argument("--max_grad_norm", type=positive_float, help="clip gradients to this norm")
    probing.add_argument(
        "--ema_decay", type=fraction, help="decay of an EMA of the classifier, which is then evaluated"
    )
    probing.add_argument("--mixed_precision", choices=["no", "bf16", "fp16"])
    probing.add_argument("--cpu_threads", type=positive_int)
    add_run_arguments(parser, None)
    stopping = parser.add_argument_group(f"cache and stop ({MAY_CHANGE})")
    stopping.add_argument("--features_dir", type=Path, default=Path("outputs/features"), help="cache of features")
    stopping.add_argument("--max_eval_samples", type=positive_int)
    stopping.add_argument("--max_train_steps", type=positive_int, help="stop after this many steps, to resume later")
    options, _ = parser.parse(arguments)
    changes = {name: getattr(options, name) for name in ("augment", "epochs", "batch_size", "learning_rate")}
    protocol = replace(
        PROTOCOLS[options.protocol], **{name: value for name, value in changes.items() if value is not None}
    )
    if not protocol.augment:
        for name in sorted({"ema_decay", "max_grad_norm", "max_train_steps"} & parser.named):
            parser.error(f"--{name} is for training with --augment true; features that are computed once need none")
    run_options = parser.run_options(options)
    run_options.batch_size = 0  # follows from the number of images
    return options, run_options, protocol


def main():
    options, run_options, protocol = parse_arguments()
    run = Run(run_options, kind="linear_probe")

    # Data.
    with run.accelerator.main_process_first():
        splits = load_image_splits(**data_arguments(options))
    splits = splits.take(options.max_train_samples, options.max_eval_samples)
    if splits.label_column is None:
        raise DataError("A probe needs labels, and there is no label column: name one with --label_column_name.")
    num_classes = 1 + max(max(rows[splits.label_column]) for rows in (splits.train, splits.held_out))
    if min(min(rows[splits.label_column]) for rows in (splits.train, splits.held_out)) < 0:
        raise DataError("Some labels are negative: is it the right split? Name another with --eval_split.")

    # Model.
    origin = {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
    with explain_loading_errors(options.model):
        encoder = AutoModel.from_pretrained(options.model, dtype=torch.float32, **origin).to(run.device)
        processor = AutoImageProcessor.from_pretrained(options.model, **origin)
    fingerprint = model_fingerprint(encoder)
    feature = options.feature or f"last.{getattr(encoder.config, 'pooling', 'mean')}"
    encode = transformer_encoder(encoder.requires_grad_(False), [feature])
    num_channels = getattr(encoder.config, "num_channels", 3)

    def cached_features(rows, description):
        columns = [splits.image_column, splits.label_column]
        identity = {"model": fingerprint, "features": [feature], "data": rows._fingerprint, "columns": columns}
        identity["processor"] = json.loads(processor.to_json_string())
        images = EvaluationDataset(rows, *columns, processor, num_channels, options.on_bad_image)
        features = extract_features(
            encode, images, options.features_dir, identity, run.accelerator, 64, description=description
        )
        return features[feature].to(run.device), features["labels"].to(run.device)

    test_features, test_labels = cached_features(splits.held_out, "held-out features")
    classifier = probe_classifier(test_features.shape[1], num_classes, protocol, options.seed).to(run.device)

    if protocol.augment:
        augmentation = Augmentation.from_processor(processor, num_channels, seed=options.seed)
        images = TrainingImages.from_splits(splits, augmentation, progress=run.progress, **decoding_arguments(options))
        classifier = train(options, run, protocol, classifier, encode, feature, fingerprint, images)
    else:
        run.resume(model=fingerprint, feature=feature, protocol=asdict(protocol))
        features, labels = cached_features(splits.train, "training features")
        train_probe(classifier, features, labels, protocol, options.seed)

    # End.
    with torch.no_grad():
        hits = classifier.eval()(test_features).topk(min(5, num_classes)).indices == test_labels.unsqueeze(1)
    if run.is_main_process:
        with run.writing("classifier.safetensors"):
            save_file(classifier.state_dict(), options.output_dir / "classifier.safetensors")
    number = {"train": len(splits.train), "test": len(test_labels)}
    results = run.results(
        {
            "linear_accuracy": hits[:, 0].double().mean().item(),
            "linear_accuracy_top5": hits.any(dim=1).double().mean().item(),
            "feature": feature,
            "protocol": {"name": options.protocol, **asdict(protocol)},
            "model": Path(options.model).name if Path(options.model).exists() else options.model,
            "model_fingerprint": fingerprint,
            "dataset": {"name": splits.name, "number": number, "held_out": splits.held_out_rule},
        }
    )
    run.print(
        f"linear_accuracy {100 * results['linear_accuracy']:.1f} % (top 5 {100 * results['linear_accuracy_top5']:.1f} %), "
        f"{feature}, {options.protocol}, {results['seconds']:.0f} s"
    )
    run.finish(results, "classifier.safetensors", card=False)


def train(options, run, protocol, classifier, encode, feature: str, fingerprint: str, images) -> torch.nn.Module:
    """Trains the classifier on features of randomly cropped images; returns the one to evaluate."""
    batch_size = min(protocol.batch_size, len(images)) // run.num_processes * run.num_processes
    run.options.batch_size = batch_size
    run.plan(images, None, protocol.epochs)

    # Optimizer.
    warmup_steps = run.warmup_steps(protocol.warmup_epochs)
    peak_learning_rate = protocol.learning_rate * (batch_size / 256 if protocol.scale_learning_rate else 1.0)
    optimizer = probe_optimizer(classifier, protocol, len(images))
    average, evaluated = run.average(classifier, use_buffers=True)

    # Prepare. Every process steps on the whole batch: the classifier is small, and its batch norm sees all images.
    run.track(model=classifier)
    (optimizer,) = run.prepare(optimizer=optimizer)  # fp16 scales its gradients

    # Resume.
    run.resume(model=fingerprint, feature=feature, protocol=asdict(protocol), fingerprint=images.fingerprint())

    # Loop.
    for batch in run.batches(images):
        run.set_learning_rate(
            optimizer, peak_learning_rate * warmup_cosine(run.step + 1, warmup_steps, run.total_steps)
        )
        with torch.no_grad(), run.accelerator.autocast():
            parts = [encode(part, [])[feature].float() for part in batch["pixel_values"].split(ENCODER_BATCH)]
        features, labels = run.accelerator.gather((torch.cat(parts), batch["labels"]))
        with run.accumulate(classifier):
            run.backward(F.cross_entropy(classifier(features), labels))
        if run.step + 1 == options.max_train_steps:
            run.request_stop("--max_train_steps")
        run.update(optimizer, classifier, average)
    return evaluated


if __name__ == "__main__":
    script_main(main)
