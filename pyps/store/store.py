"""pyps.Store: one named segment as a Python object, with views instead of copies.

Lifetime of views. A staging buffer is seen through NumPy arrays (and torch tensors over them) that keep the
segment mapped: close() while some are alive leaves the store at once and unmaps when the last of them dies.
After leave() or close() the buffer is no longer this worker's: what such a view still writes stays in this
process.

Threads share a Store safely: its calls run one after another, but for status, members, ranks and hyper, which
wait for no other. What a signal's handler raises ends a wait. A forked child opens the store itself.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, NoReturn, Self, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from pyps import native
from pyps.errors import (
    Busy,
    Forked,
    InvalidArgument,
    SegmentNotFound,
    SnapshotCancelled,
    StoreClosed,
    StoreError,
)
from pyps.formats.turns import TurnSchedule
from pyps.native import planning
from pyps.native.create import create
from pyps.native.state import StoreState, read_state, split
from pyps.native.values import (
    Advice,
    Agreement,
    Claim,
    Codec,
    Config,
    CostModel,
    DataSet,
    Flat,
    Hyper,
    Layout,
    Member,
    Optimizer,
    PolicyNeeds,
    PolicyParams,
    PushRequest,
    PushResult,
    RankCost,
    RankCounters,
    Role,
    Snapshot,
    Status,
    Tensor,
)
from pyps.store.codec import as_codec, encoded_vector_bytes
from pyps.store.creation import store_config
from pyps.store.policies import Policy, check_known
from pyps.store.request import check_request, check_vector, push_request
from pyps.store.staging import StagingBuffer

T = TypeVar("T")
JoinRole = Literal["worker", "observer", "new_worker"]
UNSAID = Agreement()
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: spreads small numbers over all bits


class Store:
    """A parameter store; make one with `create` or `open`, use it as a context manager.

    Errors: every method raises a StoreError whose class says what happened (pyps.errors), StoreClosed after
    close(), Forked in a forked child. Timeouts are in seconds; None means twice the policy's
    round_timeout_seconds, in which a late worker has been fenced.
    """

    def __init__(self, name: str, pointer: native.Pointer, *, unlinks: bool) -> None:
        self.name = name
        self.rank: int | None = None
        self._pointer: native.Pointer | None = pointer
        self._unlinks = unlinks
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._observing = threading.RLock()  # held while the mapping may change, and by each look at it
        self._both = (self._lock, self._observing)
        self._staging_buffers: dict[int, StagingBuffer] = {}
        self._drawn = 0, 0  # the first sample last claimed, and the pushes rounded stochastically since
        self._views: list[weakref.ref[native.Mapping]] = []
        self.layout: Layout = self._call(native.get_layout)
        self.tensors: tuple[Tensor, ...] = tuple(
            self._call(native.get_tensor, index) for index in range(self.layout.tensors)
        )

    @classmethod
    def create(
        cls,
        name: str,
        tensors: Mapping[str, Any] | None = None,
        *,
        batches: Sequence[int] | None = None,
        optimizer: Optimizer | str | None = None,
        policy: Policy | str | None = None,
        groups: Mapping[str, int] | None = None,
        averaged: Collection[str] = (),
        samples: int | None = None,
        state: StoreState | None = None,
        agreement: Agreement = UNSAID,
        chunk_params: int = 0,
        max_participants: int = 0,
        snapshot_spares: int = 0,
        staging_buffers: int = 0,
        keep: bool = False,
    ) -> Self:
        """Make a segment and open it. The creator's close() removes the segment's name, unless `keep`.

        tensors: name -> initial values (array or torch tensor of real numbers; kept as fp32). batches: the
        planned batch of each rank. optimizer: "sgd" (the default), "momentum", "adamw", "adam" or "adagrad".
        policy: a pyps.BSP, ASP, ..., or its text ("ssp:bound=4"). groups: name -> index of its parameter
        group (default: all 0). averaged: names of tensors, in groups after all others, of which a push
        brings values to average, not gradients. samples: sample positions to assign in all; 0: without end.
        state: what another store's `state()` gave, to go on from bit for bit; whatever is None is as there.
        Tensors, groups and optimizer must be those of the state; all else may differ. agreement: kept for
        the workers to compare. chunk_params (0: the
        state's), max_participants, snapshot_spares, staging_buffers (per worker): 0 takes the C core's
        default.
        Raises InputError, SegmentExists, OutOfSpace, InvalidArgument.
        """
        config, going_on = store_config(
            f"store {name!r}",
            tensors,
            state,
            batches=batches,
            optimizer=optimizer,
            policy=policy,
            groups=groups,
            averaged=averaged,
            samples=samples,
            agreement=agreement,
            chunk_params=chunk_params,
            max_participants=max_participants,
            snapshot_spares=snapshot_spares,
            staging_buffers=staging_buffers,
        )
        return cls._make(name, config, going_on, keep=keep)

    @classmethod
    def _make(cls, name: str, config: Config, state: StoreState | None, *, keep: bool) -> Self:
        return cls(name, create(name, config, state), unlinks=not keep)

    @classmethod
    def open(cls, name: str) -> Self:
        """Open an existing segment, trusting nothing in it.

        Raises SegmentNotFound, NotReady, SegmentCorrupt, OtherABI, NotOurs, UnknownPolicy.
        """
        return cls(name, native.open_segment(name), unlinks=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        return self._pointer is None

    def close(self) -> None:
        """Leave, unmap (when the last view is gone), and remove the name if this Store created it.
        Idempotent.

        In a forked child the handle is only dropped.
        """
        if os.getpid() != self._pid:
            self._pointer = None
            return
        with self._lock, self._observing:
            pointer, self._pointer = self._pointer, None
            if pointer is None:
                return
            joined = self.rank is not None
            self._retire()
            self._release(pointer, joined)

    def _release(self, pointer: native.Pointer, joined: bool) -> None:
        if self._unlinks:
            with suppress(SegmentNotFound):  # removed meanwhile; the name may be another's by now
                native.remove(pointer)
        if not any(view() for view in self._views):
            native.close(pointer)
        elif joined:
            with suppress(StoreError):
                native.leave(pointer)  # unmapped when the last view dies

    def join(self, rank: int | None = None, role: Role | JoinRole = "worker") -> int:
        """Become a participant; the rank, -1 for an observer. None: the lowest rank that no live worker has.

        A dead worker's rank is inherited. A "new_worker" may have a rank beyond the planned ones, below
        max_participants: the store then has so many ranks, and it rests until `replan` gives it samples.
        Raises Busy if a live process has the rank, StoreFull.
        """
        kind = Role[role.upper()] if isinstance(role, str) else role
        if kind is not Role.OBSERVER:
            check_known(self.layout.policy, self.policy_params())
        self.rank = self._locked(self._both, native.join, (kind, -1 if rank is None else rank))
        return self.rank

    def leave(self) -> None:
        """Stop participating: claimed samples go back, staging buffers are given up."""
        self._locked(self._both, native.leave, ())
        with self._lock:
            self._retire()

    def rejoin(self) -> None:
        """After Fenced: become active again with the same rank. Staging buffers must be staged anew."""
        self._call(native.rejoin)

    def reap(self) -> int:
        """Remove dead participants and complete their admitted pushes; how many there were."""
        return self._call(native.reap)

    def start(self, timeout: float | None = None) -> Claim:
        """Claim the next samples, waiting as the policy says. Raises Ended, Fenced, TimedOut."""
        claim = self._call(native.start, native.timeout_seconds(timeout))
        self._drawn = claim.first, 0
        return claim

    def start_ahead(self) -> Claim | None:
        """With a step under way, claim the samples of the next one: pushes belong to claims in order.

        For a worker that computes while its gradients travel. Never waits; None where there is nothing to
        claim now: then push first, and start(). Raises Fenced, InvalidArgument under a policy that waits.
        """
        claim = self._call(native.start_ahead)
        if not claim.count:
            return None
        self._drawn = claim.first, 0
        return claim

    def pull(self, out: Flat | None = None, *, strict: bool = False) -> tuple[Flat, int]:
        """Copy the parameters to `out` (fp32 [flat_elements], contiguous; new if None): (flat, version).

        Each chunk is whole; while others push, chunks may be of different versions, the oldest of which is
        reported. strict=True copies one single version (see `snapshot`).
        """
        if out is None:
            out = np.empty(self.layout.flat_elements, np.float32)
        self._target("pull", out)
        if not strict:
            return out, self._call(native.pull, out)
        return out, self._snapshot_into(out, (), np.empty(self.layout.chunks, np.float64), None)

    def _target(self, what: str, out: Flat) -> None:
        check_vector(what, "out", out, self.layout.flat_elements)
        if not out.flags.writeable:
            raise InvalidArgument(what, "out: found a read-only array; expected one to write to")

    def stage(self, timeout: float | None = None) -> StagingBuffer:
        """A staging buffer of this worker that is free to be filled, contents undefined. Raises Fenced."""
        return self.staging(self._call(native.stage, native.timeout_seconds(timeout)))

    def unstage(self, staging: StagingBuffer | int) -> None:
        """Give back a staging buffer after a refused push. Raises InvalidArgument if it waits in a round."""
        self._call(native.unstage, staging if isinstance(staging, int) else staging.index)

    def staging(self, staging: int) -> StagingBuffer:
        """The zero-copy view of a staging buffer; it may only be written between stage() and push()."""
        with self._lock:
            if staging not in self._staging_buffers:
                flat, view = self._call(native.staging, staging, self.layout.flat_elements)
                self._views = [v for v in self._views if v()] + [view]
                self._staging_buffers[staging] = StagingBuffer(staging, flat, self.tensors)
            elif self._pointer is None:
                raise StoreClosed("staging", "the store is closed")
            return self._staging_buffers[staging]

    def push(
        self,
        staging: StagingBuffer | int,
        samples: int,
        hyper: Hyper | Sequence[Hyper],
        scale: float = 1.0,
        timeout: float | None = None,
        **options: Any,
    ) -> PushResult:
        """Give the staged gradient, the mean over `samples` samples, and take the optimizer's step with it.

        staging: the buffer that `stage` gave. samples: 0 skips the step. hyper: one for all parameter
        groups, or one each. scale: multiplies the gradient. timeout: seconds. options: further fields of a
        PushRequest by name, among them `encoding` (an Encoding, or a codec's name) and `gradient` (in place
        of the staging buffer's: fp32 [flat_elements], or codes of that codec, uint8). Raises Fenced,
        PushRejected, TimedOut, NotFinite, InvalidArgument.
        """
        groups = self.layout.groups
        return self.send(push_request(staging, samples, hyper, scale, timeout, groups=groups, **options))

    def exchange(
        self,
        staging: StagingBuffer | int,
        samples: int,
        hyper: Hyper | Sequence[Hyper],
        out: Flat,
        scale: float = 1.0,
        timeout: float | None = None,
        **options: Any,
    ) -> tuple[PushResult, int]:
        """A push and the pull after it in one pass: (the push's result, the version that `out` holds).

        out: as for `pull`. The other arguments: as for `push`. After an error `out` may hold parts of two
        versions.
        """
        groups = self.layout.groups
        request = push_request(staging, samples, hyper, scale, timeout, groups=groups, **options)
        return self.send_and_pull(request, out)

    def send(self, request: PushRequest) -> PushResult:
        """Push. Raises Fenced, PushRejected, TimedOut, NotFinite, InvalidArgument."""
        return self._call(native.push, self._checked(request))

    def send_and_pull(self, request: PushRequest, out: Flat) -> tuple[PushResult, int]:
        """Push and pull in one pass, as `exchange` does."""
        self._target("exchange", out)
        return self._call(native.exchange, self._checked(request), out)

    def _checked(self, request: PushRequest) -> PushRequest:
        """The request as the core takes it: checked against its sizes, with noise for this push alone.

        The noise belongs to the samples: a store that goes on from a state draws what the first would have.
        """
        check_request(request, self.layout)
        how = request.encoding
        if how.rounding != "stochastic":
            return request
        with self._lock:
            first, drawn = self._drawn = self._drawn[0], self._drawn[1] + 1
            mixed = (((how.seed * GOLDEN + (self.rank or 0)) * GOLDEN + first) * GOLDEN + drawn) * GOLDEN
        return replace(request, encoding=replace(how, seed=mixed % 2**64))

    def pull_encoded(
        self, codec: Codec | str, out: NDArray[np.uint8] | None = None
    ) -> tuple[NDArray[np.uint8], int]:
        """The parameters encoded from fp32: (uint8 for pyps.store.codec.decode_vector, version).

        Raises NotFinite if a parameter is not finite.
        """
        kind = as_codec(codec)
        size = encoded_vector_bytes(kind, self.layout)
        data = np.empty(size, np.uint8) if out is None else out
        if data.dtype != np.uint8 or data.shape != (size,) or not data.flags.c_contiguous:
            expected = f"contiguous uint8 [{size}]"
            raise InvalidArgument("pull", f"out: found {data.dtype} {list(data.shape)}; expected {expected}")
        return data, self._call(native.pull_encoded, kind, data)

    def should_continue(self, done: int, following: int) -> Advice:
        """What to do between two micro-batches: `done` samples are computed, `following` are in the next one.

        CONTINUE; PUSH_NOW what is computed, since the next micro-batch would come too late; or ABORT: the
        samples go back, the staging buffer is free, call start() again. Raises Fenced.
        """
        return self._call(native.should_continue, done, following)

    def set_max_samples(self, most: int) -> None:
        """Say how many samples fit this worker's memory at once, from the next claim on; 0: no limit."""
        self._call(native.set_max_samples, most)

    def set_data_set(self, data: DataSet) -> None:
        """Say which data set this worker reads. Raises InvalidArgument, naming the rank that has another."""
        self._call(native.set_data_set, data)

    def policy_params(self) -> PolicyParams:
        """The numbers of the store's policy."""
        return self._call(native.get_policy_params)

    def policy_needs(self) -> PolicyNeeds:
        """What the store's policy asks of its workers."""
        return native.policy_needs(self.layout.policy, self.policy_params())

    def snapshot(self, timeout: float | None = None) -> Snapshot:
        """Parameters, optimizer state and step counts of exactly one version, while pushes go on.

        Any process may take one; one that has not joined is an observer meanwhile. Waits for another reader's
        snapshot, and begins again if pushers had to cancel it, until the timeout (60 s): then
        Busy or SnapshotCancelled.
        """
        size = self.layout.flat_elements
        parameters = np.empty(size, np.float32)
        state = tuple(np.empty(size, np.float32) for _ in range(self.layout.states))
        steps = np.empty(self.layout.chunks, np.float64)
        version = self._snapshot_into(parameters, state, steps, timeout)
        return Snapshot(version, parameters, state, steps, self.views(parameters))

    def state(self, timeout: float | None = None) -> StoreState:
        """All that `create(state=)` needs to go on from the present version, while pushes go on.

        As `snapshot`, with residuals, samples still to be assigned, counters and what the policy keeps.
        Residuals that remote workers keep are not in it.
        """
        with self._participating():
            reading = (self.layout, self.tensors)
            return StoreState.of(self._retried(timeout, lambda left: self._call(read_state, *reading, left)))

    def views(self, flat: Flat) -> dict[str, Flat]:
        """Views of a pulled (or any flat) vector by tensor name, each in its shape."""
        return split(flat, self.tensors)

    def status(self) -> Status:
        return self._observe(native.get_status)

    def members(self) -> list[Member]:
        """Every participant slot that was ever used, in slot order."""
        return [m for m in self._observe(native.get_members, self.layout.max_participants) if m.id]

    def ranks(self) -> list[RankCounters]:
        """What each rank has done, in rank order."""
        return self._observe(native.get_ranks, self.status().ranks)

    def costs(self) -> list[RankCost]:
        """What each rank's steps cost, in rank order."""
        return self._observe(planning.get_costs, self.status().ranks)

    def set_cost_model(self, model: CostModel) -> None:
        """Say what this worker's steps are expected to cost, for a re-plan before they are measured."""
        self._call(planning.set_cost_model, model)

    def hyper(self) -> list[Hyper | None]:
        """The constants in force: of the last step of each group; None: no step yet, or an averaged group."""
        return self._observe(native.get_hyper, self.layout.groups)

    def journal(self, path: str | os.PathLike[str] | None) -> None:
        """From now on append every decision taken through this handle to a file, which all of a run's share;
        None: no longer. `pyps.simulate.replay` decides them again. Before `join`, or that event is missing.
        """
        self._call(native.journal, None if path is None else os.fspath(path))

    def replan(self, batches: Sequence[int], plan: int | None = None) -> None:
        """Change the planned batch of every rank, from the next claims on; a rank with 0 rests.

        plan: of the status that this was decided on; None: any. Raises PlanChanged if there was another
        re-plan since, InvalidArgument unless there is one batch for each rank.
        """
        self._call(planning.replan, batches, plan)

    def set_schedule(self, schedule: TurnSchedule) -> None:
        """Set the order, the gaps and the planned period of a policy's turns, from the next cycle on.

        Gaps hold while the measured period is within 5 % of the planned one, else they follow the measured
        one; the order always holds. The first turn comes when every rank has joined. Raises InvalidArgument
        under a policy without turns, or if there is not one turn for each rank.
        """
        with self._participating():
            self._call(native.set_schedule, schedule)

    def wait(self, sequence: int, timeout: float | None = None) -> None:
        """Sleep until the view is later than `sequence` (see `status`); None: an hour. Raises TimedOut."""
        self._call(native.wait, sequence, native.timeout_seconds(timeout))

    def _snapshot_into(self, flat: Flat, state: tuple[Flat, ...], steps: Any, timeout: float | None) -> int:
        with self._participating():
            return self._retried(timeout, lambda left: self._call(native.snapshot, flat, state, steps, left))

    def _retried(self, timeout: float | None, read: Callable[[float], T]) -> T:
        """Read with the time left, again if there is another reader or pushers cancelled the snapshot."""
        deadline = time.monotonic() + (60.0 if timeout is None else timeout)
        while True:
            sequence = self.status().sequence
            left = max(0.0, deadline - time.monotonic())
            try:
                return read(left)
            except (Busy, SnapshotCancelled) as error:
                left = deadline - time.monotonic()
                if left <= 0.0:
                    raise
                if isinstance(error, Busy):
                    self.wait(sequence, left)  # the other reader's end is an event of the view

    @contextmanager
    def _participating(self) -> Iterator[None]:
        """Reading needs a participant's place: an observer's, for as long as it takes, if there is no
        other.
        """
        if self.rank is not None:
            yield
            return
        self.join(role=Role.OBSERVER)
        try:
            yield
        finally:
            self.leave()

    def _retire(self) -> None:
        for staging in self._staging_buffers.values():
            staging.flat.flags.writeable = False
        self._staging_buffers.clear()
        self.rank = None

    @overload
    def _call(self, function: Callable[[native.Pointer], T]) -> T: ...
    @overload
    def _call(self, function: Callable[..., T], *arguments: Any) -> T: ...
    def _call(self, function: Callable[..., T], *arguments: Any) -> T:
        return self._locked([self._lock], function, arguments)

    def _observe(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call what only looks at the store: while another thread's call waits, too."""
        return self._locked([self._observing], function, arguments)

    def _locked(self, locks: Sequence[Any], function: Callable[..., T], arguments: tuple[Any, ...]) -> T:
        what = function.__name__.removeprefix("get_")
        if os.getpid() != self._pid:  # its locks may be held for ever
            raise Forked(what, f"opened by process {self._pid}, used by its child {os.getpid()}")
        with ExitStack() as held:
            for lock in locks:
                held.enter_context(lock)
            if self._pointer is None:
                raise StoreClosed(what, "the store is closed")
            return self._run(function, *arguments)

    def _run(self, function: Callable[..., T], *arguments: Any) -> T:
        return function(self._pointer, *arguments)

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"store {self.name!r}: a handle cannot be copied; open the store again")
