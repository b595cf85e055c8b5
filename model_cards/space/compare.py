"""What the page shows, as functions of pictures; the page itself is `app.py`.

Models come from the folders beside this one, as in a clone; in a Space from the repositories of its owner; or from whatever
folder or owner the variable `MODELS` names. They run with the code that lies in their repositories.
"""

import json
import logging
import math
import os
import threading
import time
from functools import cache, wraps
from pathlib import Path

import numpy as np
import torch
from diffusers import DiffusionPipeline
from huggingface_hub import repo_exists
from PIL import Image, ImageColor, ImageOps, UnidentifiedImageError
from torch.nn import functional as F
from transformers import AutoImageProcessor, AutoModelForPreTraining


HERE = Path(__file__).parent

# What pictures are of -> autoencoders without and with decay. The page offers those that exist, and starts with the first.
KINDS = {
    "coloured clothes": ("undecayed-mae-coloured", "decayed-mae-coloured"),
    "clothes": ("plain-mae-fashion-mnist", "decayed-mae-fashion-mnist"),
    "photographs": ("plain-mae-cifar100", "decayed-mae-cifar100"),
}
GENERATORS = {"SiT, clothes": "decayed-sit-fashion-mnist", "U-ViT, clothes": "decayed-uvit-fashion-mnist"}
LOADING = threading.RLock()
SHOWN_SIZE = 224  # pixels; the models' images are so small that they are looked at enlarged
SHIFTS = 4  # along each side of a patch: features are computed at so many shifts of the picture, for a finer map
FITTED_IMAGES = 200  # of the gallery, whose patches choose the colours of features and the clusters
SEGMENT_COLOURS = ["#22303c", "#f28e2b", "#4e9fd1", "#59a14f", "#e15759", "#edc948"]  # the most frequent cluster first

# What one visitor may ask for. The page shows these ranges, and the functions check them again: a request need not come
# from the page.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")  # others are not even opened: Pillow hands EPS to Ghostscript
MAX_PIXELS = 25_000_000
MAX_ASPECT = 20
TIME_LIMIT = 120  # seconds of computing for one call, after the models are loaded
RANGES = {  # lowest, highest
    "mask_ratio": (0.25, 0.9),
    "layer": (0, 12),
    "count": (1, 16),
    "steps": (5, 100),
    "guidance": (1, 5),
    "seed": (0, 2**32 - 1),
}
WHOLE_NUMBERS = ("layer", "count", "steps", "seed")


class VisitorError(ValueError):
    """What a visitor has to change, in one sentence."""


def check_settings(**settings) -> dict:
    """The settings as numbers, if all are in their `RANGES`."""
    checked = {}
    for name, value in settings.items():
        lowest, highest = RANGES[name]
        kind = "a whole number" if name in WHOLE_NUMBERS else "a number"
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or not lowest <= value <= highest or (name in WHOLE_NUMBERS and value != int(value)):
            # The value may be as long as a request: only its beginning is repeated.
            raise VisitorError(f"`{name}` must be {kind} from {lowest} to {highest}, got {str(value)[:40]!r}.")
        checked[name] = int(value) if name in WHOLE_NUMBERS else float(value)
    return checked


def check_choice(name: str, value, choices) -> None:
    if not isinstance(value, str) or value not in choices:
        raise VisitorError(f"`{name}` must be one of {', '.join(choices)}, got {str(value)[:40]!r}.")


def check_time(deadline: float) -> None:
    """Ends a call that takes too long; called between steps, because a thread cannot be stopped from outside."""
    if time.monotonic() > deadline:
        raise VisitorError(f"This took longer than {TIME_LIMIT} seconds: ask for fewer images or steps, or try later.")


