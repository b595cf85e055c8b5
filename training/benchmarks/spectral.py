"""Speed and memory of spectral clustering: one image over 12 layers of 12 heads, and data sets of growing size.

python training/benchmarks/spectral.py
python training/benchmarks/spectral.py --sizes tiny --rounds 5 --images 1000,3000
"""

import argparse
from collections.abc import Callable

import torch
from timing import benchmark_parser, compare, extra_memory, run_benchmark

from hf_decayed.errors import UserError
from hf_decayed.spectral.clustering import DatasetSpectralClustering, LayerSpectralClustering
from hf_decayed.spectral.graphs import graph_stack, query_key_logits
from hf_decayed.spectral.regions import k_means_clusters
from hf_decayed.spectral.solvers import average_graph, exact_eigenvectors


LAYERS, HEADS, HEAD_DIM = 12, 12, 64  # of a ViT-B
CLUSTERS, COMPONENTS = 6, 10
GRIDS = {"tiny": 14, "base": 32}
# The gradient solver takes 400 steps by default; fewer of them are timed where all would take minutes.
GRADIENT_STEPS = {"tiny": 400, "base": 10}
PATCHES, DATASET_DIM, DATASET_CLUSTERS = 49, 128, 27
MAX_DATASET_ROUNDS = 3


def benchmark(options: argparse.Namespace) -> list[dict]:
    tables = []
    for size in options.sizes:
        layers = image_layers(GRIDS[size])
        tables += [*compare_averaged_graph(layers, GRIDS[size], options), compare_image(layers, size, options)]
    return tables + [compare_dataset(number, options) for number in options.images]


