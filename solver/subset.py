"""Which workers to use when bringing gradients together costs time: exact.

    min over S, b   max_{i in S} T_i(b_i) + sync(S),    sum b_i = B,  b_i in [low_i, cap_i], multiples of q_i

with sync(S) the largest F_k(i) over i in S, k = |S|, and F nondecreasing in k (pyps.solver.sync). More workers
compute sooner and synchronise later, so this is not monotone in S. But for every k and every bound w on F_k it is
the min-max program over the links within w with at most k workers, and the optimum is the least of these. Boxes
of (k, w) are discarded by one question each: could the best workers of the box, their largest batches added up,
do B in the time that would beat the best answer so far? What is left is solved exactly (`_fastest`).

The search over subsets is in the BOA authors' thesis; the objective and this way to solve it are ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from pyps.solver.costs import Floats, Ints
from pyps.solver.fewest import within_count
from pyps.solver.minmax import Bools, Problem, at_index, earliest, most_by, rounded, solve, times
from pyps.solver.sync import Sync


@dataclass(frozen=True)
class SubsetSolution:
    """Batches (0 = left out), each worker's compute seconds, and iteration = slowest compute + sync seconds."""

    batches: Ints
    seconds: Floats
    sync_seconds: float
    iteration_seconds: float


def solve_subset(problem: Problem, sync: Sync) -> SubsetSolution:
    """The optimum of the program above, to the rounding of one addition. Raises Infeasible as `solve` does."""
    first = _valued(problem, sync, solve(problem).batches)
    if sync.kind == "none":
        return first
    bounds = rounded(problem)
    cap = np.minimum(bounds.cap, problem.global_batch // bounds.quantum * bounds.quantum)
    return _Search(replace(bounds, cap=np.where(cap < bounds.low, 0, cap)), sync, first).run()


def _valued(problem: Problem, sync: Sync, batches: Ints) -> SubsetSolution:
    seconds = times(problem.costs, batches)
    sync_seconds = sync.seconds(batches)
    return SubsetSolution(batches, seconds, sync_seconds, float(seconds.max()) + sync_seconds)


def _spread(low: int, high: int) -> list[int]:
    """A few counts from low to high, closer together where they are small: answers to beat."""
    return sorted({min(high, max(low, round(1.6**k))) for k in range(int(math.log(high, 1.6)) + 2)})


class _Search:
    """Branch and bound over the count of workers and the slowest link that may be used."""

    def __init__(self, bounds: Problem, sync: Sync, first: SubsetSolution) -> None:
        self.bounds, self.sync, self.best = bounds, sync, first
        self.everyone = bounds.cap > 0
        self.held = bounds.required
        self.least_count = max(1, int(self.held.sum()))
        self.least_seconds = float(times(bounds.costs, np.where(self.held, bounds.low, 0)).max())

    def run(self) -> SubsetSolution:
        most = int(self.everyone.sum())
        for count in _spread(self.least_count, most):
            self._try(count, self.everyone)
        boxes = [(self.least_count, most)]
        while boxes:
            low, high = boxes.pop()
            if not self._could_win(self._least_sync(low), high, self.everyone):
                continue
            if low == high:
                self._search_links(low)
            else:
                middle = (low + high) // 2
                boxes += [(low, middle), (middle + 1, high)]
        return self.best

    def _search_links(self, count: int) -> None:
        """The same for one count, over the distinct values that its synchronisation can take."""
        by_link = self.sync.by_link(count)
        values = np.unique(by_link[self.everyone])
        values = values[values >= self._least_sync(count)]
        boxes = [(0, len(values) - 1)]
        while boxes:
            low, high = boxes.pop()
            allowed = self.everyone & (by_link <= values[high])
            if not self._could_win(float(values[low]), count, allowed):
                continue
            if low == high:
                self._try(count, allowed)
            else:
                middle = (low + high) // 2
                boxes += [(middle + 1, high), (low, middle)]

    def _least_sync(self, count: int) -> float:
        """What `count` workers pay at least: the count-th fastest link, or the slowest one that is required."""
        by_link = self.sync.by_link(count)
        some = np.partition(by_link[self.everyone], count - 1)[count - 1]
        return float(max(some, by_link[self.held].max(initial=0.0)))

    def _could_win(self, sync_seconds: float, count: int, allowed: Bools) -> bool:
        """Whether at most `count` of the allowed, could samples be dealt out freely, beat the best so far."""
        t = math.nextafter(self.best.iteration_seconds - sync_seconds, -math.inf)
        if t <= 0 or t < self.least_seconds or (self.held & ~allowed).any():
            return False
        most = np.where(allowed, self.bounds.costs.largest_batch(t, self.bounds.cap), 0)
        most -= most % self.bounds.quantum
        held, free = most[self.held], most[~self.held]
        spare = count - len(held)
        top = (
            np.partition(free, -spare)[-spare:] if 0 < spare < len(free) else free[: len(free) * (spare > 0)]
        )
        return int(held.sum() + top.sum()) >= self.bounds.global_batch

    def _try(self, count: int, allowed: Bools) -> None:
        members = np.flatnonzero(allowed)
        found = _fastest(at_index(self.bounds, members), count)
        if found is None:
            return
        batches = np.zeros(len(self.everyone), np.int64)
        batches[members] = found
        valued = _valued(self.bounds, self.sync, batches)
        if valued.iteration_seconds < self.best.iteration_seconds:
            self.best = valued


def _fastest(problem: Problem, count: int) -> Ints | None:
    """The min-max program with at most `count` workers in use; None if B cannot be done so."""
    t = earliest(problem, lambda most: within_count(problem, most, count) is not None)
    used = None if t is None else within_count(problem, most_by(problem, t), count)
    if used is None:
        return None
    batches = np.zeros(len(problem.costs), np.int64)
    batches[used] = solve(at_index(problem, used)).batches
    return batches
