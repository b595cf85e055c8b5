"""Many samples of a pipeline, the same whatever the number of processes, in shards that outlive an interruption.

    hf-decayed sample outputs/uvit --num 36 --output samples
    accelerate launch --num_processes 8 -m hf_decayed.cli sample user/model --num 50000 --output samples --format npz

Image i is drawn from a generator of its own, seeded by (seed, i), and always shares its batch with the same others.
"""

import inspect
import json
import math
import os
import shutil
from pathlib import Path

import diffusers
import numpy as np
import torch
from accelerate import Accelerator
from diffusers import DiffusionPipeline, ModelMixin, SchedulerMixin
from PIL import Image
from tqdm.auto import tqdm

from ..data.keyed_random import sample_seed
from ..data.latents import load_vae
from ..errors import UserError, explain_loading_errors, format_error
from ..kinds import package_class, read_class_name, read_json
from ..plots import save_grid
from ..provenance import pipeline_fingerprint, public_config


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
    accelerator: Accelerator | None = None,
) -> str:
    """Samples into the folder `output`; all processes call it. Returns what was done.

    Args:
        model (`str` or `DiffusionPipeline`): A pipeline, or its folder or repository.
        num (`int`, defaults to 36): How many.
        classes (`str`, defaults to `"all"`):
            `all` takes the classes in turn, `none` leaves the class open, else names or numbers with commas between.
        file_format (`str`, defaults to `"png"`):
            `png`: a file for each. `npz`: one file with `arr_0`, bytes `(num, height, width, channels)`, as the usual
            evaluators read it. A picture of the first ones comes with both.
        vae (`str`, *optional*): Autoencoder for a pipeline of latents that has none, as converted ones.
    """
    for name, value in (("num", num), ("batch_size", batch_size), ("num_inference_steps", num_inference_steps)):
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}.")
    if file_format not in ("png", "npz"):
        raise ValueError(f"`format` must be png or npz, got {file_format!r}.")
    accelerator = accelerator or Accelerator(cpu=not torch.accelerator.is_available())
    pipeline = load_pipeline(model, revision, trust_remote_code, vae) if isinstance(model, str) else model
    pipeline = pipeline.to(accelerator.device)
    pipeline.set_progress_bar_config(disable=True)
    labels = sample_labels(pipeline, classes, num)
    known = inspect.signature(pipeline.__call__).parameters
    # Said even if it is 1: some of diffusers' own would take more by themselves.
    guidance = {"guidance_scale": guidance_scale} if guidance_scale != 1.0 or "guidance_scale" in known else {}
    for name in (*guidance, "batch_size" if labels is None else "class_labels"):
        if name not in known:
            raise ValueError(f"{type(pipeline).__name__} takes no `{name}`; it takes {', '.join(known)}.")
    identity = {
        "model": pipeline_fingerprint(pipeline),
        "num": num,
        "classes": classes,
        "num_inference_steps": num_inference_steps,
        "guidance_scale": guidance_scale,
        "scheduler": public_config(pipeline.scheduler.config),
        "seed": seed,
        "batch_size": batch_size,
    }
    output, shards = Path(output), Path(output) / "shards"
    identity = json.loads(json.dumps(identity, default=str))
    done = f"{num} samples ({file_format}), samples.png, sampling.json: {output}"
    with accelerator.main_process_first():
        finished = prepare_samples_dir(output, identity)
    if file_format in finished:
        return done

    batches = range(math.ceil(num / batch_size))
    mine = [b for b in batches if b % accelerator.num_processes == accelerator.process_index]
    missing = [batch for batch in mine if not (shards / f"{batch:06d}.npy").exists()]
    bar = tqdm(
        total=len(mine), initial=len(mine) - len(missing), unit="batch", disable=not accelerator.is_main_process
    )
    for batch in missing:
        places = range(batch * batch_size, min((batch + 1) * batch_size, num))
        images = pipeline(
            **guidance,
            **({"batch_size": len(places)} if labels is None else {"class_labels": [labels[i] for i in places]}),
            num_inference_steps=num_inference_steps,
            # On the CPU, so that every device draws the same.
            generator=[torch.Generator().manual_seed(sample_seed(seed, place)) for place in places],
            output_type="np",
        ).images
        if not np.isfinite(images).all():  # of other people's pipelines; ours say so themselves
            raise ValueError(
                "The samples hold NaN or infinity, so there are no images: try float32, or less guidance."
            )
        images = (255 * images.clip(0, 1)).round().astype(np.uint8)
        shards.mkdir(exist_ok=True)
        temporary = shards / f".writing-{batch:06d}.npy"
        np.save(temporary, images)
        os.replace(temporary, shards / f"{batch:06d}.npy")
        bar.update()
    bar.close()
    accelerator.wait_for_everyone()
    if file_format == "png":  # each process its own, so that none waits long for another
        (output / "images").mkdir(exist_ok=True)
        for batch in mine:
            for place, image in enumerate(np.load(shards / f"{batch:06d}.npy"), batch * batch_size):
                image = Image.fromarray(image.squeeze(2) if image.shape[2] == 1 else image)
                image.save(output / "images" / f"{place:06d}.png")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        write_samples(output, [shards / f"{batch:06d}.npy" for batch in batches], num, file_format)
        write_record(output, {**identity, "finished": [*finished, file_format]})
        shutil.rmtree(shards)
    accelerator.wait_for_everyone()
    return done


