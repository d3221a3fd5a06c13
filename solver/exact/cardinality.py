"""Can a total be done by at most so many workers, each taking from its own set of batches? Exact.

Workers of one quantum and one minimum form a class. Of a class, j workers do best with the j largest maxima,
and together they can take every multiple of the quantum from j minima to the sum of these maxima. So only the
counts per class are searched, deepest first from the greedy choice, and a branch whose greedy completion
falls short of the total is cut. Whether the chosen classes' sums meet the total pyps.solver.exact.subset_sum
says.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyps.solver.costs import Ints
from pyps.solver.exact.minmax import Problem
from pyps.solver.exact.subset_sum import Choice, sums_to


@dataclass(frozen=True)
class _Class:
    """Optional workers of one quantum and minimum, the largest first, and the running sum of their maxima."""

    quantum: int
    low: int
    members: Ints
    reach: list[int]


def within_count(problem: Problem, most: Ints, count: int) -> Ints | None:
    """Indices of at most `count` workers, all required ones among them, whose batches can sum to B.

    `most` is each worker's largest batch, 0 where it can take none; required workers have at least their
    minimum. None where there are no such workers.
    """
    held = np.flatnonzero(problem.required)
    spare = count - len(held)
    free = np.flatnonzero(~problem.required & (most > 0))
    free = free[np.argsort(-most[free], kind="stable")]
    total = problem.global_batch
    if spare < 0 or int(most[held].sum() + most[free[:spare]].sum()) < total:
        return None
    fixed = [
        Choice(int(problem.low[of].sum()), int(most[of].sum()), int(quantum))
        for quantum in np.unique(problem.quantum[held])
        if len(of := held[problem.quantum[held] == quantum])
    ]
    classes = _classes(problem, most, free)
    values = np.concatenate([[0], np.cumsum(most[free])])
    picked = _search(classes, fixed, total, spare, values)
    if picked is None:
        return None
    chosen = [c.members[:taken] for c, taken in zip(classes, picked, strict=True)]
    return np.sort(np.concatenate([held, *chosen]))


def _classes(problem: Problem, most: Ints, free: Ints) -> list[_Class]:
    keys = np.stack([problem.quantum[free], problem.low[free]])
    found = []
    for quantum, low in np.unique(keys, axis=1).T:
        members = free[(keys[0] == quantum) & (keys[1] == low)]
        reach = [0, *np.cumsum(most[members]).tolist()]
        found.append(_Class(int(quantum), int(low), members, reach))
    return found


def _search(
    classes: list[_Class], fixed: list[Choice], total: int, spare: int, best: Ints
) -> list[int] | None:
    """How many of each class, or None. best[k]: the most that any k optional workers can do."""
    least, sure = sum(c.low for c in fixed), sum(c.high for c in fixed)
    if not _meets(_loosest(classes, fixed), total):
        return None
    greedy = _greedy(classes, spare)

    def descend(place: int, taken: list[int], left: int, low: int, high: int) -> list[int] | None:
        if place == len(classes):
            return taken if high >= total and _meets(_choices(classes, taken, fixed), total) else None
        here = classes[place]
        for j in sorted(range(min(left, len(here.members)) + 1), key=lambda j: abs(j - greedy[place])):
            reach = high + here.reach[j]
            if low + j * here.low > total or reach + _most_of(classes[place + 1 :], left - j, best) < total:
                continue
            if found := descend(place + 1, [*taken, j], left - j, low + j * here.low, reach):
                return found
        return None

    return descend(0, [], spare, least, sure)


def _most_of(classes: list[_Class], count: int, best: Ints) -> int:
    """The most that `count` workers of these classes can do; bounded by what any can where several remain."""
    if len(classes) > 1:
        return int(best[min(count, len(best) - 1)])
    return classes[0].reach[min(count, len(classes[0].members))] if classes else 0


def _greedy(classes: list[_Class], count: int) -> list[int]:
    """How many of each class the `count` largest maxima hold."""
    sizes = [np.diff(c.reach) for c in classes]
    owner = np.repeat(np.arange(len(sizes)), [len(s) for s in sizes])
    value = np.array([m for s in sizes for m in s], np.int64)
    top = owner[np.argsort(-value, kind="stable")[:count]]
    return [int((top == k).sum()) for k in range(len(classes))]


def _choices(classes: list[_Class], taken: list[int], fixed: list[Choice]) -> list[Choice]:
    sets = [Choice(j * c.low, c.reach[j], c.quantum) for c, j in zip(classes, taken, strict=True) if j]
    return fixed + sets


def _loosest(classes: list[_Class], fixed: list[Choice]) -> list[Choice]:
    """Sets that hold every sum that any number of the workers can reach, and possibly more."""
    return fixed + [Choice(0, c.reach[-1], c.quantum) for c in classes]


def _meets(choices: list[Choice], total: int) -> bool:
    """Whether one integer from each set can sum to `total`."""
    low, high = sum(c.low for c in choices), sum(c.high for c in choices)
    if not low <= total <= high:
        return False
    widest = max((c.step for c in choices if c.high > c.low), default=1)
    if any(c.step == 1 and c.high - c.low >= widest - 1 for c in choices):
        return True  # a set of unit steps closes every gap that the others leave
    return sums_to(choices, total) is not None
