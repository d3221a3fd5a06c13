"""Which change of one bound would let a refused batch be split: each is solved with before it is proposed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from pyps.errors import Infeasible
from pyps.solver.constrained import ConstrainedProblem, Limit
from pyps.solver.exact.kinds import LATEST, TooManyKinds, cheapest, fastest
from pyps.solver.exact.minmax import NotAlike

NEAR = 8  # steps of the batch on either side that are all tried; farther ones by halves
PROBES = 5
DIGITS = 6

Fits = Callable[[ConstrainedProblem], bool]


def has_split(constrained: ConstrainedProblem) -> bool:
    """Return whether a split keeps the limits and the ties; False where the search has no end."""
    with contextlib.suppress(Infeasible, TooManyKinds, NotAlike):
        return fastest(replace(constrained, resources=(), trips=())) is not None
    return False


def with_remedies(
    constrained: ConstrainedProblem, reason: str | None = None, fits: Fits = has_split
) -> Infeasible:
    """The refusal of a problem with limits or ties, and the changes of a limit or of the batch that help.

    reason: why it is refused; None: no workers within the limits do the batch. fits: whether a changed
    problem has a solution.
    """
    bounds = [limit for limit in constrained.limits if math.isfinite(limit.at_most)]
    ways = [way for limit in bounds if (way := _raised(constrained, limit, fits))]
    problem = constrained.problem
    ways += [f"set global_batch to {batch // problem.local_steps}" for batch in _nearest(constrained, fits)]
    what = [limit.field for limit in bounds] + ["together"] * bool(constrained.together)
    if reason is None:
        within = " and ".join(what)
        reason = f"{problem.named}: no workers within {within} can do it"
    return Infeasible(reason, " or ".join(ways))


def _raised(constrained: ConstrainedProblem, limit: Limit, fits: Fits) -> str | None:
    """The least value of a limit with which there is a split, if that is above its own."""
    others = tuple(one for one in constrained.limits if one is not limit)
    bare = replace(constrained, limits=others, resources=(), trips=())
    try:
        found = cheapest(bare, limit.need, LATEST)
    except (Infeasible, TooManyKinds):
        return None
    if found is None:
        return None
    least = rounded_up(float(limit.need[found.batches > 0].sum()), DIGITS)
    if not least > limit.at_most or not fits(
        replace(constrained, limits=(*others, replace(limit, at_most=least)))
    ):
        return None
    digits = next(n for n in range(DIGITS, 18) if f"{limit.at_most:.{n}g}" != f"{least:.{n}g}")
    return f"raise {limit.field} from {limit.at_most:.{digits}g} to {least:.{digits}g}"


def rounded_up(value: float, digits: int) -> float:
    """So many digits, rounded up, so that what is printed suffices."""
    if value <= 0:
        return value
    unit = 10.0 ** (math.floor(math.log10(value)) + 1 - digits)
    up = float(f"{math.ceil(value / unit * (1 - 1e-12)) * unit:.{digits}g}")
    return up if up >= value * (1 - 1e-12) else float(f"{up + unit:.{digits}g}")


def _nearest(constrained: ConstrainedProblem, fits: Fits) -> list[int]:
    """The nearest batch with a split: of all close ones, else the last one that fits by halves."""
    problem = constrained.problem
    step, total = math.gcd(*problem.batch_multiple.tolist()), problem.global_batch
    step = math.lcm(step, problem.local_steps)
    most = int(problem.max_batch.sum())

    def has(batch: int) -> bool:
        changed = replace(constrained, problem=replace(problem, global_batch=batch))
        return 1 <= batch <= most and fits(changed)

    first = total // step * step
    if not any(has(batch) for batch in _probes(total, step, most)):
        return []
    for away in range(NEAR + 1):
        pair = dict.fromkeys((first - away * step, first + away * step))
        if found := [batch for batch in pair if batch != total and has(batch)]:
            return found[:1]
    low = next((batch for batch in _probes(total, step, total) if has(batch)), 0)
    if not low:
        return []
    high = total
    while high - low > step:
        middle = (low + high) // 2 // step * step
        middle = low + step if middle <= low else middle
        low, high = (middle, high) if has(middle) else (low, middle)
    return [low]


def _probes(total: int, step: int, most: int) -> Iterator[int]:
    """A few batches, from near the total to far from it: one that fits shows that some do."""
    for k in range(PROBES):
        yield max(step, int(total * 0.6**k) // step * step)
    for k in range(1, PROBES + 1):
        if (batch := int(total * 1.5**k) // step * step) <= most:
            yield batch
    yield step
