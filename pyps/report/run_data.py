"""What is known of a run, read from its folder, or from one folder for each host."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import msgspec

from pyps.errors import InputError
from pyps.formats import Plan, read_plan
from pyps.formats.events import EVENTS, RunEvent, read_events
from pyps.formats.records import StepRecord, read_run
from pyps.formats.setup import RunSetup, read_setup
from pyps.report.clocks import HostLog, on_one_clock
from pyps.report.report import Report, RunOutcome, StoreTotals, make_report, read_report
from pyps.report.steps import applied_steps

REPORT_FILE, PLAN_FILE = "report.json", "plan.json"
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
    logs = [HostLog(read_run(path), _events(path)) for path in paths]
    _check_apart(paths, logs)
    logs = on_one_clock(logs)
    records = sorted(
        (r for log in logs for r in log.records), key=lambda r: r.spans[0][1] if r.spans else 0.0
    )
    events = sorted((e for log in logs for e in log.events), key=lambda e: e.monotonic_seconds)
    reports = [read_report(p / REPORT_FILE) for p in paths if (p / REPORT_FILE).exists()]
    reports.sort(key=lambda report: report.versions)
    if len(paths) == 1 and reports:
        report = reports[0]
    else:
        report = make_report(setup, records, events, _totals(reports, setup), *_outcome(setup, reports))
    plan = read_plan(paths[0] / PLAN_FILE) if (paths[0] / PLAN_FILE).exists() else None
    return RunData(paths, setup, records, events, report, plan)


def _events(path: Path) -> list[RunEvent]:
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
    """Of a rank in two folders, one ends before the other begins; else they are of two runs."""
    seen: dict[int, list[tuple[int, int, Path]]] = {}
    for path, log in zip(paths, logs, strict=True):
        versions: dict[int, list[int]] = {}
        for record in applied_steps(log.records):
            if record.version:
                versions.setdefault(record.rank, []).append(record.version)
        for rank, found in versions.items():
            low, high = min(found), max(found)
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
    if len(ranks) < len(setup.ranks) or sorted(ranks) != list(range(len(ranks))):
        return StoreTotals(max(r.versions for r in reports), max(r.samples.dropped for r in reports))
    every = [ranks[k] for k in sorted(ranks)]
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
