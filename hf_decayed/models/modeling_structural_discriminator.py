"""Discriminator of a GAN that is a representation: its output is a vector, not a score (Zhang's dissertation, chapter 3).

A residual network that is smooth: ELU, group norm, averages in place of strides, and half of the norms left out. Nothing in it
mixes the images of a batch, so the Jacobian of one image is that of the network, and all of it has forward-mode derivatives.

Config and model are one file, so that a pipeline that is downloaded with this file alone can load it.
"""

import dataclasses
import difflib
import math
from dataclasses import dataclass
from typing import Literal

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.utils import ModelOutput


__all__ = ["StructuralDiscriminatorConfig", "StructuralDiscriminatorModel"]

# Of the dissertation: `cifar` for 32 pixels, `imagenet` for 128, with one more stage, and all of them halving the image. `tiny`
# is for the bundled images, on a CPU.
SIZES: dict[str, dict] = {
    "tiny": {
        "hidden_sizes": (16, 32, 64, 128),
        "depths": (1, 1, 1, 1),
        "downsample_in_first_stage": True,
        "group_size": 8,
        "projection_size": 32,
    },
    "cifar": {},
    "imagenet": {"hidden_sizes": (64, 64, 128, 256, 512), "depths": (2,) * 5, "downsample_in_first_stage": True},
}
MAX_SIZE = 2**16  # larger values are typing errors, which would exhaust the memory
# Copied from hf_decayed.models.shortcut_decay.SCHEDULES
SCHEDULES = {
    "linear": lambda depth: depth,
    "cosine": lambda depth: (1.0 - math.cos(math.pi * depth)) / 2.0,
    "constant": lambda depth: 1.0,
}


# Copied from hf_decayed.models.shortcut_decay.shortcut_factors
def shortcut_factors(depths: list[float], shortcut_decay: float, schedule: str = "linear") -> list[float]:
    """Weight of the identity shortcut at each relative depth: 1 at depth 0, `shortcut_decay` at depth 1."""
    return [1.0 - (1.0 - shortcut_decay) * SCHEDULES[schedule](depth) for depth in depths]


@strict
class StructuralDiscriminatorConfig(PreTrainedConfig):
    r"""
    Configuration of [`StructuralDiscriminatorModel`].

    `StructuralDiscriminatorConfig()` is the dissertation's network for images of 32 pixels, a ResNet-18;
    `StructuralDiscriminatorConfig.from_size("imagenet")` is the one for 128 pixels.

    Args:
        num_channels (`int`, *optional*, defaults to 3): Of the images.
        hidden_sizes (`list[int]`, *optional*, defaults to `[64, 128, 256, 512]`): Channels of each stage. The first is also
            that of the stem, the last the width of the features.
        depths (`list[int]`, *optional*, defaults to `[2, 2, 2, 2]`): Residual blocks of each stage.
        downsample_in_first_stage (`bool`, *optional*, defaults to `False`): Every other stage halves height and width.
        group_size (`int`, *optional*, defaults to 16): Channels in a group of group norm.
        projection_size (`int`, *optional*, defaults to 128): Dimension of the embedding. `1` gives an ordinary discriminator,
            whose raw embedding is the score.
        shortcut_decay (`float`, *optional*, defaults to 1.0): Weight of the shortcut in the last block, in [0, 1]; the
            weights fall from 1 to this value with depth. `1.0` is the dissertation's.
        shortcut_schedule (`str`, *optional*, defaults to `"linear"`): `linear`, `cosine` or `constant`.
    """

    model_type = "structural_discriminator"

    num_channels: int = 3
    hidden_sizes: list[int] | tuple[int, ...] = (64, 128, 256, 512)
    depths: list[int] | tuple[int, ...] = (2, 2, 2, 2)
    downsample_in_first_stage: bool = False
    group_size: int = 16
    projection_size: int = 128
    shortcut_decay: float | int = 1.0
    shortcut_schedule: Literal["linear", "cosine", "constant"] = "linear"

    @classmethod
    def from_size(cls, size: str, **overrides) -> "StructuralDiscriminatorConfig":
        """A network of `SIZES`; `overrides` are fields."""
        if size not in SIZES:
            raise ValueError(f"`size` must be one of {', '.join(SIZES)}, got {size!r}.")
        return cls(**{**SIZES[size], **overrides})

    # Copied from hf_decayed.models.configuration_decayed_resnet.DecayedResNetConfig.shortcut_alphas
    def shortcut_alphas(self) -> list[float]:
        """Weight of the shortcut of every block, over all stages; projecting shortcuts are decayed like the others."""
        last = max(1, sum(self.depths) - 1)
        depths = [block / last for block in range(sum(self.depths))]
        return shortcut_factors(depths, float(self.shortcut_decay), self.shortcut_schedule)

    def validate_field_names(self):
        known = {field.name for field in dataclasses.fields(self)}
        ours = known - {field.name for field in dataclasses.fields(PreTrainedConfig)}
        for name in sorted(set(vars(self)) - known):
            nearest = difflib.get_close_matches(name, ours, 1, 0.8)
            if nearest:
                raise ValueError(
                    f"Unknown field `{name}` (value {getattr(self, name)!r}); did you mean `{nearest[0]}`?"
                )

    def validate_sizes(self):
        for name in ("num_channels", "hidden_sizes", "depths", "group_size", "projection_size"):
            values = getattr(self, name)
            values = [values] if isinstance(values, int) else list(values)
            if min(values, default=0) < 1 or max(values, default=1) > MAX_SIZE:
                raise ValueError(f"`{name}` must be in [1, {MAX_SIZE}], got {getattr(self, name)}.")
        if len(self.depths) != len(self.hidden_sizes):
            raise ValueError(
                f"`depths` needs one entry for each of `hidden_sizes`, got {list(self.depths)} and "
                f"{list(self.hidden_sizes)}."
            )
        for size in self.hidden_sizes:
            if size % self.group_size != 0:
                raise ValueError(
                    f"`hidden_sizes` must be divisible by `group_size`, got {size} and {self.group_size}."
                )

    def validate_shortcuts(self):
        if not 0.0 <= self.shortcut_decay <= 1.0:
            raise ValueError(f"`shortcut_decay` must lie in [0, 1], got {self.shortcut_decay}.")


