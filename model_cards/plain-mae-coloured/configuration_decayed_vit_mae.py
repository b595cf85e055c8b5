"""Configuration of the decayed masked autoencoder: transformers' ViTMAE plus the fields of the decayed shortcut."""

import dataclasses
import difflib
import math
from collections.abc import Collection
from typing import Literal

from transformers.utils.versions import require_version


# Checked before the imports below, so that an older transformers fails with a version and not with a missing name.
require_version("transformers>=5.18.0", "Decayed MAE needs it: `pip install -U transformers`.")

from huggingface_hub.dataclasses import strict  # noqa: E402
from transformers import ViTMAEConfig  # noqa: E402
from transformers.activations import ACT2FN  # noqa: E402
from transformers.backbone_utils import BackboneConfigMixin  # noqa: E402

from .shortcut_decay import layer_shortcut_factors, suggest_shortcut_decay, warn_about_decay  # noqa: E402


__all__ = ["DecayedViTMAEConfig"]

# The named sizes, each with the decoder of the released models (512 wide, 8 deep) and the paper's best `shortcut_decay`.
# The paper has no value for 32 layers, so `huge` takes the rule of thumb.
SIZES: dict[str, dict] = {
    "small": {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536},
    "base": {},
    "large": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "shortcut_decay": 0.7,
    },
    "huge": {
        "hidden_size": 1280,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "intermediate_size": 5120,
        "patch_size": 14,
        "shortcut_decay": "auto",
    },
}

# The fields that turn the default preset into transformers' ViTMAE.
PLAIN = {
    "layer_norm_eps": 1e-12,
    "shortcut_decay": 1.0,
    "encoder_decoder_skips": False,
    "decoder_input": "latent",
    "final_norm": True,
    "zero_init_branches": False,
    "pooling": "cls",
}

# Names that other code uses for our fields. Accepted silently, they would have no effect.
OTHER_NAMES = {
    "alpha_min": "shortcut_decay",
    "min_decay": "shortcut_decay",
    "alpha": "shortcut_decay",
    "decay": "shortcut_decay",
    "skips": "encoder_decoder_skips",
    "pool": "pooling",
    "global_pool": "pooling",
    "depth": "num_hidden_layers",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "embed_dim": "hidden_size",
    "in_channels": "num_channels",
    "decoder_depth": "decoder_num_hidden_layers",
    "norm_pix": "norm_pix_loss",
}

# Names that transformers takes at construction, or writes into a config, besides the fields.
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
MAX_LAYERS = 10_000
MAX_SIZE = 2**20


def as_pair(size: int | list[int] | tuple[int, int]) -> tuple[int, int]:
    """`(height, width)` of an image or patch size that is one number or two."""
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


def check_num_labels(fields: dict) -> None:
    """Raises for a wrong `num_labels`, which is not a field: transformers turns it into `id2label`."""
    num_labels = fields.get("num_labels", 0)
    if isinstance(num_labels, bool) or not isinstance(num_labels, int) or not 0 <= num_labels <= MAX_SIZE:
        raise ValueError(f"`num_labels` must be an integer in [0, {MAX_SIZE}], got {num_labels!r}.")


