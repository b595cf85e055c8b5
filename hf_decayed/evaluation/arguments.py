"""Command-line flags of `hf-decayed evaluate`."""

import argparse
from pathlib import Path

from ..command_line import (
    OneLineParser,
    boolean,
    fraction,
    non_negative_float,
    non_negative_int,
    positive_int,
)
from ..data.arguments import add_data_arguments
from ..data.sources import bundled_variant
from .dense import DENSE_METRICS
from .encoders import ENCODER_METRICS, FEATURE_METRICS, POOLED_METRICS
from .features import NOISE_LEVELS
from .generation import SAMPLE_METRICS
from .linear_probe import PROTOCOLS
from .lower_precision import DTYPES


QUICK_IMAGES = 1500, 750  # of the bundled training and held-out images: a minute of CPU, half of it for the features

DESCRIPTION = """\
Evaluates a model: the features of an encoder or a diffusion model, or the samples of a pipeline.

MODEL is one of
  a folder or repository that AutoModel loads: kNN accuracy, linear probe and effective rank of its features; or, by
    --metrics segmentation,where, unsupervised segmentation by its patches and how well they tell their position;
  a folder or repository that DiffusionPipeline loads: Frechet and kernel distance, precision, recall, density and coverage of
    its samples; or, by --metrics knn,linear,rank, the features of every block at every noise level, with a heat map;
  a folder or .npz file of samples.

Without --features, --metrics and flags of data, an encoder is evaluated on a part of the bundled images, for a first look.
Prints a table, and writes it as JSON with everything that the numbers depend on. Features and samples are cached: a second
evaluation, or one after an interruption, computes only what is missing."""
EXAMPLES = """\
examples:
  hf-decayed evaluate outputs/mae
  hf-decayed evaluate outputs/mae --features all_layers --metrics knn,rank
  hf-decayed evaluate outputs/mae --features all_layers --metrics segmentation,where
  hf-decayed evaluate outputs/uvit --num_samples 2000 --feature_net facebook/dinov2-base
  hf-decayed evaluate outputs/uvit --metrics linear --noise_levels 0,0.05,0.1,0.2
several processes:
  accelerate launch -m hf_decayed.evaluation facebook/dinov2-base --dataset_name uoft-cs/cifar100 \\
      --label_column_name fine_label --features last.cls,last.mean --probe_protocol mae_imagenet1k"""


def comma_separated(text: str) -> list[str]:
    """`a,b` -> `["a", "b"]`, as a type for `add_argument`."""
    return text.split(",")


def noise_levels(text: str) -> list[float]:
    """`0,0.1` -> `[0.0, 0.1]`, as a type for `add_argument`."""
    return [fraction(level) for level in text.split(",")]


def build_parser() -> OneLineParser:
    parser = OneLineParser(
        prog="hf-decayed evaluate",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="folder or repository of an encoder or a pipeline; or samples")
    parser.add_argument("--revision", help="revision of the repository; pin it when you trust its code")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that comes with the model")
    parser.add_argument("--output", type=Path, help="JSON file; by default in outputs/evaluate")
    parser.add_argument(
        "--features_dir", type=Path, default=Path("outputs/features"), help="cache of features (default: %(default)s)"
    )
    parser.add_argument(
        "--cpu_threads",
        type=positive_int,
        help="threads per process; by default OMP_NUM_THREADS, else chosen by a short trial",
    )
    data = add_data_arguments(parser)
    data.add_argument("--max_train_samples", type=positive_int)
    data.add_argument("--max_eval_samples", type=positive_int)
    metrics = parser.add_argument_group("metrics")
    metrics.add_argument(
        "--metrics",
        type=comma_separated,
        help=f"comma-separated; for features {','.join(ENCODER_METRICS)}, for patches {','.join(DENSE_METRICS)}, "
        f"for samples {','.join(SAMPLE_METRICS)}; by default {','.join(FEATURE_METRICS)} for an encoder, "
        "all sample metrics for a pipeline",
    )
    metrics.add_argument("--seed", type=non_negative_int, default=0)
    metrics.add_argument("--batch_size", type=positive_int, default=64)
    metrics.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="dtype of the weights; auto: bfloat16 if a short trial is faster with it; the difference from float32 "
        "is reported",
    )
    add_feature_arguments(parser)
    add_sample_arguments(parser)
    return parser


def add_feature_arguments(parser: argparse.ArgumentParser) -> None:
    features = parser.add_argument_group("features")
    features.add_argument(
        "--features",
        type=comma_separated,
        help="features of an encoder: comma-separated <layer>.<pooling>, such as last.mean,6.cls,last.patches; "
        "`all_layers` is the model's own pooling, or patches, at every depth; by default the model's own pooling and "
        "the class token of the last layer, or its patches",
    )
    features.add_argument(
        "--blocks",
        type=comma_separated,
        help="blocks of a diffusion model: comma-separated names of modules; by default all",
    )
    features.add_argument(
        "--noise_levels",
        type=noise_levels,
        default=list(NOISE_LEVELS),
        help="noise levels for a diffusion model, comma-separated, from 0 (data) to 1 (noise); by default "
        + ",".join(f"{level:g}" for level in NOISE_LEVELS),
    )
    features.add_argument(
        "--dense_images", type=positive_int, default=2000, help="images of each split whose patches are evaluated"
    )
    features.add_argument(
        "--num_clusters", type=positive_int, default=27, help="clusters of k-means over all patches, for segmentation"
    )
    features.add_argument("--pixels", type=boolean, default=True, help="evaluate raw pixels too (default: true)")
    features.add_argument("--k", type=positive_int, default=20, help="neighbours of kNN (default: 20)")
    features.add_argument(
        "--temperature",
        type=non_negative_float,
        default=0.07,
        help="temperature of kNN; 0 gives every neighbour one vote",
    )
    features.add_argument("--probe_protocol", choices=list(PROTOCOLS), default="ridge")


