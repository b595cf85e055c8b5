"""`decay_shortcuts` and its kin on this package's own networks, whose configs say what they are."""

import copy

import pytest
import torch
from conftest import TINY_SIZES
from torch import nn

from hf_decayed import (
    DecayedResNetConfig,
    DecayedResNetForImageClassification,
    DecayedSiTTransformer2DModel,
    DecayedUViT2DModel,
    DecayedViTMAEConfig,
    DecayedViTMAEForPreTraining,
    NestedUViT2DModel,
    decay_shortcuts,
    fold_shortcuts,
    remove_decay,
    set_shortcut_decay,
    shortcut_alphas,
    shortcut_parameter_groups,
)
from hf_decayed.decay.optimizer_rule import group_parameters
from hf_decayed.errors import UserError


pytestmark = pytest.mark.filterwarnings("ignore:`shortcut_decay=:UserWarning")

SIZES = {"sample_size": 8, "in_channels": 3, "hidden_size": 16, "num_layers": 4, "num_attention_heads": 2}


def sit(**fields) -> nn.Module:
    return DecayedSiTTransformer2DModel(**SIZES, num_classes=3, **fields)


def sit_without_skips(**fields) -> nn.Module:
    return sit(encoder_decoder_skips=False, **fields)


def uvit(**fields) -> nn.Module:
    return DecayedUViT2DModel(**SIZES, **fields)


def nested_uvit(**fields) -> nn.Module:
    return NestedUViT2DModel(**SIZES, **fields)


def plain_mae(**fields) -> nn.Module:
    return DecayedViTMAEForPreTraining(DecayedViTMAEConfig.plain(**{**TINY_SIZES, **fields}))


def resnet(**fields) -> nn.Module:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "layer_type": "basic"}
    return DecayedResNetForImageClassification(DecayedResNetConfig(**sizes, **fields))


FOLDING = [sit, sit_without_skips, uvit, nested_uvit, plain_mae]


def randomised(model: nn.Module) -> nn.Module:
    """Weights that are all at work, and norms that are blind to the scale of their input."""
    torch.manual_seed(0)
    model = model.double().eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e-18
    return model


