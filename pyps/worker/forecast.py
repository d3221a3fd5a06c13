"""Which claims a rank will get in the next rounds, where every round assigns samples to all ranks in order.

Nothing depends on a forecast but what is loaded in advance: a batch is only trained if its claim came.
"""

from __future__ import annotations

from typing import Self

from pyps.native.values import Claim
from pyps.worker.settings import Settings

Positions = tuple[int, int]  # first position, samples


class RoundForecast:
    """The rank's claim moves on by one round's samples.

    round_samples: of the plan. limit: sample positions of the run; 0: without end.
    """

    def __init__(self, round_samples: int, limit: int) -> None:
        self._stride, self._limit = round_samples, limit
        self._last: Claim | None = None
        self._holds = True

    @classmethod
    def of(cls, settings: Settings) -> Self:
        return cls(sum(settings.batches), settings.samples)

    def observe(self, claim: Claim) -> None:
        """Take in the claim of the step under way. After a wrong forecast the next one must hold first."""
        last, self._last = self._last, claim
        if last is None:
            return
        expected = self._after(last, 1)
        self._holds = expected == (claim.first, claim.count)
        if claim.round == last.round + 1 and claim.first > last.first:
            self._stride = claim.first - last.first

    def after(self, claims: int) -> list[Positions]:
        """The claims after the last one observed, as many as are known to come."""
        if self._last is None or not self._holds:
            return []
        found = (self._after(self._last, k + 1) for k in range(claims))
        return [positions for positions in found if positions[1] > 0]

    def _after(self, claim: Claim, rounds: int) -> Positions:
        first = claim.first + rounds * self._stride
        left = self._limit - first if self._limit else claim.batch
        return first, max(0, min(claim.batch, left))
