"""Claims for the steps after the one under way: in order, each sample once, and staleness counted from what a
gradient was computed on.
"""

from __future__ import annotations

import signal
from collections import deque
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled import examples

from pyps.errors import Busy, Ended, Fenced, InvalidArgument, PushRejected
from pyps.native.core import Core
from pyps.native.decisions import EventKind
from pyps.native.local import LocalBackend
from pyps.native.transfer import ArrivalCallback, Ask, FinishTransfer, Transferred, TransferRequest
from pyps.native.values import Claim, Codec, Config, Flat, Hyper, Optimizer, PushRequest, PushResult
from pyps.remote import open_store
from pyps.remote.server import Server
from pyps.store import Store
from pyps.store.policies import ASP, HPS, SSP, Policy, SaPS
from pyps.store.staging import StagingBuffer
from pyps.worker.step.client import StoreClient

LR = Hyper(lr=0.5)
WAIT = 2  # PYPS_WAIT


def make(policy: Policy, batches: tuple[int, ...], samples: int = 0, **more: int) -> list[Store]:
    first = Store.create(
        "ahead", {"w": np.ones(100)}, batches=batches, policy=policy, samples=samples, **more
    )
    stores = [first, *(Store.open("ahead") for _ in batches[1:])]
    for rank, store in enumerate(stores):
        store.join(rank)
    return stores


def close(stores: list[Store]) -> None:
    for store in reversed(stores):
        store.close()


def filled(store: Store) -> StagingBuffer:
    staging = store.stage()
    staging.flat.fill(0.0)
    return staging


def push(store: Store, samples: int, base_version: int | None = None) -> PushResult:
    return store.push(filled(store), samples, LR, base_version=base_version)


def test_claims_come_in_order_and_the_pushes_belong_to_them(shm: Path) -> None:
    stores = make(ASP(), (4,), samples=18)
    (store,) = stores
    claims = [store.start()]
    assert store.start().first == 0, "the same until it is pushed"
    held = store.pull()[1]
    staleness = []
    while True:
        ahead = store.start_ahead()
        assert store.start_ahead() is None, "two staging buffers: one claim ahead"
        result = push(store, claims[-1].count, held)
        held = store.pull()[1] - (ahead is not None)  # what the next one was begun with
        staleness.append(result.staleness)
        if ahead is None:
            break
        claims.append(ahead)
    assert [(c.first, c.count) for c in claims] == [(0, 4), (4, 4), (8, 4), (12, 4), (16, 2)]
    assert [c.round for c in claims] == list(range(5))
    assert staleness == [0, 1, 1, 1, 1]
    with pytest.raises(Ended):
        store.start()
    close(stores)


def test_no_claim_ahead_of_a_round_that_all_wait_for(shm: Path) -> None:
    for name in ("bsp", "backup"):
        stores = make(Policy.known[name](), (4,))
        stores[0].start()
        with pytest.raises(InvalidArgument, match=f"{name} waits"):
            stores[0].start_ahead()
        close(stores)


def claim_all(store: Store) -> list[Claim]:
    """The current claim, and those ahead as far as the store allows."""
    claims = [store.start()]
    while (ahead := store.start_ahead()) is not None:
        claims.append(ahead)
    return claims


@pytest.mark.parametrize("depth", range(1, 9))
def test_so_many_claims_as_staging_buffers(shm: Path, depth: int) -> None:
    stores = make(ASP(), (4,), staging_buffers=depth)
    (store,) = stores
    claims = claim_all(store)
    store.pull()
    for pushed in range(20):
        assert len(claims) == pushed + max(2, depth)
        push(store, 4, 0)
        ahead = store.start_ahead()
        assert ahead is not None
        claims.append(ahead)
    assert [(c.first, c.round) for c in claims] == [(4 * k, k) for k in range(len(claims))]
    close(stores)


class Interrupted(Exception):
    """Raised by the signal's handler."""


