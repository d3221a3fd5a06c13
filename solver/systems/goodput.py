"""Which global batch learns fastest: throughput times what each sample is worth.

With the gradient noise scale phi = S / |G|^2 in samples, a sample in a batch of B is worth

    efficiency(B) = (phi + m0) / (phi + B)

of one in a batch of m0 (Pollux, Qiao et al., OSDI 2021, section 2.2; the noise scale is that of McCandlish
et al., arXiv 1812.06162), and goodput(B) = B / T(B) * efficiency(B) with T(B) the planned iteration.
B / (phi + B) rises with B, and T's relaxation never falls, so on low .. high goodput is at most that of
B = high in the relaxed time of low: branch and bound finds the best batch to within GAP.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import gcd

from pyps.errors import Infeasible
from pyps.formats import MAX_BATCH, GoodputEstimate
from pyps.solver.exact.minmax import times
from pyps.solver.milp.constrained import Coupled, Split, solve_coupled
from pyps.solver.milp.relaxed import subset_bound

GAP = 1e-3  # relative: no batch has a goodput higher by more


@dataclass(frozen=True)
class Worth:
    """noise_scale phi and base_batch m0, in samples."""

    noise_scale: float
    base_batch: int

    def efficiency(self, global_batch: int) -> float:
        """What a sample is worth, against one in a batch of base_batch."""
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


def best_batch(
    coupled: Coupled,
    worth: Worth,
    most: int = MAX_BATCH,
    solved: Callable[[Coupled], Split] = solve_coupled,
) -> tuple[int, Split]:
    """The global batch of highest goodput up to `most`, to within GAP, and its split, by `solved`.

    coupled.problem.global_batch is not used. Only multiples of what divides every quantum are tried. Raises
    Infeasible if no batch has a split.
    """
    step = gcd(*coupled.problem.quantum.tolist())
    last = min(most, int(coupled.problem.cap.sum()), MAX_BATCH) // step
    best: tuple[float, int, Split] | None = None
    bound = _bound_of(coupled)
    seen: set[int] = set()

    def box(low: int, high: int) -> tuple[float, int, int]:
        """The highest goodput that low .. high steps could have, negative for the heap."""
        return -high * step / bound(low * step) * worth.efficiency(high * step), low, high

    ends = [min(2**k, last) for k in range(last.bit_length() + 1)]
    boxes = [box(low, high) for low, high in itertools.pairwise(ends)]
    heapq.heapify(boxes)
    while boxes:
        upper, low, high = heapq.heappop(boxes)
        if best is not None and -upper <= best[0] * (1 + GAP):
            break
        middle = (low + high) // 2
        for k in {low, middle, high} - seen:
            seen.add(k)
            split = _split_at(coupled, k * step, solved)
            if split is not None:
                goodput = worth.estimate(k * step, split.iteration_seconds).goodput
                best = max(best or (0.0, 0, split), (goodput, k * step, split), key=lambda found: found[0])
        for first, final in ((low, middle), (middle, high)):
            if final - first > 1:
                heapq.heappush(boxes, box(first, final))
    if best is None:
        raise Infeasible(
            f"no global batch up to {most} has a split", "raise the workers' maxima, or lower their minima"
        )
    return best[1], best[2]


def _bound_of(coupled: Coupled) -> Callable[[int], float]:
    """No split of B samples is sooner than this, in seconds."""
    problem, ends = coupled.problem, {}
    slowest = float(times(problem.costs, problem.costs.last_batch(problem.cap)).max())

    def bound(global_batch: int) -> float:
        if global_batch not in ends:
            at = replace(problem, global_batch=global_batch)
            wait = float(coupled.sync.by_link(len(problem.costs)).max())
            ends[global_batch] = subset_bound(at, coupled.sync, slowest + wait)
        return ends[global_batch]

    return bound


def _split_at(coupled: Coupled, global_batch: int, solved: Callable[[Coupled], Split]) -> Split | None:
    try:
        return solved(replace(coupled, problem=replace(coupled.problem, global_batch=global_batch)))
    except Infeasible:
        return None
