"""Adversarial losses on structure (dissertation, chapter 3): the discriminator's output is an embedding, not a score.

    discriminator: -divergence - 3 real alignment + 3 generated alignment + 5 ((sigma - 1)^2 + 4 norm hinge)
    generator:      divergence - 3 generated alignment

`divergence` compares the first two moments of a batch of embeddings, `alignment` each embedding with its nearest real ones,
and sigma is the largest singular value of the discriminator's Jacobian. The ordinary hinge losses are the baseline.

Rows of several processes belong together: gather them by [`gather_rows`] first, and every loss is that of the whole batch.
"""

from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed
import torch.distributed.nn.functional as distributed
from torch import nn
from torch.nn import functional as F

from .coding_rate import rate_of_gram


__all__ = [
    "NeighbourBank",
    "check_jacobian_support",
    "gather_rows",
    "gaussian_divergence",
    "hinge_discriminator_loss",
    "hinge_generator_loss",
    "jacobian_norm",
    "neighbour_alignment",
    "norm_hinge",
]

EPSILON = 0.5  # of the release: covariances are regularised as I + dim / epsilon * covariance


def gather_rows(rows: torch.Tensor) -> torch.Tensor:
    """The rows of all processes, in the order of the processes; all have as many.

    Gradients go back to the rows of each, and are those of one process with all rows, once they are averaged over the
    processes, as DistributedDataParallel does.
    """
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return rows
    rank, processes = torch.distributed.get_rank(), torch.distributed.get_world_size()
    padding = (0, 0) * (rows.ndim - 1) + (rank * len(rows), (processes - rank - 1) * len(rows))
    return distributed.all_reduce(F.pad(rows, padding))


def gaussian_divergence(
    real: torch.Tensor,
    generated: torch.Tensor,
    form: Literal["jsd", "bhattacharyya"] = "jsd",
    covariance: Literal["full", "diagonal"] = "full",
    center: Literal["unit_mean", "mean"] = "unit_mean",
    epsilon: float = EPSILON,
) -> torch.Tensor:
    """How far two sets of embeddings are apart as Gaussians; 0 if they are equal.

    Args:
        real, generated (`torch.Tensor` of shape `(number, dim)`): Embeddings of length 1.
        form (`str`, defaults to `"jsd"`):
            `jsd` (Eq. 3.4): entropy of a Gaussian fitted to both sets, minus the mean of their own entropies; an upper bound
            of the Jensen-Shannon divergence of the two Gaussians. `bhattacharyya` (Eq. 3.5): their Bhattacharyya distance.
        covariance (`str`, defaults to `"full"`): `full` as in the release, `diagonal` as in the text.
        center (`str`, defaults to `"unit_mean"`):
            What covariances are centred by: `unit_mean`, the mean brought to length 1, as in the release, or `mean`.
        epsilon (`float`, defaults to 0.5): Covariances are taken as `I + dim / epsilon * covariance`, as in the release.
    """
    for name, value, choices in (
        ("form", form, ("jsd", "bhattacharyya")),
        ("covariance", covariance, ("full", "diagonal")),
        ("center", center, ("unit_mean", "mean")),
    ):
        if value not in choices:
            raise ValueError(f"`{name}` must be {' or '.join(map(repr, choices))}, got {value!r}.")
    if real.ndim != 2 or generated.ndim != 2 or real.shape[1] != generated.shape[1]:
        raise ValueError(
            f"Embeddings must have shape (number, dim), got {tuple(real.shape)} and {tuple(generated.shape)}."
        )
    number, dim = min(len(real), len(generated)), real.shape[1]
    if covariance == "full" and number < dim:
        raise ValueError(
            f"A full covariance of {dim} dimensions needs as many embeddings, got {number}: use a larger batch, a smaller "
            "embedding, or a diagonal covariance."
        )
    with torch.autocast(real.device.type, enabled=False):  # determinants need float32
        real, generated = real.float(), generated.float()
        first, second = ((rows, center_of(rows, center)) for rows in (real, generated))
        if form == "jsd":
            both = torch.cat([real, generated])
            entropies = [
                half_log_det(rows - middle, covariance, epsilon)
                for rows, middle in (first, second, (both, center_of(both, center)))
            ]
            return entropies[2] - (entropies[0] + entropies[1]) / 2
        return bhattacharyya(*first, *second, covariance, epsilon)


