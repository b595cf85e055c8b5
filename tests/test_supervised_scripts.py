"""`training/finetune.py`, `linear_probe.py`, `resnet.py`, `sweep.py`: they learn, they resume to the last bit, they tell what is wrong."""

import json
import signal
import time

import finetune
import numpy as np
import pytest
import torch
import yaml
from conftest import TINY_SIZES, random_weights
from conftest import run_script as run
from datasets import load_dataset
from PIL import Image
from safetensors.torch import load_file
from script_server import start_script
from transformers import AutoImageProcessor, AutoModelForImageClassification

from hf_decayed import DecayedViTMAEConfig, DecayedViTMAEForImageClassification, DecayedViTMAEForPreTraining
from hf_decayed.data.augmentation import OPERATIONS, apply_operation, mixup_cutmix, rand_augment, random_erasing
from hf_decayed.data.sources import load_splits
from hf_decayed.data.transforms import Augmentation
from hf_decayed.models.image_processing_decayed import default_image_processor
from hf_decayed.run.optimization import layerwise_groups


SMALL_FINETUNE = ["--max_train_samples", 240, "--max_eval_samples", 200, "--batch_size", 24, "--num_train_epochs", 2]
SMALL_FINETUNE += ["--checkpointing_steps", 7, "--ema_decay", 0.9, "--drop_path", 0.2, "--mixup", 0.8, "--cutmix", 1]
SMALL_FINETUNE += ["--rand_augment", 9, "--random_erasing", 0.25, "--log_every", 5]


def results(folder):
    return json.loads((folder / "results.json").read_text())


def same(first, second):
    first, second = load_file(first), load_file(second)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_rates_fall_with_depth():
    model = DecayedViTMAEForImageClassification(DecayedViTMAEConfig(**TINY_SIZES, shortcut_schedule="learned"))
    layers = model.config.num_hidden_layers
    groups = layerwise_groups(model, layers, 0.5, 0.05)
    where = {id(parameter): group for group in groups for parameter in group["params"]}
    assert len(where) == sum(parameter.requires_grad for parameter in model.parameters())
    rates = {name: where[id(parameter)]["rate_scale"] for name, parameter in model.named_parameters()}
    decays = {name: where[id(parameter)]["weight_decay"] for name, parameter in model.named_parameters()}
    assert rates["classifier.weight"] == 1.0 and rates["fc_norm.weight"] == 1.0
    assert rates[f"vit.layers.{layers - 1}.mlp.fc1.weight"] == 0.5
    assert rates["vit.layers.0.mlp.fc1.bias"] == 0.5**layers
    assert rates["vit.embeddings.cls_token"] == 0.5 ** (layers + 1)
    assert decays["vit.layers.0.mlp.fc1.weight"] == 0.05 and decays["vit.layers.0.attention_alpha"] == 0.05
    assert decays["vit.embeddings.cls_token"] == 0 and decays["classifier.bias"] == 0


