"""Sampling from a SiT with decayed shortcuts: noise -> SiT and flow scheduler, step by step -> image, through a VAE if any.

A folder that this pipeline saves contains its code, and loads where the package is not installed:

    >>> pipeline = DiffusionPipeline.from_pretrained("path/or/repository", trust_remote_code=True)  # on the Hub, pin `revision`
    >>> pipeline(class_labels=["golden retriever", 3], guidance_scale=4.0).images[0]

This file travels alone to the Hub, so it imports no sibling; shared code is copied under `Copied from` headers.
"""

import inspect
import json
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from diffusers import DiffusionPipeline, ImagePipelineOutput
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils.torch_utils import randn_tensor
from huggingface_hub import HfApi


__all__ = ["DecayedSiTPipeline"]


class DecayedSiTPipeline(DiffusionPipeline):
    r"""
    Images from a SiT, unconditional or by class.

    Args:
        transformer (`DecayedSiTTransformer2DModel`): The network.
        scheduler (`SchedulerMixin`): Any scheduler for flow matching: `FlowMatchEulerDiscreteScheduler(shift=1.0)`,
            Heun's, a DPM-Solver with `prediction_type="flow_prediction", use_flow_sigmas=True`, or `SiTSDEScheduler`, the
            official stochastic sampler.
        vae (`AutoencoderKL`, *optional*): For networks of latents. Without it the network's samples are the images.
        id2label (`dict`, *optional*): Class names by class index.
        latent_scale, latent_shift (`float`, *optional*): Latents are `(encoded - shift) * scale`. Default to the VAE's
            own values.
        null_class (`bool`, defaults to `True`): Whether the network was trained with the null class, which guidance and
            samples without a class need.
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
            id2label = {str(index): name for index, name in id2label.items()}  # keys are strings in JSON
        self.register_to_config(
            id2label=id2label, latent_scale=latent_scale, latent_shift=latent_shift, null_class=null_class
        )
        self.image_processor = VaeImageProcessor()
        self._current_timestep = None
        self._guidance_scale, self._num_timesteps, self._interrupt = 1.0, 0, False

    # Copied from hf_decayed.pipelines.pipeline_decayed_uvit.DecayedUViTPipeline.current_timestep
    @property
    def current_timestep(self) -> torch.Tensor | None:
        """The timestep of the sampling step under way; attention caches read it."""
        return self._current_timestep

    # Copied from hf_decayed.pipelines.pipeline_decayed_uvit.DecayedUViTPipeline.label2id
    @property
    def label2id(self) -> dict[str, int]:
        return {name: int(index) for index, name in (self.config.id2label or {}).items()}

    # Copied from hf_decayed.pipelines.pipeline_decayed_uvit.DecayedUViTPipeline.guidance_scale
    @property
    def guidance_scale(self) -> float:
        """Of the step under way; a callback that sets `_guidance_scale` changes it for the steps that follow."""
        return self._guidance_scale

    # Copied from hf_decayed.pipelines.pipeline_decayed_uvit.DecayedUViTPipeline.num_timesteps
    @property
    def num_timesteps(self) -> int:
        """Steps of the scheduler in the call under way."""
        return self._num_timesteps

    # Copied from hf_decayed.pipelines.pipeline_decayed_uvit.DecayedUViTPipeline.interrupt
    @property
    def interrupt(self) -> bool:
        """Whether a callback has set `_interrupt`: the steps that follow are left out."""
        return self._interrupt

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
                Class indices or names, one image each. Without them a conditional network samples the null class.
            batch_size (`int`, defaults to 1): Number of images without `class_labels`.
            num_images_per_label (`int`, defaults to 1): Number of images for each of `class_labels`.
            num_inference_steps (`int`, defaults to 50): Steps of the scheduler.
            guidance_scale (`float`, defaults to 1.0):
                Classifier-free guidance in diffusers' convention, `unconditional + scale * (conditional - unconditional)`:
                1 is no guidance. SiT's own code has the same convention, but guides only the first three of four channels.
            guidance_interval (`tuple(float, float)`, defaults to `(0, 1)`):
                Guide only at noise levels in this interval, where 0 is data and 1 is noise. Elsewhere the network is
                called once per step instead of twice.
            height, width (`int`, *optional*): Size of the network's sample; the training size by default.
            generator (`torch.Generator` or a list of them, *optional*): One for all images, or one per image.
            latents (`torch.Tensor`, *optional*): The initial noise.
            output_type (`str`, defaults to `"pil"`): `pil`, `np`, `pt`, or `latent` for the network's own sample.
            callback_on_step_end (`Callable`, *optional*):
                Called as `callback(pipeline, step, timestep, tensors)` after every step; the tensors that it returns
                replace the pipeline's. It finds `num_timesteps` and `guidance_scale` at the pipeline, and may set
                `_guidance_scale` or `_interrupt`.
        """
        self.check_scheduler()
        self.check_output(output_type, num_inference_steps)
        self.check_counts(batch_size, num_images_per_label, callback_on_step_end_tensor_inputs)
        labels = self.labels_of(class_labels, num_images_per_label)
        self.check_guidance(labels, guidance_scale, guidance_interval)
        device, dtype = self._execution_device, self.transformer.dtype
        latents = self.prepare_latents(labels, batch_size, height, width, generator, latents)
        set_timesteps(self.scheduler, num_inference_steps, device)
        latents = latents * getattr(self.scheduler, "init_noise_sigma", 1.0)  # flow schedulers have none
        conditions = {} if labels is None else {"class_labels": torch.tensor(labels, device=device)}
        null_labels = torch.full((len(latents),), self.transformer.config.num_classes, device=device)
        step_takes_generator = "generator" in inspect.signature(self.scheduler.step).parameters
        step_arguments = {"generator": generator} if step_takes_generator else {}
        num_train_timesteps = self.scheduler.config.num_train_timesteps
        low, high = (level * num_train_timesteps for level in guidance_interval)

        self._guidance_scale, self._num_timesteps, self._interrupt = (
            guidance_scale,
            len(self.scheduler.timesteps),
            False,
        )
        for step, timestep in enumerate(self.progress_bar(self.scheduler.timesteps)):
            if self.interrupt:
                break
            self._current_timestep = timestep
            time = 1 - timestep / num_train_timesteps  # SiT's time runs from noise at 0 to data at 1
            if labels is not None and self.guidance_scale != 1.0 and low <= float(timestep) <= high:
                both_labels = torch.cat([conditions["class_labels"], null_labels])
                with cache_context(
                    self.transformer, "guided"
                ):  # apart from the cache below, which has half as many rows
                    prediction = self.transformer(
                        torch.cat([latents, latents]).to(dtype), time, class_labels=both_labels
                    ).sample
                conditional, unconditional = prediction.float().chunk(2)
                prediction = torch.lerp(unconditional, conditional, self.guidance_scale)
            else:
                with cache_context(self.transformer, "unguided"):
                    prediction = self.transformer(latents.to(dtype), time, **conditions).sample
            # Schedulers expect the velocity from data to noise, SiT predicts it from noise to data.
            latents = self.scheduler.step(-prediction.float(), timestep, latents, **step_arguments).prev_sample
            if callback_on_step_end is not None:
                tensors = {name: {"latents": latents}[name] for name in callback_on_step_end_tensor_inputs}
                latents = callback_on_step_end(self, step, timestep, tensors).pop("latents", latents)

        self._current_timestep = None
        check_finite(latents, "samples", "a lower `guidance_scale`, another scheduler, or float32")
        images = latents if output_type == "latent" else self.decode_latents(latents, output_type)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    def check_scheduler(self) -> None:
        """Raises for a scheduler that does not follow SiT's flow.

        A flow-matching scheduler has the method `scale_noise`, or is set up for flow prediction with flow sigmas.
        """
        config = self.scheduler.config
        prediction_type = getattr(config, "prediction_type", None)
        is_set_up_for_flow = prediction_type == "flow_prediction" and getattr(config, "use_flow_sigmas", False)
        if not hasattr(self.scheduler, "scale_noise") and not is_set_up_for_flow:
            raise ValueError(
                f"SiT predicts the velocity of a flow, and {type(self.scheduler).__name__} is set up for "
                f"{prediction_type!r}: use FlowMatchEulerDiscreteScheduler(shift=1.0), or another scheduler with "
                "`prediction_type='flow_prediction'` and `use_flow_sigmas=True`."
            )
        for name, alternative in (("invert_sigmas", "one without it"), ("stochastic_sampling", "SiTSDEScheduler")):
            if getattr(config, name, False):
                raise ValueError(f"A scheduler with `{name}=True` does not follow SiT's flow: use {alternative}.")

    # Copied from hf_decayed.pipelines.pipeline_decayed_uvit.DecayedUViTPipeline.check_output with unet->transformer
    def check_output(self, output_type: str, num_inference_steps: int) -> None:
        """Raises for an output that the components cannot produce, before anything is computed."""
        if num_inference_steps < 1:
            raise ValueError(f"`num_inference_steps` must be at least 1, got {num_inference_steps}.")
        if output_type not in ("pil", "np", "pt", "latent"):
            raise ValueError(f"`output_type` must be pil, np, pt or latent, got {output_type!r}.")
        channels = self.transformer.config.in_channels
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

    # Copied from hf_decayed.pipelines.pipeline_decayed_uvit.DecayedUViTPipeline.check_counts
    def check_counts(
        self, batch_size: int, num_images_per_label: int, callback_tensor_inputs: tuple[str, ...]
    ) -> None:
        for name, count in (("batch_size", batch_size), ("num_images_per_label", num_images_per_label)):
            if count < 1:
                raise ValueError(f"`{name}` must be at least 1, got {count}.")
        unknown = set(callback_tensor_inputs) - set(self._callback_tensor_inputs)
        if unknown:
            raise ValueError(f"`callback_on_step_end_tensor_inputs` can be 'latents' only, got {sorted(unknown)}.")

    # Copied from hf_decayed.pipelines.pipeline_decayed_uvit.DecayedUViTPipeline.labels_of with unet->transformer
    def labels_of(self, class_labels, num_images_per_label: int) -> list[int] | None:
        """Class indices, one per image; `None` without `class_labels`."""
        if class_labels is None:
            if num_images_per_label != 1:
                raise ValueError(
                    "`num_images_per_label` needs `class_labels`; without them `batch_size` is the number of images."
                )
            return None
        num_classes = self.transformer.config.num_classes
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

    # Copied from hf_decayed.pipelines.pipeline_decayed_uvit.DecayedUViTPipeline.check_guidance with unet->transformer
    def check_guidance(
        self, labels: list[int] | None, guidance_scale: float, guidance_interval: tuple[float, float]
    ) -> None:
        """Raises for guidance, or for samples without a class, that the network was not trained for."""
        guided = guidance_scale != 1.0
        if not self.config.null_class and self.transformer.config.num_classes > 0 and (guided or labels is None):
            raise ValueError(
                "This network was trained with a class for every image and has no null class: pass `class_labels`, and "
                "`guidance_scale=1`."
            )
        if guided and labels is None:
            raise ValueError(
                f"`guidance_scale={guidance_scale}` needs `class_labels`, and a network that has classes: without them "
                "there is nothing to guide to."
            )
        if guidance_interval[0] > guidance_interval[1]:
            raise ValueError(
                f"`guidance_interval` must go from a lower to a higher noise level, got {guidance_interval}."
            )

    # Copied from hf_decayed.pipelines.pipeline_decayed_uvit.DecayedUViTPipeline.prepare_latents with unet->transformer
    def prepare_latents(
        self,
        labels: list[int] | None,
        batch_size: int,
        height: int | None,
        width: int | None,
        generator: torch.Generator | list[torch.Generator] | None,
        latents: torch.Tensor | None,
    ) -> torch.Tensor:
        """The initial noise, drawn unless `latents` are passed; always in float32.

        In half precision the small steps of a long schedule would be rounded away.
        """
        num_images = batch_size if labels is None else len(labels)
        if batch_size not in (1, num_images):
            raise ValueError(
                f"`batch_size={batch_size}` is for images without classes, and there are {num_images} `class_labels`: use "
                "`num_images_per_label` for more images of each."
            )
        if isinstance(generator, list) and len(generator) != num_images:
            raise ValueError(
                f"There must be a generator for each of {num_images} images, or one for all, got {len(generator)}."
            )
        config, device = self.transformer.config, self._execution_device
        sample_size = config.sample_size
        sample_size = (sample_size, sample_size) if isinstance(sample_size, int) else sample_size
        shape = (num_images, config.in_channels, height or sample_size[0], width or sample_size[1])
        if latents is None:
            return randn_tensor(shape, generator=generator, device=device, dtype=torch.float32)
        if tuple(latents.shape) != shape:
            raise ValueError(f"`latents` must have shape {shape}, got {tuple(latents.shape)}.")
        return latents.to(device, torch.float32)

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

    # Copied from hf_decayed.pipelines.pipeline_decayed_uvit.DecayedUViTPipeline.save_pretrained with unet->transformer
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
                if name == "transformer":
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


def set_timesteps(scheduler, num_inference_steps: int, device) -> None:
    """Equal steps from noise to data for schedulers that take sigmas; the scheduler's own steps for others."""
    takes_sigmas = "sigmas" in inspect.signature(scheduler.set_timesteps).parameters
    if takes_sigmas and type(scheduler).__name__.startswith("FlowMatch"):
        sigmas = np.linspace(1.0, 1.0 / num_inference_steps, num_inference_steps)
        scheduler.set_timesteps(sigmas=sigmas, device=device)
    else:
        scheduler.set_timesteps(num_inference_steps, device=device)


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
