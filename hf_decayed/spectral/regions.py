"""Regions and pictures from embeddings of patches: k-means, connected regions, instance proposals, RGB."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .graphs import check_grid, require_module


# Silhouettes need all distances between points; above this number, a random sample is used.
MAX_SILHOUETTE_POINTS = 2048


@dataclass
class Clusters:
    """K-means clusters of points.

    Args:
        labels (`torch.Tensor`): `(points,)`, cluster of each point.
        k_means (`sklearn.cluster.KMeans`): The fitted estimator, whose labels the silhouette was measured on.
        silhouettes (`dict[int, float]`): Silhouette of every number of clusters that was tried.
    """

    labels: torch.Tensor
    k_means: Any
    silhouettes: dict[int, float]


def check_points(points: torch.Tensor) -> np.ndarray:
    """Points `(number, dim)` as a float32 array; all finite."""
    if points.ndim != 2:
        raise ValueError(f"Points must have the shape (number, dim), got {tuple(points.shape)}.")
    if not torch.isfinite(points).all():
        raise ValueError("Points have NaN or infinite values, which cannot be clustered.")
    return np.ascontiguousarray(points.detach().cpu().float().numpy())


def k_means_clusters(
    points: torch.Tensor, n_clusters: int, seed: int = 0, n_init: int = 3, mini_batch: bool = False
) -> Clusters:
    """K-means with `n_clusters` clusters of points `(number, dim)`; `mini_batch` for more points than fit a full pass."""
    if not 1 <= n_clusters <= len(points):
        raise ValueError(f"`n_clusters` must be between 1 and the {len(points)} points, got {n_clusters}.")
    cluster = require_module("sklearn.cluster")
    if mini_batch:
        k_means = cluster.MiniBatchKMeans(n_clusters, n_init=n_init, batch_size=4096, random_state=seed)
    else:
        k_means = cluster.KMeans(n_clusters, n_init=n_init, random_state=seed)
    k_means.fit(check_points(points))
    return Clusters(torch.from_numpy(k_means.labels_).long(), k_means, {})


def best_silhouette_clusters(
    points: torch.Tensor, candidates: Iterable[int] = range(2, 11), seed: int = 0, n_init: int = 3
) -> Clusters:
    """K-means with the number of clusters whose silhouette is best; the clusters are those that it was measured on.

    Args:
        points (`torch.Tensor`): `(number, dim)`. Candidates that are not below the number of points are left out.
    """
    candidates = [number for number in candidates if 2 <= number < len(points)]
    if not candidates:
        raise ValueError(
            f"A silhouette needs 2 clusters and more points than clusters; there are {len(points)} points."
        )
    array = check_points(points)
    if not np.ptp(array, axis=0).any():
        raise ValueError("All points are equal: there is nothing to cluster.")
    sample = np.arange(len(array))
    if len(array) > MAX_SILHOUETTE_POINTS:
        sample = np.random.default_rng(seed).choice(len(array), MAX_SILHOUETTE_POINTS, replace=False)
    metrics = require_module("sklearn.metrics")
    distances = metrics.pairwise_distances(array[sample])
    np.fill_diagonal(distances, 0)
    best, silhouettes = None, {}
    for number in candidates:
        clusters = k_means_clusters(points, number, seed, n_init)
        labels = clusters.labels.numpy()[sample]
        if not 2 <= len(np.unique(labels)) < len(labels):  # of a sample, or of points that are equal
            continue
        silhouettes[number] = float(metrics.silhouette_score(distances, labels, metric="precomputed"))
        if best is None or silhouettes[number] > max(best.silhouettes.values()):
            best = Clusters(clusters.labels, clusters.k_means, {number: silhouettes[number]})
    if best is None:
        raise ValueError("Too few points are different: no number of clusters has a silhouette.")
    best.silhouettes = silhouettes
    return best


def connected_regions(labels: torch.Tensor) -> torch.Tensor:
    """Connected regions of a label map `(height, width)`, numbered from 1; patches that share an edge are neighbours.

    Every label counts, including 0: nothing is taken for background.
    """
    if labels.ndim != 2:
        raise ValueError(f"A label map must have the shape (height, width), got {tuple(labels.shape)}.")
    ndimage = require_module("scipy.ndimage")
    regions = np.zeros(tuple(labels.shape), dtype=np.int64)
    for label in labels.unique():
        numbered, _ = ndimage.label((labels == label).cpu().numpy())
        regions += np.where(numbered > 0, numbered + regions.max(), 0)
    return torch.from_numpy(regions)


def ward_merges(points: torch.Tensor, regions: torch.Tensor) -> list[torch.Tensor]:
    """Masks `(height, width)` of all regions, and of every union when adjacent regions are merged one pair at a time.

    Ward's rule: first the pair whose union adds least to the squared distances of points from their region's mean.

    Args:
        points (`torch.Tensor`): `(patches, dim)`.
        regions (`torch.Tensor`): `(height, width)`, numbered from 1.
    """
    masks = {int(number): regions == number for number in regions.unique()}
    proposals = list(masks.values())
    means = {number: points[mask.flatten()].mean(dim=0) for number, mask in masks.items()}
    sizes = {number: int(mask.sum()) for number, mask in masks.items()}
    borders = adjacent_pairs(regions)
    while borders:
        first, second = min(borders, key=lambda pair: (ward_cost(pair, means, sizes), pair))
        total = sizes[first] + sizes[second]
        means[first] = (sizes[first] * means[first] + sizes[second] * means.pop(second)) / total
        masks[first], sizes[first] = masks[first] | masks.pop(second), total
        proposals.append(masks[first])
        renamed = [[first if number == second else number for number in pair] for pair in borders]
        borders = {(min(pair), max(pair)) for pair in renamed if pair[0] != pair[1]}
    return proposals


def ward_cost(pair: tuple[int, int], means: dict[int, torch.Tensor], sizes: dict[int, int]) -> float:
    first, second = pair
    weight = sizes[first] * sizes[second] / (sizes[first] + sizes[second])
    return weight * float((means[first] - means[second]).square().sum())


def adjacent_pairs(regions: torch.Tensor) -> set[tuple[int, int]]:
    """Pairs of numbers that share an edge in a map `(height, width)`, the smaller number first."""
    horizontal = torch.stack([regions[:, :-1], regions[:, 1:]], dim=-1).flatten(0, 1)
    vertical = torch.stack([regions[:-1], regions[1:]], dim=-1).flatten(0, 1)
    pairs = torch.cat([horizontal, vertical]).sort(dim=1).values.unique(dim=0)
    return {(int(first), int(second)) for first, second in pairs if first != second}


@dataclass
class InstanceProposals:
    """Masks `(number, height, width)` that may be objects, and their scores in (0, 1], best first."""

    masks: torch.Tensor
    scores: torch.Tensor


def instance_proposals(
    embedding: torch.Tensor,
    grid: Sequence[int] | None = None,
    cluster_numbers: Iterable[int] = range(2, 11),
    min_area: float = 0.01,
    max_area: float = 0.9,
    max_overlap: float = 0.7,
    max_proposals: int = 100,
    seed: int = 0,
) -> InstanceProposals:
    """Object proposals: connected regions of k-means clusters and their Ward merges, scored, without near duplicates.

    A proposal is dropped if its area is out of range, or if it touches two borders of the image; if that leaves none, three
    borders, then any. Its score is its silhouette against as many other patches, those nearest to it in the embedding.

    Args:
        embedding (`torch.Tensor`): `(patches, components)`.
        cluster_numbers: Numbers of clusters for k-means; the proposals of all are pooled.
        min_area, max_area (`float`): Shares of the patches.
        max_overlap (`float`): Of two masks with a larger intersection over union, the one with the lower score is dropped.
    """
    height, width = check_grid(grid, len(embedding))
    masks: list[torch.Tensor] = []
    for number in cluster_numbers:
        if number <= len(embedding):
            labels = k_means_clusters(embedding, number, seed).labels.view(height, width)
            masks += ward_merges(embedding, connected_regions(labels))
    masks = [mask for mask in unique_masks(masks) if min_area <= mask.float().mean() <= max_area]
    masks = drop_border_masks(masks)
    scores = [region_silhouette(embedding, mask.flatten()) for mask in masks]
    order = sorted((index for index, score in enumerate(scores) if score > 0), key=lambda index: -scores[index])
    chosen: list[int] = []
    for index in order:
        if all(mask_iou(masks[index], masks[other]) <= max_overlap for other in chosen):
            chosen.append(index)
    chosen = chosen[:max_proposals]
    empty = torch.zeros(0, height, width, dtype=torch.bool)
    return InstanceProposals(
        torch.stack([masks[index] for index in chosen]) if chosen else empty,
        torch.tensor([scores[index] for index in chosen]),
    )


def unique_masks(masks: list[torch.Tensor]) -> list[torch.Tensor]:
    return list({mask.numpy().tobytes(): mask for mask in masks}.values())


def drop_border_masks(masks: list[torch.Tensor]) -> list[torch.Tensor]:
    """Masks that touch fewer than two borders of the image; if there are none, fewer than three; if none again, all."""
    borders = [sum(bool(side.any()) for side in (mask[0], mask[-1], mask[:, 0], mask[:, -1])) for mask in masks]
    for limit in (2, 3):
        if inner := [mask for mask, number in zip(masks, borders) if number < limit]:
            return inner
    return masks


def region_silhouette(points: torch.Tensor, mask: torch.Tensor) -> float:
    """Silhouette of a region `(patches,)` against as many of the other patches, the nearest to its mean."""
    inside, outside = points[mask], points[~mask]
    if not len(outside):
        return 0.0
    distances = (outside - inside.mean(dim=0)).square().sum(dim=1)
    nearest = outside[distances.argsort(stable=True)[: len(inside)]]
    if len(inside) + len(nearest) < 3:  # a silhouette needs more points than clusters
        return 0.0
    labels = np.repeat([0, 1], [len(inside), len(nearest)])
    return float(require_module("sklearn.metrics").silhouette_score(torch.cat([inside, nearest]).numpy(), labels))


def mask_iou(first: torch.Tensor, second: torch.Tensor) -> float:
    """Intersection over union of two masks."""
    return float((first & second).sum() / (first | second).sum().clamp_min(1))


def components_to_rgb(
    embeddings: torch.Tensor | Sequence[torch.Tensor],
    grids: Sequence[int] | Sequence[Sequence[int]] | None = None,
    method: str = "components",
) -> list[torch.Tensor]:
    """Pictures `(height, width, 3)` in [0, 1] of embeddings, one set of colours for all of them.

    Args:
        embeddings: `(patches, components)` each; at least four components, or any number with `pca`.
        grids: A grid `(height, width)` for all, or one per embedding; square by default.
        method (`str`): `components` shows components 2 to 4 (the first is nearly constant), `pca` three principal components.
            Both are scaled from the smallest to the largest value over all embeddings.
    """
    embeddings = [embeddings] if isinstance(embeddings, torch.Tensor) else list(embeddings)
    if not embeddings:
        raise ValueError("`components_to_rgb` got no embeddings.")
    if grids is None or isinstance(grids[0], int):
        grids = [grids] * len(embeddings)  # type: ignore[list-item]
    points = torch.cat([torch.from_numpy(check_points(embedding)) for embedding in embeddings])
    colours = color_components(points, method)
    low, high = colours.amin(dim=0), colours.amax(dim=0)
    colours = (colours - low) / (high - low).clamp_min(1e-12)
    parts = colours.split([len(embedding) for embedding in embeddings])
    shapes = [check_grid(grid, len(part)) for grid, part in zip(grids, parts)]  # type: ignore[arg-type]
    return [part.view(*shape, 3) for part, shape in zip(parts, shapes)]


def color_components(points: torch.Tensor, method: str) -> torch.Tensor:
    """Three numbers per point, `(number, 3)`; missing principal components are zero."""
    if method == "components":
        if points.shape[1] < 4:
            raise ValueError(f"`method='components'` needs 4 components, got {points.shape[1]}: choose 'pca'.")
        return points[:, 1:4]
    if method != "pca":
        raise ValueError(f"`method` must be 'components' or 'pca', got {method!r}.")
    centred = (points - points.mean(dim=0)).double()
    _, directions = torch.linalg.eigh(centred.T @ centred)
    directions = directions.flip(1)[:, :3]
    directions = directions * torch.where(directions.sum(dim=0) < 0, -1.0, 1.0)
    colours = (centred @ directions).float()
    return torch.nn.functional.pad(colours, (0, 3 - colours.shape[1]))
