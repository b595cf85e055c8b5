"""Stock models: classes of transformers that compute what ours compute, also from a published folder without our code."""

import json
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, TINY_SIZES, random_weights
from transformers import (
    AutoModel,
    BeitForImageClassification,
    BeitModel,
    ViTForImageClassification,
    ViTMAEForPreTraining,
    ViTModel,
)

from hf_decayed import (
    DecayedViTMAEConfig,
    DecayedViTMAEForImageClassification,
    DecayedViTMAEForPreTraining,
    DecayedViTMAEModel,
    stock_model,
)
from hf_decayed.cli import main
from hf_decayed.errors import UserError
from hf_decayed.hub.publishing import publish
from hf_decayed.hub.stock import add_to_card


EXACT = {"layer_norm_eps": 1e-14}  # the eps of the norms is what folding approximates


def tokens(model, pixel_values):
    with torch.no_grad():
        return model.eval()(pixel_values).last_hidden_state


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"shortcut_decay": 0.4, "shortcut_schedule": "constant", "qkv_bias": False},
        {"shortcut_schedule": "learned"},
        {"shortcut_scope": "attention", "shortcut_granularity": "layer"},
        {"residual_form": "scale_both", "shortcut_decay": 1.0},
        {"residual_form": "scale_branch", "shortcut_decay": 1.0},
        {"final_norm": True},
    ],
    ids=str,
)
def test_a_stock_encoder_gives_our_tokens(fields, pixel_values):
    model = random_weights(DecayedViTMAEModel(DecayedViTMAEConfig(**TINY_SIZES, **EXACT, **fields))).double()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    stock = stock_model(model)
    expected = tokens(model, pixel_values.double())
    assert type(stock) is (ViTModel if fields.get("final_norm") else BeitModel)
    torch.testing.assert_close(tokens(stock, pixel_values.double()), expected, rtol=1e-9, atol=1e-9)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def test_usual_eps_and_undecayed_networks(pixel_values):
    decayed = random_weights(DecayedViTMAEModel(DecayedViTMAEConfig(**TINY_SIZES)))
    expected = tokens(decayed, pixel_values)
    torch.testing.assert_close(tokens(stock_model(decayed), pixel_values), expected, rtol=1e-4, atol=1e-4)
    plain = random_weights(DecayedViTMAEModel(DecayedViTMAEConfig.plain(**TINY_SIZES)))
    stock = stock_model(plain)
    assert torch.equal(tokens(stock, pixel_values), tokens(plain, pixel_values))
    with torch.no_grad():
        assert torch.equal(stock(pixel_values).pooler_output, tokens(plain, pixel_values)[:, 0])
    assert stock_model(decayed.bfloat16()).dtype == torch.bfloat16


