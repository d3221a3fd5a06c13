"""One transfer at the store: push, claim ahead, pull; and which errors end it.

The worker, the link's server, the first of several servers and the simulator all make it by this one body.
Each gives the verbs; the body gives their order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from enum import Enum
from functools import partial
from typing import Any, Protocol

import msgspec

from pyps.errors import Fenced, NotFinite, PushRejected
from pyps.formats.records import Span
from pyps.native.transfer import Ask, Transferred
from pyps.native.values import Claim


class Verb(Enum):
    """Name what a transfer asks of the store, and what the answer is."""

    __hash__ = object.__hash__  # Enum's own is Python

    LIMIT = "limit"  # nothing: says how many samples a claim may have
    PUSH = "push"  # the push's result
    EXCHANGE = "exchange"  # that, and what PULL answers; None: it is to be asked for
    SKIP = "skip"  # nothing: a push of no samples, in place of one whose values are not finite
    CLAIM = "claim"  # the claim of a later step; None: none now
    PULL = "pull"  # the version of the parameters, which its user has


Verbs = Generator[Verb, Any, Transferred]


class Claiming(Protocol):
    """A store as far as LIMIT and CLAIM need it."""

    def set_max_samples(self, most: int) -> None: ...
    def start_ahead(self, after: int | None) -> Claim: ...


class Transfers:
    """The transfers of one worker, one after another.

    After one that failed all but those that are alone fail alike, until the worker starts or rejoins: they
    were sent before it knew, and a push would be taken for the one that failed.
    """

    def __init__(self) -> None:
        self._failed: Exception | None = None

    def steps(self, ask: Ask) -> Verbs:
        """The verbs of a transfer, in order; send each one's answer, or throw what it raised.

        A worker that is fenced after its push has pushed nonetheless, as has one whose parameters cannot be
        encoded. Any other error ends the transfer, and is raised; so is what ended an earlier one.
        """
        result = version = None
        claims: list[Claim] = []
        rejected = skipped = False
        if not ask.alone:
            self.check()
        try:
            if ask.max_samples is not None:
                yield Verb.LIMIT
            try:
                if ask.exchanges:
                    result, version = yield Verb.EXCHANGE
                else:
                    result = yield Verb.PUSH
            except (PushRejected, NotFinite) as error:
                if ask.alone:
                    raise
                skipped = isinstance(error, NotFinite)
                rejected = not skipped
            if skipped:
                yield Verb.SKIP
            if ask.exchanges and version is None:
                version = yield Verb.PULL
            while len(claims) < ask.claims and (claim := (yield Verb.CLAIM)) is not None:
                claims.append(claim)
            if ask.pulls and version is None:
                version = yield Verb.PULL
        except Exception as error:
            if not ask.alone:
                self._failed = error
            if result is None or not isinstance(error, Fenced | NotFinite):
                raise
            return Transferred(result, tuple(claims), fenced=True)
        return Transferred(result, tuple(claims), version, rejected, skipped)

    def run(self, ask: Ask, store: Claiming, verbs: Mapping[Verb, Callable[[], Any]]) -> Transferred:
        """Make a transfer: LIMIT and CLAIM by the store, the others by these calls; when they were made.

        Raises what ended it, or an earlier one.
        """
        own = {
            Verb.LIMIT: lambda: store.set_max_samples(ask.max_samples or 0),
            Verb.CLAIM: _claims(ask, store),
        }
        return _run(self.steps(ask), {**own, **verbs})

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


def _claims(ask: Ask, store: Claiming) -> Callable[[], Claim | None]:
    """Return what answers CLAIM."""
    last = ask.after

    def claim() -> Claim | None:
        nonlocal last
        found = store.start_ahead(last)
        if not found.count:
            return None
        last = None if last is None else found.first
        return found

    return claim


def _run(steps: Verbs, verbs: Mapping[Verb, Callable[[], Any]]) -> Transferred:
    pushed = began = time.monotonic()
    pulls: tuple[Span, ...] = ()
    try:
        verb = next(steps)
        while True:
            asked = time.monotonic()
            try:
                answer = verbs[verb]()
            except Exception as error:
                following = partial(steps.throw, error)
            else:
                following = partial(steps.send, answer)
            if verb in (Verb.PUSH, Verb.EXCHANGE, Verb.SKIP):
                pushed = time.monotonic()
            elif verb is Verb.PULL:
                pulls = (("pull", asked, time.monotonic()),)
            verb = following()
    except StopIteration as end:
        done: Transferred = end.value
    waited = min(began + done.result.wait_seconds, pushed) if done.result is not None else began
    waits: tuple[Span, ...] = (("wait", began, waited),) if waited > began else ()
    return msgspec.structs.replace(done, spans=(*waits, ("push", waited, pushed), *pulls))