def run(model: nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    if isinstance(model, (DecayedViTMAEForPreTraining, DecayedResNetForImageClassification)):
        images = torch.randn(2, 3, 32, 32, generator=generator).double()
        noise = {"noise": torch.rand(2, 16, generator=generator).double()} if hasattr(model, "decoder") else {}
        return model(images, **noise).logits
    return model(torch.randn(2, 3, 8, 8, generator=generator).double(), torch.tensor([0.3, 0.7]).double())[0]


def assert_same(actual, expected, tolerance=0.0):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("build", [*FOLDING, resnet])
def test_decay_is_that_of_the_config(build, tmp_path):
    plain = randomised(build(shortcut_decay=1.0))
    settings = {"schedule": "cosine"} if build is resnet else {"schedule": "cosine", "granularity": "layer"}
    fields = {f"shortcut_{name}": value for name, value in settings.items()}
    expected = build(shortcut_decay=0.6, **fields).double().eval()
    expected.load_state_dict(plain.state_dict())
    for module in expected.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e-18
    decayed = decay_shortcuts(copy.deepcopy(plain), 0.6, **settings)
    assert_same(run(decayed), run(expected))
    assert shortcut_alphas(decayed) == shortcut_alphas(expected) and decayed.config.shortcut_decay == 0.6
    decayed.save_pretrained(tmp_path)
    loaded = type(decayed).from_pretrained(tmp_path)
    assert shortcut_alphas(loaded) == shortcut_alphas(expected)
    set_shortcut_decay(decayed, 0.8)
    assert shortcut_alphas(decayed)[-1][-1] == pytest.approx(0.8) and decayed.config.shortcut_decay == 0.8
    assert_same(run(remove_decay(decayed)), run(plain))


@pytest.mark.parametrize("build", FOLDING)
def test_fold_and_keep_function(build):
    decayed = randomised(build(shortcut_decay=0.5))
    expected = run(decayed)
    folded = fold_shortcuts(copy.deepcopy(decayed))
    assert folded.config.shortcut_decay == 1.0 and set(sum(shortcut_alphas(folded), ())) == {1.0}
    assert_same(run(folded), expected, 1e-12)
    again = decay_shortcuts(folded, 0.5, keep_function=True)
    assert_same(run(again), expected, 1e-12)
    assert_same(again.state_dict(), decayed.state_dict(), 1e-12)


@pytest.mark.parametrize("build", [sit, uvit])
def test_learned_alphas_fold(build):
    decayed = randomised(build(shortcut_schedule="learned"))
    assert shortcut_alphas(decayed)[0][0] != 1.0
    expected = run(decayed)
    folded = fold_shortcuts(decayed)
    assert_same(run(folded), expected, 1e-12)
    assert folded.config.shortcut_schedule == "linear" and not any("alpha" in name for name in folded.state_dict())


@pytest.mark.parametrize("build", [sit, sit_without_skips, plain_mae])
def test_optimizer_rule(build):
    decayed = randomised(build(shortcut_decay=0.5))
    stock = fold_shortcuts(copy.deepcopy(decayed))
    rates = {"lr": 1e-3, "weight_decay": 0.1}
    plain_rates = group_parameters(decayed, {}, rates, dict.fromkeys(rates, 0))
    expected = train(decayed, plain_rates)
    assert_same(train(stock, shortcut_parameter_groups(stock, 0.5, **rates)), expected, 1e-9)


def train(model: nn.Module, groups: list[dict]) -> torch.Tensor:
    """Losses of ten steps."""
    optimizer, losses = torch.optim.AdamW(groups), []
    for _ in range(10):
        loss = (run(model) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def test_wrappers_are_looked_through():
    model = sit(shortcut_decay=1.0)
    wrapped = nn.Sequential(model)
    decay_shortcuts(wrapped, 0.6)
    assert model.config.shortcut_decay == 0.6 and shortcut_alphas(wrapped) == shortcut_alphas(model)
    compiled = torch.compile(resnet(shortcut_decay=1.0), backend="eager")
    decay_shortcuts(compiled, 0.6)
    with pytest.raises(UserError, match="read its stream without a norm"):
        fold_shortcuts(compiled)
    larger = nn.ModuleDict({"network": sit(shortcut_decay=1.0), "head": nn.Linear(2, 2)})
    with pytest.raises(UserError, match="name it as `part='network'`"):
        decay_shortcuts(larger, 0.6)
    decay_shortcuts(larger, 0.6, part="network")
    assert larger["network"].config.shortcut_decay == 0.6


def test_what_cannot_be_done_is_refused():
    with pytest.raises(UserError, match="is decayed already: use `set_shortcut_decay`"):
        decay_shortcuts(sit(shortcut_decay=0.6), 0.6)
    with pytest.raises(UserError, match="`blocks` is for blocks that are not known"):
        decay_shortcuts(sit(shortcut_decay=1.0), 0.6, blocks={nn.Linear: [("a", "b")]})
    with pytest.raises(UserError, match="has one addition in a block"):
        decay_shortcuts(resnet(shortcut_decay=1.0), 0.6, granularity="layer")
    with pytest.raises(UserError, match="shortcut_schedule 'learned' has no decay that can be set"):
        set_shortcut_decay(sit(shortcut_schedule="learned"), 0.6)
    with pytest.raises(UserError, match="has no decayed shortcuts: all of its alphas are 1"):
        fold_shortcuts(sit(shortcut_decay=1.0))
    with pytest.raises(UserError, match="alpha of 0 cannot be folded"):
        fold_shortcuts(sit(shortcut_decay=0.0))
    with pytest.raises(UserError, match="read its stream without a norm"):
        fold_shortcuts(resnet(shortcut_decay=0.6))
    released = DecayedViTMAEForPreTraining(DecayedViTMAEConfig(**TINY_SIZES))
    with pytest.raises(
        UserError, match="reads its tokens without a norm, as skips do; `stock_model` folds its encoder"
    ):
        fold_shortcuts(released)
    with pytest.raises(UserError, match="the two halves of its skip projections need different ones"):
        shortcut_parameter_groups(uvit(shortcut_decay=1.0), 0.6, lr=1e-3)
    with pytest.raises(UserError, match="is decayed already: its optimizer needs no other rates"):
        shortcut_parameter_groups(sit(shortcut_decay=0.6), 0.6, lr=1e-3)


def test_an_eps_that_would_be_seen_is_told():
    deep = DecayedSiTTransformer2DModel(**{**SIZES, "num_layers": 28})
    remove_decay(deep)
    with pytest.warns(UserWarning, match="the norms add an eps of 1e-06 to its variance"):
        decay_shortcuts(deep, 0.8, keep_function=True)