@pytest.mark.parametrize("policy", [ASP(), HPS()], ids=str)
def test_a_call_that_a_signal_interrupted_skips_no_claim(
    shm: Path, monkeypatch: pytest.MonkeyPatch, policy: Policy
) -> None:
    """Raise in a handler between the call of the core and its return, three times before each claim."""
    made, inner = [0], LocalBackend.start_ahead

    def interrupted(self: LocalBackend, after: int | None = None) -> Claim:
        claim = inner(self, after)
        made[0] += 1
        if made[0] % 4:
            signal.raise_signal(signal.SIGUSR1)
        return claim

    def handle(_signal: int, _frame: object) -> None:
        raise Interrupted

    monkeypatch.setattr(LocalBackend, "start_ahead", interrupted)
    before = signal.signal(signal.SIGUSR1, handle)
    stores = make(policy, (4,), samples=400, staging_buffers=8)
    client = StoreClient(stores[0], Codec.F32, budget=None)
    seen: list[int] = []
    try:
        for _ in range(100):
            claim = client.claim()
            while True:
                with suppress(Interrupted):
                    if not client.claim_ahead(1):
                        break
            assert [c.first for c in client.ahead if c.first == claim.first] in ([], [claim.first])
            held = [claim.first, *(c.first for c in client.ahead if c.first != claim.first)]
            assert held == list(range(claim.first, min(400, claim.first + 32), 4))
            if client.ahead and client.ahead[0].first == claim.first:
                client.ahead.popleft()
            stores[0].pull()
            push(stores[0], claim.count)
            seen.append(claim.first)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == list(range(0, 400, 4))
    close(stores)


@pytest.mark.parametrize("far", [False, True])
def test_a_transfer_whose_reply_was_lost_skips_no_claim(
    shm: Path, monkeypatch: pytest.MonkeyPatch, far: bool
) -> None:
    """Raise, as a signal's handler would, when the reply has come: its claims do not reach the worker."""
    inner, lost = Store.begin_transfer, False

    def begin(self: Store, request: TransferRequest[PushRequest]) -> FinishTransfer:
        finish = inner(self, request)

        def end(out: Flat, arrived: ArrivalCallback | None = None) -> Transferred:
            done = finish(out, arrived)
            if lost:
                raise Interrupted
            return done

        return end

    monkeypatch.setattr(Store, "begin_transfer", begin)
    with ExitStack() as stack:
        near = stack.enter_context(make(ASP(), (4,), samples=400, staging_buffers=4)[0])
        near.leave()
        store = stack.enter_context(open_store(stack.enter_context(Server("ahead")).address)) if far else near
        store.join()
        client, out = (
            StoreClient(store, Codec.F32, budget=None),
            np.empty(store.layout.flat_elements, np.float32),
        )
        first = [client.claim(), *client.claim_ahead(2)]
        held, seen = deque((claim, store.stage()) for claim in first), list[int]()
        while len(seen) < 100:
            if lost or not held:
                current = client.claim()
                held = held or deque([(current, store.stage())])
                assert held[0][0].first == current.first
            (claim, staging), lost = held.popleft(), len(seen) % 3 == 1
            staging.flat.fill(0.0)
            request = PushRequest(staging.index, claim.count, (LR,))
            with suppress(Interrupted):
                whole = TransferRequest(request, ask=Ask(claims=3 - len(held)))
                done, buffers = client.begin_transfer(whole)(out, None)
                held += zip(done.claims, buffers, strict=True)
            seen.append(claim.first)
        assert seen == list(range(0, 400, 4))


@pytest.mark.parametrize("depth", [2, 8])
def test_all_claims_of_a_leaving_worker_are_assigned_again(shm: Path, depth: int) -> None:
    stores = make(ASP(), (4, 4), samples=20 if depth == 2 else 60, staging_buffers=depth)
    one, other = stores
    assert len(claim_all(one)) == depth
    one.leave()
    firsts: list[int] = []
    while len(firsts) < (20 if depth == 2 else 60):
        claim = other.start()
        firsts += range(claim.first, claim.first + claim.count)
        other.pull()
        push(other, claim.count)
    assert sorted(firsts) == list(range(20 if depth == 2 else 60))
    assert other.status().samples_dropped == 0
    close(stores)


@pytest.mark.parametrize("depth", [2, 5])
def test_all_claims_of_a_fenced_one_are_handed_out_again(shm: Path, depth: int) -> None:
    stores = make(ASP(round_timeout_seconds=0.2), (4, 4), samples=4 * depth + 4, staging_buffers=depth)
    one, other = stores
    claim_all(one)
    claim = other.start()
    other.pull()
    push(other, claim.count)
    seen = []
    while len(seen) < depth:  # start() waits for those samples, and fences the worker that holds them
        claim = other.start(5.0)
        seen.append(claim.first)
        other.pull()
        push(other, claim.count)
    assert seen == [4 * k for k in range(depth)]
    with pytest.raises(Fenced):
        push(one, 4)
    one.rejoin()
    assert one.start_ahead() is None
    close(stores)


