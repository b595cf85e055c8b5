"""Folders of images and masks as the segmentation benchmarks arrange them, read from disk.

    VOC         JPEGImages/ SegmentationClass/ ImageSets/Segmentation/{train,val}.txt
    ADE20K      images/{training,validation} annotations/{training,validation}
    COCO-Stuff  [images/]{train2017,val2017} and stuffthingmaps/ or annotations/ with the same two folders
    any         images/ masks/, or images/{train,val} masks/{train,val}

In ADE20K, 0 means no class: it is ignored (255), and the 150 classes are 0 to 149. In the others, 255 is ignored.
"""

from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset, Features
from datasets import Image as ImageFeature
from datasets.fingerprint import Hasher

from ..errors import DataError


IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")
VOC_CLASSES = (
    "background aeroplane bicycle bird boat bottle bus car cat chair cow diningtable dog horse motorbike person "
    "pottedplant sheep sofa train tvmonitor"
).split()
# Folders of images and of masks, and their subfolders by split; the first with a training split counts.
COCO_SPLITS = {"train2017": "train", "val2017": "validation"}
PARALLEL_FOLDERS: list[tuple[str, str, dict[str, str]]] = [
    ("images", "annotations", {"training": "train", "validation": "validation"}),  # ADE20K
    (".", "stuffthingmaps", COCO_SPLITS),
    (".", "annotations", COCO_SPLITS),
    ("images", "stuffthingmaps", COCO_SPLITS),
    ("images", "annotations", COCO_SPLITS),
    ("images", "masks", {"train": "train", "val": "validation", "validation": "validation", "test": "test"}),
    ("images", "masks", {".": "train"}),
]


@dataclass(frozen=True)
class SegmentationFolder:
    """Images and masks on disk.

    Args:
        files (`dict`): Pairs of an image and its mask, by split.
        zero_is_ignored (`bool`): Class numbers in the files start at 1; 0 is ignored.
    """

    files: dict[str, list[tuple[Path, Path]]]
    zero_is_ignored: bool = False
    mask_names: list[str] | None = None

    def splits(self) -> dict[str, Dataset]:
        """Data sets with the columns `image` and `mask`, which hold paths."""
        return {split: paths_dataset(pairs) for split, pairs in self.files.items()}


def paths_dataset(pairs: list[tuple[Path, Path]]) -> Dataset:
    """Paths as a data set whose fingerprint, the key of cached features, changes when a file does."""
    features = Features({"image": ImageFeature(), "mask": ImageFeature()})
    columns = {"image": [str(image) for image, _ in pairs], "mask": [str(mask) for _, mask in pairs]}
    files = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for pair in pairs for file in pair]
    rows = Dataset.from_dict(columns, features=features)
    return Dataset(rows.data, rows.info, fingerprint=Hasher.hash(files))


def find_segmentation_folder(path: Path) -> SegmentationFolder | None:
    """Images and masks of a folder in one of the layouts above; `None` if it is none of them."""
    if (path / "JPEGImages").is_dir() and (path / "SegmentationClass").is_dir():
        return SegmentationFolder(voc_files(path), mask_names=VOC_CLASSES)
    for images, masks, splits in PARALLEL_FOLDERS:
        folders = [(split, path / images / name, path / masks / name) for name, split in splits.items()]
        existing = {split: pair for split, *pair in folders if all(folder.is_dir() for folder in pair)}
        if "train" in existing:
            files = {split: pair_files(*pair) for split, pair in existing.items()}
            return SegmentationFolder(files, zero_is_ignored="training" in splits)
    return None


def voc_files(path: Path) -> dict[str, list[tuple[Path, Path]]]:
    """Images that the lists of the segmentation task name, by split."""
    files = {}
    for name, split in (("train", "train"), ("val", "validation")):
        names = path / "ImageSets" / "Segmentation" / f"{name}.txt"
        if not names.is_file():
            raise DataError(f"'{path.name}' has the folders of VOC, but no ImageSets/Segmentation/{name}.txt.")
        files[split] = [
            (path / "JPEGImages" / f"{stem}.jpg", path / "SegmentationClass" / f"{stem}.png")
            for stem in names.read_text().split()
        ]
        for file in (file for pair in files[split] for file in pair):
            if not file.is_file():
                raise DataError(f"{names.name} names '{file.stem}', but there is no {file.parent.name}/{file.name}.")
    return files


def pair_files(images: Path, masks: Path) -> list[tuple[Path, Path]]:
    """Every image with the mask of the same name, in the order of names."""
    mask_of = {file.stem: file for file in masks.iterdir() if file.suffix.lower() in IMAGE_SUFFIXES}
    pairs = []
    for image in sorted(file for file in images.iterdir() if file.suffix.lower() in IMAGE_SUFFIXES):
        if image.stem not in mask_of:
            raise DataError(f"The image '{image.name}' has no mask in '{masks.parent.name}/{masks.name}'.")
        pairs.append((image, mask_of[image.stem]))
    if not pairs:
        raise DataError(f"There are no images in '{images.parent.name}/{images.name}'.")
    return pairs
