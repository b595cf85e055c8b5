"""The decayed residual network: it equals transformers' ResNet at 1.0, follows the formula, and loads without the package."""

import json
import math
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
    # In double precision: the last bits of a convolution depend on the memory layout of its weights.
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
    """By hand with the parent's modules: `relu(alpha * shortcut(x) + branch(x))`, alpha from 1 to the decay."""
    config = DecayedResNetConfig(**SIZES, layer_type=layer_type, shortcut_decay=0.3)
    model = DecayedResNetModel(config).eval()
    state = model.embedder(pixel_values)
    blocks = [block for stage in model.encoder.stages for block in stage.layers]
    for index, block in enumerate(blocks):
        alpha = 1 - 0.7 * index / 7
        state = torch.relu(alpha * block.shortcut(state) + block.layer(state))
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
    "fields, message",
    [
        ({"shortcut_decay": 1.2}, "must lie in"),
        ({"shortcut_decay": "auto"}, "shortcut_decay"),
        ({"shortcut_decay": math.nan}, r"`shortcut_decay` must lie in \[0, 1\], got nan"),
        ({"depths": [2, 2]}, "at least one block"),
        ({"depths": [], "hidden_sizes": []}, r"at least one block for each of `hidden_sizes`, got \[\] and \[\]"),
        ({"depths": [2, 2, 0, 2]}, r"`depths` must be positive, got \[2, 2, 0, 2\]"),
        ({"depths": [2, 2, 2, 10**5]}, "`depths` must be at most 10000 blocks per stage, got .2, 2, 2, 100000."),
        ({"depths": None}, "depths.*None"),
        ({"hidden_sizes": None}, "hidden_sizes.*None"),
        ({"hidden_sizes": [8, 8, 8, -8]}, r"`hidden_sizes` must be positive, got \[8, 8, 8, -8\]"),
        ({"hidden_sizes": [8, 8, 8, "8"]}, "hidden_sizes.*'8'"),
        ({"embedding_size": -8}, "`embedding_size` must be positive, got -8"),
        ({"embedding_size": 2**31}, "`embedding_size` must be at most 1048576, got 2147483648"),
        ({"embedding_size": 1.5}, "embedding_size.*int.*1.5"),
        ({"num_channels": 0}, "`num_channels` must be positive, got 0"),
        ({"downsample_in_bottleneck": "false"}, "downsample_in_bottleneck.*bool.*'false'"),
        ({"layer_type": "wide"}, "layer_type.*basic.*got wide"),
        ({"hidden_act": "foo"}, "`hidden_act` must be .* got 'foo'"),
        ({"stem": "tiny"}, "imagenet"),
        ({"num_labels": "x"}, "`num_labels` must be an integer .* got 'x'"),
        ({"hiden_sizes": [8]}, "Unknown field `hiden_sizes` .*did you mean `hidden_sizes`"),
        ({"depth": 4}, "Unknown field `depth` .*did you mean `depths`"),
        ({"alpha_min": 0.6}, "Unknown field `alpha_min` .*did you mean `shortcut_decay`"),
        ({"shortcut_strength": 0.6}, "Unknown field `shortcut_strength` .*did you mean `shortcut_"),
    ],
)
def test_wrong_fields_are_refused(fields, message):
    with pytest.raises(Exception, match=f"(?s){message}"):
        DecayedResNetConfig(**fields)


def test_a_config_is_checked_again_when_a_model_is_built():
    config = DecayedResNetConfig(**SIZES)
    config.hidden_act = "foo"
    with pytest.raises(Exception, match="`hidden_act` must be .* got 'foo'"):
        DecayedResNetModel(config)
    with pytest.raises(ValueError, match="`config` must be a DecayedResNetConfig, got ResNetConfig"):
        DecayedResNetForImageClassification(ResNetConfig(**SIZES))


def test_too_few_blocks_and_other_models_are_refused():
    with pytest.raises(ValueError, match="at least 7"):
        DecayedResNetConfig.from_num_blocks(6)
    with pytest.raises(ValueError, match="got 'vit'"):
        DecayedResNetConfig.from_dict({"model_type": "vit"})


@pytest.mark.slow
def test_loads_without_the_package(tmp_path):
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
    # With the package, the code in the folder is not used.
    assert type(AutoModel.from_pretrained(tmp_path)) is DecayedResNetModel
    assert type(AutoModelForImageClassification.from_pretrained(tmp_path)) is DecayedResNetForImageClassification


def test_without_labels_logits_are_features():
    model = DecayedResNetForImageClassification(DecayedResNetConfig(**{**SIZES, "num_labels": 0})).eval()
    assert model(torch.randn(2, 3, 32, 32)).logits.shape == (2, SIZES["hidden_sizes"][-1])
