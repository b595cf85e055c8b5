"""Shrinks the images of a data set once, so that training does not decode large ones; `hf-decayed prepare`."""

import hashlib
import io
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from datasets import Dataset
from datasets import Image as ImageFeature
from PIL import Image
from tqdm.auto import tqdm

from ..command_line import count_cores
from ..errors import DataError, UserError
from ..provenance import sanitized_command, versions
from .decoding import decode_image, decode_reduced, is_grey, read_content, upright_size
from .shards import whole_file
from .sources import HELD_OUT_RULE, load_all_splits, rows_fingerprint, split_validation


RECORD = "prepared.json"


def prepare_images(
    data: str,
    output: str | os.PathLike,
    size: int = 256,
    quality: int = 95,
    uncompressed: bool = False,
    on_bad_image: str = "stop",
    num_workers: int | None = None,
    shard_size: int = 1024,
) -> str:
    """Writes a data set as parquet files, with images whose short side is at most `size` pixels; returns a summary.

    The folder has all splits and columns, and loads as any other folder of parquet files. Smaller images stay as they are. Data
    without a split for evaluation gets one, `validation`: the images that scripts would hold out of the originals. Until the
    folder is complete it has the suffix `.incomplete`; a stopped command continues there when it is repeated.

    Args:
        data (`str`): Folder or file as `--dataset_path` takes it, or a data set on the Hub.
        output (`str` or `os.PathLike`): New folder.
        quality (`int`, defaults to 95): JPEG quality, 1 to 100.
        uncompressed (`bool`): Write PPMs instead: several times the disk space, and random crops need no decoding.
        num_workers (`int`, *optional*): Threads; by default as many as there are cores.
        shard_size (`int`, defaults to 1024): Images per file.
    """
    is_path = Path(data).exists() or data.startswith((".", "/", "~"))
    splits, name = load_all_splits(dataset_path=data) if is_path else load_all_splits(dataset_name=data)
    splits, held_out_rule = hold_out(splits)
    encoding = "ppm" if uncompressed else f"jpeg {quality}"
    identity = describe(splits, name) | {"size": size, "encoding": encoding, "shard_size": shard_size}
    output = Path(output)
    if read_record(output, identity):
        return f"'{output}' holds these images already"
    folder = output.with_name(output.name + ".incomplete")
    shards = (read_record(folder, identity) or {}).get("shards", {})  # those that an earlier command has written
    (folder / "data").mkdir(parents=True, exist_ok=True)  # where `datasets` takes splits of any name
    write_record(folder, {**identity, "shards": shards})  # first of all: a folder without a record is not continued

    root = Path(data).resolve() if is_path else None
    number = sum(len(rows) for rows in splits.values())
    counts = dict.fromkeys(splits, 0)
    with (
        ThreadPoolExecutor(num_workers or count_cores()) as pool,
        tqdm(total=number, desc="preparing", unit="image") as progress,
    ):
        for split, rows in splits.items():
            starts = range(0, len(rows), shard_size)
            for index, start in enumerate(starts):
                path = folder / "data" / f"{split}-{index:05d}-of-{len(starts):05d}.parquet"
                shard = range(start, min(start + shard_size, len(rows)))
                if not path.exists() or shards.get(path.name, {}).get("sha256") != file_digest(path):
                    jpeg_quality = None if uncompressed else quality
                    written = write_shard(path, rows, shard, size, jpeg_quality, on_bad_image, root, pool)
                    shards[path.name] = {"images": written, "sha256": file_digest(path)}
                    write_record(folder, {**identity, "shards": shards})
                counts[split] += shards[path.name]["images"]
                progress.update(len(shard))
    if not all(counts.values()):
        raise DataError(f"None of the images of '{name}' could be decoded.")
    about = {"held_out_rule": held_out_rule, "images": counts, "skipped": number - sum(counts.values())}
    command = " ".join(["hf-decayed", *sanitized_command()])
    write_record(folder, identity | about | {"shards": shards, "command": command, "versions": versions()})
    # Of a command that was killed, or of one that still wrote splits beside the record.
    for leftover in [*folder.rglob(".writing-*"), *folder.glob("*.parquet")]:
        leftover.unlink()
    os.replace(folder, output)
    skipped = f", {about['skipped']} skipped" if about["skipped"] else ""
    megabytes = sum(path.stat().st_size for path in output.rglob("*.*")) / 1e6
    return f"{sum(counts.values())} images{skipped} in {len(shards)} files, {megabytes:.1f} MB: {output}"


