"""The Space: what it computes, and its page in a browser."""

import math
import os
import re
import shutil
import struct
import subprocess
import sys
import time
import urllib.request
import zlib
from pathlib import Path

import compare
import datasets
import numpy as np
import pytest
import relighting_demo
import torch
from conftest import ROOT, TINY_SIZES, random_weights
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler
from PIL import Image, ImageDraw, ImageFile

from hf_decayed import (
    DecayedSiTPipeline,
    DecayedSiTTransformer2DModel,
    DecayedUViT2DModel,
    DecayedUViTPipeline,
    DecayedViTMAEConfig,
    DecayedViTMAEForPreTraining,
    LatentIntrinsicsModel,
    RelightingPipeline,
)


SPACE = ROOT / "model_cards" / "space"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders called as the published ones, small and random."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    small = {"image_size": 28, "patch_size": 4}
    kinds = {"coloured clothes": small, "clothes": {**small, "num_channels": 1}, "photographs": {"patch_size": 4}}
    assert kinds.keys() == compare.KINDS.keys()
    for kind, fields in kinds.items():
        for name, make in zip(compare.KINDS[kind], (DecayedViTMAEConfig.plain, DecayedViTMAEConfig)):
            model = DecayedViTMAEForPreTraining(make(**{**TINY_SIZES, **fields, "norm_pix_loss": True}))
            random_weights(model).save_pretrained(folder / name)
    sizes = {"sample_size": 28, "patch_size": 7, "in_channels": 1, "hidden_size": 32, "num_layers": 4}
    names = {0: "Coat", 1: "Bag"}
    network = DecayedSiTTransformer2DModel(**sizes, num_attention_heads=4, num_classes=2)
    pipeline = DecayedSiTPipeline(network, FlowMatchEulerDiscreteScheduler(), id2label=names)
    pipeline.save_pretrained(folder / "decayed-sit-fashion-mnist")
    network = DecayedUViT2DModel(**sizes, num_attention_heads=4, num_classes=2)
    pipeline = DecayedUViTPipeline(network, DPMSolverMultistepScheduler(), id2label=names)
    pipeline.save_pretrained(folder / "decayed-uvit-fashion-mnist")
    network = LatentIntrinsicsModel.from_size("tiny", block_out_channels=(8, 8, 16), layers_per_block=(1, 1, 1))
    RelightingPipeline(random_weights(network).eval()).save_pretrained(folder / "relighting-procedural")
    return folder


@pytest.fixture
def space(models, monkeypatch):
    monkeypatch.setenv("MODELS", str(models))
    for function in (compare.autoencoders, compare.generator, compare.load_gallery, compare.gallery_tokens):
        function.cache_clear()
    compare.gallery_palette.cache_clear()
    return compare


def shirt(background="white"):
    image = Image.new("RGB", (300, 400), background)
    ImageDraw.Draw(image).polygon([(60, 60), (240, 60), (220, 350), (80, 350)], fill=(170, 40, 60))
    return image


def test_models_come_from_folders_from_an_owner_or_from_beside(monkeypatch, tmp_path):
    monkeypatch.delenv("MODELS", raising=False)
    monkeypatch.delenv("SPACE_AUTHOR_NAME", raising=False)
    assert Path(compare.source_of("a")) == ROOT / "model_cards" / "a"
    monkeypatch.setenv("SPACE_AUTHOR_NAME", "somebody")
    assert compare.source_of("a") == "somebody/a"
    monkeypatch.setenv("MODELS", str(tmp_path))
    assert Path(compare.source_of("a")) == tmp_path / "a"


