"""Cards: what they show how to use can be used so, and what they claim was measured."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import TINY_SIZES, random_weights
from diffusers import DPMSolverMultistepScheduler
from huggingface_hub import ModelCard
from PIL import Image

from hf_decayed import (
    DecayedResNetConfig,
    DecayedResNetForImageClassification,
    DecayedViTMAEConfig,
    DecayedViTMAEForImageClassification,
    DecayedViTMAEForPreTraining,
)
from hf_decayed.cli import main
from hf_decayed.hub.cards import shortcuts_text, write_card
from hf_decayed.hub.publishing import PublishingError, check_card
from hf_decayed.models.modeling_decayed_vit_mae import image_processor
from hf_decayed.models.unet_decayed_uvit import DecayedUViT2DModel
from hf_decayed.pipelines.pipeline_decayed_uvit import DecayedUViTPipeline


RESULTS = {
    "knn_accuracy": 0.57512,
    "effective_rank": 0.6696,
    "loss": 0.60264,
    "steps": 450,
    "images_seen": 14400,
    "seconds": 163.3,
    "command": "accelerate launch training/mae.py",
    "dataset": {"name": "fashion_mnist_subset", "used": "9000 images in memory"},
    "seed": 0,
    "hardware": "2 threads of a CPU (x86_64)",
}
EVALUATION = {
    "rows": {
        "pixels": {"knn_accuracy": 0.761, "effective_rank": 3.4},
        "last.mean": {"knn_accuracy": 0.5751, "effective_rank": 0.6712},
    },
    "protocol": {
        "features": "whole images",
        "knn": {"k": 20, "similarity": "cosine", "temperature": 0.07},
        "linear": {"name": "ridge"},
        "rank": "entropy",
    },
    "protocol_hash": "0123456789abcdef",
    "dataset": {"name": "fashion_mnist_subset", "number": {"train": 9000, "test": 1000}},
    "command": "python training/evaluate.py mae",
}


def folder_of(kind, folder):
    grey = {**TINY_SIZES, "num_channels": 1}
    models = {
        "autoencoder": lambda: DecayedViTMAEForPreTraining(DecayedViTMAEConfig(**TINY_SIZES)),
        "grey autoencoder": lambda: DecayedViTMAEForPreTraining(DecayedViTMAEConfig(**grey)),
        "classifier": lambda: DecayedViTMAEForImageClassification(DecayedViTMAEConfig(**TINY_SIZES, num_labels=3)),
        "residual network": lambda: DecayedResNetForImageClassification(
            DecayedResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
        ),
    }
    if kind in models:
        random_weights(models[kind]()).save_pretrained(folder)
        if kind == "residual network":  # as resnet.py leaves it
            image_processor(SimpleNamespace(image_size=32, num_channels=3)).save_pretrained(folder)
    else:
        sizes = {"sample_size": 8, "hidden_size": 32, "num_layers": 2, "num_attention_heads": 2}
        network = random_weights(DecayedUViT2DModel(**sizes, num_classes=2 if kind == "conditional pipeline" else 0))
        names = {0: "cat", 1: "dog's"} if kind == "conditional pipeline" else None
        DecayedUViTPipeline(network, DPMSolverMultistepScheduler(), id2label=names).save_pretrained(folder)
    (folder / "results.json").write_text(json.dumps({**RESULTS, "sampling": {"steps": 3, "guidance_scale": 2.0}}))
    (folder / "results").mkdir()
    (folder / "results" / "evaluation.json").write_text(json.dumps(EVALUATION))
    for picture in ("curves.png", "results/evaluation.png"):
        Image.new("L", (8, 8)).save(folder / picture)
    return folder


@pytest.mark.parametrize(
    "kind",
    ["autoencoder", "grey autoencoder", "classifier", "residual network", "pipeline", "conditional pipeline"],
)
def test_a_card_shows_what_can_be_done_and_what_was_measured(kind, tmp_path, monkeypatch):
    folder = folder_of(kind, tmp_path / "model")
    assert main(["card", str(folder), "--repo_id", "user/mine", "--license", "apache-2.0"]) == 0
    text = (folder / "README.md").read_text()
    assert str(tmp_path) not in text and "{{" not in text and "pin `revision`" in text
    assert "| kNN accuracy on held-out images | 57.5 % |" in text and "2 threads of a CPU" in text
    pictures = re.findall(r"!\[.+\]\((.+)\)", text)
    assert pictures == ["curves.png", "results/evaluation.png"]  # those that are there
    for limit in ("not for contrastive", "0.4 or less trains unstably", "biases"):
        assert limit in text
    assert ("kNN: k = 20, cosine, temperature 0.07; rank: entropy;" in text) and "linear:" not in text
    lines = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1].replace("user/mine", str(folder))
    Image.fromarray(np.zeros((40, 30, 3), dtype=np.uint8)).save(tmp_path / "picture.png")
    monkeypatch.chdir(tmp_path)
    found = {}
    exec(lines, found)
    assert "pooler_output" in found or "logits" in found or found["image"].size == (8, 8)

    check_card(folder)
    (result, *_) = [
        each for each in ModelCard.load(folder / "README.md").data.eval_results if "last.mean" in each.metric_name
    ]
    assert result.metric_value == 0.5751 and result.dataset_name == "fashion_mnist_subset"
    # Made again without one, it keeps the licence; and what was not measured is found out.
    write_card(folder)
    assert ModelCard.load(folder / "README.md").data.license == "apache-2.0"
    (folder / "README.md").write_text((folder / "README.md").read_text().replace("57.5 %", "63.9 %"))
    with pytest.raises(PublishingError, match="says 63.9"):
        check_card(folder)


def test_a_card_has_what_its_maker_says(tmp_path):
    folder = folder_of("autoencoder", tmp_path / "model")
    (folder / "about.md").write_text("Good for clothes.\n")
    text = write_card(folder).read_text()
    assert "parameters.\n\nGood for clothes.\n\n## Use" in text
    (folder / "about.md").write_text("Right in 91.2 % of the cases.\n")
    write_card(folder)
    with pytest.raises(PublishingError, match="says 91.2"):
        check_card(folder)


def test_no_card_for_what_is_not_ours(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["ViTModel"]}))
    assert main(["card", str(tmp_path)]) == 2
    assert "holds no model or pipeline of ours (ViTModel)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "config, words",
    [
        ({"shortcut_decay": 0.6}, "alpha falling linearly with depth, from 1 to 0.6"),
        ({"shortcut_decay": 0.6, "shortcut_schedule": "cosine"}, "alpha falling as a cosine"),
        ({"shortcut_decay": 0.6, "shortcut_schedule": "constant"}, "alpha 0.6 everywhere"),
        ({"shortcut_decay": 0.6, "shortcut_schedule": "learned"}, "that was learned"),
        ({"shortcut_decay": 0.6, "shortcut_scope": "mlp"}, "are decayed past the MLP"),
        ({"shortcut_decay": 1.0}, "are not decayed"),
        ({"shortcut_decay": 1.0, "residual_form": "scale_both"}, "`sqrt(0.5) * (x + f(x))`"),
    ],
)
def test_a_card_says_what_becomes_of_the_shortcuts(config, words):
    assert words in shortcuts_text(config)


@pytest.mark.parametrize(
    "name, content, sentence",
    [
        ("results/evaluation.json", "{}", "is nothing that training/evaluate.py wrote"),
        (
            "results/evaluation.json",
            json.dumps({**EVALUATION, "rows": {}}),
            "is nothing that training/evaluate.py wrote",
        ),
        ("results/evaluation.json", "[1]", "'evaluation.json' holds no fields, but list"),
        ("results.json", "{", "'results.json' is not JSON"),
        ("model.safetensors", "cut", "'.*model.safetensors' cannot be read"),
        ("config.json", '{"architectures": ["DecayedViTMAEModel"]}', "holds no model or pipeline of ours"),
        ("results.json", '{"command": "mae.py"}', "KeyError: 'dataset'"),
        ("README.md", "By hand.", "was not written by this command"),
    ],
)
def test_what_no_card_can_be_made_of_is_said(name, content, sentence, tmp_path, capsys):
    folder = folder_of("autoencoder", tmp_path / "model")
    (folder / name).write_text(content)
    assert main(["card", str(folder)]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert re.search(sentence, said)
    assert name == "README.md" or not (folder / "README.md").exists()
    if name == "README.md":
        assert main(["card", str(folder), "--overwrite"]) == main(["card", str(folder)]) == 0


@pytest.mark.parametrize("rows", [{"pixels": {"effective_rank": 3.4}}, {"blocks.0@0": {"effective_rank": 0.7}}])
def test_a_card_of_an_evaluation_without_accuracy(rows, tmp_path):
    """As `evaluate.py outputs/uvit --metrics rank` writes it: no cell is the best."""
    folder = folder_of("pipeline", tmp_path / "model")
    (folder / "results" / "evaluation.json").write_text(json.dumps({**EVALUATION, "rows": rows, "best": {}}))
    text = write_card(folder).read_text()
    assert f"| {next(iter(rows))} | {next(iter(rows.values()))['effective_rank']:.2f} |" in text