def find_image_column(rows: Dataset) -> str:
    """The only column of images; not `find_columns`, because any number of label columns may stay."""
    images = [column for column, feature in rows.features.items() if isinstance(feature, ImageFeature)]
    if not images:
        raise DataError(f"There is no column of images among {', '.join(rows.features)}.")
    if len(images) > 1:
        raise UserError(f"Found the image columns {', '.join(images)}: masks cannot be prepared yet.")
    return images[0]


def hold_out(splits: dict[str, Dataset]) -> tuple[dict[str, Dataset], str]:
    """Splits including one for evaluation, and a description of which images are in it."""
    image_columns = {split: find_image_column(rows) for split, rows in splits.items()}
    if set(splits) & {"validation", "val", "test"} or "train" not in splits:
        return splits, "the evaluation split"
    held_out, train = split_validation(splits["train"], image_columns["train"])
    return {**splits, "train": train, "validation": held_out}, HELD_OUT_RULE


def describe(splits: dict[str, Dataset], name: str) -> dict:
    """Identity of the images for the record: a folder that was prepared from others is not continued."""
    described = {
        split: {"rows": len(rows), "fingerprint": rows_fingerprint(rows, find_image_column(rows))}
        for split, rows in splits.items()
    }
    return {"source": name, "splits": described}


def read_record(folder: Path, identity: dict) -> dict | None:
    """The record of a folder that was prepared with these settings; one that holds anything else is refused."""
    if not folder.exists() or (folder.is_dir() and not any(folder.glob("[!.]*"))):
        return None
    try:
        record = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError):
        raise UserError(f"'{folder}' exists, and holds no images that this command prepared.") from None
    if different := [name for name in identity if record.get(name) != identity[name]]:
        raise UserError(f"'{folder}' was prepared otherwise ({', '.join(different)} differ): name another folder.")
    return record


def write_record(folder: Path, record: dict) -> None:
    with whole_file(folder / RECORD) as temporary:
        temporary.write_text(json.dumps(record, indent=2) + "\n")


def file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_shard(
    path: Path,
    rows: Dataset,
    indices: range,
    size: int,
    quality: int | None,
    on_bad_image: str,
    root: Path | None,
    pool: ThreadPoolExecutor,
) -> int:
    """Writes some rows of a split, or nothing; returns how many images could be decoded."""
    image_column = find_image_column(rows)
    columns = rows.cast_column(image_column, ImageFeature(decode=False))[indices.start : indices.stop]
    records = columns[image_column]
    contents = list(
        pool.map(
            lambda index, record: decode_image(
                record, 3, index, on_bad_image, lambda image, _: shrink_image(image, record, size, quality)
            ),
            indices,
            records,
        )
    )
    good = [position for position, content in enumerate(contents) if content is not None]
    columns = {name: [values[position] for position in good] for name, values in columns.items()}
    columns[image_column] = [
        {"bytes": contents[position], "path": relative_name(records[position]["path"], root)} for position in good
    ]
    with whole_file(path) as temporary:
        Dataset.from_dict(columns, features=rows.features).to_parquet(temporary)
    return len(good)


def shrink_image(image: Image.Image, record: dict, size: int, quality: int | None) -> bytes:
    """An opened image as a file with a short side of at most `size` pixels: JPEG, or PPM where `quality` is `None`."""
    height, width = upright_size(image)
    content = read_content(record)
    if min(height, width) <= size and quality is not None and content is not None:
        image.load()  # raises now if the file is broken
        return content
    scale = min(1.0, size / min(height, width))
    new_height, new_width = max(1, round(scale * height)), max(1, round(scale * width))
    # Decoded at twice the new size or more: every epoch sees the result, so quality is worth the time.
    box = (0, 0, height, width)
    image, box, _ = decode_reduced(image, 1 if is_grey(image) else 3, box, (2 * new_height, 2 * new_width))
    if (image.width, image.height) != (new_width, new_height):
        top, left, height, width = box
        sides = (left, top, left + width, top + height)
        image = image.resize((new_width, new_height), Image.Resampling.BICUBIC, sides)
    buffer = io.BytesIO()
    image.save(buffer, "PPM") if quality is None else image.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def relative_name(path: str | None, root: Path | None) -> str | None:
    """Path of a file inside its data set, without the folders above."""
    if path is None:
        return None
    file = Path(path)
    return file.relative_to(root).as_posix() if root is not None and file.is_relative_to(root) else file.name
