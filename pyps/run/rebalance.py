"""Re-plans a run: the samples of each rank, while ranks come, go and change their speed.

Three things change the split in force; the global batch stays the same in each.

- A rank goes away, comes back or joins: its share goes to the others at once, or comes from them. Where no
  step waits for all ranks, a rank of the plan that is away keeps its share: the others do not wait for it.
- With `moves`: every `window` steps of each rank, and as soon as two slow steps or a quicker one show a
  change, its cost is estimated anew. The exact split for these costs replaces the one in force if it makes
  the longest step clearly shorter (pyps.solver.online.decide). Batches keep the plan's minima and multiples.
  Where steps wait for all ranks, one that only holds the others up is left out.
- Such a rank is tried with two samples now and then, and comes back when the exact split uses it.

Every launcher of a run decides from what the store shows; the one with the lowest rank that is there acts. So
the next one can go on when it dies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pyps.formats import Plan
from pyps.native.values import PolicyNeeds, RankCost
from pyps.report.activity import StoreActivity
from pyps.run.membership import Ranks, present_ranks, share_out, why_ranks_changed
from pyps.run.step_costs import StepCosts
from pyps.solver.costs import Cost
from pyps.solver.online.decide import Split, SplitChange, decide, gain_worth_a_change, round_seconds
from pyps.solver.online.window import CONFIRMED

WINDOW_STEPS = 7
DEADBAND = 0.05
FIRST_STEPS = 3  # of a rank that nothing is known of, before it gets its share
FIRST_SHARE = 0.25  # of an equal share: what it gets until then
TRIED = 2  # samples of a rank that is tried: batch normalization cannot train on one
PROBE_SHARE = 0.01  # of the time: what trying a rank that rests may take
PROBE_ROUNDS = 50  # between two tries, at least
PROBE_PATIENCE = 3  # rounds that a try may take, if the rank is fenced meanwhile


@dataclass(frozen=True)
class Replan:
    """A new split, decided on the store's plan number `plan`. kind: of its event. probed: the rank tried."""

    change: SplitChange
    plan: int
    kind: Literal["replanned", "probed"] = "replanned"
    probed: int | None = None


@dataclass(frozen=True)
class _Probe:
    rank: int
    round: int
    before: Split  # without it


