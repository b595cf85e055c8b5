"""What the decay is: an undecayed network with `--equivalent_decay` takes the steps of the decayed one."""

import copy

import pytest
import torch
from conftest import TINY_SIZES

from hf_decayed import DecayedViTMAEConfig, DecayedViTMAEForPreTraining
from hf_decayed.run.optimization import adamw, equivalent_groups


def train(model, groups=None, steps=30):
    """Losses on the same images and masks, with weight decay, in float64."""
    optimizer = adamw(model, 1e-3, (0.9, 0.95), 0.05, groups)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * group.get("rate_scale", 1.0)
        images = torch.randn(4, 3, 32, 32, generator=generator).double()
        noise = torch.rand(4, 16, generator=generator).double()
        loss = model(images, noise=noise).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


@pytest.fixture
def plain():
    """A network that reads its stream through norms alone, as the equivalence asks, and whose branches start at zero."""
    config = DecayedViTMAEConfig.plain(**TINY_SIZES, zero_init_branches=True, layer_norm_eps=1e-14)
    return DecayedViTMAEForPreTraining(config).double()


def test_equivalent_rates_reproduce_the_losses_of_the_decay(plain):
    decayed = DecayedViTMAEForPreTraining(DecayedViTMAEConfig(**{**plain.config.to_dict(), "shortcut_decay": 0.6}))
    decayed.double().load_state_dict(plain.state_dict())
    control = copy.deepcopy(plain)
    groups = equivalent_groups(plain, plain.vit.layers, decayed.config.shortcut_alphas(), 0.05)
    expected = train(decayed)
    torch.testing.assert_close(train(plain, groups), expected, rtol=1e-8, atol=1e-8)
    assert (train(control) - expected).abs().max() > 1e-4  # with equal rates they part
