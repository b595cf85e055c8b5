"""Large float32 matrix products on a CPU, with PyTorch or NumPy, whichever is faster."""

import contextlib
import functools
import platform
from pathlib import Path

import torch
from threadpoolctl import ThreadpoolController


@functools.cache
def numpy_is_faster() -> bool:
    """Whether PyTorch multiplies with Intel's MKL on an AMD CPU; NumPy's OpenBLAS was a sixth faster where it was measured."""
    try:
        cpu = Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        cpu = platform.processor()
    return torch.backends.mkl.is_available() and "AuthenticAMD" in cpu


def runs_in_numpy(features: torch.Tensor) -> bool:
    return features.device.type == "cpu" and features.dtype == torch.float32 and numpy_is_faster()


@contextlib.contextmanager
def same_threads():
    """Where NumPy multiplies, it does so with as many threads as PyTorch in this context."""
    if not numpy_is_faster():
        yield
        return
    with find_libraries().limit(limits=torch.get_num_threads(), user_api="blas"):
        yield


@functools.cache
def find_libraries() -> ThreadpoolController:
    """Libraries with threads of their own; finding them takes milliseconds."""
    return ThreadpoolController()


def multiply_transposed(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`left @ right.T`."""
    if runs_in_numpy(left):
        return torch.from_numpy(left.detach().numpy() @ right.detach().numpy().T)
    return left @ right.T


def upper_gram(features: torch.Tensor, width: int = 128) -> torch.Tensor:
    """`features.T @ features`, of which only the upper triangle is to be read: about half of the products."""
    if runs_in_numpy(features):
        return torch.from_numpy(features.detach().numpy().T @ features.detach().numpy())  # NumPy sees the symmetry
    dim = features.shape[1]
    gram = features.new_zeros(dim, dim)
    for start in range(0, dim, width):
        end = start + width
        gram[:end, start:end] = features[:, :end].T @ features[:, start:end]
    return gram
