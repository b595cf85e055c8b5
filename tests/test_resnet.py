"""The decayed residual network: transformers' ResNet at 1.0, the formula below it, and loadable from anywhere."""

import json
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from transformers import AutoModel, AutoModelForImageClassification, ResNetConfig, ResNetForImageClassification

from hf_decayed import DecayedResNetConfig, DecayedResNetForImageClassification, DecayedResNetModel


SIZES = {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [2, 1, 3, 2], "num_labels": 5}

CLEAN_PROCESS = """
import importlib.abc, json, sys

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_decayed":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Block())
import torch
from transformers import AutoModel, AutoModelForImageClassification

images = torch.linspace(-1, 1, 2 * 3 * 32 * 32).view(2, 3, 32, 32)
with torch.no_grad():
    features = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True).eval()(images).pooler_output
    model = AutoModelForImageClassification.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
    print(json.dumps([type(model).__name__, features.flatten().tolist(), model(images).logits.flatten().tolist()]))
"""


@pytest.mark.parametrize("layer_type", ["basic", "bottleneck"])
def test_at_one_it_is_the_parent(layer_type, pixel_values, tmp_path):
    theirs = ResNetForImageClassification(ResNetConfig(**SIZES, layer_type=layer_type))
    theirs.save_pretrained(tmp_path)
    ours = DecayedResNetForImageClassification.from_pretrained(tmp_path)
    assert ours.config.shortcut_decay == 1.0 and ours.state_dict().keys() == theirs.state_dict().keys()
    labels = torch.tensor([0, 4, 2])
    # In double precision: where weights lie in memory decides the last bits of a convolution.
    theirs, ours, pixel_values = theirs.double(), ours.double(), pixel_values.double()
    close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-13)
    for mode in ("train", "eval"):
        expected = getattr(theirs, mode)()(pixel_values, labels=labels, output_hidden_states=True)
        outputs = getattr(ours, mode)()(pixel_values, labels=labels, output_hidden_states=True)
        close(outputs.loss, expected.loss)
        close(outputs.logits, expected.logits)
        close(outputs.hidden_states, expected.hidden_states)
    theirs.train()(pixel_values, labels=labels).loss.backward()
    ours.train()(pixel_values, labels=labels).loss.backward()
    gradients = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        close(parameter.grad, gradients[name].grad)


@pytest.mark.parametrize("layer_type", ["basic", "bottleneck"])
def test_every_block_weighs_its_shortcut(layer_type, pixel_values):
    """Through the parent's own blocks, by hand: `relu(alpha * shortcut(x) + branch(x))`, alpha from 1 to the decay."""
    config = DecayedResNetConfig(**SIZES, layer_type=layer_type, shortcut_decay=0.3)
    model = DecayedResNetModel(config).eval()
    state, number = model.embedder(pixel_values), 0
    for stage in model.encoder.stages:
        for block in stage.layers:
            alpha = 1 - 0.7 * number / 7
            state = torch.relu(alpha * block.shortcut(state) + block.layer(state))
            number += 1
    torch.testing.assert_close(model(pixel_values).last_hidden_state, state)
    plain = DecayedResNetModel(DecayedResNetConfig(**SIZES, layer_type=layer_type, shortcut_decay=1.0)).eval()
    plain.load_state_dict(model.state_dict())  # no parameter more or less
    assert not torch.allclose(plain(pixel_values).last_hidden_state, state, rtol=1e-2)


def test_schedules_and_depths():
    config = DecayedResNetConfig()
    assert len(config.shortcut_alphas()) == 8 and config.shortcut_decay == 0.7
    assert DecayedResNetConfig.from_num_blocks(16).depths == [2, 2, 10, 2]
    linear = DecayedResNetConfig.from_num_blocks(9, shortcut_decay=0.6).shortcut_alphas()
    assert linear == pytest.approx([1, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6])
    assert DecayedResNetConfig(shortcut_schedule="constant").shortcut_alphas() == pytest.approx([0.7] * 8)
    assert DecayedResNetConfig(depths=[1], hidden_sizes=[8]).shortcut_alphas() == [1.0]


def test_small_stem_keeps_the_size(pixel_values):
    states = {}
    for stem in ("imagenet", "small"):
        model = DecayedResNetModel(DecayedResNetConfig(**SIZES, stem=stem))
        states[stem] = model(pixel_values, output_hidden_states=True).hidden_states[0].shape
    assert states == {"imagenet": (3, 8, 8, 8), "small": (3, 8, 32, 32)}


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"shortcut_decay": 1.2}, "must lie in"),
        ({"shortcut_decay": "auto"}, "shortcut_decay"),
        ({"depths": [2, 2]}, "at least one block"),
        ({"stem": "tiny"}, "imagenet"),
    ],
)
def test_bad_fields_are_refused(fields, said):
    with pytest.raises(Exception, match=said):
        DecayedResNetConfig(**fields)


def test_too_few_blocks_and_other_models_are_refused():
    with pytest.raises(ValueError, match="at least 7"):
        DecayedResNetConfig.from_num_blocks(6)
    with pytest.raises(ValueError, match="got 'vit'"):
        DecayedResNetConfig.from_dict({"model_type": "vit"})


def test_loads_where_the_package_is_not(tmp_path):
    model = DecayedResNetForImageClassification(DecayedResNetConfig(**SIZES, shortcut_decay=0.6)).eval()
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.glob("*.py")} == {
        "configuration_decayed_resnet.py",
        "modeling_decayed_resnet.py",
        "shortcut_decay.py",
    }
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CLEAN_PROCESS, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        cwd="/",
    )
    assert result.returncode == 0, result.stderr[-2000:]
    name, features, logits = json.loads(result.stdout.splitlines()[-1])
    images = torch.linspace(-1, 1, 2 * 3 * 32 * 32).view(2, 3, 32, 32)
    with torch.no_grad():
        assert name == "DecayedResNetForImageClassification"
        assert model(images).logits.flatten().tolist() == pytest.approx(logits, rel=1e-5)
        assert model.resnet(images).pooler_output.flatten().tolist() == pytest.approx(features, rel=1e-5)
    # With the package it needs no code from the folder.
    assert type(AutoModel.from_pretrained(tmp_path)) is DecayedResNetModel
    assert type(AutoModelForImageClassification.from_pretrained(tmp_path)) is DecayedResNetForImageClassification
