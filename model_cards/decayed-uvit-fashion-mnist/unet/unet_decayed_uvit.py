"""U-ViT (Bao et al., CVPR 2023) with decayed identity shortcuts: `x <- alpha * x + f(x)`, alpha falling with depth.

A diffusion model on image or latent patches. Time and class are tokens beside the patches, and skips connect the blocks
before the middle one with the blocks after it. In every block, both residual branches multiply their shortcut by alpha,
which falls from 1 at the first branch of the network to `shortcut_decay` at the last (Zhang et al., CVPR 2026). There are
no new parameters, and with `shortcut_decay=1.0` this is the official U-ViT.

This file travels alone to the Hub, so it imports no sibling; shared code is copied under `Copied from` headers.
"""

import dataclasses
import difflib
import functools
import inspect
import math
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.loaders import PeftAdapterMixin
from diffusers.models.attention import AttentionMixin, AttentionModuleMixin
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.cache_utils import CacheMixin
from diffusers.models.embeddings import get_timestep_embedding
from diffusers.models.modeling_utils import ModelMixin
from diffusers.utils import BaseOutput
from torch import nn
from torch.nn import functional as F


__all__ = ["DecayedUViT2DModel"]

# The official sizes. `num_layers` counts the blocks on both sides of the middle one.
SIZES = {
    "S": {"hidden_size": 512, "num_layers": 12, "num_attention_heads": 8},
    "S-deep": {"hidden_size": 512, "num_layers": 16, "num_attention_heads": 8},
    "M": {"hidden_size": 768, "num_layers": 16, "num_attention_heads": 12},
    "L": {"hidden_size": 1024, "num_layers": 20, "num_attention_heads": 16},
    "H": {"hidden_size": 1152, "num_layers": 28, "num_attention_heads": 16, "final_conv": False},
}

# From a scheduler's timestep t to the time that the network was trained with.
TIME_INPUTS = {
    "timestep": lambda t: t,
    "timestep_plus_one": lambda t: t + 1,  # official latent models: noise levels are counted from 1
    "continuous": lambda t: (t + 1) * 0.999,  # official pixel models: time in (0, 1], times 999
}

# Diffusers' caches that fit the network, by the names of their configs.
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


def check_integer(name: str, value: int, low: int, high: int = 2**20) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"`{name}` must be an integer in [{low}, {high}], got {value!r}.")


def check_boolean(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"`{name}` must be True or False, got {value!r}.")


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(choices)}, got {value!r}.")


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


def check_shortcuts(config: dict) -> None:
    """Raises for a wrong value in a field of the decayed shortcut, with the field, the rule and the value."""
    check_choice("shortcut_schedule", config["shortcut_schedule"], (*SCHEDULES, "learned"))
    check_choice("shortcut_granularity", config["shortcut_granularity"], ("sublayer", "layer"))
    check_choice("shortcut_scope", config["shortcut_scope"], ("both", "attention", "mlp"))
    decay = config["shortcut_decay"]
    is_number = isinstance(decay, (int, float)) and not isinstance(decay, bool)
    if decay != "auto" and not (is_number and 0.0 <= decay <= 1.0):
        raise ValueError(f"`shortcut_decay` must be 'auto' or lie in [0, 1], got {decay!r}.")


def check_field_names(fields: dict, known: Collection[str], misspelt_only: bool = False) -> None:
    """Raises for an unknown field; with `misspelt_only`, only for one whose name is close to a known field's."""
    for name in fields.keys() - set(known):
        nearest = difflib.get_close_matches(name, known, 1, 0.8)
        if nearest:
            raise ValueError(f"Unknown field `{name}` (value {fields[name]!r}); did you mean `{nearest[0]}`?")
        if not misspelt_only:
            raise ValueError(f"Unknown field `{name}` (value {fields[name]!r}).")


def reject_unknown_fields(init: Callable) -> Callable:
    """Decorates an `__init__`, so that the error for an unknown field names the field that was meant."""
    known = inspect.signature(init).parameters

    @functools.wraps(init)
    def checked_init(self, *args, **fields):
        # Diffusers itself passes fields that start with an underscore, and drops them.
        check_field_names({name: fields[name] for name in fields if not name.startswith("_")}, known)
        init(self, *args, **fields)

    return checked_init


@dataclass
class DecayedUViT2DOutput(BaseOutput):
    """
    sample (`torch.Tensor` of shape `(batch, channels, height, width)`): The prediction, usually of the noise.
    hidden_states (`tuple(torch.Tensor)`, *optional*): Patch tokens after every block, `(batch, num_patches, hidden_size)`.
    """

    sample: torch.Tensor
    hidden_states: tuple[torch.Tensor, ...] | None = None


