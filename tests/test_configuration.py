"""The config: presets, sizes, `auto`, and wrong values, which are refused with field, rule and value."""

import json
import math
import re
import warnings
from pathlib import Path

import pytest
import transformers
from conftest import TINY_SIZES
from transformers import AutoConfig, ViTConfig, ViTMAEConfig

from hf_decayed import (
    DecayedResNetConfig,
    DecayedViTMAEConfig,
    DecayedViTMAEForPreTraining,
    DecayedViTMAEModel,
    suggest_shortcut_decay,
)


def test_default_is_the_released_architecture():
    config = DecayedViTMAEConfig()
    assert (config.hidden_size, config.num_hidden_layers, config.decoder_num_hidden_layers) == (768, 12, 8)
    assert (config.shortcut_decay, config.layer_norm_eps) == (0.6, 1e-6)
    assert (config.encoder_decoder_skips, config.decoder_input) == (True, "positions")
    assert (config.final_norm, config.zero_init_branches) == (False, True)
    assert config.num_skips == 6


def test_plain_has_every_value_of_vit_mae():
    theirs, ours = ViTMAEConfig().to_dict(), DecayedViTMAEConfig.plain().to_dict()
    assert {name: ours[name] for name in theirs if name != "model_type"} == {
        name: value for name, value in theirs.items() if name != "model_type"
    }
    assert ours["shortcut_decay"] == 1.0


@pytest.mark.parametrize(
    "size,hidden,layers,heads,patch,decay,skips",
    [
        ("small", 384, 12, 6, 16, 0.6, 6),
        ("base", 768, 12, 12, 16, 0.6, 6),
        ("large", 1024, 24, 16, 16, 0.7, 8),
        ("huge", 1280, 32, 16, 14, suggest_shortcut_decay(32), 8),
    ],
)
def test_sizes_by_name(size, hidden, layers, heads, patch, decay, skips):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the decay of a named size is inside the paper's advice
        config = DecayedViTMAEConfig.from_size(size)
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (hidden, layers, heads)
    assert config.intermediate_size == 4 * hidden
    assert (config.patch_size, config.shortcut_decay, config.num_skips) == (patch, decay, skips)
    assert (config.decoder_hidden_size, config.decoder_num_hidden_layers) == (512, 8)
    assert DecayedViTMAEConfig.plain(size).shortcut_decay == 1.0


def test_auto_is_saved_as_a_number(tmp_path):
    config = DecayedViTMAEConfig(shortcut_decay="auto", num_hidden_layers=18)
    assert config.shortcut_decay == suggest_shortcut_decay(18)
    assert config.effective_decay() == pytest.approx(3e-3, rel=1e-3)
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["shortcut_decay"] == suggest_shortcut_decay(18)
    assert DecayedViTMAEConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()


def test_auto_set_later_is_resolved_when_the_model_is_built():
    config = DecayedViTMAEConfig(**TINY_SIZES)
    config.shortcut_decay = "auto"
    assert DecayedViTMAEModel(config).config.shortcut_decay == suggest_shortcut_decay(4)


def test_integers_are_numbers():
    assert DecayedViTMAEConfig(shortcut_decay=1).effective_decay() == 1.0


