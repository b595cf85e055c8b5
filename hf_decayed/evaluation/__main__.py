"""`hf-decayed evaluate MODEL`, and with several processes `accelerate launch -m hf_decayed.evaluation MODEL`."""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import AutoImageProcessor, AutoModel

from ..command_line import set_cpu_threads
from ..data.arguments import data_arguments
from ..data.datasets import EvaluationDataset
from ..data.sources import ImageSplits, load_image_splits
from ..errors import UserError, explain_loading_errors, format_error, print_error
from ..provenance import pipeline_fingerprint, sanitized_command, versions
from .arguments import parse_arguments
from .dense import DENSE_METRICS, DenseMetrics, evaluate_patches, split_features
from .encoders import ENCODER_METRICS, POOLED_METRICS, FeatureMetrics, evaluate_encoder
from .features import Extraction, hash_json, pipeline_network, transformer_encoder
from .generation import SampledImages, SampleMetrics, evaluate_samples, require_inception
from .lower_precision import cast_weights, describe_precision, resolve_dtype
from .tables import protocol_text, results_tables


COMPARED_IMAGES = 64  # whose features are also computed in float32 if the weights are in lower precision


def evaluate(arguments: list[str] | None = None) -> str:
    """Evaluates the model that the command line names and writes the results; returns them as text on the main process."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse_arguments(arguments)
    started = time.time()
    accelerator = Accelerator(cpu=not torch.accelerator.is_available())
    set_cpu_threads(accelerator, options.cpu_threads)
    run = {"encoder": run_encoder, "pipeline": run_pipeline, "samples": run_samples}[options.kind]
    results = run(options, accelerator)
    if not accelerator.is_main_process:
        return ""
    results = {
        "model": Path(options.model).name if Path(options.model).exists() else options.model,
        **results,
        "protocol_hash": hash_json(results["protocol"]),
        "seconds": round(time.time() - started, 1),
        "command": " ".join(["hf-decayed", "evaluate", *sanitized_command(arguments)]),
        "versions": versions(),
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=2) + "\n")
    lines = [results_tables(results), protocol_text(results["protocol"], results["rows"])]
    skipped = results["dataset"].get("skipped", {})
    if skipped:
        numbers = ", ".join(f"{number} of {split}" for split, number in skipped.items())
        lines.append(f"skipped {sum(skipped.values())} images that cannot be decoded: {numbers}")
    parts = "".join(f", {part} {seconds:.0f} s" for part, seconds in results.get("seconds_by_part", {}).items())
    lines.append(f"{options.output}: protocol {results['protocol_hash']}, {results['seconds']:.0f} s{parts}")
    if "precision" in results:
        lines.append(describe_precision(**results["precision"]))
    lines += save_pictures(options.output.with_suffix(".png"), results)
    return "\n".join(lines)


def save_pictures(path: Path, results: dict) -> list[str]:
    """Draws the picture of the results, if they have one; returns a line that says where it is."""
    from ..plots import is_patch_layer, save_heat_maps, save_what_and_where

    try:
        if "grid" in results:
            save_heat_maps(path, **results["grid"])
            return [f"heat map: {path}"]
        if sum(map(is_patch_layer, results["rows"])) > 1:
            save_what_and_where(path, {results["model"]: results["rows"]})
            return [f"what and where against depth: {path}"]
    except UserError as error:  # matplotlib is missing; the numbers are written
        return [f"no picture: {format_error(error)}"]
    return []


def run_encoder(options: argparse.Namespace, accelerator: Accelerator) -> dict:
    origin = {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
    with explain_loading_errors(options.model):
        model = AutoModel.from_pretrained(options.model, dtype=torch.float32, **origin)
        processor = AutoImageProcessor.from_pretrained(options.model, **origin)
    splits = load_splits(options, accelerator, options.max_eval_samples)
    precision = cast_encoder(model, processor, splits, options, accelerator)
    names: dict = {"pooled": options.features, "dense": options.features}
    if options.features == ["all_layers"]:
        names = {"pooled": "all_layers", "dense": "all_layers"}
    elif options.features:
        names["pooled"], names["dense"] = split_features(options.features)
    results: dict = {}
    if set(options.metrics) & set(ENCODER_METRICS):
        results = evaluate_encoder(
            model,
            processor,
            splits,
            names["pooled"],
            feature_metrics(options),
            extraction(options),
            accelerator,
            options.pixels,
        )
    if set(options.metrics) & set(DENSE_METRICS):
        dense = evaluate_patches(
            model,
            processor,
            splits,
            names["dense"],
            dense_metrics(options),
            extraction(options),
            accelerator,
            options.pixels,
        )
        results = merge_results(results, dense)
    return {**results, **precision}


def cast_encoder(model, processor, splits: ImageSplits, options: argparse.Namespace, accelerator: Accelerator) -> dict:
    """Casts the weights to `--dtype`; returns why, and how far the features of some held-out images move, as `precision`."""
    dtype, reason = resolve_dtype(options.dtype, model, options.batch_size, accelerator)
    if dtype == "float32":
        return {}
    images = EvaluationDataset(
        splits.held_out.select(range(min(COMPARED_IMAGES, len(splits.held_out)))),
        splits.image_column,
        None,
        processor,
        getattr(model.config, "num_channels", 3),
        options.on_bad_image,
    )
    indices = list(range(len(images)))
    pixel_values = images.__getitems__(indices)["pixel_values"].to(accelerator.device)
    encode = transformer_encoder(model.to(accelerator.device), ["last.mean"])
    with torch.inference_mode():
        difference = cast_weights(model, dtype, lambda: encode(pixel_values, indices)["last.mean"])
    what = f"features of {len(pixel_values)} images"
    return {"precision": {"dtype": dtype, "reason": reason, "difference": difference, "what": what}}


def merge_results(pooled: dict, dense: dict) -> dict:
    """Merges the results of pooled and dense features; `dense_dataset` describes the images of the dense ones."""
    if not pooled:
        return dense
    return {
        **pooled,
        "rows": {**pooled["rows"], **dense["rows"]},
        "protocol": {**dense["protocol"], **pooled["protocol"]},
        "dense_dataset": dense["dataset"],
    }


def run_pipeline(options: argparse.Namespace, accelerator: Accelerator) -> dict:
    # Imported here, because these import diffusers, which takes seconds and which encoders do not need.
    from .blocks import evaluate_block_patches, evaluate_blocks
    from .sampling import COMPARED_SAMPLES, load_pipeline, read_json, sample, scheduler_config

    pipeline = load_pipeline(options.model, options.revision, options.trust_remote_code, options.vae)
    pipeline.to(accelerator.device)
    if set(options.metrics) <= {*POOLED_METRICS, *DENSE_METRICS}:
        network = pipeline_network(pipeline)
        dtype, _ = resolve_dtype(options.dtype, network, options.batch_size, accelerator)
        network.to(getattr(torch, dtype))
        dense = set(options.metrics) <= set(DENSE_METRICS)
        if not dense and not set(options.metrics) <= set(POOLED_METRICS):
            raise UserError(
                "Blocks and their patches are evaluated one at a time: --metrics segmentation,where alone."
            )
        arguments = (
            pipeline,
            load_splits(options, accelerator, options.max_eval_samples),
            options.blocks,
            options.noise_levels,
        )
        if dense:
            return evaluate_block_patches(*arguments, dense_metrics(options), extraction(options), accelerator)
        return evaluate_blocks(*arguments, feature_metrics(options), extraction(options), accelerator, options.pixels)
    if options.feature_net == "inception":
        require_inception()  # before the samples are drawn, which takes long
    scheduler = scheduler_config(pipeline)
    steps = options.num_inference_steps if scheduler else 1  # a GAN has no scheduler, and takes one step
    settings = {
        "num": options.num_samples,
        "classes": options.classes,
        "num_inference_steps": steps,
        "guidance_scale": options.guidance_scale,
        "seed": options.seed,
        "batch_size": options.batch_size,
    }
    dtype, reason = resolve_dtype(options.dtype, pipeline_network(pipeline), options.batch_size, accelerator)
    if dtype != "float32":
        settings["dtype"] = dtype
    fingerprint = pipeline_fingerprint(pipeline)
    name = f"{Path(options.model).name}-{hash_json([fingerprint, scheduler, settings])[:8]}"
    sample(pipeline, options.samples_dir / name, **settings, accelerator=accelerator)
    label = f"{options.num_samples} samples, {steps} steps, guidance {options.guidance_scale:g}"
    results = compare_samples(SampledImages(options.samples_dir / name), label, options, accelerator)
    results["protocol"]["sampling"] = {**settings, "scheduler": scheduler}
    if dtype != "float32":
        difference = read_json(options.samples_dir / name / "sampling.json")["dtype_difference"]
        what = f"the first {min(options.num_samples, COMPARED_SAMPLES)} samples"
        results["precision"] = {"dtype": dtype, "reason": reason, "difference": difference, "what": what}
    return {"model_fingerprint": fingerprint, **results}


def run_samples(options: argparse.Namespace, accelerator: Accelerator) -> dict:
    samples = SampledImages(options.model)
    return {
        "model_fingerprint": None,
        **compare_samples(samples, f"{len(samples)} samples", options, accelerator),
    }


def compare_samples(samples: SampledImages, label: str, options: argparse.Namespace, accelerator: Accelerator) -> dict:
    if options.reference:
        reference = SampledImages(options.reference)
    else:  # as many held-out images as samples: distances depend on the number
        limits = [limit for limit in (len(samples), options.max_eval_samples) if limit is not None]
        reference = load_splits(options, accelerator, min(limits))
    return evaluate_samples(
        samples,
        reference,
        label,
        options.feature_net,
        SampleMetrics(options.metrics, options.bootstraps, options.seed),
        extraction(options),
        accelerator,
        options.feature_net_revision,
    )


def load_splits(options: argparse.Namespace, accelerator: Accelerator, max_eval_samples: int | None) -> ImageSplits:
    """The images to evaluate on; warns where the model's training held out other images."""
    with accelerator.main_process_first():  # one process fills the cache of `datasets`, the others read it
        splits = load_image_splits(**data_arguments(options))
    rule = training_held_out_rule(Path(options.model), splits.name)
    if accelerator.is_main_process and rule not in (None, splits.held_out_rule):
        print(
            f"hf-decayed evaluate: warning: in the training of '{options.model}' on {splits.name} the held-out images were "
            f"{rule}, here they are {splits.held_out_rule}: it may have been trained on some of them",
            file=sys.stderr,
        )
    return splits.take(options.max_train_samples, max_eval_samples)


def training_held_out_rule(model: Path, dataset_name: str) -> str | None:
    """Which images of a data set a model's training held out, by its `results.json`; `None` if unknown."""
    try:
        dataset = json.loads((model / "results.json").read_text())["dataset"]
        return dataset["held_out"] if dataset["name"] == dataset_name else None
    except (OSError, ValueError, KeyError, TypeError):  # no such file, or one of an older version
        return None


def feature_metrics(options: argparse.Namespace) -> FeatureMetrics:
    temperature = None if options.temperature == 0 else options.temperature
    return FeatureMetrics(options.metrics, options.k, temperature, options.probe_protocol, options.seed)


def dense_metrics(options: argparse.Namespace) -> DenseMetrics:
    return DenseMetrics(options.metrics, options.num_clusters, max_images=options.dense_images, seed=options.seed)


def extraction(options: argparse.Namespace) -> Extraction:
    return Extraction(options.features_dir, options.batch_size, options.num_workers, options.on_bad_image)


def main(arguments: list[str] | None = None) -> int:
    """Prints the results and returns 0, or one line on standard error and returns 2."""
    try:
        text = evaluate(arguments)
    except Exception as error:
        print_error("hf-decayed evaluate", error)
        return 2
    if text:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