def test_a_plain_autoencoder_becomes_one_of_transformers(pixel_values, noise):
    config = DecayedViTMAEConfig.plain(**TINY_SIZES, **EXACT, shortcut_decay=0.6)
    model = random_weights(DecayedViTMAEForPreTraining(config)).double().eval()
    stock = stock_model(model)
    assert type(stock) is ViTMAEForPreTraining
    with torch.no_grad():
        ours, theirs = (network(pixel_values.double(), noise=noise.double()) for network in (model, stock))
    torch.testing.assert_close(theirs.logits, ours.logits, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(theirs.loss, ours.loss, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "fields, stock_class",
    [
        ({"pooling": "cls", "final_norm": True}, ViTForImageClassification),
        ({"pooling": "cls", "final_norm": False}, ViTForImageClassification),
        ({"pooling": "patch_mean", "final_norm": False}, BeitForImageClassification),
    ],
)
def test_a_classifier_gives_our_logits(fields, stock_class, pixel_values):
    config = DecayedViTMAEConfig(**TINY_SIZES, **EXACT, **fields, id2label={0: "cat", 1: "dog", 2: "emu"})
    model = random_weights(DecayedViTMAEForImageClassification(config)).double().eval()
    stock = stock_model(model)
    assert type(stock) is stock_class and stock.config.id2label == {0: "cat", 1: "dog", 2: "emu"}
    with torch.no_grad():
        ours, theirs = model(pixel_values.double()).logits, stock(pixel_values.double()).logits
    torch.testing.assert_close(theirs, ours, rtol=1e-9, atol=1e-9)


def test_models_without_a_stock_form_are_refused():
    with pytest.raises(UserError, match="No classifier of transformers pools as `pooling='mean'`"):
        stock_model(DecayedViTMAEForImageClassification(DecayedViTMAEConfig(**TINY_SIZES, num_labels=3)))
    with pytest.raises(UserError, match="BEiT, which needs square images"):
        stock_model(DecayedViTMAEModel(DecayedViTMAEConfig(**{**TINY_SIZES, "image_size": (32, 16)})))
    with pytest.raises(UserError, match="Linear has no stock form"):
        stock_model(torch.nn.Linear(2, 2))
    with pytest.raises(UserError, match="alpha of 0"):
        config = DecayedViTMAEConfig(**TINY_SIZES, shortcut_schedule="learned")
        model = DecayedViTMAEModel(config)
        with torch.no_grad():
            model.layers[0].mlp_alpha.zero_()
        stock_model(model)


def save_run(folder):
    model = random_weights(DecayedViTMAEForPreTraining(DecayedViTMAEConfig(**TINY_SIZES)))
    model.save_pretrained(folder)
    main(["card", str(folder), "--license", "apache-2.0"])
    return model


def test_published_stock_folder(tmp_path, pixel_values):
    model = save_run(tmp_path / "run")
    report = publish(tmp_path / "run", "user/model", dry_run=True, keep=tmp_path / "published", stock=True)
    assert "'stock' gives the same without any code of ours" in report
    card = (tmp_path / "published" / "README.md").read_text()
    assert 'AutoModel.from_pretrained("user/model", subfolder="stock")' in card and "BeitModel" in card
    assert not list((tmp_path / "published" / "stock").glob("*.py"))
    assert "auto_map" not in json.loads((tmp_path / "published" / "stock" / "config.json").read_text())
    loaded = AutoModel.from_pretrained(tmp_path / "published", subfolder="stock")
    torch.testing.assert_close(tokens(loaded, pixel_values), tokens(model.vit, pixel_values), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_stock_folder_with_other_weights_is_replaced(tmp_path, pixel_values):
    model = save_run(tmp_path / "run")
    random_weights(stock_model(model)).save_pretrained(tmp_path / "run" / "stock")
    publish(tmp_path / "run", "user/model", dry_run=True, keep=tmp_path / "published")
    loaded = AutoModel.from_pretrained(tmp_path / "published", subfolder="stock")
    torch.testing.assert_close(tokens(loaded, pixel_values), tokens(model.vit, pixel_values), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_card_with_stock_folder(tmp_path, pixel_values, capsys):
    """Of a plain autoencoder the encoder, which sees whole images; an older folder is replaced."""
    model = random_weights(DecayedViTMAEForPreTraining(DecayedViTMAEConfig.plain(**TINY_SIZES)))
    model.save_pretrained(tmp_path)
    (tmp_path / "stock").mkdir()
    (tmp_path / "stock" / "old.json").write_text("{}")
    assert main(["card", str(tmp_path), "--license", "apache-2.0", "--repo_id", "user/model", "--stock"]) == 0
    assert "and 'stock', which loads without any code of ours (largest difference" in capsys.readouterr().out
    assert not (tmp_path / "stock" / "old.json").exists()
    loaded = AutoModel.from_pretrained(tmp_path, subfolder="stock")
    assert type(loaded) is ViTModel
    torch.testing.assert_close(tokens(loaded, pixel_values), tokens(model.vit, pixel_values), rtol=1e-4, atol=1e-4)
    assert 'AutoModel.from_pretrained("user/model", subfolder="stock")' in (tmp_path / "README.md").read_text()
    (tmp_path / "preprocessor_config.json").unlink()
    assert main(["card", str(tmp_path), "--stock"]) == 2
    assert "preprocessor_config.json' is missing" in capsys.readouterr().err and (tmp_path / "stock").exists()


ENCODERS = [
    config.parent
    for config in sorted((ROOT / "model_cards").glob("*/config.json"))
    if json.loads(config.read_text()).get("model_type") == "decayed_vit_mae"
]


@pytest.mark.parametrize("folder", ENCODERS, ids=lambda folder: folder.name)
def test_shipped_encoders_have_a_stock_folder_of_the_same_weights(folder):
    name = folder.relative_to(ROOT)
    command = f"`hf-decayed card {name} --repo_id {name} --stock` writes it"
    assert (folder / "stock" / "config.json").exists(), command
    own, stock = AutoModel.from_pretrained(folder), AutoModel.from_pretrained(folder, subfolder="stock")
    assert type(stock).__module__.startswith("transformers.")
    images = torch.randn(2, own.config.num_channels, own.config.image_size, own.config.image_size)
    expected = tokens(own, images)
    assert (tokens(stock, images) - expected).abs().max() < 1e-4 * expected.abs().max(), command


@pytest.mark.slow
def test_shipped_encoders_load_where_this_package_is_missing():
    script = (
        "import sys; sys.modules['hf_decayed'] = None\n"
        "from transformers import AutoImageProcessor, AutoModel\n"
        "for folder in sys.argv[1:]:\n"
        "    AutoModel.from_pretrained(folder, subfolder='stock', trust_remote_code=False)\n"
        "    AutoImageProcessor.from_pretrained(folder, subfolder='stock')\n"
    )
    subprocess.run([sys.executable, "-c", script, *map(str, ENCODERS)], check=True, cwd="/")


def test_a_card_by_hand_gets_one_section(tmp_path):
    stock_model(DecayedViTMAEModel(DecayedViTMAEConfig(**TINY_SIZES))).save_pretrained(tmp_path / "stock")
    (tmp_path / "README.md").write_text("# A model\n")
    for _ in range(2):
        add_to_card(tmp_path, "user/model")
    card = (tmp_path / "README.md").read_text()
    assert card.startswith("# A model\n") and card.count('from_pretrained("user/model", subfolder="stock")') == 1


def test_the_command_refuses_what_has_no_stock_form(tmp_path, capsys):
    config = DecayedViTMAEConfig(**TINY_SIZES, num_labels=3)
    DecayedViTMAEForImageClassification(config).save_pretrained(tmp_path)
    main(["card", str(tmp_path), "--license", "apache-2.0"])
    assert main(["publish", str(tmp_path), "--repo_id", "user/model", "--dry_run", "--stock"]) == 2
    assert "No classifier of transformers pools as" in capsys.readouterr().err
