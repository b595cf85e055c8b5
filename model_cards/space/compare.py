"""What the page shows, as functions of pictures; the page itself is `app.py`.

Models come from the folders beside this one, as in a clone; in a Space from the repositories of its owner; or from whatever
folder or owner the variable `MODELS` names. They run with the code that lies in their repositories.
"""

import json
import logging
import os
import threading
from functools import cache, wraps
from pathlib import Path

import numpy as np
import torch
from diffusers import DiffusionPipeline
from PIL import Image, ImageOps
from torch.nn import functional as F
from transformers import AutoImageProcessor, AutoModelForPreTraining


HERE = Path(__file__).parent

# What pictures are of -> data set; its autoencoders are `plain-mae-<data set>` and `decayed-mae-<data set>`.
KINDS = {"clothes": "fashion-mnist", "photographs": "cifar100"}
GENERATORS = {"SiT, clothes": "decayed-sit-fashion-mnist", "U-ViT, clothes": "decayed-uvit-fashion-mnist"}
LOADING = threading.RLock()
SHOWN_SIZE = 224  # pixels; the models' images are so small that they are looked at enlarged


def source_of(name: str) -> str:
    """Where a model is loaded from: a folder, or a repository of an owner."""
    place = os.environ.get("MODELS") or os.environ.get("SPACE_AUTHOR_NAME") or str(HERE.parent)
    return str(Path(place) / name) if Path(place).is_dir() else f"{place}/{name}"


def loaded_once(function):
    """Kept when it succeeds, and by one thread at a time: while diffusers builds a network, whatever else is loaded would
    be left without weights."""
    kept = cache(function)

    @wraps(function)
    def call(*arguments):
        with LOADING:
            return kept(*arguments)

    call.cache_clear = kept.cache_clear
    return call


class Autoencoder:
    """A masked autoencoder and its processor."""

    def __init__(self, name: str):
        self.model = AutoModelForPreTraining.from_pretrained(source_of(name), trust_remote_code=True).eval()
        self.processor = AutoImageProcessor.from_pretrained(source_of(name))
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
        return [as_picture(each[0].permute(1, 2, 0).numpy()) for each in (seen, reconstructed * std + mean)]

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
        corners = [(28 * (place % 40), 28 * (place // 40)) for place in range(len(names))]
        return [sheet.crop((left, top, left + 28, top + 28)) for left, top in corners], names
    from datasets import load_dataset  # CIFAR-100 states no licence, so that it is not shipped here

    images = load_dataset("uoft-cs/cifar100", split="test[:2000]")
    names = images.features["fine_label"].names
    return list(images["img"]), [names[label] for label in images["fine_label"]]


@loaded_once
def gallery_features(kind: str, number: int) -> list[torch.Tensor]:
    """Of every layer of one of the two models: a normalised feature for each image, the mean of its tokens."""
    model, images = autoencoders(kind)[number], gallery(kind)[0]
    batches = [[each.mean(dim=1) for each in model.layers(images[i : i + 100])] for i in range(0, len(images), 100)]
    return [F.normalize(torch.cat(layer), dim=-1) for layer in zip(*batches)]


def neighbours(kind: str, number: int, tokens: torch.Tensor, layer: int, count: int = 8) -> list[tuple]:
    """The most similar images of the gallery and their names, by the cosine of features."""
    images, names = gallery(kind)
    if not images:
        return []
    feature = F.normalize(tokens.mean(dim=1), dim=-1)
    order = (gallery_features(kind, number)[layer] @ feature[0]).topk(count).indices.tolist()
    return [(as_picture(np.asarray(images[place]) / 255), names[place]) for place in order]


def prepare(kind: str, image: Image.Image) -> Image.Image:
    """A square picture like those of the data set: photographs are cut, clothes stand on black and are grey."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith(("I", "F")):  # more than eight bits: from the darkest to the lightest that there is
        values = np.asarray(image, dtype=np.float64)
        span = max(values.max() - values.min(), 1e-12)
        image = Image.fromarray((255 * (values - values.min()) / span).round().astype(np.uint8))
    if image.has_transparency_data:  # what cannot be seen is background
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "black"), image)
    if kind == "photographs":
        return ImageOps.fit(image.convert("RGB"), (32, 32), Image.Resampling.BICUBIC)
    grey = image.convert("L")
    pixels = np.asarray(grey)
    if np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]]).mean() > 127:
        grey = ImageOps.invert(grey)
    return ImageOps.pad(grey, (28, 28), Image.Resampling.BICUBIC, color=0)


def compare(kind: str, image: Image.Image, mask_ratio: float, layer: int, seed: int) -> list[dict]:
    """Of the plain model and the decayed one: pictures of what it sees, completes, distinguishes and finds alike."""
    image = prepare(kind, image)
    found = []
    for number, model in enumerate(autoencoders(kind)):
        depth = min(layer, model.num_layers)
        seen, reconstructed = model.reconstruct(image, mask_ratio, seed)
        tokens = model.layers([image])[depth]
        components, share = model.components(image, tokens)
        found.append(
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
    return found


def class_names(which: str) -> list[str]:
    return list(generator(which).config.id2label.values())


def draw(which: str, name: str, count: int, steps: int, guidance: float, seed: int, on_step=None) -> list[Image.Image]:
    """Images of a class; `on_step(done, steps)` is told how far it is."""

    def tell(pipeline, step, timestep, tensors):
        if on_step:
            on_step(step + 1, steps)
        return tensors

    images = generator(which)(
        [name] * count,
        num_inference_steps=steps,
        guidance_scale=guidance,
        generator=torch.Generator().manual_seed(seed),
        callback_on_step_end=tell,
        output_type="np",
    ).images
    return [as_picture(image) for image in images]


def as_picture(array: np.ndarray) -> Image.Image:
    """An array in [0, 1], with one channel or three, as a picture large enough to look at."""
    pixels = (255 * np.asarray(array, dtype=np.float32).clip(0, 1)).round().astype(np.uint8)
    image = Image.fromarray(pixels.squeeze(-1) if pixels.ndim == 3 and pixels.shape[-1] == 1 else pixels)
    scale = max(1, SHOWN_SIZE // max(image.size))
    return image.resize((scale * image.width, scale * image.height), Image.Resampling.NEAREST)
