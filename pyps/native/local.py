"""A store on this machine: the verbs of pyps.store.backend on a mapped segment."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from pyps.errors import Forked, SegmentNotFound, StoreError, TimedOut, WaitInterrupted
from pyps.formats.plan import TurnSchedule
from pyps.native import (
    AVERAGED,
    NANOSECOND,
    Pointer,
    abi_version,
    c_ranges,
    check,
    decode,
    encoded_bytes,
    fill_data_set,
    hyper_array,
    hyper_values,
    policy_needs,
    push_args,
    push_result,
    raised,
    segment_name,
    struct_values,
    turn_array,
    u32_array,
    unsigned,
)
from pyps.native.compiled import ffi, lib
from pyps.native.create import create
from pyps.native.decisions import Advice, PolicyParams
from pyps.native.ranges import Ranges, Visitor
from pyps.native.state import FlatState, NewVector, StoreState, new_vector, read_state
from pyps.native.status import Member, MemberState, PushCounts, Status, WaitKind, rank_cost
from pyps.native.transfer import ArrivalCallback, FinishTransfer, Transferred, TransferRequest, skipping
from pyps.native.values import (
    Claim,
    Codec,
    Config,
    CostModel,
    DataSet,
    Flat,
    Hyper,
    Layout,
    Optimizer,
    PushRequest,
    PushResult,
    RankCost,
    Role,
    Tensor,
    Ticket,
    Traffic,
)
from pyps.step.transfer import Transfers, Verb

ANY_PLAN = GIVEN_LAST = 2**64 - 1
ARRIVAL_ELEMENTS = 1 << 20  # of an exchange's copy that are told at once: 4 MiB, at most 0.4 ms of a bus


class Mapping:
    """A part of a segment as NumPy sees it; keeps the segment mapped as long as any array needs it."""

    def __init__(self, store: Pointer, address: int, elements: int, kind: type[np.generic]) -> None:
        self.store = store
        data = {"shape": (elements,), "typestr": np.dtype(kind).str, "data": (address, False)}
        self.__array_interface__ = {**data, "version": 3}


class LocalBackend:
    """A segment that this process has mapped; see pyps.store.backend.Backend.

    Not thread-safe, but what only looks (status, members, ranks, costs, hyper) may be called at any time.
    """

    servers = 0
    undone = 0

    def __init__(self, pointer: Pointer, *, removes: bool = False) -> None:
        """removes: close() removes the segment's name."""
        self.pointer = pointer
        self.traffic = Traffic()
        self._removes = removes
        self._views: list[weakref.ref[Mapping]] = []
        self._transfers = Transfers()
        self._codes: dict[Codec, NDArray[np.uint8]] = {}  # of encoded pulls
        self._hyper: tuple[Hyper, ...] = ()  # of the last push
        self._constants = hyper_array(())
        self.layout = self._layout()
        self.tensors = tuple(self._tensor(k) for k in range(self.layout.tensors))
        c = ffi.new("pyps_policy_params *")
        check("policy_params", lib.pyps_get_policy_params(pointer, c))
        self.policy_params = PolicyParams(**struct_values(PolicyParams, c))
        self.policy_needs = policy_needs(self.layout.policy, self.policy_params)

    @classmethod
    def open(cls, name: str) -> Self:
        """Map an existing segment, trusting nothing in it."""
        out, what = ffi.new("pyps_store **"), f"open {name!r}"
        check(what, lib.pyps_open(segment_name(what, name), abi_version(), out))
        return cls(_owned(out))

    @classmethod
    def create(cls, name: str, config: Config, state: StoreState | None = None, keep: bool = True) -> Self:
        """Make a segment, and map it. keep: its name stays after close()."""
        return cls(_owned(create(name, config, state)), removes=not keep)

    def remove(self) -> None:
        """Remove the segment's name, unless it is another segment's by now."""
        with suppress(SegmentNotFound, Forked):
            check("remove", lib.pyps_remove(self.pointer))

    def close(self) -> None:
        if self._removes:
            self.remove()
        if any(view() for view in self._views):
            with suppress(StoreError):
                self.leave()  # unmapped when the last view dies
        else:
            ffi.release(self.pointer)

    def _layout(self) -> Layout:
        c = ffi.new("pyps_layout *")
        check("layout", lib.pyps_get_layout(self.pointer, c))
        values = struct_values(Layout, c)
        return Layout(**{**values, "optimizer": Optimizer(c.optimizer), "master": Codec(c.master)})

    def _tensor(self, index: int) -> Tensor:
        c = ffi.new("pyps_tensor *")
        check(f"tensor {index}", lib.pyps_get_tensor(self.pointer, index, c))
        shape = tuple(int(c.shape[k]) for k in range(c.ndim))
        return Tensor(ffi.string(c.name).decode(), shape, c.group, c.offset, c.elements, c.kind == AVERAGED)

    # Taking part.

    def join(self, role: Role, rank: int) -> int:
        out = ffi.new("int *")
        what = f"join as rank {rank}" if rank >= 0 else "join"
        check(what, lib.pyps_join(self.pointer, int(role), rank, out))
        return int(out[0])

    def leave(self) -> None:
        check("leave", lib.pyps_leave(self.pointer))

    def rejoin(self) -> None:
        self._transfers.begin_again()
        check("rejoin", lib.pyps_rejoin(self.pointer))

    def reap(self) -> int:
        dead = ffi.new("uint32_t *")
        check("reap", lib.pyps_reap(self.pointer, dead))
        return int(dead[0])

    # Claims.

    def start(self, timeout: float) -> Claim:
        self._transfers.begin_again()
        c = ffi.new("pyps_claim *")
        check("start", lib.pyps_start(self.pointer, timeout, c))
        return Claim(c.first, c.count, c.batch, c.round, c.plan, c.wait_nanoseconds * NANOSECOND, c.version)

    def start_ahead(self, after: int | None = None) -> Claim:
        c = ffi.new("pyps_claim *")
        check("start_ahead", lib.pyps_start_ahead(self.pointer, GIVEN_LAST if after is None else after, c))
        return Claim(c.first, c.count, c.batch, c.round, c.plan, 0.0, c.version)

    def should_continue(self, done: int, following: int) -> Advice:
        advice = ffi.new("int *")
        check("should_continue", lib.pyps_should_continue(self.pointer, done, following, advice))
        return Advice(advice[0])

    def await_turn(self, timeout: float) -> None:
        check("await_turn", lib.pyps_await_turn(self.pointer, timeout))

    def set_max_samples(self, most: int) -> None:
        what = "set_max_samples"
        check(what, lib.pyps_set_max_samples(self.pointer, unsigned(what, "samples", most, 32)))

    def set_data_set(self, data: DataSet) -> None:
        c = ffi.new("pyps_data_set *")
        fill_data_set("set_data_set", c, data)
        check("set_data_set", lib.pyps_set_data_set(self.pointer, c))

    def set_cost_model(self, model: CostModel) -> None:
        c = ffi.new("pyps_cost_model *")
        c.size = ffi.sizeof("pyps_cost_model")
        c.fixed_seconds, c.sample_seconds = model.fixed_seconds, model.sample_seconds
        c.least_seconds = model.least_seconds
        c.max_batch = unsigned("set_cost_model", "max_batch", model.max_batch, 32)
        check("set_cost_model", lib.pyps_set_cost_model(self.pointer, c))

    # Parameters.

    def pull(self, out: Flat, ranges: Ranges | None = None, codec: Codec = Codec.F32) -> int:
        if codec is not Codec.F32:
            return self._pull_by_codes(codec, out)
        version, to = ffi.new("uint64_t *"), ffi.from_buffer("float[]", out, require_writable=True)
        if ranges is None:
            check("pull", lib.pyps_pull(self.pointer, to, version))
        else:
            check("pull", lib.pyps_pull_ranges(self.pointer, *c_ranges(ranges), to, version))
        return int(version[0])

    def pull_encoded(self, codec: Codec, out: NDArray[np.uint8]) -> int:
        version = ffi.new("uint64_t *")
        data = ffi.from_buffer("char[]", out, require_writable=True)
        check("pull", lib.pyps_pull_encoded(self.pointer, codec, data, out.size, version))
        return int(version[0])

    def read(self, visit: Visitor, ranges: Ranges | None, timeout: float) -> int:
        version, handle = ffi.new("uint64_t *"), ffi.new_handle((self.pointer, visit))
        show = lib.pyps_python_visit
        rc = lib.pyps_read(self.pointer, *c_ranges(ranges), show, handle, timeout, version)
        if rc > 0:
            raise raised.errors.pop()
        check("read", rc)
        return int(version[0])

    def snapshot(self, out: Flat, state: Sequence[Flat], steps: NDArray[np.float64], timeout: float) -> int:
        keep = [ffi.from_buffer("float[]", array) for array in state]
        states = ffi.new("float *[]", keep) if keep else ffi.NULL
        version = ffi.new("uint64_t *")
        c_out, c_steps = ffi.from_buffer("float[]", out), ffi.from_buffer("double[]", steps)
        check("snapshot", lib.pyps_snapshot(self.pointer, c_out, states, c_steps, timeout, version))
        return int(version[0])

    def state(self, timeout: float) -> FlatState:
        return self.state_in(timeout, new_vector)

    def state_in(self, timeout: float, new: NewVector) -> FlatState:
        """The state in vectors whose memory `new` gives."""
        return read_state(self.pointer, self.layout, self.tensors, timeout, new)

    # Gradients.

    def stage(self, timeout: float) -> int:
        staging = ffi.new("uint32_t *")
        check("stage", lib.pyps_stage(self.pointer, timeout, staging))
        return int(staging[0])

    def unstage(self, staging: int) -> None:
        check("unstage", lib.pyps_unstage(self.pointer, unsigned("unstage", "buffer", staging, 32)))

    def staging(self, staging: int) -> Flat:
        found = lib.pyps_staging(self.pointer, unsigned("staging", "buffer", staging, 32))
        return self._view(found, self.layout.flat_elements, np.float32)

    def staging_codes(self, staging: int, size: int) -> NDArray[np.uint8]:
        """A zero-copy array over a staging buffer's codes, `size` bytes."""
        number = unsigned("staging", "buffer", staging, 32)
        return self._view(lib.pyps_staging_codes(self.pointer, number, size), size, np.uint8)

    def _view(self, found: Any, elements: int, kind: type[np.generic]) -> NDArray[Any]:
        if found == ffi.NULL:
            check("staging", lib.pyps_error_code())
        mapping = Mapping(self.pointer, int(ffi.cast("uintptr_t", found)), elements, kind)
        self._views = [view for view in self._views if view()] + [weakref.ref(mapping)]
        return np.asarray(mapping)

    def push(self, request: PushRequest) -> PushResult:
        """Push; for what makes a transfer of its own of it."""
        c, keep = self._push_args("push", request)
        r = ffi.new("pyps_push_result *")
        _check_push("push", lib.pyps_push(self.pointer, c, r), r)
        del keep
        return push_result(r)

    def exchange(
        self, request: PushRequest, out: Flat, arrived: ArrivalCallback | None = None
    ) -> tuple[PushResult, int]:
        """Push and pull in one pass: the push's result, and the version that `out` holds."""
        c, keep = self._push_args("exchange", request)
        r, version = ffi.new("pyps_push_result *"), ffi.new("uint64_t *")
        to = ffi.from_buffer("float[]", out, require_writable=True)
        if arrived is None:
            rc = lib.pyps_exchange(self.pointer, c, to, r, version)
        else:
            tell, handle = lib.pyps_python_arrived, ffi.new_handle(arrived)
            rc = lib.pyps_exchange_arriving(self.pointer, c, to, ARRIVAL_ELEMENTS, tell, handle, r, version)
        if rc > 0:
            raise raised.errors.pop()
        _check_push("exchange", rc, r)
        del keep
        return push_result(r), int(version[0])

    def _push_args(self, what: str, request: PushRequest) -> tuple[Any, Any]:
        """The C arguments, and what must live as long as they. Codes that lie elsewhere are copied."""
        if request.encoded and request.gradient is not None:
            place = self.staging_codes(request.staging, request.gradient.size)
            if place.ctypes.data != request.gradient.ctypes.data:
                place[:] = request.gradient
        if request.hyper != self._hyper:
            self._hyper, self._constants = request.hyper, hyper_array(request.hyper)
        return push_args(what, request, self._constants)

    def begin_transfer(self, request: TransferRequest[PushRequest]) -> FinishTransfer:
        return partial(self._transfer, request)

    def _transfer(
        self, request: TransferRequest[PushRequest], out: Flat, arrived: ArrivalCallback | None = None
    ) -> Transferred:
        push, codec = request.push, request.codec

        def exchange() -> tuple[PushResult, int | None]:
            return (self.push(push), None) if codec is not Codec.F32 else self.exchange(push, out, arrived)

        return self._transfers.run(
            request.ask,
            self,
            {
                Verb.PUSH: lambda: self.push(push),
                Verb.EXCHANGE: exchange,
                Verb.SKIP: lambda: self.push(skipping(push)),
                Verb.PULL: lambda: self.pull(out, None, codec),
            },
        )

    def _pull_by_codes(self, codec: Codec, out: Flat) -> int:
        trained, averaged = self.layout.trained_elements, 4 * self.layout.averaged_elements
        if (codes := self._codes.get(codec)) is None:
            codes = self._codes[codec] = np.empty(encoded_bytes(codec, trained) + averaged, np.uint8)
        version = self.pull_encoded(codec, codes)
        decode(codec, codes[: codes.size - averaged], out[:trained])
        out[trained:].view(np.uint8)[:] = codes[codes.size - averaged :]
        return version

    def set_threads(self, threads: int) -> int:
        what, found = "set_threads", ffi.new("uint32_t *")
        check(what, lib.pyps_set_threads(self.pointer, unsigned(what, "threads", threads, 32), found))
        return int(found[0])

    def keep_residual(self, start: Flat | None, keep: Callable[[int, Flat], None]) -> None:
        """The segment itself keeps what codes do not carry."""

    # Looking.

    def status(self) -> Status:
        c = ffi.new("pyps_status *")
        check("status", lib.pyps_get_status(self.pointer, c))
        flags = {"all_joined": bool(c.all_joined), "scheduled": bool(c.scheduled)}
        return Status(**{**struct_values(Status, c), **flags})

    def members(self) -> list[Member]:
        capacity = self.layout.max_participants
        c, count = ffi.new("pyps_member[]", capacity), ffi.new("uint32_t *")
        check("members", lib.pyps_get_members(self.pointer, c, capacity, count))
        return [_member(c[k]) for k in range(min(count[0], capacity)) if c[k].id]

    def ranks(self) -> list[PushCounts]:
        ranks = self.status().ranks
        c = ffi.new("pyps_rank[]", ranks)
        check("ranks", lib.pyps_get_ranks(self.pointer, c, ranks))
        return [PushCounts(**struct_values(PushCounts, c[k])) for k in range(ranks)]

    def costs(self) -> list[RankCost]:
        ranks = self.status().ranks
        c = ffi.new("pyps_rank_cost[]", ranks)
        check("costs", lib.pyps_get_costs(self.pointer, c, ranks))
        return [rank_cost(c[k]) for k in range(ranks)]

    def hyper(self) -> list[Hyper | None]:
        c = ffi.new("pyps_hyper[]", self.layout.groups)
        check("hyper", lib.pyps_get_hyper(self.pointer, c, self.layout.groups))
        return hyper_values(c, self.layout.groups)

    def wait(self, sequence: int, timeout: float) -> None:
        check("wait", lib.pyps_wait(self.pointer, unsigned("wait", "sequence", sequence, 64), timeout))

    def ticket(self, version: int) -> Ticket:
        """Return what a push of the last versions was given. Raises InvalidArgument for others, and for
        rounds.
        """
        c = ffi.new("pyps_ticket *")
        check("ticket", lib.pyps_get_ticket(self.pointer, unsigned("ticket", "version", version, 64), c))
        return Ticket(c.version, (c.tag[0], c.tag[1]), c.samples, c.scale, c.share, c.part)

    # Planning.

    def replan(self, batches: Sequence[int], plan: int | None) -> None:
        present = ANY_PLAN if plan is None else unsigned("replan", "plan", plan, 63)
        array = u32_array("replan", "batches", batches)
        check("replan", lib.pyps_replan(self.pointer, array, len(batches), present))

    def set_schedule(self, schedule: TurnSchedule) -> None:
        turns, count = turn_array(schedule), len(schedule.order)
        check("set_schedule", lib.pyps_set_schedule(self.pointer, turns, count, schedule.period_seconds))

    def journal(self, path: str | None) -> None:
        check("journal", lib.pyps_journal(self.pointer, ffi.NULL if path is None else os.fsencode(path)))


