"""Distances between two sets of features, for judging generated images: Frechet, kernel (KID), precision and recall."""

import torch

from .effective_rank import in_double
from .knn import check_features


@torch.no_grad()
def frechet_distance(real: torch.Tensor, generated: torch.Tensor) -> float:
    """Squared Frechet distance between Gaussians fitted to two sets of `(number, dim)` features (FID on Inception's).

    In float64, with the covariances' unbiased estimate. The trace of the square root of a product of covariances is the
    sum of the square roots of the eigenvalues of `A B A`, with A the root of the first: symmetric, so nothing becomes
    complex, however few samples there are.
    """
    check_pair(real, generated, at_least=2)
    (mean_real, covariance_real), (mean_generated, covariance_generated) = map(mean_and_covariance, (real, generated))
    values, vectors = torch.linalg.eigh(covariance_real)
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    product = torch.linalg.eigvalsh(root @ covariance_generated @ root).clamp(min=0)
    traces = covariance_real.trace() + covariance_generated.trace() - 2 * product.sqrt().sum()
    # Two equal sets leave rounding, of either sign.
    return max(0.0, float((mean_real - mean_generated).square().sum() + traces))


@torch.no_grad()
def kernel_distance(
    real: torch.Tensor,
    generated: torch.Tensor,
    num_subsets: int = 100,
    subset_size: int = 1000,
    generator: torch.Generator | None = None,
) -> tuple[float, float]:
    """Kernel Inception Distance (Binkowski et al., 2018) of `(number, dim)` features: mean and deviation over subsets.

    The unbiased squared maximum mean discrepancy with the kernel `(x . y / dim + 1) ** 3`; near zero, or below, for sets
    from one distribution. Subsets are at most as large as the smaller set; `generator` draws them, seed 0 if not given.
    """
    check_pair(real, generated, at_least=2)
    size = min(subset_size, len(real), len(generated))
    if size < 2 or num_subsets < 1:
        raise ValueError(f"Need `subset_size` >= 2 and `num_subsets` >= 1, got {subset_size} and {num_subsets}.")
    generator = generator or torch.Generator().manual_seed(0)
    distances = []
    for _ in range(num_subsets):
        x, y = (
            in_double(each[torch.randperm(len(each), generator=generator)[:size].to(each.device)])
            for each in (real, generated)
        )
        within = sum((kernel(each, each).sum() - kernel(each, each).trace()) for each in (x, y)) / (size * (size - 1))
        distances.append(within - 2 * kernel(x, y).mean())
    distances = torch.stack(distances)
    return float(distances.mean()), float(distances.std(correction=0))


@torch.no_grad()
def precision_recall(
    real: torch.Tensor, generated: torch.Tensor, k: int = 3, chunk_size: int = 1024
) -> tuple[float, float]:
    """Improved precision and recall (Kynkaanniemi et al., 2019) of `(number, dim)` features.

    Precision: how many generated samples lie within the reach of a real one, the distance to its `k`-th neighbour among
    its like. Recall: the same with the roles changed.
    """
    check_pair(real, generated, at_least=k + 1)
    real, generated = real.float(), generated.float()

    def reach(features):
        # The nearest is the sample itself.
        return torch.cat(
            [torch.cdist(part, features).topk(k + 1, largest=False).values[:, -1] for part in split(features)]
        )

    def covered(queries, features):
        reaches = reach(features)
        inside = [(torch.cdist(part, features) <= reaches).any(dim=1) for part in split(queries)]
        return float(torch.cat(inside).double().mean())

    def split(features):
        return features.split(chunk_size)

    return covered(generated, real), covered(real, generated)


def mean_and_covariance(features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    features = in_double(features)
    mean = features.mean(dim=0)
    centred = features - mean
    return mean, centred.T @ centred / (len(features) - 1)


def kernel(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x @ y.T / x.shape[1] + 1) ** 3


def check_pair(real: torch.Tensor, generated: torch.Tensor, at_least: int) -> None:
    for name, features in (("real", real), ("generated", generated)):
        check_features(name, features)
        if len(features) < at_least:
            raise ValueError(f"{name}: need at least {at_least} features, got {len(features)}.")
    if real.shape[1] != generated.shape[1]:
        raise ValueError(
            f"Features must have one width, got {real.shape[1]} (real) and {generated.shape[1]} (generated)."
        )
