"""A decay that is lowered while a network trains, from ordinary shortcuts to their final weights."""

import torch

from ..decay.own_models import check_form, config_fields, require_own_stack, set_alphas
from ..models.shortcut_decay import layer_shortcut_factors


__all__ = ["DecayWarmup"]


class DecayWarmup:
    """Starts all shortcuts at weight 1, keeps them there until `start`, and moves them to their final weights until `end`.

    Without an `end` it does nothing.

    The config follows, so a network can be saved on the way, a compiled one after `finish`: every schedule is linear in
    `shortcut_decay`.

    >>> decay_warmup = DecayWarmup([model], run.schedule_steps, end=0.5)
    >>> run.record(decay_warmup.set(run.step))  # at every step

    Args:
        networks (`list[torch.nn.Module]`):
            Diffusion models and encoders of masked autoencoders, as they are before anything wraps them. Those without decay
            stay as they are.
        schedule_steps (`int`): Steps of the whole run.
        end (`float`, *optional*): Fraction of the steps after which the shortcuts have their final weights.
        start (`float`, *optional*):
            Fraction of the steps after which the shortcuts begin to move, by default 0; at that step they still have weight 1.
        compiled (`bool`, defaults to `False`):
            Whether the networks are compiled. Compiled code takes a number for a constant, and would be compiled again
            at every step. Shortcuts that move are therefore tensors, as those of `shortcut_schedule="learned"` are.
    """

    def __init__(
        self,
        networks: list[torch.nn.Module],
        schedule_steps: int,
        end: float | None,
        start: float | None = None,
        compiled: bool = False,
    ):
        self.steps = round((end or 0) * schedule_steps)
        self.start = round((start or 0) * schedule_steps)
        self.compiled = compiled
        self.share: float | None = None
        self.networks = []
        for network in dict.fromkeys(networks) if self.steps else []:  # without an EMA, twice the same
            check_form(network)
            fields = config_fields(network)
            schedule = [fields[f"shortcut_{name}"] for name in ("schedule", "granularity", "scope")]
            if fields["shortcut_decay"] != 1.0:
                self.networks.append((network, require_own_stack(network), fields["shortcut_decay"], schedule))
        if not self.networks:
            self.steps = 0

    def set(self, step: int) -> dict[str, float]:
        """Sets the shortcuts for a step, counted from 0; returns the share of the decay, for the metrics."""
        if not self.steps:
            return {}
        last = self.steps - 1  # the first step with the final weights
        share = 1.0 if step >= max(last, self.start) else max(0.0, (step - self.start) / max(1, last - self.start))
        if share != self.share:
            self.move(share)
        return {"decay_share": share}

    def move(self, share: float) -> None:
        self.share = share
        for network, stack, final_decay, schedule in self.networks:
            decay = final_decay if share == 1.0 else 1.0 - share * (1.0 - final_decay)
            alphas = layer_shortcut_factors(len(stack.modules), decay, *schedule)
            set_alphas(network, stack, [list(pair) for pair in alphas], shortcut_decay=decay)
            for layer in stack.modules:
                layer.has_learned_alphas = self.compiled and share < 1.0
                if layer.has_learned_alphas:
                    layer.attention_alpha = alpha_tensor(layer.attention_alpha, layer)
                    layer.mlp_alpha = alpha_tensor(layer.mlp_alpha, layer)

    def finish(self, step: int) -> None:
        """Leaves plain numbers, those of the last of `step` steps, also in a run that was resumed at its end."""
        self.compiled, self.share = False, None
        self.set(step - 1)


def alpha_tensor(alpha: float, layer: torch.nn.Module) -> torch.Tensor:
    weight = next(layer.parameters())
    return torch.full((1,), alpha, dtype=weight.dtype, device=weight.device)
