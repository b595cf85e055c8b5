"""Relights an image as another image is lit, and removes its light, by latent intrinsics.

    >>> pipe = DiffusionPipeline.from_pretrained("path/or/repository", trust_remote_code=True)  # on the Hub, pin `revision`
    >>> relit = pipe(image, reference).images[0]
    >>> albedo = pipe.albedo(image).images[0]
    >>> frames = pipe.interpolate(image, [morning, evening], num_frames=24).images

Images of any size are cut into overlapping tiles of the training size, which are blended with Gaussian weights. Memory grows
with the image by the image itself and the relit one, both in float32, and by nothing else.

This file travels alone to the Hub, so it imports no sibling; shared code is copied under `Copied from` headers.
"""

import inspect
import itertools
import json
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import PIL.Image
import PIL.ImageOps
import torch
from diffusers import DiffusionPipeline, ImagePipelineOutput, ModelMixin
from diffusers.image_processor import PipelineImageInput, VaeImageProcessor
from huggingface_hub import HfApi
from torch.nn import functional as F


__all__ = ["RelightingPipeline"]

BLENDING_SIGMA = 0.25  # of the Gaussian weights, as a fraction of the tile


class RelightingPipeline(DiffusionPipeline):
    r"""
    Images under the light of other images.

    Args:
        autoencoder (`LatentIntrinsicsModel`): Encodes images as intrinsic maps and a light code, and decodes them.

    A network that was trained with dense features of another encoder needs them here, too. They are no part of the saved
    folder: set `pipe.prior` to a function of images `(batch, 3, height, width)` in [-1, 1] that returns them.
    """

    model_cpu_offload_seq = "autoencoder"

    def __init__(self, autoencoder: ModelMixin):
        super().__init__()
        self.register_modules(autoencoder=autoencoder)
        # Tiles are normalized one by one: a whole image in [-1, 1] would be one more copy of it.
        self.image_processor = VaeImageProcessor(do_resize=False, do_normalize=False, do_convert_rgb=True)
        self.prior: Callable[[torch.Tensor], torch.Tensor] | None = None

    @torch.no_grad()
    def __call__(
        self,
        image: PipelineImageInput,
        reference: PipelineImageInput,
        alpha: float | None = None,
        tile_size: int | None = None,
        tile_overlap: float = 0.5,
        output_type: str = "pil",
        return_dict: bool = True,
    ) -> ImagePipelineOutput | tuple:
        r"""
        Args:
            image (`PIL.Image.Image`, `np.ndarray`, `torch.Tensor` or a list of them): Images to relight, of one size. Arrays
                and tensors have values in [0, 1].
            reference (as `image`): Images whose light they get: one for all, or one for each; of any size.
            alpha (`float`, *optional*): Strength of the light, in [0, 1]; by default that of the training.
            tile_size (`int`, *optional*): Height and width of tiles; by default those of the training images.
            tile_overlap (`float`, defaults to 0.5): Part of a tile that the next one covers again, at least; in [0, 1).
            output_type (`str`, defaults to `"pil"`): `pil`, `np` or `pt`.
        """
        pixel_values = self.preprocess(image)
        light = self.light(reference)
        if len(light) not in (1, len(pixel_values)):
            raise ValueError(f"`reference` must be 1 image or {len(pixel_values)}, one for each, got {len(light)}.")
        if is_equal(image, reference):
            warnings.warn(
                "`reference` equals `image`: the result is a reconstruction under its own light.", stacklevel=2
            )
        light = light.expand(len(pixel_values), -1)
        relit = self.render(pixel_values, [light], alpha, tile_size, tile_overlap)[0]
        del pixel_values  # conversion to PIL needs room for copies of the result
        return self.finish(relit, output_type, return_dict)

    @torch.no_grad()
    def albedo(
        self,
        image: PipelineImageInput,
        tile_size: int | None = None,
        tile_overlap: float = 0.5,
        output_type: str = "pil",
        return_dict: bool = True,
    ) -> ImagePipelineOutput | tuple:
        """Images without their light (`alpha=0`), which resemble albedo up to a factor; arguments as in `__call__`."""
        pixel_values = self.preprocess(image)
        light = pixel_values.new_zeros(len(pixel_values), self.autoencoder.config.light_dim)  # has no effect
        albedo = self.render(pixel_values, [light], 0.0, tile_size, tile_overlap)[0]
        del pixel_values
        return self.finish(albedo, output_type, return_dict)

    @torch.no_grad()
    def interpolate(
        self,
        image: PipelineImageInput,
        references: Sequence[PipelineImageInput],
        num_frames: int = 16,
        alpha: float | None = None,
        tile_size: int | None = None,
        tile_overlap: float = 0.5,
        output_type: str = "pil",
        return_dict: bool = True,
    ) -> ImagePipelineOutput | tuple:
        """One image while the light goes from the first of `references` over the others to the last, in equal steps.

        The frames are what `diffusers.utils.export_to_gif` and `export_to_video` take. Other arguments as in `__call__`.
        """
        pixel_values = self.preprocess(image)
        if len(pixel_values) != 1:
            raise ValueError(f"`image` must be one image, got {len(pixel_values)}.")
        lights = torch.cat([self.light(reference) for reference in references]) if len(references) else []
        if len(lights) < 2:
            raise ValueError(f"`references` must be at least two images, got {len(lights)}.")
        if num_frames < 2:
            raise ValueError(f"`num_frames` must be at least 2, got {num_frames}.")
        frames = interpolate_codes(lights, num_frames)
        images = self.render(pixel_values, list(frames.unsqueeze(1)), alpha, tile_size, tile_overlap)
        return self.finish(images[:, 0], output_type, return_dict)

    @torch.no_grad()
    def light(self, image: PipelineImageInput) -> torch.Tensor:
        """Light codes `(batch, light_dim)` of images, which may differ in size: each is resized to the training size."""
        images = image if isinstance(image, (list, tuple)) else [image]
        size = self.autoencoder.config.sample_size
        codes = []
        for item in images:
            pixel_values = self.preprocess(item)
            if pixel_values.shape[2:] != (size, size):
                pixel_values = F.interpolate(
                    pixel_values, (size, size), mode="bilinear", align_corners=False, antialias=True
                )
            codes.append(self.encode(pixel_values).light.float())
        return torch.cat(codes)

    def encode(self, images: torch.Tensor):
        """Intrinsic maps and light codes of images in [0, 1], with the prior if there is one."""
        pixel_values = 2 * images - 1
        if self.prior is None:
            return self.autoencoder.encode(pixel_values.to(self.autoencoder.dtype))
        prior = self.prior(pixel_values).to(self.autoencoder.dtype)
        return self.autoencoder.encode(pixel_values.to(self.autoencoder.dtype), prior)

    def preprocess(self, image: PipelineImageInput) -> torch.Tensor:
        """Images as one tensor `(batch, 3, height, width)` in [0, 1]."""
        images = image if isinstance(image, (list, tuple)) else [image]
        if not images:
            raise ValueError("There must be at least one image.")
        for item in images:
            check_image(item)
        images = [plain_image(item) if isinstance(item, PIL.Image.Image) else item for item in images]
        tensors = [self.image_processor.preprocess(item).float() for item in images]
        sizes = {tuple(tensor.shape[1:]) for tensor in tensors}
        if len(sizes) > 1:
            raise ValueError(f"Images of one call must have one size, got {sorted(sizes)}.")
        pixel_values = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        return pixel_values.to(self._execution_device)

    def render(
        self,
        pixel_values: torch.Tensor,
        lights: list[torch.Tensor],
        alpha: float | None,
        tile_size: int | None,
        tile_overlap: float,
    ) -> torch.Tensor:
        """Images under every one of `lights`, tile by tile: `(lights, batch, channels, height, width)` in [0, 1].

        Whatever grows with the images is allocated here once: the sum of the weighted tiles, which is the result.
        """
        factor = self.autoencoder.scale_factor
        tile_size = self.autoencoder.config.sample_size if tile_size is None else tile_size
        if tile_size < 2 * factor or tile_size % factor != 0:
            raise ValueError(f"`tile_size` must be a multiple of {factor}, at least {2 * factor}, got {tile_size}.")
        if not 0 <= tile_overlap < 1:
            raise ValueError(f"`tile_overlap` must lie in [0, 1), got {tile_overlap}.")
        height, width = pixel_values.shape[2:]
        rendered = pixel_values.new_zeros(len(lights), *pixel_values.shape)
        for rows, columns, weights in tiles(height, width, tile_size, tile_overlap):
            tile = pixel_values[:, :, rows, columns]
            # Only images that are smaller than a tile need this: their last row and column are repeated.
            tile_height, tile_width = tile.shape[2:]
            padded = F.pad(tile, (0, -tile_width % factor, 0, -tile_height % factor), mode="replicate")
            intrinsics, _ = self.encode(padded)
            weights = weights.to(pixel_values.device)
            for index, light in enumerate(lights):
                decoded = self.autoencoder.decode(intrinsics, light.to(self.autoencoder.dtype), alpha).float()
                check_finite(decoded, "decoded images", "float32")
                decoded = decoded[:, :, :tile_height, :tile_width] / 2 + 0.5
                rendered[index, :, :, rows, columns] += weights * decoded
        return rendered.clamp_(0, 1)

    def finish(self, images: torch.Tensor, output_type: str, return_dict: bool) -> ImagePipelineOutput | tuple:
        if output_type not in ("pil", "np", "pt"):
            raise ValueError(f"`output_type` must be pil, np or pt, got {output_type!r}.")
        images = self.image_processor.postprocess(images, output_type=output_type)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)

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

    # Copied from hf_decayed.pipelines.pipeline_decayed_uvit.DecayedUViTPipeline.save_pretrained with unet->autoencoder
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
                if name == "autoencoder":
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


