"""Rounds of a run in virtual time: what its store shows, and the launchers that re-plan it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

from pyps.formats import Plan
from pyps.native.status import Member, MemberState, PushCounts, Status, WaitKind
from pyps.native.values import CostModel, RankCost, Role
from pyps.run.rebalance import Replan, RunRebalancer, present_ranks
from pyps.store.activity import StoreActivity
from pyps.store.policies import DEFAULT_POLICY, Policy

KEPT = 8  # as PYPS_TIMED_STEPS
WARM_UP = 2
Seconds = Callable[[int, int], float]  # of a step: (rank, batch)


class VirtualRank:
    """A rank as the store sees it."""

    def __init__(self, batch: int) -> None:
        self.batch, self.worker, self.state = batch, 0, MemberState.EMPTY
        self.pushes = self.samples = self.timed = self.since_join = 0
        self.kept: list[float] = []
        self.data_seconds = 0.0
        self.model: CostModel | None = None

    @property
    def there(self) -> bool:
        return self.state in (MemberState.ACTIVE, MemberState.FENCED)

    def plan(self, batch: int) -> None:
        if batch != self.batch:
            self.batch = batch
            self.forget()

    def forget(self) -> None:
        self.timed, self.kept = 0, []


class VirtualRounds:
    """A store whose rounds end when every rank with samples is done, and one launcher for each of `hosts`."""

    def __init__(
        self,
        plan: Plan,
        seconds: Seconds,
        hosts: Sequence[Sequence[int]] | None = None,
        *,
        moves: bool = True,
        policy: Policy = DEFAULT_POLICY,
        depths: Sequence[int] = (),
    ) -> None:
        """plan: of the run. seconds: of a rank's step. hosts: the ranks of each; None: all on one."""
        self.plan, self.seconds = plan, seconds
        self.ranks = [VirtualRank(worker.batch) for worker in plan.workers if worker.batch]
        self.round = self.plans = 0
        self.assigned: list[int] = []  # samples of each round
        self.changes: list[Replan] = []
        self._ids = count(1)
        self._options = {"moves": moves, "depths": depths}
        self._policy = policy
        self.launchers: list[tuple[set[int], RunRebalancer]] = []
        for ranks in hosts if hosts is not None else [range(len(self.ranks))]:
            self.start_host(ranks)

    def start_host(self, ranks: Sequence[int], model: CostModel | None = None) -> None:
        """A launcher starts, and its ranks join."""
        made = RunRebalancer(self.plan, self._policy.needs, **self._options)  # type: ignore[arg-type]
        self.launchers.append((set(ranks), made))
        for rank in ranks:
            self.join(rank, model)

    def kill_host(self, ranks: Sequence[int]) -> None:
        """Its launcher and its workers die."""
        self.launchers = [one for one in self.launchers if one[0] != set(ranks)]
        for rank in ranks:
            self.leave(rank)

    def join(self, rank: int, model: CostModel | None = None) -> None:
        while rank >= len(self.ranks):
            self.ranks.append(VirtualRank(0))
        found = self.ranks[rank]
        found.state, found.worker, found.since_join = MemberState.ACTIVE, next(self._ids), 0
        found.model = model
        found.forget()

    def leave(self, rank: int, state: MemberState = MemberState.DEAD) -> None:
        self.ranks[rank].state = state

    @property
    def split(self) -> tuple[int, ...]:
        return tuple(rank.batch for rank in self.ranks)

    def steps(self, rounds: int) -> list[Replan]:
        """So many rounds, each with a look of every launcher; the re-plans that they made."""
        before = len(self.changes)
        for _ in range(rounds):
            self.look()
            self.train()
        return self.changes[before:]

    def train(self) -> None:
        self.round += 1
        self.assigned.append(0)
        for number, rank in enumerate(self.ranks):
            if not rank.batch or not rank.there:
                continue
            self.assigned[-1] += rank.batch
            rank.pushes, rank.samples = rank.pushes + 1, rank.samples + rank.batch
            rank.since_join += 1
            if rank.since_join > WARM_UP:
                rank.kept = [*rank.kept, self.seconds(number, rank.batch)][-KEPT:]
                rank.timed += 1

    def look(self) -> None:
        """Each launcher looks at the store; the one with the lowest rank that is there acts."""
        for ranks, rebalancer in list(self.launchers):
            state = self.state()
            replan = rebalancer.update(state, self.costs())
            there = present_ranks(state).there
            if replan is not None and there and min(there) in ranks and replan.plan == self.plans:
                self.apply(replan)
                rebalancer.adopt(replan)

    def apply(self, replan: Replan) -> None:
        assert replan.plan == self.plans, "decided on another plan"
        self.plans += 1
        self.changes.append(replan)
        for rank, batch in zip(self.ranks, replan.change.after, strict=True):
            rank.plan(batch)

    def costs(self) -> list[RankCost]:
        return [RankCost(r.timed, tuple(r.kept), r.data_seconds, 0.0, r.model) for r in self.ranks]

    def state(self) -> StoreActivity:
        members = [_member(k, rank) for k, rank in enumerate(self.ranks) if rank.worker]
        ranks = [PushCounts(r.batch, r.pushes, r.samples, 0, 0, 0, 0) for r in self.ranks]
        status = Status(0, self.round, self.round, self.plans, sum(self.assigned), 0, 0, True)
        return StoreActivity(status, tuple(members), tuple(ranks))


def _member(rank: int, found: VirtualRank) -> Member:
    return Member(
        id=found.worker,
        state=found.state,
        role=Role.WORKER,
        rank=rank,
        pid=100 + found.worker,
        clock=0,
        pulled_version=0,
        claim_first=0,
        claim_count=0,
        staged=False,
        waits_for=WaitKind.NOT,
        bytes_pushed=0,
        bytes_pulled=0,
        joined_seconds=0.0,
        waited_seconds=0.0,
        wait_seconds=0.0,
        claim_seconds=0.0,
        step_seconds=0.0,
    )
