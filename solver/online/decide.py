"""Decides when to move samples between ranks, and how many: a pure function of what the ranks have measured.

The new split is the exact one for the current cost estimates, within the bounds of each rank. It replaces
the split in force only if it makes the round clearly shorter, so that noise does not move samples back and
forth. Two slow steps may be a stall, not a slower device, and one batch does not tell whether a change takes
time once a step or for every sample: until another batch is timed, a rank's own changes by a factor at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from pyps.errors import Infeasible
from pyps.formats import MAX_BATCH
from pyps.solver.costs import Cost, Costs
from pyps.solver.exact.minmax import Problem, solve

Split = tuple[int, ...]  # samples a round, by rank

MIN_GAIN = 2.0  # in standard errors of the times: a smaller gain may be none
QUIET_GAIN = 3.0  # the same while no device has changed: noise has many chances to look like a gain
CERTAIN_GAIN = 3.0  # in standard errors: a larger gain is real, however small
AGAIN = 3.0  # times that: after a correction of the split for the same devices
LEAST_GAIN = 0.005  # relative: a smaller gain is not worth a change
MOST_UNSURE = 3  # times: how far a batch moves at once while its rank's cost is unsure
WORTH_NAMING = 0.05  # relative: a smaller change of a rank's pace is not given as a reason
LEAD = 2  # rounds that each rank draws between its report and the step at which it reads the decision


@dataclass(frozen=True)
class Bounds:
    """Hold the bounds of a rank's batch, unless it has none. required: it must have samples."""

    least: int = 1
    most: int = MAX_BATCH
    multiple: int = 1
    required: bool = False

    @property
    def least_multiple(self) -> int:
        """The least batch that is a multiple too."""
        return -(-self.least // self.multiple) * self.multiple


@dataclass(frozen=True)
class SplitChange:
    """A change of the split, decided at `step`, with its reasons.

    The seconds are those of a round, predicted by the ranks' costs. start: (epoch, round) from which the
    change holds, in runs that count rounds. probed: the rank that is tried, or whose trial ends; None: none.
    """

    step: int
    before: Split
    after: Split
    seconds_before: float
    seconds_after: float
    reasons: tuple[str, ...]
    start: tuple[int, int] | None = None
    probed: int | None = None

    def __str__(self) -> str:
        return "; ".join(self.reasons)


def gain_worth_a_change(
    deadband: float, error: float, corrected: bool = False, quiet: bool = False, drifts: bool = False
) -> float:
    """The least relative gain that is worth a change.

    error: the relative standard error of the ranks' times. The deadband holds while they are not certain; as
    evidence grows, smaller gains count. corrected: the split was corrected since a device has changed.
    quiet: no device has changed since then. drifts: a device changes all the time, so that waiting for
    evidence costs more than a change.
    """
    if drifts:
        return max(error, LEAST_GAIN)
    certain = CERTAIN_GAIN * (AGAIN if corrected else 1.0) * error
    least = QUIET_GAIN if quiet else MIN_GAIN
    return max(least * error, min(deadband, certain), LEAST_GAIN)


def best_split(global_batch: int, costs: Sequence[Cost], bounds: Sequence[Bounds]) -> Split:
    """The split with the shortest round. costs, bounds: of each rank. Raises Infeasible."""
    problem = Problem.of(
        Costs.stack(costs),
        global_batch,
        min_batch=[bound.least for bound in bounds],
        max_batch=[bound.most for bound in bounds],
        batch_multiple=[bound.multiple for bound in bounds],
        required=[bound.required for bound in bounds],
    )
    return tuple(int(batch) for batch in solve(problem).batches)


def decide(
    split: Split,
    costs: Sequence[Cost],
    paces: Sequence[float],
    bounds: Sequence[Bounds],
    least_gain: float,
    step: int,
    unsure: Sequence[bool] = (),
) -> SplitChange | None:
    """The change of the split that is worth making, or None.

    split: samples a round in force, by rank. costs: of each rank, as estimated now. paces: how many times
    longer each rank takes than at the last change. bounds: of each rank's batch. least_gain: the relative
    gain below which nothing changes. step: the step at which this is decided. unsure: by rank, whether only
    one batch was timed since its cost has changed; no rank by default. Such a rank keeps samples, and its
    batch changes by MOST_UNSURE at most.
    """
    bounds = list(bounds)
    for rank, batch in enumerate(split):
        if batch and unsure and unsure[rank]:
            own = bounds[rank]
            least, most = max(own.least, -(-batch // MOST_UNSURE)), min(own.most, MOST_UNSURE * batch)
            bounds[rank] = replace(own, least=least, most=most, required=True)
    try:
        after = best_split(sum(split), costs, bounds)
    except Infeasible:
        return None
    was, will = round_seconds(costs, split), round_seconds(costs, after)
    if after == split or will > was * (1 - least_gain):
        return None
    return SplitChange(step, split, after, was, will, _reasons(split, after, paces, step))


def round_seconds(costs: Sequence[Cost], split: Split) -> float:
    """The seconds of a round: those of its slowest rank."""
    return max((cost.seconds(b) for cost, b in zip(costs, split, strict=True) if b), default=0.0)


def _reasons(split: Split, after: Split, paces: Sequence[float], step: int) -> tuple[str, ...]:
    reasons = []
    for rank, pace in enumerate(paces):
        because = after[rank] < split[rank] if pace > 1 else after[rank] > split[rank]
        if max(pace, 1 / pace) > 1 + WORTH_NAMING and because:
            how = f"slowed by {pace:.1f}x" if pace > 1 else f"sped up by {1 / pace:.1f}x"
            reasons.append(f"rank {rank} {how} at step {step}: {split[rank]} -> {after[rank]}")
    if not reasons:
        reasons.append(f"better cost estimates at step {step}: {list(split)} -> {list(after)}")
    return tuple(reasons)


class Messenger(Protocol):
    """Hold what a rank does with its messages. number: of the report and its decision."""

    def report(self, number: int, asked: bool) -> None:
        """Send what is known. asked: a rank asked for it."""

    def decide(self, number: int, lead: int) -> None:
        """Decide, if this is the rank that does; `lead` rounds are drawn before all read it."""

    def read(self, number: int) -> bool:
        """Read the decision; whether it is a change of the split."""


class Cadence:
    """Hold when ranks that meet once a step report, decide and read, so that none waits for a message.

    Every `window` steps each rank reports what its device costs. A step later one of them decides. Another
    step later all read the decision, and it holds from a round that none has drawn. Between these steps all
    ranks have met, so every message is there when it is read.

    A rank that is sure of a change asks for a decision with what the ranks exchange anyway. All learn of it
    in the same step, and report, decide and read within it: this once they wait.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self.since = 0  # steps since the latest report
        self._number = 0  # of that report
        self._under_way = False  # its decision is still to come

    def step(self, asked: bool, part: Messenger) -> bool:
        """A step has ended. asked: a rank asks for a decision, as all ranks know. Whether one was made on
        what is known now, so that this rank need not ask for another.
        """
        self.since += 1
        if self._under_way and self.since == 1:
            part.decide(self._number, 1 if asked else LEAD)
            due = asked and not self._read(part)
        elif self._under_way:
            due = not self._read(part) and asked
        else:
            due = asked or self.since >= self.window
        if due:
            self._report(part, asked)
        return due and asked

    def _report(self, part: Messenger, asked: bool) -> None:
        """Begin a decision; where a rank asked for it, end it, too."""
        self._number, self.since, self._under_way = self._number + 1, 0, True
        part.report(self._number, asked)
        if asked:
            part.decide(self._number, 0)
            self._read(part)

    def _read(self, part: Messenger) -> bool:
        self._under_way = False
        return part.read(self._number)
