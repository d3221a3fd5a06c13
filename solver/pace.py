"""How long an iteration, one global batch of samples, takes at a policy's pace, from the workers' steps.

    round   the longest step. With k spare workers, the longest step but k: B samples then take B / (B - d)
            rounds, where d samples a round are dropped
    clock   the longest step: in the long run every worker makes as many steps as the slowest
    turns   the longest step, or all transfers one after another, if they take longer
    free    B / sum_i (b_i / s_i): nothing waits. Where a link is always busy, its workers' steps s_i stretch
            to at least s with sum_i x_i / s_i = 1, x_i the seconds of a worker's transfers over it

A step is the time from one step of a worker to its next, if it waits for no other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pyps.formats.mode import Pace
from pyps.solver.costs import Floats, Ints

SAME = 0.02  # relative: which of two steps this close is the later one changes from round to round
BISECTIONS = 60


def iteration(pace: Pace, batches: Ints, steps: Floats, longest: float, busy: Sequence[Floats]) -> float:
    """Seconds of an iteration.

    batches, steps: samples and seconds of each worker (0: left out). longest: the longest step, or the link
    or host that takes longer. busy: for each shared link, the seconds of each worker's transfers.
    """
    used = batches > 0
    if pace.kind == "free":
        for transfers in busy:
            steps = _stretched(steps, transfers)
        rate = float((batches[used] / steps[used]).sum())
        return max(int(batches.sum()) / rate, _host(steps, longest, busy))
    if pace.spare and used.sum() > 1:
        return _without_the_slowest(min(pace.spare, int(used.sum()) - 1), batches[used], steps[used])
    return longest


def _host(steps: Floats, longest: float, busy: Sequence[Floats]) -> float:
    """The seconds of a host's preparation, if they are what takes longest; else 0."""
    explained = max([float(steps.max()), *(float(transfers.sum()) for transfers in busy)])
    return longest if longest > explained else 0.0


def _stretched(steps: Floats, transfers: Floats) -> Floats:
    """The steps of workers on a link that has no more than one second a second for their transfers."""
    mine = transfers > 0
    if not mine.any() or float((transfers[mine] / steps[mine]).sum()) <= 1:
        return steps
    low, high = float(steps[mine].min()), float(transfers.sum())
    for _ in range(BISECTIONS):
        middle = low + (high - low) / 2
        if float((transfers[mine] / np.maximum(steps[mine], middle)).sum()) > 1:
            low = middle
        else:
            high = middle
    return np.where(mine, np.maximum(steps, high), steps)


def _without_the_slowest(spare: int, batches: Ints, steps: Floats) -> float:
    """A round closes without the `spare` slowest; their samples have to be trained in another round."""
    closes = float(np.sort(steps)[len(steps) - spare - 1])
    late, close = steps > closes * (1 + SAME), np.abs(steps - closes) <= closes * SAME
    dropped = float(batches[late].sum()) + (spare - int(late.sum())) * float(batches[close].mean())
    total = int(batches.sum())
    return closes * total / (total - dropped)
