"""`training/uvit.py` and `sit.py`: they learn, they resume to the last bit, one process and two agree, they tell what is wrong."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, run_script
from datasets import load_dataset
from diffusers import DiffusionPipeline
from PIL import Image
from safetensors.torch import load_file

from hf_decayed.data import Augmentation, DiffusionImages, load_splits


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


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("script, decay", [("uvit.py", 0.7), ("sit.py", 0.8)])
def test_a_killed_run_resumes_to_the_last_bit(script, decay, tmp_path):
    run_script(script, *SMALL, "--output_dir", tmp_path / "whole")
    whole = results(tmp_path / "whole")
    assert whole["steps"] == 24 and whole["frechet_pixels_9_guidance_1"] > 0
    assert Image.open(tmp_path / "whole" / "samples.png").width > 300
    assert (tmp_path / "whole" / "samples" / "step-00000012.png").exists()
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "whole", trust_remote_code=True)
    pipeline.set_progress_bar_config(disable=True)
    assert pipeline(["Ankle boot", 0], num_inference_steps=2).images[0].size == (28, 28)
    config = (pipeline.unet if script == "uvit.py" else pipeline.transformer).config
    assert config.shortcut_decay == decay and config.num_classes == 10

    parts = [*SMALL, "--output_dir", tmp_path / "parts"]
    command = [sys.executable, str(ROOT / "training" / script), *map(str, parts)]
    for number, sent in ((5, signal.SIGKILL), (15, signal.SIGTERM)):
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
        while not (tmp_path / "parts" / "checkpoints" / f"step-{number:08d}").exists():
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(sent)
        printed = process.communicate()[0].decode()
        command += ["--resume_from_checkpoint", "latest"]
    assert process.returncode == 0 and "stopped by SIGTERM at step" in printed
    assert "holds a run that did not finish" in run_script(script, *parts, code=2).stderr
    resume = [*parts, "--resume_from_checkpoint", "latest"]
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
    name = "frechet_pixels_9_guidance_1"
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
    run_script("uvit.py", *flags, "--dataset_path", tmp_path / "images.parquet")
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert pipeline.unet.config.num_classes == 0
