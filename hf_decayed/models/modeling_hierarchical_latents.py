"""Latents of an image from coarse to fine: a frozen encoder on ever smaller crops, each level reduced by its own SVD.

The targets of nested diffusion (Zhang's dissertation, chapter 5). The highest level is one vector of the whole image; a
level below has a vector for each of 2 x 2, 4 x 4, ... crops, with fewer channels. Where crops become too small to mean
anything, the encoder's feature map of the whole image, pooled to the same grid, takes their place.

Config and model are one file, and the encoder is always a class of transformers, so that a pipeline that is downloaded with
this file alone can load it. `hf_decayed.stock_model` makes such an encoder of a masked autoencoder with decayed shortcuts.
"""

import dataclasses
import difflib
import hashlib
import json
import math
from collections.abc import Collection, Iterable
from typing import Any, Literal

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel, ViTConfig
from transformers import initialization as init
from transformers.utils import ModelOutput


__all__ = ["HierarchicalLatentConfig", "HierarchicalLatentEncoder"]


# Copied from hf_decayed.models.unet_decayed_uvit.check_integer
def check_integer(name: str, value: int, low: int, high: int = 2**20) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"`{name}` must be an integer in [{low}, {high}], got {value!r}.")


# Copied from hf_decayed.models.unet_decayed_uvit.check_field_names
def check_field_names(fields: dict, known: Collection[str], misspelt_only: bool = False) -> None:
    """Raises for an unknown field; with `misspelt_only`, only for one whose name is close to a known field's."""
    for name in fields.keys() - set(known):
        nearest = difflib.get_close_matches(name, known, 1, 0.8)
        if nearest:
            raise ValueError(f"Unknown field `{name}` (value {fields[name]!r}); did you mean `{nearest[0]}`?")
        if not misspelt_only:
            raise ValueError(f"Unknown field `{name}` (value {fields[name]!r}).")


@strict
class HierarchicalLatentConfig(PreTrainedConfig):
    r"""
    Configuration of [`HierarchicalLatentEncoder`].

    Args:
        encoder_config (`dict` or `PreTrainedConfig`): Config of the encoder, a model of transformers.
        levels (`list` of `(grid, channels)`): Latents of the levels above the first, the highest first. The grid is the
            number of crops along each side. The default is the dissertation's for images of 256 pixels.
        image_size (`int`): Height and width of the images.
        encoder_size (`int`): Height and width that images and crops are resized to for the encoder.
        image_mean, image_std (`list[float]`): Normalisation of the encoder's input, per channel, for pixels in [0, 1].
        pooling (`str`): How tokens become one vector: `cls`, `mean` (all tokens), `patch_mean`, or `pooler_output`.
        num_prefix_tokens (`int`): Tokens of the encoder before those of the patches.
        min_crop_size (`int`): Levels whose crops are smaller take the pooled feature map of the whole image.
        fingerprint (`str`, *optional*): Of encoder and projections; set by `fit`. Networks remember it, so that latents of
            different encoders are not mixed.
    """

    model_type = "hierarchical_latent_encoder"
    sub_configs = {"encoder_config": AutoConfig}

    encoder_config: Any = None
    levels: list[Any] | tuple[Any, ...] = ((1, 256), (2, 128), (4, 64), (8, 32))
    image_size: int = 256
    encoder_size: int = 224
    num_channels: int = 3
    image_mean: list[float] | tuple[float, ...] = (0.485, 0.456, 0.406)
    image_std: list[float] | tuple[float, ...] = (0.229, 0.224, 0.225)
    pooling: Literal["cls", "mean", "patch_mean", "pooler_output"] = "cls"
    num_prefix_tokens: int = 1
    min_crop_size: int = 64
    fingerprint: str | None = None

    def __post_init__(self, **kwargs):
        if self.encoder_config is None:
            self.encoder_config = ViTConfig()
        elif isinstance(self.encoder_config, dict):
            fields = dict(self.encoder_config)
            self.encoder_config = AutoConfig.for_model(fields.pop("model_type", "vit"), **fields)
        super().__post_init__(**kwargs)

    def validate_field_names(self):
        known = {field.name for field in dataclasses.fields(self)}
        ours = known - {field.name for field in dataclasses.fields(PreTrainedConfig)}
        others = {name: value for name, value in vars(self).items() if name not in known}
        check_field_names(others, ours, misspelt_only=True)

    def validate_sizes(self):
        for name in ("image_size", "encoder_size", "num_channels", "min_crop_size"):
            check_integer(name, getattr(self, name), 1)
        check_integer("num_prefix_tokens", self.num_prefix_tokens, 0)

    def validate_levels(self):
        if len(self.levels) == 0:
            raise ValueError("`levels` must name at least one level.")
        for entry in self.levels:
            if not isinstance(entry, (list, tuple)) or len(entry) != 2:
                raise ValueError(f"`levels` must hold (grid, channels) of each level, got {entry!r}.")
            for name, number in zip(("grid", "channels"), entry):
                check_integer(f"levels, {name}", number, 1)
            if self.image_size % entry[0] != 0:
                raise ValueError(
                    f"`image_size` must be divisible by the grid of every level, got {self.image_size} and {entry[0]}."
                )

    def validate_normalisation(self):
        for name in ("image_mean", "image_std"):
            numbers = list(getattr(self, name))
            if len(numbers) != self.num_channels:
                raise ValueError(
                    f"`{name}` must have one number for each of the {self.num_channels} `num_channels`, got {numbers}."
                )
            if not all(math.isfinite(number) for number in numbers):
                raise ValueError(f"`{name}` must be finite, got {numbers}.")
        if any(number <= 0 for number in self.image_std):
            raise ValueError(f"`image_std` must be above 0, got {list(self.image_std)}.")


