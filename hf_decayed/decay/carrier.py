"""The decay inside blocks that compute `x + f(x)`: factors before and after modules, without changes to their code.

A block of two branches computes `y = x + f(x)` and `z = y + g(y)`. Let `s_k` be the product of its alphas from branch k to
the last. If the stream enters as `s_1 * x`, every reader gets it divided by the `s_k` of its branch, and the output of
branch k is multiplied by `s_{k+1}`, then what leaves the block is `alpha_2 * (alpha_1 * x + f(x)) + g(...)`: the decayed
stream itself, whatever norm, gate, layer scale or dropout is in between.

The factors belong to classes derived from those of the modules. Hooks would come too late: transformers records
`hidden_states[0]` from the arguments of the first block.
"""

import math
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..errors import UserError
from .families import Block, block_streams, scaled_names
from .residual_check import check_residual_block
from .schedule import DecaySettings, running_products, stack_alphas
from .stacks import Stack, forward_parameters


# Attributes of decayed blocks, readers and adders.
STORED = (
    "input_scales",
    "output_scales",
    "scaled_children",
    "is_unchecked",
    "decayed_block",
    "decay_settings",
    "block_index",
)

Scales = dict[str, tuple[dict[str | int, float], dict[int, float]]]


class ScaledModule:
    """Mixin that multiplies arguments and outputs of a module's `forward` by constants.

    Attributes are plain Python values, so that the state dict keeps its names.
    """

    input_scales: tuple[tuple[int, str, float], ...] = ()  # position, name, factor; factors of 1 are left out
    output_scales: tuple[tuple[int, float], ...] = ()  # position in a tuple, factor
    scaled_children: tuple[str, ...] = ()
    is_unchecked: bool = False

    def forward(self, *args, **kwargs):
        if self.scaled_children and not torch.compiler.is_compiling():
            check_children(self)
            if self.is_unchecked:
                check_user_block(self, args, kwargs)
        for position, name, scale in self.input_scales:
            if name in kwargs:
                kwargs[name] = kwargs[name] * scale
            elif position < len(args):
                args = (*args[:position], args[position] * scale, *args[position + 1 :])
        return self.scale_outputs(super().forward(*args, **kwargs))  # type: ignore[misc]

    def scale_outputs(self, output):
        for position, scale in self.output_scales:
            if isinstance(output, tuple):
                output = (*output[:position], output[position] * scale, *output[position + 1 :])
            else:
                output = output * scale
        return output

    def __reduce__(self):
        # Derived classes have no importable name: pickles and copies name the class that they are derived from.
        return rebuild, (scaling_mixin(self), original_class(self, ScaledModule)), self.__getstate__()


