"""The pipeline for unsupervised segmentation: the regions of `spectral`, for any vision encoder, with and without the package."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, random_weights
from loopback_hub import serve
from PIL import Image
from sklearn.metrics import silhouette_samples
from transformers import (
    AutoModel,
    BertConfig,
    BertModel,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    DINOv3ViTConfig,
    DINOv3ViTModel,
    ResNetConfig,
    ResNetModel,
    SwinConfig,
    SwinModel,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
    ViTMAEConfig,
    ViTMAEModel,
    ViTModel,
    pipeline,
)
from transformers.pipelines import PIPELINE_REGISTRY

from hf_decayed import (
    DecayedViTMAEConfig,
    DecayedViTMAEForPreTraining,
    DecayedViTMAEModel,
    Segmenter,
    UnsupervisedSegmentationPipeline,
    record_attention,
)
from hf_decayed.hub.staging import PublishingError, add_pipelines, code_modules
from hf_decayed.spectral.clustering import LayerSpectralClustering
from hf_decayed.spectral.segmenter import sort_by_area


TASK = "unsupervised-segmentation"
FILE = "pipeline_unsupervised_segmentation.py"
GRAPHS = ("vv", "qk", "features")
SHIPPED = ROOT / "model_cards" / "decayed-mae-fashion-mnist"
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 4,
}
TEXT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 50}
MODELS = {
    "vit": lambda: ViTModel(ViTConfig(**SIZES)),
    "classifier": lambda: ViTForImageClassification(ViTConfig(**SIZES)),
    "registers": lambda: Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**SIZES)),
    "rotary positions": lambda: DINOv3ViTModel(DINOv3ViTConfig(**SIZES)),
    "clip": lambda: CLIPModel(CLIPConfig(text_config=TEXT, vision_config=SIZES)),
    "vit_mae": lambda: ViTMAEModel(ViTMAEConfig(**SIZES)),
    "ours": lambda: DecayedViTMAEModel(DecayedViTMAEConfig(**SIZES)),
    "pretraining": lambda: DecayedViTMAEForPreTraining(DecayedViTMAEConfig(**SIZES)),
}


def draw_image(seed: int = 0, width: int = 48, height: int = 40) -> Image.Image:
    """Coloured squares with a little noise."""
    generator = np.random.default_rng(seed)
    squares = np.kron(generator.integers(0, 255, (3, 3, 3)), np.ones((16, 16, 1)))
    pixels = (squares + generator.normal(0, 6, squares.shape)).clip(0, 255).astype(np.uint8)
    return Image.fromarray(pixels).resize((width, height))


def build(model, processor=None, **arguments) -> UnsupervisedSegmentationPipeline:
    torch.manual_seed(0)
    model = MODELS[model]() if isinstance(model, str) else model
    processor = processor or ViTImageProcessor(size={"height": 32, "width": 32})
    return pipeline(TASK, model=random_weights(model), image_processor=processor, **arguments)


def label_map(regions) -> np.ndarray:
    """Number of the region of every pixel, from the masks, which must be a partition of the image."""
    masks = np.stack([np.asarray(region["mask"]) for region in regions])
    assert set(np.unique(masks)) <= {0, 255} and (masks.astype(int).sum(axis=0) == 255).all()
    return masks.argmax(axis=0)


def recorded_clustering(segmenter, image, graph) -> LayerSpectralClustering:
    """The package's own way: queries and keys of the attention function instead of hooks and attention weights."""
    encoder, pixel_values = segmenter.encoder, segmenter.preprocess(image)["pixel_values"]
    is_vit_mae = encoder.config.model_type == "vit_mae"
    mask_ratio = getattr(encoder.config, "mask_ratio", None)
    arguments = {"noise": torch.arange(64.0).unsqueeze(0)} if is_vit_mae else {}
    if is_vit_mae:
        encoder.config.mask_ratio = 0.0
    with torch.no_grad(), record_attention(encoder, what=("query", "key", "value", "hidden_states")) as record:
        encoder(pixel_values, **arguments)
    if is_vit_mae:
        encoder.config.mask_ratio = mask_ratio
    layers = [record.layers[-1].hidden_states[0]] if graph == "features" else record.layers
    return LayerSpectralClustering(graph=graph).fit(layers)


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("name", MODELS)
def test_regions_are_those_of_layer_spectral_clustering(name, graph):
    segmenter = build(name, graph=graph)
    result = segmenter(draw_image(width=32, height=32), return_embedding=True)
    expected = recorded_clustering(segmenter, draw_image(width=32, height=32), graph)
    torch.testing.assert_close(result["embedding"].flatten(0, 1), expected.embedding_, rtol=1e-4, atol=1e-4)
    labels = label_map(result["regions"])[2::4, 2::4]  # the middle of every patch
    assert (labels == sort_by_area(expected.labels_.numpy())).all()


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_shipped_encoder_gives_the_regions_of_the_segmenter(graph):
    model, image = AutoModel.from_pretrained(SHIPPED), draw_image(3, 28, 28)
    expected = Segmenter.from_pretrained(str(SHIPPED), graph=graph)(image)
    processor = Segmenter.from_pretrained(str(SHIPPED)).processor
    segmenter = pipeline(TASK, model=model, image_processor=processor, graph=graph)
    result = segmenter(image, return_rgb=True)
    assert (label_map(result["regions"])[2::4, 2::4] == expected.labels).all()
    difference = np.asarray(result["rgb"], dtype=int) - np.asarray(expected.rgb, dtype=int)
    assert np.abs(difference).max() <= 1


