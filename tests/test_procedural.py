"""Procedural views: keyed draws, exact masks, colours that can be seen, and training that draws them anew."""

import json

import numpy as np
import pytest
import torch
from conftest import TINY_SIZES, run_script
from safetensors.torch import load_file
from torch.nn import functional as F

from hf_decayed import DecayedViTMAEConfig, DecayedViTMAEForPreTraining, DecayedViTMAEModel
from hf_decayed.data import procedural
from hf_decayed.data.datasets import EvaluationDataset, TrainingImages
from hf_decayed.data.latents import latent_images, pixel_images
from hf_decayed.data.procedural import TRAIN_SEED, ProceduralViews, draw_colours, transform_garments
from hf_decayed.data.sources import load_image_splits, load_splits
from hf_decayed.data.transforms import Augmentation, CenterCropProcessor
from hf_decayed.errors import DataError, UserError
from hf_decayed.evaluation.encoders import FeatureMetrics, evaluate_encoder
from hf_decayed.models.image_processing_decayed import default_image_processor


KEYS = [(0, 5), (3, 1), (0, 900), (7, 7)]


@pytest.fixture(scope="module")
def garments():
    rows = load_splits()[0].select(range(400))
    return rows, torch.from_numpy(np.stack([np.asarray(image) for image in rows["image"]])).unsqueeze(1)


def views_only(channels=3, seed=0):
    """What `--crop_scale 1 1 --horizontal_flip false` does: views without another crop; pixels stay in [0, 1]."""
    return Augmentation(
        (28, 28), channels, 0, [0.0] * channels, [1.0] * channels, seed, crop_scale=(1.0, 1.0), horizontal_flip=False
    )


@pytest.mark.parametrize("variant", ["coloured", "textured"])
def test_a_view_belongs_to_its_key(garments, variant):
    """Bit-equal alone, in another batch and in another order; other seeds, epochs and indices give other views."""
    views, images = ProceduralViews(variant, garments[0]), garments[1][:4]
    pixels, masks = views.render(images, KEYS, seed=3)
    assert pixels.shape == (4, 3, 28, 28) and pixels.dtype == torch.uint8 and masks.dtype == torch.bool
    order = [2, 0]
    again, masks_again = views.render(images[order], [KEYS[index] for index in order], seed=3)
    assert torch.equal(again, pixels[order]) and torch.equal(masks_again, masks[order])
    same = images[:1].expand(4, -1, -1, -1)
    others, _ = views.render(same, [(0, 5), (1, 5), (0, 6), (0, 5)], seed=3)
    other_seed, _ = views.render(same[:1], [(0, 5)], seed=4)
    assert torch.equal(others[0], others[3])
    assert len({tensor.numpy().tobytes() for tensor in [*others, *other_seed]}) == 4


def test_coloured_is_two_colours_and_an_exact_mask(garments):
    """Each image: one colour outside of the mask; inside, a second one times the intensity that torch resamples."""
    images, keys = garments[1][:50], [(2, index) for index in range(50)]
    pixels, masks = ProceduralViews("coloured", garments[0]).render(images, keys, seed=0)
    draws = np.stack(
        [procedural.sample_generator(0, 2, index, stream=procedural.VIEW_STREAM).random(4) for index in range(50)]
    )
    scale = torch.from_numpy(0.8 + 0.5 * draws[:, 1])
    shift = torch.from_numpy(0.2 * (2 * draws[:, 2:] - 1)) * 2  # torch's coordinates span two units
    mirror = torch.where(torch.from_numpy(draws[:, 0]) < 0.5, -1.0, 1.0).double()
    matrix = torch.zeros(50, 2, 3, dtype=torch.float64)
    matrix[:, 0, 0], matrix[:, 1, 1] = mirror / scale, 1 / scale
    matrix[:, 0, 2], matrix[:, 1, 2] = -mirror * shift[:, 1] / scale, -shift[:, 0] / scale
    grid = F.affine_grid(matrix, [50, 1, 28, 28], align_corners=False)
    intensity = F.grid_sample(images.double() / 255, grid, align_corners=False)[:, 0]
    certain = (intensity - procedural.FOREGROUND_THRESHOLD).abs() > 1e-9
    assert torch.equal(masks[certain], (intensity > procedural.FOREGROUND_THRESHOLD)[certain])
    for view, mask, shade in zip(pixels.double(), masks, intensity):
        assert mask.any() and (view[:, ~mask] == view[:, ~mask][:, :1]).all()
        brightest = torch.where(mask, shade, 0).argmax()
        colour = view.flatten(1)[:, brightest] / shade.flatten()[brightest]
        assert (view[:, mask] - colour[:, None] * shade[mask]).abs().max() <= 1.5  # rounding, twice