WRONG = [
    ({"shortcut_decay": 1.2}, r"`shortcut_decay` must lie in \[0, 1\], got 1.2"),
    ({"shortcut_decay": -0.1}, r"`shortcut_decay` must lie in \[0, 1\], got -0.1"),
    ({"shortcut_decay": math.nan}, r"`shortcut_decay` must lie in \[0, 1\], got nan"),
    ({"shortcut_decay": "strong"}, "shortcut_decay.*'strong'"),
    ({"shortcut_decay": None}, "shortcut_decay.*None"),
    ({"shortcut_schedule": "quadratic"}, "shortcut_schedule.*linear.*got quadratic"),
    ({"shortcut_granularity": "block"}, "shortcut_granularity.*got block"),
    ({"shortcut_scope": "ffn"}, "shortcut_scope.*got ffn"),
    ({"residual_form": "scale"}, "residual_form.*got scale"),
    ({"residual_form": "scale_both"}, "`residual_form='scale_both'`.*`shortcut_decay=1.0`.*0.6"),
    ({"decoder_input": "image"}, "decoder_input.*got image"),
    ({"decode_ratio": 0}, r"`decode_ratio` must lie in \(0, 1\], got 0"),
    ({"decode_ratio": 1.5}, r"`decode_ratio` must lie in \(0, 1\], got 1.5"),
    ({"pooling": "max"}, "pooling.*got max"),
    ({"encoder_decoder_skips": "yes"}, "encoder_decoder_skips.*'yes'"),
    ({"encoder_decoder_skips": 7}, "`encoder_decoder_skips` must be true, false or a number up to .* got 7"),
    ({"encoder_decoder_skips": -1}, "`encoder_decoder_skips` must be .* got -1"),
    ({"num_hidden_layers": 5}, "`encoder_decoder_skips`.*even `num_hidden_layers`, got 5"),
    ({"encoder_decoder_skips": False}, "`decoder_input='positions'` needs `encoder_decoder_skips=True`"),
    ({"image_size": 33}, "`image_size` must be divisible by `patch_size`, got height 33 and patch height 8"),
    ({"image_size": (32, 20)}, "got width 20 and patch width 8"),
    ({"image_size": (32, 32, 32)}, "image_size"),
    ({"image_size": [32]}, r"`image_size` must be one number or \(height, width\), got \[32\]"),
    ({"hidden_act": "foo"}, "`hidden_act` must be .* got 'foo'"),
    ({"patch_size": 0}, "`patch_size` must be positive, got 0"),
    ({"num_channels": 0}, "`num_channels` must be positive, got 0"),
    ({"num_hidden_layers": "4"}, "num_hidden_layers.*int.*'4'"),
    ({"num_attention_heads": 5}, "`hidden_size` must be divisible by `num_attention_heads`, got 32 and 5"),
    ({"decoder_num_attention_heads": 7}, "`decoder_hidden_size` must be divisible by .*, got 24 and 7"),
    ({"hidden_size": 30, "num_attention_heads": 2}, "`hidden_size` must be divisible by 4 .* got 30"),
    ({"num_hidden_layers": 0}, "`num_hidden_layers` must be positive, got 0"),
    ({"num_hidden_layers": -8}, "`num_hidden_layers` must be positive, got -8"),
    ({"decoder_num_hidden_layers": -1}, "`decoder_num_hidden_layers` must be positive, got -1"),
    ({"num_hidden_layers": 2**31}, "`num_hidden_layers` must be at most 10000, got 2147483648"),
    ({"decoder_num_hidden_layers": 2**31}, "`decoder_num_hidden_layers` must be at most 10000, got 2147483648"),
    ({"hidden_size": 2**31}, "`hidden_size` must be at most 1048576, got 2147483648"),
    ({"hidden_size": -8}, "`hidden_size` must be positive, got -8"),
    ({"qkv_bias": "false"}, "qkv_bias.*bool.*'false'"),
    ({"layer_norm_eps": math.nan}, "`layer_norm_eps` must be positive and finite, got nan"),
    ({"layer_norm_eps": 0.0}, "`layer_norm_eps` must be positive and finite, got 0.0"),
    ({"initializer_range": -0.02}, "`initializer_range` must be finite and not negative, got -0.02"),
    ({"hidden_dropout_prob": 5}, r"`hidden_dropout_prob` must lie in \[0, 1\), got 5"),
    ({"hidden_dropout_prob": math.nan}, r"`hidden_dropout_prob` must lie in \[0, 1\), got nan"),
    ({"attention_probs_dropout_prob": -0.1}, r"`attention_probs_dropout_prob` must lie in \[0, 1\), got -0.1"),
    ({"mask_ratio": 1.0}, r"`mask_ratio` must lie in \[0, 1\), got 1.0"),
    ({"shortcut_decya": 0.6}, "Unknown field `shortcut_decya` .*did you mean `shortcut_decay`"),
    ({"shortcut_strength": 0.6}, "Unknown field `shortcut_strength` .*did you mean `shortcut_"),
    ({"alpha_min": 0.6}, "Unknown field `alpha_min` .*did you mean `shortcut_decay`"),
]


@pytest.mark.parametrize(
    "fields,message", WRONG, ids=[next(iter(fields)) + str(i) for i, (fields, _) in enumerate(WRONG)]
)
def test_wrong_values_are_refused(fields, message):
    with pytest.raises(Exception, match=f"(?s){message}"):
        DecayedViTMAEConfig(**{**TINY_SIZES, **fields})


@pytest.mark.parametrize(
    "fields,message", WRONG, ids=[next(iter(fields)) + str(i) for i, (fields, _) in enumerate(WRONG)]
)
def test_wrong_values_set_later_are_refused_when_a_model_is_built(fields, message):
    config = DecayedViTMAEConfig(**TINY_SIZES)
    with pytest.raises(Exception, match=f"(?s){message}"):
        for name, value in fields.items():
            setattr(config, name, value)
        DecayedViTMAEForPreTraining(config)


