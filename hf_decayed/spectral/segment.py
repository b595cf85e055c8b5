"""`hf-decayed segment`: regions of images in files, by one or several models, as pictures."""

import hashlib
import inspect
import json
import os
from pathlib import Path

from PIL import Image, ImageDraw
from PIL.PngImagePlugin import PngInfo
from tqdm.auto import tqdm

from ..command_line import model_names
from ..data.decoding import decode_image
from ..errors import DataError, UserError
from ..provenance import model_fingerprint, versions
from .graph_metrics import evaluate_graphs
from .regions import components_to_rgb
from .segmenter import Segmentation, Segmenter, to_picture


SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif"}
PICTURES = ("overlay", "rgb", "mask")
SOURCE_TEXT = "source_sha256"  # in a picture: of the image file that it shows
RECORD = "segmentation.json"
GRID_FILE = "grid.png"
GRID_IMAGES = 12
GRID_SIDE = 128  # pixels of a picture in the grid
TITLE_HEIGHT = 16


def segment(
    images: str | os.PathLike,
    models: list[str],
    output: str | os.PathLike,
    graph: str = "vv",
    n_clusters: int | None = None,
    n_components: int = 10,
    solver: str = "eigh",
    layers: list[int] | None = None,
    seed: int = 0,
    revision: str | None = None,
    trust_remote_code: bool = False,
    evaluate: int | None = None,
) -> str:
    """Writes overlay, RGB picture and mask of every image to `<output>/<model>`, and a grid over images and models.

    A stopped command continues when it is repeated. Returns a sentence for the user.

    Args:
        images (`str` or `os.PathLike`): An image, or a folder whose images, at any depth, are segmented.
        models (`list[str]`): Folders or repositories of vision encoders.
        graph, n_clusters, n_components, solver, seed: See [`LayerSpectralClustering`].
        layers (`list[int]`, *optional*): Negative numbers count from the last layer; by default all.
        evaluate (`int`, *optional*):
            Measures all graphs on this many held-out images with masks instead, see [`evaluate_graphs`].
    """
    settings = {"graph": graph, "n_clusters": n_clusters, "n_components": n_components, "solver": solver, "seed": seed}
    names = model_names(models)
    if evaluate is not None:
        defaults = inspect.signature(segment).parameters
        if unused := [name for name, value in settings.items() if name != "seed" and value != defaults[name].default]:
            raise UserError(f"--evaluate measures all graphs in the same way: leave out --{', --'.join(unused)}.")
        return evaluate_graphs(str(images), names, output, evaluate, layers, seed, revision, trust_remote_code)
    files = list_images(Path(images))
    rows: dict[str, list[Image.Image]] = {}
    for model, name in names.items():
        segmenter = Segmenter.from_pretrained(model, revision, trust_remote_code, layers=layers, **settings)
        folder = Path(output) / name
        prepare_folder(folder, {**settings, "layers": layers, "model": model_fingerprint(segmenter.model)})
        for number, (file, stem) in enumerate(tqdm(files.items(), desc=name, unit="image")):
            source = hashlib.sha256(file.read_bytes()).hexdigest()
            if not is_complete(folder, stem, source):
                save_segmentation(segmenter(load_image(file, number)), folder, stem, source)
        shown = list(files.items())[:GRID_IMAGES]
        rows[f"{name} - regions"] = [load_picture(folder / f"{stem}_overlay.png") for _, stem in shown]
        rows[f"{name} - features of the last layer, one set of colours"] = feature_pictures(
            segmenter, [load_image(file, number) for number, (file, _) in enumerate(shown)]
        )
    save_rows(Path(output) / GRID_FILE, rows)
    counts = [
        f"{number} {word}{'s' if number > 1 else ''}"
        for number, word in ((len(files), "image"), (len(names), "model"))
    ]
    return f"{' by '.join(counts)} (overlay, rgb, mask), grid.png: {output}"