def test_pictures_become_like_those_of_the_data_set():
    for background in ("white", "black"):  # clothes stand on black, whatever they stood on
        pixels = np.asarray(compare.prepare("clothes", shirt(background)))
        assert pixels.shape == (28, 28) and pixels[:, 0].max() < 10 and pixels[14, 14] > 30
    cut_out = Image.new("RGBA", (50, 50), (255, 255, 255, 0))
    cut_out.paste((90, 90, 90, 255), (10, 10, 40, 40))
    for image in (cut_out, cut_out.quantize()):  # what is under the transparency is not looked at
        for kind in ("clothes", "photographs"):
            pixels = np.asarray(compare.prepare(kind, image))
            assert pixels[0].max() == 0 and 80 < pixels[14, 14].mean() < 100
    deep = Image.fromarray(np.linspace(0, 40000, 2500).reshape(50, 50).astype(np.uint16))
    pixels = np.asarray(compare.prepare("photographs", deep))
    assert pixels.min() < 10 and pixels.max() > 245 and 100 < pixels.mean() < 155
    photograph = compare.prepare("photographs", Image.new("RGBA", (200, 100), "orange"))
    assert photograph.size == (32, 32) and photograph.mode == "RGB"


def test_gallery_is_of_named_clothes():
    images, names = compare.gallery("clothes")
    assert len(images) == len(names) == 1000 and {image.size for image in images} == {(28, 28)}
    assert set(names) >= {"Bag", "Coat", "Sneaker"} and len(set(names)) == 10


def test_plain_and_decayed_look_at_the_same_picture(space):
    image = space.gallery("clothes")[0][7]
    plain, decayed = space.compare("clothes", image, mask_ratio=0.75, layer=12, seed=0)
    assert (plain["decay"], decayed["decay"]) == (1.0, 0.6)
    assert plain["seen"].tobytes() == decayed["seen"].tobytes()
    for result in (plain, decayed):
        assert {result[name].size for name in ("image", "seen", "reconstructed")} == {(224, 224)}
        for name in ("components", "segments"):
            assert result[name].size == (224, 224) and result[name].mode == "RGB"
        assert len(result["segments"].getcolors()) <= len(compare.SEGMENT_COLOURS)
        assert 0 < result["share"] <= 1 + 1e-6
        assert len(result["neighbours"]) == 8
        # An image of the gallery is its own nearest neighbour.
        assert result["neighbours"][0][0].tobytes() == space.as_picture(np.asarray(image) / 255).tobytes()
        # What is visible stays; what is hidden is grey for the encoder and something else for us.
        seen, completed, whole = (np.asarray(result[name]) for name in ("seen", "reconstructed", "image"))
        hidden = seen == 128
        assert 0.7 < hidden.mean() < 0.8
        assert np.abs(completed.astype(int) - whole)[~hidden].max() <= 1
        assert (completed != whole)[hidden].any()


@pytest.mark.slow
def test_layers_and_seeds_make_a_difference(space):
    image = shirt()
    first, other = (space.compare("clothes", image, 0.5, layer, seed)[1] for layer, seed in ((4, 0), (1, 1)))
    assert first["components"].tobytes() != other["components"].tobytes()
    assert first["seen"].tobytes() != other["seen"].tobytes()
    again = space.compare("clothes", image, 0.5, 4, 0)[1]
    assert all(first[name].tobytes() == again[name].tobytes() for name in ("seen", "reconstructed", "components"))


def test_photographs_go_without_neighbours_while_there_is_no_network(space, monkeypatch):
    def unreachable(*_, **__):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    results = space.compare("photographs", shirt(), 0.75, 4, 0)
    assert [result["neighbours"] for result in results] == [[], []]
    assert results[1]["reconstructed"].mode == "RGB"
    # Nothing of that is kept: the next one who asks may have more luck.
    features = datasets.Features({"img": datasets.Image(), "fine_label": datasets.ClassLabel(names=["apple", "boy"])})
    images = [Image.fromarray(np.random.randint(0, 255, (32, 32, 3), dtype=np.uint8)) for _ in range(20)]
    reachable = datasets.Dataset.from_dict({"img": images, "fine_label": [0, 1] * 10}, features=features)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: reachable)
    results = space.compare("photographs", images[3], 0.75, 4, 0)
    assert [result["neighbours"][0][1] for result in results] == ["boy", "boy"]


