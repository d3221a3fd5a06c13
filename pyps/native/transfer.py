"""A step's way to the store and back as one request: the push, claims of later steps, and the pull.

A remote store does several of them at once, in order: the next one leaves before the reply to the last has
come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from pyps.formats.records import Span
from pyps.native.values import Claim, Codec, Flat, PushRequest, PushResult
from pyps.step.transfer import Ask

PULLS = Ask()
NO_PARAMETERS: Flat = np.empty(0, np.float32)  # what a transfer that pulls none writes to
# As an exchange goes on: the first element and the count of a further run of its copy that is final.
ArrivalCallback = Callable[[int, int], object]


class TransferRequest(NamedTuple):
    """Say what travels: the push of a step whose samples are claimed, and what `ask` says.

    codec: of the pulled parameters. max_samples: as for Store.set_max_samples; None: unchanged.
    """

    push: PushRequest
    codec: Codec = Codec.F32
    ask: Ask = PULLS
    max_samples: int | None = None


class Transferred(NamedTuple):
    """Hold what a transfer came to.

    result: of the push; None: the policy rejected it, or it was `skipped`, since its values are not finite.
    version: of the parameters that came back; None: none were asked for, or the worker was `fenced`: after
    the push a claim or a pull raised Fenced or NotFinite, as the next one will.
    """

    result: PushResult | None
    claims: tuple[Claim, ...]
    version: int | None
    spans: list[Span]
    skipped: bool = False
    fenced: bool = False


class FinishTransfer(Protocol):
    """Waits for a transfer that was begun. It belongs to one thread, in the order of the beginnings."""

    def __call__(self, out: Flat, arrived: ArrivalCallback | None = None) -> Transferred:
        """Write the parameters to `out`, if any come. arrived: is called in this thread with runs of `out`
        that are final, in ascending order; a store elsewhere calls it once.
        """


def skipping(push: PushRequest) -> PushRequest:
    """Return the push of no samples that takes this one's place."""
    return PushRequest(push.staging, 0, push.hyper)


def spans_of(began: float, pushed: float, pulled: float, result: PushResult | None) -> list[Span]:
    """Return the spans of a transfer over a link, of which the push ended with its wait for others.

    began, pushed, pulled: seconds of the monotonic clock. result: of the push; None: rejected.
    """
    waited = min(result.wait_seconds, pushed - began) if result is not None else 0.0
    arrived = pushed - waited
    waits: list[Span] = [("wait", arrived, pushed)] if waited > 0.0 else []
    return [("push", began, arrived), *waits, ("pull", pushed, pulled)]
