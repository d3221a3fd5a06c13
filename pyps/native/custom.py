"""Custom policies: what the C core calls back."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Protocol

from pyps._native import ffi, lib
from pyps.native import check, raised
from pyps.native.values import PolicyContext


class Decider(Protocol):
    """What pyps.store.policies.Custom is to this module."""

    def may_start(self, context: PolicyContext, shared_state: Any) -> bool: ...
    def scale(self, context: PolicyContext, shared_state: Any) -> float | None: ...


_known: dict[int, Decider] = {}


def register(number: int, policy: Decider) -> None:
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
        raised.append(error)
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
        raised.append(error)
        return -1


def _set_custom() -> None:
    c = ffi.new("pyps_custom *")
    c.size = ffi.sizeof("pyps_custom")
    c.start, c.push = lib.pyps_python_start, lib.pyps_python_push
    check("custom policy", lib.pyps_set_custom(c))


_set_custom()