def test_batches_give_what_single_images_give():
    images = [draw_image(seed, width, height) for seed, (width, height) in enumerate([(48, 40), (20, 60), (32, 32)])]
    for graph in GRAPHS:
        segmenter = build("ours", graph=graph)
        together = segmenter(images, batch_size=2)
        assert len(together) == 3
        for image, regions in zip(images, together):
            alone = segmenter(image)
            assert regions[0]["mask"].size == image.size
            assert (label_map(regions) == label_map(alone)).all()
            scores = [region["score"] for region in regions]
            assert scores == pytest.approx([region["score"] for region in alone], abs=1e-4)


def test_what_is_returned():
    image = draw_image(1, 60, 44)
    segmenter = build("vit")
    regions = segmenter(image, n_clusters=4)
    assert [region["label"] for region in regions] == [f"region {number}" for number in range(4)]
    result = segmenter(image, n_clusters=4, n_components=6, return_rgb=True, return_embedding=True)
    assert set(result) == {"regions", "rgb", "embedding"}
    assert result["rgb"].size == image.size and result["rgb"].mode == "RGB" and result["embedding"].shape == (8, 8, 6)
    assert set(segmenter(image, n_clusters=2, return_rgb=True)) == {"regions", "rgb"}
    areas = [np.asarray(region["mask"]).mean() for region in regions]
    assert label_map(regions).shape == (44, 60) and areas[0] == max(areas)
    # Few components are drawn by their principal ones.
    assert segmenter(image, n_components=2, return_rgb=True)["rgb"].size == image.size


def test_scores_are_mean_silhouettes():
    result = build("vit")(draw_image(2, 32, 32), n_clusters=3, return_embedding=True)
    labels = label_map(result["regions"])[2::4, 2::4].flatten()
    silhouettes = silhouette_samples(result["embedding"].flatten(0, 1).numpy(), labels)
    expected = [silhouettes[labels == number].mean() for number in range(3)]
    assert [region["score"] for region in result["regions"]] == pytest.approx(expected, abs=1e-6)
    assert build("vit")(draw_image(2), n_clusters=64)[0]["score"] == 0.0  # as many regions as patches: no silhouettes


def test_paths_grey_images_and_half_precision(tmp_path):
    grey = draw_image(4).convert("L")
    grey.save(tmp_path / "grey.png")
    segmenter = build(DecayedViTMAEModel(DecayedViTMAEConfig(**SIZES, num_channels=1)), grey_processor())
    from_file, again = segmenter([str(tmp_path / "grey.png"), str(tmp_path / "grey.png")])
    assert (label_map(from_file) == label_map(segmenter(grey))).all() and len(again) == len(from_file)
    half = build(MODELS["ours"]().to(torch.bfloat16))
    assert half.preprocess(draw_image())["pixel_values"].dtype == torch.bfloat16
    assert all(len(half(draw_image(), graph=graph)) >= 2 for graph in GRAPHS)


def grey_processor() -> ViTImageProcessor:
    return ViTImageProcessor(size={"height": 32, "width": 32}, image_mean=[0.5], image_std=[0.5])


