"""Decides exactly whether at most k workers, each with its own set of allowed batches, can sum to a total.

Workers with the same batch multiple and the same minimum form a class. The best j workers of a class are the
j with the largest maxima. Together they can take every multiple from j minima to the sum of these maxima. So
only the counts per class are searched, depth first from the greedy counts, and a branch is cut when even its
greedy completion falls short of the total. pyps.solver.exact.subset_sum decides whether the chosen classes
can sum to the total.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyps.solver.costs import Ints
from pyps.solver.exact.minmax import Problem
from pyps.solver.exact.subset_sum import Progression, subset_sum


@dataclass(frozen=True)
class _Class:
    """Optional workers with one batch multiple and minimum, largest first; reach[j]: the sum of the first j
    maxima.
    """

    batch_multiple: int
    min_batch: int
    workers: Ints
    reach: list[int]


def within_count(problem: Problem, most: Ints, count: int) -> Ints | None:
    """Indices of at most `count` workers, including every required one, whose batches can sum to B.

    `most` is each worker's largest batch: 0 if it can take none, at least the minimum for a required worker.
    Returns None if no such set of workers exists.
    """
    held = np.flatnonzero(problem.required)
    spare = count - len(held)
    free = np.flatnonzero(~problem.required & (most > 0))
    free = free[np.argsort(-most[free], kind="stable")]
    total = problem.global_batch
    if spare < 0 or int(most[held].sum() + most[free[:spare]].sum()) < total:
        return None
    fixed = [
        Progression(int(problem.min_batch[of].sum()), int(most[of].sum()), int(multiple))
        for multiple in np.unique(problem.batch_multiple[held])
        if len(of := held[problem.batch_multiple[held] == multiple])
    ]
    classes = _classes(problem, most, free)
    values = np.concatenate([[0], np.cumsum(most[free])])
    picked = _search(classes, fixed, total, spare, values)
    if picked is None:
        return None
    chosen = [c.workers[:taken] for c, taken in zip(classes, picked, strict=True)]
    return np.sort(np.concatenate([held, *chosen]))


def _classes(problem: Problem, most: Ints, free: Ints) -> list[_Class]:
    keys = np.stack([problem.batch_multiple[free], problem.min_batch[free]])
    found = []
    for multiple, least in np.unique(keys, axis=1).T:
        workers = free[(keys[0] == multiple) & (keys[1] == least)]
        reach = [0, *np.cumsum(most[workers]).tolist()]
        found.append(_Class(int(multiple), int(least), workers, reach))
    return found


def _search(
    classes: list[_Class], fixed: list[Progression], total: int, spare: int, best: Ints
) -> list[int] | None:
    """Return how many workers of each class to use, or None.

    fixed: the sets of the required workers. spare: how many optional workers may be used. best[k]: the most
    samples that any k optional workers can take.
    """
    least, sure = sum(s.first for s in fixed), sum(s.last for s in fixed)
    # Sets that contain every sum that any number of the workers can reach, and possibly more.
    loosest = fixed + [Progression(0, c.reach[-1], c.batch_multiple) for c in classes]
    if not meets(loosest, total):
        return None
    greedy = _greedy(classes, spare)

    def descend(place: int, taken: list[int], left: int, low: int, high: int) -> list[int] | None:
        if place == len(classes):
            return taken if high >= total and meets(_sets_of(classes, taken, fixed), total) else None
        here = classes[place]
        counts = np.arange(min(left, len(here.workers)) + 1)
        for j in counts[np.argsort(np.abs(counts - greedy[place]), kind="stable")].tolist():
            reach = high + here.reach[j]
            least_so_far = low + j * here.min_batch
            if least_so_far > total or reach + _most_of(classes[place + 1 :], left - j, best) < total:
                continue
            if found := descend(place + 1, [*taken, j], left - j, least_so_far, reach):
                return found
        return None

    return descend(0, [], spare, least, sure)


def _most_of(classes: list[_Class], count: int, best: Ints) -> int:
    """The most samples that `count` workers of these classes can take; an upper bound for several classes."""
    if len(classes) > 1:
        return int(best[min(count, len(best) - 1)])
    return classes[0].reach[min(count, len(classes[0].workers))] if classes else 0


def _greedy(classes: list[_Class], count: int) -> list[int]:
    """Return how many workers of each class are among the `count` workers with the largest maxima."""
    sizes = [np.diff(c.reach) for c in classes]
    owner = np.repeat(np.arange(len(sizes)), [len(s) for s in sizes])
    value = np.array([m for s in sizes for m in s], np.int64)
    top = owner[np.argsort(-value, kind="stable")[:count]]
    return [int((top == k).sum()) for k in range(len(classes))]


def _sets_of(classes: list[_Class], taken: list[int], fixed: list[Progression]) -> list[Progression]:
    taken_sets = [
        Progression(j * c.min_batch, c.reach[j], c.batch_multiple)
        for c, j in zip(classes, taken, strict=True)
        if j
    ]
    return fixed + taken_sets


def meets(sets: list[Progression], total: int) -> bool:
    """Return whether one integer from each set can sum to `total`."""
    low, high = sum(s.first for s in sets), sum(s.last for s in sets)
    if not low <= total <= high:
        return False
    widest = max((s.step for s in sets if s.last > s.first), default=1)
    if any(s.step == 1 and s.last - s.first >= widest - 1 for s in sets):
        return True  # a set of unit steps closes every gap that the others leave
    return subset_sum(sets, total) is not None
