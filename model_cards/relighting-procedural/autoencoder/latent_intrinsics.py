"""Latent intrinsics: an autoencoder that separates what a scene is from how it is lit (dissertation, chapter 6).

The encoder gives intrinsic maps, which should not change with the light, and a short light code. The decoder starts from
fixed positions and sees the scene through the maps alone. It sees the light through a small scaling of its channels, the
same at every pixel:

    F <- F * (1 + alpha * tanh(MLP(light)))          constrained scaling, Eq. 6.8, alpha = 5e-3

Maps of one image with the light code of another give the first image relit. With alpha = 0 the light has no effect, and the
decoded image resembles albedo.

This file travels alone to the Hub, so it imports no sibling; shared code is copied under `Copied from` headers.
"""

import difflib
import functools
import inspect
import math
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.attention_processor import Attention
from diffusers.models.modeling_utils import ModelMixin
from diffusers.utils import BaseOutput
from diffusers.utils.accelerate_utils import apply_forward_hook
from torch import nn
from torch.nn import functional as F


__all__ = ["LatentIntrinsicsModel"]

# `base` is the dissertation's network. `block_out_channels` has one entry for every scale, the finest first.
SIZES = {
    "tiny": {
        "sample_size": 64,
        "patch_size": 2,
        "block_out_channels": (16, 32, 64, 64),
        "layers_per_block": (1, 1, 1, 1),
        "light_dim": 8,
        "light_hidden_dim": 64,
    },
    "small": {
        "sample_size": 128,
        "block_out_channels": (32, 64, 128, 128, 256),
        "layers_per_block": (1, 2, 2, 2, 2),
        "light_dim": 16,
        "light_hidden_dim": 128,
    },
    "base": {
        "sample_size": 256,
        "block_out_channels": (32, 64, 128, 128, 256, 512),
        "layers_per_block": (1, 2, 2, 4, 4, 4),
        "light_dim": 16,
        "light_hidden_dim": 128,
    },
}
INITIAL_BRANCH_SCALE = 1e-5  # of the last layer of every residual branch: blocks start as their shortcuts
INITIAL_QKV_GAIN = math.sqrt(0.2)


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


