"""`hf-decayed report`: norms against an oracle, models of all kinds, files, and sentences for wrong input."""

import json
import math
import warnings

import numpy as np
import pytest
import torch
from conftest import PRESETS, ROOT, TINY_SIZES, random_weights
from decay_families import FAMILIES, ShortcutOracle, build
from PIL import Image
from transformers import (
    GPT2Config,
    GPT2Model,
    ViTConfig,
    ViTImageProcessorPil,
    ViTMAEConfig,
    ViTMAEModel,
    ViTModel,
    ViTMSNConfig,
    ViTMSNModel,
)

from hf_decayed import (
    DecayedResNetConfig,
    DecayedResNetModel,
    DecayedViTMAEConfig,
    DecayedViTMAEModel,
    decay_shortcuts,
)
from hf_decayed.cli import main
from hf_decayed.data.sources import load_image_splits
from hf_decayed.evaluation.branch_norms import find_shortcuts, norm_encoder
from hf_decayed.evaluation.encoders import FeatureMetrics
from hf_decayed.evaluation.features import Extraction, transformer_encoder
from hf_decayed.evaluation.report import DepthMetrics, report_encoder, report_tables


CARDS = ROOT / "model_cards"
VIT_SIZES = {name: TINY_SIZES[name] for name in list(TINY_SIZES)[:6]}
IMAGE_FAMILIES = [name for name in list(FAMILIES)[: list(FAMILIES).index("DiT")] if name not in ("GPT-2", "Llama")]
FEW = ["--max_train_samples", "70", "--max_eval_samples", "40", "--dense_images", "20", "--cpu_threads", "1"]
FEW += ["--num_clusters", "5"]


def mean_norm(tokens):
    """Mean norm of tokens `(batch, number, dim)` or of the positions of a map `(batch, dim, height, width)`."""
    return tokens.norm(dim=1 if tokens.ndim == 4 else -1).flatten(1).mean(dim=1)


