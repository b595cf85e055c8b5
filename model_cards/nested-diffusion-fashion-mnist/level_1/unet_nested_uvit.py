"""One level of a nested diffusion model: a U-ViT that denoises the latent of its level, given those of all higher levels.

Zhang's dissertation (chapter 5) generates images by a chain of diffusion models. Level L, the highest, samples a small
semantic vector; every level below samples a larger latent, and sees the latents above as tokens beside its own patches;
level 1 samples the image, or the latent of a VAE. The shortcuts decay with depth as in [`DecayedUViT2DModel`], which this
network equals, weight for weight, when nothing is above it.

This file travels alone to the Hub, so it imports no sibling; shared code is copied under `Copied from` headers.
"""

import dataclasses
import difflib
import functools
import inspect
import math
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.attention import AttentionMixin, AttentionModuleMixin
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.cache_utils import CacheMixin
from diffusers.models.embeddings import get_timestep_embedding
from diffusers.models.modeling_utils import ModelMixin
from diffusers.utils import BaseOutput
from torch import nn
from torch.nn import functional as F


__all__ = ["NestedUViT2DModel"]

# U-ViT's official small sizes, and those of the dissertation: M-12 for every level, M-16 as the single network to compare.
SIZES = {
    "S": {"hidden_size": 512, "num_layers": 12, "num_attention_heads": 8},
    "S-deep": {"hidden_size": 512, "num_layers": 16, "num_attention_heads": 8},
    "M-12": {"hidden_size": 768, "num_layers": 12, "num_attention_heads": 12, "time_embedding_mlp": True},
    "M-16": {"hidden_size": 768, "num_layers": 16, "num_attention_heads": 12, "time_embedding_mlp": True},
}

# The dissertation's latents for images of 256 pixels, the highest level first: height (and width), channels, patch size.
LATENTS_256 = ((1, 256, 1), (2, 128, 1), (4, 64, 2), (8, 32, 2))
VAE_LATENT_256 = (32, 4, 2)

# Copied from hf_decayed.models.unet_decayed_uvit.TIME_INPUTS
TIME_INPUTS = {
    "timestep": lambda t: t,
    "timestep_plus_one": lambda t: t + 1,  # official latent models: noise levels are counted from 1
    "continuous": lambda t: (t + 1) * 0.999,  # official pixel models: time in (0, 1], times 999
}

# Copied from hf_decayed.models.unet_decayed_uvit.CACHES
CACHES = (
    "PyramidAttentionBroadcastConfig",
    "FirstBlockCacheConfig",
    "MagCacheConfig",
    "TaylorSeerCacheConfig",
)


# Copied from hf_decayed.models.shortcut_decay.SCHEDULES
SCHEDULES = {
    "linear": lambda depth: depth,
    "cosine": lambda depth: (1.0 - math.cos(math.pi * depth)) / 2.0,
    "constant": lambda depth: 1.0,
}


# Copied from hf_decayed.models.shortcut_decay.EFFECTIVE_DECAY_TARGET
EFFECTIVE_DECAY_TARGET = 3e-3


# Copied from hf_decayed.models.shortcut_decay.shortcut_factors
def shortcut_factors(depths: list[float], shortcut_decay: float, schedule: str = "linear") -> list[float]:
    """Weight of the identity shortcut at each relative depth: 1 at depth 0, `shortcut_decay` at depth 1."""
    return [1.0 - (1.0 - shortcut_decay) * SCHEDULES[schedule](depth) for depth in depths]


# Copied from hf_decayed.models.shortcut_decay.branch_depths
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


# Copied from hf_decayed.models.shortcut_decay.layer_shortcut_factors
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


# Copied from hf_decayed.models.shortcut_decay.effective_decay
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


# Copied from hf_decayed.models.shortcut_decay.suggest_shortcut_decay
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


# Copied from hf_decayed.models.shortcut_decay.warn_about_decay
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


# Copied from hf_decayed.models.unet_decayed_uvit.check_integer
def check_integer(name: str, value: int, low: int, high: int = 2**20) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"`{name}` must be an integer in [{low}, {high}], got {value!r}.")


# Copied from hf_decayed.models.unet_decayed_uvit.check_boolean
def check_boolean(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"`{name}` must be True or False, got {value!r}.")


# Copied from hf_decayed.models.unet_decayed_uvit.check_choice
def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(choices)}, got {value!r}.")


