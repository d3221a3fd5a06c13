"""Define what a policy is made of and decides, as plain frozen values; the numbers are those of
csrc/pyps.h.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

NO_BOUND = 2**32 - 1  # UINT32_MAX


@dataclass(frozen=True, slots=True)
class PolicyParams:
    """A policy's numbers, named as in pyps.h; those that it does not have are 0."""

    backup: int = 0
    splits: int = 0
    bound: int = 0
    extra: int = 0
    threshold: int = 0
    abort: int = 0
    scaling: int = 0
    plain_pulls: int = 0
    quantile: float = 0.0
    slack: float = 0.0
    patience: float = 0.0
    late: int = 0
    noise: float = 0.0
    own: float = 0.0
    custom: int = 0


@dataclass(frozen=True, slots=True)
class PolicyNeeds:
    """Hold what a policy asks of a worker; see pyps.native.policy_needs.

    `uses_turns`: a push and the pull after it are one turn, so a pull follows each push.
    `checks_between_micro_batches`: call should_continue between micro-batches. `needs_grad_norm`:
    a push carries it. `resizes_batches`: claims follow measured speed, up to
    set_max_samples. `allows_pipeline`: steps may overlap (start_ahead works). `waits_for_rounds`: a
    worker that has pushed goes on when its round has closed. `starts_at_once`: no start waits for others, so
    an exchange serves in place of a push and the pull before the next step. `collects_pushes`: a version may
    take the gradients of several pushes.
    """

    uses_turns: bool
    checks_between_micro_batches: bool
    needs_grad_norm: bool
    resizes_batches: bool
    allows_pipeline: bool
    waits_for_rounds: bool
    starts_at_once: bool
    collects_pushes: bool

    @property
    def lets_ranks_rest(self) -> bool:
        """Return whether a step waits for all ranks that have samples, by a split that re-plans change."""
        return self.waits_for_rounds and not self.resizes_batches


# What a driver does not give, by the need of PolicyNeeds, and how to say so of a policy.
SEVERAL_SERVERS = {"collects_pushes": "takes several pushes for a version"}
TIMES_ALONE = {"needs_grad_norm": "looks at gradients"}


def unmet(needs: PolicyNeeds, lacks: Mapping[str, str]) -> str:
    """Say what a policy needs that a driver lacks, as in SEVERAL_SERVERS; "" if it lacks nothing."""
    return next((why for need, why in lacks.items() if getattr(needs, need)), "")


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """Hold what a custom policy sees: the worker it is asked about, and the others."""

    now: int  # nanoseconds
    version: int
    staleness: int  # versions since the worker's pull
    clock: int  # its steps
    slowest: int  # steps of the slowest worker there is
    fastest: int
    rank: int
    workers: int
    samples: int  # held or pushed
    batch: int  # planned


class Advice(IntEnum):
    """Name what a worker does between two micro-batches: as PYPS_CONTINUE ... in pyps.h."""

    CONTINUE = 0
    PUSH_NOW = 1
    ABORT = 2


class EventKind(IntEnum):
    """Name what can happen to a view, as PYPS_ON_JOIN ... in pyps.h."""

    JOIN = 1
    LEAVE = 2
    REJOIN = 3
    START = 4
    PULL = 5
    PUSH = 6
    TICK = 7
    REPLAN = 8
    CHECK = 9
    MAX_SAMPLES = 10
    GATE = 11
    START_AHEAD = 12
    SCHEDULE = 13


class Decision(Protocol):
    """Hold what a step of the decision core came to: pyps_decision in pyps.h."""

    verdict: int  # 0 committed, 1 unchanged, 2 wait
    advice: int
    rank: int
    scale: float
    ticket: int
    staleness: int
    first: int
    count: int
    batch: int
    until: int
    at: int
    progress: int
    version: int
    round: int
    next_deadline: int
    wake_epoch: int
    part: float  # of an optimizer step, that the last version took
