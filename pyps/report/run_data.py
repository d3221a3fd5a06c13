"""Define what is known of a run, read from its folder, or from one folder for each host."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import get_args

import msgspec

from pyps.errors import InputError
from pyps.formats import Plan, read_plan
from pyps.formats.events import EVENTS, RunEvent, read_events
from pyps.formats.records import StepRecord, read_run
from pyps.formats.setup import RunSetup, read_setup
from pyps.report.report import REPORT, Report, RunOutcome, StoreTotals, make_report, read_report
from pyps.report.steps import applied_steps, by_rank

PLAN_FILE = "plan.json"
SAME = ("policy", "seed", "samples", "even")  # on every host


@dataclass(frozen=True)
class RunData:
    """A run. Records and events are on one clock; `plan` is None where it is not on file."""

    folders: tuple[Path, ...]
    setup: RunSetup
    records: list[StepRecord]
    events: list[RunEvent]
    report: Report
    plan: Plan | None


def load_run(folders: Sequence[str | os.PathLike[str]]) -> RunData:
    """The run in one folder, or in those of several launchers. A rank may be in several folders, if a host's
    launcher was started again.

    Raises InputError, also for parts of two runs.
    """
    paths = tuple(Path(folder) for folder in folders)
    setups = [read_setup(path) for path in paths]
    setup = _joined(paths, setups)
    logs = [HostLog(read_run(path), events_of(path)) for path in paths]
    _check_apart(paths, logs)
    logs = on_one_clock(logs)
    records = sorted(
        (r for log in logs for r in log.records), key=lambda r: r.spans[0][1] if r.spans else 0.0
    )
    events = sorted((e for log in logs for e in log.events), key=lambda e: e.monotonic_seconds)
    found = [_report(path, log.events) for path, log in zip(paths, logs, strict=True)]
    reports = [report for report in found if report is not None]
    reports.sort(key=lambda report: report.versions)
    if len(paths) == 1 and reports:
        report = reports[0]
    else:
        report = make_report(setup, records, events, _totals(reports, setup), *_outcome(setup, reports))
    plan = read_plan(paths[0] / PLAN_FILE) if (paths[0] / PLAN_FILE).exists() else None
    return RunData(paths, setup, records, events, report, plan)


def _report(path: Path, events: Sequence[RunEvent]) -> Report | None:
    """The report in a folder; None if there is none, or only that of an earlier part of the run."""
    if not (path / REPORT).exists():
        return None
    report, parts = read_report(path / REPORT), sum(event.kind == "resumed" for event in events)
    is_last = len(report.resumed_at) == parts and (not events or events[-1].kind == "ended")
    return report if is_last else None


def events_of(path: Path) -> list[RunEvent]:
    """The events of the run in a folder, if it has any."""
    return read_events(path / EVENTS) if (path / EVENTS).exists() else []


def _joined(paths: Sequence[Path], setups: Sequence[RunSetup]) -> RunSetup:
    """One setup with every host's ranks."""
    first = setups[0]
    for path, setup in zip(paths, setups, strict=True):
        for field in SAME:
            if getattr(setup, field) != getattr(first, field):
                found, expected = repr(getattr(setup, field)), f"{getattr(first, field)!r} as in {paths[0]}"
                raise InputError(str(path), field, found, f"{expected}: parts of one run")
    ranks = {rank.rank: rank for setup in setups for rank in setup.ranks}
    hosts = ", ".join(dict.fromkeys(setup.host for setup in setups))
    return msgspec.structs.replace(first, ranks=tuple(ranks[k] for k in sorted(ranks)), host=hosts)


def _check_apart(paths: Sequence[Path], logs: Sequence[HostLog]) -> None:
    """Check that of a rank in two folders one ends before the other begins; else they are of two runs."""
    seen: dict[int, list[tuple[int, int, Path]]] = {}
    for path, log in zip(paths, logs, strict=True):
        for rank, mine in by_rank(r for r in applied_steps(log.records) if r.version).items():
            low, high = mine[0].version, mine[-1].version
            for first, last, other in seen.get(rank, ()):
                if low <= last and first <= high:
                    both = f"versions {low} to {high} of rank {rank}; {other} has {first} to {last}"
                    raise InputError(str(path), "", both, "folders of one run, one after the other")
            seen.setdefault(rank, []).append((low, high, path))