def add_sample_arguments(parser: argparse.ArgumentParser) -> None:
    samples = parser.add_argument_group("samples")
    samples.add_argument("--num_samples", type=positive_int, default=1000)
    samples.add_argument(
        "--classes", default="all", help="all in turn, none, or comma-separated names and numbers (default: all)"
    )
    samples.add_argument("--num_inference_steps", type=positive_int, default=50)
    samples.add_argument(
        "--guidance_scale", type=non_negative_float, default=1.0, help="as in diffusers: 1 is no guidance"
    )
    samples.add_argument("--vae", metavar="PATH", help="autoencoder for a latent pipeline that has none")
    samples.add_argument(
        "--samples_dir", type=Path, default=Path("outputs/samples"), help="cache of samples (default: %(default)s)"
    )
    samples.add_argument(
        "--feature_net",
        default="pixels",
        help="network whose features are compared: pixels (averaged to 8 x 8), inception (FID; needs torch-fidelity), or "
        "any folder or repository that AutoModel loads",
    )
    samples.add_argument("--feature_net_revision", help="revision of its repository")
    samples.add_argument("--reference", help=".npz file or folder of real images; by default the training images")
    samples.add_argument(
        "--bootstraps",
        type=positive_int,
        default=20,
        help="resamplings for the spread of the Frechet distance (default: 20)",
    )


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parsed and checked options, with the `kind` of the model, `metrics` and `output` filled in."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    options.kind = model_kind(options.model, options.revision)
    known = {
        "encoder": (*ENCODER_METRICS, *DENSE_METRICS),
        "pipeline": (*POOLED_METRICS, *DENSE_METRICS, *SAMPLE_METRICS),
        "samples": SAMPLE_METRICS,
    }[options.kind]
    limits = (options.max_train_samples, options.max_eval_samples)
    if options.kind == "encoder" and options.metrics is None and options.features is None and limits == (None, None):
        if (
            bundled_variant(options.dataset_name, options.dataset_path) is not None
        ):  # a first look, in less than a minute
            options.max_train_samples, options.max_eval_samples = QUICK_IMAGES
    if options.metrics is None:
        options.metrics = list(FEATURE_METRICS if options.kind == "encoder" else SAMPLE_METRICS)
    unknown = set(options.metrics) - set(known)
    if unknown:
        owner = {"encoder": "an encoder", "pipeline": "a pipeline", "samples": "samples"}[options.kind]
        parser.error(f"--metrics of {owner} are {', '.join(known)}; got {', '.join(sorted(unknown))}")
    if options.features is not None:
        dense_metrics = set(options.metrics) & set(DENSE_METRICS)
        if dense_metrics != set(options.metrics) and all(name.endswith(".patches") for name in options.features):
            parser.error(
                f"--features {','.join(options.features)} are patches: use --metrics {','.join(DENSE_METRICS)}"
            )
        if dense_metrics and not any(name == "all_layers" or name.endswith(".patches") for name in options.features):
            parser.error(f"--metrics {','.join(sorted(dense_metrics))} need --features <layer>.patches or all_layers")
    of_samples = bool(set(options.metrics) & set(SAMPLE_METRICS))
    if of_samples:
        if not set(options.metrics) <= set(SAMPLE_METRICS):
            parser.error(
                "features and samples are evaluated one at a time: --metrics knn,linear,rank, or frechet,kid,prdc"
            )
        if options.dtype != "float32" and options.kind == "samples":
            parser.error("samples that are drawn already are compared in float32; --dtype is for models")
        if options.bootstraps < 2 or options.num_samples < 10:
            parser.error("a distance needs at least --num_samples 10, and its spread --bootstraps 2")
    if options.output is None:
        name = Path(options.model).name.removesuffix(".npz")
        suffix = "" if options.kind == "encoder" else "-samples" if of_samples else "-blocks"
        options.output = Path("outputs/evaluate") / f"{name}{suffix}.json"
    return options


def model_kind(model: str, revision: str | None = None) -> str:
    """`encoder`, `pipeline` or `samples`, by the files of a folder or repository."""
    path = Path(model)
    if path.suffix == ".npz" or (path / "sampling.json").exists():
        return "samples"
    if path.is_dir():
        kinds = {"model_index.json": "pipeline", "config.json": "encoder"}
        return next((kind for file, kind in kinds.items() if (path / file).exists()), "samples")
    try:
        from diffusers import DiffusionPipeline  # here: encoders do not need diffusers, which takes seconds to import

        DiffusionPipeline.load_config(model, revision=revision)
        return "pipeline"
    except OSError:  # no pipeline, or nothing at all; then loading an encoder reports it
        return "encoder"
