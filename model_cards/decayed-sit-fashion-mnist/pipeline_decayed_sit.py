"""Sampling from a SiT with decayed shortcuts: noise -> SiT and flow scheduler, step by step -> image, through a VAE if any.

A folder that this pipeline saves holds its code too, and loads where the package it comes from is not installed:

    pipeline = DiffusionPipeline.from_pretrained("path/or/repository", trust_remote_code=True)  # pin `revision` on the Hub
    pipeline(class_labels=["golden retriever", 3], guidance_scale=4.0).images[0]

This file travels alone to the Hub, so it imports nothing of the package it comes from.
"""

import inspect
import json
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from diffusers import DiffusionPipeline, ImagePipelineOutput
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils.torch_utils import randn_tensor
from huggingface_hub import HfApi


class DecayedSiTPipeline(DiffusionPipeline):
    r"""
    Images from a SiT, unconditional or by class.

    Args:
        transformer (`DecayedSiTTransformer2DModel`): The network.
        scheduler (`SchedulerMixin`): Any for flow matching: `FlowMatchEulerDiscreteScheduler(shift=1.0)`, Heun's, a
            DPM-Solver with `prediction_type="flow_prediction", use_flow_sigmas=True`, or `SiTSDEScheduler`, the official
            stochastic sampler.
        vae (`AutoencoderKL`, *optional*): For networks of latents. Without it the network's samples are the images.
        id2label (`dict`, *optional*): Names of the classes by number.
        latent_scale, latent_shift (`float`, *optional*): Latents are `(encoded - shift) * scale`; the VAE's own when not
            given.
        null_class (`bool`, defaults to `True`): Whether the network was trained without a class too, now and then, which
            guidance and samples without a class rest on.
    """

    model_cpu_offload_seq = "transformer->vae"
    _optional_components = ["vae"]
    _callback_tensor_inputs = ["latents"]

    def __init__(
        self,
        transformer,
        scheduler,
        vae=None,
        id2label: dict[str, str] | None = None,
        latent_scale: float | None = None,
        latent_shift: float | None = None,
        null_class: bool = True,
    ):
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler, vae=vae)
        if id2label is not None:
            id2label = {str(number): name for number, name in id2label.items()}  # as JSON will have it
        self.register_to_config(
            id2label=id2label, latent_scale=latent_scale, latent_shift=latent_shift, null_class=null_class
        )
        self.image_processor = VaeImageProcessor()
        self._current_timestep = None

    @property
    def current_timestep(self) -> torch.Tensor | None:
        """While it samples; caches of attention ask for it."""
        return self._current_timestep

    @property
    def label2id(self) -> dict[str, int]:
        return {name: int(number) for number, name in (self.config.id2label or {}).items()}

    @torch.no_grad()
    def __call__(
        self,
        class_labels: int | str | list[int | str] | None = None,
        batch_size: int = 1,
        num_images_per_label: int = 1,
        num_inference_steps: int = 50,
        guidance_scale: float = 1.0,
        guidance_interval: tuple[float, float] = (0.0, 1.0),
        height: int | None = None,
        width: int | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        latents: torch.Tensor | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callable | None = None,
        callback_on_step_end_tensor_inputs: tuple[str, ...] = ("latents",),
    ) -> ImagePipelineOutput | tuple:
        r"""
        Args:
            class_labels (`int`, `str` or a list of them, *optional*):
                Numbers or names of classes, one image each. A network with classes draws from all of them when there
                are none.
            batch_size (`int`, defaults to 1): Images, where there are no `class_labels`.
            num_images_per_label (`int`, defaults to 1): Images of each of `class_labels`.
            num_inference_steps (`int`, defaults to 50): Steps of the scheduler.
            guidance_scale (`float`, defaults to 1.0):
                Classifier-free guidance as diffusers counts it, `unconditional + scale * (conditional - unconditional)`:
                1 is none. SiT's own code counts alike, and guides only the first three of four channels; here it is all.
            guidance_interval (`tuple(float, float)`, defaults to `(0, 1)`):
                Guide only at noise levels in this part of the schedule, 0 being data and 1 noise; elsewhere the
                network is called once, not twice.
            height, width (`int`, *optional*): Of the network's sample, if not what it was trained on.
            generator (`torch.Generator` or a list of them, *optional*): One for all images, or one for each.
            latents (`torch.Tensor`, *optional*): The noise to start from.
            output_type (`str`, defaults to `"pil"`): `pil`, `np`, `pt`, or `latent` for the network's own sample.
            callback_on_step_end (`Callable`, *optional*):
                Called as `callback(pipeline, step, timestep, tensors)` after every step; what it returns replaces them.
        """
        device, dtype, channels = self._execution_device, self.transformer.dtype, self.transformer.config.in_channels
        self.check_scheduler()
        self.check_output(output_type, num_inference_steps)
        for name, count in (("batch_size", batch_size), ("num_images_per_label", num_images_per_label)):
            if count < 1:
                raise ValueError(f"`{name}` must be at least 1, got {count}.")
        labels = self.labels_of(class_labels, num_images_per_label)
        guided = guidance_scale != 1.0
        if not self.config.null_class and self.transformer.config.num_classes > 0 and (guided or labels is None):
            raise ValueError(
                "This network was trained with a class for every image, and knows nothing without one: give `class_labels`, "
                "and `guidance_scale=1`."
            )
        if guided and labels is None:
            raise ValueError(
                f"`guidance_scale={guidance_scale}` needs `class_labels`, and a network that has classes: without them "
                "there is nothing to guide to."
            )
        if guidance_interval[0] > guidance_interval[1]:
            raise ValueError(f"`guidance_interval` goes from a lower to a higher share, got {guidance_interval}.")
        unknown = set(callback_on_step_end_tensor_inputs) - set(self._callback_tensor_inputs)
        if unknown:
            raise ValueError(f"`callback_on_step_end_tensor_inputs` can be 'latents' only, got {sorted(unknown)}.")
        number = batch_size if labels is None else len(labels)
        if batch_size not in (1, number):
            raise ValueError(
                f"`batch_size={batch_size}` is for images without classes, and there are {number} `class_labels`: take "
                "`num_images_per_label` for more of each."
            )
        if isinstance(generator, list) and len(generator) != number:
            raise ValueError(
                f"There must be a generator for each of {number} images, or one for all, got {len(generator)}."
            )
        size = self.transformer.config.sample_size
        size = (size, size) if isinstance(size, int) else size
        shape = (number, channels, height or size[0], width or size[1])
        if latents is None:
            latents = randn_tensor(shape, generator=generator, device=device, dtype=torch.float32)
        elif tuple(latents.shape) != shape:
            raise ValueError(f"`latents` must have shape {shape}, got {tuple(latents.shape)}.")
        set_timesteps(self.scheduler, num_inference_steps, device)
        # In float32 throughout: in half precision the small steps of many would be rounded away.
        latents = latents.to(device, torch.float32) * getattr(self.scheduler, "init_noise_sigma", 1.0)
        conditions = {}
        if labels is not None:
            conditions["class_labels"] = torch.tensor(labels, device=device)
        null_labels = torch.full((number,), self.transformer.config.num_classes, device=device)
        more = {"generator": generator} if "generator" in inspect.signature(self.scheduler.step).parameters else {}
        unit = self.scheduler.config.num_train_timesteps
        low, high = (share * unit for share in guidance_interval)

        for step, timestep in enumerate(self.progress_bar(self.scheduler.timesteps)):
            self._current_timestep = timestep
            inputs, time = latents, 1 - timestep / unit  # SiT's time runs from noise at 0 to data at 1
            if guided and low <= float(timestep) <= high:
                both = {"class_labels": torch.cat([conditions["class_labels"], null_labels])}
                with cache_of(self.transformer, "guided"):  # one of its own: half as many rows come below
                    predicted = self.transformer(torch.cat([inputs, inputs]).to(dtype), time, **both).sample
                conditional, unconditional = predicted.float().chunk(2)
                predicted = torch.lerp(unconditional, conditional, guidance_scale)
            else:
                with cache_of(self.transformer, "unguided"):
                    predicted = self.transformer(inputs.to(dtype), time, **conditions).sample
            # Schedulers have the velocity from data to noise, SiT has it from noise to data.
            latents = self.scheduler.step(-predicted.float(), timestep, latents, **more).prev_sample
            if callback_on_step_end is not None:
                tensors = {name: {"latents": latents}[name] for name in callback_on_step_end_tensor_inputs}
                latents = callback_on_step_end(self, step, timestep, tensors).pop("latents", latents)

        self._current_timestep = None
        check_finite(latents, "samples", "a lower `guidance_scale`, another scheduler, or float32")
        images = latents if output_type == "latent" else self.decoded(latents, output_type)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    def labels_of(self, class_labels, num_images_per_label: int) -> list[int] | None:
        """Class numbers, one for each image; `None` where there are none."""
        if class_labels is None:
            if num_images_per_label != 1:
                raise ValueError(
                    "`num_images_per_label` needs `class_labels`; without them `batch_size` says how many."
                )
            return None
        num_classes = self.transformer.config.num_classes
        if num_classes == 0:
            raise ValueError("`class_labels` were given to a network without classes.")
        if hasattr(class_labels, "tolist"):  # tensors, arrays, and their numbers
            class_labels = class_labels.tolist()
        wanted = [class_labels] if isinstance(class_labels, (int, float, str)) else list(class_labels)
        if not wanted:
            raise ValueError("`class_labels` is empty.")
        numbers = [self.label2id.get(each, each) if isinstance(each, str) else each for each in wanted]
        for number in numbers:
            if isinstance(number, str):
                known = ", ".join(list(self.label2id)[:10])
                raise ValueError(f"There is no class '{number}'; there are {known or 'no names'}, ...")
            if number != int(number):
                raise ValueError(f"`class_labels` must be names or whole numbers, got {number}.")
            if not 0 <= number < num_classes:
                raise ValueError(f"`class_labels` must lie in [0, {num_classes}), got {number}.")
        return [int(number) for number in numbers for _ in range(num_images_per_label)]

    def check_scheduler(self) -> None:
        """Flow-matching schedulers say so by their class, by a method of their own, or by what they are set up for."""
        config = self.scheduler.config
        kind = getattr(config, "prediction_type", None)
        flows = kind == "flow_prediction" and getattr(config, "use_flow_sigmas", False)
        if not hasattr(self.scheduler, "scale_noise") and not flows:
            raise ValueError(
                f"SiT predicts the velocity of a flow, and {type(self.scheduler).__name__} is set up for {kind!r}: take "
                "FlowMatchEulerDiscreteScheduler(shift=1.0), or another scheduler with `prediction_type='flow_prediction'` "
                "and `use_flow_sigmas=True`."
            )
        for name, instead in (("invert_sigmas", "without it"), ("stochastic_sampling", "SiTSDEScheduler")):
            if getattr(config, name, False):
                raise ValueError(f"A scheduler with `{name}=True` does not follow SiT's flow: take {instead}.")

    def check_output(self, output_type: str, num_inference_steps: int) -> None:
        """Before there is any work to lose."""
        if num_inference_steps < 1:
            raise ValueError(f"`num_inference_steps` must be at least 1, got {num_inference_steps}.")
        if output_type not in ("pil", "np", "pt", "latent"):
            raise ValueError(f"`output_type` must be pil, np, pt or latent, got {output_type!r}.")
        channels = self.transformer.config.in_channels
        made = channels if self.vae is None else getattr(self.vae.config, "latent_channels", channels)
        if made != channels and output_type != "latent":
            raise ValueError(
                f"The network has {channels} channels, and the VAE takes latents of {made}: take another VAE."
            )
        latent = self.config.latent_scale is not None or channels not in (1, 3)
        if latent and self.vae is None and output_type != "latent":
            raise ValueError(
                "This is a network of latents, and the pipeline has no VAE to make images of them: load it with `vae=`, or "
                "take `output_type='latent'`."
            )

    def decoded(self, latents: torch.Tensor, output_type: str):
        if self.vae is not None:
            # Of the pipeline if it says them, else of the VAE.
            scale, shift = self.config.latent_scale, self.config.latent_shift
            scale = getattr(self.vae.config, "scaling_factor", None) or 1.0 if scale is None else scale
            shift = getattr(self.vae.config, "shift_factor", None) or 0.0 if shift is None else shift
            latents = self.vae.decode((latents / scale + shift).to(self.vae.dtype)).sample
            check_finite(latents, "decoded images", "a VAE in float32")
        return self.image_processor.postprocess(latents.float(), output_type=output_type)

    @classmethod
    def extract_init_dict(cls, config_dict, **kwargs):
        # For diffusers' AutoModel; the pipeline itself would warn of it as unexpected.
        return super().extract_init_dict({k: v for k, v in config_dict.items() if k != "auto_map"}, **kwargs)

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs) -> None:
        """Saves the components and the code that loads them: the folder is what a Hub repository should hold."""
        upload = kwargs.pop("push_to_hub", False)
        repository = {
            name: kwargs.pop(name) for name in ("repo_id", "private", "token", "commit_message") if name in kwargs
        }
        super().save_pretrained(save_directory, **kwargs)
        folder = Path(save_directory)
        index = json.loads((folder / "model_index.json").read_text())
        index["_class_name"] = [copy_source(type(self), folder), type(self).__name__]
        auto_map = {}
        for name, component in self.components.items():
            component = getattr(component, "_orig_mod", component)  # as it was before it was compiled
            if component is not None and not type(component).__module__.startswith("diffusers."):
                module = copy_source(type(component), folder / name)
                index[name] = [module, type(component).__name__]
                if name == "transformer":
                    auto_map = {"AutoModel": f"{module}.{type(component).__name__}"}
                    config_file = folder / name / "config.json"
                    config = {**json.loads(config_file.read_text()), "auto_map": auto_map}
                    config_file.write_text(json.dumps(config, indent=2) + "\n")
        # Diffusers' AutoModel looks for the map of a component here, where there is an index.
        (folder / "model_index.json").write_text(json.dumps({**index, "auto_map": auto_map}, indent=2) + "\n")
        if upload:  # only now is the folder whole
            message = repository.pop("commit_message", None)
            name = repository.pop("repo_id", folder.name)
            name = HfApi().create_repo(name, exist_ok=True, **repository).repo_id
            HfApi(token=repository.get("token")).upload_folder(
                repo_id=name, folder_path=folder, commit_message=message
            )


def set_timesteps(scheduler, num_inference_steps: int, device) -> None:
    """Equal steps from noise to data where the scheduler lets itself be told; its own otherwise."""
    takes_sigmas = "sigmas" in inspect.signature(scheduler.set_timesteps).parameters
    if takes_sigmas and type(scheduler).__name__.startswith("FlowMatch"):
        sigmas = np.linspace(1.0, 1.0 / num_inference_steps, num_inference_steps)
        scheduler.set_timesteps(sigmas=sigmas, device=device)
    else:
        scheduler.set_timesteps(num_inference_steps, device=device)


def check_finite(tensor: torch.Tensor, what: str, advice: str) -> None:
    if not torch.isfinite(tensor).all():
        raise ValueError(f"The {what} hold NaN or infinity, so there are no images: try {advice}.")


def cache_of(network, name: str):
    """Where diffusers' caches keep what they keep, if the network takes any."""
    return network.cache_context(name) if hasattr(network, "cache_context") else nullcontext()


def copy_source(cls: type, folder: Path) -> str:
    """Copies the file that defines a class into a folder; its name, as a module."""
    source = Path(inspect.getfile(cls))
    if source.parent.resolve() != folder.resolve():
        shutil.copy(source, folder / source.name)
    return source.stem