def test_mixing_keeps_the_share_of_each_class():
    images = torch.stack([torch.full((1, 16, 16), float(number)) for number in range(4)])
    labels = torch.arange(4)
    seen = set()
    for seed in range(40):
        draws = np.random.default_rng(seed)
        mixed, targets = mixup_cutmix(images, labels, 4, draws, label_smoothing=0.0)
        torch.testing.assert_close(targets.sum(1), torch.ones(4))
        # Pixels are numbered by class, so their average tells the share that the label must tell.
        torch.testing.assert_close(mixed.mean((1, 2, 3)), targets @ torch.arange(4.0))
        seen.add(len(mixed[0].unique()))
    assert seen == {1, 2}  # blended, and pasted
    _, targets = mixup_cutmix(images, labels, 4, draws, mixup=0, cutmix=0, label_smoothing=0.1)
    torch.testing.assert_close(targets[2], torch.tensor([0.025, 0.025, 0.925, 0.025]))


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_every_operation_of_rand_augment(mode):
    """Nothing happens at strength 0, something at 0.9, as a rule more; size and kind stay."""
    pixels = np.random.default_rng(0).integers(0, 200, (24, 20, 3), dtype=np.uint8).repeat(2, 0).repeat(2, 1)
    image = Image.fromarray(pixels).convert(mode)

    def change(name, strength, sign=1):
        after = apply_operation(image, name, strength, sign * strength, fill=128 if mode == "L" else (10, 128, 250))
        assert (after.size, after.mode) == (image.size, mode)
        return np.abs(np.asarray(after, dtype=float) - np.asarray(image, dtype=float)).mean()

    for name in OPERATIONS:
        assert change(name, 0.9) > 1 or (mode, name) == ("L", "color"), name  # a grey image has no colour to lose
        if name not in ("autocontrast", "equalize", "invert"):
            assert change(name, 0) == 0, name
            if not name.startswith(("rotate", "shear", "translate")):  # of noise, any move changes as much
                assert change(name, 0.9) >= change(name, 0.4), name
    for name in ("rotate", "translate_x", "shear_y", "brightness"):
        assert change(name, 0.9, -1) > 1
    moved = np.asarray(apply_operation(image, "translate_y", 1.0, 1.0, fill=7 if mode == "L" else (7, 7, 7)))
    by = round(0.45 * image.height)
    assert (moved[-by + 1 :] == 7).all() and not (moved[:-by] == 7).all()


def test_rand_augment_is_drawn_for_the_sample():
    images = [Image.fromarray(np.full((8, 8, 3), 90, dtype=np.uint8)) for _ in range(400)]
    changed = [np.asarray(rand_augment(image, np.random.default_rng(seed))) != 90 for seed, image in enumerate(images)]
    assert (
        0.2 < np.mean([difference.any() for difference in changed]) < 0.7
    )  # each of two operations half the time; some are idle
    settings = {
        "image_size": (16, 16),
        "num_channels": 3,
        "num_patches": 0,
        "mean": [0.5] * 3,
        "std": [0.2] * 3,
        "seed": 3,
    }
    pixels = torch.randint(0, 255, (6, 3, 20, 20), dtype=torch.uint8)
    keys = [(1, index) for index in range(6)]
    plain, strong = Augmentation(**settings), Augmentation(**settings, rand_augment_magnitude=9.0)
    together = strong.batch(pixels, keys)["pixel_values"]
    for index in range(6):  # whatever the batch
        alone = strong.batch(pixels[index : index + 1], keys[index : index + 1])["pixel_values"]
        torch.testing.assert_close(alone[0], together[index])
    without = plain.batch(pixels, keys)["pixel_values"]
    differences = (together - without).abs().flatten(1).amax(1)
    assert (differences < 0.02).any() and (
        differences > 0.1
    ).any()  # some left but for rounding, and all crops the same


def test_erasing_and_dropping_branches():
    images = torch.zeros(200, 3, 16, 16)
    erased = random_erasing(images, 0.25, np.random.default_rng(0))
    changed = (erased != 0).any(1)  # (image, row, column)
    assert 30 < changed.any((1, 2)).sum() < 70 and not images.any()
    assert 0.01 < changed[changed.any((1, 2))].float().mean() < 0.34
    drop = finetune.DropPath(0.25).train()
    torch.manual_seed(0)
    branch = drop(torch.ones(4000, 2, 3))
    assert branch.mean() == pytest.approx(1, abs=0.05) and branch.unique().tolist() == pytest.approx([0, 4 / 3])
    assert torch.equal(drop.eval()(branch), branch)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_finetuning_resumes_to_the_last_bit(pretrained, tmp_path):
    run("finetune.py", pretrained, *SMALL_FINETUNE, "--output_dir", tmp_path / "whole")
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "whole")
    assert model.config.id2label[9] == "Ankle boot" and model.config.shortcut_decay == 0.6
    assert {"accuracy", "accuracy_top5", "versions", "command"} <= results(tmp_path / "whole").keys()
    parts = ["--output_dir", tmp_path / "parts", "--resume_from_checkpoint", "latest"]
    assert "starting from the beginning" in run("finetune.py", pretrained, *SMALL_FINETUNE, *parts).stdout
    (tmp_path / "parts" / "results.json").unlink()
    assert "resumed at step 14" in run("finetune.py", pretrained, *SMALL_FINETUNE, *parts).stdout
    assert same(tmp_path / "whole" / "model.safetensors", tmp_path / "parts" / "model.safetensors")
    refused = run("finetune.py", pretrained, *SMALL_FINETUNE, *parts, "--seed", 3, code=2)
    assert "finetune.py: 'step-00000014' belongs to another run (seed 0 -> 3)" in refused.stderr
    run("finetune.py", pretrained, *SMALL_FINETUNE, "--output_dir", tmp_path / "two", processes=2)


