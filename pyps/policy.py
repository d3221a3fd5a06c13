"""Policies: who waits for whom, as frozen, checked values. The rules themselves run in C (csrc/policy.c).

A new policy is a class here with the number that pyps.h gives it; nothing else in Python knows it by name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from pyps.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What every policy has.

    `round_timeout_seconds`: a live worker that holds the others up for longer is fenced; also how long the
    store's calls wait when no timeout is given. Raises InputError if it is not a positive, finite number.
    """

    round_timeout_seconds: float = 60.0

    name: ClassVar[str]
    number: ClassVar[int]
    known: ClassVar[dict[str, type[Policy]]] = {}

    def __init_subclass__(cls) -> None:
        Policy.known[cls.name] = cls

    def __post_init__(self) -> None:
        value = self.round_timeout_seconds
        if not (math.isfinite(value) and value > 0.0):
            raise InputError(self.name, "round_timeout_seconds", repr(value), "a positive, finite number")


@dataclass(frozen=True, kw_only=True)
class BSP(Policy):
    """Bulk synchronous: one step from everybody's gradient, weighted by its samples, bitwise reproducible."""

    name: ClassVar[str] = "bsp"
    number: ClassVar[int] = 0


@dataclass(frozen=True, kw_only=True)
class ASP(Policy):
    """Asynchronous: every gradient is a step of its own, at once, however old its parameters were."""

    name: ClassVar[str] = "asp"
    number: ClassVar[int] = 1


def policy_named(name: str, round_timeout_seconds: float = 60.0) -> Policy:
    """The policy of that name, e.g. "bsp". Raises InputError with the names there are."""
    kind = Policy.known.get(name)
    if kind is None:
        raise InputError("policy", "", repr(name), f"one of {', '.join(Policy.known)}")
    return kind(round_timeout_seconds=round_timeout_seconds)
