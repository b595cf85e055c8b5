"""Random numbers that belong to a sample of an epoch, wherever and whenever they are drawn."""

import numpy as np


def sample_generator(seed: int, epoch: int, index: int, stream: int = 0) -> np.random.Generator:
    """Numbers that belong to one sample in one epoch, wherever and whenever they are drawn; streams are independent."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch], counter=[0, 0, stream, index]))
