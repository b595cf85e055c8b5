"""Evaluation of generated images and of diffusion models' blocks, by functions and by the command."""

import json
import re

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY_SIZES, random_weights
from diffusers import (
    AutoencoderKL,
    DDPMPipeline,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    UNet2DModel,
)
from PIL import Image

from hf_decayed import DecayedViTMAEConfig, DecayedViTMAEModel
from hf_decayed.data.datasets import EvaluationDataset
from hf_decayed.data.sources import load_splits
from hf_decayed.data.transforms import CenterCropProcessor
from hf_decayed.errors import DataError, UserError
from hf_decayed.evaluation.__main__ import evaluate as run_evaluate
from hf_decayed.evaluation.features import extract_features
from hf_decayed.evaluation.generation import (
    SampledImages,
    image_features,
    inception_encoder,
    pixel_features,
    sample_scores,
)
from hf_decayed.evaluation.sampling import prepare_samples_dir, sample
from hf_decayed.evaluation.tables import markdown_table
from hf_decayed.models.transformer_decayed_sit import DecayedSiTTransformer2DModel
from hf_decayed.models.unet_decayed_uvit import DecayedUViT2DModel
from hf_decayed.pipelines.pipeline_decayed_sit import DecayedSiTPipeline
from hf_decayed.pipelines.pipeline_decayed_uvit import DecayedUViTPipeline


@pytest.fixture
def evaluate(monkeypatch):
    """The command, in this process: starting another one takes longer than the evaluation."""
    threads = torch.get_num_threads()

    def run(*flags):
        flags = [*map(str, flags), "--cpu_threads", "1"]
        monkeypatch.setattr("sys.argv", ["hf-decayed", "evaluate", *flags])
        print(run_evaluate(flags))

    yield run
    torch.set_num_threads(threads)  # other tests compare with processes of their own, to the last bit


def pipeline(folder, num_classes=10):
    unet = DecayedUViT2DModel(
        sample_size=28,
        patch_size=7,
        in_channels=1,
        hidden_size=32,
        num_layers=4,
        num_attention_heads=2,
        num_classes=num_classes,
        shortcut_decay=0.6,
    )
    DecayedUViTPipeline(random_weights(unet), DPMSolverMultistepScheduler()).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("channels", [1, 3])
def test_samples_are_the_same_from_a_folder_and_an_npz_file(tmp_path, channels):
    pixels = np.random.default_rng(0).integers(0, 256, (12, 16, 16, channels), dtype=np.uint8)
    np.savez(tmp_path / "samples.npz", arr_0=pixels)
    (tmp_path / "folder").mkdir()
    for index, image in enumerate(pixels):
        Image.fromarray(image.squeeze()).save(tmp_path / "folder" / f"{index:06d}.png")
    encode, identity = image_features("pixels")
    features = [
        extract_features(encode, SampledImages(tmp_path / name), tmp_path / name[:3], {"by": identity}, batch_size=5)
        for name in ("samples.npz", "folder")
    ]
    expected = pixel_features(torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255)
    for extracted in features:
        torch.testing.assert_close(extracted["features"], expected)
    assert torch.equal(features[0]["checksums"], features[1]["checksums"])
    assert SampledImages(tmp_path / "folder").shape == (channels, 16, 16)

    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no images"):
        SampledImages(tmp_path / "empty")
    np.savez(tmp_path / "floats.npz", arr_0=pixels / 255)
    with pytest.raises(DataError, match="no bytes"):
        SampledImages(tmp_path / "floats.npz")


def test_samples_are_read_as_other_images_are(tmp_path):
    """16 bits are scaled, transparency is white."""
    Image.fromarray(np.full((4, 4), 257 * 100, dtype=np.uint16)).save(tmp_path / "0.png")
    assert SampledImages(tmp_path)[0].tolist() == np.full((4, 4, 1), 100).tolist()
    Image.new("RGBA", (4, 4), (9, 9, 9, 0)).save(tmp_path / "0.png")
    assert SampledImages(tmp_path)[0].tolist() == np.full((4, 4, 3), 255).tolist()


def test_a_folder_of_samples_holds_one_dtype(tmp_path):
    """float32 is left out of the record, and is another dtype all the same."""
    assert prepare_samples_dir(tmp_path / "samples", {"seed": 0, "dtype": "bfloat16"}) == []
    (tmp_path / "samples" / "shards" / "0.npz").touch()
    with pytest.raises(UserError, match="dtype bfloat16 -> float32"):
        prepare_samples_dir(tmp_path / "samples", {"seed": 0})


