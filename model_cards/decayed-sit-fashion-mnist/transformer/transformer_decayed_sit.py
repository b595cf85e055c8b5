"""SiT (Ma et al., ECCV 2024) with decayed identity shortcuts: `x <- alpha * x + f(x)`, alpha falling with depth.

A diffusion transformer on image or latent patches that predicts the velocity of a flow from noise to data. Time and class
modulate every block. Both residual branches of a block weigh their shortcut with a number that falls from 1 at the first
branch of the network to `shortcut_decay` at the last (Zhang et al., CVPR 2026); blocks of the first half hand their
outputs to those of the second. Without these skips and with `shortcut_decay=1.0` this is the official SiT.

This file travels alone to the Hub, so it imports nothing of the package it comes from.
"""

import math
import warnings
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


# The official sizes by name; a patch size goes with them, as in "XL/2".
SIZES = {
    "S": {"hidden_size": 384, "num_layers": 12, "num_attention_heads": 6},
    "B": {"hidden_size": 768, "num_layers": 12, "num_attention_heads": 12},
    "L": {"hidden_size": 1024, "num_layers": 24, "num_attention_heads": 16},
    "XL": {"hidden_size": 1152, "num_layers": 28, "num_attention_heads": 16},
}

TIME_FREQUENCIES = 256
EFFECTIVE_DECAY_TARGET = 3e-3  # of all alphas multiplied; what `shortcut_decay="auto"` aims at


def shortcut_alphas(num_blocks: int, decay: float, schedule: str, granularity: str, scope: str):
    """`(attention_alpha, mlp_alpha)` of every block, first block first."""
    if granularity == "sublayer":
        depths = [branch / (2 * num_blocks - 1) for branch in range(2 * num_blocks)]
    else:
        depths = [block / num_blocks for block in range(1, num_blocks + 1) for _ in ("attention", "mlp")]
    share = {"linear": lambda x: x, "cosine": lambda x: (1 - math.cos(math.pi * x)) / 2, "constant": lambda x: 1.0}
    alphas = [1.0 - (1.0 - decay) * share[schedule](depth) for depth in depths]
    return [
        (attention if scope != "mlp" else 1.0, mlp if scope != "attention" else 1.0)
        for attention, mlp in zip(alphas[0::2], alphas[1::2])
    ]


def suggested_decay(num_blocks: int, schedule: str, granularity: str, scope: str) -> float:
    """The decay whose alphas have `EFFECTIVE_DECAY_TARGET` as their product, to six decimals."""
    pairs = shortcut_alphas(num_blocks, 0.0, schedule, granularity, scope)
    if math.prod(attention * mlp for attention, mlp in pairs) > EFFECTIVE_DECAY_TARGET:
        raise ValueError(
            f"{num_blocks} blocks with scope '{scope}' and schedule '{schedule}' cannot reach an effective decay of "
            f"{EFFECTIVE_DECAY_TARGET}: set `shortcut_decay` by hand."
        )
    low, high = 0.0, 1.0
    for _ in range(50):  # the product grows with the decay
        middle = (low + high) / 2
        pairs = shortcut_alphas(num_blocks, middle, schedule, granularity, scope)
        if math.prod(attention * mlp for attention, mlp in pairs) < EFFECTIVE_DECAY_TARGET:
            low = middle
        else:
            high = middle
    return round(high, 6)


def warn_of_decay(decay: float, alphas: list[tuple[float, float]]) -> None:
    effective = math.prod(attention * mlp for attention, mlp in alphas)
    if decay < 0.45:
        warnings.warn(
            f"`shortcut_decay={decay}` is below 0.45: the paper reports unstable training from 0.4 down.", stacklevel=2
        )
    elif decay < 1.0 and not 1e-4 <= effective <= 1e-1:
        warnings.warn(
            f"`shortcut_decay={decay}` over {len(alphas)} blocks gives an effective decay of {effective:.1e}, outside "
            "[1e-4, 1e-1]; `'auto'` is the rule of thumb.",
            stacklevel=2,
        )


@dataclass
class DecayedSiTTransformer2DOutput(BaseOutput):
    """
    sample (`torch.Tensor` of shape `(batch, channels, height, width)`): The velocity, from noise to data.
    hidden_states (`tuple(torch.Tensor)`, *optional*): Tokens after every block, `(batch, num_patches, hidden_size)`.
    """

    sample: torch.Tensor
    hidden_states: tuple[torch.Tensor, ...] | None = None


