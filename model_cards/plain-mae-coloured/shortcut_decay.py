"""Weights of the identity shortcuts: `x <- alpha * x + f(x)`, alpha falling with depth (Zhang et al., CVPR 2026).

A transformer layer has two residual branches, attention and MLP, so a network of L layers has 2L of them. A schedule
gives each branch one number, its alpha; everything here is plain Python arithmetic on those numbers.

The diffusion models travel to the Hub as single files and hold declared copies of these functions.
"""

import math
import warnings


__all__ = ["effective_decay", "suggest_shortcut_decay"]

# Each schedule maps relative depth (0 at the first branch, 1 at the last) to the share of the decay applied there.
SCHEDULES = {
    "linear": lambda depth: depth,
    "cosine": lambda depth: (1.0 - math.cos(math.pi * depth)) / 2.0,
    "constant": lambda depth: 1.0,
}
# What `"auto"` aims at: inside the paper's advice [1e-3, 1e-2), and near its best values at 12 and 18 layers.
EFFECTIVE_DECAY_TARGET = 3e-3


def shortcut_factors(depths: list[float], shortcut_decay: float, schedule: str = "linear") -> list[float]:
    """Weight of the identity shortcut at each relative depth: 1 at depth 0, `shortcut_decay` at depth 1."""
    return [1.0 - (1.0 - shortcut_decay) * SCHEDULES[schedule](depth) for depth in depths]


def branch_depths(num_layers: int, granularity: str = "sublayer") -> list[float]:
    """Relative depth of the 2L branches, in the order attention, MLP, attention, MLP, ...

    `sublayer` (the released code) lets depth grow from branch to branch, k / (2L - 1) for k = 0..2L-1. `layer` (the
    paper's Eq. 5) gives both branches of layer l = 1..L the depth l / L.
    """
    if granularity == "sublayer":
        return [branch / (2 * num_layers - 1) for branch in range(2 * num_layers)]
    if granularity == "layer":
        return [layer / num_layers for layer in range(1, num_layers + 1) for _ in ("attention", "mlp")]
    raise ValueError(f"`granularity` must be 'sublayer' or 'layer', got {granularity!r}.")


def layer_shortcut_factors(
    num_layers: int,
    shortcut_decay: float,
    schedule: str = "linear",
    granularity: str = "sublayer",
    scope: str = "both",
) -> list[tuple[float, float]]:
    """`(attention_alpha, mlp_alpha)` of every layer, first layer first.

    Args:
        num_layers (`int`): Number of transformer layers with decayed branches.
        shortcut_decay (`float`): Alpha of the last branch, in [0, 1]. `1.0` gives the plain residual network.
        schedule (`str`, defaults to `"linear"`): `linear`, `cosine` or `constant` (every alpha is `shortcut_decay`).
        granularity (`str`, defaults to `"sublayer"`): `sublayer` or `layer`, see [`branch_depths`].
        scope (`str`, defaults to `"both"`):
            `both`, `attention` or `mlp`. The other branch keeps alpha 1; the depths of the decayed branches do not change.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"`schedule` must be one of {sorted(SCHEDULES)}, got {schedule!r}.")
    if scope not in ("both", "attention", "mlp"):
        raise ValueError(f"`scope` must be 'both', 'attention' or 'mlp', got {scope!r}.")
    if not 0.0 <= shortcut_decay <= 1.0:
        raise ValueError(f"`shortcut_decay` must lie in [0, 1], got {shortcut_decay}.")
    if num_layers < 1:
        raise ValueError(f"`num_layers` must be at least 1, got {num_layers}.")
    factors = shortcut_factors(branch_depths(num_layers, granularity), shortcut_decay, schedule)
    return [
        (attention if scope != "mlp" else 1.0, mlp if scope != "attention" else 1.0)
        for attention, mlp in zip(factors[0::2], factors[1::2])
    ]


def effective_decay(
    num_layers: int,
    shortcut_decay: float,
    schedule: str = "linear",
    granularity: str = "sublayer",
    scope: str = "both",
) -> float:
    """Share of the network's input that reaches its output through the shortcuts alone: the product of all alphas.

    >>> round(effective_decay(12, 0.6), 4)
    0.0036
    """
    factors = layer_shortcut_factors(num_layers, shortcut_decay, schedule, granularity, scope)
    return math.prod(attention * mlp for attention, mlp in factors)


def suggest_shortcut_decay(
    num_layers: int,
    target: float = EFFECTIVE_DECAY_TARGET,
    schedule: str = "linear",
    granularity: str = "sublayer",
    scope: str = "both",
) -> float:
    """The `shortcut_decay` whose effective decay is `target`, to six decimals: the value of `"auto"`.

    A rule of thumb. It fits the paper at 12 and 18 layers; at 24 layers the paper's best value is lower. Shallow
    networks get small values, and below 0.45 training becomes unstable: prefer twelve narrow layers to six wide ones.

    >>> round(suggest_shortcut_decay(12), 3)
    0.59
    """
    if not 0.0 < target <= 1.0:
        raise ValueError(f"`target` must lie in (0, 1], got {target}.")
    smallest = effective_decay(num_layers, 0.0, schedule, granularity, scope)
    if smallest > target:
        raise ValueError(
            f"{num_layers} layers with scope {scope!r} and schedule {schedule!r} cannot reach an effective decay of "
            f"{target}: even `shortcut_decay=0` gives {smallest:.2g}."
        )
    low, high = 0.0, 1.0
    for _ in range(50):  # bisection: the effective decay grows with `shortcut_decay`
        middle = (low + high) / 2.0
        if effective_decay(num_layers, middle, schedule, granularity, scope) < target:
            low = middle
        else:
            high = middle
    return round(high, 6)


def warn_about_decay(
    num_layers: int,
    shortcut_decay: float,
    schedule: str = "linear",
    granularity: str = "sublayer",
    scope: str = "both",
) -> None:
    """Warns of a `shortcut_decay` below 1 that is unstable in training or far from the paper's effective decays."""
    if shortcut_decay == 1.0:
        return
    if shortcut_decay < 0.45:
        warnings.warn(
            f"`shortcut_decay={shortcut_decay}` is below 0.45: the paper reports unstable training from 0.4 down.",
            stacklevel=3,
        )
    effective = effective_decay(num_layers, shortcut_decay, schedule, granularity, scope)
    if not 1e-4 <= effective <= 1e-1:
        try:
            suggested = suggest_shortcut_decay(num_layers, schedule=schedule, granularity=granularity, scope=scope)
            hint = f"; the rule of thumb (`'auto'`) is {suggested:.3f}."
        except ValueError:  # the rule needs more branches, which is no reason to refuse a value set by hand
            hint = "."
        warnings.warn(
            f"`shortcut_decay={shortcut_decay}` over {num_layers} layers gives an effective decay of {effective:.1e}, "
            f"outside [1e-4, 1e-1]{hint}",
            stacklevel=3,
        )
