"""Chooses exactly which workers to use when synchronising their gradients costs time.

    min over S, b   max_{i in S} T_i(b_i) + sync(S),    sum b_i = B,  min_i <= b_i <= max_i,  q_i divides b_i

with sync(S) the largest F_k(i) over i in S, k = |S|, and F nondecreasing in k (pyps.solver.sync). More
workers finish computing sooner and synchronise longer, so the objective is not monotone in S. But for every
count k and every bound w on F_k it is the min-max program with at most k workers whose links are within w,
and the optimum is the least of these. Branch and bound over boxes of (k, w) discards a box if its best
workers, with their largest batches added up, cannot do B in less time than the best solution so far. What
remains is solved exactly.

The search over subsets is in the BOA authors' thesis; the objective and this solution method are ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pyps.solver.costs import Floats, Ints
from pyps.solver.exact.cardinality import within_count
from pyps.solver.exact.minmax import (
    Bools,
    Problem,
    at_index,
    earliest,
    most_by,
    rounded,
    solve,
    times,
    within_total,
)
from pyps.solver.sync import Sync

LINKS_TO_EXPLORE = 9  # links for each count in the first, coarse search


@dataclass(frozen=True)
class SubsetSolution:
    """Batches (0 = left out), compute seconds by worker; iteration = slowest compute + sync, in seconds."""

    batches: Ints
    seconds: Floats
    sync_seconds: float
    iteration_seconds: float


def solve_subset(problem: Problem, sync: Sync) -> SubsetSolution:
    """The optimum of the program above, up to the rounding of one addition. Raises Infeasible as `solve`."""
    first = _valued(problem, sync, solve(problem).batches)
    if sync.kind == "none":
        return first
    return _Search(within_total(rounded(problem)), sync, first).run()


def _valued(problem: Problem, sync: Sync, batches: Ints) -> SubsetSolution:
    seconds = times(problem.costs, batches)
    sync_seconds = sync.seconds(batches)
    return SubsetSolution(batches, seconds, sync_seconds, float(seconds.max()) + sync_seconds)


def _some_counts(low: int, high: int) -> list[int]:
    """A few counts from low to high, closer together where they are small."""
    return sorted({min(high, max(low, round(1.6**k))) for k in range(int(math.log(high, 1.6)) + 2)})


class _Search:
    """Branch and bound over the count of workers and the slowest link that may be used.

    `best_seconds` is the least time found, compute plus synchronisation. `winner` holds its count, its
    workers and its compute seconds. The batches themselves are computed once, at the end.
    """

    def __init__(self, bounds: Problem, sync: Sync, first: SubsetSolution) -> None:
        self.bounds, self.sync, self.first = bounds, sync, first
        self.best_seconds = first.iteration_seconds
        self.winner: tuple[int, Ints, float] | None = None
        self.usable = bounds.max_batch > 0
        self.required = bounds.required
        self.least_count = max(1, int(self.required.sum()))
        self.most_count = int(self.usable.sum())
        self.least_seconds = float(times(bounds.costs, np.where(self.required, bounds.min_batch, 0)).max())

    def run(self) -> SubsetSolution:
        self._explore()
        boxes = [(self.least_count, self.most_count)]
        while boxes:
            low, high = boxes.pop()
            if not self._could_win(self._least_sync(low), high, self.usable):
                continue
            if np.array_equal(self.sync.by_link(low), self.sync.by_link(high)):
                self._search_links(high)  # fewer workers synchronise no sooner
            else:
                middle = (low + high) // 2
                boxes += [(low, middle), (middle + 1, high)]
        return self._answer()

    def _explore(self) -> None:
        """Good first solutions: a coarse grid of counts and links in random order, then a local search."""
        spots = [
            (count, share)
            for count in _some_counts(self.least_count, self.most_count)
            for share in np.linspace(0, 1, LINKS_TO_EXPLORE).tolist()
        ]
        best = (self.most_count, 1.0)
        for k in np.random.default_rng(0).permutation(len(spots)):
            best = self._better(best, *spots[k])
        step, reach = 0.25, 1 / LINKS_TO_EXPLORE
        while step * best[0] >= 0.5:
            before, by = best, max(1, round(step * best[0]))
            for count, share in ((-by, 0.0), (by, 0.0), (0, -reach), (0, reach), (-by, -reach), (by, reach)):
                best = self._better(best, before[0] + count, before[1] + share)
            if best == before:
                step, reach = step / 2, reach / 2

    def _better(self, best: tuple[int, float], count: int, share: float) -> tuple[int, float]:
        """(count, share of the links that may be used) if that beats `best`, else `best`."""
        if not (self.least_count <= count <= self.most_count and 0 <= share <= 1):
            return best
        links = np.sort(self.sync.by_link(count)[self.usable])
        limit = max(float(links[round(share * (len(links) - 1))]), self._least_sync(count))
        return (count, share) if self._try(count, limit) else best

    def _search_links(self, count: int) -> None:
        """Branch and bound for one count, over the distinct values of its synchronisation."""
        by_link = self.sync.by_link(count)
        values = np.unique(by_link[self.usable])
        values = values[values >= self._least_sync(count)]
        boxes = [(0, len(values) - 1)]
        while boxes:
            low, high = boxes.pop()
            if low == high:
                self._try(count, float(values[low]))
            elif self._could_win(float(values[low]), count, self.usable & (by_link <= values[high])):
                middle = (low + high) // 2
                boxes += [(middle + 1, high), (low, middle)]

    def _least_sync(self, count: int) -> float:
        """The least that `count` workers pay: for the count-th fastest link, or the slowest required one."""
        by_link = self.sync.by_link(count)
        some = np.partition(by_link[self.usable], count - 1)[count - 1]
        return float(max(some, by_link[self.required].max(initial=0.0)))

    def _could_win(self, sync_seconds: float, count: int, allowed: Bools) -> bool:
        """Whether at most `count` allowed workers could beat the best, if samples were shared freely."""
        t = self._to_beat(sync_seconds)
        if t <= 0 or t < self.least_seconds or (self.required & ~allowed).any():
            return False
        most = np.where(allowed, most_by(self.bounds, t), 0)
        held, free = most[self.required], most[~self.required]
        spare = count - len(held)
        if 0 < spare < len(free):
            free = np.partition(free, -spare)[-spare:]
        return int(held.sum() + (free.sum() if spare > 0 else 0)) >= self.bounds.global_batch

    def _to_beat(self, sync_seconds: float) -> float:
        return math.nextafter(self.best_seconds - sync_seconds, -math.inf)

    def _try(self, count: int, limit: float) -> bool:
        """Whether `count` workers whose synchronisation is within `limit` seconds beat the best so far."""
        allowed = self.usable & (self.sync.by_link(count) <= limit)
        if not self._could_win(limit, count, allowed):
            return False
        workers = np.flatnonzero(allowed)
        problem = at_index(self.bounds, workers)
        t = earliest(problem, _enough(problem, count), self._to_beat(limit))
        if t is None:
            return False
        t = max(t, self.least_seconds)
        if t + limit >= self.best_seconds:
            return False
        self.best_seconds, self.winner = t + limit, (count, workers, t)
        return True

    def _answer(self) -> SubsetSolution:
        if self.winner is None:
            return self.first
        count, workers, t = self.winner
        problem = at_index(self.bounds, workers)
        used = within_count(problem, most_by(problem, t), count)
        if used is None:
            raise ValueError("the best subset cannot be rebuilt")
        batches = np.zeros(len(self.usable), np.int64)
        batches[workers[used]] = solve(at_index(problem, used)).batches
        return _valued(self.bounds, self.sync, batches)


def _enough(problem: Problem, count: int) -> Callable[[Ints], bool]:
    return lambda most: within_count(problem, most, count) is not None
