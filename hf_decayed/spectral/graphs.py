"""Affinity graphs between patches: from queries and keys, from values, or from features; dense or sparse.

An affinity is a non-negative number per pair of patches. A row-normalised graph `P = D^-1 A` is a random walk over patches;
for queries and keys it is the attention matrix itself. Query-key graphs hold mostly layout ("where"), value-value graphs
mostly category ("what").
"""

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch.nn import functional as F

from ..errors import UserError


# Cosine similarities become affinities as exp(similarity / temperature). Of 0.1, 0.2 and 0.3, this value found the foreground
# of 24 bundled training images best with values of our plain encoder; the decayed one is as good from 0.2 to 0.3.
TEMPERATURE = 0.2
# Degrees below this value count as this value: isolated patches get zero rows instead of a division by zero.
MIN_DEGREE = 1e-8
BYTES_PER_GB = 2**30
CHUNK_ENTRIES = 2**20  # entries of the graphs that are summed at a time: 4 MB, which fits a cache


def require_module(name: str) -> ModuleType:
    """A module of scipy or scikit-learn, or an error that names the extra to install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = "scikit-learn" if name.startswith("sklearn") else "scipy"
        raise UserError(f"Spectral clustering needs {package}: pip install 'hf_decayed[training]'.") from error


@dataclass
class GraphStack:
    """Dense graphs over the same patches, one per head or one per layer.

    Args:
        matrices (`torch.Tensor`): `(graphs, patches, patches)`, row-normalised, or symmetric with `sqrt_degrees`.
        grid (`tuple[int, int]`): Rows and columns of patches.
        sqrt_degrees (`torch.Tensor`, *optional*): `(graphs, patches)`, the diagonal of `D^(1/2)` of symmetric graphs.
    """

    matrices: torch.Tensor
    grid: tuple[int, int]
    sqrt_degrees: torch.Tensor | None = None


def check_tokens(tokens: torch.Tensor, name: str) -> torch.Tensor:
    """Tokens `(..., patches, dim)` in float32; refuses single patches and values that are not finite."""
    if not isinstance(tokens, torch.Tensor) or tokens.ndim < 2:
        raise ValueError(f"`{name}` must be a tensor of shape (..., patches, dim), got {describe(tokens)}.")
    if tokens.shape[-2] < 2:
        raise ValueError(f"`{name}` has {tokens.shape[-2]} patch; a graph needs at least two.")
    if not torch.isfinite(tokens).all():
        raise ValueError(f"`{name}` has NaN or infinite values: affinities need finite features.")
    return tokens.detach().float()


def describe(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def check_grid(grid: Sequence[int] | None, num_patches: int) -> tuple[int, int]:
    """`grid` as `(height, width)`, by default the square one; it must have `num_patches` cells."""
    if grid is None:
        side = round(num_patches**0.5)
        if side * side != num_patches:
            raise ValueError(f"{num_patches} patches are not a square grid: pass `grid=(height, width)`.")
        return side, side
    height, width = (int(length) for length in grid)
    if height * width != num_patches:
        raise ValueError(
            f"A grid of {height} x {width} has {height * width} patches, but the tokens have {num_patches}."
        )
    return height, width


def concatenate_heads(tokens: torch.Tensor) -> torch.Tensor:
    """`(..., heads, patches, dim)` -> `(..., patches, heads * dim)`."""
    return tokens.transpose(-3, -2).flatten(-2)


def query_key_factors(query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`Q / sqrt(dim)` and `K`, whose product is the attention logits."""
    return query * query.shape[-1] ** -0.5, key


def cosine_factors(tokens: torch.Tensor, others: torch.Tensor, temperature: float = TEMPERATURE):
    """Unit tokens divided by `temperature`, and unit tokens: the product is cosine similarities over `temperature`."""
    return F.normalize(tokens, dim=-1) / temperature, F.normalize(others, dim=-1)


