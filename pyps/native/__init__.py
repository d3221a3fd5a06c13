"""C codes become exceptions here, C structs become values; `compiled` alone imports pyps._native.

Everything above sees names, numbers, arrays and the dataclasses of pyps.native.values. What a store does is
in pyps.native.local; the C rules (one thread at a time, one process) are kept by pyps.Store, which holds it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NewType, get_args

import numpy as np
from numpy.typing import NDArray

from pyps.errors import InvalidArgument, StoreError
from pyps.formats.plan import TurnSchedule
from pyps.native import interrupt
from pyps.native.compiled import HAS_CORE as HAS_CORE
from pyps.native.compiled import ffi, lib
from pyps.native.decisions import PolicyNeeds, PolicyParams
from pyps.native.values import (
    NO_TAG,
    Codec,
    DataSet,
    EncodeCounts,
    Encoding,
    Flat,
    Hyper,
    NonFinite,
    PushRequest,
    PushResult,
    Replay,
    Rounding,
    Ticket,
)

NANOSECOND = 1e-9
MAX_COMPUTE_SECONDS = 1e9
AVERAGED = 1  # PYPS_AVERAGED
STORE_TIMEOUT = -1.0  # C: twice the store's round_timeout_seconds
ROUNDINGS, NON_FINITES = get_args(Rounding), get_args(NonFinite)  # as C counts them
ERRORS = {kind.code: kind for kind in StoreError.__subclasses__()}

Pointer = NewType("Pointer", object)


class Raised(threading.local):
    """errors: what C has called back in this thread raised, until the call that it was in has returned."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []


raised = Raised()


def check(what: str, rc: int) -> None:
    """Raise the exception that belongs to a C return code, with the C core's message. 0 passes."""
    if rc == 0:
        raised.errors.clear()
        return
    message = ffi.string(lib.pyps_error_message()).decode(errors="replace")
    code = ffi.string(lib.pyps_error_name(rc)).decode()
    if code == "PYPS_EINTR" and (reason := interrupt.reason()) is not None:
        raise reason
    cause = raised.errors.pop() if raised.errors else None
    raise ERRORS.get(code, StoreError)(what, message.removeprefix(f"{what}: ") or code) from cause


def abi_version() -> int:
    return lib.pyps_abi_version()


def isa() -> str:
    """The kernels in use: "scalar", "avx2", "avx512" or "neon" (PYPS_ISA overrides)."""
    return ffi.string(lib.pyps_isa()).decode()


def fill_policy_params(c: Any, params: PolicyParams) -> None:
    c.size = ffi.sizeof("pyps_policy_params")
    for field in fields(PolicyParams):
        setattr(c, field.name, getattr(params, field.name))


def policy_needs(number: int, params: PolicyParams | None = None) -> PolicyNeeds:
    """Return what the policy of that number asks of a worker under these parameters; None: under any
    parameters.

    Raises UnknownPolicy for a number that the C core does not have.
    """
    c, given = ffi.new("pyps_policy_needs *"), ffi.NULL
    if params is not None:
        given = ffi.new("pyps_policy_params *")
        fill_policy_params(given, params)
    check("policy_needs", lib.pyps_get_policy_needs(unsigned("policy_needs", "number", number, 32), given, c))
    return PolicyNeeds(**{need: bool(value) for need, value in struct_values(PolicyNeeds, c).items()})


def unlink(name: str, force: bool = False) -> None:
    """Remove a segment's name; Busy while any process has it open, unless forced."""
    what = f"unlink {name!r}"
    check(what, lib.pyps_unlink(segment_name(what, name), int(force)))


def probe(name: str) -> int:
    """The segment's size in bytes if no process has it open; raises Busy if one does, or why it is not
    ours.
    """
    size = ffi.new("uint64_t *")
    what = f"probe {name!r}"
    check(what, lib.pyps_probe(segment_name(what, name), size))
    return int(size[0])


def fill_data_set(what: str, c: Any, data: DataSet) -> None:
    c.size = ffi.sizeof("pyps_data_set")
    c.length, c.digest = (unsigned(what, name, getattr(data, name), 64) for name in ("length", "digest"))
    c.mean, c.tolerance = data.mean, data.tolerance


def push_result(r: Any) -> PushResult:
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


