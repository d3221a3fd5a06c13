"""Rebalancer: while the ranks train, the split follows the speed of their devices. One line ends a step:

    balance = Rebalancer(sampler, GlobalMean(model, sampler), profile="v100.json")
    ...
        optimizer.step()
        balance.step()

Each rank times its own part of its steps. Every few steps it reports what its device costs now. One step
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
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from pyps.agreement.consensus import DEADLINE_SECONDS, Consensus
from pyps.errors import InputError
from pyps.formats import MAX_BATCH, Profile, read_profile
from pyps.formats.files import learnt
from pyps.metrics import Reading, Sink
from pyps.sharding.held import peak_bytes
from pyps.solver.costs import Cost
from pyps.solver.online.balancer import Balancer
from pyps.solver.online.decide import Bounds, SplitChange
from pyps.solver.online.device import BalancedDevice
from pyps.solver.online.global_batch import BoundedCost
from pyps.solver.online.refit import OnlineCost
from pyps.solver.ranks import prior_of
from pyps.torch.compute_timer import ComputeTimer
from pyps.torch.decisions import USUAL, MeasuredRank, Moves, SplitDecision, SplitDecisions
from pyps.torch.global_mean import GlobalMean
from pyps.torch.noise import GradientNoise
from pyps.torch.rounds import Rounds

FIGURES = ("batch", "seconds", "slowdown", "waiting", "held_bytes")  # of a rank
IDLE_WINDOWS = 5  # without a possible change: by then there is a reason to name
WARM_UP = 2  # first steps that are not measured: allocations, the buckets of DDP


class _Knowledge(msgspec.Struct, frozen=True, kw_only=True):
    """A Rebalancer's state: what is known of this device, the ranks' levels at the last change, whether that
    corrected the split for the same devices, and all changes. It is kept as a text: so no kind of checkpoint
    takes it apart.
    """

    device: OnlineCost
    levels: list[float] | None
    history: list[SplitChange]
    corrected: bool = False


class Rebalancer:
    """Moves samples between ranks while they train. Every rank makes one, with the same `moves`.

    sampler: the UnevenBatchSampler or UnevenIterableDataset in use.
    mean: the model's GlobalMean.
    profile: this device's pyps.profile/1 (a file or a Profile); with it one window is enough.
    max_batch: the largest batch that fits this device, if the profile does not give it.
    min_batch, batch_multiple: bounds of this rank's batch that every change keeps. With BatchNorm1d each
        micro-batch keeps two samples.
    moves: when samples move, the same on all ranks.
    timeout: seconds to wait for ranks that make no Rebalancer.

    `history` holds every SplitChange, `states` the ranks in the latest window. Functions in `observers` are
    called with the Rebalancer when the result of a window is known. A warning says why nothing could be moved
    in five windows. Raises InputError on all ranks if one does not come, or refuses: its profile cannot be
    read, its batch is above its maximum. The next forward() raises it if ranks call step() unequally often.
    """

    def __init__(
        self,
        sampler: Rounds,
        mean: GlobalMean,
        profile: Profile | str | os.PathLike[str] | None = None,
        *,
        max_batch: int | None = None,
        min_batch: int = 1,
        batch_multiple: int = 1,
        moves: Moves = USUAL,
        timeout: float = DEADLINE_SECONDS,
    ) -> None:
        _check_types(sampler, mean, moves.window)
        consensus = Consensus("Rebalancer", mean.group, timeout, mean.peers)
        least = sampler.least * _least_samples(mean)
        least = max(least if sampler.batch >= least else sampler.least, min_batch)
        prior, self._bounds = _agreed_prior(consensus, sampler, profile, (least, max_batch, batch_multiple))
        _warn_of_another_model(profile, mean)
        self.states: list[MeasuredRank] = []
        self.observers: list[Callable[[Rebalancer], None]] = []
        self.steps = 0
        self.latest: tuple[int, float] | None = None  # the last step that was measured: batch and seconds
        self.mean = mean
        self.timer = ComputeTimer(mean)
        self.sampler = sampler
        self._device = BalancedDevice(prior, self._bounds)
        self._balancer = Balancer([], sampler.split, moves)  # its decisions are the first rank's
        every = consensus, self._device, self._balancer, sampler
        where = mean.models[0].device
        self._decisions = SplitDecisions(*every, self._read, lambda: peak_bytes(where))
        self._idle: list[str] = []  # why the latest windows moved nothing
        self._lost: dist.DistNetworkError | None = None  # the store of the process group was gone

    @property
    def history(self) -> list[SplitChange]:
        """Every change of the split."""
        return self._balancer.history

    @property
    def min_batch(self) -> int:
        """The least samples of this rank."""
        return self._bounds.least

    def step(self, rounds: int | None = None) -> None:
        """Call at the end of every step, on all ranks. Measures, and moves samples where that is worth it.

        rounds: as in GlobalMean.end_step().
        """
        if self._lost is not None:
            raise self._lost
        self.steps += 1
        self.mean.end_step(rounds)
        self.timer.finish(self._trained_batch())
        for trained, whole in self.timer.finished():
            if trained is not None:
                batch, factor = trained
                seconds = factor * whole / self.sampler.per_step
                self._device.hear(batch, seconds)
                self.latest = batch, seconds
        asked, self.mean.asked = self.mean.asked, False
        # Peers ask for nothing: a request would reach those of the other groups in another step.
        self.mean.asks = self.mean.peers is None and self._device.tells(self._balancer.rules.window)
        try:
            if self._decisions.step(asked):
                self.mean.asks = False
        except dist.DistNetworkError as error:
            # The first rank, which holds the store, ends after the last step: perhaps before this one has
            # read a decision that nothing follows. If there is another step, it fails.
            self._lost = error
        self.timer.start()

    def restart_timer(self) -> None:
        """Begin anew: what this rank did since the last step() is no part of a step."""
        self.timer.start()

    @property
    def device(self) -> BoundedCost:
        """Return what a step costs this rank's device now, and the bounds of its batch."""
        return BoundedCost(self._device.online.cost, self._bounds)

    def state_dict(self) -> dict[str, Any]:
        """Return what is known of this device and of earlier changes, for a Rebalancer of as many ranks."""
        known = _Knowledge(
            device=self._device.online,
            corrected=self._balancer.corrected,
            levels=self._balancer.levels or None,
            history=self.history,
        )
        return {"known": msgspec.json.encode(known).decode()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what was known. Call it before the first step. Raises InputError for another kind of state."""
        try:
            text = msgspec.convert(state, dict[str, str]).get("known", "")
            known = msgspec.json.decode(text, type=learnt(_Knowledge))
        except msgspec.DecodeError as error:
            raise InputError("Rebalancer", "state", str(error), "that of a Rebalancer") from None
        self._device.online, balancer = known.device, self._balancer
        balancer.levels, balancer.history = known.levels or [], known.history
        balancer.corrected = known.corrected

    def readings(self) -> list[Reading]:
        """Batch, times and bytes by rank; imbalance; changes so far."""
        found = [Reading("replans", float(len(self.history)))]
        for one in self.states:
            found += [Reading(name, float(getattr(one, name)), one.rank) for name in FIGURES]
        if self.states:
            seconds = [state.seconds for state in self.states]
            found.append(Reading("imbalance", max(seconds) / (sum(seconds) / len(seconds)) - 1))
        return found

    def scalars(self) -> dict[str, float]:
        """The readings for any logger, those of a rank as rank0/batch."""
        return {f"rank{r.rank}/{r.name}" if r.rank is not None else r.name: r.value for r in self.readings()}

    def report(self) -> str:
        """A table of the latest window, one line a rank: which ranks are slow, which wait for them, and the
        most memory that each has held, and what the plan said.
        """
        planned = dict(enumerate(self.sampler.planned_bytes))
        rows = (
            f"{s.rank:4d} {s.batch:6d} {s.seconds:12.4f} {s.slowdown:8.2f}x {s.waiting:8.1%}"
            f" {_gigabytes(s.held_bytes):>8} {_gigabytes(planned.get(s.rank)):>10}"
            for s in self.states
        )
        return "\n".join(["rank  batch  own seconds  slowdown  waiting  held GB planned GB", *rows])

    def _trained_batch(self) -> tuple[int, float] | None:
        """This rank's batch in the round that was just trained, and the factor of its time; None if that is
        not to be used.
        """
        trained = self.sampler.last_round()
        if self.steps <= WARM_UP or trained is None:
            return None
        size, own, factor = trained
        return (own, factor) if size == self.sampler.global_batch else None

    def _read(self, decision: SplitDecision) -> None:
        """A window's result is known."""
        self.states = decision.states
        self._idle = [*self._idle, decision.idle] if decision.idle else []
        if len(self._idle) == IDLE_WINDOWS and not self.history:
            window = self._balancer.rules.window
            warnings.warn(
                f"Rebalancer: nothing moved in {IDLE_WINDOWS} windows of {window}: {decision.idle}",
                stacklevel=3,
            )
        for observe in self.observers:
            observe(self)


def _gigabytes(count: int | None) -> str:
    return f"{count / 1e9:.3f}" if count else "-"


def _check_types(sampler: object, mean: object, window: int) -> None:
    if window < 3 or window % 2 == 0:
        raise InputError("Rebalancer", "window", str(window), "an odd number of steps from 3")
    if not isinstance(sampler, Rounds):
        expected = "an UnevenBatchSampler or UnevenIterableDataset"
        raise InputError("Rebalancer", "sampler", type(sampler).__name__, expected)
    if not isinstance(mean, GlobalMean):
        raise InputError("Rebalancer", "mean", type(mean).__name__, "GlobalMean(model, sampler)")


def _least_samples(mean: GlobalMean) -> int:
    """The fewest samples that the models train on: two where a layer normalizes over them."""
    layers = (layer for one in mean.models for layer in one.model.modules())
    return 2 if any(isinstance(layer, torch.nn.BatchNorm1d) for layer in layers) else 1


def _agreed_prior(
    consensus: Consensus,
    sampler: Rounds,
    profile: Profile | str | os.PathLike[str] | None,
    asked: tuple[int, int | None, int],
) -> tuple[Cost | None, Bounds]:
    """The device's cost and the bounds of its batch. asked: the least and the most samples, and of what
    they are a multiple. Raises InputError on all ranks if one refuses its own.
    """
    prior, error = None, None
    least, max_batch, multiple = asked
    bounds = Bounds(least, MAX_BATCH, multiple, required=True)
    try:
        if least < 1 or multiple < 1:
            found = f"{least} in steps of {multiple}"
            raise InputError("Rebalancer", "min_batch", found, "both at least 1")
        prior, fits = prior_of(profile, sampler.lengths)
        bounds = replace(bounds, most=min(fits, max_batch or MAX_BATCH))
        if sampler.batch > bounds.most:
            expected = f"at least the batch, {sampler.batch}"
            raise InputError("Rebalancer", "max_batch", str(bounds.most), expected)
    except InputError as refused:
        error = refused
    consensus.agree(error)
    return prior, bounds


def _warn_of_another_model(profile: Profile | str | os.PathLike[str] | None, mean: GlobalMean) -> None:
    """Where the profile says of how many parameters its model is, and the mean's has others."""
    if profile is None or mean.peers is not None:  # peers have parts of the model
        return
    found = profile if isinstance(profile, Profile) else read_profile(Path(profile))
    own = sum(parameter.numel() for parameter in mean.parameters())
    if found.model.parameters not in (None, own):
        of = f"of {found.model.name!r} with {found.model.parameters} parameters"
        warnings.warn(f"the profile is {of}; this model has {own}: profile it anew", stacklevel=3)


Observer = Callable[[Rebalancer], None]


def to_sink(sink: Sink, noise: GradientNoise | None = None) -> Observer:
    """An observer: writes the Rebalancer's scalars at the training step, and changes of the split as notes.

        balance.observers.append(to_sink(open_sink("tensorboard:logs"), noise))  # on one rank

    noise: if given, its scale too, as noise_scale.
    """
    written = 0

    def observe(balance: Rebalancer) -> None:
        nonlocal written
        found = balance.readings()
        if noise is not None and (scale := noise.scale) is not None:
            found.append(Reading("noise_scale", scale))
        sink.write(balance.steps, found)
        for change in balance.history[written:]:
            sink.note(change.step, str(change))
        written = len(balance.history)

    return observe
