"""The schedules: end points, order, products, and the paper's table of effective decays."""

import math
from pathlib import Path

import pytest
from PIL import Image

from hf_decayed.models.shortcut_decay import (
    branch_depths,
    effective_decay,
    layer_shortcut_factors,
    suggest_shortcut_decay,
)
from hf_decayed.plots import save_schedules


RESULTS = Path(__file__).parents[1] / "model_cards" / "results"


def flat(factors):
    return [alpha for pair in factors for alpha in pair]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("num_layers", [1, 2, 12, 24])
def test_falls_from_one_to_the_decay(schedule, num_layers):
    factors = flat(layer_shortcut_factors(num_layers, 0.6, schedule))
    assert len(factors) == 2 * num_layers
    assert factors[0] == 1.0
    assert factors[-1] == pytest.approx(0.6, abs=1e-12)
    assert factors == sorted(factors, reverse=True)
    assert len(set(factors)) == len(factors)


def test_linear_sublayer_steps_are_equal():
    factors = flat(layer_shortcut_factors(12, 0.6))
    assert [factors[k] for k in (0, 1, 23)] == pytest.approx([1.0, 1.0 - 0.4 / 23, 0.6])


def test_layer_granularity_is_the_papers_equation():
    for layer, (attention, mlp) in enumerate(layer_shortcut_factors(12, 0.6, granularity="layer"), start=1):
        assert attention == mlp == pytest.approx(1 - layer * (1 - 0.6) / 12)


def test_cosine_is_half_way_in_the_middle_and_flat_at_the_ends():
    assert flat(layer_shortcut_factors(2, 0.6, "cosine"))[1:3] == pytest.approx(
        [0.6 + 0.2 * (1 + math.cos(math.pi / 3)), 0.6 + 0.2 * (1 + math.cos(2 * math.pi / 3))]
    )


def test_constant_is_the_decay_everywhere():
    assert flat(layer_shortcut_factors(3, 0.8, "constant")) == pytest.approx([0.8] * 6)


def test_scope_does_not_change_the_depths():
    both = layer_shortcut_factors(4, 0.6)
    assert layer_shortcut_factors(4, 0.6, scope="attention") == [(attention, 1.0) for attention, _ in both]
    assert layer_shortcut_factors(4, 0.6, scope="mlp") == [(1.0, mlp) for _, mlp in both]


# Effective decay of the linear sublayer schedule, to two digits, from the paper.
TABLE = {
    6: {0.5: 2.4e-2, 0.6: 5.9e-2, 0.7: 0.13, 0.8: 0.27, 0.9: 0.54},
    8: {0.5: 7.1e-3, 0.6: 2.3e-2, 0.7: 6.8e-2, 0.8: 0.18, 0.9: 0.44},
    12: {0.5: 6.1e-4, 0.6: 3.6e-3, 0.7: 1.8e-2, 0.8: 7.6e-2, 0.9: 0.29},
    13: {0.5: 3.3e-4, 0.6: 2.2e-3, 0.7: 1.3e-2, 0.8: 6.1e-2, 0.9: 0.26},
    17: {0.5: 2.8e-5, 0.6: 3.5e-4, 0.7: 3.3e-3, 0.8: 2.6e-2, 0.9: 0.17},
    18: {0.5: 1.5e-5, 0.6: 2.2e-4, 0.7: 2.4e-3, 0.8: 2.1e-2, 0.9: 0.16},
    24: {0.5: 3.9e-7, 0.6: 1.3e-5, 0.7: 3.15e-4, 0.8: 5.7e-3, 0.9: 8.3e-2},
    28: {0.8: 2.4e-3},
}


@pytest.mark.parametrize("num_layers,row", TABLE.items())
def test_effective_decay_table(num_layers, row):
    for decay, expected in row.items():
        half_a_digit = 0.5 * 10 ** (math.floor(math.log10(expected)) - 1)
        assert effective_decay(num_layers, decay) == pytest.approx(expected, abs=1.01 * half_a_digit)


def test_effective_decay_of_the_papers_formula():
    assert effective_decay(12, 0.6, granularity="layer") == pytest.approx(2.2e-3, rel=0.02)
    assert effective_decay(12, 1.0) == 1.0
    assert effective_decay(3, 0.8, "constant") == pytest.approx(0.8**6)


@pytest.mark.parametrize("num_layers,expected", [(12, 0.590), (18, 0.711), (24, 0.777), (28, 0.807)])
def test_suggestion(num_layers, expected):
    assert round(suggest_shortcut_decay(num_layers), 3) == expected


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
@pytest.mark.parametrize("granularity", ["sublayer", "layer"])
@pytest.mark.parametrize("scope", ["both", "attention", "mlp"])
def test_suggestion_meets_its_target(schedule, granularity, scope):
    decay = suggest_shortcut_decay(10, 5e-3, schedule, granularity, scope)
    assert effective_decay(10, decay, schedule, granularity, scope) == pytest.approx(5e-3, rel=1e-3)


@pytest.mark.parametrize(
    "arguments,message",
    [
        ({"shortcut_decay": 1.5}, r"`shortcut_decay` must lie in \[0, 1\], got 1.5"),
        ({"shortcut_decay": math.nan}, "got nan"),
        ({"shortcut_decay": 0.6, "schedule": "linar"}, "`schedule` must be one of .* got 'linar'"),
        ({"shortcut_decay": 0.6, "scope": "ffn"}, "`scope` must be .* got 'ffn'"),
        ({"shortcut_decay": 0.6, "granularity": "block"}, "`granularity` must be .* got 'block'"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        effective_decay(12, **arguments)
    with pytest.raises(ValueError, match="`num_layers` must be at least 1, got 0"):
        effective_decay(0, 0.6)
    with pytest.raises(ValueError, match="`target` must lie in"):
        suggest_shortcut_decay(12, target=0.0)


def test_a_target_out_of_reach_is_refused():
    with pytest.raises(
        ValueError, match="4 layers with scope 'attention' .* cannot reach .* even `shortcut_decay=0` gives 0.044"
    ):
        suggest_shortcut_decay(4, scope="attention")


def test_depths_cover_zero_to_one():
    assert branch_depths(2) == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert branch_depths(2, "layer") == [0.5, 0.5, 1.0, 1.0]


def test_the_plot_of_the_schedules_can_be_drawn_again(tmp_path):
    save_schedules(tmp_path / "schedules.png")
    drawn, published = (Image.open(path) for path in (tmp_path / "schedules.png", RESULTS / "schedules.png"))
    assert drawn.size == published.size