UNKNOWN = [
    ({"depth": 4}, "Unknown field `depth` .*did you mean `num_hidden_layers`"),
    ({"num_labeels": 3}, "Unknown field `num_labeels` .*did you mean `num_labels`"),
    ({"zero_init_branch": True}, "Unknown field `zero_init_branch` .*did you mean `zero_init_branches`"),
    ({"num_layers": 6}, "Unknown field `num_layers` .*did you mean `num_hidden_layers`"),
    ({"bogus": 3}, "Unknown field `bogus` of DecayedViTMAEConfig[.]"),
    ({"merge_size": 2}, "Unknown field `merge_size`"),
    ({"max_length": 20}, "Unknown field `max_length`"),  # of generation, which transformers drops silently
]


@pytest.mark.parametrize("fields,message", UNKNOWN, ids=[next(iter(fields)) for fields, _ in UNKNOWN])
def test_unknown_fields_are_refused_at_construction(fields, message):
    with pytest.raises(ValueError, match=message):
        DecayedViTMAEConfig(**{**TINY_SIZES, **fields})
    with pytest.raises(ValueError, match="Unknown field"):
        DecayedResNetConfig(**fields)


def test_attributes_of_other_tools_may_be_set_and_are_saved(tmp_path):
    """Every name that a config of transformers has for a field can be an attribute of a built config."""
    sources = Path(transformers.__file__).parent.glob("models/*/configuration_*.py")
    names = {name for source in sources for name in re.findall(r"^    (\w+):", source.read_text(), re.MULTILINE)}
    assert len(names) > 1000 and {"merge_size", "cache_size", "patch_stride", "depth"} <= names
    for config in (DecayedViTMAEConfig(**TINY_SIZES), DecayedResNetConfig()):
        others = [name for name in names if not name.startswith("_") and not hasattr(config, name)]
        for name in others:
            setattr(config, name, None)
        config.validate_field_names()
    config = DecayedViTMAEConfig(**TINY_SIZES)
    config.merge_size = 2
    config.save_pretrained(tmp_path)
    assert DecayedViTMAEConfig.from_pretrained(tmp_path).merge_size == 2
    assert {**AutoConfig.from_pretrained(tmp_path).to_dict(), "_name_or_path": ""} == config.to_dict()
    plain = DecayedViTMAEConfig(**TINY_SIZES)
    assert DecayedViTMAEConfig(**plain.to_dict()).to_dict() == plain.to_dict()


@pytest.mark.parametrize("num_labels", [-3, 1.5, True, "x", None, 2**31])
def test_wrong_numbers_of_labels_are_refused(num_labels):
    with pytest.raises(ValueError, match=rf"`num_labels` must be an integer in \[0, 1048576\], got {num_labels!r}"):
        DecayedViTMAEConfig(num_labels=num_labels)


@pytest.mark.filterwarnings("default")
def test_warnings_of_unusual_decays():
    with pytest.warns(UserWarning, match="below 0.45"):
        DecayedViTMAEConfig(shortcut_decay=0.4)
    with pytest.warns(UserWarning, match=r"effective decay of 2.9e-01, outside \[1e-4, 1e-1\].*0.590"):
        DecayedViTMAEConfig(shortcut_decay=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for decay in (0.5, 0.6, 0.7, 0.78, 1.0, "auto"):
            DecayedViTMAEConfig(shortcut_decay=decay)
        DecayedViTMAEConfig(shortcut_schedule="learned")


def test_a_network_too_shallow_for_auto_takes_a_value():
    shallow = {**TINY_SIZES, "shortcut_scope": "attention"}
    assert DecayedViTMAEConfig(**shallow, shortcut_decay=0.8).shortcut_decay == 0.8
    with pytest.raises(Exception, match="cannot reach an effective decay of 0.003"):
        DecayedViTMAEConfig(**shallow, shortcut_decay="auto")


def test_config_of_vit_mae_becomes_the_plain_preset(tmp_path):
    ViTMAEConfig(**TINY_SIZES, norm_pix_loss=True).save_pretrained(tmp_path)
    config = DecayedViTMAEConfig.from_pretrained(tmp_path)
    assert config.to_dict() == DecayedViTMAEConfig.plain(**TINY_SIZES, norm_pix_loss=True).to_dict()
    assert DecayedViTMAEConfig.from_pretrained(tmp_path, shortcut_decay=0.6).shortcut_decay == 0.6


def test_config_of_another_family_is_refused(tmp_path):
    ViTConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="`model_type` must be 'decayed_vit_mae' or 'vit_mae', got 'vit'"):
        DecayedViTMAEConfig.from_pretrained(tmp_path)


def test_a_config_of_another_class_is_refused_by_the_model():
    with pytest.raises(ValueError, match="must be a DecayedViTMAEConfig, got ViTMAEConfig"):
        DecayedViTMAEModel(ViTMAEConfig(**TINY_SIZES))


def test_auto_config_knows_the_type():
    assert isinstance(AutoConfig.for_model("decayed_vit_mae"), DecayedViTMAEConfig)
