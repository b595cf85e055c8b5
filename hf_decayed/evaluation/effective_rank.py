"""Effective rank of features: how many directions they use (Roy and Vetterli, 2007)."""

import torch

from .knn import BANK_BLOCK, check_features
from .products import same_threads, upper_gram


@torch.no_grad()
def effective_rank(features: torch.Tensor, kind: str = "entropy") -> float:
    """Effective rank of `(number, dim)` features.

    Args:
        features (`torch.Tensor` of shape `(number, dim)`): Features; they are centred first.
        kind (`str`, defaults to `"entropy"`):
            `entropy`: the paper's, minus the sum of s log s over the singular values of the covariance, normalised to
            sum 1. `exponential`: its exponential, Roy and Vetterli's number of directions. `rankme`: the exponential
            over the singular values of the features themselves, uncentred (Garrido et al., 2023).

    Constant features have rank 0 (exponential: 1).
    """
    if kind not in ("entropy", "exponential", "rankme"):
        raise ValueError(f"`kind` must be 'entropy', 'exponential' or 'rankme', got {kind!r}.")
    features = features.cpu() if features.device.type == "mps" else features  # MPS has no float64
    # Blocks are computed in the features' own precision, which is twice as fast, and summed in float64. RankMe takes
    # square roots of the spectrum, which amplify rounding, so that all of it is in float64.
    dtype = torch.float64 if kind == "rankme" else torch.promote_types(features.dtype, torch.float32)
    # The smaller of the two matrices has the same non-zero spectrum: dim x dim, or number x number for few samples.
    if features.ndim == 2 and 0 < features.shape[1] <= len(features):
        gram, mean = gram_and_mean(features, dtype, is_centred=kind != "rankme")
    else:
        check_features("features", features)
        mean = features.double().mean(dim=0)
        centred = features.double() - (0.0 if kind == "rankme" else mean)
        gram = centred @ centred.T
    spectrum = torch.linalg.eigvalsh(gram, UPLO="U").clamp(min=0)
    # After centring, constant features are rounding errors, not exactly zero.
    if spectrum.sum() <= (8 * torch.finfo(dtype).eps) ** 2 * len(features) * mean.square().sum():
        return 0.0 if kind == "entropy" else 1.0
    if kind == "rankme":
        spectrum = spectrum.sqrt()
    total = spectrum.sum()
    shares = spectrum / total
    entropy = torch.special.entr(shares).sum()
    return float(entropy if kind == "entropy" else entropy.exp())


def gram_and_mean(features: torch.Tensor, dtype: torch.dtype, is_centred: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Upper triangle of the products of all features, centred or not, and their mean; one pass, in blocks of `dtype`.

    Centring uses the mean of a sample, which is precise enough for the products; the rest is subtracted at the end.
    """
    centre = torch.zeros(features.shape[1], dtype=dtype, device=features.device)
    if is_centred:
        centre = features[:: max(1, len(features) // BANK_BLOCK)].to(dtype).mean(dim=0)
    total = torch.zeros_like(centre, dtype=torch.float64)
    gram = total.new_zeros(len(total), len(total))
    centred_block = centre.new_empty(min(BANK_BLOCK, len(features)), len(centre))
    with same_threads():
        for block in features.split(BANK_BLOCK):
            centred = torch.sub(block.to(dtype), centre, out=centred_block[: len(block)])
            gram += upper_gram(centred)
            total += centred.sum(dim=0)
    if not total.isfinite().all():
        check_features("features", features)  # says how many features hold NaN or infinity
    if is_centred:
        gram = gram - torch.outer(total, total) / len(features)
    return gram, centre.double() + total / len(features)


def in_double(features: torch.Tensor) -> torch.Tensor:
    """Features as float64, on the CPU if the device does not have it."""
    return (features.cpu() if features.device.type == "mps" else features).double()
