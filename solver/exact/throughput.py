"""Splits a global batch exactly so that the most samples pass a second, where no worker waits for another.

    max  sum_i  b_i / T_i(b_i)    s.t.  sum b_i = B,  b_i = 0 or min_i <= b_i <= max_i,  q_i divides b_i

required workers must have b_i > 0.

By dynamic programming over the workers: the most samples a second that the first k do with s samples in all.
Its work grows with workers times B squared, in units of the greatest common divisor of all multiples. Past
MOST_WORK a price on samples takes its place (Lagrange): each worker takes the batch that is worth most at the
price, and the price rises until the batches sum to B. Where they jump past B, the last samples are moved one
by one, and the result may be short of the optimum by `gap`, which no split exceeds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pyps.solver.costs import Floats, Ints
from pyps.solver.exact.minmax import Problem, rounded, solve, within_total

MOST_WORK = 1 << 28  # pairs of a batch and a sum: about a second
PRICES = 60  # bisections
NEVER = -math.inf


@dataclass(frozen=True)
class Throughput:
    """Batches (0: left out), their samples a second, and by what share of it another split may have more."""

    batches: Ints
    samples_per_second: float
    gap: float


def rates_of(problem: Problem) -> int:
    """How many rates the search has in memory: one of each worker for each of its batches."""
    unit = math.gcd(problem.global_batch, *problem.batch_multiple.tolist())
    return int(np.minimum(problem.max_batch, problem.global_batch).sum()) // unit


def most_throughput(problem: Problem) -> Throughput:
    """The optimum of the program above, or a split with its gap. Raises Infeasible as `solve`."""
    feasible = solve(problem).batches  # raises where nothing fits
    bounds = within_total(rounded(problem))
    unit = math.gcd(problem.global_batch, *bounds.batch_multiple.tolist())
    total = problem.global_batch // unit
    rates = [_rates(bounds, k, unit) for k in range(len(bounds.max_batch))]
    if len(rates) * total * total <= MOST_WORK:
        batches = _by_sums(rates, total)
        return Throughput(batches * unit, _rate_of(rates, batches), 0.0)
    return _by_price(rates, total, unit, feasible)


def _rates(bounds: Problem, k: int, unit: int) -> Floats:
    """A worker's samples a second by its batch in units; -inf where it may not have that batch."""
    most, least, multiple = int(bounds.max_batch[k]), int(bounds.min_batch[k]), int(bounds.batch_multiple[k])
    rates = np.full(most // unit + 1, NEVER)
    if not bounds.required[k]:
        rates[0] = 0.0
    allowed = np.arange(-(-least // multiple) * multiple, most + 1, multiple, dtype=np.int64)
    if len(allowed):
        costs = bounds.costs.take(np.full(len(allowed), k))
        rates[allowed // unit] = allowed / costs.seconds(allowed)
    return rates


def _by_sums(rates: list[Floats], total: int) -> Ints:
    """The best batches, in units, by dynamic programming; some sum to the total."""
    best = np.full(total + 1, NEVER)
    best[0] = 0.0
    chosen = []
    for own in rates:
        found, choice = np.full(total + 1, NEVER), np.zeros(total + 1, np.int64)
        for batch in np.flatnonzero(own[: total + 1] > NEVER).tolist():
            trial = best[: total + 1 - batch] + own[batch]
            better = trial > found[batch:]
            found[batch:][better], choice[batch:][better] = trial[better], batch
        best = found
        chosen.append(choice)
    batches, left = np.zeros(len(rates), np.int64), total
    for k in range(len(rates) - 1, -1, -1):
        batches[k] = chosen[k][left]
        left -= int(batches[k])
    return batches


def _by_price(rates: list[Floats], total: int, unit: int, feasible: Ints) -> Throughput:
    """Batches by a price on samples, and their gap. feasible: a split, for where none is found."""
    high = max(float((own[1:] / np.arange(1, len(own))).max(initial=0.0)) for own in rates)
    low, bound = -high, math.inf
    for _ in range(PRICES):
        price = (low + high) / 2
        worth = [own - price * np.arange(len(own)) for own in rates]
        batches = np.array([int(one.argmax()) for one in worth])
        bound = min(bound, sum(float(one.max()) for one in worth) + price * total)
        low, high = (low, price) if batches.sum() < total else (price, high)
    best, moved = feasible // unit, _moved(rates, batches, total)
    if moved is not None and _rate_of(rates, moved) > _rate_of(rates, best):
        best = moved
    rate = _rate_of(rates, best)
    return Throughput(best * unit, rate, max(0.0, bound / rate - 1))


def _moved(rates: list[Floats], batches: Ints, total: int) -> Ints | None:
    """The batches with single steps, each the best there is, until they sum to the total; None: stuck."""
    batches = batches.copy()
    allowed = [np.flatnonzero(own > NEVER) for own in rates]
    for _ in range(total):
        left = total - int(batches.sum())
        if left == 0:
            return batches
        best, where, what = NEVER, -1, 0
        for k, own in enumerate(rates):
            place = int(np.searchsorted(allowed[k], batches[k])) + (1 if left > 0 else -1)
            if not 0 <= place < len(allowed[k]):
                continue
            to = int(allowed[k][place])
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
