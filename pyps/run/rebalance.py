"""Re-plans a run: shows a Balancer what the store shows, and gives the launcher what it decides.

Every launcher of a run decides from what the store shows; the one with the lowest rank that is there acts. So
the next one can go on when it dies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Literal

from pyps.formats import MAX_BATCH, Plan
from pyps.native.decisions import PolicyNeeds
from pyps.native.status import MemberState
from pyps.native.values import CostModel, RankCost, Role
from pyps.profiler.statistics import median_and_error
from pyps.report.report import LOADING_SHARE
from pyps.solver.costs import Line
from pyps.solver.online.balancer import Balancer, Rules
from pyps.solver.online.decide import Bounds, Split, SplitChange
from pyps.solver.online.device import BalancedDevice, planned_device
from pyps.solver.online.members import Ranks
from pyps.store.activity import StoreActivity

HERE = (MemberState.ACTIVE, MemberState.FENCED)  # a fenced worker comes back by itself


@dataclass(frozen=True)
class Replan:
    """A new split, decided on the store's plan number `plan`."""

    change: SplitChange
    plan: int

    @property
    def kind(self) -> Literal["replanned", "probed"]:
        """Return the kind of the run's event."""
        return "replanned" if self.change.probed is None else "probed"


def present_ranks(state: StoreActivity) -> Ranks:
    """The ranks of a store as last seen."""
    workers = {
        m.rank: m.id
        for m in state.members
        if m.role is Role.WORKER and m.state in HERE and m.rank is not None and m.rank < len(state.ranks)
    }
    return Ranks(workers, tuple(rank.batch for rank in state.ranks))


class RunRebalancer:
    """Re-plans of one run. `split`: the one in force when it last looked."""

    def __init__(
        self, plan: Plan, needs: PolicyNeeds, *, moves: bool = True, depths: Sequence[int] = ()
    ) -> None:
        """plan: as it is run. needs: of its policy. moves: samples move for speed too. depths: steps under
        way, by store rank; by default 1.
        """
        workers = [worker for worker in plan.workers if worker.batch > 0]
        depth = [d or 1 for _, d in zip_longest(workers, depths[: len(workers)])]
        devices = [planned_device(worker, d) for worker, d in zip(workers, depth, strict=True)]
        self.split: Split = tuple(worker.batch for worker in workers)
        self._balancer = Balancer(devices, self.split, Rules(moves=moves, rests=needs.lets_ranks_rest))

    @property
    def history(self) -> list[SplitChange]:
        """The changes made."""
        return self._balancer.history

    def update(self, state: StoreActivity, found: Sequence[RankCost]) -> Replan | None:
        """Take in what the store shows; the re-plan that is due now, if any.

        found: what the steps of each rank cost. Call `adopt` once the store has taken it.
        """
        ranks, status = present_ranks(state), state.status
        if len(found) != len(ranks.split):  # a rank came between two calls
            return None
        self.split = ranks.split
        self._see(found)
        if not status.all_joined:
            self._balancer.note(ranks, status.round)
            return None
        change = self._balancer.look(ranks, status.round, max(rank.pushes for rank in state.ranks))
        if change is None:
            return None
        loading = _loading_reasons(
            found, (rank for rank in ranks.there if change.after[rank] < change.before[rank])
        )
        return Replan(replace(change, reasons=(*change.reasons, *loading)), status.plan)

    def adopt(self, replan: Replan) -> None:
        """The store has taken the re-plan."""
        self._balancer.adopt(replan.change)

    def _see(self, found: Sequence[RankCost]) -> None:
        """Take note of what the store has timed, and at which batches."""
        devices = self._balancer.devices
        for rank, (cost, batch) in enumerate(zip(found, self.split, strict=True)):
            if rank >= len(devices):
                devices.append(_new(cost.model))
            elif not devices[rank].known and cost.model is not None:
                devices[rank] = _new(cost.model)
            devices[rank].see(batch, cost.steps, cost.seconds)


def _new(model: CostModel | None) -> BalancedDevice:
    """A rank that the plan does not have: as its worker's profile says, or once its first steps are timed."""
    if model is None:
        return BalancedDevice(known=False)
    line = Line(model.fixed_seconds, model.sample_seconds, model.least_seconds)
    return BalancedDevice(line, Bounds(most=model.max_batch or MAX_BATCH))


def _loading_reasons(found: Sequence[RankCost], ranks: Iterable[int]) -> list[str]:
    """A line for each rank whose data costs it more time than its compute."""
    reasons = []
    for rank in sorted(ranks):
        if not found[rank].seconds:
            continue
        cost, _ = median_and_error(list(found[rank].seconds))
        compute = max(0.0, cost - found[rank].data_seconds)
        if cost > (1 + LOADING_SHARE) * compute:
            how = f"{cost * 1e3:.1f} ms a step, {compute * 1e3:.1f} ms of it compute"
            reasons.append(f"rank {rank} is held up by its data: {how}")
    return reasons
