"""Alphas of a stack: the schedule over all of its additions, and the products that the stream has passed."""

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Real

from ..errors import UserError
from ..models.shortcut_decay import EFFECTIVE_DECAY_TARGET, SCHEDULES, shortcut_factors
from .families import Block, Branch


@dataclass
class DecaySettings:
    """The arguments of `decay_shortcuts`; all blocks of a stack share one object.

    `keep_function` says that the weights of the branches were scaled so that the network computes what it did before.
    """

    shortcut_decay: float
    schedule: str
    granularity: str
    scope: str
    keep_function: bool
    num_blocks: int
    fold_refusal: str
    raw_output: str


def check_choices(shortcut_decay: float | str, schedule: str, granularity: str, scope: str) -> None:
    if not (isinstance(shortcut_decay, str) and shortcut_decay == "auto"):
        check_value(shortcut_decay, "a number or 'auto'")
    if schedule not in SCHEDULES:
        raise UserError(f"`schedule` must be one of {', '.join(sorted(SCHEDULES))}, got {schedule!r}.")
    if granularity not in ("sublayer", "layer"):
        raise UserError(f"`granularity` must be 'sublayer' or 'layer', got {granularity!r}.")
    if scope not in ("both", "attention", "mlp"):
        raise UserError(f"`scope` must be 'both', 'attention' or 'mlp', got {scope!r}.")


def check_value(shortcut_decay: object, expected: str = "a number") -> None:
    if isinstance(shortcut_decay, bool) or not isinstance(
        shortcut_decay, Real
    ):  # floats of numpy are real numbers too
        raise UserError(f"`shortcut_decay` must be {expected}, got {shortcut_decay!r}.")
    if shortcut_decay == 0:
        raise UserError("`shortcut_decay` must be above 0 here: the stream is divided by it. A small value works.")
    if not 0 < float(shortcut_decay) <= 1:
        raise UserError(f"`shortcut_decay` must lie in (0, 1], got {shortcut_decay}.")


def stack_alphas(
    blocks: list[Block], shortcut_decay: float, schedule: str, granularity: str, scope: str
) -> list[list[float]]:
    """Alpha of every addition of every block, on the schedule of [`hf_decayed.models.shortcut_decay`].

    Blocks may have any number of additions: `sublayer` counts additions, `layer` counts blocks.
    """
    num_steps = sum(len(block.steps) for block in blocks)
    alphas, position = [], 0
    for number, block in enumerate(blocks, start=1):
        depths = []
        for _ in block.steps:
            # A single addition is the last one, not the first.
            sublayer_depth = position / (num_steps - 1) if num_steps > 1 else 1.0
            depths.append(sublayer_depth if granularity == "sublayer" else number / len(blocks))
            position += 1
        factors = shortcut_factors(depths, shortcut_decay, schedule)
        kinds = [step[0].kind for step in block.steps]
        alphas.append([factor if scope in ("both", kind) else 1.0 for factor, kind in zip(factors, kinds)])
    return alphas


def resolve_decay(
    blocks: list[Block], shortcut_decay: float | str, schedule: str, granularity: str, scope: str
) -> float:
    """The number that `shortcut_decay` means for these blocks; refuses a scope or depth that leaves nothing to decay."""
    kinds = {step[0].kind for block in blocks for step in block.steps}
    if scope != "both" and (scope not in kinds or not kinds <= {"attention", "mlp"}):
        raise UserError(
            f"`scope='{scope}'` needs blocks of attention and MLP branches, these have: {', '.join(sorted(kinds))}."
        )

    def product(value: float) -> float:
        return math.prod(math.prod(alphas) for alphas in stack_alphas(blocks, value, schedule, granularity, scope))

    if shortcut_decay == "auto":
        shortcut_decay = suggest_decay(product, scope, schedule)
    shortcut_decay = float(shortcut_decay)
    if shortcut_decay < 1 and product(shortcut_decay) == 1:
        raise UserError(
            f"`shortcut_decay={shortcut_decay}` changes no shortcut: the stack is too short for its schedule."
        )
    warn_about_product(shortcut_decay, product(shortcut_decay))
    return shortcut_decay


def suggest_decay(product, scope: str, schedule: str) -> float:
    """The decay whose product over all additions is that of `"auto"` in our models, to six decimals."""
    low, high = 1e-6, 1.0
    if product(low) > EFFECTIVE_DECAY_TARGET:
        raise UserError(
            f"`shortcut_decay='auto'` aims at an effective decay of {EFFECTIVE_DECAY_TARGET}, which these blocks cannot "
            f"reach with scope '{scope}' and schedule '{schedule}': pass a number."
        )
    for _ in range(50):  # bisection: the product grows with the decay
        middle = (low + high) / 2
        low, high = (middle, high) if product(middle) < EFFECTIVE_DECAY_TARGET else (low, middle)
    return round(high, 6)


def warn_about_product(shortcut_decay: float, product: float) -> None:
    """The warnings of our own models' configs, for stacks with any number of additions."""
    if shortcut_decay == 1:
        return
    if shortcut_decay < 0.45:
        warnings.warn(
            f"`shortcut_decay={shortcut_decay}` is below 0.45: the paper reports unstable training from 0.4 down.",
            stacklevel=4,
        )
    if not 1e-4 <= product <= 1e-1:
        warnings.warn(
            f"`shortcut_decay={shortcut_decay}` gives an effective decay of {product:.1e}, outside [1e-4, 1e-1].",
            stacklevel=4,
        )


def running_products(
    blocks: list[Block], alphas: list[list[float]]
) -> Iterator[tuple[int, int, Branch, float, float]]:
    """`(block index, step index, branch, product before, product after)` for every branch of a stack.

    The products are those of the alphas that the stream has passed since the beginning of its stage.
    """
    products: dict[str, float] = {}
    stage = 0
    for block_index, block in enumerate(blocks):
        if block.stage != stage:
            products, stage = {}, block.stage
        for step_index, step in enumerate(block.steps):
            for branch in step:
                before = products.get(branch.streams[0], 1.0)
                after = before * alphas[block_index][step_index]
                products.update(dict.fromkeys(branch.streams, after))
                yield block_index, step_index, branch, before, after