def test_real_images_are_prepared_as_samples_are(tmp_path):
    """A real image has the same features as a sample and as a reference."""
    train = load_splits()[0].select(range(20))
    pixels = np.stack([np.asarray(image) for image in train["image"]])[..., None]
    np.savez(tmp_path / "samples.npz", arr_0=pixels)
    random_weights(DecayedViTMAEModel(DecayedViTMAEConfig(**TINY_SIZES))).save_pretrained(tmp_path / "model")
    for network in ("pixels", str(tmp_path / "model")):  # grey images, for a network of colour ones too
        encode, identity = image_features(network)
        assert not encode(torch.rand(2, 1, 28, 28), [0, 1])["features"].requires_grad  # no graph is kept in memory
        as_samples = extract_features(
            encode, SampledImages(tmp_path / "samples.npz"), tmp_path / "a", {"by": identity}
        )
        real = EvaluationDataset(train, "image", None, CenterCropProcessor(28, 28), 1)
        as_real = extract_features(encode, real, tmp_path / "b", {"by": identity})
        torch.testing.assert_close(as_samples["features"], as_real["features"], atol=1e-5, rtol=1e-5)
        assert sample_scores(as_real, as_samples, ["frechet"], name="pixels", bootstraps=2)["frechet_pixels"] < 1e-6


def test_scores_are_named_after_their_features():
    real, generated = ({"features": torch.randn(60, 4), "logits": torch.randn(60, 5)} for _ in range(2))
    of_dinov2 = sample_scores(real, generated, ["frechet", "kid", "prdc"], name="dinov2-base", bootstraps=2)
    assert not any("fid" in name or "kid" in name or "inception" in name for name in of_dinov2)
    assert {
        "frechet_dinov2-base",
        "frechet_dinov2-base_spread",
        "kernel_distance_dinov2-base",
        "coverage",
    } <= of_dinov2.keys()
    of_inception = sample_scores(real, generated, ["frechet", "kid"], bootstraps=2)
    assert {"fid", "fid_spread", "kid", "inception_score"} <= of_inception.keys()


def test_inception_takes_bytes_in_colour():
    inputs = []

    class Inception(torch.nn.Module):
        def forward(self, images):
            inputs.append(images)
            return torch.zeros(len(images), 2048), torch.zeros(len(images), 1008)

    grey = torch.tensor([0.0, 1.0, 100 / 255]).view(3, 1, 1, 1).expand(3, 1, 4, 4)
    assert set(inception_encoder(Inception())(grey, [0, 1, 2])) == {"features", "logits"}
    assert (
        inputs[0].dtype == torch.uint8
        and inputs[0].shape == (3, 3, 4, 4)
        and inputs[0][:, 2, 0, 0].tolist() == [0, 255, 100]
    )


def test_samples_are_evaluated(tmp_path, capsys, evaluate):
    folders = ["--features_dir", tmp_path / "features", "--samples_dir", tmp_path / "samples"]
    few = [*folders, "--num_samples", 40, "--num_inference_steps", 3, "--max_train_samples", 200, "--batch_size", 16]
    output = tmp_path / "results.json"
    evaluate(pipeline(tmp_path / "model"), *few, "--output", output, "--guidance_scale", 1.5)
    printed = capsys.readouterr().out
    results = json.loads(output.read_text())
    generated, held_out = results["rows"]["40 samples, 3 steps, guidance 1.5"], results["rows"]["40 held-out images"]
    assert generated["frechet_pixels"] > held_out["frechet_pixels"] > 0
    assert held_out["precision"] > generated["precision"] and "| 40 held-out images |" in printed
    assert results["protocol"]["sampling"]["guidance_scale"] == 1.5 and results["dataset"]["number"] == 200
    assert str(tmp_path) not in json.dumps(results)

    # The samples are cached; evaluating their folder gives the same.
    (samples,) = (tmp_path / "samples").iterdir()
    evaluate(samples, *few, "--output", output)
    assert json.loads(output.read_text())["rows"]["40 samples"] == generated


def test_every_block_is_evaluated_at_every_noise_level(tmp_path, capsys, evaluate):
    few = ["--features_dir", tmp_path, "--max_train_samples", 200, "--max_eval_samples", 60, "--noise_levels", "0,0.9"]
    output = tmp_path / "results.json"
    evaluate(pipeline(tmp_path / "model"), *few, "--output", output, "--metrics", "knn,linear,rank")
    printed = capsys.readouterr().out
    results = json.loads(output.read_text())
    blocks = ["in_blocks.0", "in_blocks.1", "mid_block", "out_blocks.0", "out_blocks.1"]
    assert results["grid"]["blocks"] == blocks and np.shape(results["grid"]["cells"]["linear_accuracy"]) == (5, 2)
    best = results["best"]["linear_accuracy"]
    assert results["rows"][best]["linear_accuracy"] == np.max(results["grid"]["cells"]["linear_accuracy"])
    assert f"best: {best}" in printed and output.with_suffix(".png").exists()
    # Even untrained blocks see more of an image than of noise.
    accuracies = np.array(results["grid"]["cells"]["linear_accuracy"])
    assert accuracies[:, 0].mean() > accuracies[:, 1].mean()


