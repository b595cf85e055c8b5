"""Sampling from nested diffusion models: from a semantic vector down to the image, one level after the other.

The highest level samples a small latent; every level below samples a larger one, given all those above; level 1 is the image
or the latent of a VAE (Zhang's dissertation, chapter 5). Whoever fixes the upper latents and samples the lower ones again
gets images with the same content and other details.

    >>> pipeline = DiffusionPipeline.from_pretrained("path/or/repository", trust_remote_code=True)  # on the Hub, pin `revision`
    >>> output = pipeline(num_images=8, guidance_weights=[1.5, 1.3])
    >>> pipeline(fixed_latents={2: output.latents[2]}).images  # the same content, other details
    >>> pipeline.vary(image, from_level=2).images

This file travels alone to the Hub, so it imports no sibling; shared code is copied under `Copied from` headers.
"""

import inspect
import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import PIL.Image
import PIL.ImageOps
import torch
from diffusers import DiffusionPipeline
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils import BaseOutput
from diffusers.utils.torch_utils import randn_tensor
from huggingface_hub import HfApi


__all__ = ["NestedDiffusionPipeline"]

MAX_LEVELS = 6  # diffusers takes components by name, so there is a fixed number of names
GUIDED_GAMMA = 0.3  # the dissertation's with guidance; without guidance its conditions have no noise


@dataclass
class NestedDiffusionPipelineOutput(BaseOutput):
    """
    images (`list[PIL.Image.Image]`, `np.ndarray` or `torch.Tensor`): The images.
    latents (`dict[int, torch.Tensor]`): Latents `(number, channels, height, width)` of every level; level 1 is what is decoded.
    """

    images: list[PIL.Image.Image] | np.ndarray | torch.Tensor
    latents: dict[int, torch.Tensor]


