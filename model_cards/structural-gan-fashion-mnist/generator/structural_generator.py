"""Generator of a GAN whose discriminator is a representation: BigGAN-deep without classes (Zhang's dissertation, chapter 3).

    >>> generator = StructuralGenerator(sample_size=32)
    >>> images = generator(torch.randn(4, generator.config.latent_dim)).sample  # in [-1, 1]

Bottleneck blocks with batch norms that the latent modulates, and spectral norm on every weight. The batch norms take the
statistics of the batch of all processes.

This file travels alone to the Hub, so it imports no sibling; shared code is copied under `Copied from` headers.
"""

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
import torch.distributed
import torch.distributed.nn.functional as distributed
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from diffusers.utils import BaseOutput
from torch import nn
from torch.nn import functional as F


__all__ = ["StructuralGenerator"]

# Of the dissertation: `cifar` for 32 pixels, `imagenet` for 128. `tiny` is for the bundled images, on a CPU.
SIZES = {
    "tiny": {"latent_dim": 64, "block_out_channels": (32, 32), "layers_per_block": 1},
    "cifar": {"latent_dim": 128, "block_out_channels": (512, 512, 512), "layers_per_block": 2},
    "imagenet": {
        "latent_dim": 128,
        "block_out_channels": (2048, 1024, 512, 256, 128),
        "layers_per_block": 2,
        "attention_sizes": (64,),
    },
}


# Copied from hf_decayed.models.unet_decayed_uvit.check_integer
def check_integer(name: str, value: int, low: int, high: int = 2**20) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"`{name}` must be an integer in [{low}, {high}], got {value!r}.")


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


def check_sizes(sample_size: int, block_out_channels: Sequence[int], attention_sizes: Sequence[int]) -> None:
    if not isinstance(block_out_channels, (list, tuple)) or len(block_out_channels) == 0:
        raise ValueError(f"`block_out_channels` must list the channels of every stage, got {block_out_channels!r}.")
    for channels in block_out_channels:
        check_integer("block_out_channels", channels, 8)
        if channels % 8 != 0:
            raise ValueError(f"`block_out_channels` must be divisible by 8, got {channels}.")
    for before, after in zip(block_out_channels, block_out_channels[1:]):
        if after > before:  # a shortcut drops channels and cannot add any
            raise ValueError(f"`block_out_channels` must not rise from stage to stage, got {block_out_channels!r}.")
    check_integer("sample_size", sample_size, 1)
    factor = 2 ** len(block_out_channels)
    if sample_size % factor != 0:
        raise ValueError(
            f"`sample_size` must be divisible by {factor}, because {len(block_out_channels)} stages double it, got "
            f"{sample_size}."
        )
    if not isinstance(attention_sizes, (list, tuple)):
        raise ValueError(f"`attention_sizes` must list sizes of maps, got {attention_sizes!r}.")
    sizes = [sample_size * 2**stage // factor for stage in range(1, len(block_out_channels) + 1)]
    if unknown := [size for size in attention_sizes if size not in sizes]:
        raise ValueError(f"`attention_sizes` must be some of {sizes}, the sizes of the stages, got {unknown[0]!r}.")


@dataclass
class StructuralGeneratorOutput(BaseOutput):
    """
    sample (`torch.Tensor` of shape `(batch, channels, height, width)`): Images in [-1, 1].
    """

    sample: torch.Tensor


class SpectralNormalization(nn.Module):
    """The weight of a layer over an estimate of its largest singular value; training refines the estimate.

    Not torch's `spectral_norm`, whose parametrization computes when it is constructed, which fails on the device `meta`.
    """

    weight: nn.Parameter

    def add_singular_vector(self) -> None:
        self.register_buffer("singular_vector", F.normalize(torch.randn(len(self.weight)), dim=0))

    def normalized_weight(self) -> torch.Tensor:
        matrix = self.weight.flatten(1)
        with torch.no_grad():  # one step of the power iteration; gradients go through the matrix alone
            right = F.normalize(matrix.T @ self.singular_vector.to(matrix.dtype), dim=0, eps=1e-6)
        product = matrix @ right
        left = F.normalize(product.detach(), dim=0, eps=1e-6)
        if self.training:
            self.singular_vector.copy_(left)
        return self.weight / torch.dot(left, product)


class SpectralNormLinear(SpectralNormalization, nn.Linear):
    def __init__(self, in_features: int, out_features: int, bias: bool = True):
        nn.Linear.__init__(self, in_features, out_features, bias)
        self.add_singular_vector()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden_states, self.normalized_weight(), self.bias)


