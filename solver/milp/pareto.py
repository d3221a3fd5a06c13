"""The Pareto front of time against price: every choice that no other beats in both.

A point (iteration seconds, price per hour) is on it if no split is sooner at the same price or cheaper at the
same time. It is walked from the fastest end: the least time within a price, then the least price within that
time, then the next lower price. What a job costs is their product; a split of least product at its time is on
this front too, as whoever beats it in both beats it in the product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from pyps.errors import Infeasible
from pyps.solver.costs import Floats
from pyps.solver.milp.constrained import Coupled, Limit, Split, answer, needed, program_of, solve_coupled

PRICE = "price_per_hour"
POINTS_AT_MOST = 100
MAX_POINTS = 1_000_000
TIME_TOLERANCE = 1e-6  # relative: what HiGHS may miss a bound on the time by
CHEAPER = 1e-4  # relative: the next point's price is lower by this, at least; well above HiGHS' tolerance


@dataclass(frozen=True)
class FrontPoint:
    """One choice: price_per_hour of the workers in use, and what a million samples cost at its speed."""

    split: Split
    price_per_hour: float
    price_per_million_samples: float


def pareto(coupled: Coupled, price: Floats, most: int = POINTS_AT_MOST) -> Iterator[FrontPoint]:
    """The first `most` points of the front, the fastest first; price is that of each worker's hour.

    Raises Infeasible if there is none, PypsError if HiGHS stops.
    """
    split: Split | None = solve_coupled(coupled)
    for _ in range(most):
        if split is None:
            return
        point = _point(_cheapest(coupled, price, split), price)
        yield point
        split = _fastest(coupled, price, point.price_per_hour * (1 - CHEAPER))


def within_budget(coupled: Coupled, price: Floats, budget: float) -> Split:
    """The fastest split by which a million samples cost at most `budget`: the first such point of the front.

    It is optimal, as a split that is as cheap and faster would be beaten by an earlier point in time and in
    price an hour, and so in their product. Raises Infeasible with the least budget that would do.
    """
    cheapest = math.inf
    for point in pareto(coupled, price, most=MAX_POINTS):
        if point.price_per_million_samples <= budget:
            return point.split
        cheapest = min(cheapest, point.price_per_million_samples)
    raise Infeasible(
        f"no workers compute a million samples for {budget:g}",
        f"raise limits.price_per_million_samples from {budget:g} to {_up(cheapest):g}",
    )


def _up(value: float) -> float:
    """Six digits, rounded up, so that what is printed is enough."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 5)
    return math.ceil(value / unit) * unit


def _point(split: Split, price: Floats) -> FrontPoint:
    hourly = float(price[split.batches > 0].sum())
    samples_per_hour = 3600 * int(split.batches.sum()) / split.iteration_seconds
    return FrontPoint(split, hourly, 1e6 * hourly / samples_per_hour)


def _fastest(coupled: Coupled, price: Floats, budget: float) -> Split | None:
    if budget <= 0:
        return None
    try:
        return solve_coupled(replace(coupled, limits=(*coupled.limits, Limit(PRICE, price, budget))))
    except Infeasible:
        return None


def _cheapest(coupled: Coupled, price: Floats, split: Split) -> Split:
    """The least price within the time of `split`; then the least time with the workers of that."""
    limit = Limit(PRICE, price, float(price[split.batches > 0].sum()))
    program, seconds = program_of(coupled)
    program.model += seconds <= split.iteration_seconds / program.scale * (1 + TIME_TOLERANCE)
    if not program.minimise(needed(program, limit)):
        return split
    cheap = answer(coupled, program)
    if float(price[cheap.batches > 0].sum()) >= limit.at_most * (1 - CHEAPER):
        return split
    return solve_coupled(_only(coupled, cheap.batches > 0))


def _only(coupled: Coupled, used: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Coupled:
    """The same with nobody else in use."""
    problem = coupled.problem
    cap = np.where(used, problem.cap, np.where(problem.required, problem.cap, 0))
    return replace(coupled, problem=replace(problem, cap=cap))
