"""This package alone imports pyps._native: C codes become exceptions here, C structs become values.

Everything above sees names, numbers, arrays and the dataclasses of pyps.native.values. A `Pointer` is
opaque; the C rules (one thread at a time, one process) are kept by pyps.Store, which holds it.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NewType, get_args

import numpy as np
from numpy.typing import NDArray

from pyps._native import ffi, lib
from pyps.errors import InvalidArgument, StoreError
from pyps.formats.turns import TurnSchedule
from pyps.native import interrupt
from pyps.native.values import (
    Advice,
    Claim,
    Codec,
    DataSet,
    EncodeCounts,
    Encoding,
    Flat,
    Hyper,
    Layout,
    NonFinite,
    Optimizer,
    PolicyNeeds,
    PolicyParams,
    PushRequest,
    PushResult,
    Replay,
    Role,
    Rounding,
    Tensor,
    Ticket,
)

NANOSECOND = 1e-9
MAX_COMPUTE_SECONDS = 1e9
AVERAGED = 1  # PYPS_AVERAGED
STORE_TIMEOUT = -1.0  # C: twice the store's round_timeout_seconds
raised: list[BaseException] = []  # by what C called back, until the call that it was in has returned
ERRORS = {kind.code: kind for kind in StoreError.__subclasses__()}

Pointer = NewType("Pointer", object)


def check(what: str, rc: int) -> None:
    """Raise the exception that belongs to a C return code, with the C core's message. 0 passes."""
    if rc == 0:
        raised.clear()
        return
    message = ffi.string(lib.pyps_error_message()).decode(errors="replace")
    code = ffi.string(lib.pyps_error_name(rc)).decode()
    if code == "PYPS_EINTR" and (reason := interrupt.reason()) is not None:
        raise reason
    cause = raised.pop() if raised else None
    raise ERRORS.get(code, StoreError)(what, message.removeprefix(f"{what}: ") or code) from cause


def abi_version() -> int:
    return lib.pyps_abi_version()


def isa() -> str:
    """The kernels in use: "scalar", "avx2", "avx512" or "neon" (PYPS_ISA overrides)."""
    return ffi.string(lib.pyps_isa()).decode()


def fill_policy_params(c: Any, params: PolicyParams) -> None:
    for field in fields(PolicyParams):
        setattr(c, field.name, getattr(params, field.name))


def get_policy_params(store: Pointer) -> PolicyParams:
    c = ffi.new("pyps_policy_params *")
    check("policy_params", lib.pyps_get_policy_params(store, c))
    return PolicyParams(**struct_values(PolicyParams, c))


def policy_needs(number: int, params: PolicyParams | None = None) -> PolicyNeeds:
    """What the policy of that number asks of a worker under these parameters; None: under any parameters.

    Raises UnknownPolicy for a number that the C core does not have.
    """
    c, given = ffi.new("pyps_policy_needs *"), ffi.NULL
    if params is not None:
        given = ffi.new("pyps_policy_params *")
        fill_policy_params(given, params)
    check("policy_needs", lib.pyps_get_policy_needs(unsigned("policy_needs", "number", number, 32), given, c))
    return PolicyNeeds(**{need: bool(value) for need, value in struct_values(PolicyNeeds, c).items()})


def open_segment(name: str) -> Pointer:
    """Map an existing segment."""
    out = ffi.new("pyps_store **")
    what = f"open {name!r}"
    check(what, lib.pyps_open(segment_name(what, name), out))
    return owned(out)


def close(store: Pointer) -> None:
    """Leave and unmap now; without it both happen when the last view of the segment is gone."""
    ffi.release(store)


def unlink(name: str, force: bool = False) -> None:
    """Remove a segment's name; Busy while any process has it open, unless forced."""
    what = f"unlink {name!r}"
    check(what, lib.pyps_unlink(segment_name(what, name), int(force)))


def remove(store: Pointer) -> None:
    """Remove the name of this store's segment; SegmentNotFound if it has none, or another segment has it."""
    check("remove", lib.pyps_remove(store))