def test_geometry_stays_in_its_ranges():
    """A square of half the size: its area and its centre say how it was scaled and shifted."""
    square = np.zeros((500, 40, 40))
    square[:, 10:30, 10:30] = 1
    moved = transform_garments(square, np.random.default_rng(0).random((500, 4)))
    sides = np.sqrt(moved.sum(axis=(1, 2))) / 20
    inside = sides < 1.0  # a larger one may be cut off at the border
    assert 0.79 < sides.min() < 0.82 and 1.25 < sides.max() < 1.31
    centres = (moved.sum(axis=2) * (np.arange(40) + 0.5)).sum(axis=1) / moved.sum(axis=(1, 2)) / 40 - 0.5
    assert 0.18 < np.abs(centres[inside]).max() <= 0.2 + 1e-9


def test_colours_differ_enough_to_be_seen():
    draws = np.random.default_rng(0).random((20_000, procedural.COLOUR_DRAWS))
    foreground, background = draw_colours(draws)
    distances = np.linalg.norm(foreground - background, axis=1)
    assert distances.min() >= procedural.MIN_COLOUR_DISTANCE
    assert abs(foreground.mean() - 0.5) < 0.01 and foreground.min() < 0.01 and foreground.max() > 0.99
    foreground, background = draw_colours(np.full((1, procedural.COLOUR_DRAWS), 0.3))  # no pair differs at all
    assert np.linalg.norm(foreground - background) >= procedural.MIN_COLOUR_DISTANCE


@pytest.mark.slow
def test_raw_pixels_lose_what_they_knew():
    """Nearest neighbours by pixels: far above chance on grey garments, less on coloured, least on textured ones."""

    def accuracy(name):
        splits = load_image_splits(name).take(2000, 500)
        train, test = (
            EvaluationDataset(rows, "image", "label", CenterCropProcessor(28, 28), 3).__getitems__(
                list(range(len(rows)))
            )
            for rows in (splits.train, splits.held_out)
        )
        bank, queries = (F.normalize((batch["pixel_values"] - 0.5).flatten(1)) for batch in (train, test))
        votes = F.one_hot(train["labels"][(queries @ bank.T).topk(10).indices], 10).sum(1)
        return (votes.argmax(1) == test["labels"]).float().mean().item()

    grey, coloured, textured = (accuracy(f"bundled:{variant}") for variant in procedural.VARIANTS)
    assert grey > 0.65 > 0.45 > coloured > textured + 0.05 and textured > 0.1