class RunRebalancer:
    """Decides re-plans. `split`: the one in force when it last looked, `history`: the changes made."""

    def __init__(
        self,
        plan: Plan,
        needs: PolicyNeeds,
        *,
        moves: bool = True,
        window: int = WINDOW_STEPS,
        deadband: float = DEADBAND,
        depths: Sequence[int] = (),
    ) -> None:
        """plan: as it is run. needs: of its policy. moves: samples move for speed too. window: steps.
        deadband: the least relative gain. depths: steps under way, by store rank; by default 1.
        """
        self.split: Split = tuple(worker.batch for worker in plan.workers if worker.batch > 0)
        self.history: list[SplitChange] = []
        self.costs = StepCosts(plan, depths)
        self._global_batch, self._planned = plan.global_batch, len(self.split)
        self._shares_absent = needs.waits_for_rounds and not needs.resizes_batches
        self._moves, self._window, self._deadband = moves, window, deadband
        self._levels_at_change: list[float] = []
        self._corrected = False  # as in gain_worth_a_change
        self._remembered: dict[frozenset[int], Split] = {frozenset(range(self._planned)): self.split}
        self._left_out: dict[int, int] = {}  # the round since which a rank that is there rests
        self._probe: _Probe | None = None
        self._last: Ranks | None = None
        self._round = 0

    def update(self, state: StoreActivity, found: Sequence[RankCost]) -> Replan | None:
        """Take in what the store shows; the re-plan that is due now, if any.

        found: what the steps of each rank cost. Call `adopt` once the store has taken it.
        """
        ranks, status = present_ranks(state), state.status
        if len(found) != len(ranks.split):  # a rank came between two calls
            return None
        self.split = ranks.split
        self.costs.see(found, ranks.split)
        self._note_rests(ranks, status.round)
        if not status.all_joined or not ranks.workers:
            return None
        step = max(rank.pushes for rank in state.ranks)
        change = self._membership(ranks, step) or self._measured(ranks, step)
        if change is not None:
            return Replan(change, status.plan)
        if self._probe is not None:
            return self._end_probe(ranks, status.round, status.plan, step)
        if not ranks.resting and all(map(self.costs.is_known, ranks.workers)):
            self._remembered[self._sharing(ranks)] = ranks.split
        error = self._take_window(ranks)
        if not self._moves:
            return None
        change = self._faster(ranks, step, error) if error is not None else None
        if change is not None:
            return Replan(change, status.plan)
        return self._begin_probe(ranks, status.round, status.plan, step)

    def adopt(self, replan: Replan) -> None:
        """The store has taken the re-plan."""
        change = replan.change
        self.history.append(change)
        self._levels_at_change = self.costs.levels
        begins = replan.kind == "probed" and replan.probed is not None and change.after[replan.probed] > 0
        rank = replan.probed
        self._probe = _Probe(rank, self._round, change.before) if begins and rank is not None else None

    # ---- who is there ----

    def _note_rests(self, ranks: Ranks, now: int) -> None:
        """A rank whose samples were taken while its worker stayed is left out."""
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

    def _kept(self, ranks: Ranks) -> frozenset[int]:
        """Ranks that keep their share though they are away."""
        return frozenset(r for r in ranks.gone if not self._shares_absent and r < self._planned)

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
        unknown = {rank for rank in arrived if not self.costs.is_known(rank)}
        among = self._sharing(ranks) - unknown
        first = dict.fromkeys(unknown, self._first_batch(ranks)) if among else {}
        if not among:
            among = frozenset(unknown)
        after = self._split(among, sum(first.values()))
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

    def _split(self, among: frozenset[int], taken: int) -> Split:
        """The split among these ranks, but for so many samples: the one that they had before, or the best."""
        costs, most, size = self.costs.all, self.costs.max_batches, len(self.split)
        required = among - self._hopeless()
        before = self._remembered.get(among) if not taken else None
        if before is None:
            bounds = self.costs.min_batches, self.costs.batch_multiples
            return share_out(self._global_batch - taken, among, costs, most, required, size, *bounds)
        before = before + (0,) * (size - len(before))
        better = self._decide(before, costs, required, self._deadband, 0) if self._moves else None
        return before if better is None else better.after

    def _measured(self, ranks: Ranks, step: int) -> SplitChange | None:
        """The split with a rank of which nothing was known until its first steps."""
        there = [r for r in ranks.there if ranks.split[r] and not self.costs.is_known(r)]
        done = [rank for rank in there if self.costs.new_steps(rank) >= FIRST_STEPS]
        if not done:
            return None
        for rank in done:
            self.costs.take(rank, FIRST_STEPS)
        others = set(there) - set(done)
        taken = sum(ranks.split[rank] for rank in others)
        after = self._split(self._sharing(ranks) - others, taken)
        after = tuple(ranks.split[r] if r in others else batch for r, batch in enumerate(after))
        seconds = ", ".join(
            f"rank {r} is measured, {self.costs.all[r].seconds(ranks.split[r]) * 1e3:.1f} ms for "
            f"{ranks.split[r]} samples"
            for r in done
        )
        return self._change(step, ranks.split, after, f"{seconds}: {list(ranks.split)} -> {list(after)}")

    # ---- speed ----

    def _take_window(self, ranks: Ranks) -> float | None:
        """Estimate the costs anew, once there are enough steps of each rank, or a change shows: the greatest
        relative error.
        """
        among = [rank for rank in ranks.there if ranks.split[rank]]
        fresh = [rank for rank in among if self.costs.new_steps(rank)]
        full = len(fresh) == len(among) and all(self.costs.new_steps(r) >= self._window for r in among)
        if not among or not (full or any(self.costs.tells(rank, self._window) for rank in fresh)):
            return None
        # What left one device may have come to another: that one's first slow step is no hiccup.
        moved = any(self.costs.quicker(rank, self._window) for rank in fresh)
        confirmed = 1 if moved else CONFIRMED
        return max(self.costs.take(rank, self._window, confirmed) for rank in fresh)

    def _faster(self, ranks: Ranks, step: int, error: float) -> SplitChange | None:
        """The split that makes steps shorter."""
        changed = any(self.costs.unsure)
        self._corrected = self._corrected and not changed
        deadband = gain_worth_a_change(self._deadband, error, self._corrected)
        split = tuple(b if rank in ranks.workers else 0 for rank, b in enumerate(ranks.split))
        among = {rank for rank, batch in enumerate(split) if batch}
        required = {r for r in among if not self._shares_absent or self.costs.is_required(r)}
        change = self._decide(split, self.costs.all, required, deadband, step)
        if change is None or any(was and not b for was, b in zip(split, change.after, strict=True)):
            # A smaller batch may help after all: one batch tells nothing of the time for each sample.
            change = self._decide(split, self.costs.proportional, required, deadband, step) or change
        if change is None:
            return None
        self._corrected = not changed
        pairs = zip(change.after, ranks.split, strict=True)
        after = tuple(a if r in ranks.workers else b for r, (a, b) in enumerate(pairs))
        loading = self.costs.loading_reasons(sorted(among))
        reasons = (*change.reasons, *self._left_out_reasons(change), *loading)
        return replace(change, before=ranks.split, after=after, reasons=reasons)

    def _decide(
        self,
        split: Split,
        costs: Sequence[Cost],
        required: set[int] | frozenset[int],
        deadband: float,
        step: int,
    ) -> SplitChange | None:
        """The better split among the ranks that have samples in this one."""
        levels, then = self.costs.levels, self._levels_at_change
        then = then + [1.0] * (len(levels) - len(then))
        paces = [now / before for now, before in zip(levels, then, strict=True)]
        caps = [most if batch else 0 for most, batch in zip(self.costs.max_batches, split, strict=True)]
        needed = [rank in required for rank in range(len(split))]
        least, multiples = self.costs.min_batches, self.costs.batch_multiples
        unsure = self.costs.unsure
        return decide(split, costs, paces, least, caps, deadband, step, needed, multiples, unsure)

    def _left_out_reasons(self, change: SplitChange) -> list[str]:
        reasons = []
        for rank, (was, batch) in enumerate(zip(change.before, change.after, strict=True)):
            if was and not batch:
                alone = self.costs.proportional[rank].seconds(1) * 1e3
                others = f"a step without it {change.seconds_after * 1e3:.1f} ms"
                reasons.append(f"rank {rank} is left out: one sample takes it {alone:.1f} ms, {others}")
        return reasons

    # ---- ranks that were left out ----

    def _begin_probe(self, ranks: Ranks, now: int, plan: int, step: int) -> Replan | None:
        """Give a rank that has rested for long enough the fewest samples."""
        due = [r for r, since in self._left_out.items() if now - since >= self._rest_rounds(ranks, r)]
        if not due:
            return None
        rank, split = min(due), list(ranks.split)
        most = max(range(len(split)), key=split.__getitem__)
        least, multiples = self.costs.min_batches, self.costs.batch_multiples
        few = min(TRIED, self.costs.max_batches[rank]) if split[most] >= 2 * TRIED else 1
        tried = -(-max(least[rank], few) // multiples[most]) * multiples[most]  # what the other can give
        split[most], split[rank] = split[most] - tried, tried
        if split[most] < least[most] or tried % multiples[rank]:
            return None
        samples = "one sample" if tried == 1 else f"{tried} samples"
        change = self._change(step, ranks.split, tuple(split), f"rank {rank} is tried with {samples}")
        return Replan(change, plan, "probed", rank)

    def _rest_rounds(self, ranks: Ranks, rank: int) -> int:
        """Rounds between two tries, which delay a round each."""
        usual = round_seconds(self.costs.all, ranks.split)
        delay = self.costs.proportional[rank].seconds(TRIED) - usual
        return max(PROBE_ROUNDS, math.ceil(delay / (PROBE_SHARE * usual)) if usual > 0 else 0)

    def _end_probe(self, ranks: Ranks, now: int, plan: int, step: int) -> Replan | None:
        """Once the rank's samples are timed: plan it in, or let it rest again."""
        probe = self._probe
        if probe is None:
            return None
        timed = self.costs.new_steps(probe.rank) > 0
        if not timed and now < probe.round + PROBE_PATIENCE:
            return None
        if timed:
            self.costs.renew(probe.rank)
        required = ranks.there - self._hopeless()
        costs, most = self.costs.all, self.costs.max_batches
        bounds = self.costs.min_batches, self.costs.batch_multiples
        after = share_out(self._global_batch, ranks.there, costs, most, required, len(ranks.split), *bounds)
        if not after[probe.rank]:
            before = probe.before + (0,) * (len(ranks.split) - len(probe.before))
            reason = (
                f"rank {probe.rank} rests: one sample takes it {costs[probe.rank].seconds(1) * 1e3:.1f} ms"
            )
            return Replan(self._change(step, ranks.split, before, reason), plan, "probed", probe.rank)
        reason = f"rank {probe.rank} is back at step {step}: {list(probe.before)} -> {list(after)}"
        return Replan(self._change(step, ranks.split, after, reason), plan)

    def _change(self, step: int, before: Split, after: Split, reason: str) -> SplitChange:
        costs = self.costs.all
        return SplitChange(
            step, before, after, round_seconds(costs, before), round_seconds(costs, after), (reason,)
        )


def _listed(ranks: set[int]) -> str:
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {', '.join(map(str, sorted(ranks)))}"
