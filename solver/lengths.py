"""Shares samples of unlike cost among ranks of unlike speed, so that all finish a step at the same time.

To share a step's samples with the least longest time is scheduling on unlike machines, which is NP-hard. Each
sample, the dearest first, goes to the rank that would finish it first; then samples move from the rank that
finishes last, or are exchanged with another's, while that helps. All is done in whole numbers, and ties go to
the lowest rank and sample, so that hosts of any kind make the same shares of the same lengths.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from pyps.errors import InputError
from pyps.formats import LengthCost

MOST_MOVES = 200  # after the first shares, for each rank
LEVEL = 0.005  # relative: a longest time that is above the mean by less is not shortened
PARTS = 2**36  # of the time that the fastest takes for a round

Ints = npt.NDArray[np.int64]
BY_TOKENS = LengthCost(per_token_seconds=1.0)


class SampleLengths:
    """The lengths of all samples of a data set, and what they cost.

    tokens: of each sample, int [samples]. Raises InputError for other than `count` whole numbers from 1.
    """

    def __init__(self, tokens: npt.ArrayLike, count: int) -> None:
        found = np.asarray(tokens)
        if found.shape != (count,) or found.dtype.kind not in "iu" or found.min(initial=1) < 1:
            least = f", the least {found.min()}" if found.size and found.dtype.kind in "iuf" else ""
            seen = f"{found.size} of type {found.dtype}{least}"
            raise InputError("sampler", "lengths", seen, f"a whole number from 1 for each of {count} samples")
        self.tokens = found.astype(np.int64)
        values, numbers = np.unique(self.tokens, return_counts=True)
        squares = sum(int(number) * int(n) ** 2 for n, number in zip(values, numbers, strict=True))
        self.mean, self.mean_square = int(self.tokens.sum()) / count, squares / count
        self.each = max(1, round(self.mean))  # tokens of a sample, about

    def digest(self, costs: Sequence[LengthCost]) -> str:
        """Return what tells other lengths or costs."""
        return hashlib.blake2b(self.tokens.tobytes() + repr(costs).encode(), digest_size=8).hexdigest()

    def tokens_worth(self, cost: LengthCost, samples: Any = slice(None)) -> npt.NDArray[np.float64]:
        """Return the cost of samples, in tokens of the data set's average cost."""
        seconds: npt.NDArray[np.float64] = cost.seconds(self.tokens[samples])
        return seconds * (self.mean / cost.mean(self.mean, self.mean_square))

    def shares(
        self, samples: Ints, split: Sequence[int], costs: Sequence[LengthCost], least: Sequence[int]
    ) -> list[Ints]:
        """The samples of each rank, the longest first. split: tokens that ranks compute in the same time."""
        rows = {cost: self.tokens_worth(cost, samples) for cost in costs}
        scale = PARTS * min(split) / self.mean / max(1, len(samples))
        ticks = [np.rint(rows[cost] * (scale / share)) for cost, share in zip(costs, split, strict=True)]
        owner = shares_by_cost(np.array(ticks).astype(np.int64), least)
        order = np.argsort(-self.tokens[samples], kind="stable")
        return [samples[order[owner[order] == rank]] for rank in range(len(split))]


def shares_by_cost(ticks: Ints, least: Sequence[int]) -> Ints:
    """The rank of each sample. ticks: that it takes on each rank, [ranks, samples]. least: samples of each
    rank. Raises InputError for fewer samples than these.
    """
    ranks, count = ticks.shape
    minima = np.asarray(least, np.int64)
    if count < minima.sum():
        raise InputError("shares", "samples", str(count), f"{minima.sum()}, the least of all ranks, or more")
    owner = _first_shares(ticks, minima)
    for _ in range(MOST_MOVES * ranks):
        if not _improved(ticks, minima, owner):
            break
    return owner


def equal_parts(costs: npt.NDArray[np.float64], parts: int) -> list[tuple[int, int]]:
    """Ranges of costs in a row, each of one or more, whose sums are about equal."""
    ends = np.searchsorted(np.cumsum(costs) - costs / 2, costs.sum() * np.arange(1, parts) / parts)
    cuts = [0, *ends.tolist(), len(costs)]
    for k in range(1, parts):
        cuts[k] = min(max(cuts[k], cuts[k - 1] + 1), len(costs) - parts + k)
    return list(pairwise(cuts))


def _first_shares(ticks: Ints, least: Ints) -> Ints:
    """The rank of each sample, the dearest first: the one that would finish it first."""
    ranks, count = ticks.shape
    owner, load, lacking = np.empty(count, np.int64), np.zeros(ranks, np.int64), least.copy()
    open_places = int(lacking.sum())
    for place, sample in enumerate(np.argsort(-ticks.min(axis=0), kind="stable").tolist()):
        end = load + ticks[:, sample]
        if count - place <= open_places:  # the rest goes to ranks that have too few
            end[lacking <= 0] = np.iinfo(np.int64).max
        rank = int(end.argmin())
        owner[sample] = rank
        load[rank] += ticks[rank, sample]
        open_places -= int(lacking[rank] > 0)
        lacking[rank] -= 1
    return owner


def _improved(ticks: Ints, least: Ints, owner: Ints) -> bool:
    """Move a sample from the rank that ends last, or exchange it with another's, if the later of the two then
    ends sooner than before: the best such change.
    """
    ranks, count = ticks.shape
    own = ticks[owner, np.arange(count)]
    load = np.zeros(ranks, np.int64)
    np.add.at(load, owner, own)
    last = int(load.argmax())
    if load[last] <= (1 + LEVEL) * load.mean():
        return False
    mine, theirs = np.flatnonzero(owner == last), np.flatnonzero(owner != last)
    without = load[last] - own[mine]
    moved = np.maximum(without, load[:, None] + ticks[:, mine])  # [ranks, mine]
    moved[slice(None) if len(mine) <= least[last] else last] = np.iinfo(np.int64).max
    best, change = int(moved.min()), divmod(int(moved.argmin()), len(mine))
    other = None
    if len(theirs):
        of = owner[theirs]
        after = np.maximum(
            without + ticks[last, theirs][:, None], (load[of] - own[theirs])[:, None] + ticks[of][:, mine]
        )
        if (found := int(after.min())) < best:
            best, (other, sample) = found, divmod(int(after.argmin()), len(mine))
            change = int(of[other]), sample
    if best >= load[last]:
        return False
    owner[mine[change[1]]] = change[0]
    if other is not None:
        owner[theirs[other]] = last
    return True
