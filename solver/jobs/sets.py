"""The best set of workers by a goal of time and of needs: every count of like workers, or a proven bound.

How long a set takes follows from its counts: the first of a list of times by which its largest batches sum to
the global batch. So many sets are valued at once. Where minima, unlike multiples or shared links tie the
batches, that is a bound, and sets are solved one after another, the best bounds first, until no other can be
better.

Of more than MOST_SETS sets, boxes of times and of one need are searched instead, the best bound first. In a
box the least price of workers that do the batch by its latest time, with no more of the need than its most,
is bounded by a linear program with one multiplier for the need (Lagrange); its solution, rounded, is tried,
and the best set is improved by exchanging workers. What the boxes left open is in `proven`.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from pyps.errors import Infeasible
from pyps.solver.constrained import (
    WITHIN,
    ConstrainedProblem,
    ConstrainedSolution,
    Limit,
    evaluate,
    observed,
    split_among,
)
from pyps.solver.costs import Floats, Ints
from pyps.solver.exact.followed import alone, best_followed
from pyps.solver.exact.minmax import Bools, Problem, at_index, rounded, solve, times, within_total
from pyps.solver.goal import SetObjective, fastest_goal

MOST_SETS = 1 << 20  # valued at once: two seconds
MOST_TIMES = 1 << 16  # in the list; more are so many, evenly spread
MOST_SOLVED, MOST_LINKED = 300, 30  # sets that are solved one after another; those whose transfers meet
MOST_BOXES = 2_500
PROVEN = 1e-4  # relative: a gap that is small enough
ROUNDING = 1e-9  # relative
MULTIPLIERS = np.concatenate([[0.0], np.geomspace(1e-4, 1e4, 60)])
STEPS = 1, 2, 4, 8, 16, 64


@dataclass(frozen=True)
class BestSet:
    """The solution of the best set found, its value by the goal, and the value that none is below."""

    solution: ConstrainedSolution
    value: float
    proven: float


def best_set(constrained: ConstrainedProblem, goal: SetObjective) -> BestSet | None:
    """The best set of workers, with its best split; None if none is allowed.

    constrained: at a pace at which workers wait for the slowest. Raises Infeasible where no split exists even
    without limits.
    """
    solve(constrained.problem)
    return _Sets(constrained, goal).run()


class _Sets:
    """The sets of one problem, as counts of workers of each kind."""

    def __init__(self, constrained: ConstrainedProblem, goal: SetObjective) -> None:
        apart = [Limit(f"need {k}", need, math.inf) for k, need in enumerate(goal.needs)]
        self.constrained = replace(constrained, limits=(*constrained.limits, *apart))
        self.goal, self.meets = goal, constrained.may_meet
        lower = alone(self.constrained)
        self.kinds = [np.array(kind) for kind in self.constrained.kinds()]
        self.heads = np.array([kind[0] for kind in self.kinds])
        bounds = within_total(rounded(lower.problem))
        self.total = bounds.global_batch
        usable = bounds.max_batch[self.heads] > 0
        self.most = np.where(usable, [len(kind) for kind in self.kinds], 0)
        self.least = np.where(bounds.required[self.heads], self.most, 0)
        self.needs = [need[self.heads] for need in goal.needs]
        self.sync = constrained.sync
        self.links = [
            np.where(one.workers, one.transfer_seconds, 0.0)[self.heads]
            for one in lower.resources
            if one.overlaps and one.transfer_seconds.any()
        ]
        self._list_times(at_index(replace(bounds, required=np.zeros(len(bounds.required), bool)), self.heads))
        self.best: BestSet | None = None
        self.solved: set[tuple[int, ...]] = set()

    def _list_times(self, heads: Problem) -> None:
        """The times at which a kind's largest batch changes, and these batches by then."""
        each, count = [], max(64, MOST_TIMES // len(self.heads))
        self.thinned = False
        for k in range(len(self.heads)):
            step, low, high = (int(x[k]) for x in (heads.batch_multiple, heads.min_batch, heads.max_batch))
            batches = (
                np.arange(max(low, step), high + 1, step, dtype=np.int64) if high else np.empty(0, np.int64)
            )
            if len(batches) > count:
                self.thinned = True
                batches = np.unique(np.geomspace(batches[0], batches[-1], count) // step * step).astype(
                    np.int64
                )
            seconds = times(heads.costs.take(np.full(len(batches), k)), batches)
            # Between two of these the largest batch is one step below the next, at most.
            each.append((np.append(batches[1:] - step, batches[-1:]) if self.thinned else batches, seconds))
        merged = np.unique(np.concatenate([seconds for _, seconds in each]))
        self.times = merged
        columns = []
        for batches, seconds in each:
            place = np.searchsorted(seconds, merged, "right")
            columns.append(np.concatenate([[0], batches])[place])
        self.caps = np.stack(columns, axis=1)

    def run(self) -> BestSet | None:
        sizes = math.prod(int(n) + 1 for n in self.most - self.least)
        if sizes <= MOST_SETS:
            rows = np.stack(
                [x.ravel() for x in np.meshgrid(*map(np.arange, self.least, self.most + 1), indexing="ij")], 1
            )
            left = self._solve_best(rows[self._allowed(rows)])
        else:
            left = self._by_boxes()
        if self.best is None:
            return None
        return replace(self.best, proven=min(left, self.best.value))

    def _allowed(self, rows: Ints) -> Bools:
        """Which sets keep the limits and the ties."""
        found = (rows >= self.least).all(1) & (rows <= self.most).all(1) & (rows.sum(1) > 0)
        for limit in self.constrained.limits:
            if math.isfinite(limit.at_most):
                found &= rows @ limit.need[self.heads] <= limit.at_most * WITHIN
        for group in self.constrained.together:
            mine = np.flatnonzero(np.isin(self.heads, group))
            whole = np.array([len(self.kinds[k]) for k in mine])
            found &= (rows[:, mine] == 0).all(1) | (rows[:, mine] == whole).all(1)
        return np.asarray(found)

    def seconds(self, rows: Ints) -> Floats:
        """The least seconds of an iteration of each set; infinite where it is too small."""
        low, high = np.full(len(rows), -1), np.full(len(rows), len(self.times) - 1)
        fits = (rows * self.caps[high]).sum(1) >= self.total
        while (high - low > 1).any():
            middle = (low + high) // 2
            enough = (rows * self.caps[np.maximum(middle, 0)]).sum(1) >= self.total
            open_ = high - low > 1
            high, low = np.where(open_ & enough, middle, high), np.where(open_ & ~enough, middle, low)
        place = np.maximum(high - 1, 0) if self.thinned else high
        found = np.where(fits, self.times[place], math.inf)
        for seconds in self.links:
            found = np.maximum(found, rows @ seconds)
        return self._synchronised(rows, found)

    def _synchronised(self, rows: Ints, seconds: Floats) -> Floats:
        """The seconds with each set's synchronisation."""
        sync = self.sync
        if sync.kind == "none":
            return seconds
        counts, waits = rows.sum(1), np.zeros(len(rows))
        for count in np.unique(counts[counts > 0]).tolist():
            mine = counts == count
            waits[mine] = np.where(rows[mine] > 0, sync.by_link(count)[self.heads], 0.0).max(1)
        return np.maximum(seconds + sync.tail * waits, (1 - sync.overlap) * seconds + waits)

    def values(self, rows: Ints) -> Floats:
        """The least value of each set by the goal."""
        with np.errstate(invalid="ignore", over="ignore"):
            found = self.goal.value(self.seconds(rows), *(rows @ need for need in self.needs))
        return np.where(np.isnan(found), math.inf, found)

    def _solve_best(self, rows: Ints) -> float:
        """Solve these sets, the best first, until no other can be better; the value that none is below."""
        values = self.values(rows) if len(rows) else np.empty(0)
        left = MOST_LINKED if self.meets else MOST_SOLVED
        for k in np.argsort(values, kind="stable").tolist():
            known = math.inf if self.best is None else self.best.value
            if values[k] >= known * (1 - ROUNDING) or math.isinf(values[k]):
                return float(values[k])
            if not left:
                return float(values[k])
            left -= self._solve(rows[k])
        return math.inf

    def _solve(self, row: Ints) -> bool:
        """Solve a set; False if it was before."""
        key = tuple(row.tolist())
        if key in self.solved:
            return False
        self.solved.add(key)
        workers = np.concatenate([kind[:n] for kind, n in zip(self.kinds, row, strict=True)])
        solution = self._solution(workers)
        if solution is not None:
            value = self.goal.of(solution.batches, solution.iteration_seconds)
            if math.isfinite(value) and (self.best is None or value < self.best.value):
                self.best = BestSet(solution, value, 0.0)
        return True

    def _solution(self, workers: Ints) -> ConstrainedSolution | None:
        """The fastest split with all of these workers, and no others."""
        try:
            batches = split_among(self.constrained, workers)
        except Infeasible:
            return None
        if not self.meets:
            return evaluate(self.constrained, batches)
        problem, used = self.constrained.problem, batches > 0
        mine = replace(problem, max_batch=np.where(used, problem.max_batch, 0), required=used)
        bare = replace(self.constrained, problem=mine, limits=(), together=())
        found = best_followed(bare, fastest_goal(), [batches], 0.0, plain=True)
        return None if found is None else observed(self.constrained, found.batches)

    def _by_boxes(self) -> float:
        """Search boxes of times and of the need that counts most; the value that no set is below."""
        boxes = _Boxes(self)
        rows, bound = boxes.run()
        left = self._solve_best(self._improved(rows))
        return min(bound, left) if math.isfinite(left) else bound

    def _improved(self, rows: Ints) -> Ints:
        """The sets, and those that exchanges of workers make of the best."""
        rows = rows[self._allowed(rows)] if len(rows) else rows
        if not len(rows):
            return rows
        found = [rows]
        values = self.values(rows)
        best, value = rows[values.argmin()], float(values.min())
        moves = self._moves()
        while math.isfinite(value):
            near = best + moves
            near = near[self._allowed(near)]
            values = self.values(near) if len(near) else np.array([math.inf])
            if values.min() >= value * (1 - ROUNDING):
                break
            best, value = near[values.argmin()], float(values.min())
            found.append(best[None, :])
            last = near[np.argsort(values)[:8]]
            found.append(last)
        return np.unique(np.concatenate(found), axis=0)

    def _moves(self) -> Ints:
        """A few workers of one kind more or fewer; of two kinds, some of one for some of the other."""
        m = len(self.kinds)
        unit = np.eye(m, dtype=np.int64)
        single = [sign * step * unit for step in STEPS for sign in (1, -1)]
        pairs = [
            more * unit[i] - less * unit[j]
            for i, j in itertools.permutations(range(m), 2)
            for more in STEPS[:4]
            for less in STEPS[:4]
        ]
        return np.concatenate([*single, np.array(pairs).reshape(-1, m)])


@dataclass(frozen=True)
class _Box:
    """Times first..last of the list, and a need from `low` to `high`."""

    first: int
    last: int
    low: float
    high: float


class _Boxes:
    """The search by boxes. The first need is the price; the one that boxes are cut by is `need`."""

    def __init__(self, sets: _Sets) -> None:
        self.sets = sets
        later = [k for k in range(1, len(sets.needs)) if sets.needs[k].any()]
        self.by = later[-1] if later else 0
        self.need = sets.needs[self.by] if later else np.zeros(len(sets.heads))
        self.price = sets.needs[0] if sets.needs else np.ones(len(sets.heads))
        self.rows: list[Ints] = []

    def run(self) -> tuple[Ints, float]:
        """Sets to try, and the value that no set is below."""
        sets, order = self.sets, itertools.count()
        whole = _Box(0, len(sets.times) - 1, 0.0, float(sets.most @ self.need))
        heap = [(0.0, next(order), whole)]
        best, floor = math.inf, math.inf
        for _ in range(MOST_BOXES):
            if not heap or heap[0][0] >= best * (1 - PROVEN):
                break
            bound, _, box = heapq.heappop(heap)
            parts = list(self._parts(box))
            if not parts:
                floor = min(floor, bound)
            for part in parts:
                inner, tried = self._bound(part)
                if len(tried):
                    best = min(best, float(sets.values(tried).min()))
                    self.rows.append(tried)
                if inner < best * (1 - PROVEN):
                    heapq.heappush(heap, (max(bound, inner), next(order), part))
                else:
                    floor = min(floor, max(bound, inner))
        found = (
            np.unique(np.concatenate(self.rows), axis=0)
            if self.rows
            else np.zeros((0, len(sets.heads)), np.int64)
        )
        if len(found):
            found = found[np.argsort(sets.values(found))[:200]]
        return found, min(floor, heap[0][0] if heap else math.inf)

    def _parts(self, box: _Box) -> Iterator[_Box]:
        """The box in two: by its times, or by its need where that changes the value by more."""
        sets = self.sets
        spread = sets.times[box.last] / sets.times[box.first]
        needs = [0.0] * len(sets.needs)
        if sets.needs:
            needs[0] = 1.0
        worth = []
        for amount in (box.low, box.high):
            if self.by:
                needs[self.by] = amount
            worth.append(float(self.sets.goal.value(1e-30, *needs)))
        ratio = worth[1] / worth[0] if self.by and 0 < worth[0] < math.inf and worth[1] < math.inf else 1.0
        if max(spread, ratio) < 1 + PROVEN / 4 or (box.first == box.last and ratio <= 1.0):
            return
        if spread >= ratio and box.first < box.last:
            target = math.sqrt(sets.times[box.first] * sets.times[box.last])
            middle = int(np.clip(np.searchsorted(sets.times, target), box.first, box.last - 1))
            yield replace(box, last=middle)
            yield replace(box, first=middle + 1)
        elif box.high > box.low:
            middle_ = (box.low + box.high) / 2
            yield replace(box, high=middle_)
            yield replace(box, low=middle_)

    def _bound(self, box: _Box) -> tuple[float, Ints]:
        """A value that no set of a box is below, and sets near its linear program's solution."""
        sets = self.sets
        caps = sets.caps[box.last].astype(float)
        base = sets.least
        missing = sets.total - float(base @ caps)
        room = (sets.most - base).astype(float)
        if room @ caps < missing:
            return math.inf, np.zeros((0, len(base)), np.int64)
        scale = float(self.price.max()) / max(float(self.need.max()), 1e-300)
        multipliers = MULTIPLIERS * scale if self.need.any() else MULTIPLIERS[:1]
        cost = self.price + multipliers[:, None] * self.need
        with np.errstate(divide="ignore"):
            ratio = np.where(caps > 0, cost / np.maximum(caps, 1e-300), math.inf)
        place = np.argsort(ratio, axis=1, kind="stable")
        samples = np.take_along_axis(np.broadcast_to(room * caps, ratio.shape), place, 1)
        before = np.cumsum(samples, axis=1) - samples
        taken = np.clip(max(missing, 0.0) - before, 0.0, samples)
        with np.errstate(divide="ignore", invalid="ignore"):
            part = np.where(samples > 0, taken / np.where(samples > 0, samples, 1.0), 0.0)
        levels = np.empty_like(part)
        np.put_along_axis(levels, place, part, 1)
        levels = levels * room
        least = (levels * cost).sum(1) - multipliers * (box.high - float(base @ self.need))
        price = max(0.0, float(least.max()) + float(base @ self.price))
        needs = [price if k == 0 else box.low if k == self.by else 0.0 for k in range(len(sets.needs))]
        bound = float(sets.goal.value(float(sets.times[max(box.first - sets.thinned, 0)]), *needs))
        near = levels[[int(least.argmax()), 0, -1]] + base
        rows = np.unique(
            np.concatenate([np.floor(near + 1e-9), np.ceil(near - 1e-9)]).astype(np.int64), axis=0
        )
        rows = rows[sets._allowed(rows)]
        return (bound if not math.isnan(bound) else 0.0), rows