def test_a_sit_of_latents_is_evaluated_with_any_network(tmp_path, evaluate):
    vae = AutoencoderKL(
        in_channels=1,
        out_channels=1,
        latent_channels=4,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )
    sizes = {"sample_size": 14, "patch_size": 7, "in_channels": 4, "hidden_size": 32, "num_attention_heads": 2}
    network = random_weights(DecayedSiTTransformer2DModel(**sizes, num_layers=2, num_classes=3))
    DecayedSiTPipeline(network, FlowMatchEulerDiscreteScheduler(), vae).save_pretrained(tmp_path / "model")
    encoder = random_weights(DecayedViTMAEModel(DecayedViTMAEConfig(**TINY_SIZES)))
    encoder.save_pretrained(tmp_path / "inception")  # a folder of this name is not Inception
    output, few = tmp_path / "results.json", ["--features_dir", tmp_path / "features", "--max_train_samples", 60]
    evaluate(
        *(tmp_path / "model", *few, "--output", output, "--samples_dir", tmp_path / "samples", "--num_samples", 12),
        *("--num_inference_steps", 2, "--feature_net", tmp_path / "inception"),
    )
    (first, _) = json.loads(output.read_text())["rows"].values()
    assert "frechet_inception" in first and "fid" not in first
    (samples,) = (tmp_path / "samples").iterdir()
    evaluate(samples, *few, "--output", output, "--reference", samples)
    results = json.loads(output.read_text())
    assert results["rows"]["12 samples"]["frechet_pixels"] < 1e-9 and "as they lie" in results["protocol"]["reference"]
    evaluate(tmp_path / "model", *few, "--output", output, "--metrics", "linear", "--max_eval_samples", 30)
    results = json.loads(output.read_text())
    assert results["grid"]["blocks"] == ["transformer_blocks.0", "transformer_blocks.1"]
    assert "share of the way" in results["protocol"]["features"]


def test_wrong_arguments_are_refused(tmp_path, capsys, evaluate):
    model = pipeline(tmp_path / "model")
    with pytest.raises(UserError, match="is neither a local folder nor a repository that could be loaded"):
        evaluate(tmp_path / "absent")
    for flags, sentence in (
        (
            ["--metrics", "fid"],
            "--metrics of a pipeline are knn, linear, rank, knn_whitened, kmeans, svm, segmentation, where, frechet, kid, prdc; got fid",
        ),
        (["--metrics", "knn,frechet"], "features and samples are evaluated one at a time"),
        (["--dtype", "bf16"], "--dtype: invalid choice: 'bf16'"),
        (["--num_samples", 3], "at least --num_samples 10"),
        (["--num_samples", 0], "--num_samples: must be at least 1, got 0"),
        (["--noise_levels", "0,1.5"], "--noise_levels: must be at least 0 and at most 1, got 1.5"),
        (["--max_train_samples", -3], "--max_train_samples: must be at least 1, got -3"),
        (["--temperature", "nan"], "--temperature: must be finite, got nan"),
    ):
        with pytest.raises(SystemExit) as stopped:
            evaluate(model, *flags)
        error = capsys.readouterr().err
        assert stopped.value.code == 2 and sentence in error and error.count("\n") == 1
    latents = DecayedUViT2DModel(sample_size=4, in_channels=4, hidden_size=16, num_layers=2, num_attention_heads=2)
    DecayedUViTPipeline(latents, DPMSolverMultistepScheduler()).save_pretrained(tmp_path / "latents")
    with pytest.raises(UserError, match="takes latents, and the pipeline has no VAE"):
        evaluate(tmp_path / "latents", "--metrics", "linear")
    DDPMPipeline(small_unet(), DDPMScheduler()).save_pretrained(tmp_path / "unet")
    with pytest.raises(UserError, match="UNet2DModel does not declare its blocks: name modules with --blocks"):
        evaluate(tmp_path / "unet", "--metrics", "linear")


def small_unet():
    return UNet2DModel(
        sample_size=8,
        block_out_channels=(16, 16),
        norm_num_groups=4,
        down_block_types=("DownBlock2D",) * 2,
        up_block_types=("UpBlock2D",) * 2,
    )


def test_pipelines_of_diffusers_are_sampled_too(tmp_path):
    DDPMPipeline(small_unet(), DDPMScheduler()).save_pretrained(tmp_path / "model")
    sample(str(tmp_path / "model"), tmp_path / "samples", num=3, num_inference_steps=2, file_format="npz")
    assert SampledImages(tmp_path / "samples").shape == (3, 8, 8)
    with pytest.raises(ValueError, match="DDPMPipeline takes no `guidance_scale`; it takes batch_size"):
        sample(str(tmp_path / "model"), tmp_path / "guided", num=3, guidance_scale=2.0)
    with pytest.raises(ValueError, match="DDPMPipeline takes no `class_labels`"):
        sample(str(tmp_path / "model"), tmp_path / "classes", num=3, classes="1,2")


def test_the_table_of_latents_is_the_one_in_the_results():
    page, folder = (ROOT / "docs/small_diffusion.md").read_text(), ROOT / "model_cards/results/small_diffusion"
    shown = re.search(r"<!-- table latents -->\n(.*?)\n<!-- end -->", page, re.DOTALL)[1]
    files = {"SiT, 500 samples": "latents_samples.json", "held-out images, 500": "latents_held_out.json"}
    rows = {name: next(iter(json.loads((folder / f).read_text())["rows"].values())) for name, f in files.items()}
    assert shown == markdown_table(rows)