def image_layers(side: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Queries and keys of an image of six bands; every head sees them with other codes and noise."""
    generator = torch.Generator().manual_seed(0)
    bands = torch.arange(side**2) * CLUSTERS // side**2
    layers = []
    for _ in range(LAYERS):
        codes = torch.randn(HEADS, CLUSTERS, HEAD_DIM, generator=generator)[:, bands]
        query, key = (codes + 0.7 * torch.randn(codes.shape, generator=generator) for _ in range(2))
        layers.append((query, key))
    return layers


def compare_averaged_graph(layers, side: int, options: argparse.Namespace) -> list[dict]:
    """Clusters and eigenvectors of the averaged graph, which is given."""
    graph = average_graph([graph_stack(query_key_logits(*layer)) for layer in layers])

    def exact():
        spectrum = exact_eigenvectors(graph, CLUSTERS)
        return k_means_clusters(spectrum.eigenvectors * spectrum.eigenvalues, CLUSTERS)

    embed, cluster = scikit_learn(graph)
    variants = {"scikit-learn SpectralClustering": cluster, "exact solver and k-means": exact}
    clusters = compare(f"{side} x {side} patches: clusters of the averaged graph", variants, 1, options)
    variants = {"scikit-learn spectral_embedding": embed, "exact solver": lambda: exact_eigenvectors(graph, CLUSTERS)}
    return [clusters, compare(f"{side} x {side} patches: eigenvectors of the averaged graph", variants, 1, options)]


def scikit_learn(graph: torch.Tensor) -> tuple[Callable, Callable]:
    """Eigenvectors of a graph, and its clusters."""
    try:
        from sklearn.cluster import SpectralClustering  # of the extra `training`
        from sklearn.manifold import spectral_embedding
    except ImportError as error:
        raise UserError("The benchmark needs scikit-learn: pip install 'hf_decayed[training]'.") from error
    affinity = ((graph + graph.T) / 2).numpy()
    return (
        lambda: spectral_embedding(affinity, n_components=CLUSTERS, drop_first=False, random_state=0),
        lambda: SpectralClustering(CLUSTERS, affinity="precomputed", random_state=0).fit(affinity),
    )


def compare_image(layers, size: str, options: argparse.Namespace) -> dict:
    """Clusters from the queries and keys of all layers, the graphs included."""

    def peer():
        graph = average_graph([graph_stack(query_key_logits(*layer)) for layer in layers])
        return scikit_learn(graph)[1]()

    steps = GRADIENT_STEPS[size]
    variants = {"average, scikit-learn SpectralClustering": peer}
    features = torch.cat(
        [key.transpose(0, 1).flatten(1) for _, key in layers], dim=1
    )  # (patches, all layers and heads)
    if ncut := ncut_pytorch(features, COMPONENTS, CLUSTERS):
        variants["ncut-pytorch, concatenated features"] = ncut
    settings = {"n_components": COMPONENTS, "n_clusters": CLUSTERS}
    variants["LayerSpectralClustering, eigh"] = lambda: LayerSpectralClustering(**settings).fit(layers)
    variants[f"LayerSpectralClustering, gradient, {steps} steps"] = lambda: LayerSpectralClustering(
        solver="gradient", steps=steps, **settings
    ).fit(layers)
    title = f"{GRIDS[size]} x {GRIDS[size]} patches, {LAYERS} layers of {HEADS} heads: clusters of an image"
    table = compare(title, variants, 1, options)
    for label, run in variants.items():
        table["rows"][label]["extra memory (MB)"] = extra_memory(run)
    return table


def ncut_pytorch(features: torch.Tensor, n_components: int, n_clusters: int) -> Callable | None:
    """Nystrom normalised cuts of one feature matrix, and the same k-means; `None` if the package is not installed."""
    try:
        from ncut_pytorch import Ncut
    except ImportError:
        return None

    def run():
        vectors = Ncut(n_eig=n_components, device="cpu").fit_transform(features)
        return k_means_clusters(vectors, n_clusters, mini_batch=len(vectors) > 20_000)

    return run


def compare_dataset(num_images: int, options: argparse.Namespace) -> dict:
    """Clusters of all patches of a data set; a solver that is linear has the same images per second in all tables."""
    values = dataset_values(num_images)
    variants = {}
    for solver in ("eigsh", "nystrom"):
        model = DatasetSpectralClustering("vv", n_clusters=DATASET_CLUSTERS, solver=solver)
        variants[f"DatasetSpectralClustering, {solver}"] = lambda model=model: model.fit([values])
    if ncut := ncut_pytorch(values.flatten(0, 1), DATASET_CLUSTERS, DATASET_CLUSTERS):
        variants["ncut-pytorch"] = ncut
    rounds = argparse.Namespace(**{**vars(options), "rounds": min(options.rounds, MAX_DATASET_ROUNDS)})
    title = f"data set, {num_images:,} images of {PATCHES} patches, {DATASET_DIM} dimensions"
    table = compare(title, variants, num_images, rounds)
    for label, run in variants.items():
        table["rows"][label]["extra memory (MB)"] = extra_memory(run)
    return table


def dataset_values(num_images: int) -> torch.Tensor:
    """Images of four regions each, out of 30 kinds: `(images, patches, dim)`."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(30, DATASET_DIM, generator=generator)
    kinds = torch.randint(30, (num_images, 4), generator=generator)
    regions = torch.randint(4, (num_images, PATCHES), generator=generator).sort(dim=1).values
    noise = torch.randn(num_images, PATCHES, DATASET_DIM, generator=generator)
    return codes[kinds.gather(1, regions)] + 0.7 * noise


def image_numbers(text: str) -> list[int]:
    """`1000,3000` -> `[1000, 3000]`, as a type for `add_argument`; an empty text leaves the data sets out."""
    try:
        numbers = [int(number) for number in text.split(",") if number]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be numbers of images such as 1000,3000, got {text}") from error
    if any(number < 1 for number in numbers):
        raise argparse.ArgumentTypeError(f"must be positive, got {text}")
    return numbers


def main() -> None:
    parser = benchmark_parser(__doc__, "tiny: 14 x 14 patches; base: 32 x 32 patches")
    parser.add_argument("--images", type=image_numbers, default=[1000, 3000, 10_000], help="sizes of the data sets")
    run_benchmark(benchmark, parser)


if __name__ == "__main__":
    main()
