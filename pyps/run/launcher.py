"""The launcher of a run: starts a process for each rank and watches them until all have ended.

The launcher decides nothing about the training: the workers and the store do. It starts the processes, passes
on what they print, takes dead ones out of the store, restarts them a bounded number of times, and leaves
neither a process nor a segment behind, however the run ends.
"""

from __future__ import annotations

import contextlib
import math
import selectors
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Literal, Self

from pyps import native
from pyps.checkpoint.folder import MODEL
from pyps.checkpoint.local_states import without_moments
from pyps.checkpoint.tensors import write_whole
from pyps.errors import (
    InputError,
    InvalidArgument,
    LinkLost,
    PlanChanged,
    PypsError,
    SegmentNotFound,
    StoreError,
)
from pyps.formats.events import EventLog, read_undone
from pyps.formats.records import record_path
from pyps.formats.setup import RankSpec
from pyps.remote.address import is_address
from pyps.report.report import StoreTotals
from pyps.run.checkpoints import Checkpointer
from pyps.run.guard import Guard
from pyps.run.process import RankProcess, Restarts, WorkerProcess, end_processes
from pyps.run.rebalance import RunRebalancer, present_ranks
from pyps.run.spec import RunSpec
from pyps.run.store import RunStore
from pyps.store.activity import StoreActivity, look
from pyps.store.segments import segment_path
from pyps.store.store import Store
from pyps.worker.run.notice import LEFT, Signals

TICK_SECONDS = 0.05
REMOTE_POLL_SECONDS = 0.5  # between two polls of a store on another host
REAP_INTERVAL_SECONDS = 1.0  # how often the store is asked to reap members that the launcher did not start
LOST_PLACE_SECONDS = 1.0  # before a rank whose place was lost asks for another one
KILL_SECONDS = 5.0  # between SIGTERM and SIGKILL to what has not left in time
AWAY_SECONDS = 60.0  # that a store which may come back is waited for at the end
LAST_CHECKPOINT_SECONDS = 20.0  # that the last checkpoint of a run that was stopped may take

OnLine = Callable[[int, str, bool], None]  # (rank, line, is_stderr)
OnTick = Callable[[StoreActivity | None], None]
OnNotice = Callable[[str], None]  # a sentence
Start = Callable[[RunSpec, RankSpec], RankProcess]


class TrainingFailed(PypsError):
    """A worker died more often than it may be restarted; `error`: its own, as the process printed it."""

    exit_code = 1

    def __init__(self, message: str, error: str = "") -> None:
        self.error = error
        super().__init__(f"{message}: {error}" if error else message)


class RunInterrupted(PypsError):
    """A signal asked the run to end; `exit_code` is 128 + the signal, as in a shell."""

    def __init__(self, number: int) -> None:
        self.exit_code = 128 + number
        super().__init__(f"interrupted by {signal.Signals(number).name}")


def start_here(spec: RunSpec, rank: RankSpec) -> WorkerProcess:
    """Start a rank's process on this machine."""
    log = spec.run_dir / f"worker-{rank.rank}.log"
    return WorkerProcess(rank.rank, spec.command, spec.environment(rank), log, spec.folder)