class NestedDiffusionPipeline(DiffusionPipeline):
    r"""
    Images from a chain of diffusion models, unconditional or by class.

    Args:
        scheduler (`SchedulerMixin`): Any scheduler for the networks' prediction; it serves all levels.
        level_1, level_2, ... (`NestedUViT2DModel`): The networks. A chain that is not trained down to level 1 gives latents;
            the latents of a level without a network have to be passed as `fixed_latents`.
        vae (`AutoencoderKL`, *optional*): For a first level of VAE latents. Without it level 1 samples pixels.
        latent_encoder (`HierarchicalLatentEncoder`, *optional*): Gives the latents of an image, for `vary` and `interpolate`.
        id2label (`dict`, *optional*): Class names by class index.
        prediction_type (`str`, defaults to `"epsilon"`): What the networks were trained to predict, in schedulers' terms.
        latent_scale, latent_shift (`float`, *optional*): Latents are `(encoded - shift) * scale`. Default to the VAE's
            own values.
        null_condition (`bool`, defaults to `True`): Whether the networks were also trained without class and latents above,
            which guidance, level 1 alone and samples of any class need.
    """

    model_cpu_offload_seq = "latent_encoder->level_6->level_5->level_4->level_3->level_2->level_1->vae"
    _optional_components = [*(f"level_{number}" for number in range(1, MAX_LEVELS + 1)), "vae", "latent_encoder"]
    _callback_tensor_inputs = ["latents"]

    def __init__(
        self,
        scheduler,
        level_1=None,
        level_2=None,
        level_3=None,
        level_4=None,
        level_5=None,
        level_6=None,
        vae=None,
        latent_encoder=None,
        id2label: dict[str, str] | None = None,
        prediction_type: str = "epsilon",
        latent_scale: float | None = None,
        latent_shift: float | None = None,
        null_condition: bool = True,
    ):
        super().__init__()
        networks = (level_1, level_2, level_3, level_4, level_5, level_6)
        self.register_modules(
            scheduler=scheduler,
            **{f"level_{number}": network for number, network in enumerate(networks, 1)},
            vae=vae,
            latent_encoder=latent_encoder,
        )
        if id2label is not None:
            id2label = {str(index): name for index, name in id2label.items()}  # keys are strings in JSON
        self.register_to_config(
            id2label=id2label,
            prediction_type=prediction_type,
            latent_scale=latent_scale,
            latent_shift=latent_shift,
            null_condition=null_condition,
        )
        self.image_processor = VaeImageProcessor()
        self._current_level: int | None = None
        self._current_timestep: torch.Tensor | None = None
        self.check_hierarchy()

    @property
    def networks(self) -> dict[int, torch.nn.Module]:
        """The networks by level, the lowest first; levels without one are left out."""
        components = {number: getattr(self, f"level_{number}") for number in range(1, MAX_LEVELS + 1)}
        return {number: network for number, network in components.items() if network is not None}

    @property
    def unet(self) -> torch.nn.Module:
        """The network of the lowest level, under the name that tools for diffusion pipelines look for."""
        return next(iter(self.networks.values()))

    @property
    def num_levels(self) -> int:
        config = self.unet.config
        return config.level + len(config.condition_levels)

    @property
    def current_level(self) -> int | None:
        """The level that is being sampled, for callbacks."""
        return self._current_level

    @property
    def current_timestep(self) -> torch.Tensor | None:
        """The timestep of the sampling step under way; attention caches read it."""
        return self._current_timestep

    @property
    def label2id(self) -> dict[str, int]:
        return {name: int(index) for index, name in (self.config.id2label or {}).items()}

    def check_hierarchy(self) -> None:
        """Raises for levels that do not fit each other, or that were trained on latents of different encoders."""
        if not self.networks:
            raise ValueError("There are no networks: pass at least one of `level_1`, `level_2`, ...")
        sizes = self.latent_sizes()
        encoder = self.latent_encoder
        fingerprints = {"latent_encoder": encoder.config.fingerprint} if encoder is not None else {}
        for number, network in self.networks.items():
            config = network.config
            if config.level != number:
                raise ValueError(f"`level_{number}` was trained as level {config.level}.")
            if not isinstance(config.sample_size, int):
                raise ValueError(f"The latents of `level_{number}` must be square, got {tuple(config.sample_size)}.")
            size = (config.sample_size, config.in_channels)
            expected = [sizes[upper] for upper in range(self.num_levels, number, -1)]
            if size != sizes[number] or [tuple(entry[:2]) for entry in config.condition_levels] != expected:
                raise ValueError(
                    f"`level_{number}` belongs to another hierarchy than `level_{self.unet.config.level}`: it is trained for "
                    f"{list(config.condition_levels)} above {size}, and the chain has {expected} above {sizes[number]}."
                )
            if config.num_classes != self.unet.config.num_classes:
                raise ValueError(
                    f"`level_{number}` has {config.num_classes} classes, and `level_{self.unet.config.level}` "
                    f"{self.unet.config.num_classes}."
                )
            if config.latent_fingerprint is not None:
                fingerprints[f"level_{number}"] = config.latent_fingerprint
        if len(set(fingerprints.values())) > 1:
            listing = ", ".join(f"{name} {fingerprint}" for name, fingerprint in fingerprints.items())
            raise ValueError(f"The components were made for the latents of different encoders ({listing}).")

    def latent_sizes(self) -> dict[int, tuple[int, int]]:
        """Height (and width) and channels of the latents of all levels that the lowest network knows."""
        config = self.unet.config
        sizes = {config.level: (config.sample_size, config.in_channels)}
        for distance, (size, channels, _) in enumerate(reversed(config.condition_levels), 1):
            sizes[config.level + distance] = (size, channels)
        return sizes

    @torch.no_grad()
    def __call__(
        self,
        num_images: int = 1,
        class_labels: int | str | list[int | str] | None = None,
        num_inference_steps: int = 50,
        guidance_weights: float | Sequence[float] = 1.0,
        gamma: float | None = None,
        gamma_scales: str = "variance",
        fixed_latents: dict[int, torch.Tensor] | None = None,
        start_level: int | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callable | None = None,
        callback_on_step_end_tensor_inputs: tuple[str, ...] = ("latents",),
    ) -> NestedDiffusionPipelineOutput | tuple:
        r"""
        Args:
            num_images (`int`, defaults to 1): Number of images; with `class_labels`, of each of them.
            class_labels (`int`, `str` or a list of them, *optional*):
                Class indices or names. Without them a conditional chain samples the null class.
            num_inference_steps (`int`, defaults to 50): Steps of the scheduler at every level.
            guidance_weights (`float` or a list, defaults to 1.0):
                Classifier-free guidance in diffusers' convention, one weight for all levels or one per level, the highest
                level first: `empty + weight * (conditional - empty)`, where the empty prediction knows neither the class nor
                the latents above. 1 is no guidance. The dissertation counts from 0: its 0.5 is 1.5 here. The highest level
                of a chain without classes has nothing to be guided by, and ignores its weight.
            gamma (`float`, *optional*):
                The latents above get the noise of training, with its variance multiplied by `(t / T) ** gamma` at time t of
                T. 0 is the noise of training at all steps, infinity is none. By default 0.3 with guidance and infinity
                without, as in the dissertation.
            gamma_scales (`str`, defaults to `"variance"`):
                Whether the factor `(t / T) ** gamma` is that of the `variance` (the dissertation's text) or of the `std`
                (the caption of its table).
            fixed_latents (`dict[int, torch.Tensor]`, *optional*):
                Clean latents `(number or 1, channels, height, width)` of the highest levels, which are not sampled.
            start_level (`int`, *optional*):
                Level at which sampling starts; all levels above must be in `fixed_latents`. By default the highest that is
                not. `start_level=1` without `fixed_latents` samples level 1 alone, with the empty condition.
            generator (`torch.Generator` or a list of them, *optional*): One for all images, or one per image.
            output_type (`str`, defaults to `"pil"`): `pil`, `np`, `pt`, or `latent` for the lowest level's own sample.
            callback_on_step_end (`Callable`, *optional*):
                Called as `callback(pipeline, step, timestep, tensors)` after every step of every level, which is
                `pipeline.current_level`; the tensors that it returns replace the pipeline's.
        """
        self.check_scheduler()
        if self.level_1 is None and output_type != "latent":
            raise ValueError("There is no `level_1`, so the chain ends above the image: pass `output_type='latent'`.")
        self.check_output(output_type, num_inference_steps)
        self.check_counts(num_images, callback_on_step_end_tensor_inputs)
        weights = self.check_guidance(guidance_weights, gamma, gamma_scales)
        labels = None if class_labels is None else self.labels_of(class_labels, num_images)
        latents = self.check_fixed_latents(fixed_latents or {}, start_level)
        number = self.count_images(num_images, labels, latents)
        if isinstance(generator, list) and len(generator) != number:
            raise ValueError(
                f"There must be a generator for each of {number} images, or one for all, got {len(generator)}."
            )
        device = self._execution_device
        latents = {
            level: tensor.to(device, torch.float32).expand(number, -1, -1, -1) for level, tensor in latents.items()
        }
        class_labels = None if labels is None else torch.tensor(labels, device=device).expand(number)
        guided = any(weight != 1.0 for weight in weights)
        gamma = (GUIDED_GAMMA if guided else math.inf) if gamma is None else gamma

        first = min(latents, default=self.num_levels + 1) - 1 if start_level is None else start_level
        self.check_null_condition(guided, labels is None, alone=not latents and first < self.num_levels)
        for level in range(first, self.unet.config.level - 1, -1):
            self._current_level = level
            # The highest level has nothing above it; for level 1 alone, what is above it stays empty.
            above = range(self.num_levels, level, -1)
            conditions = [latents[upper] for upper in above if upper in latents] or None
            latents[level] = self.sample_level(
                level,
                number,
                class_labels,
                conditions,
                weights[self.num_levels - level],
                num_inference_steps,
                lambda timestep: self.noise_share(timestep, gamma, gamma_scales),
                generator,
                callback_on_step_end,
                callback_on_step_end_tensor_inputs,
            )
        self._current_level = self._current_timestep = None
        lowest = latents[self.unet.config.level]
        check_finite(lowest, "samples", "a lower weight of guidance, another scheduler, or float32")
        images = lowest if output_type == "latent" else self.decode_latents(lowest, output_type)
        self.maybe_free_model_hooks()
        latents = dict(sorted(latents.items(), reverse=True))
        return NestedDiffusionPipelineOutput(images=images, latents=latents) if return_dict else (images, latents)

    def sample_level(
        self,
        level: int,
        number: int,
        class_labels: torch.Tensor | None,
        conditions: list[torch.Tensor] | None,
        guidance_weight: float,
        num_inference_steps: int,
        noise_share: Callable[[float], float],
        generator: torch.Generator | list[torch.Generator] | None,
        callback_on_step_end: Callable | None,
        callback_on_step_end_tensor_inputs: tuple[str, ...],
    ) -> torch.Tensor:
        """Clean latents `(number, channels, size, size)` of one level, given those above."""
        network, device = self.networks[level], self._execution_device
        size, channels = self.latent_sizes()[level]
        # In half precision the small steps of a long schedule would be rounded away.
        settings = {"generator": generator, "device": device, "dtype": torch.float32}
        self.scheduler.set_timesteps(num_inference_steps, device=device)
        latents = randn_tensor((number, channels, size, size), **settings) * self.scheduler.init_noise_sigma
        step_takes_generator = "generator" in inspect.signature(self.scheduler.step).parameters
        step_arguments = {"generator": generator} if step_takes_generator else {}
        guided = guidance_weight != 1.0 and (class_labels is not None or conditions is not None)
        null_labels = torch.full((number,), network.config.num_classes, device=device)

        for step, timestep in enumerate(self.progress_bar(self.scheduler.timesteps)):
            self._current_timestep = timestep
            inputs = self.scheduler.scale_model_input(latents, timestep)
            arguments = {}
            if class_labels is not None:
                arguments["class_labels"] = class_labels
            if conditions is not None:
                share = noise_share(float(timestep))
                arguments["conditions"] = [
                    (clean if sigma * share == 0.0 else clean + sigma * share * randn_tensor(clean.shape, **settings))
                    for clean, sigma in zip(conditions, network.config.condition_sigmas)
                ]
            if guided:
                # Conditional and empty predictions in one batch; the empty one has neither class nor latents above.
                inputs = torch.cat([inputs, inputs])
                if class_labels is not None:
                    arguments["class_labels"] = torch.cat([class_labels, null_labels])
                if conditions is not None:
                    arguments["conditions"] = [torch.cat([noisy, noisy]) for noisy in arguments["conditions"]]
                    arguments["drop_conditions"] = torch.arange(2 * number, device=device) >= number
            if conditions is not None:
                arguments["conditions"] = [noisy.to(network.dtype) for noisy in arguments["conditions"]]
            with cache_context(network, f"level_{level}"):
                prediction = network(inputs.to(network.dtype), timestep, **arguments).sample.float()
            if guided:
                conditional, empty = prediction.chunk(2)
                prediction = torch.lerp(empty, conditional, guidance_weight)
            latents = self.scheduler.step(prediction, timestep, latents, **step_arguments).prev_sample
            if callback_on_step_end is not None:
                tensors = {name: {"latents": latents}[name] for name in callback_on_step_end_tensor_inputs}
                latents = callback_on_step_end(self, step, timestep, tensors).pop("latents", latents)
        return latents

    def noise_share(self, timestep: float, gamma: float, gamma_scales: str) -> float:
        """Standard deviation of the noise on the latents above, as a share of that in training."""
        if math.isinf(gamma):
            return 0.0
        # Timesteps are counted from 0, the dissertation's t from 1.
        factor = ((timestep + 1) / self.scheduler.config.num_train_timesteps) ** gamma
        return math.sqrt(factor) if gamma_scales == "variance" else factor

    def vary(
        self,
        image: PIL.Image.Image | list[PIL.Image.Image] | torch.Tensor,
        from_level: int = 2,
        num_images: int = 4,
        **arguments,
    ) -> NestedDiffusionPipelineOutput | tuple:
        r"""
        Images that have the latents of `image` from `from_level` upwards, and are sampled below.

        Args:
            image (`PIL.Image.Image`, a list of them, or a tensor `(number, channels, height, width)` in [0, 1]).
            from_level (`int`, defaults to 2): Lowest level that is taken from the image: a high one leaves more open.
            num_images (`int`, defaults to 4): Variations of every image, which follow one another.
            arguments: Of the pipeline's call.
        """
        fixed = self.encode_image(image, from_level)
        fixed = {level: latents.repeat_interleave(num_images, dim=0) for level, latents in fixed.items()}
        return self(fixed_latents=fixed, **arguments)

    def interpolate(
        self,
        image_a: PIL.Image.Image | torch.Tensor,
        image_b: PIL.Image.Image | torch.Tensor,
        level: int | None = None,
        num_images: int = 8,
        generator: torch.Generator | None = None,
        **arguments,
    ) -> NestedDiffusionPipelineOutput | tuple:
        r"""
        Images between two images: their latents, from `level` (by default the highest) upwards, are interpolated on the
        sphere; the levels below are sampled, from the same noise for all images.

        Args:
            num_images (`int`, defaults to 8): Steps of the interpolation, with both ends.
            generator (`torch.Generator`, *optional*): For the seed of the noise.
            arguments: Of the pipeline's call.
        """
        level = self.num_levels if level is None else level
        if num_images < 2:
            raise ValueError(f"`num_images` must be at least 2, the two ends, got {num_images}.")
        ends = [self.encode_image(image, level) for image in (image_a, image_b)]
        between = {number: spherical_interpolation(ends[0][number], ends[1][number], num_images) for number in ends[0]}
        seed = int(torch.randint(2**62, (1,), generator=generator))
        generators = [torch.Generator().manual_seed(seed) for _ in range(num_images)]
        return self(fixed_latents=between, generator=generators, **arguments)

    def encode_image(
        self, image: PIL.Image.Image | list[PIL.Image.Image] | torch.Tensor, from_level: int = 2
    ) -> dict[int, torch.Tensor]:
        """Latents of images from `from_level` upwards; PIL images are cropped to a square and resized."""
        if self.latent_encoder is None:
            raise ValueError("The pipeline has no `latent_encoder`, which gives the latents of an image.")
        if not 2 <= from_level <= self.num_levels:
            raise ValueError(f"A level to keep must lie in [2, {self.num_levels}], got {from_level}.")
        config = self.latent_encoder.config
        if not isinstance(image, torch.Tensor):
            images = image if isinstance(image, list) else [image]
            modes, size = {1: "L", 3: "RGB"}, (config.image_size, config.image_size)
            images = [plain_image(one).convert(modes[config.num_channels]) for one in images]
            images = [PIL.ImageOps.fit(one, size, PIL.Image.BICUBIC) for one in images]
            pixels = np.stack([np.asarray(one).reshape(*size, config.num_channels) for one in images])
            image = torch.from_numpy(pixels).movedim(-1, 1).float() / 255
        # By `forward`, so that offloading brings the encoder to its device.
        latents = self.latent_encoder(image.to(self._execution_device)).latents
        return {level: tensor.float() for level, tensor in latents.items() if level >= from_level}

    def check_fixed_latents(
        self, fixed_latents: dict[int, torch.Tensor], start_level: int | None
    ) -> dict[int, torch.Tensor]:
        """The fixed latents; raises for a wrong shape, and for levels that would be sampled without their condition."""
        top, lowest, sizes = self.num_levels, self.unet.config.level, self.latent_sizes()
        for level, latents in fixed_latents.items():
            if level not in sizes:
                raise ValueError(f"`fixed_latents` must be of levels {sorted(sizes)}, got {level!r}.")
            size, channels = sizes[level]
            shape = tuple(latents.shape)
            if len(shape) != 4 or shape[1:] != (channels, size, size):
                raise ValueError(
                    f"`fixed_latents` of level {level} must have shape (number, {channels}, {size}, {size}), got {shape}."
                )
        gaps = [level for level in range(min(fixed_latents, default=top + 1), top + 1) if level not in fixed_latents]
        if gaps:
            raise ValueError(
                f"`fixed_latents` of level {min(fixed_latents)} need those of level {gaps[-1]} too: sampled, they would be of "
                "another image."
            )
        first = min(fixed_latents, default=top + 1) - 1 if start_level is None else start_level
        if not lowest - 1 <= first <= top or (start_level is not None and first < lowest):
            raise ValueError(f"`start_level` must lie in [{lowest}, {top}], got {start_level}.")
        above = set(range(first + 1, top + 1))
        alone = first == 1 and not fixed_latents
        if not above <= fixed_latents.keys() and not alone:
            raise ValueError(
                f"`start_level={first}` needs `fixed_latents` of levels {sorted(above)}, got {sorted(fixed_latents)}."
            )
        missing = [level for level in range(lowest, first + 1) if level not in self.networks]
        if missing:
            raise ValueError(
                f"There is no `level_{missing[-1]}`, so its latents cannot be sampled: pass them as `fixed_latents`."
            )
        return {level: fixed_latents[level] for level in above if level in fixed_latents}

    def count_images(self, num_images: int, labels: list[int] | None, latents: dict[int, torch.Tensor]) -> int:
        """Number of images; raises if labels and fixed latents are not as many."""
        number = num_images if labels is None else len(labels)
        rows = {len(tensor) for tensor in latents.values()} - {1}
        if rows and number == 1:
            number = max(rows)
        if rows - {number}:
            raise ValueError(
                f"`fixed_latents` must have {number} rows, as many as images, or one, got {sorted(rows)}."
            )
        return number

    def check_guidance(
        self, guidance_weights: float | Sequence[float], gamma: float | None, gamma_scales: str
    ) -> list[float]:
        """Weights of all levels, the highest first; raises for wrong ones, and for a wrong `gamma`."""
        levels = self.num_levels
        weights = [guidance_weights] * levels if isinstance(guidance_weights, (int, float)) else list(guidance_weights)
        if len(weights) != levels:
            raise ValueError(
                f"`guidance_weights` must be one number or one for each of {levels} levels, the highest first, got "
                f"{len(weights)}."
            )
        for weight in weights:
            if not 1.0 <= weight < math.inf:
                raise ValueError(
                    f"`guidance_weights` must be at least 1, which is no guidance, got {weight}; the dissertation "
                    "counts from 0: its 0.5 is 1.5 here."
                )
        if gamma is not None and not gamma >= 0.0:
            raise ValueError(f"`gamma` must be at least 0, got {gamma}.")
        if gamma_scales not in ("variance", "std"):
            raise ValueError(f"`gamma_scales` must be variance or std, got {gamma_scales!r}.")
        return [float(weight) for weight in weights]

    def check_null_condition(self, guided: bool, without_class: bool, alone: bool) -> None:
        if self.config.null_condition:
            return
        if guided or alone or (without_class and self.unet.config.num_classes > 0):
            raise ValueError(
                "The networks were not trained without class and latents above, which guidance, level 1 alone and samples of "
                "any class need: pass `class_labels`, and `guidance_weights=1`."
            )

    def check_counts(self, num_images: int, callback_tensor_inputs: tuple[str, ...]) -> None:
        if isinstance(num_images, bool) or not isinstance(num_images, int) or num_images < 1:
            raise ValueError(f"`num_images` must be a whole number of at least 1, got {num_images!r}.")
        unknown = set(callback_tensor_inputs) - set(self._callback_tensor_inputs)
        if unknown:
            raise ValueError(f"`callback_on_step_end_tensor_inputs` can be 'latents' only, got {sorted(unknown)}.")

    # Copied from hf_decayed.pipelines.pipeline_decayed_uvit.DecayedUViTPipeline.check_scheduler
    def check_scheduler(self) -> None:
        """Raises for a scheduler of another prediction type or of other noise levels than the network's."""
        prediction_type = getattr(self.scheduler.config, "prediction_type", None)
        if prediction_type != self.config.prediction_type:
            raise ValueError(
                f"The network predicts '{self.config.prediction_type}', and {type(self.scheduler).__name__} is set up for "
                f"{prediction_type!r}: build the scheduler with `prediction_type='{self.config.prediction_type}'`."
            )
        if not hasattr(self.scheduler, "alphas_cumprod") or getattr(self.scheduler.config, "use_flow_sigmas", False):
            raise ValueError(
                f"{type(self.scheduler).__name__} has other noise levels than the network was trained on: use one that has "
                "betas, such as DPMSolverMultistepScheduler, and no `use_flow_sigmas`."
            )

    # Copied from hf_decayed.pipelines.pipeline_decayed_uvit.DecayedUViTPipeline.check_output
    def check_output(self, output_type: str, num_inference_steps: int) -> None:
        """Raises for an output that the components cannot produce, before anything is computed."""
        if num_inference_steps < 1:
            raise ValueError(f"`num_inference_steps` must be at least 1, got {num_inference_steps}.")
        if output_type not in ("pil", "np", "pt", "latent"):
            raise ValueError(f"`output_type` must be pil, np, pt or latent, got {output_type!r}.")
        channels = self.unet.config.in_channels
        latent_channels = channels if self.vae is None else getattr(self.vae.config, "latent_channels", channels)
        if latent_channels != channels and output_type != "latent":
            raise ValueError(
                f"The network has {channels} channels, and the VAE takes latents of {latent_channels}: use another VAE."
            )
        samples_are_latents = self.config.latent_scale is not None or channels not in (1, 3)
        if samples_are_latents and self.vae is None and output_type != "latent":
            raise ValueError(
                "This is a network of latents, and the pipeline has no VAE to decode them: load it with `vae=`, or pass "
                "`output_type='latent'`."
            )

    # Copied from hf_decayed.pipelines.pipeline_decayed_uvit.DecayedUViTPipeline.labels_of
    def labels_of(self, class_labels, num_images_per_label: int) -> list[int] | None:
        """Class indices, one per image; `None` without `class_labels`."""
        if class_labels is None:
            if num_images_per_label != 1:
                raise ValueError(
                    "`num_images_per_label` needs `class_labels`; without them `batch_size` is the number of images."
                )
            return None
        num_classes = self.unet.config.num_classes
        if num_classes == 0:
            raise ValueError("`class_labels` were passed to a network without classes.")
        labels = flatten_labels(class_labels)
        if not labels:
            raise ValueError("`class_labels` is empty.")
        indices = [self.label2id.get(label, label) if isinstance(label, str) else label for label in labels]
        for index in indices:
            if isinstance(index, str):
                known = ", ".join(list(self.label2id)[:10])
                raise ValueError(f"There is no class '{index}'; there are {known or 'no names'}, ...")
            if index != int(index):
                raise ValueError(f"`class_labels` must be names or whole numbers, got {index}.")
            if not 0 <= index < num_classes:
                raise ValueError(f"`class_labels` must lie in [0, {num_classes}), got {index}.")
        return [int(index) for index in indices for _ in range(num_images_per_label)]

    # Copied from hf_decayed.pipelines.pipeline_decayed_uvit.DecayedUViTPipeline.decode_latents
    def decode_latents(self, latents: torch.Tensor, output_type: str):
        """Samples as images, through the VAE if there is one."""
        if self.vae is not None:
            # The pipeline's own scale and shift take precedence over the VAE's.
            scale, shift = self.config.latent_scale, self.config.latent_shift
            scale = getattr(self.vae.config, "scaling_factor", None) or 1.0 if scale is None else scale
            shift = getattr(self.vae.config, "shift_factor", None) or 0.0 if shift is None else shift
            latents = self.vae.decode((latents / scale + shift).to(self.vae.dtype)).sample
            check_finite(latents, "decoded images", "a VAE in float32")
        return self.image_processor.postprocess(latents.float(), output_type=output_type)

    # Copied from hf_decayed.pipelines.pipeline_decayed_uvit.DecayedUViTPipeline._dict_from_json_file
    @classmethod
    def _dict_from_json_file(cls, json_file):
        """The index of a folder. The package's class needs no `trust_remote_code`: it loads components by the package."""
        index = super()._dict_from_json_file(json_file)
        package, is_installed, _ = cls.__module__.rpartition(".pipelines.")
        if not is_installed:  # downloaded with the weights
            return index
        for name, value in index.items():
            module, class_name = value if isinstance(value, list) and len(value) == 2 else (None, None)
            if name == "_class_name" and class_name == cls.__name__:
                index[name] = class_name
            elif isinstance(module, str) and module.isidentifier():
                paths = (f"{package}.{room}.{module}" for room in ("models", "pipelines"))
                if path := next(filter(find_spec, paths), None):
                    import_module(path)  # diffusers loads components only from modules that are imported
                    index[name] = [path, class_name]
        return index

    # Copied from hf_decayed.pipelines.pipeline_decayed_uvit.DecayedUViTPipeline.extract_init_dict
    @classmethod
    def extract_init_dict(cls, config_dict, **kwargs):
        # `auto_map` is for diffusers' AutoModel; the pipeline itself would warn of it.
        config_dict = {name: value for name, value in config_dict.items() if name != "auto_map"}
        return super().extract_init_dict(config_dict, **kwargs)

    # Copied from hf_decayed.pipelines.pipeline_decayed_uvit.DecayedUViTPipeline.save_pretrained with unet->level_1
    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs) -> None:
        """Saves the components and the code that loads them: the folder is a complete Hub repository."""
        push_to_hub = kwargs.pop("push_to_hub", False)
        hub_arguments = {
            name: kwargs.pop(name) for name in ("repo_id", "private", "token", "commit_message") if name in kwargs
        }
        super().save_pretrained(save_directory, **kwargs)
        folder = Path(save_directory)
        index = json.loads((folder / "model_index.json").read_text())
        index["_class_name"] = [copy_source(type(self), folder), type(self).__name__]
        auto_map = {}
        for name, component in self.components.items():
            component = getattr(component, "_orig_mod", component)  # a compiled module wraps the original
            if component is not None and not type(component).__module__.startswith("diffusers."):
                module = copy_source(type(component), folder / name)
                index[name] = [module, type(component).__name__]
                if name == "level_1":
                    auto_map = {"AutoModel": f"{module}.{type(component).__name__}"}
                    config_file = folder / name / "config.json"
                    config = {**json.loads(config_file.read_text()), "auto_map": auto_map}
                    config_file.write_text(json.dumps(config, indent=2) + "\n")
        # In a folder with an index, diffusers' AutoModel looks for the `auto_map` of a component there.
        (folder / "model_index.json").write_text(json.dumps({**index, "auto_map": auto_map}, indent=2) + "\n")
        if push_to_hub:  # only now is the folder complete
            message = hub_arguments.pop("commit_message", None)
            repo_id = hub_arguments.pop("repo_id", folder.name)
            repo_id = HfApi().create_repo(repo_id, exist_ok=True, **hub_arguments).repo_id
            HfApi(token=hub_arguments.get("token")).upload_folder(
                repo_id=repo_id, folder_path=folder, commit_message=message
            )


