"""Rebalancer: while the ranks train, the split follows the speed of their devices. One line ends a step:

    balance = Rebalancer(sampler, weighted_hook(model), profile="v100.json")
    ...
        optimizer.step()
        balance.step()

Each rank times its own part of its steps. Every `window` steps it reports what its device costs now. One step
later the first rank decides. Another step later all ranks read the decision, and the new batches start at the
same round on all of them, one that no rank's DataLoader has fetched yet. B stays the same. Between these
steps all ranks have met in a reduction, so no rank waits for a message.

A rank whose steps have clearly changed asks for a decision with its next gradient. All ranks learn of it in
the same step, and report, decide and read within it: this once they wait, some milliseconds, and the next
batches that are drawn are the new ones.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import msgspec
import torch.distributed as dist

from pyps.errors import InputError
from pyps.formats import MAX_BATCH, Profile
from pyps.formats.learnt import learnt
from pyps.solver.costs import Cost
from pyps.solver.online.decide import SplitChange, decide, gain_worth_a_change
from pyps.solver.online.global_batch import RankDevice
from pyps.solver.online.prior import prior_of
from pyps.solver.online.refit import NOISE, OnlineCost, Timed
from pyps.solver.online.window import CONFIRMED, settled, tells, undecided
from pyps.torch.consensus import DEADLINE_SECONDS, Consensus, CostMessage
from pyps.torch.rounds import RoundIndex, Rounds
from pyps.torch.timer import ComputeTimer
from pyps.torch.weighted import WeightedHook

UNUSED_STEPS = 20  # gradients: a loop that calls step() has called it by then
IDLE_WINDOWS = 5  # without a possible change: by then there is a reason to name
WARM_UP = 2  # first steps that are not measured: allocations, the buckets of DDP
LEAD = 2  # rounds that each rank draws between its report and the step at which it reads the decision


class _Report(msgspec.Struct, frozen=True, kw_only=True):
    """A rank at the end of a window. seconds: of its own part of a step, None if nothing new was measured."""

    batch: int
    seconds: float | None
    relative_error: float  # the standard error of what is known of this batch
    cost: CostMessage
    level: float
    max_batch: int
    min_batch: int
    batch_multiple: int
    epoch: int
    trained: int  # rounds of this pass that were trained
    max_drawn: int  # the most rounds of this pass that may have been handed out
    rounds: int | None  # of the pass, if known
    unsure: bool  # only one batch was timed since the device has changed
    changing: bool  # another split than the measured one is to come, or has come and was not timed


class _Decision(msgspec.Struct, frozen=True):
    """What all ranks read: the state of each rank, and the change of the split if there is one."""

    states: list[RankState]
    change: SplitChange | None = None
    idle: str = ""  # why nothing could be moved


class RankState(msgspec.Struct, frozen=True):
    """One rank in the latest window.

    seconds: of its own part of a step. slowdown: its time now over its time at first. waiting: the share of a
    round in which it waits for other ranks.
    """

    rank: int
    batch: int
    seconds: float
    slowdown: float
    waiting: float


class _Knowledge(msgspec.Struct, frozen=True, kw_only=True):
    """A Rebalancer's state: this device's OnlineCost, the ranks' levels at the last change, all changes.

    known: seconds by batch, over how many steps and with which scatter `timed` says; `scatter` is the latest.
    changed: whether the device did, with the bounds of its slope in `slopes` and the cost before that in
    `first`. corrected: the split was since.
    """

    prior: CostMessage
    changed: bool
    known: list[tuple[int, float]]
    level: float
    levels: list[float] | None
    history: list[SplitChange]
    timed: list[tuple[int, float]] = []
    slopes: tuple[float, float] | None = None
    first: CostMessage | None = None
    profiled: bool = True
    scatter: float = NOISE
    corrected: bool = False


class Rebalancer:
    """Moves samples between ranks while they train. Every rank makes one, with the same window and deadband.

    sampler: the UnevenBatchSampler or UnevenIterableDataset in use.
    hook: the model's WeightedHook.
    profile: this device's pyps.profile/1 (a file or a Profile); with it one window is enough.
    max_batch: the largest batch that fits this device, if the profile does not give it.
    min_batch, batch_multiple: bounds of this rank's batch that every change keeps. With BatchNorm1d each
        micro-batch keeps two samples.
    window: steps between decisions, an odd number.
    deadband: the least share of a round's time that a change must save.
    store: for messages between ranks; by default the process group's.
    timeout: seconds to wait for ranks that make no Rebalancer.

    `history` holds every SplitChange, `states` the ranks in the latest window. Functions in `observers` are
    called with the Rebalancer when the result of a window is known. A warning says why nothing could be moved
    in five windows. Raises InputError on all ranks if one does not come, or refuses: its profile cannot be
    read, its batch is above its maximum. The next forward() raises it if ranks call step() unequally often.
    """

    def __init__(
        self,
        sampler: Rounds,
        hook: WeightedHook,
        profile: Profile | str | os.PathLike[str] | None = None,
        *,
        max_batch: int | None = None,
        min_batch: int = 1,
        batch_multiple: int = 1,
        window: int = 5,
        deadband: float = 0.03,
        store: Any = None,
        timeout: float = DEADLINE_SECONDS,
    ) -> None:
        _check_types(sampler, hook, window)
        self._consensus = Consensus("Rebalancer", hook.group, store, timeout, hook.peers)
        least = sampler.accumulation * hook.least_samples
        least = least if sampler.batch >= least else sampler.accumulation
        self.min_batch, self.batch_multiple = max(least, min_batch), batch_multiple
        prior, self.max_batch = self._agreed_prior(sampler, profile, max_batch)
        self.window, self.deadband = window, deadband
        self.history: list[SplitChange] = []
        self.states: list[RankState] = []
        self.observers: list[Callable[[Rebalancer], None]] = []
        self.steps = 0
        self.hook = hook
        self._sampler = sampler
        self._device = OnlineCost(prior)
        self._lockstep = hook.lockstep
        self._lockstep.calls, self._lockstep.sampler = 0, sampler
        self._idle: list[str] = []  # why the latest windows moved nothing
        self._timer = ComputeTimer(hook)
        self._gradients = 0
        hook.on_ready.append(self._count_gradient)
        self._times: list[tuple[int, float]] = []  # batch and seconds of the window's full rounds
        self._pass, self._trained = 0, 0  # the sampler's latest pass, and its rounds that were trained
        self._before_pass = 0
        self._reported_pass = 0
        self._number, self._since = 0, 0  # of the latest report; steps since
        self._under_way = False  # the decision of that report is still to come
        self._lost: dist.DistNetworkError | None = None  # the store of the process group was gone
        self._corrected = False  # of the deciding rank: as in gain_worth_a_change
        self._levels: list[float] | None = None  # by rank, the level when the split was made

    def step(self) -> None:
        """Call at the end of every step, on all ranks. Measures, and moves samples where that is worth it."""
        if self._lost is not None:
            raise self._lost
        self.steps += 1
        self._lockstep.calls = (self._lockstep.calls or 0) + 1
        self._timer.finish(self._trained_batch())
        finished = [(b, s) for b, s in self._timer.finished() if b is not None]
        self._times += finished
        self._since += 1
        asked = self._lockstep.asked()
        self._lockstep.asks = self._asks()
        try:
            self._exchange(asked)
        except dist.DistNetworkError as error:
            # The first rank, which holds the store, ends after the last step: perhaps before this one has
            # read a decision that nothing follows. If there is another step, it fails.
            self._lost = error
        self._timer.start()

    def _exchange(self, asked: bool) -> None:
        """What this step has to report, to decide and to read. asked: a rank asked for a decision."""
        if self._under_way and self._since == 1:
            self._decide_if_first(1 if asked else LEAD)
            if asked and not self._read_decision():
                self._report(asked)
        elif self._under_way:
            if not self._read_decision() and asked:
                self._report(asked)
        elif asked or self._since >= self.window:
            self._report(asked)

    def skip(self, rounds: int) -> None:
        """The next pass begins with that many rounds that are read but not trained."""
        self._before_pass = rounds

    def restart_timer(self) -> None:
        """What this rank did since the last step() is no part of a step."""
        self._timer.start()

    @property
    def device(self) -> RankDevice:
        """What a step costs this rank's device now, and the bounds of its batch."""
        least = -(-self.min_batch // self.batch_multiple) * self.batch_multiple
        return RankDevice(self._device.cost, least, self.max_batch, self.batch_multiple)

    def state_dict(self) -> dict[str, Any]:
        """What is known of this rank's device and of earlier changes, for a Rebalancer of as many ranks."""
        known = _Knowledge(
            prior=CostMessage.of(self._device.prior),
            changed=self._device.changed,
            known=[(batch, timed.seconds) for batch, timed in self._device.known.items()],
            timed=[(timed.steps, timed.scatter) for timed in self._device.known.values()],
            slopes=self._device.slopes,
            first=CostMessage.of(self._device.first) if self._device.first is not None else None,
            profiled=self._device.profiled,
            scatter=self._device.scatter,
            corrected=self._corrected,
            level=self._device.level,
            levels=self._levels,
            history=self.history,
        )
        plain: dict[str, Any] = msgspec.to_builtins(known)
        return plain

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what was known. Call it before the first step. Raises InputError for another kind of state."""
        try:
            known = msgspec.convert(state, learnt(_Knowledge))
        except msgspec.ValidationError as error:
            raise InputError("Rebalancer", "state", str(error), "that of a Rebalancer") from None
        device, timed = self._device, [*known.timed, *[(1, 0.01)] * (len(known.known) - len(known.timed))]
        device.prior, device.profiled = known.prior.cost(), known.profiled
        device.known = {b: Timed(s, *more) for (b, s), more in zip(known.known, timed, strict=True)}
        device.slopes, device.level, device.scatter = known.slopes, known.level, known.scatter
        device.first = known.first.cost() if known.first is not None else None
        self._levels, self.history, self._corrected = known.levels, known.history, known.corrected

    def scalars(self) -> dict[str, float]:
        """Figures for any logger: batch, seconds, slowdown and waiting by rank; imbalance; changes so far."""
        found = {"replans": float(len(self.history))}
        for state in self.states:
            fields = ("batch", "seconds", "slowdown", "waiting")
            found |= {f"rank{state.rank}/{field}": float(getattr(state, field)) for field in fields}
        if self.states:
            seconds = [state.seconds for state in self.states]
            found["imbalance"] = max(seconds) / (sum(seconds) / len(seconds)) - 1
        return found

    def report(self) -> str:
        """A table of the latest window, one line a rank: which ranks are slow, and which wait for them."""
        rows = (
            f"{s.rank:4d} {s.batch:6d} {s.seconds:12.4f} {s.slowdown:8.2f}x {s.waiting:8.1%}"
            for s in self.states
        )
        return "\n".join(["rank  batch  own seconds  slowdown  waiting", *rows])

    def _agreed_prior(
        self, sampler: Rounds, profile: Profile | str | os.PathLike[str] | None, max_batch: int | None
    ) -> tuple[Cost | None, int]:
        """The device's cost and largest batch. Raises InputError on all ranks if one refuses its own."""
        prior, most, error = None, MAX_BATCH, None
        try:
            if self.min_batch < 1 or self.batch_multiple < 1:
                found = f"{self.min_batch} in steps of {self.batch_multiple}"
                raise InputError("Rebalancer", "min_batch", found, "both at least 1")
            prior, fits = prior_of(profile)
            most = min(fits, max_batch or MAX_BATCH)
            if sampler.batch > most:
                expected = f"at least the batch, {sampler.batch}"
                raise InputError("Rebalancer", "max_batch", str(most), expected)
        except InputError as refused:
            error = refused
        self._consensus.agree(error)
        return prior, most

    def _count_gradient(self) -> None:
        """Warn where the loop does not call step()."""
        self._gradients += 1
        if self._gradients == UNUSED_STEPS and not self.steps:
            warnings.warn(
                f"Rebalancer: {UNUSED_STEPS} gradients and no call of step(): the split never changes",
                stacklevel=2,
            )

    def _trained_batch(self) -> int | None:
        """This rank's batch in the round that was just trained; None if its time is not to be used."""
        if self._sampler.passes != self._pass:
            self._pass, self._trained, self._before_pass = self._sampler.passes, self._before_pass, 0
        self._trained += 1
        self._sampler.trained = self._trained
        trained = self._sampler.round_samples(self._trained - 1)
        if self.steps <= WARM_UP or trained is None:
            return None
        size, own = trained
        return own if size == self._sampler.global_batch else None

    def _asks(self) -> bool:
        """Whether this rank's latest steps are a reason to decide before the window ends.

        Peers ask for nothing: a request would reach those of the other groups in another step.
        """
        return self.hook.peers is None and tells(*self._latest())

    def _latest(self) -> tuple[list[float], OnlineCost, int]:
        """The seconds of the window's steps with the latest batch, for this device, and that batch."""
        batch = self._times[-1][0] if self._times else self._sampler.batch
        return [seconds for b, seconds in self._times if b == batch], self._device, batch

    def _report(self, asked: bool) -> None:
        """Begin a decision. asked: a rank asked for it, so end it, too."""
        self._number, self._since, self._under_way = self._number + 1, 0, True
        self._consensus.report(self._number, self._window_ended(asked))
        if asked:
            self._decide_if_first(0)
            self._read_decision()
            self._lockstep.asks = False

    def _window_ended(self, asked: bool) -> _Report:
        """This rank's report. The window's times are added to what is known of the device. asked: a rank
        asked for it, so that what was known before may do.
        """
        seconds, _, batch = self._latest()
        self._times = []
        if undecided(seconds, self._device, batch):  # the next step tells
            self._times = [(batch, seconds.pop())]
        middle, error = None, 0.0
        if len(seconds) >= (CONFIRMED if asked else self.window // 2 + 1):
            times = settled(seconds, self._device, batch)
            self._device.observe(batch, times)
            middle, error = median(times), self._device.error
        elif asked and self._device.known:
            middle, error = self._device.cost.seconds(batch), self._device.error
        sampler, self._reported_pass = self._sampler, self._pass
        return _Report(
            batch=batch,
            seconds=middle,
            relative_error=error,
            cost=CostMessage.of(self._device.cost),
            level=self._device.level,
            max_batch=self.max_batch,
            min_batch=-(-self.min_batch // self.batch_multiple) * self.batch_multiple,
            batch_multiple=self.batch_multiple,
            epoch=sampler.epoch,
            trained=self._trained,
            max_drawn=sampler.max_drawn(self._trained),
            rounds=sampler.rounds,
            unsure=self._device.unsure,
            changing=batch != sampler.latest_split[sampler.rank] or self._device.awaits(batch),
        )

    def _decide_if_first(self, lead: int) -> None:
        """On the first rank, decide. lead: rounds that each rank draws before it reads the decision."""
        if self._consensus.decides:
            reports = self._consensus.reports(self._number, _Report)
            self._consensus.decide(self._number, self._decide(reports, lead))

    def _read_decision(self) -> bool:
        """Whether it is a change of the split."""
        self._under_way = False
        decision = self._consensus.decision(self._number, _Decision)
        self._adopt(decision)
        for observe in self.observers:
            observe(self)
        return decision.change is not None

    def _decide(self, reports: Sequence[_Report], lead: int) -> _Decision:
        states, start = _states(reports), _start(reports, lead)
        unmeasured = [rank for rank, report in enumerate(reports) if report.seconds is None]
        if unmeasured:
            return _Decision(states, idle=f"no full round was measured on ranks {unmeasured}")
        if start is None:
            return _Decision(states, idle="no round of the epoch is left when all have read a decision")
        if any(report.changing for report in reports):
            return _Decision(states)
        levels = [report.level for report in reports]
        before = self._levels = self._levels or levels
        unsure = [report.unsure for report in reports]
        self._corrected = self._corrected and not any(unsure)
        error = max(report.relative_error for report in reports)
        change = decide(
            tuple(report.batch for report in reports),
            [report.cost.cost() for report in reports],
            [now / then for now, then in zip(levels, before, strict=True)],
            [report.min_batch for report in reports],
            [report.max_batch for report in reports],
            gain_worth_a_change(self.deadband, error, self._corrected),
            self.steps - self._since,
            True,
            [report.batch_multiple for report in reports],
            unsure,
        )
        if change is None:
            full = [rank for rank, report in enumerate(reports) if report.batch >= report.max_batch]
            others = len(full) >= len(reports) - 1
            return _Decision(states, idle=f"ranks {full} are at their max_batch" if full and others else "")
        self._levels, self._corrected = levels, not any(unsure)
        return _Decision(states, replace(change, start=start))

    def _adopt(self, decision: _Decision) -> None:
        self.states, change = decision.states, decision.change
        self._idle = [*self._idle, decision.idle] if decision.idle else []
        if len(self._idle) == IDLE_WINDOWS and not self.history:
            warnings.warn(
                f"Rebalancer: nothing moved in {IDLE_WINDOWS} windows of {self.window}: {decision.idle}",
                stacklevel=3,
            )
        if change is None or change.start is None:
            return
        if self._sampler.passes != self._reported_pass:
            return  # a stream has ended since, on all ranks: the round of the change did not come
        self._sampler.replan(change.after, *change.start)
        self.history.append(change)


def _check_types(sampler: object, hook: object, window: int) -> None:
    if window < 3 or window % 2 == 0:
        raise InputError("Rebalancer", "window", str(window), "an odd number of steps from 3")
    if not isinstance(sampler, Rounds):
        expected = "an UnevenBatchSampler or UnevenIterableDataset"
        raise InputError("Rebalancer", "sampler", type(sampler).__name__, expected)
    if not isinstance(hook, WeightedHook):
        raise InputError("Rebalancer", "hook", type(hook).__name__, "what weighted_hook(model) gives")


def _start(reports: Sequence[_Report], lead: int) -> RoundIndex | None:
    """The first round that no rank will have handed out when it reads the decision, or None.

    lead: rounds that each rank draws between its report and that.
    """
    epoch, rounds, trained = reports[0].epoch, reports[0].rounds, reports[0].trained
    number = max(report.max_drawn for report in reports) + lead
    if rounds is None or number < rounds:
        return epoch, number
    # In the next epoch, if all ranks read the decision before that begins.
    return (epoch + 1, 0) if trained + lead <= rounds else None


def _states(reports: Sequence[_Report]) -> list[RankState]:
    seconds = [p.seconds if p.seconds is not None else p.cost.cost().seconds(p.batch) for p in reports]
    longest = max(seconds)
    return [
        RankState(k, p.batch, own, p.level, 1 - own / longest)
        for k, (p, own) in enumerate(zip(reports, seconds, strict=True))
    ]
