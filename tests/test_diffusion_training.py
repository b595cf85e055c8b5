"""`training/uvit.py` and `sit.py`: they learn, they resume to the last bit, one process and two agree, they tell what is wrong."""

import json
import signal
import time

import numpy as np
import pytest
import sit
import torch
import uvit
from accelerate import Accelerator
from conftest import run_script
from datasets import load_dataset
from diffusers import AutoencoderKL, DiffusionPipeline
from PIL import Image
from safetensors.torch import load_file
from script_server import start_script
from transformers import CLIPImageProcessorPil

from hf_decayed.data.datasets import DiffusionImages, EvaluationDataset
from hf_decayed.data.keyed_random import sample_generator
from hf_decayed.data.latents import CachedLatents, cache_latents, latent_images
from hf_decayed.data.sources import ImageSplits, load_splits
from hf_decayed.data.transforms import Augmentation


SMALL = ["--set", "hidden_size=32", "--set", "num_layers=2", "--set", "patch_size=7", "--batch_size", 16]
SMALL += ["--max_train_steps", 24, "--max_train_samples", 120, "--warmup_steps", 4, "--log_every", 1]
SMALL += ["--checkpointing_steps", 5, "--sample_every", 12, "--sample_steps", 3, "--eval_samples", 9]
SMALL += ["--sample_images", 9, "--cpu_threads", 1]


def results(folder):
    return json.loads((folder / "results.json").read_text())


def weights(folder):
    return load_file(next(folder.glob("*/diffusion_pytorch_model.safetensors")))


def losses(folder):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


def test_draws_belong_to_the_sample():
    train = load_splits()[0].select(range(20))
    augmentation = Augmentation((28, 28), 1, 0, mean=[0.5], std=[0.5], seed=3, crop_scale=(1.0, 1.0))
    images = DiffusionImages(train, "image", augmentation, label_column="label")
    together, alone = images.__getitems__([(0, 4), (0, 7), (1, 4)]), images.__getitems__([(0, 7)])
    for name in ("pixel_values", "noise", "uniform", "labels"):
        assert torch.equal(together[name][1], alone[name][0])
    assert not torch.equal(together["noise"][0], together["noise"][2])  # another epoch
    assert together["pixel_values"].min() >= -1 and together["pixel_values"].max() <= 1
    many = images.__getitems__([(epoch, index) for epoch in range(5) for index in range(20)])
    assert abs(many["noise"].mean()) < 0.02 and abs(many["noise"].std() - 1) < 0.02
    assert abs(many["uniform"].mean() - 0.5) < 0.1


def small_vae():
    torch.manual_seed(0)
    return AutoencoderKL(
        in_channels=1,
        out_channels=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        latent_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        shift_factor=0.1,
    ).eval()


def test_kept_latents_are_the_latents(tmp_path):
    """Kept in memory, read from the disk, encoded on the way: the same, mirrored or not; an interruption costs a shard."""
    vae, train = small_vae(), load_splits()[0].select(range(10))
    splits = ImageSplits("ten", train, train, "none", "image", "label")
    settings = {"image_size": 28, "seed": 3, "accelerator": Accelerator(cpu=True)}
    encoded = latent_images(vae, splits, **settings)
    in_memory = latent_images(vae, splits, **settings, cache_dir=tmp_path)
    on_disk = latent_images(vae, splits, **settings, cache_dir=tmp_path, memory_limit=0)
    assert in_memory.memory is not None and on_disk.memory is None and len(in_memory) == len(encoded) == 10
    keys = [(epoch, index) for epoch in (0, 1) for index in (7, 2, 9, 0)]
    batches = [images.__getitems__(keys) for images in (encoded, in_memory, on_disk)]
    assert batches[0]["pixel_values"].shape == (8, 3, 14, 14)
    for batch in batches[1:]:
        for name in batches[0]:
            torch.testing.assert_close(batch[name], batches[0][name], rtol=1e-6, atol=1e-6)
    assert batches[0]["labels"].tolist() == [train[index]["label"] for _, index in keys]
    # By hand: an image that is turned round in this epoch, and one that is not.
    turned = [sample_generator(3, *key).random(23)[22] < 0.5 for key in keys]
    assert len(set(turned)) == 2
    for position in (turned.index(True), turned.index(False)):
        pixels = torch.tensor(np.array(train[keys[position][1]]["image"])).float().div(127.5).sub(1)[None, None]
        with torch.no_grad():
            posterior = vae.encode(pixels.flip(-1) if turned[position] else pixels).latent_dist
        noise = sample_generator(3, *keys[position], stream=3).standard_normal((3, 14, 14), dtype=np.float32)
        expected = (posterior.mean + posterior.std * torch.from_numpy(noise) - 0.1) * vae.config.scaling_factor
        torch.testing.assert_close(batches[1]["pixel_values"][position], expected[0], rtol=1e-4, atol=1e-5)