def test_a_refused_push_leaves_the_next_claim(shm: Path) -> None:
    stores = make(SaPS(threshold="fixed", bound=1), (4, 4))
    one, other = stores
    one.start()
    ahead = one.start_ahead()
    assert ahead is not None
    one.pull()
    for _ in range(3):
        claim = other.start()
        other.pull()
        push(other, claim.count)
    with pytest.raises(PushRejected):
        push(one, 1)
    one.pull()
    now = one.start()
    assert (now.first, now.count) == (ahead.first, ahead.count)
    assert push(one, 1).staleness == 0
    close(stores)


def test_ssp_keeps_its_bound_with_claims_ahead(shm: Path) -> None:
    stores = make(SSP(bound=1), (1, 1))
    fast, _ = stores
    taken = [fast.start()]
    while (ahead := fast.start_ahead()) is not None:
        taken.append(ahead)
        fast.pull()
        push(fast, 1)
    assert len(taken) == 1 + 1, "bound + 1 steps"
    close(stores)


def test_ssp_claims_ahead_what_it_could_start_after_its_own_pushes(shm: Path) -> None:
    """Worker 0 alone is the slowest: its own pushes raise the minimum, up to the clock of worker 1."""
    stores = make(SSP(bound=1), (1, 1), staging_buffers=8)
    slow, fast = stores
    for _ in range(2):
        fast.start()
        fast.pull()
        push(fast, 1)
    assert len(claim_all(slow)) == 4, "its clock may be at most one more than the 2 of the other"
    assert fast.start_ahead() is None
    close(stores)


def test_saps_claims_no_step_that_its_own_pushes_would_make_too_late(shm: Path) -> None:
    stores = make(SaPS(threshold="fixed", bound=2), (1, 1), staging_buffers=8)
    assert len(claim_all(stores[0])) == 1 + 2
    close(stores)
    stores = make(SaPS(threshold="ringmaster"), (1, 1), staging_buffers=8)
    assert len(claim_all(stores[0])) == 8
    close(stores)


def rounds_of(stores: list[Store], depths: list[int], rounds: int) -> list[list[Claim]]:
    """Each rank's claims in a run where all work ahead; every push of a round but the last in threads."""
    from concurrent.futures import ThreadPoolExecutor

    def drive(store: Store, depth: int) -> list[Claim]:
        claims = [store.start()]
        versions = [store.pull()[1]]
        for step in range(rounds):
            while len(claims) < step + depth and (ahead := store.start_ahead()) is not None:
                claims.append(ahead)
            base = versions[max(0, step - depth + 1)]
            result = store.push(filled(store), claims[step].count, LR, base_version=base)
            assert result.staleness == min(depth - 1, step)
            versions.append(store.pull()[1])
            if len(claims) == step + 1:
                claims.append(store.start())
        return claims

    with ThreadPoolExecutor(len(stores)) as pool:
        return list(pool.map(drive, stores, depths, timeout=30))


@pytest.mark.parametrize("depths", [[2, 2, 2], [4, 4, 4], [1, 3, 2], [8, 1, 1]])
def test_rounds_of_hps_keep_the_global_batch_ahead(shm: Path, depths: list[int]) -> None:
    stores = make(HPS(), (5, 3, 2), staging_buffers=max(depths))
    stores[1].set_max_samples(2)
    claims = rounds_of(stores, depths, 12)
    whole = min(map(len, claims))
    for of_round in zip(*(mine[:whole] for mine in claims), strict=True):
        assert sum(claim.count for claim in of_round) == 10
        assert len({claim.round for claim in of_round}) == 1
    assert all(claim.count <= 2 for claim in claims[1][1 + max(depths) :])
    positions = [p for mine in claims for c in mine[:whole] for p in range(c.first, c.first + c.count)]
    assert len(positions) == len(set(positions)) == 10 * whole
    close(stores)


def test_the_core_steps_the_same_in_virtual_time() -> None:
    core = lone_core(ASP(), (4,), 0)
    assert core.step(EventKind.START, 0, 2).first == 0
    assert core.step(EventKind.START_AHEAD, 0, 3).first == 4
    core.step(EventKind.PULL, 0, 4, version=0)
    assert core.push(0, 5, 0, 4, 1, 0.0).ticket == 1
    core.step(EventKind.PULL, 0, 6, version=1)
    assert core.step(EventKind.START_AHEAD, 0, 7).first == 8
    assert core.step(EventKind.PUSH, 0, 8, staging=1, samples=4, base_version=1).staleness == 1