def test_masks_cover_what_a_processor_would_crop():
    """The left quarter of a wide image is outside of CLIP's crop; it must reach the model all the same."""
    processor = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    segmenter = build("clip", processor)
    image = Image.new("RGB", (128, 32), "black")
    image.paste("white", (0, 0, 32, 32))
    pixels = segmenter.preprocess(image)["pixel_values"]
    assert pixels.shape == (1, 3, 32, 32)
    assert pixels[..., :6].min() > pixels[..., 10:].max() and segmenter(image)[0]["mask"].size == (128, 32)


@pytest.mark.parametrize("name", ["vit", "vit_mae", "ours", "clip"])
def test_nothing_is_left_behind(name):
    segmenter = build(name)
    before = json.dumps(segmenter.model.config.to_dict(), default=str, sort_keys=True)
    implementation = segmenter.encoder.config._attn_implementation
    for graph in GRAPHS:
        segmenter(draw_image(), graph=graph)
    with pytest.raises(ValueError, match="size|patches"):  # the hooks of a call that fails go too
        segmenter._forward({"pixel_values": torch.zeros(1, 3, 64, 64), "image_size": torch.ones(1, 2)}, graph="qk")
    assert json.dumps(segmenter.model.config.to_dict(), default=str, sort_keys=True) == before
    assert segmenter.encoder.config._attn_implementation == implementation != "eager"
    assert not any(module._forward_hooks for module in segmenter.model.modules())


def test_the_task_is_registered_and_a_saved_encoder_loads(tmp_path):
    assert PIPELINE_REGISTRY.check_task(TASK)[1]["impl"] is UnsupervisedSegmentationPipeline
    segmenter = build("vit", seed=3)
    segmenter.model.save_pretrained(tmp_path)
    segmenter.image_processor.save_pretrained(tmp_path)
    loaded = pipeline(TASK, model=str(tmp_path), seed=3)
    assert type(loaded) is UnsupervisedSegmentationPipeline
    assert (label_map(loaded(draw_image())) == label_map(segmenter(draw_image()))).all()


def resnet():
    return ResNetModel(ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]))


def swin():
    return SwinModel(
        SwinConfig(image_size=32, patch_size=4, window_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 4])
    )


def bert():
    return BertModel(
        BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=20)
    )


@pytest.mark.parametrize(
    "model, sentence",
    [
        (resnet, "ResNetModel cannot be segmented by its attention: it has no layers of attention over one grid"),
        (swin, "SwinModel cannot be segmented by its attention"),
        (bert, "BertModel takes no images"),
    ],
)
def test_models_without_attention_over_a_grid_are_refused(model, sentence):
    with pytest.raises(ValueError, match=sentence):
        build(model())


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ({"graph": "kq"}, "`graph` must be one of qk, vv, features, got 'kq'"),
        ({"n_clusters": 65}, "65 clusters are more than the 64 patches"),
        ({"n_clusters": 1}, "`n_clusters` must be at least 2"),
        ({"n_components": 65}, "`n_components` must be between 1 and the 64 patches, got 65"),
        ({"n_components": 0}, "`n_components` must be between 1 and the 64 patches, got 0"),
    ],
)
def test_wrong_arguments(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        build("vit")(draw_image(), **arguments)
    with pytest.raises(TypeError, match="unexpected keyword argument 'n_cluster'"):
        build("vit", n_cluster=3)


def test_one_patch_and_values_that_are_not_finite():
    with pytest.raises(ValueError, match="has 1 patch of 32 x 32; regions need at least two"):
        build(ViTModel(ViTConfig(**{**SIZES, "patch_size": 32})))(draw_image())
    segmenter = build("vit")
    segmenter.model.layers[1].attention.v_proj.weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match="NaN or infinite"):
        segmenter(draw_image())


def test_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match="Unsupervised segmentation needs scikit-learn: pip install scikit-learn"):
        build("vit")


# Published folders.


@pytest.fixture
def published(tmp_path) -> Path:
    """A shipped checkpoint, as `hf-decayed publish` stages it."""
    folder = tmp_path / "decayed-mae"
    shutil.copytree(SHIPPED, folder)
    add_pipelines(folder)
    return folder