def plain_image(image: PIL.Image.Image) -> PIL.Image.Image:
    """An image as training reads it: upright, and on white where it is transparent."""
    image = PIL.ImageOps.exif_transpose(image)
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = PIL.Image.alpha_composite(PIL.Image.new("RGBA", image.size, "white"), image)
    return image


def check_image(image: PIL.Image.Image | np.ndarray | torch.Tensor) -> None:
    """Raises for images whose values would be misread."""
    if isinstance(image, PIL.Image.Image):
        if image.mode.startswith(("I", "F")):
            raise ValueError(f"Images must have 8 bits per channel, got the mode {image.mode}: convert them first.")
        return
    if not isinstance(image, (np.ndarray, torch.Tensor)):
        raise ValueError(f"Images must be PIL images, arrays or tensors, got {type(image).__name__}.")
    values = torch.as_tensor(image)
    if not values.is_floating_point():
        raise ValueError(f"Arrays and tensors must have values in [0, 1], got the integers of {values.dtype}.")
    smallest, largest = values.min(), values.max()  # NaN if one value is
    if not torch.isfinite(largest - smallest):
        raise ValueError("An image holds NaN or infinity.")
    if smallest < 0 or largest > 1:
        raise ValueError(
            f"Arrays and tensors must have values in [0, 1], got {values.dtype} from {smallest} to {largest}."
        )


