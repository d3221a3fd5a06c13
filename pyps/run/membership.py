"""The split while ranks are away: the others take over their samples, so that a step has the whole batch.

A rank is away from its death until its next process joins. The split among the others is the exact one for
their costs, within their caps; what no cap allows is missing from the step. When all are back, the split of
before is in force again.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyps.errors import Infeasible
from pyps.solver.costs import Cost
from pyps.solver.online.decide import Split, best_split


def split_without(
    away: frozenset[int], split: Split, costs: Sequence[Cost], max_batches: Sequence[int]
) -> Split:
    """The split among the ranks that are there; those in `away` keep their batches, for when they come back.

    split: samples a step with all ranks. costs, max_batches: of each rank.
    """
    there = [rank for rank in range(len(split)) if rank not in away]
    if not away or not there:
        return split
    caps = [max_batches[rank] for rank in there]
    total = min(sum(split), sum(caps))
    try:
        parts = best_split(total, [costs[rank] for rank in there], [1] * len(there), caps)
    except Infeasible:  # fewer samples than ranks
        return split
    shared = dict(zip(there, parts, strict=True))
    return tuple(shared.get(rank, batch) for rank, batch in enumerate(split))


def reason(away: frozenset[int], before: Split, after: Split) -> str:
    """Why the split changed, in a line."""
    if not away:
        return f"all ranks are back: {list(before)} -> {list(after)}"
    names = ", ".join(map(str, sorted(away)))
    noun, verb = ("rank", "is") if len(away) == 1 else ("ranks", "are")
    return f"{noun} {names} {verb} away: {list(before)} -> {list(after)}"
