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
from PIL import Image, ImageOps, UnidentifiedImageError
from torch.nn import functional as F
from transformers import AutoImageProcessor, AutoModelForPreTraining


HERE = Path(__file__).parent

# What pictures are of -> data set; its autoencoders are `plain-mae-<data set>` and `decayed-mae-<data set>`.
KINDS = {"clothes": "fashion-mnist", "photographs": "cifar100"}
GENERATORS = {"SiT, clothes": "decayed-sit-fashion-mnist", "U-ViT, clothes": "decayed-uvit-fashion-mnist"}
LOADING = threading.RLock()
SHOWN_SIZE = 224  # pixels; the models' images are so small that they are looked at enlarged

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

    def components(self, image: Image.Image, tokens: torch.Tensor) -> tuple[Image.Image, float]:
        """The three principal components of an image's patches as red, green and blue; their share of the variance."""
        patches = tokens[0, 1:]
        patches = patches - patches.mean(dim=0)
        left, singular, right = torch.linalg.svd(patches, full_matrices=False)
        # A component's sign is arbitrary: its largest weight is made positive, so that colours do not flip by chance.
        sign = torch.gather(right[:3], 1, right[:3].abs().argmax(dim=1, keepdim=True)).sign().squeeze(1)
        colours = left[:, :3] * sign
        colours = (colours - colours.amin(dim=0)) / (colours.amax(dim=0) - colours.amin(dim=0)).clamp_min(1e-12)
        grid = colours.reshape(*self.grid_of(self.pixels([image])), 3)
        share = (singular[:3].square().sum() / singular.square().sum().clamp_min(1e-12)).item()
        return as_picture(grid.numpy()), share


@loaded_once
def autoencoders(kind: str) -> tuple[Autoencoder, Autoencoder]:
    """The plain one and the decayed one."""
    return Autoencoder(f"plain-mae-{KINDS[kind]}"), Autoencoder(f"decayed-mae-{KINDS[kind]}")


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
    if kind == "clothes":  # 1,000 test images of Fashion-MNIST, in rows of 40
        sheet = Image.open(HERE / "gallery.png")
        names = json.loads((HERE / "gallery.json").read_text())
        corners = [(28 * (index % 40), 28 * (index // 40)) for index in range(len(names))]
        return [sheet.crop((left, top, left + 28, top + 28)) for left, top in corners], names
    from datasets import load_dataset  # CIFAR-100 states no licence, so that it is not shipped here

    images = load_dataset("uoft-cs/cifar100", split="test[:2000]")
    names = images.features["fine_label"].names
    return list(images["img"]), [names[label] for label in images["fine_label"]]


@loaded_once
def gallery_features(kind: str, number: int) -> list[torch.Tensor]:
    """Of every layer of one of the two models: a normalised feature for each image, the mean of its tokens."""
    model, images = autoencoders(kind)[number], gallery(kind)[0]
    batches = [
        [tokens.mean(dim=1) for tokens in model.layers(images[i : i + 100])] for i in range(0, len(images), 100)
    ]
    return [F.normalize(torch.cat(layer), dim=-1) for layer in zip(*batches)]


def neighbours(kind: str, number: int, tokens: torch.Tensor, layer: int, count: int = 8) -> list[tuple]:
    """The most similar images of the gallery and their names, by the cosine of features."""
    images, names = gallery(kind)
    if not images:
        return []
    feature = F.normalize(tokens.mean(dim=1), dim=-1)
    order = (gallery_features(kind, number)[layer] @ feature[0]).topk(count).indices.tolist()
    return [(as_picture(np.asarray(images[index]) / 255), names[index]) for index in order]


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
    """A square picture like those of the data set: photographs are cut, clothes stand on black and are grey."""
    image = flatten(image)
    if kind == "photographs":
        return ImageOps.fit(image.convert("RGB"), (32, 32), Image.Resampling.BICUBIC)
    grey = image.convert("L")
    pixels = np.asarray(grey)
    if np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]]).mean() > 127:
        grey = ImageOps.invert(grey)
    return ImageOps.pad(grey, (28, 28), Image.Resampling.BICUBIC, color=0)


def compare(kind: str, image: Image.Image, mask_ratio: float, layer: int, seed: int) -> list[dict]:
    """Of the plain model and the decayed one: pictures of what it sees, completes, distinguishes and finds alike."""
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
        seen, reconstructed = model.reconstruct(image, settings["mask_ratio"], settings["seed"])
        tokens = model.layers([image])[depth]
        components, share = model.components(image, tokens)
        check_time(deadline)
        results.append(
            {
                "decay": model.decay,
                "image": as_picture(np.asarray(image) / 255),
                "seen": seen,
                "reconstructed": reconstructed,
                "components": components,
                "share": share,
                "neighbours": neighbours(kind, number, tokens, depth),
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
