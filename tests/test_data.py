"""Data: draws keyed by sample, crops as Pillow makes them, images of every kind, errors in one sentence."""

import io
import itertools
import tarfile
import zipfile

import numpy as np
import pyarrow.parquet
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, IterableDataset, Value, concatenate_datasets
from datasets import Image as ImageFeature
from PIL import Image

from hf_decayed.data.datasets import EpochBatchSampler, EvaluationDataset, StreamedImages, TrainingImages
from hf_decayed.data.decoding import decode_image, to_pixels
from hf_decayed.data.inspection import ImageKind, inspect_images
from hf_decayed.data.keyed_random import sample_generator
from hf_decayed.data.sources import (
    HELD_OUT_RULE,
    find_columns,
    load_image_splits,
    load_splits,
    rows_fingerprint,
    split_validation,
)
from hf_decayed.data.transforms import (
    Augmentation,
    CenterCropProcessor,
    center_crop,
    crop_and_resize,
    crop_boxes,
    crop_then_resize,
)
from hf_decayed.errors import DataError


def png(pixels, mode=None, **save):
    buffer = io.BytesIO()
    Image.fromarray(pixels, mode).save(buffer, "PNG", **save)
    return {"bytes": buffer.getvalue(), "path": None}


def image_table(sizes, channels=3):
    random = np.random.default_rng(0)
    shapes = [(*size, channels) if channels == 3 else size for size in sizes]
    rows = [png(random.integers(0, 256, shape, dtype=np.uint8)) for shape in shapes]
    features = Features({"picture": ImageFeature(), "kind": ClassLabel(names=["a", "b"])})
    return Dataset.from_dict({"picture": rows, "kind": [i % 2 for i in range(len(rows))]}, features=features)


def training_images(table, **options):
    return TrainingImages(table, "picture", augmentation(), **options)


def augmentation():
    return Augmentation((16, 16), 3, num_patches=16, mean=[0.5] * 3, std=[0.25] * 3, seed=0)


def test_draws_belong_to_the_sample():
    first = sample_generator(3, 1, 17).random(200)
    assert np.array_equal(first, sample_generator(3, 1, 17).random(200))
    for other in ((4, 1, 17), (3, 2, 17), (3, 1, 18)):
        assert not np.intersect1d(first, sample_generator(*other).random(200)).size


def test_batched_crop_is_pillows():
    """To one step of its rounding: Pillow rounds to bytes after each of the two passes."""
    random = np.random.default_rng(0)
    images = torch.from_numpy(random.integers(0, 256, (40, 3, 28, 36), dtype=np.uint8))
    boxes = crop_boxes(random.random((40, 24)), 28, 36, (0.2, 1.0))
    flips = torch.from_numpy(random.random(40) < 0.5)
    for size in ((32, 32), (12, 20), (28, 36)):
        ours = crop_and_resize(images, torch.from_numpy(boxes).float(), flips, size)
        for image, (top, left, height, width), flip, result in zip(images, boxes, flips, ours):
            pillow = Image.fromarray(image.permute(1, 2, 0).numpy())
            pillow = pillow.resize(size[::-1], Image.Resampling.BICUBIC, (left, top, left + width, top + height))
            expected = np.asarray(pillow)[:, ::-1] if flip else np.asarray(pillow)
            assert np.abs(result.permute(1, 2, 0).numpy() - expected).max() < 2.0


def test_crops_follow_the_distribution():
    boxes = crop_boxes(np.random.default_rng(0).random((4000, 24)), 100, 100, (0.2, 1.0))
    top, left, height, width = boxes.T
    assert (top >= 0).all() and (left >= 0).all() and (top + height <= 100).all() and (left + width <= 100).all()
    areas = height * width / 1e4
    assert 0.18 < areas.min() < 0.25 and areas.max() > 0.95
    assert 0.5 < areas.mean() < 0.6  # uniform areas, less the large ones that do not fit
    assert 0.7 < (width / height).min() and (width / height).max() < 1.4