def check_fraction(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(f"`{name}` must be a number in [0, 1], got {value!r}.")


def check_channels(block_out_channels: Sequence[int], layers_per_block: Sequence[int]) -> None:
    if not isinstance(block_out_channels, (list, tuple)) or len(block_out_channels) < 2:
        raise ValueError(f"`block_out_channels` must list at least two scales, got {block_out_channels!r}.")
    if not isinstance(layers_per_block, (list, tuple)) or len(layers_per_block) != len(block_out_channels):
        raise ValueError(
            f"`layers_per_block` must have an entry for each of {len(block_out_channels)} scales, got {layers_per_block!r}."
        )
    for channels, layers in zip(block_out_channels, layers_per_block):
        check_integer("block_out_channels", channels, 4)
        check_integer("layers_per_block", layers, 1, 10_000)
        if channels % 4 != 0:
            raise ValueError(f"`block_out_channels` must be divisible by 4, got {channels}.")


class LatentIntrinsicsEncoding(NamedTuple):
    """What the encoder finds in images.

    Args:
        intrinsics (`tuple[torch.Tensor, ...]`): One map `(batch, channels, height, width)` for every scale but the finest,
            the finest first; vectors along the channels have length 1.
        light (`torch.Tensor` of shape `(batch, light_dim)`): The light code, of length 1.
    """

    intrinsics: tuple[torch.Tensor, ...]
    light: torch.Tensor


@dataclass
class LatentIntrinsicsOutput(BaseOutput):
    """
    sample (`torch.Tensor` of shape `(batch, channels, height, width)`): Decoded images in about [-1, 1].
    intrinsics (`tuple(torch.Tensor)`): Intrinsic maps of the input images.
    light (`torch.Tensor` of shape `(batch, light_dim)`): Light codes of the input images.
    """

    sample: torch.Tensor
    intrinsics: tuple[torch.Tensor, ...]
    light: torch.Tensor


def group_norm(channels: int) -> nn.GroupNorm:
    """At most 32 groups, of at least 4 channels."""
    groups = next(number for number in range(min(32, channels // 4), 0, -1) if channels % number == 0)
    return nn.GroupNorm(groups, channels, eps=1e-6)


def constrained_scaling(
    hidden_states: torch.Tensor, modulation: torch.Tensor, alpha: float, bounded: bool = True
) -> torch.Tensor:
    """`F * (1 + alpha * tanh(modulation))`, one factor per channel; without `bounded` there is no tanh.

    Args:
        hidden_states (`torch.Tensor` of shape `(batch, channels, height, width)`): F.
        modulation (`torch.Tensor` of shape `(batch, channels)`): What the light code says of every channel.
    """
    scale = 1 + alpha * (torch.tanh(modulation) if bounded else modulation)
    return hidden_states * scale[:, :, None, None]


def sinusoidal_positions(height: int, width: int, channels: int, device: torch.device) -> torch.Tensor:
    """Cosines and sines of row and column, counted from the middle: `(1, channels, height, width)`."""
    frequencies = 10_000.0 ** (-torch.arange(channels // 4, device=device) / (channels // 4))
    rows, columns = (
        (torch.arange(size, device=device) - (size - 1) / 2)[:, None] * frequencies for size in (height, width)
    )
    rows, columns = (torch.cat([angles.cos(), angles.sin()], dim=1) for angles in (rows, columns))
    rows, columns = rows[:, None].expand(-1, width, -1), columns[None].expand(height, -1, -1)
    return torch.cat([rows, columns], dim=2).permute(2, 0, 1).unsqueeze(0)


class LatentIntrinsicsBlock(nn.Module):
    """Residual block of two convolutions; in the decoder, the light scales the channels between them.

    Args:
        light_hidden_dim (`int`, *optional*): Width of the decoded light code; `None` in the encoder.
        resample (`str`, *optional*): `down` halves height and width by averages, `up` doubles them by repetition.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        dropout: float,
        light_hidden_dim: int | None = None,
        bounded: bool = True,
        resample: str | None = None,
    ):
        super().__init__()
        self.resample_mode, self.bounded = resample, bounded
        self.norm1 = group_norm(in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.norm2 = group_norm(out_channels)
        self.light_projection = nn.Linear(light_hidden_dim, out_channels) if light_hidden_dim else None
        self.dropout = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        is_identity = in_channels == out_channels and resample is None
        self.shortcut = nn.Identity() if is_identity else nn.Conv2d(in_channels, out_channels, 1)

    def resample(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.resample_mode == "down":
            return F.avg_pool2d(hidden_states, 2)
        if self.resample_mode == "up":
            return F.interpolate(hidden_states, scale_factor=2.0, mode="nearest")
        return hidden_states

    def forward(
        self, hidden_states: torch.Tensor, light: torch.Tensor | None = None, alpha: float = 0.0
    ) -> torch.Tensor:
        residual = self.conv1(self.resample(F.silu(self.norm1(hidden_states))))
        residual = self.norm2(residual)
        if self.light_projection is not None:
            residual = constrained_scaling(residual, self.light_projection(light), alpha, self.bounded)
        residual = self.conv2(self.dropout(F.silu(residual)))
        if self.resample_mode == "up":  # the same as below, at a quarter of the cost
            return self.resample(self.shortcut(hidden_states)) + residual
        return self.shortcut(self.resample(hidden_states)) + residual


class LatentIntrinsicsEncoder(nn.Module):
    """Images to feature maps of all scales, the finest first."""

    def __init__(
        self, in_channels: int, block_out_channels: Sequence[int], layers_per_block: Sequence[int], dropout: float
    ):
        super().__init__()
        channels = block_out_channels[0]
        self.conv_in = nn.Conv2d(in_channels, channels, 3, padding=1)
        self.scales = nn.ModuleList()
        for index, (out_channels, layers) in enumerate(zip(block_out_channels, layers_per_block)):
            blocks = nn.ModuleList()
            if index > 0:
                blocks.append(LatentIntrinsicsBlock(channels, channels, dropout, resample="down"))
            for _ in range(layers):
                blocks.append(LatentIntrinsicsBlock(channels, out_channels, dropout))
                channels = out_channels
            self.scales.append(blocks)
        self.gradient_checkpointing = False

    def forward(self, pixel_values: torch.Tensor) -> list[torch.Tensor]:
        hidden_states, maps = self.conv_in(pixel_values), []
        for blocks in self.scales:
            for block in blocks:
                if torch.is_grad_enabled() and self.gradient_checkpointing:
                    hidden_states = self._gradient_checkpointing_func(block, hidden_states)
                else:
                    hidden_states = block(hidden_states)
            maps.append(hidden_states)
        return maps


class LatentIntrinsicsDecoder(nn.Module):
    """Positions to an image; the intrinsic map of a scale enters every block of it, the up-sampling one excepted."""

    def __init__(
        self,
        out_channels: int,
        block_out_channels: Sequence[int],
        layers_per_block: Sequence[int],
        dropout: float,
        light_hidden_dim: int,
        bounded: bool,
    ):
        super().__init__()
        settings: dict[str, Any] = {"dropout": dropout, "light_hidden_dim": light_hidden_dim, "bounded": bounded}
        channels = self.position_channels = block_out_channels[-1]
        self.in_block1 = LatentIntrinsicsBlock(channels, channels, **settings)
        groups = group_norm(channels).num_groups
        self.attention = Attention(
            channels, heads=1, dim_head=channels, norm_num_groups=groups, eps=1e-6, bias=True, residual_connection=True
        )
        self.in_block2 = LatentIntrinsicsBlock(channels, channels, **settings)
        self.upsamplers, self.scales = nn.ModuleList(), nn.ModuleList()  # the coarsest scale first
        for index in reversed(range(len(block_out_channels))):
            is_coarsest = index == len(block_out_channels) - 1
            upsampler = (
                nn.Identity() if is_coarsest else LatentIntrinsicsBlock(channels, channels, **settings, resample="up")
            )
            self.upsamplers.append(upsampler)
            map_channels = block_out_channels[index] if index > 0 else 0  # the finest scale has no map
            blocks = nn.ModuleList()
            for _ in range(layers_per_block[index] + 1):
                blocks.append(LatentIntrinsicsBlock(channels + map_channels, block_out_channels[index], **settings))
                channels = block_out_channels[index]
            self.scales.append(blocks)
        self.norm_out = group_norm(channels)
        self.conv_out = nn.Conv2d(channels, out_channels, 3, padding=1)
        self.gradient_checkpointing = False

    def forward(self, intrinsics: Sequence[torch.Tensor], light: torch.Tensor, alpha: float) -> torch.Tensor:
        batch_size, _, height, width = intrinsics[-1].shape
        positions = sinusoidal_positions(height, width, self.position_channels, light.device)
        hidden_states = positions.to(light.dtype).expand(batch_size, -1, -1, -1)
        hidden_states = self.run(self.in_block1, hidden_states, light, alpha)
        hidden_states = self.attention(hidden_states)
        hidden_states = self.run(self.in_block2, hidden_states, light, alpha)
        for upsampler, blocks, intrinsic in zip(self.upsamplers, self.scales, (*reversed(intrinsics), None)):
            if not isinstance(upsampler, nn.Identity):
                hidden_states = self.run(upsampler, hidden_states, light, alpha)
            for block in blocks:
                inputs = hidden_states if intrinsic is None else torch.cat([hidden_states, intrinsic], dim=1)
                hidden_states = self.run(block, inputs, light, alpha)
        return self.conv_out(F.silu(self.norm_out(hidden_states)))

    def run(self, block: nn.Module, *inputs) -> torch.Tensor:
        if torch.is_grad_enabled() and self.gradient_checkpointing:
            return self._gradient_checkpointing_func(block, *inputs)
        return block(*inputs)


class LatentIntrinsicsModel(ModelMixin, ConfigMixin):
    r"""
    Autoencoder of images that are given as intrinsic maps and a light code.

    >>> intrinsics, _ = model.encode(image)
    >>> _, light = model.encode(reference)
    >>> relit = model.decode(intrinsics, light)
    >>> albedo = model.decode(intrinsics, light, alpha=0.0)

    Args:
        sample_size (`int`, defaults to 256):
            Height and width of the training images. The network takes others that are divisible by `scale_factor`;
            [`RelightingPipeline`] cuts large images into tiles of this size.
        in_channels (`int`, defaults to 3): Channels of input and output.
        patch_size (`int`, defaults to 1):
            Height and width of the patches of pixels that the finest scale takes as its positions. `2` makes the network
            four times faster for the same channels, and its finest map half as fine.
        block_out_channels (`tuple[int, ...]`): Channels of every scale, the finest first. Each scale but the finest has an
            intrinsic map of so many channels.
        layers_per_block (`tuple[int, ...]`): Residual blocks of every scale in the encoder; the decoder has one more.
        light_dim (`int`, defaults to 16): Length of the light code.
        light_hidden_dim (`int`, defaults to 128): Width of the MLP that decodes the light code.
        alpha (`float`, defaults to 5e-3): The most that light changes a channel in one block, as a fraction.
        bounded_modulation (`bool`, defaults to `True`):
            Whether the modulation is bounded by tanh. `alpha=1` without it is the dissertation's ablation "alpha infinite".
        dropout (`float`, defaults to 0.1): In every residual block.
        prior_channels (`int`, defaults to 0):
            Channels of the dense features of another encoder, which `encode` then takes beside the images; their projections
            are added to the maps of all scales. `0` is the network without them.
    """

    _supports_gradient_checkpointing = True
    _no_split_modules = ["LatentIntrinsicsBlock"]
    _repeated_blocks = ["LatentIntrinsicsBlock"]
    _skip_layerwise_casting_patterns = ["norm"]

    @reject_unknown_fields
    @register_to_config
    def __init__(
        self,
        sample_size: int = 256,
        in_channels: int = 3,
        patch_size: int = 1,
        block_out_channels: tuple[int, ...] = (32, 64, 128, 128, 256, 512),
        layers_per_block: tuple[int, ...] = (1, 2, 2, 4, 4, 4),
        light_dim: int = 16,
        light_hidden_dim: int = 128,
        alpha: float = 5e-3,
        bounded_modulation: bool = True,
        dropout: float = 0.1,
        prior_channels: int = 0,
    ):
        super().__init__()
        check_channels(block_out_channels, layers_per_block)
        for name in ("sample_size", "in_channels", "patch_size", "light_dim", "light_hidden_dim"):
            check_integer(name, self.config[name], 1)
        check_integer("prior_channels", prior_channels, 0)
        check_fraction("alpha", alpha)
        check_fraction("dropout", dropout)
        check_boolean("bounded_modulation", bounded_modulation)
        if sample_size % self.scale_factor != 0:
            raise ValueError(f"`sample_size` must be divisible by {self.scale_factor}, got {sample_size}.")
        channels = block_out_channels[-1]
        patch_channels = in_channels * patch_size**2
        self.encoder = LatentIntrinsicsEncoder(patch_channels, block_out_channels, layers_per_block, dropout)
        self.prior_projections = nn.ModuleList(
            nn.Conv2d(prior_channels, out_channels, 1) for out_channels in block_out_channels[1:] if prior_channels > 0
        )
        self.light_encoder = nn.Sequential(nn.Linear(channels, channels), nn.SiLU(), nn.Linear(channels, light_dim))
        self.light_decoder = nn.Sequential(
            nn.Linear(light_dim, light_hidden_dim), nn.SiLU(), nn.Linear(light_hidden_dim, light_hidden_dim)
        )
        self.decoder = LatentIntrinsicsDecoder(
            patch_channels, block_out_channels, layers_per_block, dropout, light_hidden_dim, bounded_modulation
        )
        self.initialize_weights()

    @classmethod
    def from_size(cls, size: str, **overrides) -> "LatentIntrinsicsModel":
        """A network by name, `tiny`, `small` or `base` (the dissertation's); any argument can be overridden."""
        check_choice("size", size, SIZES)
        return cls(**{**SIZES[size], **overrides})

    # Copied from hf_decayed.models.unet_decayed_uvit.DecayedUViT2DModel.extract_init_dict
    @classmethod
    def extract_init_dict(cls, config_dict, **kwargs):
        # `auto_map` is for diffusers' AutoModel; the model itself would warn of it. Diffusers ignores other unknown fields
        # of a file, and a misspelt one with them.
        config_dict = {name: value for name, value in config_dict.items() if name != "auto_map"}
        check_field_names({**config_dict, **kwargs}, inspect.signature(cls.__init__).parameters, misspelt_only=True)
        return super().extract_init_dict(config_dict, **kwargs)

    @property
    def scale_factor(self) -> int:
        """How many pixels of the image one position of the coarsest map covers, along each side."""
        return self.config.patch_size * 2 ** (len(self.config.block_out_channels) - 1)

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Xavier; residual branches start near zero, and the last convolution keeps the variance of its input."""
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        branches = [module.conv2 for module in self.modules() if isinstance(module, LatentIntrinsicsBlock)]
        for layer in (*branches, *self.prior_projections, self.decoder.attention.to_out[0]):
            layer.weight.mul_(INITIAL_BRANCH_SCALE)
        attention = self.decoder.attention
        for layer in (attention.to_q, attention.to_k, attention.to_v):
            layer.weight.mul_(INITIAL_QKV_GAIN / math.sqrt(2))  # one matrix for all three has twice the fan
        nn.init.kaiming_normal_(self.decoder.conv_out.weight, nonlinearity="linear")

    @apply_forward_hook
    def encode(self, pixel_values: torch.Tensor, prior: torch.Tensor | None = None) -> LatentIntrinsicsEncoding:
        """Intrinsic maps and light code of images.

        Args:
            pixel_values (`torch.Tensor` of shape `(batch, in_channels, height, width)`): Images in [-1, 1]; height and
                width are divisible by `scale_factor`.
            prior (`torch.Tensor` of shape `(batch, prior_channels, rows, columns)`, *optional*): Dense features of the
                images, on a grid of any size, of a network with `prior_channels`.
        """
        self.check_images(pixel_values)
        self.check_prior(pixel_values, prior)
        maps = self.encoder(F.pixel_unshuffle(pixel_values, self.config.patch_size))
        for index, projection in enumerate(self.prior_projections, start=1):
            features = F.interpolate(projection(prior), maps[index].shape[2:], mode="bilinear", align_corners=False)
            maps[index] = maps[index] + features
        intrinsics = tuple(F.normalize(features, dim=1) for features in maps[1:])
        light = self.light_encoder(maps[-1].mean(dim=(2, 3)))  # (batch, light_dim)
        return LatentIntrinsicsEncoding(intrinsics, F.normalize(light, dim=1))

    def warn_about_rounding(self, alpha: float | None = None, dtype: torch.dtype | None = None) -> None:
        """Warns if the factors `1 + alpha * tanh(...)`, by which the light acts, are too close to 1 for the dtype."""
        alpha, dtype = self.config.alpha if alpha is None else alpha, dtype or self.dtype
        if 0 < alpha < torch.finfo(dtype).eps:
            warnings.warn(
                f"In {str(dtype).removeprefix('torch.')} numbers near 1 are {torch.finfo(dtype).eps:g} apart, and the light "
                f"changes the image by factors of 1 +- alpha = {alpha:g}: it is mostly rounding. Use float32.",
                stacklevel=2,
            )

    @apply_forward_hook
    def decode(
        self, intrinsics: Sequence[torch.Tensor], light: torch.Tensor, alpha: float | None = None
    ) -> torch.Tensor:
        """Images of a scene under a light.

        Args:
            intrinsics (`Sequence[torch.Tensor]`): Maps that `encode` gave; they are not changed.
            light (`torch.Tensor` of shape `(batch, light_dim)`): Light codes, one for each image.
            alpha (`float`, *optional*): Strength of the light, by default the config's. `0.0` gives the image without
                light, which resembles albedo.

        Returns:
            `torch.Tensor` of shape `(batch, in_channels, height, width)`: Images in about [-1, 1].
        """
        alpha = self.config.alpha if alpha is None else alpha
        check_fraction("alpha", alpha)
        self.warn_about_rounding(alpha)
        self.check_codes(intrinsics, light)
        # Entries of vectors of length 1 are small where there are many; layers expect them to be about 1.
        maps = [intrinsic * math.sqrt(intrinsic.shape[1]) for intrinsic in intrinsics]
        light = self.light_decoder(light * math.sqrt(light.shape[1]))  # (batch, light_hidden_dim)
        return F.pixel_shuffle(self.decoder(maps, light, alpha), self.config.patch_size)

    def forward(
        self,
        pixel_values: torch.Tensor,
        light_index: torch.Tensor | None = None,
        alpha: float | None = None,
        prior: torch.Tensor | None = None,
        return_dict: bool = True,
    ) -> LatentIntrinsicsOutput | tuple:
        """Encodes images, and decodes every one of them under its own light or another's of the batch.

        Args:
            pixel_values (`torch.Tensor` of shape `(batch, in_channels, height, width)`): Images in [-1, 1].
            light_index (`torch.Tensor` of shape `(batch,)`, *optional*): The image whose light each decoded image has; by
                default itself.
            alpha (`float`, *optional*): Strength of the light, by default the config's.
            prior (`torch.Tensor`, *optional*): As of `encode`.
        """
        intrinsics, light = self.encode(pixel_values, prior)
        sample = self.decode(intrinsics, light if light_index is None else light[light_index], alpha)
        if not return_dict:
            return sample, intrinsics, light
        return LatentIntrinsicsOutput(sample=sample, intrinsics=intrinsics, light=light)

    def check_images(self, pixel_values: torch.Tensor) -> None:
        if pixel_values.ndim != 4 or pixel_values.shape[1] != self.config.in_channels:
            raise ValueError(
                f"`pixel_values` must have the shape (batch, {self.config.in_channels}, height, width), got "
                f"{tuple(pixel_values.shape)}."
            )
        height, width = pixel_values.shape[2:]
        if height % self.scale_factor != 0 or width % self.scale_factor != 0:
            raise ValueError(
                f"Height and width of `pixel_values` must be divisible by {self.scale_factor}, got {height} x {width}."
            )

    def check_prior(self, pixel_values: torch.Tensor, prior: torch.Tensor | None) -> None:
        channels = self.config.prior_channels
        if prior is None and channels > 0:
            raise ValueError(
                f"This network takes dense features of another encoder: pass `prior` of {channels} channels."
            )
        if prior is not None and (prior.ndim != 4 or prior.shape[:2] != (len(pixel_values), channels)):
            raise ValueError(
                f"`prior` must have the shape ({len(pixel_values)}, {channels}, rows, columns), got {tuple(prior.shape)}."
            )

    def check_codes(self, intrinsics: Sequence[torch.Tensor], light: torch.Tensor) -> None:
        channels = tuple(self.config.block_out_channels[1:])
        if tuple(intrinsic.shape[1] for intrinsic in intrinsics) != channels:
            raise ValueError(
                f"`intrinsics` must be {len(channels)} maps of {', '.join(map(str, channels))} channels, got "
                f"{[tuple(intrinsic.shape) for intrinsic in intrinsics]}."
            )
        if light.shape != (len(intrinsics[0]), self.config.light_dim):
            raise ValueError(
                f"`light` must have the shape {(len(intrinsics[0]), self.config.light_dim)}, got {tuple(light.shape)}."
            )
