"""k-nearest-neighbour accuracy of features by DINO's protocol: cosine similarity, and votes weighted by it."""

import torch
from torch.nn import functional as F

from .products import multiply_transposed, same_threads


BANK_BLOCK = 4096  # rows processed at once: memory does not grow with the number of features


@torch.no_grad()
def knn_accuracy(
    train_features: torch.Tensor,
    train_labels: torch.Tensor,
    test_features: torch.Tensor,
    test_labels: torch.Tensor,
    k: int = 20,
    temperature: float | None = 0.07,
    num_classes: int | None = None,
    chunk_size: int = 1024,
    first_pass: torch.dtype | None = None,
) -> float:
    """Fraction of test features whose `k` nearest training features vote for their label.

    Args:
        train_features, test_features (`torch.Tensor` of shape `(number, dim)`): Features, of any scale.
        train_labels, test_labels (`torch.Tensor` of shape `(number,)`): Classes, counted from 0.
        k (`int`, defaults to 20): Neighbours that vote; the paper's choice.
        temperature (`float`, *optional*, defaults to 0.07):
            A neighbour of cosine similarity s has the weight `exp(s / temperature)`. `None` gives every neighbour one vote;
            a tie goes to the smaller class.
        num_classes (`int`, *optional*): Labels must be below it; by default the largest label + 1.
        chunk_size (`int`, defaults to 1024): Queries at a time: the matrix of all similarities is never in memory.
        first_pass (`torch.dtype`, *optional*):
            `torch.bfloat16` finds candidates in that precision, and compares them in float32. The neighbours are the
            same: a query whose candidates might miss one is searched again in float32. It is for hardware with fast
            products in that precision, such as GPUs and CPUs with AVX512-BF16 or AMX; elsewhere it is slower.
    """
    num_classes = check_splits(train_features, train_labels, test_features, test_labels, num_classes)
    if not 1 <= k <= len(train_features):
        raise ValueError(f"`k` must lie in [1, {len(train_features)}], the number of training features, got {k}.")
    if temperature is not None and not temperature > 0:
        raise ValueError(f"`temperature` must be positive or None, got {temperature}.")
    if first_pass not in (None, torch.bfloat16, torch.float16):
        raise ValueError(f"`first_pass` must be None, torch.bfloat16 or torch.float16, got {first_pass}.")

    if first_pass is None:
        best, neighbours = find_neighbours(train_features, test_features, k, chunk_size)
    else:
        best, neighbours = find_neighbours_twice(train_features, test_features, k, chunk_size, first_pass)
    neighbour_labels = train_labels.long().to(best.device)[neighbours]
    # Relative to the nearest neighbour: the votes are the same, and nothing overflows.
    weights = torch.ones_like(best) if temperature is None else ((best - best[:, :1]) / temperature).exp()
    votes = torch.zeros(len(best), num_classes, device=best.device).scatter_add_(1, neighbour_labels, weights)
    return (votes.argmax(dim=1) == test_labels.to(best.device)).double().mean().item()


