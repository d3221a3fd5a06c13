"""The store's optimizers in float64: a step, or a part of one, as csrc/kernels/ takes it.

A part f of a step goes a m + b g, with m the momentum before and g the gradient: docs/concepts/policies.md.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pyps.native.values import Hyper, Optimizer

Vector = NDArray[np.float64]


def coefficients(beta: float, part: float, left: float, rate: float, steady: float) -> tuple[float, float]:
    """(a, b) of a part of a step.

    left: what a whole step's way has of the momentum before it. rate, steady: way and momentum of a step, for
    each unit of the gradient, once that has been the same for long.
    """
    a = left * (1.0 - beta**part) / (1.0 - beta)
    return a, rate * part - a * steady


class OptimizerState:
    """An optimizer with its state vectors and the steps that it has taken."""

    def __init__(self, kind: Optimizer, hyper: Hyper, size: int) -> None:
        self.kind, self.hyper, self.steps = kind, hyper, 0.0
        self.first, self.second = np.zeros(size), np.zeros(size)

    def step(self, w: Vector, gradient: Vector, part: float) -> Vector:
        """The parameters after a part of a step; `w` is unchanged."""
        h = self.hyper
        g = np.clip(gradient, -h.clip, h.clip) if h.clip else gradient
        d = g if self.kind is Optimizer.ADAMW else g + h.weight_decay * w
        moved = {
            Optimizer.SGD: self._sgd,
            Optimizer.MOMENTUM: self._momentum,
            Optimizer.ADAGRAD: self._adagrad,
        }.get(self.kind, self._adam)(d, part)
        if self.kind is Optimizer.ADAMW:
            decay = h.lr * h.weight_decay
            w = w * ((1.0 - decay) ** part if decay < 1.0 else 1.0 - part * decay)
        self.steps += part
        return w - moved

    def ahead(
        self, w: Vector, distance: float, gradient: Vector | None = None, *, rounds: bool = False
    ) -> Vector:
        """`w` after `distance` more steps, if all their gradients are like this one; None: zero.

        Weight decay is left out. This gradient is the less like those the longer the distance: above 1 it
        counts for a step of 1 / distance**2. `rounds`: as kernels_ahead has it.
        """
        h, adam = self.hyper, self.kind in (Optimizer.ADAM, Optimizer.ADAMW)
        beta = h.betas[0] if adam else h.momentum if self.kind is Optimizer.MOMENTUM else 0.0
        if not self.steps > 0.0 or not distance > 0.0 or beta == 0.0:
            return w
        g = np.zeros_like(w) if gradient is None else gradient
        g = np.clip(g, -h.clip, h.clip) if h.clip else g
        steady, left, rate = (1.0, beta, 1.0) if adam else self._steady(1.0 - h.dampening)
        a, _ = (distance + 0.5, 0.0) if adam and rounds else coefficients(beta, distance, left, rate, steady)
        _, b = coefficients(beta, min(distance, distance**-2), left, rate, steady)
        way = a * self.first + b * g
        if adam:
            root = np.sqrt(self.second / (1.0 - h.betas[1] ** self.steps))
            way = way / (1.0 - beta**self.steps) / (root + h.eps)
        return np.asarray(w - h.lr * way)

    def _sgd(self, d: Vector, part: float) -> Vector:
        return self.hyper.lr * part * d

    def _steady(self, gain: float) -> tuple[float, float, float]:
        """For each unit of a constant gradient: momentum; then `left` and `rate` of `coefficients`."""
        beta = self.hyper.momentum
        steady = gain / (1.0 - beta)
        return (steady, beta * beta, beta * steady + 1.0) if self.hyper.nesterov else (steady, beta, steady)

    def _momentum(self, d: Vector, part: float) -> Vector:
        h, beta = self.hyper, self.hyper.momentum
        steady, left, rate = self._steady(1.0 if self.steps + part / 2 < 1.0 else 1.0 - h.dampening)
        a, b = coefficients(beta, part, left, rate, steady)
        moved = h.lr * (a * self.first + b * d)
        self.first = beta**part * self.first + (1.0 - beta**part) * steady * d
        return moved

    def _adam(self, d: Vector, part: float) -> Vector:
        h, (beta1, beta2) = self.hyper, self.hyper.betas
        a, b = coefficients(beta1, part, beta1, 1.0, 1.0)
        calmed = d
        if self.steps > 0.0:
            mean = self.first / (1.0 - beta1**self.steps)
            calmed = mean + math.sqrt(part) * (d - mean)
        way = (a * self.first + b * d) / (1.0 - a / part * beta1**self.steps)
        self.first = beta1**part * self.first + (1.0 - beta1**part) * d
        self.second = beta2**part * self.second + (1.0 - beta2**part) * calmed * calmed
        root = np.sqrt(self.second / (1.0 - beta2 ** (self.steps + part)))
        moved: Vector = h.lr * way / (root + h.eps)
        return moved

    def _adagrad(self, d: Vector, part: float) -> Vector:
        h = self.hyper
        self.first = self.first + part * d * d
        return part * h.lr / (1.0 + self.steps * h.lr_decay) * d / (np.sqrt(self.first) + h.eps)