@pytest.mark.parametrize("variant", ["grey", "coloured", "textured"])
def test_as_a_data_set(variant):
    splits = load_image_splits(dataset_name=f"bundled:{variant}")
    assert splits.name == ("fashion_mnist_subset" if variant == "grey" else f"bundled:{variant}")
    assert (len(splits.train), len(splits.held_out)) == (9000, 2000)
    assert splits.train.column_names == splits.held_out.column_names == ["image", "label", "mask"]
    assert (splits.image_column, splits.label_column, splits.mask_column) == ("image", "label", "mask")
    assert len(splits.mask_names) == 11 and splits.mask_names[0] == "background"
    for row in splits.held_out.select(range(0, 2000, 199)):
        assert row["image"].mode == ("L" if variant == "grey" else "RGB") and row["image"].size == (28, 28)
        assert set(np.unique(row["mask"])) == {0, row["label"] + 1}
    again = load_image_splits(dataset_name=f"bundled:{variant}")
    assert again.train._fingerprint == splits.train._fingerprint and again.fingerprint() == splits.fingerprint()
    images = EvaluationDataset(
        splits.train, "image", "label", CenterCropProcessor(28, 28), 3, mask_column=splits.mask_column
    )
    batch = images.__getitems__([4, 17])
    assert batch["masks"].amax(dim=(1, 2)).tolist() == (batch["labels"] + 1).tolist()


def test_fixed_views_are_those_of_a_fixed_seed(garments):
    train = load_image_splits(dataset_name="bundled:coloured").train
    expected, masks = ProceduralViews("coloured", garments[0]).render(garments[1][[7]], [(0, 7)], TRAIN_SEED)
    assert np.array_equal(np.asarray(train[7]["image"]), expected[0].permute(1, 2, 0).numpy())
    assert np.array_equal(np.asarray(train[7]["mask"]) > 0, masks[0].numpy())
    assert procedural.HELD_OUT_SEED != TRAIN_SEED


def test_plain_images_did_not_change():
    """With masks, which are where a garment is brighter than the threshold; name and fingerprint are the old ones."""
    plain, named = load_image_splits(), load_image_splits(dataset_name="bundled")
    assert plain.name == named.name == "fashion_mnist_subset" and plain.views is None
    assert plain.fingerprint() == named.fingerprint()
    original = load_splits()[0]
    for index in (0, 8999):
        pixels = np.asarray(plain.train[index]["image"])
        assert np.array_equal(pixels, np.asarray(original[index]["image"]))
        assert np.array_equal(np.asarray(plain.train[index]["mask"]) > 0, pixels > 25.5)


def test_training_draws_new_views():
    """By epoch and index; halves of a batch, as two processes take them, are bit-equal to the whole."""
    splits = load_image_splits(dataset_name="bundled:coloured").take(60)
    images = TrainingImages.from_splits(splits, views_only(seed=5))
    keys = [(epoch, index) for epoch in (0, 1) for index in range(30)]
    batch = images.__getitems__(keys)
    first, second = batch["pixel_values"].split(30)
    assert (first != second).flatten(1).any(dim=1).all()
    originals = torch.from_numpy(np.stack([np.asarray(image) for image in splits.views.originals["image"]]))
    expected, _ = splits.views.render(originals[[i for _, i in keys]].unsqueeze(1), keys, seed=5)
    torch.testing.assert_close(255 * batch["pixel_values"], expected.float(), atol=1e-3, rtol=0)  # nothing but views
    halves = [images.__getitems__(keys[start::2]) for start in (0, 1)]
    for start, half in enumerate(halves):
        assert torch.equal(half["pixel_values"], batch["pixel_values"][start::2])
    assert batch["labels"].tolist() == [splits.train[index]["label"] for _, index in keys]
    assert not images.uses_workers


def test_views_follow_a_subset():
    splits = load_image_splits(dataset_name="bundled:textured")
    part = splits.take(50)
    assert part.views.originals["label"][:] == part.train["label"][:] and len(part.views.originals) == 50
    assert part.fingerprint() != splits.fingerprint()


def test_random_crops_come_on_top():
    splits = load_image_splits(dataset_name="bundled:coloured").take(20)
    crop = Augmentation((28, 28), 3, 0, [0.0] * 3, [1.0] * 3, seed=0, crop_scale=(0.2, 0.5))
    keys = [(0, index) for index in range(20)]
    cropped, whole = (
        TrainingImages.from_splits(splits, one).__getitems__(keys)["pixel_values"] for one in (crop, views_only())
    )
    assert (cropped != whole).flatten(1).any(dim=1).all()
    colours = [set(map(tuple, image.mul(255).round().flatten(1).T.tolist())) for image in (cropped[0], whole[0])]
    assert colours[0] & colours[1]  # the same plain background


