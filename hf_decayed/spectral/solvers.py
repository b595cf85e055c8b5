"""Solvers of the normalised cut over one or many graphs: exact eigenvectors, Nystrom, and soft memberships by gradient.

The exact solver takes one graph, usually the average of all layers and heads. The gradient solver takes all graphs, on
grids of any size, and finds soft cluster memberships that are smooth on each of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from .graphs import MIN_DEGREE, GraphStack, image_batches, require_module, symmetric_normalize, upsample_graph


# Graphs up to this size go to LAPACK, larger ones to Lanczos iterations. On one thread, for 10 components: 1-2 ms against
# 3-6 ms at 196 patches, 13-15 ms against 5-21 ms at 576, 63-65 ms against 16-37 ms at 1,024. torch.lobpcg takes over 350 ms.
MAX_DENSE_SIZE = 576
# Landmark kernels have eigenvalues near zero, whose inverse would amplify rounding errors.
NYSTROM_TOLERANCE = 1e-4


@dataclass
class Spectrum:
    """Leading solutions of `A x = lambda D x`, the largest eigenvalue first.

    Args:
        eigenvalues (`torch.Tensor`): `(components,)`, at most 1.
        eigenvectors (`torch.Tensor`): `(patches, components)`, with `X^T D X = patches * I` for degrees of mean 1: the first
            is constant, entries are about 1, signs are fixed.
    """

    eigenvalues: torch.Tensor
    eigenvectors: torch.Tensor


def check_components(n_components: int, num_patches: int) -> None:
    if not 1 <= n_components <= num_patches:
        raise ValueError(f"`n_components` must be between 1 and the {num_patches} patches, got {n_components}.")


def average_graph(stacks: Sequence[GraphStack], grid: tuple[int, int] | None = None) -> torch.Tensor:
    """Mean of all row-normalised graphs `(patches, patches)` on `grid`, by default the finest; every graph counts alike."""
    grid = grid or finest_grid([stack.grid for stack in stacks])
    total = sum(upsample_graph(stack.matrices.sum(dim=0), stack.grid, grid) for stack in stacks)
    return total / sum(len(stack.matrices) for stack in stacks)


def finest_grid(grids: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The grid with the most patches; every other one must be a coarser version of it."""
    return max(grids, key=lambda grid: grid[0] * grid[1])


def exact_eigenvectors(graph: torch.Tensor, n_components: int) -> Spectrum:
    """Leading eigenvectors of a dense graph `(patches, patches)`, which is symmetrised first."""
    check_components(n_components, len(graph))
    normalized, sqrt_degrees = symmetric_normalize(graph)
    matrix = normalized.cpu().numpy()
    if len(matrix) <= MAX_DENSE_SIZE or n_components > len(matrix) // 4:
        linalg = require_module("scipy.linalg")
        first = len(matrix) - n_components
        values, vectors = linalg.eigh(matrix, subset_by_index=[first, len(matrix) - 1], check_finite=False)
    else:
        values, vectors = lanczos(matrix, n_components, sqrt_degrees.cpu().numpy())
    return scale_spectrum(values, vectors, sqrt_degrees.cpu().numpy())


def sparse_eigenvectors(graph: Any, n_components: int) -> Spectrum:
    """Leading eigenvectors of a symmetric `scipy.sparse` graph; patches without edges get zeros."""
    check_components(n_components, graph.shape[0])
    if n_components > graph.shape[0] // 4:  # Lanczos needs room for more vectors than it returns
        return exact_eigenvectors(torch.from_numpy(np.asarray(graph.todense())), n_components)
    normalized, diagonal = normalize_sparse(graph)
    sqrt_degrees = diagonal.numpy()
    values, vectors = lanczos(normalized, n_components, sqrt_degrees)
    spectrum = scale_spectrum(values, vectors, sqrt_degrees)
    spectrum.eigenvectors[diagonal.square() <= 2 * MIN_DEGREE] = 0  # isolated: dividing by their degree gives noise
    return spectrum