def find_neighbours(
    bank: torch.Tensor, queries: torch.Tensor, k: int, chunk_size: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine similarities of the `k` nearest rows of a bank to every query, largest first, and the numbers of the rows.

    The bank is read block by block, with a running top k for every query: neither a normalised copy of the bank nor the
    matrix of all similarities is in memory. `dtype` is that of the products.
    """
    best = torch.full((len(queries), k), -torch.inf, device=queries.device)
    neighbours = torch.zeros(len(queries), k, dtype=torch.long, device=queries.device)
    with same_threads():
        for first_row, block in zip(range(0, len(bank), BANK_BLOCK), bank.split(BANK_BLOCK)):
            block = F.normalize(block.float(), dim=1).to(best.device, dtype)
            for start in range(0, len(queries), chunk_size):
                chunk = slice(start, start + chunk_size)
                # Unnormalised queries have the same order.
                similarities = multiply_transposed(queries[chunk].to(dtype), block)
                similarities, rows = candidates_of_rows(similarities, k, best[chunk, -1:])
                similarities = torch.cat([best[chunk], similarities.float()], dim=1)
                rows = torch.cat([neighbours[chunk], first_row + rows], dim=1)
                best[chunk], order = similarities.topk(k, dim=1)
                neighbours[chunk] = rows.gather(1, order)
    best /= torch.linalg.vector_norm(queries.float(), dim=1, keepdim=True).clamp(min=1e-12)
    return best, neighbours


def find_neighbours_twice(
    bank: torch.Tensor, queries: torch.Tensor, k: int, chunk_size: int, dtype: torch.dtype, candidates: int = 2
) -> tuple[torch.Tensor, torch.Tensor]:
    """[`find_neighbours`] with `candidates * k` candidates from products in `dtype`, compared in float32.

    A row that is not a candidate is at most as similar, in `dtype`, as the last candidate, and its true similarity is
    larger by the rounding error at most. Queries with a k-th neighbour below that bound are searched again, in
    float32.
    """
    queries = F.normalize(queries.float(), dim=1)
    number = min(candidates * k, len(bank))
    rough, rows = find_neighbours(bank, queries, number, chunk_size, dtype)
    best, neighbours = torch.empty_like(rough[:, :k]), torch.empty_like(rows[:, :k])
    few = max(1, BANK_BLOCK // number)  # queries at a time whose candidates are as many rows as a block
    for start in range(0, len(queries), few):
        chunk = slice(start, start + few)
        selected = bank[rows[chunk].to(bank.device)].float().to(queries.device)
        similarities = (selected @ queries[chunk].unsqueeze(2)).squeeze(2)
        norms = torch.linalg.vector_norm(selected, dim=2).clamp(min=1e-12)
        best[chunk], order = (similarities / norms).topk(k, dim=1)
        neighbours[chunk] = rows[chunk].gather(1, order)
    if number == len(bank):
        return best, neighbours
    # The error of a product of unit vectors is at most the sum of their own rounding errors, that of adding the terms in
    # float32, and that of the result, which is relative to it.
    bank_error = max(
        rounding_errors(F.normalize(block.float(), dim=1), dtype).max() for block in bank.split(BANK_BLOCK)
    )
    error = rounding_errors(queries, dtype) + bank_error.to(queries.device) + bank.shape[1] * torch.finfo().eps
    error += torch.finfo(dtype).eps * rough[:, -1].abs()
    unproved = (best[:, -1] < rough[:, -1] + error).nonzero().squeeze(1)
    if len(unproved):
        best[unproved], neighbours[unproved] = find_neighbours(bank, queries[unproved], k, chunk_size)
    return best, neighbours


def rounding_errors(features: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Norm of every row's rounding error in `dtype`."""
    return torch.linalg.vector_norm(features - features.to(dtype).float(), dim=1)


@torch.no_grad()
def whiten(
    train_features: torch.Tensor, test_features: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both sets of features, centred and with the covariance of the training features taken out.

    Cosine similarity of plain features follows their few strongest directions; of whitened ones it follows all. `epsilon`
    is the variance, relative to the mean variance, below which a direction counts as noise.
    """
    train, test = train_features.double(), test_features.double()
    mean = train.mean(dim=0)
    train, test = train - mean, test - mean
    variances, directions = torch.linalg.eigh(train.T @ train / len(train))
    scales = (variances.clamp(min=0) + epsilon * variances.mean().clamp(min=1e-30)).rsqrt()
    return (train @ directions * scales).float(), (test @ directions * scales).float()


def candidates_of_rows(
    values: torch.Tensor, k: int, at_least: torch.Tensor, group: int = 16
) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidate values of every row and their columns, which include the `k` largest, if they exceed `at_least`.

    Rows are divided into groups. The k largest values are in the k groups with the largest maxima, and a group whose maximum
    is not above `at_least` has none, so only few groups are searched. Members of a group are strided, so that the maxima of
    all groups are one vectorised reduction.
    """
    rows, length = values.shape
    groups = length // group
    if groups < 2 * k:
        return values, torch.arange(length, device=values.device).expand(rows, -1)
    maxima = values[:, : groups * group].view(rows, group, groups).amax(dim=1)
    searched = min(k, int((maxima > at_least).sum(dim=1).max()))
    best_groups = maxima.topk(searched, dim=1, sorted=False).indices
    indices = (best_groups.unsqueeze(2) + groups * torch.arange(group, device=values.device)).flatten(1)
    rest = torch.arange(groups * group, length, device=values.device).expand(rows, -1)  # too few to fill a group
    indices = torch.cat([indices, rest], dim=1)
    return values.gather(1, indices), indices


def check_features(name: str, features: torch.Tensor) -> None:
    if features.ndim != 2 or len(features) == 0:
        raise ValueError(f"{name}: features must have shape (number, dim), got {tuple(features.shape)}.")
    sum_dtype = torch.promote_types(features.dtype, torch.float32)  # sums in float16 would overflow
    # A sum is finite only if all its terms are: a fast pass, and a slow one that counts only if it fails.
    if all(block.sum(dim=0, dtype=sum_dtype).isfinite().all() for block in features.split(BANK_BLOCK)):
        return
    bad = sum(int((~torch.isfinite(block)).any(dim=1).sum()) for block in features.split(BANK_BLOCK))
    if bad:
        raise ValueError(f"{name}: {bad} features hold NaN or infinity.")


def check_labelled(name: str, features: torch.Tensor, labels: torch.Tensor) -> None:
    check_features(name, features)
    if labels.shape != (len(features),):
        raise ValueError(f"{name}: {len(features)} features need as many labels, got shape {tuple(labels.shape)}.")
    if labels.is_floating_point():
        raise ValueError(f"{name}: labels must be whole numbers, got {labels.dtype}.")
    if labels.min() < 0:
        raise ValueError(f"{name}: labels must be counted from 0, got {int(labels.min())}.")


def check_splits(train_features, train_labels, test_features, test_labels, num_classes: int | None) -> int:
    """Checks features and labels of both splits; returns the number of classes."""
    check_labelled("train", train_features, train_labels)
    check_labelled("test", test_features, test_labels)
    if train_features.shape[1] != test_features.shape[1]:
        raise ValueError(
            f"Features must have one width, got {train_features.shape[1]} in training and {test_features.shape[1]} in test."
        )
    if len(train_labels.unique()) < 2:
        raise ValueError(f"train: all labels are {int(train_labels[0])}; there is nothing to tell apart.")
    largest = int(max(train_labels.max(), test_labels.max()))
    if num_classes is not None and largest >= num_classes:
        raise ValueError(f"Label {largest} is out of range: with {num_classes} classes they end at {num_classes - 1}.")
    return num_classes or largest + 1
