"""What the README shows runs; its figures come from files; the code keeps its style."""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from conftest import TINY_SIZES
from test_conversion import timm_weights
from transformers import ViTMAEConfig, ViTMAEForPreTraining

from hf_decayed import DecayedViTMAEConfig
from hf_decayed.cli import main


ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def load_script(name):
    specification = importlib.util.spec_from_file_location(name, ROOT / "training" / f"{name}.py")
    script = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(script)
    return script


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_python_blocks_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), names)
        if "pooler_output" in block:
            assert names["outputs"].last_hidden_state.shape == (1, 65, 384)
            assert names["outputs"].pooler_output.shape == (1, 384)
    assert round(names["effective_decay"](12, 0.6), 4) == 0.0036
    assert round(names["suggest_shortcut_decay"](24), 3) == 0.777
    assert names["baseline"].config.shortcut_decay == 1.0


def test_training_commands_are_understood(monkeypatch):
    """Every `training/mae.py` line parses into a recipe and its overrides."""
    mae = load_script("mae")
    lines = [line for block in blocks("bash") for line in block.splitlines() if "training/mae.py" in line]
    assert len(lines) == 6
    for line in lines:
        options = mae.parse_arguments(shlex.split(line.split("training/mae.py")[1]))
        assert options.batch_size > 0


@pytest.mark.parametrize("recipe", sorted(path.stem for path in (ROOT / "training" / "recipes").glob("*.yaml")))
def test_every_recipe_describes_a_model(recipe):
    options = load_script("mae").parse_arguments(["--recipe", recipe])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = DecayedViTMAEConfig.from_size(options.size, **options.fields)
    assert config.norm_pix_loss and options.weight_decay == 0.05 and options.adam_beta2 == 0.95
    if recipe.startswith("imagenet"):
        assert (options.batch_size, options.num_train_epochs, options.base_learning_rate) == (1024, 800, 1.5e-4)


def test_conversion_commands_run(tmp_path, monkeypatch, capsys):
    """Every `hf-decayed` line, on small files of the names and kinds it speaks of."""
    monkeypatch.chdir(tmp_path)
    sizes = {"width": 384, "decoder_width": 512, "patch": 16, "grid": 2}
    torch.save({"model": timm_weights(2, 1, released=True, **sizes)}, "checkpoint-799.pth")
    torch.save({"model": timm_weights(2, 1, **sizes)}, "mae_pretrain_vit_base_full.pth")
    ViTMAEForPreTraining(ViTMAEConfig(**TINY_SIZES)).save_pretrained("path/to/vit-mae-base")
    lines = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("hf-decayed")]
    assert len(lines) == 4
    for line in lines:
        assert main(shlex.split(line)[1:]) == 0, capsys.readouterr().err
        assert "written to" in capsys.readouterr().out


def test_benchmark_table_is_the_one_in_the_results():
    benchmark = load_script("benchmark")
    shown = re.search(r"<!-- benchmark models -->\n(.*?)\n<!-- end -->", README, re.DOTALL)[1]
    assert shown == benchmark.render(json.loads((ROOT / "model_cards/results/benchmark_models.json").read_text()))


def test_benchmark_runs(tmp_path):
    command = [
        sys.executable,
        "training/benchmark.py",
        "models",
        "--sizes",
        "tiny",
        "--rounds",
        "1",
        "--batch_size",
        "4",
    ]
    result = subprocess.run([*command, "--output", tmp_path / "b.json"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "transformers ViTMAE" in result.stdout
    assert len(json.loads((tmp_path / "b.json").read_text())["tables"]) == 3


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]])
def test_style(command):
    ruff = pytest.importorskip("ruff")
    result = subprocess.run(
        [sys.executable, "-m", ruff.__name__, *command, "."], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout


def test_published_files_import_only_what_travels():
    for file in (ROOT / "hf_decayed" / "models").glob("*.py"):
        for line in file.read_text().splitlines():
            assert not re.match(r"\s*(from \. import|from \.\.|import hf_decayed|from hf_decayed)", line), (
                file.name,
                line,
            )
