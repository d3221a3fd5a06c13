"""The ranks of a run at present: which are there, which are away, and which wait for samples.

A rank takes part while it has samples planned. One without rests: its worker waits. A rank that is away has
none, so that a step never has more than the global batch when it comes back; the re-plan that follows gives
it samples again. Ranks that the plan does not have rest from the start.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from pyps.errors import Infeasible
from pyps.solver.costs import Cost
from pyps.solver.online.decide import Bounds, Split, best_split


@dataclass(frozen=True)
class Ranks:
    """The id of each present rank's worker, and the split in force."""

    workers: dict[int, int]
    split: Split

    @property
    def there(self) -> frozenset[int]:
        return frozenset(self.workers)

    @property
    def gone(self) -> frozenset[int]:
        """Ranks with samples and without a worker."""
        return frozenset(rank for rank, batch in enumerate(self.split) if batch and rank not in self.workers)

    @property
    def resting(self) -> frozenset[int]:
        """Ranks with a worker and without samples."""
        return frozenset(rank for rank in self.workers if not self.split[rank])


def share_out(
    samples: int,
    ranks: Collection[int],
    costs: Sequence[Cost],
    bounds: Sequence[Bounds],
    required: Collection[int],
) -> Split:
    """The split of `samples` with the shortest step, among these ranks; the others get none.

    costs, bounds: of every rank. required: ranks that get at least a sample. What no maximum allows is
    missing. Where the samples do not suffice for the required ranks, none is required; where no split keeps
    the minima and multiples, these do not hold.
    """
    among = sorted(ranks)
    if not among or samples < 1:
        return (0,) * len(bounds)
    total = min(samples, sum(bounds[rank].most for rank in among))
    enough = len(set(required) & set(among)) <= total
    held = [replace(bounds[rank], required=enough and rank in required) for rank in among]
    parts = _nearest_split(total, [costs[rank] for rank in among], held)
    shared = dict(zip(among, parts, strict=True))
    return tuple(shared.get(rank, 0) for rank in range(len(bounds)))


def _nearest_split(total: int, costs: Sequence[Cost], bounds: Sequence[Bounds]) -> Split:
    """The best split within these bounds, or within as many of them as can be kept."""
    for tried in (bounds, [replace(bound, required=False) for bound in bounds]):
        with contextlib.suppress(Infeasible):
            return best_split(total, costs, tried)
    return best_split(total, costs, [Bounds(most=b.most, required=b.required) for b in bounds])


def why_ranks_changed(before: Ranks, away: frozenset[int], planned: int, after: Split) -> str:
    """Why the split changed, in a line. away: all ranks that are; planned: ranks of the plan."""
    back = sorted(rank for rank in before.resting if after[rank] and rank < planned)
    new = sorted(rank for rank in before.resting if after[rank] and rank >= planned)
    parts = []
    if before.gone or (away and not new):
        parts.append(_named(away | before.gone, "is away", "are away"))
    elif back:
        parts.append("all ranks are back")
    if new:
        parts.append(_named(new, "has joined", "have joined"))
    return f"{'; '.join(parts)}: {list(before.split)} -> {list(after)}"


def _named(ranks: Collection[int], one: str, several: str) -> str:
    noun, verb = ("rank", one) if len(ranks) == 1 else ("ranks", several)
    return f"{noun} {', '.join(map(str, sorted(ranks)))} {verb}"
