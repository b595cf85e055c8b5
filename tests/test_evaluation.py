"""Measurements against independent implementations."""

import numpy as np
import pytest
import torch

from hf_decayed.evaluation import effective_rank, knn_accuracy


def by_hand(train, train_labels, test, test_labels, k, temperature):
    """One query at a time, in double precision."""
    train, test = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (train, test))
    correct = 0
    for query, label in zip(test, test_labels):
        similarity = train @ query
        nearest = np.argsort(-similarity, kind="stable")[:k]
        weights = np.ones(k) if temperature is None else np.exp(similarity[nearest] / temperature)
        votes = np.bincount(train_labels[nearest], weights, minlength=10)
        correct += votes.argmax() == label
    return correct / len(test)


@pytest.mark.parametrize("k", [1, 5, 20])
@pytest.mark.parametrize("temperature", [0.07, None])
def test_knn(k, temperature):
    random = np.random.default_rng(0)
    centres = random.normal(size=(10, 16))
    train_labels, test_labels = random.integers(0, 10, 500), random.integers(0, 10, 300)
    train = centres[train_labels] + 1.5 * random.normal(size=(500, 16))
    test = centres[test_labels] + 1.5 * random.normal(size=(300, 16))
    expected = by_hand(train, train_labels, test, test_labels, k, temperature)
    tensors = [torch.from_numpy(array) for array in (train, train_labels, test, test_labels)]
    assert 0.2 < expected < 0.95
    assert knn_accuracy(*tensors, k=k, temperature=temperature, chunk_size=64) == expected


@pytest.mark.parametrize(
    "change,message",
    [
        ({"k": 11}, r"`k` must lie in \[1, 10\].*got 11"),
        ({"k": 0}, "got 0"),
        ({"temperature": 0.0}, "`temperature` must be positive"),
        ({"test_features": torch.full((5, 4), torch.nan)}, "test: 5 features hold NaN"),
        ({"train_labels": torch.zeros(9, dtype=torch.long)}, r"train: .*got \(10, 4\) and \(9,\)"),
        ({"test_labels": torch.full((5,), -1)}, "test: labels must be counted from 0, got -1"),
        ({"test_features": torch.ones(5, 3)}, "one width, got 4 in training and 3 in test"),
    ],
)
def test_knn_refuses(change, message):
    arguments = {
        "train_features": torch.randn(10, 4),
        "train_labels": torch.zeros(10, dtype=torch.long),
        "test_features": torch.randn(5, 4),
        "test_labels": torch.zeros(5, dtype=torch.long),
        "k": 3,
    }
    with pytest.raises(ValueError, match=message):
        knn_accuracy(**{**arguments, **change})


@pytest.mark.parametrize("shape", [(200, 12), (8, 30)])
def test_effective_rank_is_the_formula(shape):
    features = np.random.default_rng(0).normal(size=shape) * np.linspace(0.1, 3, shape[1])
    centred = features - features.mean(0)
    singular = np.linalg.svd(centred @ centred.T, compute_uv=False)  # sample by sample, as the paper has it
    shares = singular / singular.sum()
    entropy = -(shares * np.log(shares, where=shares > 0, out=np.zeros_like(shares))).sum()
    assert effective_rank(torch.from_numpy(features)) == pytest.approx(entropy, rel=1e-9)
    assert effective_rank(torch.from_numpy(features), "exponential") == pytest.approx(np.exp(entropy), rel=1e-9)
    shares = np.linalg.svd(features, compute_uv=False)
    shares = shares / shares.sum()
    assert effective_rank(torch.from_numpy(features), "rankme") == pytest.approx(
        np.exp(-(shares * np.log(shares)).sum())
    )


def test_effective_rank_at_the_extremes():
    assert effective_rank(torch.full((50, 8), 3.7)) == 0.0
    assert effective_rank(torch.zeros(50, 8), "exponential") == 1.0
    equal = torch.cat([torch.eye(8), -torch.eye(8)])
    assert effective_rank(equal, "exponential") == pytest.approx(8)
    with pytest.raises(ValueError, match="1 features hold NaN"):
        effective_rank(torch.tensor([[1.0, torch.nan], [0.0, 1.0]]))
    with pytest.raises(ValueError, match="`kind` must be"):
        effective_rank(equal, "stable")
