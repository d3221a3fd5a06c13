"""A new segment from a configuration, and from a state that it goes on from."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from pyps.errors import InvalidArgument
from pyps.native import (
    abi_version,
    check,
    fill_data_set,
    fill_policy_params,
    hyper_array,
    segment_name,
    u32_array,
    unsigned,
)
from pyps.native.compiled import ffi, lib
from pyps.native.state import COUNTERS, VECTORS, RankHistory, StoreState
from pyps.native.status import PushCounts
from pyps.native.values import Config, DataSet, Tensor

MAX_NAME_BYTES = 159  # char name[160] in pyps_tensor
MAX_DIMENSIONS = 8
F32 = 0  # PYPS_F32, the one element type
STATE_WORDS = 16  # PYPS_STATE_WORDS


def create(name: str, config: Config, state: StoreState | None = None) -> Any:
    """Make a segment, ready to use: a pyps_store **. With a state, config.initial must be its parameters."""
    what = f"create {name!r}"
    try:
        c, keep = _config_struct(what, config)
    except OverflowError as error:  # a policy's number or parameters, as a file may have them
        raise InvalidArgument(what, f"a number out of range: {error}") from None
    out = ffi.new("pyps_store **")
    if state is None:
        check(what, lib.pyps_create(segment_name(what, name), abi_version(), c, out))
    else:
        c_state, keep_state = _state_struct(what, config, state)
        check(what, lib.pyps_restore(segment_name(what, name), abi_version(), c, c_state, out))
        del keep_state
    del keep
    return out


def _config_struct(what: str, config: Config) -> tuple[Any, Any]:
    """The C struct, and what must live as long as it."""
    tensors = ffi.new("pyps_tensor[]", max(1, len(config.tensors)))
    for k, tensor in enumerate(config.tensors):
        _fill_tensor(what, tensors[k], tensor)
    initial = _pointers(config.initial)
    batches = u32_array(what, "batches", config.batches)
    c = ffi.new("pyps_config *")
    c.size = ffi.sizeof("pyps_config")
    for field in ("chunk_params", "max_participants", "snapshot_spares", "staging_buffers", "groups"):
        setattr(c, field, unsigned(what, field, getattr(config, field), 32))
    c.optimizer, c.master, c.policy = int(config.optimizer), int(config.master), config.policy
    fill_policy_params(c.policy_params, config.policy_params)
    c.ranks, c.tensors = len(config.batches), len(config.tensors)
    c.samples = unsigned(what, "samples", config.samples, 64)
    c.plan = unsigned(what, "plan", config.agreement.plan, 64)
    c.seed = unsigned(what, "seed", config.agreement.seed, 64)
    c.round_timeout_seconds = config.round_timeout_seconds
    c.batches, c.tensor, c.initial = batches, tensors, initial[0]
    return c, (tensors, initial, batches)


def _pointers(arrays: Any) -> tuple[Any, Any]:
    """Pointers to arrays (NULL for None and empty ones), and what keeps them valid."""
    keep = [ffi.NULL if a is None or not a.size else ffi.from_buffer("float[]", a) for a in arrays]
    return ffi.new("float *[]", keep or 1), keep


def _state_struct(what: str, config: Config, state: StoreState) -> tuple[Any, Any]:
    """The C struct, and what must live as long as it."""
    header, names = state.header, [tensor.name for tensor in config.tensors]
    c = ffi.new("pyps_state *")
    c.size, c.optimizer = ffi.sizeof("pyps_state"), int(header.optimizer)
    c.policy = unsigned(what, "state: policy", header.policy, 32)
    for field in COUNTERS:
        setattr(c, field, unsigned(what, f"state: {field}", getattr(header, field), 64))
    if len(header.policy_state) != STATE_WORDS:
        found = f"policy_state: found {len(header.policy_state)} words; expected {STATE_WORDS}"
        raise InvalidArgument(what, f"state: {found}")
    c.policy_state = [unsigned(what, "state: policy_state", word, 64) for word in header.policy_state]
    ranks, ranges = ffi.new("pyps_rank_state[]", len(header.ranks) or 1), _ranges(what, header.ranges)
    for r, rank in enumerate(header.ranks):
        _fill_rank(f"{what}: state: rank {r}", ranks[r], rank)
        ranks[r].has_residual = int(r in state.residuals)
    taken = {t.name: n for t, n in zip(header.tensors, header.steps, strict=True)}
    steps = ffi.new("double[]", [taken[name] for name in names] or 1)
    hyper = hyper_array(header.hyper)
    vectors = _pointers([state.vectors[v].get(n) for v in VECTORS[header.optimizer] for n in names])
    none: dict[str, Any] = {}
    residuals = _pointers(
        [state.residuals.get(r, none).get(n) for r in range(len(header.ranks)) for n in names]
    )
    c.ranks, c.rank, c.ranges, c.range = len(header.ranks), ranks, len(header.ranges), ranges
    c.steps, c.hyper, c.vectors, c.residuals = steps, hyper, vectors[0], residuals[0]
    return c, (ranks, ranges, steps, hyper, vectors, residuals)


def _ranges(what: str, ranges: tuple[tuple[int, int], ...]) -> Any:
    c = ffi.new("pyps_range[]", len(ranges) or 1)
    for k, (first, count) in enumerate(ranges):
        c[k].first = unsigned(what, f"state: ranges[{k}]", first, 64)
        c[k].count = unsigned(what, f"state: ranges[{k}]", count, 64)
    return c


def _fill_rank(what: str, c: Any, rank: RankHistory) -> None:
    for field in fields(PushCounts):
        bits = 32 if field.name == "batch" else 64
        setattr(c.total, field.name, unsigned(what, field.name, getattr(rank.total, field.name), bits))
    for field in fields(RankHistory):
        value = getattr(rank, field.name)
        if field.name == "total" or value is None:
            continue
        if isinstance(value, DataSet):
            fill_data_set(what, c.data_set, value)
            continue
        if field.type == "float":
            setattr(c, field.name, value)
        else:
            bits = 64 if field.name in ("clock", "interval", "turn_gap") else 32
            setattr(c, field.name, unsigned(what, field.name, value, bits))


def _fill_tensor(what: str, c: Any, tensor: Tensor) -> None:
    name = tensor.name.encode()
    if not 0 < len(name) <= MAX_NAME_BYTES or b"\0" in name:
        raise InvalidArgument(
            what, f"tensor name: found {tensor.name!r}; expected 1 to {MAX_NAME_BYTES} bytes without NUL"
        )
    if len(tensor.shape) > MAX_DIMENSIONS:
        found = f"{len(tensor.shape)} dimensions"
        raise InvalidArgument(
            what, f"tensor {tensor.name!r}: found {found}; expected at most {MAX_DIMENSIONS}"
        )
    c.name, c.dtype, c.ndim, c.kind = name, F32, len(tensor.shape), int(tensor.averaged)
    c.group = unsigned(what, f"tensor {tensor.name!r}: group", tensor.group, 32)
    for k, size in enumerate(tensor.shape):
        c.shape[k] = size
