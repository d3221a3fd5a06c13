"""pyps.Store: one named segment as a Python object, with views instead of copies."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, Self, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from pyps import native
from pyps.errors import Busy, InvalidArgument, SnapshotCancelled
from pyps.formats.plan import TurnSchedule
from pyps.native.decisions import Advice
from pyps.native.local import LocalBackend
from pyps.native.ranges import Packer, Ranges, Visitor, as_ranges, elements, row_ranges, tensor_ranges
from pyps.native.state import StoreState
from pyps.native.transfer import (
    NO_PARAMETERS,
    ArrivalCallback,
    Ask,
    FinishTransfer,
    Transferred,
    TransferRequest,
)
from pyps.native.values import (
    Agreement,
    Claim,
    Codec,
    Config,
    CostModel,
    DataSet,
    Flat,
    Hyper,
    Optimizer,
    PushRequest,
    PushResult,
    Role,
    Snapshot,
)
from pyps.store.backend import Backend
from pyps.store.codec import as_codec, encoded_vector_bytes
from pyps.store.creation import store_config
from pyps.store.handle import StoreHandle
from pyps.store.marks import check_whole
from pyps.store.policies import Policy, check_known
from pyps.store.staging import StagingBuffer, check_vector, exchanged, push_request

T = TypeVar("T")
JoinRole = Literal["worker", "observer", "new_worker"]
UNSAID = Agreement()
PUSH, EXCHANGE = Ask(pulls=False, alone=True), Ask(exchanges=True, alone=True)
Making = Callable[[str, Config, StoreState | None, bool], Backend]


class Store(StoreHandle):
    """A parameter store; make one with `create` or `open`, use it as a context manager.

    Errors: every method raises a StoreError whose class says what happened (pyps.errors), StoreClosed after
    close(), Forked in a forked child. Timeouts are in seconds; None means twice the policy's
    round_timeout_seconds, in which a late worker has been fenced.
    """

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
        master: Codec | str | None = None,
        state: StoreState | None = None,
        agreement: Agreement = UNSAID,
        chunk_params: int = 0,
        max_participants: int = 0,
        snapshot_spares: int = 0,
        staging_buffers: int = 0,
        keep: bool = False,
        make: Making = LocalBackend.create,
    ) -> Self:
        """Make a segment and open it. The creator's close() removes the segment's name, unless `keep`.

        tensors: name -> initial values (array or torch tensor of real numbers; kept as fp32). batches: the
        planned batch of each rank. optimizer: "sgd" (the default), "momentum", "adamw", "adam" or "adagrad".
        policy: a pyps.BSP, ASP, ..., or its text ("ssp:bound=4"). groups: name -> index of its parameter
        group (default: all 0). averaged: names of tensors, in groups after all others, of which a push
        brings values to average, not gradients. samples: sample positions to assign in all; 0: without end.
        master: how trained parameters are kept: "f32" (the default), or "bf16", in half the memory: rounded
        at random after each step, so that steps too small for bf16 count on average. All else stays fp32.
        state: what another store's `state()` gave, to go on from bit for bit; whatever is None is as there.
        Tensors, groups and optimizer must be those of the state; all else may differ. agreement: kept for
        the workers to compare. chunk_params (0: the
        state's), max_participants, snapshot_spares, staging_buffers (per worker): 0 takes the C core's
        default. make: gives the Backend; pyps.remote.create_store has others.
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
            master=master,
            agreement=agreement,
            chunk_params=chunk_params,
            max_participants=max_participants,
            snapshot_spares=snapshot_spares,
            staging_buffers=staging_buffers,
        )
        return cls(name, make(name, config, going_on, keep))

    @classmethod
    def open(cls, name: str) -> Self:
        """Open an existing segment, trusting nothing in it.

        Raises SegmentNotFound, NotReady, SegmentCorrupt, OtherABI, NotOurs, UnknownPolicy.
        """
        return cls(name, LocalBackend.open(name))

    def join(self, rank: int | None = None, role: Role | JoinRole = "worker") -> int:
        """Become a participant; the rank, -1 for an observer. None: the lowest rank that no live worker has.

        A dead worker's rank is inherited. A "new_worker" may have a rank beyond the planned ones, below
        max_participants: the store then has all ranks up to it, and it rests until `replan` gives it samples.
        Raises Busy if a live process has the rank, StoreFull, InvalidArgument for a part of a model over
        several servers.
        """
        kind = Role[role.upper()] if isinstance(role, str) else role
        if kind is not Role.OBSERVER:
            check_known(self.layout.policy, self.policy_params())
            check_whole(self.tensors)
        with self._calls as backend, self._looks:
            self.rank = backend.join(kind, -1 if rank is None else rank)
            return self.rank

    def leave(self) -> None:
        """Stop participating: claimed samples go back, staging buffers are given up."""
        with self._calls as backend, self._looks:
            backend.leave()
            self._retire()

    def rejoin(self) -> None:
        """After Fenced: become active again with the same rank. Staging buffers must be staged anew."""
        with self._calls as backend:
            backend.rejoin()
            self._give_back(backend)

    def reap(self) -> int:
        """Remove dead participants and complete their admitted pushes; how many there were."""
        with self._calls as backend:
            return backend.reap()

    def start(self, timeout: float | None = None) -> Claim:
        """Claim the next samples, waiting as the policy says. Raises Ended, Fenced, TimedOut."""
        with self._calls as backend:
            claim = backend.start(native.timeout_seconds(timeout))
            self._give_back(backend)
            self._drawn = claim.first, 0
            return claim

    def start_ahead(self, after: Claim | None = None) -> Claim | None:
        """With a step under way, claim the samples of the next one: pushes belong to claims in order.

        For a worker that computes while its gradients travel. Never waits; None where there is nothing to
        claim now: then push first, and start(). after: the last claim that you have, so that a call made
        again after a signal skips none; None: the last that was given. Raises Fenced, InvalidArgument under
        a policy that waits.
        """
        with self._calls as backend:
            claim = backend.start_ahead(None if after is None else after.first)
            if not claim.count:
                return None
            self._drawn = claim.first, 0
            return claim

    def pull(
        self,
        out: Flat | None = None,
        *,
        strict: bool = False,
        ranges: Any = None,
        codec: Codec | str = Codec.F32,
    ) -> tuple[Flat, int]:
        """Copy the parameters to `out` (fp32 [flat_elements], contiguous; new if None): (flat, version).

        Each chunk is whole; while others push, chunks may be of different versions, the oldest of which is
        reported. strict=True copies one single version (see `snapshot`). ranges: of parts of the flat vector
        alone (see `ranges`), whose values `out` holds one after the other; no other part is read. codec: in
        which all parameters travel, unless strict: they are those that it carries.
        """
        if ranges is not None:
            return self._pull_ranges(as_ranges("pull", ranges), out, strict)
        out = np.empty(self.layout.flat_elements, np.float32) if out is None else out
        self._target("pull", out, self.layout.flat_elements)
        if not strict:
            with self._calls as backend:
                return out, backend.pull(out, None, as_codec(codec))
        return out, self._snapshot_into(out, (), np.empty(self.layout.chunks, np.float64), None)

    def _pull_ranges(self, parts: Ranges, out: Flat | None, strict: bool) -> tuple[Flat, int]:
        size = elements("pull", parts, self.layout.flat_elements)
        out = np.empty(size, np.float32) if out is None else out
        self._target("pull", out, size)
        if not strict:
            with self._calls as backend:
                return out, backend.pull(out, parts)
        take = Packer(parts, out)
        return out, self._retried(None, lambda backend, left: backend.read(take, parts, left))

    def ranges(self, names: str | Iterable[str], rows: Any = None) -> Ranges:
        """Which parts of the flat vector tensors are: uint64 [n, 2], the first element and the count of each.

        For `pull`, `push` and `read`; the parts come in the order of the flat vector. rows: of one tensor, in
        ascending order. Raises InvalidArgument.
        """
        if rows is None:
            return tensor_ranges(self.tensors, [names] if isinstance(names, str) else names)
        if not isinstance(names, str):
            raise InvalidArgument("ranges", f"rows: found with {names!r}; expected one tensor's name")
        return row_ranges(self.tensors, names, rows)

    def read(self, visit: Visitor, ranges: Any = None, timeout: float | None = None) -> int:
        """Show one version's parameters where they are, without a copy, while pushes go on; the version.

        visit(first, values): called in ascending order with pieces of at most a chunk: an fp32 array, to be
        read until `visit` returns, and its place in the flat vector. It must not use this Store. ranges: as
        for `pull`; None: all. Raises SnapshotCancelled if `visit` took so long that pushers needed the
        memory, Busy, and what `visit` raises.
        """
        parts = None if ranges is None else as_ranges("read", ranges)
        with self._participating() as backend:
            return backend.read(visit, parts, native.timeout_seconds(timeout))

    def _target(self, what: str, out: Flat | NDArray[np.uint8], size: int, kind: Any = np.float32) -> None:
        check_vector(what, "out", out, size, kind)
        if not out.flags.writeable:
            raise InvalidArgument(what, "out: found a read-only array; expected one to write to")

    def stage(self, timeout: float | None = None) -> StagingBuffer:
        """A staging buffer of this worker that is free to be filled, contents undefined. Raises Fenced."""
        with self._calls as backend:
            return self.staging(backend.stage(native.timeout_seconds(timeout)))

    def unstage(self, staging: StagingBuffer | int) -> None:
        """Give back a staging buffer after a refused push. Raises InvalidArgument if it waits in a round."""
        with self._calls as backend:
            backend.unstage(staging if isinstance(staging, int) else staging.index)

    def staging(self, staging: int) -> StagingBuffer:
        """The zero-copy view of a staging buffer; it may only be written between stage() and push()."""
        with self._calls:
            if self.rank is None or self.rank < 0:
                raise InvalidArgument("staging", "not a worker; join as one first")
            if not 0 <= staging < (count := self.layout.staging_buffers):
                raise InvalidArgument("staging", f"found {staging}; expected 0 to {count - 1}")
            if staging not in self._staging_buffers:
                find = partial(self._staging_flat, staging)
                self._staging_buffers[staging] = StagingBuffer(staging, find, self.tensors)
            return self._staging_buffers[staging]

    def staging_codes(self, staging: int, size: int) -> NDArray[np.uint8]:
        """Room for a push's codes, uint8 [size], that it need not copy: of the staging buffer itself. A store
        over a link has none, and gets codes from any array.
        """
        with self._calls as backend:
            if isinstance(backend, LocalBackend):
                return backend.staging_codes(staging, size)
        return np.empty(size, np.uint8)

    def _staging_flat(self, staging: int) -> Flat:
        with self._calls as backend:
            return backend.staging(staging)

    def push(
        self,
        staging: StagingBuffer | int | None,
        samples: int,
        hyper: Hyper | Sequence[Hyper],
        scale: float = 1.0,
        timeout: float | None = None,
        **options: Any,
    ) -> PushResult:
        """Give the staged gradient, the mean over `samples` samples, and take the optimizer's step with it.

        staging: the buffer that `stage` gave; None: any, for a `gradient` that is given; after TimedOut it
        is kept. samples: 0 skips the step. hyper: one for all parameter groups, or one each. scale:
        multiplies the gradient. timeout: seconds. options: further fields of a PushRequest by name, among
        them `encoding` (an Encoding, or a codec's name), `gradient` (in place of the staging buffer's: fp32
        [flat_elements], or codes of that codec, uint8) and `ranges` (the parts that the gradient is of, as
        for `pull`; all other parameters and their optimizer states stay as they are). Raises Fenced,
        PushRejected, TimedOut, NotFinite, OutOfSpace, InvalidArgument.
        """
        if staging is None:
            if options.get("gradient") is None:
                raise InvalidArgument("push", "staging: found None without a gradient; expected one of both")
            with self._any_buffer(native.timeout_seconds(timeout)) as found:
                return self.push(found, samples, hyper, scale, timeout, **options)
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

        out: as for `pull`. The other arguments: as for `push`. After an error `out` may be of two versions.
        """
        groups = self.layout.groups
        request = push_request(staging, samples, hyper, scale, timeout, groups=groups, **options)
        return exchanged(*self.send_and_pull(request, out), lambda: self.pull(out)[1])

    def send(self, request: PushRequest) -> PushResult:
        """Push. Raises Fenced, PushRejected, TimedOut, NotFinite, InvalidArgument."""
        result = self._transfer(request, PUSH, NO_PARAMETERS).result
        assert result is not None
        return result

    def send_and_pull(
        self, request: PushRequest, out: Flat, arrived: ArrivalCallback | None = None
    ) -> tuple[PushResult, int | None]:
        """Push and pull in one pass: the push's result, and the version that `out` holds; None: the push
        counts, and a pull raised Fenced or NotFinite, as the next one will.

        arrived: called in this thread, meanwhile, with the first element and the count of further runs of
        `out` that are final; it must not use this Store.
        """
        self._target("exchange", out, self.layout.flat_elements)
        done = self._transfer(request, EXCHANGE, out, arrived)
        assert done.result is not None
        return done.result, done.version

    def _transfer(
        self, push: PushRequest, ask: Ask, out: Flat, arrived: ArrivalCallback | None = None
    ) -> Transferred:
        with self._calls as backend:
            return backend.begin_transfer(TransferRequest(self._checked(push), ask=ask))(out, arrived)

    def begin_transfer(self, request: TransferRequest[PushRequest]) -> FinishTransfer:
        """Begin a step's transfer as Backend.begin_transfer does; another thread may finish it meanwhile."""
        checked = msgspec.structs.replace(request, push=self._checked(request.push))
        with self._calls as backend:
            finish = backend.begin_transfer(checked)
        return finish if self.servers else partial(self._finish_here, finish)

    def _finish_here(
        self, finish: FinishTransfer, out: Flat, arrived: ArrivalCallback | None = None
    ) -> Transferred:
        with self._calls:
            return finish(out, arrived)

    def set_threads(self, threads: int) -> int:
        """Let up to `threads` threads of this process, the caller's among them, share the chunks of a
        worker's pushes, pulls and exchanges; how many there are now. They last until `leave`, and come again
        when it joins. The bits are the same with any number; small models and stores over a link use one.

        Each but the caller's takes one of max_participants, of those past the ranks and 8 more, so there may
        be fewer than asked for. Raises InvalidArgument unless threads is 1 to 64.
        """
        with self._calls as backend:
            return backend.set_threads(threads) if isinstance(backend, LocalBackend) else 1

    def keep_residual(self, start: Flat | None, keep: Callable[[int, Flat], None]) -> None:
        """Over a link, what the codes of a push do not carry is this process's alone.

        start: fp32 [trained_elements], to begin with; None: nothing. keep: gets the staging buffer of each
        push, and that, before it is sent. Raises InvalidArgument for a residual of another size.
        """
        with self._calls as backend:
            backend.keep_residual(start, keep)

    def pull_encoded(
        self, codec: Codec | str, out: NDArray[np.uint8] | None = None
    ) -> tuple[NDArray[np.uint8], int]:
        """The parameters encoded from fp32: (uint8 for pyps.store.codec.decode_vector, version).

        Raises NotFinite if a parameter is not finite.
        """
        kind = as_codec(codec)
        size = encoded_vector_bytes(kind, self.layout)
        data = np.empty(size, np.uint8) if out is None else out
        self._target("pull", data, size, np.uint8)
        with self._calls as backend:
            return data, backend.pull_encoded(kind, data)

    def should_continue(self, done: int, following: int) -> Advice:
        """Say what to do between micro-batches: `done` samples are computed, the next one has `following`.

        CONTINUE; PUSH_NOW what is computed, since the next micro-batch would come too late; or ABORT: the
        samples go back, the staging buffer is free, call start() again. Raises Fenced.
        """
        with self._calls as backend:
            return backend.should_continue(done, following)

    def await_turn(self, timeout: float | None = None) -> None:
        """Under a policy with turns, wait until this worker's push may be sent; else nothing.

        A push waits for its turn in any case, but over a link its gradient travels before that; after this
        call it has the link for itself. Other threads may use a store that is elsewhere meanwhile. Raises
        Fenced, TimedOut.
        """
        with nullcontext(self.backend) if self.servers else self._calls as backend:
            backend.await_turn(native.timeout_seconds(timeout))

    def set_max_samples(self, most: int) -> None:
        """Say how many samples fit this worker's memory at once, from the next claim on; 0: no limit."""
        with self._calls as backend:
            backend.set_max_samples(most)

    def set_data_set(self, data: DataSet) -> None:
        """Say which data set this worker reads. Raises InvalidArgument, naming the rank that has another."""
        with self._calls as backend:
            backend.set_data_set(data)

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
        return StoreState.of(self._retried(timeout, lambda backend, left: backend.state(left)))

    def set_cost_model(self, model: CostModel) -> None:
        """Say what this worker's steps are expected to cost, for a re-plan before they are measured."""
        with self._calls as backend:
            backend.set_cost_model(model)

    def journal(self, path: str | os.PathLike[str] | None) -> None:
        """From now on append every decision taken through this handle to a file, which all of a run's share;
        None: no longer. `pyps.simulate.replay` decides them again. Before `join`, or that event is missing.
        """
        with self._calls as backend:
            backend.journal(None if path is None else os.fspath(path))

    def replan(self, batches: Sequence[int], plan: int | None = None) -> None:
        """Change the planned batch of every rank, from the next claims on; a rank with 0 rests.

        plan: of the status that this was decided on; None: any. Raises PlanChanged if there was another
        re-plan since, InvalidArgument unless there is one batch for each rank.
        """
        with self._calls as backend:
            backend.replan(batches, plan)

    def set_schedule(self, schedule: TurnSchedule) -> None:
        """Set the order, the gaps and the planned period of a policy's turns, from the next cycle on.

        Gaps hold while the measured period is within 5 % of the planned one, else they follow the measured
        one; the order always holds. The first turn comes when every rank has joined. Raises InvalidArgument
        under a policy without turns, or if there is not one turn for each rank.
        """
        with self._participating() as backend:
            backend.set_schedule(schedule)

    def _snapshot_into(self, flat: Flat, state: tuple[Flat, ...], steps: Any, timeout: float | None) -> int:
        return self._retried(timeout, lambda backend, left: backend.snapshot(flat, state, steps, left))

    def _retried(self, timeout: float | None, read: Callable[[Backend, float], T]) -> T:
        """Read with the time left, again if there is another reader or pushers cancelled the snapshot."""
        deadline = time.monotonic() + (60.0 if timeout is None else timeout)
        with self._as_participant():
            while True:
                sequence = self.status().sequence
                left = max(0.0, deadline - time.monotonic())
                try:
                    with self._calls as backend:
                        return read(backend, left)
                except (Busy, SnapshotCancelled) as error:
                    left = deadline - time.monotonic()
                    if left <= 0.0:
                        raise
                    if isinstance(error, Busy):
                        self.wait(sequence, left)  # the other reader's end is an event of the view

    @contextmanager
    def _participating(self) -> Iterator[Backend]:
        with self._as_participant(), self._calls as backend:
            yield backend

    @contextmanager
    def _as_participant(self) -> Iterator[None]:
        """Reading needs a participant's place: an observer's, for as long as it takes, if there is no
        other. Calls of other threads wait for the end of that.
        """
        with self._calls:
            if self.rank is None:
                self.join(role=Role.OBSERVER)
                try:
                    yield
                finally:
                    self.leave()
                return
        yield
