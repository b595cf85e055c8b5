"""Cards: the lines that show how to use a model run, and what they claim was measured."""

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
from hf_decayed.hub.cards import comparison_table, eval_results, samples_table, shortcuts_text, write_card
from hf_decayed.hub.publishing import PublishingError, check_card
from hf_decayed.hub.validation import sentence_numbers
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
    "command": "hf-decayed evaluate mae",
}


def write_folder(kind, folder):
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
    folder = write_folder(kind, tmp_path / "model")
    assert main(["card", str(folder), "--repo_id", "user/mine", "--license", "apache-2.0"]) == 0
    text = (folder / "README.md").read_text()
    assert str(tmp_path) not in text and "{{" not in text and "pin `revision`" in text
    assert "| kNN accuracy on held-out images | 57.5 % |" in text and "2 threads of a CPU" in text
    pictures = re.findall(r"!\[.+\]\((.+)\)", text)
    assert pictures == ["curves.png", "results/evaluation.png"]  # those that are there
    assert "arxiv.org/abs/2404.10947" in text and "| 57.5 % | 76.1 % | worse |" in text
    assert ModelCard.load(folder / "README.md").data.datasets == "zalando-datasets/fashion_mnist"
    for limit in ("not for contrastive", "0.4 or less trains unstably", "biases"):
        assert limit in text
    assert ("kNN: k = 20, cosine, temperature 0.07; rank: entropy;" in text) and "linear:" not in text
    lines = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1].replace("user/mine", str(folder))
    Image.fromarray(np.zeros((40, 30, 3), dtype=np.uint8)).save(tmp_path / "picture.png")
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(lines, names)
    assert "pooler_output" in names or "logits" in names or names["image"].size == (8, 8)

    check_card(folder)
    (result, *_) = [
        result
        for result in ModelCard.load(folder / "README.md").data.eval_results
        if "last.mean" in result.metric_name
    ]
    assert result.metric_value == 0.5751 and result.dataset_name == "fashion_mnist_subset"
    # Written again without a licence, the card keeps its own; a number that was not measured is refused.
    write_card(folder)
    assert ModelCard.load(folder / "README.md").data.license == "apache-2.0"
    (folder / "README.md").write_text((folder / "README.md").read_text().replace("57.5 %", "63.9 %"))
    with pytest.raises(PublishingError, match="says 63.9"):
        check_card(folder)


def test_a_card_has_the_words_of_its_author(tmp_path):
    folder = write_folder("autoencoder", tmp_path / "model")
    (folder / "about.md").write_text("Good for clothes.\n")
    text = write_card(folder).read_text()
    assert re.search(r"parameters\.\n\nGood for clothes\.\n\n## (Use|What it is good and bad at)\n", text)
    (folder / "about.md").write_text("Right in 91.2 % of the cases.\n")
    write_card(folder)
    with pytest.raises(PublishingError, match="says 91.2"):
        check_card(folder)


def test_no_card_for_a_model_of_another_package(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["ViTModel"]}))
    assert main(["card", str(tmp_path)]) == 2
    assert "holds no model or pipeline of this package (ViTModel)" in capsys.readouterr().err


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
def test_a_card_describes_the_shortcuts(config, words):
    assert words in shortcuts_text(config)