def test_latents_are_encoded_once(tmp_path):
    vae, train = small_vae(), load_splits()[0].select(range(10))
    processor = CLIPImageProcessorPil(
        size={"shortest_edge": 28},
        crop_size={"height": 28, "width": 28},
        do_convert_rgb=False,
        image_mean=[0.5],
        image_std=[0.5],
    )
    images = EvaluationDataset(train, "image", "label", processor, 1)
    settings = {"accelerator": Accelerator(cpu=True), "batch_size": 2, "shard_size": 4}
    shards = cache_latents(vae, images, tmp_path, {"data": "ten"}, **settings)
    before = [shard.stat().st_mtime_ns for shard in shards]
    assert len(shards) == 3
    shards[1].write_bytes(shards[1].read_bytes()[:-100])  # as a killed process may leave it
    again = cache_latents(vae, images, tmp_path, {"data": "ten"}, **settings)
    after = [shard.stat().st_mtime_ns for shard in again]
    assert [old == new for old, new in zip(before, after)] == [True, False, True]
    on_disk = CachedLatents(again, 0, seed=0, scale=1.0, shift=0.0, flip=False)
    in_memory = CachedLatents(again, 2**30, seed=0, scale=1.0, shift=0.0, flip=False)
    keys = [(0, index) for index in range(10)]
    assert torch.equal(on_disk.__getitems__(keys)["pixel_values"], in_memory.__getitems__(keys)["pixel_values"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_training_on_latents(tmp_path):
    small_vae().save_pretrained(tmp_path / "vae")
    flags = [*SMALL, "--vae", tmp_path / "vae", "--latents_dir", tmp_path / "latents", "--max_train_steps", 6]
    flags += ["--learning_rate", 1e-4]
    run_script("sit.py", *flags, "--output_dir", tmp_path / "cached")
    run_script("sit.py", *flags, "--output_dir", tmp_path / "encoded", "--keep_latents", "false")
    cached, encoded = losses(tmp_path / "cached"), losses(tmp_path / "encoded")
    assert cached[0] == pytest.approx(encoded[0], rel=1e-6)
    assert cached == pytest.approx(
        encoded, rel=1e-3
    )  # Adam's first steps follow the sign of gradients that are rounding
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "cached", trust_remote_code=True)
    pipeline.set_progress_bar_config(disable=True)
    assert pipeline.transformer.config.sample_size == 14 and pipeline.transformer.config.in_channels == 3
    assert pipeline(1, num_inference_steps=2).images[0].size == (28, 28)
    saved = [path for path in (tmp_path / "cached").rglob("*.json") if "checkpoints" not in path.parts]
    assert len(saved) > 4  # what is uploaded says nothing of this machine
    assert not any(str(tmp_path) in path.read_text() for path in saved if path.name != "arguments.json")
    refused = run_script("uvit.py", *flags, "--output_dir", tmp_path / "odd", "--image_size", 29, code=2)
    assert "--image_size must be divisible by the autoencoder's factor of 2, got 29" in refused.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("script, decay", [("uvit.py", 0.7), ("sit.py", 0.6)])
def test_a_killed_run_resumes_to_the_last_bit(script, decay, tmp_path):
    run_script(script, *SMALL, "--output_dir", tmp_path / "whole")
    whole = results(tmp_path / "whole")
    assert whole["steps"] == 24 and whole["frechet_pixels_9_guidance_2"] > 0
    assert Image.open(tmp_path / "whole" / "samples.png").width > 300
    assert (tmp_path / "whole" / "samples" / "step-00000012.png").exists()
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "whole", trust_remote_code=True)
    pipeline.set_progress_bar_config(disable=True)
    assert pipeline(["Ankle boot", 0], num_inference_steps=2).images[0].size == (28, 28)
    config = (pipeline.unet if script == "uvit.py" else pipeline.transformer).config
    assert config.shortcut_decay == decay and config.num_classes == 10

    parts = [*SMALL, "--output_dir", tmp_path / "parts"]
    resume = [*parts, "--resume_from_checkpoint", "latest"]
    for number, sent, flags in ((5, signal.SIGKILL, parts), (15, signal.SIGTERM, resume)):
        process = start_script(script, *flags)
        while not (tmp_path / "parts" / "checkpoints" / f"step-{number:08d}").exists():
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(sent)
        printed, _ = process.communicate()
    assert process.returncode == 0 and "stopped by SIGTERM at step" in printed
    assert "holds a run that did not finish" in run_script(script, *parts, code=2).stderr
    assert "belongs to another run" in run_script(script, *resume, "--learning_rate", 1, code=2).stderr
    assert "resumed at step" in run_script(script, *resume).stdout
    first, second = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_process_and_two(tmp_path):
    run_script("uvit.py", *SMALL, "--output_dir", tmp_path / "one")
    two = run_script("uvit.py", *SMALL, "--output_dir", tmp_path / "two", processes=2)
    assert "2 process(es)" in two.stdout
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "two"), rel=1e-5)
    run_script("uvit.py", *SMALL, "--output_dir", tmp_path / "parts", "--gradient_accumulation_steps", 4)
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "parts"), rel=1e-4)
    name = "frechet_pixels_9_guidance_2"
    assert results(tmp_path / "one")[name] == pytest.approx(results(tmp_path / "two")[name], rel=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_it_refuses_and_what_it_takes(tmp_path):
    flags = [*SMALL, "--max_train_steps", 2, "--eval_samples", 0, "--output_dir", tmp_path / "out"]
    refused = run_script("uvit.py", *flags, "--set", "patch_size=5", code=2).stderr.strip().splitlines()[-1]
    assert refused.startswith("uvit.py: `sample_size` must be divisible by `patch_size`, got 28 x 28 and 5")
    assert "--size must be one of" in run_script("uvit.py", *flags, "--size", "XXL", code=2).stderr
    load_splits()[0].remove_columns("label").select(range(50)).to_parquet(tmp_path / "images.parquet")
    assert len(load_dataset("parquet", data_files=str(tmp_path / "images.parquet"))["train"]) == 50
    run_script("uvit.py", "--recipe", "tiny", *flags, "--dataset_path", tmp_path / "images.parquet")
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert pipeline.unet.config.num_classes == 0
    assert (
        results(tmp_path / "out")["sampling"]["guidance_scale"] == 1.0
    )  # whatever the recipe says: there are no classes


@pytest.mark.parametrize("script", [uvit, sit])
def test_fields_that_there_are_not(script, capsys):
    for field, sentence in (
        ("hidden_sizes=64", "'hidden_sizes' is not a field of the config; did you mean 'hidden_size'?"),
        ("num_classes=3", "--set num_classes: it follows from the data"),
    ):
        with pytest.raises(SystemExit) as stopped:
            script.parse_arguments(["--set", field])
        assert stopped.value.code == 2 and sentence in capsys.readouterr().err


@pytest.mark.parametrize("script", [uvit, sit])
def test_guidance_needs_a_null_class(script, capsys):
    with pytest.raises(SystemExit):
        script.parse_arguments(["--class_dropout", "0", "--guidance_scale", "2"])
    assert "--guidance_scale needs a trained null class: give --class_dropout above 0" in capsys.readouterr().err
    script.parse_arguments(["--class_dropout", "0", "--guidance_scale", "1"])
