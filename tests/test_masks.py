"""Masks: the geometry of their images, the layouts of segmentation benchmarks, errors that name the image."""

import io
import os

import numpy as np
import pytest
import torch
from datasets import Dataset, Features
from datasets import Image as ImageFeature
from PIL import Image
from transformers import CLIPImageProcessorPil, ViTImageProcessorPil

from hf_decayed.data.datasets import EvaluationDataset
from hf_decayed.data.masks import IGNORED, process_masks
from hf_decayed.data.sources import find_columns, load_image_splits
from hf_decayed.data.transforms import CenterCropProcessor
from hf_decayed.errors import DataError, UserError


RAW = {"do_rescale": False, "do_normalize": False, "resample": Image.Resampling.NEAREST}


def png(pixels):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return {"bytes": buffer.getvalue(), "path": "street.png"}


def table(masks, images=None, mask_column="mask"):
    images = images or [np.stack([mask.astype(np.uint8)] * 3, -1) for mask in masks]
    columns = {"image": [png(image) for image in images], mask_column: [png(mask) for mask in masks]}
    return Dataset.from_dict(columns, features=Features({name: ImageFeature() for name in columns}))


def random_masks(*sizes):
    random = np.random.default_rng(0)
    return [random.integers(0, 256, size, dtype=np.uint8) for size in sizes]


@pytest.mark.parametrize(
    "processor",
    [
        ViTImageProcessorPil(size={"height": 14, "width": 22}, **RAW),
        CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 12, "width": 15}, **RAW),
        CLIPImageProcessorPil(size={"shortest_edge": 31}, crop_size={"height": 24, "width": 24}, **RAW),
    ],
)
def test_masks_have_the_geometry_of_their_images(processor):
    """The image is its own mask, and its processor takes the nearest pixel: both must come out the same."""
    images = EvaluationDataset(table(random_masks((20, 33), (41, 18))), "image", None, processor, mask_column="mask")
    batch = images.__getitems__([0, 1])
    assert batch["masks"].dtype == torch.long
    assert torch.equal(batch["masks"].float(), batch["pixel_values"][:, 0].float())


def test_center_crop_processor():
    mask = np.arange(8 * 12, dtype=np.uint8).reshape(8, 12)
    assert torch.equal(
        process_masks([mask], CenterCropProcessor(8, 8))[0], torch.from_numpy(mask[:, 2:10].astype(np.int64))
    )
    halved = process_masks([mask.repeat(2, 0).repeat(2, 1)], CenterCropProcessor(8, 8))[0]
    assert torch.equal(halved, torch.from_numpy(mask[:, 2:10].astype(np.int64)))


def test_padding_is_ignored():
    processor = CLIPImageProcessorPil(
        do_resize=False, size={"shortest_edge": 6}, crop_size={"height": 10, "width": 10}, **RAW
    )
    masks = process_masks([np.full((6, 6), 3, np.uint8)], processor)
    assert masks.shape == (1, 10, 10) and (masks == 3).sum() == 36 and (masks == IGNORED).sum() == 64


def test_processors_that_cannot_process_masks_are_refused():
    def flat(images, **_):
        return {"pixel_values": torch.zeros(len(images), 5)}

    with pytest.raises(UserError, match="function cannot process masks: it does not return one image for each"):
        process_masks(random_masks((4, 4)), flat)


