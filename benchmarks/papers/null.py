"""Tell what can be resolved, by each competitor's own copy, which is tuned and timed with other seeds.

A copy is as fast as its competitor, so what lies between their times is luck: of the seeds, of the tuning,
and of the choice of the best among many. A claim is a win only beyond that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tuning import TuningResult, ratio_interval

WITHIN = 0.95  # of all copies


@dataclass(frozen=True)
class Null:
    """The copies of some results. winners: by scenario, the copy's time over that of the competitor that was
    the fastest without copies. within: what the longer time of a competitor and its copy is over the shorter
    at most, in 19 of 20.
    """

    winners: dict[str, float]
    within: float
    count: int

    @staticmethod
    def of(found: Sequence[TuningResult]) -> Null:
        by_scenario: dict[str, list[tuple[float, float]]] = {}
        for one in found:
            by_scenario.setdefault(one.scenario.title, []).append(one.halves)
        winners = {title: second / first for title, (first, second) in _winners(by_scenario).items()}
        pairs = [halves for several in by_scenario.values() for halves in several if min(halves) < math.inf]
        folded = sorted(max(pair) / min(pair) for pair in pairs)
        return Null(winners, folded[math.ceil(WITHIN * len(folded)) - 1] if folded else math.inf, len(folded))

    def __str__(self) -> str:
        named = ", ".join(f"{title} {ratio:.2f}" for title, ratio in self.winners.items())
        return (
            f"Copies, tuned and timed with other seeds. The winner's over the winner: {named}. "
            f"Of {self.count} competitors 19 of 20 are within {self.within:.2f} of their copy."
        )


def _winners(by_scenario: dict[str, list[tuple[float, float]]]) -> dict[str, tuple[float, float]]:
    return {title: min(several) for title, several in by_scenario.items()}


@dataclass(frozen=True)
class Claim:
    """A rival's time over ours, both with their copies' seeds, paired by seed."""

    figure: str
    ratio: float
    interval: tuple[float, float]
    within: float

    @staticmethod
    def of(ours: TuningResult, rival: TuningResult, null: Null, name: str = "") -> Claim:
        figure = (
            f"{rival.scenario.title}: {rival.competitor.title}'s time over {name or ours.competitor.title}'s"
        )
        return Claim(figure, *_paired(rival, ours), null.within)

    @property
    def verdict(self) -> str:
        """A win or a loss: the interval excludes 1, and copies are not that far apart. Otherwise a tie."""
        low, high = self.interval
        if low > 1.0 and self.ratio > self.within:
            return "win"
        return "loss" if high < 1.0 and self.ratio * self.within < 1.0 else "tie"

    def __str__(self) -> str:
        low, high = self.interval
        return f"- {self.verdict}: {self.figure}: {self.ratio:.2f}; by seed {low:.2f} to {high:.2f}"


def _paired(rival: TuningResult, ours: TuningResult) -> tuple[float, tuple[float, float]]:
    """The ratio of the means, with its interval; where some runs never reach the loss, of the medians."""
    if max(*rival.seconds, *ours.seconds) < math.inf:
        return rival.mean / ours.mean, ratio_interval(rival, ours)
    if min(rival.median, ours.median) == math.inf:
        return math.nan, (0.0, math.inf)
    ratio = rival.median / ours.median
    return ratio, (0.0, math.inf) if 0.0 < ratio < math.inf else (ratio, ratio)
