"""Brings each step its batches: says to the loader what comes next, and takes what the step needs.

What comes next is the claims made ahead, under a policy that allows them; otherwise a forecast.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from pyps.native.values import Claim
from pyps.worker.client import StoreClient
from pyps.worker.forecast import Positions, RoundForecast
from pyps.worker.loader import Loader, LoaderOptions
from pyps.worker.samples import Source
from pyps.worker.seeding import Draw, seed_generators
from pyps.worker.step import Step


class BatchFeed:
    """The batches of one run of a worker over a data set; a context manager that ends the loader.

    source, options: as for Loader.
    client: whose claims these are.
    claim_ahead: claims the next step's samples now.
    at_once: of so many samples, how many may be computed at once now.
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
        batch, seconds = self._loader.take(wanted)
        step.loader_seconds += seconds
        step.loader_workers = self._loader.workers
        seed_generators(self._seed, first, Draw.STEP)
        step.began = time.monotonic()
        step.spans.append(("data", began, step.began))
        return batch

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
        self._client.after_claim_ahead = _ignore
        self._loader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        self.close()


def _ignore(_: Claim) -> None:
    """The loader has ended."""