class SpectralNormConv2d(SpectralNormalization, nn.Conv2d):
    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, bias: bool = True):
        nn.Conv2d.__init__(self, in_channels, out_channels, kernel_size, padding=kernel_size // 2, bias=bias)
        self.add_singular_vector()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return F.conv2d(hidden_states, self.normalized_weight(), self.bias, padding=self.padding)


class DistributedBatchNorm2d(nn.Module):
    """Batch norm without affine parameters, of the batch of all processes; torch's `SyncBatchNorm` has no CPU kernel."""

    def __init__(self, channels: int, eps: float = 1e-5, momentum: float = 0.1):
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if not self.training or not is_distributed():
            return F.batch_norm(
                hidden_states,
                self.running_mean,
                self.running_var,
                training=self.training,
                momentum=self.momentum,
                eps=self.eps,
            )
        values = hidden_states.float()
        mean = mean_over_processes(values.mean(dim=(0, 2, 3)))
        centred = values - mean[:, None, None]
        variance = mean_over_processes(centred.square().mean(dim=(0, 2, 3)))
        with torch.no_grad():
            number = values.numel() // values.shape[1] * torch.distributed.get_world_size()
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * number / max(1, number - 1), self.momentum)
        return (centred * torch.rsqrt(variance + self.eps)[:, None, None]).to(hidden_states.dtype)


def is_distributed() -> bool:
    return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


def mean_over_processes(values: torch.Tensor) -> torch.Tensor:
    """The mean over processes with shares of one size; gradients go back to every share."""
    return distributed.all_reduce(values) / torch.distributed.get_world_size()


