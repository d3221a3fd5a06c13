# halving.py
from dataclasses import dataclass

import pyps


@dataclass(frozen=True, kw_only=True)
class Halving(pyps.Custom):
    """SSP that halves a gradient for every version it is late, and drops it past `most`."""

    bound: int = 2
    most: int = 4

    def may_start(self, context, shared_state):
        return context.clock - context.slowest <= self.bound

    def scale(self, context, shared_state):
        return 0.5**context.staleness if context.staleness <= self.most else None
