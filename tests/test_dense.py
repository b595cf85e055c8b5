"""Dense features of encoders and diffusion models: what `hf-decayed evaluate --metrics segmentation,where` measures."""

import json
from pathlib import Path

import pytest
import torch
from conftest import run_script
from transformers import AutoImageProcessor, AutoModel

from hf_decayed import DecayedSiTTransformer2DModel, DecayedUViT2DModel, DecayedViTMAEConfig, DecayedViTMAEModel
from hf_decayed.cli import main
from hf_decayed.data.sources import load_image_splits
from hf_decayed.evaluation.blocks import find_blocks
from hf_decayed.evaluation.dense import DenseMetrics, evaluate_patches, pixel_patches
from hf_decayed.evaluation.features import dense_features, diffusion_encoder, patch_grid, transformer_encoder


CARDS = Path(__file__).parents[1] / "model_cards"


@pytest.fixture(scope="module")
def splits():
    return load_image_splits("bundled").take(200, 200)


def evaluate_checkpoint(name, splits, features=None, **settings):
    model = AutoModel.from_pretrained(CARDS / name)
    processor = AutoImageProcessor.from_pretrained(CARDS / name)
    return evaluate_patches(model, processor, splits, features, DenseMetrics(**settings))


@pytest.mark.slow
def test_decay_turns_where_into_what_in_the_shipped_checkpoints(splits):
    """Three seeds of k-means: the spread is far smaller than the difference."""
    plain, decayed = (
        evaluate_checkpoint(f"{name}-mae-fashion-mnist", splits)["rows"]["last.patches"]
        for name in ("plain", "decayed")
    )
    for metric in ("cluster_miou", "cluster_miou_greedy"):
        margin = decayed[metric] - plain[metric]
        assert margin > 0.03 and margin > 2 * (plain[f"{metric}_spread"] + decayed[f"{metric}_spread"])
    assert decayed["position_accuracy"] < 0.7 * plain["position_accuracy"]
    assert decayed["position_mse"] > 2 * plain["position_mse"]


def test_dense_features_are_the_hidden_states_without_the_class_token():
    config = DecayedViTMAEConfig(
        image_size=(8, 12), patch_size=4, num_channels=3, hidden_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    model = DecayedViTMAEModel(config).eval()
    pixels = torch.rand(2, 3, 8, 12)
    with torch.no_grad():
        features = transformer_encoder(model, ["1.patches", "last.patches", "last.cls"])(pixels, [0, 1])
        states = model(pixels, output_hidden_states=True)
    assert features["last.patches"].shape == (2, 2, 3, 16)
    torch.testing.assert_close(features["last.patches"].flatten(1, 2), states.last_hidden_state[:, 1:])
    torch.testing.assert_close(features["1.patches"].flatten(1, 2), states.hidden_states[1][:, 1:])
    torch.testing.assert_close(features["last.cls"], states.last_hidden_state[:, 0])


def test_patches_of_vit_mae_are_neither_masked_nor_shuffled():
    from transformers import ViTMAEConfig
    from transformers import ViTMAEModel as StockModel

    config = ViTMAEConfig(image_size=16, patch_size=4, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    model = StockModel(config).eval()
    pixels = torch.rand(2, 3, 16, 16)
    with torch.no_grad():
        encode = transformer_encoder(model, ["0.patches", "last.patches"])
        first, second = encode(pixels, [0, 1]), encode(pixels, [0, 1])
        embedded = model.embeddings.patch_embeddings(pixels) + model.embeddings.position_embeddings[:, 1:]
    torch.testing.assert_close(first["0.patches"].flatten(1, 2), embedded)
    assert torch.equal(first["last.patches"], second["last.patches"])


@pytest.mark.parametrize("kind", ["uvit", "sit"])
def test_dense_features_of_diffusion_models_are_the_blocks_patches(kind):
    from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler

    torch.manual_seed(0)
    sizes = {"sample_size": 8, "in_channels": 3, "patch_size": 2, "hidden_size": 16, "num_layers": 4}
    if kind == "uvit":
        model, scheduler = DecayedUViT2DModel(**sizes, num_attention_heads=2).eval(), DDPMScheduler()
    else:
        model, scheduler = (
            DecayedSiTTransformer2DModel(**sizes, num_attention_heads=2).eval(),
            FlowMatchEulerDiscreteScheduler(),
        )
    block = find_blocks(model)[1]
    pixels = torch.rand(2, 3, 8, 8)
    with torch.no_grad():
        dense = diffusion_encoder(model, scheduler, [block], [0.0, 0.3], pooling="patches")(pixels, [0, 1])
        pooled = diffusion_encoder(model, scheduler, [block], [0.0, 0.3])(pixels, [0, 1])
    for name, features in dense.items():
        assert features.shape == (2, 4, 4, 16)
        torch.testing.assert_close(features.mean(dim=(1, 2)), pooled[name])


def test_pixels_of_patches_are_in_the_order_of_the_grid():
    pixels = torch.arange(2 * 3 * 8 * 12, dtype=torch.float32).view(2, 3, 8, 12)
    patches = pixel_patches(DecayedViTMAEConfig(image_size=(8, 12), patch_size=4))(pixels, [0, 1])["pixels.patches"]
    assert patches.shape == (2, 2, 3, 48)
    torch.testing.assert_close(patches[1, 1, 2], pixels[1, :, 4:8, 8:12].flatten())


def test_convolutional_maps_are_dense_features_too():
    maps = torch.rand(2, 5, 3, 4)
    torch.testing.assert_close(dense_features(maps, None)[1, 2, 3], maps[1, :, 2, 3])


def test_the_command_prints_curves_over_depth_and_writes_a_picture(tmp_path, capsys):
    output = tmp_path / "results.json"
    flags = ["--metrics", "segmentation,where", "--features", "0.patches,6.patches,12.patches", "--num_clusters", "12"]
    limits = ["--max_train_samples", "100", "--max_eval_samples", "100", "--cpu_threads", "1", "--output", str(output)]
    assert main(["evaluate", str(CARDS / "decayed-mae-fashion-mnist"), *flags, *limits]) == 0
    results = json.loads(output.read_text())
    assert list(results["rows"]) == ["pixels.patches", "0.patches", "6.patches", "12.patches"]
    assert results["protocol"]["segmentation"]["clusters"] == 12
    # The embedding holds the position in full; the decay takes it out with depth.
    position = [row["position_accuracy"] for row in list(results["rows"].values())[1:]]
    assert position[0] > 0.9 > position[2] and position[1] > position[2]
    assert output.with_suffix(".png").stat().st_size > 10_000
    assert "what and where against depth" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--features", "last.patches"], "are patches: use --metrics segmentation,where"),
        (["--metrics", "where", "--features", "last.mean"], "need --features <layer>.patches"),
        (["--metrics", "where,frechet"], "frechet"),
        (["--metrics", "where", "--features", "99.patches"], "layers 0 to 12"),
    ],
)
def test_bad_flags_get_one_sentence(flags, message, tmp_path, capsys):
    limits = ["--max_train_samples", "10", "--max_eval_samples", "10", "--output", str(tmp_path / "results.json")]
    try:
        code = main(["evaluate", str(CARDS / "decayed-mae-fashion-mnist"), *flags, *limits])
    except SystemExit as error:
        code = error.code
    captured = capsys.readouterr().err.strip().splitlines()[-1]
    assert code == 2 and message in captured