def read_config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def test_the_code_and_its_entry_are_added(published):
    assert (published / FILE).read_text() == (ROOT / "hf_decayed" / "pipelines" / FILE).read_text()
    config = read_config(published)
    entry = config["custom_pipelines"][TASK]
    assert entry == {"impl": f"{Path(FILE).stem}.UnsupervisedSegmentationPipeline", "pt": ["AutoModel"]}
    assert Path(FILE).stem in code_modules(published)
    before = (published / "config.json").read_text()
    add_pipelines(published)
    assert (published / "config.json").read_text() == before
    shipped = read_config(SHIPPED)
    assert {**shipped, "custom_pipelines": {TASK: entry}} == config  # nothing else has changed


def test_folders_of_other_kinds_stay_as_they_are(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["DecayedResNetModel"]}')
    add_pipelines(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert read_config(tmp_path) == {"architectures": ["DecayedResNetModel"]}


@pytest.mark.parametrize(
    "entries, sentence",
    [
        ({TASK: {"impl": "somebody/else--code.Pipeline"}}, "takes code from another repository, somebody/else--code"),
        ({TASK: {"impl": "../code.Pipeline"}}, "`custom_pipelines` in 'config.json' must name a module and a class"),
        ({TASK: {"pt": []}}, "`custom_pipelines` in 'config.json' must name code by task"),
        ([1], "`custom_pipelines` in 'config.json' must name code by task"),
    ],
)
def test_pipelines_of_strangers_are_refused(published, entries, sentence):
    (published / "config.json").write_text(json.dumps({**read_config(published), "custom_pipelines": entries}))
    with pytest.raises(PublishingError, match=sentence):
        code_modules(published)


def test_an_entry_is_saved_only_with_its_code(published, tmp_path):
    segmenter = pipeline(TASK, model=str(published), trust_remote_code=True)
    segmenter.model.save_pretrained(tmp_path / "again")
    assert "custom_pipelines" not in read_config(tmp_path / "again") and not (tmp_path / "again" / FILE).exists()
    segmenter = build("ours")
    segmenter.save_pretrained(tmp_path / "with code")
    assert TASK in read_config(tmp_path / "with code")["custom_pipelines"]
    assert (tmp_path / "with code" / FILE).exists()


CLEAN_PROCESS = """
import json, sys
sys.modules["hf_decayed"] = None  # those who download the folder have no such package
from transformers import pipeline
segmenter = pipeline("unsupervised-segmentation", model=sys.argv[1], trust_remote_code=True)
results = {}
for graph in ("vv", "qk", "features"):
    regions = segmenter(sys.argv[2], graph=graph)
    results[graph] = [[region["score"], sum(region["mask"].tobytes()) // 255] for region in regions]
print(json.dumps(results))
"""


def run_clean(source, image: Path, cache: Path, **environment) -> dict:
    """Score and area of every region, from a process that cannot import the package."""
    image.parent.mkdir(parents=True, exist_ok=True)
    draw_image().save(image)
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CLEAN_PROCESS, str(source), str(image)],
        env={**os.environ, "PYTHONPATH": "", "HF_HOME": str(cache), **environment},
        capture_output=True,
        text=True,
        cwd="/",
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def expected_regions(segmenter) -> dict:
    results = {}
    for graph in GRAPHS:
        regions = segmenter(draw_image(), graph=graph)
        results[graph] = [[region["score"], sum(region["mask"].tobytes()) // 255] for region in regions]
    return results


@pytest.mark.slow
def test_a_published_encoder_without_the_package_from_disk_and_over_http(published, tmp_path):
    model, processor = AutoModel.from_pretrained(published), Segmenter.from_pretrained(str(published)).processor
    expected = expected_regions(UnsupervisedSegmentationPipeline(model=model, image_processor=processor))
    image = tmp_path / "images" / "picture.png"
    assert run_clean(published, image, tmp_path / "first") == expected
    (tmp_path / "hub" / "user").mkdir(parents=True)
    shutil.copytree(published, tmp_path / "hub" / "user" / "decayed-mae")
    with serve(tmp_path / "hub") as server:
        environment = {"HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": "0"}
        assert run_clean("user/decayed-mae", image, tmp_path / "second", **environment) == expected


@pytest.mark.slow
def test_an_encoder_of_transformers_that_was_saved_with_the_pipeline(tmp_path):
    segmenter = build("vit")
    segmenter.save_pretrained(tmp_path / "vit")
    result = run_clean(tmp_path / "vit", tmp_path / "images" / "picture.png", tmp_path / "cache")
    assert result == expected_regions(segmenter)
