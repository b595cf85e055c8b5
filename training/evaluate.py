"""Judges a model: the features of an encoder or a diffusion model, and the images that a pipeline makes.

    python training/evaluate.py outputs/mae
    python training/evaluate.py outputs/mae --features all_layers --metrics knn,rank
    accelerate launch training/evaluate.py facebook/dinov2-base --dataset_name uoft-cs/cifar100 \\
        --label_column_name fine_label --features last.cls,last.mean --probe_protocol mae_imagenet1k
    python training/evaluate.py outputs/uvit --num_samples 2000 --feature_net facebook/dinov2-base
    python training/evaluate.py outputs/uvit --metrics linear --noise_levels 0,0.05,0.1,0.2

MODEL is a folder or a repository that `AutoModel` loads, ours or anybody's: kNN accuracy, linear probe, effective rank. Or
one that `DiffusionPipeline` loads: Frechet and kernel distance, precision, recall, density and coverage of its samples, or
kNN, probe and rank of every block at every noise level, with a heat map. Or a folder or `.npz` file of samples that were
made elsewhere. Without a data set: the bundled images, on a CPU in a minute or two. Prints a table and writes it as JSON,
with all that the numbers depend on. Features and samples are kept, so that a second look, or one after an interruption,
costs little.
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
from diffusers import DiffusionPipeline
from torch.nn import functional as F
from transformers import AutoImageProcessor, AutoModel

import hf_decayed  # noqa: F401, registers our classes with AutoModel
from hf_decayed.data.datasets import EvaluationDataset
from hf_decayed.data.latents import latent_scaling, vae_scale_factor
from hf_decayed.data.sources import split_validation, take_subset
from hf_decayed.data.transforms import CenterCropProcessor
from hf_decayed.errors import DataError, explain_loading_errors, format_error
from hf_decayed.evaluation import PROTOCOLS, effective_rank, generation, knn_accuracy, linear_probe
from hf_decayed.evaluation.features import diffusion_encoder, extract_features, transformer_encoder
from hf_decayed.evaluation.sampling import load_pipeline, sample
from hf_decayed.evaluation.tables import format_metric, markdown_table, protocol_text
from hf_decayed.plots import save_heat_maps
from hf_decayed.provenance import model_fingerprint, pipeline_fingerprint, public_config, sanitized_command, versions
from hf_decayed.run.arguments import add_data_arguments, boolean, load_images
from hf_decayed.run.run import set_cpu_threads


METRICS = ("knn", "linear", "rank")
PIXELS_SIDE = 32  # raw pixels are compared at this size, larger images averaged down to it


def parse_arguments(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="folder or repository of an encoder or a pipeline; or samples")
    parser.add_argument("--revision", help="of the repository; pin it where its code runs")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that comes with the model")
    parser.add_argument("--output", type=Path, help="JSON file; one in outputs/evaluate when not given")
    parser.add_argument("--features_dir", type=Path, default=Path("outputs/features"), help="where features are kept")
    parser.add_argument("--cpu_threads", type=int, help="per process; the machine's cores shared out when not given")
    add_data_arguments(parser)
    parser.add_argument("--max_train_samples", type=int)
    parser.add_argument("--max_eval_samples", type=int)
    judged = parser.add_argument_group("what is judged, and how")
    judged.add_argument(
        "--metrics",
        help=f"comma-separated; of features {','.join(METRICS)}, of samples {','.join(generation.METRICS)}; all of "
        "features for an encoder, all of samples for a pipeline, when not given",
    )
    judged.add_argument("--seed", type=int, default=0)
    judged.add_argument("--batch_size", type=int, default=64)
    judged.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], default="float32", help="of the weights"
    )
    features = parser.add_argument_group("features")
    features.add_argument(
        "--features",
        help="of an encoder: comma-separated <layer>.<pooling>, such as last.mean,6.cls; `all_layers` is the model's own "
        "pooling at every depth; when not given, the model's own pooling and the class token",
    )
    features.add_argument(
        "--blocks", help="of a diffusion model: comma-separated names of modules; all blocks if not given"
    )
    features.add_argument(
        "--noise_levels", default="0,0.05,0.1,0.2,0.3,0.5", help="of a diffusion model: data 0, noise 1"
    )
    features.add_argument("--pixels", type=boolean, default=True, help="judge raw pixels too")
    features.add_argument("--k", type=int, default=20)
    features.add_argument("--temperature", type=float, default=0.07, help="0 gives every neighbour one vote")
    features.add_argument("--probe_protocol", choices=list(PROTOCOLS), default="ridge")
    samples = parser.add_argument_group("samples")
    samples.add_argument("--num_samples", type=int, default=1000)
    samples.add_argument(
        "--classes", default="all", help="all in turn, none, or names and numbers with commas between"
    )
    samples.add_argument("--num_inference_steps", type=int, default=50)
    samples.add_argument("--guidance_scale", type=float, default=1.0, help="as diffusers counts it: 1 is none")
    samples.add_argument("--vae", metavar="PATH", help="autoencoder for a pipeline of latents that has none")
    samples.add_argument("--samples_dir", type=Path, default=Path("outputs/samples"), help="where samples are kept")
    samples.add_argument(
        "--feature_net",
        default="pixels",
        help="whose features are compared: pixels (averaged to 8 x 8), inception (FID; needs torch-fidelity), or any "
        "folder or repository that AutoModel loads",
    )
    samples.add_argument("--feature_net_revision", help="of its repository")
    samples.add_argument("--reference", help=".npz file or folder of real images; the training images when not given")
    samples.add_argument("--bootstraps", type=int, default=20, help="for the spread of the Frechet distance")
    options = parser.parse_args(arguments)
    options.kind = kind_of(options)
    options.metrics = options.metrics.split(",") if options.metrics else None
    if options.metrics is None:
        options.metrics = list(METRICS if options.kind == "encoder" else generation.METRICS)
    known = {"encoder": METRICS, "pipeline": (*METRICS, *generation.METRICS), "samples": generation.METRICS}[
        options.kind
    ]
    unknown = set(options.metrics) - set(known)
    if unknown:
        parser.error(f"--metrics of {an(options.kind)} are {', '.join(known)}; got {', '.join(sorted(unknown))}")
    if set(options.metrics) & set(generation.METRICS):
        if set(options.metrics) & set(METRICS):
            parser.error(
                "features and samples are judged one at a time: --metrics knn,linear,rank, or frechet,kid,prdc"
            )
        if options.dtype != "float32":
            parser.error("samples are drawn and compared in float32; --dtype is for features")
        if options.bootstraps < 2 or options.num_samples < 10:
            parser.error("a distance needs at least --num_samples 10, and its spread --bootstraps 2")
    if options.output is None:
        name = Path(options.model).name.removesuffix(".npz")
        ending = "" if options.kind == "encoder" else "-blocks" if set(options.metrics) <= set(METRICS) else "-samples"
        options.output = Path("outputs/evaluate") / f"{name}{ending}.json"
    return options


def kind_of(options) -> str:
    """`encoder`, `pipeline` or `samples`, by what lies there."""
    path = Path(options.model)
    if path.suffix == ".npz" or (path / "sampling.json").exists():
        return "samples"
    if path.is_dir():
        names = {"model_index.json": "pipeline", "config.json": "encoder"}
        return next((kind for name, kind in names.items() if (path / name).exists()), "samples")
    try:
        DiffusionPipeline.load_config(options.model, revision=options.revision)
        return "pipeline"
    except OSError:  # not there, or no pipeline; if it is not there, loading an encoder will say so
        return "encoder"


def main(arguments=None):
    options = parse_arguments(arguments)
    started = time.time()
    accelerator = Accelerator(cpu=not torch.accelerator.is_available())
    set_cpu_threads(accelerator, options.cpu_threads)
    judge = {"encoder": judge_encoder, "pipeline": judge_pipeline, "samples": judge_samples}[options.kind]
    results = judge(options, accelerator)
    if not accelerator.is_main_process:
        return
    pictures = results.pop("pictures", {})
    results = {
        "model": Path(options.model).name if Path(options.model).exists() else options.model,
        **results,
        "protocol_hash": hash_of(results["protocol"]),
        "seconds": round(time.time() - started, 1),
        "command": " ".join(["python", "training/evaluate.py", *sanitized_command()]),
        "versions": versions(),
    }
    output = options.output
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(results, indent=2) + "\n")
    if pictures:
        save_heat_maps(output.with_suffix(".png"), **pictures)
    print("\n".join(tables(results)))
    print(protocol_text(results["protocol"], results["rows"]))
    print(f"{output}: protocol {results['protocol_hash']}, {results['seconds']:.0f} s")
    if pictures:
        print(f"heat map: {output.with_suffix('.png')}")


# Features of an encoder.


def judge_encoder(options, accelerator) -> dict:
    origin = {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
    with explain_loading_errors(options.model):
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
    return judge_features(
        transformer_encoder(model.to(accelerator.device), names),
        names,
        processor,
        getattr(model.config, "num_channels", 3),
        {"model": model_fingerprint(model), "features": names},
        "whole images, as the model's processor prepares them",
        options,
        accelerator,
    )


def judge_features(encode, names, processor, channels, identity, preparation, options, accelerator) -> dict:
    """kNN accuracy, probe and rank of the named features of the training and held-out images."""
    train, held_out, dataset_name, image_column, label_column = load_images(options, accelerator)
    if label_column is None and set(options.metrics) & {"knn", "linear"}:
        raise DataError("kNN and probes need labels, and there is no label column: use --metrics rank, or name one.")
    if held_out is None:
        held_out, train = split_validation(train, len(train) // 10)
    splits = {
        "train": take_subset(train, options.max_train_samples),
        "test": take_subset(held_out, options.max_eval_samples),
    }
    identity = {
        **identity,
        "pixels": options.pixels,
        "processor": json.loads(processor.to_json_string()),
        "dtype": options.dtype,
    }
    features = {}
    for split, rows in splits.items():
        images = EvaluationDataset(rows, image_column, label_column, processor, channels, options.on_bad_image)
        features[split] = extract_features(
            with_pixels(encode, options.pixels),
            images,
            options.features_dir,
            {**identity, "split": split, "data": rows._fingerprint, "columns": [image_column, label_column]},
            accelerator,
            options.batch_size,
            num_workers=options.num_workers if accelerator.device.type != "cpu" else 0,
            description=f"features of {split}",
        )
    rows = {}
    if accelerator.is_main_process:
        for name in (["pixels"] if options.pixels else []) + names:
            rows[name] = numbers_of(*(features[split][each] for split in splits for each in (name, "labels")), options)
    return {
        "model_fingerprint": identity["model"],
        "rows": rows,
        "protocol": {
            "features": preparation,
            "knn": {"k": options.k, "similarity": "cosine", "temperature": options.temperature or None},
            "linear": {"name": options.probe_protocol, **asdict(PROTOCOLS[options.probe_protocol]), "augment": False},
            "rank": "entropy of the normalised eigenvalues of the centred covariance of held-out features",
            "seed": options.seed,
            "dtype": options.dtype,
            "precision": accelerator.mixed_precision,
        },
        "dataset": {
            "name": dataset_name,
            "number": {split: len(features[split]["labels"]) for split in splits},
            "fingerprint": {split: hash_of(features[split]["checksums"].tolist()) for split in splits},
        },
    }


def with_pixels(encode, pixels: bool):
    """An encoder that gives the raw pixels too, as a baseline that knows nothing."""
    if not pixels:
        return encode

    def encode_both(pixel_values, places):
        side = min(PIXELS_SIDE, *pixel_values.shape[2:])
        return {"pixels": F.adaptive_avg_pool2d(pixel_values, side).flatten(1), **encode(pixel_values, places)}

    return encode_both


def numbers_of(train, train_labels, test, test_labels, options) -> dict[str, float]:
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


# Features and samples of a pipeline.


def judge_pipeline(options, accelerator) -> dict:
    pipeline = load_pipeline(options.model, options.revision, options.trust_remote_code, options.vae)
    pipeline.to(accelerator.device)
    if set(options.metrics) <= set(METRICS):
        return judge_blocks(pipeline, options, accelerator)
    settings = {
        "num": options.num_samples,
        "classes": options.classes,
        "num_inference_steps": options.num_inference_steps,
        "guidance_scale": options.guidance_scale,
        "seed": options.seed,
        "batch_size": options.batch_size,
    }
    network = pipeline_fingerprint(pipeline)
    scheduler = public_config(pipeline.scheduler.config)
    folder = options.samples_dir / f"{Path(options.model).name}-{hash_of([network, scheduler, settings])[:8]}"
    sample(pipeline, folder, **settings, accelerator=accelerator)
    named = f"{options.num_samples} samples, {options.num_inference_steps} steps, guidance {options.guidance_scale:g}"
    results = judge_images(generation.SampledImages(folder), named, options, accelerator)
    results["protocol"]["sampling"] = {**settings, "scheduler": scheduler}
    return {"model_fingerprint": network, **results}


def judge_blocks(pipeline, options, accelerator) -> dict:
    """Every block at every noise level: a grid, of which the best cell is the paper's number."""
    network = pipeline.unet if hasattr(pipeline, "unet") else pipeline.transformer
    if options.dtype != "float32":
        network.to(getattr(torch, options.dtype))
    vae = getattr(pipeline, "vae", None)
    if vae is None and network.config.in_channels not in (1, 3):
        raise DataError("This is a network of latents, and the pipeline has no VAE to make them of images.")
    if not getattr(pipeline.config, "null_class", True) and network.config.num_classes > 0:
        raise DataError(
            "Blocks are probed without telling the network a class, and this one was trained with a class for every image."
        )
    kinds = getattr(network, "_repeated_blocks", None) or network._no_split_modules or []
    blocks = [name for name, module in network.named_modules() if type(module).__name__ in kinds]
    blocks = options.blocks.split(",") if options.blocks else blocks
    if not blocks:
        names = ", ".join(name for name, _ in network.named_children())
        raise DataError(
            f"{type(network).__name__} does not say what its blocks are: name modules with --blocks ({names})."
        )
    levels = [float(each) for each in options.noise_levels.split(",")]
    encode = diffusion_encoder(network, pipeline.scheduler, blocks, levels, options.seed)
    channels, height, width = image_shape(network, vae)

    def encode_latents(pixel_values, places):
        if vae is not None:
            with torch.autocast(pixel_values.device.type, enabled=False):  # as latents for training are made
                latents = vae.encode(pixel_values.to(vae.dtype)).latent_dist.mode().float()
            own = latent_scaling(vae)
            scale, shift = (getattr(pipeline.config, name, None) for name in ("latent_scale", "latent_shift"))
            scale, shift = own["scale"] if scale is None else scale, own["shift"] if shift is None else shift
            pixel_values = (latents - shift) * scale
        return encode(pixel_values, places)

    names = [f"{block}@{level:g}" for block in blocks for level in levels]
    scheduler = public_config(pipeline.scheduler.config)
    flows = hasattr(network, "time_of_noise_level")
    counted = "share of the way from data (0) to noise (1)" if flows else "share of the timesteps (0 data, 1 noise)"
    results = judge_features(
        encode_latents,
        names,
        CenterCropProcessor(height, width, signed=True),
        channels,
        {"model": pipeline_fingerprint(pipeline), "scheduler": scheduler, "features": names, "seed": options.seed},
        f"<block>@<noise level>, a {counted}: the mean of a block's patches, without a class; the middle of each image",
        options,
        accelerator,
    )
    results["protocol"] |= {"scheduler": scheduler, "best": "of all cells, chosen on the held-out images"}
    if accelerator.is_main_process:
        measures = [name for name in results["rows"][names[0]] if name != "effective_rank_exponential"]
        cells = {
            name: [[results["rows"][f"{block}@{level:g}"][name] for level in levels] for block in blocks]
            for name in measures
        }
        results["grid"] = {"blocks": blocks, "noise_levels": levels, "cells": cells}
        results["best"] = {
            measure: max(names, key=lambda name: results["rows"][name][measure])
            for measure in measures
            if measure.endswith("accuracy")
        }
        results["pictures"] = {**results["grid"], "label": f"noise level: {counted}"}
    return results