def test_kinds_without_models_are_not_offered(space, models, monkeypatch, tmp_path):
    assert all(space.is_available(kind) for kind in space.KINDS)
    (tmp_path / "decayed-mae-coloured").mkdir()  # without its twin
    monkeypatch.setenv("MODELS", str(tmp_path))
    assert not any(space.is_available(kind) for kind in space.KINDS)
    monkeypatch.setenv("MODELS", "somebody")
    monkeypatch.setattr(compare, "repo_exists", lambda name: "fashion" in name)
    assert [kind for kind in space.KINDS if space.is_available(kind)] == ["clothes"]


def test_every_class_can_be_tried(space):
    for kind in ("clothes", "coloured clothes"):
        pictures = space.examples(kind)
        assert len(pictures) == 12 and len({name for _, name in pictures}) == 10
        colours = [len(picture.convert("RGB").resize((28, 28), 0).getcolors(28 * 28)) for picture, _ in pictures]
        assert pictures[0][0].mode == ("L" if kind == "clothes" else "RGB") and min(colours) > 10
        results = space.compare(kind, pictures[0][0], 0.75, 12, 0)
        assert results[0]["neighbours"][0][1] == pictures[0][1]


@pytest.mark.parametrize("patch_size, image_size, shifts, unshifted", [(4, 28, 4, 1), (2, 8, 2, 0), (8, 32, 4, None)])
def test_dense_features_are_those_of_shifted_pictures(
    patch_size, image_size, shifts, unshifted, monkeypatch, tmp_path
):
    sizes = {**TINY_SIZES, "image_size": image_size, "patch_size": patch_size, "num_channels": 1}
    random_weights(DecayedViTMAEForPreTraining(DecayedViTMAEConfig(**sizes))).save_pretrained(tmp_path / "model")
    monkeypatch.setenv("MODELS", str(tmp_path))
    model, grid = compare.Autoencoder("model"), image_size // patch_size
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (image_size, image_size), dtype=np.uint8))
    dense = model.dense_features(image, 2)
    assert dense.shape == (shifts * grid, shifts * grid, sizes["hidden_size"])
    if unshifted is not None:
        patches = model.layers([image])[2][0, 1:].unflatten(0, (grid, grid))
        torch.testing.assert_close(dense[unshifted::shifts, unshifted::shifts], patches)


def test_clusters_are_found():
    torch.manual_seed(0)
    centres = 10 * torch.eye(6)
    rows = torch.cat([centre + 0.1 * torch.randn(20 + 10 * number, 6) for number, centre in enumerate(centres)])
    found = compare.cluster_centres(rows, 6)
    torch.testing.assert_close(found, centres.flip(0), atol=0.2, rtol=0)  # the largest first


def test_features_after_the_last_layer_are_those_that_are_evaluated(space):
    for model in space.autoencoders("clothes"):
        image = space.prepare("clothes", shirt())
        with torch.no_grad():
            expected = model.model.vit(model.pixels([image])).last_hidden_state
        assert torch.equal(model.layers([image])[-1], expected)


def test_the_space_pins_the_versions_that_were_tried():
    pinned = (ROOT / "constraints.txt").read_text().split()
    lines = [line for line in (SPACE / "requirements.txt").read_text().splitlines() if not line.startswith("#")]
    assert len(lines) == 5 and set(lines) <= set(pinned)
    sdk = re.search(r"sdk_version: (.+)", (SPACE / "README.md").read_text())[1]
    assert f"gradio=={sdk}" in pinned