def probe(name: str) -> int:
    """The segment's size in bytes if no process has it open; raises Busy if one does, or why it is not
    ours.
    """
    size = ffi.new("uint64_t *")
    what = f"probe {name!r}"
    check(what, lib.pyps_probe(segment_name(what, name), size))
    return int(size[0])


def get_layout(store: Pointer) -> Layout:
    c = ffi.new("pyps_layout *")
    check("layout", lib.pyps_get_layout(store, c))
    values = struct_values(Layout, c)
    return Layout(**{**values, "optimizer": Optimizer(c.optimizer), "master": Codec(c.master)})


def get_tensor(store: Pointer, index: int) -> Tensor:
    c = ffi.new("pyps_tensor *")
    check(f"tensor {index}", lib.pyps_get_tensor(store, index, c))
    shape = tuple(int(c.shape[k]) for k in range(c.ndim))
    return Tensor(ffi.string(c.name).decode(), shape, c.group, c.offset, c.elements, c.kind == AVERAGED)


def join(store: Pointer, role: Role, rank: int) -> int:
    out = ffi.new("int *")
    check(f"join as rank {rank}" if rank >= 0 else "join", lib.pyps_join(store, int(role), rank, out))
    return int(out[0])


def leave(store: Pointer) -> None:
    check("leave", lib.pyps_leave(store))


def rejoin(store: Pointer) -> None:
    check("rejoin", lib.pyps_rejoin(store))


def reap(store: Pointer) -> int:
    dead = ffi.new("uint32_t *")
    check("reap", lib.pyps_reap(store, dead))
    return int(dead[0])


def start(store: Pointer, timeout: float) -> Claim:
    c = ffi.new("pyps_claim *")
    check("start", lib.pyps_start(store, timeout, c))
    return Claim(c.first, c.count, c.batch, c.round, c.plan, c.wait_nanoseconds * NANOSECOND, c.version)


def start_ahead(store: Pointer) -> Claim:
    c = ffi.new("pyps_claim *")
    check("start_ahead", lib.pyps_start_ahead(store, c))
    return Claim(c.first, c.count, c.batch, c.round, c.plan, 0.0, c.version)


def pull(store: Pointer, flat: Flat) -> int:
    version = ffi.new("uint64_t *")
    check("pull", lib.pyps_pull(store, ffi.from_buffer("float[]", flat, require_writable=True), version))
    return int(version[0])


def stage(store: Pointer, timeout: float) -> int:
    staging = ffi.new("uint32_t *")
    check("stage", lib.pyps_stage(store, timeout, staging))
    return int(staging[0])


def unstage(store: Pointer, staging: int) -> None:
    check("unstage", lib.pyps_unstage(store, unsigned("unstage", "buffer", staging, 32)))


class Mapping:
    """A part of a segment as NumPy sees it; keeps the segment mapped as long as any array needs it."""

    def __init__(self, store: Pointer, address: int, elements: int, kind: type[np.generic]) -> None:
        self.store = store
        data = {"shape": (elements,), "typestr": np.dtype(kind).str, "data": (address, False)}
        self.__array_interface__ = {**data, "version": 3}


def staging(store: Pointer, staging: int, elements: int) -> tuple[Flat, weakref.ref[Mapping]]:
    """A zero-copy array over a staging buffer, and a reference that dies with the last array over it."""
    pointer = lib.pyps_staging(store, unsigned("staging", "buffer", staging, 32))
    if pointer == ffi.NULL:
        check("staging", lib.pyps_error_code())
    mapping = Mapping(store, int(ffi.cast("uintptr_t", pointer)), elements, np.float32)
    return np.asarray(mapping), weakref.ref(mapping)


def staging_codes(store: Pointer, staging: int, size: int) -> tuple[NDArray[np.uint8], weakref.ref[Mapping]]:
    """The same for the staging buffer's codes, `size` bytes."""
    pointer = lib.pyps_staging_codes(store, unsigned("staging", "buffer", staging, 32), size)
    if pointer == ffi.NULL:
        check("staging", lib.pyps_error_code())
    mapping = Mapping(store, int(ffi.cast("uintptr_t", pointer)), size, np.uint8)
    return np.asarray(mapping), weakref.ref(mapping)


