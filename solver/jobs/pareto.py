"""The Pareto front of time against price: every choice of workers that no other beats in both.

A point (iteration seconds, price per hour) is on the front if no solution is faster at the same price or
cheaper at the same time. The front is computed from its fastest end: the least time within a price, then the
least price within that time, then the next lower price. A job's cost is the product of time and price. The
solution with the least product is on this front too, because a solution that is better in both time and price
has a smaller product.

Of workers that are all unlike, every choice may be worth its price. So after MANY points the prices go
on in steps of COARSE, and so do times where a search has no end: no solution is better by more.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pyps.errors import Infeasible
from pyps.solver.constrained import ConstrainedProblem, ConstrainedSolution, Limit, observed
from pyps.solver.costs import Floats
from pyps.solver.exact.followed import alone, best_followed
from pyps.solver.exact.kinds import ROUNDING, TooManyKinds, cheapest, fastest, handles
from pyps.solver.exact.remedies import DIGITS, rounded_up, with_remedies
from pyps.solver.goal import SetObjective
from pyps.solver.milp.constrained import (
    constrained_milp,
    solution_of,
    solve_by_milp,
    solve_constrained,
    total_need,
)

PRICE = "price_per_hour"
TIME_TOLERANCE = 1e-6  # relative: the error that HiGHS may make in a bound on the time
CHEAPER = 1e-4  # relative: how much cheaper the next point is at least; well above HiGHS' tolerance
MANY, COARSE = 100, 0.01  # points; the same of what follows them


@dataclass(frozen=True)
class ParetoPoint:
    """One point of the front: its solution, and the price of the workers in use, per hour and per million
    samples.
    """

    solution: ConstrainedSolution
    price_per_hour: float
    price_per_million_samples: float


@dataclass
class _Steps:
    """By how much two prices, and two times, of a front differ at least, relatively."""

    price: float = CHEAPER
    time: float = 0.0

    def search(self, searched: Callable[[], ConstrainedSolution | None]) -> ConstrainedSolution | None:
        """Return what a search finds, with coarse steps if it has no end with these. Raises TooManyKinds."""
        try:
            return searched()
        except TooManyKinds:
            if self.time == COARSE:
                raise
            self.price = self.time = COARSE
            return searched()


def pareto_front(constrained: ConstrainedProblem, price: Floats) -> Iterator[ParetoPoint]:
    """The points of the front, fastest first. price: of one hour of each worker.

    Raises Infeasible if there is no solution, PypsError if HiGHS stops without a proof.
    """
    if constrained.may_meet:
        yield from _followed_front(constrained, price)
        return
    solution: ConstrainedSolution | None = solve_constrained(constrained)
    steps, count = _Steps(), 0
    before: ParetoPoint | None = None
    while solution is not None:
        point = _point(_cheapest(constrained, price, solution, steps), price)
        if before is not None and before.solution.longest_seconds < point.solution.longest_seconds:
            yield before  # coarse steps may find one that is as fast, and cheaper, after it
            count += 1
        before = point
        if not steps.time:  # none after it is as fast
            yield point
            before, count = None, count + 1
        if count == MANY:
            steps.price = COARSE
        solution = _fastest(constrained, price, point, steps)
    if before is not None:
        yield before


def _followed_front(constrained: ConstrainedProblem, price: Floats) -> Iterator[ParetoPoint]:
    """The front by transfers followed over shared links, fastest first."""
    scale = ROUNDING / max(float(price.sum()), 1e-300)  # of equally fast ones the cheapest
    goal, limited = (
        SetObjective((price,), lambda seconds, hourly: seconds * (1 + scale * hourly)),
        constrained,
    )
    while True:
        try:
            least = solve_constrained(alone(limited))
            starts = [least.batches, solve_constrained(replace(limited, trips=())).batches]
        except Infeasible:
            if limited is constrained:
                raise
            return
        bound = least.iteration_seconds if constrained.minimises_iteration else 0.0
        found = best_followed(limited, goal, starts, bound, plain=False)
        if found is None:
            return
        point = _point(observed(constrained, found.batches), price)
        yield point
        below = point.price_per_hour * (1 - CHEAPER)
        if below <= 0:
            return
        limited = replace(constrained, limits=(*constrained.limits, Limit(PRICE, price, below)))


def unbeaten(points: Sequence[ParetoPoint]) -> list[ParetoPoint]:
    """Keep what no other beats of a front, fastest first. Where workers do not wait for the slowest, it is a
    front of the longest step, and one with a longer step may pass more samples.
    """
    found: list[ParetoPoint] = []
    for point in sorted(points, key=lambda one: (one.solution.iteration_seconds, one.price_per_hour)):
        if not found or point.price_per_hour < found[-1].price_per_hour:
            found.append(point)
    return found


def within_budget(
    constrained: ConstrainedProblem, price: Floats, budget: float, name_least: bool = True
) -> ConstrainedSolution:
    """The fastest solution that computes a million samples for at most `budget`.

    Raises Infeasible with the least budget for which there is a solution, if name_least; that takes a front.
    """
    try:
        return _within(constrained, price, budget, name_least)
    except Infeasible as error:
        if not name_least or "compute a million samples" in error.reason:
            raise

        def fits(changed: ConstrainedProblem) -> bool:
            with contextlib.suppress(Infeasible):
                return bool(_within(changed, price, budget, name_least=False).batches.any())
            return False

        raise with_remedies(constrained, error.reason, fits) from None


def _within(
    constrained: ConstrainedProblem, price: Floats, budget: float, name_least: bool
) -> ConstrainedSolution:
    if constrained.minimises_iteration and handles(constrained):
        with contextlib.suppress(TooManyKinds):
            at_most = budget * 3600 * constrained.problem.global_batch / 1e6  # price an hour times seconds
            found = fastest(constrained, spend=(price, at_most))
            if found is not None:
                return found
            if not name_least:
                raise Infeasible(f"no workers compute a million samples for {budget:g}")
    return _first_within(constrained, price, budget, name_least)


def _first_within(
    constrained: ConstrainedProblem, price: Floats, budget: float, name_least: bool
) -> ConstrainedSolution:
    """The first point of the front within the budget: a faster solution within it would make an earlier
    point, no worse in time and price and so in their product, lie within the budget too.
    """
    cheapest = math.inf
    for point in pareto_front(constrained, price):
        if point.price_per_million_samples <= budget:
            return point.solution
        cheapest = min(cheapest, point.price_per_million_samples)
    if not name_least:
        raise Infeasible(f"no workers compute a million samples for {budget:g}")
    least, way = rounded_up(cheapest, DIGITS), ""
    with contextlib.suppress(Infeasible):
        _within(constrained, price, least, name_least=False)
        way = f"raise limits.price_per_million_samples from {budget:g} to {least:.{DIGITS}g}"
    raise Infeasible(f"no workers compute a million samples for {budget:g}", way)


def _point(solution: ConstrainedSolution, price: Floats) -> ParetoPoint:
    hourly = float(price[solution.batches > 0].sum())
    return ParetoPoint(solution, hourly, price_per_million(solution, hourly))


def price_per_million(solution: ConstrainedSolution, price_per_hour: float) -> float:
    """Return what a million samples cost at the speed of a solution whose workers cost price_per_hour."""
    samples_per_hour = 3600 * int(solution.batches.sum()) / solution.iteration_seconds
    return 1e6 * price_per_hour / samples_per_hour


def _fastest(
    constrained: ConstrainedProblem, price: Floats, before: ParetoPoint, steps: _Steps
) -> ConstrainedSolution | None:
    """The fastest solution that is cheaper than the point before it by a step."""
    budget, seconds = before.price_per_hour * (1 - steps.price), before.solution.longest_seconds
    if budget <= 0:
        return None
    limited = replace(constrained, limits=(*constrained.limits, Limit(PRICE, price, budget)))
    if handles(limited):
        with contextlib.suppress(TooManyKinds):
            not_before = seconds * (1 - TIME_TOLERANCE)
            return steps.search(lambda: fastest(limited, not_before=not_before, step=steps.time))
    try:
        return solve_by_milp(limited)
    except Infeasible:
        return None


def _cheapest(
    constrained: ConstrainedProblem, price: Floats, solution: ConstrainedSolution, steps: _Steps
) -> ConstrainedSolution:
    """The least price within the time of `solution`, then the least time with the workers of that one."""
    hourly = float(price[solution.batches > 0].sum())
    if handles(constrained):
        with contextlib.suppress(TooManyKinds):
            latest = solution.longest_seconds * (1 + ROUNDING)
            found = steps.search(
                lambda: cheapest(constrained, price, latest, hourly * (1 - steps.price), steps.price)
            )
            return found or solution
    limit = Limit(PRICE, price, hourly)
    milp, seconds = constrained_milp(constrained)
    milp.model += seconds <= solution.longest_seconds / milp.scale * (1 + TIME_TOLERANCE)
    if not milp.minimise(total_need(milp, limit)):
        return solution
    cheap = solution_of(constrained, milp)
    if float(price[cheap.batches > 0].sum()) >= limit.at_most * (1 - steps.price):
        return solution
    return solve_constrained(_only(constrained, cheap.batches > 0))


def _only(
    constrained: ConstrainedProblem, used: np.ndarray[tuple[int], np.dtype[np.bool_]]
) -> ConstrainedProblem:
    """The same problem with only the `used` workers, and the required ones."""
    problem = constrained.problem
    most = np.where(used, problem.max_batch, np.where(problem.required, problem.max_batch, 0))
    return replace(constrained, problem=replace(problem, max_batch=most))