class DecayedUViTAttnProcessor:
    """Attention by the kernel of `model.set_attention_backend`; PyTorch's own by default."""

    _attention_backend = None
    _parallel_config = None

    def __call__(self, attn: "DecayedUViTAttention", hidden_states: torch.Tensor) -> torch.Tensor:
        if attn.fused_projections:
            projections = attn.to_qkv(hidden_states).chunk(3, dim=-1)
        else:
            projections = (attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states))
        query, key, value = (tensor.unflatten(-1, (attn.heads, -1)) for tensor in projections)
        attention_output = dispatch_attention_fn(
            query, key, value, backend=self._attention_backend, parallel_config=self._parallel_config
        )
        return attn.to_out[0](attention_output.flatten(2, 3))


class DecayedUViTAttention(nn.Module, AttentionModuleMixin):
    _default_processor_cls = DecayedUViTAttnProcessor
    _available_processors = [DecayedUViTAttnProcessor]

    def __init__(self, hidden_size: int, heads: int, qkv_bias: bool):
        super().__init__()
        self.heads, self.use_bias, self.is_cross_attention = heads, qkv_bias, False
        self.to_q = nn.Linear(hidden_size, hidden_size, bias=qkv_bias)
        self.to_k = nn.Linear(hidden_size, hidden_size, bias=qkv_bias)
        self.to_v = nn.Linear(hidden_size, hidden_size, bias=qkv_bias)
        self.to_out = nn.ModuleList([nn.Linear(hidden_size, hidden_size)])
        self.set_processor(DecayedUViTAttnProcessor())

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.processor(self, hidden_states)


def add_learned_shortcut(
    branch: torch.Tensor, hidden_states: torch.Tensor, alpha: torch.Tensor | float
) -> torch.Tensor:
    """`alpha * hidden_states + branch` for a trained alpha, in the dtype that the sum has with a fixed alpha."""
    if isinstance(alpha, float):  # the branch that `shortcut_scope` leaves at 1
        return torch.add(branch, hidden_states, alpha=alpha)
    return torch.addcmul(branch, hidden_states, alpha.to(hidden_states.dtype))


class DecayedUViTBlock(nn.Module):
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
        self.attn = DecayedUViTAttention(hidden_size, heads, qkv_bias)
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