def test_processor_of_pretraining(tmp_path):
    config = DecayedViTMAEConfig(**TINY_SIZES)
    config.save_pretrained(tmp_path)
    assert finetune.load_processor(str(tmp_path), config).size == {"height": 32, "width": 32}  # none was saved
    default_image_processor(32, center_crop=True).save_pretrained(tmp_path)
    processor = finetune.load_processor(str(tmp_path), config)
    assert processor.do_center_crop and Augmentation.from_processor(processor, 3, seed=0).image_size == (32, 32)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_finetuning_keeps_the_processor_of_pretraining(tmp_path):
    """A model that was pretrained on the middle of photos is fine-tuned and used on the middle, not on squeezed photos."""
    wide = Image.new("RGB", (96, 32), "blue")
    wide.paste("red", (32, 0, 64, 32))
    for name in ("blue", "red"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(20):
            wide.save(tmp_path / "photos" / name / f"{number}.png")
    model = random_weights(DecayedViTMAEForPreTraining(DecayedViTMAEConfig(**TINY_SIZES)))
    default_image_processor(32, center_crop=True).save_pretrained(tmp_path / "pretrained")
    model.save_pretrained(tmp_path / "pretrained")
    few = ["--dataset_path", tmp_path / "photos", "--batch_size", 8, "--num_train_epochs", 1]
    run("finetune.py", tmp_path / "pretrained", *few, "--output_dir", tmp_path / "out")
    processor = AutoImageProcessor.from_pretrained(tmp_path / "out")
    pixels = processor(wide, return_tensors="pt").pixel_values[0]
    assert pixels.shape == (3, 32, 32) and (pixels[0] > pixels[2]).all()  # all of it red


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_probing_by_both_protocols(pretrained, tmp_path):
    few = ["--max_train_samples", 600, "--max_eval_samples", 300, "--features_dir", tmp_path / "features"]
    printed = run("linear_probe.py", pretrained, *few, "--output_dir", tmp_path / "paper").stdout
    paper = results(tmp_path / "paper")
    assert paper["linear_accuracy"] > 0.25 and f"{100 * paper['linear_accuracy']:.1f} %" in printed
    assert paper["protocol"]["name"] == "paper_imagenet100" and not paper["protocol"]["augment"]

    # With augmentation: stopped, resumed, with two processes; each time the same classifier.
    few += ["--protocol", "mae_imagenet1k", "--epochs", 2, "--batch_size", 100, "--checkpointing_steps", 5]
    run("linear_probe.py", pretrained, *few, "--output_dir", tmp_path / "whole")
    assert results(tmp_path / "whole")["protocol"]["augment"]
    stopped = run("linear_probe.py", pretrained, *few, "--output_dir", tmp_path / "parts", "--max_train_steps", 7)
    assert "stopped by --max_train_steps at step 7" in stopped.stdout
    run("linear_probe.py", pretrained, *few, "--output_dir", tmp_path / "parts", "--resume_from_checkpoint", "latest")
    assert same(*(tmp_path / name / "classifier.safetensors" for name in ("whole", "parts")))
    run("linear_probe.py", pretrained, *few, "--output_dir", tmp_path / "two", processes=2)
    one, two = (load_file(tmp_path / name / "classifier.safetensors") for name in ("whole", "two"))
    assert all(torch.allclose(one[name].float(), two[name].float(), atol=1e-5) for name in one)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_data_without_labels_is_refused(pretrained, tmp_path):
    load_splits()[0].remove_columns("label").select(range(50)).to_parquet(tmp_path / "images.parquet")
    assert len(load_dataset("parquet", data_files=str(tmp_path / "images.parquet"))["train"]) == 50
    for script in ("finetune.py", "linear_probe.py"):
        refused = run(script, pretrained, "--dataset_path", tmp_path / "images.parquet", code=2).stderr
        assert refused.strip().splitlines()[-1].startswith(f"{script}: ") and "label" in refused


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sweep_goes_on_where_it_stopped(tmp_path):
    """Two runs and two seeds; one line each, none done twice; tables and pictures of them."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "decoder_num_hidden_layers": 2}
    flags = {"max_train_samples": 200, "max_train_steps": 6, "eval_every": 2, "log_every": 2, "batch_size": 16}
    grid = {
        "recipe": "grey",
        "flags": {**sizes, **flags, "eval_train_samples": 200, "eval_test_samples": 100},
        "evaluation": {"max_train_samples": 200, "max_eval_samples": 100},
        "seeds": [0, 1],
        "runs": {"plain preset": {"preset": "plain", "shortcut_decay": 1.0}},
        "axes": {"shortcut_decay": [0.8]},
    }
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(grid))
    command = [tmp_path / "grid.yaml", "--output_dir", tmp_path / "out"]
    nothing = run("sweep.py", *command, "--report", code=2)
    assert "sweep.py: There is nothing to report" in nothing.stderr
    run("sweep.py", *command, "--only", "decay")
    first = (tmp_path / "out" / "results.jsonl").read_text()
    assert len(first.splitlines()) == 2
    again = run("sweep.py", *command)
    lines = (tmp_path / "out" / "results.jsonl").read_text()
    assert lines.startswith(first) and "shortcut_decay=0.8, seed" not in again.stdout
    records = [json.loads(line) for line in lines.splitlines()]
    assert [(record["name"], record["seed"]) for record in records[2:]] == [("plain preset", 0), ("plain preset", 1)]
    assert all(record["training_flops"] > 0 and record["images_seen"] == 96 for record in records)
    assert str(tmp_path) not in lines
    table = (tmp_path / "out" / "report" / "tables.md").read_text()
    titles, _, seeds, steps, *_ = table.splitlines()
    assert titles == "|  | plain preset | shortcut_decay=0.8 | raw pixels |"  # as in the grid
    assert (seeds, steps) == ("| seeds | 2 | 2 |  |", "| steps | 6 | 6 |  |")
    for name in ("accuracy_against_decay", "rank_and_accuracy", "accuracy_by_layer", "use_of_skips", "tsne"):
        assert (tmp_path / "out" / "report" / f"{name}.png").stat().st_size > 5000


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_residual_networks_resume_after_a_kill(tmp_path):
    """Order, random numbers, batch statistics and learning rates must all come back for equal weights."""
    few = ["--max_train_samples", 320, "--max_eval_samples", 100, "--batch_size", 16, "--num_train_epochs", 2]
    few += ["--checkpointing_steps", 6, "--eval_every", 9, "--num_blocks", 9, "--cpu_threads", 1]
    run("resnet.py", *few, "--output_dir", tmp_path / "whole")
    whole = results(tmp_path / "whole")
    assert whole["steps"] == 40 and whole["num_blocks"] == 9 and whole["shortcut_decay"] == 0.7
    records = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "effective_rank_stage4" in record] == [0, 9, 18, 27, 36, 40]
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "whole")
    assert model.config.id2label[9] == "Ankle boot" and model.config.depths == [2, 2, 3, 2]

    parts = [*few, "--output_dir", tmp_path / "parts"]
    resume = [*parts, "--resume_from_checkpoint", "latest"]
    for number, sent, flags in ((6, signal.SIGKILL, parts), (18, signal.SIGTERM, resume)):
        process = start_script("resnet.py", *flags)
        while not (tmp_path / "parts" / "checkpoints" / f"step-{number:08d}").exists():
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(sent)
        printed, _ = process.communicate()
    assert process.returncode == 0 and "stopped by SIGTERM at step" in printed
    unfinished = run("resnet.py", *parts, code=2)
    assert "holds a run that did not finish" in unfinished.stderr
    assert "belongs to another run" in run("resnet.py", *resume, "--shortcut_decay", 0.9, code=2).stderr
    assert "resumed at step" in run("resnet.py", *resume).stdout
    assert same(tmp_path / "whole" / "model.safetensors", tmp_path / "parts" / "model.safetensors")
    assert results(tmp_path / "parts")["effective_rank"] == whole["effective_rank"]
    run("resnet.py", *few, "--output_dir", tmp_path / "two", processes=2)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sweep_of_residual_networks(tmp_path):
    flags = {"max_train_samples": 100, "max_eval_samples": 60, "max_train_steps": 4, "eval_every": 2, "batch_size": 16}
    grid = {"script": "resnet", "flags": flags, "axes": {"shortcut_decay": [1.0, 0.7], "num_blocks": [8, 9]}}
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(grid, sort_keys=False))
    run("sweep.py", tmp_path / "grid.yaml", "--output_dir", tmp_path / "out", "--cpu_threads", 1)
    table = (tmp_path / "out" / "report" / "tables.md").read_text()
    assert [line.split("|")[1:4] for line in table.splitlines()[2:6]] == [
        [f" {decay} ", f" {blocks} ", " 1 "] for decay in (1.0, 0.7) for blocks in (8, 9)
    ]
    assert (tmp_path / "out" / "report" / "rank_against_depth.png").stat().st_size > 5000


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", ["uvit", "sit"])
def test_a_sweep_of_diffusion_models(script, tmp_path):
    flags = {"hidden_size": 32, "num_layers": 2, "max_train_steps": 4, "max_train_samples": 100, "batch_size": 16}
    flags |= {"log_every": 1, "sample_every": 2, "sample_steps": 2, "eval_samples": 9, "sample_images": 9}
    samples = {"num_samples": 20, "num_inference_steps": 2, "max_train_samples": 100}
    blocks = {"metrics": "linear,knn", "max_train_samples": 100, "max_eval_samples": 50, "noise_levels": "0,0.5"}
    grid = {"script": script, "flags": flags, "axes": {"shortcut_decay": [1.0, "auto"]}}
    grid["evaluation"] = {"samples": samples, "blocks": blocks}
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(grid, sort_keys=False))
    run("sweep.py", tmp_path / "grid.yaml", "--output_dir", tmp_path / "out", "--cpu_threads", 1)
    lines = (tmp_path / "out" / "results.jsonl").read_text()
    assert str(tmp_path) not in lines
    for record in map(json.loads, lines.splitlines()):
        assert set(record["samples"]["rows"]) == {"20 samples, 2 steps, guidance 1", "20 held-out images"}
        assert len(record["blocks"]["grid"]["cells"]["linear_accuracy"]) == (3 if script == "uvit" else 2)
    table = (tmp_path / "out" / "report" / "tables.md").read_text()
    assert "| shortcut_decay=auto | 1 |" in table and "| 20 held-out images |" in table
    for name in ("over_training", "blocks", "samples"):
        assert (tmp_path / "out" / "report" / f"{name}.png").stat().st_size > 5000
