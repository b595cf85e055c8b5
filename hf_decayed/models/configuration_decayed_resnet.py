"""Configuration of the decayed residual network: transformers' ResNet plus the fields of the decayed shortcut."""

import dataclasses
import difflib
from collections.abc import Collection
from typing import Literal

from transformers.utils.versions import require_version


# Checked before the imports below, so that an older transformers fails with a version and not with a missing name.
require_version("transformers>=5.18.0", "Decayed ResNet needs it: `pip install -U transformers`.")

from huggingface_hub.dataclasses import strict  # noqa: E402
from transformers import ResNetConfig  # noqa: E402
from transformers.activations import ACT2FN  # noqa: E402

from .shortcut_decay import shortcut_factors  # noqa: E402


__all__ = ["DecayedResNetConfig"]

# Names that other code uses for our fields. Accepted silently, they would have no effect.
OTHER_NAMES = {
    "alpha_min": "shortcut_decay",
    "min_decay": "shortcut_decay",
    "alpha": "shortcut_decay",
    "decay": "shortcut_decay",
    "num_blocks": "depths",
    "num_layers": "depths",
    "num_hidden_layers": "depths",
}

# Copied from hf_decayed.models.configuration_decayed_vit_mae.LIBRARY_NAMES
LIBRARY_NAMES = {
    "model_type",
    "num_labels",
    "dtype",
    "torch_dtype",
    "attn_implementation",
    "experts_implementation",
    "output_attentions",
    "name_or_path",
    "out_features",
    "out_indices",
    "stage_names",
    "auto_map",
    "custom_pipelines",
    "quantization_config",
}

# Larger values are typing errors, which would exhaust the memory.
MAX_BLOCKS = 10_000
MAX_SIZE = 2**20


# Copied from hf_decayed.models.configuration_decayed_vit_mae.check_num_labels
def check_num_labels(fields: dict) -> None:
    """Raises for a wrong `num_labels`, which is not a field: transformers turns it into `id2label`."""
    num_labels = fields.get("num_labels", 0)
    if isinstance(num_labels, bool) or not isinstance(num_labels, int) or not 0 <= num_labels <= MAX_SIZE:
        raise ValueError(f"`num_labels` must be an integer in [0, {MAX_SIZE}], got {num_labels!r}.")