def center_of(rows: torch.Tensor, center: str) -> torch.Tensor:
    mean = rows.mean(dim=0)
    return F.normalize(mean, dim=0) if center == "unit_mean" else mean


def half_log_det(centred: torch.Tensor, covariance: str, epsilon: float) -> torch.Tensor:
    """Half of the logarithm of the regularised covariance's determinant: the entropy of a Gaussian, up to a constant."""
    number, dim = centred.shape
    if covariance == "full":  # the coding rate of the centred rows
        return rate_of_gram(centred.T @ centred, number, epsilon)
    return torch.log1p(dim / epsilon * centred.square().mean(dim=0)).sum() / 2


def bhattacharyya(
    real: torch.Tensor,
    real_center: torch.Tensor,
    generated: torch.Tensor,
    generated_center: torch.Tensor,
    covariance: str,
    epsilon: float,
) -> torch.Tensor:
    dim, difference = real.shape[1], real_center - generated_center
    first, second = real - real_center, generated - generated_center
    entropies = [half_log_det(centred, covariance, epsilon) for centred in (first, second)]
    # Both sets count as half, whatever their numbers: rows are scaled so that their squares add up to the mean covariance.
    rows = torch.cat([first / (2 * len(first)) ** 0.5, second / (2 * len(second)) ** 0.5])
    mixed = half_log_det(rows * len(rows) ** 0.5, covariance, epsilon)
    if covariance == "full":
        matrix = rows.T @ rows + epsilon / dim * torch.eye(dim, device=rows.device)
        distance = difference @ torch.linalg.solve(matrix, difference)
    else:
        distance = (difference.square() / (rows.square().sum(dim=0) + epsilon / dim)).sum()
    return distance / 8 + mixed - (entropies[0] + entropies[1]) / 2


def neighbour_alignment(
    embeddings: torch.Tensor,
    keys: torch.Tensor,
    candidates: torch.Tensor,
    candidate_keys: torch.Tensor,
    num_neighbours: int = 1,
    exclude_self: bool = False,
) -> torch.Tensor:
    """Mean inner product of embeddings with those of their nearest candidates (Eq. 3.6); a step of mean shift.

    Args:
        embeddings (`torch.Tensor` of shape `(number, dim)`): Of real or generated images, of length 1.
        keys (`torch.Tensor` of shape `(number, key_dim)`): Features of the same images, of length 1, by which neighbours are
            found; no gradient goes into them.
        candidates, candidate_keys: The same of real images, `NeighbourBank.candidates`.
        num_neighbours (`int`, defaults to 1): K.
        exclude_self (`bool`, defaults to `False`): The first candidates are the embeddings themselves: real images must not
            be their own neighbours.
    """
    available = len(candidates) - exclude_self
    if not 1 <= num_neighbours <= available:
        raise ValueError(f"`num_neighbours` must lie in [1, {available}], got {num_neighbours}.")
    with torch.no_grad():
        similarities = keys.float() @ candidate_keys.float().T
        if exclude_self:
            similarities.fill_diagonal_(-torch.inf)
        neighbours = similarities.topk(num_neighbours, dim=1).indices
    return (candidates[neighbours] * embeddings.unsqueeze(1)).sum(dim=2).mean()