def load_pipeline(
    model: str, revision: str | None = None, trust_remote_code: bool = False, vae: str | None = None
) -> DiffusionPipeline:
    """A pipeline from a folder or repository; ours is built from the classes of this package, so that no other code runs.

    `vae` names an autoencoder, for a pipeline of latents that has none or should have another.
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
    parameters = inspect.signature(pipeline_class.__init__).parameters
    for name in (parameters.keys() & index.keys()) - replaced.keys():
        value = index[name]
        arguments[name] = load_component(model, name, value, revision) if isinstance(value, list) else value
    for name, parameter in parameters.items():
        required = name != "self" and parameter.default is parameter.empty  # the network and the scheduler
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
    component_class = package_class(entry[1]) or getattr(diffusers, entry[1], None)
    if not isinstance(component_class, type) or not issubclass(component_class, (ModelMixin, SchedulerMixin)):
        raise UserError(
            f"`{name}` in 'model_index.json' names {entry[1]!r}, which is no network or scheduler of this package or of "
            "diffusers."
        )
    try:
        return component_class.from_pretrained(model, subfolder=name, revision=revision)
    except (
        Exception
    ) as error:  # damaged JSON, values of wrong types, weights of other shapes: whatever the library raises
        raise UserError(f"'{name}' of '{model}' is no {entry[1]}: {format_error(error)}") from error


def sample_labels(pipeline, classes: str, num: int) -> list[int] | None:
    """A class for each sample, or `None`."""
    network = pipeline.unet if hasattr(pipeline, "unet") else pipeline.transformer
    number = getattr(network.config, "num_classes", 0)
    if classes == "none" or (classes == "all" and number == 0):
        return None
    if classes == "all":
        return [place % number for place in range(num)]
    names = getattr(pipeline, "label2id", {})
    wanted = [classes] if classes in names else [each.strip() for each in classes.split(",")]  # names may have commas
    wanted = [int(each) if each.isdecimal() else each for each in wanted]
    # Diffusers' own take numbers, and check them themselves.
    chosen = pipeline.labels_of(wanted, 1) if hasattr(pipeline, "labels_of") else wanted
    return [chosen[place % len(chosen)] for place in range(num)]


def prepare_samples_dir(output: Path, identity: dict) -> list[str]:
    """Makes the folder, or goes on in one that was begun with the same settings; the formats that are finished."""
    record = output / "sampling.json"
    if record.exists():
        found = json.loads(record.read_text())
        changed = [
            f"{name} {found.get(name)} -> {value}" for name, value in identity.items() if found.get(name) != value
        ]
        begun = found.get("finished") or any((output / "shards").glob("[!.]*"))
        if changed and begun:  # a command that was refused before it drew anything holds nothing
            raise ValueError(f"'{output}' holds other samples ({', '.join(changed)}): name another --output.")
        if not changed:
            return found.get("finished", [])
    elif output.exists() and any(output.iterdir()):
        raise ValueError(f"'{output}' holds files that are no samples: name another --output.")
    (output / "shards").mkdir(parents=True, exist_ok=True)
    write_record(output, identity)
    return []


def write_record(output: Path, record: dict) -> None:
    temporary = output / ".writing.json"
    temporary.write_text(json.dumps(record, indent=2) + "\n")
    os.replace(temporary, output / "sampling.json")


def write_samples(output: Path, shards: list[Path], num: int, file_format: str) -> None:
    """A picture of the first samples, and for `npz` the one file."""
    first = np.load(shards[0])
    save_grid(output / "samples.png", first[:64] / 255)
    if file_format == "npz":
        images, place = np.empty((num, *first.shape[1:]), dtype=np.uint8), 0
        for shard in shards:
            part = np.load(shard)
            images[place : place + len(part)] = part
            place += len(part)
        np.savez(output / ".writing.npz", arr_0=images)
        os.replace(output / ".writing.npz", output / "samples.npz")
