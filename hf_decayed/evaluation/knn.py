"""k-nearest-neighbour accuracy of features, after DINO's protocol: cosine similarity, votes weighted by it."""

import torch
from torch.nn import functional as F


@torch.no_grad()
def knn_accuracy(
    train_features: torch.Tensor,
    train_labels: torch.Tensor,
    test_features: torch.Tensor,
    test_labels: torch.Tensor,
    k: int = 20,
    temperature: float | None = 0.07,
    chunk_size: int = 256,
) -> float:
    """Fraction of test features whose `k` nearest training features vote for their label.

    Args:
        train_features, test_features (`torch.Tensor` of shape `(number, dim)`): Features, of any scale.
        train_labels, test_labels (`torch.Tensor` of shape `(number,)`): Classes, counted from 0.
        k (`int`, defaults to 20): Neighbours that vote; the paper's choice.
        temperature (`float`, *optional*, defaults to 0.07):
            A neighbour of cosine similarity s has the weight `exp(s / temperature)`. `None` gives each one vote; a tie
            goes to the smaller class.
        chunk_size (`int`, defaults to 256): Queries at a time, so that similarities never exist all at once.
    """
    check("train", train_features, train_labels)
    check("test", test_features, test_labels)
    if train_features.shape[1] != test_features.shape[1]:
        raise ValueError(
            f"Features must have one width, got {train_features.shape[1]} in training and {test_features.shape[1]} in test."
        )
    if not 1 <= k <= len(train_features):
        raise ValueError(f"`k` must lie in [1, {len(train_features)}], the number of training features, got {k}.")
    if temperature is not None and not temperature > 0:
        raise ValueError(f"`temperature` must be positive or None, got {temperature}.")

    num_classes = int(max(train_labels.max(), test_labels.max())) + 1
    bank = F.normalize(train_features.float(), dim=1)
    train_labels = train_labels.long()
    correct = 0
    for queries, labels in zip(test_features.split(chunk_size), test_labels.split(chunk_size)):
        similarities, neighbours = (F.normalize(queries.float(), dim=1) @ bank.T).topk(k, dim=1)
        weights = torch.ones_like(similarities) if temperature is None else (similarities / temperature).exp()
        votes = torch.zeros(len(queries), num_classes, device=bank.device)
        votes.scatter_add_(1, train_labels[neighbours], weights)
        correct += (votes.argmax(dim=1) == labels).sum().item()
    return correct / len(test_labels)


def check(split: str, features: torch.Tensor, labels: torch.Tensor) -> None:
    if features.ndim != 2 or labels.ndim != 1 or len(features) != len(labels) or len(features) == 0:
        raise ValueError(
            f"{split}: features must have shape (number, dim) and labels (number,), "
            f"got {tuple(features.shape)} and {tuple(labels.shape)}."
        )
    if not torch.isfinite(features).all():
        raise ValueError(f"{split}: {int((~torch.isfinite(features)).any(1).sum())} features hold NaN or infinity.")
    if labels.min() < 0:
        raise ValueError(f"{split}: labels must be counted from 0, got {int(labels.min())}.")
