"""Rules for learning rates and shortcuts over training, parameter groups, and an optimizer that torch lacks."""

import math
import re

import torch


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict]:
    """Weight decay for matrices, tokens and learned alphas; none for biases and norms."""
    decayed, free = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            # The paper regularises learned alphas like any matrix, although each is one number.
            (decayed if parameter.ndim > 1 or name.endswith("_alpha") else free).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": free, "weight_decay": 0.0}]


def set_shortcut_progress(layers, alphas: list[tuple[float, float]], share: float) -> None:
    """Takes the shortcuts of transformer layers this share of the way from 1 down to their alphas."""
    for layer, (attention_alpha, mlp_alpha) in zip(layers, alphas):
        # The last step of the way is the alpha itself, to the bit: a model is saved only with its config's alphas.
        layer.attention_alpha = attention_alpha if share >= 1.0 else 1.0 - share * (1.0 - attention_alpha)
        layer.mlp_alpha = mlp_alpha if share >= 1.0 else 1.0 - share * (1.0 - mlp_alpha)


def layerwise_groups(
    model: torch.nn.Module, num_layers: int, learning_rate: float, layer_decay: float, weight_decay: float
) -> list[dict]:
    """Parameter groups for fine-tuning: the rate falls by `layer_decay` with every layer below the head.

    Layers are told by the names that transformers gives them: `...embeddings...` is the lowest, `...layers.3...` the
    fifth, everything else belongs to the head. Groups carry `peak_learning_rate`, for a schedule to start from.
    """
    groups = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        numbers = re.findall(r"(?:^|\.)layers?\.(\d+)\.", name)
        depth = 0 if "embeddings." in name else int(numbers[0]) + 1 if numbers else num_layers + 1
        # Tokens are matrices in shape only; the paper regularises learned alphas like any matrix.
        decayed = (parameter.ndim > 1 and not name.endswith("_token")) or name.endswith("_alpha")
        rate = learning_rate * layer_decay ** (num_layers + 1 - depth)
        group = {
            "params": [],
            "lr": rate,
            "peak_learning_rate": rate,
            "weight_decay": weight_decay if decayed else 0.0,
        }
        groups.setdefault((depth, decayed), group)["params"].append(parameter)
    return list(groups.values())


def is_scaler_warmup(scaler: torch.amp.GradScaler | None, loss: float) -> bool:
    """With fp16: whether a step was left out because the scale of gradients was too large, as happens every few thousand.

    Where the scale is below one and gradients still overflow, it is not the scale's fault.
    """
    return scaler is not None and math.isfinite(loss) and scaler.get_scale() >= 1.0


def ema_with_warmup(decay: float):
    """For `AveragedModel`: an exponential average that forgets its first weights, so that short runs can be sampled from.

    With `decay` from the first step on, 0.999 would still hold a fifth of the untrained weights after 1,500 steps. The rule,
    min(decay, (1 + n) / (10 + n)), is that of diffusers' `EMAModel`; that class has no fused kernel.
    """

    @torch.no_grad()
    def update(averaged, current, number):
        number = int(number)
        torch._foreach_lerp_(averaged, current, 1 - min(decay, (1 + number) / (10 + number)))

    return update