class Launcher:
    """The processes of one run; a context manager that ends all of them, whatever happens inside."""

    def __init__(
        self,
        spec: RunSpec,
        log: EventLog,
        on_line: OnLine | None = None,
        on_tick: OnTick | None = None,
        on_notice: OnNotice | None = None,
        start: Start = start_here,
    ) -> None:
        """spec: what to run; log: of events; on_line, on_notice: as in pyps.run.run.

        on_tick: called about 20 times a second with the store's state, None before the store is there.
        start: starts the process of a rank.
        """
        self.spec, self.log = spec, log
        self._start_process = start
        self.totals = StoreTotals()
        self._ranks = {rank.rank: rank for rank in spec.ranks}
        self._is_remote = is_address(spec.store)
        depths = [mode.depth for mode in spec.modes]
        self._rebalancer = RunRebalancer(
            spec.plan, spec.policy.needs, moves=spec.options.rebalance, depths=depths
        )
        self._on_line, self._on_tick, self._on_notice = on_line, on_tick, on_notice
        self._selector = selectors.DefaultSelector()
        self._processes: dict[int, RankProcess] = {}
        self._restart_at: dict[int, tuple[float, str]] = {}  # by rank: when, and what to say then
        self._restarts = Restarts(spec.options.max_restarts, len(spec.ranks))
        self._store = RunStore(spec, lambda state: self._detect_joins(state, *self._processes.values()))
        self._signals = Signals()
        self._left: set[int] = set()  # ranks that left on a notice of their own
        self._previous_handlers: dict[int, object] = {}
        self._checkpoints = Checkpointer(spec, self._note_checkpoint, self._note_failed_checkpoint)
        self._next_reap = self._next_poll = 0.0
        self._has_finished = False  # some process, and with it the run's samples

    def __enter__(self) -> Self:
        self._previous_handlers = _catch_signals(self._on_signal)
        self._guard = Guard(None if self._is_remote else segment_path(self.spec.store))
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        try:
            end_processes(self._processes.values(), signal.SIGTERM, KILL_SECONDS)
            for process in self._processes.values():
                process.close()
            self._guard.close()
            self._selector.close()
            self._store.close()
            if not self._is_remote:
                with contextlib.suppress(SegmentNotFound):  # no worker has created it
                    native.unlink(self.spec.store, force=True)
        finally:
            restore_signals(self._previous_handlers)

    def run(self) -> None:
        """Return when every worker has ended well. Raises TrainingFailed, Interrupted, after a checkpoint.

        A signal is passed on as a notice: the workers finish their steps and leave, so that the checkpoint
        has all that was trained.
        """
        try:
            self._train()
        except (TrainingFailed, RunInterrupted) as end:
            if isinstance(end, RunInterrupted):
                last = ", then a checkpoint is written" if self._checkpoints.writes else ""
                self._notice(f"{end}: workers finish their steps{last}; a second signal ends the run at once")
                self._drain()
            self._save_last(LAST_CHECKPOINT_SECONDS)
            if self.last_checkpoint is not None:
                hint = f"continue with pyps run --resume {self.spec.run_dir}"
                end.add_note(f"the last checkpoint is {self.last_checkpoint}: {hint}")
            raise

    @property
    def last_checkpoint(self) -> Path | None:
        """The newest checkpoint of this run that is whole."""
        return self._checkpoints.path

    def _drain(self) -> None:
        """Ask the workers to finish their steps and leave; return when they have, or after the grace."""
        self._restart_at.clear()
        for process in self._processes.values():
            process.signal(signal.SIGTERM)
            process.signal(signal.SIGCONT)
        deadline = time.monotonic() + self.spec.options.grace
        while self._processes and time.monotonic() < deadline and self._signals.count < 2:
            self._wait_for_output()
            self._poll_store()
            self._reap_children()
        grace = f"in {self.spec.options.grace:g} s (--grace)"
        late = f"has not finished its step {grace if self._signals.count < 2 else 'before the second signal'}"
        for process in self._processes.values():
            self._notice(f"{self._place(process)} {late}: that step is trained again")

    def _train(self) -> None:
        if self._is_remote:
            self._poll_store()  # a store of another run is refused before any process starts
        for rank in self._ranks:
            self._start(rank, "started")
        while self._processes or self._restart_at:
            self._wait_for_output()
            self._poll_store()
            self._reap_children()
            self._give_up_waiting()
            for rank in [r for r, (when, _) in self._restart_at.items() if when <= time.monotonic()]:
                self._notice(self._restart_at.pop(rank)[1])
                self._start(rank, "restarted")
            if self._signals.first:
                raise RunInterrupted(self._signals.first)
        if self._left and not self._has_finished:
            raise RunInterrupted(signal.SIGTERM)
        # Workers may have joined and ended between two looks.
        if not self._store.was_open and self._store.open() is None:
            raise TrainingFailed("every worker ended, but none joined: the script has to call pyps.join()")
        deadline = time.monotonic() + AWAY_SECONDS
        while not self._end(deadline):
            time.sleep(REMOTE_POLL_SECONDS)

    def _end(self, deadline: float) -> bool:
        """Keep what was trained; whether the store was there. Raises LinkLost after the deadline."""
        with self._store.may_be_lost(deadline):
            store = self._store.open()
            if store is None:
                raise LinkLost("end", "trained to the end, but the store has not come back")
            state = look(store)
            self._update_totals(state)
            self._note_undone()
            if self._on_tick is not None:
                self._on_tick(state)
            self._save_last(math.inf)
            try:
                write_whole(self.spec.run_dir / MODEL, without_moments(store.snapshot().tensors))
            except InputError as full:
                raise TrainingFailed(f"trained to the end, but the model is not written: {full}") from None
            return True
        return False

    def _start(self, rank: int, event: Literal["started", "restarted"]) -> None:
        process = self._processes[rank] = self._start_process(self.spec, self._ranks[rank])
        if process.is_here:
            self._guard.add(process.pid)
            self._selector.register(process.pidfd, selectors.EVENT_READ)
        for stream in process.streams():
            self._selector.register(stream, selectors.EVENT_READ, (process, stream))
        self.log.write(event, rank=rank, pid=process.pid or None)

    def _wait_for_output(self) -> None:
        """Sleep for at most a tick; return earlier if a worker prints something or ends."""
        for key, _ in self._selector.select(TICK_SECONDS):
            if key.data is not None:
                self._read(*key.data)

    def _read(self, process: RankProcess, stream: IO[bytes]) -> None:
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
            if process.is_here:
                self._guard.remove(process.pid)
            with self._store.may_be_lost():
                if self._store.store is not None:  # it may have joined since the last look
                    self._detect_joins(look(self._store.store), process)
            joined = process.joined or self._has_record(process)
            if code == 0 and joined:
                self.log.write("finished", rank=rank, pid=process.pid)
                self._has_finished = True
                continue
            if code == LEFT:
                self._note_left(process)
                continue
            self.log.write("died", rank=rank, pid=process.pid, detail=process.exit_reason())
            with self._store.may_be_lost():
                if self._store.store is not None:
                    self._store.store.reap()
            if self._signals.count:
                continue
            self._restart_or_fail(process, joined)

    def _note_left(self, process: RankProcess) -> None:
        """A worker left on a notice. On a cluster that places it, it asks for another place."""
        self.log.write("left", rank=process.rank, pid=process.pid or None, detail="on SIGTERM")
        if self._signals.count:
            return
        if process.is_here:
            self._left.add(process.rank)
            self._notice(f"{self._place(process)} left on SIGTERM")
            return
        text = f"{self._place(process)} left on a notice; asking for another place"
        self._restart_at[process.rank] = time.monotonic() + LOST_PLACE_SECONDS, text

    def _give_up_waiting(self) -> None:
        """A process that has no place yet comes too late once all others have ended well."""
        if not self._has_finished or self._restart_at or any(p.pid for p in self._processes.values()):
            return
        end_processes(self._processes.values(), signal.SIGTERM, KILL_SECONDS)
        for process in self._processes.values():
            process.close()
        self._processes.clear()

    def _restart_or_fail(self, process: RankProcess, joined: bool) -> None:
        """Start the rank again later. Raises TrainingFailed where that would not help."""
        if process.is_lost and not process.pid:
            why = f"{process.exit_reason()} before it had a place; asking for another"
            text = f"{self._place(process)}: {why}"
            self._restart_at[process.rank] = time.monotonic() + LOST_PLACE_SECONDS, text
            return
        path = record_path(self.spec.run_dir, process.rank, process.pid)
        has_steps = path.exists() and path.stat().st_size > 0
        refusal: str | None = " before it had joined the run"
        if joined or process.is_lost:
            refusal = self._restarts.refusal(process, has_steps)
        if refusal is not None:
            raise TrainingFailed(self._exit_message(process, refusal), process.error)
        when = time.monotonic() + self._restarts.count(process.rank)
        nth = f"{self._restarts.counts[process.rank]} of {self.spec.options.max_restarts}"
        text = f"{self._place(process)}: {process.exit_reason()}; restarting ({nth})"
        self._restart_at[process.rank] = when, text

    def _read_remaining_output(self, process: RankProcess) -> None:
        """Read what a dead process has printed last, then close its descriptors."""
        for stream in process.streams():
            while not stream.closed:
                before = len(process.stderr_tail)
                self._read(process, stream)
                if not stream.closed and len(process.stderr_tail) == before:
                    self._selector.unregister(stream)
                    stream.close()  # a process outside its group holds the other end
        if process.is_here:
            self._selector.unregister(process.pidfd)
        process.close()

    def _place(self, process: RankProcess) -> str:
        return f"rank {process.rank} ({self._ranks[process.rank].name})"

    def _exit_message(self, process: RankProcess, refusal: str) -> str:
        hint = " (the script has to call pyps.join() and worker.attach())" if process.exit_code == 0 else ""
        line = f" at {process.error_line}" if process.error_line else ""
        return f"{self._place(process)}: {process.exit_reason()}{line}{refusal}{hint}"

    def _poll_store(self) -> None:
        """Note which workers joined and how far the run is; rebalance, and begin a checkpoint that is due."""
        if time.monotonic() < self._next_poll:
            return
        self._next_poll = time.monotonic() + (REMOTE_POLL_SECONDS if self._is_remote else 0.0)
        state: StoreActivity | None = None
        with self._store.may_be_lost():
            if (store := self._store.open()) is not None:
                state = look(store)
                self._detect_joins(state, *self._processes.values())
                if time.monotonic() >= self._next_reap:
                    self._next_reap = time.monotonic() + REAP_INTERVAL_SECONDS
                    store.reap()
                self._update_totals(state)
                self._note_undone()
                if not self._signals.count:  # ranks that leave with the whole run keep their samples
                    self._rebalance(store, state)
                self._checkpoints.update(state.status)
        if self._on_tick is not None:
            self._on_tick(state)

    def _detect_joins(self, state: StoreActivity, *processes: RankProcess) -> None:
        """A worker has joined when it has a record; one here also when it is a member or its rank has pushed.
        The slot of a dead worker may be another's by now.
        """
        pids = set() if self._is_remote else {member.pid for member in state.members}
        for process in processes:
            if process.joined:
                continue
            again = self.spec.resumed.path or self._restarts.counts[process.rank]
            first = process.is_here and not (self._is_remote or again)
            pushed = first and process.rank < len(state.ranks) and state.ranks[process.rank].pushes > 0
            if pushed or process.pid in pids or self._has_record(process):
                process.joined = True
                self.log.write("joined", rank=process.rank, pid=process.pid)

    def _has_record(self, process: RankProcess) -> bool:
        return record_path(self.spec.run_dir, process.rank, process.pid).exists()

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
        """Re-plan where that is due: of several launchers, the one with the lowest rank that is there.

        Only a joined observer can.
        """
        if 0 < self.spec.options.samples <= state.status.samples_assigned:  # it ends
            return
        replan = self._rebalancer.update(state, store.costs())
        there = present_ranks(state).there
        if replan is None or store.rank is None or min(there) not in self._ranks:
            return
        with contextlib.suppress(PlanChanged, InvalidArgument):  # decided on an older look
            store.replan(replan.change.after, replan.plan)
            self._rebalancer.adopt(replan)
            self.log.write(replan.kind, detail=str(replan.change))

    def _save_last(self, seconds: float) -> None:
        """Write a checkpoint of what is new since the last one, in at most `seconds`.

        Meanwhile what workers print is read, and a second signal ends it at once.
        """
        deadline, begun = time.monotonic() + seconds, self._store.store is None
        while time.monotonic() < deadline and self._signals.count < 2:
            if not self._checkpoints.wait(TICK_SECONDS):
                self._wait_for_output()
            elif begun:
                return
            else:
                begun = self._begin_last(min(seconds, LAST_CHECKPOINT_SECONDS))

    def _begin_last(self, seconds: float) -> bool:
        with contextlib.suppress(StoreError):  # its server may be gone
            if self._store.store is not None:
                self._checkpoints.begin_last(self._store.store.status().version, seconds)
        return True

    def _note_checkpoint(self, version: int, path: Path) -> None:
        self.log.write("checkpoint", version=version, detail=path.name)

    def _note_failed_checkpoint(self, error: PypsError) -> None:
        last = self.last_checkpoint
        before = f"the last one is {last}" if last is not None else "there is no earlier one"
        self._notice(f"no checkpoint written: {error}; {before}")

    def _note_undone(self) -> None:
        """Pass on what rank 0 wrote when it made a lost store again."""
        known = sum(event.kind == "undone" for event in self.log.events)
        for one in read_undone(self.spec.run_dir)[known:]:
            self.log.write("undone", version=one.version, pushes=one.pushes)
            back = f"a server's host was lost: all shards are back at version {one.version:,}"
            self._notice(f"{back}, and {one.pushes:,} pushes after it are undone")

    def _notice(self, text: str) -> None:
        if self._on_notice is not None:
            self._on_notice(text)

    def _on_signal(self, number: int, _: object) -> None:
        self._signals.note(number)


def _catch_signals(handler: Callable[[int, object], None]) -> dict[int, object]:
    """Handle the signals that end a run; returns the previous handlers. Only the main thread can."""
    handlers: dict[int, object] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                handlers[number] = signal.signal(number, handler)
    except ValueError:
        pass
    return handlers


def restore_signals(handlers: Mapping[int, object]) -> None:
    """Put back what signal.signal gave; None: one that was set outside Python, which it does not take."""
    for number, handler in handlers.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]
