"""Features of a data set: in safetensors shards with checksums that survive an interruption, or in memory."""

import hashlib
import json
import logging
import math
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm.auto import tqdm

from ..errors import DataError
from .datasets import EvaluationDataset, identity_collate


logger = logging.getLogger(__name__)

# From `pixel_values` and the indices of the images to features `(batch, dim)` by name.
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
    """Encodes all images into shards and returns the files, in the order of the data; all processes call it.

    Args:
        encode (`Callable`): From a batch of `pixel_values` and the indices of its images to features `(batch, dim)` by name.
        images (`EvaluationDataset`): Images to encode.
        folder (`str` or `os.PathLike`): Has a subfolder for every `identity`, with one safetensors file per shard.
            Existing shards are used if their checksum is right; others are rebuilt, with one line in the log.
        identity (`dict`): JSON-plain; everything that the features depend on: model, features, preparation, data.
        shard_size (`int`, defaults to 8192): Images per file, rounded up to whole batches. With n processes, each writes
            every n-th shard, so the number of processes does not change the result.
        precision (`str`, *optional*): Precision that `encode` computes in, if it is not the accelerator's.
    """
    accelerator = accelerator or Accelerator()
    batches_per_shard = math.ceil(shard_size / batch_size)
    identity = {**identity, "precision": precision or accelerator.mixed_precision, "number": len(images)}
    text = json.dumps({**identity, "batches": [batch_size, batches_per_shard]}, sort_keys=True)
    folder = Path(folder) / hashlib.sha256(text.encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    if accelerator.is_main_process:
        (folder / "identity.json").write_text(text + "\n")

    batches = split_batches(len(images), batch_size)
    shards = [batches[start : start + batches_per_shard] for start in range(0, len(batches), batches_per_shard)]
    paths = [folder / f"shard-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(len(shards))]
    own = range(accelerator.process_index, len(shards), accelerator.num_processes)
    missing = [number for number in own if not has_valid_shard(paths[number])]
    own_batches = [batch for number in missing for batch in shards[number]]
    encoded = encode_batches(encode, images, own_batches, accelerator, num_workers, description)
    for number in missing:
        write_shard(paths[number], [next(encoded) for _ in shards[number]])
    accelerator.wait_for_everyone()
    return paths


def encode_dataset(
    encode: Encoder,
    images: EvaluationDataset,
    accelerator: Accelerator | None = None,
    batch_size: int = 64,
    description: str = "features",
) -> dict[str, torch.Tensor]:
    """Features by name, `labels` and `checksums` of all images, in the order of the data, without files.

    All processes call it and get the same. With the same `batch_size` the batches are those of [`write_shards`], so that the
    features are bit-equal to the ones in its shards.
    """
    accelerator = accelerator or Accelerator()
    batches = split_batches(len(images), batch_size)
    processes, batch_count = accelerator.num_processes, len(batches)
    # Every process encodes equally many batches, because a sharded model runs on all of them at once; repeats are dropped.
    own = range(accelerator.process_index, math.ceil(batch_count / processes) * processes, processes)
    own_batches = [batches[min(number, batch_count - 1)] for number in own]
    encoded = dict(zip(own, encode_batches(encode, images, own_batches, accelerator, 0, description)))
    parts = {number: part for process in gather_object([encoded]) for number, part in process.items()}
    return concatenate([parts[number] for number in range(batch_count)], "the data set")


def split_batches(number: int, batch_size: int) -> list[list[int]]:
    """Indices of all images in consecutive batches."""
    return [list(range(start, min(start + batch_size, number))) for start in range(0, number, batch_size)]


def encode_batches(
    encode: Encoder,
    images: EvaluationDataset,
    batches: list[list[int]],
    accelerator: Accelerator,
    num_workers: int,
    description: str,
) -> Iterator[dict[str, torch.Tensor]]:
    """Features, labels and checksums of batches of indices, on the CPU, one batch at a time."""
    loader = torch.utils.data.DataLoader(
        images,
        batch_sampler=batches,
        collate_fn=identity_collate,
        num_workers=num_workers,
        generator=torch.Generator(),  # its own: an evaluation must not advance the one of dropout
    )
    for batch in tqdm(loader, desc=description, unit="batch", disable=not accelerator.is_main_process, leave=False):
        yield encode_batch(encode, batch, accelerator)


@torch.no_grad()
def encode_batch(encode: Encoder, batch: dict, accelerator: Accelerator) -> dict[str, torch.Tensor]:
    if "pixel_values" not in batch:  # none of its images could be decoded
        return {}
    with accelerator.autocast():
        features = encode(batch["pixel_values"].to(accelerator.device), batch["indices"].tolist())
    features = {name: feature.float().cpu() for name, feature in features.items()}
    return {**features, **{name: batch[name] for name in ("labels", "checksums", "masks") if name in batch}}


def concatenate(parts: list[dict[str, torch.Tensor]], source: str) -> dict[str, torch.Tensor]:
    """Encoded batches as one; a batch without decodable images is empty."""
    parts = [part for part in parts if part]
    if not parts:
        raise DataError(f"None of the images of {source} could be decoded.")
    return {name: torch.cat([part[name] for part in parts]).contiguous() for name in parts[0]}


def write_shard(path: Path, parts: list[dict[str, torch.Tensor]]) -> None:
    """Writes a complete shard or none."""
    tensors = concatenate(parts, path.stem)
    with whole_file(path) as temporary:
        save_file(tensors, temporary, metadata={"checksum": tensors_checksum(tensors)})


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary path to write to, which is renamed at the end; an error leaves nothing behind."""
    temporary = path.with_name(f".writing-{os.getpid()}-{path.name}")  # another run may write the same file
    try:
        yield temporary
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk by an error of its own
        temporary.unlink(missing_ok=True)
        raise DataError(f"'{path.name}' could not be written in '{path.parent}': {error}") from error


def tensors_checksum(tensors: dict[str, torch.Tensor]) -> str:
    """CRC-32 of names, types, shapes and bytes."""
    checksum = 0
    for name, tensor in sorted(tensors.items()):
        checksum = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), checksum)
        checksum = zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy(), checksum)
    return f"crc32:{checksum:08x}"


def load_shard(path: Path) -> dict[str, torch.Tensor]:
    """Tensors of a shard; a shard that is damaged, or has no checksum, raises `DataError`."""
    try:
        with safe_open(path, "pt") as shard:
            checksum = (shard.metadata() or {}).get("checksum")
            tensors = {name: shard.get_tensor(name) for name in shard.keys()}
    except (OSError, SafetensorError) as error:
        raise DataError(f"'{path.name}' in '{path.parent}' cannot be read ({error}).") from error
    if checksum is None:
        raise DataError(f"'{path.name}' in '{path.parent}' has no checksum.")
    if checksum != tensors_checksum(tensors):
        raise DataError(f"'{path.name}' in '{path.parent}' is damaged: its checksum is wrong.")
    return tensors


def has_valid_shard(path: Path) -> bool:
    if not path.exists():
        return False
    try:
        load_shard(path)
    except DataError as error:
        logger.warning("Rebuilding a shard: %s", error)
        return False
    return True


def read_shards(paths: list[Path]) -> dict[str, torch.Tensor]:
    """All shards in order, as one; every tensor is allocated once. A damaged shard raises `DataError`."""
    shards = [load_shard(path) for path in paths]  # mapped from the files, not copied
    rows = [len(shard["labels"]) for shard in shards]
    tensors = {name: part.new_empty(sum(rows), *part.shape[1:]) for name, part in shards[0].items()}
    start = 0
    for shard, number in zip(shards, rows):
        for name, tensor in tensors.items():
            tensor[start : start + number] = shard[name]
        start += number
    return tensors