def image_shape(network, vae) -> tuple[int, int, int]:
    """Channels, height and width of the images that a network was trained on."""
    size = network.config.sample_size
    height, width = (size, size) if isinstance(size, int) else size
    if vae is None:
        return network.config.in_channels, height, width
    return vae.config.in_channels, height * vae_scale_factor(vae), width * vae_scale_factor(vae)


def judge_samples(options, accelerator) -> dict:
    images = generation.SampledImages(options.model)
    return {"model_fingerprint": None, **judge_images(images, f"{len(images)} samples", options, accelerator)}


def judge_images(samples, named: str, options, accelerator) -> dict:
    """Distances between samples and the training images; and between as many held-out ones and these, for a scale."""
    encode, network = generation.image_features(options.feature_net, accelerator.device, options.feature_net_revision)
    channels, height, width = samples.shape
    middle = CenterCropProcessor(height, width)

    def features_of(images, identity, description):
        return extract_features(
            encode,
            images,
            options.features_dir,
            {"network": network, "images": identity},
            accelerator,
            options.batch_size,
            num_workers=options.num_workers if accelerator.device.type != "cpu" else 0,
            description=description,
        )

    generated = features_of(samples, samples.fingerprint, "features of samples")
    others = {}
    if options.reference:
        reference = generation.SampledImages(options.reference)
        if reference.shape != samples.shape:
            raise DataError(f"Samples are {samples.shape} (channels, height, width), the reference {reference.shape}.")
        real = features_of(reference, reference.fingerprint, "features of the reference")
        dataset_name, prepared = Path(options.reference).name, "as they lie"
    else:
        train, held_out, dataset_name, image_column, _ = load_images(options, accelerator)
        splits = {"train": take_subset(train, options.max_train_samples)}
        if held_out is not None:
            splits["held-out"] = take_subset(held_out, min(len(samples), options.max_eval_samples or len(held_out)))
        for split, rows in splits.items():
            images = EvaluationDataset(rows, image_column, None, middle, channels, options.on_bad_image)
            identity = [rows._fingerprint, image_column, channels, middle.to_json_string()]
            others[split] = features_of(images, identity, f"features of {split} images")
        real = others.pop("train")
        prepared = f"the middle of each, {height} x {width}"
    name = {"inception": None, "pixels": "pixels"}.get(options.feature_net, Path(options.feature_net).name)
    rows = {}
    if accelerator.is_main_process:
        settings = {"metrics": options.metrics, "name": name, "bootstraps": options.bootstraps, "seed": options.seed}
        rows[named] = generation.scores(real, generated, **settings)
        for split, features in others.items():
            rows[f"{len(features['labels'])} {split} images"] = generation.scores(real, features, **settings)
    texts = {
        "frechet": f"spread: deviation over {options.bootstraps} bootstraps of the samples",
        "kid": "unbiased, cubic kernel, 100 subsets of 1000, or of half the smaller set; spread: deviation over subsets",
        "prdc": "5 neighbours, of at most 10000 images each",
    }
    return {
        "rows": rows,
        "protocol": {
            "features": network,
            "reference": f"{len(real['labels'])} images, {prepared}",
            "samples": len(samples),
            **{metric: texts[metric] for metric in options.metrics},
            **({"inception_score": "10 parts in random order"} if name is None else {}),
            "precision": "float32",
            "seed": options.seed,
        },
        "dataset": {
            "name": dataset_name,
            "number": len(real["labels"]),
            "fingerprint": hash_of(real["checksums"].tolist()),
            "samples": samples.fingerprint,
        },
    }