def spherical_interpolation(start: torch.Tensor, end: torch.Tensor, steps: int) -> torch.Tensor:
    """`(steps, ...)` from one latent `(1, ...)` to another, on the sphere, which keeps the norm."""
    fractions = torch.linspace(0, 1, steps, device=start.device).view(-1, *[1] * (start.ndim - 1))
    angle = torch.acos(torch.cosine_similarity(start.flatten(), end.flatten(), dim=0).clamp(-1, 1))
    if torch.sin(angle) < 1e-4:  # the two are parallel
        return torch.lerp(start, end, fractions)
    return (torch.sin((1 - fractions) * angle) * start + torch.sin(fractions * angle) * end) / torch.sin(angle)


# Copied from hf_decayed.pipelines.pipeline_relighting.plain_image
def plain_image(image: PIL.Image.Image) -> PIL.Image.Image:
    """An image as training reads it: upright, and on white where it is transparent."""
    image = PIL.ImageOps.exif_transpose(image)
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = PIL.Image.alpha_composite(PIL.Image.new("RGBA", image.size, "white"), image)
    return image


# Copied from hf_decayed.pipelines.pipeline_decayed_uvit.check_finite
def check_finite(tensor: torch.Tensor, name: str, advice: str) -> None:
    if not torch.isfinite(tensor).all():
        raise ValueError(f"The {name} hold NaN or infinity, so there are no images: try {advice}.")


# Copied from hf_decayed.pipelines.pipeline_decayed_uvit.flatten_labels
def flatten_labels(class_labels) -> list:
    """Names and numbers of a label, of lists and tensors of any shape, in order."""
    if hasattr(class_labels, "tolist"):  # tensors, arrays, and their scalars
        class_labels = class_labels.tolist()
    if isinstance(class_labels, (int, float, str)):
        return [class_labels]
    return [label for part in class_labels for label in flatten_labels(part)]


# Copied from hf_decayed.pipelines.pipeline_decayed_uvit.cache_context
def cache_context(network, name: str):
    """The context in which diffusers' caches store activations under a name; for networks without caches, none."""
    return network.cache_context(name) if hasattr(network, "cache_context") else nullcontext()


# Copied from hf_decayed.pipelines.pipeline_decayed_uvit.copy_source
def copy_source(cls: type, folder: Path) -> str:
    """Copies the file that defines a class into a folder and returns its module name."""
    source = Path(inspect.getfile(cls))
    if source.parent.resolve() != folder.resolve():
        shutil.copy(source, folder / source.name)
    return source.stem
