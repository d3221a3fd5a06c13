"""Local steps in virtual time: a worker takes steps of its own optimizer, and pushes how far they brought it.

The optimizers are those of the store (pyps.simulate.optimizer); each worker's keeps its state from claim to
claim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyps.native.values import Hyper, Optimizer
from pyps.simulate.optimizer import OptimizerState, Vector
from pyps.step.parts import even_steps

if TYPE_CHECKING:
    from pyps.simulate.problem import Objective


@dataclass(frozen=True)
class LocalOptimizer:
    """The workers' own optimizer: its kind, and its constants or learning rate."""

    optimizer: Optimizer | str = "sgd"
    lr: float | Hyper = 0.1


class LocalWorkers:
    """Pseudo-gradients of every worker's local steps on an objective."""

    def __init__(self, objective: Objective, steps: LocalOptimizer) -> None:
        self._objective = objective
        self._kind = Optimizer.of(steps.optimizer)
        self._hyper = steps.lr if isinstance(steps.lr, Hyper) else Hyper(steps.lr)
        self._states: dict[int, OptimizerState] = {}
        self._ways: dict[int, Vector] = {}  # of the steps since each worker's last push, where it has merged

    def gradient(self, worker: int, w: Vector, first: int, count: int, most: int) -> tuple[Vector, float]:
        """The way back from where the local steps lead, and the loss of the last one; arguments as below."""
        loss = self.advance(worker, w, first, count, most)
        return self._ways.pop(worker), loss

    def advance(self, worker: int, w: Vector, first: int, count: int, most: int) -> float:
        """Take local steps; the loss of the last one.

        worker: whose. w: what it pulled, from which its steps since the last push lead further. first, count:
        the samples of these steps. most: of one step; 0: all.
        """
        state = self._states.setdefault(worker, OptimizerState(self._kind, self._hyper, w.size))
        at = w - self._ways.pop(worker, 0.0)
        loss, end = float("nan"), first + count
        while first < end:
            size = even_steps(end - first, most or count)
            gradient, loss = self._objective.gradient(at, first, size)
            at, first = state.step(at, gradient, 1.0), first + size
        self._ways[worker] = w - at
        return loss

    def forget(self, worker: int) -> None:
        """Drop the steps since the last push."""
        self._ways.pop(worker, None)
