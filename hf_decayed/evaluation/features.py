"""Features of a whole data set: extracted once, in shards that outlive an interruption, in the data's own order.

    encode = transformer_encoder(model, ["last.mean", "6.cls"])
    features = extract_features(encode, images, "outputs/features", identity={"model": fingerprint(model)})
    features["last.mean"], features["6.cls"], features["labels"]

What is extracted is asked for by name. Of a transformers encoder: `<layer>.<pooling>`, with a layer's number (0 is the
embedding) or `last` (after the final norm, where there is one), and `cls`, `mean` (all tokens), `patch_mean` or
`pooler` (the model's own). Of a diffusion model: `<module>@<noise level>`.
"""

import hashlib
import json
import math
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from datasets import Dataset
from datasets import Image as ImageFeature
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm.auto import tqdm

from ..data import DataError, as_it_is, decode, sample_generator
from ..models.modeling_decayed_vit_mae import pool


Encoder = Callable[[torch.Tensor, list[int]], dict[str, torch.Tensor]]


class ImagesInOrder(torch.utils.data.Dataset):
    """Images as a processor prepares them, with label, place and a checksum of the decoded pixels."""

    def __init__(
        self,
        dataset: Dataset,
        image_column: str,
        label_column: str | None,
        processor,
        num_channels: int = 3,
        on_bad_image: str = "stop",
    ):
        columns = [image_column] + ([label_column] if label_column else [])
        self.dataset = dataset.select_columns(columns).cast_column(image_column, ImageFeature(decode=False))
        self.image_column, self.label_column = image_column, label_column
        self.processor, self.num_channels, self.on_bad_image = processor, num_channels, on_bad_image

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, places: list[int]) -> dict[str, torch.Tensor]:
        images, labels, kept, checksums = [], [], [], []
        rows = self.dataset[places]  # at once: a table gives rows one by one far more slowly
        row_labels = rows[self.label_column] if self.label_column else [-1] * len(places)
        for place, record, label in zip(places, rows[self.image_column], row_labels):
            pixels = decode(record, self.num_channels, place, self.on_bad_image)
            if pixels is None:
                continue
            images.append(pixels if self.num_channels == 1 else Image.fromarray(pixels))
            labels.append(label)
            kept.append(place)
            checksums.append(zlib.crc32(pixels.tobytes()))
        batch = {"labels": torch.tensor(labels), "places": torch.tensor(kept), "checksums": torch.tensor(checksums)}
        if images:
            layout = {"input_data_format": "channels_last"} if self.num_channels == 1 else {}
            batch["pixel_values"] = self.processor(images, return_tensors="pt", **layout)["pixel_values"]
        return batch


def extract_features(encode: Encoder, images: ImagesInOrder, *arguments, **settings) -> dict[str, torch.Tensor]:
    """Features by name, `labels` and pixel `checksums` of all images, in order; all processes call it and get the same.

    Takes what [`write_shards`] takes.
    """
    return read_shards(write_shards(encode, images, *arguments, **settings))


