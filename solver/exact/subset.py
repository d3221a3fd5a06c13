"""Chooses exactly which workers to use when synchronising their gradients costs time.

    min over S, b   max_{i in S} T_i(b_i) + sync(S),    sum b_i = B,  min_i <= b_i <= max_i,  q_i divides b_i

with sync(S) the largest F_k(i) over i in S, k = |S|, and F nondecreasing in k, or, where the two overlap, the
end that pyps.solver.sync states instead of the sum. More workers finish computing sooner and synchronise
longer, so the objective is not monotone in S. But for every count k and every bound w on F_k it is the
min-max program with at most k workers whose links are within w, and the optimum is the least of these. Branch
and bound over boxes of (k, w) takes a box's greatest k, and all links that its greatest w allows to its least
k. If these workers' largest batches cannot sum to B in the time that its least w leaves of the best solution
so far, the box is discarded. What remains is solved exactly.

The search over subsets is in the BOA authors' thesis; the objective and this solution method are ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

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

ROUNDING = 1e-9  # relative, and in samples
LINKS_TO_EXPLORE = 9  # links for each count in the first, coarse search


@dataclass(frozen=True)
class SubsetSolution:
    """Batches (0 = left out), compute seconds by worker; iteration = slowest compute + sync_seconds."""

    batches: Ints
    seconds: Floats
    sync_seconds: float
    iteration_seconds: float


def solve_subset(problem: Problem, sync: Sync) -> SubsetSolution:
    """The optimum of the program above, up to the rounding of one addition. Raises Infeasible as `solve`."""
    first = _valued(problem, sync, solve(problem).batches)
    if sync.kind == "none" or problem.required.all():
        return first
    return SubsetSearch(within_total(rounded(problem)), sync, first).run()


def _valued(problem: Problem, sync: Sync, batches: Ints) -> SubsetSolution:
    seconds = times(problem.costs, batches)
    slowest, whole = float(seconds.max()), sync.seconds(batches)
    return SubsetSolution(batches, seconds, sync.exposed(slowest, whole), sync.end(slowest, whole))


def _some_counts(low: int, high: int) -> list[int]:
    """A few counts from low to high, closer together where they are small."""
    return sorted({min(high, max(low, round(1.6**k))) for k in range(int(math.log(high, 1.6)) + 2)})


@dataclass(frozen=True)
class _Box:
    """Counts low..high of workers that synchronise in `least` to `most` seconds, both ends included.

    workers: a box within this one uses no others.
    """

    low: int
    high: int
    least: float
    most: float
    workers: Ints


def _cut(box: _Box, seconds: float) -> list[_Box]:
    """Return what synchronises later than `seconds`, and the rest."""
    return [replace(box, least=math.nextafter(seconds, math.inf)), replace(box, most=seconds)]


def _most_at_most(bounds: Problem, t: float) -> Ints:
    """most_by(t), or one batch more where rounding could hide it: a third of the time."""
    real = bounds.costs.real_batch(t, bounds.max_batch) * (1 + ROUNDING) + ROUNDING
    step = bounds.batch_multiple
    most = np.minimum(np.floor(real / step) * step, bounds.max_batch).astype(np.int64)
    return np.where(most < bounds.min_batch, np.where(bounds.required, bounds.min_batch, 0), most)


def _descending(batches: Ints) -> Ints:
    """The batches, the largest first: counted where there are few sizes, which is faster than to sort."""
    largest = int(batches.max(initial=0))
    if largest > len(batches):
        return np.sort(batches)[::-1]
    return np.repeat(np.arange(largest, -1, -1), np.bincount(batches, minlength=1)[::-1])


class SubsetSearch:
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
        self.required_sync = sync.take(np.flatnonzero(self.required))
        self.least_held = int(self.required.sum())
        self.least_count = max(1, self.least_held)
        self.most_count = int(self.usable.sum())
        self.least_seconds = float(times(bounds.costs, np.where(self.required, bounds.min_batch, 0)).max())

    def run(self) -> SubsetSolution:
        self.explore()
        boxes = [_Box(self.least_count, self.most_count, 0.0, math.inf, np.flatnonzero(self.usable))]
        while boxes:
            boxes += self._halves(boxes.pop())
        return self._answer()

    def _halves(self, box: _Box) -> list[_Box]:
        """The box in two parts, the better one last; none if it cannot beat the best, or holds one choice.

        It is cut where its bound is looser: the samples that the greatest count can take more than the
        least, as a share of B, against the seconds between its links, as a share of the compute.
        """
        sync, bounds = self.sync.take(box.workers), at_index(self.bounds, box.workers)
        while True:
            by_link = sync.by_link(box.low)
            allowed = by_link <= box.most
            links = by_link[allowed]
            box = replace(box, least=max(box.least, self._least_sync(box.low, links)))
            t = self._to_beat(box.least)
            sums = self.sums_by(t, bounds, allowed)
            if sums is None or sums[min(box.high, len(sums) - 1)] < self.bounds.global_batch:
                return []
            needed = int(np.searchsorted(sums, self.bounds.global_batch))
            if needed <= box.low:
                break
            box = replace(box, low=needed)  # fewer are too few, and more synchronise later
        box = replace(box, workers=box.workers[allowed])
        if np.array_equal(by_link, sync.by_link(box.high)):
            return self._by_link(box, links)
        last = float(links.max())
        samples = int(sums[min(box.high, len(sums) - 1)] - sums[box.low])
        seconds, count = (box.least + last) / 2, (box.low + box.high) // 2
        if seconds < last and (last - box.least) * self.bounds.global_batch > samples * t:
            return _cut(box, seconds)
        return [replace(box, low=count + 1), replace(box, high=count)]

    def _by_link(self, box: _Box, links: Floats) -> list[_Box]:
        """The parts of a box whose counts synchronise alike: cut between its links, and tried at the last."""
        values = np.unique(links[links >= box.least])
        if len(values) > 1:
            return _cut(box, float(values[(len(values) - 1) // 2]))
        if len(values):
            self.consider(box.high, float(values[0]))
        return []

    def sums_by(self, t: float, bounds: Problem, allowed: Bools) -> Ints | None:
        """The most samples that 0, 1, 2... allowed workers of `bounds` can do by t, if samples were shared
        freely.

        0 for fewer workers than the required ones; None if a required worker is late or not allowed.
        """
        held = bounds.required & allowed
        if t <= 0 or t < self.least_seconds or int(held.sum()) < self.least_held:
            return None
        most = _most_at_most(bounds, t)
        free = _descending(most[allowed & ~held])
        sums = np.zeros(self.least_held + 1 + len(free), np.int64)
        sums[self.least_held] = int(most[held].sum())
        np.cumsum(free, out=sums[self.least_held + 1 :])
        sums[self.least_held + 1 :] += sums[self.least_held]
        return sums

    def explore(self) -> None:
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
        limit = max(float(links[round(share * (len(links) - 1))]), self._least_sync(count, links))
        return (count, share) if self.consider(count, limit) else best

    def _least_sync(self, count: int, by_link: Floats) -> float:
        """The least that `count` of these workers pay: for the count-th fastest link, or a required one.

        by_link: seconds of `count` workers, of each worker that may be used; infinite if these are too few.
        """
        if len(by_link) < count:
            return math.inf
        required = self.required_sync.by_link(count).max(initial=0.0)
        return float(max(np.partition(by_link, count - 1)[count - 1], required))

    def _could_win(self, sync_seconds: float, count: int, allowed: Bools) -> bool:
        """Return whether at most `count` allowed workers could win, if samples were shared freely."""
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
        return math.nextafter(self.sync.compute_by(self.best_seconds, sync_seconds), -math.inf)

    def consider(self, count: int, limit: float) -> bool:
        """Return whether `count` workers that synchronise within `limit` seconds beat the best."""
        allowed = self.usable & (self.sync.by_link(count) <= limit)
        if not self._could_win(limit, count, allowed):
            return False
        workers = np.flatnonzero(allowed)
        problem = at_index(self.bounds, workers)
        t = earliest(
            problem, lambda most: within_count(problem, most, count) is not None, self._to_beat(limit)
        )
        if t is None:
            return False
        t = max(t, self.least_seconds)
        end = self.sync.end(t, limit)
        if end >= self.best_seconds:
            return False
        self.best_seconds, self.winner = end, (count, workers, t)
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
