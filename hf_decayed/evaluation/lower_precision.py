"""Evaluation and sampling with weights in lower precision, and how much that changes the outputs."""

from collections.abc import Callable

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from ..precision import choose_dtype


DTYPES = ("float32", "bfloat16", "float16", "auto")


def resolve_dtype(dtype: str, network: torch.nn.Module, batch_size: int, accelerator: Accelerator) -> tuple[str, str]:
    """One of [`DTYPES`] with `auto` resolved by a trial on the main process, and why."""
    if dtype != "auto":
        return dtype, "as asked for"
    main_process = accelerator.is_main_process
    choice = [choose_dtype(network, batch_size, torch.get_num_threads()) if main_process else None]
    return broadcast_object_list(choice)[0]


def cast_weights(network: torch.nn.Module, dtype: str, outputs: Callable[[], torch.Tensor]) -> float:
    """Casts a network in place; returns the norm of the change of `outputs()`, relative to their norm in float32."""
    exact = outputs().double()
    network.to(getattr(torch, dtype))
    return ((outputs().double() - exact).norm() / exact.norm()).item()


def describe_precision(dtype: str, reason: str, difference: float, what: str) -> str:
    return f"{dtype} ({reason}): {what} differ from those in float32 by {100 * difference:.2g} %"
