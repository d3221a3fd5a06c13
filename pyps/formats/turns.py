"""The ring of turns that a plan's `r2sp` stands for, by rank of the store."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from pyps.errors import InputError
from pyps.formats.plan import Plan, R2spSchedule

MAX_TURN_SECONDS = 1e6  # as in csrc/policy/config.h


@dataclass(frozen=True)
class TurnSchedule:
    """Which rank of the store takes the k-th turn, and the seconds from its push to the next turn's.

    order: every rank once. gaps_seconds: one for each turn. period_seconds: that a cycle of all turns is
    planned to take; with gaps of equal length, each is the period divided by the number of turns. Raises
    InputError.
    """

    order: tuple[int, ...]
    gaps_seconds: tuple[float, ...]
    period_seconds: float

    def __post_init__(self) -> None:
        if not self.order or sorted(self.order) != list(range(len(self.order))):
            expected = "each rank from 0 on, once"
            raise InputError("schedule", "order", str(list(self.order)), expected)
        if len(self.gaps_seconds) != len(self.order):
            expected = f"one for each of {len(self.order)} turns"
            raise InputError("schedule", "gaps_seconds", f"{len(self.gaps_seconds)} of them", expected)
        for gap in self.gaps_seconds:
            if not 0.0 <= gap <= MAX_TURN_SECONDS:
                raise InputError("schedule", "gaps_seconds", str(gap), f"0 to {MAX_TURN_SECONDS:g}")
        if not 0.0 < self.period_seconds <= MAX_TURN_SECONDS:
            found, expected = str(self.period_seconds), f"above 0, and at most {MAX_TURN_SECONDS:g}"
            raise InputError("schedule", "period_seconds", found, expected)


def plan_turns(plan: Plan, where: str = "plan") -> TurnSchedule:
    """The turns of a plan's ring, for the store's ranks: the plan's workers that have a batch, in order.

    where: what an error names, the plan's file. Raises InputError if `r2sp` is not of these workers.
    """
    ring = plan.r2sp
    ranks = [worker.rank for worker in plan.workers if worker.batch > 0]
    if sorted(ring.order) != ranks:
        expected = f"each worker with a batch once: {', '.join(map(str, ranks))}"
        raise InputError(where, "r2sp.order", ", ".join(map(str, ring.order)) or "none", expected)
    return TurnSchedule(tuple(map(ranks.index, ring.order)), _gaps(ring, where), ring.period_seconds)


def _gaps(ring: R2spSchedule, where: str) -> tuple[float, ...]:
    """Equal, unless a transfer does not fit into its gap: then the offsets say when each turn begins."""
    turns, offsets = len(ring.order), ring.offsets_seconds
    if max(ring.turn_seconds, default=0.0) <= ring.gap_seconds:
        return (ring.gap_seconds,) * turns
    begins = [*offsets, math.fsum([*offsets[:1], ring.period_seconds])]
    gaps = [b - a for a, b in pairwise(begins)]
    if len(gaps) != turns or min(gaps) < 0.0:
        expected = f"{turns} times that do not go back, within a period of {ring.period_seconds:g}"
        raise InputError(where, "r2sp.offsets_seconds", ", ".join(map(str, offsets)) or "none", expected)
    return tuple(gap * ring.gap_seconds * turns / ring.period_seconds for gap in gaps)
