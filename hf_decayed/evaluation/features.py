"""Features of a whole data set, extracted once into shards that survive an interruption, in the order of the data.

    >>> encode = transformer_encoder(model, ["last.mean", "6.cls"])
    >>> features = extract_features(encode, images, "outputs/features", identity={"model": model_fingerprint(model)})
    >>> features["last.mean"], features["6.cls"], features["labels"]

Features have names. For a transformers encoder: `<layer>.<pooling>`, with the number of a layer (0 is the embedding)
or `last` (after the final norm, if there is one), and `cls`, `mean` (all tokens), `patch_mean` or `pooler` (the
model's own); `patches` are dense features, a vector for every patch. For a diffusion model: `<module>@<noise level>`.
For raw pixels, as a baseline: `pixels`.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from torch.nn import functional as F

from ..command_line import count_loader_workers
from ..data.datasets import EvaluationDataset
from ..data.keyed_random import sample_generator
from ..data.shards import Encoder, read_shards, write_shards
from ..errors import UserError
from ..models.modeling_decayed_vit_mae import pool_tokens


NOISE_LEVELS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5)  # default for features of diffusion models
POOLINGS = ("cls", "mean", "patch_mean", "pooler", "patches")
PIXELS_SIZE = 32  # height and width of raw pixels as features; larger images are averaged down


@dataclass(frozen=True)
class Extraction:
    """How features are extracted, and where they are cached.

    Args:
        folder (`Path`): Cache of feature shards.
        num_workers (`int`, *optional*):
            Processes that decode images, by default one for every core, 16 at most; none on a CPU, whose cores the
            model needs.
        on_bad_image (`str`): `stop` or `skip`, for an image that cannot be decoded.
    """

    folder: Path = Path("outputs/features")
    batch_size: int = 64
    num_workers: int | None = None
    on_bad_image: str = "stop"

    def extract(
        self, encode: Encoder, images, identity: dict, accelerator: Accelerator, description: str
    ) -> dict[str, torch.Tensor]:
        workers = self.num_workers
        if workers is None:
            workers = count_loader_workers(accelerator) if accelerator.device.type != "cpu" else 0
        return extract_features(
            encode,
            images,
            self.folder,
            identity,
            accelerator,
            self.batch_size,
            num_workers=workers,
            description=description,
        )


def extract_features(encode: Encoder, images: EvaluationDataset, *arguments, **settings) -> dict[str, torch.Tensor]:
    """Features by name, `labels` and pixel `checksums` of all images, in order; all processes call it and get the same.

    Takes the arguments of [`write_shards`].
    """
    return read_shards(write_shards(encode, images, *arguments, **settings))


def with_pixels(encode: Encoder) -> Encoder:
    """An encoder that returns the raw pixels too, averaged down to at most 32 x 32, under the name `pixels`."""

    def encode_with_pixels(pixel_values, indices):
        size = min(PIXELS_SIZE, *pixel_values.shape[2:])
        return {"pixels": F.adaptive_avg_pool2d(pixel_values, size).flatten(1), **encode(pixel_values, indices)}

    return encode_with_pixels


def transformer_encoder(model: torch.nn.Module, names: list[str]) -> Encoder:
    """Encodes with any vision model of transformers; feature maps of convolutional models are averaged."""
    features = [name.rpartition(".") for name in names]
    for name, (layer, _, pooling) in zip(names, features):
        if pooling not in POOLINGS or not (layer == "last" or layer.isdecimal()):
            raise ValueError(
                f"A feature is `<layer>.<pooling>`: a number or 'last', and one of {', '.join(POOLINGS)}; got '{name}'."
            )
    model.eval()
    output_hidden_states = any(layer != "last" for layer, _, _ in features)

    def encode(pixel_values, indices):
        outputs = model(
            pixel_values.to(next(model.parameters()).dtype),
            output_hidden_states=output_hidden_states,
            **unmasked_inputs(model, pixel_values),
        )
        pooled = {}
        for name, (layer, _, pooling) in zip(names, features):
            if layer != "last" and int(layer) >= len(outputs.hidden_states):
                raise ValueError(f"'{name}': the model has layers 0 to {len(outputs.hidden_states) - 1}.")
            if pooling == "pooler":
                pooled[name] = outputs.pooler_output.flatten(1)
            else:
                tokens = outputs.last_hidden_state if layer == "last" else outputs.hidden_states[int(layer)]
                if pooling == "patches":
                    pooled[name] = dense_features(tokens, patch_grid(model.config, pixel_values))
                else:
                    pooled[name] = pool_features(tokens, pooling)
        return pooled

    return encode


def unmasked_inputs(model: torch.nn.Module, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Inputs with which a model sees all patches, in order.

    transformers' ViTMAE masks and shuffles in evaluation too: its ratio is set to 0, and rising noise does not shuffle.
    """
    if getattr(model.config, "model_type", "") != "vit_mae":
        return {}
    model.config.mask_ratio = 0.0
    grid = patch_grid(model.config, pixel_values)
    assert grid is not None
    noise = torch.linspace(0, 1, grid[0] * grid[1], device=pixel_values.device)
    return {"noise": noise.expand(len(pixel_values), -1)}


