"""A step's way to the store and back as one request: the push, claims of later steps, and the pull.

A remote store does several of them at once, in order: the next one leaves before the reply to the last has
come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pyps.formats.records import Span
from pyps.native.values import Claim, Codec, Flat, PushRequest, PushResult


@dataclass(frozen=True)
class TransferRequest:
    """push: of a step whose samples are claimed. codec: of the pulled parameters. exchange: the
    pull comes with the push; else after the claims, so that parameters are no older than a bounded policy
    allows. claims: steps to claim ahead, as far as the policy allows. max_samples: as for
    Store.set_max_samples; None: unchanged.
    """

    push: PushRequest
    codec: Codec = Codec.F32
    exchange: bool = False
    claims: int = 0
    max_samples: int | None = None


@dataclass(frozen=True)
class Transferred:
    """result: of the push; None: the policy rejected it. version: of the parameters that came back; None:
    after the push a pull raised Fenced or NotFinite, as the next one will.
    """

    result: PushResult | None
    claims: tuple[Claim, ...]
    version: int | None
    spans: list[Span]


def spans_of(began: float, pushed: float, pulled: float, result: PushResult | None) -> list[Span]:
    """A transfer's spans, of which the push ended with its wait for others.

    began, pushed, pulled: seconds of the monotonic clock. result: of the push; None: rejected.
    """
    waited = min(result.wait_seconds, pushed - began) if result is not None else 0.0
    arrived = pushed - waited
    waits: list[Span] = [("wait", arrived, pushed)] if waited > 0.0 else []
    return [("push", began, arrived), *waits, ("pull", pushed, pulled)]


# As an exchange goes on: the first element and the count of a further run of its copy that is final.
ArrivalCallback = Callable[[int, int], object]
FinishTransfer = Callable[[Flat], Transferred]  # waits, and writes the parameters