def all_norms(model, pixel_values):
    with torch.no_grad():
        norms = norm_encoder(model, find_shortcuts(model))(pixel_values, [])
    return [(norms[f"{number}.stream"], norms[f"{number}.branch"]) for number in range(len(norms) // 2)]


def build_encoder(name):
    """A model of a family without its head, and images for it."""
    model, inputs = build(name)
    return model if type(model).__name__.endswith("Model") else model.base_model, inputs["pixel_values"]


class NormOracle(ShortcutOracle):
    """Records the two operands of every addition of a plain model, which it decays without names of modules."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.norms = []

    def add(self, shortcut, branch):
        if self.alphas:
            self.norms.append((mean_norm(shortcut), mean_norm(branch)))
        return super().add(shortcut, branch)


@pytest.mark.parametrize("decay", [pytest.param(1.0, marks=pytest.mark.slow), 0.6])
@pytest.mark.parametrize("name", IMAGE_FAMILIES)
def test_norms_are_those_of_the_operands_of_the_additions(name, decay):
    """Readers and adders of a decayed model see scaled values: the norms must not."""
    plain, pixel_values = build_encoder(name)
    oracle = NormOracle(plain, FAMILIES[name], decay)
    run = transformer_encoder(plain, ["last.mean"])
    oracle.prepare(lambda: run(pixel_values, []))
    with torch.no_grad(), oracle:
        run(pixel_values, [])
    model, _ = build_encoder(name)
    if decay != 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # few layers decay little
            decay_shortcuts(model, decay)
    norms = all_norms(model, pixel_values)
    assert len(norms) == len(oracle.norms) >= 4
    for measured, expected in zip(norms, oracle.norms):
        for value, other in zip(measured, expected):
            torch.testing.assert_close(value.double(), other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["ViT", "Swin", "DINOv2"])
def test_keeping_the_function_keeps_the_ratios(name):
    """The same network in decayed form: streams and branches are smaller by the running product."""
    plain, pixel_values = build_encoder(name)
    decayed = decay_shortcuts(build_encoder(name)[0], 0.3, keep_function=True)
    alphas = [alpha for block in find_shortcuts(decayed).alphas for alpha in block]
    pairs = zip(alphas, all_norms(plain, pixel_values), all_norms(decayed, pixel_values))
    ratios = [
        (branch / stream, small / (alpha * stream_small)) for alpha, (stream, branch), (stream_small, small) in pairs
    ]
    assert len(set(alphas)) == len(ratios) > 3
    for expected, ratio in ratios:
        torch.testing.assert_close(ratio, expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("preset", ["default", "learned", "scale_both", "constant_mlp_only"])
def test_norms_of_our_encoder(preset, pixel_values):
    model = random_weights(DecayedViTMAEModel(PRESETS[preset](**TINY_SIZES))).eval()
    outputs = []
    for layer in model.layers:
        layer.attention.register_forward_hook(lambda module, args, output: outputs.append(output[0]))
        layer.mlp.register_forward_hook(lambda module, args, output: outputs.append(output))
    norms = all_norms(model, pixel_values)
    with torch.no_grad():
        states = model(pixel_values, output_hidden_states=True).hidden_states
    assert find_shortcuts(model).alphas == [list(pair) for pair in model.shortcut_alphas()]
    assert len(norms) == 8
    for (_, branch), output in zip(norms, outputs):
        torch.testing.assert_close(branch, model.layers[0].branch_scale * mean_norm(output), rtol=1e-4, atol=1e-4)
    for (stream, _), state in zip(norms[::2], states):
        torch.testing.assert_close(stream, mean_norm(state))


def test_norms_of_our_resnet():
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2]}
    model = DecayedResNetModel(DecayedResNetConfig(**sizes, shortcut_decay=0.5)).eval()
    outputs = {"shortcut": [], "layer": []}
    for name, module in model.named_modules():
        if name.startswith("encoder") and name.rpartition(".")[2] in outputs and not name.endswith("layers"):
            values = outputs[name.rpartition(".")[2]]
            module.register_forward_hook(lambda module, args, output, values=values: values.append(output.clone()))
    norms = all_norms(model, torch.randn(2, 3, 32, 32))
    assert find_shortcuts(model).alphas == [[alpha] for alpha in model.config.shortcut_alphas()]
    assert len(norms) == len(outputs["shortcut"]) == len(outputs["layer"]) == 4
    for (stream, branch), shortcut, layer in zip(norms, outputs["shortcut"], outputs["layer"]):
        torch.testing.assert_close((stream, branch), (mean_norm(shortcut), mean_norm(layer)))


def test_hooks_leave_no_trace(pixel_values):
    model = random_weights(ViTModel(ViTConfig(**VIT_SIZES))).eval()
    with torch.no_grad():
        before = model(pixel_values).last_hidden_state
        all_norms(model, pixel_values)
        assert torch.equal(model(pixel_values).last_hidden_state, before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.layers.modules())


@pytest.fixture(scope="module")
def splits():
    return load_image_splits("bundled").take(70, 40)


@pytest.fixture(scope="module")
def processor():
    return ViTImageProcessorPil(size={"height": 32, "width": 32})


def small_report(model, processor, splits, folder, **settings):
    return report_encoder(model, processor, splits, 20, 5, extraction=Extraction(folder / "features"), **settings)


def stock_mae():
    torch.manual_seed(0)
    return random_weights(ViTMAEModel(ViTMAEConfig(**TINY_SIZES))).eval()


@pytest.fixture
def own_mae():
    model = DecayedViTMAEModel(DecayedViTMAEConfig.plain(**TINY_SIZES, shortcut_decay=0.6)).eval()
    model.load_state_dict(stock_mae().state_dict())
    return model


def test_our_model_and_a_decayed_stock_model_have_the_same_report(own_mae, processor, splits, tmp_path):
    own = small_report(own_mae, processor, splits, tmp_path)
    stock = small_report(decay_shortcuts(stock_mae(), 0.6), processor, splits, tmp_path)
    assert own["effective_decay"] == pytest.approx(own_mae.config.effective_decay())
    assert stock["effective_decay"] == pytest.approx(own["effective_decay"])
    assert [row["branch"] for row in own["additions"]] == ["attention", "mlp"] * 4
    for row, other in zip(own["additions"], stock["additions"]):
        for name in set(row) - {"branch"}:
            assert row[name] == pytest.approx(other[name], rel=1e-4)
    for number, row in enumerate(own["additions"]):
        assert row["running_product"] == pytest.approx(
            math.prod(row["alpha"] for row in own["additions"][: number + 1])
        )
        assert row["ratio"] == pytest.approx(row["branch_norm"] / (row["alpha"] * row["stream_norm"]))
    assert list(own["rows"]) == ["pixels", "0", "1", "2", "3", "4"]
    for depth, row in own["rows"].items():
        assert row == pytest.approx(stock["rows"][depth], rel=1e-3, abs=1e-3)


def test_cached_features_of_a_plain_model_are_not_those_of_a_decayed_one(processor, splits, tmp_path):
    """Both have the same weights and config; the fingerprint knows `decay_shortcuts`."""
    plain = small_report(stock_mae(), processor, splits, tmp_path)
    decayed = small_report(decay_shortcuts(stock_mae(), 0.3), processor, splits, tmp_path)
    assert plain["model_fingerprint"] != decayed["model_fingerprint"]
    ranks = [[report["rows"][str(depth)]["effective_rank"] for depth in range(1, 5)] for report in (plain, decayed)]
    assert all(first != second for first, second in zip(*ranks))
    assert plain["effective_decay"] == 1.0 and all(row["running_product"] == 1 for row in plain["additions"])


def test_an_unknown_family_is_reported_without_branches(processor, splits, tmp_path):
    report = small_report(ViTMSNModel(ViTMSNConfig(**VIT_SIZES)), processor, splits, tmp_path)
    assert report["additions"] == [] and report["effective_decay"] is None
    assert len(report["notes"]) == 1 and "ViTMSNModel" in report["notes"][0]
    expected = {"effective_rank", "knn_accuracy", "cluster_miou", "position_accuracy"}
    assert expected <= set(report["rows"]["4"])


def test_whitening_needs_two_images_for_every_dimension():
    train, test = torch.randn(64, 32), torch.randn(20, 32)
    labels = torch.arange(64) % 2
    metrics = DepthMetrics(("knn", "knn_whitened"), k=3)
    expected = FeatureMetrics(("knn", "knn_whitened"), k=3).compute(train, labels, test, labels[:20])
    assert metrics.compute(train, labels, test, labels[:20]) == expected and len(expected) == 2
    assert list(metrics.compute(train[1:], labels[1:], test, labels[:20])) == ["knn_accuracy"]


def test_changing_grids_have_no_what_and_where(processor, splits, tmp_path):
    model = DecayedResNetModel(DecayedResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2]))
    report = small_report(model.eval(), processor, splits, tmp_path)
    assert len(report["notes"]) == 1 and "What and where" in report["notes"][0]
    assert {row["branch"] for row in report["additions"]} == {"convolution"}
    assert "knn_accuracy" in report["rows"]["2"] and "position_accuracy" not in report["rows"]["2"]
    assert report["depth_unit"] == "stage" and "| stage 2 |" in report_tables(report)


@pytest.fixture
def checkpoint(processor, tmp_path):
    """Folder of a stock ViT."""
    random_weights(ViTModel(ViTConfig(**VIT_SIZES))).save_pretrained(tmp_path / "vit")
    processor.save_pretrained(tmp_path / "vit")
    return tmp_path / "vit"


def run_report(*flags, capsys, folder, code=0):
    flags = [*map(str, flags), *FEW, "--features_dir", str(folder / "features"), "--output", str(folder / "report")]
    capsys.readouterr()
    assert main(["report", *flags]) == code
    printed = capsys.readouterr()
    return printed.out if code == 0 else printed.err.splitlines()[-1]


def test_the_command_writes_numbers_tables_and_a_picture(checkpoint, tmp_path, capsys):
    printed = run_report(checkpoint, "--shortcut_decay", "auto", capsys=capsys, folder=tmp_path)
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert report["model"] == "vit" and len(report["additions"]) == 8 and len(report["rows"]) == 6
    assert report["additions"][-1]["alpha"] == pytest.approx(report["shortcut_decay"])
    assert report["effective_decay"] == pytest.approx(3e-3, rel=1e-2) and "product of all alphas: 0.003." in printed
    assert "below 0.45" in printed  # the warning of `decay_shortcuts`
    assert str(tmp_path) not in json.dumps({**report, "command": ""})
    text = (tmp_path / "report" / "report.md").read_text()
    for words in ("| layer 4 mlp | ", "| layer 4 | ", "kNN accuracy is highest at layer"):
        assert words in printed and words in text
    assert "report.png" in text
    with Image.open(tmp_path / "report" / "report.png") as picture:
        assert np.asarray(picture.convert("L")).std() > 10


def test_keep_function_reports_the_features_of_the_stock_model(checkpoint, tmp_path, capsys):
    stock, decayed = (
        (
            run_report(checkpoint, *flags, capsys=capsys, folder=tmp_path),
            json.loads((tmp_path / "report" / "report.json").read_text()),
        )
        for flags in ([], ["--shortcut_decay", "0.5", "--keep_function"])
    )
    assert "No shortcut is decayed" in stock[0] and "No shortcut is decayed" not in decayed[0]
    assert stock[1]["shortcut_decay"] is None and decayed[1]["shortcut_decay"] == 0.5
    for row, other in zip(stock[1]["additions"], decayed[1]["additions"]):
        assert row["ratio"] == pytest.approx(other["ratio"], rel=1e-3)
    ranks = [report["rows"]["4"]["effective_rank"] for _, report in (stock, decayed)]
    assert ranks[0] == pytest.approx(ranks[1], rel=1e-3)


def test_our_checkpoint_has_its_own_alphas(own_mae, tmp_path, capsys):
    own_mae.save_pretrained(tmp_path / "mae")
    printed = run_report(tmp_path / "mae", capsys=capsys, folder=tmp_path)
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    alphas = [alpha for pair in own_mae.config.shortcut_alphas() for alpha in pair]
    assert [row["alpha"] for row in report["additions"]] == pytest.approx(alphas)
    assert (
        report["shortcut_decay"] == 0.6
        and f"product of all alphas: {own_mae.config.effective_decay():.2g}." in printed
    )


def test_images_without_labels_and_masks(checkpoint, tmp_path, capsys):
    (tmp_path / "photos").mkdir()
    for number in range(40):
        pixels = np.random.default_rng(number).integers(0, 255, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{number}.png")
    printed = run_report(checkpoint, "--dataset_path", tmp_path / "photos", capsys=capsys, folder=tmp_path)
    assert "no label column" in printed and "no masks" in printed and "kNN accuracy is highest" not in printed
    row = json.loads((tmp_path / "report" / "report.json").read_text())["rows"]["4"]
    assert {"effective_rank", "position_accuracy"} <= set(row) and not {"knn_accuracy", "cluster_miou"} & set(row)


def test_wrong_input_gets_one_sentence(checkpoint, tmp_path, capsys):
    def error(*flags):
        return run_report(*flags, capsys=capsys, folder=tmp_path, code=2)

    (tmp_path / "empty").mkdir()
    GPT2Model(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=20)).save_pretrained(tmp_path / "gpt2")
    assert "neither a local folder nor a repository" in error("nobody/nothing")
    assert "encoder of images" in error(tmp_path / "gpt2") and "input_ids" in error(tmp_path / "gpt2")
    assert "hf-decayed evaluate" in error(next(CARDS.glob("decayed-uvit-*")))
    assert "no config.json" in error(tmp_path / "empty")
    assert "is decayed already" in error(next(CARDS.glob("decayed-mae-*")), "--shortcut_decay", "0.5")
    assert "needs --shortcut_decay" in error(checkpoint, "--keep_function")
    assert "above 0" in error(checkpoint, "--shortcut_decay", "0")
    assert "photos" in error(checkpoint, "--dataset_path", tmp_path / "photos")
    assert not (tmp_path / "report").exists()
    (checkpoint / "preprocessor_config.json").unlink()
    assert "preprocessor_config.json" in error(checkpoint)


def test_an_unknown_family_is_not_decayed(processor, tmp_path, capsys):
    ViTMSNModel(ViTMSNConfig(**VIT_SIZES)).save_pretrained(tmp_path / "msn")
    processor.save_pretrained(tmp_path / "msn")
    sentence = run_report(tmp_path / "msn", "--shortcut_decay", "0.5", capsys=capsys, folder=tmp_path, code=2)
    assert "ViTMSNModel has no blocks of a known family" in sentence
