"""U-ViT (Bao et al., CVPR 2023) with decayed identity shortcuts: `x <- alpha * x + f(x)`, alpha falling with depth.

A diffusion model on image or latent patches. Time and class are tokens beside the patches; blocks before the middle hand
their outputs to the blocks after it. In every block, both residual branches weigh their shortcut with a number that falls
from 1 at the first branch of the network to `shortcut_decay` at the last (Zhang et al., CVPR 2026). There are no new
parameters, and with `shortcut_decay=1.0` this is the official U-ViT.

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


# The official sizes by name. Depth counts the blocks on either side of the middle one.
SIZES = {
    "S": {"hidden_size": 512, "num_layers": 12, "num_attention_heads": 8},
    "S-deep": {"hidden_size": 512, "num_layers": 16, "num_attention_heads": 8},
    "M": {"hidden_size": 768, "num_layers": 16, "num_attention_heads": 12},
    "L": {"hidden_size": 1024, "num_layers": 20, "num_attention_heads": 16},
    "H": {"hidden_size": 1152, "num_layers": 28, "num_attention_heads": 16, "final_conv": False},
}

EFFECTIVE_DECAY_TARGET = 3e-3  # of all alphas multiplied; what `shortcut_decay="auto"` aims at

# How a scheduler's timestep t becomes the time that the network is trained with.
TIME_INPUTS = {
    "timestep": lambda t: t,
    "timestep_plus_one": lambda t: t + 1,  # official latent models: noise levels are counted from 1
    "continuous": lambda t: (t + 1) * 0.999,  # official pixel models: time in (0, 1], times 999
}


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
class DecayedUViT2DOutput(BaseOutput):
    """
    sample (`torch.Tensor` of shape `(batch, channels, height, width)`): What the scheduler takes, usually the noise.
    hidden_states (`tuple(torch.Tensor)`, *optional*): Patch tokens after every block, `(batch, num_patches, hidden_size)`.
    """

    sample: torch.Tensor
    hidden_states: tuple[torch.Tensor, ...] | None = None


class DecayedUViTAttnProcessor:
    """Attention by whichever kernel `model.set_attention_backend` chose; PyTorch's own when none."""

    _attention_backend = None
    _parallel_config = None

    def __call__(self, attn: "DecayedUViTAttention", hidden_states: torch.Tensor) -> torch.Tensor:
        if attn.fused_projections:
            projected = attn.to_qkv(hidden_states).chunk(3, dim=-1)
        else:
            projected = (attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states))
        query, key, value = (each.unflatten(-1, (attn.heads, -1)) for each in projected)
        attended = dispatch_attention_fn(
            query, key, value, backend=self._attention_backend, parallel_config=self._parallel_config
        )
        return attn.to_out[0](attended.flatten(2, 3))


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


class DecayedUViTBlock(nn.Module):
    """Attention and MLP, each added to its weighted shortcut; after the middle of the network, first the skip."""

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
        if learned_scope in ("both", "attention"):  # of shape (1,): sharding refuses scalars
            self.attention_alpha = nn.Parameter(torch.ones(1))
        if learned_scope in ("both", "mlp"):
            self.mlp_alpha = nn.Parameter(torch.ones(1))

    def forward(self, hidden_states: torch.Tensor, skip: torch.Tensor | None = None) -> torch.Tensor:
        if self.skip_projection is not None:
            hidden_states = self.skip_projection(torch.cat([hidden_states, skip], dim=-1))
        hidden_states = shortcut_sum(hidden_states, self.attn(self.norm1(hidden_states)), self.attention_alpha)
        branch = self.fc2(F.gelu(self.fc1(self.norm2(hidden_states))))
        return shortcut_sum(hidden_states, branch, self.mlp_alpha)