def test_data_without_masks_gets_one_sentence(splits):
    from dataclasses import replace

    with pytest.raises(ValueError, match="no mask column: name one with --mask_column_name, or use --metrics where"):
        evaluate_checkpoint("decayed-mae-fashion-mnist", replace(splits, mask_column=None))


def test_features_that_would_not_fit_memory_are_refused_before_they_are_taken(splits, monkeypatch):
    import psutil

    free = psutil.virtual_memory()._replace(available=2**20)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    with pytest.raises(ValueError, match=r"would take 0\.\d GB of memory.*fewer --dense_images"):
        evaluate_checkpoint("decayed-mae-fashion-mnist", splits)


def test_images_smaller_than_a_patch_get_one_sentence():
    with pytest.raises(ValueError, match="smaller than a patch of 16 x 16"):
        patch_grid(DecayedViTMAEConfig(), torch.rand(1, 3, 8, 8))
    with pytest.raises(ValueError, match="do not fill the grid"):
        dense_features(torch.rand(1, 3, 8), (2, 2))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_training_prints_the_numbers_that_the_command_gives_for_its_model(tmp_path, capsys):
    folder = tmp_path / "mae"
    flags = ["--max_train_steps", 3, "--eval_train_samples", 200, "--eval_test_samples", 200, "--cpu_threads", 1]
    trained = run_script("mae.py", *flags, "--output_dir", folder)
    assert "segmentation by patches" in trained.stdout and "position of a patch" in trained.stdout
    assert (folder / "patches.png").stat().st_size > 5000
    output = tmp_path / "results.json"
    flags = ["--metrics", "segmentation,where", "--dense_images", "200", "--cpu_threads", "1", "--output", str(output)]
    assert main(["evaluate", str(folder), *flags]) == 0
    rows, results = json.loads(output.read_text())["rows"], json.loads((folder / "results.json").read_text())
    for name, value in rows["last.patches"].items():
        assert results[name] == value
    for name, value in rows["pixels.patches"].items():
        assert results[f"{name}_pixels"] == value