@dataclasses.dataclass
class HierarchicalLatentOutput(ModelOutput):
    """
    latents (`dict[int, torch.Tensor]`): `(batch, channels, grid, grid)` by level, from the highest level down to level 2.
    """

    latents: dict[int, torch.Tensor] | None = None


class LatentProjection(nn.Module):
    """Centred SVD of one level: `z = (features - mean) components^T / scale`, with one scale for all channels.

    One scale gives the channels a mean variance of 1, and keeps the shape of the spectrum.
    """

    def __init__(self, num_features: int, channels: int):
        super().__init__()
        self.register_buffer("mean", torch.zeros(num_features))
        self.register_buffer("components", torch.eye(channels, num_features))
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("explained_variance", torch.zeros(channels))  # share of the variance, of every channel

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return (features - self.mean) @ self.components.T / self.scale

    def inverse(self, latents: torch.Tensor) -> torch.Tensor:
        return (latents * self.scale) @ self.components + self.mean


class FeatureMoments:
    """Number, mean and scatter matrix of vectors that come in batches; the memory does not grow with their number."""

    def __init__(self, num_features: int, device: torch.device):
        self.number = 0
        device = torch.device("cpu") if device.type == "mps" else device  # which has no float64
        self.mean = torch.zeros(num_features, dtype=torch.float64, device=device)
        self.scatter = torch.zeros(num_features, num_features, dtype=torch.float64, device=device)

    def add(self, features: torch.Tensor) -> None:
        """Merges the moments of a batch `(number, num_features)`, each set centred by its own mean, which is stable."""
        features = features.to(self.mean.device).double()
        number, mean = len(features), features.mean(dim=0)
        difference = mean - self.mean
        total = self.number + number
        self.scatter += (features - mean).T @ (features - mean)
        self.scatter += torch.outer(difference, difference) * (self.number * number / total)
        self.mean += difference * (number / total)
        self.number = total

    def principal_components(self, channels: int) -> dict[str, torch.Tensor]:
        """The buffers of a [`LatentProjection`]."""
        if self.number <= channels:
            raise ValueError(f"An SVD with {channels} channels needs more vectors than that, got {self.number}.")
        variances, vectors = torch.linalg.eigh(self.scatter / self.number)
        variances, components = variances.flip(0).clamp(min=0), vectors.flip(1).T[:channels]
        # An eigenvector has no sign of its own; with this rule, repeated fits give the same.
        largest = components.gather(1, components.abs().argmax(dim=1, keepdim=True))
        scale = variances[:channels].mean().sqrt()
        if not scale > 0:
            raise ValueError("The encoder gives the same features for all images, so there are no latents.")
        return {
            "mean": self.mean,
            "components": components * largest.sign(),
            "scale": scale.reshape(1),
            "explained_variance": variances[:channels] / variances.sum(),
        }


