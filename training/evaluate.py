"""Judges the features of a model: kNN accuracy, linear probe, effective rank.

    python training/evaluate.py outputs/mae
    python training/evaluate.py outputs/mae --features all_layers --metrics knn,rank
    accelerate launch training/evaluate.py facebook/dinov2-base --dataset_name uoft-cs/cifar100 \\
        --label_column_name fine_label --features last.cls,last.mean --probe_protocol mae_imagenet1k

MODEL is a folder or a repository that `AutoModel` loads, ours or anybody's. Without a data set: the bundled images, on a
CPU in a minute or two. Prints a table and writes it as JSON, with all that the numbers depend on. Features are kept, so
that a second look, or one after an interruption, costs little.
"""

import argparse
import hashlib
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.nn import functional as F
from transformers import AutoImageProcessor, AutoModel

import hf_decayed  # noqa: F401, registers our classes with AutoModel
from hf_decayed.data import DataError, hold_out, some
from hf_decayed.evaluation import PROTOCOLS, effective_rank, knn_accuracy, linear_probe
from hf_decayed.evaluation.features import ImagesInOrder, extract_features, fingerprint, transformer_encoder
from hf_decayed.runs import (
    add_data_arguments,
    boolean,
    flags_without_paths,
    load_images,
    one_sentence,
    share_cores,
    versions,
)


METRICS = ("knn", "linear", "rank")
PIXELS_SIDE = 32  # raw pixels are compared at this size, larger images averaged down to it


def parse_arguments(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="folder or repository")
    parser.add_argument("--revision", help="of the repository; pin it where its code runs")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that comes with the model")
    parser.add_argument("--output", type=Path, help="JSON file; outputs/evaluate/<model>.json when not given")
    parser.add_argument("--features_dir", type=Path, default=Path("outputs/features"), help="where features are kept")
    parser.add_argument("--cpu_threads", type=int, help="per process; the machine's cores shared out when not given")
    add_data_arguments(parser)
    parser.add_argument("--max_train_samples", type=int)
    parser.add_argument("--max_eval_samples", type=int)
    judged = parser.add_argument_group("what is judged, and how")
    judged.add_argument("--metrics", default=",".join(METRICS), help="comma-separated")
    judged.add_argument(
        "--features",
        help="comma-separated <layer>.<pooling>, such as last.mean,6.cls; `all_layers` is the model's own pooling at "
        "every depth; when not given, the model's own pooling and the class token",
    )
    judged.add_argument("--pixels", type=boolean, default=True, help="judge raw pixels too")
    judged.add_argument("--k", type=int, default=20)
    judged.add_argument("--temperature", type=float, default=0.07, help="0 gives every neighbour one vote")
    judged.add_argument("--probe_protocol", choices=list(PROTOCOLS), default="ridge")
    judged.add_argument("--seed", type=int, default=0)
    judged.add_argument("--batch_size", type=int, default=64)
    judged.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], default="float32", help="of the weights"
    )
    options = parser.parse_args(arguments)
    options.metrics = options.metrics.split(",")
    unknown = set(options.metrics) - set(METRICS)
    if unknown:
        parser.error(f"--metrics knows {', '.join(METRICS)}, got {', '.join(sorted(unknown))}")
    return options


