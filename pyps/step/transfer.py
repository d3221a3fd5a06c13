"""One transfer at the store: push, claim ahead, pull; and which errors end it.

The worker, the link's server, the first of several servers and the simulator all make it by this one body.
Each gives the verbs; the body gives their order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Annotated, Any

from msgspec import Meta

from pyps.errors import Fenced, NotFinite, PushRejected
from pyps.native.values import Claim, PushResult


class Verb(Enum):
    """Name what a transfer asks of the store, and what the answer is."""

    __hash__ = object.__hash__  # Enum's own is Python

    LIMIT = "limit"  # nothing: says how many samples a claim may have, if that has changed
    PUSH = "push"  # the push's result
    EXCHANGE = "exchange"  # that, and what PULL answers
    SKIP = "skip"  # nothing: a push of no samples, in place of one whose values are not finite
    CLAIM = "claim"  # the claim of a later step; None: none now
    PULL = "pull"  # the parameters, as its user has them


MOST_CLAIMS = 16  # of a transfer: the steps of the deepest pipeline, and some more


@dataclass(frozen=True, slots=True)
class Ask:
    """Say what a transfer is to do.

    exchanges: the pull comes with the push; otherwise after the claims, so that parameters are no older than
    a bounded policy allows. claims: of later steps, as far as the policy allows. pulls: whether parameters
    come back. alone: its sender has no other under way and waits for it, so it does not fail as an earlier
    one did; a push that is rejected, or whose values are not finite, is an error. Otherwise these are part
    of a transfer: a step that cannot be pushed is skipped. after: `first` of the last claim that its sender
    has, so that claims whose reply it did not take come again; None, with others under way: the last given.
    """

    exchanges: bool = False
    claims: Annotated[int, Meta(ge=0, le=MOST_CLAIMS)] = 0
    pulls: bool = True
    alone: bool = False
    after: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None


@dataclass(slots=True)
class Done:
    """Hold what a transfer came to.

    result: of the push; None: the policy rejected it, or it was `skipped`. pulled: what came back; None:
    nothing was asked for, or there was an `error` after the push. push_seconds: from the beginning until
    the push had ended.
    """

    result: PushResult | None
    claims: tuple[Claim, ...]
    pulled: Any
    error: Fenced | NotFinite | None = None
    push_seconds: float = 0.0
    skipped: bool = False


Verbs = Generator[Verb, Any, Done]


def transfer(ask: Ask) -> Verbs:
    """The verbs of a transfer, in order; send each one's answer, or throw what it raised.

    A worker that is fenced after its push has pushed nonetheless, as
    has one whose parameters cannot be encoded. Any other error ends the transfer, and is raised.
    """
    result = pulled = None
    claims: list[Claim] = []
    skipped = False
    yield Verb.LIMIT
    try:
        if ask.exchanges:
            result, pulled = yield Verb.EXCHANGE
        else:
            result = yield Verb.PUSH
    except (PushRejected, NotFinite) as error:
        if ask.alone:
            raise
        skipped = isinstance(error, NotFinite)
    if skipped:
        yield Verb.SKIP
    try:
        if ask.exchanges and pulled is None:
            pulled = yield Verb.PULL
        while len(claims) < ask.claims and (claim := (yield Verb.CLAIM)) is not None:
            claims.append(claim)
        if ask.pulls and pulled is None:
            pulled = yield Verb.PULL
    except (Fenced, NotFinite) as error:
        if result is None:
            raise
        return Done(result, tuple(claims), None, error)
    return Done(result, tuple(claims), pulled, skipped=skipped)


class Transfers:
    """The transfers of one worker, one after another.

    After one that failed all but those that are alone fail alike, until the worker starts or rejoins: they
    were sent before it knew, and a push would be taken for the one that failed.
    """

    def __init__(self) -> None:
        self._failed: Exception | None = None

    def steps(self, ask: Ask) -> Verbs:
        """The verbs of a transfer, as `transfer` has them. Raises what ended an earlier one."""
        if ask.alone:
            return (yield from transfer(ask))
        self.check()
        try:
            done = yield from transfer(ask)
        except Exception as error:
            self._failed = error
            raise
        self._failed = done.error
        return done

    def run(self, ask: Ask, verbs: Mapping[Verb, Callable[[], Any]]) -> Done:
        """Make a transfer by these calls. Raises what ended it, or an earlier one."""
        return _run(self.steps(ask), verbs)

    def check(self) -> None:
        """Raise what ended an earlier one."""
        if self._failed is not None:
            raise self._failed

    def fail(self, error: Exception) -> None:
        """A transfer failed before its push."""
        self._failed = error

    def begin_again(self) -> None:
        """The worker starts or rejoins."""
        self._failed = None


def claims_after(ask: Ask, start_ahead: Callable[[int | None], Claim]) -> Callable[[], Claim | None]:
    """Return what answers CLAIM."""
    last = ask.after

    def claim() -> Claim | None:
        nonlocal last
        found = start_ahead(last)
        if not found.count:
            return None
        last = None if last is None else found.first
        return found

    return claim


def _run(steps: Verbs, verbs: Mapping[Verb, Callable[[], Any]]) -> Done:
    began, pushed = time.monotonic(), 0.0
    try:
        verb = next(steps)
        while True:
            try:
                answer = verbs[verb]()
            except Exception as error:
                following = partial(steps.throw, error)
            else:
                following = partial(steps.send, answer)
            if verb in (Verb.PUSH, Verb.EXCHANGE, Verb.SKIP):
                pushed = time.monotonic() - began
            verb = following()
    except StopIteration as end:
        done: Done = end.value
        done.push_seconds = pushed
        return done
