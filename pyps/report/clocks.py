"""One clock for the records of several hosts.

Each host's records count from its own boot. The times of day in its events say roughly how two clocks differ.
The store's versions say it for certain within bounds: version v is admitted during the push that became it,
and before every later version is. The estimate is the first, kept within the second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import msgspec

from pyps.formats.events import RunEvent
from pyps.formats.records import StepRecord


@dataclass(frozen=True)
class HostLog:
    """What one host kept of a run, on its own clock."""

    records: list[StepRecord]
    events: list[RunEvent]


def on_one_clock(logs: Sequence[HostLog]) -> list[HostLog]:
    """The same logs on the clock of the first."""
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
