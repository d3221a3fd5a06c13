"""The decision core in virtual time, and the custom policies that the core calls back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pyps.errors import InvalidArgument
from pyps.formats.plan import TurnSchedule
from pyps.native import check, fill_policy_params, raised, turn_array, u32_array, unsigned
from pyps.native.compiled import HAS_CORE, ffi, lib
from pyps.native.decisions import Decision, EventKind, PolicyContext
from pyps.native.status import PushCounts, rank_cost
from pyps.native.values import Config, RankCost


class Core:
    """The decision core on a private view, in virtual time: see pyps.h. Times are whole nanoseconds.

    A step returns the same `Decision` object each time, overwritten, which is also `last`; an event that is
    refused raises the store's exception for it.
    """

    def __init__(self, config: Config) -> None:
        batches = u32_array("core", "batches", config.batches)
        c, out = ffi.new("pyps_config *"), ffi.new("pyps_core **")
        c.size, c.policy, c.ranks = ffi.sizeof("pyps_config"), config.policy, len(config.batches)
        c.max_participants, c.staging_buffers = config.max_participants, config.staging_buffers
        c.samples = unsigned("core", "samples", config.samples, 64)
        c.round_timeout_seconds, c.batches = config.round_timeout_seconds, batches
        fill_policy_params(c.policy_params, config.policy_params)
        check("core", lib.pyps_core_create(c, out))
        self._core = ffi.gc(out[0], lib.pyps_core_free)
        self._event, self._decision = ffi.new("pyps_event *"), ffi.new("pyps_decision *")
        self._event.size = ffi.sizeof("pyps_event")
        self.last: Decision = self._decision
        self._step = lib.pyps_core_step
        self._ranks = len(config.batches)
        self.looks_at_gradients = bool(lib.pyps_core_gradient(out[0], ffi.NULL, 0))
        self._capacity = config.max_participants or self._ranks

    def step(self, kind: int, slot: int, now: int, **values: Any) -> Decision:
        """One event. `values` are fields of pyps_event; unnamed ones keep their last value."""
        e = self._event
        e.kind, e.slot, e.now = kind, slot, now
        if values:
            for name, value in values.items():
                setattr(e, name, value)
        if rc := self._step(self._core, e, self._decision):
            check(EventKind(kind).name.lower(), rc)
        return self.last

    def push(
        self,
        slot: int,
        now: int,
        staging: int,
        samples: int,
        compute_nanoseconds: int,
        norm: float,
        base_version: int = 0,
        waited: int = 0,
        sent: int = 0,
        cost_nanoseconds: int = 0,
    ) -> Decision:
        """A push, the most frequent of the steps that have values.

        staging, samples, norm: as in a PushRequest. compute_nanoseconds: that the gradient took.
        base_version: 1 + the version computed on; 0: what was pulled last. waited: nanoseconds, for its turn.
        sent: nanoseconds since its turn began. cost_nanoseconds: what the step cost; 0: as it took.
        """
        e = self._event
        e.staging, e.samples, e.base_version = staging, samples, base_version
        e.waited, e.sent, e.cost_nanoseconds = waited, sent, cost_nanoseconds
        e.compute_nanoseconds, e.grad_norm_squared = compute_nanoseconds, norm
        return self.step(EventKind.PUSH, slot, now)

    def see_gradient(self, gradient: NDArray[np.floating[Any]]) -> None:
        """The gradient of the next push, for a policy that looks at gradients."""
        values = np.ascontiguousarray(gradient, dtype=np.float32)
        lib.pyps_core_gradient(self._core, ffi.from_buffer("float[]", values), values.size)

    def pull(self, slot: int, now: int, version: int) -> Decision:
        self._event.version = version
        return self.step(EventKind.PULL, slot, now)

    def replan(self, now: int, batches: Sequence[int]) -> Decision:
        """Another batch for each rank; one of 0 lets it rest."""
        keep = u32_array("replan", "batches", batches)
        decision = self.step(EventKind.REPLAN, 0, now, batches=keep)
        self._event.batches = ffi.NULL
        return decision

    def set_schedule(self, now: int, schedule: TurnSchedule) -> Decision:
        keep = turn_array(schedule)
        if len(schedule.order) != self._ranks:
            found, expected = f"{len(schedule.order)} turns", f"one for each of {self._ranks} ranks"
            raise InvalidArgument("set_schedule", f"order: found {found}; expected {expected}")
        values = {"turns": keep, "period_seconds": schedule.period_seconds}
        decision = self.step(EventKind.SCHEDULE, 0, now, **values)
        self._event.turns = ffi.NULL
        return decision

    def sources(self) -> list[tuple[int, int, int, float]]:
        """Return the last round that became a version, in order: slot, staging buffer, samples, scale."""
        n = self._capacity
        slots, staging_buffers, samples = (ffi.new("uint32_t[]", n) for _ in range(3))
        scales = ffi.new("float[]", n)
        count = lib.pyps_core_sources(self._core, slots, staging_buffers, samples, scales, n)
        return [(slots[k], staging_buffers[k], samples[k], scales[k]) for k in range(count)]

    def lookahead(self, slot: int) -> float:
        """How far a pull of this slot's worker looks ahead, in global batches."""
        return float(lib.pyps_core_lookahead(self._core, slot))

    def ranks(self) -> list[PushCounts]:
        c = ffi.new("pyps_rank[]", self._ranks)
        check("ranks", lib.pyps_core_ranks(self._core, c, self._ranks))
        names = [field.name for field in fields(PushCounts)]
        return [PushCounts(*(getattr(c[k], name) for name in names)) for k in range(self._ranks)]

    def costs(self) -> list[RankCost]:
        """Return what each rank's steps cost, as a store shows it."""
        c = ffi.new("pyps_rank_cost[]", self._ranks)
        check("costs", lib.pyps_core_costs(self._core, c, self._ranks))
        return [rank_cost(c[k]) for k in range(self._ranks)]


class Decider(Protocol):
    """The protocol that pyps.store.policies.Custom fulfils."""

    def may_start(self, context: PolicyContext, shared_state: Any) -> bool: ...
    def scale(self, context: PolicyContext, shared_state: Any) -> float | None: ...


_known: dict[int, Decider] = {}


def register_decider(number: int, policy: Decider) -> None:
    """From now on this process can decide by that policy."""
    _known[number] = policy


def is_registered(number: int) -> bool:
    return number in _known


def _context(c: Any) -> PolicyContext:
    return PolicyContext(*(getattr(c, field.name) for field in fields(PolicyContext)))


@ffi.def_extern(error=-1)
def pyps_python_start(context: Any, shared_state: Any) -> int:
    try:
        return int(_known[context.custom].may_start(_context(context), shared_state))
    except Exception as error:
        raised.errors.append(error)
        return -1


@ffi.def_extern(error=-1)
def pyps_python_push(context: Any, shared_state: Any, scale: Any) -> int:
    try:
        found = _known[context.custom].scale(_context(context), shared_state)
        if found is None:
            return 0
        scale[0] = found
        return 1
    except Exception as error:
        raised.errors.append(error)
        return -1


def _set_custom() -> None:
    c = ffi.new("pyps_custom *")
    c.size = ffi.sizeof("pyps_custom")
    c.start, c.push = lib.pyps_python_start, lib.pyps_python_push
    check("custom policy", lib.pyps_set_custom(c))


if HAS_CORE:
    _set_custom()
