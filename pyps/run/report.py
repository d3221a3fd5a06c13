"""What a run came to: report.json (pyps.report/1), computed from the workers' step records and the events.

An iteration is the global batch's worth of samples, under every policy: the time between the moments at which
the samples in the parameters pass k*B and (k+1)*B. Under BSP that is one round. The first is not counted (it
has no beginning), nor is a process's wait for all others to join before its first step.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta

from pyps.errors import InputError
from pyps.formats.records import SpanKind, StepRecord, apart
from pyps.run.events import Event
from pyps.run.ranks import Place

REPORT_SCHEMA: Final = "pyps.report/1"
Outcome = Literal["finished", "failed", "interrupted"]
KINDS: tuple[SpanKind, ...] = ("compute", "push", "pull", "wait")
Count = Annotated[int, Meta(ge=0)]


class Spread(msgspec.Struct, frozen=True):
    """Seconds of something that happened `count` times: mean, median, and the quartiles around it."""

    count: Count
    mean: float = 0.0
    median: float = 0.0
    low: float = 0.0
    high: float = 0.0


class RankReport(msgspec.Struct, frozen=True):
    """One rank, over all processes that held it.

    `steps` are the gradients that were taken, `samples` what they were made of. `compute`, `push`, `pull` and
    `wait` are seconds a step; `idle_share` is the wait's share of all four together. `overrun_seconds` is how
    much longer than the emulated device the real one took, in sum: above a few per cent of the compute time,
    the emulation did not hold.
    """

    rank: Count
    name: str
    batch: Count
    predicted_seconds: float | None
    emulated: bool
    processes: Count
    steps: Count
    samples: Count
    skipped_samples: Count
    returned_samples: Count
    rejected_steps: Count
    compute: Spread
    push: Spread
    pull: Spread
    wait: Spread
    idle_share: float
    overrun_seconds: float
    staleness_mean: float
    staleness_max: Count


class Samples(msgspec.Struct, frozen=True):
    """Sample positions of the whole run: asked for (0: without end), and what became of them.

    `trained` are in the parameters, `skipped` were taken without a gradient, `returned` went back after a
    death or a fence and were handed out again, `lost` could not be handed out again.
    """

    asked: Count
    trained: Count
    skipped: Count
    returned: Count
    lost: Count


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A run; `ratio` is the measured over the predicted iteration, absent where the plan predicts none."""

    schema: Literal["pyps.report/1"] = REPORT_SCHEMA
    outcome: Outcome
    policy: str
    even: bool
    emulated: bool
    seed: int
    global_batch: int
    wall_seconds: float
    iteration_seconds: Spread
    predicted_iteration_seconds: float | None
    ratio: float | None
    idle_share: float
    versions: Count
    samples: Samples
    restarts: Count
    ranks: list[RankReport]
    error: str = ""
    replans: list[str] = []  # why the batches changed while it trained


class Totals(msgspec.Struct, frozen=True):
    """The store's own counters at the end of a run; zeros where it was never made."""

    versions: int = 0
    lost: int = 0
    samples: tuple[int, ...] = ()
    skipped: tuple[int, ...] = ()
    returned: tuple[int, ...] = ()


def taken(records: Iterable[StepRecord]) -> list[StepRecord]:
    """The steps whose gradient is in the parameters, in the order of their versions."""
    kept = [r for r in records if not r.skipped and not r.rejected]
    return sorted(kept, key=lambda r: (r.version, r.rank))


def version_times(records: Sequence[StepRecord]) -> dict[int, tuple[float, int]]:
    """For each version: when the last of its sources was done (seconds, monotonic), and its samples."""
    times: dict[int, tuple[float, int]] = {}
    for r in taken(records):
        done, samples = times.get(r.version, (0.0, 0))
        times[r.version] = (max(done, r.spans[-1][2]), samples + r.samples)
    return times


def iteration_times(records: Sequence[StepRecord], global_batch: int) -> list[float]:
    """Seconds between the moments at which the samples trained pass multiples of the global batch."""
    passed, total = [], 0
    latest = 0.0
    for _, (done, samples) in sorted(version_times(records).items()):
        latest = max(latest, done)  # two versions of ASP may be completed out of order
        count = (total + samples) // global_batch - total // global_batch
        passed += [latest] * count
        total += samples
    return [b - a for a, b in pairwise(passed)]


def spread(values: Sequence[float]) -> Spread:
    """Mean, median and quartiles; zeros for nothing."""
    if not values:
        return Spread(0)
    low, median, high = (float(q) for q in np.percentile(values, (25, 50, 75)))
    return Spread(len(values), float(np.mean(values)), median, low, high)