@strict
class DecayedViTMAEConfig(BackboneConfigMixin, ViTMAEConfig):
    r"""
    Configuration of [`DecayedViTMAEModel`] and its heads: every field of `ViTMAEConfig`, and those below.

    `DecayedViTMAEConfig()` is the authors' released architecture at ViT-B/16 with `shortcut_decay` 0.6.
    `DecayedViTMAEConfig.plain()` is transformers' ViTMAE, weight for weight. `from_size` builds a named size.

    Args:
        shortcut_decay (`float` or `"auto"`, *optional*, defaults to 0.6):
            Weight of the identity shortcut in the last branch, in [0, 1]; the weights fall from 1 to this value with
            depth. `1.0` gives the ordinary residual network. `"auto"` becomes the value whose effective decay is 3e-3.
        shortcut_schedule (`str`, *optional*, defaults to `"linear"`):
            `linear`, `cosine`, `constant` (every weight is `shortcut_decay`) or `learned` (one trained scalar per
            branch that starts at 1; `shortcut_decay` has no effect).
        shortcut_granularity (`str`, *optional*, defaults to `"sublayer"`):
            `sublayer` (released code: depth grows from branch to branch) or `layer` (the paper's equation: both
            branches of a layer share a weight).
        shortcut_scope (`str`, *optional*, defaults to `"both"`):
            `both`, `attention` or `mlp`: which branches are decayed. The other keeps weight 1.
        residual_form (`str`, *optional*, defaults to `"decay"`):
            `decay` is `alpha * x + f(x)`; `scale_both` is `sqrt(0.5) * (x + f(x))` and `scale_branch` is
            `x + sqrt(0.5) * f(x)`, the paper's ablations, which need `shortcut_decay=1.0`.
        encoder_decoder_skips (`bool` or `int`, *optional*, defaults to `True`):
            Connections from every other encoder layer, deepest first, to the decoder layers: `True` makes
            `min(num_hidden_layers / 2, decoder_num_hidden_layers)` of them, a number makes that many. `2` connects the
            last encoder layer and the last but two. Never decayed.
        decoder_input (`str`, *optional*, defaults to `"positions"`):
            `positions`: the decoder starts from its position table and sees the image through the skips only.
            `latent`: it starts from the projected encoder output and mask tokens, as in He et al.
        decode_ratio (`float`, *optional*, defaults to 1.0):
            Share of the masked patches, chosen at random, that the decoder predicts where the loss alone is asked for
            (`return_logits=False`), in (0, 1]: less makes a training step faster. With logits it predicts all of them.
        zero_init_branches (`bool`, *optional*, defaults to `True`):
            Attention output, MLP output and prediction head start at zero. Needed for `shortcut_decay` below 0.7.
        final_norm (`bool`, *optional*, defaults to `False`):
            LayerNorm after the encoder. Without it, a classifier normalises the pooled feature instead.
        pooling (`str`, *optional*, defaults to `"mean"`):
            How the tokens are pooled into one feature: `cls`, `mean` (all tokens, as in the released linear probe) or
            `patch_mean`.

    Example:

    ```python
    >>> from hf_decayed import DecayedViTMAEConfig

    >>> config = DecayedViTMAEConfig.from_size("large", image_size=(224, 448))
    >>> config.shortcut_decay
    0.7
    ```"""

    model_type = "decayed_vit_mae"

    layer_norm_eps: float = 1e-6
    shortcut_decay: float | int | Literal["auto"] = 0.6
    shortcut_schedule: Literal["linear", "cosine", "constant", "learned"] = "linear"
    shortcut_granularity: Literal["sublayer", "layer"] = "sublayer"
    shortcut_scope: Literal["both", "attention", "mlp"] = "both"
    residual_form: Literal["decay", "scale_both", "scale_branch"] = "decay"
    encoder_decoder_skips: bool | int = True
    decoder_input: Literal["positions", "latent"] = "positions"
    decode_ratio: float | int = 1.0
    zero_init_branches: bool = True
    final_norm: bool = False
    pooling: Literal["cls", "mean", "patch_mean"] = "mean"
    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None

    def __post_init__(self, **kwargs):
        check_num_labels(kwargs)
        self.check_field_names(kwargs)
        self.stage_names = self._all_stage_names()
        kwargs.pop("stage_names", None)
        self.set_output_features_output_indices(
            out_features=kwargs.pop("out_features", None), out_indices=kwargs.pop("out_indices", None)
        )
        super().__post_init__(**kwargs)

    @classmethod
    def from_size(cls, size: str, **overrides) -> "DecayedViTMAEConfig":
        """The released architecture in size `small`, `base`, `large` or `huge`; any field can be overridden."""
        if size not in SIZES:
            raise ValueError(f"`size` must be one of {sorted(SIZES)}, got {size!r}.")
        return cls(**{**SIZES[size], **overrides})

    @classmethod
    def plain(cls, size: str = "base", **overrides) -> "DecayedViTMAEConfig":
        """Transformers' ViTMAE: plain residuals, no skips, decoder from the latent. Any field can be overridden."""
        return cls.from_size(size, **{**PLAIN, **overrides})

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs):
        source_type = config_dict.get("model_type", cls.model_type)
        if source_type == ViTMAEConfig.model_type:
            # A ViTMAE config does not have our fields, and their defaults would not describe its weights.
            config_dict = {**PLAIN, **config_dict, "model_type": cls.model_type}
        elif source_type != cls.model_type:
            raise ValueError(
                f"`model_type` must be '{cls.model_type}' or '{ViTMAEConfig.model_type}', got '{source_type}': "
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

    @classmethod
    def is_field(cls, name: str) -> bool:
        """Whether the constructor takes this name; those with an underscore are transformers' own."""
        return name in {field.name for field in dataclasses.fields(cls)} | LIBRARY_NAMES or name.startswith("_")

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

    @property
    def grid_size(self) -> tuple[int, int]:
        """Number of patches along the height and the width of an image of `image_size`."""
        (height, width), (patch_height, patch_width) = as_pair(self.image_size), as_pair(self.patch_size)
        return height // patch_height, width // patch_width

    @property
    def num_skips(self) -> int:
        """Number of encoder-decoder skips: at most one per decoder layer, so that no parameter is left unused."""
        limit = min(self.num_hidden_layers // 2, self.decoder_num_hidden_layers)
        return limit if self.encoder_decoder_skips is True else int(self.encoder_decoder_skips)

    def shortcut_alphas(self) -> list[tuple[float, float]]:
        """`(attention_alpha, mlp_alpha)` of every encoder layer; for `learned`, their initial values."""
        learned = self.shortcut_schedule == "learned"
        return layer_shortcut_factors(
            self.num_hidden_layers,
            1.0 if learned else float(self.shortcut_decay),
            "constant" if learned else self.shortcut_schedule,
            self.shortcut_granularity,
            self.shortcut_scope,
        )

    def effective_decay(self) -> float:
        """Share of the embeddings that passes the encoder through the shortcuts alone: the product of all alphas."""
        return math.prod(attention * mlp for attention, mlp in self.shortcut_alphas())

    def suggested_shortcut_decay(self) -> float:
        """The value of `shortcut_decay="auto"` for this depth, schedule, granularity and scope."""
        if self.shortcut_schedule == "learned":
            return 1.0
        return suggest_shortcut_decay(
            self.num_hidden_layers,
            schedule=self.shortcut_schedule,
            granularity=self.shortcut_granularity,
            scope=self.shortcut_scope,
        )

    def _check_num_layers(self) -> None:
        # Called before everything that counts layers: the order of the validators is not ours.
        for name in ("num_hidden_layers", "decoder_num_hidden_layers"):
            number = getattr(self, name)
            if number < 1:
                raise ValueError(f"`{name}` must be positive, got {number}.")
            if number > MAX_LAYERS:
                raise ValueError(f"`{name}` must be at most {MAX_LAYERS}, got {number}.")

    def _all_stage_names(self) -> list[str]:
        self._check_num_layers()
        return ["stem"] + [f"stage{layer}" for layer in range(1, self.num_hidden_layers + 1)]

    def validate_field_names(self):
        # Other attributes may be set by tools; nobody but a user who means ours sets these.
        self.check_field_names(
            [name for name in vars(self) if name.startswith(("shortcut", "alpha_min", "min_decay"))]
        )

    def validate_stages(self):
        stage_names = self._all_stage_names()
        if self.stage_names != stage_names:  # the depth has changed since construction, and the last stage with it
            out_features = None if self._out_features == self.stage_names[-1:] else self._out_features
            self.stage_names = stage_names
            self.set_output_features_output_indices(out_features=out_features, out_indices=None)

    def validate_sizes(self):
        for name in ("image_size", "patch_size"):
            if not isinstance(getattr(self, name), int) and len(getattr(self, name)) != 2:
                raise ValueError(f"`{name}` must be one number or (height, width), got {getattr(self, name)}.")
        sizes = {
            "image_size": as_pair(self.image_size),
            "patch_size": as_pair(self.patch_size),
            "num_channels": (self.num_channels,),
        }
        for prefix in ("", "decoder_"):
            for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
                sizes[prefix + name] = (getattr(self, prefix + name),)
        for name, values in sizes.items():
            if min(values) < 1:
                raise ValueError(f"`{name}` must be positive, got {getattr(self, name)}.")
            limit = MAX_LAYERS if name.endswith("num_hidden_layers") else MAX_SIZE
            if max(values) > limit:
                raise ValueError(f"`{name}` must be at most {limit}, got {getattr(self, name)}.")
        for side, image, patch in zip(("height", "width"), sizes["image_size"], sizes["patch_size"]):
            if image % patch != 0:
                raise ValueError(
                    f"`image_size` must be divisible by `patch_size`, got {side} {image} and patch {side} {patch}."
                )
        for prefix in ("", "decoder_"):
            hidden_size, heads = getattr(self, f"{prefix}hidden_size"), getattr(self, f"{prefix}num_attention_heads")
            if hidden_size % heads != 0:
                raise ValueError(
                    f"`{prefix}hidden_size` must be divisible by `{prefix}num_attention_heads`, "
                    f"got {hidden_size} and {heads}."
                )
            if hidden_size % 4 != 0:
                raise ValueError(
                    f"`{prefix}hidden_size` must be divisible by 4 for 2-D sine-cosine positions, got {hidden_size}."
                )
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"`hidden_act` must be an activation of transformers, got {self.hidden_act!r}.")

    def validate_numbers(self):
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "mask_ratio"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"`{name}` must lie in [0, 1), got {getattr(self, name)}.")
        if not 0.0 < self.decode_ratio <= 1.0:
            raise ValueError(f"`decode_ratio` must lie in (0, 1], got {self.decode_ratio}.")
        if not 0.0 < self.layer_norm_eps < math.inf:
            raise ValueError(f"`layer_norm_eps` must be positive and finite, got {self.layer_norm_eps}.")
        if not 0.0 <= self.initializer_range < math.inf:
            raise ValueError(f"`initializer_range` must be finite and not negative, got {self.initializer_range}.")

    def validate_shortcuts(self):
        self._check_num_layers()
        if self.residual_form != "decay":
            if self.shortcut_decay != 1.0 or self.shortcut_schedule == "learned" or self.shortcut_scope != "both":
                raise ValueError(
                    f"`residual_form='{self.residual_form}'` scales every branch by a constant: it needs "
                    f"`shortcut_decay=1.0`, a schedule other than `learned` and `shortcut_scope='both'`, got "
                    f"{self.shortcut_decay!r}, {self.shortcut_schedule!r} and {self.shortcut_scope!r}."
                )
        if self.shortcut_decay == "auto":
            # The number replaces the word, so that the saved file describes the network.
            self.shortcut_decay = self.suggested_shortcut_decay()
        if not 0.0 <= self.shortcut_decay <= 1.0:
            raise ValueError(f"`shortcut_decay` must lie in [0, 1], got {self.shortcut_decay}.")
        if self.shortcut_schedule != "learned":
            warn_about_decay(
                self.num_hidden_layers,
                self.shortcut_decay,
                self.shortcut_schedule,
                self.shortcut_granularity,
                self.shortcut_scope,
            )

    def validate_decoder(self):
        self._check_num_layers()
        if self.encoder_decoder_skips and self.num_hidden_layers % 2 != 0:
            raise ValueError(
                "`encoder_decoder_skips` takes every other layer and needs an even `num_hidden_layers`, "
                f"got {self.num_hidden_layers}."
            )
        limit = min(self.num_hidden_layers // 2, self.decoder_num_hidden_layers)
        if not 0 <= self.num_skips <= limit:
            raise ValueError(
                f"`encoder_decoder_skips` must be true, false or a number up to {limit}, the smaller of half the encoder "
                f"layers and all decoder layers, got {self.encoder_decoder_skips}."
            )
        if self.decoder_input == "positions" and not self.encoder_decoder_skips:
            raise ValueError(
                "`decoder_input='positions'` needs `encoder_decoder_skips=True`, got False: "
                "such a decoder never sees the image."
            )


DecayedViTMAEConfig.register_for_auto_class()
