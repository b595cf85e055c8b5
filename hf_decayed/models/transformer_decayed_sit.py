"""SiT (Ma et al., ECCV 2024) with decayed identity shortcuts: `x <- alpha * x + f(x)`, alpha falling with depth.

A diffusion transformer on image or latent patches that predicts the velocity of a flow from noise to data. Time and class
modulate every block. In every block, both residual branches multiply their shortcut by alpha, which falls from 1 at the
first branch of the network to `shortcut_decay` at the last (Zhang et al., CVPR 2026), and skips connect the blocks of the
first half with those of the second. Without the skips and with `shortcut_decay=1.0` this is the official SiT.

This file travels alone to the Hub, so it imports no sibling; shared code is copied under `Copied from` headers.
"""

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


__all__ = ["DecayedSiTTransformer2DModel"]

# The official sizes; their names have a patch size, as in "XL/2".
SIZES = {
    "S": {"hidden_size": 384, "num_layers": 12, "num_attention_heads": 6},
    "B": {"hidden_size": 768, "num_layers": 12, "num_attention_heads": 12},
    "L": {"hidden_size": 1024, "num_layers": 24, "num_attention_heads": 16},
    "XL": {"hidden_size": 1152, "num_layers": 28, "num_attention_heads": 16},
}

# Copied from hf_decayed.models.unet_decayed_uvit.CACHES
CACHES = (
    "PyramidAttentionBroadcastConfig",
    "FirstBlockCacheConfig",
    "MagCacheConfig",
    "TaylorSeerCacheConfig",
)

TIME_FREQUENCIES = 256  # width of the sine-cosine embedding of the time


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


@dataclass
class DecayedSiTTransformer2DOutput(BaseOutput):
    """
    sample (`torch.Tensor` of shape `(batch, channels, height, width)`): The velocity, from noise to data.
    hidden_states (`tuple(torch.Tensor)`, *optional*): Tokens after every block, `(batch, num_patches, hidden_size)`.
    """

    sample: torch.Tensor
    hidden_states: tuple[torch.Tensor, ...] | None = None


# Copied from hf_decayed.models.unet_decayed_uvit.DecayedUViTAttnProcessor with UViT->SiT
class DecayedSiTAttnProcessor:
    """Attention by the kernel of `model.set_attention_backend`; PyTorch's own by default."""

    _attention_backend = None
    _parallel_config = None

    def __call__(self, attn: "DecayedSiTAttention", hidden_states: torch.Tensor) -> torch.Tensor:
        if attn.fused_projections:
            projections = attn.to_qkv(hidden_states).chunk(3, dim=-1)
        else:
            projections = (attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states))
        query, key, value = (tensor.unflatten(-1, (attn.heads, -1)) for tensor in projections)
        attention_output = dispatch_attention_fn(
            query, key, value, backend=self._attention_backend, parallel_config=self._parallel_config
        )
        return attn.to_out[0](attention_output.flatten(2, 3))


# Copied from hf_decayed.models.unet_decayed_uvit.DecayedUViTAttention with UViT->SiT
class DecayedSiTAttention(nn.Module, AttentionModuleMixin):
    _default_processor_cls = DecayedSiTAttnProcessor
    _available_processors = [DecayedSiTAttnProcessor]

    def __init__(self, hidden_size: int, heads: int, qkv_bias: bool):
        super().__init__()
        self.heads, self.use_bias, self.is_cross_attention = heads, qkv_bias, False
        self.to_q = nn.Linear(hidden_size, hidden_size, bias=qkv_bias)
        self.to_k = nn.Linear(hidden_size, hidden_size, bias=qkv_bias)
        self.to_v = nn.Linear(hidden_size, hidden_size, bias=qkv_bias)
        self.to_out = nn.ModuleList([nn.Linear(hidden_size, hidden_size)])
        self.set_processor(DecayedSiTAttnProcessor())

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.processor(self, hidden_states)


