"""Stores in shared memory and the core in virtual time, given the same order of events, decide the same."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from policy_drive import COMMITTED, REFUSED, WAIT, Drive, cost_nanoseconds, orders

from pyps.errors import Ended, PushRejected, TimedOut
from pyps.native.values import Hyper, PushResult
from pyps.store import Store
from pyps.store.policies import (
    ASP,
    BSP,
    R2SP,
    SSP,
    Backup,
    DynSGD,
    Policy,
    Quorum,
    SaPS,
    Softsync,
)
from pyps.store.staging import StagingBuffer

BATCHES = [5, 3, 2, 7]
SAMPLES = 100
ORDERED = [  # those that decide by order alone, not by how long things took
    BSP(), ASP(), Backup(k=1), Softsync(n=2), SSP(bound=1), DynSGD(),
    SaPS(threshold="fixed", bound=2), SaPS(threshold="ringmaster"), SaPS(threshold="quantile", quantile=0.5),
    SaPS(threshold="fixed", bound=2, late="weigh"),
    R2SP(slack=0.0, patience=1e6), Quorum(k=1, grace=0.0),
]  # fmt: skip


class Twins:
    """The same workers twice; every step is taken in both, and compared."""

    def __init__(self, policy: Policy, name: str, stack: ExitStack) -> None:
        self.drive = Drive(policy, BATCHES, SAMPLES)
        more = {
            "max_participants": len(BATCHES)
        }  # as in the core alone: it bounds the list of returned ranges
        first = Store.create(
            name, {"w": np.zeros(10)}, batches=BATCHES, policy=policy, samples=SAMPLES, **more
        )
        self.stores = [first, *(Store.open(name) for _ in BATCHES[1:])]
        for rank, store in enumerate(self.stores):
            stack.enter_context(store)
            store.join(rank)
        self.flats: list[np.ndarray] = [np.zeros(0)] * len(BATCHES)
        self.staging_buffers: dict[int, StagingBuffer] = {}
        self.staged: dict[int, tuple[StagingBuffer, int]] = {}  # in a round that a store's worker waits for

    def turn(self, k: int) -> None:
        drive = self.drive
        if k in drive.ended or k in drive.waiting:
            return
        if k in self.staged:  # the round has closed meanwhile
            staging, samples = self.staged.pop(k)
            assert self.push(k, staging, samples) is not None
        if k in drive.owes_pull:
            self.pull(k)
            drive.turn(k)
        elif k in drive.claims:
            self.push_both(k)
        else:
            self.start_both(k)

    def start_both(self, k: int) -> None:
        fresh = k in self.drive.fresh
        claimed = self.drive.start(k)
        try:
            claim = self.stores[k].start(timeout=0.0)
            assert claimed
            assert (claim.first, claim.count) == self.drive.claims[k]
            if not fresh:
                self.pull(k)
        except TimedOut:
            assert not claimed
            assert k not in self.drive.ended
        except Ended:
            assert k in self.drive.ended

    def pull(self, k: int) -> None:
        self.flats[k], version = self.stores[k].pull()
        assert version == self.drive.version

    def push(self, k: int, staging: StagingBuffer, samples: int) -> PushResult | None:
        """None: it has to wait."""
        try:
            cost = cost_nanoseconds(k, samples) * 1e-9
            more = {"timeout": 0.0, "cost_seconds": cost}
            return self.stores[k].push(staging, samples, Hyper(lr=0.1), **more)
        except TimedOut:
            return None

    def replan(self, batches: list[int]) -> None:
        """In both, as a Balancer's change is made in a run and in a simulation."""
        self.drive.core.replan(self.drive.now, batches)
        self.drive.see()
        self.stores[0].replan(batches)

    def costs(self) -> None:
        """Return what both show of the ranks' steps, which is all that a Balancer learns of them."""
        found = [(cost.steps, cost.seconds) for cost in self.stores[0].costs()]
        expected = [(cost.steps, pytest.approx(cost.seconds)) for cost in self.drive.core.costs()]
        assert found == expected

    def push_both(self, k: int) -> None:
        drive, samples = self.drive, self.drive.claims[k][1]
        if len(drive.staging_buffers[k]) == 2:
            with pytest.raises(TimedOut):
                self.stores[k].stage(timeout=0.0)
            return
        staging = self.staging_buffers.pop(k, None) or self.stores[k].stage()
        verdict = drive.push(k)
        try:
            result = self.push(k, staging, samples)
        except PushRejected:
            assert verdict == REFUSED
            return
        assert verdict != REFUSED
        if verdict == WAIT:
            assert result is None
            self.staging_buffers[k] = staging
        elif k in drive.waiting:
            assert result is None
            self.staged[k] = (staging, samples)
        else:
            assert result is not None
            assert verdict == COMMITTED
            assert result.staleness == drive.pushes[-1][1]
            if result.version:
                assert result.version == drive.version


@pytest.mark.parametrize("policy", ORDERED, ids=str)
def test_stores_decide_as_the_core_does(shm: Path, policy: Policy) -> None:
    @settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
    @given(order=orders)
    def agree(order: list[int]) -> None:
        with ExitStack() as stack:
            twins = Twins(policy, "twins", stack)
            for k in order:
                twins.turn(k)
            status = twins.stores[0].status()
            assert (status.version, status.round) == (twins.drive.version, twins.drive.round)
            assert twins.stores[0].ranks() == twins.drive.core.ranks()

    agree()


@pytest.mark.parametrize("policy", [BSP(), Backup(k=1), ASP(), SSP(bound=1)], ids=str)
def test_they_re_plan_alike_and_show_the_same_costs(shm: Path, policy: Policy) -> None:
    @settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
    @given(order=orders, splits=st.lists(st.permutations([0, 4, 6, 7]), min_size=1, max_size=3))
    def agree(order: list[int], splits: list[list[int]]) -> None:
        with ExitStack() as stack:
            twins = Twins(policy, "twins", stack)
            for step, k in enumerate(order):
                if step % 8 == 7 and splits:
                    twins.replan(splits.pop())
                twins.turn(k)
                twins.costs()
            assert twins.stores[0].ranks() == twins.drive.core.ranks()

    agree()