@pytest.mark.parametrize("which", compare.GENERATORS)
def test_samples_are_of_a_class_and_repeat(which, space):
    assert space.class_names(which) == ["Coat", "Bag"]
    progress = []
    images = space.draw(which, "Bag", 3, 5, 2.0, 0, lambda step, steps: progress.append((step, steps)))
    assert len(images) == 3 and images[0].size == (224, 224) and progress == [(step, 5) for step in range(1, 6)]
    again = space.draw(which, "Bag", 3, 5, 2.0, 0)
    assert [image.tobytes() for image in images] == [image.tobytes() for image in again]


# What visitors may ask for.


def write_png(path, width, height):
    """A PNG with a valid header, whose pixels are not there: whoever decodes it fails."""
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(b"")),
        (b"IEND", b""),
    ]
    content = b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + content)
    return path


@pytest.mark.parametrize(
    "size, sentence",
    [
        ((13000, 13000), "has 13000 x 13000 pixels: at most 25,000,000 are allowed"),
        ((5001, 5000), "has 5001 x 5000 pixels: at most 25,000,000 are allowed"),
        ((2**31 - 1, 2**31 - 1), "too many pixels"),  # Pillow refuses these itself
        ((21, 1), "has 21 x 1 pixels: a side may be 20 times the other at most"),
        ((1, 20_000_000), "a side may be 20 times the other at most"),
    ],
)
def test_a_picture_is_refused_by_its_header(size, sentence, tmp_path, monkeypatch):
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda image: pytest.fail("the picture was decoded"))
    with pytest.raises(compare.VisitorError, match=sentence):
        compare.read_picture(write_png(tmp_path / "picture.png", *size))


