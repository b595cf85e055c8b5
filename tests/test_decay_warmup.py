"""`--decay_warmup`: shortcuts start at 1 and fall to their final weights, in networks of every family, compiled or not."""

import mae
import pytest
import torch
import uvit
from torch._dynamo.testing import CompileCounterWithBackend

from hf_decayed import (
    DecayedSiTTransformer2DModel,
    DecayedUViT2DModel,
    DecayedViTMAEConfig,
    DecayedViTMAEModel,
    NestedUViT2DModel,
)
from hf_decayed.decay.own_models import own_stack
from hf_decayed.errors import UserError
from hf_decayed.run.decay_warmup import DecayWarmup


SIZES = {"sample_size": 8, "in_channels": 1, "patch_size": 4, "hidden_size": 32, "num_layers": 4}
SIZES |= {"num_attention_heads": 2, "num_classes": 3}


@pytest.mark.parametrize("decay", [0.6, "auto"])
def test_shortcuts_on_their_way_down(decay, tmp_path):
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
    encoder = DecayedViTMAEModel(DecayedViTMAEConfig(shortcut_decay=decay, image_size=16, patch_size=4, **sizes))
    alphas = encoder.config.shortcut_alphas()
    warmup = DecayWarmup([encoder], end=0.5, schedule_steps=10)
    assert warmup.set(0) == {"decay_share": 0.0} and encoder.shortcut_alphas() == [(1.0, 1.0)] * len(alphas)
    assert warmup.set(2) == {"decay_share": 0.5}
    assert encoder.shortcut_alphas()[-1][1] == pytest.approx((1 + alphas[-1][1]) / 2)
    encoder.save_pretrained(tmp_path)  # on its way down too
    assert DecayedViTMAEModel.from_pretrained(tmp_path).shortcut_alphas() == encoder.shortcut_alphas()
    assert warmup.set(4) == warmup.set(9) == {"decay_share": 1.0}
    assert encoder.shortcut_alphas() == alphas  # to the bit
    assert DecayWarmup([encoder], end=None, schedule_steps=10).set(0) == {}
    assert encoder.shortcut_alphas() == alphas


def test_shortcuts_are_held_before_they_fall():
    encoder = DecayedViTMAEModel(DecayedViTMAEConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=4))
    alphas = encoder.shortcut_alphas()
    warmup = DecayWarmup([encoder], end=0.7, schedule_steps=10, start=0.4)
    shares = [warmup.set(step)["decay_share"] for step in range(10)]
    assert shares == [0.0] * 5 + [0.5] + [1.0] * 4
    assert encoder.shortcut_alphas() == alphas
    # So short that nothing is left between: they fall at once.
    warmup = DecayWarmup([encoder], end=0.5, schedule_steps=10, start=0.4)
    assert [warmup.set(step)["decay_share"] for step in range(6)] == [0.0] * 4 + [1.0] * 2


@pytest.mark.parametrize("script", [mae, uvit])
def test_decay_start_must_be_below_decay_warmup(script, capsys):
    for flags in (["--decay_warmup", "0.3"], ["--decay_warmup", "0"]):
        with pytest.raises(SystemExit):
            script.parse_arguments([*flags, "--decay_start", "0.3"])
        assert f"--decay_start 0.3 must be below --decay_warmup, got {flags[1]}" in capsys.readouterr().err
    assert script.parse_arguments(["--decay_warmup", "0.5", "--decay_start", "0.3"])[0].decay_start == 0.3


def test_a_recipe_holds_shortcuts_only_before_the_end_that_is_named(capsys):
    def start(*flags):
        return mae.parse_arguments(["--recipe", "photos_small", *flags])[0].decay_start

    assert start() == start("--decay_warmup", "0.7") == 0.33
    assert start("--decay_warmup", "0") is start("--decay_warmup", "0.3") is start("--decay_start", "0") is None
    assert start("--init_from", "model") is None  # it is for a new network
    with pytest.raises(SystemExit):
        start("--init_from", "model", "--decay_start", "0.3")
    assert "--decay_start needs --decay_warmup" in capsys.readouterr().err


def test_a_network_without_decay_stays_as_it_is():
    """Also a compiled one: numbers, not tensors that never move."""
    network = DecayedUViT2DModel(**SIZES, shortcut_decay=1.0)
    warmup = DecayWarmup([network], end=0.5, schedule_steps=10, compiled=True)
    assert warmup.set(0) == {}
    layers = own_stack(network).modules
    assert not any(layer.has_learned_alphas for layer in layers) and all(layer.mlp_alpha == 1.0 for layer in layers)
    assert all(isinstance(layer.attention_alpha, float) for layer in layers)


def test_learned_shortcuts_are_refused_before_images_are_read(capsys):
    with pytest.raises(SystemExit):
        uvit.parse_arguments(["--decay_warmup", "0.5", "--set", "shortcut_schedule=learned"])
    assert "and shortcut_schedule=learned learns it: drop one" in capsys.readouterr().err


