"""SplitDecisions: how the ranks of DDP agree on a change of the split.

Each reports, the first decides, all read. When they do is the Cadence's; what is decided is the
Balancer's, on the first rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from pyps.agreement.consensus import Consensus
from pyps.solver.online.balancer import Balancer, Rules
from pyps.solver.online.decide import Cadence, SplitChange
from pyps.solver.online.device import BalancedDevice, DeviceReading
from pyps.torch.rounds import RoundIndex, Rounds


@dataclass(frozen=True)
class Moves(Rules):
    """When samples move between ranks that all take part in each step.

    window: steps between two decisions, an odd number. deadband: the least share of a round's time that a
    change must save. moves: samples move for speed, not only as ranks come and go.
    """

    window: int = 5
    deadband: float = 0.03
    rests: bool = field(default=False, init=False)


USUAL = Moves()


class WindowReport(msgspec.Struct, frozen=True):
    """A rank at the end of a window: what it read, and where it is in its pass over the data."""

    reading: DeviceReading
    epoch: int
    trained: int  # rounds of this pass that were trained
    max_drawn: int  # the most rounds of this pass that may have been handed out
    rounds: int | None  # of the pass, if known
    held_bytes: int


class SplitDecision(msgspec.Struct, frozen=True):
    """Hold what all ranks read: the state of each rank, and the change of the split if there is one."""

    states: list[MeasuredRank]
    change: SplitChange | None = None
    idle: str = ""  # why nothing could be moved


class MeasuredRank(msgspec.Struct, frozen=True):
    """One rank in the latest window.

    seconds: of its own part of a step. slowdown: its time now over its time at first. waiting: the share of a
    round in which it waits for other ranks. held_bytes: the most that its process has held so far.
    """

    rank: int
    batch: int
    seconds: float
    slowdown: float
    waiting: float
    held_bytes: int = 0


class SplitDecisions:
    """A rank's part in them. device: this rank's. balancer: with the changes that were made; only the first
    rank's decides. on_read: called with each decision; whether it takes effect is known by then. held: the
    most bytes that this rank has held.
    """

    def __init__(
        self,
        consensus: Consensus,
        device: BalancedDevice,
        balancer: Balancer,
        sampler: Rounds,
        on_read: Callable[[SplitDecision], None],
        held: Callable[[], int],
    ) -> None:
        self._consensus, self._device, self._balancer, self._held = consensus, device, balancer, held
        self._sampler, self._on_read = sampler, on_read
        self._cadence = Cadence(balancer.rules.window)
        self._reported_pass = 0
        self.steps = 0

    def step(self, asked: bool) -> bool:
        """A step has ended: as Cadence.step."""
        self.steps += 1
        return self._cadence.step(asked, self)

    def report(self, number: int, asked: bool) -> None:
        """Give this rank's report, as Cadence asks. The window's times are added to what is known of the
        device. asked: a rank asked for it, so that what was known before may do.
        """
        sampler = self._sampler
        batches = sampler.batch, sampler.latest_split[sampler.rank]
        reading = self._device.read(self._balancer.rules.window, asked, *batches)
        self._reported_pass = sampler.passes
        position = sampler.epoch, sampler.trained, sampler.max_drawn(), sampler.rounds
        self._consensus.report(number, WindowReport(reading, *position, self._held()))

    def decide(self, number: int, lead: int) -> None:
        """Decide, as Cadence asks, on the first rank. lead: rounds that each rank draws before it reads."""
        if self._consensus.decides:
            reports = self._consensus.reports(number, WindowReport)
            self._consensus.decide(number, self._decided(reports, lead * self._sampler.per_step))

    def read(self, number: int) -> bool:
        """Take, as Cadence asks, the decision; whether it is a change of the split."""
        decision = self._consensus.decision(number, SplitDecision)
        self._adopt(decision)
        self._on_read(decision)
        return decision.change is not None

    def _decided(self, reports: Sequence[WindowReport], lead: int) -> SplitDecision:
        readings = [report.reading for report in reports]
        held = [report.held_bytes for report in reports]
        states, start = _states(readings, held), _start(reports, lead, self._sampler.per_step)
        if start is None and all(reading.seconds is not None for reading in readings):
            return SplitDecision(states, idle="no round of the epoch is left when all have read a decision")
        change, idle = self._balancer.decide_read(readings, self.steps - self._cadence.since)
        return SplitDecision(states, replace(change, start=start) if change is not None else None, idle)

    def _adopt(self, decision: SplitDecision) -> None:
        change = decision.change
        if change is None or change.start is None:
            return
        if self._sampler.rounds is None and self._sampler.passes != self._reported_pass:
            return  # a stream has ended since, on all ranks: the round of the change did not come
        self._sampler.replan(change.after, *change.start)
        self._balancer.adopt(change, [state.slowdown for state in decision.states])


def _start(reports: Sequence[WindowReport], lead: int, per_step: int) -> RoundIndex | None:
    """The first round that no rank will have handed out when it reads the decision, or None.

    lead: rounds that each rank draws between its report and that. per_step: of a step, all with one split.
    """
    epoch, rounds, trained = reports[0].epoch, reports[0].rounds, reports[0].trained
    number = max(report.max_drawn for report in reports) + lead
    number += (trained - number) % per_step
    if rounds is None or number < rounds:
        return epoch, number
    # In the next epoch, if all ranks read the decision before that begins.
    return (epoch + 1, 0) if trained + lead <= rounds else None


def _states(readings: Sequence[DeviceReading], held: Sequence[int]) -> list[MeasuredRank]:
    seconds = [r.seconds if r.seconds is not None else r.estimate.cost.seconds(r.batch) for r in readings]
    longest = max(seconds)
    return [
        MeasuredRank(k, reading.batch, own, reading.estimate.level, 1 - own / longest, most)
        for k, (reading, own, most) in enumerate(zip(readings, seconds, held, strict=True))
    ]