def push_args(what: str, push: PushRequest, constants: Any) -> tuple[Any, Any]:
    """The C arguments, and what must live as long as they; codes are in the staging buffer already.

    constants: the hyper_array of the push.
    """
    c = ffi.new("pyps_push_args *")
    c.size, c.staging = ffi.sizeof("pyps_push_args"), unsigned(what, "staging", push.staging, 32)
    c.samples = unsigned(what, "samples", push.samples, 32)
    c.scale, c.timeout_seconds, c.hyper = push.scale, timeout_seconds(push.timeout), constants
    gradient = ffi.NULL
    if push.gradient is not None and not push.encoded:
        gradient = ffi.from_buffer("float[]", push.gradient)
    c.gradient, c.encoded = gradient, int(push.encoded)
    c.grad_norm_squared = push.grad_norm_squared
    c.base_version = (
        0 if push.base_version is None else 1 + unsigned(what, "base_version", push.base_version, 63)
    )
    c.compute_nanoseconds = _nanoseconds(what, "compute_seconds", push.compute_seconds)
    c.cost_nanoseconds = _nanoseconds(what, "cost_seconds", push.cost_seconds)
    c.data_nanoseconds = _nanoseconds(what, "data_seconds", push.data_seconds)
    c.position = unsigned(what, "position", push.position, 64)
    c.ranges, c.range_count = ranges = c_ranges(push.ranges)
    c.looked, c.looked_count = looked = c_ranges(push.looked)
    if push.tag != NO_TAG:
        c.tag = [unsigned(what, "tag", word, 64) for word in push.tag]
    given = ffi.NULL if push.given is None else _ticket_struct(push.given)
    c.decided = given
    if push.weight is not None:
        c.weighted, c.weight = 1, push.weight
    how = push.encoding
    c.codec, c.seed, c.error_feedback = how.codec, how.seed, int(how.error_feedback)
    c.rounding, c.nonfinite = ROUNDINGS.index(how.rounding), NON_FINITES.index(how.nonfinite)
    return c, (constants, gradient, ranges, looked, given)


def c_ranges(ranges: NDArray[np.uint64] | None) -> tuple[Any, int]:
    """Return the ranges as the core takes them, uint64 [n, 2], and how many; None: (NULL, 0)."""
    return (ffi.NULL, 0) if ranges is None else (ffi.from_buffer("pyps_range[]", ranges), len(ranges))


def finite(values: Flat) -> bool:
    """Return whether every value of a contiguous fp32 array is finite. Any thread may ask, during any
    call.
    """
    if not HAS_CORE:
        return bool(np.isfinite(values).all())
    return lib.pyps_finite(ffi.from_buffer("float[]", values), values.size) == 0


def take(values: Flat, to: Flat) -> bool:
    """Copy a contiguous fp32 array to another of its size; whether every value is finite, as `finite`."""
    if values.size != to.size:
        raise InvalidArgument("take", f"to: found {to.size} values; expected {values.size}")
    if not HAS_CORE:
        to[:] = values
        return finite(to)
    out = ffi.from_buffer("float[]", to, require_writable=True)
    return lib.pyps_take(out, ffi.from_buffer("float[]", values), values.size) == 0


def _ticket_struct(ticket: Ticket) -> Any:
    c = ffi.new("pyps_ticket *")
    c.size, c.scale, c.share, c.part = ffi.sizeof("pyps_ticket"), ticket.scale, ticket.share, ticket.part
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


def _nanoseconds(what: str, name: str, seconds: float) -> int:
    if not 0.0 <= seconds <= MAX_COMPUTE_SECONDS:
        raise InvalidArgument(what, f"{name}: found {seconds}; expected at least 0")
    return round(seconds / NANOSECOND)


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
    c.rounding, c.nonfinite = ROUNDINGS.index(how.rounding), NON_FINITES.index(how.nonfinite)
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


def hyper_values(c: Any, groups: int) -> list[Hyper | None]:
    """Return what hyper_array was made from."""
    size = ffi.sizeof("pyps_hyper")
    return [_hyper(c[k]) if any(bytes(ffi.buffer(c + k, size))) else None for k in range(groups)]


def _hyper(c: Any) -> Hyper:
    values = {f.name: _f32(getattr(c, f.name)) for f in fields(Hyper) if f.name not in ("betas", "nesterov")}
    return Hyper(**values, betas=(_f32(c.beta1), _f32(c.beta2)), nesterov=bool(c.nesterov))


def _f32(value: float) -> float:
    """The shortest number that is this one in fp32: 0.1, not 0.10000000149011612."""
    return float(str(np.float32(value)))


def turn_array(schedule: TurnSchedule) -> Any:
    turns = zip(schedule.order, schedule.gaps_seconds, strict=True)
    return ffi.new("pyps_turn[]", [{"rank": rank, "gap_seconds": gap} for rank, gap in turns])


def replay(path: str) -> Replay:
    """Every decision of a journal once more."""
    c = ffi.new("pyps_replay_result *")
    check("replay", lib.pyps_replay(os.fsencode(path), c))
    first = ffi.string(c.first).decode()
    return Replay(c.events, c.decisions, c.differences, c.missing_events, first)


def timeout_seconds(timeout: float | None) -> float:
    """Return what C takes for a timeout; None: the store's own. Raises InvalidArgument."""
    if timeout is None:
        return STORE_TIMEOUT
    if not timeout >= 0.0:
        raise InvalidArgument("timeout", f"found {timeout}; expected at least 0, or None")
    return float(timeout)


def struct_values(kind: Any, c: Any) -> dict[str, Any]:
    """The fields of a dataclass, read from the C struct that has them under the same names."""
    return {field.name: getattr(c, field.name) for field in fields(kind)}


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
