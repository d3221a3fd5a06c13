"""Shares samples of unlike cost among ranks of unlike speed, so that all finish a step at the same time.

A sequence of n tokens costs

    c + a n + q n^2        c: per sample; a: of layers that see each token alone; q: of attention

seconds, and a rank's seconds are the sum over its samples, over its speed. To share a step's samples with the
least longest time is scheduling on uniform machines, which is NP-hard. Each sample, the dearest first, goes
to the rank that would finish it first (its longest time is at most 1.58 times the least possible; Dobson, and
Friesen, SIAM J. Comput. 1984 and 1987, for the rule); then samples move from the rank that finishes last, or
are exchanged with another's, while that helps. Ties go to the lowest rank and sample, so that all ranks that
see the same costs make the same shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pyps.errors import InputError

MOST_MOVES = 200  # after the first shares, for each rank
GAIN = 1e-9  # relative: a move that helps by less is none
LEVEL = 0.002  # relative: a longest time that is above the mean by less is not shortened

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LengthCost:
    """The seconds of a sample of so many tokens: fixed + per_token n + per_square n^2, none negative."""

    fixed: float
    per_token: float
    per_square: float

    def seconds(self, tokens: npt.ArrayLike) -> Floats:
        n = np.asarray(tokens, np.float64)
        return self.fixed + n * (self.per_token + n * self.per_square)

    @staticmethod
    def fitted(tokens: Sequence[int], seconds: Sequence[float]) -> LengthCost:
        """The cost with the least relative squared error at measured lengths.

        tokens, seconds: of a sample of each length. Raises InputError for fewer than three distinct lengths,
        or seconds that are not above 0.
        """
        n, t = np.array(tokens, np.float64), np.array(seconds, np.float64)
        if len(set(tokens)) < 3:
            found = f"{len(set(tokens))} distinct"
            raise InputError("lengths", "tokens", found, "3 or more: the cost has three coefficients")
        if not (np.isfinite(t) & (t > 0)).all():
            raise InputError("lengths", "seconds", repr(list(seconds)), "numbers above 0")
        from pyps.errors import needed

        scale = float(n.max())
        rows = np.column_stack([np.ones(len(n)), n / scale, (n / scale) ** 2]) / t[:, None]
        found, _ = needed("scipy.optimize", "plan").nnls(rows, np.ones(len(n)))
        return LengthCost(float(found[0]), float(found[1]) / scale, float(found[2]) / scale**2)


def shares_by_cost(
    costs: Sequence[float] | Floats, speeds: Sequence[float], most: Sequence[int] | None = None
) -> list[list[int]]:
    """The samples of each rank, ascending, by their place in `costs`; each rank with a speed has one.

    costs: seconds of each sample at speed 1. speeds: of each rank; 0: it gets none. most: the samples that a
    rank may have; None: any number.

    Raises InputError for a cost or speed that is not finite or is negative, fewer samples than ranks with a
    speed, or more than `most` allows.
    """
    cost, speed = np.asarray(costs, np.float64), np.asarray(speeds, np.float64)
    limit = np.full(len(speed), len(cost)) if most is None else np.asarray(most, np.int64)
    limit = np.where(speed > 0, limit, 0)
    _check(cost, speed, limit)
    owner = _first_shares(cost, speed, limit)
    for _ in range(MOST_MOVES * len(speed)):
        if not _improved(cost, speed, limit, owner):
            break
    return [np.flatnonzero(owner == rank).tolist() for rank in range(len(speed))]


def _check(cost: Floats, speed: Floats, limit: npt.NDArray[np.int64]) -> None:
    for name, values in (("costs", cost), ("speeds", speed)):
        if not (np.isfinite(values) & (values >= 0)).all():
            raise InputError(
                "shares", name, "one that is negative or not finite", "finite numbers of at least 0"
            )
    used = int((speed > 0).sum())
    if not used or len(cost) < used:
        raise InputError("shares", "costs", f"{len(cost)} samples", f"one for each of {used} ranks, or more")
    if int(limit.sum()) < len(cost) or (limit[speed > 0] < 1).any():
        found = f"{len(cost)} samples, and room for {int(limit.sum())}"
        raise InputError("shares", "most", found, "room for every sample, and one on each rank")


def _first_shares(cost: Floats, speed: Floats, limit: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The owner of each sample, the dearest first: the rank that would finish it first."""
    owner, load, count = np.empty(len(cost), np.int64), np.zeros(len(speed)), np.zeros(len(speed), np.int64)
    empty = int((speed > 0).sum())
    pace = np.where(speed > 0, speed, 1.0)
    for place, sample in enumerate(np.argsort(-cost, kind="stable")):
        end = np.where(count < limit, (load + cost[sample]) / pace, np.inf)
        if len(cost) - place <= empty:  # the rest goes to ranks that have none yet
            end = np.where(count == 0, end, np.inf)
        rank = int(np.argmin(end))
        empty -= int(count[rank] == 0)
        owner[sample] = rank
        load[rank] += cost[sample]
        count[rank] += 1
    return owner


def _improved(
    cost: Floats, speed: Floats, limit: npt.NDArray[np.int64], owner: npt.NDArray[np.int64]
) -> bool:
    """Move a sample from the rank that ends last, or exchange it with a cheaper one, if the later of the two
    then ends sooner than before: the best such change.
    """
    ranks = np.flatnonzero(speed > 0)
    load = np.bincount(owner, cost, len(speed))
    count = np.bincount(owner, minlength=len(speed))
    end = load[ranks] / speed[ranks]
    if end.max() <= (1 + LEVEL) * cost.sum() / speed.sum():
        return False
    last = int(ranks[np.argmax(end)])
    best, change = float(end.max()) * (1 - GAIN), None
    mine = np.flatnonzero(owner == last)
    for rank in ranks[ranks != last].tolist():
        theirs = np.flatnonzero(owner == rank)
        moved = cost[mine][:, None] - np.concatenate([cost[theirs], [0.0]])[None, :]  # the last: to nothing
        after = np.maximum((load[last] - moved) / speed[last], (load[rank] + moved) / speed[rank])
        if count[last] == 1 or count[rank] >= limit[rank]:
            after[:, -1] = np.inf
        k, m = np.unravel_index(int(np.argmin(after)), after.shape)
        if after[k, m] < best:
            best = float(after[k, m])
            change = int(mine[k]), rank, int(theirs[m]) if m < len(theirs) else None
    if change is None:
        return False
    sample, rank, other = change
    owner[sample] = rank
    if other is not None:
        owner[other] = last
    return True
