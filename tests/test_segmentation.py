"""Metrics of dense features against independent computations, and what they say of features made by hand."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_decayed.evaluation import (
    cluster_miou,
    cluster_patches,
    coordinate_probe,
    knn_accuracy,
    oracle_miou,
    patch_labels,
    patch_probe,
    spatial_labels,
    whiten,
)
from hf_decayed.evaluation.segmentation import IGNORE_INDEX


def random_maps(seed, images=3, size=12, clusters=5, classes=3):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randint(0, clusters, (images, size, size), generator=generator),
        torch.randint(0, classes, (images, size, size), generator=generator),
    )


def miou_of_prediction(predicted, masks, classes):
    """From pixels, class by class; a prediction of -1 is none of the classes."""
    scores = []
    for number in range(classes):
        intersection = ((predicted == number) & (masks == number)).sum().item()
        union = ((predicted == number) | (masks == number)).sum().item()
        scores.append(intersection / union)
    return sum(scores) / len(scores)


@pytest.mark.parametrize("seed", range(3))
def test_hungarian_match_is_the_best_of_all_assignments(seed):
    clusters, masks = random_maps(seed)
    agreement = {}
    for chosen in itertools.permutations(range(5), 3):  # a cluster for each of the three classes
        predicted = torch.full_like(masks, -1)
        for number, cluster in enumerate(chosen):
            predicted[clusters == cluster] = number
        agreement[chosen] = ((predicted == masks).sum().item(), miou_of_prediction(predicted, masks, 3))
    most = max(pixels for pixels, _ in agreement.values())
    best = [
        score for pixels, score in agreement.values() if pixels == most
    ]  # several, where numbers of pixels are equal
    assert any(cluster_miou(clusters, masks) == pytest.approx(score) for score in best)


@pytest.mark.parametrize("seed", range(3))
def test_greedy_match_gives_each_cluster_its_most_frequent_class(seed):
    clusters, masks = random_maps(seed)
    predicted = torch.empty_like(masks)
    for cluster in range(5):
        predicted[clusters == cluster] = masks[clusters == cluster].mode().values
    assert cluster_miou(clusters, masks, "greedy") == pytest.approx(miou_of_prediction(predicted, masks, 3))


def test_names_of_clusters_do_not_matter_and_a_perfect_segmentation_scores_one():
    _, masks = random_maps(0)
    names = torch.tensor([7, 0, 3])
    for match in ("hungarian", "greedy"):
        assert cluster_miou(names[masks], masks, match) == 1.0
    assert oracle_miou(names[masks], masks) == 1.0


def test_hungarian_punishes_clusters_that_split_a_class_and_greedy_does_not():
    masks = torch.zeros(1, 4, 4, dtype=torch.long)
    masks[:, :, 2:] = 1
    clusters = torch.tensor([0, 1, 2, 3]).repeat(4, 1).unsqueeze(0)  # two clusters for each class
    assert cluster_miou(clusters, masks, "greedy") == 1.0
    assert cluster_miou(clusters, masks) == pytest.approx(0.5)


def test_clusters_of_patches_are_enlarged_to_the_mask():
    clusters = torch.tensor([[[0, 1], [2, 3]]])
    masks = clusters.repeat_interleave(5, 1).repeat_interleave(5, 2)
    assert cluster_miou(clusters, masks) == 1.0


def test_ignored_pixels_do_not_count():
    clusters, masks = random_maps(1)
    changed = clusters.clone()
    ignored = masks.clone()
    ignored[:, :6] = IGNORE_INDEX
    changed[:, :6] = 4
    for match in ("hungarian", "greedy"):
        assert cluster_miou(changed, ignored, match) == cluster_miou(clusters, ignored, match)
        assert cluster_miou(clusters, ignored, match) == pytest.approx(
            cluster_miou(clusters[:, 6:], masks[:, 6:], match)
        )


def test_a_class_that_does_not_occur_is_not_in_the_mean():
    clusters, masks = random_maps(2)
    assert cluster_miou(clusters, masks, num_classes=9) == cluster_miou(clusters, masks)


def test_oracle_matches_regions_image_by_image():
    # Region 0 is class 0 in one image and class 1 in the other: over a data set clusters cannot be right, regions are.
    regions = torch.tensor([[[0, 1]], [[0, 1]]])
    masks = torch.tensor([[[0, 1]], [[1, 0]]])
    assert oracle_miou(regions, masks) == 1.0
    assert cluster_miou(regions, masks, "greedy") < 1.0


def test_label_of_a_patch_is_that_of_most_of_its_pixels():
    mask = torch.tensor([[0, 0, 1, 1], [0, 2, 1, 0], [255, 255, 2, 2], [255, 255, 255, 255]])
    assert patch_labels(mask.unsqueeze(0), (2, 2)).tolist() == [[[0, 1], [255, 2]]]


def dense_features(kind, images=40, size=6, classes=3, seed=0):
    """Features that hold the class of a patch, or its position, and noise; with masks whose regions are anywhere."""
    generator = np.random.default_rng(seed)
    masks = np.repeat(np.repeat(generator.integers(0, classes, (images, size, size)), 4, axis=1), 4, axis=2)
    labels = masks[:, ::4, ::4]
    rows, columns = np.meshgrid(np.arange(size), np.arange(size), indexing="ij")
    what = np.eye(classes)[labels]
    where = np.broadcast_to(np.stack([rows, columns], axis=-1) / size, (images, size, size, 2))
    signal = what if kind == "what" else np.concatenate([where, where**2], axis=-1)
    noise = 0.05 * generator.standard_normal((images, size, size, 8))
    noise[..., : signal.shape[-1]] += signal
    return torch.from_numpy(noise).float(), torch.from_numpy(masks)


def test_features_of_what_and_of_where_are_told_apart():
    what, masks = dense_features("what")
    where, _ = dense_features("where")
    assert cluster_miou(cluster_patches(what, 3), masks) > 0.95
    assert cluster_miou(cluster_patches(where, 3), masks) < 0.4
    assert coordinate_probe(what).accuracy < 0.1
    assert coordinate_probe(where).r2 > 0.95 > 0.1 > coordinate_probe(what).r2
    assert coordinate_probe(where).mse < 0.1 * coordinate_probe(what).mse
    for method in ("linear", "knn"):
        assert patch_probe(what[:20], masks[:20], what[20:], masks[20:], method) > 0.95
        assert patch_probe(where[:20], masks[:20], where[20:], masks[20:], method) < 0.5


def test_coordinate_error_is_that_of_scikit_learns_ridge():
    from sklearn.linear_model import Ridge
    from sklearn.preprocessing import StandardScaler

    features, _ = dense_features("where", images=10)
    order = torch.randperm(10, generator=torch.Generator().manual_seed(0))
    train, test = (features[part].reshape(-1, 8).numpy().astype(np.float64) for part in (order[:8], order[8:]))
    rows, columns = np.meshgrid(*[np.linspace(0, 31, 6)] * 2, indexing="ij")
    coordinates = np.stack([rows, columns], axis=-1).reshape(-1, 2)
    scaler = StandardScaler().fit(train)
    scaler.scale_ = train.std(axis=0, ddof=1)
    ridge = Ridge(alpha=1e-3 * len(train)).fit(scaler.transform(train), np.tile(coordinates, (8, 1)))
    expected = ((ridge.predict(scaler.transform(test)) - np.tile(coordinates, (2, 1))) ** 2).mean()
    probe = coordinate_probe(features)
    assert probe.mse == pytest.approx(expected, rel=1e-6)
    assert probe.r2 == pytest.approx(1 - expected / coordinates.var(axis=0).mean(), rel=1e-6)


def test_constant_features_say_nothing_of_position():
    probe = coordinate_probe(torch.ones(10, 4, 4, 3))
    variance = np.linspace(0, 31, 4).var()
    assert probe.accuracy == pytest.approx(1 / 16) and probe.mse == pytest.approx(variance) and abs(probe.r2) < 1e-6


def test_left_and_right_of_a_class_are_two_classes():
    mask = torch.zeros(1, 20, 40, dtype=torch.long)
    mask[:, 2:12, 2:12] = 1  # left
    mask[:, 2:12, 28:38] = 1  # right
    mask[:, 14:18, 2:4] = 1  # too small
    mask[:, 14:19, 12:28] = 2  # in the middle
    sides = spatial_labels(mask)[0]
    assert (sides[2:12, 2:12] == 2).all() and (sides[2:12, 28:38] == 3).all()
    assert (sides[14:18, 2:4] == IGNORE_INDEX).all() and (sides[14:19, 12:28] == IGNORE_INDEX).all()


def test_whitened_training_features_have_unit_covariance_and_find_a_weak_direction():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(400) % 2
    features = torch.randn(400, 6, generator=generator)
    features[:, 0] *= 100.0  # a strong direction without meaning
    features[:, 5] = 0.3 * (2.0 * labels - 1) + 0.1 * features[:, 5]
    train, test = whiten(features[:300], features[300:])
    torch.testing.assert_close(train.T @ train / 300, torch.eye(6), atol=0.02, rtol=0)
    plain = knn_accuracy(features[:300], labels[:300], features[300:], labels[300:])
    assert knn_accuracy(train, labels[:300], test, labels[300:]) >= plain + 0.1


MASKS = torch.zeros(2, 4, 4, dtype=torch.long)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: cluster_miou(MASKS, torch.full_like(MASKS, 255)), "All pixels of the masks are 255"),
        (lambda: cluster_miou(MASKS, MASKS[0]), "shape (images, height, width)"),
        (lambda: cluster_miou(MASKS, MASKS.float()), "whole numbers"),
        (lambda: cluster_miou(MASKS, MASKS - 1), "counted from 0"),
        (lambda: cluster_miou(MASKS, MASKS + 5, num_classes=3), "end at 2, got 5"),
        (lambda: cluster_miou(MASKS[:1], MASKS), "need as many masks"),
        (lambda: cluster_miou(MASKS, MASKS, "best"), "'hungarian' or 'greedy'"),
        (lambda: cluster_patches(torch.rand(1, 2, 2, 3), 5), "5 clusters need as many patches; there are 4"),
        (lambda: cluster_patches(torch.full((1, 2, 2, 3), torch.nan), 2), "NaN or infinity"),
        (lambda: cluster_patches(torch.rand(4, 3), 2), "(images, height, width, dim)"),
        (lambda: coordinate_probe(torch.rand(4, 1, 1, 3)), "One patch per image"),
        (lambda: coordinate_probe(torch.rand(1, 4, 4, 3)), "two images or more"),
        (lambda: patch_labels(MASKS, (8, 8)), "smaller than the grid"),
        (lambda: patch_probe(torch.rand(2, 2, 2, 3), MASKS[:1], torch.rand(2, 2, 2, 3), MASKS), "as many masks"),
        (lambda: patch_probe(*[torch.rand(2, 2, 2, 3), MASKS] * 2, method="svm"), "'linear' or 'knn'"),
    ],
)
def test_bad_input_gets_one_sentence(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert message in str(error.value) and "\n" not in str(error.value)


def test_evaluate_modules_give_the_numbers_of_the_functions(tmp_path, monkeypatch):
    import evaluate

    import hf_decayed

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = Path(hf_decayed.__file__).parent / "metrics"

    def load(name):
        return evaluate.load(str(folder / name), cache_dir=str(tmp_path))

    clusters, masks = random_maps(0)
    maps = {"predictions": clusters.tolist(), "references": masks.tolist()}
    assert load("cluster_miou").compute(**maps) == {"cluster_miou": cluster_miou(clusters, masks)}
    greedy = load("cluster_miou").compute(**maps, match="greedy")
    assert greedy == {"cluster_miou": cluster_miou(clusters, masks, "greedy")}
    assert load("oracle_miou").compute(**maps) == {"oracle_miou": oracle_miou(clusters, masks)}
    features, masks = dense_features("what", images=8)
    position = load("coordinate_probe").compute(data=features.tolist())
    assert position["position_mse"] == pytest.approx(coordinate_probe(features).mse)
    assert position["position_accuracy"] == pytest.approx(coordinate_probe(features).accuracy)
    metric = load("patch_probe")
    train = {"train_features": features[:4].tolist(), "train_masks": masks[:4].tolist()}
    accuracy = metric.compute(predictions=features[4:].tolist(), references=masks[4:].tolist(), **train)
    assert accuracy == {"patch_accuracy": pytest.approx(patch_probe(features[:4], masks[:4], features[4:], masks[4:]))}