# Copied from hf_decayed.models.unet_decayed_uvit.check_sizes
def check_sizes(config: dict) -> None:
    """Raises for a wrong size, with the field, the rule and the value."""
    for name in ("patch_size", "in_channels", "hidden_size", "num_attention_heads"):
        check_integer(name, config[name], 1)
    check_integer("num_layers", config["num_layers"], 1, 10_000)
    check_integer("num_classes", config["num_classes"], 0)
    check_boolean("qkv_bias", config["qkv_bias"])
    mlp_ratio = config["mlp_ratio"]
    if isinstance(mlp_ratio, bool) or not isinstance(mlp_ratio, (int, float)) or not 0 < mlp_ratio <= 1024:
        raise ValueError(f"`mlp_ratio` must be a number in (0, 1024], got {mlp_ratio!r}.")
    if int(config["hidden_size"] * mlp_ratio) < 1:
        raise ValueError(f"`mlp_ratio` must leave the MLP at least one hidden unit, got {mlp_ratio!r}.")
    sample_size, patch_size = config["sample_size"], config["patch_size"]
    if isinstance(sample_size, (list, tuple)) and len(sample_size) != 2:
        raise ValueError(f"`sample_size` must be one integer or (height, width), got {sample_size!r}.")
    height, width = sample_size if isinstance(sample_size, (list, tuple)) else (sample_size, sample_size)
    for side in (height, width):
        check_integer("sample_size", side, 1)
    if height % patch_size != 0 or width % patch_size != 0:
        raise ValueError(f"`sample_size` must be divisible by `patch_size`, got {height} x {width} and {patch_size}.")
    if config["hidden_size"] % config["num_attention_heads"] != 0:
        raise ValueError(
            f"`hidden_size` must be divisible by `num_attention_heads`, got {config['hidden_size']} and "
            f"{config['num_attention_heads']}."
        )


# Copied from hf_decayed.models.unet_decayed_uvit.check_shortcuts
def check_shortcuts(config: dict) -> None:
    """Raises for a wrong value in a field of the decayed shortcut, with the field, the rule and the value."""
    check_choice("shortcut_schedule", config["shortcut_schedule"], (*SCHEDULES, "learned"))
    check_choice("shortcut_granularity", config["shortcut_granularity"], ("sublayer", "layer"))
    check_choice("shortcut_scope", config["shortcut_scope"], ("both", "attention", "mlp"))
    decay = config["shortcut_decay"]
    is_number = isinstance(decay, (int, float)) and not isinstance(decay, bool)
    if decay != "auto" and not (is_number and 0.0 <= decay <= 1.0):
        raise ValueError(f"`shortcut_decay` must be 'auto' or lie in [0, 1], got {decay!r}.")


# Copied from hf_decayed.models.unet_decayed_uvit.check_field_names
def check_field_names(fields: dict, known: Collection[str], misspelt_only: bool = False) -> None:
    """Raises for an unknown field; with `misspelt_only`, only for one whose name is close to a known field's."""
    for name in fields.keys() - set(known):
        nearest = difflib.get_close_matches(name, known, 1, 0.8)
        if nearest:
            raise ValueError(f"Unknown field `{name}` (value {fields[name]!r}); did you mean `{nearest[0]}`?")
        if not misspelt_only:
            raise ValueError(f"Unknown field `{name}` (value {fields[name]!r}).")


# Copied from hf_decayed.models.unet_decayed_uvit.reject_unknown_fields
def reject_unknown_fields(init: Callable) -> Callable:
    """Decorates an `__init__`, so that the error for an unknown field names the field that was meant."""
    known = inspect.signature(init).parameters

    @functools.wraps(init)
    def checked_init(self, *args, **fields):
        # Diffusers itself passes fields that start with an underscore, and drops them.
        check_field_names({name: fields[name] for name in fields if not name.startswith("_")}, known)
        init(self, *args, **fields)

    return checked_init


def check_conditions(condition_levels: Sequence, condition_sigmas: Sequence[float] | None) -> None:
    """Raises for a description of the higher levels that describes no latents, with the field, the rule and the value."""
    if not isinstance(condition_levels, (list, tuple)):
        raise ValueError(f"`condition_levels` must be a list, got {condition_levels!r}.")
    for entry in condition_levels:
        if not isinstance(entry, (list, tuple)) or len(entry) != 3:
            raise ValueError(
                f"`condition_levels` must hold (size, channels, patch size) of each level, got {entry!r}."
            )
        for name, number in zip(("size", "channels", "patch size"), entry):
            check_integer(f"condition_levels, {name}", number, 1)
        if entry[0] % entry[2] != 0:
            raise ValueError(f"`condition_levels` needs sizes divisible by their patch size, got {tuple(entry)}.")
    if condition_sigmas is None:
        return
    if not isinstance(condition_sigmas, (list, tuple)) or len(condition_sigmas) != len(condition_levels):
        raise ValueError(
            f"`condition_sigmas` must have one number for each of {len(condition_levels)} `condition_levels`, got "
            f"{condition_sigmas!r}."
        )
    for sigma in condition_sigmas:
        if isinstance(sigma, bool) or not isinstance(sigma, (int, float)) or not 0.0 <= sigma < math.inf:
            raise ValueError(f"`condition_sigmas` must be finite and at least 0, got {sigma!r}.")


