"""Checks on its first real input that a block is what the user says: `x + f(x)` with these readers and adders."""

import copy

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
        inputs, named = copy_caches((args, kwargs))
        if stream_name in named:
            output = forward(block, *inputs, **{**named, stream_name: stream})
        else:
            output = forward(block, stream, *inputs[1:], **named)
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
    """Runs the block without side effects: no gradients, no random numbers used up, no buffers changed, no hooks left."""
    handles = [register(block.get_submodule(name)) for name in names]
    devices = [stream.device] if stream.device.type == "cuda" else []
    buffers = [(buffer, buffer.clone()) for buffer in block.buffers()]  # such as the averages of a batch norm
    try:
        with torch.no_grad(), torch.random.fork_rng(devices):
            return run(stream)
    finally:
        for handle in handles:
            handle.remove()
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):  # autograd notices any writing
                    buffer.copy_(before)


def copy_caches(inputs):
    """A copy of a block's arguments, of which it may change some, such as the keys and values of earlier tokens."""
    copies = {id(tensor): tensor.detach().clone() for tensor in find_tensors(inputs)}
    return copy.deepcopy(inputs, copies)  # which refuses to copy tensors that have a gradient function


def find_tensors(values) -> list[torch.Tensor]:
    """All tensors in containers and in attributes of objects, which may refer to each other."""
    tensors, seen, waiting = [], set(), [values]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, (tuple, list)):
            waiting.extend(value)
        elif hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)):
            waiting.append(vars(value))
    return tensors


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
