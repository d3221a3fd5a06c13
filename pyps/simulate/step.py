"""A step under way in virtual time, and its worker: a generator of the times that it waits for."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pyps.formats import Mode
from pyps.simulate.optimizer import Vector
from pyps.solver.mode import ModeChoices

StepProcess = Generator[int | None, None, Any]
Parameters = tuple[Vector, int]  # with their version
Gradient = tuple[Vector, float]  # with the loss


class Turn(NamedTuple):
    """A worker's turn over a link. opened: when; waited: for it. Nanoseconds."""

    opened: int
    waited: int


@dataclass
class SimulatedStep:
    """A step under way: its samples, what it goes on from, and how far it is."""

    first: int
    count: int
    version: int  # of the parameters
    base: Vector  # where its next local step goes on from
    claimed: int  # the time at which it could begin
    done: int = 0
    before: int = 0  # samples done before the last micro-batch
    taken: int = 0  # samples whose local steps were taken before newer parameters came
    gradient: Gradient | None = None
    nanoseconds: int = 0  # of computing
    lasted: int = 0  # from its beginning until its gradient was ready
    turn: Turn | None = None  # in which its gradient travels
    mode: Mode | None = None  # of its transfer, where that may change


class Pipelines(NamedTuple):
    """How many steps of each worker are under way (1: no pipeline), and the modes that workers may change to;
    None: theirs stay.
    """

    depths: Sequence[int]
    choices: ModeChoices | None = None

    @property
    def deepest(self) -> int:
        """Steps of a worker that may ever be under way."""
        return max(*self.depths, self.choices.depths[1] if self.choices else 1)
