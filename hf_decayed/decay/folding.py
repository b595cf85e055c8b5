"""Folding: a decayed pre-norm network is a stock network whose branch outputs are larger.

With P the product of the alphas that the stream x has passed, u = x / P obeys `u <- u + f(norm(u)) / P`: norms do not see
the scale of their input (but for their eps), so the last layer of every branch takes the factor 1 / P.
"""

import copy
import inspect
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import UserError
from .carrier import (
    ScaledModule,
    decayed_stacks,
    derive,
    derived_class,
    original_class,
    rebuild,
    restore,
    scaling_mixin,
    settings_alphas,
)
from .families import scaled_names
from .schedule import DecaySettings, running_products
from .stacks import USER_OUTPUT, Stack


FLOAT_TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Streams of trained networks reach values of a few hundred, and float16 ends at 65504.
LARGEST_HALF_GROWTH = 64
# In files of a decayed model's `save_pretrained`; stock classes report it as an unexpected weight, and load the others.
FOLDED_KEY = "folded_shortcuts"


def fold_stacks(model: nn.Module) -> None:
    """Folds all decayed stacks of a model, in place."""
    stacks = require_decay(model)
    factors = [checked_factors(stack, settings) for stack, settings in stacks]  # all of them before any weight changes
    require_original_classes(stacks)
    for (stack, settings), stack_factors in zip(stacks, factors):
        scale_parameters(stack_factors)
        warn_about_raw_output(stack, settings)
    uninstall(model, stacks)


def remove_stacks(model: nn.Module) -> None:
    """Removes the decay of all stacks of a model, in place; the weights stay."""
    stacks = require_decay(model)
    if any(settings.keep_function for _, settings in stacks):
        raise UserError("The weights were scaled by `keep_function=True`: `fold_shortcuts` scales them back.")
    require_original_classes(stacks)
    uninstall(model, stacks)


def require_decay(model: nn.Module) -> list[tuple[Stack, DecaySettings]]:
    stacks = decayed_stacks(model)
    if not stacks:
        raise UserError(f"{type(model).__name__} has no decayed shortcuts: call `decay_shortcuts` first.")
    return stacks


def require_original_classes(stacks: list[tuple[Stack, DecaySettings]]) -> None:
    for module in scaled_modules(stacks):
        if not isinstance(module, ScaledModule) or module.__class__ is not derived_class(
            scaling_mixin(module), original_class(module, ScaledModule)
        ):
            raise UserError(
                f"{type(module).__name__} was replaced, or given another class, after `decay_shortcuts`, as by sharding or "
                "adapters: undo that first."
            )


def uninstall(model: nn.Module, stacks: list[tuple[Stack, DecaySettings]]) -> None:
    for module in scaled_modules(stacks):
        restore(module, ScaledModule)
    for module in model.modules():
        if isinstance(module, FoldedSaving):
            restore(module, FoldedSaving)


def scaled_modules(stacks: list[tuple[Stack, DecaySettings]]) -> list[nn.Module]:
    modules = []
    for stack, _ in stacks:
        for module, block in zip(stack.modules, stack.blocks):
            modules += [module, *(module.get_submodule(name) for name in scaled_names(block))]
    return modules


def warn_about_raw_output(stack: Stack, settings: DecaySettings) -> None:
    if stack.raw_output and not settings.keep_function:
        *_, (_, _, _, _, product) = running_products(stack.blocks, settings_alphas(stack, settings))
        if product != 1:
            text = f"In the folded model {stack.raw_output} is {1 / product:.4g} times that of the decayed one"
            if stack.raw_output == USER_OUTPUT:
                text += ": its outputs are the same if a norm stands behind that."
            else:
                text += ": no norm stands behind its blocks. Pooled and projected outputs are the same."
            warnings.warn(text, stacklevel=4)


def checked_factors(stack: Stack, settings: DecaySettings) -> list[tuple[nn.Parameter, float]]:
    """The folding factors of a stack that can be folded."""
    factors = list(folding_factors(stack, settings_alphas(stack, settings), settings.keep_function))
    check_folding(stack, factors)
    return factors


@torch.no_grad()
def scale_parameters(factors: Sequence[tuple[torch.Tensor, float]], inverse: bool = False) -> None:
    for parameter, factor in factors:
        parameter.mul_(1 / factor if inverse else factor)


def folding_factors(
    stack: Stack, alphas: list[list[float]], keep_function: bool
) -> Iterator[tuple[nn.Parameter, float]]:
    """`(parameter, factor)` of the parameters of the stock model that differ from the decayed one.

    Layers that read the stream without a norm take the inverse factor, unless `keep_function` scales what they read.
    """
    for index, _, branch, before, after in running_products(stack.blocks, alphas):
        for layer_name in branch.output_layers:
            for parameter in stack.modules[index].get_submodule(layer_name).parameters():
                yield parameter, 1 / after
        for layer_name in branch.input_layers if not keep_function else ():
            yield stack.modules[index].get_submodule(layer_name).weight, before


