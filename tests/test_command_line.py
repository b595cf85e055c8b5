"""What people type: flags spelled either way, the nearest flag, defaults in help, `hf-decayed train` and `features`."""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet
import pytest
import torch
from conftest import ROOT, TINY_SIZES, random_weights
from PIL import Image
from safetensors import safe_open

from hf_decayed import DecayedViTMAEConfig, DecayedViTMAEModel, __version__, command_line
from hf_decayed.cli import main, training_scripts
from hf_decayed.command_line import OneLineParser, count_cores, set_cpu_threads, time_thread_counts
from hf_decayed.evaluation.arguments import QUICK_IMAGES, parse_arguments
from hf_decayed.evaluation.feature_files import load_named_images, write_file


def error_of(capsys, call, *arguments) -> str:
    with pytest.raises(SystemExit) as stopped:
        call(*arguments)
    lines = capsys.readouterr().err.strip().splitlines()
    assert stopped.value.code == 2 and len(lines) == 1
    return lines[0]


def test_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0 and capsys.readouterr().out == f"hf_decayed {__version__}\n"


def test_dashes_and_underscores_are_alike():
    parser = OneLineParser()
    parser.add_argument("--repo_id")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--set")
    assert parser.parse_args(["--repo-id", "a-b/c_d", "--dry-run"]) == parser.parse_args(
        ["--repo_id=a-b/c_d", "--dry-run"]
    )
    assert parser.parse_args(["--repo-id=--x-y"]).repo_id == "--x-y"


def test_a_wrong_flag_names_the_nearest(capsys):
    parser = OneLineParser(prog="mae.py")
    parser.add_argument("--base_learning_rate", type=float)
    assert "no argument --learning_rate; did you mean --base_learning_rate?" in error_of(
        capsys, parser.parse_args, ["--learning_rate", "1"]
    )
    assert "no argument --bananas (see" in error_of(capsys, parser.parse_args, ["--bananas"])
    sentence = error_of(capsys, main, ["publish", "folder", "--repo-id", "a/b", "--dryrun"])
    assert sentence.startswith("hf-decayed publish: there is no argument --dryrun; did you mean --dry_run?")


def test_help_tells_defaults(capsys):
    parser = OneLineParser()
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--steps", type=int, default=50, help="of the scheduler")
    parser.add_argument("--told", default=1, help="by default one")
    parser.add_argument("--nothing", help="a path")
    parser.add_argument("--hidden", default=3, help=argparse.SUPPRESS)
    text = " ".join(parser.format_help().split())
    assert "--seed SEED (default: 7)" in text and "of the scheduler (default: 50)" in text
    assert "by default one --nothing" in text and "a path" in text and text.count("(default") == 2
    assert parser.format_help().count("(default: 7)") == 1  # also when it is asked for twice


def test_train_knows_every_script(capsys):
    assert {"mae", "uvit", "sit", "resnet", "finetune", "linear_probe", "sweep"} <= set(training_scripts())
    assert not {"sweep_report", "sweep_tables"} & set(training_scripts())
    assert "argument SCRIPT: invalid choice: 'gpt' (choose from" in error_of(capsys, main, ["train", "gpt"])