def is_equal(image: PipelineImageInput, other: PipelineImageInput) -> bool:
    """Whether two images, or two lists of images, are of one kind and have the same pixels."""
    if isinstance(image, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(image) == len(other) and all(map(is_equal, image, other))
    if isinstance(image, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(image, other)
    if isinstance(image, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(image, other)
    return isinstance(image, PIL.Image.Image) and image == other


def interpolate_codes(lights: torch.Tensor, num_frames: int) -> torch.Tensor:
    """Codes on the straight lines between light codes `(number, dim)`, in equal steps, brought back to length 1."""
    positions = torch.linspace(0, len(lights) - 1, num_frames, device=lights.device)
    lower = positions.floor().long().clamp(max=len(lights) - 2)
    codes = torch.lerp(lights[lower], lights[lower + 1], (positions - lower).unsqueeze(1))
    return F.normalize(codes, dim=1)


def tile_starts(size: int, tile_size: int, overlap: float) -> list[int]:
    """Where tiles begin along one side: evenly spaced, from the first pixel to the last."""
    if size <= tile_size:
        return [0]
    number = math.ceil((size - tile_size) / max(1, int(tile_size * (1 - overlap)))) + 1
    return [round(index * (size - tile_size) / (number - 1)) for index in range(number)]


def strips(size: int, tile_size: int, overlap: float) -> list[tuple[slice, torch.Tensor]]:
    """Tiles along one side, with their Gaussian weights; the weights of all tiles that cover a pixel add up to 1."""
    tile_size = min(tile_size, size)
    slices = [slice(start, start + tile_size) for start in tile_starts(size, tile_size, overlap)]
    gaussian, total = gaussian_weights(tile_size), torch.zeros(size)
    for part in slices:
        total[part] += gaussian
    return [(part, gaussian / total[part]) for part in slices]


def tiles(height: int, width: int, tile_size: int, overlap: float) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Rows and columns of every tile, with weights `(rows, columns)` that fall off from its middle and add up to 1."""
    sides = (strips(size, tile_size, overlap) for size in (height, width))
    for (rows, row_weights), (columns, column_weights) in itertools.product(*sides):
        yield rows, columns, row_weights[:, None] * column_weights


def gaussian_weights(size: int) -> torch.Tensor:
    offsets = (torch.arange(size) + 0.5) / size - 0.5
    return torch.exp(-(offsets**2) / (2 * BLENDING_SIGMA**2))


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
