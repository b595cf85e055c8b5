"""Losses of latent intrinsics (dissertation, chapter 6): the relit image, maps that ignore the light, spread of both codes.

    loss = relighting + 0.1 * invariance + 1e-4 * spread of the intrinsic maps + 1e-4 * spread of the light codes

Images are in [-1, 1]. Intrinsic maps `(batch, channels, height, width)` have length 1 along their channels, and so have
light codes `(batch, dim)`.
"""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed
from torch.nn import functional as F

from .coding_rate import EPSILON, coding_rate, max_coding_rate, uniform_coding_rate


__all__ = ["gradient_difference", "invariance_loss", "pixel_loss", "spread_loss", "structural_similarity"]

DATA_RANGE = 2.0  # of images in [-1, 1]


def pixel_loss(
    predicted: torch.Tensor,
    target: torch.Tensor,
    mse_weight: float = 10.0,
    ssim_weight: float = 0.1,
    gradient_weight: float = 1.0,
) -> torch.Tensor:
    """Difference of images (Eq. 6.4): squared error, structural similarity and gradients, with the dissertation's weights."""
    mse = F.mse_loss(predicted, target)
    dissimilarity = 1 - structural_similarity(predicted, target).mean()
    return mse_weight * mse + ssim_weight * dissimilarity + gradient_weight * gradient_difference(predicted, target)


def gradient_difference(predicted: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean absolute difference of the slopes between neighbouring pixels, downwards plus to the right."""
    difference = predicted - target
    return difference.diff(dim=-2).abs().mean() + difference.diff(dim=-1).abs().mean()


# None of the base dependencies has an SSIM: torchmetrics, kornia and scikit-image would each be a new one.
def structural_similarity(
    predicted: torch.Tensor,
    target: torch.Tensor,
    data_range: float = DATA_RANGE,
    window_size: int = 11,
    sigma: float = 1.5,
) -> torch.Tensor:
    """SSIM (Wang et al., 2004) of every image, with Gaussian windows that lie inside of the image.

    Args:
        predicted, target (`torch.Tensor` of shape `(batch, channels, height, width)`): Images.
        data_range (`float`, defaults to 2.0): Largest minus smallest possible value.

    Returns:
        `torch.Tensor` of shape `(batch,)`: Means over windows and channels, at most 1.
    """
    if predicted.shape != target.shape:
        raise ValueError(f"Images must have one shape, got {tuple(predicted.shape)} and {tuple(target.shape)}.")
    if min(predicted.shape[-2:]) < window_size:
        raise ValueError(
            f"SSIM needs images of at least {window_size} x {window_size} pixels, got {tuple(predicted.shape[-2:])}."
        )
    offsets = torch.arange(window_size, device=predicted.device) - (window_size - 1) / 2
    window = torch.softmax(-(offsets**2) / (2 * sigma**2), dim=0)
    first, second = predicted.float().flatten(0, 1), target.float().flatten(0, 1)
    moments = torch.stack([first, second, first**2, second**2, first * second], dim=1)
    with torch.autocast(predicted.device.type, enabled=False):  # differences of squares need float32
        moments = F.conv2d(moments, window.view(1, 1, -1, 1).expand(5, 1, -1, 1), groups=5)
        moments = F.conv2d(moments, window.view(1, 1, 1, -1).expand(5, 1, 1, -1), groups=5)
    mean_1, mean_2, square_1, square_2, product = moments.unbind(dim=1)
    luminance, contrast = (0.01 * data_range) ** 2, (0.03 * data_range) ** 2  # the paper's C1 and C2
    similarity = (2 * mean_1 * mean_2 + luminance) / (mean_1**2 + mean_2**2 + luminance)
    similarity = similarity * (2 * (product - mean_1 * mean_2) + contrast)
    similarity = similarity / (square_1 - mean_1**2 + square_2 - mean_2**2 + contrast)
    return similarity.flatten(1).mean(dim=1).unflatten(0, predicted.shape[:2]).mean(dim=1)


def invariance_loss(
    first: Sequence[torch.Tensor],
    second: Sequence[torch.Tensor],
    form: Literal["cosine", "distance"] = "cosine",
) -> torch.Tensor:
    """How much the intrinsic maps of two lights differ; smallest where they are equal.

    Args:
        first, second (`Sequence[torch.Tensor]`): The maps of all scales, of one scene under two lights.
        form (`str`, defaults to `"cosine"`):
            `cosine` is the release's: minus the cosine similarity, averaged over positions and scales. `distance` is the
            dissertation's (Eq. 6.5): the Euclidean distance, averaged over positions and summed over scales.
    """
    if form == "cosine":
        return -torch.stack([(a * b).sum(dim=1).mean() for a, b in zip(first, second)]).mean()
    if form == "distance":
        return torch.stack([torch.linalg.vector_norm(a - b, dim=1).mean() for a, b in zip(first, second)]).sum()
    raise ValueError(f"`form` must be 'cosine' or 'distance', got {form!r}.")


def spread_loss(
    vectors: Sequence[torch.Tensor], target: Literal["own", "max"] = "own", epsilon: float = EPSILON
) -> torch.Tensor:
    """Squared difference between coding rates and their targets (Eq. 6.6), averaged; it keeps codes from collapsing.

    Args:
        vectors (`Sequence[torch.Tensor]`): Intrinsic maps, or `[light]`; the channels are dimension 1.
        target (`str`, defaults to `"own"`):
            `own`: the rate of as many random vectors of the same dimension. `max`: the largest rate that such vectors can
            have. In the release, light codes are compared with the targets of the intrinsic maps, which they cannot reach,
            so that they are pushed to the largest spread; `max` does that without the wrong targets.
    """
    if target not in ("own", "max"):
        raise ValueError(f"`target` must be 'own' or 'max', got {target!r}.")
    losses = []
    for tensor in vectors:
        rows = tensor.movedim(1, -1).flatten(0, -2)  # (positions, channels)
        number = len(rows) * (torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1)
        target_rate = uniform_coding_rate if target == "own" else max_coding_rate
        losses.append((coding_rate(rows, epsilon) - target_rate(number, rows.shape[1], epsilon)) ** 2)
    return torch.stack(losses).mean()