def test_train_runs_a_script(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert "mae.py: " in error_of(capsys, main, ["train", "mae", "--batch-size", "0"])


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.get_num_threads
    torch.set_num_threads(before)


def test_threads_are_those_asked_for_or_the_faster(threads, monkeypatch):
    accelerator = SimpleNamespace(device=torch.device("cpu"), num_processes=1)
    monkeypatch.setattr(command_line, "count_cores", lambda: 2)
    for name in ("ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert set_cpu_threads(accelerator) == "2 threads (by OMP_NUM_THREADS)" and threads() == 2
    assert set_cpu_threads(accelerator, 1) == "1 thread (as asked for)" and threads() == 1
    monkeypatch.delenv("OMP_NUM_THREADS")
    for seconds, faster in (({1: 0.004, 2: 0.003}, 2), ({1: 0.004, 2: 0.02}, 1)):
        monkeypatch.setattr(command_line, "time_thread_counts", lambda counts, seconds=seconds: seconds)
        assert "by trial, 1: 4.0 ms, 2: " in set_cpu_threads(accelerator) and threads() == faster
    accelerator.num_processes = 2
    assert set_cpu_threads(accelerator) == "1 thread (the cores divided by the processes)"
    # A launcher sets the variable to 1 for its processes; what counts is what the launcher was started with.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    monkeypatch.setattr(os, "getppid", lambda: 0)
    assert command_line.threads_of_environment() is None


def test_the_trial_of_threads_draws_no_random_numbers(threads):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    assert set(time_thread_counts([1, 2], rounds=1)) == {1, 2} and torch.equal(torch.rand(3), expected)
    assert 1 <= count_cores() <= os.cpu_count()


@pytest.fixture
def photos(tmp_path):
    for number in range(5):
        for name in ("cats", "dogs"):
            (tmp_path / "photos" / name).mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng(number).integers(0, 256, (40, 50, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.png")
    return tmp_path / "photos"


def test_features_of_a_folder(photos, tmp_path, capsys):
    random_weights(DecayedViTMAEModel(DecayedViTMAEConfig(**TINY_SIZES))).save_pretrained(tmp_path / "model")
    command = ["features", str(photos), "--model", str(tmp_path / "model"), "--cpu_threads", "1", "--output"]
    assert main([*command, str(tmp_path / "features.safetensors")]) == 0
    assert "last.mean of 10 images, 32 numbers each" in capsys.readouterr().out
    with safe_open(tmp_path / "features.safetensors", "pt") as file:
        names, classes = (json.loads(file.metadata()[name]) for name in ("names", "classes"))
        features, labels = file.get_tensor("features"), file.get_tensor("labels")
    assert classes == ["cats", "dogs"] and names == [f"{name}/{i}.png" for name in classes for i in range(5)]
    assert labels.tolist() == [0] * 5 + [1] * 5 and features.shape == (10, 32)
    assert features[:5].equal(features[5:])  # the same images under another name
    (photos / "cats" / "broken.png").write_bytes(b"not an image")
    assert main([*command, str(tmp_path / "features.parquet"), "--feature", "2.cls"]) == 2
    assert "'broken.png' (row 5) cannot be decoded" in capsys.readouterr().err
    assert main([*command, str(tmp_path / "features.parquet"), "--feature", "2.cls", "--on-bad-image", "skip"]) == 0
    assert "2.cls of 10 images, 1 skipped" in capsys.readouterr().out
    rows = pyarrow.parquet.read_table(tmp_path / "features.parquet").to_pylist()
    assert [row["name"] for row in rows] == names and rows[9]["label"] == "dogs" and len(rows[0]["feature"]) == 32
    assert main([*command, str(tmp_path / "features.csv")]) == 2
    assert "--output must end in .safetensors or .parquet, got 'features.csv'" in capsys.readouterr().err


def test_features_of_images_with_masks_or_without_some_labels(photos, tmp_path, monkeypatch):
    (tmp_path / "seg").mkdir()
    for folder in ("images", "masks"):
        shutil.copytree(photos / "cats", tmp_path / "seg" / folder)
    monkeypatch.chdir(tmp_path)
    assert load_named_images(Path("seg"))[1] == [f"images/{number}.png" for number in range(5)]
    for name in ("cats", "dogs"):
        (tmp_path / "links" / name).mkdir(parents=True)
        (tmp_path / "links" / name / "0.png").symlink_to(photos / name / "0.png")
    assert load_named_images(Path("links"))[1] == ["cats/0.png", "dogs/0.png"]
    classes = ["cat", "dog"]
    write_file(tmp_path / "features.parquet", torch.zeros(2, 3), torch.tensor([1, -1]), ["a", "b"], classes, {})
    rows = pyarrow.parquet.read_table(tmp_path / "features.parquet").to_pylist()
    assert [row["label"] for row in rows] == ["dog", None]


def test_an_error_is_repeated_below_the_traceback_of_a_launcher():
    errors = (
        f"runpy.run_path({str(ROOT / 'hf_decayed' / 'errors.py')!r})"  # alone: the package takes seconds to import
    )
    script = f"import runpy; {errors}['print_error']('mae.py', ValueError('wrong')); raise SystemExit(2)"
    launcher = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
    command = [sys.executable, "-c", launcher, script]
    environment = {**os.environ, "ACCELERATE_MIXED_PRECISION": "no"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = result.stderr.strip().splitlines()
    assert result.returncode == 1 and lines[0] == lines[-1] == "mae.py: wrong" and "CalledProcessError" in lines[-2]
    environment["RANK"] = "1"  # the first process repeats it for all
    assert (
        subprocess.run(command, env=environment, capture_output=True, text=True).stderr.count("mae.py: wrong\n") == 1
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "launch, flags, sentence",
    [
        (["--cpu"], ["--dataset_path", "absent"], "mae.py: There is nothing at 'absent'."),
        (["--cpu"], ["--batch_size", "0"], "mae.py: argument --batch_size: must be at least 1, got 0 (see "),
        (
            ["--multi_gpu", "--num_processes", "2"],
            ["--dataset_path", "absent"],
            "mae.py: There is nothing at 'absent'.",
        ),
    ],
    ids=["path", "flag", "two processes"],
)
def test_errors_under_accelerate_end_with_our_sentence(launch, flags, sentence, tmp_path):
    command = [sys.executable, "-m", "accelerate.commands.launch", *launch, str(ROOT / "training" / "mae.py"), *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 1 and "Traceback" in result.stderr
    assert result.stderr.strip().splitlines()[-1].startswith(sentence)


def test_a_first_look_evaluates_a_part_of_the_bundled_images(tmp_path):
    DecayedViTMAEModel(DecayedViTMAEConfig(**TINY_SIZES)).save_pretrained(tmp_path)
    first_look = parse_arguments([str(tmp_path)])
    assert (first_look.max_train_samples, first_look.max_eval_samples) == QUICK_IMAGES
    whole = [["--features", "last.mean"], ["--metrics", "knn"], ["--dataset_path", "photos"]]
    for flags in whole:
        options = parse_arguments([str(tmp_path), *flags])
        assert options.max_train_samples is None and options.max_eval_samples is None
    options = parse_arguments([str(tmp_path), "--max_eval_samples", "50"])
    assert options.max_train_samples is None and options.max_eval_samples == 50