def list_images(path: Path) -> dict[Path, str]:
    """Image files, each with the path of its pictures; without pictures that this command has made."""
    if path.is_file():
        return {path: path.stem}
    if not path.is_dir():
        raise DataError(f"There is nothing at '{path}'.")
    made = {record.parent for record in path.rglob(RECORD)}
    made |= {folder.parent / GRID_FILE for folder in made}
    files = sorted(
        file
        for file in path.rglob("*")
        if file.suffix.lower() in SUFFIXES and file.is_file() and made.isdisjoint([file, *file.parents])
    )
    if not files:
        raise DataError(f"There are no images in '{path}': files with the ending {', '.join(sorted(SUFFIXES))}.")
    stems = {file: str(file.relative_to(path).with_suffix("")) for file in files}
    if len(set(stems.values())) < len(stems):  # a.png beside a.jpg
        stems = {file: str(file.relative_to(path)) for file in files}
    return stems


def load_image(file: Path, number: int) -> Image.Image:
    pixels = decode_image({"path": str(file), "bytes": None}, 3, number)
    assert pixels is not None  # without `skip`, an image that cannot be decoded is an error
    return Image.fromarray(pixels)


def prepare_folder(folder: Path, settings: dict) -> None:
    """Makes the folder, or checks that its pictures were made with the same settings."""
    record = folder / RECORD
    settings = json.loads(json.dumps(settings))
    if record.exists():
        try:
            before = json.loads(record.read_text())["settings"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"'{record}' cannot be read: choose another --output, or remove '{folder}'.") from error
        changed = sorted(name for name in {**before, **settings} if before.get(name) != settings.get(name))
        if changed:
            raise UserError(
                f"'{folder}' has pictures made with another {', '.join(changed)}: choose another --output, or remove it."
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps({"settings": settings, "versions": versions()}, indent=2) + "\n")


def is_complete(folder: Path, stem: str, source: str) -> bool:
    """Whether the pictures are there, and of this image: each names the hash of the file that it was made from."""
    for picture in PICTURES:
        try:
            with Image.open(folder / f"{stem}_{picture}.png") as image:
                if image.info.get(SOURCE_TEXT) != source:
                    return False
        except OSError:
            return False
    return True


def save_segmentation(segmentation: Segmentation, folder: Path, stem: str, source: str) -> None:
    """Writes the three pictures, each of them complete or not at all."""
    text = PngInfo()
    text.add_text(SOURCE_TEXT, source)
    for picture in PICTURES:
        path = folder / f"{stem}_{picture}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".writing-{os.getpid()}-{path.name}")
        try:
            getattr(segmentation, picture).save(temporary, "PNG", pnginfo=text)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def load_picture(path: Path) -> Image.Image:
    with Image.open(path) as picture:
        return picture.convert("RGB")


def feature_pictures(segmenter: Segmenter, images: list[Image.Image]) -> list[Image.Image]:
    """Three principal components of the patches' features as colours, fitted to all images together."""
    features, grids = zip(*(segmenter.features(image) for image in images))
    colours = components_to_rgb(list(features), list(grids), "pca")
    return [to_picture(colour) for colour in colours]


def save_rows(path: Path, rows: dict[str, list[Image.Image]]) -> None:
    """Rows of pictures, each below its title."""
    columns = max(map(len, rows.values()))
    grid = Image.new("RGB", (columns * (GRID_SIDE + 4), len(rows) * (GRID_SIDE + TITLE_HEIGHT)), "white")
    draw = ImageDraw.Draw(grid)
    for row, (title, pictures) in enumerate(rows.items()):
        top = row * (GRID_SIDE + TITLE_HEIGHT)
        draw.text((2, top + 2), title, fill="black")
        for column, picture in enumerate(pictures):
            grid.paste(fit(picture), (column * (GRID_SIDE + 4), top + TITLE_HEIGHT))
    grid.save(path)


def fit(picture: Image.Image) -> Image.Image:
    """A picture fitted into a square of the grid's size; its aspect ratio stays."""
    scale = GRID_SIDE / max(picture.size)
    size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    method = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.BILINEAR
    square = Image.new("RGB", (GRID_SIDE, GRID_SIDE), "white")
    square.paste(picture.resize(size, method))
    return square