def dissertation_levels(num_levels: int) -> list[tuple[int, int, int]]:
    """`(size, channels, patch size)` of the dissertation's levels 1 to `num_levels`, for images of 256 pixels.

    >>> dissertation_levels(3)
    [(32, 4, 2), (2, 128, 1), (1, 256, 1)]
    """
    check_integer("num_levels", num_levels, 1, 1 + len(LATENTS_256))
    return [VAE_LATENT_256, *reversed(LATENTS_256[: num_levels - 1])]


# Copied from hf_decayed.models.unet_decayed_uvit.DecayedUViT2DOutput with DecayedUViT->NestedUViT
@dataclass
class NestedUViT2DOutput(BaseOutput):
    """
    sample (`torch.Tensor` of shape `(batch, channels, height, width)`): The prediction, usually of the noise.
    hidden_states (`tuple(torch.Tensor)`, *optional*): Patch tokens after every block, `(batch, num_patches, hidden_size)`.
    """

    sample: torch.Tensor
    hidden_states: tuple[torch.Tensor, ...] | None = None


# Copied from hf_decayed.models.unet_decayed_uvit.DecayedUViTAttnProcessor with DecayedUViT->NestedUViT
class NestedUViTAttnProcessor:
    """Attention by the kernel of `model.set_attention_backend`; PyTorch's own by default."""

    _attention_backend = None
    _parallel_config = None

    def __call__(self, attn: "NestedUViTAttention", hidden_states: torch.Tensor) -> torch.Tensor:
        if attn.fused_projections:
            projections = attn.to_qkv(hidden_states).chunk(3, dim=-1)
        else:
            projections = (attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states))
        query, key, value = (tensor.unflatten(-1, (attn.heads, -1)) for tensor in projections)
        attention_output = dispatch_attention_fn(
            query, key, value, backend=self._attention_backend, parallel_config=self._parallel_config
        )
        return attn.to_out[0](attention_output.flatten(2, 3))


# Copied from hf_decayed.models.unet_decayed_uvit.DecayedUViTAttention with DecayedUViT->NestedUViT
class NestedUViTAttention(nn.Module, AttentionModuleMixin):
    _default_processor_cls = NestedUViTAttnProcessor
    _available_processors = [NestedUViTAttnProcessor]

    def __init__(self, hidden_size: int, heads: int, qkv_bias: bool):
        super().__init__()
        self.heads, self.use_bias, self.is_cross_attention = heads, qkv_bias, False
        self.to_q = nn.Linear(hidden_size, hidden_size, bias=qkv_bias)
        self.to_k = nn.Linear(hidden_size, hidden_size, bias=qkv_bias)
        self.to_v = nn.Linear(hidden_size, hidden_size, bias=qkv_bias)
        self.to_out = nn.ModuleList([nn.Linear(hidden_size, hidden_size)])
        self.set_processor(NestedUViTAttnProcessor())

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.processor(self, hidden_states)


# Copied from hf_decayed.models.unet_decayed_uvit.add_learned_shortcut
def add_learned_shortcut(
    branch: torch.Tensor, hidden_states: torch.Tensor, alpha: torch.Tensor | float
) -> torch.Tensor:
    """`alpha * hidden_states + branch` for a trained alpha, in the dtype that the sum has with a fixed alpha."""
    if isinstance(alpha, float):  # the branch that `shortcut_scope` leaves at 1
        return torch.add(branch, hidden_states, alpha=alpha)
    return torch.addcmul(branch, hidden_states, alpha.to(hidden_states.dtype))