def test_the_claim_of_a_round_that_has_opened_comes_before_those_ahead() -> None:
    """A worker that has pushed all there was asks again after others have left, whose samples go back."""
    core = lone_core(HPS(), (2, 2, 2), 10)

    def claim(slot: int, kind: EventKind) -> tuple[int, int]:
        decision = core.step(kind, slot, 2)
        return decision.first, decision.count

    assert [claim(slot, EventKind.START) for slot in range(3)] == [(0, 2), (2, 2), (4, 2)]
    assert [claim(slot, EventKind.START_AHEAD) for slot in range(3)] == [(6, 2), (8, 2), (0, 0)]
    core.push(2, 10, 0, 2, 1, 0.0)
    for slot in (0, 1):
        core.step(EventKind.LEAVE, slot, 11, state=3)
    core.step(EventKind.PULL, 2, 12, version=1)
    assert [claim(2, EventKind.START_AHEAD) for _ in range(2)] == [(0, 4), (6, 4)]
    assert claim(2, EventKind.START) == (0, 4)
    for now in (20, 30):
        core.push(2, now, 0, 4, 1, 0.0)
    assert core.ranks()[2].samples == 10


def lone_core(policy: Policy, batches: tuple[int, ...], samples: int, staging_buffers: int = 2) -> Core:
    config = Config(
        tensors=(),
        initial=(),
        batches=batches,
        groups=1,
        optimizer=Optimizer.SGD,
        policy=policy.number,
        round_timeout_seconds=1e6,
        samples=samples,
        chunk_params=0,
        max_participants=len(batches),
        snapshot_spares=0,
        staging_buffers=staging_buffers,
        policy_params=policy.params(),
    )
    core = Core(config)
    for slot in range(len(batches)):
        core.step(EventKind.JOIN, slot, 1, rank=slot)
    return core


class Crowd:
    """Workers that do whatever they may in any order; `trained` are the positions of admitted pushes."""

    def __init__(self, core: Core, count: int) -> None:
        self.core, self.now = core, 1
        self.ahead: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        self.current: list[tuple[int, int] | None] = [None] * count
        self.ended = [False] * count
        self.gone = [False] * count
        self.staging = [0] * count
        self.trained: list[int] = []

    def act(self, slot: int, deed: str) -> None:
        self.now += 1_000_000
        if self.gone[slot]:
            try:
                self.core.step(EventKind.JOIN, slot, self.now, rank=slot)
            except Busy:
                return  # the gradient that it left behind waits for its round: the slot is free after that
            self.gone[slot] = self.ended[slot] = False
        if deed == "leave":
            self.core.step(EventKind.LEAVE, slot, self.now, state=3)
            self.gone[slot], self.ahead[slot], self.current[slot] = True, [], None
            return
        try:
            claim = self.core.step(EventKind.START, slot, self.now)
        except Ended:
            self.ended[slot] = True
            return
        if claim.verdict == WAIT:
            return
        first, count = claim.first, claim.count
        if self.ahead[slot] and self.current[slot] != (first, count):
            assert self.ahead[slot].pop(0) == (first, count), "claims come in the order in which it has them"
        self.current[slot] = first, count
        if deed in ("ahead", "lost"):
            last = (self.ahead[slot] or [(first, count)])[-1][0]
            following = self.core.step(EventKind.START_AHEAD, slot, self.now, after_plus_1=last + 1)
            if deed == "lost":  # a signal came: it does not have it
                return
            self.ahead[slot] += [(following.first, following.count)] if following.count else []
            assert all(ahead != (first, count) for ahead in self.ahead[slot])
            return
        self.core.step(EventKind.PULL, slot, self.now, version=claim.version)
        self.staging[slot] ^= 1
        try:
            pushed = self.core.push(slot, self.now, self.staging[slot], count, 1000, 0.0)
        except PushRejected:
            return
        if pushed.verdict != WAIT:
            self.trained += range(first, first + count)


@settings(max_examples=examples(18, 60), deadline=None, derandomize=True)
@given(
    st.sampled_from([ASP(), SSP(bound=1), SaPS(threshold="fixed", bound=3), HPS()]),
    st.sampled_from([2, 3, 8]),
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["ahead", "lost", "ahead", "push", "push", "leave"])),
        max_size=60,
    ),
)
def test_each_sample_is_trained_once_with_claims_ahead(
    policy: Policy, depth: int, deeds: list[tuple[int, str]]
) -> None:
    crowd = Crowd(lone_core(policy, (5, 3, 4), 120, depth), 3)
    for slot, deed in deeds:
        crowd.act(slot, deed)
    for turn in range(400):
        crowd.act(turn % 3, "ahead" if turn % 2 else "push")
    for turn in range(400):
        crowd.act(turn % 3, "push")
    assert all(crowd.ended)
    assert sorted(crowd.trained) == list(range(120))
