"""Finds the global batch that learns fastest: throughput times the statistical efficiency of a sample.

With the gradient noise scale phi = S / |G|^2 in samples, a sample in a batch of B contributes

    efficiency(B) = (phi + m0) / (phi + B)

times as much as one in a batch of m0 (Pollux, Qiao et al., OSDI 2021, section 2.2; the noise scale is that of
McCandlish et al., arXiv 1812.06162). Then goodput(B) = B / T(B) * efficiency(B), with T(B) the planned
iteration. B / (phi + B) rises with B, and the relaxation of T never falls, so the goodput of every batch
in low .. high is at most that of B = high in the relaxed time of low. Branch and bound uses this to find the
best batch to within GAP.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import gcd

from pyps.errors import Infeasible
from pyps.formats import MAX_BATCH, GoodputEstimate, GoodputInfo
from pyps.solver.constrained import ConstrainedProblem, ConstrainedSolution
from pyps.solver.exact.minmax import times
from pyps.solver.milp.constrained import solve_constrained
from pyps.solver.milp.relaxed import subset_bound

GAP = 1e-3  # relative: no batch has a goodput higher by more


@dataclass(frozen=True)
class StatisticalEfficiency:
    """Hold how much a sample contributes in a larger batch; noise_scale phi and base_batch m0, in samples."""

    noise_scale: float
    base_batch: int

    def efficiency(self, global_batch: int) -> float:
        """The contribution of a sample, relative to one in a batch of base_batch."""
        return (self.noise_scale + self.base_batch) / (self.noise_scale + global_batch)

    def estimate(self, global_batch: int, iteration_seconds: float) -> GoodputEstimate:
        rate = global_batch / iteration_seconds
        return GoodputEstimate(
            noise_scale=self.noise_scale,
            base_batch=self.base_batch,
            samples_per_second=rate,
            efficiency=self.efficiency(global_batch),
            goodput=rate * self.efficiency(global_batch),
        )


def efficiency_of(info: GoodputInfo) -> StatisticalEfficiency:
    """Return what a cluster's [goodput] says, with its noise scale and base batch given."""
    assert info.noise_scale is not None
    assert info.base_batch is not None
    return StatisticalEfficiency(info.noise_scale, info.base_batch)


def best_batch(
    constrained: ConstrainedProblem,
    statistical: StatisticalEfficiency,
    most: int = MAX_BATCH,
    solved: Callable[[ConstrainedProblem], ConstrainedSolution] = solve_constrained,
    least: int = 0,
) -> tuple[int, ConstrainedSolution]:
    """The global batch of highest goodput up to `most`, to within GAP, and its solution by `solved`.

    constrained: the problem; its own global batch is ignored. statistical: of a sample in a larger batch.
    most: samples. solved: with a global batch. least: samples, below which none has a solution.

    Tries only multiples of the greatest common divisor of the batch multiples. Raises Infeasible if no batch
    has a solution.
    """
    step = gcd(*constrained.problem.batch_multiple.tolist())
    last = min(most, int(constrained.problem.max_batch.sum()), MAX_BATCH) // step
    none = Infeasible(
        f"no global batch up to {most} has a split",
        "raise the workers' maxima or the limits, or lower their minima",
    )
    if last < 1:
        raise none
    best: tuple[float, int, ConstrainedSolution] | None = None
    bound = _bound_of(constrained)
    seen: set[int] = set()

    def box(low: int, high: int) -> tuple[float, int, int]:
        """An upper bound of the goodput of low .. high steps, negative for the heap."""
        return -high * step / bound(low * step) * statistical.efficiency(high * step), low, high

    first = min(max(1, -(-least // step)), last)
    ends = [first, *(end for k in range(last.bit_length() + 1) if (end := min(2**k, last)) > first)]
    if len(ends) == 1:
        ends *= 2
    boxes = [box(low, high) for low, high in itertools.pairwise(ends)]
    heapq.heapify(boxes)
    while boxes:
        upper, low, high = heapq.heappop(boxes)
        if best is not None and -upper <= best[0] * (1 + GAP):
            break
        middle = (low + high) // 2
        for k in {low, middle, high} - seen:
            seen.add(k)
            solution = _solution_at(constrained, k * step, solved)
            if solution is not None:
                goodput = statistical.estimate(k * step, solution.longest_seconds).goodput
                best = max(
                    best or (0.0, 0, solution), (goodput, k * step, solution), key=lambda found: found[0]
                )
        for first, final in ((low, middle), (middle, high)):
            if final - first > 1:
                heapq.heappush(boxes, box(first, final))
    if best is None:
        raise none
    return best[1], best[2]


def _bound_of(constrained: ConstrainedProblem) -> Callable[[int], float]:
    """A lower bound, in seconds, of the iteration with a given global batch."""
    problem, ends = constrained.problem, {}
    slowest = float(times(problem.costs, problem.costs.last_batch(problem.max_batch)).max())

    def bound(global_batch: int) -> float:
        if global_batch not in ends:
            at = replace(problem, global_batch=global_batch)
            wait = float(constrained.sync.by_link(len(problem.costs)).max())
            ends[global_batch] = subset_bound(at, constrained.sync, slowest + wait)
        return ends[global_batch]

    return bound


def _solution_at(
    constrained: ConstrainedProblem,
    global_batch: int,
    solved: Callable[[ConstrainedProblem], ConstrainedSolution],
) -> ConstrainedSolution | None:
    try:
        return solved(replace(constrained, problem=replace(constrained.problem, global_batch=global_batch)))
    except Infeasible:
        return None
