"""Balancer: which rank has how many samples, while ranks come, go and change their speed. It does no I/O.

It is driven by the launchers of a store's run, by the ranks of DDP, and in virtual time. Timed steps and the
ranks that are there go in; changes of the split come out. The global batch stays the same in each.

- A rank goes away, comes back or joins: its share goes to the others at once, or comes from them. Where no
  step waits for all ranks, a rank of the plan that is away keeps its share: the others do not wait for it.
- With `moves`: every `window` steps of each rank, and as soon as two slow steps or a quicker one show a
  change, its cost is estimated anew. The exact split for these costs replaces the one in force if it makes
  the longest step clearly shorter (pyps.solver.online.decide). Batches keep their minima and multiples.
  Where ranks may rest, one that only holds the others up is left out.
- Such a rank is tried with two samples now and then, and comes back when the exact split uses it.

The same input gives the same changes. So each launcher of a store's run asks a Balancer of its own; the one
with the lowest rank that is there acts, and the next one can go on when it dies.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from pyps.solver.online.decide import Bounds, Split, SplitChange, decide, gain_worth_a_change, round_seconds
from pyps.solver.online.device import BalancedDevice, DeviceReading, Estimate
from pyps.solver.online.members import Ranks, share_out, why_ranks_changed

FIRST_STEPS = 3  # of a rank that nothing is known of, before it gets its share
FIRST_SHARE = 0.25  # of an equal share: what it gets until then
TRIED = 2  # samples of a rank that is tried: batch normalization cannot train on one
PROBE_SHARE = 0.01  # of the time: what trying a rank that rests may take
PROBE_ROUNDS = 50  # between two tries, at least
PROBE_PATIENCE = 3  # rounds that a try may take, if the rank is fenced meanwhile


@dataclass(frozen=True)
class Rules:
    """In what balanced runs differ.

    window: steps of each rank between two decisions, if no change shows. deadband: the least relative gain,
    while times are not certain. moves: samples move for speed, not only as ranks come and go. rests: steps
    wait for all ranks that have samples, and one may have none: so the share of one that is away goes to the
    others, and one that holds them up is left out.
    """

    window: int = 7
    deadband: float = 0.05
    moves: bool = True
    rests: bool = True


@dataclass(frozen=True)
class _Probe:
    rank: int
    round: int
    before: Split  # without it


class Balancer:
    """Decides changes of the split. devices: of the ranks, in their order; more may be added.

    `history`: the changes that were adopted. levels, corrected: of the devices when the last one was decided,
    and whether it corrected the split for the same devices: with `history` all that a checkpoint keeps.
    """

    def __init__(self, devices: Sequence[BalancedDevice], split: Split, rules: Rules) -> None:
        """split: the first one, which its devices' ranks have."""
        self.devices = list(devices)
        self.rules = rules
        self.history: list[SplitChange] = []
        self.levels: list[float] = []
        self.corrected = False  # as in gain_worth_a_change
        self._global_batch, self._planned = sum(split), len(split)
        self._remembered: dict[frozenset[int], Split] = {frozenset(range(self._planned)): split}
        self._left_out: dict[int, int] = {}  # the round since which a rank that is there rests
        self._probe: _Probe | None = None
        self._last: Ranks | None = None
        self._round = 0

    def note(self, ranks: Ranks, now: int) -> None:
        """Take note of who is there in round `now`. A rank whose samples were taken while its worker stayed
        is left out.
        """
        last, self._last, self._round = self._last, ranks, now
        for rank in list(self._left_out):
            if rank not in ranks.resting:
                del self._left_out[rank]
        for rank in ranks.resting:
            had = last is not None and rank < len(last.split) and last.split[rank] > 0
            if had and last is not None and last.workers.get(rank) == ranks.workers[rank]:
                self._left_out[rank] = now
        if self._probe is not None and not ranks.split[self._probe.rank]:
            self._probe = None  # another launcher has ended it

    def look(self, ranks: Ranks, now: int, step: int) -> SplitChange | None:
        """The change that is due, if any. now: the round; step: the number in the reasons.

        Call `adopt` once the change is made; what was decided and not adopted is decided again.
        """
        self.note(ranks, now)
        if not ranks.workers:
            return None
        change = self._membership(ranks, step) or self._measured(ranks, step)
        if change is not None:
            return change
        if self._probe is not None:
            return self._end_probe(ranks, self._probe, step)
        if not ranks.resting and all(self.devices[rank].known for rank in ranks.workers):
            self._remembered[self._sharing(ranks)] = ranks.split
        taken = self._take_window(ranks)
        if not self.rules.moves:
            return None
        change = self.decide(ranks, self._estimates, self._bounds, taken, step) if taken else None
        return change or self._begin_probe(ranks, step)

    def adopt(self, change: SplitChange, levels: Sequence[float] = ()) -> None:
        """The change is made. levels: of the ranks' devices then; by default those of `devices`."""
        self.history.append(change)
        self.levels = list(levels) or [device.online.level for device in self.devices]
        rank = change.probed
        begins = rank is not None and change.after[rank] > 0
        self._probe = _Probe(rank, self._round, change.before) if begins and rank is not None else None

    def decide_read(self, readings: Sequence[DeviceReading], step: int) -> tuple[SplitChange | None, str]:
        """The change that is due where each rank has timed its own steps; or why none can be."""
        unmeasured = [rank for rank, reading in enumerate(readings) if reading.seconds is None]
        if unmeasured:
            return None, f"no full round was measured on ranks {unmeasured}"
        if any(reading.changing for reading in readings):
            return None, ""
        split, every = tuple(reading.batch for reading in readings), range(len(readings))
        bounds = [reading.bounds for reading in readings]
        ranks = Ranks({rank: rank for rank in every}, split)
        change = self.decide(ranks, [reading.estimate for reading in readings], bounds, every, step)
        full = [rank for rank in every if split[rank] >= bounds[rank].most]
        if change is None and full and len(full) >= len(readings) - 1:
            return None, f"ranks {full} are at their max_batch"
        return change, ""

    def decide(
        self,
        ranks: Ranks,
        estimates: Sequence[Estimate],
        bounds: Sequence[Bounds],
        measured: Collection[int],
        step: int,
    ) -> SplitChange | None:
        """The change that makes steps shorter, by what is known of each rank; None: none is worth it.

        measured: the ranks whose errors count: of new steps.
        """
        unsure = any(estimate.unsure for estimate in estimates)
        self.corrected = self.corrected and not unsure
        error = max((estimates[rank].error for rank in measured), default=0.0)
        quiet = not unsure and (self.corrected or all(estimate.level == 1.0 for estimate in estimates))
        drifts = any(estimate.drifts for estimate in estimates)
        least_gain = gain_worth_a_change(self.rules.deadband, error, self.corrected, quiet, drifts)
        split = tuple(b if rank in ranks.workers else 0 for rank, b in enumerate(ranks.split))
        bounds = [
            replace(bound, required=bool(batch) and (bound.required or not self.rules.rests))
            for bound, batch in zip(bounds, split, strict=True)
        ]
        change = self._better(split, estimates, bounds, least_gain, step)
        if change is None or any(was and not b for was, b in zip(split, change.after, strict=True)):
            # A smaller batch may help after all: one batch tells nothing of the time for each sample.
            steeper = [replace(estimate, cost=estimate.proportional) for estimate in estimates]
            change = self._better(split, steeper, bounds, least_gain, step) or change
        if change is None:
            return None
        self.corrected = not unsure
        pairs = zip(change.after, ranks.split, strict=True)
        after = tuple(a if r in ranks.workers else b for r, (a, b) in enumerate(pairs))
        reasons = (*change.reasons, *_left_out_reasons(change, estimates))
        return replace(change, before=ranks.split, after=after, reasons=reasons)

    def _better(
        self,
        split: Split,
        estimates: Sequence[Estimate],
        bounds: Sequence[Bounds],
        least_gain: float,
        step: int,
    ) -> SplitChange | None:
        """The better split among the ranks that have samples in this one."""
        then = [*self.levels, *[1.0] * (len(split) - len(self.levels))]
        return decide(
            split,
            [estimate.cost for estimate in estimates],
            [estimate.level / before for estimate, before in zip(estimates, then, strict=True)],
            [b if batch else replace(b, most=0) for b, batch in zip(bounds, split, strict=True)],
            least_gain,
            step,
            [estimate.unsure for estimate in estimates],
        )

    # ---- ranks that come and go ----

    @property
    def _estimates(self) -> list[Estimate]:
        return [device.estimate for device in self.devices]

    @property
    def _bounds(self) -> list[Bounds]:
        return [device.bounds for device in self.devices]

    def _kept(self, ranks: Ranks) -> frozenset[int]:
        """Ranks that keep their share though they are away."""
        return frozenset(r for r in ranks.gone if not self.rules.rests and r < self._planned)

    def _sharing(self, ranks: Ranks) -> frozenset[int]:
        return ranks.there | self._kept(ranks)

    def _hopeless(self) -> set[int]:
        return {*self._left_out, *([self._probe.rank] if self._probe is not None else [])}

    def _membership(self, ranks: Ranks, step: int) -> SplitChange | None:
        """The split for the ranks that are there now, if others were there when the last one was made."""
        away = ranks.gone - self._kept(ranks)
        arrived = ranks.resting - self._left_out.keys()
        if not away and not arrived:
            return None
        unknown = {rank for rank in arrived if not self.devices[rank].known}
        among = self._sharing(ranks) - unknown
        first = dict.fromkeys(unknown, self._first_batch(ranks)) if among else {}
        if not among:
            among = frozenset(unknown)
        after = self._split(among, sum(first.values()), len(ranks.split))
        after = tuple(first.get(rank, batch) for rank, batch in enumerate(after))
        if after == ranks.split:
            return None
        absent = frozenset(range(self._planned)) - ranks.there
        reason = why_ranks_changed(ranks, absent, self._planned, after)
        if first:
            reason += f"; {_listed(unknown)} to be measured first"
        return self._change(step, ranks.split, after, reason)

    def _first_batch(self, ranks: Ranks) -> int:
        equal = self._global_batch / len(ranks.workers)
        return max(1, min(TRIED, int(equal)), int(FIRST_SHARE * equal))

    def _split(self, among: frozenset[int], taken: int, size: int) -> Split:
        """The split among these ranks, without `taken` samples: the one that they had before, or the best."""
        required = among - self._hopeless()
        before = self._remembered.get(among) if not taken else None
        if before is None:
            return self._shared(self._global_batch - taken, among, required)
        before = before + (0,) * (size - len(before))
        if not self.rules.moves:
            return before
        bounds = [replace(bound, required=rank in required) for rank, bound in enumerate(self._bounds)]
        better = self._better(before, self._estimates, bounds, self.rules.deadband, 0)
        return before if better is None else better.after

    def _shared(self, samples: int, among: frozenset[int], required: Collection[int]) -> Split:
        """The best split of `samples` among these ranks."""
        return share_out(samples, among, [one.cost for one in self._estimates], self._bounds, required)

    def _measured(self, ranks: Ranks, step: int) -> SplitChange | None:
        """The split with a rank of which nothing was known until its first steps."""
        there = [r for r in ranks.there if ranks.split[r] and not self.devices[r].known]
        done = [rank for rank in there if len(self.devices[rank].times) >= FIRST_STEPS]
        if not done:
            return None
        for rank in done:
            self.devices[rank].take(FIRST_STEPS)
        others = set(there) - set(done)
        taken = sum(ranks.split[rank] for rank in others)
        after = self._split(self._sharing(ranks) - others, taken, len(ranks.split))
        after = tuple(ranks.split[r] if r in others else batch for r, batch in enumerate(after))
        seconds = ", ".join(
            f"rank {r} is measured, {self.devices[r].estimate.cost.seconds(ranks.split[r]) * 1e3:.1f} ms for "
            f"{ranks.split[r]} samples"
            for r in done
        )
        return self._change(step, ranks.split, after, f"{seconds}: {list(ranks.split)} -> {list(after)}")

    def _take_window(self, ranks: Ranks) -> list[int]:
        """Estimate the costs anew, once there are enough steps of each rank, or a change shows: the ranks
        whose steps were taken in.
        """
        window = self.rules.window
        among = [rank for rank in ranks.there if ranks.split[rank]]
        fresh = [rank for rank in among if self.devices[rank].times]
        full = len(fresh) == len(among) and all(len(self.devices[r].times) >= window for r in among)
        if not among or not (full or any(self.devices[rank].tells(window) for rank in fresh)):
            return []
        # What left one device may have come to another: that one's first slow step is no hiccup.
        moved = any(self.devices[rank].quicker() for rank in fresh)
        for rank in fresh:
            self.devices[rank].take(window, 1 if moved else None)
        return fresh

    # ---- ranks that were left out ----

    def _begin_probe(self, ranks: Ranks, step: int) -> SplitChange | None:
        """Give a rank that has rested for long enough the fewest samples."""
        now = self._round
        due = [r for r, since in self._left_out.items() if now - since >= self._rest_rounds(ranks, r)]
        if not due:
            return None
        rank, split = min(due), list(ranks.split)
        most = max(range(len(split)), key=split.__getitem__)
        bound, giver = self.devices[rank].bounds, self.devices[most].bounds
        few = min(TRIED, bound.most) if split[most] >= 2 * TRIED else 1
        tried = -(-max(bound.least_multiple, few) // giver.multiple) * giver.multiple  # what it can give
        split[most], split[rank] = split[most] - tried, tried
        if split[most] < giver.least_multiple or tried % bound.multiple or tried > bound.most:
            return None
        samples = "one sample" if tried == 1 else f"{tried} samples"
        change = self._change(step, ranks.split, tuple(split), f"rank {rank} is tried with {samples}")
        return replace(change, probed=rank)

    def _rest_rounds(self, ranks: Ranks, rank: int) -> int:
        """Rounds between two tries, which delay a round each."""
        estimates = self._estimates
        usual = round_seconds([estimate.cost for estimate in estimates], ranks.split)
        delay = estimates[rank].proportional.seconds(TRIED) - usual
        return max(PROBE_ROUNDS, math.ceil(delay / (PROBE_SHARE * usual)) if usual > 0 else 0)

    def _end_probe(self, ranks: Ranks, probe: _Probe, step: int) -> SplitChange | None:
        """Once the rank's samples are timed: plan it in, or let it rest again."""
        device = self.devices[probe.rank]
        if not device.times and self._round < probe.round + PROBE_PATIENCE:
            return None
        device.renew()
        size = len(ranks.split)
        after = self._shared(self._global_batch, ranks.there, ranks.there - self._hopeless())
        if not after[probe.rank]:
            before = probe.before + (0,) * (size - len(probe.before))
            alone = device.estimate.cost.seconds(1) * 1e3
            change = self._change(
                step, ranks.split, before, f"rank {probe.rank} rests: one sample takes it {alone:.1f} ms"
            )
            return replace(change, probed=probe.rank)
        reason = f"rank {probe.rank} is back at step {step}: {list(probe.before)} -> {list(after)}"
        return self._change(step, ranks.split, after, reason)

    def _change(self, step: int, before: Split, after: Split, reason: str) -> SplitChange:
        costs = [estimate.cost for estimate in self._estimates]
        return SplitChange(
            step, before, after, round_seconds(costs, before), round_seconds(costs, after), (reason,)
        )


def _left_out_reasons(change: SplitChange, estimates: Sequence[Estimate]) -> list[str]:
    reasons = []
    for rank, (was, batch) in enumerate(zip(change.before, change.after, strict=True)):
        if was and not batch:
            alone = estimates[rank].proportional.seconds(1) * 1e3
            others = f"a step without it {change.seconds_after * 1e3:.1f} ms"
            reasons.append(f"rank {rank} is left out: one sample takes it {alone:.1f} ms, {others}")
    return reasons


def _listed(ranks: set[int]) -> str:
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {', '.join(map(str, sorted(ranks)))}"