def sincos_positions(grid_size: tuple[int, int], hidden_size: int) -> torch.Tensor:
    """Table `(1, height * width, hidden_size)`: sines and cosines of the column, then of the row."""
    frequencies = 10_000.0 ** -(torch.arange(hidden_size // 4, dtype=torch.float64) / (hidden_size // 4))
    rows, columns = torch.meshgrid(*(torch.arange(side).double() for side in grid_size), indexing="ij")
    angles = [place.flatten().unsqueeze(1) * frequencies for place in (columns, rows)]
    return torch.cat([part for angle in angles for part in (angle.sin(), angle.cos())], dim=1).float().unsqueeze(0)


def shortcut_sum(hidden_states: torch.Tensor, branch: torch.Tensor, alpha: float | torch.Tensor) -> torch.Tensor:
    """`alpha * hidden_states + branch`, in one pass over memory."""
    if isinstance(alpha, float):
        return torch.add(branch, hidden_states, alpha=alpha)
    return torch.addcmul(branch, hidden_states, alpha.to(hidden_states.dtype))


class DecayedUViT2DModel(ModelMixin, AttentionMixin, ConfigMixin, CacheMixin):
    r"""
    U-ViT with decayed shortcuts; `forward(sample, timestep)` fits diffusers' own pipelines, as their `unet`.

    Args:
        sample_size (`int` or pair, defaults to 32): Height and width, of the image or of its latent.
        patch_size (`int`, defaults to 2): Side of a patch, by which height and width must be divisible.
        in_channels (`int`, defaults to 3): Channels in and out.
        hidden_size, num_layers, num_attention_heads, mlp_ratio, qkv_bias:
            Sizes; `num_layers` is the paper's depth, an even number. The middle block comes on top: there is one more.
        num_classes (`int`, defaults to 0): 0 is unconditional. The null class, for guidance, is not counted: its label is
            `num_classes`.
        time_embedding_mlp (`bool`, defaults to `False`): A small network on the time's embedding.
        final_conv (`bool`, defaults to `True`): A 3 x 3 convolution over the finished image.
        time_input (`str`, defaults to `"timestep_plus_one"`):
            How a scheduler's timestep t, counted from 0, becomes the network's time: `timestep` (t itself),
            `timestep_plus_one` (t + 1: official latent models) or `continuous` ((t + 1) / 1000 * 999: official pixel
            models).
        zero_init_branches (`bool`, defaults to `True`): Attention output and MLP output start at zero.
        sincos_init_positions (`bool`, defaults to `False`):
            Positions, which are learned, start as sines and cosines of rows and columns, instead of as noise that is small
            beside the patches, as in the official code. Short training gains by it.
        shortcut_decay (`float` or `"auto"`, defaults to 0.7):
            Weight of the identity shortcut in the last branch; weights fall to it from 1. `1.0` is the official U-ViT.
            `"auto"` becomes the value at which all weights multiply to 3e-3.
        shortcut_schedule (`str`, defaults to `"linear"`): `linear`, `cosine`, `constant` or `learned`.
        shortcut_granularity (`str`, defaults to `"sublayer"`): `sublayer` (from branch to branch) or `layer`.
        shortcut_scope (`str`, defaults to `"both"`): `both`, `attention` or `mlp`: the other branch keeps weight 1.
    """

    _supports_gradient_checkpointing = True
    _no_split_modules = ["DecayedUViTBlock"]
    _repeated_blocks = ["DecayedUViTBlock"]
    _skip_layerwise_casting_patterns = ["position_embedding", "norm"]

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
        check_choice("time_input", time_input, TIME_INPUTS)
        check_choice("shortcut_schedule", shortcut_schedule, ("linear", "cosine", "constant", "learned"))
        check_choice("shortcut_granularity", shortcut_granularity, ("sublayer", "layer"))
        check_choice("shortcut_scope", shortcut_scope, ("both", "attention", "mlp"))
        height, width = (sample_size, sample_size) if isinstance(sample_size, int) else sample_size
        if height % patch_size != 0 or width % patch_size != 0:
            raise ValueError(
                f"`sample_size` must be divisible by `patch_size`, got {height} x {width} and {patch_size}."
            )
        if hidden_size % num_attention_heads != 0:
            raise ValueError(
                f"`hidden_size` must be divisible by `num_attention_heads`, got {hidden_size} and {num_attention_heads}."
            )
        if num_layers < 2 or num_layers % 2 != 0:
            raise ValueError(f"`num_layers` must be even, as many before the middle as after it, got {num_layers}.")
        if sincos_init_positions and hidden_size % 4 != 0:
            raise ValueError(f"`sincos_init_positions` needs a `hidden_size` divisible by 4, got {hidden_size}.")
        num_blocks = num_layers + 1
        learned = shortcut_schedule == "learned"
        fixed_schedule = "constant" if learned else shortcut_schedule
        if shortcut_decay == "auto":
            # The number replaces the word, so that the saved file says what the network does.
            shortcut_decay = (
                1.0
                if learned
                else suggested_decay(num_blocks, shortcut_schedule, shortcut_granularity, shortcut_scope)
            )
            self.register_to_config(shortcut_decay=shortcut_decay)
        if isinstance(shortcut_decay, str) or not 0.0 <= shortcut_decay <= 1.0:
            raise ValueError(f"`shortcut_decay` must be 'auto' or lie in [0, 1], got {shortcut_decay!r}.")
        alphas = shortcut_alphas(
            num_blocks, 1.0 if learned else float(shortcut_decay), fixed_schedule, shortcut_granularity, shortcut_scope
        )
        if not learned:
            warn_of_decay(shortcut_decay, alphas)

        self.gradient_checkpointing = False
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

        def block(number):
            return DecayedUViTBlock(
                hidden_size,
                num_attention_heads,
                mlp_ratio,
                qkv_bias,
                alphas[number],
                number > num_layers // 2,
                shortcut_scope if learned else None,
            )

        half = num_layers // 2
        self.in_blocks = nn.ModuleList([block(number) for number in range(half)])
        self.mid_block = block(half)
        self.out_blocks = nn.ModuleList([block(number) for number in range(half + 1, num_blocks)])
        self.norm_out = nn.LayerNorm(hidden_size)
        self.proj_out = nn.Linear(hidden_size, patch_size**2 * in_channels)
        self.conv_out = nn.Conv2d(in_channels, in_channels, 3, padding=1) if final_conv else None
        self.initialize_weights()

    @classmethod
    def from_size(cls, size: str, **overrides) -> "DecayedUViT2DModel":
        """An official size, `S`, `S-deep`, `M`, `L` or `H`; any argument can be overridden."""
        check_choice("size", size, SIZES)
        return cls(**{**SIZES[size], **overrides})

    @classmethod
    def extract_init_dict(cls, config_dict, **kwargs):
        # For diffusers' AutoModel; the model itself would warn of it as unexpected.
        return super().extract_init_dict({k: v for k, v in config_dict.items() if k != "auto_map"}, **kwargs)

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """As the official code; with `zero_init_branches` each branch starts silent."""
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
        """Of diffusers' caches those of attention: others leave out blocks, whose outputs the skips take."""
        if type(config).__name__ != "PyramidAttentionBroadcastConfig":
            raise ValueError(
                f"{type(config).__name__} does not fit this network: use PyramidAttentionBroadcastConfig."
            )
        super().enable_cache(config)

    def effective_decay(self) -> float:
        """Product of all shortcut weights: how much of the embeddings the shortcuts alone carry through the network."""
        blocks = [module for module in self.modules() if isinstance(module, DecayedUViTBlock)]
        return math.prod(float(block.attention_alpha) * float(block.mlp_alpha) for block in blocks)

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
            sample (`torch.Tensor` of shape `(batch, in_channels, height, width)`): Noisy images or latents. Other sizes
                than `sample_size` are taken too, with positions interpolated.
            timestep (`torch.Tensor`, `float` or `int`): The scheduler's; one for all or one for each.
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
        patches = self.patch_embedding(sample).flatten(2).transpose(1, 2)

        time = torch.as_tensor(timestep, device=sample.device).expand(batch_size)
        time = TIME_INPUTS[self.config.time_input](time.float())
        time = get_timestep_embedding(time, self.config.hidden_size, flip_sin_to_cos=True, downscale_freq_shift=0)
        time = time.to(patches.dtype)
        tokens = [(self.time_mlp(time) if self.time_mlp is not None else time).unsqueeze(1), patches]
        if self.class_embedding is not None:
            tokens.insert(0, self.class_embedding(self.check_labels(class_labels, batch_size)).unsqueeze(1))
        elif class_labels is not None:
            raise ValueError("`class_labels` were passed to a model without classes (`num_classes=0`).")
        hidden_states = torch.cat(tokens, dim=1) + self.positions(grid_size)

        skips, kept = [], []
        for block in (*self.in_blocks, self.mid_block, *self.out_blocks):
            arguments = (hidden_states,) if block.skip_projection is None else (hidden_states, skips.pop())
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                hidden_states = self._gradient_checkpointing_func(block, *arguments)
            else:
                hidden_states = block(*arguments)
            if block.skip_projection is None and block is not self.mid_block:
                skips.append(hidden_states)
            if output_hidden_states:
                kept.append(hidden_states[:, self.num_extra_tokens :])

        patches = self.proj_out(self.norm_out(hidden_states)[:, self.num_extra_tokens :])
        sample = patches.unflatten(1, grid_size).unflatten(3, (patch_size, patch_size, channels))
        sample = sample.permute(0, 5, 1, 3, 2, 4).reshape(batch_size, channels, height, width)
        if self.conv_out is not None:
            sample = self.conv_out(sample)
        hidden = tuple(kept) if output_hidden_states else None
        if not return_dict:
            return (sample,) if hidden is None else (sample, hidden)
        return DecayedUViT2DOutput(sample=sample, hidden_states=hidden)

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
        """The learned positions; for another grid of patches those of patches are interpolated, bicubic."""
        if grid_size == self.grid_size:
            return self.position_embedding
        extra, patches = self.position_embedding.split(
            [self.num_extra_tokens, self.position_embedding.shape[1] - self.num_extra_tokens], dim=1
        )
        patches = patches.transpose(1, 2).unflatten(2, self.grid_size).float()
        patches = F.interpolate(patches, size=grid_size, mode="bicubic", align_corners=False)
        return torch.cat([extra, patches.flatten(2).transpose(1, 2).to(extra.dtype)], dim=1)


def check_choice(name: str, value: str, choices) -> None:
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(choices)}, got {value!r}.")
