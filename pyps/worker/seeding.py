"""Random numbers belong to positions: generators are seeded from (run seed, position).

Those of torch, NumPy and Python are seeded before each sample is read, before a batch is collated and before
it is yielded. So augmentation and dropout do not depend on which process or which attempt does them, and a
resumed run repeats them bit for bit.
"""

from __future__ import annotations

import random
from enum import IntEnum

import numpy as np
import torch

WORD = 2**64 - 1


class Draw(IntEnum):
    """What random numbers are drawn for at one position; each has a seed of its own."""

    SAMPLE = 0
    COLLATE = 1
    STEP = 2


def seed_at(run_seed: int, position: int, draw: Draw) -> int:
    """The seed of 64 bits for one position: splitmix64 (Steele, Lea, Flood: OOPSLA 2014) over all three."""
    z = (_mixed(run_seed & WORD) + 3 * position + draw) & WORD
    return _mixed(z)


def _mixed(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


def seed_generators(run_seed: int, position: int, draw: Draw) -> None:
    """Seed this process's generators: random, numpy.random, torch on the CPU and, once in use, every GPU."""
    seed = seed_at(run_seed, position, draw)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    # torch.manual_seed() formats a stack trace for a CUDA that is not in use yet: 100 us instead of 1.
    torch.default_generator.manual_seed(seed)
    if draw is Draw.STEP and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
