"""A data set encoded once, in safetensors shards that survive an interruption."""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm.auto import tqdm

from ..errors import DataError
from .datasets import EvaluationDataset, identity_collate


Encoder = Callable[[torch.Tensor, list[int]], dict[str, torch.Tensor]]


def write_shards(
    encode: Encoder,
    images: EvaluationDataset,
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
        collate_fn=identity_collate,
        num_workers=num_workers,
    )
    batches = iter(tqdm(loader, desc=description, unit="batch", disable=not accelerator.is_main_process, leave=False))
    for number in missing:
        parts = [encode_batch(encode, batch, accelerator) for batch in take_batches(batches, len(shards[number]))]
        write_shard(shard_path(folder, number, len(shards)), [part for part in parts if part])
    accelerator.wait_for_everyone()
    return [shard_path(folder, number, len(shards)) for number in range(len(shards))]


def take_batches(batches: Iterator, number: int) -> Iterator:
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