def _totals(reports: Sequence[Report], setup: RunSetup) -> StoreTotals:
    """The store's counters, of which each host's report has those of its own ranks."""
    if not reports:
        return StoreTotals()
    ranks = {r.rank: r for report in reports for r in report.ranks}
    has_all = len(ranks) >= len(setup.ranks) and sorted(ranks) == list(range(len(ranks)))
    every = [ranks[k] for k in sorted(ranks)] if has_all else []
    return StoreTotals(
        versions=max(r.versions for r in reports),
        dropped=max(r.samples.dropped for r in reports),
        samples=tuple(r.samples for r in every),
        skipped=tuple(r.skipped_samples for r in every),
        returned=tuple(r.returned_samples for r in every),
    )


def _outcome(setup: RunSetup, reports: Sequence[Report]) -> tuple[RunOutcome, str]:
    """The worst outcome of any rank's last launcher; "unfinished" where a rank has no report yet."""
    last = {rank.rank: report for report in reports for rank in report.ranks}
    if {rank.rank for rank in setup.ranks} - last.keys():
        return "unfinished", "it still trains, or its launcher was killed"
    order = get_args(RunOutcome)
    worst = max(last.values(), key=lambda r: order.index(r.outcome))
    return worst.outcome, worst.error


@dataclass(frozen=True)
class HostLog:
    """Hold what one host kept of a run, on its own clock."""

    records: list[StepRecord]
    events: list[RunEvent]


def on_one_clock(logs: Sequence[HostLog]) -> list[HostLog]:
    """The same logs on the clock of the first.

    Each host's records count from its own boot. The times of day in its events say roughly how two clocks
    differ. The store's versions say it for certain within bounds: version v is admitted during the push that
    became it, and before every later version is. The estimate is the first, kept within the second.
    """
    return [log if k == 0 else _shifted(log, offset(logs[0], log)) for k, log in enumerate(logs)]


def offset(reference: HostLog, other: HostLog) -> float:
    """Seconds to add to the times of `other`, to be on the clock of `reference`."""
    walls = [_wall(log.events) for log in (reference, other)]
    guess = walls[1] - walls[0] if walls[0] is not None and walls[1] is not None else 0.0
    low, high = _bounds(_admissions(reference.records), _admissions(other.records))
    return (low + high) / 2 if low > high else min(max(guess, low), high)


def _wall(events: Sequence[RunEvent]) -> float | None:
    """The time of day at the clock's zero."""
    return median(e.unix_seconds - e.monotonic_seconds for e in events) if events else None


def _admissions(records: Sequence[StepRecord]) -> list[tuple[int, float, float]]:
    """By version: after when it was admitted, and before when. In order of versions."""
    found = []
    for r in records:
        if r.skipped or r.rejected or not r.sources or not r.spans:
            continue
        computed = [end for kind, _, end in r.spans if kind == "compute"]
        if computed:
            found.append((r.version, computed[-1], r.spans[-1][2]))
    return sorted(found)


def _bounds(
    mine: Sequence[tuple[int, float, float]], other: Sequence[tuple[int, float, float]]
) -> tuple[float, float]:
    """The least and the greatest seconds to add to `other` so that no version comes before an earlier one."""
    low = max((after - before for after, before in _pairs(mine, other)), default=-math.inf)
    high = -max((after - before for after, before in _pairs(other, mine)), default=-math.inf)
    return low, high


def _pairs(
    first: Sequence[tuple[int, float, float]], then: Sequence[tuple[int, float, float]]
) -> list[tuple[float, float]]:
    """For each version of `then`: the latest moment after which an earlier or equal one of `first` was
    admitted, and the moment before which it was itself.
    """
    found, latest, k = [], -math.inf, 0
    for version, _, before in then:
        while k < len(first) and first[k][0] <= version:
            latest = max(latest, first[k][1])
            k += 1
        if latest > -math.inf:
            found.append((latest, before))
    return found


def _shifted(log: HostLog, seconds: float) -> HostLog:
    records = [
        msgspec.structs.replace(r, spans=[(k, b + seconds, e + seconds) for k, b, e in r.spans])
        for r in log.records
    ]
    events = [msgspec.structs.replace(e, monotonic_seconds=e.monotonic_seconds + seconds) for e in log.events]
    return replace(log, records=records, events=events)
