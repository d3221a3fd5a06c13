"""The launcher of a run: starts a process for each rank and watches them until all have ended.

The launcher decides nothing about the training: the workers and the store do. It starts the processes, passes
on what they print, takes dead ones out of the store, restarts them a bounded number of times, and leaves
neither a process nor a segment behind, however the run ends.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Literal, Self

import numpy as np

from pyps import native
from pyps.errors import Busy, NotReady, PypsError, SegmentNotFound, SnapshotCancelled, StoreFull, TimedOut
from pyps.formats.events import EventLog
from pyps.formats.records import record_path
from pyps.native.values import MemberState, Role, Snapshot
from pyps.remote import open_store
from pyps.remote.address import is_address
from pyps.report.activity import StoreActivity, look
from pyps.report.report import StoreTotals
from pyps.run.guard import Guard
from pyps.run.membership import reason, split_without
from pyps.run.process import WorkerProcess, end_processes
from pyps.run.rebalance import RunRebalancer
from pyps.run.restarts import Restarts
from pyps.run.spec import RunSpec
from pyps.store.segments import segment_path
from pyps.store.store import Store

TICK_SECONDS = 0.05
HERE = (MemberState.ACTIVE, MemberState.FENCED)  # a fenced worker comes back by itself
REMOTE_POLL_SECONDS = 0.5  # between two polls of a store on another host
REAP_INTERVAL_SECONDS = 1.0  # how often the store is asked to reap members that the launcher did not start
GRACE_SECONDS = 5.0  # between the first signal, SIGTERM and SIGKILL
SNAPSHOT_TIMEOUT_SECONDS = 5.0  # a snapshot that takes longer is left out

OnLine = Callable[[int, str, bool], None]  # (rank, line, is_stderr)
OnTick = Callable[[StoreActivity | None], None]
OnRestart = Callable[[str], None]  # a sentence


class TrainingFailed(PypsError):
    """A worker died more often than it may be restarted; `stderr_tail` holds the last lines of its stderr."""

    exit_code = 1

    def __init__(self, message: str, stderr_tail: tuple[str, ...] = ()) -> None:
        self.stderr_tail = stderr_tail
        super().__init__(f"{message}: {stderr_tail[-1].strip()}" if stderr_tail else message)


class Interrupted(PypsError):
    """A signal asked the run to end; `exit_code` is 128 + the signal, as in a shell."""

    def __init__(self, number: int) -> None:
        self.exit_code = 128 + number
        super().__init__(f"interrupted by {signal.Signals(number).name}")


class Launcher:
    """The processes of one run; a context manager that ends all of them, whatever happens inside."""

    def __init__(
        self,
        spec: RunSpec,
        log: EventLog,
        on_line: OnLine | None = None,
        on_tick: OnTick | None = None,
        on_restart: OnRestart | None = None,
    ) -> None:
        """spec: what to run; log: of events; on_line, on_restart: as in pyps.run.run.

        on_tick: called about 20 times a second with the store's state, None before the store is there.
        """
        self.spec, self.log = spec, log
        self.totals = StoreTotals()
        self._ranks = {rank.rank: rank for rank in spec.ranks}
        self._is_remote = is_address(spec.store)
        depths = [mode.depth for mode in spec.modes]
        self._rebalancer = RunRebalancer(spec.plan, spec.run_dir, depths=depths)
        self._seen: set[int] = set()  # ranks that have been there
        self._finished: set[int] = set()
        self._away: frozenset[int] = frozenset()
        self._on_line, self._on_tick, self._on_restart = on_line, on_tick, on_restart
        self._selector = selectors.DefaultSelector()
        self._processes: dict[int, WorkerProcess] = {}
        self._restart_at: dict[int, float] = {}  # by rank
        self._restarts = Restarts(spec.options.max_restarts)
        self._store: Store | None = None
        self._signal = 0
        self._previous_handlers: dict[int, object] = {}
        self._next_snapshot = spec.options.snapshot_every
        self._next_reap = self._next_poll = 0.0

    def __enter__(self) -> Self:
        self._previous_handlers = _catch_signals(self._on_signal)
        self._guard = Guard(None if self._is_remote else segment_path(self.spec.store))
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        try:
            end_processes(self._processes.values(), self._signal or signal.SIGTERM, GRACE_SECONDS)
            for process in self._processes.values():
                process.close()
            self._guard.close()
            self._selector.close()
            if self._store is not None:
                self._store.close()
            if not self._is_remote:
                with contextlib.suppress(SegmentNotFound):  # no worker has created it
                    native.unlink(self.spec.store, force=True)
        finally:
            _restore_signals(self._previous_handlers)

    def run(self) -> None:
        """Return when every worker has ended well. Raises TrainingFailed, Interrupted."""
        for rank in self._ranks:
            self._start(rank, "started")
        while self._processes or self._restart_at:
            self._wait_for_output()
            self._poll_store()
            self._reap_children()
            for rank in [r for r, when in self._restart_at.items() if when <= time.monotonic()]:
                del self._restart_at[rank]
                self._start(rank, "restarted")
            if self._signal:
                raise Interrupted(self._signal)
        if self._store is None:
            raise TrainingFailed("every worker ended, but none joined: the script has to call pyps.join()")
        save_parameters(self.spec.run_dir / "parameters.npz", self._store.snapshot())
        state = look(self._store)
        self._update_totals(state)
        if self._on_tick is not None:
            self._on_tick(state)

    def _start(self, rank: int, event: Literal["started", "restarted"]) -> None:
        log = self.spec.run_dir / f"worker-{rank}.log"
        process = WorkerProcess(rank, self.spec.command, self.spec.environment(self._ranks[rank]), log)
        self._guard.add(process.pid)
        self._processes[rank] = process
        for stream in process.streams():
            self._selector.register(stream, selectors.EVENT_READ, (process, stream))
        self._selector.register(process.pidfd, selectors.EVENT_READ)
        self.log.write(event, rank=rank, pid=process.pid)

    def _wait_for_output(self) -> None:
        """Sleep for at most a tick; return earlier if a worker prints something or ends."""
        for key, _ in self._selector.select(TICK_SECONDS):
            if key.data is not None:
                self._read(*key.data)

    def _read(self, process: WorkerProcess, stream: IO[bytes]) -> None:
        is_stderr, fd = process.is_stderr(stream), stream.fileno()
        for line in process.read(stream):
            if self._on_line is not None:
                self._on_line(process.rank, line, is_stderr)
        if stream.closed:
            self._selector.unregister(fd)

    def _reap_children(self) -> None:
        """Handle the dead processes: one that ended well is done; any other is restarted or ends the run."""
        for rank, process in list(self._processes.items()):
            code = process.poll()
            if code is None:
                continue
            self._read_remaining_output(process)
            del self._processes[rank]
            self._guard.remove(process.pid)
            joined = process.joined or self._has_record(process)
            if code == 0 and joined:
                self._finished.add(rank)
                self.log.write("finished", rank=rank, pid=process.pid)
                continue
            self.log.write("died", rank=rank, pid=process.pid, detail=process.exit_reason())
            if self._store is not None:
                self._store.reap()
            if self._signal:
                continue
            self._restart_or_fail(process, joined)

    def _restart_or_fail(self, process: WorkerProcess, joined: bool) -> None:
        """Start the rank again later. Raises TrainingFailed where that would not help."""
        path = record_path(self.spec.run_dir, process.rank, process.pid)
        has_steps = path.exists() and path.stat().st_size > 0
        refusal = self._restarts.refusal(process, has_steps) if joined else " before it had joined the run"
        if refusal is not None:
            raise TrainingFailed(self._exit_message(process, refusal), tuple(process.stderr_tail))
        self._restart_at[process.rank] = time.monotonic() + self._restarts.count(process.rank)
        if self._on_restart is not None:
            self._on_restart(self._restart_message(process))

    def _read_remaining_output(self, process: WorkerProcess) -> None:
        """Read what a dead process has printed last, then close its descriptors."""
        for stream in process.streams():
            while not stream.closed:
                before = len(process.stderr_tail)
                self._read(process, stream)
                if not stream.closed and len(process.stderr_tail) == before:
                    self._selector.unregister(stream)
                    stream.close()  # a process outside its group holds the other end
        self._selector.unregister(process.pidfd)
        process.close()

    def _restart_message(self, process: WorkerProcess) -> str:
        nth = f"{self._restarts.counts[process.rank]} of {self.spec.options.max_restarts}"
        return f"{self._place(process)}: {process.exit_reason()}; restarting ({nth})"

    def _place(self, process: WorkerProcess) -> str:
        return f"rank {process.rank} ({self._ranks[process.rank].name})"

    def _exit_message(self, process: WorkerProcess, refusal: str) -> str:
        hint = " (the script has to call pyps.join() and worker.attach())" if process.exit_code == 0 else ""
        return f"{self._place(process)}: {process.exit_reason()}{refusal}{hint}"

    def _poll_store(self) -> None:
        """Note which workers joined and how far the run is; rebalance, and take a snapshot that is due."""
        if time.monotonic() < self._next_poll:
            return
        self._next_poll = time.monotonic() + (REMOTE_POLL_SECONDS if self._is_remote else 0.0)
        store = self._store = self._store or self._open_store()
        if store is None:
            state = None
        else:
            state = look(store)
            self._detect_joins(state)
            if time.monotonic() >= self._next_reap:
                self._next_reap = time.monotonic() + REAP_INTERVAL_SECONDS
                store.reap()
            self._update_totals(state)
            self._rebalance(store, state)
            if self.spec.options.snapshot_every and state.status.version >= self._next_snapshot:
                self._take_snapshot(store)
        if self._on_tick is not None:
            self._on_tick(state)

    def _detect_joins(self, state: StoreActivity) -> None:
        """A local worker has joined when its process is a member; a remote one, when it has a record."""
        pids = set() if self._is_remote else {member.pid for member in state.members}
        for process in self._processes.values():
            if process.joined:
                continue
            if process.pid in pids or (self._is_remote and self._has_record(process)):
                process.joined = True
                self.log.write("joined", rank=process.rank, pid=process.pid)

    def _has_record(self, process: WorkerProcess) -> bool:
        return record_path(self.spec.run_dir, process.rank, process.pid).exists()

    def _open_store(self) -> Store | None:
        try:
            store = open_store(self.spec.store)
        except (SegmentNotFound, NotReady):
            return None
        if self.spec.journal is not None:
            store.journal(self.spec.journal)
        with contextlib.suppress(StoreFull):  # every slot is a worker's: status() works without joining
            store.join(role="observer")
        return store

    def _update_totals(self, state: StoreActivity) -> None:
        status, ranks = state.status, state.ranks
        self.totals = StoreTotals(
            versions=status.version,
            dropped=status.samples_dropped,
            samples=tuple(r.samples for r in ranks),
            skipped=tuple(r.skipped for r in ranks),
            returned=tuple(r.returned for r in ranks),
        )

    def _rebalance(self, store: Store, state: StoreActivity) -> None:
        """Share out the samples of ranks that are away, and move samples where that saves time.

        Only a joined observer can, and of several launchers the one with the lowest rank that is there.
        """
        there = {
            m.rank for m in state.members if m.role is Role.WORKER and m.state in HERE and m.rank is not None
        }
        self._seen |= there
        ending = 0 < self.spec.options.samples <= state.status.samples_assigned
        if store.rank is None or ending or not there or min(there) not in self._ranks:
            return
        away = frozenset(self._seen - there - self._finished)
        if away != self._away:
            self._take_over(store, away)
            return
        wanted = self.spec.options.rebalance and not away
        if wanted and (change := self._rebalancer.update(state.status.plan)):
            store.replan(change.after)
            self.log.write("replanned", detail="; ".join(change.reasons))

    def _take_over(self, store: Store, away: frozenset[int]) -> None:
        """Ranks went away or came back: where a step needs all gradients, share out the whole batch again."""
        self._away, needs = away, self.spec.policy.needs
        if not needs.waits_for_rounds or needs.resizes_batches:
            return
        full = self._rebalancer.split
        before = tuple(rank.batch for rank in store.ranks())
        after = split_without(away, full, self._rebalancer.costs, self._rebalancer.max_batches)
        if after != before:
            store.replan(after)
            self.log.write("replanned", detail=reason(away, before, after))

    def _take_snapshot(self, store: Store) -> None:
        try:
            snapshot = store.snapshot(SNAPSHOT_TIMEOUT_SECONDS)
        except (SnapshotCancelled, Busy, TimedOut):
            return  # the next tick tries again
        path = self.spec.run_dir / "snapshots" / f"{snapshot.version:09d}.npz"
        save_parameters(path, snapshot)
        self.log.write("snapshot", version=snapshot.version, detail=path.name)
        every = self.spec.options.snapshot_every
        self._next_snapshot = (snapshot.version // every + 1) * every

    def _on_signal(self, number: int, _: object) -> None:
        self._signal = number


def save_parameters(path: Path, snapshot: Snapshot) -> None:
    """Write one version's tensors by name, and `pyps.version`, to an .npz, atomically."""
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
    """Handle the signals that end a run; returns the previous handlers. Only the main thread can."""
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