# Copied from hf_decayed.models.unet_decayed_uvit.DecayedUViTBlock with DecayedUViT->NestedUViT
class NestedUViTBlock(nn.Module):
    """Attention and MLP, each added to its weighted shortcut; in the second half of the network, after the skip."""

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        mlp_ratio: float,
        qkv_bias: bool,
        alphas: tuple[float, float],
        takes_skip: bool,
        learned_scope: str | None,
    ):
        super().__init__()
        inner_size = int(hidden_size * mlp_ratio)
        self.skip_projection = nn.Linear(2 * hidden_size, hidden_size) if takes_skip else None
        self.norm1 = nn.LayerNorm(hidden_size)
        self.attn = NestedUViTAttention(hidden_size, heads, qkv_bias)
        self.norm2 = nn.LayerNorm(hidden_size)
        self.fc1 = nn.Linear(hidden_size, inner_size)
        self.fc2 = nn.Linear(inner_size, hidden_size)
        self.attention_alpha, self.mlp_alpha = alphas
        self.has_learned_alphas = learned_scope is not None
        if learned_scope in ("both", "attention"):  # of shape (1,): sharding refuses scalars
            self.attention_alpha = nn.Parameter(torch.ones(1))
        if learned_scope in ("both", "mlp"):
            self.mlp_alpha = nn.Parameter(torch.ones(1))

    def forward(self, hidden_states: torch.Tensor, skip: torch.Tensor | None = None) -> torch.Tensor:
        if self.skip_projection is not None:
            hidden_states = self.skip_projection(torch.cat([hidden_states, skip], dim=-1))
        if self.has_learned_alphas:
            return self.forward_learned(hidden_states)
        attention_output = self.attn(self.norm1(hidden_states))
        hidden_states = torch.add(attention_output, hidden_states, alpha=self.attention_alpha)
        mlp_output = self.fc2(F.gelu(self.fc1(self.norm2(hidden_states))))
        hidden_states = torch.add(mlp_output, hidden_states, alpha=self.mlp_alpha)
        return hidden_states

    def forward_learned(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The rest of `forward` for `shortcut_schedule="learned"`."""
        attention_output = self.attn(self.norm1(hidden_states))
        hidden_states = add_learned_shortcut(attention_output, hidden_states, self.attention_alpha)
        mlp_output = self.fc2(F.gelu(self.fc1(self.norm2(hidden_states))))
        return add_learned_shortcut(mlp_output, hidden_states, self.mlp_alpha)


# Copied from hf_decayed.models.unet_decayed_uvit.sincos_positions
def sincos_positions(grid_size: tuple[int, int], hidden_size: int) -> torch.Tensor:
    """Table `(1, height * width, hidden_size)`: sines and cosines of the column, then of the row.

    Diffusers' function scales positions by a base size; the official weights were trained without this scale.
    """
    frequencies = 10_000.0 ** -(torch.arange(hidden_size // 4, dtype=torch.float64) / (hidden_size // 4))
    rows, columns = torch.meshgrid(*(torch.arange(side).double() for side in grid_size), indexing="ij")
    angles = [index.flatten().unsqueeze(1) * frequencies for index in (columns, rows)]
    return torch.cat([part for angle in angles for part in (angle.sin(), angle.cos())], dim=1).float().unsqueeze(0)


class NestedUViT2DModel(ModelMixin, AttentionMixin, ConfigMixin, CacheMixin):
    r"""
    The denoiser of one level: `forward(sample, timestep, class_labels, conditions)`.

    Tokens are [class, time, latents of the higher levels, patches of the sample]; only the last are read out.

    Args:
        sample_size (`int` or pair, defaults to 32): Height and width of this level's latent.
        patch_size (`int`, defaults to 2): Side of a patch; height and width must be divisible by it.
        in_channels (`int`, defaults to 4): Channels of input and output.
        condition_levels (`list` of `(size, channels, patch_size)`, defaults to `()`):
            The latents of all higher levels, the highest first. Empty for the highest level.
        condition_sigmas (`list[float]`, *optional*, defaults to zeros):
            Standard deviation of the noise that training added to each of them; sampling may add it too.
        level (`int`, defaults to 1): Number of this level; 1 is the image or the VAE's latent.
        latent_fingerprint (`str`, *optional*): Fingerprint of the [`HierarchicalLatentEncoder`] whose latents these are.
        hidden_size, num_layers, num_attention_heads, mlp_ratio, qkv_bias:
            Sizes. `num_layers` is U-ViT's depth, an even number; the middle block is not counted.
        num_classes (`int`, defaults to 0): 0 is unconditional. The null class of guidance is not counted: its label is
            `num_classes`.
        time_embedding_mlp, final_conv, time_input, zero_init_branches, sincos_init_positions:
            As in [`DecayedUViT2DModel`].
        shortcut_decay, shortcut_schedule, shortcut_granularity, shortcut_scope:
            The decayed shortcut, as in [`DecayedUViT2DModel`]. `shortcut_decay=1.0` is the dissertation's U-ViT.
    """

    _supports_gradient_checkpointing = True
    _no_split_modules = ["NestedUViTBlock"]
    _repeated_blocks = ["NestedUViTBlock"]
    _skip_layerwise_casting_patterns = ["position_embedding", "empty_condition", "norm"]

    @reject_unknown_fields
    @register_to_config
    def __init__(
        self,
        sample_size: int | tuple[int, int] = 32,
        patch_size: int = 2,
        in_channels: int = 4,
        condition_levels: Sequence[tuple[int, int, int]] = (),
        condition_sigmas: Sequence[float] | None = None,
        level: int = 1,
        latent_fingerprint: str | None = None,
        hidden_size: int = 512,
        num_layers: int = 12,
        num_attention_heads: int = 8,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = False,
        num_classes: int = 0,
        time_embedding_mlp: bool = False,
        final_conv: bool = True,
        time_input: str = "timestep_plus_one",
        zero_init_branches: bool = True,
        sincos_init_positions: bool = False,
        shortcut_decay: float | str = 0.7,
        shortcut_schedule: str = "linear",
        shortcut_granularity: str = "sublayer",
        shortcut_scope: str = "both",
    ):
        super().__init__()
        check_integer("level", level, 1)
        check_conditions(condition_levels, condition_sigmas)
        if condition_sigmas is None:
            self.register_to_config(condition_sigmas=[0.0] * len(condition_levels))
        if latent_fingerprint is not None and not isinstance(latent_fingerprint, str):
            raise ValueError(f"`latent_fingerprint` must be a string or None, got {latent_fingerprint!r}.")
        check_sizes(self.config)
        check_shortcuts(self.config)
        for name in ("time_embedding_mlp", "final_conv", "zero_init_branches", "sincos_init_positions"):
            check_boolean(name, self.config[name])
        check_choice("time_input", time_input, TIME_INPUTS)
        if num_layers % 2 != 0:
            raise ValueError(f"`num_layers` must be even, the middle block not counted, got {num_layers}.")
        if sincos_init_positions and hidden_size % 4 != 0:
            raise ValueError(f"`sincos_init_positions` needs a `hidden_size` divisible by 4, got {hidden_size}.")
        alphas = self.initial_alphas(num_layers + 1)

        self.gradient_checkpointing = False
        height, width = (sample_size, sample_size) if isinstance(sample_size, int) else sample_size
        self.grid_size = (height // patch_size, width // patch_size)
        self.patch_embedding = nn.Conv2d(in_channels, hidden_size, kernel_size=patch_size, stride=patch_size)
        self.time_mlp = (
            nn.Sequential(nn.Linear(hidden_size, 4 * hidden_size), nn.SiLU(), nn.Linear(4 * hidden_size, hidden_size))
            if time_embedding_mlp
            else None
        )
        self.class_embedding = nn.Embedding(num_classes + 1, hidden_size) if num_classes > 0 else None

        self.condition_embeddings = nn.ModuleList(
            [
                nn.Conv2d(channels, hidden_size, kernel_size=patch, stride=patch)
                for _, channels, patch in condition_levels
            ]
        )
        num_condition_tokens = sum((size // patch) ** 2 for size, _, patch in condition_levels)
        self.empty_condition = (
            nn.Parameter(torch.zeros(1, num_condition_tokens, hidden_size)) if condition_levels else None
        )
        self.num_extra_tokens = (2 if num_classes > 0 else 1) + num_condition_tokens
        num_tokens = self.num_extra_tokens + math.prod(self.grid_size)
        self.position_embedding = nn.Parameter(torch.zeros(1, num_tokens, hidden_size))

        half = num_layers // 2
        blocks = [
            NestedUViTBlock(
                hidden_size,
                num_attention_heads,
                mlp_ratio,
                qkv_bias,
                alphas[index],
                takes_skip=index > half,
                learned_scope=shortcut_scope if shortcut_schedule == "learned" else None,
            )
            for index in range(num_layers + 1)
        ]
        self.in_blocks = nn.ModuleList(blocks[:half])
        self.mid_block = blocks[half]
        self.out_blocks = nn.ModuleList(blocks[half + 1 :])
        self.norm_out = nn.LayerNorm(hidden_size)
        self.proj_out = nn.Linear(hidden_size, patch_size**2 * in_channels)
        self.conv_out = nn.Conv2d(in_channels, in_channels, 3, padding=1) if final_conv else None
        self.initialize_weights()

    # Copied from hf_decayed.models.unet_decayed_uvit.DecayedUViT2DModel.from_size with DecayedUViT->NestedUViT
    @classmethod
    def from_size(cls, size: str, **overrides) -> "NestedUViT2DModel":
        """A network of a named size, a key of `SIZES`; any argument can be overridden."""
        check_choice("size", size, SIZES)
        return cls(**{**SIZES[size], **overrides})

    @classmethod
    def for_level(
        cls, levels: Sequence[tuple[int, int, int]], level: int, size: str = "M-12", **overrides
    ) -> "NestedUViT2DModel":
        """The network of one level.

        Args:
            levels (`list` of `(size, channels, patch_size)`): All latents of the chain, that of level 1 first; those of the
                dissertation are `dissertation_levels(num_levels)`.
            level (`int`): Number of the level, from 1.
        """
        check_integer("level", level, 1, len(levels))
        sample_size, channels, patch_size = levels[level - 1]
        fields = {
            "sample_size": sample_size,
            "in_channels": channels,
            "patch_size": patch_size,
            "condition_levels": [tuple(entry) for entry in reversed(levels[level:])],
            "level": level,
            "final_conv": level == 1,  # the others are no images
        }
        return cls.from_size(size, **{**fields, **overrides})

    # Copied from hf_decayed.models.unet_decayed_uvit.DecayedUViT2DModel.extract_init_dict
    @classmethod
    def extract_init_dict(cls, config_dict, **kwargs):
        # `auto_map` is for diffusers' AutoModel; the model itself would warn of it. Diffusers ignores other unknown fields
        # of a file, and a misspelt one with them.
        config_dict = {name: value for name, value in config_dict.items() if name != "auto_map"}
        check_field_names({**config_dict, **kwargs}, inspect.signature(cls.__init__).parameters, misspelt_only=True)
        return super().extract_init_dict(config_dict, **kwargs)

    # Copied from hf_decayed.models.unet_decayed_uvit.DecayedUViT2DModel.initial_alphas
    def initial_alphas(self, num_blocks: int) -> list[tuple[float, float]]:
        """`(attention_alpha, mlp_alpha)` of every block; learned ones start at 1."""
        config = self.config
        if config.shortcut_schedule == "learned":
            decay, schedule = 1.0, ("constant", config.shortcut_granularity, config.shortcut_scope)
        else:
            schedule = (config.shortcut_schedule, config.shortcut_granularity, config.shortcut_scope)
            decay = config.shortcut_decay
            if decay == "auto":
                decay = suggest_shortcut_decay(num_blocks, EFFECTIVE_DECAY_TARGET, *schedule)
            warn_about_decay(num_blocks, decay, *schedule)
        if config.shortcut_decay == "auto":
            # The number replaces the word, so that the saved file describes the network.
            self.register_to_config(shortcut_decay=decay)
        return layer_shortcut_factors(num_blocks, float(decay), *schedule)

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """As in the official U-ViT; with `zero_init_branches`, every branch starts with a zero output."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.trunc_normal_(self.position_embedding, std=0.02)
        if self.empty_condition is not None:
            nn.init.trunc_normal_(self.empty_condition, std=0.02)
        if self.config.sincos_init_positions:
            table = sincos_positions(self.grid_size, self.config.hidden_size)
            self.position_embedding[:, self.num_extra_tokens :] = table
        if self.config.zero_init_branches:
            for module in self.modules():
                if isinstance(module, NestedUViTBlock):
                    nn.init.zeros_(module.attn.to_out[0].weight)
                    nn.init.zeros_(module.fc2.weight)

    # Copied from hf_decayed.models.unet_decayed_uvit.DecayedUViT2DModel.enable_cache with DecayedUViT->NestedUViT
    def enable_cache(self, config) -> None:
        """Enables one of diffusers' `CACHES`.

        FirstBlock and Mag leave out blocks, skips included, and add what the blocks added at an earlier step: the stream
        before them keeps the weight 1, where the network has the product of its alphas. TaylorSeer's lite mode continues the
        outputs of earlier steps on a straight line, which is independent of the network's inside.
        """
        kind = type(config).__name__
        if kind not in CACHES:
            reason = " FasterCache needs batches whose second half is conditional, and the pipeline's first half is."
            raise ValueError(
                f"{kind} does not fit this network: use one of {', '.join(CACHES)}."
                f"{reason if kind == 'FasterCacheConfig' else ''}"
            )
        if kind == "TaylorSeerCacheConfig" and not (config.cache_identifiers or config.use_lite_mode):
            config = dataclasses.replace(config, cache_identifiers=[r"(in_blocks|mid_block|out_blocks)\b.*attn"])
        if kind in ("FirstBlockCacheConfig", "MagCacheConfig"):
            from diffusers.hooks._helpers import TransformerBlockMetadata, TransformerBlockRegistry  # not public

            TransformerBlockRegistry.register(NestedUViTBlock, TransformerBlockMetadata(return_hidden_states_index=0))
        # Diffusers looks for all blocks in one list of this name; it is no part of the network.
        self.transformer_blocks = nn.ModuleList([*self.in_blocks, self.mid_block, *self.out_blocks])
        try:
            super().enable_cache(config)
        finally:
            del self.transformer_blocks

    # Copied from hf_decayed.models.unet_decayed_uvit.DecayedUViT2DModel.effective_decay with DecayedUViT->NestedUViT
    def effective_decay(self) -> float:
        """Share of the embeddings that passes the network through the shortcuts alone: the product of all alphas."""
        blocks = [module for module in self.modules() if isinstance(module, NestedUViTBlock)]
        pairs = [(block.attention_alpha, block.mlp_alpha) for block in blocks]
        return math.prod(
            math.prod(alpha.item() if isinstance(alpha, torch.Tensor) else alpha for alpha in pair) for pair in pairs
        )

    @property
    def num_tokens(self) -> int:
        """Length of the sequence: time, class, conditions and patches."""
        return self.position_embedding.shape[1]

    def count_macs(self) -> int:
        """Multiply-accumulate operations of one call for one sample: what the dissertation's table calls Flops."""
        config, tokens = self.config, self.num_tokens
        patches, dim = math.prod(self.grid_size), config.hidden_size
        projections = 4 * dim**2 + 2 * dim * int(dim * config.mlp_ratio)  # query, key, value, output; MLP
        blocks = (config.num_layers + 1) * (tokens * projections + 2 * tokens**2 * dim)
        skips = config.num_layers // 2 * tokens * 2 * dim**2
        patch_dim = config.patch_size**2 * config.in_channels
        embeddings = 2 * patches * patch_dim * dim  # into the network, and out of it
        embeddings += sum(size**2 * channels * dim for size, channels, _ in config.condition_levels)
        embeddings += 8 * dim**2 if config.time_embedding_mlp else 0
        convolution = patches * config.patch_size**2 * 9 * config.in_channels**2 if config.final_conv else 0
        return blocks + skips + embeddings + convolution

    def forward(
        self,
        sample: torch.Tensor,
        timestep: torch.Tensor | float | int,
        class_labels: torch.Tensor | None = None,
        conditions: Sequence[torch.Tensor] | None = None,
        drop_conditions: torch.Tensor | None = None,
        return_dict: bool = True,
        output_hidden_states: bool = False,
    ) -> NestedUViT2DOutput | tuple:
        """
        Args:
            sample (`torch.Tensor` of shape `(batch, in_channels, height, width)`): Noisy latents of this level. Positions
                are interpolated for sizes other than `sample_size`.
            timestep (`torch.Tensor`, `float` or `int`): The scheduler's timestep; one for all samples or one per sample.
            class_labels (`torch.Tensor` of shape `(batch,)`, *optional*): Labels from 0. `num_classes` is the null class,
                which is also the default of a conditional model.
            conditions (`list[torch.Tensor]`, *optional*): Latents `(batch, channels, size, size)` of all higher levels, the
                highest first. Without them, learned empty tokens take their places.
            drop_conditions (`torch.Tensor` of shape `(batch,)`, *optional*): True for samples whose conditions are replaced
                by the empty tokens.
        """
        batch_size, channels, height, width = sample.shape
        patch_size = self.config.patch_size
        if channels != self.config.in_channels:
            raise ValueError(f"`sample` must have {self.config.in_channels} channels, got {channels}.")
        if height % patch_size != 0 or width % patch_size != 0:
            raise ValueError(
                f"Height and width of `sample` must be divisible by `patch_size`, got {height} x {width} and {patch_size}."
            )
        grid_size = (height // patch_size, width // patch_size)
        patches = self.patch_embedding(sample).flatten(2).transpose(1, 2)  # (batch, num_patches, hidden_size)

        time = torch.as_tensor(timestep, device=sample.device).expand(batch_size)
        time = TIME_INPUTS[self.config.time_input](time.float())
        time = get_timestep_embedding(time, self.config.hidden_size, flip_sin_to_cos=True, downscale_freq_shift=0)
        time = time.to(patches.dtype)
        tokens = [(self.time_mlp(time) if self.time_mlp is not None else time).unsqueeze(1), patches]
        if self.class_embedding is not None:
            tokens.insert(0, self.class_embedding(self.check_labels(class_labels, batch_size)).unsqueeze(1))
        elif class_labels is not None:
            raise ValueError("`class_labels` were passed to a model without classes (`num_classes=0`).")
        if self.empty_condition is not None:
            tokens.insert(-1, self.embed_conditions(conditions, drop_conditions, batch_size).to(patches.dtype))
        elif conditions:
            raise ValueError("`conditions` were passed to the highest level, which has none.")
        hidden_states = torch.cat(tokens, dim=1) + self.positions(grid_size)  # (batch, num_tokens, hidden_size)

        skips, all_hidden_states = [], []
        for block in (*self.in_blocks, self.mid_block, *self.out_blocks):
            inputs = (hidden_states,) if block.skip_projection is None else (hidden_states, skips.pop())
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                hidden_states = self._gradient_checkpointing_func(block, *inputs)
            else:
                hidden_states = block(*inputs)
            if block.skip_projection is None and block is not self.mid_block:
                skips.append(hidden_states)
            if output_hidden_states:
                all_hidden_states.append(hidden_states[:, self.num_extra_tokens :])

        patches = self.proj_out(self.norm_out(hidden_states)[:, self.num_extra_tokens :])
        sample = patches.unflatten(1, grid_size).unflatten(3, (patch_size, patch_size, channels))
        sample = sample.permute(0, 5, 1, 3, 2, 4).reshape(batch_size, channels, height, width)
        if self.conv_out is not None:
            sample = self.conv_out(sample)
        if not return_dict:
            return (sample, tuple(all_hidden_states)) if output_hidden_states else (sample,)
        return NestedUViT2DOutput(
            sample=sample, hidden_states=tuple(all_hidden_states) if output_hidden_states else None
        )

    def embed_conditions(
        self, conditions: Sequence[torch.Tensor] | None, drop_conditions: torch.Tensor | None, batch_size: int
    ) -> torch.Tensor:
        """Tokens `(batch, num_condition_tokens, hidden_size)` of the higher levels, or the empty tokens in their places."""
        assert self.empty_condition is not None
        empty = self.empty_condition.expand(batch_size, -1, -1)
        if conditions is None:
            return empty
        expected = [(batch_size, channels, size, size) for size, channels, _ in self.config.condition_levels]
        shapes = [tuple(condition.shape) for condition in conditions]
        if shapes != expected:
            raise ValueError(f"`conditions` must have shapes {expected}, the highest level first, got {shapes}.")
        tokens = torch.cat(
            [embed(latent).flatten(2).transpose(1, 2) for embed, latent in zip(self.condition_embeddings, conditions)],
            dim=1,
        )
        if drop_conditions is None:
            return tokens
        return torch.where(drop_conditions.view(-1, 1, 1), empty.to(tokens.dtype), tokens)

    # Copied from hf_decayed.models.unet_decayed_uvit.DecayedUViT2DModel.check_labels
    def check_labels(self, class_labels: torch.Tensor | None, batch_size: int) -> torch.Tensor:
        """The labels as integers, one per sample; the null class by default."""
        if class_labels is None:
            return torch.full((batch_size,), self.config.num_classes, device=self.position_embedding.device)
        if class_labels.shape != (batch_size,) or class_labels.dtype == torch.bool or class_labels.is_floating_point():
            raise ValueError(
                f"`class_labels` must be {batch_size} whole numbers, one for each sample, got "
                f"{tuple(class_labels.shape)} of {class_labels.dtype}."
            )
        # On other devices this would wait for the device at every step; there the embedding's own check has to do.
        if class_labels.device.type == "cpu" and not torch.compiler.is_compiling():
            smallest, largest = int(class_labels.min()), int(class_labels.max())
            if smallest < 0 or largest > self.config.num_classes:
                raise ValueError(
                    f"`class_labels` must lie in [0, {self.config.num_classes}], where the last is the null class, "
                    f"got {smallest if smallest < 0 else largest}."
                )
        return class_labels.long()  # `nn.Embedding` takes no smaller integer types

    # Copied from hf_decayed.models.unet_decayed_uvit.DecayedUViT2DModel.positions
    def positions(self, grid_size: tuple[int, int]) -> torch.Tensor:
        """The learned positions. For another grid, those of the patches are interpolated (bicubic)."""
        if grid_size == self.grid_size:
            return self.position_embedding
        extra, patches = self.position_embedding.split(
            [self.num_extra_tokens, self.position_embedding.shape[1] - self.num_extra_tokens], dim=1
        )
        patches = patches.transpose(1, 2).unflatten(2, self.grid_size).float()
        patches = F.interpolate(patches, size=grid_size, mode="bicubic", align_corners=False)
        return torch.cat([extra, patches.flatten(2).transpose(1, 2).to(extra.dtype)], dim=1)