def steady(records: Sequence[StepRecord]) -> list[StepRecord]:
    """The records without each process's wait before its first step: that is start-up, not training."""
    seen: set[int] = set()
    kept = []
    for r in sorted(records, key=lambda r: (r.pid, r.step)):
        first = r.pid not in seen
        seen.add(r.pid)
        kept.append(msgspec.structs.replace(r, spans=_without_first_wait(r)) if first else r)
    return kept


def _without_first_wait(record: StepRecord) -> list[tuple[SpanKind, float, float]]:
    spans = list(record.spans)
    return spans[1:] if spans and spans[0][0] == "wait" else spans


def rank_report(
    place: Place, records: Sequence[StepRecord], events: Sequence[Event], totals: Totals
) -> RankReport:
    """One rank's part, from its own records."""
    mine = steady([r for r in records if r.rank == place.rank])
    seconds = {kind: [_seconds(r, kind) for r in mine] for kind in KINDS}
    counted = taken(mine)
    rank = place.rank
    return RankReport(
        rank=rank,
        name=place.name,
        batch=place.batch,
        predicted_seconds=place.predicted_seconds,
        emulated=place.throttle is not None,
        processes=sum(e.rank == rank and e.kind in ("started", "restarted") for e in events),
        steps=len(counted),
        samples=_at(totals.samples, rank, sum(r.samples for r in counted)),
        skipped_samples=_at(totals.skipped, rank, sum(r.samples for r in mine if r.skipped)),
        returned_samples=_at(totals.returned, rank, 0),
        rejected_steps=sum(r.rejected for r in mine),
        compute=spread(seconds["compute"]),
        push=spread(seconds["push"]),
        pull=spread(seconds["pull"]),
        wait=spread(seconds["wait"]),
        idle_share=_idle_share(mine),
        overrun_seconds=sum(r.overrun_seconds for r in mine),
        staleness_mean=float(np.mean([r.staleness for r in counted])) if counted else 0.0,
        staleness_max=max((r.staleness for r in counted), default=0),
    )


def make_report(
    places: Sequence[Place],
    records: Sequence[StepRecord],
    events: Sequence[Event],
    totals: Totals,
    *,
    outcome: Outcome,
    policy: str,
    even: bool,
    seed: int,
    global_batch: int,
    samples: int,
    predicted_seconds: float | None,
    error: str = "",
) -> Report:
    """The whole report. Samples come from the store's counters where there are any: a killed worker's last
    record may be missing although its gradient was taken."""
    ranks = [rank_report(place, records, events, totals) for place in places]
    times = spread(iteration_times(records, global_batch))
    return Report(
        outcome=outcome,
        policy=policy,
        even=even,
        emulated=any(place.throttle is not None for place in places),
        seed=seed,
        global_batch=global_batch,
        wall_seconds=events[-1].seconds - events[0].seconds if events else 0.0,
        iteration_seconds=times,
        predicted_iteration_seconds=predicted_seconds,
        ratio=times.median / predicted_seconds if predicted_seconds and times.count else None,
        idle_share=_idle_share(steady(records)),
        versions=totals.versions or max((r.version for r in taken(records)), default=0),
        samples=Samples(
            asked=samples,
            trained=sum(r.samples for r in ranks),
            skipped=sum(r.skipped_samples for r in ranks),
            returned=sum(r.returned_samples for r in ranks),
            lost=totals.lost,
        ),
        restarts=sum(e.kind == "restarted" for e in events),
        ranks=ranks,
        error=error,
        replans=[e.detail for e in events if e.kind == "replanned"],
    )


def read_report(path: str | os.PathLike[str]) -> Report:
    """Read and check a pyps.report/1 file. Raises InputError."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Report)
    except OSError as error:
        raise InputError(str(path), "", error.strerror or str(error), "a readable file") from None
    except msgspec.DecodeError as error:
        raise InputError(str(path), "", str(error), f"a {REPORT_SCHEMA} file") from None


def _idle_share(records: Sequence[StepRecord]) -> float:
    """The wait's share of the workers' own time; what a pipeline's transfers wait for keeps nobody idle."""
    own = [span for record in records for span in apart(record)[0]]
    spent = sum(end - begin for kind, begin, end in own if kind in KINDS)
    return sum(end - begin for kind, begin, end in own if kind == "wait") / spent if spent else 0.0


def _seconds(record: StepRecord, kind: str) -> float:
    return sum(end - begin for name, begin, end in record.spans if name == kind)


def _at(values: Sequence[int], index: int, default: int) -> int:
    return values[index] if index < len(values) else default
