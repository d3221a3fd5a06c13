"""A step's way to the store and back as one request: the push, claims of later steps, and the pull.

A remote store does several of them at once, in order: the next one leaves before the reply to the last has
come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Generic, Protocol, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from pyps.formats.records import Span, SpanKind
from pyps.native.values import Claim, Codec, Flat, PushRequest, PushResult

MOST_CLAIMS = 16  # of a transfer: the steps of the deepest pipeline, and some more
NO_PARAMETERS: Flat = np.empty(0, np.float32)  # what a transfer that pulls none writes to
# As an exchange goes on: the first element and the count of a further run of its copy that is final.
ArrivalCallback = Callable[[int, int], object]
P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class Ask:
    """Say what a transfer is to do.

    exchanges: the pull comes with the push; otherwise after the claims, so that parameters are no older than
    a bounded policy allows. claims: of later steps, as far as the policy allows. pulls: whether parameters
    come back. alone: its sender has no other under way and waits for it, so it does not fail as an earlier
    one did; a push that is rejected, or whose values are not finite, is an error. Otherwise these are part
    of a transfer: a step that cannot be pushed is skipped. after: `first` of the last claim that its sender
    has, so that claims whose reply it did not take come again; None, with others under way: the last given.
    max_samples: as for Store.set_max_samples; None: unchanged.
    """

    exchanges: bool = False
    claims: Annotated[int, Meta(ge=0, le=MOST_CLAIMS)] = 0
    pulls: bool = True
    alone: bool = False
    after: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None
    max_samples: Annotated[int, Meta(ge=0, le=(1 << 32) - 1)] | None = None


class TransferRequest(msgspec.Struct, Generic[P], frozen=True, forbid_unknown_fields=True):
    """Say what travels: the push of a step whose samples are claimed, and what `ask` says.

    push: a PushRequest; over the link its header, as the numbers follow. codec: of the pulled parameters.
    """

    push: P
    codec: Codec = Codec.F32
    ask: Ask = Ask()


class Transferred(msgspec.Struct, frozen=True):
    """Hold what a transfer came to. It goes over the link as it is.

    result: of the push; None: the policy `rejected` it, it was `skipped`, since its values are not finite, or
    the worker was fenced before it. version: of the parameters that came back; None: none were asked for, or
    the worker was `fenced`: after the push a claim or a pull raised Fenced or NotFinite, as the next one
    will. spans: by the clock of the machine that has made or received it.
    """

    result: PushResult | None = None
    claims: tuple[Claim, ...] = ()
    version: int | None = None
    rejected: bool = False
    skipped: bool = False
    fenced: bool = False
    spans: tuple[Span, ...] = ()


class FinishTransfer(Protocol):
    """Waits for a transfer that was begun. It belongs to one thread, in the order of the beginnings."""

    def __call__(self, out: Flat, arrived: ArrivalCallback | None = None) -> Transferred:
        """Write the parameters to `out`, if any come. arrived: is called in this thread with runs of `out`
        that are final, in ascending order; a store elsewhere calls it once.
        """


def skipping(push: PushRequest) -> PushRequest:
    """Return the push of no samples that takes this one's place."""
    return PushRequest(push.staging, 0, push.hyper)


def seconds_of(spans: Iterable[Span], *kinds: SpanKind) -> float:
    """Return how long the spans of these kinds last together."""
    return sum(end - begin for kind, begin, end in spans if kind in kinds)