def push(store: Pointer, request: PushRequest) -> PushResult:
    c, keep = _push_args("push", store, request)
    r = ffi.new("pyps_push_result *")
    check("push", lib.pyps_push(store, c, r))
    del keep
    return _push_result(r)


def should_continue(store: Pointer, done: int, following: int) -> Advice:
    advice = ffi.new("int *")
    check("should_continue", lib.pyps_should_continue(store, done, following, advice))
    return Advice(advice[0])


def set_max_samples(store: Pointer, samples: int) -> None:
    check(
        "set_max_samples",
        lib.pyps_set_max_samples(store, unsigned("set_max_samples", "samples", samples, 32)),
    )


def set_data_set(store: Pointer, data: DataSet) -> None:
    c = ffi.new("pyps_data_set *")
    fill_data_set("set_data_set", c, data)
    check("set_data_set", lib.pyps_set_data_set(store, c))


def fill_data_set(what: str, c: Any, data: DataSet) -> None:
    c.size = ffi.sizeof("pyps_data_set")
    c.length, c.digest = (unsigned(what, name, getattr(data, name), 64) for name in ("length", "digest"))
    c.mean, c.tolerance = data.mean, data.tolerance


def exchange(store: Pointer, request: PushRequest, flat: Flat) -> tuple[PushResult, int]:
    c, keep = _push_args("exchange", store, request)
    r, version = ffi.new("pyps_push_result *"), ffi.new("uint64_t *")
    to = ffi.from_buffer("float[]", flat, require_writable=True)
    check("exchange", lib.pyps_exchange(store, c, to, r, version))
    del keep
    return _push_result(r), int(version[0])


def _push_result(r: Any) -> PushResult:
    wait = r.wait_nanoseconds * NANOSECOND
    at = r.admitted_nanoseconds * NANOSECOND
    return PushResult(
        r.version,
        r.staleness,
        r.sources,
        r.samples,
        wait,
        r.nonfinite,
        r.blocks_skipped,
        at,
        r.rank_pushes,
        r.saved_pushes,
    )


def _push_args(what: str, store: Pointer, push: PushRequest) -> tuple[Any, Any]:
    """The C arguments, and what must live as long as they. Codes are copied to the staging buffer."""
    if push.encoded and push.gradient is not None:
        staging_codes(store, push.staging, push.gradient.size)[0][:] = push.gradient
    c, hyper = ffi.new("pyps_push_args *"), push.hyper
    constants = hyper_array(hyper)
    c.size, c.staging = ffi.sizeof("pyps_push_args"), unsigned(what, "staging", push.staging, 32)
    c.samples = unsigned(what, "samples", push.samples, 32)
    c.scale, c.timeout_seconds, c.hyper = push.scale, timeout_seconds(push.timeout), constants
    gradient = ffi.NULL
    if push.gradient is not None and not push.encoded:
        gradient = ffi.from_buffer("float[]", push.gradient)
    c.gradient, c.encoded = gradient, int(push.encoded)
    base_params = ffi.NULL if push.base_params is None else ffi.from_buffer("float[]", push.base_params)
    c.base_params, c.grad_norm_squared = base_params, push.grad_norm_squared
    c.base_version = (
        0 if push.base_version is None else 1 + unsigned(what, "base_version", push.base_version, 63)
    )
    if not 0.0 <= push.compute_seconds <= MAX_COMPUTE_SECONDS:
        raise InvalidArgument(what, f"compute_seconds: found {push.compute_seconds}; expected at least 0")
    c.compute_nanoseconds = round(push.compute_seconds / NANOSECOND)
    for name in ("cost_seconds", "data_seconds"):
        seconds = getattr(push, name)
        if not 0.0 <= seconds <= MAX_COMPUTE_SECONDS:
            raise InvalidArgument(what, f"{name}: found {seconds}; expected at least 0")
        setattr(c, name.replace("seconds", "nanoseconds"), round(seconds / NANOSECOND))
    c.position = unsigned(what, "position", push.position, 64)
    ranges = ffi.NULL
    if push.ranges is not None:
        ranges, c.range_count = ffi.from_buffer("pyps_range[]", push.ranges), len(push.ranges)
    c.ranges = ranges
    c.tag = [unsigned(what, "tag", word, 64) for word in push.tag]
    given = ffi.NULL if push.given is None else _ticket_struct(push.given)
    setattr(c, "as", given)
    how = push.encoding
    c.codec, c.seed, c.error_feedback = how.codec, how.seed, int(how.error_feedback)
    c.rounding, c.nonfinite = _position(Rounding, how.rounding), _position(NonFinite, how.nonfinite)
    return c, (constants, gradient, base_params, ranges, given)


