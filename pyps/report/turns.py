"""The turns of a run whose ranks push in turn: as planned, and as taken."""

from __future__ import annotations

from itertools import accumulate

from pyps.formats.records import StepRecord
from pyps.report.charts import Bar, bars, lanes_chart
from pyps.report.ring import TurnsReport, turns_report
from pyps.report.run_data import RunData
from pyps.report.steps import applied_steps

CYCLES = 6.0  # of the ring, that are shown
TURN_WIDTH = 0.006  # of the shown time: the least width of a mark


def turns_chart(run: RunData) -> str:
    """A lane for each rank in the ring's order: its transfers, and below them when its turns were planned."""
    schedule = run.setup.turns
    pushes = [r for r in applied_steps(run.records) if r.spans]
    names = {r.rank: f"{r.rank} {r.name}" for r in run.setup.ranks}
    if schedule is None or set(schedule.order) != set(names) or len(pushes) < 2 * len(names):
        return ""
    period = sum(schedule.gaps_seconds)
    first = next((r for r in pushes[len(pushes) // 2 :] if r.rank == schedule.order[0]), pushes[0])
    begin = _begin(first)
    end = min(begin + CYCLES * period, max(r.spans[-1][2] for r in pushes))
    lanes = []
    for rank, offset in zip(schedule.order, accumulate(schedule.gaps_seconds, initial=0.0), strict=False):
        mine = [r for r in pushes if r.rank == rank]
        least = TURN_WIDTH * (end - begin)
        taken = [Bar("turn", t, max(r.spans[-1][2], t + least), _title(r)) for r in mine for t in [_begin(r)]]
        times = [begin + offset + k * period for k in range(int(CYCLES) + 1)]
        planned = [Bar("planned", t, t + least, "planned", overlapped=True) for t in times]
        lanes.append((names[rank], bars(taken + planned, begin, end)))
    origin = _begin(pushes[0])
    summary = _summary(turns_report(schedule, pushes))
    return summary + lanes_chart(lanes, begin - origin, end - origin, ("planned", "turn"))


def _begin(record: StepRecord) -> float:
    """When the transfer began: of the push, after the wait for the turn."""
    return next((b for kind, b, _ in reversed(record.spans) if kind == "push"), record.spans[-1][1])


def _title(record: StepRecord) -> str:
    return f"version {record.version}, step {record.step}"


def _summary(found: TurnsReport) -> str:
    text = f"{found.turns - found.out_of_order:,} of {found.turns:,} turns followed the plan's order"
    planned = f"the plan has {found.planned_gap_seconds * 1e3:,.1f} ms"
    if found.gap_seconds is None:
        return f"<p>{text}; {planned} from one turn to the next.</p>"
    return (
        f"<p>{text}. From one to the next it took {found.gap_seconds * 1e3:,.1f} ms (median); {planned}.</p>"
    )
