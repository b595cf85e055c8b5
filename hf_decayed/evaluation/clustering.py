"""How well clusters of features agree with classes: spherical k-means, accuracy, mutual information, purity; and a linear SVM."""

from collections.abc import Callable

import torch
from torch.nn import functional as F

from ..errors import UserError
from .effective_rank import in_double
from .knn import check_labelled, check_splits


NUM_RUNS = 20  # as in the dissertation


@torch.no_grad()
def spherical_kmeans(
    features: torch.Tensor, num_clusters: int, seed: int = 0, restarts: int = 1, max_iterations: int = 100
) -> torch.Tensor:
    """Clusters `(number,)` of features by their directions: cosine similarity, and centres of length 1.

    Args:
        features (`torch.Tensor` of shape `(number, dim)`): Features, of any scale.
        seed (`int`): Seed of the initial centres, which are drawn as in k-means++.
        restarts (`int`, defaults to 1): Number of runs, of which the one with the largest sum of similarities is kept.
    """
    if not 1 <= num_clusters <= len(features):
        raise ValueError(f"`num_clusters` must lie in [1, {len(features)}], got {num_clusters}.")
    rows = F.normalize(in_double(features).cpu(), dim=1)
    generator = torch.Generator().manual_seed(seed)
    best, best_score = torch.zeros(len(rows), dtype=torch.long), -torch.inf
    for _ in range(restarts):
        centres = first_centres(rows, num_clusters, generator)
        clusters = None
        for _ in range(max_iterations):
            similarity, assigned = (rows @ centres.T).max(dim=1)
            if clusters is not None and torch.equal(assigned, clusters):
                break
            clusters = assigned
            sums = torch.zeros_like(centres).index_add_(0, clusters, rows)
            is_empty = torch.bincount(clusters, minlength=num_clusters) == 0
            centres = F.normalize(torch.where(is_empty[:, None], centres, sums), dim=1)
        if similarity.sum() > best_score:
            best, best_score = assigned, similarity.sum()
    return best.to(features.device)


def first_centres(rows: torch.Tensor, number: int, generator: torch.Generator) -> torch.Tensor:
    """Rows, each drawn with a probability that grows with its distance to those before it."""
    chosen = [int(torch.randint(len(rows), (), generator=generator))]
    distance = torch.full((len(rows),), torch.inf, dtype=rows.dtype)
    for _ in range(number - 1):
        distance = torch.minimum(distance, (1 - rows @ rows[chosen[-1]]).clamp(min=0))
        weights = distance if distance.sum() > 0 else torch.ones_like(distance)  # all rows are alike
        chosen.append(int(torch.multinomial(weights, 1, generator=generator)))
    return rows[chosen].clone()


def contingency(clusters: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Number of samples of every class in every cluster, `(clusters, classes)`."""
    if clusters.shape != labels.shape or clusters.ndim != 1 or len(clusters) == 0:
        raise ValueError(
            f"Clusters and labels must be two lists of one length, got {tuple(clusters.shape)} and {tuple(labels.shape)}."
        )
    for name, values in (("clusters", clusters), ("labels", labels)):
        if values.is_floating_point() or values.min() < 0:
            raise ValueError(f"`{name}` must be whole numbers from 0 on.")
    shape = int(clusters.max()) + 1, int(labels.max()) + 1
    pairs = clusters.cpu().long() * shape[1] + labels.cpu().long()
    return torch.bincount(pairs, minlength=shape[0] * shape[1]).view(shape)


def cluster_accuracy(clusters: torch.Tensor, labels: torch.Tensor) -> float:
    """Fraction of samples whose cluster is matched with their class, under the best one-to-one matching."""
    counts = contingency(clusters, labels)
    try:
        from scipy.optimize import linear_sum_assignment  # here: scipy comes with an extra
    except ImportError as error:
        raise UserError("Matching clusters needs scikit-learn: pip install 'hf_decayed[training]'.") from error
    rows, columns = linear_sum_assignment(counts.numpy(), maximize=True)
    return counts[rows, columns].sum().item() / len(labels)


def normalized_mutual_information(clusters: torch.Tensor, labels: torch.Tensor) -> float:
    """Mutual information of clusters and classes over the mean of their entropies, in [0, 1]."""
    joint = contingency(clusters, labels).double() / len(labels)
    entropies = [entropy(joint.sum(dim=1)), entropy(joint.sum(dim=0))]
    information = sum(entropies) - entropy(joint.flatten())
    mean = sum(entropies) / 2
    return float(information.clamp(min=0) / mean) if mean > 0 else 1.0  # one cluster and one class agree


def entropy(probabilities: torch.Tensor) -> torch.Tensor:
    return -torch.xlogy(probabilities, probabilities).sum()


def purity(clusters: torch.Tensor, labels: torch.Tensor) -> float:
    """Fraction of samples that have the most frequent class of their cluster."""
    return contingency(clusters, labels).amax(dim=1).sum().item() / len(labels)


CLUSTER_METRICS: dict[str, Callable[[torch.Tensor, torch.Tensor], float]] = {
    "kmeans_accuracy": cluster_accuracy,
    "kmeans_nmi": normalized_mutual_information,
    "kmeans_purity": purity,
}


def kmeans_metrics(
    features: torch.Tensor, labels: torch.Tensor, num_clusters: int | None = None, runs: int = NUM_RUNS, seed: int = 0
) -> dict[str, float]:
    """Accuracy, mutual information and purity of spherical k-means, averaged over runs.

    Args:
        features (`torch.Tensor` of shape `(number, dim)`): Usually of held-out images.
        labels (`torch.Tensor` of shape `(number,)`): Classes, counted from 0.
        num_clusters (`int`, *optional*): By default the number of classes.
        runs (`int`, defaults to 20): Runs, each with its own initial centres.
    """
    check_labelled("k-means", features, labels)
    if runs < 1:
        raise ValueError(f"`runs` must be at least 1, got {runs}.")
    number = num_clusters or len(labels.unique())
    clusterings = [spherical_kmeans(features, number, seed=seed * runs + run) for run in range(runs)]
    return {
        name: sum(metric(clusters, labels) for clusters in clusterings) / runs
        for name, metric in CLUSTER_METRICS.items()
    }


def linear_svm(
    train_features: torch.Tensor,
    train_labels: torch.Tensor,
    test_features: torch.Tensor,
    test_labels: torch.Tensor,
    regularization: float = 1.0,
    seed: int = 0,
) -> float:
    """Fraction of test features that a linear support vector machine, one class against the rest, gets right.

    Args:
        train_features, test_features (`torch.Tensor` of shape `(number, dim)`): Standardised by the training features.
        regularization (`float`, defaults to 1.0): scikit-learn's `C`; smaller is stronger.
    """
    check_splits(train_features, train_labels, test_features, test_labels, None)
    if not regularization > 0:
        raise ValueError(f"`regularization` must be positive, got {regularization}.")
    try:
        from sklearn.svm import LinearSVC
    except ImportError as error:
        raise UserError("A support vector machine needs scikit-learn: pip install 'hf_decayed[training]'.") from error
    train, test = in_double(train_features).cpu(), in_double(test_features).cpu()
    mean, deviation = train.mean(dim=0), train.std(dim=0).clamp(min=1e-12)
    # The primal problem if there are more samples than features.
    machine = LinearSVC(C=regularization, dual=len(train) < train.shape[1], random_state=seed, max_iter=5000)
    machine.fit(((train - mean) / deviation).numpy(), train_labels.cpu().numpy())
    predicted = machine.predict(((test - mean) / deviation).numpy())
    return float((predicted == test_labels.cpu().numpy()).mean())
