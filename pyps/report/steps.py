"""Figures of a run from its step records alone: versions, iterations, losses, phases and absences."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta
from msgspec.structs import replace

from pyps.formats.records import SpanKind, StepRecord, split_spans
from pyps.formats.setup import RunSetup
from pyps.solver.online.mode import mode_text

PHASES: tuple[SpanKind, ...] = ("data", "compute", "push", "pull", "wait")
CURVE_POINTS = 200
ABSENT_STEPS = 3.0  # of a rank's own step time: a longer gap between its steps counts as absence
ABSENT_SECONDS = 0.5  # and no shorter one
WAITS_FOR_SOME = ("backup", "quorum", "softsync")  # policies whose rounds are not of all ranks
RESIZES = ("hps",)  # policies that share out each round anew
LITTLE = 0.1  # of the ranks' time: below, training is limited by compute
NonNegative = Annotated[int, Meta(ge=0)]


class Distribution(msgspec.Struct, frozen=True):
    """Seconds of something that happened `count` times: mean, median, and the quartiles around it."""

    count: NonNegative
    mean: float = 0.0
    median: float = 0.0
    lower_quartile: float = 0.0
    upper_quartile: float = 0.0


class LossPoint(msgspec.Struct, frozen=True, array_like=True):
    """Seconds since the first step began, samples trained by then, and the mean loss since the last point."""

    seconds: float
    samples: NonNegative
    loss: float


def applied_steps(records: Iterable[StepRecord]) -> list[StepRecord]:
    """The steps whose gradient is in the parameters, in the order of their versions. One whose round
    had not closed when its push ended has version 0 on file, and here that of the next one made.
    """
    applied = list(filter(is_applied, records))
    made = sorted((_taken_at(r), r.version) for r in applied if r.version)
    if made and len(made) < len(applied):
        last = len(made) - 1
        applied = [
            r if r.version else replace(r, version=made[min(last, bisect_left(made, (_taken_at(r), 0)))][1])
            for r in applied
        ]
    return sorted(applied, key=attrgetter("version", "rank"))


def by_rank(records: Iterable[StepRecord], ranks: Iterable[int] = ()) -> dict[int, list[StepRecord]]:
    """The records of each rank, in their order; of these ranks also where there are none."""
    found: dict[int, list[StepRecord]] = {rank: [] for rank in ranks}
    for record in records:
        found.setdefault(record.rank, []).append(record)
    return found


def _taken_at(record: StepRecord) -> float:
    return record.admitted_at or (record.spans[-1][2] if record.spans else 0.0)


def is_applied(record: StepRecord) -> bool:
    return not record.skipped and not record.rejected


def version_times(records: Sequence[StepRecord]) -> dict[int, tuple[float, int]]:
    """For each version: when the last of its sources was done (seconds, monotonic), and its samples."""
    times: dict[int, tuple[float, int]] = {}
    for r in applied_steps(records):
        done, samples = times.get(r.version, (0.0, 0))
        times[r.version] = (max(done, r.spans[-1][2]), samples + r.samples)
    return times


def iteration_times(
    records: Sequence[StepRecord], global_batch: int, resumed: Sequence[float] = ()
) -> list[float]:
    """Seconds between the moments at which the samples trained pass multiples of the global batch.

    resumed: when later parts of the run began; an iteration does not last over one of them.
    """
    passed = passings((done for _, done in sorted(version_times(records).items())), global_batch)
    return [b - a for (a, _), (b, _) in pairwise(passed) if not any(a < begin <= b for begin in resumed)]


def passings(done: Iterable[tuple[float, int]], global_batch: int) -> list[tuple[float, int]]:
    """When the samples trained pass each multiple of the global batch, and how many there are by then.

    done: when, and how many more, in the order in which they count.
    """
    found, total, latest = [], 0, 0.0
    if not global_batch:  # of ranks that the plan does not have
        return []
    for moment, samples in done:
        latest = max(latest, moment)  # two versions of ASP may be completed out of order
        before, total = total, total + samples
        found += [(latest, total)] * (total // global_batch - before // global_batch)
    return found


def pauses(records: Sequence[StepRecord], resumed: Sequence[float]) -> list[tuple[float, float]]:
    """When a run did not train between two parts: from the last step of one to the first of the next.

    resumed: when each later part began. With what stopped the part before, and the start of this one.
    """
    ends = sorted(r.spans[-1][2] for r in records if r.spans)
    begins = sorted(b for r in records for kind, b, _ in r.spans if kind == "compute")
    paused = dict[float, tuple[float, float]]()  # by where it begins: a part may have trained nothing
    for at in resumed:
        before, after = bisect_right(ends, at), bisect_left(begins, at)
        if before and after < len(begins):
            paused[ends[before - 1]] = ends[before - 1], begins[after]
    return sorted(paused.values())


def between(begin: float, end: float, paused: Sequence[tuple[float, float]]) -> float:
    """Seconds from `begin` to `end` without those of the pauses."""
    return end - begin - sum(max(0.0, min(end, b) - max(begin, a)) for a, b in paused)


def loss_points(records: Sequence[StepRecord], global_batch: int) -> list[LossPoint]:
    """A point for each global batch of samples: the mean loss of its samples, where it was recorded."""
    applied = [r for r in applied_steps(records) if r.spans]
    began, _ = training_time(applied)
    points, total, sum_, weight, latest = [], 0, 0.0, 0, 0.0
    for k, r in enumerate(applied):
        latest = max(latest, r.spans[-1][2] - began)
        before, total = total, total + r.samples
        if r.loss is not None:
            sum_, weight = sum_ + r.loss * r.samples, weight + r.samples
        passed = not global_batch or total // global_batch > before // global_batch
        if weight and (passed or k == len(applied) - 1):
            points.append(LossPoint(max(0.0, latest), total, sum_ / weight))
            sum_, weight = 0.0, 0
    return points


def recent_loss(applied: Sequence[StepRecord], global_batch: int) -> float | None:
    """The mean loss of the last global batch's samples, of those whose loss was recorded."""
    total = weight = 0.0
    for record in reversed(applied):
        if weight and weight >= global_batch:
            break
        if record.loss is not None:
            total, weight = total + record.loss * record.samples, weight + record.samples
    return total / weight if weight else None