def query_key_logits(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """`Q K^T / sqrt(dim)`, the attention logits: `(..., patches, patches)`."""
    query, key = check_tokens(query, "query"), check_tokens(key, "key")
    if query.shape[-1] != key.shape[-1] or query.shape[:-2] != key.shape[:-2]:
        raise ValueError(f"`query` and `key` do not match: {tuple(query.shape)} and {tuple(key.shape)}.")
    rows, columns = query_key_factors(query, key)
    return rows @ columns.mT


def cosine_logits(tokens: torch.Tensor, temperature: float = TEMPERATURE) -> torch.Tensor:
    """Cosine similarities of values or features, divided by `temperature`: `(..., patches, patches)`."""
    tokens = check_tokens(tokens, "tokens")
    rows, columns = cosine_factors(tokens, tokens, temperature)
    return rows @ columns.mT


def sum_of_walks(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Sum over heads of `softmax(rows columns^T)`, `(patches, other patches)`, in memory for a few heads at a time.

    Buffers are reused: for large graphs, allocating memory takes longer than the arithmetic.

    Args:
        rows, columns (`torch.Tensor`): `(heads, patches, dim)`, scaled by `query_key_factors` or `cosine_factors`.
    """
    size = rows.shape[1] * columns.shape[1]
    step = min(len(rows), max(1, CHUNK_ENTRIES // size))
    logits = torch.empty(step, rows.shape[1], columns.shape[1])
    total = torch.zeros(rows.shape[1], columns.shape[1])
    for first in range(0, len(rows), step):
        last = min(first + step, len(rows))
        chunk = logits[: last - first]
        torch.bmm(rows[first:last], columns[first:last].mT, out=chunk)
        torch.softmax(chunk, dim=-1, out=chunk)
        for head in chunk:
            total += head
    return total


def affinity(logits: torch.Tensor) -> torch.Tensor:
    """`exp(logits)`, each matrix divided by its largest entry so that nothing overflows."""
    return (logits - logits.amax(dim=(-2, -1), keepdim=True)).exp()


def row_normalize(affinities: torch.Tensor) -> torch.Tensor:
    """`D^-1 A`: rows sum to 1, those of isolated patches to 0. Of `affinity(logits)` it is `softmax(logits)`."""
    return affinities / affinities.sum(dim=-1, keepdim=True).clamp_min(MIN_DEGREE)


def symmetric_normalize(affinities: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`D^-1/2 S D^-1/2` with `S = (A + A^T) / 2`, and the diagonal of `D^1/2`. Its eigenvalues lie in [-1, 1]."""
    symmetric = (affinities + affinities.mT) / 2
    sqrt_degrees = symmetric.sum(dim=-1).clamp_min(MIN_DEGREE).sqrt()
    return symmetric / sqrt_degrees.unsqueeze(-1) / sqrt_degrees.unsqueeze(-2), sqrt_degrees


def graph_stack(logits: torch.Tensor, grid: Sequence[int] | None = None, symmetric: bool = False) -> GraphStack:
    """Graphs from logits `(patches, patches)` or `(heads, patches, patches)`.

    Args:
        symmetric (`bool`): Symmetrise `exp(logits)` and normalise both sides; otherwise rows are normalised (softmax).
    """
    logits = logits.unsqueeze(0) if logits.ndim == 2 else logits
    grid = check_grid(grid, logits.shape[-1])
    if symmetric:
        matrices, sqrt_degrees = symmetric_normalize(affinity(logits))
        return GraphStack(matrices, grid, sqrt_degrees)
    return GraphStack(logits.softmax(dim=-1), grid)


def pooling_matrix(fine: tuple[int, int], coarse: tuple[int, int]) -> torch.Tensor:
    """Adaptive average pooling from one grid to another as a matrix `(coarse patches, fine patches)`; rows sum to 1."""
    if coarse[0] > fine[0] or coarse[1] > fine[1]:
        raise ValueError(
            f"Pooling goes to a coarser grid, not from {fine[0]} x {fine[1]} to {coarse[0]} x {coarse[1]}."
        )
    cells = torch.eye(fine[0] * fine[1]).view(-1, *fine)
    return F.adaptive_avg_pool2d(cells, coarse).flatten(1).T.contiguous()


def upsample_graph(matrix: torch.Tensor, coarse: tuple[int, int], fine: tuple[int, int]) -> torch.Tensor:
    """A row-normalised graph of a coarse grid on a finer one: a patch walks like its cell, to all patches of a cell alike.

    For a map `x` on the fine grid the quadratic form is, up to a factor, that of the pooled map on the coarse grid.
    """
    if coarse == fine:
        return matrix
    pooling = pooling_matrix(fine, coarse).to(matrix)
    membership = pooling.T / pooling.sum(dim=0).unsqueeze(1)  # cells that a fine patch belongs to; rows sum to 1
    return membership @ matrix @ pooling


def check_memory(num_bytes: float, max_memory_gb: float, what: str, instead: str) -> None:
    """Refuses to take more than `max_memory_gb`, in one sentence that says how much is needed and what to choose instead."""
    if num_bytes > max_memory_gb * BYTES_PER_GB:
        raise UserError(
            f"{what} would need {num_bytes / BYTES_PER_GB:,.1f} GB, more than max_memory_gb={max_memory_gb:g}: {instead}."
        )


def sparse_graph(
    rows: torch.Tensor,
    columns: torch.Tensor | None = None,
    intra: int = 10,
    inter: int = 10,
    threshold: float = 0.1,
    images_per_batch: int = 32,
    rounds: int = 2,
    generator: torch.Generator | None = None,
):
    """Symmetric sparse graph over the patches of many images: the nearest patches within an image and in other images.

    Images are compared in random mini-batches, so time and memory grow linearly with the number of images. Every round
    draws other batches: with one round, patches of different batches would never be connected.

    Args:
        rows, columns (`torch.Tensor`): `(images, patches, dim)`; queries and keys, or values alone.
        intra, inter (`int`): Neighbours of a patch within its image, and in the other images of all rounds together.
        threshold (`float`): Cosine similarities below it are no edges.

    Returns:
        `scipy.sparse.csr_array`: `(images * patches)` squared, `(A + A^T) / 2`, without self edges.
    """
    sparse = require_module("scipy.sparse")
    rows = F.normalize(check_tokens(rows, "tokens"), dim=-1)
    columns = rows if columns is None else F.normalize(check_tokens(columns, "tokens"), dim=-1)
    num_images, num_patches, _ = rows.shape
    rounds = rounds if num_images > images_per_batch else 1
    parts: list[tuple[torch.Tensor, ...]] = []
    for images in image_batches(num_images, images_per_batch, rounds, generator):
        patches = (images.unsqueeze(1) * num_patches + torch.arange(num_patches)).flatten()
        neighbours = nearest_patches(rows[images], columns[images], intra, -(-inter // rounds), threshold)
        parts.append((patches[neighbours[0]], patches[neighbours[1]], neighbours[2]))
    source, target, weight = (torch.cat(part).numpy() for part in zip(*parts))
    size = num_images * num_patches
    index = "int32" if size < 2**31 else "int64"
    indices = (source.astype(index), target.astype(index))
    graph = sparse.coo_array((weight, indices), shape=(size, size)).tocsr()
    counts = sparse.coo_array((weight > 0, indices), shape=(size, size), dtype="float32").tocsr()
    graph.data /= counts.data  # an edge found in several rounds counts once
    return (graph + graph.T) * 0.5


def image_batches(
    num_images: int, images_per_batch: int, rounds: int, generator: torch.Generator | None = None
) -> Iterator[torch.Tensor]:
    """Indices of images in random batches of nearly equal size, all images once per round."""
    batches = -(-num_images // images_per_batch)
    for _ in range(rounds):
        yield from torch.randperm(num_images, generator=generator).tensor_split(batches)


def nearest_patches(
    rows: torch.Tensor, columns: torch.Tensor, intra: int, inter: int, threshold: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Source, target and weight of the edges between patches `(images, patches, dim)` of one batch."""
    num_images, num_patches, _ = rows.shape
    size = num_images * num_patches
    similarity = rows.flatten(0, 1) @ columns.flatten(0, 1).T
    blocks = similarity.view(num_images, num_patches, num_images, num_patches).diagonal(dim1=0, dim2=2)
    same_image = blocks.permute(2, 0, 1).clone()  # (images, patches, patches)
    same_image.diagonal(dim1=1, dim2=2).fill_(0)
    blocks.fill_(0)  # a view: only the other images are left
    offsets = torch.arange(size).div(num_patches, rounding_mode="floor").unsqueeze(1) * num_patches
    within = same_image.flatten(0, 1).topk(min(intra, num_patches - 1))
    between = similarity.topk(min(inter, size - num_patches))
    targets = torch.cat([within.indices + offsets, between.indices], dim=1)
    weights = torch.cat([within.values, between.values], dim=1)
    sources = torch.arange(size).unsqueeze(1).expand_as(targets)
    edges = weights >= max(threshold, 1e-6)
    return sources[edges], targets[edges], weights[edges]
