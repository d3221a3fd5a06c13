"""Which ranks are stragglers: by the versions that they are late, which is SaPS's idea, and by time.

A static straggler is slower than the others, on older hardware, say. A dynamic one is slower than itself,
while another job shares its device, say. A plan's batches cure the first, a rebalancer the second.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

StragglerKind = Literal["", "static", "dynamic"]

TIMES = 2.0  # as long, or as many versions late: less is no straggler


@dataclass(frozen=True, slots=True)
class StepPace:
    """A rank's steps. seconds: its usual step; seconds_now: the present one so far. versions: how late its
    gradients are, the mean; versions_now: the present one, so far. 0: not known.
    """

    seconds: float = 0.0
    versions: float = 0.0
    seconds_now: float = 0.0
    versions_now: float = 0.0


@dataclass(frozen=True, slots=True)
class Straggler:
    """Hold what kind of straggler a rank is, if any."""

    by_version: StragglerKind = ""
    by_time: StragglerKind = ""

    def __str__(self) -> str:
        """Return it as "static straggler by version and time"; of two kinds each is named."""
        if self.by_version == self.by_time:
            return f"{self.by_version} straggler by version and time" if self.by_time else ""
        return ", ".join(self._each())

    def _each(self) -> Iterator[str]:
        if self.by_version:
            yield f"{self.by_version} straggler by version"
        if self.by_time:
            yield f"{self.by_time} straggler by time"


def stragglers(paces: Sequence[StepPace], ranks: int, pushes: float = 1.0) -> list[Straggler]:
    """One for each pace. ranks: that train at present. pushes: that make a version, on average. So each of
    equal workers is (ranks - 1) / pushes versions late; by less than one version no rank is a straggler.
    """
    fastest = min((p.seconds for p in paces if p.seconds > 0), default=0.0)
    equal = max((ranks - 1.0) / max(pushes, 1.0), 1.0)
    latest = max(TIMES * min((p.versions for p in paces), default=0.0), equal)
    return [
        Straggler(
            _kind(p.versions, latest, is_late(p.versions_now, p.versions, equal)),
            _kind(p.seconds, TIMES * fastest, is_late(p.seconds_now, p.seconds)),
        )
        for p in paces
    ]


def is_late(now: float, usual: float, least: float = 0.0) -> bool:
    """Is this a straggler's step, by its own rank's usual one? Never up to `least`."""
    return usual > 0.0 and now > max(TIMES * usual, least)


def _kind(usual: float, most: float, late: bool) -> StragglerKind:
    if usual > most:
        return "static"
    return "dynamic" if late else ""
