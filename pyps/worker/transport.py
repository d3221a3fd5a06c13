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
from pyps.native.values import Codec, Encoding, Flat, Hyper, PushResult
from pyps.store.codec import decode, encoded_bytes
from pyps.store.staging import StagingBuffer
from pyps.store.store import Store


@dataclass(frozen=True, slots=True)
class Gradient:
    """A ready gradient in its area: the mean over `samples` once it is multiplied by `scale`.

    samples 0: a step to skip. `base_version`: the version it was computed on; `base_params`: those
    parameters, where the policy needs it. `compute_seconds` that it took; 0: since its claim.
    `grad_norm_squared`: for SaPS; 0: not known. `codes`: the gradient, scaled and encoded already, in place
    of the staging buffer's.
    """

    staging: StagingBuffer
    samples: int
    hyper: tuple[Hyper, ...]
    scale: float
    base_version: int
    compute_seconds: float
    grad_norm_squared: float = 0.0
    base_params: Flat | None = None
    codes: NDArray[np.uint8] | None = None


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

    def __init__(self, store: Store, push: Encoding, pull: Codec, turns: bool) -> None:
        self._store, self._encoding, self._codec, self._turns = store, push, pull, turns
        self._encoded = Encoding(push.codec)  # by somebody else, who also keeps what the code does not carry
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

    def push(self, gradient: Gradient, out: Flat) -> Outcome:
        """Send a gradient; under a policy of turns fetch the parameters into `out` too.

        A fenced worker has rejoined when this returns: its claims are gone.
        """
        began, outcome = time.monotonic(), Outcome()
        try:
            self._send(gradient, out, outcome)
        except Fenced:
            outcome.fenced = True
            self._store.rejoin()
        except PushRejected:
            outcome.rejected = True
        except NotFinite:
            outcome.unencodable = True
            self._store.push(gradient.staging, 0, gradient.hyper)  # the claim was still ours
        done = time.monotonic()
        waited = began
        if outcome.result is not None and outcome.result.wait_seconds > 0.0:
            waited = min(began + outcome.result.wait_seconds, done)
            outcome.spans.append(("wait", began, waited))
        outcome.spans.append(("push" if gradient.samples else "skip", waited, done))
        return outcome

    def _send(self, g: Gradient, out: Flat, outcome: Outcome) -> None:
        scale, encoding = (g.scale, self._encoding) if g.codes is None else (1.0, self._encoded)
        if self._turns and self._codec is Codec.F32:
            outcome.result, outcome.version = self._store.exchange(
                g.staging, g.samples, g.hyper, out, scale, encoding=encoding, gradient=g.codes,
                base_version=g.base_version, compute_seconds=g.compute_seconds,
            )  # fmt: skip
            return
        outcome.result = self._store.push(
            g.staging, g.samples, g.hyper, scale, encoding=encoding, gradient=g.codes,
            base_params=g.base_params, grad_norm_squared=g.grad_norm_squared, base_version=g.base_version,
            compute_seconds=g.compute_seconds,
        )  # fmt: skip
        if self._turns:
            outcome.version = self.pull(out)