def read_picture(path: str | Path) -> Image.Image:
    """The picture in a file. Its size is read from the header, and a picture too large is refused before it is decoded."""
    try:
        image = Image.open(path, formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise VisitorError(f"The picture has too many pixels: at most {MAX_PIXELS:,} are allowed.") from error
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError) as error:
        raise VisitorError(f"This file is not a picture that can be read: use one of {', '.join(FORMATS)}.") from error
    check_size(image)
    try:
        image.load()
    except Exception as error:  # Pillow raises many types for broken files
        raise VisitorError("The picture is damaged: it cannot be decoded.") from error
    return image


def check_size(image: Image.Image) -> None:
    """Refuses a picture by the size in its header."""
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise VisitorError(
            f"The picture has {width} x {height} pixels: at most {MAX_PIXELS:,} are allowed. Upload a smaller copy."
        )
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise VisitorError(
            f"The picture has {width} x {height} pixels: a side may be {MAX_ASPECT} times the other at most."
        )


def source_of(name: str) -> str:
    """Where a model is loaded from: a folder, or a repository of an owner."""
    source = os.environ.get("MODELS") or os.environ.get("SPACE_AUTHOR_NAME") or str(HERE.parent)
    return str(Path(source) / name) if Path(source).is_dir() else f"{source}/{name}"


def is_available(kind: str) -> bool:
    """Whether both autoencoders of a kind exist, as folders or repositories."""
    sources = [source_of(name) for name in KINDS[kind]]
    if Path(sources[0]).parent.is_dir():
        return all(Path(source).is_dir() for source in sources)
    return all(repo_exists(source) for source in sources)


def loaded_once(function):
    """Caches results; calls run one thread at a time, because whatever is loaded while diffusers builds a network would be
    left without weights."""
    cached = cache(function)

    @wraps(function)
    def call(*arguments):
        with LOADING:
            return cached(*arguments)

    call.cache_clear = cached.cache_clear
    return call


