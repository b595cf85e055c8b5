"""What the README shows runs; its figures come from files; the code keeps its style."""

import json
import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import mae
import nested
import numpy as np
import pytest
import resnet
import sit
import sweep
import torch
import uvit
from conftest import TINY_SIZES
from diffusers import DPMSolverMultistepScheduler
from PIL import Image
from sweep_tables import effect_table, format_tables, seed_table
from test_conversion import sit_weights, timm_weights, uvit_weights
from timing import render
from transformers import AutoModel, ViTMAEConfig, ViTMAEForPreTraining

from hf_decayed import (
    DecayedResNetConfig,
    DecayedSiTTransformer2DModel,
    DecayedUViT2DModel,
    DecayedUViTPipeline,
    DecayedViTMAEConfig,
    DecayedViTMAEForPreTraining,
    NestedUViT2DModel,
)
from hf_decayed.cli import main


ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


COMMAND_PAGES = ["quick_start", "diffusion", "evaluation", "publishing"]


def blocks(language, text=README):
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_python_blocks_run_alone(tmp_path, monkeypatch):
    """Each as a reader would paste it, in a clone."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model_cards").symlink_to(ROOT / "model_cards")
    for block in blocks("python"):
        names = {}
        exec(compile(block, "README.md", "exec"), names)
        if "pooler_output" in block:
            assert names["outputs"].last_hidden_state.shape == (1, 50, 96)
            assert names["outputs"].pooler_output.shape == (1, 96)
        if "pullover" in block:
            assert names["image"].size == (28, 28) and Path("pullover.png").exists()
        if "decay_shortcuts" in block:
            assert type(names["stock"]).__name__ == "ViTModel"


@pytest.mark.parametrize("page", ["any_model", "method", "migration", "what_and_where"])
def test_pages_run(page, tmp_path, monkeypatch):
    """Python blocks run, and lines that call a script or a command are understood."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model_cards").symlink_to(ROOT / "model_cards")
    text = (ROOT / "docs" / f"{page}.md").read_text()
    names = {}
    for block in blocks("python", text):
        exec(compile(block, page, "exec"), names)
    if page == "method":
        assert round(names["effective_decay"](12, 0.6), 4) == 0.0036
        decays = [round(names["suggest_shortcut_decay"](layers), 2) for layers in (8, 12, 24, 32)]
        assert str(decays) in text
    scripts = {"mae": mae, "uvit": uvit, "sit": sit}
    commands = re.findall(r"^    accelerate launch training/(\w+)\.py(.*)$", text, re.MULTILINE)
    assert bool(commands) == (page in ("any_model", "method"))
    for script, flags in commands:
        assert scripts[script].parse_arguments(shlex.split(flags))


