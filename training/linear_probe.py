"""Trains a linear classifier on the features of a frozen encoder.

    accelerate launch training/linear_probe.py outputs/mae
    accelerate launch training/linear_probe.py path/or/repository --protocol mae_imagenet1k --dataset_path path/to/imagenet
    accelerate launch training/linear_probe.py outputs/mae --augment true --resume_from_checkpoint latest

MODEL is a folder or a repository that `AutoModel` loads, ours or anybody's; it stays as it is, in evaluation mode. The
protocols are the paper's: `mae_imagenet1k` (LARS, batch norm, random crops) and `paper_imagenet100` (AdamW, nothing
random). Without augmentation features are computed once and kept; with it every epoch has its own. Without a data set:
the bundled images, on a CPU in a minute or two.
"""

import argparse
import json
import math
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from safetensors.torch import save_file
from torch.nn import functional as F
from tqdm.auto import tqdm
from transformers import AutoImageProcessor, AutoModel

import hf_decayed  # noqa: F401, registers our classes with AutoModel
from hf_decayed.data.datasets import EpochBatchSampler, EvaluationDataset, TrainingImages, identity_collate
from hf_decayed.data.sources import split_validation, take_subset
from hf_decayed.data.transforms import Augmentation
from hf_decayed.errors import DataError, explain_loading_errors, format_error
from hf_decayed.evaluation import PROTOCOLS
from hf_decayed.evaluation.features import extract_features, transformer_encoder
from hf_decayed.evaluation.linear_probe import probe_classifier, probe_optimizer, train_probe, warmup_cosine
from hf_decayed.provenance import model_fingerprint, sanitized_command, versions
from hf_decayed.run.arguments import add_data_arguments, boolean, load_images
from hf_decayed.run.checkpoints import save_checkpoint
from hf_decayed.run.records import MetricsFile
from hf_decayed.run.run import StopSignal, ignore_signals, prepare_output_dir, run_signature, set_cpu_threads


TRAINED = [name for name, protocol in PROTOCOLS.items() if protocol.optimizer != "ridge"]  # ridge has no steps
ENCODED_AT_ONCE = 256  # images; batches of the classifier may be far larger


def parse_arguments(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="folder or repository")
    parser.add_argument("--revision", help="of the repository; pin it where its code runs")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that comes with the model")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/linear_probe"))
    parser.add_argument("--features_dir", type=Path, default=Path("outputs/features"), help="where features are kept")
    parser.add_argument("--cpu_threads", type=int, help="per process; the machine's cores shared out when not given")
    parser.add_argument("--seed", type=int, default=0)
    data = add_data_arguments(parser)
    data.add_argument("--max_train_samples", type=int)
    data.add_argument("--max_eval_samples", type=int)
    data.add_argument("--memory_limit_gb", type=float, default=2.0, help="hold decoded images of one size up to this")
    probing = parser.add_argument_group("probing (what is not given comes from the protocol)")
    probing.add_argument("--protocol", choices=TRAINED, default="paper_imagenet100")
    probing.add_argument("--feature", help="<layer>.<pooling>; last and the model's own pooling when not given")
    probing.add_argument("--augment", type=boolean)
    probing.add_argument("--epochs", type=int)
    probing.add_argument("--batch_size", type=int)
    probing.add_argument("--learning_rate", type=float)
    running = parser.add_argument_group("while it runs, with augmentation")
    running.add_argument("--max_train_steps", type=int, help="stop there, to go on later")
    running.add_argument("--checkpointing_steps", type=int, default=500)
    running.add_argument("--checkpoints_total_limit", type=int, default=2)
    running.add_argument("--resume_from_checkpoint", metavar="latest|PATH")
    running.add_argument("--log_every", type=int, default=10)
    return parser.parse_args(arguments)


