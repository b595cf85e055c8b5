"""Draws many samples from a pipeline: the same ones for any number of processes, and again after an interruption.

    hf-decayed sample outputs/uvit --num 36 --output samples
    accelerate launch --num_processes 8 -m hf_decayed.cli sample user/model --num 50000 --output samples --format npz

Image i has its own generator, seeded by (seed, i), and is always in the same batch.
"""

import inspect
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from accelerate import Accelerator
from diffusers import DiffusionPipeline, ModelMixin, SchedulerMixin
from PIL import Image
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..data.keyed_random import sample_seed
from ..data.latents import load_vae
from ..data.shards import has_valid_shard, load_shard, write_shard
from ..errors import UserError, explain_loading_errors, format_error
from ..kinds import package_class, read_class_name, read_json
from ..plots import save_grid
from ..provenance import pipeline_fingerprint, public_config
from .features import pipeline_network
from .lower_precision import DTYPES, cast_weights, describe_precision, resolve_dtype


PICTURE_IMAGES = 64
COMPARED_SAMPLES = 8  # samples that are also drawn in float32 if the weights are in lower precision
MAX_TITLES = 16  # columns of a picture with one class per column


def sample(
    model: str | DiffusionPipeline,
    output: str | os.PathLike,
    num: int = 36,
    classes: str = "all",
    num_inference_steps: int = 50,
    guidance_scale: float = 1.0,
    seed: int = 0,
    batch_size: int = 64,
    file_format: str = "png",
    revision: str | None = None,
    trust_remote_code: bool = False,
    vae: str | None = None,
    dtype: str = "float32",
    accelerator: Accelerator | None = None,
) -> str:
    """Draws samples into the folder `output`; all processes call it. Returns a sentence for the user.

    Args:
        model (`str` or `DiffusionPipeline`): A pipeline, or its folder or repository.
        num (`int`, defaults to 36): Number of samples.
        classes (`str`, defaults to `"all"`):
            `all` takes the classes in turn, `none` draws without a class, else names or numbers separated by commas.
        file_format (`str`, defaults to `"png"`):
            `png`: a file for each sample. `npz`: one file with `arr_0`, bytes `(num, height, width, channels)`, which the
            usual evaluators read. Both come with a picture of the first samples.
        vae (`str`, *optional*): Autoencoder for a latent pipeline that has none, such as a converted one.
        dtype (`str`, defaults to `"float32"`):
            dtype of the network's weights; `auto` is bfloat16 if a short trial is faster with it. In lower precision,
            the first samples are drawn in float32 too, and the difference is reported.
    """
    for name, value in (("num", num), ("batch_size", batch_size), ("num_inference_steps", num_inference_steps)):
        if value < 1:
            raise UserError(f"`{name}` must be at least 1, got {value}.")
    if file_format not in ("png", "npz"):
        raise UserError(f"`format` must be png or npz, got {file_format!r}.")
    if dtype not in DTYPES:
        raise UserError(f"`dtype` must be one of {', '.join(DTYPES)}, got {dtype!r}.")
    accelerator = accelerator or Accelerator(cpu=not torch.accelerator.is_available())
    pipeline = load_pipeline(model, revision, trust_remote_code, vae) if isinstance(model, str) else model
    pipeline = pipeline.to(accelerator.device)
    pipeline.set_progress_bar_config(disable=True)
    output = Path(output)
    check_disk_space(pipeline, output, num)
    labels = class_cycle(pipeline, classes)
    known = inspect.signature(pipeline.__call__).parameters
    # Passed even if it is 1: some pipelines of diffusers have a larger default. A chain has a weight for every level.
    scale = "guidance_weights" if "guidance_weights" in known else "guidance_scale"
    guidance = {scale: guidance_scale} if guidance_scale != 1.0 or scale in known else {}
    steps = {"num_inference_steps": num_inference_steps} if "num_inference_steps" in known else {}  # a GAN takes one
    count = "num_images" if "num_images" in known else "batch_size"  # for samples without a class
    for name in (*guidance, count if labels is None else "class_labels"):
        if name not in known:
            raise UserError(f"{type(pipeline).__name__} takes no `{name}`; it takes {', '.join(known)}.")
    settings = {
        "model": pipeline_fingerprint(pipeline),
        "num": num,
        "classes": classes,
        "num_inference_steps": num_inference_steps if steps else 1,
        "guidance_scale": guidance_scale,
        "scheduler": scheduler_config(pipeline),
        "seed": seed,
        "batch_size": batch_size,
    }
    dtype, reason = resolve_dtype(dtype, pipeline_network(pipeline), batch_size, accelerator)
    if dtype != "float32":
        settings["dtype"] = dtype
    settings = json.loads(json.dumps(settings, default=str))
    summary = f"{num} samples ({file_format}), samples.png, sampling.json: {output}"
    with accelerator.main_process_first():
        finished = prepare_samples_dir(output, settings)
    batches = [
        range(start, min(start + batch_size, num))
        for start in range(0, num, batch_size)
        if needs_drawing(output, range(start, min(start + batch_size, num)), file_format, finished)
    ]
    if not batches:
        return summary

    def draw(indices: range) -> np.ndarray:
        chosen: dict[str, Any] = {count: len(indices)}
        if labels is not None:
            chosen = {"class_labels": [labels[index % len(labels)] for index in indices]}
        images = pipeline(
            **guidance,
            **chosen,
            **steps,
            # On the CPU, so that every device draws the same.
            generator=[torch.Generator().manual_seed(sample_seed(seed, index)) for index in indices],
            output_type="np",
        ).images
        if not np.isfinite(images).all():  # for other people's pipelines; ours raise this error themselves
            raise UserError("The samples hold NaN or infinity, so there are no images: try float32, or less guidance.")
        return images

    record: dict[str, Any] = dict(settings)
    if dtype != "float32":
        compared = range(min(num, COMPARED_SAMPLES))
        difference = cast_weights(pipeline_network(pipeline), dtype, lambda: torch.from_numpy(draw(compared)))
        record["dtype_difference"] = difference
        summary += "\n" + describe_precision(dtype, reason, difference, f"the first {len(compared)} samples")
    mine = batches[accelerator.process_index :: accelerator.num_processes]
    missing = [indices for indices in mine if not has_valid_shard(shard_path(output, indices))]
    for indices in tqdm(missing, unit="batch", disable=not accelerator.is_main_process):
        pixels = torch.from_numpy((255 * draw(indices).clip(0, 1)).round().astype(np.uint8))
        shard_path(output, indices).parent.mkdir(exist_ok=True)
        write_shard(shard_path(output, indices), [{"images": pixels}])
    if file_format == "png":  # every process writes its own, so that none waits long for another
        for indices in mine:
            write_images(output / "images", indices, load_shard(shard_path(output, indices))["images"].numpy())
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        if file_format == "npz":
            write_npz(output / "samples.npz", [shard_path(output, indices) for indices in batches])
        pictures = first_images(output, min(num, PICTURE_IMAGES), file_format) / 255
        save_grid(output / "samples.png", pictures, class_titles(pipeline, labels or []))
        write_record(output, {**record, "finished": sorted({*finished, file_format})})
        shutil.rmtree(output / "shards", ignore_errors=True)
    accelerator.wait_for_everyone()
    return summary