@strict
class DecayedResNetConfig(ResNetConfig):
    r"""
    Configuration of [`DecayedResNetModel`] and its classifier: every field of `ResNetConfig`, and those below.

    `DecayedResNetConfig()` is ResNet-18 with the paper's best decay for it. `from_num_blocks` builds the paper's deeper
    networks. With `shortcut_decay=1.0` it is transformers' ResNet, weight for weight.

    Args:
        shortcut_decay (`float`, *optional*, defaults to 0.7):
            Weight of the shortcut in the last block, in [0, 1]; the weights fall from 1 to this value with depth. `1.0`
            gives the ordinary network.
        shortcut_schedule (`str`, *optional*, defaults to `"linear"`):
            `linear`, `cosine` or `constant` (every weight is `shortcut_decay`).
        stem (`str`, *optional*, defaults to `"imagenet"`):
            `imagenet`: a convolution and a pooling that each halve the image. `small`: a 3 x 3 convolution that keeps
            its size, for images of about 32 pixels.

    Example:

    ```python
    >>> from hf_decayed import DecayedResNetConfig

    >>> config = DecayedResNetConfig.from_num_blocks(12, shortcut_decay=0.8)
    >>> config.depths
    [2, 2, 6, 2]
    ```"""

    model_type = "decayed_resnet"

    hidden_sizes: list[int] | tuple[int, ...] = (64, 128, 256, 512)
    depths: list[int] | tuple[int, ...] = (2, 2, 2, 2)
    layer_type: Literal["basic", "bottleneck"] = "basic"
    shortcut_decay: float | int = 0.7
    shortcut_schedule: Literal["linear", "cosine", "constant"] = "linear"
    stem: Literal["imagenet", "small"] = "imagenet"

    def __post_init__(self, **kwargs):
        check_num_labels(kwargs)
        self.check_field_names(kwargs)
        super().__post_init__(**kwargs)

    @classmethod
    def from_num_blocks(cls, num_blocks: int, **overrides) -> "DecayedResNetConfig":
        """ResNet-18 has 8 blocks, two per stage; deeper networks have more in the third stage, as in the paper."""
        if num_blocks < 7:
            raise ValueError(
                f"`num_blocks` must be at least 7, so that the third stage has a block, got {num_blocks}."
            )
        return cls(**{"depths": [2, 2, num_blocks - 6, 2], **overrides})

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs):
        source_type = config_dict.get("model_type", cls.model_type)
        if source_type == ResNetConfig.model_type:
            # A ResNet config does not have our fields, and omits fields whose defaults differ from ours.
            defaults = {name: getattr(ResNetConfig(), name) for name in ("hidden_sizes", "depths", "layer_type")}
            config_dict = {**defaults, "shortcut_decay": 1.0, **config_dict, "model_type": cls.model_type}
        elif source_type != cls.model_type:
            raise ValueError(
                f"`model_type` must be '{cls.model_type}' or '{ResNetConfig.model_type}', got '{source_type}': "
                f"such a checkpoint cannot become a {cls.__name__}."
            )
        # What other tools have saved is no field, but theirs: set as an attribute, as they did.
        attributes = {name: value for name, value in config_dict.items() if not cls.is_field(name)}
        fields = {name: value for name, value in config_dict.items() if name not in attributes}
        result = super().from_dict(fields, **kwargs)
        config = result[0] if kwargs.get("return_unused_kwargs") else result
        for name, value in attributes.items():
            setattr(config, name, value)
        config.validate()  # `from_dict` sets keyword arguments after construction
        return result

    # Copied from hf_decayed.models.configuration_decayed_vit_mae.DecayedViTMAEConfig.is_field
    @classmethod
    def is_field(cls, name: str) -> bool:
        """Whether the constructor takes this name; those with an underscore are transformers' own."""
        return name in {field.name for field in dataclasses.fields(cls)} | LIBRARY_NAMES or name.startswith("_")

    # Copied from hf_decayed.models.configuration_decayed_vit_mae.DecayedViTMAEConfig.check_field_names
    @classmethod
    def check_field_names(cls, names: Collection[str]) -> None:
        """Raises for a name that is no field, with the nearest that is."""
        fields = {field.name for field in dataclasses.fields(cls)} | {"num_labels"}
        for name in sorted(names):
            if not cls.is_field(name):
                cutoff = 0.0 if name.startswith("shortcut") else 0.6
                nearest = OTHER_NAMES.get(name) or next(iter(difflib.get_close_matches(name, fields, 1, cutoff)), None)
                hint = f"; did you mean `{nearest}`?" if nearest else "."
                raise ValueError(f"Unknown field `{name}` of {cls.__name__}{hint}")

    def shortcut_alphas(self) -> list[float]:
        """Weight of the shortcut of every block, over all stages; projecting shortcuts are decayed like the others."""
        last = max(1, sum(self.depths) - 1)
        depths = [block / last for block in range(sum(self.depths))]
        return shortcut_factors(depths, float(self.shortcut_decay), self.shortcut_schedule)

    # Copied from hf_decayed.models.configuration_decayed_vit_mae.DecayedViTMAEConfig.validate_field_names
    def validate_field_names(self):
        # Other attributes may be set by tools; nobody but a user who means ours sets these.
        self.check_field_names(
            [name for name in vars(self) if name.startswith(("shortcut", "alpha_min", "min_decay"))]
        )

    def validate_sizes(self):
        for name in ("num_channels", "embedding_size", "hidden_sizes", "depths"):
            values = getattr(self, name)
            values = [values] if isinstance(values, int) else list(values)
            if min(values, default=1) < 1:
                raise ValueError(f"`{name}` must be positive, got {getattr(self, name)}.")
            if max(values, default=1) > MAX_SIZE:
                raise ValueError(f"`{name}` must be at most {MAX_SIZE}, got {getattr(self, name)}.")
        if len(self.depths) != len(self.hidden_sizes) or len(self.depths) == 0:
            raise ValueError(
                f"`depths` needs at least one block for each of `hidden_sizes`, got {list(self.depths)} and "
                f"{list(self.hidden_sizes)}."
            )
        if max(self.depths) > MAX_BLOCKS:
            raise ValueError(f"`depths` must be at most {MAX_BLOCKS} blocks per stage, got {list(self.depths)}.")
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"`hidden_act` must be an activation of transformers, got {self.hidden_act!r}.")

    def validate_shortcuts(self):
        if not 0.0 <= self.shortcut_decay <= 1.0:
            raise ValueError(f"`shortcut_decay` must lie in [0, 1], got {self.shortcut_decay}.")


DecayedResNetConfig.register_for_auto_class()
