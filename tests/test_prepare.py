"""`hf-decayed prepare`: small images, labels, names and splits kept; killed and repeated; errors in one sentence."""

import io
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import ROOT
from datasets import ClassLabel, Dataset, DatasetDict, Features, load_dataset
from datasets import Image as ImageFeature
from PIL import Image

from hf_decayed.cli import main
from hf_decayed.data import prepare
from hf_decayed.data.datasets import TrainingImages
from hf_decayed.data.decoding import decode_image, view_pixels
from hf_decayed.data.prepare import prepare_images
from hf_decayed.data.sources import HELD_OUT_RULE, load_image_splits, load_splits
from hf_decayed.data.transforms import Augmentation
from hf_decayed.errors import DataError
from hf_decayed.models.image_processing_decayed import to_pixels


def photo(height, width, seed=0):
    coarse = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height))


@pytest.fixture
def photos(tmp_path):
    for number in range(10):
        for name in ("cats", "dogs"):
            (tmp_path / "photos" / name).mkdir(parents=True, exist_ok=True)
            image = photo(90, 120, seed=2 * number + (name == "dogs"))
            image.save(tmp_path / "photos" / name / f"{number}.jpg", quality=95)
    return tmp_path / "photos"


def rows_by_name(rows):
    records = rows.cast_column("image", ImageFeature(decode=False))
    return {"/".join(row["image"]["path"].split("/")[-2:]): row for row in records}


def test_labels_names_and_held_out_images_are_those_of_the_originals(photos, tmp_path, capsys):
    output = tmp_path / "small"
    assert main(["prepare", str(photos), "--size", "40", "--output", str(output)]) == 0
    assert "20 images in 2 files" in capsys.readouterr().out
    originals, prepared = load_image_splits(dataset_path=str(photos)), load_image_splits(dataset_path=str(output))
    assert prepared.label_column == "label" and prepared.class_names() == ["cats", "dogs"]
    for split in ("train", "held_out"):
        before, after = rows_by_name(getattr(originals, split)), rows_by_name(getattr(prepared, split))
        assert list(before) == list(after) and [row["label"] for row in before.values()] == [
            row["label"] for row in after.values()
        ]
        for name, row in after.items():
            image = Image.open(io.BytesIO(row["image"]["bytes"]))
            assert image.size == (53, 40) and image.format == "JPEG" and row["image"]["path"] == name
            expected = Image.open(photos / name).resize(image.size, Image.Resampling.BICUBIC)
            assert np.abs(np.asarray(image, float) - np.asarray(expected, float)).mean() < 3
    record = json.loads((output / "prepared.json").read_text())
    assert record["held_out_rule"] == HELD_OUT_RULE and sum(record["images"].values()) == 20
    assert str(tmp_path) not in (output / "prepared.json").read_text()
    augmentation = Augmentation((16, 16), 3, 0, [0.5] * 3, [0.5] * 3, seed=0)
    images = TrainingImages.from_splits(prepared, augmentation, memory_limit=0)
    assert images.__getitems__([(0, 0), (0, 1)])["pixel_values"].shape == (2, 3, 16, 16)
    # The same command again finds them; other settings are another folder.
    assert main(["prepare", str(photos), "--size", "40", "--output", str(output)]) == 0
    assert "holds these images already" in capsys.readouterr().out
    assert main(["prepare", str(photos), "--size", "41", "--output", str(output)]) == 2
    assert "was prepared otherwise (size differ)" in capsys.readouterr().err