@dataclass
class StructuralDiscriminatorOutput(ModelOutput):
    """
    last_hidden_state (`torch.Tensor` of shape `(batch, channels, height, width)`): Feature map of the last stage.
    pooler_output (`torch.Tensor` of shape `(batch, channels)`): Its mean, the feature for everything downstream.
    raw_embeds (`torch.Tensor` of shape `(batch, projection_size)`): The embedding; with a size of 1, the score.
    image_embeds (`torch.Tensor` of shape `(batch, projection_size)`): The embedding, brought to length 1.
    hidden_states (`tuple(torch.Tensor)`, *optional*): Outputs of the stem and of every stage.
    """

    last_hidden_state: torch.Tensor | None = None
    pooler_output: torch.Tensor | None = None
    raw_embeds: torch.Tensor | None = None
    image_embeds: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None


class StructuralDiscriminatorBlock(nn.Module):
    """Two convolutions with one norm, after the second; a block that halves the image averages first."""

    def __init__(self, in_channels: int, out_channels: int, group_size: int, downsample: bool, alpha: float):
        super().__init__()
        self.alpha = alpha
        self.pool = nn.AvgPool2d(2) if downsample else nn.Identity()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(out_channels // group_size, out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if downsample or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, bias=False),
                nn.GroupNorm(out_channels // group_size, out_channels),
            )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states = self.pool(hidden_states)
        shortcut = self.shortcut(hidden_states)
        hidden_states = F.elu(self.conv1(hidden_states))
        hidden_states = self.norm(self.conv2(hidden_states))
        return F.elu(torch.add(hidden_states, shortcut, alpha=self.alpha))


class StructuralDiscriminatorModel(PreTrainedModel):
    r"""
    Residual network with a projection head.

    >>> model = AutoModel.from_pretrained("path/or/repository", trust_remote_code=True)
    >>> features = model(pixel_values).pooler_output
    """

    config: StructuralDiscriminatorConfig
    config_class = StructuralDiscriminatorConfig
    base_model_prefix = "discriminator"
    main_input_name = "pixel_values"
    supports_gradient_checkpointing = False

    def __init__(self, config: StructuralDiscriminatorConfig):
        super().__init__(config)
        width = config.hidden_sizes[0]
        self.stem = nn.Conv2d(config.num_channels, width, 3, padding=1, bias=False)
        alphas = iter(config.shortcut_alphas())
        self.stages = nn.ModuleList()
        for stage, (out_channels, depth) in enumerate(zip(config.hidden_sizes, config.depths)):
            halves = stage > 0 or config.downsample_in_first_stage
            blocks = nn.ModuleList()
            for block in range(depth):
                settings = (config.group_size, halves and block == 0, next(alphas))
                blocks.append(StructuralDiscriminatorBlock(width, out_channels, *settings))
                width = out_channels
            self.stages.append(blocks)
        self.projection_in = nn.Linear(width, width)
        self.projection_out = nn.Linear(width, config.projection_size)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module):
        if isinstance(module, nn.Conv2d):
            init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.GroupNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):  # torch's own default, as in the release
            bound = 1 / math.sqrt(module.in_features)
            init.uniform_(module.weight, -bound, bound)
            init.uniform_(module.bias, -bound, bound)

    def forward(
        self,
        pixel_values: torch.Tensor,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> StructuralDiscriminatorOutput | tuple:
        """
        Args:
            pixel_values (`torch.Tensor` of shape `(batch, num_channels, height, width)`): Images in [-1, 1].
        """
        if pixel_values.ndim != 4 or pixel_values.shape[1] != self.config.num_channels:
            raise ValueError(
                f"`pixel_values` must have shape (batch, {self.config.num_channels}, height, width), got "
                f"{tuple(pixel_values.shape)}."
            )
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        return_dict = self.config.return_dict if return_dict is None else return_dict
        hidden_states = F.elu(self.stem(pixel_values))
        states = [hidden_states]
        for blocks in self.stages:
            for block in blocks:
                hidden_states = block(hidden_states)
            states.append(hidden_states)
        features = hidden_states.mean(dim=(2, 3))  # (batch, width)
        raw_embeds = self.projection_out(F.elu(self.projection_in(features)))  # (batch, projection_size)
        output = StructuralDiscriminatorOutput(
            last_hidden_state=hidden_states,
            pooler_output=features,
            raw_embeds=raw_embeds,
            image_embeds=F.normalize(raw_embeds, dim=1),
            hidden_states=tuple(states) if output_hidden_states else None,
        )
        return output if return_dict else output.to_tuple()

    def save_pretrained(self, save_directory, *args, **kwargs):
        self.config.auto_map = dict(AUTO_MAP)
        return super().save_pretrained(save_directory, *args, **kwargs)


AUTO_MAP = {
    "AutoConfig": "modeling_structural_discriminator.StructuralDiscriminatorConfig",
    "AutoModel": "modeling_structural_discriminator.StructuralDiscriminatorModel",
}
StructuralDiscriminatorConfig.register_for_auto_class()
StructuralDiscriminatorModel.register_for_auto_class("AutoModel")