class ScaledLayerNorm(ScaledModule):
    """Mixin for `nn.LayerNorm`: a norm of `scale * x` is a norm of x with another eps, which costs no time."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        eps = self.eps / self.input_scales[0][2] ** 2 if self.input_scales else self.eps  # type: ignore[attr-defined]
        output = F.layer_norm(input, self.normalized_shape, self.weight, self.bias, eps)  # type: ignore[attr-defined]
        return self.scale_outputs(output)


def scaling_mixin(module) -> type:
    return ScaledLayerNorm if type(module) is nn.LayerNorm or isinstance(module, ScaledLayerNorm) else ScaledModule


def check_children(block) -> None:
    """Refuses to run a block in which a module was replaced after the decay, such as by an adapter."""
    for name in block.scaled_children:
        module = block.get_submodule(name)
        # Hooks of accelerate call the `forward` that they replace, kernels and adapters may not.
        bypassed = "forward" in vars(module) and not hasattr(module, "_hf_hook")
        if not isinstance(module, ScaledModule) or bypassed:
            raise UserError(
                f"'{name}' of {type(block).__name__} was replaced after `decay_shortcuts`: replace or wrap it before."
            )


def check_user_block(block, args: tuple, kwargs: dict) -> None:
    """Checks a block once against what the user says of it: it decays only if that is true."""
    branches = [branch for step in block.decayed_block.steps for branch in step]
    readers, adders = ([getattr(branch, role) for branch in branches] for role in ("reader", "adder"))
    forward = original_class(block, ScaledModule).forward  # type: ignore[attr-defined]
    check_residual_block(block, forward, readers, adders, args, kwargs, branches[0].streams[0])
    block.is_unchecked = False


@cache
def derived_class(mixin: type, module_class: Any) -> Any:
    """`module_class` with a mixin in front, under the same name, which libraries compare with lists of names."""
    names = ("__module__", "__qualname__", "__doc__")
    return type(module_class.__name__, (mixin, module_class), {name: getattr(module_class, name) for name in names})


def rebuild(mixin: type, module_class: type) -> nn.Module:
    """An empty instance of a derived class, for copies and pickles."""
    return object.__new__(derived_class(mixin, module_class))


def derive(module: nn.Module, mixin: type) -> None:
    if not isinstance(module, mixin):
        module.__class__ = derived_class(mixin, module.__class__)


def original_class(module, mixin: type) -> type:
    """The class that a mixin was added to."""
    ancestors = type(module).__mro__
    return ancestors[ancestors.index(mixin) + 1]


def restore(module: nn.Module, mixin: type) -> None:
    """Gives a module the class that it had, and removes what the mixin stored in it."""
    module.__class__ = original_class(module, mixin)
    for name in STORED:
        vars(module).pop(name, None)


def install(stack: Stack, settings: DecaySettings) -> None:
    """Derives the classes of all blocks, readers and adders, and sets their factors."""
    for index, (module, block) in enumerate(zip(stack.modules, stack.blocks)):
        for name in scaled_names(block):
            child = module.get_submodule(name)
            derive(child, scaling_mixin(child))
        derive(module, ScaledModule)
        module.scaled_children = tuple(scaled_names(block))
        if stack.is_unchecked:
            module.is_unchecked = True
        module.decayed_block, module.decay_settings, module.block_index = block, settings, index
    update(stack, settings)


def update(stack: Stack, settings: DecaySettings) -> None:
    """Sets the factors of an installed stack from its settings."""
    alphas = settings_alphas(stack, settings)
    scales = [carrier_scales(block, block_alphas) for block, block_alphas in zip(stack.blocks, alphas)]
    if settings.keep_function:
        add_kept_scales(stack, alphas, scales)
    for module, block_scales in zip(stack.modules, scales):
        for name, (inputs, outputs) in block_scales.items():
            set_factors(module.get_submodule(name), inputs, outputs)


def settings_alphas(stack: Stack, settings: DecaySettings) -> list[list[float]]:
    return stack_alphas(stack.blocks, settings.shortcut_decay, settings.schedule, settings.granularity, settings.scope)


def carrier_scales(block: Block, alphas: list[float]) -> Scales:
    """Factors of inputs and outputs by the name of the submodule; the block's own name is empty."""
    scales: Scales = {name: ({}, {}) for name in ["", *scaled_names(block)]}
    for streams in block_streams(block):
        branches = [
            (branch, alpha) for step, alpha in zip(block.steps, alphas) for branch in step if branch.streams == streams
        ]
        for number, (branch, alpha) in enumerate(branches):
            if branch.shortcut:
                scales[branch.shortcut][1][0] = alpha
                continue
            product = math.prod(later for _, later in branches[number:])
            later_product = math.prod(later for _, later in branches[number + 1 :])
            if number == 0:
                scales[""][0].update(dict.fromkeys(streams, product))
            if branch.reader:
                scales[branch.reader][0][0] = 1 / product
            if branch.adder and number < len(branches) - 1:
                scales[branch.adder][1][branch.adder_output] = later_product
    return scales


def add_kept_scales(stack: Stack, alphas: list[list[float]], scales: list[Scales]) -> None:
    """Readers and the model's output get the stream at its scale without decay: divided by the running product.

    Norms would undo the scale too, except for their eps, which is not small compared with a decayed stream.
    """
    last: dict[tuple[int, str], tuple[int, float]] = {}
    for index, _, branch, before, after in running_products(stack.blocks, alphas):
        if branch.reader:
            scales[index][branch.reader][0][0] /= before
        for stream in branch.streams:
            last[stack.blocks[index].stage, stream] = index, after
    for (_, stream), (index, product) in last.items():
        scales[index][""][1][stack.blocks[index].stream_outputs.get(stream, 0)] = 1 / product


def set_factors(module: nn.Module, inputs: dict[str | int, float], outputs: dict[int, float]) -> None:
    parameters = forward_parameters(original_class(module, ScaledModule))
    module.input_scales = tuple(
        (argument, parameters[argument], scale)
        if isinstance(argument, int)
        else (parameters.index(argument), argument, scale)
        for argument, scale in inputs.items()
        if scale != 1
    )
    module.output_scales = tuple((position, scale) for position, scale in outputs.items() if scale != 1)


def decayed_stacks(model: nn.Module) -> list[tuple[Stack, DecaySettings]]:
    """The decayed stacks inside a model; refuses a part of a stack."""
    stacks: dict[int, tuple[Stack, DecaySettings]] = {}
    for module in model.modules():
        settings = vars(module).get("decay_settings")
        if settings is not None:
            stack, _ = stacks.setdefault(
                id(settings), (Stack([], [], settings.fold_refusal, settings.raw_output), settings)
            )
            stack.modules.append(module)
    for stack, settings in stacks.values():
        if len(stack.modules) != settings.num_blocks:
            raise UserError(
                f"{type(model).__name__} holds {len(stack.modules)} of {settings.num_blocks} decayed blocks: "
                "pass the model that holds all of them."
            )
        stack.modules.sort(key=lambda module: module.block_index)
        stack.blocks = [module.decayed_block for module in stack.modules]
    return list(stacks.values())
