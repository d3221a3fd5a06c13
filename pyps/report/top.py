"""The figures of `pyps top`: what every rank of a store does, read without joining the store.

Samples, steps, waits and bytes come from the store. Loss and the time that data takes come from the step
records, where the run's folder is known: it is named by the target, or by a local worker's environment.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from pyps.errors import InputError, PypsError, SegmentNotFound
from pyps.formats.events import EVENTS, read_events
from pyps.formats.records import RunReader, StepRecord
from pyps.formats.setup import SETUP_FILE, VARIABLE, RunSetup, read_setup
from pyps.native.status import Member, PushCounts
from pyps.remote import open_store
from pyps.remote.address import is_address
from pyps.store.activity import Activity, StoreActivity, activities, look
from pyps.store.policies import policy_name
from pyps.store.segments import segments
from pyps.store.store import Store
from pyps.store.stragglers import StepPace, Straggler, StragglerKind, stragglers

RECENT_STEPS = 20  # of a rank, for means from its records


@dataclass(frozen=True, slots=True)
class TopRank:
    """One rank. None: not known. Per second: samples since the last look, bytes also since it joined.

    late_by_version, late_by_time: "static" and "dynamic" stragglers (pyps.store.stragglers); "": neither.
    straggler: others wait for it now. behind: versions since its last pull. idle_share: of its
    time, waiting for others. data_seconds, compute_seconds: of its latest steps.
    """

    rank: int
    name: str
    doing: str
    reason: str
    straggler: bool
    late_by_version: StragglerKind
    late_by_time: StragglerKind
    batch: int
    steps: int
    samples: int
    version: int | None
    behind: int | None
    staleness_mean: float
    staleness_max: int
    step_seconds: float | None
    data_seconds: float | None
    idle_share: float | None
    bytes_pushed: int
    bytes_pulled: int
    bytes_per_second: float | None
    samples_per_second: float | None
    pid: int | None


@dataclass(frozen=True, slots=True)
class TopStore:
    """One store. `error`: why it cannot be read; then the rest is empty.

    turn_rank, gap_seconds: under a policy of turns, the rank on turn, and the mean from push to push.
    """

    name: str
    run_dir: str | None = None
    policy: str = ""
    parameters: int = 0
    version: int = 0
    samples: int = 0
    requested: int = 0
    samples_per_second: float | None = None
    loss: float | None = None
    turn_rank: int | None = None
    gap_seconds: float | None = None
    ranks: list[TopRank] = field(default_factory=list)
    error: str = ""


class _Launched(msgspec.Struct):
    """Hold what is read here of a worker's settings."""

    run_dir: str


@dataclass(slots=True)
class _Past:
    """Hold what a rank's member had done at the last look."""

    member: int
    seconds: float
    samples: int
    moved: int
    waited: float


