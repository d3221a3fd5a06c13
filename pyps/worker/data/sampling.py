"""From sample positions to data: position p of the endless sequence of epochs is the same sample for all
workers.

Epoch e is a permutation that depends on (seed, e) alone, so a claim of positions says which samples they are,
whichever worker takes it, and a restarted worker needs no state.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pyps.errors import InputError

MAX_SEED = 2**64 - 1


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, length: int) -> NDArray[np.int64]:
    """The order of epoch `epoch`: a permutation of 0 .. length-1, int64, read-only."""
    order = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(length)
    order.flags.writeable = False
    return order


def indices(first: int, count: int, length: int, seed: int) -> NDArray[np.int64]:
    """The dataset indices of positions first .. first+count-1, int64 [count]; a range may span epochs.

    Raises InputError if length or count is below 1, or first or seed is negative.
    """
    for field, value, least in (("length", length, 1), ("count", count, 1), ("first", first, 0)):
        if value < least:
            raise InputError("samples", field, str(value), f"at least {least}")
    if not 0 <= seed <= MAX_SEED:
        raise InputError("samples", "seed", str(seed), f"0 to {MAX_SEED}")
    return np.concatenate(list(_parts(first, count, length, seed)))


def _parts(first: int, count: int, length: int, seed: int) -> Iterator[NDArray[np.int64]]:
    while count > 0:
        epoch, start = divmod(first, length)
        part = permutation(seed, epoch, length)[start : start + count]
        yield part
        first, count = first + len(part), count - len(part)