def main():
    options = parse_arguments()
    started = time.time()
    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(),
        dataloader_config=DataLoaderConfiguration(split_batches=True, even_batches=False),
    )
    set_cpu_threads(accelerator, options.cpu_threads)
    set_seed(options.seed)
    given = {name: getattr(options, name) for name in ("augment", "epochs", "batch_size", "learning_rate")}
    protocol = replace(PROTOCOLS[options.protocol], **{name: each for name, each in given.items() if each is not None})

    # Model.
    origin = {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
    with explain_loading_errors(options.model):
        model = AutoModel.from_pretrained(options.model, dtype=torch.float32, **origin).to(accelerator.device)
        processor = AutoImageProcessor.from_pretrained(options.model, **origin)
    feature = options.feature or f"last.{getattr(model.config, 'pooling', 'mean')}"
    encode = transformer_encoder(model.requires_grad_(False), [feature])
    num_channels = getattr(model.config, "num_channels", 3)
    encoder = model_fingerprint(model)

    # Data.
    train, held_out, dataset_name, image_column, label_column = load_images(options, accelerator)
    if label_column is None:
        raise DataError("A probe needs labels, and there is no label column: name one with --label_column_name.")
    if held_out is None:
        held_out, train = split_validation(train, len(train) // 10)
    train, held_out = take_subset(train, options.max_train_samples), take_subset(held_out, options.max_eval_samples)

    def kept_features(rows, split):
        identity = {"model": encoder, "features": [feature], "data": rows._fingerprint}
        identity |= {"processor": json.loads(processor.to_json_string()), "columns": [image_column, label_column]}
        images = EvaluationDataset(rows, image_column, label_column, processor, num_channels, options.on_bad_image)
        kept = extract_features(encode, images, options.features_dir, identity, accelerator, 64, description=split)
        return kept[feature].to(accelerator.device), kept["labels"].to(accelerator.device)

    test_features, test_labels = kept_features(held_out, "features of held-out images")
    num_classes = 1 + max(max(train[label_column]), int(test_labels.max()))
    if min(min(train[label_column]), int(test_labels.min())) < 0:
        raise DataError("Some labels are negative: is it the right split? Name another with --eval_split.")

    # Classifier.
    classifier = probe_classifier(test_features.shape[1], num_classes, protocol, options.seed).to(accelerator.device)
    if not protocol.augment:
        features, labels = kept_features(train, "features of training images")
        train_probe(classifier, features, labels, protocol, options.seed)
    elif not train_with_augmentation(
        classifier,
        encode,
        encoder,
        feature,
        train,
        image_column,
        label_column,
        processor,
        num_channels,
        protocol,
        options,
        accelerator,
    ):
        return  # stopped on the way

    # End.
    if accelerator.is_main_process:
        with torch.no_grad():
            top = classifier.eval()(test_features).topk(min(5, num_classes)).indices == test_labels.unsqueeze(1)
        results = {
            "linear_accuracy": top[:, 0].double().mean().item(),
            "linear_accuracy_top5": top.any(dim=1).double().mean().item(),
            "feature": feature,
            "protocol": {"name": options.protocol, **asdict(protocol)},
            "model": Path(options.model).name if Path(options.model).exists() else options.model,
            "model_fingerprint": encoder,
            "dataset": {"name": dataset_name, "number": {"train": len(train), "test": len(test_labels)}},
            "seed": options.seed,
            "seconds": round(time.time() - started, 1),
            "command": " ".join(["accelerate launch", "training/linear_probe.py", *sanitized_command()]),
            "versions": versions(),
        }
        options.output_dir.mkdir(parents=True, exist_ok=True)
        save_file(classifier.state_dict(), options.output_dir / "classifier.safetensors")
        (options.output_dir / "results.json").write_text(json.dumps(results, indent=2) + "\n")
        print(
            f"linear_accuracy {100 * results['linear_accuracy']:.1f} % (first five {100 * results['linear_accuracy_top5']:.1f} %), "
            f"{feature}, {options.protocol}, {results['seconds']:.0f} s"
        )
        print(f"classifier.safetensors, results.json: {options.output_dir}")


def train_with_augmentation(
    classifier,
    encode,
    encoder,
    feature,
    train,
    image_column,
    label_column,
    processor,
    num_channels,
    protocol,
    options,
    accelerator,
) -> bool:
    """Steps of the classifier on features of freshly cropped images; whether it came to the end."""
    size = processor.to_dict().get("crop_size") or processor.size
    height = size.get("height") or size.get("shortest_edge")
    augmentation = Augmentation(
        (height, size.get("width") or height),
        num_channels,
        0,  # no patches are masked
        mean=list(processor.image_mean),
        std=list(processor.image_std),
        seed=options.seed,
    )
    images = TrainingImages(
        train,
        image_column,
        augmentation,
        memory_limit=int(options.memory_limit_gb * 2**30),
        on_bad_image=options.on_bad_image,
        label_column=label_column,
    )
    batch_size = min(protocol.batch_size, len(images)) // accelerator.num_processes * accelerator.num_processes
    steps_per_epoch = max(1, len(images) // batch_size)
    total_steps = protocol.epochs * steps_per_epoch
    warmup_steps = min(protocol.warmup_epochs * steps_per_epoch, total_steps // 4)
    peak = protocol.learning_rate * (batch_size / 256 if protocol.scale_learning_rate else 1.0)
    optimizer = probe_optimizer(classifier, protocol, len(images))
    accelerator.register_for_checkpointing(classifier, optimizer)

    # Resume.
    checkpoints = options.output_dir / "checkpoints"
    identity = run_signature(
        options, model=encoder, feature=feature, protocol=asdict(protocol), steps=total_steps, number=len(images)
    )
    identity.pop("max_train_steps")  # where to stop for now
    step = prepare_output_dir(accelerator, options, identity).get("step", 0)
    log = MetricsFile(options.output_dir / "metrics.jsonl", step, accelerator.is_main_process)
    loader = torch.utils.data.DataLoader(
        images,
        batch_sampler=EpochBatchSampler(len(images), batch_size, options.seed, step, total_steps),
        collate_fn=identity_collate,
        num_workers=0 if images.memory is not None else options.num_workers,
        worker_init_fn=ignore_signals,
    )
    loader = accelerator.prepare(loader)

    # Loop.
    stop = StopSignal()
    bar = tqdm(total=total_steps, initial=step, disable=not accelerator.is_local_main_process, unit="step")
    classifier.train()
    for batch in loader:
        with torch.no_grad():
            parts = [encode(part, [])[feature] for part in batch["pixel_values"].split(ENCODED_AT_ONCE)]
        # Every process takes the same step on the whole batch: the classifier is small, and its batch norm sees all.
        features, labels = accelerator.gather((torch.cat(parts), batch["labels"]))
        for group in optimizer.param_groups:
            group["lr"] = peak * warmup_cosine(step + 1, warmup_steps, total_steps)
        loss = F.cross_entropy(classifier(features), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        bar.update()
        if not math.isfinite(loss.item()):
            raise DataError(f"The loss is not finite at step {step}: try a lower --learning_rate.")
        if step % options.log_every == 0 or step == total_steps:
            log.write({"step": step, "loss": loss.item(), "learning_rate": optimizer.param_groups[0]["lr"]})
            bar.set_postfix(loss=f"{loss.item():.4f}")
        asked = torch.tensor([float(stop.asked or step == options.max_train_steps)], device=accelerator.device)
        stopping = accelerator.reduce(asked, "sum").item() > 0
        if stopping or step % options.checkpointing_steps == 0:
            save_checkpoint(accelerator, checkpoints, step, {"identity": identity}, options.checkpoints_total_limit)
        if stopping and step < total_steps:
            bar.close()
            accelerator.print(f"stopped at step {step}; go on with --resume_from_checkpoint latest")
            return False
    bar.close()
    return True


if __name__ == "__main__":
    try:
        main()
    except (DataError, ValueError, OSError) as error:
        print(f"linear_probe.py: {format_error(error)}", file=sys.stderr)
        sys.exit(2)
