"""Speed and memory of evaluation: kNN, effective rank and feature extraction, against scikit-learn, faiss and torch.

python training/benchmarks/evaluation.py
python training/benchmarks/evaluation.py --sizes tiny --rounds 5 --large_bank
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from data import save_photographs
from datasets import Dataset
from models import BATCH_SIZES, CONFIG_FIELDS, SIZES_HELP
from timing import Stopwatch, benchmark_parser, compare, compare_part, extra_memory, run_benchmark, summarize
from torch.nn import functional as F

from hf_decayed import DecayedViTMAEConfig, DecayedViTMAEModel
from hf_decayed.command_line import number
from hf_decayed.data.datasets import EvaluationDataset
from hf_decayed.data.sources import load_image_splits
from hf_decayed.errors import UserError
from hf_decayed.evaluation import effective_rank, knn_accuracy
from hf_decayed.evaluation.features import extract_features, transformer_encoder
from hf_decayed.models.image_processing_decayed import default_image_processor


DIM = 768  # of the features of a ViT-B
IMAGENET_IMAGES = 1_281_167
NEIGHBOURS = 20


def benchmark(options: argparse.Namespace) -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    bank, queries = labelled_features(options.bank, 100, generator), labelled_features(options.queries, 100, generator)
    features, few = bank[0], bank[0][:4000]
    tables = [
        compare_knn(*bank, *queries, options),
        compare_rank(features, {"svdvals": rank_of_singular_values}, options),
        compare_rank(few, {f"{len(few):,} x {len(few):,} covariance": rank_of_sample_covariance}, options),
    ]
    if options.large_bank:  # 3.7 GB, which nothing may copy
        bank, queries = labelled_features(IMAGENET_IMAGES, 1000, generator), [tensor[:500] for tensor in queries]
        tables += large_bank(*bank, *queries, options)
    if options.evaluate:
        tables.append(evaluate_command(options.evaluate))
    with tempfile.TemporaryDirectory() as folder:
        if "tiny" in options.sizes:
            held_out = load_image_splits().take(max_eval_samples=512).held_out
            tables.append(feature_extraction("tiny", held_out, 1, "bundled images", options))
        if "base" in options.sizes:
            photographs = save_photographs(Path(folder), 16)
            tables.append(feature_extraction("base", photographs, 3, "photographs", options))
    return tables


def labelled_features(num_images: int, num_classes: int, generator: torch.Generator) -> list[torch.Tensor]:
    features = torch.randn(num_images, DIM, generator=generator)
    return [features, torch.randint(num_classes, (num_images,), generator=generator)]


def compare_knn(features, labels, query_features, query_labels, options: argparse.Namespace) -> dict:
    variants = {"scikit-learn, brute force": scikit_learn_knn(features, labels, query_features, query_labels)}
    search = faiss_search(features, query_features, options.threads)
    if search is not None:
        variants["faiss, flat index (search alone)"] = search
    tensors = features, labels, query_features, query_labels
    variants["knn_accuracy"] = lambda: knn_accuracy(*tensors)
    variants["knn_accuracy, first pass in bfloat16"] = lambda: knn_accuracy(*tensors, first_pass=torch.bfloat16)
    title = f"kNN, {len(features):,} x {DIM} bank, {len(query_features):,} queries (images/s: queries)"
    table = compare(title, variants, len(query_features), options)
    for label, run in variants.items():
        table["rows"][label]["extra memory (MB)"] = extra_memory(run)
    return table


def scikit_learn_knn(features, labels, query_features, query_labels) -> Callable:
    """The arithmetic of `knn_accuracy`: all cosine distances, votes of exp(similarity / temperature)."""
    try:
        from sklearn.neighbors import KNeighborsClassifier  # of the extra `training`
    except ImportError as error:
        raise UserError("The benchmark needs scikit-learn: pip install 'hf_decayed[training]'.") from error

    def run():
        classifier = KNeighborsClassifier(
            NEIGHBOURS,
            metric="cosine",
            algorithm="brute",
            weights=lambda distances: np.exp((1 - distances) / 0.07),
        )
        classifier.fit(features.numpy(), labels.numpy()).score(query_features.numpy(), query_labels.numpy())

    return run


def faiss_search(features, query_features, threads: int) -> Callable | None:
    try:
        import faiss
    except ImportError:  # few have this peer installed
        return None

    def run():
        faiss.omp_set_num_threads(threads)
        index = faiss.IndexFlatIP(DIM)
        index.add(F.normalize(features).numpy())
        index.search(F.normalize(query_features).numpy(), NEIGHBOURS)

    return run


def compare_rank(features: torch.Tensor, peer: dict[str, Callable], options: argparse.Namespace) -> dict:
    functions = {**peer, "effective_rank": effective_rank}
    variants = {label: lambda function=function: function(features) for label, function in functions.items()}
    return compare(f"effective rank, {len(features):,} x {DIM}", variants, len(features), options)


def rank_of_sample_covariance(features: torch.Tensor) -> torch.Tensor:
    """Entropy of the spectrum of the covariance between samples."""
    centred = features - features.mean(dim=0)
    spectrum = torch.linalg.svdvals(centred @ centred.T)
    return torch.special.entr(spectrum / spectrum.sum()).sum()


def rank_of_singular_values(features: torch.Tensor) -> torch.Tensor:
    """Entropy of the squared singular values of the features."""
    spectrum = torch.linalg.svdvals(features - features.mean(dim=0)).square()
    return torch.special.entr(spectrum / spectrum.sum()).sum()


def large_bank(features, labels, query_features, query_labels, options: argparse.Namespace) -> list[dict]:
    """Time and memory with as many features as ImageNet-1K has training images."""
    queries, size = len(query_features), f"{len(features):,} x {DIM}"
    runs = {
        "kNN": (
            f"kNN, {size} bank, {queries:,} queries (images/s: queries)",
            queries,
            lambda: knn_accuracy(features, labels, query_features, query_labels),
        ),
        "effective rank": (f"effective rank, {size}", len(features), lambda: effective_rank(features)),
    }
    tables = []
    for label, (title, num_images, run) in runs.items():
        tables.append(compare(title, {label: run}, num_images, options))
        tables[-1]["rows"][label]["extra memory (MB)"] = extra_memory(run)
    return tables


def feature_extraction(size: str, dataset: Dataset, num_channels: int, what: str, options: argparse.Namespace) -> dict:
    """Whole extraction (reading, decoding, image processor, shards) against its forward passes."""
    config = DecayedViTMAEConfig(**CONFIG_FIELDS[size], num_channels=num_channels)
    model = DecayedViTMAEModel(config).to(options.device)
    processor = default_image_processor(config.image_size, num_channels)
    images = EvaluationDataset(dataset, "image", None, processor, num_channels=num_channels)
    batch_size = options.batch_size or min(64, BATCH_SIZES[size])
    stopwatch = Stopwatch(options.device)
    encode = stopwatch.wrap(transformer_encoder(model, ["last.mean"]))

    def run():
        with tempfile.TemporaryDirectory() as folder:
            extract_features(encode, images, folder, {}, batch_size=batch_size)

    title = f"features of {len(images)} {what}, {size}"
    return compare_part(title, "its forward passes", "extract_features", run, stopwatch, len(images), options)


def evaluate_command(model: Path) -> dict:
    """Wall-clock time of the whole command, once, with default arguments and without features from earlier runs."""
    command = [sys.executable, "-m", "hf_decayed.evaluation", model.resolve(), "--cpu_threads", "1"]
    with tempfile.TemporaryDirectory() as folder:
        stopwatch = Stopwatch("cpu")
        stopwatch.wrap(subprocess.run)(list(map(str, command)), cwd=folder, check=True, capture_output=True)
        (results,) = (json.loads(path.read_text()) for path in Path(folder).glob("outputs/evaluate/*.json"))
    images = sum(results["dataset"]["number"].values())
    table = summarize(f"hf-decayed evaluate {model.name}, {images:,} images", [{"command": stopwatch.seconds}], images)
    table["rows"]["command"]["time (s)"] = stopwatch.seconds
    return table


def main() -> None:
    parser = benchmark_parser(__doc__, f"of the encoder that extracts features: {SIZES_HELP}")
    more_than_neighbours = number(int, NEIGHBOURS)
    parser.add_argument(
        "--bank", type=more_than_neighbours, default=50_000, help="features of the kNN bank (default: %(default)s)"
    )
    parser.add_argument(
        "--queries", type=more_than_neighbours, default=10_000, help="features to classify (default: %(default)s)"
    )
    parser.add_argument("--evaluate", type=Path, metavar="MODEL", help="also time `hf-decayed evaluate MODEL`, once")
    parser.add_argument("--large_bank", action="store_true", help="also 1.28 million features; needs 5 GB")
    run_benchmark(benchmark, parser)


if __name__ == "__main__":
    main()
