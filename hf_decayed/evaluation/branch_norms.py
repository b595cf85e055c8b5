"""The residual additions of an encoder: their alphas, and the norms of branches against the stream that they are added to."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import nn

from ..data.datasets import EvaluationDataset
from ..data.shards import Encoder, encode_dataset
from ..decay.carrier import decayed_stacks, settings_alphas
from ..decay.families import Block
from ..decay.own_models import own_stack
from ..decay.schedule import DecaySettings, running_products
from ..decay.stacks import Stack, find_stack
from ..errors import UserError
from .features import transformer_encoder


RESNET_BRANCH = "layer"  # module of a ResNet block whose output is added to that of its `shortcut`


@dataclass
class Shortcuts:
    """The residual additions of a model.

    Args:
        stack (`Stack`): Its blocks, in the order in which they run.
        alphas (`list[list[float]]`): Alpha of every addition of every block.
        settings (`DecaySettings`, *optional*): Settings of a model that `decay_shortcuts` has changed.
    """

    stack: Stack
    alphas: list[list[float]]
    settings: DecaySettings | None = None

    def effective_decay(self) -> float:
        return math.prod(math.prod(alphas) for alphas in self.alphas)


def find_shortcuts(model: nn.Module) -> Shortcuts | None:
    """The residual additions of an encoder; `None` if its blocks are of no family that `decay_shortcuts` knows."""
    decayed = decayed_stacks(model)
    if decayed:
        stack, settings = decayed[0]
        return Shortcuts(stack, settings_alphas(stack, settings), settings)
    own = own_stack(model)
    if own is not None:
        return Shortcuts(own, own.alphas)
    try:
        stack = find_stack(model)
    except UserError:
        return None
    return Shortcuts(stack, [[1.0] * len(block.steps) for block in stack.blocks])


def norm_encoder(model: nn.Module, shortcuts: Shortcuts) -> Encoder:
    """Encodes images as the mean norms of their tokens at every addition: `<number>.stream` and `<number>.branch`."""
    forward = transformer_encoder(model, ["last.mean"])
    stack = shortcuts.stack

    def encode(pixel_values, indices):
        norms: dict[str, torch.Tensor] = {}

        def record(stream: torch.Tensor, branch: torch.Tensor) -> None:
            number = len(norms) // 2
            norms[f"{number}.stream"], norms[f"{number}.branch"] = token_norms(stream), token_norms(branch)

        handles = []
        for module, block, alphas in zip(stack.modules, stack.blocks, shortcuts.alphas):
            watch = watch_projected_shortcut if block.steps[0][0].shortcut else watch_block
            handles += watch(module, block, alphas, shortcuts.settings is not None, record)
        try:
            forward(pixel_values, indices)
        finally:
            for handle in handles:
                handle.remove()
        return norms

    return encode


def token_norms(tokens: torch.Tensor) -> torch.Tensor:
    """Mean norm per image, of tokens `(batch, number, dim)` or of a feature map `(batch, dim, height, width)`."""
    norms = torch.linalg.vector_norm(tokens.float(), dim=1 if tokens.ndim == 4 else -1)
    return norms.flatten(1).mean(dim=1)


def watch_block(module: nn.Module, block: Block, alphas: list[float], is_carried: bool, record: Callable) -> list:
    """Hooks that record the stream before every addition of a block, and what is added.

    The stream is recorded where branches read it. What is added is the difference of two streams, not the output of a
    module, because layer scales and gates come after modules. `is_carried` says that `decay_shortcuts` has changed the
    block: then readers get the stream times the alphas that are still to come in the block.
    """
    branches = [step[0] for step in block.steps]
    streams: list[torch.Tensor] = []  # of the current addition

    def pass_stream(number: int, stream: torch.Tensor) -> None:
        if number > 0:
            previous = streams.pop()
            record(previous, stream - alphas[number - 1] * previous)
        streams[:] = [stream]

    def enter(module, args, kwargs):
        name = branches[0].streams[0]
        pass_stream(0, kwargs[name] if name in kwargs else args[0])

    def leave(module, args, output):
        output = output[0] if isinstance(output, tuple) else output
        # With `keep_function` the last block returns the stream at the scale that it had without decay.
        pass_stream(len(branches), output / dict(getattr(module, "output_scales", ())).get(0, 1.0))

    def read(number: int) -> Callable:
        scale = math.prod(alphas[number:]) if is_carried else 1.0
        return lambda reader, args: pass_stream(number, args[0] / scale)

    handles = [module.register_forward_pre_hook(enter, with_kwargs=True), module.register_forward_hook(leave)]
    for number, branch in enumerate(branches[1:], start=1):
        assert branch.reader is not None
        handles.append(module.get_submodule(branch.reader).register_forward_pre_hook(read(number)))
    return handles


def watch_projected_shortcut(
    module: nn.Module, block: Block, alphas: list[float], is_carried: bool, record: Callable
) -> list:
    """Hooks for the block of a ResNet, whose shortcut may project, and whose output has passed an activation."""
    outputs: dict[str, torch.Tensor] = {}
    shortcut = block.steps[0][0].shortcut
    assert shortcut is not None

    def keep(name: str) -> Callable:
        def hook(child, args, output):
            outputs[name] = output.clone()  # the addition is in place

        return hook

    def leave(module, args, output):
        record(outputs[shortcut] / (alphas[0] if is_carried else 1.0), outputs[RESNET_BRANCH])
        outputs.clear()

    handles = [module.get_submodule(name).register_forward_hook(keep(name)) for name in (shortcut, RESNET_BRANCH)]
    return [*handles, module.register_forward_hook(leave)]


def measure_additions(
    model: nn.Module,
    shortcuts: Shortcuts,
    images: EvaluationDataset,
    accelerator: Accelerator | None = None,
    batch_size: int = 64,
) -> list[dict]:
    """One row for every residual addition: `layer`, `branch`, `alpha`, `running_product`, `stream_norm`, `branch_norm`, `ratio`.

    `layer` counts blocks from 1. The running product restarts where downsampling begins a new stream. The ratio is that of
    the branch to alpha times the stream; `None` if that is zero.
    """
    accelerator = accelerator or Accelerator()
    encode = norm_encoder(model.to(accelerator.device), shortcuts)
    norms = encode_dataset(encode, images, accelerator, batch_size, "norms of branches")
    products = {
        (block_index, step_index): (branch.kind, after)
        for block_index, step_index, branch, _, after in running_products(shortcuts.stack.blocks, shortcuts.alphas)
    }
    rows = []
    for number, ((block_index, step_index), (kind, product)) in enumerate(products.items()):
        alpha = shortcuts.alphas[block_index][step_index]
        stream, branch = (norms[f"{number}.{name}"].double().mean().item() for name in ("stream", "branch"))
        rows.append(
            {
                "layer": block_index + 1,
                "branch": kind,
                "alpha": alpha,
                "running_product": product,
                "stream_norm": stream,
                "branch_norm": branch,
                "ratio": branch / (alpha * stream) if alpha * stream > 0 else None,
            }
        )
    return rows
