"""Splits a global batch exactly so that the most samples pass a second, where no worker waits for another.

    max  sum_i  b_i / T_i(b_i)    s.t.  sum b_i = B,  b_i = 0 or min_i <= b_i <= max_i,  q_i divides b_i

required workers must have b_i > 0. Limits on sums of needs, sets of workers that are used all or not at all,
and a price of samples may bind, too.

Without these, by dynamic programming over the workers: the most samples a second that the first k do with s
samples in all. Its work grows with workers times B squared, in units of the greatest common divisor of all
multiples. Past MOST_WORK a price on samples takes its place (Lagrange): each worker takes the batch that is
worth most at the price, and the price rises until the batches sum to B. Where they jump past B, the last
samples are moved one by one, and the result may be short of the optimum by `gap`, which no split exceeds.

With side constraints, branch and bound over the counts of like workers: a box of counts passes no more than
its optimum without them. Where that breaks one, the box is cut at a count of workers that need it. What is
open after MOST_NODES boxes, or as much work as of MOST_PROBLEMS problems, is in the gap.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pyps.errors import Infeasible
from pyps.solver.constrained import WITHIN, ConstrainedProblem
from pyps.solver.costs import Floats, Ints
from pyps.solver.exact.knapsack import NEVER, best_choices
from pyps.solver.exact.minmax import Problem, rounded, solve, within_total

MOST_WORK = 1 << 28  # pairs of a batch and a sum: about a second
MOST_NODES, MOST_PROBLEMS = 2_000, 4
PRICES, PRICED = 60, 20  # bisections; splits by price that take as long as MOST_WORK
SAME = 1e-12  # relative: rates that differ by less are equal


@dataclass(frozen=True)
class Throughput:
    """Batches (0: left out), their samples a second, and by what share of it another split may have more."""

    batches: Ints
    samples_per_second: float
    gap: float


@dataclass(frozen=True)
class _Counts:
    """A box: the least and the most workers in use of each kind."""

    low: tuple[int, ...]
    high: tuple[int, ...]


def rates_of(constrained: ConstrainedProblem) -> int:
    """Return how many rates the search has in memory: one of each kind of worker for each of its batches."""
    problem, heads = constrained.problem, [kind[0] for kind in constrained.kinds()]
    unit = math.gcd(problem.global_batch, *problem.batch_multiple.tolist())
    return int(np.minimum(problem.max_batch[heads], problem.global_batch).sum()) // unit


def most_throughput(
    constrained: ConstrainedProblem, spend: tuple[Floats, float] | None = None
) -> Throughput | None:
    """The optimum of the program above, or a split with its gap; None if the side constraints allow none.

    constrained: its resources are ignored. spend: the price an hour of each worker, and the most that a
    million samples may cost. Raises Infeasible as `solve`, where no split exists even without them.
    """
    solve(constrained.problem)
    return _Search(constrained, spend).run()


class _Search:
    """One search; `best` holds the best split found."""

    def __init__(self, constrained: ConstrainedProblem, spend: tuple[Floats, float] | None) -> None:
        problem = constrained.problem
        self.constrained, self.spend = constrained, spend
        self.kinds = constrained.kinds()
        if spend is not None:
            self.kinds = [mine for kind in self.kinds for mine in _by_value(kind, spend[0])]
        self.bounds = within_total(rounded(problem))
        self.unit = math.gcd(problem.global_batch, *self.bounds.batch_multiple.tolist())
        self.total = problem.global_batch // self.unit
        self.rates = [_rates(self.bounds, kind[0], self.unit) for kind in self.kinds]
        self.held = [np.concatenate([[NEVER], own[1:]]) for own in self.rates]
        self.best: Throughput | None = None
        self.work, self.lost = 0, 0.0  # lost: the most samples a second of boxes that could not be cut

    def run(self) -> Throughput | None:
        must = [len(kind) if self.bounds.required[kind[0]] else 0 for kind in self.kinds]
        first = _Counts(tuple(must), tuple(len(kind) for kind in self.kinds))
        found, order = self._solved(first), itertools.count()
        heap = [] if found is None else [(-self._bound(found), next(order), first, found)]
        for _ in range(MOST_NODES):
            if self.work > MOST_PROBLEMS * MOST_WORK or not heap or -heap[0][0] <= self._rate() * (1 + SAME):
                break
            _, _, box, found = heapq.heappop(heap)
            for part in self._parts(box, found.batches):
                inner = self._solved(part)
                if inner is not None and self._bound(inner) > self._rate() * (1 + SAME):
                    heapq.heappush(heap, (-self._bound(inner), next(order), part, inner))
        best = self.best
        if best is None:
            return None
        open_ = max(-heap[0][0] if heap else 0.0, self._bound(best), self.lost)
        return replace(best, gap=max(0.0, open_ / best.samples_per_second - 1))

    def _rate(self) -> float:
        return 0.0 if self.best is None else self.best.samples_per_second

    def _bound(self, found: Throughput) -> float:
        return found.samples_per_second * (1 + found.gap)

    def _solved(self, box: _Counts) -> Throughput | None:
        """The optimum of a box without side constraints, which becomes the best if it keeps them all; None
        where nothing fits.
        """
        if any(low > high for low, high in zip(box.low, box.high, strict=True)):
            return None
        for limit in self.constrained.limits:
            least = sum(limit.need[kind[0]] * low for kind, low in zip(self.kinds, box.low, strict=True))
            if least > limit.at_most * WITHIN:
                return None
        workers, rates, must = [], [], []
        for k, (low, high) in enumerate(zip(box.low, box.high, strict=True)):
            workers += self.kinds[k][:high]
            rates += [self.held[k]] * low + [self.rates[k]] * (high - low)
            must += [True] * low + [False] * (high - low)
        found = self._split(np.array(workers, np.int64), rates, must)
        if found is None or self._costs(box, self._bound(found)):
            return None
        better = self.best is None or found.samples_per_second > self.best.samples_per_second
        if better and next(self._broken(found), None) is None:
            self.best = found
        return found

    def _split(self, workers: Ints, rates: list[Floats], must: list[bool]) -> Throughput | None:
        """The optimum of these workers; None where no batches of theirs sum to B."""
        if not len(workers):
            return None
        work = len(rates) * self.total * self.total
        self.work += work if work <= MOST_WORK else MOST_WORK // PRICED
        batches = np.zeros(len(self.bounds.max_batch), np.int64)
        if work <= MOST_WORK:
            worth, mine = best_choices(rates, [np.arange(len(own)) for own in rates], self.total)
            if worth == NEVER:
                return None
            batches[workers] = np.array(mine) * self.unit
            return Throughput(batches, _rate_of(rates, np.array(mine)), 0.0)
        problem, most = self.constrained.problem, np.zeros(len(batches), np.int64)
        required = problem.required.copy()
        most[workers], required[workers[np.array(must, bool)]] = problem.max_batch[workers], True
        try:
            feasible = solve(replace(problem, max_batch=most, required=required)).batches[workers]
        except Infeasible:
            return None
        found = _by_price(rates, self.total, feasible // self.unit)
        batches[workers] = found.batches * self.unit
        return replace(found, batches=batches)

    def _costs(self, box: _Counts, rate: float) -> bool:
        """Return whether the least workers of a box cost too much for so many samples a second."""
        if self.spend is None:
            return False
        price, most = self.spend
        hourly = sum(price[kind[0]] * low for kind, low in zip(self.kinds, box.low, strict=True))
        return bool(hourly * 1e6 / 3600 > most * rate * WITHIN)

    def _broken(self, found: Throughput) -> Iterator[Floats | Ints]:
        """The needs of all workers in a limit that a split breaks, or the workers of a set it divides."""
        used = found.batches > 0
        for group in self.constrained.together:
            if used[group].any() and not used[group].all():
                yield group
        for limit in self.constrained.limits:
            if limit.need[used].sum() > limit.at_most * WITHIN:
                yield limit.need
        if self.spend is not None:
            price, most = self.spend
            if price[used].sum() * 1e6 / 3600 > most * found.samples_per_second * WITHIN:
                yield price

    def _parts(self, box: _Counts, batches: Ints) -> list[_Counts]:
        """The box in two, cut where the split has workers that a side constraint may forbid."""
        broken = next(self._broken(Throughput(batches, self._rate_at(batches), 0.0)), None)
        if broken is None:
            self.lost = max(self.lost, self._rate_at(batches))
            return []
        if broken.dtype == np.int64:  # a set
            mine = [k for k, kind in enumerate(self.kinds) if kind[0] in broken]
            none = tuple(0 if k in mine else high for k, high in enumerate(box.high))
            all_ = tuple(len(self.kinds[k]) if k in mine else low for k, low in enumerate(box.low))
            return [replace(box, high=none), replace(box, low=all_)]
        counts = [int((batches[kind] > 0).sum()) for kind in self.kinds]
        free = [
            k for k, kind in enumerate(self.kinds) if counts[k] > box.low[k] and float(broken[kind[0]]) > 0
        ]
        if not free:
            self.lost = max(self.lost, self._rate_at(batches))
            return []
        k = max(free, key=lambda k: float(broken[self.kinds[k][0]]) * (counts[k] - box.low[k]))
        at = (counts[k] + box.low[k]) // 2  # halves: a kind may have thousands
        below = (*box.high[:k], at, *box.high[k + 1 :])
        above = (*box.low[:k], at + 1, *box.low[k + 1 :])
        return [replace(box, high=below), replace(box, low=above)]

    def _rate_at(self, batches: Ints) -> float:
        rates = zip(self.kinds, self.rates, strict=True)
        return sum(float(own[batches[k] // self.unit]) for kind, own in rates for k in kind if batches[k])


def _by_value(kind: Sequence[int], need: Floats) -> list[list[int]]:
    """The workers of a kind by what each needs."""
    found: dict[float, list[int]] = {}
    for k in kind:
        found.setdefault(float(need[k]), []).append(k)
    return list(found.values())


def _rates(bounds: Problem, k: int, unit: int) -> Floats:
    """A worker's samples a second by its batch in units; -inf where it may not have that batch."""
    most, least, multiple = int(bounds.max_batch[k]), int(bounds.min_batch[k]), int(bounds.batch_multiple[k])
    rates = np.full(most // unit + 1, NEVER)
    if not bounds.required[k]:
        rates[0] = 0.0
    allowed_ = np.arange(-(-least // multiple) * multiple, most + 1, multiple, dtype=np.int64)
    if len(allowed_):
        costs = bounds.costs.take(np.full(len(allowed_), k))
        rates[allowed_ // unit] = allowed_ / costs.seconds(allowed_)
    return rates


def _by_price(rates: list[Floats], total: int, feasible: Ints) -> Throughput:
    """Batches by a price on samples, in units, and their gap. feasible: a split, for where none is found."""
    alike: dict[int, list[int]] = {}
    for k, own in enumerate(rates):
        alike.setdefault(id(own), []).append(k)
    members = [np.array(mine) for mine in alike.values()]
    kinds = [rates[mine[0]] for mine in members]
    high = max(float((own[1:] / np.arange(1, len(own))).max(initial=0.0)) for own in kinds)
    low, bound, batches = -high, math.inf, np.zeros(len(rates), np.int64)
    for _ in range(PRICES):
        price = (low + high) / 2
        worth = [own - price * np.arange(len(own)) for own in kinds]
        for mine, one in zip(members, worth, strict=True):
            batches[mine] = int(one.argmax())
        value = sum(len(mine) * float(one.max()) for mine, one in zip(members, worth, strict=True))
        bound = min(bound, value + price * total)
        low, high = (low, price) if batches.sum() < total else (price, high)
    best, moved = feasible, _moved(rates, batches, total)
    if moved is not None and _rate_of(rates, moved) > _rate_of(rates, best):
        best = moved
    rate = _rate_of(rates, best)
    return Throughput(best, rate, max(0.0, bound / rate - 1))


def _moved(rates: list[Floats], batches: Ints, total: int) -> Ints | None:
    """The batches with single steps, each the best there is, until they sum to the total; None: stuck."""
    batches = batches.copy()
    allowed_ = {id(own): np.flatnonzero(own > NEVER) for own in rates}
    for _ in range(total):
        left = total - int(batches.sum())
        if left == 0:
            return batches
        best, where, what = NEVER, -1, 0
        seen: set[tuple[int, int]] = set()
        for k, own in enumerate(rates):
            if (at := (id(own), int(batches[k]))) in seen:
                continue
            seen.add(at)
            steps = allowed_[id(own)]
            place = int(np.searchsorted(steps, batches[k])) + (1 if left > 0 else -1)
            if not 0 <= place < len(steps):
                continue
            to = int(steps[place])
            if abs(to - int(batches[k])) > abs(left):
                continue
            gain = (float(own[to]) - float(own[batches[k]])) / abs(to - int(batches[k]))
            if gain > best:
                best, where, what = gain, k, to
        if where < 0:
            return None
        batches[where] = what
    return None


def _rate_of(rates: list[Floats], batches: Ints) -> float:
    return sum(float(own[batch]) for own, batch in zip(rates, batches.tolist(), strict=True))
