"""Plots: what a reader sees in them."""

import numpy as np
from PIL import Image

from hf_decayed.plots import distance_title, distant_colour, save_curves, save_grid


def test_masked_patches_have_a_colour_that_is_not_in_the_images():
    grey = np.linspace(0, 1, 8 * 8 * 7).reshape(7, 8, 8, 1)
    assert np.ptp(distant_colour(grey)) > 0.2  # no grey hides among greys
    for colour in ([0.8, 0.45, 0.3], [0.25, 0.4, 0.75]):
        images = np.broadcast_to(colour, (2, 8, 8, 3))
        assert np.abs(distant_colour(images) - colour).max() > 0.3


def test_columns_of_a_grid_have_titles(tmp_path):
    images = np.random.default_rng(0).random((6, 8, 8, 1))
    save_grid(tmp_path / "plain.png", images)
    save_grid(tmp_path / "titled.png", images, ["T-shirt/top", "a name that is far too long for its column", "Bag"])
    titled = np.asarray(Image.open(tmp_path / "titled.png"))
    header = titled[:18]
    thirds = np.array_split(header, 3, axis=1)
    assert all((third < 128).any() for third in thirds)  # ink above every column
    assert (header[:, [0, -1]] == 255).all()  # nothing is cut at the sides
    assert titled.shape[1] >= 3 * 76 and Image.open(tmp_path / "plain.png").size[0] >= 600


def test_curves_of_few_and_of_many_records(tmp_path):
    few = [{"step": 10, "loss": 1.0, "knn_accuracy": 0.3}, {"step": 20, "loss": 0.5, "knn_accuracy": 0.4}]
    many = [{"step": step, "loss": 100.0 if step < 3 else 1 / step, "skip_use_2": 0.1} for step in range(1, 200)]
    for name, records in (("few", few), ("many", many)):
        save_curves(tmp_path / f"{name}.png", records)
        width, height = Image.open(tmp_path / f"{name}.png").size
        assert width == 1200 and height == 450


def test_names_of_distances_become_titles():
    assert distance_title("frechet_pixels_200_guidance_2") == "Frechet distance, pixels, 200 samples,\nguidance 2"
    assert distance_title("frechet_pixels_500") == "Frechet distance, pixels, 500 samples"
