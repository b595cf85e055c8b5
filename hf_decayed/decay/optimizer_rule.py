"""What the decay means for an optimizer: a plain network whose branches learn faster with depth."""

import math
from numbers import Real

import torch
from torch import nn

from ..errors import UserError
from .carrier import decayed_stacks
from .folding import check_folding, folding_factors
from .own_models import checked_own_factors, find_own_model, is_decayed, require_own_stack
from .schedule import check_choices, resolve_decay, stack_alphas
from .stacks import find_part, find_stack


__all__ = ["shortcut_parameter_groups"]

# A parameter of the stock network is c times that of the decayed one, and its gradient 1 / c times. These are the
# powers of c that multiply learning rate, weight decay and eps, so that the updates differ by c as well. AdamW and
# LAMB decay weights apart from the gradient, the others as a part of it; the trust ratios of LARS and LAMB already
# contain the scale of the weight.
POWERS = {
    "adamw": {"lr": 1, "weight_decay": -1, "eps": -1},
    "adam": {"lr": 1, "weight_decay": -2, "eps": -1},
    "sgd": {"lr": 2, "weight_decay": -2},
    "lars": {"lr": 0, "weight_decay": -2},
    "lamb": {"lr": 0, "weight_decay": -1, "eps": -1},
}
# Biases have no weight decay, and LARS and LAMB (those of MAE's code and of timm) no trust ratio for such parameters.
BIAS_POWERS = {**POWERS, "lars": POWERS["sgd"], "lamb": POWERS["adamw"]}


def shortcut_parameter_groups(
    model: nn.Module,
    shortcut_decay: float | str = "auto",
    optimizer: str = "adamw",
    *,
    lr: float,
    weight_decay: float = 0.0,
    eps: float = 1e-8,
    schedule: str = "linear",
    granularity: str = "sublayer",
    scope: str = "both",
    blocks: dict[type, list[tuple[str, ...]]] | None = None,
    part: str = "",
) -> list[dict]:
    """Parameter groups with which a plain model trains as its decayed form would, for models that cannot be changed.

    With P the product of the alphas up to a branch, its last layer gets, for Adam, `lr / P` and `weight_decay * P`.
    The two networks take the same steps if they also start alike: with branch outputs at zero, or at those of
    `fold_shortcuts(decay_shortcuts(model, ...))`. Gradient clipping by norm differs, because it sees other gradients.

    Args:
        model (`nn.Module`): A model without decay, as for [`decay_shortcuts`], which has the same arguments.
        optimizer (`str`, defaults to `"adamw"`):
            `adamw`, `adam`, `sgd` (with or without momentum), `lars` or `lamb`. The trust ratio of the last two undoes the
            rule for matrices; only biases, which have none, learn at another rate.
        lr (`float`): Learning rate of the other parameters.
        weight_decay (`float`, defaults to 0): Weight decay of matrices; biases and norms have none.
        eps (`float`, defaults to 1e-8): Epsilon of Adam and LAMB; it scales with the gradients.

    Returns groups for a torch optimizer, those with the rates of the plain network first.

    >>> optimizer = torch.optim.AdamW(shortcut_parameter_groups(model, 0.6, lr=1e-4, weight_decay=0.05))
    """
    if optimizer not in POWERS:
        raise UserError(f"`optimizer` must be one of {', '.join(POWERS)}, got {optimizer!r}.")
    rates = {"lr": lr, "weight_decay": weight_decay, "eps": eps}
    for name, rate in rates.items():
        if isinstance(rate, bool) or not isinstance(rate, Real) or not 0 <= rate < math.inf:
            raise UserError(f"`{name}` must be a number of at least 0, got {rate!r}.")
    check_choices(shortcut_decay, schedule, granularity, scope)
    factors = plain_factors(find_part(model, part), shortcut_decay, (schedule, granularity, scope), blocks)
    scales = {id(parameter): factor for parameter, factor in factors}
    rates = {name: rates[name] for name in POWERS[optimizer]}
    return group_parameters(model, scales, rates, POWERS[optimizer], BIAS_POWERS[optimizer])


def plain_factors(
    model: nn.Module,
    shortcut_decay: float | str,
    settings: tuple[str, str, str],
    blocks: dict[type, list[tuple[str, ...]]] | None,
) -> list[tuple[torch.Tensor, float]]:
    """Factors of the weights of a model without decay against those of its decayed form."""
    own_model = find_own_model(model)
    if decayed_stacks(model) or (own_model is not None and is_decayed(require_own_stack(own_model))):
        raise UserError(f"{type(model).__name__} is decayed already: its optimizer needs no other rates.")
    stack = find_stack(model, blocks) if own_model is None else require_own_stack(own_model)
    value = resolve_decay(stack.blocks, shortcut_decay, *settings)
    alphas = stack_alphas(stack.blocks, value, *settings)
    if own_model is None:
        factors: list[tuple[torch.Tensor, float]] = list(folding_factors(stack, alphas, keep_function=False))
        check_folding(stack, factors)
        return factors
    factors = checked_own_factors(own_model, stack, alphas)
    if not all(isinstance(parameter, nn.Parameter) for parameter, _ in factors):
        raise UserError(
            f"{type(own_model).__name__} has no equivalent rates: the two halves of its skip projections need different ones."
        )
    return factors


def group_parameters(
    model: nn.Module,
    scales: dict[int, float],
    rates: dict[str, float],
    powers: dict[str, int],
    bias_powers: dict[str, int] | None = None,
) -> list[dict]:
    """One group for every scale, and for parameters with and without weight decay; frozen parameters are left out."""
    members: dict[tuple[float, bool], list[torch.nn.Parameter]] = {(1.0, True): [], (1.0, False): []}
    for parameter in model.parameters():
        if parameter.requires_grad:
            key = (scales.get(id(parameter), 1.0), parameter.ndim > 1)
            members.setdefault(key, []).append(parameter)
    groups = []
    for (scale, is_matrix), parameters in members.items():
        group_powers = powers if is_matrix else bias_powers or powers
        group = {name: rate * scale ** group_powers[name] for name, rate in rates.items()}
        if not is_matrix:
            group["weight_decay"] = 0.0
        if parameters:
            groups.append({"params": parameters, **group})
    return groups