def scheduler_config(pipeline: DiffusionPipeline) -> dict | None:
    """Config of a pipeline's scheduler, which defines its steps; `None` without one."""
    return public_config(pipeline.scheduler.config) if hasattr(pipeline, "scheduler") else None


def check_disk_space(pipeline: DiffusionPipeline, output: Path, num: int) -> None:
    """Refuses a number of samples that does not fit on the disk, before anything is drawn."""
    config = pipeline_network(pipeline).config
    size = config.get("sample_size") or 1
    height, width = (size, size) if isinstance(size, int) else size
    needed = num * height * width * config.get("in_channels", 1)  # one byte a value; latents are smaller than images
    existing = next(path for path in (output, *output.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise UserError(
            f"{num} samples need at least {needed / 1e9:.0f} GB, and {free / 1e9:.0f} GB are free: lower --num."
        )


def needs_drawing(output: Path, indices: range, file_format: str, finished: list[str]) -> bool:
    """Whether a batch must be drawn, because one of its images, or the one file of all samples, is missing."""
    if file_format == "npz":
        return "npz" not in finished or not (output / "samples.npz").exists()
    return not all((output / "images" / f"{index:06d}.png").exists() for index in indices)


def shard_path(output: Path, indices: range) -> Path:
    return output / "shards" / f"{indices.start:09d}.safetensors"


def load_pipeline(
    model: str, revision: str | None = None, trust_remote_code: bool = False, vae: str | None = None
) -> DiffusionPipeline:
    """A pipeline from a folder or repository; ours is built from the classes of this package, so that no other code runs.

    `vae` names an autoencoder, for a latent pipeline that has none or to replace its own.
    """
    replaced = {"vae": load_vae(vae, "cpu")} if vae else {}
    if (Path(model) / "model_index.json").is_file():
        index = read_json(Path(model) / "model_index.json")
    else:
        with explain_loading_errors(model):
            index = DiffusionPipeline.load_config(model, revision=revision)
    pipeline_class = package_class(read_class_name(index, "model_index.json"))
    if pipeline_class is None or not issubclass(pipeline_class, DiffusionPipeline):
        return DiffusionPipeline.from_pretrained(
            model, revision=revision, trust_remote_code=trust_remote_code, **replaced
        )
    arguments = dict(replaced)
    parameters = inspect.signature(pipeline_class).parameters
    for name in (parameters.keys() & index.keys()) - replaced.keys():
        value = index[name]
        arguments[name] = load_component(model, name, value, revision) if isinstance(value, list) else value
    for name, parameter in parameters.items():
        required = parameter.default is parameter.empty  # the network and the scheduler
        if required and (not isinstance(index.get(name), list) or arguments[name] is None):
            raise UserError(
                f"'model_index.json' of '{model}' names no '{name}', which {pipeline_class.__name__} needs."
            )
    try:
        return pipeline_class(**arguments)
    except (TypeError, AttributeError, KeyError) as error:  # a value of the wrong type, or a component left out
        raise UserError(
            f"'model_index.json' of '{model}' describes no {pipeline_class.__name__}: {format_error(error)}"
        ) from error


def load_component(model: str, name: str, entry: list, revision: str | None):
    """A component that `model_index.json` gives by library and class; `None` if it leaves the component out."""
    if len(entry) != 2 or not all(part is None or isinstance(part, str) for part in entry):
        raise UserError(f"`{name}` in 'model_index.json' must name a library and a class, got {entry!r}.")
    if entry[1] is None:
        return None
    component_class: Any = package_class(entry[1]) or getattr(diffusers, entry[1], None)
    known = (ModelMixin, SchedulerMixin, PreTrainedModel)
    if not (inspect.isclass(component_class) and issubclass(component_class, known)):
        raise UserError(
            f"`{name}` in 'model_index.json' names {entry[1]!r}, which is no network or scheduler of this package or of "
            "diffusers."
        )
    load: Any = getattr(component_class, "from_pretrained", None)
    try:
        return load(model, subfolder=name, revision=revision)
    except Exception as error:  # damaged JSON, wrong types, weights of other shapes: whatever the library raises
        raise UserError(f"'{name}' of '{model}' is no {entry[1]}: {format_error(error)}") from error


def class_cycle(pipeline: DiffusionPipeline, classes: str) -> list[int | str] | None:
    """Class labels that samples take in turn; `None` for samples without a class."""
    num_classes = pipeline_network(pipeline).config.get("num_classes") or 0
    if classes == "none" or (classes == "all" and num_classes == 0):
        return None
    if classes == "all":
        return list(range(num_classes))
    names = getattr(pipeline, "label2id", {})
    requested = (
        [classes] if classes in names else [name.strip() for name in classes.split(",")]
    )  # names may have commas
    requested = [int(name) if name.isdecimal() else name for name in requested]
    # Pipelines of diffusers take numbers, and check them themselves.
    return pipeline.labels_of(requested, 1) if hasattr(pipeline, "labels_of") else requested


def class_titles(pipeline: DiffusionPipeline, labels: Iterable[int | str]) -> list[str] | None:
    """Names of the classes that samples take in turn, as titles of columns; `None` if there are none, or too many."""
    names = {number: name for name, number in getattr(pipeline, "label2id", {}).items()}
    titles = [str(names.get(label, label)) for label in labels]
    return titles if names and 0 < len(titles) <= MAX_TITLES else None


def prepare_samples_dir(output: Path, settings: dict) -> list[str]:
    """Creates the folder, or checks that an existing one has the same settings; returns the formats that are finished."""
    record = output / "sampling.json"
    if record.exists():
        recorded = {"dtype": "float32"} | read_json(record)  # which is left out of `settings`
        changed = [
            f"{name} {recorded.get(name)} -> {value}"
            for name, value in ({"dtype": "float32"} | settings).items()
            if recorded.get(name) != value
        ]
        started = recorded.get("finished") or any((output / "shards").glob("[!.]*"))
        if changed and started:  # a command that was refused before it drew anything has left nothing
            raise UserError(f"'{output}' holds other samples ({', '.join(changed)}): name another --output.")
        if not changed:
            return recorded.get("finished", [])
    elif output.exists() and any(output.iterdir()):
        raise UserError(f"'{output}' holds files that are no samples: name another --output.")
    (output / "shards").mkdir(parents=True, exist_ok=True)
    write_record(output, settings)
    return []


def write_record(output: Path, record: dict) -> None:
    temporary = output / ".writing.json"
    temporary.write_text(json.dumps(record, indent=2) + "\n")
    os.replace(temporary, output / "sampling.json")


def write_images(folder: Path, indices: range, images: np.ndarray) -> None:
    folder.mkdir(exist_ok=True)
    for index, image in zip(indices, images):
        temporary = folder / f".writing-{index:06d}.png"
        Image.fromarray(image.squeeze(2) if image.shape[2] == 1 else image).save(temporary)
        os.replace(temporary, folder / f"{index:06d}.png")


def write_npz(path: Path, shards: list[Path]) -> None:
    """One file with all samples."""
    images = np.concatenate([load_shard(shard)["images"].numpy() for shard in shards])
    temporary = path.with_name(".writing.npz")
    np.savez(temporary, arr_0=images)
    os.replace(temporary, path)


def first_images(output: Path, number: int, file_format: str) -> np.ndarray:
    """The first samples, as bytes `(number, height, width, channels)`."""
    if file_format == "npz":
        with np.load(output / "samples.npz") as arrays:
            return arrays["arr_0"][:number]
    images = [np.asarray(Image.open(output / "images" / f"{index:06d}.png")) for index in range(number)]
    return np.stack([image if image.ndim == 3 else image[..., None] for image in images])