def test_grey_models_see_the_grey_of_the_colours():
    splits = load_image_splits(dataset_name="bundled:coloured").take(20)
    keys = [(0, index) for index in range(20)]
    grey, colour = (
        TrainingImages.from_splits(splits, views_only(channels)).__getitems__(keys)["pixel_values"]
        for channels in (1, 3)
    )
    weights = torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)
    assert (grey - (colour * weights).sum(1, keepdim=True)).abs().max() < 1.5 / 255


def test_diffusion_draws_new_views_and_latents_refuse():
    splits = load_image_splits(dataset_name="bundled:coloured").take(20)
    images = pixel_images(splits, image_size=28, channels=3, seed=0, horizontal_flip=False)
    batch = images.__getitems__([(0, 3), (1, 3)])
    assert batch["pixel_values"].shape == batch["noise"].shape == (2, 3, 28, 28)
    assert not torch.equal(batch["pixel_values"][0], batch["pixel_values"][1])
    with pytest.raises(UserError, match="'bundled:coloured' draws new views in every epoch"):
        latent_images(None, splits, 32, 0, None)


def test_fingerprints_name_originals_variant_and_version(monkeypatch):
    names = ["bundled:grey", "bundled:coloured", "bundled:textured"]
    splits = [load_image_splits(dataset_name=name).take(30) for name in names]
    prints = [one.fingerprint() for one in splits]
    prints += [TrainingImages.from_splits(one, views_only()).fingerprint() for one in splits]
    assert len(set(prints)) == 6
    coloured = TrainingImages.from_splits(splits[1], views_only())
    monkeypatch.setattr(procedural, "VERSION", 99)
    assert splits[1].fingerprint() != prints[1] and coloured.fingerprint() != prints[4]


def test_wrong_names_get_one_sentence():
    with pytest.raises(
        DataError, match="'bundled:blue' is not one of bundled:grey, bundled:coloured, bundled:textured"
    ):
        load_image_splits(dataset_name="bundled:blue")
    with pytest.raises(DataError, match="'bundled:coloured' is drawn in memory and cannot be streamed"):
        load_image_splits(dataset_name="bundled:coloured", streaming=True)
    with pytest.raises(ValueError, match="`variant` must be one of coloured, textured, got 'grey'"):
        ProceduralViews("grey", None)


def test_another_rendering_is_never_taken_from_the_cache(garments, monkeypatch):
    rows = garments[0].select(range(3))
    before = procedural.render_dataset(rows, "coloured", seed=1)
    monkeypatch.setattr(procedural, "MAX_SHIFT", 0.0)
    after = procedural.render_dataset(rows, "coloured", seed=1)
    assert before._fingerprint != after._fingerprint
    assert not np.array_equal(np.asarray(before[0]["image"]), np.asarray(after[0]["image"]))