def _ticket_struct(ticket: Ticket) -> Any:
    c = ffi.new("pyps_ticket *")
    c.scale, c.share, c.part = ticket.scale, ticket.share, ticket.part
    return c


def hyper_array(hyper: Sequence[Hyper | None]) -> Any:
    """The C constants of each group; None: zeros."""
    constants = ffi.new("pyps_hyper[]", max(1, len(hyper)))
    for h, group in zip(constants, hyper, strict=False):
        if group is None:
            continue
        h.lr, h.weight_decay = group.lr, group.weight_decay
        h.momentum, h.dampening = group.momentum, group.dampening
        h.beta1, h.beta2 = group.betas
        h.eps, h.nesterov = group.eps, int(group.nesterov)
        h.lr_decay, h.clip, h.clip_norm = group.lr_decay, group.clip, group.clip_norm
    return constants


def _position(kinds: Any, name: str) -> int:
    return get_args(kinds).index(name)


def encoded_bytes(codec: Codec, count: int) -> int:
    return int(lib.pyps_encoded_bytes(codec, unsigned("codec", "count", count, 44)))


def encode(
    values: Flat,
    how: Encoding,
    scale: float,
    first: int,
    residual: Flat | None,
    residual_out: Flat | None,
    out: NDArray[np.uint8],
) -> EncodeCounts:
    c, r = ffi.new("pyps_encode_args *"), ffi.new("pyps_encode_result *")
    c.size, c.codec, c.seed, c.scale = ffi.sizeof("pyps_encode_args"), how.codec, how.seed, scale
    c.rounding, c.nonfinite = _position(Rounding, how.rounding), _position(NonFinite, how.nonfinite)
    c.first = unsigned("encode", "first", first, 64)
    kept = ffi.NULL if residual is None else ffi.from_buffer("float[]", residual)
    left = ffi.NULL
    if residual_out is not None:
        left = ffi.from_buffer("float[]", residual_out, require_writable=True)
    c.residual, c.residual_out = kept, left
    data = ffi.from_buffer("char[]", out, require_writable=True)
    check("encode", lib.pyps_encode(c, ffi.from_buffer("float[]", values), values.size, data, out.size, r))
    return EncodeCounts(r.nonfinite, r.blocks_skipped)


def decode(codec: Codec, data: NDArray[np.uint8], out: Flat) -> None:
    to = ffi.from_buffer("float[]", out, require_writable=True)
    check("decode", lib.pyps_decode(codec, ffi.from_buffer("char[]", data), data.size, to, out.size))


def pull_encoded(store: Pointer, codec: Codec, out: NDArray[np.uint8]) -> int:
    version = ffi.new("uint64_t *")
    data = ffi.from_buffer("char[]", out, require_writable=True)
    check("pull", lib.pyps_pull_encoded(store, codec, data, out.size, version))
    return int(version[0])


def snapshot(
    store: Pointer, flat: Flat, state: Sequence[Flat], steps: NDArray[np.float64], timeout: float
) -> int:
    """Fill the arrays with one version's parameters, states and steps a chunk; the version."""
    keep = [ffi.from_buffer("float[]", array) for array in state]
    states = ffi.new("float *[]", keep) if keep else ffi.NULL
    version = ffi.new("uint64_t *")
    c_flat, c_steps = ffi.from_buffer("float[]", flat), ffi.from_buffer("double[]", steps)
    check("snapshot", lib.pyps_snapshot(store, c_flat, states, c_steps, timeout, version))
    return int(version[0])


