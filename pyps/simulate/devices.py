"""How long a simulated worker computes: its cost model, times what makes real devices uneven.

    seconds(b, t) = (T(b) + added(t)) * lognormal * uniform * spike * drift(t) * co-tenants(t)

Every worker draws from a stream of its own, so that nothing depends on the order of events.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pyps.formats import Fit, Jitter
from pyps.profiler.fit import predict_seconds

DRAWS = 128  # at a time


@dataclass(frozen=True)
class Slowdown:
    """From `begin` to `end` (seconds) every step takes `factor` times as long, and `added` seconds more."""

    begin: float
    end: float = math.inf
    factor: float = 1.0
    added: float = 0.0


class Device:
    """One worker's clock; `cost` is seconds as a function of the batch, before any jitter."""

    def __init__(
        self,
        cost: Callable[[int], float],
        jitter: Jitter,
        slowdowns: tuple[Slowdown, ...],
        seed: int,
        rank: int,
        recorded: tuple[float, ...] = (),
    ) -> None:
        self._cost, self._jitter, self._slowdowns = cost, jitter, slowdowns
        self._draw = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(rank,)))
        self._phase = self._draw.uniform(0.0, 2.0 * math.pi)
        self._plain = not slowdowns and jitter.drift == 0.0
        self._factors: list[float] = []
        self._costs: dict[int, float] = {}
        self._recorded = list(reversed(recorded))

    def seconds(self, batch: int, now: float) -> float:
        """How long a step of `batch` samples takes that begins at `now` (seconds)."""
        if self._recorded:
            return self._recorded.pop()
        if not self._factors:
            self._factors = self._new_factors()
        if batch not in self._costs:
            self._costs[batch] = self._cost(batch)
        base, factor = self._costs[batch], self._factors.pop()
        if self._plain:
            return base * factor
        for s in self._slowdowns:
            if s.begin <= now < s.end:
                base, factor = base + s.added, factor * s.factor
        j = self._jitter
        return base * factor * (1.0 + j.drift * math.sin(2.0 * math.pi * now / j.drift_seconds + self._phase))

    def _new_factors(self) -> list[float]:
        """Lognormal with mean 1, uniform around 1, and now and then a spike."""
        j = self._jitter
        normal = self._draw.standard_normal(DRAWS)
        factors = np.exp(j.sigma * normal - 0.5 * j.sigma**2)
        factors *= self._draw.uniform(1.0 - j.spread, 1.0 + j.spread, DRAWS)
        factors = np.where(self._draw.random(DRAWS) < j.spike_share, factors * j.spike_factor, factors)
        drawn: list[float] = factors.tolist()
        return drawn


def fitted(fit: Fit) -> Callable[[int], float]:
    """The cost model of a profile."""
    return lambda batch: predict_seconds(fit, batch)
