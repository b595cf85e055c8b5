"""Configuration of the decayed residual network: transformers' ResNet plus the fields of the decayed shortcut."""

from typing import Literal

from transformers.utils.versions import require_version


# Checked before anything else is imported, so that an older library answers with a version and not with a missing name.
require_version("transformers>=5.18.0", "Decayed ResNet needs it: `pip install -U transformers`.")

from huggingface_hub.dataclasses import strict  # noqa: E402
from transformers import ResNetConfig  # noqa: E402

from .shortcut_decay import shortcut_factors  # noqa: E402


@strict
class DecayedResNetConfig(ResNetConfig):
    r"""
    Configuration of [`DecayedResNetModel`] and its classifier: every field of `ResNetConfig`, and those below.

    `DecayedResNetConfig()` is ResNet-18 with the decay that the paper found best for it. `from_num_blocks` gives the
    paper's deeper networks. With `shortcut_decay=1.0` it is transformers' ResNet, weight for weight.

    Args:
        shortcut_decay (`float`, *optional*, defaults to 0.7):
            Weight of the shortcut in the last block, in [0, 1]; weights fall to it from 1 with depth. `1.0` gives the
            ordinary network.
        shortcut_schedule (`str`, *optional*, defaults to `"linear"`):
            `linear`, `cosine` or `constant` (every weight is `shortcut_decay`).
        stem (`str`, *optional*, defaults to `"imagenet"`):
            `imagenet`: a convolution and a pooling that each halve the image. `small`: a 3 x 3 convolution that keeps
            its size, for images of 32 pixels or so.

    Example:

    ```python
    >>> from hf_decayed import DecayedResNetConfig

    >>> config = DecayedResNetConfig.from_num_blocks(12, shortcut_decay=0.8)
    >>> config.depths
    [2, 2, 6, 2]
    ```"""

    model_type = "decayed_resnet"

    hidden_sizes: list[int] | tuple[int, ...] | None = (64, 128, 256, 512)
    depths: list[int] | tuple[int, ...] | None = (2, 2, 2, 2)
    layer_type: str = "basic"
    shortcut_decay: float | int = 0.7
    shortcut_schedule: Literal["linear", "cosine", "constant"] = "linear"
    stem: Literal["imagenet", "small"] = "imagenet"

    @classmethod
    def from_num_blocks(cls, num_blocks: int, **overrides) -> "DecayedResNetConfig":
        """ResNet-18 has 8 blocks, two a stage; deeper networks repeat those of the third stage, as the paper's do."""
        if num_blocks < 7:
            raise ValueError(
                f"`num_blocks` must be at least 7, so that the third stage keeps a block, got {num_blocks}."
            )
        return cls(**{"depths": [2, 2, num_blocks - 6, 2], **overrides})

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs):
        source_type = config_dict.get("model_type", cls.model_type)
        if source_type == ResNetConfig.model_type:
            # A ResNet config leaves our fields, and what differs in their defaults, open.
            theirs = {name: getattr(ResNetConfig(), name) for name in ("hidden_sizes", "depths", "layer_type")}
            config_dict = {**theirs, "shortcut_decay": 1.0, **config_dict, "model_type": cls.model_type}
        elif source_type != cls.model_type:
            raise ValueError(
                f"`model_type` must be '{cls.model_type}' or '{ResNetConfig.model_type}', got '{source_type}': "
                f"such a checkpoint cannot become a {cls.__name__}."
            )
        made = super().from_dict(config_dict, **kwargs)
        (made[0] if isinstance(made, tuple) else made).validate()  # keyword arguments are set after construction
        return made

    def shortcut_alphas(self) -> list[float]:
        """Weight of the shortcut of every block, over all stages; those that project are weighted like the others."""
        last = max(1, sum(self.depths) - 1)
        depths = [block / last for block in range(sum(self.depths))]
        return shortcut_factors(depths, float(self.shortcut_decay), self.shortcut_schedule)

    def validate_shortcuts(self):
        if not 0.0 <= self.shortcut_decay <= 1.0:
            raise ValueError(f"`shortcut_decay` must lie in [0, 1], got {self.shortcut_decay}.")
        if len(self.depths) != len(self.hidden_sizes) or min(self.depths) < 1:
            raise ValueError(
                f"`depths` needs at least one block for each of `hidden_sizes`, got {list(self.depths)} and "
                f"{list(self.hidden_sizes)}."
            )


DecayedResNetConfig.register_for_auto_class()
