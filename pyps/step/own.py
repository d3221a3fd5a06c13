"""A worker's own gradients under way: the part of the next rounds that it knows.

Where rounds overlap in a pipeline, a step is computed while the worker's gradients of the rounds before it
are under way. A store that looks ahead for it (view_lookahead) adds the way of momentum alone. That of these
gradients follows from their constants, for SGD with or without momentum. So the worker, real or simulated,
goes on along them, as if the others' were alike. Adam's pulls go on along its mean. What they lack is how the
gradients under way differ from it, and the worker adds that of its own, by moments that it keeps itself.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

from pyps.native.values import Hyper, Optimizer
from pyps.step.machine import StepRules

G = TypeVar("G")
ADAM = Optimizer.ADAM, Optimizer.ADAMW
# The loss after as many samples over that without a pipeline, with 2 to 32 workers, an MLP and a transformer:
# with 2 and with 3 steps under way, at half of the best rate and at the best (benchmarks/pipelined.py).
MEASURED = {
    Optimizer.SGD: (("1.00 to 1.10", "1.05 to 1.19"), ("1.01 to 1.13", "1.07 to 1.41")),
    Optimizer.MOMENTUM: (
        ("0.97 to 1.02", "0.85 to 1.14, or diverged"),
        ("0.98 to 1.23", "0.77 to 1.42, or diverged"),
    ),
    Optimizer.ADAMW: (("0.86 to 1.05", "1.14 to 3.1"), ("1.09 to 1.38", "2.0 to 12")),
}


def follows_own(rules: StepRules, optimizer: Optimizer, *, lookahead: bool) -> bool:
    """Return whether a worker goes on along its own gradients. `lookahead`: of the policy."""
    overlaps = rules.depth > 1 and rules.needs.waits_for_rounds and not rules.local
    return overlaps and lookahead and optimizer in (Optimizer.SGD, Optimizer.MOMENTUM, *ADAM)


def loss_of_pipeline(optimizer: Optimizer, depth: int) -> str:
    """Return what a pipeline of so many steps cost where it was measured, in words."""
    name = Optimizer.ADAMW if optimizer in ADAM else optimizer
    half, best = MEASURED[name][min(depth, 3) - 2]
    return (
        f"{depth} steps under way, {optimizer.name}: after as many samples the loss was {half} times that "
        f"without a pipeline at half of the best learning rate, {best} at the best; less of either costs less"
    )


def way_of(hyper: Hyper, optimizer: Optimizer, steps: int) -> float:
    """How far a gradient of ones moves a parameter down in its own step and those after, `steps` in all; for
    Adam a difference of ones, as pyps.worker.step.onward gives it.
    """
    if optimizer in ADAM:
        return hyper.lr * (1.0 - hyper.betas[0] ** steps)
    if optimizer is Optimizer.SGD:
        return hyper.lr * (steps > 0)
    moved = (1.0 - hyper.dampening) * sum(hyper.momentum**k for k in range(steps))
    return hyper.lr * (hyper.momentum * moved + (steps > 0) if hyper.nesterov else moved)


def share_of_way(hyper: Hyper, optimizer: Optimizer, part: float) -> float:
    """Return how much of its own gradient's way a worker goes on: min(1, 2 sqrt(part) / (1 - momentum)).

    part: of a global batch, that the gradient's samples are. Let each worker go on by a share a. Where the
    curvature is h the workers' mean then takes w - lr h (a w + (1 - a) w_late): from a = 1/2 on no lateness
    makes that diverge where lr h < 2, as without a pipeline. But each worker's own point is off by the noise
    of its gradient, whose variance is 1 / part that of a round's, and where the loss is no quadratic that
    harms. With this a it is off by at most two steps' noise of a round, lr / (1 - momentum) each, and up to
    16 workers have their half. Adam's own moments weigh what a worker adds, so all of it counts.
    """
    return 1.0 if optimizer in ADAM else min(1.0, 2.0 * math.sqrt(part) / max(1.0 - hyper.momentum, 1e-6))


class UnderWay(Generic[G]):
    """Gradients under way, and the steps of each that the worker's parameters have."""

    def __init__(self) -> None:
        self._under_way: deque[tuple[G, int]] = deque()

    def sent(self, gradient: G) -> None:
        self._under_way.append((gradient, 0))

    def arrived(self) -> None:
        """The oldest is no more under way."""
        self._under_way.popleft()

    def loaded(self) -> None:
        """Parameters came that have no step of those under way."""
        self._under_way = deque((gradient, 0) for gradient, _ in self._under_way)

    def go_on(self) -> Iterator[tuple[G, int, int]]:
        """For the next step: each gradient, the steps of it that the parameters have, and should have."""
        count = len(self._under_way)
        for k, (gradient, have) in enumerate(self._under_way):
            yield gradient, have, count - k
        self._under_way = deque((gradient, count - k) for k, (gradient, _) in enumerate(self._under_way))