class ConditionalBatchNorm2d(nn.Module):
    """Batch norm whose gain and bias are linear in the latent."""

    def __init__(self, channels: int, latent_dim: int):
        super().__init__()
        self.norm = DistributedBatchNorm2d(channels)
        self.gain = SpectralNormLinear(latent_dim, channels, bias=False)
        self.bias = SpectralNormLinear(latent_dim, channels, bias=False)

    def forward(self, hidden_states: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        gain, bias = 1 + self.gain(latents), self.bias(latents)
        return self.norm(hidden_states) * gain[:, :, None, None] + bias[:, :, None, None]


class StructuralGeneratorBlock(nn.Module):
    """Bottleneck of four convolutions; the shortcut drops channels that the output does not have."""

    def __init__(self, in_channels: int, out_channels: int, latent_dim: int, upsample: bool):
        super().__init__()
        hidden = in_channels // 4
        self.out_channels, self.upsample = out_channels, upsample
        self.norm1 = ConditionalBatchNorm2d(in_channels, latent_dim)
        self.conv1 = SpectralNormConv2d(in_channels, hidden, 1)
        self.norm2 = ConditionalBatchNorm2d(hidden, latent_dim)
        self.conv2 = SpectralNormConv2d(hidden, hidden, 3)
        self.norm3 = ConditionalBatchNorm2d(hidden, latent_dim)
        self.conv3 = SpectralNormConv2d(hidden, hidden, 3)
        self.norm4 = ConditionalBatchNorm2d(hidden, latent_dim)
        self.conv4 = SpectralNormConv2d(hidden, out_channels, 1)

    def forward(self, hidden_states: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        shortcut = hidden_states[:, : self.out_channels]
        hidden_states = self.conv1(F.relu(self.norm1(hidden_states, latents)))
        hidden_states = F.relu(self.norm2(hidden_states, latents))
        if self.upsample:
            hidden_states = F.interpolate(hidden_states, scale_factor=2.0, mode="nearest")
            shortcut = F.interpolate(shortcut, scale_factor=2.0, mode="nearest")
        hidden_states = self.conv2(hidden_states)
        hidden_states = self.conv3(F.relu(self.norm3(hidden_states, latents)))
        hidden_states = self.conv4(F.relu(self.norm4(hidden_states, latents)))
        return shortcut + hidden_states


class StructuralGeneratorAttention(nn.Module):
    """BigGAN's self-attention: keys and values of half the height and width, and a gain that starts at 0."""

    def __init__(self, channels: int):
        super().__init__()
        self.query = SpectralNormConv2d(channels, channels // 8, 1, bias=False)
        self.key = SpectralNormConv2d(channels, channels // 8, 1, bias=False)
        self.value = SpectralNormConv2d(channels, channels // 2, 1, bias=False)
        self.output = SpectralNormConv2d(channels // 2, channels, 1, bias=False)
        self.gain = nn.Parameter(torch.zeros(()))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        query = self.query(hidden_states).flatten(2).transpose(1, 2)  # (batch, positions, channels / 8)
        key = F.max_pool2d(self.key(hidden_states), 2).flatten(2).transpose(1, 2)
        value = F.max_pool2d(self.value(hidden_states), 2).flatten(2).transpose(1, 2)
        # BigGAN's similarities are not divided by the root of the dimension.
        attended = F.scaled_dot_product_attention(query, key, value, scale=1.0).transpose(1, 2)
        return hidden_states + self.gain * self.output(attended.unflatten(2, hidden_states.shape[2:]))


class StructuralGenerator(ModelMixin, ConfigMixin):
    r"""
    BigGAN-deep without classes: normal latents in, images out.

    The defaults are the dissertation's network for CIFAR. `StructuralGenerator.from_size("imagenet")` is the one for 128
    pixels, `"tiny"` one for CPUs.

    Args:
        sample_size (`int`, defaults to 32): Height and width of the images; every stage doubles them.
        out_channels (`int`, defaults to 3): Of the images.
        latent_dim (`int`, defaults to 128): Dimension of the normal latent.
        block_out_channels (`tuple[int]`, defaults to `(512, 512, 512)`): Channels of each stage, the smallest maps first.
        layers_per_block (`int`, defaults to 2): Blocks of each stage; the last of them doubles the map.
        attention_sizes (`tuple[int]`, defaults to `()`): Sizes of maps, such as 64, after whose stage there is self-attention.
    """

    @reject_unknown_fields
    @register_to_config
    def __init__(
        self,
        sample_size: int = 32,
        out_channels: int = 3,
        latent_dim: int = 128,
        block_out_channels: Sequence[int] = (512, 512, 512),
        layers_per_block: int = 2,
        attention_sizes: Sequence[int] = (),
    ):
        super().__init__()
        check_sizes(sample_size, block_out_channels, attention_sizes)
        for name, value in (
            ("out_channels", out_channels),
            ("latent_dim", latent_dim),
            ("layers_per_block", layers_per_block),
        ):
            check_integer(name, value, 1)
        self.first_size = size = sample_size // 2 ** len(block_out_channels)
        channels = block_out_channels[0]
        self.latent_embedding = SpectralNormLinear(latent_dim, latent_dim)
        self.linear_in = SpectralNormLinear(latent_dim, channels * size**2)
        self.stages = nn.ModuleList()
        for stage_channels in block_out_channels:
            size *= 2
            blocks = nn.ModuleList()
            for layer in range(layers_per_block):
                is_last = layer == layers_per_block - 1
                block_channels = stage_channels if is_last else channels
                blocks.append(StructuralGeneratorBlock(channels, block_channels, latent_dim, upsample=is_last))
            attention = StructuralGeneratorAttention(stage_channels) if size in attention_sizes else None
            self.stages.append(nn.ModuleDict({"blocks": blocks} | ({"attention": attention} if attention else {})))
            channels = stage_channels
        self.norm_out = DistributedBatchNorm2d(channels)
        self.gain_out = nn.Parameter(torch.ones(channels))
        self.bias_out = nn.Parameter(torch.zeros(channels))
        self.conv_out = SpectralNormConv2d(channels, out_channels, 3)
        self.initialize_weights()

    @classmethod
    def from_size(cls, size: str, **overrides) -> "StructuralGenerator":
        """A network of `SIZES`; `overrides` are fields."""
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

    def initialize_weights(self) -> None:
        """He's normal initialisation, as in the release; biases keep torch's."""
        for module in self.modules():
            if isinstance(module, SpectralNormalization):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, latents: torch.Tensor, return_dict: bool = True) -> StructuralGeneratorOutput | tuple:
        """
        Args:
            latents (`torch.Tensor` of shape `(batch, latent_dim)`): Standard normal.
        """
        if latents.ndim != 2 or latents.shape[1] != self.config.latent_dim:
            raise ValueError(
                f"`latents` must have shape (batch, {self.config.latent_dim}), got {tuple(latents.shape)}."
            )
        latents = self.latent_embedding(latents)
        hidden_states = self.linear_in(latents).unflatten(1, (-1, self.first_size, self.first_size))
        for stage in self.stages:
            for block in stage["blocks"]:
                hidden_states = block(hidden_states, latents)
            if "attention" in stage:
                hidden_states = stage["attention"](hidden_states)
        hidden_states = self.norm_out(hidden_states) * self.gain_out[:, None, None] + self.bias_out[:, None, None]
        sample = torch.tanh(self.conv_out(F.relu(hidden_states)))
        return StructuralGeneratorOutput(sample=sample) if return_dict else (sample,)
