"""Brings each step its batches: says to the loader what comes next, and takes what the step needs.

What comes next is the claims made ahead, under a policy that allows them; otherwise a forecast.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import fmean
from typing import Any, Self

from pyps.native.values import Claim
from pyps.worker.data.loader import Loader, LoaderOptions, Positions
from pyps.worker.data.samples import Draw, Source, seed_generators
from pyps.worker.step.client import StoreClient
from pyps.worker.step.step import Step


class RoundForecast:
    """Which claims a rank will get in the next rounds: each moves on by one round's samples.

    Nothing depends on it but what is loaded in advance: a batch is only trained if its claim came.
    round_samples: of the plan. limit: sample positions of the run; 0: without end.
    """

    def __init__(self, round_samples: int, limit: int) -> None:
        self._stride, self._limit = round_samples, limit
        self._last: Claim | None = None
        self._holds = True

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


class Waits:
    """Waits for batches: what of them is the cost of loading.

    Loader processes that began together also end together: their batches come in groups, of which only the
    first is waited for, so each counts the mean. A batch that was asked for late counts none: after a re-plan
    the loader first ends what is dropped, which later batches do not wait for.
    """

    def __init__(self, loader_workers: int) -> None:
        self._group: deque[float] = deque(maxlen=max(1, loader_workers))

    def cost(self, waited: float, early: bool) -> float:
        """Seconds of a step that has waited so long for its batch."""
        if not early:
            self._group.clear()
            return 0.0
        self._group.append(waited)
        return fmean(self._group)


class BatchFeed:
    """The batches of one run of a worker over a data set; a context manager that ends the loader.

    source, options: as for Loader.
    client: whose claims these are.
    claim_ahead: claims the next step's samples now.
    at_once: how many of a number of samples may be computed at once now.
    forecast: of claims, under a policy without claims ahead.
    """

    def __init__(
        self,
        source: Source,
        options: LoaderOptions,
        client: StoreClient,
        claim_ahead: Callable[[], None],
        at_once: Callable[[int], int],
        forecast: RoundForecast | None,
    ) -> None:
        self._seed, self._client, self._claim_ahead = source.seed, client, claim_ahead
        self._at_once, self._forecast = at_once, forecast
        self._loader = Loader(source, options)
        self._waits = Waits(self._loader.workers)
        self._began = False
        client.after_claim_ahead = self._append
        try:
            client.check_data_set(self._loader.fingerprint())
        except BaseException:
            self.close()
            raise

    def begin(self, claim: Claim) -> None:
        """A step with this claim begins."""
        ahead = self._client.ahead
        if ahead and ahead[0].first == claim.first:
            ahead.popleft()
        if self._forecast is not None:
            self._forecast.observe(claim)
        if self._loader.workers:
            self._align((claim.first, claim.count))
            self._began = True
            if self._forecast is None:
                self._claim_ahead()

    def load(self, step: Step) -> Any:
        """The step's micro-batch that has begun, when the loader has it."""
        began = time.monotonic()
        first = step.claim.first + step.claim.count - step.left - step.micro
        wanted = (first, step.micro)
        self._align((first + step.micro, step.left), wanted)
        loaded = self._loader.take(wanted)
        step.loader_seconds += loaded.seconds
        step.loader_workers = self._loader.workers
        seed_generators(self._seed, first, Draw.STEP)
        step.began = time.monotonic()
        step.spans.append(("data", began, step.began))
        step.late_seconds += self._waits.cost(step.began - began, loaded.early)
        return loaded.data

    def _align(self, rest: Positions, *first: Positions) -> None:
        """Have these loaded, then the rest of the claim, then the claims that come next."""
        wanted = list(first)
        if self._loader.workers:
            for positions in (rest, *self._next_claims()):
                wanted += self._micro_batches(positions)
        self._loader.align(wanted)

    def _next_claims(self) -> list[Positions]:
        if self._forecast is not None:
            return self._forecast.after(self._loader.room)
        return [(claim.first, claim.count) for claim in tuple(self._client.ahead)]

    def _micro_batches(self, positions: Positions) -> list[Positions]:
        first, count = positions
        found = []
        while count:
            size = self._at_once(count)
            found.append((first, size))
            first, count = first + size, count - size
        return found

    def _append(self, claim: Claim) -> None:
        """A claim was made ahead, perhaps in a background thread while this one computes."""
        if self._began and self._loader.workers:
            self._loader.append(self._micro_batches((claim.first, claim.count)))

    def close(self) -> None:
        """End the loader. Idempotent."""
        self._client.after_claim_ahead = lambda _: None
        self._loader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
