"""What a worker sends and fetches: a gradient to the store, parameters from it, each in its codec.

A Transfer may be used by one thread at a time, which need not always be the same.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pyps.errors import Fenced, NotFinite, PushRejected
from pyps.formats.records import Span
from pyps.native.values import Codec, Flat, PushRequest, PushResult
from pyps.store.codec import decode, encoded_bytes
from pyps.store.store import Store


@dataclass(slots=True)
class Outcome:
    """What became of a gradient: `result`, or why it was dropped; when it travelled.

    `version`: of parameters that were pulled after it. `unencodable`: the codec met what is not finite.
    """

    result: PushResult | None = None
    fenced: bool = False
    rejected: bool = False
    unencodable: bool = False
    version: int | None = None
    spans: list[Span] = field(default_factory=list)


class Transfer:
    """A worker's way to a store and back. `turns`: a push and the pull after it are one turn."""

    def __init__(self, store: Store, pull: Codec, turns: bool) -> None:
        self._store, self._codec, self._turns = store, pull, turns
        self._codes: NDArray[np.uint8] | None = None

    def pull(self, out: Flat) -> int:
        """Fetch the parameters, each chunk whole, from the store's fp32 ones; the version."""
        if self._codec is Codec.F32:
            return self._store.pull(out)[1]
        if self._codes is None:
            self._codes = np.empty(encoded_bytes(self._codec, out.size), np.uint8)
        _, version = self._store.pull_encoded(self._codec, self._codes)
        decode(self._codes, self._codec, out.size, out)
        return version

    def push(self, request: PushRequest, out: Flat) -> Outcome:
        """Send a gradient; under a policy of turns fetch the parameters into `out` too.

        A fenced worker has rejoined when this returns: its claims are gone.
        """
        began, outcome = time.monotonic(), Outcome()
        try:
            self._send(request, out, outcome)
        except Fenced:
            outcome.fenced = True
            self._store.rejoin()
        except PushRejected:
            outcome.rejected = True
        except NotFinite:
            outcome.unencodable = True
            self._store.send(PushRequest(request.staging, 0, request.hyper))  # the claim was still ours
        done = time.monotonic()
        waited = began
        if outcome.result is not None and outcome.result.wait_seconds > 0.0:
            waited = min(began + outcome.result.wait_seconds, done)
            outcome.spans.append(("wait", began, waited))
        outcome.spans.append(("push" if request.samples else "skip", waited, done))
        return outcome

    def _send(self, request: PushRequest, out: Flat, outcome: Outcome) -> None:
        if self._turns and self._codec is Codec.F32:
            outcome.result, outcome.version = self._store.send_and_pull(request, out)
            return
        outcome.result = self._store.send(request)
        if self._turns:
            outcome.version = self.pull(out)
