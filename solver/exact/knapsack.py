"""One choice of each worker, so that batches sum to a total and are worth most, by dynamic programming."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pyps.solver.costs import Floats, Ints

NEVER = -math.inf  # the worth of a batch that may not be


def best_choices(worths: Sequence[Floats], batches: Sequence[Ints], total: int) -> tuple[float, list[int]]:
    """The most that batches are worth which sum to `total`, and which of each worker's choices these are.

    worths, batches: of each worker's choices. NEVER, and none: no batches sum to it.
    """
    best, picks = np.concatenate([[0.0], np.full(total, NEVER)]), list[Ints]()
    for worth, batch in zip(worths, batches, strict=True):
        found, pick = np.full(total + 1, NEVER), np.zeros(total + 1, np.int64)
        for k in np.flatnonzero((worth > NEVER) & (batch <= total)).tolist():
            first = int(batch[k])
            trial = best[: total + 1 - first] + worth[k]
            better = trial > found[first:]
            found[first:][better], pick[first:][better] = trial[better], k
        best = found
        picks.append(pick)
    left, chosen = total, list[int]()
    if best[total] > NEVER:
        for pick, batch in zip(reversed(picks), reversed(batches), strict=True):
            chosen.append(int(pick[left]))
            left -= int(batch[chosen[-1]])
    return float(best[total]), chosen[::-1]
