"""The checkpoints in model_cards: whole, small, loadable by anybody as they are, and what their cards say is so."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModel

from hf_decayed import DecayedViTMAEModel
from hf_decayed.evaluation.tables import markdown_table
from hf_decayed.hub.publishing import code_modules, validate_staged


ROOT = Path(__file__).parents[1]
CARDS = ROOT / "model_cards"
CHECKPOINTS = sorted(path.parent.name for path in CARDS.glob("*/README.md") if path.parent.name != "space")
OURS = {path.name: path for folder in ("models", "pipelines") for path in (ROOT / "hf_decayed" / folder).glob("*.py")}
DATA = {"coloured": "coloured garments", "fashion-mnist": "Fashion-MNIST"}
USES = """
import sys
sys.modules["hf_decayed"] = None  # whoever loads these has no such package
import re, warnings
from pathlib import Path
for name in sys.argv[1:]:
    lines = re.search(r"```python\\n(.*?)```", Path("model_cards", name, "README.md").read_text(), re.DOTALL)[1]
    names = {}
    exec(lines, names)
    result = next(names[key] for key in ("pooler_output", "relit", "image") if key in names)
    print(name, tuple(result.shape) if hasattr(result, "shape") else result.size)
"""


def readme_table() -> str:
    """Of the autoencoders, features of the last layer and of its patches; of the generators, their samples."""
    lines = [
        "| autoencoder | kNN (%) | kNN, class token (%) | linear (%) | rank | segmentation (%) | position (%) |",
        "|---" * 7 + "|",
    ]
    for data, title in DATA.items():
        for name in [f"{kind}-mae-{data}" for kind in ("plain", "undecayed", "decayed")]:
            if name in CHECKPOINTS:
                rows, patches = (
                    json.loads((CARDS / name / "results" / f"{file}.json").read_text())["rows"]
                    for file in ("features", "patches")
                )
                cells = autoencoder_cells(rows["last.mean"], rows["last.cls"], patches["12.patches"])
                lines.append(f"| [{name}](model_cards/{name}) | {cells} |")
        lines.append(f"| raw pixels of {title} | {autoencoder_cells(rows['pixels'], {}, patches['pixels.patches'])} |")
    lines += ["", "| generator | Frechet distance | precision | recall |", "|---" * 4 + "|"]
    for name in [name for name in CHECKPOINTS if (CARDS / name / "results" / "samples.json").exists()]:
        rows = json.loads((CARDS / name / "results" / "samples.json").read_text())["rows"]
        own, held_out = rows
        lines.append(generator_row(f"[{name}](model_cards/{name})", rows[own]))
    return "\n".join([*lines, generator_row(held_out, rows[held_out])])


def generator_row(name: str, row: dict) -> str:
    distance = next(metric for metric in row if metric.startswith("frechet_"))
    cells = [f"{row[distance]:.3f} +- {row[distance + '_spread']:.3f}"]
    return f"| {name} | {' | '.join(cells + [f'{row[metric]:.2f}' for metric in ('precision', 'recall')])} |"


def autoencoder_cells(mean: dict, class_token: dict, patches: dict) -> str:
    accuracies = [mean["knn_accuracy"], class_token.get("knn_accuracy"), mean["linear_accuracy"]]
    cells = ["" if accuracy is None else f"{100 * accuracy:.1f}" for accuracy in accuracies]
    cells += [f"{mean['effective_rank']:.2f}"]
    cells += [f"{100 * patches[metric]:.1f}" for metric in ("cluster_miou", "position_accuracy")]
    return " | ".join(cells)


def test_the_readme_has_the_numbers_of_the_cards():
    shown = re.search(r"<!-- checkpoints -->\n(.*?)\n<!-- end -->", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    assert shown == readme_table()


def depth_table() -> str:
    """What and where at every layer of the plain and the decayed autoencoder of Fashion-MNIST."""
    metrics = {"cluster_miou": "segmentation", "patch_accuracy": "class", "position_accuracy": "position"}
    names = [f"{text}, {kind}" for text in metrics.values() for kind in ("plain", "decayed")]
    lines = ["| layer | " + " | ".join(names) + " |", "|---" * 7 + "|"]
    plain, decayed = (
        json.loads((CARDS / f"{kind}-mae-fashion-mnist" / "results" / "patches.json").read_text())["rows"]
        for kind in ("plain", "decayed")
    )
    for name in plain:
        cells = []
        for metric in metrics:
            for rows in (plain, decayed):
                spread = rows[name].get(f"{metric}_spread")
                cells.append(f"{100 * rows[name][metric]:.1f}" + (f" +- {100 * spread:.1f}" if spread else ""))
        lines.append(f"| {name.removesuffix('.patches')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_page_on_what_and_where_has_the_numbers_of_the_cards():
    page = (ROOT / "docs" / "what_and_where.md").read_text()
    assert re.search(r"<!-- depth -->\n(.*?)\n<!-- end -->", page, re.DOTALL)[1] == depth_table()
    graphs = json.loads((CARDS / "results" / "what_and_where" / "graphs.json").read_text())["rows"]
    assert re.search(r"<!-- graphs -->\n(.*?)\n<!-- end -->", page, re.DOTALL)[1] == markdown_table(graphs)
    for picture in re.findall(r"\.\./(model_cards/\S+\.png)", page):
        assert (ROOT / picture).stat().st_size > 5000


def test_the_readme_has_the_numbers_of_its_first_picture():
    numbers = []
    for kind in ("undecayed", "decayed"):
        folder = CARDS / f"{kind}-mae-coloured" / "results"
        class_token = json.loads((folder / "features.json").read_text())["rows"]["last.cls"]
        patches = json.loads((folder / "patches.json").read_text())["rows"]["12.patches"]
        numbers.append((class_token["knn_accuracy"], patches["cluster_miou"], patches["position_accuracy"]))
    (knn, miou, position), (decayed_knn, decayed_miou, decayed_position) = numbers
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"kNN accuracy of the class token rises from {100 * knn:.1f} to {100 * decayed_knn:.1f} %" in readme
    assert f"unsupervised segmentation from {100 * miou:.1f} to {100 * decayed_miou:.1f} % mean IoU" in readme
    assert f"position of {100 * decayed_position:.0f} % of the patches instead of {100 * position:.0f} %" in readme


def test_the_readme_has_the_numbers_of_the_gan():
    rows = json.loads((CARDS / "structural-gan-fashion-mnist" / "results" / "features.json").read_text())["rows"]
    own, pixels = (f"{100 * rows[name]['knn_accuracy']:.1f} %" for name in ("last.mean", "pixels"))
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"{own} kNN accuracy on the bundled images, where raw pixels have {pixels}" in readme


def test_there_are_plain_and_decayed_ones():
    assert {name.split("-", 1)[1] for name in CHECKPOINTS if name.startswith("plain-mae-")} == {
        name.split("-", 1)[1] for name in CHECKPOINTS if name.startswith("decayed-mae-")
    }
    assert {"decayed-mae-coloured", "decayed-mae-fashion-mnist", "decayed-uvit-fashion-mnist"} <= set(CHECKPOINTS)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_is_what_a_repository_may_hold(name):
    folder = CARDS / name
    files = [path for path in folder.rglob("*") if path.is_file()]
    stock = [path for path in files if "stock" in path.relative_to(folder).parts]  # a second form of the same network
    for part in (set(files) - set(stock), stock):
        assert sum(path.stat().st_size for path in part) <= 15e6
    assert (folder / "LICENSE").exists() and list(folder.rglob("*.safetensors"))
    for module in code_modules(folder):
        assert list(folder.rglob(f"{module}.py"))
    for path in folder.rglob("*.py"):  # who changes the package's code changes these too, or says why not
        assert path.read_text() == OURS[path.name].read_text(), f"{path} is not the package's: run `make fix-copies`"
    validate_staged(folder)  # numbers that no results file has, secrets, paths
    text = (folder / "README.md").read_text()
    for picture in re.findall(r"!\[.+\]\((.+)\)", text):
        assert (folder / picture).exists()


def test_all_checkpoints_are_small_together():
    assert sum(path.stat().st_size for name in CHECKPOINTS for path in (CARDS / name).rglob("*")) <= 110e6


def test_the_lines_of_the_cards_run_without_the_package_and_without_a_network(tmp_path):
    (tmp_path / "model_cards").symlink_to(CARDS)
    Image.fromarray(np.zeros((40, 30, 3), dtype=np.uint8)).save(tmp_path / "picture.png")
    Image.new("RGB", (64, 64), "orange").save(tmp_path / "reference.png")
    run = subprocess.run(
        [sys.executable, "-c", USES, *CHECKPOINTS],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    shapes = dict(line.split(" ", 1) for line in run.stdout.splitlines())
    assert list(shapes) == CHECKPOINTS
    for name, shape in shapes.items():
        parts = ("level_1", "generator")  # of a chain or a GAN, the network that draws images
        configs = sorted((CARDS / name).glob("**/config.json"), key=lambda path: path.parent.name not in parts)
        config = json.loads(configs[0].read_text())
        expected = (1, config["hidden_size"]) if "mae" in name else (config["sample_size"], config["sample_size"])
        expected = (30, 40) if name.startswith("relighting") else expected  # as large as the picture
        assert shape == str(expected)


def test_a_stock_folder_is_the_network_beside_it():
    """In this process, which trusts no code; the lines of the card name the folder."""
    folder = CARDS / "decayed-mae-fashion-mnist"
    assert (
        f'AutoModel.from_pretrained("model_cards/{folder.name}", subfolder="stock")'
        in (folder / "README.md").read_text()
    )
    stock = AutoModel.from_pretrained(folder, subfolder="stock")
    own = DecayedViTMAEModel.from_pretrained(folder)
    images = torch.randn(2, 1, 28, 28)
    with torch.no_grad():
        expected, tokens = own(images).last_hidden_state, stock(images).last_hidden_state
    assert type(stock).__module__.startswith("transformers.")
    assert (tokens - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_numbers_of_a_card_come_out_again(name, tmp_path):
    """By the commands that it gives."""
    for file in sorted((CARDS / name / "results").glob("*.json")):
        recorded = json.loads(file.read_text())
        words = ["-m", "hf_decayed.cli", *shlex.split(recorded["command"])[1:]]
        for flag, name in (("--output", "again.json"), ("--features_dir", "features"), ("--samples_dir", "samples")):
            words = [word for index, word in enumerate(words) if flag not in (word, words[index - 1])]
            words += [flag, str(tmp_path / name)]
        subprocess.run([sys.executable, *words], cwd=ROOT, check=True)
        again = json.loads((tmp_path / "again.json").read_text())
        assert again["protocol_hash"] == recorded["protocol_hash"]
        for row, measured in recorded["rows"].items():
            repeated = again["rows"][row]
            for metric, value in measured.items():
                if metric.endswith("_spread"):
                    continue  # of three clusterings, or of resamplings: itself as random as they are
                # Clusters and samples come out otherwise on another CPU, by as much as their spread says. Of a thousand images
                # one or two may fall to another side.
                spread = max(rows.get(f"{metric}_spread", 0.0) for rows in (measured, repeated))
                tolerance = pytest.approx(value, rel=0.01, abs=max(0.003, 3 * spread))
                assert repeated[metric] == tolerance, (row, metric)
