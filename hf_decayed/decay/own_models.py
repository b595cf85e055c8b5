"""This package's own networks: their blocks hold the alphas, and their config says what they are."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from ..errors import UserError
from .families import FAMILIES, VIT, Block, Branch, describe_resnet
from .folding import check_folding, folding_factors, scale_parameters
from .schedule import resolve_decay, running_products, stack_alphas
from .stacks import Stack


def describe_diffusion_block(block: nn.Module) -> Block:
    attention = Branch("attention", "norm1", "attn", output_layers=("attn.to_out.0",))
    return Block(((attention,), (Branch("mlp", "norm2", "fc2", output_layers=("fc2",)),)))


@dataclass(frozen=True)
class OwnFamily:
    """Blocks of one of our networks; `alphas` names their attributes, in the order of the additions."""

    describe: Callable[[nn.Module], Block]
    alphas: tuple[str, ...] = ("attention_alpha", "mlp_alpha")
    staged: bool = False


OWN_FAMILIES = {
    "DecayedViTMAELayer": OwnFamily(VIT),
    "DecayedResNetBasicLayer": OwnFamily(describe_resnet, ("alpha",), staged=True),
    "DecayedResNetBottleNeckLayer": OwnFamily(describe_resnet, ("alpha",), staged=True),
    "DecayedSiTBlock": OwnFamily(describe_diffusion_block),
    "DecayedUViTBlock": OwnFamily(describe_diffusion_block),
    "NestedUViTBlock": OwnFamily(describe_diffusion_block),
}
# Relative error of a norm, caused by its eps in a decayed stream, above which `keep_function` warns.
LARGEST_EPS_SHARE = 1e-3


def own_family(module: nn.Module) -> OwnFamily | None:
    """The family of a block, found by its base classes: FSDP2 makes a block an instance of a subclass."""
    names = (base.__name__ for base in type(module).__mro__)
    return next((OWN_FAMILIES[name] for name in names if name in OWN_FAMILIES), None)


@dataclass
class OwnStack(Stack):
    """The decayed blocks of one of our networks, with their alphas."""

    alphas: list[list[float]] = field(default_factory=list)


def find_own_model(model: nn.Module) -> nn.Module | None:
    """The network of this package that `model` is, or wraps, as DDP and `torch.compile` do; `None` for other models.

    Raises `UserError` for a larger model that holds one of our networks.
    """
    model = getattr(
        model, "_orig_mod", model
    )  # a compiled model passes on the attributes of this one, and is no such class
    own = next((module for module in model.modules() if has_decay_field(module)), None)
    if own is None or own is model:
        return own
    if len(list(own.parameters())) < len(list(model.parameters())):
        name = next(name for name, module in model.named_modules() if module is own)
        raise UserError(
            f"{type(model).__name__} holds a {type(own).__name__}, which has shortcuts of its own: name it as "
            f"`part='{name}'`, or set `shortcut_decay` in its config."
        )
    return own


def has_decay_field(module: nn.Module) -> bool:
    config = getattr(module, "config", None)
    return "shortcut_decay" in config if isinstance(config, dict) else hasattr(config, "shortcut_decay")


def own_stack(model: nn.Module) -> OwnStack | None:
    """The decayed blocks inside a model in the order in which they run, with their alphas; `None` if it has none."""
    named = [
        (name.rpartition(".")[0], module, family)
        for name, module in model.named_modules()
        if "decoder" not in name and (family := own_family(module))
    ]
    if not named:
        return None
    stack = OwnStack([], [])
    stage, previous_parent = 0, named[0][0]
    for parent, module, family in named:
        # A skip of U-ViT is concatenated: what its projection returns is a new stream.
        if (family.staged and parent != previous_parent) or joins_skip(module):
            stage += 1
        previous_parent = parent
        stack.modules.append(module)
        stack.blocks.append(replace(family.describe(module), stage=stage))
        alphas = (getattr(module, name) for name in family.alphas)  # numbers, or learned parameters
        stack.alphas.append([float(alpha) for alpha in alphas])
    return stack


def joins_skip(module: nn.Module) -> bool:
    projection = getattr(module, "skip_projection", None)
    return projection is not None and projection.in_features > projection.out_features


def require_own_stack(model: nn.Module) -> OwnStack:
    stack = own_stack(model)
    if stack is None:
        raise UserError(f"{type(model).__name__} has no decayed blocks: pass the network that holds them.")
    return stack


def is_decayed(stack: OwnStack) -> bool:
    return any(alpha != 1 for alphas in stack.alphas for alpha in alphas)


def decay_own_model(
    model: nn.Module,
    shortcut_decay: float | str,
    schedule: str,
    granularity: str,
    scope: str,
    keep_function: bool = False,
) -> None:
    """Sets config and alphas of a network of ours that has no decay."""
    stack = require_own_stack(model)
    check_form(model)
    if is_decayed(stack):
        raise UserError(
            f"{type(model).__name__} is decayed already: use `set_shortcut_decay`, or `remove_decay` first."
        )
    fields = {"shortcut_schedule": schedule, "shortcut_granularity": granularity, "shortcut_scope": scope}
    if "shortcut_granularity" not in config_fields(model):  # ResNet
        if granularity != "sublayer" or scope != "both":
            raise UserError(f"{type(model).__name__} has one addition in a block: it has no granularity and no scope.")
        fields = {"shortcut_schedule": schedule}
    value = resolve_decay(stack.blocks, shortcut_decay, schedule, granularity, scope)
    alphas = stack_alphas(stack.blocks, value, schedule, granularity, scope)
    if keep_function:
        factors = checked_own_factors(model, stack, alphas)
        warn_about_eps(model, stack, alphas)
        scale_parameters(factors, inverse=True)
    set_alphas(model, stack, alphas, shortcut_decay=value, **fields)


def set_own_decay(model: nn.Module, value: float) -> None:
    stack = require_own_stack(model)
    check_form(model)
    fields = config_fields(model)
    names = ("shortcut_schedule", "shortcut_granularity", "shortcut_scope")
    settings = [fields.get(name, default) for name, default in zip(names, ("linear", "sublayer", "both"))]
    set_alphas(model, stack, stack_alphas(stack.blocks, value, *settings), shortcut_decay=value)


def fold_own_model(model: nn.Module) -> None:
    """Turns a decayed network of ours into the same class with `shortcut_decay=1.0` and other weights."""
    stack = require_own_stack(model)
    if config_fields(model).get("residual_form", "decay") != "decay":
        raise UserError("Only the residual_form 'decay' can be folded.")
    if not is_decayed(stack):
        raise UserError(f"{type(model).__name__} has no decayed shortcuts: all of its alphas are 1.")
    if any(alpha <= 0 for alphas in stack.alphas for alpha in alphas):
        raise UserError("A shortcut with an alpha of 0 cannot be folded: weights would be divided by it.")
    scale_parameters(checked_own_factors(model, stack, stack.alphas))
    is_learned = config_fields(model).get("shortcut_schedule") == "learned"
    fields = {"shortcut_schedule": "linear"} if is_learned else {}
    set_alphas(model, stack, [[1.0] * len(alphas) for alphas in stack.alphas], shortcut_decay=1.0, **fields)


def check_form(model: nn.Module) -> None:
    fields = config_fields(model)
    form, schedule = fields.get("residual_form", "decay"), fields.get("shortcut_schedule")
    if not has_fixed_alphas(fields):
        raise UserError(
            f"{type(model).__name__} with residual_form '{form}' and shortcut_schedule '{schedule}' has no decay that can "
            "be set."
        )


def has_fixed_alphas(fields: dict) -> bool:
    """Whether a network with these config fields has a decay that can be set."""
    return fields.get("residual_form", "decay") == "decay" and fields.get("shortcut_schedule") != "learned"


def config_fields(model) -> dict:
    return dict(model.config) if isinstance(model.config, dict) else model.config.to_dict()


def set_alphas(model, stack: OwnStack, alphas: list[list[float]], **fields) -> None:
    """Writes alphas into the blocks and what they come from into the config, so that the saved config describes the network."""
    for module, block_alphas in zip(stack.modules, alphas):
        family = own_family(module)
        assert family is not None, "blocks of a stack are of a family"
        for name, alpha in zip(family.alphas, block_alphas):
            if isinstance(getattr(module, name), nn.Parameter):  # a learned alpha
                delattr(module, name)
                module.has_learned_alphas = False
            setattr(module, name, alpha)
    if hasattr(model, "register_to_config"):
        model.register_to_config(**fields)
        return
    for config in {id(module.config): module.config for module in model.modules() if has_decay_field(module)}.values():
        for name, value in fields.items():
            setattr(config, name, value)


def checked_own_factors(model: nn.Module, stack: Stack, alphas: list[list[float]]) -> list[tuple[torch.Tensor, float]]:
    """The folding factors of one of our networks; raises `UserError` where it reads its stream without a norm."""
    stack.fold_refusal = own_fold_refusal(model, stack)
    factors = [*folding_factors(stack, alphas, keep_function=False), *skip_factors(stack, alphas)]
    check_folding(stack, factors)
    return factors


def own_fold_refusal(model: nn.Module, stack: Stack) -> str:
    if any(branch.shortcut for block in stack.blocks for step in block.steps for branch in step):
        return FAMILIES["ResNet"].fold_refusal
    fields = config_fields(model)
    if "final_norm" not in fields:
        return ""
    has_skips = hasattr(model, "decoder") and len(model.decoder.skips) > 0
    if not fields["final_norm"] or has_skips or "Backbone" in type(model).__name__:
        return f"{type(model).__name__} reads its tokens without a norm, as skips do; `stock_model` folds its encoder"
    return ""


def skip_factors(stack: Stack, alphas: list[list[float]]) -> Iterator[tuple[torch.Tensor, float]]:
    """`(weight, factor)` of the projections of skips, which read the stream of the mirror block without a norm."""
    before: dict[int, float] = {}
    after: dict[int, float] = {}
    for index, _, _, product_before, product_after in running_products(stack.blocks, alphas):
        before.setdefault(index, product_before)
        after[index] = product_after
    for index, module in enumerate(stack.modules):
        projection = getattr(module, "skip_projection", None)
        if projection is None:
            continue
        mirror = after[len(stack.modules) - 1 - index]
        if joins_skip(module):
            yield projection.weight[:, : projection.out_features], after[index - 1]
            yield projection.weight[:, projection.out_features :], mirror
        else:
            yield projection.weight, mirror / before[index]
            yield projection.bias, 1 / before[index]


def warn_about_eps(model: nn.Module, stack: Stack, alphas: list[list[float]]) -> None:
    """Warns if the function is not quite kept: an eps small for a plain stream may not be so for a decayed one."""
    smallest = min(product for *_, product in running_products(stack.blocks, alphas))
    eps = max(module.eps for module in model.modules() if isinstance(module, nn.LayerNorm))
    if eps / smallest**2 > LARGEST_EPS_SHARE:
        warnings.warn(
            f"The stream decays to {smallest:.1e} of its size, and the norms add an eps of {eps:.0e} to its variance: the "
            f"function is kept only if tokens had a variance far above {eps / smallest**2:.1g}.",
            stacklevel=4,
        )
