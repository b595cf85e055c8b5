"""Measurements against independent implementations."""

import ast
import doctest
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import evaluate
import numpy as np
import pytest
import scipy.linalg
import torch
from conftest import ROOT
from loopback_hub import serve
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.neighbors import KNeighborsClassifier, NearestNeighbors
from threadpoolctl import threadpool_info
from torch.nn import functional as F

import hf_decayed
from hf_decayed.evaluation import (
    PROTOCOLS,
    density_coverage,
    effective_rank,
    frechet_distance,
    kernel_distance,
    knn_accuracy,
    linear_probe,
    precision_recall,
    products,
    skip_ablation,
)
from hf_decayed.evaluation.generation import inception_score, sample_scores
from hf_decayed.evaluation.knn import candidates_of_rows, find_neighbours, find_neighbours_twice


def knn_by_hand(train, train_labels, test, test_labels, k, temperature):
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
    expected = knn_by_hand(train, train_labels, test, test_labels, k, temperature)
    tensors = [torch.from_numpy(array) for array in (train, train_labels, test, test_labels)]
    assert 0.2 < expected < 0.95
    assert knn_accuracy(*tensors, k=k, temperature=temperature, chunk_size=64) == expected
    with mock.patch("hf_decayed.evaluation.knn.BANK_BLOCK", 15):  # a bank in blocks smaller than k
        assert knn_accuracy(*tensors, k=k, temperature=temperature) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offset,searched_again", [(0.0, 0), (30.0, 100)], ids=["apart", "alike"])
def test_first_pass_in_low_precision_finds_the_same_neighbours(dtype, offset, searched_again):
    """Also where all features are alike to that precision, which is then not used."""
    generator = torch.Generator().manual_seed(0)
    bank, queries = (offset + torch.randn(number, 8, generator=generator) for number in (3000, 100))
    with mock.patch("hf_decayed.evaluation.knn.BANK_BLOCK", 700):
        expected = find_neighbours(bank, queries, 5, 64)
        with mock.patch("hf_decayed.evaluation.knn.find_neighbours", wraps=find_neighbours) as search:
            best, neighbours = find_neighbours_twice(bank, queries, 5, 64, dtype)
    torch.testing.assert_close(best, expected[0], rtol=0, atol=1e-6)
    assert torch.equal(neighbours.sort().values, expected[1].sort().values)
    again = len(search.call_args_list[1].args[1]) if search.call_count == 2 else 0
    assert again == 100 if searched_again else again < 20
    labels = torch.arange(3000) % 7, torch.arange(100) % 7
    with_first_pass, plain = (knn_accuracy(bank, labels[0], queries, labels[1], first_pass=t) for t in (dtype, None))
    assert with_first_pass == plain