def write_shards(
    encode: Encoder,
    images: ImagesInOrder,
    folder: str | os.PathLike,
    identity: dict,
    accelerator: Accelerator | None = None,
    batch_size: int = 256,
    shard_size: int = 8192,
    num_workers: int = 0,
    description: str = "features",
    precision: str | None = None,
) -> list[Path]:
    """Files with the features of all images, in order; all processes call it.

    Args:
        encode (`Callable`): From a batch of `pixel_values` and the images' places to features `(batch, dim)` by name.
        images (`ImagesInOrder`): What to encode.
        folder (`str` or `os.PathLike`): Under it a folder is made for this `identity`, with one safetensors file per
            shard. Shards that are there and whole are used as they are.
        identity (`dict`): JSON-plain; all that the features depend on: model, features, preparation, data.
        shard_size (`int`, defaults to 8192): Images per file, rounded up to whole batches. Each process writes every
            n-th shard, so the result does not depend on how many processes there are.
        precision (`str`, *optional*): What `encode` computes in, if that is not the accelerator's.
    """
    accelerator = accelerator or Accelerator()
    batches_per_shard = math.ceil(shard_size / batch_size)
    identity = {**identity, "precision": precision or accelerator.mixed_precision, "number": len(images)}
    text = json.dumps({**identity, "batches": [batch_size, batches_per_shard]}, sort_keys=True)
    folder = Path(folder) / hashlib.sha256(text.encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    if accelerator.is_main_process:
        (folder / "identity.json").write_text(text + "\n")

    all_batches = [
        list(range(start, min(start + batch_size, len(images)))) for start in range(0, len(images), batch_size)
    ]
    shards = [
        all_batches[start : start + batches_per_shard] for start in range(0, len(all_batches), batches_per_shard)
    ]
    mine = range(accelerator.process_index, len(shards), accelerator.num_processes)
    missing = [number for number in mine if not is_whole(shard_path(folder, number, len(shards)))]
    loader = torch.utils.data.DataLoader(
        images,
        batch_sampler=[batch for number in missing for batch in shards[number]],
        collate_fn=as_it_is,
        num_workers=num_workers,
    )
    batches = iter(tqdm(loader, desc=description, unit="batch", disable=not accelerator.is_main_process, leave=False))
    for number in missing:
        parts = [encode_batch(encode, batch, accelerator) for batch in take(batches, len(shards[number]))]
        write_shard(shard_path(folder, number, len(shards)), [part for part in parts if part])
    accelerator.wait_for_everyone()
    return [shard_path(folder, number, len(shards)) for number in range(len(shards))]


def take(batches: Iterator, number: int) -> Iterator:
    for _ in range(number):
        yield next(batches)


@torch.no_grad()
def encode_batch(encode: Encoder, batch: dict, accelerator: Accelerator) -> dict[str, torch.Tensor]:
    if "pixel_values" not in batch:  # every image of it was bad
        return {}
    with accelerator.autocast():
        features = encode(batch["pixel_values"].to(accelerator.device), batch["places"].tolist())
    features = {name: each.float().cpu() for name, each in features.items()}
    return {**features, "labels": batch["labels"], "checksums": batch["checksums"]}


def shard_path(folder: Path, number: int, total: int) -> Path:
    return folder / f"shard-{number:05d}-of-{total:05d}.safetensors"


def write_shard(path: Path, parts: list[dict[str, torch.Tensor]]) -> None:
    """Whole or not at all."""
    if not parts:
        raise DataError(f"None of the images of {path.stem} could be decoded.")
    temporary = path.with_name(f".writing-{os.getpid()}-{path.name}")  # two runs may want the same
    save_file({name: torch.cat([part[name] for part in parts]).contiguous() for name in parts[0]}, temporary)
    os.replace(temporary, path)


def is_whole(path: Path) -> bool:
    if not path.exists():
        return False
    try:
        with safe_open(path, "pt"):  # checks the header against the length of the file
            return True
    except SafetensorError:
        return False


def read_shards(paths: list[Path]) -> dict[str, torch.Tensor]:
    """All shards one after the other, each tensor allocated once."""
    shapes, kinds, rows = {}, {}, []
    for path in paths:
        with safe_open(path, "pt") as shard:
            for name in shard.keys():
                part = shard.get_slice(name)
                shapes.setdefault(name, part.get_shape()[1:])
                kinds[name] = kinds[name] if name in kinds else part[:1].dtype
            rows.append(part.get_shape()[0])
    tensors = {name: torch.empty(sum(rows), *shapes[name], dtype=kinds[name]) for name in shapes}
    start = 0
    for path, count in zip(paths, rows):
        with safe_open(path, "pt") as shard:
            for name, tensor in tensors.items():
                tensor[start : start + count] = shard.get_tensor(name)
        start += count
    return tensors


def transformer_encoder(model: torch.nn.Module, names: list[str]) -> Encoder:
    """Encodes with a transformers vision model, ours or anybody's; maps of convolutional models are averaged."""
    wanted = [name.rpartition(".") for name in names]
    for (layer, _, pooling), name in zip(wanted, names):
        if pooling not in ("cls", "mean", "patch_mean", "pooler") or not (layer == "last" or layer.isdecimal()):
            raise ValueError(
                f"A feature is `<layer>.<pooling>`: a number or 'last', and cls, mean, patch_mean or pooler; got '{name}'."
            )
    model.eval()
    hidden = any(layer != "last" for layer, _, _ in wanted)
    if getattr(model.config, "model_type", "") == "vit_mae":
        model.config.mask_ratio = 0.0  # it masks in evaluation too

    def encode(pixel_values, places):
        outputs = model(pixel_values.to(next(model.parameters()).dtype), output_hidden_states=hidden)
        features = {}
        for name, (layer, _, pooling) in zip(names, wanted):
            if layer != "last" and int(layer) >= len(outputs.hidden_states):
                raise ValueError(f"'{name}': the model has layers 0 to {len(outputs.hidden_states) - 1}.")
            if pooling == "pooler":
                features[name] = outputs.pooler_output.flatten(1)
            else:
                tokens = outputs.last_hidden_state if layer == "last" else outputs.hidden_states[int(layer)]
                features[name] = pooled(tokens, pooling)
        return features

    return encode


def diffusion_encoder(
    model: torch.nn.Module, scheduler, blocks: list[str], levels: list[float], seed: int = 0, **inputs
) -> Encoder:
    """Encodes with a diffusers model: the average over places of what the named modules put out, at given noise levels.

    Levels count from 0, data, to 1, noise: parts of the scheduler's timesteps, or, where images flow to noise in a straight
    line, of the way, so levels of the two kinds are not the same. The noise belongs to the image and the level, so features
    do not depend on batches or processes. `pixel_values` must come in the range that the model was trained on, usually
    [-1, 1]; `inputs` go to the model as they are, each repeated for the batch if it has one entry.
    """
    from diffusers import DDPMScheduler  # here: other encoders need not wait for it

    model.eval()
    modules = dict(model.named_modules())
    unknown = [block for block in blocks if block not in modules]
    if unknown:
        raise ValueError(f"The model has no module {', '.join(unknown)}; it has {', '.join(list(modules)[1:30])}, ...")
    outside = [level for level in levels if not 0 <= level <= 1]
    if outside:
        raise ValueError(f"Noise levels lie in [0, 1], from data to noise; got {outside[0]}.")
    flows = not hasattr(scheduler, "add_noise") or getattr(scheduler.config, "use_flow_sigmas", False)
    last = scheduler.config.num_train_timesteps - 1
    # DDPM's, of the same levels: solvers add noise by the steps that they are set up for, and DPM-Solver, before it is set
    # up for any, by the levels in reverse.
    diffusion = None if flows else DDPMScheduler.from_config(scheduler.config)

    def noised(pixel_values, noise, level):
        """The sample at a level, and the time that the model takes."""
        if not flows:
            time = torch.tensor([min(round(level * (last + 1)), last)], device=pixel_values.device)
            return diffusion.add_noise(pixel_values, noise, time.expand(len(noise))), time
        own_time = getattr(model, "time_of_noise_level", lambda level: level * (last + 1))
        return torch.lerp(pixel_values, noise, level), torch.tensor([own_time(level)], device=pixel_values.device)

    extra = getattr(model, "num_extra_tokens", 0)  # time and class, which say nothing of the image

    def keep(features, name):
        def hook(module, arguments, output):
            output = output[0] if isinstance(output, tuple) else output
            output = getattr(output, "sample", output)
            features[name] = pooled(output[:, extra:] if output.ndim == 3 else output, "mean")

        return hook

    def encode(pixel_values, places):
        features = {}
        for level in levels:
            draws = [sample_generator(seed, round(level * 1000), place) for place in places]
            noise = np.stack([each.standard_normal(pixel_values.shape[1:]) for each in draws])
            sample, time = noised(pixel_values, torch.from_numpy(noise).to(pixel_values), level)
            handles = [modules[block].register_forward_hook(keep(features, f"{block}@{level:g}")) for block in blocks]
            try:
                repeated = {name: each.expand(len(places), *each.shape[1:]) for name, each in inputs.items()}
                model(sample.to(model.dtype), time.expand(len(places)), **repeated)
            except TypeError as error:
                raise ValueError(
                    f"{type(model).__name__} cannot be called with a sample and a time: {error}"
                ) from error
            finally:
                for handle in handles:
                    handle.remove()
        return features

    return encode


def pooled(tokens: torch.Tensor, pooling: str) -> torch.Tensor:
    """One feature per image, from tokens `(batch, number, dim)` or a map `(batch, dim, height, width)`."""
    if tokens.ndim == 4:
        if pooling != "mean":
            raise ValueError(f"A convolutional model has no class token: pool by `mean`, not `{pooling}`.")
        return tokens.mean(dim=(2, 3))
    return pool(tokens, pooling)


def fingerprint(model: torch.nn.Module) -> str:
    """Of weights and config: the same for the same model, wherever it lies."""
    digest = hashlib.sha256(type(model).__name__.encode())
    config = model.config.to_dict() if hasattr(model.config, "to_dict") else dict(model.config)
    meaning = {
        name: value for name, value in config.items() if not name.startswith("_") and name != "transformers_version"
    }
    digest.update(json.dumps(meaning, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
