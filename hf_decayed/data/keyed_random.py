"""Random numbers keyed by seed, epoch and index, so that they do not depend on processes, workers or resuming."""

import numpy as np


def sample_generator(seed: int, epoch: int, index: int, stream: int = 0) -> np.random.Generator:
    """The generator of one sample in one epoch; streams are independent of each other."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch], counter=[0, 0, stream, index]))


def batch_generator(seed: int, step: int, part: int, process: int) -> np.random.Generator:
    """The generator of one process's share of a micro-batch, for numbers that belong to a batch as a whole."""
    return np.random.Generator(np.random.Philox(key=[seed, step], counter=[0, 0, part, process]))


def sample_seed(seed: int, index: int) -> int:
    """The seed of generated image `index`: a hash of both numbers, so that neighbouring seeds share no images."""
    return int(np.random.SeedSequence([seed, index]).generate_state(1, np.uint64)[0] >> 1)