def lanczos(matrix: Any, n_components: int, sqrt_degrees: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`scipy.sparse.linalg.eigsh` from a start vector that is the same in every run.

    The leading eigenvector alone, `sqrt_degrees`, would be a bad start: Lanczos would never leave it.
    """
    linalg = require_module("scipy.sparse.linalg")
    noise = np.random.default_rng(0).standard_normal(len(sqrt_degrees))
    start = (sqrt_degrees / np.linalg.norm(sqrt_degrees) + noise / np.linalg.norm(noise)).astype(matrix.dtype)
    try:
        return linalg.eigsh(matrix, n_components, which="LA", v0=start, tol=1e-4, ncv=2 * n_components + 10)
    except linalg.ArpackNoConvergence as error:
        raise ValueError(
            f"Lanczos iterations found no {n_components} components: choose fewer, or more edges."
        ) from error


def scale_spectrum(values: np.ndarray, vectors: np.ndarray, sqrt_degrees: np.ndarray) -> Spectrum:
    """Eigenvectors of `D^-1 A` from those of `D^-1/2 A D^-1/2`, sorted and scaled so that the first is all ones."""
    order = np.argsort(-values)
    vectors = vectors[:, order] / sqrt_degrees[:, None] * np.linalg.norm(sqrt_degrees)
    eigenvectors = torch.from_numpy(np.ascontiguousarray(vectors, dtype=np.float32))
    return Spectrum(torch.from_numpy(values[order].astype(np.float32)), fix_signs(eigenvectors))


def fix_signs(vectors: torch.Tensor) -> torch.Tensor:
    """Every column with the sign that makes its sum of cubes positive; solvers return either sign."""
    return vectors * torch.where(vectors.pow(3).sum(dim=0) < 0, -1.0, 1.0)


def nystrom_eigenvectors(
    tokens: torch.Tensor,
    n_components: int,
    affinity: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    num_landmarks: int = 512,
    chunk_size: int = 8192,
    generator: torch.Generator | None = None,
) -> Spectrum:
    """Leading eigenvectors of a graph that is never stored: a rank-`num_landmarks` approximation from random landmarks.

    With the affinities `C` of all patches to the landmarks and `M` among landmarks, the graph is `C M^-1 C^T`. `C` is
    computed in chunks, three times, so that memory is that of the tokens and of the result.

    Args:
        tokens (`torch.Tensor`): `(patches, dim)`.
        affinity (`Callable`): `affinity(tokens, landmarks)`, a positive semi-definite kernel such as exp(cosine / temperature).
    """
    num_landmarks = min(num_landmarks, len(tokens))
    check_components(n_components, num_landmarks)
    chosen = torch.randperm(len(tokens), generator=generator)[:num_landmarks]
    landmarks, chunks = tokens[chosen], tokens.split(chunk_size)
    root = inverse_root(affinity(landmarks, landmarks))  # M^-1/2 in double precision
    column_sums = sum(affinity(chunk, landmarks).sum(dim=0).double() for chunk in chunks)
    degree_weights = root @ (root.T @ column_sums)  # degrees are C M^-1 C^T 1
    gram, degrees = torch.zeros(len(landmarks), len(landmarks), dtype=torch.float64), []
    for chunk in chunks:
        affinities = affinity(chunk, landmarks)
        degrees.append((affinities @ degree_weights.float()).clamp_min(MIN_DEGREE))
        gram += affinities.T @ (affinities / degrees[-1].unsqueeze(1))
    values, rotation = torch.linalg.eigh(root.T @ gram @ root)
    values, rotation = values.flip(0)[:n_components], rotation.flip(1)[:, :n_components]
    projection = (root @ (rotation * values.clamp_min(1e-12).rsqrt())).float()
    total = torch.cat(degrees).double().sum().sqrt().float()
    vectors = [affinity(chunk, landmarks) @ projection for chunk in chunks]
    # D^-1/2 twice: of the graph, and of its eigenvectors.
    vectors = [part * (total / degree).unsqueeze(1) for part, degree in zip(vectors, degrees)]
    return Spectrum(values.float(), fix_signs(torch.cat(vectors)))


def inverse_root(kernel: torch.Tensor) -> torch.Tensor:
    """`M^-1/2` of a positive semi-definite matrix, without its smallest eigenvalues: `(landmarks, rank)`."""
    values, vectors = torch.linalg.eigh(kernel.double())
    large = values > values[-1] * NYSTROM_TOLERANCE
    return vectors[:, large] * values[large].rsqrt()


def reorthogonalize(memberships: torch.Tensor, unit_columns: bool = True) -> torch.Tensor:
    """`X U` with the eigenvectors `U` of `X^T X`: orthogonal columns `(patches, components)`, the largest norm first.

    These are the left singular vectors times the singular values.

    Args:
        unit_columns (`bool`): Scale the columns of `X` to unit length first, so that small clusters count like large ones.
    """
    memberships = F.normalize(memberships, dim=0) if unit_columns else memberships
    gram = memberships.double().T @ memberships.double()
    _, rotation = torch.linalg.eigh(gram)
    return fix_signs(memberships @ rotation.flip(1).to(memberships))


def association(memberships: torch.Tensor, stack: GraphStack) -> tuple[torch.Tensor, torch.Tensor]:
    """Association of every channel with every graph, and the Gram matrix of the channels.

    Channels are pooled to the graphs' grid and scaled to unit length, `z_c`; the association is `z_c^T P z_c`. For symmetric
    graphs it is at most 1; for row-normalised ones, which need not be symmetric, it can be larger.

    Args:
        memberships (`torch.Tensor`): `(channels, height, width)`.

    Returns:
        `(graphs, channels)`, and `(channels, channels)` with ones on the diagonal (one per graph for symmetric graphs).
    """
    pooled = pool_maps(memberships, stack.grid).flatten(1)  # (channels, patches)
    if stack.sqrt_degrees is not None:
        pooled = pooled * stack.sqrt_degrees.unsqueeze(1)  # (graphs, channels, patches)
    vectors = F.normalize(pooled, dim=-1).transpose(-2, -1)  # (..., patches, channels)
    return quadratic_form(vectors, stack.matrices), vectors.mT @ vectors


def pool_maps(maps: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    """Maps `(..., height, width)` on another, coarser grid, by adaptive average pooling."""
    return maps if tuple(maps.shape[-2:]) == tuple(grid) else F.adaptive_avg_pool2d(maps, grid)


def quadratic_form(vectors: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """`z_c^T P z_c` per graph and channel, differentiable only in `vectors`.

    The gradient is `(P + P^T) z`. For symmetric matrices it is twice the product that the value needs, so the backward pass
    multiplies by no matrix: `matrices` must be symmetric, as `symmetric_parts` makes them.
    """
    with torch.no_grad():
        products = matrices @ vectors
    halves = (vectors * products).sum(dim=-2)
    return 2 * halves - halves.detach()


def symmetric_parts(stacks: Sequence[GraphStack]) -> list[GraphStack]:
    """The graphs as `(P + P^T) / 2`, which have the same quadratic forms, in one stack per grid: fewer and larger products."""
    groups: dict[tuple, list[GraphStack]] = {}
    for stack in stacks:
        groups.setdefault((stack.grid, stack.sqrt_degrees is None), []).append(stack)
    result = []
    for (grid, row_normalized), group in groups.items():
        matrices = torch.cat([stack.matrices for stack in group])
        matrices = matrices.add_(matrices.mT.clone()).mul_(0.5)
        sqrt_degrees = None if row_normalized else torch.cat([stack.sqrt_degrees for stack in group])
        result.append(GraphStack(matrices, grid, sqrt_degrees))
    return result


def soft_cut_loss(
    memberships: torch.Tensor,
    stacks: Sequence[GraphStack],
    association_weight: float = 2.0,
    orthogonality_weight: float = 2.0,
) -> torch.Tensor:
    """Mean `|1 - z_c^T P z_c|` over graphs and channels, plus mean squared products of different channels.

    Args:
        memberships (`torch.Tensor`): `(channels, height, width)`, non-negative, on the finest grid.
        stacks: Graphs with symmetric matrices (`symmetric_parts`).
    """
    num_graphs = sum(len(stack.matrices) for stack in stacks)
    distances = penalties = torch.zeros(())
    for stack in stacks:
        associations, gram = association(memberships, stack)
        off_diagonal = gram - torch.diag_embed(gram.diagonal(dim1=-2, dim2=-1))
        share = len(stack.matrices) / num_graphs
        distances = distances + share * (1 - associations).abs().mean()
        penalties = penalties + share * off_diagonal.square().mean()
    return association_weight * distances + orthogonality_weight * penalties


class ConvolutionalPrior(nn.Module):
    """Maps from a learned input through three small convolutions, which makes them smooth.

    Batch norm stays in training mode to the end, as in the authors' release.
    """

    def __init__(self, n_components: int, grid: tuple[int, int], width: int = 128):
        super().__init__()
        self.input = nn.Parameter(torch.randn(1, width, *grid))
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, n_components, 3, padding=1),
        )

    def forward(self) -> torch.Tensor:
        return self.layers(self.input).squeeze(0)


class BareMap(nn.Module):
    """One free number per channel and patch."""

    def __init__(self, n_components: int, grid: tuple[int, int]):
        super().__init__()
        self.map = nn.Parameter(torch.randn(n_components, *grid))

    def forward(self) -> torch.Tensor:
        return self.map


# Class, learning rate and steps. The release uses 2e-3 and 100 steps with the prior; the bare map is our calibration.
PARAMETERIZATIONS: dict[str, tuple[type[nn.Module], float, int]] = {
    "map": (BareMap, 3e-2, 400),
    "convolution": (ConvolutionalPrior, 2e-3, 100),
}


def soft_memberships(
    stacks: Sequence[GraphStack],
    n_components: int,
    grid: tuple[int, int] | None = None,
    parameterization: str = "map",
    steps: int | None = None,
    learning_rate: float | None = None,
    seed: int = 0,
) -> torch.Tensor:
    """Soft cluster memberships `(patches, components)` that minimise `soft_cut_loss` over all graphs, by Adam.

    Args:
        grid (`tuple[int, int]`, *optional*): Grid of the result, by default the finest of the graphs.
        parameterization (`str`): `map`, a free number per patch, or `convolution`, a small convolutional prior.
        steps, learning_rate: By default 400 and 3e-2 for the map, 100 and 2e-3 for the prior.
    """
    if parameterization not in PARAMETERIZATIONS:
        raise ValueError(f"`parameterization` must be 'map' or 'convolution', got {parameterization!r}.")
    grid = grid or finest_grid([stack.grid for stack in stacks])
    check_components(n_components, grid[0] * grid[1])
    network_class, default_rate, default_steps = PARAMETERIZATIONS[parameterization]
    stacks = symmetric_parts(stacks)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(seed)
        network = network_class(n_components, grid).to(stacks[0].matrices.device)
        optimizer = torch.optim.Adam(network.parameters(), lr=learning_rate or default_rate)
        for _ in range(default_steps if steps is None else steps):
            loss = soft_cut_loss(network().softmax(dim=0), stacks)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        return network().softmax(dim=0).flatten(1).T.contiguous()


def dataset_memberships(
    build_graphs: Callable[[torch.Tensor], list[tuple[Any, tuple[int, int]]]],
    num_images: int,
    grid: tuple[int, int],
    n_channels: int = 50,
    epochs: int = 200,
    inner_steps: int = 5,
    learning_rate: float = 1e-2,
    images_per_batch: int = 32,
    seed: int = 0,
    average: float = 0.99,
) -> torch.Tensor:
    """Soft cluster memberships `(images, channels, height, width)` of a data set: one free map per image.

    Every epoch shuffles the images into new batches, builds the sparse graphs of a batch, and takes some Adam steps on
    its maps. The result comes from a bias-corrected exponential moving average of the maps, one update per batch.

    Args:
        build_graphs (`Callable`): `build_graphs(images)` gives a symmetric `scipy.sparse` graph and its grid per layer.
    """
    generator = torch.Generator().manual_seed(seed)
    maps = nn.Embedding(num_images, n_channels * grid[0] * grid[1], sparse=True)
    with torch.no_grad():
        maps.weight.normal_(generator=generator)
    averages = torch.zeros_like(maps.weight)
    optimizer = torch.optim.SparseAdam(maps.parameters(), lr=learning_rate)
    for _ in range(epochs):
        for images in image_batches(num_images, images_per_batch, 1, generator):
            graphs = [(*normalize_sparse(graph), graph_grid) for graph, graph_grid in build_graphs(images)]
            for _ in range(inner_steps):
                with torch.enable_grad():
                    memberships = maps(images).view(len(images), n_channels, *grid).softmax(dim=1)
                    loss = dataset_loss(memberships, graphs)
                    optimizer.zero_grad()
                    loss.backward()
                optimizer.step()
            averages[images] = average * averages[images] + (1 - average) * maps.weight.detach()[images]
    averages /= 1 - average**epochs
    return averages.view(num_images, n_channels, *grid).softmax(dim=1)


def normalize_sparse(graph: Any) -> tuple[Any, torch.Tensor]:
    """`D^-1/2 A D^-1/2` of a symmetric `scipy.sparse` graph, and the diagonal of `D^1/2`; isolated patches get zeros."""
    sparse = require_module("scipy.sparse")
    sqrt_degrees = np.sqrt(np.maximum(np.asarray(graph.sum(axis=1)).ravel(), MIN_DEGREE))
    scale = sparse.dia_array(((1 / sqrt_degrees)[None], [0]), shape=graph.shape)
    return (scale @ graph @ scale).tocsr(), torch.from_numpy(sqrt_degrees).float()


def dataset_loss(
    memberships: torch.Tensor, graphs: Sequence[tuple[Any, torch.Tensor, tuple[int, int]]]
) -> torch.Tensor:
    """`soft_cut_loss` over sparse symmetric graphs of the patches of all images; coarse grids count more, as in the release.

    Args:
        memberships (`torch.Tensor`): `(images, channels, height, width)`.
    """
    total = torch.zeros(())
    for graph, sqrt_degrees, grid in graphs:
        pooled = pool_maps(memberships, grid).transpose(0, 1).flatten(1)  # (channels, all patches)
        vectors = F.normalize(pooled * sqrt_degrees, dim=-1).T
        products = torch.from_numpy(graph @ vectors.detach().numpy())
        halves = (vectors * products).sum(dim=0)
        associations = 2 * halves - halves.detach()  # the value and the gradient of z^T P z, see `quadratic_form`
        gram = vectors.T @ vectors
        off_diagonal = gram - torch.diag(gram.diagonal())
        weight = memberships.shape[-1] / grid[1]
        total = total + weight * ((1 - associations).abs().mean() + off_diagonal.square().mean())
    return total / len(graphs)
