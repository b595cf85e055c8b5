"""Learning-rate rules and parameter groups."""

import math

import torch


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict]:
    """Weight decay for matrices, tokens and learned alphas; none for biases and norms."""
    decayed, free = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            # The paper regularises learned alphas like any matrix, although each is one number.
            (decayed if parameter.ndim > 1 or name.endswith("_alpha") else free).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": free, "weight_decay": 0.0}]


def warmup_cosine(step: int, warmup_steps: int, total_steps: int) -> float:
    """Share of the peak learning rate at a step: up in a line over `warmup_steps`, then half a cosine down to 0."""
    if step < warmup_steps:
        return step / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