@pytest.mark.parametrize("content", [b"", b"text", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", b"<svg/>"])
def test_what_is_no_picture_is_refused(content, tmp_path):
    (tmp_path / "picture.png").write_bytes(content)
    with pytest.raises(compare.VisitorError, match="not a picture that can be read: use one of BMP, GIF, JPEG, PNG"):
        compare.read_picture(tmp_path / "picture.png")


def test_a_damaged_picture_is_refused_and_a_whole_one_is_read(tmp_path):
    with pytest.raises(compare.VisitorError, match="damaged"):
        compare.read_picture(write_png(tmp_path / "cut.png", 100, 100))
    for suffix in ("png", "jpg", "webp", "gif", "bmp", "tif"):
        shirt().save(tmp_path / f"whole.{suffix}")
        assert compare.read_picture(tmp_path / f"whole.{suffix}").size == (300, 400)


@pytest.mark.parametrize("size", [(20, 1), (1, 20), (1, 1), (40, 2)])
@pytest.mark.parametrize("kind", compare.KINDS)
def test_the_longest_pictures_that_are_allowed_can_be_prepared(kind, size):
    image = Image.new("RGB", size)
    compare.check_size(image)
    assert max(compare.prepare(kind, image).size) in (28, 32)


COMPARISON = {"kind": "clothes", "mask_ratio": 0.75, "layer": 1, "seed": 0}
DRAWING = {"which": "SiT, clothes", "name": "Bag", "count": 1, "steps": 5, "guidance": 2.0, "seed": 0}


@pytest.mark.parametrize(
    "function, setting, value",
    [
        ("compare", "kind", "../clothes"),
        ("compare", "kind", ["clothes"]),
        *(("compare", "mask_ratio", value) for value in (0.2, 1.0, -1, math.nan, math.inf, "0.5", None, True, [0.5])),
        *(("compare", "layer", value) for value in (-1, 13, 1.5, math.nan, "1", None)),
        *(("compare", "seed", value) for value in (-1, 2**32, 0.5, 1e300, "x", {})),
        ("draw", "which", "somebody/else"),
        ("draw", "name", "Trousers"),
        ("draw", "name", 3),
        *(("draw", "count", value) for value in (0, -1, 17, 10**12, 1.5, math.nan, "3", None)),
        *(("draw", "steps", value) for value in (0, 4, 101, 10**9, 5.5, math.inf, "x" * 10**6)),
        *(("draw", "guidance", value) for value in (0, 5.1, 1e30, math.nan, None, "2")),
        *(("draw", "seed", value) for value in (-1, 2**32, 2**64, math.nan)),
    ],
    ids=lambda value: str(value)[:20],
)
def test_settings_are_checked_again(function, setting, value, space):
    """Whatever the sliders allow: a request need not come from the page."""
    settings = {**(COMPARISON if function == "compare" else DRAWING), setting: value}
    settings |= {"image": shirt()} if function == "compare" else {}
    shown_name = {"which": "generator", "name": "class"}.get(setting, setting)
    with pytest.raises(compare.VisitorError, match=f"`{shown_name}` must be ") as raised:
        getattr(space, function)(**settings)
    assert len(str(raised.value)) < 200 and "\n" not in str(raised.value)


def test_a_picture_too_large_is_refused_when_it_comes_decoded(space):
    with pytest.raises(compare.VisitorError, match="25,000,000 are allowed"):
        space.compare(**COMPARISON, image=Image.new("1", (5001, 5000)))


def test_ends_of_the_ranges_are_allowed():
    for name, ends in compare.RANGES.items():
        assert [compare.check_settings(**{name: end})[name] for end in ends] == list(ends)


@pytest.mark.parametrize("which", compare.GENERATORS)
def test_drawing_ends_when_its_time_is_over(which, space, monkeypatch):
    steps = []
    monkeypatch.setattr(compare, "TIME_LIMIT", 0)
    with pytest.raises(compare.VisitorError, match="took longer than 0 seconds: ask for fewer"):
        space.draw(**{**DRAWING, "which": which, "steps": 100}, on_step=lambda step, _: steps.append(step))
    assert steps == []
    with pytest.raises(compare.VisitorError, match="took longer than 0 seconds"):
        space.compare(**COMPARISON, image=shirt())


def test_scenes_are_relit(space):
    relighting_demo.relighter.cache_clear()
    scenes = relighting_demo.load_scenes()
    assert len(scenes) == 24 and all(scene.size == (64, 64) for scene in scenes)
    result = relighting_demo.relight(scenes[0], scenes[7].resize((300, 200)))
    assert len(result["frames"]) == relighting_demo.NUM_FRAMES and result["relit"].size == result["albedo"].size == (
        192,
        192,
    )
    assert result["frames"][0].tobytes() != result["relit"].tobytes() == result["frames"][-1].tobytes()
    with pytest.raises(compare.VisitorError, match="a side may be 20 times the other at most"):
        relighting_demo.relight(scenes[0], Image.new("RGB", (2100, 100)))
    deep = Image.fromarray(np.arange(4096, dtype=np.uint16).reshape(64, 64) * 16)
    assert relighting_demo.prepare(deep).mode == "RGB" and relighting_demo.prepare(
        Image.new("RGBA", (9, 5))
    ).getextrema()[0] == (0, 0)


@pytest.fixture
def app(models, monkeypatch):
    """The page, with gradio; skipped where it is not installed."""
    gradio = pytest.importorskip("gradio")
    monkeypatch.setenv("MODELS", str(models))
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "0")
    import app

    app.Error = gradio.Error
    return app


def test_the_page_has_limits(app):
    assert app.QUEUE == {"max_size": 20, "default_concurrency_limit": 1, "api_open": False}
    assert {"max_file_size", "max_threads"} <= app.LAUNCH.keys()
    app.page.queue(**app.QUEUE)
    events = [event for event in app.page.fns.values() if event.fn.__module__ == "app"]
    assert len(events) == 7
    for event in events:  # all events that compute share one place
        assert (event.concurrency_limit, event.concurrency_id) == (1, "models")


def test_the_page_reads_uploads_by_our_rules(app, tmp_path):
    from gradio.data_classes import ImageData

    assert app.image.preprocess is app.open_upload and app.open_upload(None) is None
    shirt().save(tmp_path / "shirt.png")
    assert app.open_upload(ImageData(path=str(tmp_path / "shirt.png"))).size == (300, 400)
    with pytest.raises(app.Error, match="at most 25,000,000 are allowed"):
        app.open_upload(ImageData(path=str(write_png(tmp_path / "large.png", 13000, 13000))))
    with pytest.raises(app.Error, match="Upload the picture as a file"):
        app.open_upload(ImageData(url="data:image/png;base64,AAAA"))
    with pytest.raises(app.Error, match="`steps` must be a whole number from 5 to 100"):
        app.draw_class("SiT, clothes", "Bag", 1, 10**6, 2.0, 0)


@pytest.mark.slow
def test_page_in_a_browser(models, tmp_path):
    """`pip install gradio playwright`, and Chromium of the system."""
    pytest.importorskip("gradio")
    playwright = pytest.importorskip("playwright.sync_api")
    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    if browser_path is None:
        pytest.skip("there is no Chromium")
    address = "http://127.0.0.1:7932"
    environment = {**os.environ, "MODELS": str(models), "GRADIO_SERVER_PORT": "7932", "GRADIO_ANALYTICS_ENABLED": "0"}
    server = subprocess.Popen([sys.executable, "app.py"], cwd=SPACE, env=environment, stderr=subprocess.PIPE)
    try:
        wait_for(address, server)
        with playwright.sync_playwright() as driver:
            options = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
            browser = driver.chromium.launch(executable_path=browser_path, args=options)
            page = browser.new_page(viewport={"width": 1400, "height": 1100})
            page.set_default_timeout(120_000)
            problems = []
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.goto(address)

            # What a visitor sees first: an answer, without empty boxes.
            shown = page.locator(".grid-container img")
            shown.nth(12 + 2 * (2 + 8 + 2) - 1).wait_for()
            for caption in ("features", "segments", "seen", "completed"):
                assert page.get_by_text(caption, exact=True).count() == 2, caption
            page.screenshot(path=tmp_path / "start.png", full_page=True)

            features = shown.nth(12)
            before = features.get_attribute("src")
            shown.nth(3).click()
            changed = "before => document.querySelectorAll('.grid-container img')[12].src != before"
            page.wait_for_function(changed, arg=before)
            before = features.get_attribute("src")
            picture = tmp_path / "shirt.png"
            shirt().save(picture)
            page.get_by_label("Remove Image").first.click()
            page.locator("input[type=file]").first.set_input_files(picture)
            page.wait_for_function(changed, arg=before)
            loaded = "[...document.querySelectorAll('.grid-container img')].every(image => image.naturalWidth > 0)"
            page.wait_for_function(loaded)  # an address changes before its image is there
            widths = shown.evaluate_all("images => images.map(image => image.naturalWidth)")
            assert min(widths) >= 112, widths

            page.get_by_label("photographs").first.check()
            page.get_by_text("There are no neighbours to show").nth(1).wait_for()
            assert page.get_by_text("There are no neighbours to show").count() == 2

            page.get_by_role("tab", name="Samples").click()
            samples = page.locator(".grid-container img:visible")
            samples.nth(7).wait_for()  # nobody clicked
            assert samples.count() == 8
            page.get_by_role("tab", name="Relighting").click()
            samples.nth(4 + 7 - 1).wait_for()
            page.screenshot(path=tmp_path / "relighting.png")
            assert not problems, problems
            browser.close()
    finally:
        server.terminate()
        server.communicate(timeout=30)


def wait_for(address, server):
    for _ in range(240):
        if server.poll() is not None:
            raise AssertionError(server.stderr.read().decode()[-3000:])
        try:
            return urllib.request.urlopen(address, timeout=2)
        except OSError:
            time.sleep(0.5)
    raise AssertionError("the page did not come up in two minutes")
