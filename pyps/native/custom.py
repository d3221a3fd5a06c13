"""Policies of one's own: what the C core calls back."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Protocol

from pyps._native import ffi, lib
from pyps.native import check, raised
from pyps.native.values import Sight


class Decider(Protocol):
    """What pyps.store.policies.Custom is to this module."""

    def may_start(self, sight: Sight, words: Any) -> bool: ...
    def scale(self, sight: Sight, words: Any) -> float | None: ...


_known: dict[int, Decider] = {}


def know(number: int, policy: Decider) -> None:
    """From now on this process can decide by that policy."""
    _known[number] = policy


def knows(number: int) -> bool:
    return number in _known


def _sight(c: Any) -> Sight:
    return Sight(*(getattr(c, field.name) for field in fields(Sight)))


@ffi.def_extern(error=-1)
def pyps_python_start(sight: Any, words: Any) -> int:
    try:
        return int(_known[sight.custom].may_start(_sight(sight), words))
    except Exception as error:
        raised.append(error)
        return -1


@ffi.def_extern(error=-1)
def pyps_python_push(sight: Any, words: Any, scale: Any) -> int:
    try:
        found = _known[sight.custom].scale(_sight(sight), words)
        if found is None:
            return 0
        scale[0] = found
        return 1
    except Exception as error:
        raised.append(error)
        return -1


def _set_custom() -> None:
    c = ffi.new("pyps_custom *")
    c.start, c.push = lib.pyps_python_start, lib.pyps_python_push
    check("custom policy", lib.pyps_set_custom(c))


_set_custom()
