"""Says what a search for workers and batches minimises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pyps.solver.costs import Floats, Ints


@dataclass(frozen=True)
class SetObjective:
    """A value to minimise, of an iteration's seconds and of the sums of needs of the workers in use, as of
    their price an hour. It never falls where one of these rises; infinite: not allowed.

    needs: one entry a worker each. value: takes the seconds and these sums: numbers, or arrays of many sets.
    """

    needs: tuple[Floats, ...]
    value: Callable[..., Any]

    def of(self, batches: Ints, seconds: float) -> float:
        """The value of a split with an iteration of so many seconds."""
        used = batches > 0
        return float(self.value(seconds, *(float(need[used].sum()) for need in self.needs)))


def fastest_goal() -> SetObjective:
    """The shortest iteration."""
    return SetObjective((), lambda seconds: seconds)


def within_price(price: Floats, most: float) -> SetObjective:
    """The shortest iteration whose seconds, times the price an hour of its workers, are at most `most`."""
    return SetObjective((price,), lambda seconds, hourly: np.where(seconds * hourly <= most, seconds, np.inf))
