"""Effective rank of features: how many directions they really use (Roy and Vetterli, 2007)."""

import torch


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
    if features.ndim != 2 or len(features) == 0:
        raise ValueError(f"`features` must have shape (number, dim), got {tuple(features.shape)}.")
    if not torch.isfinite(features).all():
        raise ValueError(f"{int((~torch.isfinite(features)).any(1).sum())} features hold NaN or infinity.")
    features = features.double()
    energy = features.square().sum()
    if kind != "rankme":
        features = features - features.mean(dim=0)
    # The smaller of the two matrices has the same non-zero spectrum: dim x dim, or number x number for few samples.
    gram = features.T @ features if features.shape[1] <= len(features) else features @ features.T
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
