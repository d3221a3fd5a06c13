"""A custom policy, as a user would write it: `--policy halving.Halving:bound=2`."""

from __future__ import annotations

from collections.abc import MutableSequence
from dataclasses import dataclass

from pyps.native.decisions import PolicyContext
from pyps.store.policies import Custom


@dataclass(frozen=True, kw_only=True)
class Halving(Custom):
    """SSP that halves a gradient for every version it is late, and drops it past `most`."""

    bound: int = 2
    most: int = 4

    def may_start(self, context: PolicyContext, shared_state: MutableSequence[int]) -> bool:
        return context.clock - context.slowest <= self.bound

    def scale(self, context: PolicyContext, shared_state: MutableSequence[int]) -> float | None:
        shared_state[0] += 1
        return 0.5**context.staleness if context.staleness <= self.most else None
