"""The plain preset is transformers' ViTMAE: outputs, gradients, state dicts, layer by layer."""

import pytest
import torch
from conftest import TINY_SIZES, random_weights
from transformers import ViTMAEConfig, ViTMAEForPreTraining, ViTMAEModel
from transformers.models.vit_mae.modeling_vit_mae import ViTMAELayer

from hf_decayed import DecayedViTMAEConfig, DecayedViTMAEForPreTraining, DecayedViTMAEModel
from hf_decayed.models.modeling_decayed_vit_mae import DecayedViTMAELayer, sincos_positions


def assert_same(actual, expected):
    """Equal to a millionth of the largest value, the rounding of another order of float32 sums."""
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= 1e-6 * expected.abs().max()


def pair(dtype=torch.float32, **fields):
    """Their pretraining model and ours, with the same weights and correct position tables."""
    theirs = random_weights(ViTMAEForPreTraining(ViTMAEConfig(**TINY_SIZES, **fields)))
    ours = DecayedViTMAEForPreTraining(DecayedViTMAEConfig.plain(**TINY_SIZES, **fields))
    tables = {
        name: table for name, table in ours.state_dict().items() if name.endswith(("position_embeddings", "pos_embed"))
    }
    theirs.load_state_dict({**theirs.state_dict(), **tables})
    ours.load_state_dict(theirs.state_dict())  # strict: same names, nothing extra
    return theirs.to(dtype), ours.to(dtype)


@pytest.mark.parametrize("norm_pix_loss", [False, True])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_pretraining_outputs(norm_pix_loss, mode, pixel_values, noise):
    theirs, ours = pair(norm_pix_loss=norm_pix_loss)
    expected = getattr(theirs, mode)()(pixel_values, noise=noise)
    outputs = getattr(ours, mode)()(pixel_values, noise=noise)
    assert_same(outputs.loss, expected.loss)
    assert_same(outputs.logits, expected.logits)
    assert torch.equal(outputs.mask, expected.mask)
    assert torch.equal(outputs.ids_restore, expected.ids_restore)


def test_gradients(pixel_values, noise):
    """In double precision every parameter's gradient agrees to a billionth of its own size; in float32 to rounding."""
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        theirs, ours = pair(dtype, norm_pix_loss=True)
        theirs(pixel_values.to(dtype), noise=noise).loss.backward()
        ours(pixel_values.to(dtype), noise=noise).loss.backward()
        their_gradients = {name: p.grad for name, p in theirs.named_parameters() if p.requires_grad}
        our_gradients = {name: p.grad for name, p in ours.named_parameters()}
        assert their_gradients.keys() == our_gradients.keys()
        largest = max(gradient.abs().max() for gradient in their_gradients.values())
        for name, gradient in our_gradients.items():
            difference = (gradient - their_gradients[name]).abs().max()
            if name.endswith("k_proj.bias"):  # softmax cancels it: its gradient is rounding in both
                assert difference < 1e-6 * largest
            else:
                assert difference <= tolerance * their_gradients[name].abs().max(), name