class NeighbourBank(nn.Module):
    """The last `size` real embeddings with their keys, without gradients; it starts empty.

    The release starts with random vectors, which are the neighbours of the first steps.

    Args:
        size (`int`): A multiple of the batch size; 10240 in the dissertation.
    """

    def __init__(self, size: int, embedding_dim: int, key_dim: int):
        super().__init__()
        self.register_buffer("embeddings", torch.zeros(size, embedding_dim))
        self.register_buffer("keys", torch.zeros(size, key_dim))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))  # rows written so far, over all rounds

    @property
    def size(self) -> int:
        return len(self.embeddings)

    def candidates(self, embeddings: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings and keys of the batch, with their gradients, followed by those of the bank."""
        filled = min(int(self.count), self.size)
        return torch.cat([embeddings, self.embeddings[:filled]]), torch.cat([keys, self.keys[:filled]])

    @torch.no_grad()
    def update(self, embeddings: torch.Tensor, keys: torch.Tensor) -> None:
        """Writes a batch over the oldest rows."""
        if self.size % len(embeddings) != 0:
            raise ValueError(f"The bank's {self.size} rows are not divisible by a batch of {len(embeddings)}.")
        start = int(self.count) % self.size
        self.embeddings[start : start + len(embeddings)] = embeddings.detach()
        self.keys[start : start + len(keys)] = keys.detach()
        self.count += len(embeddings)


def jacobian_norm(
    function: Callable[[torch.Tensor], torch.Tensor],
    inputs: torch.Tensor,
    directions: torch.Tensor,
    num_iterations: int = 1,
) -> torch.Tensor:
    """Largest singular value of the Jacobian at each input, by power iteration; never more than the exact one.

    Gradients go through the Jacobian alone, not through the singular vectors. The last product with the Jacobian gives the
    left vector and the value at once, so that `num_iterations` VJPs and as many JVPs are all there is.

    Args:
        function (`Callable`): `(batch, ...)` to `(batch, dim)`, each output a function of its own input alone. Such a network
            has no batch norm in training mode, and forward-mode derivatives for all operators ([`check_jacobian_support`]).
        inputs (`torch.Tensor` of shape `(batch, ...)`): No gradient goes into them.
        directions (`torch.Tensor` of shape `(batch, dim)`): Random vectors to start from, of any length.
        num_iterations (`int`, defaults to 1): One is enough to train with.

    Returns:
        `torch.Tensor` of shape `(batch,)`.
    """
    if num_iterations < 1:
        raise ValueError(f"`num_iterations` must be at least 1, got {num_iterations}.")
    if isinstance(function, nn.Module):
        check_jacobian_support(function)
    # In float32: under autocast, forward-mode derivatives meet weights of another type.
    with torch.autocast(inputs.device.type, enabled=False):
        inputs, left = inputs.detach().float(), directions.float()
        for iteration in range(num_iterations):
            with torch.no_grad():  # of the parameters; derivatives with respect to inputs are not affected
                _, vjp = torch.func.vjp(function, inputs)
                right = F.normalize(vjp(left)[0].flatten(1), dim=1).view_as(inputs)
            with torch.set_grad_enabled(torch.is_grad_enabled() and iteration == num_iterations - 1):
                _, product = torch.func.jvp(function, (inputs,), (right,))
            left = F.normalize(product.detach(), dim=1)
        return (left * product).sum(dim=1)


def check_jacobian_support(network: nn.Module) -> None:
    """Raises for a network whose Jacobian [`jacobian_norm`] cannot compute image by image."""
    for name, module in network.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            raise ValueError(
                f"`{name}` is a batch norm, which mixes the images of a batch, so that an image has no Jacobian of its own: "
                "use group norm."
            )
        if getattr(getattr(module, "config", None), "_attn_implementation", None) in ("sdpa", "flex_attention"):
            raise ValueError(
                f"{type(module).__name__} has an attention kernel without forward-mode derivatives: load it with "
                "`attn_implementation='eager'`."
            )


def norm_hinge(raw_embeddings: torch.Tensor, side: Literal["below", "above"] = "below") -> torch.Tensor:
    """Mean square of what the norms of embeddings `(number, dim)` miss to 1.

    Args:
        side (`str`, defaults to `"below"`): `below` penalises norms below 1, as in the release: a smooth network is more likely
            to collapse to 0. `above` penalises norms above 1, as in the text (Eq. 3.7).
    """
    if side not in ("below", "above"):
        raise ValueError(f"`side` must be 'below' or 'above', got {side!r}.")
    excess = torch.linalg.vector_norm(raw_embeddings.float(), dim=1) - 1
    return F.relu(-excess if side == "below" else excess).square().mean()


def hinge_discriminator_loss(real_scores: torch.Tensor, generated_scores: torch.Tensor) -> torch.Tensor:
    """The ordinary hinge loss of a discriminator: scores of real images above 1, of generated ones below -1."""
    return F.relu(1 - real_scores.float()).mean() + F.relu(1 + generated_scores.float()).mean()


def hinge_generator_loss(generated_scores: torch.Tensor) -> torch.Tensor:
    return -generated_scores.float().mean()
