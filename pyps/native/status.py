"""Define what a store says of itself: its counters, its participants and what each rank has done."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from pyps.native import struct_values
from pyps.native.values import CostModel, RankCost, Role


class MemberState(IntEnum):
    """The states of a participant slot. Fenced: alive, but too late; its next push is refused until it
    rejoins.
    """

    EMPTY = 0
    ACTIVE = 1
    FENCED = 2
    LEFT = 3
    DEAD = 4


class WaitKind(IntEnum):
    """Name what a member waits for: PYPS_WAITS_NOT ... in pyps.h."""

    NOT = 0
    START = 1
    STAGING = 2
    TURN = 3
    ROUND = 4


@dataclass(frozen=True, slots=True)
class Member:
    """A participant; rank is None for observers. `staged`: its gradient waits for the round to close.

    Since it joined, joined_seconds ago: waited_seconds, the sum of its waits for others; bytes_pushed and
    bytes_pulled, of its numbers as they are encoded. wait_seconds: how long its present wait lasts.
    claim_seconds: how long ago samples were claimed for it; 0: it holds none. step_seconds: of its rank, from
    claim to gradient, a moving average; 0: no step yet.
    """

    id: int
    state: MemberState
    role: Role
    rank: int | None
    pid: int
    clock: int
    pulled_version: int
    claim_first: int
    claim_count: int
    staged: bool
    waits_for: WaitKind
    bytes_pushed: int
    bytes_pulled: int
    joined_seconds: float
    waited_seconds: float
    wait_seconds: float
    claim_seconds: float
    step_seconds: float


@dataclass(frozen=True, slots=True)
class PushCounts:
    """Hold what the workers of a rank have done; pushes and samples count what was admitted."""

    batch: int
    pushes: int
    samples: int
    skipped: int
    returned: int
    staleness_sum: int
    staleness_max: int
    residuals_dropped: int = 0


@dataclass(frozen=True, slots=True)
class Status:
    """The store's counters. `sequence` counts every event; `all_joined`: every rank has joined once.

    Under a policy of turns: turn_rank: the rank on turn; -1: no turns. period_nanoseconds: of a cycle, as
    planned or measured; 0: not known yet. gap_nanoseconds: the mean from push to push; 0: none. scheduled:
    Store.set_schedule has set the turns. ranks: at present.
    """

    sequence: int
    version: int
    round: int
    plan: int
    samples_assigned: int
    samples_dropped: int
    active: int
    all_joined: bool
    period_nanoseconds: int = 0
    gap_nanoseconds: int = 0
    turn_rank: int = -1
    scheduled: bool = False
    ranks: int = 0


def rank_cost(c: Any) -> RankCost:
    """Return what a rank's steps cost, of a pyps_rank_cost."""
    kept = len(c.seconds)
    steps = range(max(0, c.steps - kept), c.steps)
    model = CostModel(**struct_values(CostModel, c.model))
    known = any((model.fixed_seconds, model.sample_seconds, model.least_seconds))
    return RankCost(
        c.steps,
        tuple(c.seconds[step % kept] for step in steps),
        c.data_seconds,
        c.sample_seconds,
        model if known else None,
    )