def test_kinds_of_images(tmp_path):
    """Small files stay as they are, bytes and all; grey stays grey; what lies on its side is turned; PPM on request."""
    folder = tmp_path / "mixed" / "train"
    folder.mkdir(parents=True)
    photo(20, 30).save(folder / "a_small.png")
    photo(90, 120).convert("L").save(folder / "b_grey.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    photo(90, 121).save(folder / "c_turned.jpg", exif=exif)
    photo(90, 120).convert("P").save(folder / "d_palette.gif")
    (tmp_path / "mixed" / "test").mkdir()
    photo(300, 40).save(tmp_path / "mixed" / "test" / "tall.png")
    prepare_images(str(tmp_path / "mixed"), tmp_path / "small", size=32)
    train, test, _ = load_splits(dataset_path=str(tmp_path / "small"))
    records = [row["image"] for row in train.cast_column("image", ImageFeature(decode=False))]
    assert records[0]["bytes"] == (folder / "a_small.png").read_bytes()
    opened = [Image.open(io.BytesIO(record["bytes"])) for record in records]
    assert [image.size for image in opened] == [(30, 20), (43, 32), (32, 43), (43, 32)]
    assert [image.mode for image in opened] == ["RGB", "L", "RGB", "RGB"]
    assert test[0]["image"].size == (32, 240)
    prepare_images(str(tmp_path / "mixed"), tmp_path / "ppm", size=32, uncompressed=True)
    records = load_splits(dataset_path=str(tmp_path / "ppm"))[0].cast_column("image", ImageFeature(decode=False))
    assert [row["image"]["bytes"][:2] for row in records] == [b"P6", b"P5", b"P6", b"P6"]


@pytest.mark.parametrize("num_channels", [1, 3])
def test_crops_of_uncompressed_images_are_those_of_decoded_ones(num_channels):
    """The pixels of a PPM are used as they lie in the file, if they have the channels; a file that was cut is named."""
    augmentation = Augmentation((16, 16), num_channels, 0, [0.5] * num_channels, [0.5] * num_channels, seed=0)
    for mode in ("RGB", "L"):
        buffer = io.BytesIO()
        photo(40, 60).convert(mode).save(buffer, "PPM")
        assert (view_pixels(Image.open(buffer), num_channels) is None) == (len(mode) != num_channels)
        for draws in augmentation.draw([(0, index) for index in range(5)]):
            decoded = to_pixels(Image.open(buffer), num_channels)
            decoded = Image.fromarray(decoded if num_channels == 3 else decoded[:, :, 0])
            assert np.array_equal(augmentation.crop(Image.open(buffer), draws), augmentation.crop(decoded, draws))
    record = {"bytes": buffer.getvalue()[:-1], "path": "photos/cut.ppm"}
    with pytest.raises(DataError, match="'cut.ppm' .* cannot be decoded"):
        decode_image(record, num_channels, 0, decode=lambda image, _: augmentation.crop(image, draws))


def test_bad_input_is_one_sentence(photos, tmp_path, capsys):
    def error(*words):
        assert main(["prepare", *map(str, words)]) == 2
        lines = capsys.readouterr().err.strip().splitlines()
        return next(line for line in lines if line.startswith("hf-decayed prepare: "))

    assert "There is nothing at" in error(tmp_path / "absent", "--output", tmp_path / "out")
    (photos / "cats" / "5.jpg").write_bytes(b"no image")
    assert "'5.jpg' (row " in error(photos, "--size", 40, "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    command = ["prepare", str(photos), "--size", "40", "--output", str(tmp_path / "out"), "--on_bad_image", "skip"]
    assert main(command) == 0
    assert "19 images, 1 skipped in 2 files" in capsys.readouterr().out
    assert "exists, and holds no images that this command prepared" in error(photos, "--output", photos)
    masks = tmp_path / "segmentation"
    for name in ("images", "masks"):
        (masks / name).mkdir(parents=True)
        photo(8, 8).convert("L").save(masks / name / "x.png")
    assert "masks cannot be prepared yet" in error(masks, "--output", tmp_path / "other")
    with pytest.raises(DataError, match="There is no column of images among text"):
        Dataset.from_dict({"text": ["a"]}).to_parquet(tmp_path / "text.parquet")
        prepare_images(str(tmp_path / "text.parquet"), tmp_path / "other")
    for path in photos.rglob("*.jpg"):
        path.write_bytes(path.stem.encode())
    with pytest.raises(DataError, match="None of the images of 'photos' could be decoded"):
        prepare_images(str(photos), tmp_path / "none", on_bad_image="skip")
    with pytest.raises(SystemExit):
        main(["prepare", str(photos), "--output", "x", "--quality", "101"])
    assert "must be at least 1 and at most 100" in capsys.readouterr().err


def test_several_labels_stay(tmp_path):
    """As in CIFAR-100, which has two; training is then told which one it should take."""
    features = {"img": ImageFeature(), "fine": ClassLabel(names=["a", "b"]), "coarse": ClassLabel(names=["c", "d"])}
    rows = {"img": [photo(40, 50, seed) for seed in range(3)], "fine": [0, 1, 1], "coarse": [1, 0, 1]}
    (tmp_path / "data").mkdir()
    for split in ("train", "test"):
        Dataset.from_dict(rows, features=Features(features)).to_parquet(tmp_path / "data" / f"{split}.parquet")
    prepare_images(str(tmp_path / "data"), tmp_path / "small", size=20)
    splits = load_image_splits(dataset_path=str(tmp_path / "small"), label_column="coarse")
    assert splits.class_names() == ["c", "d"] and list(splits.train["coarse"]) == rows["coarse"]
    assert list(splits.train["fine"]) == rows["fine"] and splits.train[0]["img"].size == (25, 20)


def test_splits_of_any_name_stay_apart(tmp_path):
    numbers = {"train": 6, "train_extra": 4, "unlabeled": 5, "validation": 3}
    rows = {
        split: Dataset.from_dict({"image": [photo(8, 8, seed) for seed in range(number)]}).cast_column(
            "image", ImageFeature()
        )
        for split, number in numbers.items()
    }
    DatasetDict(rows).save_to_disk(tmp_path / "rows")
    prepare_images(str(tmp_path / "rows"), tmp_path / "small", size=4)
    prepared = load_dataset(str(tmp_path / "small"), cache_dir=str(tmp_path / "cache"))
    assert {split: len(rows) for split, rows in prepared.items()} == numbers


def test_what_was_cut_off_is_written_again(photos, tmp_path, monkeypatch):
    """An interrupted command: some shards are there, one is cut off, a temporary file is left; the end is the same."""
    prepare_images(str(photos), tmp_path / "whole", size=40, shard_size=4)
    write_shard = prepare.write_shard

    def interrupted(number):
        """Writes so many shards; the last of them is not in the record."""
        left = iter(range(number - 1, -1, -1))

        def write(*arguments):
            written = write_shard(*arguments)
            if next(left) == 0:
                raise KeyboardInterrupt
            return written

        return write

    for number in (1, 3):
        monkeypatch.setattr(prepare, "write_shard", interrupted(number))
        with pytest.raises(KeyboardInterrupt):
            prepare_images(str(photos), tmp_path / "again", size=40, shard_size=4)
    monkeypatch.undo()
    incomplete = tmp_path / "again.incomplete"
    assert not (tmp_path / "again").exists() and len(list(incomplete.rglob("*.parquet"))) == 3
    first = sorted(incomplete.rglob("*.parquet"))[0]
    first.write_bytes(first.read_bytes()[:-20])
    prepare_images(str(photos), tmp_path / "again", size=40, shard_size=4)
    assert not incomplete.exists()
    written = sorted((tmp_path / "whole" / "data").iterdir())
    assert len(written) > 3
    for path in written:
        assert (tmp_path / "again" / "data" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.slow
def test_killed_and_repeated(photos, tmp_path):
    """SIGKILL when some shards are written: the command, repeated, ends with the files of one that was never stopped."""
    prepare_images(str(photos), tmp_path / "whole", size=40, shard_size=1)
    code = (
        "import sys, time; from hf_decayed.data import prepare; write = prepare.write_shard;"
        "prepare.write_shard = lambda *arguments: time.sleep(0.2) or write(*arguments);"
        "prepare.prepare_images(sys.argv[1], sys.argv[2], size=40, shard_size=1)"
    )
    command = [sys.executable, "-c", code, str(photos), str(tmp_path / "killed")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while len(list((tmp_path / "killed.incomplete").glob("*.parquet"))) < 5:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed").exists()
    prepare_images(str(photos), tmp_path / "killed", size=40, shard_size=1)
    names = sorted(path.name for path in (tmp_path / "whole").glob("*.parquet"))
    assert sorted(path.name for path in (tmp_path / "killed").glob("*.parquet")) == names
    for name in names:
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