def test_a_sliver_is_cropped_to_the_allowed_ratio():
    boxes = crop_boxes(np.random.default_rng(0).random((10, 24)), 4, 400, (0.9, 1.0))
    assert (boxes == [0, (400 - 5) // 2, 4, 5]).all()


def test_memory_and_on_demand_see_the_same_images():
    table = image_table([(20, 24)] * 6)
    memory, lazy = training_images(table), training_images(table, memory_limit=0)
    assert memory.memory is not None and lazy.memory is None
    keys = [(0, 5), (0, 1), (3, 1)]
    first, second = memory.__getitems__(keys), lazy.__getitems__(keys)
    assert torch.equal(first["noise"], second["noise"])
    # What is decoded on demand is cropped first: pixels outside of the crop do not reach into its border.
    border = 4
    difference = (first["pixel_values"] - second["pixel_values"])[..., border:-border, border:-border]
    assert difference.abs().max() < 2 / 255 / 0.25
    assert not torch.equal(first["pixel_values"][1], first["pixel_values"][2])  # another epoch, another crop
    alone = memory.__getitems__([(3, 1)])
    torch.testing.assert_close(alone["pixel_values"][0], first["pixel_values"][2])
    assert first["pixel_values"].shape == (3, 3, 16, 16) and first["noise"].shape == (3, 16)


def test_crop_then_resize_is_torchvisions():
    """Which crops by `Image.crop` and resizes by `Image.resize`; to two levels of rounding."""
    random = np.random.default_rng(0)
    for channels, size in ((3, (32, 32)), (1, (12, 20))):
        shape = (70, 90, 3) if channels == 3 else (70, 90)
        image = Image.fromarray(random.integers(0, 256, shape, dtype=np.uint8))
        for top, left, height, width in crop_boxes(random.random((20, 24)), 70, 90, (0.05, 1.0)).astype(int).tolist():
            ours = crop_then_resize(image, (top, left, height, width), size)
            theirs = image.crop((left, top, left + width, top + height)).resize(size[::-1], Image.Resampling.BICUBIC)
            assert ours.shape == (*size, channels)
            assert np.abs(ours.astype(int) - np.asarray(theirs).reshape(ours.shape)).max() <= 2


def positions(height, width):
    """An image whose red tells the column and whose green tells the row."""
    red, green = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return np.stack([red, green, np.full_like(red, 128)], -1).round().astype(np.uint8)


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_scaled_decoding_takes_the_same_crops(orientation):
    """A JPEG decoded at 1/2, 1/4 and 1/8 against the whole of it: every crop lies where it was drawn."""
    upright = Image.fromarray(positions(301, 403))
    turns = {1: None, 3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}
    stored = upright if turns[orientation] is None else upright.transpose(turns[orientation])
    exif, buffer = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    stored.save(buffer, "JPEG", quality=95, exif=exif)
    factors = set()
    for size, crop_scale in (((16, 16), (0.01, 1.0)), ((120, 100), (0.2, 1.0)), ((30, 30), None)):
        augmentation = Augmentation(size, 3, 0, [0.5] * 3, [0.5] * 3, seed=0, crop_scale=crop_scale)
        for index in range(20):
            image = Image.open(buffer)
            crop = augmentation.crop(image, augmentation.draw([(0, index)])[0]).astype(float)
            factors.add(round(max(stored.size) / max(image.size)))
            draws = sample_generator(0, 0, index).random((1, 24))
            top, left, height, width = augmentation.boxes(draws, 301, 403)[0]
            middle = 255 * (left + width / 2 - 0.5) / 402, 255 * (top + height / 2 - 0.5) / 300
            assert np.abs(crop.mean((0, 1))[:2] - middle).max() < 1.0
            extent = (crop[:, -1, 0] - crop[:, 0, 0]).mean(), (crop[-1, :, 1] - crop[0, :, 1]).mean()
            expected = 255 * width / 402 * (1 - 1 / size[1]), 255 * height / 300 * (1 - 1 / size[0])
            assert np.abs(np.array(extent) - expected).max() < 3.0
    assert factors == {1, 2, 4, 8}


def test_scaled_decoding_loses_little():
    """Of a picture with fine detail: the mean difference to the crop of the whole picture, in levels of 255."""
    random = np.random.default_rng(0)
    coarse = Image.fromarray(random.integers(0, 256, (30, 40, 3), dtype=np.uint8)).resize((1200, 900))
    pixels = np.asarray(coarse) * 0.9 + random.normal(0, 8, (900, 1200, 3))
    buffer = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=90)
    augmentation = Augmentation((64, 64), 3, 0, [0.5] * 3, [0.5] * 3, seed=0)
    for index in range(8):
        image, whole = Image.open(buffer), Image.open(buffer)
        whole.load()  # a picture that was decoded cannot be reduced any more
        draws = augmentation.draw([(0, index)])[0]
        reduced, full = (augmentation.crop(each, draws).astype(float) for each in (image, whole))
        assert image.width < whole.width and np.abs(reduced - full).mean() < 2.0


def test_images_of_many_sizes_are_decoded_on_demand():
    images = training_images(image_table([(20, 24), (1, 1), (90, 3)]))
    assert images.memory is None
    assert torch.isfinite(images.__getitems__([(0, 0), (0, 1), (0, 2)])["pixel_values"]).all()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_repeats_itself_exactly(workers):
    """Two readings of a shuffled stream are the same, over the end of an epoch; epochs differ."""
    table = image_table([(9, 9)] * 10).to_iterable_dataset(num_shards=2)

    def read():
        stream = StreamedImages(table, "picture", augmentation(), buffer_size=5)
        return list(itertools.islice(torch.utils.data.DataLoader(stream, batch_size=4, num_workers=workers), 6))

    first, second = read(), read()
    for one, other in zip(first, second):
        assert torch.equal(one["pixel_values"], other["pixel_values"]) and torch.equal(one["noise"], other["noise"])
    assert first[0]["pixel_values"].shape == (4, 3, 16, 16)
    assert not torch.equal(first[0]["noise"], first[5]["noise"])


def test_batches_cover_every_epoch_once_and_start_anywhere():
    batches = list(EpochBatchSampler(10, 3, seed=1, first_step=0, last_step=9))
    for epoch in range(3):
        indices = [index for batch in batches[3 * epoch : 3 * epoch + 3] for _, index in batch]
        assert len(set(indices)) == 9 and all(key[0] == epoch for key in batches[3 * epoch])
    assert batches[0] != batches[3]
    assert list(EpochBatchSampler(10, 3, seed=1, first_step=4, last_step=9)) == batches[4:]
    whole = list(EpochBatchSampler(11, 4, seed=1, first_step=1, last_step=6))
    parts = list(EpochBatchSampler(11, 4, seed=1, first_step=1, last_step=6, parts=2))
    assert len(parts) == len(EpochBatchSampler(11, 4, 1, 1, 6, parts=2)) == 10
    assert [first + second for first, second in zip(parts[::2], parts[1::2])] == whole
    with pytest.raises(DataError, match="batch of 11 images needs as many; there are 10"):
        EpochBatchSampler(10, 11, 0, 0, 1)


def test_a_stream_of_images_in_an_archive_has_a_fingerprint(tmp_path):
    with zipfile.ZipFile(tmp_path / "images.zip", "w") as archive:
        for number in range(3):
            buffer = io.BytesIO()
            Image.new("L", (4, 4), number).save(buffer, "PNG")
            archive.writestr(f"{number}.png", buffer.getvalue())
    paths = [f"zip://{number}.png::{tmp_path / 'images.zip'}" for number in range(3)]
    rows = Dataset.from_dict({"image": paths}, features=Features({"image": ImageFeature()})).to_iterable_dataset()
    others = Dataset.from_dict(
        {"image": paths[:2]}, features=Features({"image": ImageFeature()})
    ).to_iterable_dataset()
    assert rows_fingerprint(rows, "image") == rows_fingerprint(rows, "image") != rows_fingerprint(others, "image")


def test_every_kind_of_image():
    grey = np.arange(64, dtype=np.uint8).reshape(8, 8)
    colour = np.stack([grey, 2 * grey, 3 * grey], -1)
    assert np.array_equal(to_pixels(Image.fromarray(grey), 3), np.stack([grey] * 3, -1))
    assert np.array_equal(to_pixels(Image.fromarray(colour), 3), colour)
    assert to_pixels(Image.fromarray(colour), 1).shape == (8, 8, 1)
    see_through = np.concatenate([colour, np.zeros((8, 8, 1), np.uint8)], -1)
    assert (to_pixels(Image.fromarray(see_through), 3) == 255).all()  # transparent is white
    palette = Image.fromarray(colour).convert("P")
    assert to_pixels(palette, 3).shape == (8, 8, 3)
    assert to_pixels(Image.fromarray(colour).convert("CMYK"), 3).shape == (8, 8, 3)
    deep = Image.fromarray(grey.astype(np.uint16) * 1000)
    assert np.abs(to_pixels(deep, 1)[..., 0].astype(int) - (grey.astype(int) * 1000) // 257).max() <= 1
    assert to_pixels(Image.fromarray(np.full((8, 8), 200, dtype=np.uint16)), 1).max() == 0  # nearly black in 16 bits
    assert to_pixels(Image.fromarray(grey.astype(np.float32) / 255), 1).max() == grey.max()  # floats from 0 to 1
    assert to_pixels(Image.fromarray(grey > 31), 1).max() == 255  # one bit
    buffer = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera lay on its side
    Image.fromarray(np.zeros((10, 20, 3), np.uint8)).save(buffer, "JPEG", exif=exif)
    assert to_pixels(Image.open(buffer), 3).shape == (20, 10, 3)
    with pytest.raises(DataError, match="3 .RGB.; the model takes 4"):
        decode_image({"bytes": buffer.getvalue(), "path": None}, 4, 0)


def test_bad_images_stop_or_are_counted():
    table = image_table([(8, 8)] * 4).cast_column("picture", ImageFeature(decode=False))
    rows = table.to_list()
    rows[2]["picture"] = {"bytes": b"not a picture", "path": "folder/broken.png"}
    table = Dataset.from_list(rows, features=Features({"picture": ImageFeature(), "kind": Value("int64")}))
    with pytest.raises(DataError, match=r"The image 'broken.png' \(row 2\) cannot be decoded .*on_bad_image skip"):
        training_images(table)
    memory = training_images(table, on_bad_image="skip")
    assert len(memory) == 3 and memory.bad_images == 1
    lazy = training_images(table, memory_limit=0)
    with pytest.raises(DataError, match="broken.png"):
        lazy.__getitems__([(0, 2)])
    lazy = training_images(table, memory_limit=0, on_bad_image="skip")
    batch = lazy.__getitems__([(0, 2), (0, 3)])
    assert batch["pixel_values"].shape == (2, 3, 16, 16) and batch["bad_images"].tolist() == [1, 0]
    images = EvaluationDataset(table, "picture", "kind", CenterCropProcessor(16, 16), on_bad_image="skip")
    batch = images.__getitems__([0, 1, 2, 3])
    assert len(batch["pixel_values"]) == len(batch["labels"]) == 3 and batch["indices"].tolist() == [0, 1, 3]


def test_columns_are_found_by_type():
    assert find_columns(image_table([(8, 8)])) == ("picture", "kind")
    unlabelled = image_table([(8, 8)]).remove_columns("kind")
    assert find_columns(unlabelled) == ("picture", None)
    with pytest.raises(DataError, match="no column 'photo'; the columns are picture, kind"):
        find_columns(image_table([(8, 8)]), image_column="photo")
    with_text = image_table([(8, 8)]).add_column("name", ["cat"])
    with pytest.raises(DataError, match="The column 'name' holds text, and classes are numbers"):
        find_columns(with_text, label_column="name")
    with pytest.raises(DataError, match="Found 0 image columns among text"):
        find_columns(Dataset.from_dict({"text": ["a"]}))


def test_bundled_images():
    train, test, name = load_splits()
    assert (len(train), len(test), name) == (9000, 2000, "fashion_mnist_subset")
    assert np.bincount(train["label"]).tolist() == [900] * 10 and np.bincount(test["label"]).tolist() == [200] * 10
    assert find_columns(train) == ("image", "label")


def test_labels_follow_their_images():
    """In memory, decoded on demand, and past a bad image, whose neighbour brings its own label."""
    table = image_table([(8, 8), (8, 8), (8, 9), (8, 8)])
    rows = table.cast_column("picture", ImageFeature(decode=False)).to_list()
    rows[1]["picture"]["bytes"] = b"junk"
    damaged = Dataset.from_list(rows, features=table.features)
    images = training_images(damaged, label_column="kind", on_bad_image="skip")
    batch = images.__getitems__([(0, 0), (0, 1), (0, 3)])
    assert batch["labels"].tolist() == [0, 0, 1] and batch["bad_images"].tolist() == [0, 1, 0]
    rows[2] = rows[0]
    even = Dataset.from_list(rows, features=table.features)
    images = training_images(even, label_column="kind", on_bad_image="skip")
    assert images.memory is not None and images.labels.tolist() == [0, 0, 1] and images.bad_images == 1


def test_paths(tmp_path):
    table = image_table([(8, 8)] * 4)
    table.to_parquet(tmp_path / "train.parquet")
    table.save_to_disk(tmp_path / "arrow")
    for kind in "ab":
        (tmp_path / "folder" / "train" / kind).mkdir(parents=True)
        Image.new("RGB", (9, 9)).save(tmp_path / "folder" / "train" / kind / "x.png")
    (tmp_path / "tars").mkdir()
    for number in range(2):
        with tarfile.open(tmp_path / "tars" / f"train-{number}.tar", "w") as tar:
            for key, row in enumerate(table):
                for suffix, content in (("png", png(np.array(row["picture"]))["bytes"]), ("cls", b"1")):
                    member = tarfile.TarInfo(f"{number}{key}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    for path, rows, columns in (
        ("train.parquet", 4, ("picture", "kind")),
        ("arrow", 4, ("picture", "kind")),
        ("folder", 2, ("image", "label")),
        ("tars", 8, ("png", "cls")),
        ("tars/train-0.tar", 4, ("png", "cls")),
    ):
        train, test, name = load_splits(dataset_path=str(tmp_path / path))
        assert len(train) == rows and test is None and name == path.split("/")[-1]
        assert find_columns(train) == columns
        stream, _, _ = load_splits(dataset_path=str(tmp_path / path), streaming=True)
        assert isinstance(stream, IterableDataset) and find_columns(stream) == columns and len(list(stream)) == rows
    with pytest.raises(DataError, match="There is nothing at"):
        load_splits(dataset_path=str(tmp_path / "absent"))
    with pytest.raises(DataError, match="neither a folder nor a file of kind .parquet, .arrow, .tar"):
        (tmp_path / "x.zip").touch()
        load_splits(dataset_path=str(tmp_path / "x.zip"))
    with pytest.raises(DataError, match="no split 'dev'; it has train, test"):
        load_splits(eval_split="dev")
    with pytest.raises(DataError, match="'train' cannot be trained on and held out at once"):
        load_splits(eval_split="train")
    assert load_splits(train_split="test")[1] is None  # not itself
    (tmp_path / "three").mkdir()
    for split, rows in (("train", 4), ("test", 3), ("validation", 2)):
        table.select(range(rows)).to_parquet(tmp_path / "three" / f"{split}.parquet")
    assert len(load_splits(dataset_path=str(tmp_path / "three"))[1]) == 2  # test labels are often withheld
    with pytest.raises(DataError, match="'empty.parquet' could not be loaded, or is empty"):
        pyarrow.parquet.write_table(table.data.table.slice(0, 0), tmp_path / "empty.parquet")
        load_splits(dataset_path=str(tmp_path / "empty.parquet"))


def test_the_middle_is_the_same_for_training_and_for_judging():
    """Of oblong images: the largest box of the wanted shape, resized; a batch at once, one by one, and as a processor."""
    pixels = np.random.default_rng(0).integers(0, 256, (2, 10, 15, 3), dtype=np.uint8).repeat(4, 1).repeat(4, 2)
    for size in ((20, 20), (10, 30), (40, 40)):
        augmentation = Augmentation(size, 3, 0, [0.5] * 3, [0.5] * 3, seed=0, crop_scale=None, horizontal_flip=False)
        keys = [(0, 0), (0, 1)]
        at_once = augmentation.batch(torch.from_numpy(pixels).permute(0, 3, 1, 2), keys)["pixel_values"]
        draws = augmentation.draw(keys)
        crops = [augmentation.crop(Image.fromarray(image), row) for image, row in zip(pixels, draws)]
        one_by_one = augmentation.images(crops, draws, keys)["pixel_values"]
        judged = CenterCropProcessor(*size, signed=True)([Image.fromarray(image) for image in pixels])["pixel_values"]
        torch.testing.assert_close(judged, one_by_one)
        torch.testing.assert_close(judged, at_once, atol=3 / 127.5, rtol=0)  # Pillow rounds between its passes
    assert np.array_equal(center_crop(pixels[0], (40, 40)), pixels[0, :, 10:50])
    assert np.array_equal(center_crop(pixels[0], (20, 60)), pixels[0, 10:30])


def test_held_out_images_depend_on_the_images_alone(tmp_path):
    """One rule: for a table and a stream, in any order, of a part or the whole; copies of an image stay together."""
    table = image_table([(8, 8)] * 120)
    twice = concatenate_datasets([table, table.select(range(30))]).shuffle(seed=1)
    twice.to_parquet(tmp_path / "images.parquet")
    path = str(tmp_path / "images.parquet")

    def contents(rows):
        rows = rows.cast_column("picture", ImageFeature(decode=False))
        return [row["picture"]["bytes"] for row in rows]

    splits = load_image_splits(dataset_path=path)
    held_out, train = contents(splits.held_out), contents(splits.train)
    assert len(held_out) + len(train) == 150 and 4 <= len(held_out) <= 30
    assert not set(held_out) & set(train) and splits.held_out_rule == HELD_OUT_RULE
    streamed = load_image_splits(dataset_path=path, streaming=True)
    assert sorted(contents(streamed.held_out)) == sorted(held_out)
    assert sorted(contents(streamed.train)) == sorted(train)
    part, _ = split_validation(load_splits(dataset_path=path)[0].select(range(60)), "picture")
    assert set(contents(part)) <= set(held_out)
    bundled = load_image_splits()
    assert bundled.held_out_rule == "the evaluation split" and len(bundled.held_out) == 2000
    few, rest = split_validation(table.select(range(3)), "picture")  # too few for one in ten: still one
    assert len(few) >= 1 and len(few) + len(rest) == 3
    with pytest.raises(DataError, match="All images are the same file"):
        split_validation(table.select([0, 0]), "picture")


def test_fingerprints_follow_the_images_and_not_their_folder(tmp_path):
    table = image_table([(8, 8)] * 40)
    for name, rows in (("here", table), ("there", table), ("other", table.select([*range(39), 0]))):
        rows.to_parquet(tmp_path / f"{name}.parquet")
    here, there, other = (
        load_image_splits(dataset_path=str(tmp_path / f"{name}.parquet")).fingerprint()
        for name in ("here", "there", "other")
    )
    assert here == there != other


def test_numbers_that_are_no_colours_are_a_bad_image():
    picture = np.ones((4, 4), dtype=np.float32)
    picture[1, 2] = np.nan
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "TIFF")
    record = {"bytes": buffer.getvalue(), "path": "nan.tiff"}
    with pytest.raises(DataError, match="'nan.tiff' .row 3. cannot be decoded .it holds NaN or infinity"):
        decode_image(record, 1, 3)
    assert decode_image(record, 1, 3, on_bad_image="skip") is None


def test_what_images_are_like():
    assert inspect_images(image_table([(480, 640)] * 3), "picture") == ImageKind(True, 480, 640)
    assert str(inspect_images(image_table([(480, 640)] * 3), "picture")) == "RGB, 640 x 480"
    assert inspect_images(image_table([(20, 30), (22, 30), (90, 90)], channels=1), "picture") == ImageKind(
        False, 22, 30
    )
    grey = np.random.default_rng(0).integers(0, 256, (40, 40), dtype=np.uint8)
    rows = [png(np.stack([grey] * 3, -1)), {"bytes": b"not a picture", "path": None}]
    table = Dataset.from_dict({"picture": rows}, features=Features({"picture": ImageFeature()}))
    assert inspect_images(table, "picture") == ImageKind(
        False, 40, 40
    )  # RGB without colours; a broken file is left out
    assert inspect_images(table.to_iterable_dataset(), "picture") == ImageKind(False, 40, 40)
    assert inspect_images(table.select([1]), "picture") is None