def get_ticket(store: Pointer, version: int) -> Ticket:
    """What a push of the last versions was given. Raises InvalidArgument for others, and for rounds."""
    c = ffi.new("pyps_ticket *")
    check("ticket", lib.pyps_get_ticket(store, unsigned("ticket", "version", version, 64), c))
    return Ticket(c.version, (c.tag[0], c.tag[1]), c.samples, c.scale, c.share, c.part)


def get_hyper(store: Pointer, groups: int) -> list[Hyper | None]:
    c = ffi.new("pyps_hyper[]", groups)
    check("hyper", lib.pyps_get_hyper(store, c, groups))
    return hyper_values(c, groups)


def hyper_values(c: Any, groups: int) -> list[Hyper | None]:
    """What hyper_array was made from."""
    size = ffi.sizeof("pyps_hyper")
    return [_hyper(c[k]) if any(bytes(ffi.buffer(c + k, size))) else None for k in range(groups)]


def _hyper(c: Any) -> Hyper:
    values = {f.name: _f32(getattr(c, f.name)) for f in fields(Hyper) if f.name not in ("betas", "nesterov")}
    return Hyper(**values, betas=(_f32(c.beta1), _f32(c.beta2)), nesterov=bool(c.nesterov))


def _f32(value: float) -> float:
    """The shortest number that is this one in fp32: 0.1, not 0.10000000149011612."""
    return float(str(np.float32(value)))


def set_schedule(store: Pointer, schedule: TurnSchedule) -> None:
    turns, count = turn_array(schedule), len(schedule.order)
    check("set_schedule", lib.pyps_set_schedule(store, turns, count, schedule.period_seconds))


def turn_array(schedule: TurnSchedule) -> Any:
    turns = zip(schedule.order, schedule.gaps_seconds, strict=True)
    return ffi.new("pyps_turn[]", [{"rank": rank, "gap_seconds": gap} for rank, gap in turns])


def journal(store: Pointer, path: str | None) -> None:
    check("journal", lib.pyps_journal(store, ffi.NULL if path is None else os.fsencode(path)))


def replay(path: str) -> Replay:
    """Every decision of a journal once more."""
    c = ffi.new("pyps_replay_result *")
    check("replay", lib.pyps_replay(os.fsencode(path), c))
    first = ffi.string(c.first).decode()
    return Replay(c.events, c.decisions, c.differences, c.missing_events, first)


def wait(store: Pointer, sequence: int, timeout: float) -> None:
    check("wait", lib.pyps_wait(store, unsigned("wait", "sequence", sequence, 64), timeout))


def timeout_seconds(timeout: float | None) -> float:
    """What C takes for a timeout; None: the store's own. Raises InvalidArgument."""
    if timeout is None:
        return STORE_TIMEOUT
    if not timeout >= 0.0:
        raise InvalidArgument("timeout", f"found {timeout}; expected at least 0, or None")
    return float(timeout)


def struct_values(kind: Any, c: Any) -> dict[str, Any]:
    """The fields of a dataclass, read from the C struct that has them under the same names."""
    return {field.name: getattr(c, field.name) for field in fields(kind)}


def owned(out: Any) -> Pointer:
    return Pointer(ffi.gc(out[0], lib.pyps_close))


def segment_name(what: str, name: str) -> bytes:
    data = name.encode(errors="surrogateescape")
    if b"\0" in data:
        raise InvalidArgument(what, "name: found a NUL; expected letters, digits, '.', '_' or '-'")
    return data


def unsigned(what: str, field: str, value: int, bits: int) -> int:
    if not 0 <= value < 1 << bits or value != int(value):
        expected = f"expected a whole number from 0 to {(1 << bits) - 1}"
        raise InvalidArgument(what, f"{field}: found {value}; {expected}")
    return int(value)


def u32_array(what: str, field: str, values: Sequence[int]) -> Any:
    return ffi.new("uint32_t[]", [unsigned(what, f"{field}[{k}]", v, 32) for k, v in enumerate(values)] or 1)
