"""`training/mae.py`: it runs, it resumes to the last bit, it survives being killed, it tells what is wrong."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from conftest import run_script
from datasets import Dataset, Features, Value
from datasets import Image as ImageFeature
from loopback_hub import serve
from PIL import Image
from safetensors.torch import load_file
from script_server import kill, start_script
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoImageProcessor, AutoModel, AutoModelForPreTraining, ViTMAEConfig, ViTMAEForPreTraining

from hf_decayed import DecayedViTMAEConfig, DecayedViTMAEForPreTraining
from hf_decayed.data.sources import load_splits


ROOT = Path(__file__).parents[1]

# Small enough for a second of training; accumulation, averaging and clipping are on, so that their state counts.
RECIPE = {
    "fields": {
        "image_size": 16,
        "patch_size": 4,
        "num_channels": 1,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "decoder_hidden_size": 32,
        "decoder_num_hidden_layers": 2,
        "decoder_num_attention_heads": 4,
        "decoder_intermediate_size": 64,
        "hidden_dropout_prob": 0.1,
        "norm_pix_loss": True,
    },
    "size": "small",
    "max_train_samples": 72,
    "batch_size": 16,
    "gradient_accumulation_steps": 2,
    "max_train_steps": 12,
    "warmup_epochs": 1,
    "base_learning_rate": 0.02,
    "max_grad_norm": 1.0,
    "ema_decay": 0.9,
    "eval_train_samples": 60,
    "eval_test_samples": 40,
    "checkpointing_steps": 5,
    "log_every": 2,
}


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return path


def run(recipe, output, *flags, **settings):
    return run_script("mae.py", "--recipe", recipe, "--output_dir", output, *flags, **settings)


def weights(output):
    return load_file(Path(output) / "model.safetensors")


def assert_same_weights(first, second):
    first, second = weights(first), weights(second)
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert different == []


def logged(output, name):
    records = [json.loads(line) for line in (Path(output) / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record[name] for record in records if name in record}


def losses(output):
    return logged(output, "loss")


def test_a_run_and_its_resumption(recipe, tmp_path):
    whole = run(recipe, tmp_path / "whole", "--eval_every", 6, "--report_to", "tensorboard")
    results = json.loads((tmp_path / "whole" / "results.json").read_text())
    for name in ("loss", "knn_accuracy", "knn_accuracy_pixels", "knn_accuracy_untrained", "effective_rank"):
        assert np.isfinite(results[name]), name
    table = {line[:31].strip(): line[31:].split() for line in whole.stdout.splitlines()}
    assert table["kNN accuracy (%)"] == [
        f"{100 * results[f'knn_accuracy{kind}']:.1f}" for kind in ("", "_untrained", "_pixels")
    ]
    assert table["effective rank"][0] == f"{results['effective_rank']:.3f}"
    assert {"command", "versions", "seed", "seconds", "dataset"} <= results.keys()
    assert list(results["skip_use"]) == ["4", "2"] and "(layer 4)" in whole.stdout
    assert str(tmp_path) not in json.dumps(results) + (tmp_path / "whole" / "README.md").read_text()
    assert f"{100 * results['knn_accuracy']:.1f} %" in (tmp_path / "whole" / "README.md").read_text()
    for picture in ("reconstructions.png", "curves.png", "reconstructions/step-00000006.png"):
        assert Image.open(tmp_path / "whole" / picture).size[0] > 300
    assert "1 process(es) on cpu" in whole.stdout
    events = EventAccumulator(str(tmp_path / "whole" / "trackers" / "mae")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [2, 4, 6, 8, 10, 12]
    assert [event.step for event in events.Scalars("knn_accuracy")] == [0, 6, 12]
    assert AutoImageProcessor.from_pretrained(tmp_path / "whole").size["height"] == 16
    features = AutoModel.from_pretrained(tmp_path / "whole").eval()(torch.randn(2, 1, 16, 16)).pooler_output
    assert features.shape == (2, 32)

    # Without its newest checkpoint, which is damaged, it resumes from the one before and ends with the same weights.
    # Beside itself as it was, it has the same numbers.
    shutil.copytree(tmp_path / "whole", tmp_path / "first")
    newest = tmp_path / "whole" / "checkpoints" / "step-00000010" / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-7])
    for leftover in ("model.safetensors", "results.json"):
        (tmp_path / "whole" / leftover).unlink()
    flags = ["--resume_from_checkpoint", "latest", "--eval_every", 6, "--report_to", "tensorboard"]
    config = DecayedViTMAEConfig.from_pretrained(tmp_path / "first", patch_size=8)  # as many patches as it likes
    DecayedViTMAEForPreTraining(config).save_pretrained(tmp_path / "coarse")
    resumed = run(recipe, tmp_path / "whole", *flags, "--compare", tmp_path / "first", tmp_path / "coarse").stdout
    assert "resumed at step 5" in resumed and re.search(r"this run +first +coarse +untrained +raw pixels", resumed)
    results = json.loads((tmp_path / "whole" / "results.json").read_text())
    for name, value in results["compared"]["first"].items():
        assert results.get(name, value) == value, name
    assert_same_weights(tmp_path / "first", tmp_path / "whole")
    assert losses(tmp_path / "first") == losses(tmp_path / "whole")


@pytest.mark.slow
def test_a_finished_run_is_finished_again_elsewhere(recipe, tmp_path):
    """From its last checkpoint, with the losses that were recorded beside it; and a finished model is not replaced."""
    run(recipe, tmp_path / "whole", "--checkpointing_steps", 12)
    last = tmp_path / "whole" / "checkpoints" / "step-00000012"
    run(recipe, tmp_path / "again", "--checkpointing_steps", 12, "--resume_from_checkpoint", last)
    assert_same_weights(tmp_path / "whole", tmp_path / "again")
    assert losses(tmp_path / "whole") == losses(tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints", ignore_errors=True)
    for checkpoint in ("latest", last):
        refused = run(recipe, tmp_path / "again", "--resume_from_checkpoint", checkpoint, code=2)
        assert "holds a finished model (results.json): name another --output_dir" in refused.stderr
    (tmp_path / "again" / "metrics.jsonl").unlink()
    (tmp_path / "whole" / "metrics.jsonl").unlink()
    (tmp_path / "again" / "results").mkdir()
    (tmp_path / "again" / "results" / "old.json").write_text("{}")  # an evaluation of what is replaced
    flags = ["--checkpointing_steps", 12, "--overwrite_output_dir"]
    assert "loss not recorded" in run(recipe, tmp_path / "again", "--resume_from_checkpoint", last, *flags).stdout
    assert not (tmp_path / "again" / "results").exists()


@pytest.mark.slow
def test_a_run_in_parts(recipe, tmp_path):
    """Stopped in the middle of an epoch, between checkpoints, and resumed."""
    run(recipe, tmp_path / "whole", "--eval_every", 6)
    first = run(
        recipe, tmp_path / "parts", "--max_train_steps", 12, "--resume_from_checkpoint", "latest", "--eval_every", 6
    )
    assert "starting from the beginning" in first.stdout
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")
    for leftover in ("model.safetensors", "results.json"):
        (tmp_path / "parts" / leftover).unlink()
    checkpoints = sorted(path.name for path in (tmp_path / "parts" / "checkpoints").iterdir())
    assert checkpoints == ["step-00000005", "step-00000010"]
    # The newest is damaged: it is passed over, and the one before it leads to the same end.
    newest = tmp_path / "parts" / "checkpoints" / "step-00000010" / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-7])
    resumed = run(recipe, tmp_path / "parts", "--resume_from_checkpoint", "latest", "--eval_every", 6)
    assert "resumed at step 5" in resumed.stdout
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")

    # Another seed would be another run; and a run that did not finish is not thrown away.
    flags = ["--resume_from_checkpoint", "latest", "--seed", 1]
    assert "belongs to another run (seed 0 -> 1)" in run(recipe, tmp_path / "parts", *flags, code=2).stderr
    assert "holds a finished model" in run(recipe, tmp_path / "parts", code=2).stderr
    for leftover in ("model.safetensors", "results.json"):
        (tmp_path / "parts" / leftover).unlink()
    assert "holds a run that did not finish" in run(recipe, tmp_path / "parts", code=2).stderr


@pytest.mark.slow
def test_shortcuts_that_are_lowered_while_it_trains(recipe, tmp_path):
    flags = ["--shortcut_decay", 0.6, "--decay_warmup", 0.8, "--log_every", 1, "--resume_from_checkpoint", "latest"]
    run(recipe, tmp_path / "lowered", *flags)
    # Nothing is lowered at the first step, and everything is at the end: otherwise it could not be saved.
    run(recipe, tmp_path / "plain", "--shortcut_decay", 1.0, "--log_every", 1, "--max_train_steps", 1)
    lowered, plain = (logged(tmp_path / name, "encoder_norm") for name in ("lowered", "plain"))
    assert lowered[1] == plain[1] and lowered[12] < 0.5 * lowered[1]
    shares = logged(tmp_path / "lowered", "decay_share")
    assert [round(shares[step], 3) for step in (1, 2, 10, 11, 12)] == [0.0, 0.111, 1.0, 1.0, 1.0]

    # Resumed on the way down, it goes on from there.
    whole = weights(tmp_path / "lowered")
    shutil.rmtree(tmp_path / "lowered" / "checkpoints" / "step-00000010")
    for leftover in ("model.safetensors", "results.json"):
        (tmp_path / "lowered" / leftover).unlink()
    assert "resumed at step 5" in run(recipe, tmp_path / "lowered", *flags).stdout
    resumed = weights(tmp_path / "lowered")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)

    # The beginning of a longer run is what that run began with.
    run(recipe, tmp_path / "beginning", *flags, "--max_train_steps", 10, "--schedule_steps", 12)
    for metric in ("loss", "learning_rate", "decay_share"):
        beginning, longer = (logged(tmp_path / name, metric) for name in ("beginning", "lowered"))
        assert [beginning[step] for step in range(1, 11)] == [longer[step] for step in range(1, 11)]

    # One that ends on the way down is saved with the decay that it has reached, also when only its end is repeated.
    flags += ["--max_train_steps", 5, "--schedule_steps", 12]
    for _ in range(2):
        run(recipe, tmp_path / "halfway", *flags)
        config = json.loads((tmp_path / "halfway" / "config.json").read_text())
        assert config["shortcut_decay"] == 1 - logged(tmp_path / "halfway", "decay_share")[5] * (1 - 0.6)
        for leftover in ("model.safetensors", "results.json"):
            (tmp_path / "halfway" / leftover).unlink()


@pytest.mark.parametrize(
    "flags, sentence",
    [
        pytest.param(
            ["--decay_warmup", "1.5"],
            "argument --decay_warmup: must be at least 0 and at most 1, got 1.5",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--decay_warmup", "0.5", "--set", "shortcut_schedule=learned", "--shortcut_decay", "1.0"],
            "mae.py: --decay_warmup needs residual_form 'decay' and a shortcut_schedule that is not learned, got 'decay' and 'learned'",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--max_train_steps", "4", "--schedule_steps", "3"],
            "mae.py: --schedule_steps 3 ends before the training, which has 4 steps",
            marks=pytest.mark.slow,
        ),
        (["--dataset_path", "junk.parquet"], "mae.py: .*'cat.png' .* cannot be decoded"),
        pytest.param(
            ["--shortcut_decay", "1.5"],
            "mae.py: argument --shortcut_decay: must be at least 0 and at most 1, got 1.5",
            marks=pytest.mark.slow,
        ),
        pytest.param(["--dataset_path", "absent"], "mae.py: There is nothing at", marks=pytest.mark.slow),
        pytest.param(["--recipe", "tyni"], "there is no recipe 'tyni'; there are ", marks=pytest.mark.slow),
    ],
)
def test_wrong_arguments_end_in_one_sentence(recipe, tmp_path, flags, sentence):
    rows = [{"image": {"bytes": content, "path": "cat.png"}, "label": 0} for content in (b"junk", b"more junk")]
    Dataset.from_list(rows, features=Features({"image": ImageFeature(), "label": Value("int64")})).to_parquet(
        tmp_path / "junk.parquet"
    )
    flags = [tmp_path / flag if flag in ("absent", "junk.parquet") else flag for flag in flags]
    result = run(recipe, tmp_path / "out", *flags, code=2)
    assert re.search(sentence, result.stderr.strip().splitlines()[-1]), result.stderr[-500:]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("data", ["memory", "workers"])
def test_killed_at_random_moments(recipe, tmp_path, processes, data):
    """SIGKILL, again and again, in training and in writing; the end is that of a run never stopped."""
    flags = ["--checkpointing_steps", 2, "--checkpoints_total_limit", 2]
    flags += ["--memory_limit_gb", 0, "--num_workers", 2] if data == "workers" else []
    run(recipe, tmp_path / "whole", *flags, processes=processes)
    moments = random.Random(0)
    kills = 0
    for _ in range(12):
        resumed = [*flags, "--output_dir", tmp_path / "killed", "--resume_from_checkpoint", "latest"]
        process = start_script("mae.py", "--recipe", recipe, *resumed, processes=processes)
        # Wait until it trains, then let it go on for a moment that may end inside a step or inside a checkpoint.
        metrics = tmp_path / "killed" / "metrics.jsonl"
        before = metrics.stat().st_mtime_ns if metrics.exists() else 0
        while process.poll() is None and (not metrics.exists() or metrics.stat().st_mtime_ns == before):
            time.sleep(0.005)
        time.sleep(moments.uniform(0, 0.35))
        if process.poll() is not None:
            break
        kill(process)
        kills += 1
    assert kills >= 2
    run(recipe, tmp_path / "killed", *flags, "--resume_from_checkpoint", "latest", processes=processes)
    assert_same_weights(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("data", ["memory", "workers"])
@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop(recipe, tmp_path, signal_number, data):
    """The whole group gets the signal, workers too, as from a terminal or a cluster's scheduler."""
    flags = ["--memory_limit_gb", 0, "--num_workers", 2] if data == "workers" else []
    run(recipe, tmp_path / "whole", *flags)
    process = start_script("mae.py", "--recipe", recipe, "--output_dir", tmp_path / "stopped", *flags)
    metrics = tmp_path / "stopped" / "metrics.jsonl"
    while not (metrics.exists() and '"loss"' in metrics.read_text()):  # before that there is nothing to keep
        time.sleep(0.01)
    os.killpg(process.pid, signal_number)
    output, errors = process.communicate()
    assert process.returncode == 0, errors[-2000:]
    assert re.search(
        rf"stopped by {signal_number.name} at step \d+; continue with --resume_from_checkpoint latest", output
    )
    run(recipe, tmp_path / "stopped", *flags, "--resume_from_checkpoint", "latest")
    assert_same_weights(tmp_path / "whole", tmp_path / "stopped")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_full_disk_keeps_the_last_checkpoint(recipe, tmp_path):
    """Files may not grow past a limit that the weights fit under and the optimizer's state does not, later on."""
    run(recipe, tmp_path / "out", "--max_train_steps", 6, "--checkpointing_steps", 3, "--checkpoints_total_limit", 5)
    before = sorted(path.name for path in (tmp_path / "out" / "checkpoints").iterdir())
    assert before == ["step-00000003", "step-00000006"]
    (tmp_path / "out" / "checkpoints" / "step-00000006" / "manifest.json").unlink()
    limit = (tmp_path / "out" / "checkpoints" / "step-00000003" / "model.safetensors").stat().st_size + 5000
    flags = ["--max_train_steps", 6, "--checkpointing_steps", 3, "--resume_from_checkpoint", "latest"]
    result = run(recipe, tmp_path / "out", *flags, file_limit=limit // 1024)
    assert "Skipping the checkpoint 'step-00000006'" in result.stderr
    assert "No checkpoint at step 6: it could not be written" in result.stderr
    assert "resumed at step 3" in result.stdout
    assert not list((tmp_path / "out" / "checkpoints").glob(".writing*"))
    assert (tmp_path / "out" / "checkpoints" / "step-00000003" / "manifest.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_steps_without_a_finite_loss(recipe, tmp_path):
    """A rate that blows up: steps are skipped and counted, and past the limit the run says what to try."""
    result = run(
        recipe,
        tmp_path / "out",
        "--base_learning_rate",
        "1e30",
        "--max_train_steps",
        60,
        "--max_skipped_steps",
        5,
        code=2,
    )
    assert "steps without a finite loss" in result.stderr and "try a lower learning rate" in result.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_streaming_resumes_to_the_same_end(recipe, tmp_path):
    """Without dropout, whose draws a stream does not give back."""
    flags = ["--streaming", "true", "--num_workers", 0, "--set", "hidden_dropout_prob=0.0"]
    run(recipe, tmp_path / "whole", *flags)
    run(recipe, tmp_path / "parts", *flags)
    (tmp_path / "parts" / "results.json").unlink()
    assert "resumed at step 10" in run(recipe, tmp_path / "parts", *flags, "--resume_from_checkpoint", "latest").stdout
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")
    two = run(recipe, tmp_path / "two", *flags, processes=2)
    assert "2 process(es)" in two.stdout
    # One that was complete is complete; and the usual number of workers is no trouble where there is one file.
    flags += ["--num_workers", 4, "--checkpointing_steps", 6]
    run(recipe, tmp_path / "done", *flags)
    before = weights(tmp_path / "done")
    assert "resumed at step 12" in run(recipe, tmp_path / "done", *flags, "--resume_from_checkpoint", "latest").stdout
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(tmp_path / "done").items())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_do_what_one_does(recipe, tmp_path):
    """The same order, masks and loss at the same global batch. No dropout: its draws do belong to the process."""
    flags = ["--max_train_steps", 20, "--log_every", 1, "--set", "hidden_dropout_prob=0.0"]
    run(recipe, tmp_path / "one", *flags)
    two = run(recipe, tmp_path / "two", *flags, processes=2)
    assert "2 process(es) on cpu" in two.stdout
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert one.keys() == two.keys() and len(one) == 20
    assert max(abs(one[step] - two[step]) for step in one) < 1e-6


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("data", ["map", "stream"])
def test_bad_images_are_counted_wherever_they_are_decoded(recipe, tmp_path, data):
    """Images of two sizes are decoded in workers; two of them cannot be."""
    train, _, _ = load_splits()
    images = [row["image"].resize((20 + index % 2, 20)) for index, row in enumerate(train.select(range(80)))]
    images[11], images[40] = ({"bytes": content, "path": "junk.png"} for content in (b"junk", b"rubbish"))
    features = Features({"image": ImageFeature(), "label": Value("int64")})
    table = Dataset.from_dict({"image": images, "label": [index % 4 for index in range(80)]}, features=features)
    table.to_parquet(tmp_path / "images.parquet")
    flags = ["--dataset_path", tmp_path / "images.parquet", "--max_train_samples", 80, "--num_workers", 2]
    flags += ["--streaming", "true" if data == "stream" else "false", "--eval_test_samples", 4]
    stopped = run(recipe, tmp_path / "out", *flags, code=2).stderr.strip().splitlines()[-1]
    assert stopped.startswith("mae.py: The image 'junk.png' (row ") and "Traceback" not in stopped
    run(recipe, tmp_path / "out", *flags, "--on_bad_image", "skip")
    bad_images = json.loads((tmp_path / "out" / "results.json").read_text())["bad_images"]
    assert (
        2 <= bad_images <= 2 * 4
    )  # 192 images seen of about 76: each bad one two or three times, or four with its neighbour


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_from_the_hub_and_to_it(recipe, tmp_path):
    """A data set by its name, and the result uploaded; then anyone loads it by name, without checkpoints in it."""
    data = tmp_path / "hub" / "user" / "images" / "data"
    data.mkdir(parents=True)
    for split, rows in zip(("train", "test"), load_splits()):
        rows.select(range(80)).to_parquet(data / f"{split}-00000-of-00001.parquet")
    cache = {"HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "cache"), "HF_TOKEN": "hf_secret"}
    with serve(tmp_path / "hub") as server:
        variables = {**cache, "HF_ENDPOINT": server.url}
        flags = ["--dataset_name", "user/images", "--push_to_hub", "user/my-mae"]
        result = run(recipe, tmp_path / "out", *flags, environment=variables)
        assert "user/images: 72 images in memory" in result.stdout and "uploaded to user/my-mae" in result.stdout
        loading = (
            "from transformers import AutoModel; AutoModel.from_pretrained('user/my-mae', trust_remote_code=True)"
        )
        subprocess.run([sys.executable, "-c", loading], env={**os.environ, **variables}, check=True)
        absent = run(recipe, tmp_path / "absent", "--dataset_name", "user/absent", environment=variables, code=2)
        assert "mae.py: 'user/absent' could not be loaded" in absent.stderr
    # Nowhere to upload to is found out before training, not after.
    refused = run(recipe, tmp_path / "late", "--push_to_hub", "user/my-mae", environment=variables, code=2)
    assert "mae.py: The repository 'user/my-mae' cannot be made: " in refused.stderr.strip().splitlines()[-1]
    assert not (tmp_path / "late").exists()
    uploaded = {path.name for path in (tmp_path / "hub" / "user" / "my-mae").rglob("*")}
    assert {"model.safetensors", "README.md", "results.json", "modeling_decayed_vit_mae.py", "curves.png"} <= uploaded
    assert not uploaded & {"checkpoints", "arguments.json", "optimizer.bin"}
    for path in (tmp_path / "out").rglob("*"):
        assert path.is_dir() or b"hf_secret" not in path.read_bytes(), path


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_started_from_weights_and_warned_of_a_blow_up(recipe, tmp_path):
    sizes = {name: value for name, value in RECIPE["fields"].items() if name != "hidden_dropout_prob"}
    theirs = ViTMAEForPreTraining(ViTMAEConfig(**sizes))
    with torch.no_grad():
        theirs.vit.layers[-1].mlp.fc2.weight *= 1e5
    theirs.save_pretrained(tmp_path / "theirs")
    flags = ["--init_from", tmp_path / "theirs", "--max_train_steps", 2, "--base_learning_rate", 0]
    result = run(recipe, tmp_path / "out", *flags, "--set", "final_norm=false", code=2)
    assert "layernorm.weight" in result.stderr  # a field that the weights do not fit is an error, not a surprise
    result = run(recipe, tmp_path / "out", *flags)
    assert "Step 2: encoder tokens have norm" in result.stderr and "raise --shortcut_decay" in result.stderr
    ours = AutoModelForPreTraining.from_pretrained(tmp_path / "out")
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[name]), name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_public_checkpoint_goes_on_with_decay(recipe, tmp_path):
    """At a learning rate of 0 the saved network is the stock one in decayed form; it resumes; wrong flags are one sentence."""
    sizes = {name: value for name, value in RECIPE["fields"].items() if name != "hidden_dropout_prob"}
    theirs = ViTMAEForPreTraining(ViTMAEConfig(**sizes)).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    flags = ["--init_from", tmp_path / "theirs", "--shortcut_decay", 0.6, "--keep_function", "true"]
    run(recipe, tmp_path / "out", *flags, "--max_train_steps", 2, "--base_learning_rate", 0)
    ours = AutoModelForPreTraining.from_pretrained(tmp_path / "out").eval()
    assert ours.config.shortcut_decay == 0.6 and len(ours.decoder.skips) > 0
    images, noise = torch.randn(2, 1, 16, 16), torch.rand(2, 16)
    with torch.no_grad():
        torch.testing.assert_close(
            ours(images, noise=noise).logits, theirs(images, noise=noise).logits, rtol=1e-4, atol=1e-4
        )
    assert json.loads((tmp_path / "out" / "results.json").read_text())["kept_function"] is True
    for wrong, sentence in (
        (["--init_from", tmp_path / "theirs"], "--keep_function needs --init_from and --shortcut_decay above 0"),
        ([*flags[:4], "--decay_warmup", 0.5], "begins with the whole decay"),
        ([*flags[:4], "--set", "hidden_size=64"], "cannot be kept with another architecture"),
    ):
        refused = run(recipe, tmp_path / "wrong", *wrong, "--keep_function", "true", code=2)
        assert sentence in refused.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_compiled_checkpointed_and_in_half_precision(recipe, tmp_path):
    """What only makes it faster or smaller leaves the same files behind, and resumes."""
    shared = ["--set", "hidden_dropout_prob=0.0", "--decay_warmup", 0.5]
    for flags, variables in (
        (["--compile", "true"], {}),
        (["--gradient_checkpointing", "true"], {}),
        (["--mixed_precision", "bf16"], {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}),
    ):
        output = tmp_path / flags[0].strip("-")
        # One thread: those of compiled code add up gradients in whatever order they come, resumed or not.
        flags = [*flags, *shared, "--cpu_threads", 1]
        run(recipe, output, *flags, environment=variables)
        whole = weights(output)
        assert AutoModel.from_pretrained(output).num_parameters() > 0
        (output / "results.json").unlink()
        resumed = run(recipe, output, *flags, "--resume_from_checkpoint", "latest", environment=variables)
        assert "resumed at step 10" in resumed.stdout
        assert all(torch.equal(tensor, whole[name]) for name, tensor in weights(output).items())
    run(recipe, tmp_path / "plain", *shared)
    expected = losses(tmp_path / "plain")
    for name, tolerance in (("compile", 1e-5), ("gradient_checkpointing", 1e-6), ("mixed_precision", 0.02)):
        measured = losses(tmp_path / name)
        assert all(abs(measured[step] - loss) < tolerance for step, loss in expected.items()), (
            name,
            measured,
            expected,
        )
