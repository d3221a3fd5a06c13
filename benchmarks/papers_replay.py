"""A recorded run decided again: what its workers asked, in the order and at the times they did.

The decision core answers in virtual time. Inputs are times, and the version that a pull found; what is
compared are the decisions: the samples of each claim, the version that each gradient went into, and which
were dropped. Records do not hold gradients' norms, by which Ringmaster's threshold is set.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pyps.errors import Ended, PushRejected
from pyps.metrics import StepRecord
from pyps.native.core import Core
from pyps.policy import Policy
from pyps.values import Config, Moment, Optimizer

WAIT, AREAS, SECOND = 2, 2, 10**9
Event = tuple[int, int, str, int]  # nanoseconds, order of equals, what, record


@dataclass
class Decided:
    """What the core said of one step; nothing yet: None."""

    first: int | None = None
    samples: int | None = None
    version: int | None = None
    rejected: bool = False


def differences(
    records: Sequence[StepRecord], policy: Policy, batches: tuple[int, ...], samples: int
) -> list[str]:
    """Each decision that came out otherwise, in words."""
    decided = Again(records, policy, batches, samples).decide()
    found = []
    for record, d in zip(records, decided, strict=True):
        version = None if record.rejected else record.version
        was = (record.first, record.samples, version, record.rejected)
        now = (d.first, d.samples, d.version, d.rejected)
        if was != now:
            found.append(f"rank {record.rank} step {record.step}: was {was}, is {now}")
    return found


class Again:
    """One run's records through a core of its own."""

    def __init__(
        self, records: Sequence[StepRecord], policy: Policy, batches: tuple[int, ...], samples: int
    ) -> None:
        self._records, self._policy = records, policy
        config = Config(
            (), (), batches, 1, Optimizer.SGD, policy.number, policy.round_timeout_seconds, samples, 0,
            len(batches), 0, AREAS, policy.rules(),
        )  # fmt: skip
        self._core = Core(config)
        self._decided = [Decided() for _ in records]
        self._pushes = [0] * len(batches)
        self._staged: dict[tuple[int, int], int] = {}  # rank and area -> record, in the open round
        self._rounds = 0

    def decide(self) -> list[Decided]:
        for rank in range(len(self._pushes)):
            self._core.step(Moment.JOIN, rank, 1, rank=rank)
        for now, _, what, k in self._events():
            getattr(self, f"_{what}")(k, now)
        return self._decided

    def _events(self) -> list[Event]:
        """By time; pushes never before those of earlier versions, which their recorded ends may be."""
        origin = min(r.spans[0][1] for r in self._records) - 1.0
        order = sorted(range(len(self._records)), key=lambda k: self._pushed_at(k))
        order.sort(key=lambda k: self._records[k].version if self._alone(k) else 0)
        return sorted(self._timed(order, origin))

    def _timed(self, order: list[int], origin: float) -> Iterator[Event]:
        latest = 0
        for place, k in enumerate(order):
            r = self._records[k]
            ends = {kind: end for kind, _, end in reversed(r.spans)}  # of the first of each kind
            yield _ns(ends["wait"] - origin), place, "start", k
            if not (self._policy.turns and r.step > 1):
                yield _ns(ends["pull"] - origin), place, "pull", k
            pushed = _ns(self._pushed_at(k) - origin)
            if self._alone(k):
                pushed = latest = max(latest, pushed)
            yield pushed, place, "push", k

    def _alone(self, k: int) -> bool:
        """Whether the record's gradient is a version of its own."""
        return not self._records[k].rejected and self._records[k].sources == 1

    def _pushed_at(self, k: int) -> float:
        """When the gradient was there; in a ring, when its turn had come."""
        spans = self._records[k].spans
        return (
            spans[-1][1] if self._policy.turns else next(end for kind, _, end in spans if kind == "compute")
        )

    # What a worker asks.

    def _start(self, k: int, now: int) -> None:
        try:
            d = self._core.step(Moment.START, self._records[k].rank, now)
        except Ended:
            return
        if d.verdict != WAIT:
            self._decided[k].first, self._decided[k].samples = d.first, d.count

    def _pull(self, k: int, now: int) -> None:
        r = self._records[k]
        version = r.version if r.rejected else r.version - 1 - r.staleness
        self._core.step(Moment.PULL, r.rank, now, version=version)

    def _push(self, k: int, now: int) -> None:
        r, decided = self._records[k], self._decided[k]
        if decided.samples is None:  # it may not even have begun
            return
        area = self._pushes[r.rank] % AREAS
        self._pushes[r.rank] += 1
        if self._policy.turns:
            self._core.step(Moment.GATE, r.rank, now)
        self._staged[r.rank, area] = k
        try:
            d = self._core.push(
                r.rank, now, area, min(r.samples, decided.samples), _ns(r.spans[-1][1] - r.spans[0][2]), 0.0
            )
        except PushRejected:
            del self._staged[r.rank, area]
            decided.rejected = True
            return
        if d.ticket and d.round == self._rounds:
            del self._staged[r.rank, area]
            decided.version = d.ticket
        version, closed, self._rounds = d.version, d.round != self._rounds, d.round
        if closed:
            for rank, of, _, _ in self._core.sources():
                self._decided[self._staged.pop((rank, of))].version = version
        if self._policy.turns:
            self._core.step(Moment.PULL, r.rank, now, version=version)


def _ns(seconds: float) -> int:
    return round(seconds * SECOND)
