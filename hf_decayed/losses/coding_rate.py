"""Coding rate: how many directions a set of vectors uses, as a differentiable number.

    R(Z) = 1/2 log det(I + dim / (number * epsilon) Z^T Z)

For rows of length 1 it is largest when they spread evenly over all directions, and small when they are all alike.
"""

from functools import lru_cache

import torch
import torch.distributed
import torch.distributed.nn.functional as distributed


__all__ = ["coding_rate", "max_coding_rate", "uniform_coding_rate"]

EPSILON = 0.2  # of the latent intrinsics release; the dissertation writes lambda^2 and gives no value
ROWS_PER_CHUNK = 2**16


def coding_rate(features: torch.Tensor, epsilon: float = EPSILON) -> torch.Tensor:
    """Coding rate of the rows of `features`, over all processes together.

    In distributed training, the value is that of one process with all rows. So are the gradients, once they are averaged
    over the processes, as DistributedDataParallel does. Gradient accumulation has no such equivalent: a micro-batch knows
    nothing of the others.

    Args:
        features (`torch.Tensor` of shape `(..., dim)`): One vector per row, usually of length 1.
        epsilon (`float`, defaults to 0.2): Squared precision; the smaller, the more do weak directions count.

    Returns:
        `torch.Tensor`: A number; at most `max_coding_rate` for rows of length 1.
    """
    with torch.autocast(features.device.type, enabled=False):  # determinants need float32
        rows = features.flatten(0, -2).float()
        if rows.numel() == 0:
            raise ValueError(f"`features` must have rows and columns, got the shape {tuple(features.shape)}.")
        return rate_of_gram(*sum_over_processes(rows.T @ rows, len(rows)), epsilon)


def sum_over_processes(gram: torch.Tensor, number: int) -> tuple[torch.Tensor, int]:
    """Gram matrix and number of rows of all processes; gradients go back to the rows of each."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return gram, number
    total = torch.tensor(number, device=gram.device)
    torch.distributed.all_reduce(total)
    return distributed.all_reduce(gram), int(total)


def rate_of_gram(gram: torch.Tensor, number: int, epsilon: float) -> torch.Tensor:
    """Coding rate of `number` rows from their Gram matrix `Z^T Z`."""
    dim = len(gram)
    identity = torch.eye(dim, dtype=gram.dtype, device=gram.device)
    factor = torch.linalg.cholesky(identity + dim / (number * epsilon) * gram)
    return factor.diagonal().log().sum()  # log det of a Cholesky factor is half of that of the matrix


def max_coding_rate(number: int, dim: int, epsilon: float = EPSILON) -> float:
    """The largest coding rate that `number` rows of length 1 can have: that of rows spread evenly over all directions."""
    rank = min(number, dim)
    return rank / 2 * torch.log1p(torch.tensor(dim / (rank * epsilon), dtype=torch.float64)).item()


@lru_cache(maxsize=64)
def uniform_coding_rate(number: int, dim: int, epsilon: float = EPSILON, seed: int = 0) -> float:
    """Coding rate of `number` random rows, uniform on the sphere: what a set of vectors without structure has."""
    generator = torch.Generator().manual_seed(seed)
    gram = torch.zeros(dim, dim)
    for start in range(0, number, ROWS_PER_CHUNK):
        rows = torch.randn(min(ROWS_PER_CHUNK, number - start), dim, generator=generator)
        rows = torch.nn.functional.normalize(rows, dim=1)
        gram += rows.T @ rows
    return rate_of_gram(gram, number, epsilon).item()
