"""Tells what a run or a store does now: one model for the progress of `pyps run`, metrics and `pyps top`.

A Tracker makes it from step records, events and looks at the store; `update` returns a LiveRun. Speed, loss,
phases and staleness are of the last seconds. The page of a run shows the same figures of all its time: both
take them from pyps.report.steps.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from pyps.formats.events import RunEvent
from pyps.formats.records import StepRecord
from pyps.formats.setup import RunSetup
from pyps.native.status import Member, PushCounts
from pyps.report.steps import (
    RankTime,
    applied_steps,
    bottleneck,
    by_rank,
    idle_share,
    is_applied,
    iteration_times,
    mean_staleness,
    passings,
    phase_totals,
    recent_loss,
    without_startup_wait,
)
from pyps.store.activity import Activity, StoreActivity, activities, explain
from pyps.store.stragglers import StepPace, Straggler, StragglerKind, stragglers

WINDOW_SECONDS = 20.0
LEAST_ITERATIONS = 4  # that a window holds, however long they take
MOST_RECORDS = 2000  # of a window
STALLED_SECONDS = 10.0
STALLED_ITERATIONS = 5.0


@dataclass(frozen=True, slots=True)
class LiveRank:
    """One rank. None: not known.

    samples, steps: in all. phases: mean seconds of the last steps by kind; empty without records.
    idle_share, staleness: of the last steps. Without records they are the store's: the share of the time
    since the last look, and the mean over all steps.
    doing, reason: at present; "": there is no store. straggler: others wait for it now. late_by_version,
    late_by_time: what kind of straggler it is. behind: versions since its last pull. step_seconds: from
    claim to gradient. bytes_pushed, bytes_pulled: since its process joined. bytes_per_second: since the last
    look.
    """

    rank: int
    name: str
    batch: int
    samples: int
    steps: int
    phases: dict[str, float]
    idle_share: float | None
    staleness: float
    doing: str = ""
    reason: str = ""
    straggler: bool = False
    late_by_version: StragglerKind = ""
    late_by_time: StragglerKind = ""
    behind: int | None = None
    step_seconds: float | None = None
    bytes_pushed: int = 0
    bytes_pulled: int = 0
    bytes_per_second: float | None = None
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class LiveRun:
    """Where a run is. None: not known yet.

    samples: trained. requested: to train in all; 0: without end, or not known. seconds: since it began, or
    went on. iteration_seconds: for one global batch. predicted_seconds: the plan's, of the same. loss: the
    mean over the last global batch's samples. staleness: the mean. eta_seconds: until the end. stalled: what
    holds the run up, a sentence; "": it goes on. limit: where the ranks' time goes, a sentence; "": no
    records.
    """

    samples: int = 0
    requested: int = 0
    versions: int = 0
    seconds: float = 0.0
    iterations: int = 0
    samples_per_second: float | None = None
    iteration_seconds: float | None = None
    predicted_seconds: float | None = None
    loss: float | None = None
    staleness: float = 0.0
    eta_seconds: float | None = None
    restarts: int = 0
    stalled: str = ""
    limit: str = ""
    ranks: list[LiveRank] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Look:
    """Hold what the store said of a rank's process: its id, when, bytes moved, and seconds waited."""

    member: int
    seconds: float
    moved: int
    waited: float