@pytest.mark.parametrize(
    "name, content, sentence",
    [
        ("results/evaluation.json", "{}", "was not written by `hf-decayed evaluate`"),
        (
            "results/evaluation.json",
            json.dumps({**EVALUATION, "rows": {}}),
            "was not written by `hf-decayed evaluate`",
        ),
        (
            "results/evaluation.json",
            json.dumps({**EVALUATION, "rows": {"last.mean": {"knn_accuracy": "high"}}}),
            "was not written by `hf-decayed evaluate`",
        ),
        ("results/evaluation.json", "[1]", "'evaluation.json' must hold an object with fields, got list"),
        ("results.json", "{", "'results.json' is not JSON"),
        ("model.safetensors", "cut", "'.*model.safetensors' cannot be read"),
        ("config.json", '{"architectures": ["DecayedViTMAEModel"]}', "holds no model or pipeline of this"),
        ("results.json", '{"command": "mae.py"}', "'results.json' has no 'dataset'"),
        ("results.json", '{"command": 3}', "'command' in 'results.json' must be text, got 3"),
        ("results.json", '{"dataset": "mine"}', "'dataset' in 'results.json' must be an object, got 'mine'"),
        ("results.json", '{"loss": "low"}', "'loss' in 'results.json' must be a number, got 'low'"),
        ("results.json", '{"command": "x", "dataset": {"name": 1}}', "'name' in 'results.json' must be text, got 1"),
        ("about.md", "\xe9", "'about.md' is not UTF-8 text"),
        ("README.md", "By hand.", "was not written by this command"),
    ],
)
def test_files_that_no_card_can_be_written_from_are_named(name, content, sentence, tmp_path, capsys):
    folder = write_folder("autoencoder", tmp_path / "model")
    (folder / name).write_text(content, encoding="latin-1")
    assert main(["card", str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(sentence, line)
    assert name == "README.md" or not (folder / "README.md").exists()
    if name == "README.md":
        assert main(["card", str(folder), "--overwrite"]) == main(["card", str(folder)]) == 0


@pytest.mark.parametrize("rows", [{"pixels": {"effective_rank": 3.4}}, {"blocks.0@0": {"effective_rank": 0.7}}])
def test_a_card_of_an_evaluation_without_accuracy(rows, tmp_path):
    """As `hf-decayed evaluate outputs/uvit --metrics rank` writes it: no cell is the best."""
    folder = write_folder("pipeline", tmp_path / "model")
    (folder / "results" / "evaluation.json").write_text(json.dumps({**EVALUATION, "rows": rows, "best": {}}))
    text = write_card(folder).read_text()
    assert f"| {next(iter(rows))} | {next(iter(rows.values()))['effective_rank']:.2f} |" in text


@pytest.mark.parametrize(
    "field, value",
    [
        ("residual_form", "none"),
        ("residual_form", 3),
        ("shortcut_schedule", "steep"),
        ("shortcut_schedule", ["linear"]),
    ],
)
def test_a_config_with_an_unknown_word_gets_one_sentence(field, value, tmp_path, capsys):
    folder = write_folder("autoencoder", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, field: value}))
    assert main(["card", str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"`{field}` in 'config.json' must be one of" in line


CLAIMS = [
    "Its accuracy is 0.912.",
    "It reaches an accuracy of 91 on held-out images.",
    "kNN: 91",
    "The Frechet distance falls to 12.",
    "accuracy=0.91",
    "It is 1.37 times as good.",
    "A rank of 5.4e-3.",
    "Right in 91.2 per cent of the cases.",
    "Its loss was about 0.111, which is little.",
    "It improves by -0.25 over the baseline.",
    "It scores .912 in the end.",
]
NO_CLAIMS = [
    "Trained with torch 2.13 and Python 3.11 on CUDA 12.4.",
    "Needs transformers>=5.18 and version 0.1.0 of the package, v1.2 or later.",
    "Licence: CC BY-NC 4.0, apache-2.0, GPL 3.0.",
    "It has 2.8 million parameters, 11.3 MB, 1.5B tokens, and images of 28 x 28 pixels.",
    "Its shortcut_decay is 0.6, the mask ratio 0.75.",  # in config.json
    "Published in 2026; the data set is from 2017.",
    "12 layers of width 96 in 3 epochs; accuracy on 1000 images was measured.",
    "Its kNN accuracy is 57.5 % (0.575), and the effective rank 0.67.",  # in results.json
    "The accuracy of `lr=0.12345` is unknown; see [here](https://example.com/0.998).",
    "Recall that 5 classes were left out.",
]


@pytest.mark.parametrize("sentence", CLAIMS)
def test_a_number_in_a_sentence_that_nobody_measured_is_refused(sentence, tmp_path):
    folder = write_folder("autoencoder", tmp_path / "model")
    (folder / "about.md").write_text(f"A good model. {sentence}\n")
    write_card(folder)
    with pytest.raises(PublishingError, match="The card says .*, which is in no results file"):
        check_card(folder)


@pytest.mark.parametrize("sentence", NO_CLAIMS)
def test_versions_years_sizes_and_settings_are_no_claims(sentence, tmp_path):
    folder = write_folder("autoencoder", tmp_path / "model")
    (folder / "about.md").write_text(f"A good model. {sentence}\n")
    write_card(folder)
    check_card(folder)


def test_a_setting_is_no_result(tmp_path):
    """The mask ratio is in the config; an accuracy of the same value is not in the results."""
    folder = write_folder("autoencoder", tmp_path / "model")
    (folder / "about.md").write_text("The mask ratio is 0.75.\n")
    write_card(folder)
    check_card(folder)
    (folder / "about.md").write_text("The accuracy is 0.75.\n")
    write_card(folder)
    with pytest.raises(PublishingError, match="says 0.75"):
        check_card(folder)


def test_numbers_in_code_are_not_read():
    assert list(sentence_numbers("```python\nx = 0.123\n```\n\n    run --lr 0.456\n\n<!-- 0.789 -->\n")) == []


@pytest.mark.parametrize(
    "rows, best, row",
    [
        (["pixels", "last.mean", "last.cls", "6.mean"], {}, "last.mean"),
        (["pixels", "0.mean", "0.cls", "9.mean", "10.mean", "10.cls"], {}, "10.mean"),
        (["pixels.patches", "0.patches", "1.patches"], {}, "1.patches"),
        (["b0@0", "b1@0", "pixels"], {"knn_accuracy": "b1@0"}, "b1@0"),
    ],
)
def test_the_row_that_stands_for_a_model(rows, best, row):
    values = {
        name: {"knn_accuracy": 0.3 if name.startswith("pixels") else 0.8 if name == row else 0.2} for name in rows
    }
    evaluation = {**EVALUATION, "rows": values, "best": best}
    assert "| 80.0 % | 30.0 % | better |" in comparison_table([evaluation])
    (result,) = eval_results(evaluation, "image-classification")
    assert result.metric_value == 0.8 and result.metric_name == f"knn accuracy, {row}"


def test_samples_are_compared_with_held_out_images():
    row = {"frechet_pixels": 2.0, "frechet_pixels_spread": 0.1, "precision": 0.5, "recall": 0.25}
    samples = {"rows": {"9 samples": row, "9 held-out images": {**row, "frechet_pixels": 0.5, "precision": 0.75}}}
    blocks = {"rows": {"block 1": {"linear_accuracy": 0.5}}}
    table = samples_table([blocks, samples])
    assert table.splitlines()[2:] == [
        "| fidelity: samples that lie among training images (precision) | 0.50 | 0.75 |",
        "| variety: training images that lie among samples (recall) | 0.25 | 0.25 |",
        "| distance to training images (Frechet, less is better) | 2.00 | 0.50 |",
    ]
    assert samples_table([blocks]) == "" and samples_table([{"rows": {"9 held-out images": row}}]) == ""
