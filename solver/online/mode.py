"""ModeBalancer: which codecs and depth one worker has, while its link or its device changes. It does no I/O.

A plan chooses bits and depth for the links and devices that it knows. Here one worker chooses anew from what
its transfers and steps take: the most exact codecs, and then the shallowest pipeline, that delay no worker.
It is driven by a worker of a run, and in virtual time; each worker decides for itself.

- A message of n bytes takes the link's latency and n / bandwidth. The bandwidth is the median of the latest
  transfers, whatever their codecs were, so one late transfer changes nothing. With more than two steps under
  way a gradient may queue behind the one before it, which waits for others: then only the way back tells.
- Where workers wait for rounds, a worker whose gradient has waited at the store has time to spare: it takes
  codecs with which it is still in time. One that has not waited may be the slowest: if others would make its
  step clearly shorter, it takes the most exact ones of the quickest.
- Where they wait for nothing, only its own step counts.
- A mode is kept for SOON transfers at least, and for WINDOW before a more exact one follows it. The mode that
  was left last comes back only if link, device or period have changed by a factor of CHANGED since.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from pyps.formats.mode import Mode, Pace
from pyps.solver.links import LinkCost, link_cost
from pyps.solver.mode import ModeChoices, bits_of, step_of

WINDOW = 7  # transfers: as Balancer's steps
SOON = 3  # transfers that show that the link or the device has become slower
SLACK = 0.05  # of a period: a gradient that waits longer at the store is not the last one
ROOM = 0.95  # of a period: what a step may take whose gradient is not to be the last one
SAME = 1.02  # times the least seconds: a step that is no longer
CLEARLY = 1.10  # times the least seconds: a step that is clearly longer
CHANGED = 1.25  # times, or 1 over it: more than the noise of a few transfers
LEAST_SECONDS = 1e-9


@dataclass(frozen=True)
class ModeChange:
    """A change of one worker's mode after `step` transfers. seconds: of a step, before and after."""

    step: int
    before: Mode
    after: Mode
    seconds: tuple[float, float]
    bytes_per_second: float

    def __str__(self) -> str:
        change = f"{mode_text(self.before)} -> {mode_text(self.after)}"
        was, will = (f"{seconds * 1e3:.0f}" for seconds in self.seconds)
        return f"the link carries {self.bytes_per_second / 1e6:.3g} MB/s: {change} ({was} -> {will} ms)"


def may_change(pace: Pace, *, local: bool) -> bool:
    """Return whether workers decide anew: their waits then show at the store. local: with local steps."""
    return pace.kind in ("round", "free") and not local


def _alike(now: tuple[float, ...], then: tuple[float, ...]) -> bool:
    return all(b / CHANGED < a < b * CHANGED for a, b in zip(now, then, strict=True))


def mode_text(mode: Mode) -> str:
    """The codecs of pushes and pulls, and the depth."""
    return f"{mode.push}/{mode.pull}, depth {mode.depth}"


@dataclass(frozen=True)
class TimedStep:
    """A step whose transfer has ended. mode: in which it was made. compute: seconds of its compute. there,
    waited, back: seconds of its gradient's way and of its wait at the store, and of the parameters' way. at:
    when it ended, in seconds.
    """

    mode: Mode
    compute: float
    there: float
    waited: float
    back: float
    at: float


class ModeBalancer:
    """Decides changes of one worker's mode. `mode`: in force."""

    def __init__(
        self, choices: ModeChoices, mode: Mode, parameters: int, latency: float = 0.0, averaged: int = 0
    ) -> None:
        """choices: codecs and depths to choose from, and what the policy's workers wait for. parameters: that
        a transfer moves. latency: of the link, seconds. averaged: fp32 values of each that travel with it.
        """
        self.mode = mode
        self._options = choices.options()
        self._waits = choices.pace.kind == "round" and not choices.pace.spare
        self._parameters, self._latency, self._averaged = parameters, latency, averaged
        self._rates: deque[float] = deque(maxlen=2 * SOON - 1)
        self._latest: deque[TimedStep] = deque(maxlen=WINDOW)  # in this mode
        self._step = 0
        self._left: tuple[Mode, tuple[float, ...]] | None = None  # the mode left last, and why

    def hear(self, one: TimedStep) -> ModeChange | None:
        """Take note of a transfer; the change of the mode that is due, which holds from the next one on."""
        self._step += 1
        self._rates.append(self._rate(one))
        if one.mode != self.mode:
            return None  # sent before the last change
        self._latest.append(one)
        return self._better() if len(self._latest) >= SOON else None

    def _rate(self, one: TimedStep) -> float:
        """Bytes a second of a transfer."""
        (push, pull), unit = bits_of(one.mode), self._link(1.0)  # on which a byte takes a second
        if one.mode.depth > 2:
            return unit.one_way_seconds(pull) / max(one.back - self._latency, LEAST_SECONDS)
        way = max(one.there + one.back - 2 * self._latency, LEAST_SECONDS)
        return unit.wire_seconds(push, pull) / way

    def _link(self, bytes_per_second: float) -> LinkCost:
        cost = link_cost(self._parameters, bytes_per_second, self._latency, averaged=self._averaged)
        assert cost is not None
        return cost

    def _better(self) -> ModeChange | None:
        rate = median(self._rates)
        link, compute = self._link(rate), median(one.compute for one in self._latest)

        seconds = [step_of(compute, [link], o) for o in self._options]
        least, own = min(seconds), seconds[self._options.index(self.mode)]
        limit, period = SAME * least, median(b.at - a.at for a, b in pairwise(self._latest))
        if self._waits and median(one.waited for one in self._latest) > SLACK * period:
            limit = max(limit, ROOM * period)
        place = next(k for k, one in enumerate(seconds) if one <= limit)
        chosen, full = self._options[place], len(self._latest) == WINDOW
        exacter = place < self._options.index(self.mode)
        if chosen == self.mode or not (own > max(CLEARLY * least, limit) or (full and exacter)):
            return None
        known = (rate, compute, period)
        if self._left is not None and chosen == self._left[0] and _alike(known, self._left[1]):
            return None
        self._left = self.mode, known
        change = ModeChange(self._step, self.mode, chosen, (own, seconds[place]), rate)
        self.mode = chosen
        self._latest.clear()
        return change
