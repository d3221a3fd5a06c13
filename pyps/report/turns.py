"""The turns of a run whose ranks push in turn: as planned, and as taken."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

from pyps.formats import Plan
from pyps.formats.records import StepRecord
from pyps.report.charts import Bar, bars, lanes_chart
from pyps.report.report import applied_steps
from pyps.report.run_data import RunData
from pyps.store.policies import Policy

CYCLES = 6.0  # of the ring, that are shown
TURN_WIDTH = 0.006  # of the shown time: the least width of a mark


def turns_chart(run: RunData) -> str:
    """A lane for each rank in the ring's order: its transfers, and below them when its turns were planned."""
    kind = Policy.known.get(run.setup.policy.partition(":")[0])
    pushes = [r for r in applied_steps(run.records) if r.spans]
    if kind is None or not kind().needs.uses_turns or run.plan is None:
        return ""
    ring, order = run.plan.r2sp, ring_order(run.plan)
    names = {r.rank: f"{r.rank} {r.name}" for r in run.setup.ranks}
    if sorted(order) != sorted(names) or ring.period_seconds <= 0.0 or len(pushes) < 2 * len(order):
        return ""
    first = next((r for r in pushes[len(pushes) // 2 :] if r.rank == order[0]), pushes[0])
    begin = _begin(first)
    end = min(begin + CYCLES * ring.period_seconds, max(r.spans[-1][2] for r in pushes))
    lanes = []
    for rank, offset in zip(order, ring.offsets_seconds, strict=False):
        mine = [r for r in pushes if r.rank == rank]
        least = TURN_WIDTH * (end - begin)
        taken = [Bar("turn", t, max(r.spans[-1][2], t + least), _title(r)) for r in mine for t in [_begin(r)]]
        at = begin + offset - ring.offsets_seconds[0]
        times = [at + k * ring.period_seconds for k in range(int(CYCLES) + 1)]
        planned = [Bar("planned", t, t + least, "planned", overlapped=True) for t in times]
        lanes.append((names[rank], bars(taken + planned, begin, end)))
    origin = _begin(pushes[0])
    summary = _summary(order, pushes, ring.gap_seconds)
    return summary + lanes_chart(lanes, begin - origin, end - origin, ("planned", "turn"))


def ring_order(plan: Plan) -> list[int]:
    """The ring of the plan by ranks of the store: its workers that have a batch, in order."""
    ranks = {worker.rank: k for k, worker in enumerate(w for w in plan.workers if w.batch > 0)}
    return [ranks[rank] for rank in plan.r2sp.order if rank in ranks]


def _begin(record: StepRecord) -> float:
    """When the transfer began: of the push, after the wait for the turn."""
    return next((b for kind, b, _ in reversed(record.spans) if kind == "push"), record.spans[-1][1])


def _title(record: StepRecord) -> str:
    return f"version {record.version}, step {record.step}"


def _summary(order: list[int], pushes: list[StepRecord], gap: float) -> str:
    follows = dict(zip(order, [*order[1:], order[0]], strict=True))
    kept = sum(follows.get(a.rank) == b.rank for a, b in pairwise(pushes))
    gaps = [_begin(b) - _begin(a) for a, b in pairwise(pushes)]
    took = f"it took {median(gaps) * 1e3:,.1f} ms (median); the plan has {gap * 1e3:,.1f} ms"
    turns = f"{kept:,} of {len(pushes) - 1:,} turns followed the plan's order"
    return f"<p>{turns}. From one turn to the next {took}.</p>"
