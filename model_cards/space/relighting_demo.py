"""Relighting: a picture under the light of another one, and without light; functions of pictures, like `compare.py`."""

import time

import numpy as np
import torch
from compare import HERE, TIME_LIMIT, as_picture, check_size, check_time, flatten, loaded_once, source_of
from diffusers import DiffusionPipeline
from PIL import Image, ImageOps


MODEL = "relighting-procedural"
SIDE = 64  # pixels that the network was trained with; larger pictures would take tiles, and time
NUM_FRAMES = 7
SCENES, LIGHTS = 4, 6  # of the sheet `scenes.png`: a row for every scene, a column for every light


@loaded_once
def relighter() -> DiffusionPipeline:
    return DiffusionPipeline.from_pretrained(source_of(MODEL), trust_remote_code=True)


@loaded_once
def load_scenes() -> list[Image.Image]:
    """Procedural scenes to try, none of which the network was trained with."""
    sheet = Image.open(HERE / "scenes.png").convert("RGB")
    return [
        sheet.crop((SIDE * column, SIDE * row, SIDE * (column + 1), SIDE * (row + 1)))
        for row in range(SCENES)
        for column in range(LIGHTS)
    ]


def prepare(image: Image.Image) -> Image.Image:
    """The middle of a picture as a square of the network's size, in colour; what is transparent is black."""
    return ImageOps.fit(flatten(image).convert("RGB"), (SIDE, SIDE), Image.Resampling.BICUBIC)


def relight(image: Image.Image, reference: Image.Image) -> dict:
    """The picture relit, its albedo, and frames in between: from its own light to that of the reference."""
    for picture in (image, reference):
        check_size(picture)
    pipeline = relighter()
    deadline = time.monotonic() + TIME_LIMIT
    image, reference = prepare(image), prepare(reference)
    frames = pipeline.interpolate(image, [image, reference], num_frames=NUM_FRAMES, output_type="np").images
    check_time(deadline)
    albedo = pipeline.albedo(image, output_type="np").images[0]
    return {
        "image": as_picture(np.asarray(image) / 255),
        "reference": as_picture(np.asarray(reference) / 255),
        "relit": as_picture(frames[-1]),
        "albedo": as_picture(albedo / max(float(torch.quantile(torch.from_numpy(albedo), 0.99)), 1e-6)),
        "frames": [as_picture(frame) for frame in frames],
    }
