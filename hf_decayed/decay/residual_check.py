"""Checks on its first real input that a block is what the user says: `x + f(x)` with these readers and adders."""

import torch
from torch import nn

from ..errors import UserError


def check_residual_block(
    block: nn.Module, forward, readers: list[str], adders: list[str], args: tuple, kwargs: dict, stream_name: str
) -> None:
    """Raises `UserError` if the block is not a pre-norm block of these branches.

    If its adders output zero, a residual block returns its input. If its readers get zero, it returns its input plus
    something that does not depend on it.
    """
    stream = kwargs[stream_name] if stream_name in kwargs else args[0]

    def run(stream: torch.Tensor) -> torch.Tensor:
        if stream_name in kwargs:
            output = forward(block, *args, **{**kwargs, stream_name: stream})
        else:
            output = forward(block, stream, *args[1:], **kwargs)
        return (output[0] if isinstance(output, tuple) else output) - stream

    name = type(block).__name__
    if run_with_hooks(run, stream, block, adders, silence_output).any():
        raise UserError(
            f"{name} does not return its input when {', '.join(adders)} return zero: it is no pre-norm block with these "
            "adders, and the decay would compute something else."
        )
    first = run_with_hooks(run, stream, block, readers, silence_input)
    second = run_with_hooks(run, 2 * stream, block, readers, silence_input)
    tolerance = 1e3 * torch.finfo(stream.dtype).eps * stream.abs().max().item()
    if not torch.allclose(first, second, rtol=0, atol=tolerance):
        raise UserError(
            f"{name} reads its stream elsewhere than in {', '.join(readers)}: the decay would not reach that."
        )


def run_with_hooks(run, stream: torch.Tensor, block: nn.Module, names: list[str], register) -> torch.Tensor:
    """Runs the block without side effects: no gradients, no random numbers used up, no hooks left."""
    handles = [register(block.get_submodule(name)) for name in names]
    devices = [stream.device] if stream.device.type == "cuda" else []
    try:
        with torch.no_grad(), torch.random.fork_rng(devices):
            return run(stream)
    finally:
        for handle in handles:
            handle.remove()


def silence_output(module: nn.Module):
    def hook(module, args, output):
        if isinstance(output, tuple):
            return (torch.zeros_like(output[0]), *output[1:])
        return torch.zeros_like(output)

    return module.register_forward_hook(hook)


def silence_input(module: nn.Module):
    def hook(module, args, kwargs):
        if args:
            return (torch.zeros_like(args[0]), *args[1:]), kwargs
        first = next(iter(kwargs))
        return args, {**kwargs, first: torch.zeros_like(kwargs[first])}

    return module.register_forward_pre_hook(hook, with_kwargs=True)
