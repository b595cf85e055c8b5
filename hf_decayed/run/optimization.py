"""Parameter groups, the learning-rate schedule, decay warm-up, and the moving average of weights."""

import math
import re

import torch

from ..decay.optimizer_rule import group_parameters
from ..evaluation.linear_probe import warmup_cosine


__all__ = [
    "adamw",
    "equivalent_groups",
    "ema_with_warmup",
    "is_scaler_warmup",
    "layerwise_groups",
    "linear_warmup",
    "parameter_groups",
    "warmup_cosine",
]


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict]:
    """Weight decay for matrices, tokens and learned alphas; none for biases and norms."""
    decayed, free = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            # The paper regularises learned alphas like any matrix, although each is one number.
            (decayed if parameter.ndim > 1 or name.endswith("_alpha") else free).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": free, "weight_decay": 0.0}]


def equivalent_groups(
    model: torch.nn.Module, layers, alphas: list[tuple[float, float]], weight_decay: float
) -> list[dict]:
    """Groups with which AdamW trains undecayed layers as if their shortcuts had these alphas (docs/method.md).

    With P the product of the alphas up to a branch, the branch's last layer has `rate_scale` 1 / P, and its weight
    decay and eps are multiplied by P.
    """
    scales, product = {}, 1.0
    for layer, pair in zip(layers, alphas):
        for projection, alpha in zip((layer.attention.o_proj, layer.mlp.fc2), pair):
            product *= alpha
            scales |= {id(parameter): 1 / product for parameter in projection.parameters()}
    rates = {"rate_scale": 1.0, "weight_decay": weight_decay, "eps": 1e-8}
    return group_parameters(model, scales, rates, {"rate_scale": 1, "weight_decay": -1, "eps": -1})


def adamw(
    model: torch.nn.Module,
    learning_rate: float,
    betas: tuple[float, float],
    weight_decay: float,
    groups: list[dict] | None = None,
):
    groups = groups or parameter_groups(model, weight_decay)
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=True)


def linear_warmup(step: int, warmup_steps: int) -> float:
    """Fraction of the peak learning rate at a step: rising linearly over `warmup_steps`, then constant."""
    return min(1.0, step / max(1, warmup_steps))


def layerwise_groups(model: torch.nn.Module, num_layers: int, layer_decay: float, weight_decay: float) -> list[dict]:
    """Parameter groups for fine-tuning: the learning rate falls by `layer_decay` with every layer below the head.

    The names that transformers gives to modules tell the layer: `...embeddings...` is the lowest, `...layers.3...` the
    fifth, everything else belongs to the head. `rate_scale` of a group is its fraction of the head's learning rate.
    """
    groups = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        numbers = re.findall(r"(?:^|\.)layers?\.(\d+)\.", name)
        depth = 0 if "embeddings." in name else int(numbers[0]) + 1 if numbers else num_layers + 1
        # Tokens are matrices in shape only; the paper regularises learned alphas like any matrix.
        decayed = (parameter.ndim > 1 and not name.endswith("_token")) or name.endswith("_alpha")
        group = {
            "params": [],
            "rate_scale": layer_decay ** (num_layers + 1 - depth),
            "weight_decay": weight_decay if decayed else 0.0,
        }
        groups.setdefault((depth, decayed), group)["params"].append(parameter)
    return list(groups.values())


def is_scaler_warmup(scaler: torch.amp.GradScaler | None, loss: float) -> bool:
    """With fp16: whether a step was skipped because the gradient scale was too large, as happens every few thousand steps.

    If gradients overflow at a scale below one, the scale is not the cause.
    """
    return scaler is not None and math.isfinite(loss) and scaler.get_scale() >= 1.0


def ema_with_warmup(decay: float):
    """For `AveragedModel`: an exponential moving average that forgets the initial weights, so that short runs can use it.

    With a constant decay of 0.999, the average would still contain a fifth of the initial weights after 1,500 steps.
    The rule, min(decay, (1 + n) / (10 + n)), is that of diffusers' `EMAModel`, which has no fused kernel.
    """

    @torch.no_grad()
    def update(averaged, current, number):
        number = int(number)
        if averaged[0].is_floating_point():  # tensors come grouped by type
            torch._foreach_lerp_(averaged, current, 1 - min(decay, (1 + number) / (10 + number)))
        else:  # counters, such as that of batch norm
            torch._foreach_copy_(averaged, current)

    return update