def diffusion_encoder(
    model: torch.nn.Module,
    scheduler,
    blocks: list[str],
    levels: list[float],
    seed: int = 0,
    pooling: str = "mean",
    **inputs,
) -> Encoder:
    """Encodes with a diffusion model of diffusers: outputs of named modules at noise levels.

    Args:
        blocks (`list[str]`): Names of modules.
        levels (`list[float]`):
            Noise levels from 0 (data) to 1 (noise): a share of the scheduler's timesteps, or, for flow matching, of the
            straight line from data to noise. Levels of the two kinds are not comparable.
        seed (`int`): Seed of the noise, which is keyed by image and level: batches and processes do not change the
            features.
        pooling (`str`): `mean` over all positions, or `patches`: dense features.
        inputs: Passed on to the model; a tensor with one entry is repeated for the batch.

    `pixel_values` must have the range that the model was trained on, usually [-1, 1].
    """
    from diffusers import DDPMScheduler  # here: other encoders do not need diffusers

    model.eval()
    modules = dict(model.named_modules())
    unknown = [block for block in blocks if block not in modules]
    if unknown:
        raise ValueError(f"The model has no module {', '.join(unknown)}; it has {', '.join(list(modules)[1:30])}, ...")
    outside = [level for level in levels if not 0 <= level <= 1]
    if outside:
        raise ValueError(f"Noise levels lie in [0, 1], from data to noise; got {outside[0]}.")
    is_flow = not hasattr(scheduler, "add_noise") or getattr(scheduler.config, "use_flow_sigmas", False)
    num_timesteps = scheduler.config.num_train_timesteps
    # DDPM's `add_noise` with the same noise schedule: solvers' own follows their inference steps, and DPM-Solver's,
    # before `set_timesteps`, the reversed schedule.
    ddpm = None if is_flow else DDPMScheduler.from_config(scheduler.config)

    def add_noise(pixel_values, noise, level):
        """The noisy sample of a level, and the time that the model expects for it."""
        if not is_flow:
            time = torch.tensor([min(round(level * num_timesteps), num_timesteps - 1)], device=pixel_values.device)
            return ddpm.add_noise(pixel_values, noise, time.expand(len(noise))), time
        time_of_level = getattr(model, "time_of_noise_level", lambda level: level * num_timesteps)
        return torch.lerp(pixel_values, noise, level), torch.tensor([time_of_level(level)], device=pixel_values.device)

    num_extra_tokens = getattr(model, "num_extra_tokens", 0)  # tokens of time and class, not of the image

    def pooling_hook(features, name, grid):
        def hook(module, arguments, output):
            output = output[0] if isinstance(output, tuple) else output
            output = getattr(output, "sample", output)
            if pooling == "patches":
                features[name] = dense_features(output, grid)
            else:
                features[name] = pool_features(output[:, num_extra_tokens:] if output.ndim == 3 else output, "mean")

        return hook

    def encode(pixel_values, indices):
        features = {}
        expanded = {name: value.expand(len(indices), *value.shape[1:]) for name, value in inputs.items()}
        grid = patch_grid(model.config, pixel_values) if pooling == "patches" else None
        for level in levels:
            generators = [sample_generator(seed, round(level * 1000), index) for index in indices]
            noise = np.stack([generator.standard_normal(pixel_values.shape[1:]) for generator in generators])
            sample, time = add_noise(pixel_values, torch.from_numpy(noise).to(pixel_values), level)
            handles = [
                modules[block].register_forward_hook(pooling_hook(features, f"{block}@{level:g}", grid))
                for block in blocks
            ]
            try:
                model(sample.to(model.dtype), time.expand(len(indices)), **expanded)
            except TypeError as error:
                raise ValueError(
                    f"{type(model).__name__} cannot be called with a sample and a time: {error}"
                ) from error
            finally:
                for handle in handles:
                    handle.remove()
        return features

    return encode


def pool_features(tokens: torch.Tensor, pooling: str) -> torch.Tensor:
    """One feature per image, from tokens `(batch, number, dim)` or a feature map `(batch, dim, height, width)`."""
    if tokens.ndim == 4:
        if pooling != "mean":
            raise ValueError(f"A convolutional model has no class token: pool by `mean`, not `{pooling}`.")
        return tokens.mean(dim=(2, 3))
    return pool_tokens(tokens, pooling)


def patch_grid(config, pixel_values: torch.Tensor) -> tuple[int, int] | None:
    """Rows and columns of the patches of a batch of images; `None` for a model without patches."""
    patch_size = getattr(config, "patch_size", None)
    if patch_size is None:
        return None
    height, width = (patch_size, patch_size) if isinstance(patch_size, int) else patch_size[-2:]
    rows, columns = pixel_values.shape[-2] // height, pixel_values.shape[-1] // width
    if rows * columns == 0:
        raise ValueError(
            f"Images of {tuple(pixel_values.shape[-2:])} pixels are smaller than a patch of {height} x {width}."
        )
    return rows, columns


def dense_features(tokens: torch.Tensor, grid: tuple[int, int] | None) -> torch.Tensor:
    """Features `(batch, height, width, dim)` from tokens `(batch, number, dim)` or a map `(batch, dim, height, width)`.

    Tokens that are not patches, such as class and registers, come before the patches and are dropped.
    """
    if tokens.ndim == 4:
        return tokens.permute(0, 2, 3, 1)
    if grid is None:
        raise ValueError("The model does not say how large its patches are: its tokens cannot be laid out on a grid.")
    rows, columns = grid
    if tokens.shape[1] < rows * columns:
        raise ValueError(f"{tokens.shape[1]} tokens do not fill the grid of {rows} x {columns} patches.")
    return tokens[:, tokens.shape[1] - rows * columns :].unflatten(1, (rows, columns))


def hash_json(value) -> str:
    """Short hash of a JSON-plain value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def pipeline_network(pipeline) -> torch.nn.Module:
    """The network that generates: what diffusers calls `unet` or `transformer`, or the `generator` of a GAN."""
    for name in ("unet", "transformer", "generator"):
        if hasattr(pipeline, name):
            return getattr(pipeline, name)
    raise UserError(f"{type(pipeline).__name__} has neither a `unet` nor a `transformer`.")