# What is printed.


def tables(results: dict) -> list[str]:
    if "grid" not in results:
        return [markdown_table(results["rows"])]
    grid, lines = results["grid"], []
    for metric, cells in grid["cells"].items():
        lines += [f"{metric}, by block and noise level", ""]
        lines += ["| block | " + " | ".join(f"{level:g}" for level in grid["noise_levels"]) + " |"]
        lines += ["|---" * (1 + len(grid["noise_levels"])) + "|"]
        lines += [
            f"| {block} | " + " | ".join(format_metric(metric, value) for value in row) + " |"
            for block, row in zip(grid["blocks"], cells)
        ]
        best = results["best"].get(metric)
        pixels = results["rows"].get("pixels")
        lines += [""]
        if best:
            lines += [f"best: {best}, {format_metric(metric, results['rows'][best][metric])}"]
        if pixels:
            lines += [f"raw pixels: {format_metric(metric, pixels[metric])}", ""]
    return lines


def hash_of(value) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def an(word: str) -> str:
    return {"encoder": "an encoder", "pipeline": "a pipeline", "samples": "samples"}[word]


if __name__ == "__main__":
    try:
        main()
    except (DataError, ValueError, OSError) as error:
        print(f"evaluate.py: {format_error(error)}", file=sys.stderr)
        sys.exit(2)
