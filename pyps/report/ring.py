"""Planned against actual turns of a run: was the ring's order kept, and were its gaps?"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

import msgspec

from pyps.formats.plan import TurnSchedule
from pyps.formats.records import StepRecord
from pyps.report.steps import NonNegative


class TurnsReport(msgspec.Struct, frozen=True):
    """The ring of a run.

    order: the ranks, as planned.
    turns: pushes whose turn is known from the records of both this one and the one before.
    out_of_order: those that did not come from the next rank of the order: the ranks between were away, late,
        or had no samples left.
    planned_gap_seconds: the mean from push to push. gap_seconds: the measured median.
    gap_deviation: the median, over the turns, of the measured gap over the turn's planned one, minus 1.
    period_seconds: the measured median from one push of a rank to its next.
    The measured ones are of the time before other batches were planned: these gaps were for the first ones.
    They are None where there was no such pair of pushes.
    """

    order: list[NonNegative]
    turns: NonNegative
    out_of_order: NonNegative
    planned_gap_seconds: float
    planned_period_seconds: float
    gap_seconds: float | None
    gap_deviation: float | None
    period_seconds: float | None

    @property
    def kept(self) -> bool:
        """Return whether every turn came in the planned order."""
        return self.out_of_order == 0


def turns_report(schedule: TurnSchedule, applied: Sequence[StepRecord]) -> TurnsReport:
    """The ring of a run; `applied`: the steps of all ranks that are in the parameters, by version."""
    order, count = schedule.order, len(schedule.order)
    after = {rank: order[(place + 1) % count] for place, rank in enumerate(order)}
    planned = dict(zip(order, schedule.gaps_seconds, strict=True))
    pushes = [r for r in applied if r.admitted_at > 0.0 and r.rank in after]
    pairs = [(a, b) for a, b in pairwise(pushes) if b.version == a.version + 1]
    ordered = [(a, b) for a, b in pairs if b.rank == after[a.rank]]
    first = min((r.plan for r in pushes), default=0)
    gaps = [(a.rank, b.admitted_at - a.admitted_at) for a, b in ordered if b.plan == first]
    return TurnsReport(
        order=list(order),
        turns=len(pairs),
        out_of_order=len(pairs) - len(ordered),
        planned_gap_seconds=sum(schedule.gaps_seconds) / count,
        planned_period_seconds=schedule.period_seconds,
        gap_seconds=_median([gap for _, gap in gaps]),
        gap_deviation=_median([gap / planned[rank] - 1.0 for rank, gap in gaps if planned[rank] > 0.0]),
        period_seconds=_median(_periods([r for r in pushes if r.plan == first])),
    )


def _periods(pushes: Sequence[StepRecord]) -> list[float]:
    """Seconds from each push of a rank to its next."""
    last: dict[int, float] = {}
    found = []
    for push in pushes:
        if push.rank in last:
            found.append(push.admitted_at - last[push.rank])
        last[push.rank] = push.admitted_at
    return found


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None