def sincos_positions(grid_size: tuple[int, int], hidden_size: int) -> torch.Tensor:
    """Table `(1, height * width, hidden_size)`: sines and cosines of the column, then of the row.

    Diffusers' function scales positions by a base size; the official weights were trained without this scale.
    """
    frequencies = 10_000.0 ** -(torch.arange(hidden_size // 4, dtype=torch.float64) / (hidden_size // 4))
    rows, columns = torch.meshgrid(*(torch.arange(side).double() for side in grid_size), indexing="ij")
    angles = [index.flatten().unsqueeze(1) * frequencies for index in (columns, rows)]
    return torch.cat([part for angle in angles for part in (angle.sin(), angle.cos())], dim=1).float().unsqueeze(0)


class DecayedUViT2DModel(ModelMixin, AttentionMixin, ConfigMixin, PeftAdapterMixin, CacheMixin):
    r"""
    U-ViT with decayed shortcuts. `forward(sample, timestep)` fits diffusers' own pipelines as their `unet`.

    Args:
        sample_size (`int` or pair, defaults to 32): Height and width of the image or latent.
        patch_size (`int`, defaults to 2): Side of a patch; height and width must be divisible by it.
        in_channels (`int`, defaults to 3): Channels of input and output.
        hidden_size, num_layers, num_attention_heads, mlp_ratio, qkv_bias:
            Sizes. `num_layers` is the paper's depth, an even number; the middle block is not counted.
        num_classes (`int`, defaults to 0): 0 is unconditional. The null class of guidance is not counted: its label is
            `num_classes`.
        time_embedding_mlp (`bool`, defaults to `False`): An MLP on the time embedding.
        final_conv (`bool`, defaults to `True`): A 3 x 3 convolution on the output image.
        time_input (`str`, defaults to `"timestep_plus_one"`):
            How a scheduler's timestep t, counted from 0, becomes the network's time: `timestep` (t itself),
            `timestep_plus_one` (t + 1: official latent models) or `continuous` ((t + 1) / 1000 * 999: official pixel
            models).
        zero_init_branches (`bool`, defaults to `True`): Attention output and MLP output start at zero.
        sincos_init_positions (`bool`, defaults to `False`):
            Initialise the learned positions with sines and cosines of rows and columns instead of the official small
            noise. Short training runs profit from it.
        shortcut_decay (`float` or `"auto"`, defaults to 0.7):
            Weight of the identity shortcut in the last branch; the weights fall from 1 to this value with depth. `1.0` is
            the official U-ViT. `"auto"` becomes the value at which the product of all weights is 3e-3.
        shortcut_schedule (`str`, defaults to `"linear"`): `linear`, `cosine`, `constant` or `learned`.
        shortcut_granularity (`str`, defaults to `"sublayer"`): `sublayer` (from branch to branch) or `layer`.
        shortcut_scope (`str`, defaults to `"both"`): `both`, `attention` or `mlp`: the other branch keeps weight 1.
    """

    _supports_gradient_checkpointing = True
    _no_split_modules = ["DecayedUViTBlock"]
    _repeated_blocks = ["DecayedUViTBlock"]
    _skip_layerwise_casting_patterns = ["position_embedding", "norm"]

    @reject_unknown_fields
    @register_to_config
    def __init__(
        self,
        sample_size: int | tuple[int, int] = 32,
        patch_size: int = 2,
        in_channels: int = 3,
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
        self.num_extra_tokens = 2 if num_classes > 0 else 1
        self.patch_embedding = nn.Conv2d(in_channels, hidden_size, kernel_size=patch_size, stride=patch_size)
        self.time_mlp = (
            nn.Sequential(nn.Linear(hidden_size, 4 * hidden_size), nn.SiLU(), nn.Linear(4 * hidden_size, hidden_size))
            if time_embedding_mlp
            else None
        )
        self.class_embedding = nn.Embedding(num_classes + 1, hidden_size) if num_classes > 0 else None
        num_tokens = self.num_extra_tokens + math.prod(self.grid_size)
        self.position_embedding = nn.Parameter(torch.zeros(1, num_tokens, hidden_size))

        half = num_layers // 2
        blocks = [
            DecayedUViTBlock(
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

    @classmethod
    def from_size(cls, size: str, **overrides) -> "DecayedUViT2DModel":
        """A network of a named size, a key of `SIZES`; any argument can be overridden."""
        check_choice("size", size, SIZES)
        return cls(**{**SIZES[size], **overrides})

    @classmethod
    def extract_init_dict(cls, config_dict, **kwargs):
        # `auto_map` is for diffusers' AutoModel; the model itself would warn of it. Diffusers ignores other unknown fields
        # of a file, and a misspelt one with them.
        config_dict = {name: value for name, value in config_dict.items() if name != "auto_map"}
        check_field_names({**config_dict, **kwargs}, inspect.signature(cls.__init__).parameters, misspelt_only=True)
        return super().extract_init_dict(config_dict, **kwargs)

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
        """As in the official code; with `zero_init_branches`, every branch starts with a zero output."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.trunc_normal_(self.position_embedding, std=0.02)
        if self.config.sincos_init_positions:
            table = sincos_positions(self.grid_size, self.config.hidden_size)
            self.position_embedding[:, self.num_extra_tokens :] = table
        if self.config.zero_init_branches:
            for module in self.modules():
                if isinstance(module, DecayedUViTBlock):
                    nn.init.zeros_(module.attn.to_out[0].weight)
                    nn.init.zeros_(module.fc2.weight)

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

            TransformerBlockRegistry.register(DecayedUViTBlock, TransformerBlockMetadata(return_hidden_states_index=0))
        # Diffusers looks for all blocks in one list of this name; it is no part of the network.
        self.transformer_blocks = nn.ModuleList([*self.in_blocks, self.mid_block, *self.out_blocks])
        try:
            super().enable_cache(config)
        finally:
            del self.transformer_blocks

    def effective_decay(self) -> float:
        """Share of the embeddings that passes the network through the shortcuts alone: the product of all alphas."""
        blocks = [module for module in self.modules() if isinstance(module, DecayedUViTBlock)]
        pairs = [(block.attention_alpha, block.mlp_alpha) for block in blocks]
        return math.prod(
            math.prod(alpha.item() if isinstance(alpha, torch.Tensor) else alpha for alpha in pair) for pair in pairs
        )

    def forward(
        self,
        sample: torch.Tensor,
        timestep: torch.Tensor | float | int,
        class_labels: torch.Tensor | None = None,
        return_dict: bool = True,
        output_hidden_states: bool = False,
    ) -> DecayedUViT2DOutput | tuple:
        """
        Args:
            sample (`torch.Tensor` of shape `(batch, in_channels, height, width)`): Noisy images or latents. Positions are
                interpolated for sizes other than `sample_size`.
            timestep (`torch.Tensor`, `float` or `int`): The scheduler's timestep; one for all samples or one per sample.
            class_labels (`torch.Tensor` of shape `(batch,)`, *optional*): Labels from 0. `num_classes` is the null class,
                which is also the default of a conditional model.
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
        return DecayedUViT2DOutput(
            sample=sample, hidden_states=tuple(all_hidden_states) if output_hidden_states else None
        )

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
