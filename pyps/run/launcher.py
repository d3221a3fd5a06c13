"""A run under way: its worker processes, watched until all have ended, and the store seen from outside.

The crew decides nothing about the training: the workers and the store do that among themselves. It starts one
process a rank, passes on what they print, takes the dead out of the store, starts them again a bounded number
of times, and leaves neither a process nor a segment behind, however it ends.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import numpy as np

from pyps import native
from pyps.errors import Busy, NotReady, PypsError, SegmentNotFound, SnapshotCancelled, StoreFull, TimedOut
from pyps.formats.records import record_path
from pyps.native.values import Codec, Snapshot, Status
from pyps.remote import open_store
from pyps.remote.address import is_address
from pyps.run.events import EventLog
from pyps.run.process import Child, end_all
from pyps.run.ranks import Place
from pyps.run.rebalance import Balancer
from pyps.run.report import Totals
from pyps.store.policies import Policy
from pyps.store.store import Store
from pyps.worker.settings import FROM_PLAN

TICK_SECONDS = 0.05
LOOK_SECONDS = 0.5  # between two looks at a store that is elsewhere
REAP_SECONDS = 1.0  # how often the store is asked for dead members that are not this crew's children
GRACE_SECONDS = 5.0  # between the polite signal, SIGTERM and SIGKILL
BACKOFF_SECONDS = 0.2  # before the first restart of a rank; doubled for each further one
MAX_BACKOFF_SECONDS = 5.0
SNAPSHOT_SECONDS = 5.0  # patience for one snapshot; a missed one is left out
OUR_VARIABLES = (
    "STORE",
    "RANK",
    "PLAN",
    "POLICY",
    "RUN_DIR",
    "SAMPLES",
    "SEED",
    "ROUND_TIMEOUT",
    "CODEC",
    "PIPELINE",
    "JOURNAL",
    "THROTTLE",
)

OnLine = Callable[[int, str, bool], None]  # (rank, line, whether of stderr)
OnTick = Callable[[Status | None], None]


class TrainingFailed(PypsError):
    """A worker died more often than it may be restarted; `words` are the last lines of its stderr."""

    exit_code = 1

    def __init__(self, message: str, words: tuple[str, ...] = ()) -> None:
        self.words = words
        super().__init__(f"{message}: {words[-1].strip()}" if words else message)


class Interrupted(PypsError):
    """A signal asked the run to end; `exit_code` is 128 + the signal, as a shell has it."""

    def __init__(self, number: int) -> None:
        self.exit_code = 128 + number
        super().__init__(f"interrupted by {signal.Signals(number).name}")


@dataclass(frozen=True)
class Job:
    """What a run runs: the same command for every place, told apart by its environment."""

    store: str
    command: tuple[str, ...]
    places: tuple[Place, ...]
    plan_path: Path
    policy: Policy
    samples: int
    seed: int
    codec: Codec | None  # None: as the plan says, each way
    run_dir: Path
    max_restarts: int
    snapshot_every: int
    balancer: Balancer | None = None
    pipeline: bool = False
    journal: Path | None = None

    def environment(self, place: Place) -> dict[str, str]:
        """A worker's environment: this process's, and what pyps.worker.settings reads."""
        env = {k: v for k, v in os.environ.items() if k.removeprefix("PYPS_") not in OUR_VARIABLES}
        env |= {
            "PYPS_STORE": self.store,
            "PYPS_RANK": str(place.rank),
            "LOCAL_RANK": str(self.places.index(place)),  # of this machine's, as torchrun has it
            "PYPS_PLAN": str(self.plan_path),
            "PYPS_POLICY": str(self.policy),
            "PYPS_RUN_DIR": str(self.run_dir),
            "PYPS_SAMPLES": str(self.samples),
            "PYPS_SEED": str(self.seed),
            "PYPS_CODEC": self.codec.name.lower() if self.codec is not None else FROM_PLAN,
            "PYPS_PIPELINE": str(int(self.pipeline)),
            "PYPS_JOURNAL": str(self.journal or ""),
            "PYPS_ROUND_TIMEOUT": repr(self.policy.round_timeout_seconds),
            "PYTHONUNBUFFERED": "1",
        }
        if place.throttle is not None:
            env |= {"PYPS_THROTTLE": place.throttle_json(), "OMP_NUM_THREADS": "1"}
        return env


class Crew:
    """The processes of one job; a context manager, for whatever happens inside, all is ended at its end."""

    def __init__(self, job: Job, log: EventLog, on_line: OnLine | None, on_tick: OnTick | None) -> None:
        self.job, self.log = job, log
        self._places = {place.rank: place for place in job.places}
        self._far = is_address(job.store)
        self.totals = Totals()
        self._on_line, self._on_tick = on_line, on_tick
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, Child] = {}
        self._due: dict[int, float] = {}  # rank -> when it is to be started again
        self._restarts: Counter[int] = Counter()
        self._fruitless: Counter[int] = Counter()
        self._store: Store | None = None
        self._signal = 0
        self._handlers: dict[int, object] = {}
        self._next_snapshot = job.snapshot_every
        self._next_reap = self._next_look = 0.0

    def __enter__(self) -> Self:
        self._handlers = _catch_signals(self._note_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        try:
            first = self._signal or signal.SIGTERM
            end_all(self._children.values(), first, GRACE_SECONDS)
            for child in self._children.values():
                child.close()
            self._selector.close()
            if self._store is not None:
                self._store.close()
            if not self._far:
                with contextlib.suppress(SegmentNotFound):  # no worker got as far as making it
                    native.unlink(self.job.store, force=True)
        finally:
            _restore_signals(self._handlers)

    def work(self) -> None:
        """Until every worker has ended well. Raises TrainingFailed, Interrupted."""
        for place in self.job.places:
            self._start(place.rank, "started")
        while self._children or self._due:
            self._listen()
            self._observe()
            self._bury()
            for rank in [r for r, when in self._due.items() if when <= time.monotonic()]:
                del self._due[rank]
                self._start(rank, "restarted")
            if self._signal:
                raise Interrupted(self._signal)
        if self._store is None:
            raise TrainingFailed("every worker ended, but none joined: the script has to call pyps.join()")
        snapshot = self._store.snapshot()
        save_parameters(self.job.run_dir / "parameters.npz", snapshot)
        self._count(self._store)

    def _start(self, rank: int, kind: str) -> None:
        place, job = self._places[rank], self.job
        log = job.run_dir / f"worker-{rank}.log"
        child = Child(rank, job.command, job.environment(place), log)
        self._children[rank] = child
        for stream in child.streams():
            self._selector.register(stream, selectors.EVENT_READ, (child, stream))
        self._selector.register(child.pidfd, selectors.EVENT_READ)
        self.log.write("started" if kind == "started" else "restarted", rank=rank, pid=child.pid)

    def _listen(self) -> None:
        """Sleep a tick at most, less if a worker says something or ends."""
        for key, _ in self._selector.select(TICK_SECONDS):
            if key.data is not None:
                self._read(*key.data)

    def _read(self, child: Child, stream: IO[bytes]) -> None:
        is_stderr, fd = child.is_stderr(stream), stream.fileno()
        for line in child.read(stream):
            if self._on_line is not None:
                self._on_line(child.rank, line, is_stderr)
        if stream.closed:
            self._selector.unregister(fd)

    def _bury(self) -> None:
        """See to the dead: those that ended well are done, the others are restarted or end the run."""
        for rank, child in list(self._children.items()):
            code = child.poll()
            if code is None:
                continue
            self._drain(child)
            del self._children[rank]
            joined = child.joined or self._has_record(child)
            if code == 0 and joined:
                self.log.write("finished", rank=rank, pid=child.pid)
                continue
            self.log.write("died", rank=rank, pid=child.pid, detail=child.verdict())
            if self._store is not None:
                self._store.reap()
            if self._signal:
                continue
            hopeless = self._fails_at_once(child)
            if not joined or hopeless or self._restarts[rank] >= self.job.max_restarts:
                raise TrainingFailed(self._obituary(child, joined), tuple(child.tail))
            backoff = min(MAX_BACKOFF_SECONDS, BACKOFF_SECONDS * 2 ** self._restarts[rank])
            self._restarts[rank] += 1
            self._due[rank] = time.monotonic() + backoff

    def _fails_at_once(self, child: Child) -> bool:
        """Whether a second process of the rank ended in an error of its own before its first step."""
        path = record_path(self.job.run_dir, child.rank, child.pid)
        if (child.code or 0) <= 0 or (path.exists() and path.stat().st_size):
            self._fruitless[child.rank] = 0
            return False
        self._fruitless[child.rank] += 1
        return self._fruitless[child.rank] > 1

    def _drain(self, child: Child) -> None:
        """What a dead child had still to say; then its descriptors go."""
        for stream in child.streams():
            while not stream.closed:
                before = len(child.tail)
                self._read(child, stream)
                if not stream.closed and len(child.tail) == before:
                    self._selector.unregister(stream)
                    stream.close()  # something outside its group holds the other end
        self._selector.unregister(child.pidfd)
        child.close()

    def _obituary(self, child: Child, joined: bool) -> str:
        name = self._places[child.rank].name
        restarts = self._restarts[child.rank]
        why = f"after {restarts} restart{'s' * (restarts != 1)}" if joined else "before it had joined the run"
        if child.code == 0:
            why += " (the script has to call pyps.join() and worker.attach())"
        return f"rank {child.rank} ({name}): {child.verdict()} {why}"

    def _observe(self) -> None:
        """Look at the store: who joined, how far it is, and a snapshot where one is due."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + (LOOK_SECONDS if self._far else 0.0)
        store = self._store = self._store or self._open()
        if store is None:
            status = None
        else:
            status = store.status()
            self._note_joined(store)
            if time.monotonic() >= self._next_reap:
                self._next_reap = time.monotonic() + REAP_SECONDS
                store.reap()
            self._count(store)
            self._balance(store)
            if self.job.snapshot_every and status.version >= self._next_snapshot:
                self._take_snapshot(store)
        if self._on_tick is not None:
            self._on_tick(status)

    def _note_joined(self, store: Store) -> None:
        """Who has joined since: by process, which members have; where others stand in for them, by record."""
        pids = set() if self._far else {member.pid for member in store.members()}
        for child in self._children.values():
            if child.joined:
                continue
            if child.pid in pids or (self._far and self._has_record(child)):
                child.joined = True
                self.log.write("joined", rank=child.rank, pid=child.pid)

    def _has_record(self, child: Child) -> bool:
        return record_path(self.job.run_dir, child.rank, child.pid).exists()

    def _open(self) -> Store | None:
        try:
            store = open_store(self.job.store)
        except (SegmentNotFound, NotReady):
            return None
        if self.job.journal is not None:
            store.journal(self.job.journal)
        with contextlib.suppress(StoreFull):  # every place is a worker's: looking works without joining
            store.join(role="observer")
        return store

    def _count(self, store: Store) -> None:
        status, ranks = store.status(), store.ranks()
        self.totals = Totals(
            versions=status.version,
            lost=status.samples_dropped,
            samples=tuple(r.samples for r in ranks),
            skipped=tuple(r.skipped for r in ranks),
            returned=tuple(r.returned for r in ranks),
        )

    def _balance(self, store: Store) -> None:
        """Move samples where the balancer finds it worth while; a place to look from is one to steer from."""
        if self.job.balancer is None or store.rank is None:
            return
        if move := self.job.balancer.look():
            store.replan(move.after)
            self.log.write("replanned", detail="; ".join(move.reasons))

    def _take_snapshot(self, store: Store) -> None:
        try:
            snapshot = store.snapshot(SNAPSHOT_SECONDS)
        except (SnapshotCancelled, Busy, TimedOut):
            return  # the next tick tries again
        path = self.job.run_dir / "snapshots" / f"{snapshot.version:09d}.npz"
        save_parameters(path, snapshot)
        self.log.write("snapshot", version=snapshot.version, detail=path.name)
        every = self.job.snapshot_every
        self._next_snapshot = (snapshot.version // every + 1) * every

    def _note_signal(self, number: int, _: object) -> None:
        self._signal = number


def save_parameters(path: Path, snapshot: Snapshot) -> None:
    """Write one version's tensors by name, and `pyps.version`, as an .npz: entirely or not at all."""
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    arrays: dict[str, np.ndarray] = {**snapshot.tensors, "pyps.version": np.uint64(snapshot.version)}  # type: ignore
    try:
        with open(temporary, "xb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _catch_signals(handler: Callable[[int, object], None]) -> dict[int, object]:
    """Take over the signals that end a run; in a thread other than the main one, there are none to take."""
    handlers: dict[int, object] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            handlers[number] = signal.signal(number, handler)
    except ValueError:
        pass
    return handlers


def _restore_signals(handlers: Mapping[int, object]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)  # type: ignore[arg-type]
