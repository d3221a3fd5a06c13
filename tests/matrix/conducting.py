"""A run that follows its simulation: workers push in the order in which they do in virtual time.

The simulation says which worker computes when. A worker with a micro-batch's gradient waits at a gate; the
conductor opens it for one worker after the other, in the order in which their computing ends in virtual time,
each time after all that should have happened by then has: every worker whose next step had begun is at its
gate, and in a pipeline the parameters that had come back are there. A run that decides otherwise than its
simulation then shows by a gate that is not reached, by other parameters, or by other counters.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from cells import Cell
from numpy.typing import NDArray
from trained import BATCHES, GLOBAL_BATCH, SAMPLES, Objective, local_step, store_step

from pyps.formats import Jitter
from pyps.simulate import Result, Scenario, SimWorker, simulate
from pyps.store.policies import Policy

Events = list[tuple[int, float]]
SPEEDS = (1.0, 1.37, 0.61)  # seconds of each rank's step
LATENCY_SECONDS = 1e-6  # so that pulls are in the timeline
CONDUCTED = 0.7  # of all steps; towards the end workers that wake at once race for the last samples
PATIENCE_SECONDS = 30.0  # more than a busy machine stands still
LOOK_SECONDS = 0.0005


@dataclass(frozen=True)
class Simulated:
    """A cell's run in virtual time until `end`: its result there, the parameters, and when each rank (rank,
    seconds) began and ended a step, pushed and pulled.
    """

    end: float
    result: Result
    parameters: NDArray[np.float64]
    begun: Events
    ended: Events
    pushed: Events
    pulled: Events


def counts(events: Events, by: float = math.inf) -> list[int]:
    """How many of each rank there were before a time."""
    found = Counter(rank for rank, seconds in events if seconds < by)
    return [found[rank] for rank in range(len(BATCHES))]


def simulated(cell: Cell, policy: Policy, seed: int) -> Simulated:
    """The cell's run in virtual time, with devices of unlike speeds."""
    whole, _ = _simulate(cell, policy, seed)
    computed = [(rank, begin, end) for rank, kind, begin, end, _ in whole.timeline if kind == "compute"]
    last = int(CONDUCTED * len(computed))
    until = (computed[last - 1][2] + computed[last][2]) / 2
    result, parameters = _simulate(cell, policy, seed, until)
    return Simulated(
        until,
        result,
        parameters,
        begun=[(rank, begin) for rank, begin, _ in computed],
        ended=[(rank, end) for rank, _, end in computed[:last]],
        pushed=list(whole.pushed_at),
        pulled=[(rank % len(BATCHES), end) for rank, kind, _, end, _ in whole.timeline if kind == "pull"],
    )


def _simulate(
    cell: Cell, policy: Policy, seed: int, seconds: float = math.inf
) -> tuple[Result, NDArray[np.float64]]:
    """The result, and the parameters."""
    steps = max(1, cell.local_steps)

    def cost(rank: int) -> Callable[[int], float]:
        return lambda batch: SPEEDS[rank] * batch / BATCHES[rank]

    workers = tuple(
        SimWorker(f"w{k}", steps * batch, cost(k), Jitter(sigma=0.2), latency=LATENCY_SECONDS,
                  micro_batch=batch // cell.accumulation)
        for k, batch in enumerate(BATCHES)
    )  # fmt: skip
    objective = Objective()
    optimizer, hyper = store_step(cell)
    result = simulate(
        Scenario(workers, local=cell.local_steps > 0),
        policy,
        iterations=SAMPLES // (steps * GLOBAL_BATCH),
        seed=seed,
        objective=objective,
        lr=hyper,
        optimizer=optimizer,
        depth=cell.depth,
        local=local_step(cell),
        timeline=True,
        seconds=seconds,
    )
    return result, objective.last


@dataclass(frozen=True)
class Progress:
    """Hold what each rank has done until now in the run: gradients that the store took, and pulls."""

    pushes: Sequence[int]
    pulls: Sequence[int]


class Conductor:
    """Opens the gates. `fault` says where the run left its simulation; empty: nowhere."""

    def __init__(self, simulated: Simulated, look: Callable[[], Progress], overlaps: bool) -> None:
        """simulated: what to follow. look: what the run's store says. overlaps: transfers and computing."""
        self.fault = ""
        self._simulated, self._look, self._overlaps = simulated, look, overlaps
        self._came, self._opened = [0] * len(BATCHES), [0] * len(BATCHES)
        self._changed = threading.Condition()
        self._free = False

    def gate(self, rank: int) -> None:
        """Wait for the rank's turn."""
        with self._changed:
            self._came[rank] += 1
            self._changed.notify_all()
            while not self._free and self._opened[rank] < self._came[rank]:
                self._changed.wait(PATIENCE_SECONDS)

    def conduct(self, at_end: Callable[[], None]) -> None:
        """Open the gates in the simulation's order to its end, call `at_end`, then open them for good."""
        try:
            for rank, seconds in self._simulated.ended:
                if not self._caught_up(seconds):
                    return
                with self._changed:
                    self._opened[rank] += 1
                    self._changed.notify_all()
            if self._caught_up(self._simulated.end):
                at_end()
        finally:
            with self._changed:
                self._free = True
                self._changed.notify_all()

    def _caught_up(self, by: float) -> bool:
        """Wait until the run has done what the simulation had done by then; whether it has."""
        s, deadline = self._simulated, time.monotonic() + PATIENCE_SECONDS
        begun, pushes, pulls = (counts(events, by) for events in (s.begun, s.pushed, s.pulled))
        if not self._overlaps:
            pulls = [0] * len(BATCHES)  # a worker at its gate has pulled
        while True:
            seen = self._look()
            if _reached(self._came, begun) and _reached(seen.pushes, pushes) and _reached(seen.pulls, pulls):
                return True
            if time.monotonic() > deadline:
                here = f"{self._came} gates reached, {list(seen.pushes)} pushes, {list(seen.pulls)} pulls"
                self.fault = f"by {by:.6f} s: {here}; {begun}, {pushes}, {pulls} in the simulation"
                return False
            with self._changed:
                self._changed.wait(LOOK_SECONDS)


def _reached(found: Sequence[int], wanted: Sequence[int]) -> bool:
    return all(f >= w for f, w in zip(found, wanted, strict=True))
