"""Effective rank of features: how many directions they really use (Roy and Vetterli, 2007)."""

import torch

from .knn import BANK_BLOCK, check_features


@torch.no_grad()
def effective_rank(features: torch.Tensor, kind: str = "entropy") -> float:
    """Effective rank of `(number, dim)` features.

    Args:
        features (`torch.Tensor` of shape `(number, dim)`): Features; the mean is taken off first.
        kind (`str`, defaults to `"entropy"`):
            `entropy`: the paper's, minus the sum of s log s over the singular values of the covariance, normalised to
            sum 1. `exponential`: its exponential, Roy and Vetterli's number of directions. `rankme`: the exponential
            over the singular values of the features themselves, uncentred (Garrido et al., 2023).

    Constant features have rank 0 (exponential: 1).
    """
    if kind not in ("entropy", "exponential", "rankme"):
        raise ValueError(f"`kind` must be 'entropy', 'exponential' or 'rankme', got {kind!r}.")
    check_features("features", features)
    features = features.cpu() if features.device.type == "mps" else features  # which has no float64
    # Sums in float64, products in the features' own precision, which is twice as fast.
    kept = torch.promote_types(features.dtype, torch.float32)
    blocks = features.split(BANK_BLOCK)
    mean = sum(block.sum(dim=0, dtype=torch.float64) for block in blocks) / len(features)
    energy = sum(torch.linalg.vector_norm(block, dtype=torch.float64) ** 2 for block in blocks)
    centre = torch.zeros_like(mean, dtype=kept) if kind == "rankme" else mean.to(kept)
    # The smaller of the two matrices has the same non-zero spectrum: dim x dim, or number x number for few samples.
    if features.shape[1] <= len(features):
        gram = sum(((centred := block.to(kept) - centre).T @ centred).double() for block in blocks)
    else:
        centred = features.to(kept) - centre
        gram = (centred @ centred.T).double()
    spectrum = torch.linalg.eigvalsh(gram).clamp(min=0)
    if kind == "rankme":
        spectrum = spectrum.sqrt()
    total = spectrum.sum()
    # Taking the mean off constant features leaves rounding, not zero.
    if total <= 1e-24 * energy:
        return 0.0 if kind == "entropy" else 1.0
    shares = spectrum / total
    entropy = torch.special.entr(shares).sum()
    return float(entropy if kind == "entropy" else entropy.exp())


def in_double(features: torch.Tensor) -> torch.Tensor:
    """As float64, on a device that has it."""
    return (features.cpu() if features.device.type == "mps" else features).double()