def check_folding(stack: Stack, factors: Sequence[tuple[torch.Tensor, float]]) -> None:
    """Raises if the stack cannot be folded, before anything is changed."""
    if stack.fold_refusal:
        raise UserError(f"The decay cannot become stock weights: {stack.fold_refusal}.")
    layers = [layer for module, block in zip(stack.modules, stack.blocks) for layer in output_layers(module, block)]
    for layer in layers:
        check_layer(layer)
    if len({id(parameter) for parameter, _ in factors}) < len(factors):
        raise UserError("The decay cannot become stock weights: layers of different depth share weights.")
    for parameter, factor in factors:
        if parameter.dtype == torch.float16:
            growth = max(factor, 1 / factor)
            largest = parameter.detach().abs().max().item() * growth
            if growth > LARGEST_HALF_GROWTH or largest > torch.finfo(torch.float16).max:
                raise UserError(
                    f"float16 is too small to fold this decay: activations change by a factor of {growth:.3g}. "
                    "Convert the model to bfloat16 or float32 first."
                )


def output_layers(module: nn.Module, block) -> Iterator[nn.Module]:
    for step in block.steps:
        for branch in step:
            for name in (*branch.output_layers, *branch.input_layers):
                yield module.get_submodule(name)


def check_layer(layer: nn.Module) -> None:
    """Accepts plain layers with weights in ordinary tensors."""
    name = type(layer).__name__
    if not isinstance(layer, (nn.Linear, nn.Conv2d)) and name != "Conv1D":
        raise UserError(
            f"{type(layer).__module__}.{name} cannot be folded: fold before quantisation, and merge adapters or restore "
            "layers that were replaced first."
        )
    for parameter in layer.parameters():
        if parameter.is_meta or parameter.numel() == 0 or type(parameter.data) is not torch.Tensor:
            raise UserError(f"Weights of {name} are sharded, offloaded or quantised: gather them before folding.")
        if parameter.dtype not in FLOAT_TYPES:
            raise UserError(f"Weights of {name} are quantised ({parameter.dtype}): fold before quantisation.")


class FoldedSaving:
    """Mixin of models with decayed blocks: `save_pretrained` writes folded weights.

    A saved folder names a stock class, and stock code must compute from it what the model computed.
    """

    def save_pretrained(self, save_directory, *args, **kwargs):
        """Writes folded weights, which a stock class loads, and a number that marks them as folded.

        `load_state_dict` of a decayed model undoes the folding of such weights, so that a `Trainer` resumes. Weights
        without the number, such as those of `fold_shortcuts(model).save_pretrained(...)`, are taken as they are.
        """
        stacks = decayed_stacks(self)  # type: ignore[arg-type]
        if not stacks:
            return super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        for stack, _ in stacks:
            if stack.fold_refusal:
                raise UserError(
                    f"{type(self).__name__} would be loaded without its decay, and cannot be saved as stock weights: "
                    f"{stack.fold_refusal}. Save `state_dict()`, or call `remove_decay` first."
                )
        if kwargs.get("state_dict") is not None:
            kwargs["state_dict"] = scale_state_dict(self, stacks, kwargs["state_dict"], fold=True)
            return super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        folded: Any = copy.deepcopy(self)
        fold_stacks(folded)
        folded._register_state_dict_hook(add_folded_key)
        return folded.save_pretrained(save_directory, *args, **kwargs)

    def state_dict(self, *args, **kwargs):
        """As in every module, but refused inside the `save_pretrained` of a larger model, which would not fold."""
        if saver := stock_saver():
            raise UserError(
                f"{saver} would be saved without the decay of its {type(self).__name__}: call `decay_shortcuts` with the "
                f"whole {saver} and the name of its `part`, or `fold_shortcuts` before saving."
            )
        return super().state_dict(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, state_dict, *args, **kwargs):
        """As in every module, but weights that `save_pretrained` of a decayed model has folded are unfolded."""
        if FOLDED_KEY in state_dict:
            state_dict = scale_state_dict(self, decayed_stacks(self), state_dict, fold=False)  # type: ignore[arg-type]
        return super().load_state_dict(state_dict, *args, **kwargs)  # type: ignore[misc]

    def __reduce__(self):
        return rebuild, (FoldedSaving, original_class(self, FoldedSaving)), self.__getstate__()


def stock_saver() -> str | None:
    """Class of the model whose `save_pretrained` runs without folding. PEFT saves only adapters."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "save_pretrained":
            saver = frame.f_locals.get("self")
            if isinstance(saver, nn.Module) and not isinstance(saver, FoldedSaving):
                return None if type(saver).__module__.startswith("peft.") else type(saver).__name__
        frame = frame.f_back
    return None


def add_folded_key(module: nn.Module, state_dict: dict, prefix: str, _) -> None:
    if not prefix:
        state_dict[FOLDED_KEY] = torch.ones(1)


def scale_state_dict(model, stacks: list[tuple[Stack, DecaySettings]], state_dict: dict, fold: bool) -> dict:
    """A folded copy of a decayed model's state dict, with the key that says so, or the reverse."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    scaled = dict(state_dict)
    for stack, settings in stacks:
        for parameter, factor in checked_factors(stack, settings):
            name = names[id(parameter)]
            if name not in scaled:  # transformers saves some classes with the names of older versions
                raise UserError(f"The state dict has no '{name}', which has to be scaled for the decay.")
            scaled[name] = scaled[name] * (factor if fold else 1 / factor)
    if fold:
        scaled[FOLDED_KEY] = torch.ones(1)
    else:
        del scaled[FOLDED_KEY]
    return scaled


def install_saving(model: nn.Module) -> None:
    """Derives the classes of the models that hold decayed blocks; adapters are saved without the model's weights."""
    for module in list(model.modules()):
        has_saving = hasattr(type(module), "save_pretrained") and not type(module).__module__.startswith("peft.")
        if has_saving and any(vars(child).get("decay_settings") for child in module.modules()):
            derive(module, FoldedSaving)