def mean_staleness(applied: Sequence[StepRecord]) -> float:
    return sum(record.staleness for record in applied) / len(applied) if applied else 0.0


def thinned(points: Sequence[LossPoint], most: int = CURVE_POINTS) -> list[LossPoint]:
    """At most `most` points, each the mean of as many that follow one another."""
    size = -(-len(points) // most) if points else 1
    groups = [points[k : k + size] for k in range(0, len(points), size)]
    return [LossPoint(g[-1].seconds, g[-1].samples, sum(p.loss for p in g) / len(g)) for g in groups]


def short_rounds(records: Sequence[StepRecord], setup: RunSetup) -> list[int] | None:
    """Versions of rounds with fewer samples than a global batch; None where every version has one source, or
    the policy does not wait for all. In one host's part of a run they count by its ranks: None where what is
    planned for these has changed. A round that lacks the record of a worker that was killed is not counted.
    """
    applied, part = applied_steps(records), setup.options.get("ranks") is not None
    if setup.policy in WAITS_FOR_SOME or not any(r.sources > 1 for r in applied):
        return None
    if part and (setup.policy in RESIZES or len({r.plan for r in applied}) > 1):
        return None
    seen, sure = Counter(r.version for r in applied), part or any(r.skipped for r in records)
    unknown = {r.version for r in applied if not sure and r.sources > seen[r.version]}
    found = sorted(version_times(applied).items())[:-1]
    return [k for k, (_, samples) in found if samples < setup.global_batch and k not in unknown]


def training_time(records: Sequence[StepRecord]) -> tuple[float, float]:
    """When the first step of any rank began to compute, and when the last one ended; zeros without steps."""
    shown = [r for r in records if r.spans]
    first = min((r.spans[0][1] for r in shown), default=0.0)
    begin = min((b for r in shown for kind, b, _ in r.spans if kind == "compute"), default=first)
    return begin, max((r.spans[-1][2] for r in shown), default=begin)


def absent_seconds(
    records: Sequence[StepRecord], begin: float, end: float, paused: Sequence[tuple[float, float]] = ()
) -> float:
    """The time from `begin` to `end`, without the run's pauses, that no step of one rank's records covers.

    Gaps of a few steps' length count as one does between two steps, and not as absence.
    """
    covered = sorted((max(r.spans[0][1], begin), r.spans[-1][2]) for r in records if r.spans)
    usual = float(np.median([e - b for b, e in covered])) if covered else 0.0
    least = max(ABSENT_SECONDS, ABSENT_STEPS * usual)
    absent, reached = 0.0, begin
    for b, e in [*covered, (end, end)]:
        gap = between(reached, max(b, reached), paused)
        absent += gap if gap > least else 0.0
        reached = max(reached, e)
    return absent


def phase_seconds(records: Sequence[StepRecord]) -> list[list[float]]:
    """For each of PHASES: its seconds in each step, without those that overlap the next steps' compute."""
    found = {phase: [0.0] * len(records) for phase in PHASES}
    for k, record in enumerate(records):
        for kind, begin, end in split_spans(record)[0]:
            if kind in found:
                found[kind][k] += end - begin
    return list(found.values())


def overlapped_seconds(records: Sequence[StepRecord]) -> list[float]:
    """For each step: how long its push and its pull took during the next steps' compute."""
    transfers = (split_spans(record)[1] for record in records)
    return [sum(end - begin for kind, begin, end in spans if kind in ("push", "pull")) for spans in transfers]


def distribution(values: Sequence[float]) -> Distribution:
    """Mean, median and quartiles; zeros without values."""
    if not values:
        return Distribution(0)
    lower, median, upper = (float(q) for q in np.percentile(values, (25, 50, 75)))
    return Distribution(len(values), float(np.mean(values)), median, lower, upper)


def without_startup_wait(
    records: Sequence[StepRecord], started: set[tuple[int, int]] | None = None
) -> list[StepRecord]:
    """The records without each process's wait before its first step, which is start-up and not training; by
    rank, in the order of time. A process may have the pid of an earlier one.

    started: rank and pid of each process with earlier records; those of these are added.
    """
    seen: set[tuple[int, int]] = set() if started is None else started
    kept = []
    for r in sorted(records, key=lambda r: (r.rank, r.spans[0][1] if r.spans else 0.0)):
        is_first = r.step == 1 or (r.rank, r.pid) not in seen
        seen.add((r.rank, r.pid))
        if is_first and r.spans and r.spans[0][0] == "wait":
            r = replace(r, spans=r.spans[1:])
        kept.append(r)
    return kept


class RankTime(NamedTuple):
    """Where the time of a rank's steps went: seconds in all, by kind."""

    rank: int
    name: str
    steps: int
    seconds: Mapping[str, float]

    def __str__(self) -> str:
        return f"rank {self.rank}" + (f" ({self.name})" if self.name else "")

    @property
    def transfer(self) -> float:
        return self.seconds["push"] + self.seconds["pull"]

    @property
    def busy(self) -> float:
        """Return what a step takes without waits."""
        return (self.seconds["compute"] + self.seconds["data"] + self.transfer) / max(1, self.steps)


def bottleneck(ranks: Collection[RankTime]) -> str:
    """Where the ranks' time goes apart from compute, and which rank is the slowest; empty without steps."""
    if not ranks:
        return ""
    whole = sum(sum(r.seconds.values()) for r in ranks) or 1.0
    share = {kind: sum(r.seconds[kind] for r in ranks) / whole for kind in ("compute", "data", "wait")}
    transfer = sum(r.transfer for r in ranks) / whole
    if share["data"] >= LITTLE and share["data"] >= transfer:
        most = max(ranks, key=lambda r: r.seconds["data"])
        return f"Loading data takes {share['data']:.0%} of the ranks' time, most on {most}."
    if transfer >= LITTLE:
        return f"Transfers take {transfer:.0%} of the ranks' time."
    if share["wait"] >= LITTLE:
        slowest = max(ranks, key=lambda r: r.busy)
        busy = f"{slowest.busy * 1e3:,.1f} ms a step"
        return f"The ranks wait {share['wait']:.0%} of their time; {slowest} is the slowest, with {busy}."
    return f"Compute limits it: {share['compute']:.0%} of the ranks' time."


def phase_totals(records: Sequence[StepRecord]) -> dict[str, float]:
    """The seconds of each of PHASES in all steps together."""
    return dict(zip(PHASES, map(sum, phase_seconds(records)), strict=True))


def idle_share(seconds: Mapping[str, float]) -> float:
    """The wait's share of the time; seconds: by kind, as phase_totals has them."""
    total = sum(seconds.values())
    return seconds["wait"] / total if total else 0.0


def mode_changes(records: Mapping[int, Sequence[StepRecord]]) -> Iterator[str]:
    """A line for each change of a rank's codecs and depth; records: of each rank, in order."""
    for rank, steps in records.items():
        modes = [(step.step, step.mode) for step in steps if step.mode is not None]
        for (_, before), (step, after) in pairwise(modes):
            if before != after:
                yield f"rank {rank}'s transfers from step {step}: {mode_text(before)} -> {mode_text(after)}"
