"""A recorded run decided again: what its workers asked, in the order and at the times they did.

The decision core answers in virtual time. Inputs are times, and the version that a pull found; what is
compared are the decisions: the samples of each claim, the version that each gradient went into, and which
were dropped. Two inputs are not in records: gradients' norms, by which Ringmaster's threshold is set, and
the nanoseconds of a step, by which H-PS rounds its tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyps.errors import Ended, PushRejected
from pyps.metrics import StepRecord
from pyps.native.core import Core
from pyps.policy import Policy
from pyps.values import Config, Moment, Optimizer

WAIT, AREAS, SECOND = 2, 2, 10**9
CLOSE = SECOND // 1000  # a recorded time may be so much before the event itself
Event = tuple[int, str, int]  # nanoseconds, what, record


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
        for now, what, k in self._events():
            getattr(self, f"_{what}")(k, now)
        return self._decided

    def _events(self) -> list[Event]:
        """By time. What took place in an order that is known keeps it, where recorded times overlap."""
        records = self._records
        alone = [k for k, r in enumerate(records) if not r.rejected and r.sources == 1]
        starts = {k: self._span(k, "wait")[1] for k in range(len(records))}
        pushes = {k: self._asked_at(k) for k in range(len(records))}
        _keep(pushes, sorted(alone, key=lambda k: records[k].version))
        if not any(r.rejected for r in records):  # else claims are also of samples that went back
            _keep(starts, sorted(starts, key=lambda k: records[k].first))
        events = [(starts[k], k, "start") for k in starts]
        events += [(max(starts[k], self._span(k, "pull")[1]), k, "pull") for k in starts if self._pulls(k)]
        events += [(self._span(k, "compute")[1], k, "gate") for k in starts if self._policy.turns]
        events += [(pushes[k], k, "push") for k in starts]
        origin = min(starts.values()) - 1.0
        return [(_ns(at - origin), what, k) for at, k, what in sorted(events)]

    def _span(self, k: int, kind: str) -> tuple[float, float]:
        """Begin and end of the first of a kind."""
        return next((begin, end) for name, begin, end in self._records[k].spans if name == kind)

    def _pulls(self, k: int) -> bool:
        """Not where the turn before brought the parameters."""
        return not self._policy.turns or self._records[k].step == 1

    def _asked_at(self, k: int) -> float:
        """When the gradient was there; in a ring, when its turn had come."""
        return self._span(k, "push")[0] if self._policy.turns else self._span(k, "compute")[1]

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

    def _gate(self, k: int, now: int) -> int:
        """When the turn is there: at once, or when the core says."""
        d = self._core.step(Moment.GATE, self._records[k].rank, now)
        if d.verdict == WAIT and now < d.at < now + CLOSE:
            now = d.at
            self._core.step(Moment.GATE, self._records[k].rank, now)
        return now

    def _push(self, k: int, now: int) -> None:
        r, decided = self._records[k], self._decided[k]
        if decided.samples is None:  # it may not even have begun
            return
        took = _ns(self._span(k, "compute")[1] - self._span(k, "wait")[1])
        area = self._pushes[r.rank] % AREAS
        self._pushes[r.rank] += 1
        if self._policy.turns:
            now = self._gate(k, now)
        self._staged[r.rank, area] = k
        try:
            d = self._core.push(r.rank, now, area, min(r.samples, decided.samples), took, 0.0)
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


def _keep(at: dict[int, float], order: list[int]) -> None:
    """Nothing before what it came after."""
    latest = 0.0
    for k in order:
        at[k] = latest = max(latest, at[k])


def _ns(seconds: float) -> int:
    return round(seconds * SECOND)
