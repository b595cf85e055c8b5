"""`hf-decayed segment` and `Segmenter`: regions of pictures by frozen models."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoModel,
    ResNetConfig,
    ResNetModel,
    ViTConfig,
    ViTImageProcessor,
    ViTModel,
)

from hf_decayed import LayerSpectralClustering, Segmenter, record_attention
from hf_decayed.cli import main
from hf_decayed.errors import UserError
from hf_decayed.spectral.segmenter import PALETTE, Segmentation, sort_by_area


MODEL = Path(__file__).parents[1] / "model_cards" / "decayed-mae-fashion-mnist"


def write_picture(path, seed=0, size=(30, 20)):
    pixels = np.random.default_rng(seed).integers(0, 255, (*size, 3), dtype=np.uint8)
    pixels[: size[0] // 2] = (200, 30, 30)  # half of it is plain
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny-vit"
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=32, patch_size=8, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    ViTModel(config).save_pretrained(folder)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


def run(*arguments):
    return main(["segment", *map(str, arguments)])


def test_pictures_of_a_folder_by_two_models(tmp_path, vit, capsys):
    write_picture(tmp_path / "photos" / "one.png")
    write_picture(tmp_path / "photos" / "trip" / "two.jpg", 1)
    output = tmp_path / "regions"
    assert run(tmp_path / "photos", "--model", vit, MODEL, "--n_clusters", 3, "--output", output) == 0
    assert "2 images by 2 models" in capsys.readouterr().out
    for name in ("tiny-vit", MODEL.name):
        for stem in ("one", "trip/two"):
            sizes = {Image.open(output / name / f"{stem}_{kind}.png").size for kind in ("overlay", "rgb", "mask")}
            assert len(sizes) == 1
        assert set(np.unique(Image.open(output / name / "one_mask.png"))) <= {0, 1, 2}
    assert Image.open(output / "grid.png").size == (2 * 132, 4 * 144)
    assert not [path for path in output.rglob("*") if path.name.startswith(".writing")]


def test_a_repeated_command_makes_only_what_is_missing(tmp_path, vit):
    for number in range(3):
        write_picture(tmp_path / "photos" / f"{number}.png", number)
    command = [tmp_path / "photos", "--model", vit, "--output", tmp_path / "regions"]
    assert run(*command) == 0
    pictures = {path: path.stat().st_mtime_ns for path in (tmp_path / "regions" / "tiny-vit").glob("*.png")}
    missing = tmp_path / "regions" / "tiny-vit" / "1_rgb.png"
    content = missing.read_bytes()
    missing.unlink()
    assert run(*command) == 0
    assert missing.read_bytes() == content
    for path, time in pictures.items():
        assert path.name.startswith("1_") or path.stat().st_mtime_ns == time


def test_changed_images_are_segmented_again_and_pictures_are_no_images(tmp_path, vit, capsys):
    photo = write_picture(tmp_path / "photos" / "a.png")
    command = [tmp_path / "photos", "--model", vit, "--output", tmp_path / "photos"]  # beside the images
    assert run(*command) == 0
    mask = tmp_path / "photos" / "tiny-vit" / "a_mask.png"
    before = mask.read_bytes()
    Image.open(photo).rotate(90).save(photo)
    capsys.readouterr()
    assert run(*command) == 0
    assert "1 image by 1 model" in capsys.readouterr().out
    assert mask.read_bytes() != before
    assert run(*command[:2], MODEL, *command[3:]) == 0
    assert "1 image by 1 model" in capsys.readouterr().out


def test_other_settings_do_not_mix_with_the_pictures_that_are_there(tmp_path, vit, capsys):
    write_picture(tmp_path / "a.png")
    command = [tmp_path / "a.png", "--model", vit, "--output", tmp_path / "regions"]
    assert run(*command) == 0
    assert run(*command, "--graph", "qk", "--seed", 3) == 2
    assert "pictures made with another graph, seed: choose another --output" in capsys.readouterr().err


def test_pictures_that_differ_only_in_their_ending_are_kept_apart(tmp_path, vit):
    write_picture(tmp_path / "photos" / "a.png")
    write_picture(tmp_path / "photos" / "a.jpg", 1)
    assert run(tmp_path / "photos", "--model", vit, "--output", tmp_path / "regions") == 0
    assert (tmp_path / "regions/tiny-vit/a.png_mask.png").exists()
    assert (tmp_path / "regions/tiny-vit/a.jpg_mask.png").exists()


def save_resnet(folder):
    ResNetModel(ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic")).save_pretrained(
        folder
    )
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["{photos}", "--model", "{vit}", "--n_clusters", "99"], "99 clusters are more than the 16 patches"),
        (["{nothing}", "--model", "{vit}"], "There is nothing at"),
        (["{empty}", "--model", "{vit}"], "There are no images in"),
        (["{broken}", "--model", "{vit}"], "broken.png"),
        (["{photos}", "--model", "{resnet}"], "attention"),
        (["{photos}", "--model", "{empty}"], "config.json"),
        (["{photos}", "--model", "{vit}", "--layers", "7"], "7"),
        (["{photos}", "--model", "{vit}", "--n_components", "99"], "99"),
    ],
)
def test_bad_input_gets_one_sentence(arguments, sentence, tmp_path, vit, capsys):
    write_picture(tmp_path / "photos" / "a.png")
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.png").write_bytes(b"\x89PNG no more")
    names = {name: tmp_path / name for name in ("photos", "empty", "nothing")}
    names |= {"vit": vit, "broken": tmp_path / "broken.png", "resnet": tmp_path / "resnet"}
    if "{resnet}" in arguments:
        save_resnet(tmp_path / "resnet")
    words = [argument.format(**names) for argument in arguments]
    assert run(*words, "--output", tmp_path / "regions") == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("hf-decayed segment: ") and sentence in error
    assert "Error:" not in error  # a sentence, not the name of an exception


@pytest.mark.parametrize("graph", ["vv", "qk", "features"])
def test_a_segmentation_is_that_of_the_recorded_layers(graph, tmp_path):
    image = Image.open(write_picture(tmp_path / "a.png"))
    segmenter = Segmenter.from_pretrained(str(MODEL), graph=graph, n_clusters=4)
    segmentation = segmenter(image)
    model = AutoModel.from_pretrained(MODEL)
    processor = AutoImageProcessor.from_pretrained(MODEL)
    grey = np.asarray(image.convert("L"))[:, :, None]
    pixels = processor([grey], return_tensors="pt", input_data_format="channels_last")["pixel_values"]
    with torch.no_grad(), record_attention(model, what=("query", "key", "value")) as record:
        states = model(pixels).last_hidden_state
    clustering = LayerSpectralClustering(graph=graph, n_clusters=4)
    layers = [states[0, 1:]] if graph == "features" else record.layers
    expected = clustering.fit_predict(layers, grid=record.layers[0].grid)
    np.testing.assert_array_equal(segmentation.labels, sort_by_area(expected.numpy()))
    assert segmentation.rgb.size == segmentation.mask.size == segmentation.overlay.size == segmentation.image.size


def test_masks_hold_many_regions(tmp_path):
    """Pillow drops the upper bits of values where the palette is short."""
    labels = np.arange(256).reshape(16, 16)
    segmentation = Segmentation(Image.new("RGB", (16, 16)), labels, torch.zeros(256, 4), {})
    segmentation.mask.save(tmp_path / "mask.png")
    assert np.array_equal(np.asarray(Image.open(tmp_path / "mask.png")), labels)
    assert len(set(PALETTE)) == 256
    with pytest.raises(UserError, match="`n_clusters` must be at most 256, got 257"):
        Segmenter(torch.nn.Identity(), None, n_clusters=257)


def test_regions_are_numbered_by_area():
    labels = np.array([[2, 2, 2], [0, 0, 1]])
    np.testing.assert_array_equal(sort_by_area(labels), [[0, 0, 0], [1, 1, 2]])


def test_graphs_are_measured_on_images_with_masks(tmp_path, capsys):
    """Two halves of different colours: regions follow the border, whatever the classes are called."""
    generator = np.random.default_rng(0)
    for number in range(10):
        split = "train" if number < 2 else "val"
        column, mask = generator.integers(8, 24), np.zeros((32, 32), dtype=np.uint8)
        mask[:, column:] = 1
        pixels = generator.integers(0, 40, (32, 32, 3), dtype=np.uint8)
        pixels[mask == 1] += 200
        for folder, picture in (("images", pixels), ("masks", mask)):
            (tmp_path / "data" / folder / split).mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture).save(tmp_path / "data" / folder / split / f"{number}.png")
    measure = [tmp_path / "data", "--model", MODEL, "--output", tmp_path / "out"]
    assert run(*measure, "--evaluate", 100) == 0
    record = json.loads((tmp_path / "out" / "graphs.json").read_text())
    rows = record["rows"]
    assert record["dataset"]["number"] == 8  # there are no more
    assert list(rows) == [f"{MODEL.name}, {graph}" for graph in ("qk", "vv", "features")]
    for row in rows.values():
        assert row["oracle_miou"] > 0.6 and 0 < row["cluster_miou"] <= 1
    assert "oracle_miou" in capsys.readouterr().out
    assert run(*measure, "--evaluate", 8, "--seed", 5) == 0
    assert json.loads((tmp_path / "out" / "graphs.json").read_text())["rows"] != rows
    capsys.readouterr()
    assert run(*measure, "--evaluate", 8, "--graph", "qk", "--n_clusters", 3) == 2
    assert "--evaluate measures all graphs in the same way: leave out --graph, --n_clusters" in capsys.readouterr().err


def test_graphs_need_masks(tmp_path, capsys):
    for number in range(12):
        write_picture(tmp_path / "photos" / "class" / f"{number}.png", number)
    assert run(tmp_path / "photos", "--model", MODEL, "--evaluate", 2, "--output", tmp_path / "out") == 2
    assert "has no masks, which --evaluate compares regions with" in capsys.readouterr().err