def test_differences_in_float32_are_rounding(pixel_values, noise):
    """In double precision the two agree to the last digits: only the order of the sums differs."""
    theirs, ours = pair(torch.float64)
    expected, outputs = theirs(pixel_values.double(), noise=noise), ours(pixel_values.double(), noise=noise)
    torch.testing.assert_close(outputs.logits, expected.logits, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(outputs.loss, expected.loss, rtol=1e-12, atol=1e-12)


def test_encoder_outputs_with_noise(pixel_values, noise):
    theirs = random_weights(ViTMAEModel(ViTMAEConfig(**TINY_SIZES))).eval()
    ours = DecayedViTMAEModel(DecayedViTMAEConfig.plain(**TINY_SIZES)).eval()
    ours.load_state_dict(theirs.state_dict())
    theirs.config.output_hidden_states = ours.config.output_hidden_states = True
    expected, outputs = theirs(pixel_values, noise=noise), ours(pixel_values, noise=noise)
    assert_same(outputs[0], expected[0])
    assert len(outputs.hidden_states) == len(expected.hidden_states) == 5
    for state, expected_state in zip(outputs.hidden_states, expected.hidden_states):
        assert_same(state, expected_state)


def test_features_of_the_whole_image(pixel_values):
    """ViTMAE needs `mask_ratio=0` and ordered noise to see the whole image; the base model here does it by default."""
    theirs = random_weights(ViTMAEModel(ViTMAEConfig(**TINY_SIZES, mask_ratio=0.0))).eval()
    ours = DecayedViTMAEModel(DecayedViTMAEConfig.plain(**TINY_SIZES)).eval()
    ours.load_state_dict(theirs.state_dict())
    in_order = torch.arange(16.0).expand(3, -1)
    assert_same(ours(pixel_values)[0], theirs(pixel_values, noise=in_order)[0])


def test_layer_with_weights_one_is_their_layer_bit_for_bit():
    config = DecayedViTMAEConfig(**TINY_SIZES)
    config._attn_implementation = "sdpa"
    theirs = random_weights(ViTMAELayer(config))
    ours = DecayedViTMAELayer(config, 1.0, 1.0)
    ours.load_state_dict(theirs.state_dict())
    hidden_states = torch.randn(2, 17, 32)
    assert torch.equal(ours(hidden_states), theirs(hidden_states))


def test_layer_is_the_equation():
    config = DecayedViTMAEConfig(**TINY_SIZES)
    config._attn_implementation = "eager"
    layer = random_weights(DecayedViTMAELayer(config, 0.9, 0.7))
    x = torch.randn(2, 17, 32)
    x_middle = 0.9 * x + layer.attention(layer.layernorm_before(x))[0]
    expected = 0.7 * x_middle + layer.mlp(layer.layernorm_after(x_middle))
    torch.testing.assert_close(layer(x), expected, rtol=1e-6, atol=1e-6)


def test_learned_layer_is_the_equation():
    config = DecayedViTMAEConfig(**TINY_SIZES, shortcut_schedule="learned")
    config._attn_implementation = "eager"
    layer = random_weights(DecayedViTMAELayer(config, torch.nn.Parameter(torch.ones(1)), 1.0)).double()
    assert 0.5 <= layer.attention_alpha.item() < 1.0 and layer.mlp_alpha == 1.0
    x = torch.randn(2, 17, 32, dtype=torch.float64)  # in float32 the order of sums shows on some CPUs
    x_middle = layer.attention_alpha * x + layer.attention(layer.layernorm_before(x))[0]
    expected = x_middle + layer.mlp(layer.layernorm_after(x_middle))
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)


def test_learned_alphas_do_not_change_the_dtype():
    """Alphas in float32 beside weights in half precision, as with layerwise casting."""
    config = DecayedViTMAEConfig(**TINY_SIZES, shortcut_schedule="learned")
    config._attn_implementation = "eager"
    layer = DecayedViTMAELayer(config, 1.0, 1.0).to(torch.bfloat16)
    layer.attention_alpha = layer.mlp_alpha = torch.nn.Parameter(torch.ones(1))
    layer.has_learned_alphas = True
    assert layer(torch.randn(2, 17, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("form,shortcut,branch", [("scale_both", 0.5**0.5, 0.5**0.5), ("scale_branch", 1.0, 0.5**0.5)])
def test_ablation_forms(form, shortcut, branch):
    config = DecayedViTMAEConfig(**TINY_SIZES, residual_form=form, shortcut_decay=1.0)
    layer = random_weights(DecayedViTMAEModel(config)).layers[-1]
    x = torch.randn(2, 17, 32)
    x_middle = shortcut * x + branch * layer.attention(layer.layernorm_before(x))[0]
    expected = shortcut * x_middle + branch * layer.mlp(layer.layernorm_after(x_middle))
    torch.testing.assert_close(layer(x), expected, rtol=1e-6, atol=1e-6)
    layer.dropout = torch.nn.Identity()  # stochastic depth replaces the dropout; the scale is not part of it
    torch.testing.assert_close(layer(x), expected, rtol=1e-6, atol=1e-6)


def test_state_dicts_go_both_ways(pixel_values, noise):
    theirs, ours = pair()
    other = ViTMAEForPreTraining(ViTMAEConfig(**TINY_SIZES))
    other.load_state_dict(ours.state_dict())
    assert torch.equal(other(pixel_values, noise=noise).loss, theirs(pixel_values, noise=noise).loss)


def test_position_tables_follow_he_et_al():
    """Width's sines and cosines first, then height's; the class token's row is zero (facebookresearch/mae)."""
    table = sincos_positions((2, 3), 8)[0]
    row, column = 1, 2
    omega = torch.tensor([1.0, 10000**-0.5], dtype=torch.float64)
    expected = torch.cat([(column * omega).sin(), (column * omega).cos(), (row * omega).sin(), (row * omega).cos()])
    torch.testing.assert_close(table[1 + 3 * row + column], expected.float())
    assert not table[0].any()