class DecayedSiTAttnProcessor:
    """Attention by whichever kernel `model.set_attention_backend` chose; PyTorch's own when none."""

    _attention_backend = None
    _parallel_config = None

    def __call__(self, attn: "DecayedSiTAttention", hidden_states: torch.Tensor) -> torch.Tensor:
        if attn.fused_projections:
            projected = attn.to_qkv(hidden_states).chunk(3, dim=-1)
        else:
            projected = (attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states))
        query, key, value = (each.unflatten(-1, (attn.heads, -1)) for each in projected)
        attended = dispatch_attention_fn(
            query, key, value, backend=self._attention_backend, parallel_config=self._parallel_config
        )
        return attn.to_out[0](attended.flatten(2, 3))


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


def sincos_positions(grid_size: tuple[int, int], hidden_size: int) -> torch.Tensor:
    """Fixed table `(1, height * width, hidden_size)`: sines and cosines of the column, then of the row.

    Diffusers' function scales positions by a base size, which the official weights know nothing of.
    """
    frequencies = 10_000.0 ** -(torch.arange(hidden_size // 4, dtype=torch.float64) / (hidden_size // 4))
    rows, columns = torch.meshgrid(*(torch.arange(side).double() for side in grid_size), indexing="ij")
    angles = [place.flatten().unsqueeze(1) * frequencies for place in (columns, rows)]
    return torch.cat([part for angle in angles for part in (angle.sin(), angle.cos())], dim=1).float().unsqueeze(0)


def modulate(hidden_states: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.addcmul(shift.unsqueeze(1), hidden_states, 1 + scale.unsqueeze(1))


class DecayedSiTBlock(nn.Module):
    """Attention and MLP, modulated by time and class, each added to its weighted shortcut; first the skip, if any."""

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
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.modulation(condition).chunk(6, dim=1)
        branch = gate.unsqueeze(1) * self.attn(modulate(self.norm1(hidden_states), shift, scale))
        hidden_states = shortcut_sum(hidden_states, branch, self.attention_alpha)
        inner = F.gelu(self.fc1(modulate(self.norm2(hidden_states), mlp_shift, mlp_scale)), approximate="tanh")
        return shortcut_sum(hidden_states, mlp_gate.unsqueeze(1) * self.fc2(inner), self.mlp_alpha)


def shortcut_sum(hidden_states: torch.Tensor, branch: torch.Tensor, alpha: float | torch.Tensor) -> torch.Tensor:
    """`alpha * hidden_states + branch`, in one pass over memory."""
    if isinstance(alpha, float):
        return torch.add(branch, hidden_states, alpha=alpha)
    return torch.addcmul(branch, hidden_states, alpha.to(hidden_states.dtype))


class DecayedSiTTransformer2DModel(ModelMixin, AttentionMixin, ConfigMixin, CacheMixin):
    r"""
    SiT with decayed shortcuts.

    Args:
        sample_size (`int` or pair, defaults to 32): Height and width, of the image or of its latent.
        patch_size (`int`, defaults to 2): Side of a patch, by which height and width must be divisible.
        in_channels (`int`, defaults to 4): Channels in and out.
        hidden_size, num_layers, num_attention_heads, mlp_ratio, qkv_bias: Sizes; those of SiT-XL when not given.
        num_classes (`int`, defaults to 1000): 0 is unconditional. The null class, for guidance, is not counted: its label
            is `num_classes`.
        learned_sigma (`bool`, defaults to `False`): Official weights predict twice the channels, the second half of which
            nobody uses: it is kept in the weights and never returned.
        encoder_decoder_skips (`bool`, defaults to `True`): Each block of the first half hands its output to its mirror
            image in the second. `False` is the official SiT.
        shortcut_decay (`float` or `"auto"`, defaults to 0.8):
            Weight of the identity shortcut in the last branch; weights fall to it from 1. `1.0` is the ordinary network.
            `"auto"` becomes the value at which all weights multiply to 3e-3.
        shortcut_schedule (`str`, defaults to `"linear"`): `linear`, `cosine`, `constant` or `learned`.
        shortcut_granularity (`str`, defaults to `"sublayer"`): `sublayer` (from branch to branch) or `layer`.
        shortcut_scope (`str`, defaults to `"both"`): `both`, `attention` or `mlp`: the other branch keeps weight 1.

    Branches always start silent: their gates are zero, as in the official SiT.
    """

    _supports_gradient_checkpointing = True
    _no_split_modules = ["DecayedSiTBlock"]
    _repeated_blocks = ["DecayedSiTBlock"]
    _skip_layerwise_casting_patterns = ["position_embedding", "norm"]

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
        check_choice("shortcut_schedule", shortcut_schedule, ("linear", "cosine", "constant", "learned"))
        check_choice("shortcut_granularity", shortcut_granularity, ("sublayer", "layer"))
        check_choice("shortcut_scope", shortcut_scope, ("both", "attention", "mlp"))
        height, width = (sample_size, sample_size) if isinstance(sample_size, int) else sample_size
        if height % patch_size != 0 or width % patch_size != 0:
            raise ValueError(
                f"`sample_size` must be divisible by `patch_size`, got {height} x {width} and {patch_size}."
            )
        if hidden_size % num_attention_heads != 0 or hidden_size % 4 != 0:
            raise ValueError(
                "`hidden_size` must be divisible by `num_attention_heads` and, for its positions, by 4, got "
                f"{hidden_size} and {num_attention_heads} heads."
            )
        if encoder_decoder_skips and num_layers % 2 != 0:
            raise ValueError(f"`encoder_decoder_skips` needs an even `num_layers`, got {num_layers}.")
        learned = shortcut_schedule == "learned"
        fixed_schedule = "constant" if learned else shortcut_schedule
        if shortcut_decay == "auto":
            # The number replaces the word, so that the saved file says what the network does.
            shortcut_decay = (
                1.0
                if learned
                else suggested_decay(num_layers, shortcut_schedule, shortcut_granularity, shortcut_scope)
            )
            self.register_to_config(shortcut_decay=shortcut_decay)
        if isinstance(shortcut_decay, str) or not 0.0 <= shortcut_decay <= 1.0:
            raise ValueError(f"`shortcut_decay` must be 'auto' or lie in [0, 1], got {shortcut_decay!r}.")
        alphas = shortcut_alphas(
            num_layers, 1.0 if learned else float(shortcut_decay), fixed_schedule, shortcut_granularity, shortcut_scope
        )
        if not learned:
            warn_of_decay(shortcut_decay, alphas)

        self.gradient_checkpointing = False
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
                    alphas[number],
                    encoder_decoder_skips and number >= num_layers // 2,
                    shortcut_scope if learned else None,
                )
                for number in range(num_layers)
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
            raise ValueError(f"`size` is a name and a patch size, as in 'XL/2', got {size!r}.")
        return cls(**{**SIZES[name], "patch_size": int(patch_size or 2), **overrides})

    @classmethod
    def extract_init_dict(cls, config_dict, **kwargs):
        # For diffusers' AutoModel; the model itself would warn of it as unexpected.
        return super().extract_init_dict({k: v for k, v in config_dict.items() if k != "auto_map"}, **kwargs)

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """As the official code: gates, modulations and the prediction start at zero."""
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
        """Of diffusers' caches those of attention; those that leave out blocks, where no skips need the blocks."""
        kind = type(config).__name__
        if kind == "FirstBlockCacheConfig" and not self.config.encoder_decoder_skips:
            from diffusers.hooks._helpers import TransformerBlockMetadata, TransformerBlockRegistry  # not public

            TransformerBlockRegistry.register(DecayedSiTBlock, TransformerBlockMetadata(return_hidden_states_index=0))
        elif kind != "PyramidAttentionBroadcastConfig":
            raise ValueError(
                f"{kind} does not fit this network: use PyramidAttentionBroadcastConfig or, where "
                "`encoder_decoder_skips=False`, FirstBlockCacheConfig."
            )
        super().enable_cache(config)

    def effective_decay(self) -> float:
        """Product of all shortcut weights: how much of the embeddings the shortcuts alone carry through the network."""
        return math.prod(float(block.attention_alpha) * float(block.mlp_alpha) for block in self.transformer_blocks)

    @staticmethod
    def time_of_noise_level(level: float) -> float:
        """The `timestep` of a sample with so much noise in it, from 0, data, to 1, noise."""
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
            sample (`torch.Tensor` of shape `(batch, in_channels, height, width)`): Noisy images or latents. Other sizes
                than `sample_size` are taken too, with positions interpolated.
            timestep (`torch.Tensor` or `float`): SiT's own time in [0, 1], where 0 is noise and 1 is data; one for all or
                one for each. The pipeline makes it of a scheduler's timesteps.
            class_labels (`torch.Tensor` of shape `(batch,)`, *optional*): Labels from 0; `num_classes` is the null
                class, which is also what a conditional model takes when there are none.
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
        hidden_states = self.patch_embedding(sample).flatten(2).transpose(1, 2)
        hidden_states = hidden_states + self.positions(grid_size).to(hidden_states.dtype)

        time = torch.as_tensor(timestep, device=sample.device).float().expand(batch_size)
        time = get_timestep_embedding(time, TIME_FREQUENCIES, flip_sin_to_cos=True, downscale_freq_shift=0)
        condition = self.time_mlp(time.to(hidden_states.dtype))
        if self.class_embedding is not None:
            condition = condition + self.class_embedding(self.check_labels(class_labels, batch_size))
        elif class_labels is not None:
            raise ValueError("`class_labels` were passed to a model without classes (`num_classes=0`).")
        condition = F.silu(condition)  # the same for every block, which the official code takes each time anew

        skips, kept = [], []
        for number, block in enumerate(self.transformer_blocks):
            arguments = (hidden_states, condition) + (() if block.skip_projection is None else (skips.pop(),))
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                hidden_states = self._gradient_checkpointing_func(block, *arguments)
            else:
                hidden_states = block(*arguments)
            if self.config.encoder_decoder_skips and number < self.config.num_layers // 2:
                skips.append(hidden_states)
            if output_hidden_states:
                kept.append(hidden_states)

        shift, scale = self.modulation_out(condition).chunk(2, dim=1)
        patches = self.proj_out(modulate(self.norm_out(hidden_states), shift, scale))
        sample = patches.unflatten(1, grid_size).unflatten(3, (patch_size, patch_size, -1))[..., :channels]
        sample = sample.permute(0, 5, 1, 3, 2, 4).reshape(batch_size, channels, height, width)
        hidden = tuple(kept) if output_hidden_states else None
        if not return_dict:
            return (sample,) if hidden is None else (sample, hidden)
        return DecayedSiTTransformer2DOutput(sample=sample, hidden_states=hidden)

    def check_labels(self, class_labels: torch.Tensor | None, batch_size: int) -> torch.Tensor:
        if class_labels is None:
            return torch.full((batch_size,), self.config.num_classes, device=self.position_embedding.device)
        if class_labels.shape != (batch_size,) or class_labels.dtype == torch.bool or class_labels.is_floating_point():
            raise ValueError(
                f"`class_labels` must be {batch_size} whole numbers, one for each sample, got "
                f"{tuple(class_labels.shape)} of {class_labels.dtype}."
            )
        # On other devices looking would wait for the device, every step; there the embedding's own check must do.
        if class_labels.device.type == "cpu" and not torch.compiler.is_compiling():
            smallest, largest = int(class_labels.min()), int(class_labels.max())
            if smallest < 0 or largest > self.config.num_classes:
                raise ValueError(
                    f"`class_labels` must lie in [0, {self.config.num_classes}], of which the last is the null class, "
                    f"got {smallest if smallest < 0 else largest}."
                )
        return class_labels.long()  # an embedding takes no smaller kinds of numbers

    def positions(self, grid_size: tuple[int, int]) -> torch.Tensor:
        """The fixed positions; for another grid of patches they are interpolated, bicubic."""
        if grid_size == self.grid_size:
            return self.position_embedding
        table = self.position_embedding.transpose(1, 2).unflatten(2, self.grid_size).float()
        table = F.interpolate(table, size=grid_size, mode="bicubic", align_corners=False)
        return table.flatten(2).transpose(1, 2)


def check_choice(name: str, value: str, choices) -> None:
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(choices)}, got {value!r}.")