def test_a_short_warmup():
    encoder = DecayedViTMAEModel(DecayedViTMAEConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=4))
    alphas = encoder.shortcut_alphas()
    DecayWarmup([encoder, encoder], end=1.0, schedule_steps=1).set(0)
    assert encoder.shortcut_alphas() == alphas  # a single step has the whole decay


def test_compiled_shortcuts_are_numbers_again_at_the_end(tmp_path):
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "num_hidden_layers": 2}
    encoder = DecayedViTMAEModel(DecayedViTMAEConfig(image_size=16, patch_size=4, **sizes)).eval()
    warmup = DecayWarmup([encoder], end=1.0, schedule_steps=10, compiled=True)
    images = torch.rand(2, 3, 16, 16)
    outputs = [encoder(images).last_hidden_state for step in (0, 4) if warmup.set(step)]
    assert isinstance(encoder.layers[1].mlp_alpha, torch.Tensor) and not torch.equal(*outputs)
    assert not any(name.endswith("alpha") for name in encoder.state_dict())
    warmup.finish(5)  # a run may end on its way down
    torch.testing.assert_close(encoder(images).last_hidden_state, outputs[1])
    encoder.save_pretrained(tmp_path)
    assert DecayedViTMAEModel.from_pretrained(tmp_path).shortcut_alphas() == encoder.shortcut_alphas()


@pytest.mark.parametrize(
    "model_class, fields",
    [
        (DecayedUViT2DModel, {}),
        (DecayedUViT2DModel, {"shortcut_scope": "mlp", "shortcut_schedule": "cosine"}),
        (DecayedSiTTransformer2DModel, {"shortcut_granularity": "layer"}),
        (NestedUViT2DModel, {}),
    ],
)
def test_diffusion_models(model_class, fields, tmp_path):
    """Every weight moves linearly from 1 to that of the network as it was made, and a saved network is the same."""
    model = model_class(**SIZES, shortcut_decay=0.6, **fields)
    final = own_stack(model).alphas
    warmup = DecayWarmup([model], end=0.5, schedule_steps=10)
    for step, share in ((0, 0.0), (1, 0.25), (2, 0.5), (4, 1.0), (9, 1.0)):
        assert warmup.set(step) == {"decay_share": share}
        for layer, alphas in zip(own_stack(model).alphas, final, strict=True):
            assert layer == pytest.approx([1 - share * (1 - alpha) for alpha in alphas], abs=1e-12)
        model.save_pretrained(tmp_path / str(step))
        assert own_stack(model_class.from_pretrained(tmp_path / str(step))).alphas == own_stack(model).alphas
    assert own_stack(model).alphas == final  # to the bit


@pytest.mark.parametrize(
    "model",
    [
        lambda: DecayedUViT2DModel(**SIZES, shortcut_schedule="learned"),
        lambda: DecayedViTMAEModel(DecayedViTMAEConfig.plain(residual_form="scale_both", num_hidden_layers=2)),
    ],
)
def test_a_network_whose_decay_cannot_move(model):
    with pytest.raises(UserError, match="has no decay that can be set"):
        DecayWarmup([model()], end=0.5, schedule_steps=10)
    DecayWarmup([model()], end=None, schedule_steps=10).finish(10)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mae", "uvit", "sit"])
def test_shortcuts_on_their_way_down_are_not_compiled_again(family):
    """Compiled once for all steps on the way down and once for the final shortcuts; every step is the eager network's."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "num_hidden_layers": 2}
    if family == "mae":
        network = DecayedViTMAEModel(
            DecayedViTMAEConfig(image_size=16, patch_size=4, hidden_dropout_prob=0.0, **sizes)
        )
        inputs = (torch.randn(2, 3, 16, 16),)
    else:
        model_class = DecayedUViT2DModel if family == "uvit" else DecayedSiTTransformer2DModel
        network = model_class(**SIZES, shortcut_decay=0.6)
        inputs = (torch.randn(2, 1, 8, 8), torch.tensor([0.2, 0.7]), torch.tensor([0, 2]))
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2)  # branches that start at zero would hide their shortcuts
    eager, compiled = (DecayWarmup([network], schedule_steps=10, end=0.4, compiled=choice) for choice in (False, True))
    counter = CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()
    forward = torch.compile(network, backend=counter)
    outputs, compilations = [], []
    for step in range(5):
        eager.share = None  # the other one has moved the shortcuts
        eager.set(step)
        expected = network(*inputs)[0]
        compiled.share = None
        compiled.set(step)
        actual = forward(*inputs)[0]
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        actual.sum().backward()
        outputs.append(actual.detach())
        compilations.append(counter.frame_count)
    assert not torch.allclose(outputs[0], outputs[1]) and torch.equal(outputs[3], outputs[4])
    assert compilations[0] == compilations[2] < compilations[3] == compilations[4]