class Tracker:
    """Follows one run, which began, or went on, at `began` (seconds, monotonic): earlier steps only count.

    setup: None: of a store alone. local: its workers' processes are on this machine. Where other hosts train
    too, or there are no records, samples are counted by the store; losses and phases are of the ranks here.
    """

    def __init__(self, setup: RunSetup | None, began: float, *, local: bool = True) -> None:
        self._setup, self._began, self._local = setup, began, local
        self._specs = {rank.rank: rank for rank in setup.ranks} if setup is not None else {}
        self._names = {rank.rank: rank.name for rank in self._specs.values()}
        self._global_batch = (setup.global_batch if setup is not None else 0) or 1
        self._window: deque[tuple[float, StepRecord]] = deque(maxlen=MOST_RECORDS)
        self._arrivals: deque[tuple[float, int]] = deque(maxlen=MOST_RECORDS)  # when, how many samples
        self._started: set[tuple[int, int]] = set()  # rank and pid of each process with a step
        self._samples: Counter[int] = Counter()
        self._steps: Counter[int] = Counter()
        self._counted = 0  # samples, by the store
        self._versions = 0
        self._looks: dict[int, _Look] = {}  # by rank

    def update(
        self,
        records: Sequence[StepRecord],
        state: StoreActivity | None,
        now: float,
        events: Sequence[RunEvent] = (),
        *,
        ended: bool = False,
    ) -> LiveRun:
        """How far the run is.

        records: those written since the last call. state: of its store, None while there is none. now:
        seconds, monotonic. events: all of the run until now. ended: no step follows.
        """
        all_here = self._setup is not None and (state is None or len(state.ranks) == len(self._specs))
        for record in without_startup_wait(records, self._started):
            self._add(record, all_here)
        if state is not None:
            self._versions = max(self._versions, state.status.version)
            self._global_batch = sum(rank.batch for rank in state.ranks) or 1
            self._count(sum(rank.samples for rank in state.ranks), None if all_here else now)
        self._forget()
        samples = max(self._counted, sum(self._samples.values()))
        requested = self._setup.samples if self._setup is not None else 0
        ended = ended or 0 < requested <= samples
        applied = applied_steps(record for _, record in self._window)
        rate, seconds = self._speed(applied, now, all_here, ended)
        times, doing = self._times(), activities(state, local=self._local) if state is not None else []
        return LiveRun(
            samples=samples,
            requested=requested,
            versions=self._versions,
            seconds=now - self._began,
            iterations=samples // self._global_batch,
            samples_per_second=rate,
            iteration_seconds=seconds,
            predicted_seconds=self._setup.predicted_iteration_seconds if self._setup is not None else None,
            loss=recent_loss(applied, self._global_batch),
            staleness=mean_staleness(applied),
            eta_seconds=max(0, requested - samples) / rate if rate and requested else None,
            restarts=sum(event.kind == "restarted" for event in events),
            stalled="" if ended else self._stalled(doing, seconds, now),
            limit=bottleneck(times.values()),
            ranks=self._ranks(times, applied, state, doing, now),
        )

    def _add(self, record: StepRecord, all_here: bool) -> None:
        if not record.spans:
            return
        end, applied = record.spans[-1][2], is_applied(record)
        if end >= self._began:
            self._window.append((end, record))
            if all_here and applied:
                self._arrivals.append((end, record.samples))
        self._samples[record.rank] += record.samples * applied
        self._steps[record.rank] += applied
        self._versions = max(self._versions, record.version * applied)

    def _count(self, samples: int, now: float | None) -> None:
        """Samples by the store's count: a killed worker's last record may be missing. now: they arrived."""
        if now is not None and samples > self._counted:
            self._arrivals.append((now, samples - self._counted))
        self._counted = max(self._counted, samples)

    def _forget(self) -> None:
        """Drop what came a window's time before the last arrival, down to a few iterations."""
        if not self._arrivals:
            return
        least = LEAST_ITERATIONS * self._global_batch
        held = sum(samples for _, samples in self._arrivals)
        begin = max(t for t, _ in self._arrivals) - WINDOW_SECONDS
        while self._arrivals[0][0] < begin:
            held -= self._arrivals[0][1]
            if held < least:
                break
            self._arrivals.popleft()
        while self._window and self._window[0][0] < self._arrivals[0][0]:
            self._window.popleft()

    def _speed(
        self, applied: Sequence[StepRecord], now: float, all_here: bool, ended: bool
    ) -> tuple[float | None, float | None]:
        """Samples a second over the window, and the seconds of a global batch. The rate falls
        while no step arrives, until the run has ended.
        """
        arrivals = sorted(self._arrivals)
        passed = passings(arrivals, self._global_batch)
        if not passed or passed[-1][0] == passed[0][0]:
            return None, None
        (began, before), (finished, after) = passed[0], passed[-1]
        rate = (after - before) / (finished - began)
        seconds = self._global_batch / rate
        times = iteration_times(applied, self._global_batch) if all_here else []
        first, last = arrivals[0][0], arrivals[-1][0]
        if now - last > 2.0 * seconds and not ended:
            rate *= (last - first) / (now - first)
        return rate, median(times) if times else seconds

    def _stalled(self, doing: Sequence[Activity], seconds: float | None, now: float) -> str:
        """Nothing before the first step is a stall: workers still start."""
        if not self._arrivals:
            return ""
        quiet = now - max(t for t, _ in self._arrivals)
        if quiet < max(STALLED_SECONDS, STALLED_ITERATIONS * (seconds or 0.0)):
            return ""
        reason = explain(doing, self._names)
        return f"no step for {quiet:.0f} s" + (f": {reason}" if reason else "")

    def _times(self) -> dict[int, RankTime]:
        """The time of the last steps, by rank."""
        # A stopped worker's step says nothing of the usual ones.
        mine = by_rank(record for _, record in self._window if not record.fenced)
        return {
            rank: RankTime(rank, self._names.get(rank, ""), len(found), phase_totals(found))
            for rank, found in mine.items()
        }

    def _ranks(
        self,
        times: Mapping[int, RankTime],
        applied: Sequence[StepRecord],
        state: StoreActivity | None,
        doing: Sequence[Activity],
        now: float,
    ) -> list[LiveRank]:
        """All ranks of the store; those of the run, while there is none."""
        late = by_rank(applied)
        found = [
            self._rank(rank, times.get(rank), mean_staleness(late.get(rank, ())))
            for rank in (self._specs if state is None else range(len(state.ranks)))
        ]
        if state is None:
            return found
        pushes = sum(rank.pushes for rank in state.ranks) / max(1, state.status.version)
        present = sum(activity.member is not None for activity in doing)
        kinds = stragglers([_pace(activity, state) for activity in doing], present, pushes)
        return [self._seen(*each, state, now) for each in zip(found, doing, kinds, strict=True)]

    def _rank(self, rank: int, time: RankTime | None, staleness: float) -> LiveRank:
        """Return what the records say of a rank."""
        return LiveRank(
            rank=rank,
            name=self._names.get(rank, ""),
            batch=self._specs[rank].batch if rank in self._specs else 0,
            samples=self._samples[rank],
            steps=self._steps[rank],
            phases={kind: seconds / time.steps for kind, seconds in time.seconds.items()} if time else {},
            idle_share=idle_share(time.seconds) if time else None,
            staleness=staleness,
        )

    def _seen(
        self, rank: LiveRank, activity: Activity, late: Straggler, state: StoreActivity, now: float
    ) -> LiveRank:
        """The rank with what the store says of it too."""
        counters, member = state.ranks[rank.rank], activity.member
        rank = replace(
            rank,
            batch=counters.batch,
            samples=max(rank.samples, counters.samples),
            steps=max(rank.steps, counters.pushes),
            staleness=rank.staleness if rank.phases else _staleness(counters),
            doing=activity.doing,
            reason=activity.text,
            straggler=activity.straggler,
            late_by_version=late.by_version,
            late_by_time=late.by_time,
        )
        if member is None:
            return rank
        seconds, moved, waited = self._since(rank.rank, member, now)
        return replace(
            rank,
            idle_share=rank.idle_share if rank.phases or not seconds else min(1.0, waited / seconds),
            behind=state.status.version - member.pulled_version,
            step_seconds=member.step_seconds or None,
            bytes_pushed=member.bytes_pushed,
            bytes_pulled=member.bytes_pulled,
            bytes_per_second=moved / seconds if seconds else None,
            pid=member.pid,
        )

    def _since(self, rank: int, member: Member, now: float) -> tuple[float, int, float]:
        """Seconds, bytes and waiting since the last look at a rank's process; at first, since it joined."""
        look = _Look(member.id, now, member.bytes_pushed + member.bytes_pulled, member.waited_seconds)
        before = self._looks.get(rank, look)
        self._looks[rank] = look
        if before is look or before.member != member.id:
            return member.joined_seconds, look.moved, look.waited
        return now - before.seconds, look.moved - before.moved, look.waited - before.waited


def _staleness(counters: PushCounts) -> float:
    return counters.staleness_sum / counters.pushes if counters.pushes else 0.0


def _pace(activity: Activity, state: StoreActivity) -> StepPace:
    """Return what a rank is judged by; of one that does not compute now, its past."""
    member, usual = activity.member, _staleness(state.ranks[activity.rank])
    if member is None:
        return StepPace(versions=usual)
    if activity.doing != "computing":
        return StepPace(member.step_seconds, usual)
    behind = float(state.status.version - member.pulled_version)
    return StepPace(member.step_seconds, usual, activity.seconds, behind)
