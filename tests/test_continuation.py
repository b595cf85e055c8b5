"""Continuing a trained autoencoder with decay: the same function at the start, and other steps from there on."""

import pytest
import torch
from conftest import TINY_SIZES, random_weights

from hf_decayed import DecayedViTMAEConfig, DecayedViTMAEForPreTraining, stock_model
from hf_decayed.decay.continuation import continue_with_decay
from hf_decayed.errors import UserError


def plain_model(**fields):
    config = DecayedViTMAEConfig.plain(**TINY_SIZES, layer_norm_eps=1e-14, **fields)
    return random_weights(DecayedViTMAEForPreTraining(config)).double().eval()


@pytest.mark.parametrize(
    "fields",
    [
        {"shortcut_decay": 0.6},
        {"shortcut_decay": "auto", "shortcut_granularity": "layer"},
        {"shortcut_decay": 0.5, "shortcut_scope": "mlp", "encoder_decoder_skips": False},
    ],
    ids=str,
)
def test_the_decayed_network_begins_as_the_same_function(fields, pixel_values, noise):
    plain = plain_model()
    decayed = continue_with_decay(plain, **fields).eval()
    assert decayed.config.effective_decay() < 0.5 and plain.config.effective_decay() == 1
    assert len(decayed.decoder.skips) == (0 if fields.get("encoder_decoder_skips") is False else 2)
    expected, outputs = (model(pixel_values.double(), noise=noise.double()) for model in (plain, decayed))
    torch.testing.assert_close(outputs.logits, expected.logits, rtol=1e-9, atol=1e-9)
    outputs.loss.backward()
    gradients = [skip.output_projection.weight.grad for skip in decayed.decoder.skips]
    assert all(gradient.abs().max() > 0 for gradient in gradients)  # silent, and able to speak


def test_from_one_decay_to_another_and_back_to_stock(pixel_values, noise):
    decayed = plain_model(shortcut_decay=0.8)
    other = continue_with_decay(decayed, shortcut_decay=0.5, encoder_decoder_skips=False).eval()
    stock = stock_model(other)
    with torch.no_grad():
        expected, outputs = (model(pixel_values.double(), noise=noise.double()) for model in (decayed, stock))
    torch.testing.assert_close(outputs.logits, expected.logits, rtol=1e-9, atol=1e-9)


def test_what_cannot_be_kept_is_refused():
    released = DecayedViTMAEForPreTraining(DecayedViTMAEConfig(**TINY_SIZES))
    with pytest.raises(UserError, match="only if a norm stands behind the encoder and no skips leave it"):
        continue_with_decay(released, shortcut_decay=0.5)
    plain = plain_model()
    with pytest.raises(UserError, match="a shortcut_schedule that is not learned"):
        continue_with_decay(plain, shortcut_schedule="learned")
    with pytest.raises(UserError, match="another architecture"):
        continue_with_decay(plain, shortcut_decay=0.6, intermediate_size=16)
    with pytest.raises(UserError, match="alpha of 0"):
        continue_with_decay(plain, shortcut_decay=0.0, shortcut_schedule="constant")