class HierarchicalLatentEncoder(PreTrainedModel):
    r"""
    Frozen encoder with an SVD per level: images in, latents by level out.

    >>> latent_encoder = HierarchicalLatentEncoder.from_encoder(encoder, [(1, 256), (2, 128)], image_size=256)
    >>> latent_encoder.fit(batches_of_pixel_values)
    >>> latents = latent_encoder.encode(pixel_values)  # {3: (batch, 256, 1, 1), 2: (batch, 128, 2, 2)}
    """

    config: HierarchicalLatentConfig
    config_class = HierarchicalLatentConfig
    main_input_name = "pixel_values"

    def __init__(self, config: HierarchicalLatentConfig):
        super().__init__(config)
        self.encoder = AutoModel.from_config(config.encoder_config)
        pooler = getattr(self.encoder, "pooler", None)
        if config.pooling != "pooler_output" and pooler is not None and list(pooler.parameters()):
            self.encoder.pooler = None  # its weights, often random, would be a part of the fingerprint
        width = feature_width(config.encoder_config)
        for level, (_, channels) in zip(self.level_numbers, config.levels):
            if channels > width:
                raise ValueError(
                    f"`levels` asks for {channels} channels at level {level}, and the encoder's features have {width}."
                )
        self.projections = nn.ModuleList([LatentProjection(width, channels) for _, channels in config.levels])
        self.requires_grad_(False)
        self.post_init()

    def _init_weights(self, module):
        if isinstance(module, LatentProjection):
            init.zeros_(module.mean)
            init.copy_(module.components, torch.eye(*module.components.shape))
            init.ones_(module.scale)
            init.zeros_(module.explained_variance)

    @classmethod
    def from_encoder(
        cls, encoder: PreTrainedModel, levels: list[tuple[int, int]], image_size: int, **fields
    ) -> "HierarchicalLatentEncoder":
        """Around a trained encoder, which is copied; `fit` comes next. `fields` are those of the config."""
        if not type(encoder).__module__.startswith("transformers."):
            raise ValueError(
                f"The encoder must be a model of transformers, got {type(encoder).__name__}, whose code could not travel with "
                "the latents; of a decayed masked autoencoder pass `stock_model(encoder)`."
            )
        if encoder.config.model_type == "vit_mae":
            raise ValueError(
                "ViTMAE masks and shuffles its patches: pass `stock_model(DecayedViTMAEModel.from_pretrained(...))`."
            )
        num_channels = getattr(encoder.config, "num_channels", 3)
        size = getattr(encoder.config, "image_size", None) or image_size
        sizes = {"encoder_size": size if isinstance(size, int) else size[0], "num_channels": num_channels}
        config = HierarchicalLatentConfig(
            encoder_config=encoder.config.to_dict(), levels=levels, image_size=image_size, **{**sizes, **fields}
        )
        model = cls(config)
        missing, unexpected = model.encoder.load_state_dict(encoder.state_dict(), strict=False)
        if missing or any(not name.startswith(("pooler.", "layernorm.")) for name in unexpected):
            raise ValueError(
                f"{type(encoder).__name__} is no encoder that its config describes: {(missing + unexpected)[0]}."
            )
        return model.eval()

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        loaded = super().from_pretrained(*args, **kwargs)
        # Loading makes every parameter trainable.
        (loaded[0] if isinstance(loaded, tuple) else loaded).requires_grad_(False)
        return loaded

    @property
    def level_numbers(self) -> list[int]:
        """Numbers of the levels, the highest first; level 1, the image or its VAE latent, is not among them."""
        return list(range(len(self.config.levels) + 1, 1, -1))

    def forward(self, pixel_values: torch.Tensor, return_dict: bool | None = None) -> HierarchicalLatentOutput | tuple:
        """
        Args:
            pixel_values (`torch.Tensor` of shape `(batch, num_channels, image_size, image_size)`): Images in [0, 1].
        """
        latents = self.encode(pixel_values)
        return (latents,) if return_dict is False else HierarchicalLatentOutput(latents=latents)

    @torch.no_grad()
    def encode(self, pixel_values: torch.Tensor) -> dict[int, torch.Tensor]:
        """Latents `(batch, channels, grid, grid)` by level of images in [0, 1]; the highest level comes first."""
        if self.config.fingerprint is None:
            raise ValueError("The latent encoder has no SVD yet: call `fit` with batches of images first.")
        return {
            level: projection(features.to(projection.mean.dtype)).movedim(-1, 1)
            for (level, features), projection in zip(self.features(pixel_values).items(), self.projections)
        }

    def decode_features(self, latents: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """The inverse of the SVD: features `(batch, grid, grid, width)` by level, without what the SVD left out."""
        projections = dict(zip(self.level_numbers, self.projections))
        unknown = latents.keys() - projections.keys()
        if unknown:
            raise ValueError(f"There are latents of levels {self.level_numbers}, got {sorted(unknown)}.")
        return {level: projections[level].inverse(tensor.movedim(1, -1)) for level, tensor in latents.items()}

    @torch.no_grad()
    def fit(self, batches: Iterable[torch.Tensor]) -> "HierarchicalLatentEncoder":
        """Fits the SVD of every level in one pass over batches of images in [0, 1], and sets the fingerprint."""
        moments: dict[int, FeatureMoments] = {}
        for pixel_values in batches:
            for level, features in self.features(pixel_values.to(self.device)).items():
                vectors = features.flatten(0, 2)
                if level not in moments:
                    moments[level] = FeatureMoments(vectors.shape[1], vectors.device)
                moments[level].add(vectors)
        if not moments:
            raise ValueError("`fit` got no images.")
        for level, projection in zip(self.level_numbers, self.projections):
            buffers = moments[level].principal_components(len(projection.components))
            projection.load_state_dict({name: tensor.float() for name, tensor in buffers.items()})
        self.config.fingerprint = self.compute_fingerprint()
        return self

    def explained_variance(self) -> dict[int, float]:
        """Share of the features' variance that the latents of each level hold."""
        return {
            level: float(projection.explained_variance.sum())
            for level, projection in zip(self.level_numbers, self.projections)
        }

    def compute_fingerprint(self) -> str:
        """A hash of all weights, of encoder and projections, and of what is done before and after them."""
        fields = ("levels", "image_size", "encoder_size", "image_mean", "image_std", "pooling", "min_crop_size")
        digest = hashlib.sha256(json.dumps([getattr(self.config, name) for name in fields]).encode())
        for name, tensor in sorted(self.state_dict().items()):
            digest.update(name.encode() + tensor.float().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    @torch.no_grad()
    def features(self, pixel_values: torch.Tensor) -> dict[int, torch.Tensor]:
        """Features `(batch, grid, grid, width)` by level: vectors of crops, or the feature map of the whole image."""
        config = self.config
        expected = (config.num_channels, config.image_size, config.image_size)
        if pixel_values.ndim != 4 or tuple(pixel_values.shape[1:]) != expected:
            raise ValueError(
                f"`pixel_values` must have shape (batch, {str(expected)[1:-1]}), got {tuple(pixel_values.shape)}."
            )
        features, whole = {}, None  # the tokens of the whole image serve every level that needs them
        for level, (grid, _) in zip(self.level_numbers, config.levels):
            crop_size = config.image_size // grid
            if grid > 1 and crop_size >= config.min_crop_size:
                crops = pixel_values.unfold(2, crop_size, crop_size).unfold(3, crop_size, crop_size)
                crops = crops.permute(0, 2, 3, 1, 4, 5).flatten(0, 2)  # (batch * grid * grid, channels, crop, crop)
                features[level] = self.pool(self.run_encoder(crops)).unflatten(0, (-1, grid, grid))
                continue
            whole = self.run_encoder(pixel_values) if whole is None else whole
            if grid == 1:
                features[level] = self.pool(whole)[:, None, None]
            else:
                features[level] = F.adaptive_avg_pool2d(self.feature_map(whole), grid).movedim(1, -1)
        return features

    def run_encoder(self, images: torch.Tensor) -> ModelOutput:
        config, size = self.config, (self.config.encoder_size, self.config.encoder_size)
        if images.shape[2:] != size:
            images = F.interpolate(images.float(), size=size, mode="bicubic", antialias=True).clamp(0, 1)
        mean, std = (
            torch.tensor(list(values), device=images.device).view(-1, 1, 1)
            for values in (config.image_mean, config.image_std)
        )
        return self.encoder(((images.float() - mean) / std).to(self.encoder.dtype))

    def pool(self, outputs: ModelOutput) -> torch.Tensor:
        """One vector per image."""
        tokens, config = outputs.last_hidden_state, self.config
        if tokens.ndim == 4:  # of a convolutional network
            return tokens.mean(dim=(2, 3))
        if config.pooling == "pooler_output":
            return outputs.pooler_output
        if config.pooling == "cls":
            return tokens[:, 0]
        return tokens.mean(dim=1) if config.pooling == "mean" else tokens[:, config.num_prefix_tokens :].mean(dim=1)

    def feature_map(self, outputs: ModelOutput) -> torch.Tensor:
        """Features `(batch, width, height, width)` of the patches."""
        tokens = outputs.last_hidden_state
        if tokens.ndim == 4:
            return tokens
        patches = tokens[:, self.config.num_prefix_tokens :]
        side = math.isqrt(patches.shape[1])
        if side**2 != patches.shape[1]:
            raise ValueError(f"The encoder's {patches.shape[1]} patches form no square: check `num_prefix_tokens`.")
        return patches.transpose(1, 2).unflatten(2, (side, side))


def feature_width(config: PreTrainedConfig) -> int:
    """Number of features of an encoder with this config."""
    width = getattr(config, "hidden_size", None) or getattr(config, "hidden_sizes", [None])[-1]
    if width is None:
        raise ValueError(f"The config of the encoder ({config.model_type}) says nothing of the width of its features.")
    return width


AUTO_MAP = {
    "AutoConfig": "modeling_hierarchical_latents.HierarchicalLatentConfig",
    "AutoModel": "modeling_hierarchical_latents.HierarchicalLatentEncoder",
}
HierarchicalLatentConfig.register_for_auto_class()
HierarchicalLatentEncoder.register_for_auto_class("AutoModel")
