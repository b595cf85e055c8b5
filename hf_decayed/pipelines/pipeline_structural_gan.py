"""Draws images from a GAN whose discriminator is a representation, in one step.

    >>> pipe = DiffusionPipeline.from_pretrained("path/or/repository", trust_remote_code=True)  # on the Hub, pin `revision`
    >>> images = pipe(batch_size=16, truncation=1.0).images
    >>> frames = pipe.interpolate(num_frames=24).images
    >>> features = pipe.discriminator(pixel_values).pooler_output

This file travels alone to the Hub, so it imports no sibling; shared code is copied under `Copied from` headers.
"""

import inspect
import json
import math
import os
import shutil
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
from diffusers import DiffusionPipeline, ImagePipelineOutput, ModelMixin
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils.torch_utils import randn_tensor
from huggingface_hub import HfApi


__all__ = ["StructuralGANPipeline"]


class StructuralGANPipeline(DiffusionPipeline):
    r"""
    Images from normal latents, in one step and without classes.

    Args:
        generator (`StructuralGenerator`): Latents to images.
        discriminator (`StructuralDiscriminatorModel`, *optional*): Images to features; sampling does not need it.
    """

    model_cpu_offload_seq = "generator"
    _optional_components = ["discriminator"]

    def __init__(self, generator: ModelMixin, discriminator=None):
        super().__init__()
        self.register_modules(generator=generator, discriminator=discriminator)
        self.image_processor = VaeImageProcessor()

    @torch.no_grad()
    def __call__(
        self,
        batch_size: int = 1,
        truncation: float | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        latents: torch.Tensor | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
    ) -> ImagePipelineOutput | tuple:
        r"""
        Args:
            batch_size (`int`, defaults to 1): Number of images.
            truncation (`float`, *optional*): Latents are drawn from a normal distribution that ends at plus and minus this
                value; smaller values give less varied images of more usual looks. By default there is no limit.
            generator (`torch.Generator` or a list of them, *optional*): Of the latents: one for all images, or one for each.
            latents (`torch.Tensor` of shape `(batch_size, latent_dim)`, *optional*): Instead of drawn ones.
            output_type (`str`, defaults to `"pil"`): `pil`, `np` or `pt`.
        """
        latents = self.prepare_latents(batch_size, truncation, generator, latents)
        return self.render(latents, output_type, return_dict)

    @torch.no_grad()
    def interpolate(
        self,
        num_frames: int = 16,
        truncation: float | None = None,
        generator: torch.Generator | None = None,
        latents: torch.Tensor | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
    ) -> ImagePipelineOutput | tuple:
        """Images on the arcs between latents, from the first of `latents` `(number, latent_dim)` over the others to the last.

        By default between two random latents. There are `num_frames` from each latent to the next, both included. The frames
        are what `diffusers.utils.export_to_gif` takes. Other arguments as in `__call__`.
        """
        if num_frames < 2:
            raise ValueError(f"`num_frames` must be at least 2, got {num_frames}.")
        number = 2 if latents is None else len(latents)
        if number < 2:
            raise ValueError(f"`latents` must be at least two, got {number}.")
        points = self.prepare_latents(number, truncation, generator, latents)
        arcs = [
            spherical_interpolation(start[None], end[None], num_frames)[0 if index == 0 else 1 :]
            for index, (start, end) in enumerate(zip(points, points[1:]))
        ]
        return self.render(torch.cat(arcs), output_type, return_dict)

    def prepare_latents(
        self,
        batch_size: int,
        truncation: float | None,
        generator: torch.Generator | list[torch.Generator] | None,
        latents: torch.Tensor | None,
    ) -> torch.Tensor:
        """Latents as passed, or drawn; in float32."""
        if batch_size < 1:
            raise ValueError(f"`batch_size` must be at least 1, got {batch_size}.")
        if truncation is not None and not truncation > 0:
            raise ValueError(f"`truncation` must be positive or None, got {truncation}.")
        device, dim = self._execution_device, self.generator.config.latent_dim
        if latents is None:
            if isinstance(generator, list) and len(generator) != batch_size:
                raise ValueError(
                    f"There must be a generator for each of {batch_size} images, or one for all, got {len(generator)}."
                )
            latents = randn_tensor((batch_size, dim), generator=generator, device=device, dtype=torch.float32)
        elif latents.ndim != 2 or latents.shape[1] != dim:
            raise ValueError(f"`latents` must have shape (number, {dim}), got {tuple(latents.shape)}.")
        latents = latents.to(device, torch.float32)
        return latents if truncation is None else truncate_normal(latents, truncation)

    def render(self, latents: torch.Tensor, output_type: str, return_dict: bool) -> ImagePipelineOutput | tuple:
        if output_type not in ("pil", "np", "pt"):
            raise ValueError(f"`output_type` must be pil, np or pt, got {output_type!r}.")
        images = self.generator(latents.to(self.generator.dtype)).sample.float()
        check_finite(images, "samples", "float32")
        images = self.image_processor.postprocess(images, output_type=output_type)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    # Copied from hf_decayed.pipelines.pipeline_decayed_uvit.DecayedUViTPipeline.extract_init_dict
    @classmethod
    def extract_init_dict(cls, config_dict, **kwargs):
        # `auto_map` is for diffusers' AutoModel; the pipeline itself would warn of it.
        config_dict = {name: value for name, value in config_dict.items() if name != "auto_map"}
        return super().extract_init_dict(config_dict, **kwargs)

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

    # Copied from hf_decayed.pipelines.pipeline_decayed_uvit.DecayedUViTPipeline.save_pretrained with unet->generator
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
                if name == "generator":
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


def truncate_normal(latents: torch.Tensor, limit: float) -> torch.Tensor:
    """Standard normal values as those of a normal distribution that ends at `-limit` and `limit`; their order is kept."""
    share = math.erf(limit / math.sqrt(2))  # of the values that lie inside
    return math.sqrt(2) * torch.erfinv(share * torch.erf(latents / math.sqrt(2)))


# Copied from hf_decayed.pipelines.pipeline_nested_diffusion.spherical_interpolation
def spherical_interpolation(start: torch.Tensor, end: torch.Tensor, steps: int) -> torch.Tensor:
    """`(steps, ...)` from one latent `(1, ...)` to another, on the sphere, which keeps the norm."""
    fractions = torch.linspace(0, 1, steps, device=start.device).view(-1, *[1] * (start.ndim - 1))
    angle = torch.acos(torch.cosine_similarity(start.flatten(), end.flatten(), dim=0).clamp(-1, 1))
    if torch.sin(angle) < 1e-4:  # the two are parallel
        return torch.lerp(start, end, fractions)
    return (torch.sin((1 - fractions) * angle) * start + torch.sin(fractions * angle) * end) / torch.sin(angle)


# Copied from hf_decayed.pipelines.pipeline_decayed_uvit.check_finite
def check_finite(tensor: torch.Tensor, name: str, advice: str) -> None:
    if not torch.isfinite(tensor).all():
        raise ValueError(f"The {name} hold NaN or infinity, so there are no images: try {advice}.")


# Copied from hf_decayed.pipelines.pipeline_decayed_uvit.copy_source
def copy_source(cls: type, folder: Path) -> str:
    """Copies the file that defines a class into a folder and returns its module name."""
    source = Path(inspect.getfile(cls))
    if source.parent.resolve() != folder.resolve():
        shutil.copy(source, folder / source.name)
    return source.stem