MAE = ["--dataset_name", "bundled:coloured", "--max_train_samples", 72, "--batch_size", 16, "--max_train_steps", 12]
MAE += ["--eval_train_samples", 60, "--eval_test_samples", 40, "--checkpointing_steps", 5, "--crop_scale", 1, 1]
MAE += ["--horizontal_flip", "false", "--cpu_threads", 1]
for field in ("num_channels=3", "image_size=28", "hidden_size=32", "num_hidden_layers=2", "intermediate_size=64"):
    MAE += ["--set", field]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_runs_resume_to_the_last_bit_and_processes_agree(tmp_path):
    """Over the end of an epoch, after which views are drawn anew; another variant is another run."""

    def weights(folder):
        return load_file(tmp_path / folder / "model.safetensors")

    def losses(folder):
        lines = (tmp_path / folder / "metrics.jsonl").read_text().splitlines()
        return [record["loss"] for record in map(json.loads, lines) if "loss" in record]

    run_script("mae.py", *MAE, "--output_dir", tmp_path / "whole", "--log_every", 1)
    checkpoint = min((tmp_path / "whole" / "checkpoints").iterdir())
    resume = ["--output_dir", tmp_path / "resumed", "--resume_from_checkpoint", checkpoint]
    assert "resumed at step" in run_script("mae.py", *MAE, *resume).stdout
    whole, resumed = weights("whole"), weights("resumed")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    run_script("mae.py", *MAE, "--output_dir", tmp_path / "two", "--log_every", 1, processes=2)
    assert losses("two") == pytest.approx(losses("whole"), rel=1e-3)
    assert "dataset" in run_script("mae.py", *MAE, *resume, "--dataset_name", "bundled:textured", code=2).stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", ["uvit.py", "sit.py", "resnet.py", "finetune.py", "linear_probe.py"])
def test_other_scripts_train_on_views(script, tmp_path):
    flags = ["--dataset_name", "bundled:textured", "--max_train_samples", 40, "--output_dir", tmp_path / "out"]
    flags += ["--cpu_threads", 1, "--max_train_steps", 2, "--batch_size", 16]
    if script in ("uvit.py", "sit.py"):
        flags += [
            "--set",
            "hidden_size=32",
            "--set",
            "num_layers=2",
            "--set",
            "patch_size=7",
            "--set",
            "in_channels=3",
        ]
        flags += ["--sample_steps", 2, "--eval_samples", 0, "--sample_images", 4]
    else:
        flags += ["--max_eval_samples", 40]
    if script == "resnet.py":
        flags += ["--set", "num_channels=3"]
    if script in ("finetune.py", "linear_probe.py"):
        DecayedViTMAEForPreTraining(DecayedViTMAEConfig(**TINY_SIZES)).save_pretrained(tmp_path / "model")
        flags = [tmp_path / "model", *flags]
    if script == "linear_probe.py":
        flags += ["--augment", "true", "--features_dir", tmp_path / "features"]
    printed = run_script(script, *flags)
    results = tmp_path / "out" / "results.json"
    # A probe that stops at a step has no results yet.
    assert script == "linear_probe.py" or json.loads(results.read_text())["dataset"]["name"] == "bundled:textured"
    assert printed.returncode == 0


def test_invariance_is_how_often_another_view_of_the_image_is_nearest():
    """Features of the garment alone are invariant, features of the colours are not; grey data has no other views."""
    splits = load_image_splits("bundled:coloured").take(64, 48)
    assert len(splits.other_views) == 48 and splits.other_views["label"] == splits.held_out["label"]
    pairs = zip(splits.held_out, splits.other_views)
    assert all(np.asarray(row["image"]).tobytes() != np.asarray(other["image"]).tobytes() for row, other in pairs)
    metrics, labels = FeatureMetrics(["invariance"]), torch.zeros(48, dtype=torch.long)
    test, noise = torch.randn(48, 8), torch.randn(48, 8)
    same = metrics.compute(test, labels, test, labels, test + 0.01 * noise)
    other = metrics.compute(test, labels, test, labels, noise)
    assert same["invariance_accuracy"] == 1 and other["invariance_accuracy"] < 0.3
    model = DecayedViTMAEModel(DecayedViTMAEConfig(**{**TINY_SIZES, "image_size": 28, "patch_size": 7}))
    processor = default_image_processor(28)
    results = evaluate_encoder(model, processor, splits, metrics=metrics)
    assert 0 <= results["rows"]["pixels"]["invariance_accuracy"] < 0.5
    assert results["dataset"]["number"] == {"train": 64, "test": 48, "other_views": 48}
    with pytest.raises(DataError, match="Invariance needs data whose views are drawn"):
        evaluate_encoder(model, processor, load_image_splits("bundled").take(8, 8), metrics=metrics)