def test_kinds_of_masks():
    """Palettes, as VOC has them, and one bit are class numbers; 16 bits are if they are small; colours are not."""
    numbers = np.array([[0, 1], [7, 255]], dtype=np.uint8)
    palette = Image.fromarray(numbers).convert("P")
    palette.putpalette([255 - value // 3 for value in range(768)])
    buffer = io.BytesIO()
    palette.save(buffer, "PNG")
    rows = table([numbers, numbers > 0, numbers.astype(np.uint16), numbers]).cast_column(
        "mask", ImageFeature(decode=False)
    )
    rows = rows.to_list()
    rows[3]["mask"]["bytes"] = buffer.getvalue()
    rows = Dataset.from_list(rows, features=Features({"image": ImageFeature(), "mask": ImageFeature()}))
    images = EvaluationDataset(rows, "image", None, CenterCropProcessor(2, 2), mask_column="mask")
    masks = images.__getitems__([0, 1, 2, 3])["masks"]
    assert all(torch.equal(masks[row], torch.from_numpy(numbers.astype(np.int64))) for row in (0, 2, 3))
    assert torch.equal(masks[1], torch.tensor([[0, 1], [1, 1]]))
    shifted = EvaluationDataset(
        rows, "image", None, CenterCropProcessor(2, 2), mask_column="mask", mask_zero_is_ignored=True
    )
    assert shifted.__getitems__([0])["masks"].tolist() == [[[255, 0], [6, 254]]]


@pytest.mark.parametrize(
    ("mask", "sentence"),
    [
        (np.zeros((4, 5), np.uint8), r"'street.png' \(row 0\) has another size \(4 x 5\) than the image \(5 x 4\)"),
        (np.zeros((5, 4, 3), np.uint8), r"'street.png' \(row 0\) has colours"),
        (np.full((5, 4), 300, np.uint16), r"'street.png' \(row 0\) has class numbers outside of 0 to 255"),
    ],
)
def test_errors_name_the_image(mask, sentence):
    rows = table([mask], images=[np.zeros((5, 4, 3), np.uint8)])
    images = EvaluationDataset(rows, "image", None, CenterCropProcessor(4, 4), mask_column="mask")
    with pytest.raises(DataError, match=sentence):
        images.__getitems__([0])


def test_mask_columns_are_found(tmp_path):
    masks = random_masks(*[(6, 6)] * 30)
    for name, expected in (("mask", "mask"), ("annotation", "annotation"), ("segmentation", "segmentation")):
        rows = table(masks, mask_column=name)
        assert find_columns(rows) == ("image", None)
        rows.to_parquet(tmp_path / "rows.parquet")
        assert load_image_splits(dataset_path=str(tmp_path / "rows.parquet")).mask_column == expected
    table(masks, mask_column="regions").to_parquet(tmp_path / "regions.parquet")
    path = str(tmp_path / "regions.parquet")
    with pytest.raises(DataError, match="Found 2 image columns"):
        load_image_splits(dataset_path=path)
    assert load_image_splits(dataset_path=path, mask_column="regions").mask_column == "regions"
    with pytest.raises(DataError, match="'image' is not a column of masks"):
        load_image_splits(dataset_path=path, image_column="image", mask_column="image")


def write(folder, names, suffix, values=3):
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        colour = suffix == ".jpg"
        pixels = np.full((8, 8, 3) if colour else (8, 8), number % values, np.uint8)
        Image.fromarray(pixels).save(folder / f"{name}{suffix}")


def voc(root):
    write(root / "JPEGImages", "abcde", ".jpg")  # e is for detection alone: it has no mask
    write(root / "SegmentationClass", "abcd", ".png")
    (root / "ImageSets" / "Segmentation").mkdir(parents=True)
    (root / "ImageSets" / "Segmentation" / "train.txt").write_text("a\nc\n")
    (root / "ImageSets" / "Segmentation" / "val.txt").write_text("b\nd\n")


def parallel(images, masks, train, validation):
    def build(root):
        for split, names in ((train, "ac"), (validation, "bd")):
            write(root / images / split, names, ".jpg")
            write(root / masks / split, names, ".png")

    return build


@pytest.mark.parametrize(
    ("build", "zero_is_ignored"),
    [
        (voc, False),
        (parallel("images", "annotations", "training", "validation"), True),
        (parallel(".", "stuffthingmaps", "train2017", "val2017"), False),
        (parallel("images", "annotations", "train2017", "val2017"), False),
        (parallel("images", "masks", "train", "val"), False),
    ],
)
def test_layouts_on_disk(tmp_path, build, zero_is_ignored):
    build(tmp_path)
    splits = load_image_splits(dataset_path=str(tmp_path))
    assert (splits.image_column, splits.label_column, splits.mask_column) == ("image", None, "mask")
    assert splits.held_out_rule == "the evaluation split" and splits.mask_zero_is_ignored == zero_is_ignored
    for rows, names in ((splits.train, "ac"), (splits.held_out, "bd")):
        files = rows.cast_column("image", ImageFeature(decode=False)).cast_column("mask", ImageFeature(decode=False))
        assert [row["image"]["path"][-5] for row in files] == list(names)
        assert [row["mask"]["path"][-5] for row in files] == list(names)
    settings = {"mask_column": splits.mask_column, "mask_zero_is_ignored": splits.mask_zero_is_ignored}
    images = EvaluationDataset(splits.train, "image", None, CenterCropProcessor(8, 8), **settings)
    expected = [255, 0] if zero_is_ignored else [0, 2] if build is voc else [0, 1]
    assert images.__getitems__([0, 1])["masks"][:, 0, 0].tolist() == expected
    assert next(iter(load_image_splits(dataset_path=str(tmp_path), streaming=True).train))["mask"].size == (8, 8)


def test_changed_files_have_another_fingerprint(tmp_path):
    """The key of cached features."""
    parallel("images", "masks", "train", "val")(tmp_path)
    before = load_image_splits(dataset_path=str(tmp_path))
    assert load_image_splits(dataset_path=str(tmp_path)).train._fingerprint == before.train._fingerprint
    file = next((tmp_path / "images" / "train").iterdir())
    os.utime(file, ns=(0, 0))
    after = load_image_splits(dataset_path=str(tmp_path))
    assert after.train._fingerprint != before.train._fingerprint
    assert after.held_out._fingerprint == before.held_out._fingerprint


def test_folders_without_splits_hold_out_some_images(tmp_path):
    names = [f"picture{number}" for number in range(30)]
    write(tmp_path / "images", names, ".jpg")
    write(tmp_path / "masks", names, ".png")
    splits = load_image_splits(dataset_path=str(tmp_path))
    assert len(splits.train) + len(splits.held_out) == 30 and len(splits.held_out) > 0
    assert splits.mask_column == "mask" and splits.held_out.column_names == ["image", "mask"]
    (tmp_path / "masks" / "picture7.png").unlink()
    with pytest.raises(DataError, match="The image 'picture7.jpg' has no mask in '.*/masks'"):
        load_image_splits(dataset_path=str(tmp_path))


def test_voc_without_its_files(tmp_path):
    voc(tmp_path)
    (tmp_path / "SegmentationClass" / "c.png").unlink()
    with pytest.raises(DataError, match="train.txt names 'c', but there is no SegmentationClass/c.png"):
        load_image_splits(dataset_path=str(tmp_path))
    (tmp_path / "ImageSets" / "Segmentation" / "train.txt").unlink()
    with pytest.raises(DataError, match="no ImageSets/Segmentation/train.txt"):
        load_image_splits(dataset_path=str(tmp_path))


def test_voc_has_names(tmp_path):
    voc(tmp_path)
    names = load_image_splits(dataset_path=str(tmp_path)).mask_names
    assert len(names) == 21 and names[0] == "background" and names[15] == "person"