@pytest.mark.parametrize("shape,k", [((7, 5000), 20), ((3, 4097), 5), ((4, 100), 20)])
@pytest.mark.parametrize("at_least", [-torch.inf, 1.5, 3.0, 10.0])
def test_candidates_hold_the_top_of_long_rows(shape, k, at_least):
    """The k largest values of a row, as far as they are above what was found before."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    candidates, indices = candidates_of_rows(values, k, torch.full((len(values), 1), at_least))
    assert torch.equal(values.gather(1, indices), candidates)
    for row, found in zip(values, candidates):
        top = row.topk(k).values
        assert torch.isin(top[top > at_least], found).all()


@pytest.mark.parametrize("k", [5, 50])
def test_blocks_of_a_bank_do_not_change_the_neighbours(k):
    """Later blocks are searched only where they can hold a nearer neighbour; the best ones come first, last or anywhere."""
    generator = torch.Generator().manual_seed(0)
    bank, queries = torch.randn(6000, 8, generator=generator), torch.randn(50, 8, generator=generator)
    order = torch.argsort(bank @ queries[0])
    for rows in (bank, bank[order], bank[order.flip(0)]):
        similarities = F.normalize(queries.double(), dim=1) @ F.normalize(rows.double(), dim=1).T
        expected = similarities.topk(k, dim=1)
        for size in (700, 2048, 6000):
            with mock.patch("hf_decayed.evaluation.knn.BANK_BLOCK", size):
                best, neighbours = find_neighbours(rows, queries, k, 16)
            assert torch.equal(neighbours, expected.indices)
            torch.testing.assert_close(best.double(), expected.values, rtol=0, atol=1e-6)


def test_knn_with_a_temperature_near_zero_asks_the_nearest():
    train, train_labels, test, test_labels = map(torch.from_numpy, classes_in_features())
    nearest = knn_accuracy(train, train_labels, test, test_labels, k=1)
    assert knn_accuracy(train, train_labels, test, test_labels, temperature=1e-5) == pytest.approx(nearest, abs=0.01)


def test_knn_majority_is_scikit_learns():
    random = np.random.default_rng(0)
    train, test = random.normal(size=(400, 8)), random.normal(size=(200, 8))
    train_labels, test_labels = (3 * (x[:, 0] > 0.3) + (x[:, 1] > 0) for x in (train, test))
    theirs = KNeighborsClassifier(7, metric="cosine").fit(train, train_labels).score(test, test_labels)
    tensors = [torch.from_numpy(array) for array in (train, train_labels, test, test_labels)]
    assert knn_accuracy(*tensors, k=7, temperature=None) == theirs


@pytest.mark.parametrize(
    "change,message",
    [
        ({"k": 11}, r"`k` must lie in \[1, 10\].*got 11"),
        ({"k": 0}, "got 0"),
        ({"temperature": 0.0}, "`temperature` must be positive"),
        ({"first_pass": torch.int8}, "`first_pass` must be None, torch.bfloat16 or torch.float16, got torch.int8"),
        ({"test_features": torch.full((5, 4), torch.nan)}, "test: 5 features hold NaN"),
        ({"train_labels": torch.arange(9)}, r"train: 10 features need as many labels, got shape \(9,\)"),
        (
            {"train_labels": torch.zeros(10, dtype=torch.long)},
            "train: all labels are 0; there is nothing to tell apart",
        ),
        ({"train_labels": torch.rand(10)}, "train: labels must be whole numbers, got torch.float32"),
        (
            {"num_classes": 2, "test_labels": torch.full((5,), 2)},
            "Label 2 is out of range: with 2 classes they end at 1",
        ),
        ({"test_labels": torch.full((5,), -1)}, "test: labels must be counted from 0, got -1"),
        ({"test_features": torch.ones(5, 3)}, "one width, got 4 in training and 3 in test"),
    ],
)
def test_knn_refuses(change, message):
    arguments = {
        "train_features": torch.randn(10, 4),
        "train_labels": torch.arange(10) % 2,
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
    # In float32, far from the origin, the same but for rounding.
    assert effective_rank(torch.from_numpy(features + 100).float()) == pytest.approx(entropy, rel=1e-4)
    shares = np.linalg.svd(features, compute_uv=False)
    shares = shares / shares.sum()
    assert effective_rank(torch.from_numpy(features), "rankme") == pytest.approx(
        np.exp(-(shares * np.log(shares)).sum())
    )


def test_effective_rank_of_sorted_features():
    """The mean is taken from a sample of the rows; rows sorted by class must not change the result."""
    random = np.random.default_rng(0)
    features = random.normal(size=(9000, 6)) * [3, 2, 1, 1, 0.5, 0.1] + 50
    features[:5000] += [0, 40, 0, 0, -7, 0]
    shares = np.linalg.eigvalsh(np.cov(features.T))
    shares /= shares.sum()
    expected = -(shares * np.log(shares)).sum()
    for rows in (features, features[::-1].copy()):
        assert effective_rank(torch.from_numpy(rows)) == pytest.approx(expected, rel=1e-9)
        assert effective_rank(torch.from_numpy(rows).float()) == pytest.approx(expected, rel=1e-5)


def test_products_of_numpy_are_those_of_torch(monkeypatch):
    """On an AMD CPU NumPy multiplies; neighbours and rank do not depend on it."""
    generator = torch.Generator().manual_seed(0)
    bank, queries = torch.randn(5000, 24, generator=generator), torch.randn(300, 24, generator=generator)
    results = {}
    for in_numpy in (False, True):
        monkeypatch.setattr(products, "numpy_is_faster", lambda in_numpy=in_numpy: in_numpy)
        assert products.runs_in_numpy(bank) == in_numpy
        assert not products.runs_in_numpy(bank.double()) and not products.runs_in_numpy(bank.bfloat16())
        results[in_numpy] = (*find_neighbours(bank, queries, 20, 128), torch.tensor(effective_rank(bank)))
    for ours, theirs in zip(results[False], results[True]):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


def test_numpy_multiplies_with_as_many_threads_as_torch(monkeypatch):
    def threads():
        return [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]

    if not threads():
        pytest.skip("NumPy multiplies with a library whose threads cannot be set")
    monkeypatch.setattr(products, "numpy_is_faster", lambda: True)
    before, of_torch = threads(), torch.get_num_threads()
    torch.set_num_threads(before[0] + 1)
    try:
        with products.same_threads():
            assert set(threads()) == {before[0] + 1}
    finally:
        torch.set_num_threads(of_torch)
    assert threads() == before


def test_effective_rank_at_the_extremes():
    assert effective_rank(torch.full((50, 8), 3.7)) == 0.0
    assert effective_rank(torch.zeros(50, 8), "exponential") == 1.0
    equal = torch.cat([torch.eye(8), -torch.eye(8)])
    assert effective_rank(equal, "exponential") == pytest.approx(8)
    with pytest.raises(ValueError, match="1 features hold NaN"):
        effective_rank(torch.tensor([[1.0, torch.nan], [0.0, 1.0]]))
    with pytest.raises(ValueError, match="`kind` must be"):
        effective_rank(equal, "stable")


def classes_in_features(seed=0):
    random = np.random.default_rng(seed)
    centres = random.normal(size=(5, 12))
    labels = random.integers(0, 5, 900)
    features = (centres[labels] + 1.2 * random.normal(size=(900, 12))) * np.geomspace(0.1, 10, 12) + 3
    return features[:600], labels[:600], features[600:], labels[600:]


@pytest.mark.slow
def test_linear_probes_are_scikit_learns():
    train, train_labels, test, test_labels = classes_in_features()
    tensors = [torch.from_numpy(array) for array in (train, train_labels, test, test_labels)]
    standard = [(x - train.mean(0)) / train.std(0, ddof=1) for x in (train, test)]
    theirs = RidgeClassifier(alpha=1e-3 * 600).fit(standard[0], train_labels).score(standard[1], test_labels)
    assert linear_probe(*tensors, protocol="ridge") == pytest.approx(theirs, abs=1e-9)
    # Both go to the best linear classifier, by steps, so they come near it; one brings its own normalisation.
    best = LogisticRegression(max_iter=5000).fit(standard[0], train_labels).score(standard[1], test_labels)
    scaled = [torch.from_numpy(standard[0]), tensors[1], torch.from_numpy(standard[1]), tensors[3]]
    # Rate and epochs of the second are made for a million images: with few it needs more, and says so.
    with pytest.warns(UserWarning, match="600 images .* hardly moves"):
        assert linear_probe(*tensors, protocol="mae_imagenet1k") < 0.5
    longer = replace(PROTOCOLS["mae_imagenet1k"], learning_rate=3.0, epochs=200, warmup_epochs=20)
    for protocol, data in (("paper_imagenet100", scaled), (longer, tensors)):
        accuracy = linear_probe(*data, protocol=protocol)
        assert abs(accuracy - best) < 0.04, (protocol, accuracy, best)
        assert accuracy == linear_probe(*data, protocol=protocol)  # deterministic
    shuffled = linear_probe(tensors[0], tensors[1][torch.randperm(600)], *tensors[2:])
    assert shuffled < 0.4 < best
    with pytest.raises(ValueError, match="train: all labels are 1"):
        linear_probe(tensors[0], torch.ones(600, dtype=torch.long), *tensors[2:])


@pytest.mark.parametrize("skips, layers", [(True, [6, 4, 2]), (2, [6, 4])])
def test_skip_ablation(skips, layers):
    config = hf_decayed.DecayedViTMAEConfig(
        image_size=16,
        patch_size=4,
        hidden_size=24,
        num_hidden_layers=6,
        num_attention_heads=2,
        intermediate_size=32,
        encoder_decoder_skips=skips,
        decoder_hidden_size=16,
        decoder_num_hidden_layers=3,
        decoder_num_attention_heads=2,
        decoder_intermediate_size=32,
        shortcut_decay=0.8,
    )
    torch.manual_seed(0)
    model = hf_decayed.DecayedViTMAEForPreTraining(config).eval().double()  # for small differences
    for parameter in model.parameters():  # zero-initialised branches would hide everything
        torch.nn.init.normal_(parameter, std=0.2)
    for index, skip in enumerate(model.decoder.skips):
        torch.nn.init.normal_(skip.output_projection.weight, std=0.0 if index == 1 else 2.0)
    images, noise = torch.randn(10, 3, 16, 16).double(), torch.rand(10, 16)
    increases = skip_ablation(model, images, noise, batch_size=10)
    assert list(increases) == layers
    assert increases[layers[1]] == 0.0  # its projection is zero
    with torch.no_grad():
        outputs = model.vit(images, noise=noise, output_skips=True, output_hidden_states=True)
        whole = model(images, noise=noise)
        for index, layer in enumerate(layers):
            assert torch.equal(outputs.skips[index], outputs.hidden_states[layer])
            skips = [skip.clone() for skip in outputs.skips]
            skips[index][:, 0] = skips[index][:, 0].mean(dim=0)
            skips[index][:, 1:] = skips[index][:, 1:].mean(dim=(0, 1))
            predicted = model.decoder(outputs.last_hidden_state, outputs.ids_restore, tuple(skips))
            predicted = predicted.gather(1, outputs.ids_restore.unsqueeze(2).expand_as(predicted))
            error = (predicted - model.patchify(images)).square().mean(dim=2)
            expected = (error * whole.mask).sum() / whole.mask.sum() - whole.loss
            assert increases[layer] == pytest.approx(expected.item(), abs=1e-9)
            assert index == 1 or abs(increases[layer]) > 1e-6
    assert skip_ablation(model, images, noise, batch_size=10)[layers[0]] == increases[layers[0]]  # hooks are removed
    # Batches of equal size, each with its own means.
    halves = [skip_ablation(model, images[half], noise[half]) for half in (slice(0, 5), slice(5, 10))]
    together = skip_ablation(model, images, noise, batch_size=9)
    assert together[layers[0]] == pytest.approx((halves[0][layers[0]] + halves[1][layers[0]]) / 2, abs=1e-9)
    with pytest.raises(ValueError, match="10 images need as many rows of noise, got 9"):
        skip_ablation(model, images, noise[:9])
    with pytest.warns(FutureWarning, match="`skip_use` is now called `skip_ablation`"):
        assert hf_decayed.evaluation.skip_use is skip_ablation
    plain = hf_decayed.DecayedViTMAEConfig.plain("small", num_hidden_layers=1, decoder_num_hidden_layers=1)
    assert skip_ablation(hf_decayed.DecayedViTMAEForPreTraining(plain), images, noise) == {}


def two_sets(number=300, dim=6):
    random = np.random.default_rng(0)
    mix = random.normal(size=(dim, dim))
    return random.normal(size=(number, dim)) @ mix, random.normal(size=(number - 50, dim)) * 1.3 + 0.4


@pytest.mark.parametrize("number", [300, 56])  # 56: fewer generated samples than dimensions, so a singular covariance
def test_frechet_distance_is_the_formula(number):
    real, generated = two_sets(number)
    root = scipy.linalg.sqrtm(np.cov(real.T) @ np.cov(generated.T)).real
    expected = ((real.mean(0) - generated.mean(0)) ** 2).sum()
    expected += np.trace(np.cov(real.T) + np.cov(generated.T) - 2 * root)
    assert frechet_distance(*map(torch.from_numpy, (real, generated))) == pytest.approx(expected, rel=1e-6)
    assert frechet_distance(*map(torch.from_numpy, (real, real))) == pytest.approx(0, abs=1e-6)


def test_kernel_distance_is_the_formula():
    real, generated = two_sets()
    size = len(generated)
    distances = []
    for _ in range(2):
        real = real[:size]
        kernels = [(a @ b.T / 6 + 1) ** 3 for a, b in ((real, real), (generated, generated), (real, generated))]
        within = sum((matrix.sum() - np.trace(matrix)) / (size * (size - 1)) for matrix in kernels[:2])
        distances.append(within - 2 * kernels[2].mean())
    mean, deviation = kernel_distance(*map(torch.from_numpy, (real, generated)), num_subsets=2)
    assert mean == pytest.approx(distances[0]) and deviation == pytest.approx(0, abs=1e-9)
    # One distribution: zero within the deviation; subsets differ, but are the same in every call.
    same = torch.from_numpy(np.random.default_rng(1).normal(size=(2000, 6)))
    mean, deviation = kernel_distance(same[:1000], same[1000:], subset_size=200)
    assert abs(mean) < 3 * deviation and (mean, deviation) == kernel_distance(
        same[:1000], same[1000:], subset_size=200
    )


def test_precision_and_recall():
    real, generated = two_sets()
    inside = []
    for features, queries in ((real, generated), (generated, real)):
        distances, _ = NearestNeighbors(n_neighbors=4).fit(features).kneighbors(features)
        between = np.linalg.norm(queries[:, None] - features[None], axis=-1)
        inside.append((between <= distances[:, -1]).any(1).mean())
    assert precision_recall(*map(torch.from_numpy, (real, generated)), chunk_size=64) == pytest.approx(tuple(inside))
    near, far = torch.randn(100, 4), torch.randn(100, 4) + 100
    assert precision_recall(near, near) == (1.0, 1.0) and precision_recall(near, far) == (0.0, 0.0)


def test_density_and_coverage_are_the_counts():
    random = np.random.default_rng(0)
    real, generated = random.normal(size=(150, 4)), random.normal(size=(130, 4)) + 0.5
    reach = NearestNeighbors(n_neighbors=6).fit(real).kneighbors(real)[0][:, -1]
    inside = np.linalg.norm(generated[:, None] - real[None], axis=-1) <= reach
    expected = inside.sum() / (5 * 130), inside.any(0).mean()
    assert density_coverage(*map(torch.from_numpy, (real, generated)), chunk_size=64) == pytest.approx(expected)
    same, far = torch.randn(4000, 2), torch.randn(50, 2) + 100
    density, coverage = density_coverage(same, torch.randn(4000, 2))
    assert abs(density - 1) < 0.1 and coverage > 0.9
    assert density_coverage(same, far) == (0.0, 0.0)


def test_neighbours_do_not_depend_on_the_origin():
    """Features of a network may have a mean a hundred times their spread."""
    real, generated = torch.randn(500, 16, dtype=torch.float64), 1.1 * torch.randn(500, 16, dtype=torch.float64)
    for measure in (precision_recall, density_coverage):
        assert measure(real + 1e5, generated + 1e5) == pytest.approx(measure(real, generated), abs=0.01)


def test_the_frechet_distance_spreads_as_new_samples_would():
    real = torch.randn(2000, 6)
    over_sets = np.std([frechet_distance(real, torch.randn(300, 6) + 0.3) for _ in range(40)])
    sets = {"features": real}, {"features": torch.randn(300, 6) + 0.3}
    spread = sample_scores(*sets, ["frechet"], name="any", bootstraps=40)["frechet_any_spread"]
    assert 0.6 < spread / over_sets < 1.6


def test_inception_score_is_the_formula():
    logits = 3 * torch.randn(120, 7, dtype=torch.float64)
    probabilities = logits.softmax(1).numpy()
    divergence = (probabilities * np.log(probabilities / probabilities.mean(0))).sum(1).mean()
    assert inception_score(logits, splits=1) == pytest.approx((np.exp(divergence), 0.0))
    assert inception_score(torch.zeros(50, 7))[0] == pytest.approx(1.0)  # uniform predictions
    certain = 1000 * torch.nn.functional.one_hot(torch.arange(700) % 7).double()
    assert inception_score(certain, splits=1)[0] == pytest.approx(7.0)  # certain predictions of all classes


def test_distances_refuse():
    for distance in (frechet_distance, kernel_distance, precision_recall, density_coverage):
        with pytest.raises(ValueError, match="generated: 2 features hold NaN"):
            distance(torch.randn(8, 3), torch.full((2, 3), torch.nan))
        with pytest.raises(ValueError, match="one width, got 3 .real. and 4 .generated."):
            distance(torch.randn(8, 3), torch.randn(8, 4))
        with pytest.raises(ValueError, match="real: need at least . features, got 1"):
            distance(torch.randn(1, 3), torch.randn(8, 3))


@pytest.mark.parametrize("by", ["path", "file"])
def test_evaluate_modules_give_the_functions_numbers(by, tmp_path, monkeypatch):
    """Loaded by path, without a network, with numpy arrays, in batches."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = Path(hf_decayed.__file__).parent / "metrics"

    def load(name):
        path = folder / name if by == "path" else folder / name / f"{name}.py"
        return evaluate.load(str(path), cache_dir=str(tmp_path))

    train, train_labels, test, test_labels = classes_in_features()
    tensors = [torch.from_numpy(array).float() for array in (train, test)]
    labelled = (tensors[0], torch.from_numpy(train_labels), tensors[1], torch.from_numpy(test_labels))
    for name, function, key in (
        ("knn_accuracy", knn_accuracy, "knn_accuracy"),
        ("linear_probe", partial(linear_probe, protocol="ridge"), "linear_accuracy"),
    ):
        metric = load(name)
        for start in range(0, len(test), 128):
            part = slice(start, start + 128)
            metric.add_batch(predictions=test[part], references=test_labels[part])
        assert metric.compute(train_features=train, train_labels=train_labels) == {key: function(*labelled)}
    rank = load("effective_rank").compute(data=test, kind="exponential")["effective_rank"]
    assert rank == pytest.approx(effective_rank(tensors[1], "exponential"))
    generated = {"predictions": test, "real_features": train}
    assert load("frechet_distance").compute(**generated)["frechet_distance"] == pytest.approx(
        frechet_distance(*tensors)
    )
    assert load("kernel_distance").compute(**generated, num_subsets=3)["kernel_distance"] == pytest.approx(
        kernel_distance(*tensors, num_subsets=3)[0]
    )
    assert tuple(load("precision_recall").compute(**generated).values()) == precision_recall(*tensors)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_evaluate_modules_load_as_spaces(tmp_path):
    """Where `evaluate.load("user/name")` looks for community metrics: a Space with the module's file."""
    shutil.copytree(Path(hf_decayed.__file__).parent / "metrics", tmp_path / "hub" / "user")
    program = """
import evaluate, json, sys
results = {}
for name, inputs in json.loads(sys.argv[1]).items():
    results.update(evaluate.load("user/" + name).compute(**inputs))
print(json.dumps(results))
"""
    bank, queries = [[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]], [[1.0, 0.2], [0.1, 1.0]]
    labelled = {"predictions": queries, "references": [0, 0], "train_features": bank, "train_labels": [0, 0, 1, 1]}
    inputs = {"knn_accuracy": {**labelled, "k": 1}, "effective_rank": {"data": bank}}
    with serve(tmp_path / "hub") as server:
        environment = {"HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "cache")}
        result = subprocess.run(
            [sys.executable, "-c", program, json.dumps(inputs)],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
    assert result.returncode == 0, result.stderr[-2000:]
    results = json.loads(result.stdout.splitlines()[-1])
    assert results["knn_accuracy"] == 0.5 and results["effective_rank"] == pytest.approx(
        effective_rank(torch.tensor(bank))
    )
    assert "user/knn_accuracy/resolve" in " ".join(server.downloads)


@pytest.mark.parametrize("path", sorted((ROOT / "hf_decayed/metrics").glob("*/*.py")), ids=lambda path: path.stem)
def test_examples_of_evaluate_modules(path, monkeypatch):
    """The lines of the docstring run and print what they say; every module names the paper of its metric."""
    monkeypatch.chdir(ROOT)
    text = ast.get_docstring(ast.parse(path.read_text()))
    example = doctest.DocTestParser().get_doctest(text, {}, path.stem, str(path), 0)
    assert len(example.examples) > 3 and doctest.DocTestRunner(verbose=False).run(example).failed == 0
    assert re.search(r'citation="[^"]{20,}"', path.read_text())