class StoreTop:
    """Looks at one store again and again."""

    def __init__(self, name: str, run_dir: Path | None = None) -> None:
        self.name = name
        self._store: Store | None = None
        self._run_dir, self._setup = run_dir, read_setup(run_dir) if run_dir is not None else None
        self._records = RunReader(run_dir) if run_dir is not None else None
        self._recent: dict[int, list[StepRecord]] = {}
        self._past: dict[int, _Past] = {}

    def look(self) -> TopStore:
        """The store as it is now; one that has gone or cannot be read says so in `error`."""
        try:
            if self._store is None:
                self._store = open_store(self.name)
            return self._figures(self._store, look(self._store))
        except SegmentNotFound as error:
            self.close()
            folder = self._run_dir
            name = str(folder) if folder is not None else self.name
            return TopStore(name, error=str(error) if folder is None else _without_store(folder))
        except PypsError as error:
            self.close()
            return TopStore(self.name, str(self._run_dir) if self._run_dir else None, error=str(error))

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None
            self._past.clear()

    def _figures(self, store: Store, state: StoreActivity) -> TopStore:
        local = not is_address(self.name)
        if self._run_dir is None and local:
            self._find_run(state)
        self._read_records()
        names = {rank.rank: rank.name for rank in self._setup.ranks} if self._setup else {}
        found = activities(state, local=local)
        paces = [_pace(a, state) for a in found]
        pushes = sum(rank.pushes for rank in state.ranks) / max(1, state.status.version)
        late = stragglers(paces, sum(a.member is not None for a in found), pushes)
        ranks = [
            self._rank(a, kind, state, names.get(a.rank, "")) for a, kind in zip(found, late, strict=True)
        ]
        status, turns = state.status, state.status.turn_rank >= 0
        rates = [r.samples_per_second for r in ranks if r.samples_per_second is not None]
        return TopStore(
            name=self.name,
            run_dir=str(self._run_dir) if self._run_dir else None,
            policy=policy_name(store.layout.policy),
            parameters=store.layout.parameters,
            version=state.status.version,
            samples=sum(rank.samples for rank in state.ranks),
            requested=self._setup.samples if self._setup else 0,
            samples_per_second=sum(rates) if rates else None,
            loss=self._loss(),
            turn_rank=status.turn_rank if turns else None,
            gap_seconds=status.gap_nanoseconds * 1e-9 if turns else None,
            ranks=ranks,
        )

    def _find_run(self, state: StoreActivity) -> None:
        """The folder of a local run, from the environment of one of its workers."""
        for member in state.members:
            folder = _run_dir_of(member.pid)
            if folder is not None and (folder / SETUP_FILE).exists():
                self._run_dir, self._records = folder, RunReader(folder)
                self._setup = _setup_or_none(folder)
                return

    def _read_records(self) -> None:
        if self._records is None:
            return
        for record in self._records.new():
            recent = self._recent.setdefault(record.rank, [])
            recent.append(record)
            del recent[:-RECENT_STEPS]

    def _loss(self) -> float | None:
        """The mean over each rank's latest step, weighted by samples."""
        total = weight = 0.0
        for records in self._recent.values():
            for record in reversed(records):
                if record.loss is not None and not record.rejected:
                    total, weight = total + record.loss * record.samples, weight + record.samples
                    break
        return total / weight if weight else None

    def _rank(self, activity: Activity, late: Straggler, state: StoreActivity, name: str) -> TopRank:
        counters, member = state.ranks[activity.rank], activity.member
        moved = member.bytes_pushed + member.bytes_pulled if member is not None else 0
        seconds, bytes_, waited, rate = self._since(member, counters, moved)
        recent = self._recent.get(activity.rank, [])
        data = [r.seconds("data") for r in recent]
        known = any(kind == "data" for r in recent for kind, _, _ in r.spans)
        return TopRank(
            rank=activity.rank,
            name=name,
            doing=activity.doing,
            reason=activity.text,
            straggler=activity.straggler,
            late_by_version=late.by_version,
            late_by_time=late.by_time,
            batch=counters.batch,
            steps=counters.pushes,
            samples=counters.samples,
            version=member.pulled_version if member is not None else None,
            behind=state.status.version - member.pulled_version if member is not None else None,
            staleness_mean=_staleness(counters),
            staleness_max=counters.staleness_max,
            step_seconds=(member.step_seconds or None) if member is not None else None,
            data_seconds=sum(data) / len(data) if known else None,
            idle_share=min(1.0, waited / seconds) if seconds else None,
            bytes_pushed=member.bytes_pushed if member is not None else 0,
            bytes_pulled=member.bytes_pulled if member is not None else 0,
            bytes_per_second=bytes_ / seconds if seconds else None,
            samples_per_second=rate,
            pid=member.pid if member is not None else None,
        )

    def _since(
        self, member: Member | None, counters: PushCounts, moved: int
    ) -> tuple[float, int, float, float | None]:
        """Seconds, bytes and waiting since the last look, or since the member joined; and samples a second
        since the last look: they are the rank's, of processes before this one too.
        """
        if member is None or not member.joined_seconds:
            return 0.0, 0, 0.0, None
        rank = member.rank or 0
        now = time.monotonic()
        before = self._past.get(rank)
        self._past[rank] = _Past(member.id, now, counters.samples, moved, member.waited_seconds)
        if before is None:
            return member.joined_seconds, moved, member.waited_seconds, None
        rate = max(0, counters.samples - before.samples) / (now - before.seconds)
        if before.member != member.id:
            return member.joined_seconds, moved, member.waited_seconds, rate
        return now - before.seconds, moved - before.moved, member.waited_seconds - before.waited, rate


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


def find_stores(target: str | None) -> list[StoreTop]:
    """The stores that a target means: a run's folder, an address, a store's name; None: all of this machine.

    Raises InputError where there is no such thing.
    """
    if target is None:
        return [StoreTop(s.name) for s in segments() if s.in_use]
    if is_address(target):
        return [StoreTop(target)]
    if Path(target).is_dir():
        return [StoreTop(read_setup(target).store, Path(target))]
    if "/" in target or target not in {s.name for s in segments()}:
        names = ", ".join(s.name for s in segments()) or "none on this machine"
        expected = f"a run's folder, an address such as tcp://host:port/name, or a store: {names}"
        raise InputError("top", "", repr(target), expected)
    return [StoreTop(target)]


def _without_store(run_dir: Path) -> str:
    """Why a run has no store."""
    events = read_events(run_dir / EVENTS) if (run_dir / EVENTS).exists() else []
    if events and events[-1].kind == "ended":
        return f"the run has ended ({events[-1].detail}; see pyps report {run_dir})"
    return f"no store: the run starts, or its launcher was killed (see pyps report {run_dir})"


def _run_dir_of(pid: int) -> Path | None:
    """The run's folder, as its launcher wrote it into a worker's environment."""
    try:
        values = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    name = f"{VARIABLE}=".encode()
    found = [value.removeprefix(name) for value in values if value.startswith(name)]
    try:
        return Path(msgspec.json.decode(found[0], type=_Launched).run_dir) if found else None
    except msgspec.DecodeError:
        return None


def _setup_or_none(folder: Path) -> RunSetup | None:
    try:
        return read_setup(folder)
    except InputError:
        return None