# Copied from hf_decayed.models.unet_decayed_uvit.sincos_positions
def sincos_positions(grid_size: tuple[int, int], hidden_size: int) -> torch.Tensor:
    """Table `(1, height * width, hidden_size)`: sines and cosines of the column, then of the row.

    Diffusers' function scales positions by a base size; the official weights were trained without this scale.
    """
    frequencies = 10_000.0 ** -(torch.arange(hidden_size // 4, dtype=torch.float64) / (hidden_size // 4))
    rows, columns = torch.meshgrid(*(torch.arange(side).double() for side in grid_size), indexing="ij")
    angles = [index.flatten().unsqueeze(1) * frequencies for index in (columns, rows)]
    return torch.cat([part for angle in angles for part in (angle.sin(), angle.cos())], dim=1).float().unsqueeze(0)


# Copied from hf_decayed.models.unet_decayed_uvit.add_learned_shortcut
def add_learned_shortcut(
    branch: torch.Tensor, hidden_states: torch.Tensor, alpha: torch.Tensor | float
) -> torch.Tensor:
    """`alpha * hidden_states + branch` for a trained alpha, in the dtype that the sum has with a fixed alpha."""
    if isinstance(alpha, float):  # the branch that `shortcut_scope` leaves at 1
        return torch.add(branch, hidden_states, alpha=alpha)
    return torch.addcmul(branch, hidden_states, alpha.to(hidden_states.dtype))


def modulate(hidden_states: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.addcmul(shift, hidden_states, 1 + scale)


class DecayedSiTBlock(nn.Module):
    """Attention and MLP, modulated by time and class, each added to its weighted shortcut; after the skip, if any."""

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
        self.skip_projection = nn.Linear(hidden_size, hidden_size) if takes_skip else None
        self.norm1 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.attn = DecayedSiTAttention(hidden_size, heads, qkv_bias)
        self.norm2 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.fc1 = nn.Linear(hidden_size, inner_size)
        self.fc2 = nn.Linear(inner_size, hidden_size)
        self.modulation = nn.Linear(hidden_size, 6 * hidden_size)
        self.attention_alpha, self.mlp_alpha = alphas
        self.has_learned_alphas = learned_scope is not None
        if learned_scope in ("both", "attention"):  # of shape (1,): sharding refuses scalars
            self.attention_alpha = nn.Parameter(torch.ones(1))
        if learned_scope in ("both", "mlp"):
            self.mlp_alpha = nn.Parameter(torch.ones(1))

    def forward(
        self, hidden_states: torch.Tensor, condition: torch.Tensor, skip: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`condition` is the embedding of time and class after its activation, the same for all blocks."""
        if self.skip_projection is not None:
            hidden_states = hidden_states + self.skip_projection(skip)
        if self.has_learned_alphas:
            return self.forward_learned(hidden_states, condition)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.modulation(condition).unsqueeze(1).chunk(6, dim=2)
        attention_output = self.attn(modulate(self.norm1(hidden_states), shift, scale))
        hidden_states = torch.add(gate * attention_output, hidden_states, alpha=self.attention_alpha)
        mlp_input = modulate(self.norm2(hidden_states), mlp_shift, mlp_scale)
        mlp_output = self.fc2(F.gelu(self.fc1(mlp_input), approximate="tanh"))
        hidden_states = torch.add(mlp_gate * mlp_output, hidden_states, alpha=self.mlp_alpha)
        return hidden_states

    def forward_learned(self, hidden_states: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        """The rest of `forward` for `shortcut_schedule="learned"`."""
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.modulation(condition).unsqueeze(1).chunk(6, dim=2)
        attention_output = self.attn(modulate(self.norm1(hidden_states), shift, scale))
        hidden_states = add_learned_shortcut(gate * attention_output, hidden_states, self.attention_alpha)
        mlp_input = modulate(self.norm2(hidden_states), mlp_shift, mlp_scale)
        mlp_output = self.fc2(F.gelu(self.fc1(mlp_input), approximate="tanh"))
        return add_learned_shortcut(mlp_gate * mlp_output, hidden_states, self.mlp_alpha)


class DecayedSiTTransformer2DModel(ModelMixin, AttentionMixin, ConfigMixin, PeftAdapterMixin, CacheMixin):
    r"""
    SiT with decayed shortcuts.

    Args:
        sample_size (`int` or pair, defaults to 32): Height and width of the image or latent.
        patch_size (`int`, defaults to 2): Side of a patch; height and width must be divisible by it.
        in_channels (`int`, defaults to 4): Channels of input and output.
        hidden_size, num_layers, num_attention_heads, mlp_ratio, qkv_bias: Sizes; SiT-XL by default.
        num_classes (`int`, defaults to 1000): 0 is unconditional. The null class of guidance is not counted: its label is
            `num_classes`.
        learned_sigma (`bool`, defaults to `False`): Official weights predict twice the channels and do not use the second
            half. With `True` the weights have both halves; only the first is returned.
        encoder_decoder_skips (`bool`, defaults to `True`): A skip from each block of the first half to its mirror image
            in the second. `False` is the official SiT.
        shortcut_decay (`float` or `"auto"`, defaults to 0.8):
            Weight of the identity shortcut in the last branch; the weights fall from 1 to this value with depth. `1.0` is
            the ordinary network. `"auto"` becomes the value at which the product of all weights is 3e-3.
        shortcut_schedule (`str`, defaults to `"linear"`): `linear`, `cosine`, `constant` or `learned`.
        shortcut_granularity (`str`, defaults to `"sublayer"`): `sublayer` (from branch to branch) or `layer`.
        shortcut_scope (`str`, defaults to `"both"`): `both`, `attention` or `mlp`: the other branch keeps weight 1.

    Branches always start with a zero output: their gates start at zero, as in the official SiT.
    """

    _supports_gradient_checkpointing = True
    _no_split_modules = ["DecayedSiTBlock"]
    _repeated_blocks = ["DecayedSiTBlock"]
    _skip_layerwise_casting_patterns = ["position_embedding", "norm"]

    @reject_unknown_fields
    @register_to_config
    def __init__(
        self,
        sample_size: int | tuple[int, int] = 32,
        patch_size: int = 2,
        in_channels: int = 4,
        hidden_size: int = 1152,
        num_layers: int = 28,
        num_attention_heads: int = 16,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        num_classes: int = 1000,
        learned_sigma: bool = False,
        encoder_decoder_skips: bool = True,
        shortcut_decay: float | str = 0.8,
        shortcut_schedule: str = "linear",
        shortcut_granularity: str = "sublayer",
        shortcut_scope: str = "both",
    ):
        super().__init__()
        check_sizes(self.config)
        check_shortcuts(self.config)
        for name in ("learned_sigma", "encoder_decoder_skips"):
            check_boolean(name, self.config[name])
        if hidden_size % 4 != 0:
            raise ValueError(f"`hidden_size` must be divisible by 4 for sine-cosine positions, got {hidden_size}.")
        if encoder_decoder_skips and num_layers % 2 != 0:
            raise ValueError(f"`encoder_decoder_skips` needs an even `num_layers`, got {num_layers}.")
        alphas = self.initial_alphas(num_layers)

        self.gradient_checkpointing = False
        height, width = (sample_size, sample_size) if isinstance(sample_size, int) else sample_size
        self.grid_size = (height // patch_size, width // patch_size)
        self.patch_embedding = nn.Conv2d(in_channels, hidden_size, kernel_size=patch_size, stride=patch_size)
        self.time_mlp = nn.Sequential(
            nn.Linear(TIME_FREQUENCIES, hidden_size), nn.SiLU(), nn.Linear(hidden_size, hidden_size)
        )
        self.class_embedding = nn.Embedding(num_classes + 1, hidden_size) if num_classes > 0 else None
        self.register_buffer("position_embedding", sincos_positions(self.grid_size, hidden_size))
        self.transformer_blocks = nn.ModuleList(
            [
                DecayedSiTBlock(
                    hidden_size,
                    num_attention_heads,
                    mlp_ratio,
                    qkv_bias,
                    alphas[index],
                    takes_skip=encoder_decoder_skips and index >= num_layers // 2,
                    learned_scope=shortcut_scope if shortcut_schedule == "learned" else None,
                )
                for index in range(num_layers)
            ]
        )
        self.norm_out = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.modulation_out = nn.Linear(hidden_size, 2 * hidden_size)
        self.proj_out = nn.Linear(hidden_size, patch_size**2 * in_channels * (2 if learned_sigma else 1))
        self.initialize_weights()

    @classmethod
    def from_size(cls, size: str, **overrides) -> "DecayedSiTTransformer2DModel":
        """An official size, `S`, `B`, `L` or `XL`, with a patch size as in `XL/2`; any argument can be overridden."""
        name, _, patch_size = size.partition("/")
        check_choice("size", name, SIZES)
        if not (patch_size or "2").isdecimal():
            raise ValueError(f"`size` must be a name and a patch size, as in 'XL/2', got {size!r}.")
        return cls(**{**SIZES[name], "patch_size": int(patch_size or 2), **overrides})

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
        """As in the official code: gates, modulations and the prediction start at zero."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.xavier_uniform_(self.patch_embedding.weight.view(self.config.hidden_size, -1))
        nn.init.zeros_(self.patch_embedding.bias)
        if self.class_embedding is not None:
            nn.init.normal_(self.class_embedding.weight, std=0.02)
        for linear in (self.time_mlp[0], self.time_mlp[2]):
            nn.init.normal_(linear.weight, std=0.02)
        for linear in (*(block.modulation for block in self.transformer_blocks), self.modulation_out, self.proj_out):
            nn.init.zeros_(linear.weight)

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
        if kind in ("FirstBlockCacheConfig", "MagCacheConfig"):
            from diffusers.hooks._helpers import TransformerBlockMetadata, TransformerBlockRegistry  # not public

            TransformerBlockRegistry.register(DecayedSiTBlock, TransformerBlockMetadata(return_hidden_states_index=0))
        super().enable_cache(config)

    # Copied from hf_decayed.models.unet_decayed_uvit.DecayedUViT2DModel.effective_decay with UViT->SiT
    def effective_decay(self) -> float:
        """Share of the embeddings that passes the network through the shortcuts alone: the product of all alphas."""
        blocks = [module for module in self.modules() if isinstance(module, DecayedSiTBlock)]
        pairs = [(block.attention_alpha, block.mlp_alpha) for block in blocks]
        return math.prod(
            math.prod(alpha.item() if isinstance(alpha, torch.Tensor) else alpha for alpha in pair) for pair in pairs
        )

    @staticmethod
    def time_of_noise_level(level: float) -> float:
        """The `timestep` of a noise level in [0, 1], where 0 is data and 1 is noise."""
        return 1.0 - level

    def forward(
        self,
        sample: torch.Tensor,
        timestep: torch.Tensor | float,
        class_labels: torch.Tensor | None = None,
        return_dict: bool = True,
        output_hidden_states: bool = False,
    ) -> DecayedSiTTransformer2DOutput | tuple:
        """
        Args:
            sample (`torch.Tensor` of shape `(batch, in_channels, height, width)`): Noisy images or latents. Positions are
                interpolated for sizes other than `sample_size`.
            timestep (`torch.Tensor` or `float`): SiT's own time in [0, 1], where 0 is noise and 1 is data; one for all
                samples or one per sample. The pipeline computes it from a scheduler's timesteps.
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
        hidden_states = self.patch_embedding(sample).flatten(2).transpose(1, 2)  # (batch, num_patches, hidden_size)
        hidden_states = hidden_states + self.positions(grid_size).to(hidden_states.dtype)

        time = torch.as_tensor(timestep, device=sample.device).float().expand(batch_size)
        time = get_timestep_embedding(time, TIME_FREQUENCIES, flip_sin_to_cos=True, downscale_freq_shift=0)
        condition = self.time_mlp(time.to(hidden_states.dtype))
        if self.class_embedding is not None:
            condition = condition + self.class_embedding(self.check_labels(class_labels, batch_size))
        elif class_labels is not None:
            raise ValueError("`class_labels` were passed to a model without classes (`num_classes=0`).")
        condition = F.silu(condition)  # once for all blocks; the official code repeats it in every block

        skips, all_hidden_states = [], []
        for index, block in enumerate(self.transformer_blocks):
            inputs = (hidden_states, condition) + (() if block.skip_projection is None else (skips.pop(),))
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                hidden_states = self._gradient_checkpointing_func(block, *inputs)
            else:
                hidden_states = block(*inputs)
            if self.config.encoder_decoder_skips and index < self.config.num_layers // 2:
                skips.append(hidden_states)
            if output_hidden_states:
                all_hidden_states.append(hidden_states)

        shift, scale = self.modulation_out(condition).unsqueeze(1).chunk(2, dim=2)
        patches = self.proj_out(modulate(self.norm_out(hidden_states), shift, scale))
        sample = patches.unflatten(1, grid_size).unflatten(3, (patch_size, patch_size, -1))[..., :channels]
        sample = sample.permute(0, 5, 1, 3, 2, 4).reshape(batch_size, channels, height, width)
        if not return_dict:
            return (sample, tuple(all_hidden_states)) if output_hidden_states else (sample,)
        return DecayedSiTTransformer2DOutput(
            sample=sample, hidden_states=tuple(all_hidden_states) if output_hidden_states else None
        )

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

    def positions(self, grid_size: tuple[int, int]) -> torch.Tensor:
        """The fixed positions, interpolated (bicubic) for another grid."""
        if grid_size == self.grid_size:
            return self.position_embedding
        table = self.position_embedding.transpose(1, 2).unflatten(2, self.grid_size).float()
        table = F.interpolate(table, size=grid_size, mode="bicubic", align_corners=False)
        return table.flatten(2).transpose(1, 2)
