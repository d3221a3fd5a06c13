"""The compute time of a simulated worker: its cost model, times the jitter of real devices.

    seconds(b, t) = (T(b) + added(t)) * lognormal * uniform * half-normal * spike * drift(t) * co-tenants(t)

Every worker has its own random stream, so that no draw depends on the order of events.
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


class DeviceModel:
    """Compute times of one worker.

    cost: seconds of a step as a function of its batch, without jitter. jitter, slowdowns: what changes them.
    seed, rank: of the random stream. recorded: seconds of the first steps, which replace the model's.
    """

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
        """Seconds that a step of `batch` samples takes if it begins at `now` (seconds)."""
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
        """DRAWS factors: lognormal with mean 1, uniform around 1, half-normal above 1, and rare spikes."""
        j = self._jitter
        normal = self._draw.standard_normal(DRAWS)
        factors = np.exp(j.sigma * normal - 0.5 * j.sigma**2)
        factors *= self._draw.uniform(1.0 - j.spread, 1.0 + j.spread, DRAWS)
        factors = np.where(self._draw.random(DRAWS) < j.spike_share, factors * j.spike_factor, factors)
        if j.half_normal:
            factors *= 1.0 + j.half_normal * np.abs(self._draw.standard_normal(DRAWS))
        drawn: list[float] = factors.tolist()
        return drawn


def fitted_cost(fit: Fit) -> Callable[[int], float]:
    """The cost model of a profile: seconds as a function of the batch."""
    return lambda batch: predict_seconds(fit, batch)
