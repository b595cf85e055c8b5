"""Distances between the features of generated and of real images: Frechet, kernel (KID), precision and recall."""

from collections.abc import Callable

import torch

from .effective_rank import in_double
from .knn import check_features


@torch.no_grad()
def frechet_distance(real: torch.Tensor, generated: torch.Tensor) -> float:
    """Squared Frechet distance between Gaussians fitted to two sets of `(number, dim)` features (FID on Inception's).

    In float64, with unbiased covariances. The trace of the square root of a product of covariances is the sum of the square
    roots of the eigenvalues of `A B A`, with A the root of the first: a symmetric matrix, so nothing becomes complex, however
    few samples there are.
    """
    check_pair(real, generated, at_least=2)
    return distance_from(real)(generated)


def distance_from(real: torch.Tensor) -> Callable[[torch.Tensor], float]:
    """A function that computes the Frechet distance to `real`, whose covariance is decomposed once."""
    mean, covariance = mean_and_covariance(real)
    values, vectors = torch.linalg.eigh(covariance)
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T

    def distance(generated):
        mean_generated, covariance_generated = mean_and_covariance(generated)
        product = torch.linalg.eigvalsh(root @ covariance_generated @ root).clamp(min=0)
        traces = covariance.trace() + covariance_generated.trace() - 2 * product.sqrt().sum()
        # For equal sets the result is rounding error, of either sign.
        return max(0.0, float((mean - mean_generated).square().sum() + traces))

    return distance


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
    from one distribution. Subsets are at most as large as the smaller set; `generator` draws them, by default with seed 0.
    """
    check_pair(real, generated, at_least=2)
    size = min(subset_size, len(real), len(generated))
    if size < 2 or num_subsets < 1:
        raise ValueError(f"Need `subset_size` >= 2 and `num_subsets` >= 1, got {subset_size} and {num_subsets}.")
    generator = generator or torch.Generator().manual_seed(0)
    distances = []
    for _ in range(num_subsets):
        x, y = (
            in_double(features[torch.randperm(len(features), generator=generator)[:size].to(features.device)])
            for features in (real, generated)
        )
        within = sum(kernel(subset, subset).sum() - kernel(subset, subset).trace() for subset in (x, y))
        within = within / (size * (size - 1))
        distances.append(within - 2 * kernel(x, y).mean())
    distances = torch.stack(distances)
    return float(distances.mean()), float(distances.std(correction=0))


@torch.no_grad()
def precision_recall(
    real: torch.Tensor, generated: torch.Tensor, k: int = 3, chunk_size: int = 1024
) -> tuple[float, float]:
    """Improved precision and recall (Kynkaanniemi et al., 2019) of `(number, dim)` features.

    Precision: the fraction of generated samples within the radius of a real one, which is the distance to its `k`-th
    neighbour among the real ones. Recall: the same with the roles exchanged.
    """
    check_pair(real, generated, at_least=k + 1)
    return neighbours(generated, real, k, chunk_size)[0], neighbours(real, generated, k, chunk_size)[0]


@torch.no_grad()
def density_coverage(
    real: torch.Tensor, generated: torch.Tensor, k: int = 5, chunk_size: int = 1024
) -> tuple[float, float]:
    """Density and coverage (Naeem et al., 2020) of `(number, dim)` features: more robust to outliers.

    Density: the average number of real samples whose radius a generated one is within, over `k`; about 1 for sets from one
    distribution. Coverage: the fraction of real samples with a generated one within their radius.
    """
    check_pair(real, generated, at_least=k + 1)
    return neighbours(generated, real, k, chunk_size)[1:]


@torch.no_grad()
def neighbours(
    queries: torch.Tensor, features: torch.Tensor, k: int, chunk_size: int = 1024
) -> tuple[float, float, float]:
    """Precision, density and coverage of queries among features whose radius is the distance to their `k`-th neighbour."""
    # `cdist` computes distances from products, which lose precision far from the origin.
    centre = features.double().mean(dim=0)
    queries, features = ((rows.double() - centre).float() for rows in (queries, features))
    parts = features.split(chunk_size)
    # k + 1: the nearest neighbour is the sample itself.
    radius = torch.cat([torch.cdist(part, features).topk(k + 1, largest=False).values[:, -1] for part in parts])
    precise, pairs, covered = 0, 0, torch.zeros(len(features), dtype=torch.bool, device=features.device)
    for part in queries.split(chunk_size):
        inside = torch.cdist(part, features) <= radius
        precise += int(inside.any(dim=1).sum())
        pairs += int(inside.sum())
        covered |= inside.any(dim=0)
    return precise / len(queries), pairs / (k * len(queries)), float(covered.double().mean())


def mean_and_covariance(features: torch.Tensor, chunk_size: int = 8192) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and covariance in double precision, by chunks: features of a million images need no second copy."""
    parts = features.split(chunk_size)
    mean = sum(in_double(part).sum(dim=0) for part in parts) / len(features)
    scatter = sum(centred.T @ centred for centred in (in_double(part) - mean for part in parts))
    return mean, scatter / (len(features) - 1)


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
