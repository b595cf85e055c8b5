"""Effective rank of features: how many directions they use (Roy and Vetterli, 2007)."""

import torch

from .knn import BANK_BLOCK, check_features


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
    check_features("features", features)
    features = features.cpu() if features.device.type == "mps" else features  # MPS has no float64
    # Within a block in the features' own precision, which is twice as fast, and over blocks in float64. RankMe takes square
    # roots of the spectrum, which amplify rounding: all in float64.
    dtype = torch.float64 if kind == "rankme" else torch.promote_types(features.dtype, torch.float32)
    blocks = features.split(BANK_BLOCK)
    mean = sum(block.to(dtype).sum(dim=0).double() for block in blocks) / len(features)
    centre = torch.zeros_like(mean, dtype=dtype) if kind == "rankme" else mean.to(dtype)
    # The smaller of the two matrices has the same non-zero spectrum: dim x dim, or number x number for few samples.
    if features.shape[1] <= len(features):
        gram, residual = 0.0, 0.0
        for block in blocks:
            centred = block.to(dtype) - centre
            gram = gram + upper_gram(centred).double()
            residual = residual + centred.sum(dim=0).double()
        if kind != "rankme":  # the rounding error of the mean
            gram = gram - torch.outer(residual, residual) / len(features)
    else:
        centred = features.double() - (0.0 if kind == "rankme" else features.double().mean(dim=0))
        gram = centred @ centred.T
    spectrum = torch.linalg.eigvalsh(gram, UPLO="U").clamp(min=0)
    # Centred constant features are not exactly zero, but rounding.
    if spectrum.sum() <= (8 * torch.finfo(dtype).eps) ** 2 * len(features) * mean.square().sum():
        return 0.0 if kind == "entropy" else 1.0
    if kind == "rankme":
        spectrum = spectrum.sqrt()
    total = spectrum.sum()
    shares = spectrum / total
    entropy = torch.special.entr(shares).sum()
    return float(entropy if kind == "entropy" else entropy.exp())


def upper_gram(features: torch.Tensor, width: int = 192) -> torch.Tensor:
    """`features.T @ features` in its upper triangle, which is all that `eigvalsh` reads: about half of the products."""
    dim = features.shape[1]
    gram = features.new_zeros(dim, dim)
    for start in range(0, dim, width):
        strip = slice(start, start + width)
        gram[strip, start:] = features[:, strip].T @ features[:, start:]
    return gram


def in_double(features: torch.Tensor) -> torch.Tensor:
    """Features as float64, on the CPU if the device does not have it."""
    return (features.cpu() if features.device.type == "mps" else features).double()