def _check_push(what: str, rc: int, r: Any) -> None:
    """Check as `check` does; a wait for the round that did not end says what is staged."""
    try:
        check(what, rc)
    except (TimedOut, WaitInterrupted) as error:
        error.staged = push_result(r) if r.admitted_nanoseconds else None
        raise


def _owned(out: Any) -> Pointer:
    return Pointer(ffi.gc(out[0], lib.pyps_close))


def _member(c: Any) -> Member:
    rank = c.rank if c.rank >= 0 else None
    enums = {"state": MemberState(c.state), "role": Role(c.role), "waits_for": WaitKind(c.waits_for)}
    return Member(**{**struct_values(Member, c), **enums, "rank": rank, "staged": bool(c.staged)})


@ffi.def_extern(error=1)
def pyps_python_arrived(context: Any, first: int, count: int) -> int:
    try:
        ffi.from_handle(context)(first, count)
    except BaseException as error:
        raised.errors.append(error)
        return 1
    return 0


@ffi.def_extern(error=1)
def pyps_python_visit(context: Any, first: int, values: Any, count: int) -> int:
    try:
        store, visit = ffi.from_handle(context)
        shown = np.asarray(Mapping(store, int(ffi.cast("uintptr_t", values)), count, np.float32))
        shown.flags.writeable = False
        visit(first, shown)
    except BaseException as error:
        raised.errors.append(error)
        return 1
    return 0