@pytest.mark.slow
@pytest.mark.parametrize("notebook", sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_run(notebook, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model_cards").symlink_to(ROOT / "model_cards")
    names = {}
    for cell in json.loads(notebook.read_text())["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"]  # results are for readers to compute; they would grow old here
            exec(compile("".join(cell["source"]), notebook.stem, "exec"), names)


def test_training_commands_are_understood(tmp_path, monkeypatch):
    """Every line that calls a script parses; the recipe for photos follows from the photos."""
    monkeypatch.chdir(tmp_path)
    Path("path/to/photos").mkdir(parents=True)
    for number in range(20):
        Image.new("RGB", (640, 480), (number, 90, 200)).save(f"path/to/photos/{number}.jpg")
    lines = [match for block in blocks("bash") for match in re.findall(r"training/(\w+)\.py(.*)", block)]
    assert [script for script, _ in lines] == ["mae", "mae"]
    for _, flags in lines:
        assert mae.parse_arguments(shlex.split(flags))


@pytest.mark.parametrize(
    "recipe", sorted(path.stem for path in (ROOT / "training" / "recipes" / "mae").glob("*.yaml"))
)
def test_every_recipe_describes_a_model(recipe):
    options = mae.parse_arguments(["--recipe", recipe])[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = DecayedViTMAEConfig.from_size(options.size, **options.fields)
    assert config.norm_pix_loss and options.weight_decay == 0.05 and options.adam_beta2 == 0.95
    if recipe.startswith("imagenet"):
        assert (options.batch_size, options.num_train_epochs, options.base_learning_rate) == (1024, 800, 1.5e-4)


@pytest.mark.parametrize("script", [uvit, sit])
def test_every_recipe_describes_a_diffusion_model(script):
    for path in (ROOT / "training" / "recipes" / script.__name__).glob("*.yaml"):
        options, _ = script.parse_arguments(["--recipe", path.stem])
        model_class = DecayedUViT2DModel if script is uvit else DecayedSiTTransformer2DModel
        with torch.device("meta"):
            model = model_class.from_size(options.size, sample_size=options.image_size, **options.fields)
        assert 1e-4 < model.effective_decay() < 0.3


@pytest.mark.parametrize(
    "grid", sorted(path.stem for path in (ROOT / "training" / "recipes" / "sweeps").glob("*.yaml"))
)
def test_every_grid_describes_models(grid):
    _, content = sweep.parse_arguments([grid])
    runs = sweep.expand(content, {})
    assert len({run["key"] for run in runs}) == len({run["folder"] for run in runs}) == len(runs) > 2
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`shortcut_decay=")
        for run in runs:
            if run["script"] == "resnet":
                options, _ = resnet.parse_arguments(sweep.as_flags(run))
                DecayedResNetConfig.from_num_blocks(options.num_blocks, **options.fields)
                continue
            if run["script"] == "uvit":
                options, _ = uvit.parse_arguments(sweep.as_flags(run))
                DecayedUViT2DModel.from_size(options.size, **{**options.fields, "sample_size": options.image_size})
                continue
            if run["script"] == "sit":
                options, _ = sit.parse_arguments(sweep.as_flags(run))
                size = f"{options.size}/{options.patch_size}"
                DecayedSiTTransformer2DModel.from_size(size, **{**options.fields, "sample_size": options.image_size})
                continue
            if run["script"] == "nested":
                options, _ = nested.parse_arguments(sweep.as_flags(run))
                assert options.encoder == "random_projection" or (ROOT / options.encoder / "config.json").exists()
                fields = {**options.fields, "sample_size": options.image_size}
                NestedUViT2DModel.from_size(options.size, **fields, condition_levels=options.hierarchy)
                continue
            options, _ = mae.parse_arguments(sweep.as_flags(run))
            make = DecayedViTMAEConfig.plain if options.preset == "plain" else DecayedViTMAEConfig.from_size
            make(options.size, **options.fields)


def test_commands_run(tmp_path, monkeypatch, capsys):
    """Every `hf-decayed` line, on small files of the names and kinds it speaks of."""
    monkeypatch.chdir(tmp_path)
    sizes = {"width": 384, "decoder_width": 512, "patch": 16, "grid": 2}
    torch.save({"model": timm_weights(2, 1, released=True, **sizes)}, "checkpoint-799.pth")
    torch.save({"model": timm_weights(2, 1, **sizes)}, "mae_pretrain_vit_base_full.pth")
    ViTMAEForPreTraining(ViTMAEConfig(**TINY_SIZES)).save_pretrained("path/to/vit-mae-base")
    torch.save(uvit_weights(in_channels=4, hidden_size=512, num_attention_heads=8)[1], "imagenet256_uvit_large.pth")
    torch.save(sit_weights(False, hidden_size=384, num_attention_heads=6)[1], "SiT-XL-2-256x256.pt")
    torch.save({"ema": sit_weights(True, hidden_size=384, num_attention_heads=6)[1]}, "0400000.pt")
    network = DecayedUViT2DModel(sample_size=8, hidden_size=32, num_layers=2, num_attention_heads=2)
    DecayedUViTPipeline(network, DPMSolverMultistepScheduler()).save_pretrained("outputs/uvit")
    texts = [*((ROOT / "docs" / f"{page}.md").read_text() for page in COMMAND_PAGES), README]
    lines = [line for text in texts for block in blocks("bash", text) for line in block.splitlines()]
    # test_features.py, test_generation.py and test_report.py run these; test_docs.py parses them.
    others = ("hf-decayed evaluate", "hf-decayed report")
    lines = [line for line in lines if line.startswith("hf-decayed") and not line.startswith(others)]
    assert {line.split()[1] for line in lines} == {"card", "convert", "publish", "sample", "segment"}
    model = DecayedViTMAEForPreTraining(DecayedViTMAEConfig(**TINY_SIZES))
    model.save_pretrained("outputs/mae")
    AutoModel.from_config(model.config).save_pretrained("facebook/dinov2-base")
    Image.new("RGB", (40, 30), "orange").save("photo.jpg")
    expected = {
        "segment": "1 image by 2 models",
        "convert": "written to",
        "card": "written: ",
        "sample": "36 samples",
        "publish": "nothing was pushed to user/decayed-mae",
    }
    for line in dict.fromkeys(lines):
        if line.startswith("hf-decayed publish") and "--dry_run" not in line:
            continue  # tests/test_publishing.py pushes
        assert main(shlex.split(line)[1:]) == 0, (line, capsys.readouterr().err)
        assert expected[line.split()[1]] in capsys.readouterr().out


def equivalence_table() -> str:
    """Losses and features of every run of the sweep, and how far its losses are from the decayed network's of that seed."""
    lines = (ROOT / "model_cards" / "results" / "equivalence" / "results.jsonl").read_text().splitlines()
    groups: dict[str, dict[int, dict]] = {}
    for record in map(json.loads, lines):
        groups.setdefault(record["name"], {})[record["seed"]] = record
    losses = {
        name: {
            seed: {point["step"]: point["loss"] for point in record["curve"] if "loss" in point}
            for seed, record in records.items()
        }
        for name, records in groups.items()
    }
    table = [
        "| network | loss, last 50 steps | mean difference of the losses to `decayed` | kNN (%) | effective rank | "
        "segmentation, mIoU (%) | position (%) |",
        "|---" * 7 + "|",
    ]
    for name, records in groups.items():
        cells: list[list[str]] = [[], [], [], [], [], []]
        for seed, record in records.items():
            own, reference = losses[name][seed], losses["decayed"][seed]
            features = record["evaluation"]["last.mean"]
            cells[0].append(f"{np.mean([loss for step, loss in own.items() if step > max(own) - 50]):.3f}")
            cells[1].append(f"{np.mean([abs(loss - reference[step]) for step, loss in own.items()]):.4f}")
            cells[2].append(f"{100 * features['knn_accuracy']:.1f}")
            cells[3].append(f"{features['effective_rank']:.2f}")
            cells[4].append(f"{100 * record['results']['cluster_miou']:.1f}")
            cells[5].append(f"{100 * record['results']['position_accuracy']:.1f}")
        cells[1] = ["-"] if name == "decayed" else cells[1]
        table.append(f"| {name} | {' | '.join(', '.join(values) for values in cells)} |")
    return "\n".join(table)


def test_the_page_on_the_method_has_the_numbers_of_the_sweep():
    page = (ROOT / "docs" / "method.md").read_text()
    assert re.search(r"<!-- equivalence -->\n(.*?)\n<!-- end -->", page, re.DOTALL)[1] == equivalence_table()


@pytest.mark.parametrize(
    "name",
    [
        "models",
        "decode_ratio",
        "decode_ratio_base",
        "images",
        "data",
        "training",
        "first_command",
        "eval",
        "diffusion",
        "sampling_uvit",
        "sampling_sit",
        "startup",
        "scaling",
        "processes",
        "decay",
        "structural_gan",
        "relighting",
        "nested",
        "photos",
    ],
)
def test_benchmark_table_is_the_one_in_the_results(name):
    page = (ROOT / "docs" / ("your_own_photos.md" if name == "photos" else "speed.md")).read_text()
    shown = re.search(rf"<!-- benchmark {name} -->\n(.*?)\n<!-- end -->", page, re.DOTALL)[1]
    assert shown == render(json.loads((ROOT / f"model_cards/results/benchmark_{name}.json").read_text()))


@pytest.mark.parametrize(
    "page, grid",
    [
        *(("small_scale", f"coloured{grid}") for grid in ("", "_long", "_map", "_tuning")),
        *(("small_scale", grid) for grid in ("textured", "grey", "bundled_decay", "resnet_rank")),
        ("speed", "coloured_decode_ratio"),
        *(("small_scale_cifar100", f"cifar100_{grid}") for grid in ("small_scale", "patch8", "levers", "long")),
    ],
)
def test_small_scale_table_is_the_one_in_the_results(page, grid):
    page, folder = (ROOT / f"docs/{page}.md").read_text(), ROOT / "model_cards/results/small_scale"
    shown = re.search(rf"<!-- table {grid} -->\n(.*?)\n<!-- end -->", page, re.DOTALL)[1]
    assert shown == format_tables(sweep.read_records(folder / f"{grid}.jsonl")).rstrip()
    for picture in re.findall(r"\.\./(model_cards/\S+\.png)", page):
        assert (ROOT / picture).stat().st_size > 5000


@pytest.mark.parametrize(
    "page, grids",
    [
        ("small_scale", {"coloured", "coloured_long", "coloured_longer", "coloured_tiny"}),
        ("small_diffusion", {"coloured_sit", "coloured_uvit"}),
    ],
)
def test_tables_of_effects_are_those_of_the_results(page, grids):
    text, folder = (ROOT / f"docs/{page}.md").read_text(), ROOT / "model_cards/results" / page
    shown = re.findall(r"<!-- effects (\w+): ([^\n]+?) / ([^\n]+?) -->\n(.*?)\n<!-- end -->", text, re.DOTALL)
    assert {grid for grid, *_ in shown} == grids
    for grid, run, baseline, table in shown:
        assert table == effect_table(sweep.read_records(folder / f"{grid}.jsonl"), run, baseline)


def test_table_of_starts_is_the_one_in_the_results():
    page, records = (
        (ROOT / "docs/small_scale.md").read_text(),
        ROOT / "model_cards/results/small_scale/coloured_fork.jsonl",
    )
    shown = re.search(r"<!-- seeds coloured_fork -->\n(.*?)\n<!-- end -->", page, re.DOTALL)[1]
    assert shown == seed_table(sweep.read_records(records))


@pytest.mark.parametrize("grid", ["cifar100_uvit", "coloured_sit", "coloured_uvit"])
def test_tables_of_decays_in_diffusion_models_are_those_of_the_results(grid):
    page = (ROOT / "docs/small_diffusion.md").read_text()
    shown = re.search(rf"<!-- table {grid} -->\n(.*?)\n<!-- end -->", page, re.DOTALL)[1]
    records = sweep.read_records(ROOT / f"model_cards/results/small_diffusion/{grid}.jsonl")
    assert shown == format_tables(records).rstrip()
    for picture in re.findall(r"\.\./(model_cards/\S+\.png)", page):
        assert (ROOT / picture).stat().st_size > 5000


def test_the_table_of_tiny_recipes_is_the_one_in_the_results():
    page = (ROOT / "docs/small_diffusion.md").read_text()
    shown = re.search(r"<!-- table tiny_recipes -->\n(.*?)\n<!-- end -->", page, re.DOTALL)[1].splitlines()[2:]
    records = (ROOT / "model_cards/results/small_diffusion/tiny_recipes.jsonl").read_text().splitlines()
    assert len(shown) == len(records)
    for line, record in zip(shown, map(json.loads, records)):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        distance = next(name for name in record if name.startswith("frechet_"))
        expected = [record[name] for name in ("script", "predicts", "patch_size", "batch_size")]
        expected += [f"{record['learning_rate']:g}", f"{record['shortcut_decay']:g}"]
        expected += ["yes" if record["zero_init_branches"] else "no", record["steps"], record["images_seen"]]
        expected += [f"{record['loss']:.3f}", f"{record[distance]:.2f}", distance.rpartition("_")[2]]
        assert cells == [str(value) for value in expected]


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