class Autoencoder:
    """A masked autoencoder and its processor."""

    def __init__(self, name: str):
        self.model = AutoModelForPreTraining.from_pretrained(source_of(name), trust_remote_code=True).eval()
        self.processor = AutoImageProcessor.from_pretrained(source_of(name), trust_remote_code=True)
        self.decay = self.model.config.shortcut_decay
        self.num_layers = self.model.config.num_hidden_layers

    def pixels(self, images: list[Image.Image]) -> torch.Tensor:
        """Images as the model takes them; grey ones get the axis of channels that the processor expects."""
        arrays = [np.asarray(image) for image in images]
        arrays = [array[..., None] if array.ndim == 2 else array for array in arrays]
        return self.processor(arrays, input_data_format="channels_last", return_tensors="pt").pixel_values

    @torch.no_grad()
    def layers(self, images: list[Image.Image]) -> list[torch.Tensor]:
        """Tokens after the embedding and after every layer, the class token first; nothing is masked.

        The last are the encoder's output, which a plain one has normalised.
        """
        outputs = self.model.vit(self.pixels(images), output_hidden_states=True)
        return [*outputs.hidden_states[:-1], outputs.last_hidden_state]

    def reconstruct(self, image: Image.Image, mask_ratio: float, seed: int) -> list[Image.Image]:
        """What the encoder sees, and the whole image as the decoder completes it."""
        pixels = self.pixels([image])
        height, width = self.grid_of(pixels)
        noise = torch.rand(1, height * width, generator=torch.Generator().manual_seed(seed))
        reconstructed, removed = self.model.reconstruct(pixels, noise=noise, mask_ratio=mask_ratio)
        mean, std = (
            torch.tensor(values).view(1, -1, 1, 1) for values in (self.processor.image_mean, self.processor.image_std)
        )
        seen = torch.where(removed, 0.5, pixels * std + mean)
        return [as_picture(pixels[0].permute(1, 2, 0).numpy()) for pixels in (seen, reconstructed * std + mean)]

    def grid_of(self, pixels: torch.Tensor) -> tuple[int, int]:
        return self.model.vit.embeddings.patch_grid(pixels, interpolate_pos_encoding=False)

    @torch.no_grad()
    def dense_features(self, image: Image.Image, layer: int) -> torch.Tensor:
        """Features `(rows, columns, width)` after a layer, finer than patches: of shifts of the picture, put side by side."""
        pixels = self.pixels([image])
        patch, (height, width) = self.model.config.patch_size, self.grid_of(pixels)
        step = max(1, patch // SHIFTS)
        offsets = range(0, patch, step)
        before = (patch - step) // 2  # the middle of a patch is where its feature is shown
        padded = F.pad(pixels, (before, patch - step - before) * 2, mode="replicate")
        shifted = [padded[:, :, y : y + pixels.shape[2], x : x + pixels.shape[3]] for y in offsets for x in offsets]
        outputs = self.model.vit(torch.cat(shifted), output_hidden_states=True)
        tokens = [*outputs.hidden_states[:-1], outputs.last_hidden_state][layer][:, 1:]
        grid = tokens.unflatten(1, (height, width)).unflatten(0, (len(offsets), len(offsets)))
        return grid.permute(2, 0, 3, 1, 4).flatten(0, 1).flatten(1, 2)


class Palette:
    """Colours of features: three principal components, and clusters, both chosen by some features of one layer."""

    def __init__(self, features: torch.Tensor):
        """`features` are `(number, width)`."""
        rows = self.normalize(features)
        self.mean = rows.mean(dim=0)
        _, singular, right = torch.linalg.svd(rows - self.mean, full_matrices=False)
        # A component's sign is arbitrary: its largest weight is made positive, so that colours do not flip by chance.
        sign = torch.gather(right[:3], 1, right[:3].abs().argmax(dim=1, keepdim=True)).sign()
        self.directions = right[:3] * sign
        self.share = (singular[:3].square().sum() / singular.square().sum().clamp_min(1e-12)).item()
        projected = (rows - self.mean) @ self.directions.T
        self.low, self.high = (torch.quantile(projected, share, dim=0) for share in (0.02, 0.98))
        self.centres = cluster_centres(rows, len(SEGMENT_COLOURS))

    def normalize(self, features: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(features, features.shape[-1:])

    def components(self, features: torch.Tensor) -> Image.Image:
        """Features `(rows, columns, width)` as a picture: similar features have similar colours."""
        projected = (self.normalize(features) - self.mean) @ self.directions.T
        return as_picture(((projected - self.low) / (self.high - self.low).clamp_min(1e-12)).numpy())

    def segments(self, features: torch.Tensor) -> Image.Image:
        """The nearest cluster of every feature, in its colour."""
        nearest = torch.cdist(self.normalize(features).flatten(0, 1), self.centres).argmin(dim=1)
        colours = np.array([ImageColor.getrgb(colour) for colour in SEGMENT_COLOURS])
        return as_picture(colours[nearest.numpy()].reshape(*features.shape[:2], 3) / 255)


def cluster_centres(rows: torch.Tensor, number: int) -> torch.Tensor:
    """k-means, started at rows that are far from one another; the centre of the largest cluster comes first."""
    centres = rows[:1]
    for _ in range(number - 1):
        farthest = torch.cdist(rows, centres).amin(dim=1).argmax()
        centres = torch.cat([centres, rows[farthest : farthest + 1]])
    for _ in range(20):
        nearest = torch.cdist(rows, centres).argmin(dim=1)
        sizes = nearest.bincount(minlength=number)
        sums = torch.zeros_like(centres).index_add_(0, nearest, rows)
        centres = torch.where(sizes[:, None] > 0, sums / sizes[:, None].clamp_min(1), centres)
    return centres[sizes.argsort(descending=True, stable=True)]


@loaded_once
def autoencoders(kind: str) -> tuple[Autoencoder, Autoencoder]:
    """Those without and with decay."""
    without_decay, decayed = KINDS[kind]
    return Autoencoder(without_decay), Autoencoder(decayed)


@loaded_once
def generator(which: str):
    pipeline = DiffusionPipeline.from_pretrained(source_of(GENERATORS[which]), trust_remote_code=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def gallery(kind: str) -> tuple[list[Image.Image], list[str]]:
    """Images to look for neighbours in, and their names; none where they cannot be had, which is tried again."""
    try:
        return load_gallery(kind)
    except Exception as error:  # no network, no library, no repository: the page goes without neighbours
        logging.warning("No gallery of %s: %s", kind, error)
        return [], []


@loaded_once
def load_gallery(kind: str) -> tuple[list[Image.Image], list[str]]:
    if kind != "photographs":  # 1,000 test images of Fashion-MNIST, in rows of 40
        sheet = Image.open(HERE / "gallery.png")
        names = json.loads((HERE / "gallery.json").read_text())
        corners = [(28 * (index % 40), 28 * (index // 40)) for index in range(len(names))]
        images = [sheet.crop((left, top, left + 28, top + 28)) for left, top in corners]
        return colour_garments(images) if kind == "coloured clothes" else images, names
    from datasets import load_dataset  # CIFAR-100 states no licence, so that it is not shipped here

    images = load_dataset("uoft-cs/cifar100", split="test[:2000]")
    names = images.features["fine_label"].names
    return list(images["img"]), [names[label] for label in images["fine_label"]]


def colour_garments(images: list[Image.Image]) -> list[Image.Image]:
    """Grey garments on black, in a colour on a background of another, as the models of coloured clothes were trained."""
    draws = np.random.default_rng(0)
    pictures = []
    for image in images:
        intensity = np.asarray(image)[:, :, None] / 255
        garment = draws.random(3)
        background = (garment + draws.uniform(0.3, 0.7, 3)) % 1  # every channel differs
        pixels = np.where(intensity > 0.1, intensity * garment, background)
        pictures.append(Image.fromarray((255 * pixels).round().astype(np.uint8)))
    return pictures


@loaded_once
def gallery_tokens(kind: str, number: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Of every layer of one of the two models: a normalised feature for each image, the mean of its tokens; some patches."""
    model, images = autoencoders(kind)[number], gallery(kind)[0]
    means, patches = [], []
    for start in range(0, len(images), 100):
        layers = model.layers(images[start : start + 100])
        means.append([tokens.mean(dim=1) for tokens in layers])
        if start < FITTED_IMAGES:
            patches.append([tokens[:, 1:].flatten(0, 1) for tokens in layers])
    features = [F.normalize(torch.cat(layer), dim=-1) for layer in zip(*means)]
    return features, [torch.cat(layer) for layer in zip(*patches)]


@loaded_once
def gallery_palette(kind: str, number: int, layer: int) -> Palette:
    return Palette(gallery_tokens(kind, number)[1][layer])


def neighbours(kind: str, number: int, tokens: torch.Tensor, layer: int, count: int = 8) -> list[tuple]:
    """The most similar images of the gallery and their names, by the cosine of features."""
    images, names = gallery(kind)
    if not images:
        return []
    feature = F.normalize(tokens.mean(dim=1), dim=-1)
    order = (gallery_tokens(kind, number)[0][layer] @ feature[0]).topk(count).indices.tolist()
    return [(as_picture(np.asarray(images[index]) / 255), names[index]) for index in order]


def examples(kind: str) -> list[tuple[Image.Image, str]]:
    """Pictures to try with their names, one of every class and a few more; none where there is no gallery."""
    images, names = gallery(kind)
    first = sorted({names.index(name) for name in names})[:10]
    chosen = first + [index for index in range(len(names)) if index not in first][: 12 - len(first)]
    return [(as_picture(np.asarray(images[index]) / 255), names[index]) for index in chosen]


def flatten(image: Image.Image) -> Image.Image:
    """A picture upright, of eight bits and without transparency."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith(("I", "F")):  # more than eight bits: from the darkest to the lightest that there is
        values = np.asarray(image, dtype=np.float64)
        span = max(values.max() - values.min(), 1e-12)
        image = Image.fromarray((255 * (values - values.min()) / span).round().astype(np.uint8))
    if image.has_transparency_data:  # what cannot be seen is background
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "black"), image)
    return image


def prepare(kind: str, image: Image.Image) -> Image.Image:
    """A square picture like those of the data set: colour pictures are cut, grey clothes stand on black."""
    image = flatten(image)
    if kind != "clothes":
        side = 28 if kind == "coloured clothes" else 32
        return ImageOps.fit(image.convert("RGB"), (side, side), Image.Resampling.BICUBIC)
    grey = image.convert("L")
    pixels = np.asarray(grey)
    if np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]]).mean() > 127:
        grey = ImageOps.invert(grey)
    return ImageOps.pad(grey, (28, 28), Image.Resampling.BICUBIC, color=0)


def compare(kind: str, image: Image.Image, mask_ratio: float, layer: int, seed: int) -> list[dict]:
    """Of the models without and with decay: pictures of what it distinguishes, finds alike, sees and completes."""
    check_choice("kind", kind, KINDS)
    check_size(image)
    settings = check_settings(mask_ratio=mask_ratio, layer=layer, seed=seed)
    models = autoencoders(kind)
    deadline = time.monotonic() + TIME_LIMIT
    image = prepare(kind, image)
    results = []
    for number, model in enumerate(models):
        check_time(deadline)
        depth = min(settings["layer"], model.num_layers)
        features = model.dense_features(image, depth)
        # Without a gallery, the picture's own features choose its colours.
        has_gallery = bool(gallery(kind)[0])
        palette = gallery_palette(kind, number, depth) if has_gallery else Palette(features.flatten(0, 1))
        check_time(deadline)
        seen, reconstructed = model.reconstruct(image, settings["mask_ratio"], settings["seed"])
        results.append(
            {
                "decay": model.decay,
                "image": as_picture(np.asarray(image) / 255),
                "components": palette.components(features),
                "segments": palette.segments(features),
                "share": palette.share,
                "neighbours": neighbours(kind, number, model.layers([image])[depth], depth),
                "seen": seen,
                "reconstructed": reconstructed,
            }
        )
    return results


def class_names(which: str) -> list[str]:
    check_choice("generator", which, GENERATORS)
    return list(generator(which).config.id2label.values())


def draw(which: str, name: str, count: int, steps: int, guidance: float, seed: int, on_step=None) -> list[Image.Image]:
    """Images of a class; `on_step(step, steps)` is called after every step."""
    check_choice("class", name, class_names(which))
    settings = check_settings(count=count, steps=steps, guidance=guidance, seed=seed)
    deadline = time.monotonic() + TIME_LIMIT

    def after_step(pipeline, step, timestep, tensors):
        check_time(deadline)
        if on_step:
            on_step(step + 1, settings["steps"])
        return tensors

    images = generator(which)(
        [name] * settings["count"],
        num_inference_steps=settings["steps"],
        guidance_scale=settings["guidance"],
        generator=torch.Generator().manual_seed(settings["seed"]),
        callback_on_step_end=after_step,
        output_type="np",
    ).images
    return [as_picture(image) for image in images]


def as_picture(array: np.ndarray) -> Image.Image:
    """An array in [0, 1], with one channel or three, as a picture large enough to look at."""
    pixels = (255 * np.asarray(array, dtype=np.float32).clip(0, 1)).round().astype(np.uint8)
    image = Image.fromarray(pixels.squeeze(-1) if pixels.ndim == 3 and pixels.shape[-1] == 1 else pixels)
    scale = max(1, SHOWN_SIZE // max(image.size))
    return image.resize((scale * image.width, scale * image.height), Image.Resampling.NEAREST)