def main(arguments=None):
    options = parse_arguments(arguments)
    started = time.time()
    accelerator = Accelerator(cpu=not torch.accelerator.is_available())
    share_cores(accelerator, options.cpu_threads)

    # Model.
    origin = {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
    model = AutoModel.from_pretrained(options.model, dtype=getattr(torch, options.dtype), **origin)
    processor = AutoImageProcessor.from_pretrained(options.model, **origin)
    own_pooling = getattr(model.config, "pooling", "mean")
    if options.features is None:
        class_token = any("cls_token" in name or "class_embedding" in name for name, _ in model.named_parameters())
        names = list(dict.fromkeys([f"last.{own_pooling}", *(["last.cls"] if class_token else [])]))
    elif options.features == "all_layers":
        names = [f"{layer}.{own_pooling}" for layer in range(model.config.num_hidden_layers + 1)]
    else:
        names = options.features.split(",")
    encode = with_pixels(transformer_encoder(model.to(accelerator.device), names), options.pixels)

    # Data.
    train, held_out, dataset_name, image_column, label_column = load_images(options, accelerator)
    if label_column is None and set(options.metrics) != {"rank"}:
        raise DataError("kNN and probes need labels, and there is no label column: use --metrics rank, or name one.")
    if held_out is None:
        held_out, train = hold_out(train, len(train) // 10)
    splits = {"train": some(train, options.max_train_samples), "test": some(held_out, options.max_eval_samples)}

    # Features.
    identity = {
        "model": fingerprint(model),
        "features": names,
        "pixels": options.pixels,
        "processor": json.loads(processor.to_json_string()),
        "dtype": options.dtype,
    }
    features = {}
    for split, rows in splits.items():
        images = ImagesInOrder(
            rows, image_column, label_column, processor, getattr(model.config, "num_channels", 3), options.on_bad_image
        )
        features[split] = extract_features(
            encode,
            images,
            options.features_dir,
            {**identity, "split": split, "data": rows._fingerprint, "columns": [image_column, label_column]},
            accelerator,
            options.batch_size,
            num_workers=options.num_workers if accelerator.device.type != "cpu" else 0,
            description=f"features of {split}",
        )
    if not accelerator.is_main_process:
        return

    # Numbers.
    rows = {}
    for name in (["pixels"] if options.pixels else []) + names:
        rows[name] = judge(*(features[split][each] for split in splits for each in (name, "labels")), options)
    protocol = {
        "features": "whole images, as the model's processor prepares them",
        "knn": {"k": options.k, "similarity": "cosine", "temperature": options.temperature or None},
        "linear": {"name": options.probe_protocol, **asdict(PROTOCOLS[options.probe_protocol]), "augment": False},
        "rank": "entropy of the normalised eigenvalues of the centred covariance of held-out features",
        "seed": options.seed,
        "dtype": options.dtype,
        "precision": accelerator.mixed_precision,
    }
    results = {
        "model": Path(options.model).name if Path(options.model).exists() else options.model,
        "model_fingerprint": identity["model"],
        "rows": rows,
        "protocol": protocol,
        "protocol_hash": hash_of(protocol),
        "dataset": {
            "name": dataset_name,
            "number": {split: len(features[split]["labels"]) for split in splits},
            "fingerprint": {split: hash_of(features[split]["checksums"].tolist()) for split in splits},
        },
        "seconds": round(time.time() - started, 1),
        "command": " ".join(["python", "training/evaluate.py", *flags_without_paths()]),
        "versions": versions(),
    }
    output = options.output or Path("outputs/evaluate") / f"{Path(options.model).name}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(results, indent=2) + "\n")
    print(table(rows))
    print(f"{output}: protocol {results['protocol_hash']}, {results['seconds']:.0f} s")


def with_pixels(encode, pixels: bool):
    """An encoder that gives the raw pixels too, as a baseline that knows nothing."""
    if not pixels:
        return encode

    def encode_both(pixel_values, places):
        side = min(PIXELS_SIDE, *pixel_values.shape[2:])
        return {"pixels": F.adaptive_avg_pool2d(pixel_values, side).flatten(1), **encode(pixel_values, places)}

    return encode_both


def judge(train, train_labels, test, test_labels, options) -> dict[str, float]:
    results = {}
    labelled = train, train_labels, test, test_labels
    if "knn" in options.metrics:
        results["knn_accuracy"] = knn_accuracy(*labelled, k=options.k, temperature=options.temperature or None)
    if "linear" in options.metrics:
        results["linear_accuracy"] = linear_probe(*labelled, protocol=options.probe_protocol, seed=options.seed)
    if "rank" in options.metrics:
        results["effective_rank"] = effective_rank(test)
        results["effective_rank_exponential"] = effective_rank(test, "exponential")
    return results


def hash_of(value) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def table(rows: dict[str, dict[str, float]]) -> str:
    columns = list(next(iter(rows.values())))
    lines = ["| features | " + " | ".join(columns) + " |", "|---" * (1 + len(columns)) + "|"]
    for name, row in rows.items():
        cells = [f"{100 * row[each]:.1f} %" if each.endswith("accuracy") else f"{row[each]:.2f}" for each in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        main()
    except (DataError, ValueError, OSError) as error:
        print(f"evaluate.py: {one_sentence(error)}", file=sys.stderr)
        sys.exit(2)
