"""A store made from another's state goes on bit for bit, here and over a link."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampled import examples

from pyps._native import ffi, lib
from pyps.errors import Ended, InputError, InvalidArgument, StoreError, TimedOut
from pyps.native import check
from pyps.native.decisions import PolicyParams
from pyps.native.local import LocalBackend
from pyps.native.state import VECTORS, RankHistory, StateHeader, StoreState
from pyps.native.status import PushCounts
from pyps.native.values import Codec, Encoding, Hyper, Optimizer, Tensor
from pyps.remote import create_store, open_store
from pyps.remote.server import Server
from pyps.store import Store

SHAPES = {"weight": (70, 30), "bias": (5,), "mean": (3,)}
GROUPS = {"weight": 0, "bias": 1, "mean": 2}
BATCHES = (4, 3)
HYPER = Hyper(lr=0.01, weight_decay=0.01, momentum=0.9)


@contextmanager
def workers(name: str, count: int = len(BATCHES)) -> Iterator[list[Store]]:
    with ExitStack() as stack:
        joined = [stack.enter_context(open_store(name)) for _ in range(count)]
        for rank, worker in enumerate(joined):
            worker.join(rank)
        yield joined


def step(worker: Store, how: Encoding | None) -> tuple[int, int, int]:
    """A gradient that depends on samples and parameters; the push's place in the run."""
    claim = worker.start()
    flat, _ = worker.pull()
    staged = worker.stage()
    noise = np.random.default_rng(claim.first)
    for tensor in worker.tensors:
        at = slice(tensor.offset, tensor.offset + tensor.elements)
        staged.flat[at] = noise.standard_normal(tensor.elements, np.float32) + flat[at]
    result = worker.push(staged, claim.count, HYPER, encoding=how)
    worker.pull()  # ends its turn, if the policy has turns
    return claim.first, claim.count, result.version


def steps(
    joined: list[Store], how: Encoding | None, rounds: int, together: bool
) -> list[tuple[int, int, int]]:
    """All workers' steps, in turn or at once."""
    found: list[tuple[int, int, int]] = []
    with ThreadPoolExecutor(len(joined) if together else 1) as pool:
        for _ in range(rounds):
            found += pool.map(lambda worker: step(worker, how), joined)
    return sorted(found)


def assert_same(a: StoreState, b: StoreState) -> None:
    for name in ("version", "round", "samples_assigned", "ranges", "slowest", "fastest", "steps", "hyper"):
        assert getattr(a.header, name) == getattr(b.header, name), name
    assert [rank.clock for rank in a.header.ranks] == [rank.clock for rank in b.header.ranks]
    totals = [[replace(rank.total, staleness_max=0) for rank in x.header.ranks] for x in (a, b)]
    assert totals[0] == totals[1]
    assert a.vectors.keys() == b.vectors.keys() == set(VECTORS[a.header.optimizer])
    assert a.residuals.keys() == b.residuals.keys()
    pairs = [(a.parameters, b.parameters)]
    pairs += [(a.vectors[name], b.vectors[name]) for name in a.vectors]
    pairs += [(a.residuals[rank], b.residuals[rank]) for rank in a.residuals]
    for x, y in pairs:
        assert x.keys() == y.keys()
        assert all(x[name].tobytes() == y[name].tobytes() for name in x)


def made(name: str, **options: Any) -> Store:
    values = np.random.default_rng(1)
    tensors = {tensor: values.standard_normal(shape) for tensor, shape in SHAPES.items()}
    options = {"groups": GROUPS, "averaged": ["mean"], "batches": BATCHES, "chunk_params": 1024, **options}
    return create_store(name, tensors, **options)


INT4 = Encoding(Codec.INT4, error_feedback=True)
FIXED_SAPS = (
    "saps:threshold=fixed,bound=1,late=weigh"  # a measured bound follows times, which are new each time
)


@pytest.mark.parametrize("how", [None, INT4], ids=["f32", "int4"])
@pytest.mark.parametrize("policy", ["bsp", "asp", "ssp:bound=2", "r2sp:slack=0", FIXED_SAPS, "softsync:n=2"])
@pytest.mark.parametrize("optimizer", list(Optimizer))
def test_goes_on_bit_for_bit(shm: Path, optimizer: Optimizer, policy: str, how: Encoding | None) -> None:
    together = policy == "bsp"
    with made("a", optimizer=optimizer, policy=policy) as store, workers("a") as joined:
        steps(joined, how, 3, together)
        state = store.state()
        expected = steps(joined, how, 3, together)
        end = store.state()
    with Store.create("b", state=state) as again, workers("b") as joined:
        assert_same(again.state(), state)
        assert steps(joined, how, 3, together) == expected
        assert_same(again.state(), end)


def test_a_push_says_how_many_of_its_rank_are_in_the_last_state(shm: Path) -> None:
    """Not one that waited for its round meanwhile; a snapshot without residuals is no state."""

    def pushed(worker: Store) -> tuple[int, int]:
        claim = worker.start()
        result = worker.push(worker.stage(), claim.count, HYPER)
        return result.rank_pushes, result.saved_pushes

    with made("a", policy="softsync:n=1") as store, workers("a") as (first, second):
        assert (pushed(first), pushed(second), pushed(first)) == ((1, 0), (1, 0), (2, 0))
        store.snapshot()
        state = store.state()  # with the second push of `first` still to be admitted
        assert (pushed(second), pushed(first)) == ((2, 1), (3, 1))
    with Store.create("b", state=state), workers("b") as (first, second):
        assert (pushed(first), pushed(second)) == ((2, 1), (2, 1))


def test_over_the_link_too(shm: Path) -> None:
    with made("a", optimizer="adamw", policy="asp", samples=500) as store, workers("a") as joined:
        steps(joined, INT4, 3, together=False)
        with Server("a") as server, open_store(server.address) as remote:
            state = remote.state()
        assert_same(state, store.state())
        expected = steps(joined, INT4, 2, together=False)
        end = store.state()
    with Server("b") as server, create_store(server.address, state=state) as again:
        assert_same(again.state(), state)
        with workers("b") as joined:  # on the server's machine: residuals of others are theirs
            assert steps(joined, INT4, 2, together=False) == expected
        assert_same(again.state(), end)


def test_in_other_chunks_with_other_ranks_and_another_policy(shm: Path) -> None:
    """Codes are the same in other chunks: a block never crosses a group's start."""
    with made("a", optimizer="adam", policy="saps") as store, workers("a") as joined:
        steps(joined, INT4, 3, together=False)
        state = store.state()
        expected = [w.version for w in [joined[0].status()]]
    sizes = {"chunk_params": 3072, "max_participants": 9, "staging_buffers": 3}
    with Store.create("b", state=state, batches=[1, 2, 3], policy="asp", samples=100, **sizes) as again:
        found = again.state()
        assert [found.header.version] == expected
        assert [rank.total.batch for rank in found.header.ranks] == [1, 2, 3]
        assert found.header.ranks[2].total.pushes == 0
        for name in SHAPES:
            assert found.parameters[name].tobytes() == state.parameters[name].tobytes()
        assert found.residuals.keys() == state.residuals.keys()
        with workers("b", 3) as joined:
            assert [step(worker, INT4)[1] for worker in joined] == [1, 2, 3]
    with Store.create("c", state=state, batches=[5]) as again, workers("c", 1) as joined:
        assert step(joined[0], None)[:2] == (21, 5)
        assert again.status().version == state.header.version + 1


def test_samples_that_were_claimed_but_not_pushed_are_assigned_again(shm: Path) -> None:
    with made("a", policy="asp", samples=30, batches=[4, 3]) as store, workers("a") as joined:
        steps(joined, None, 1, together=False)
        joined[0].start()  # 7 to 10
        joined[1].start()  # 11 to 13
        joined[0].start_ahead()  # 14 to 17
        state = store.state()
        assert (state.header.samples_assigned, state.header.ranges) == (7, ())
        step_of(joined[1])
        state = store.state()
    assert (state.header.samples_assigned, state.header.ranges) == (14, ((7, 4),))
    with Store.create("b", state=state) as again, workers("b") as joined:
        assert [step(worker, None)[:2] for worker in (*joined, joined[0])] == [(7, 4), (14, 3), (17, 4)]
        assert again.ranks()[1].pushes == 3


def step_of(worker: Store) -> None:
    """Push what the worker has claimed."""
    claim = worker.start()
    staged = worker.stage()
    staged.flat.fill(0.0)
    worker.push(staged, claim.count, HYPER)


@pytest.mark.parametrize("how", [None, INT4], ids=["f32", "int4"])
@pytest.mark.parametrize("policy", ["bsp", "softsync:n=1"])
def test_a_gradient_that_waits_for_its_round_was_not_pushed(
    shm: Path, policy: str, how: Encoding | None
) -> None:
    """Its rank goes on with the samples, clock, counters and residual that it had."""
    with made("a", policy=policy) as store, workers("a") as joined:
        steps(joined, how, 2, together=True)
        before = store.state()
        with pytest.raises(TimedOut) if policy == "bsp" else nullcontext():
            joined[0].start()
            staged = joined[0].stage()
            staged.flat.fill(1.0)
            joined[0].push(staged, BATCHES[0], HYPER, encoding=how, timeout=0.0)
        assert_same(store.state(), before)


def test_a_residual_that_is_read_is_written_by_no_worker(shm: Path) -> None:
    """Between the begin of a state and its end, workers write elsewhere: what was begun is what is read."""
    with made("a", policy="asp") as store, workers("a") as joined, Store.open("a") as reader:
        steps(joined, INT4, 2, together=False)
        expected = store.state()
        reader.join(role="observer")
        assert isinstance(reader.backend, LocalBackend)
        pointer = reader.backend.pointer
        c = ffi.new("pyps_state *")
        check("state", lib.pyps_state_begin(pointer, 5.0, c))
        steps(joined, INT4, 5, together=False)
        flat = np.empty(reader.layout.flat_elements, np.float32)
        for rank in expected.residuals:
            check("state", lib.pyps_state_residual(pointer, rank, ffi.from_buffer("float[]", flat)))
            for name, residual in expected.residuals[rank].items():
                assert reader.views(flat)[name].tobytes() == residual.tobytes()
        steps(joined, INT4, 1, together=False)
        check("state", lib.pyps_state_end(pointer))


def worth(first: int, count: int) -> float:
    """Return what the samples of a range add to a gradient: small whole numbers."""
    return float(sum(position % 7 + 1 for position in range(first, first + count)))


@pytest.mark.parametrize("how", [None, INT4], ids=["f32", "int4"])
@pytest.mark.parametrize("policy", ["asp", "softsync:n=1"])
def test_states_while_workers_push(shm: Path, policy: str, how: Encoding | None) -> None:
    """Parameters, samples to assign, counters and residuals of each are of one moment."""
    total = 1500

    def train(worker: Store) -> None:
        with suppress(Ended):
            while True:
                claim = worker.start()
                staged = worker.stage()
                staged.flat.fill(worth(claim.first, claim.count) / 2)
                worker.push(staged, claim.count, Hyper(lr=1.0), scale=2.0, encoding=how)

    def check_whole(state: StoreState, first: float) -> None:
        open_ = sum(worth(*found) for found in state.header.ranges)
        pushed = worth(0, state.header.samples_assigned) - open_ if policy == "asp" else None
        kept = sum(float(residual["bias"][2]) for residual in state.residuals.values())
        moved = first - float(state.parameters["bias"][2])
        if pushed is not None:
            assert moved + kept == pytest.approx(pushed, abs=0.0 if how is None else 0.05)
        done = sum(rank.total.samples for rank in state.header.ranks)
        waiting = sum(count for _, count in state.header.ranges)
        assert state.header.samples_assigned == done + waiting
        assert set(state.header.steps) == {state.header.version}
        if policy == "asp":
            assert sum(rank.total.pushes for rank in state.header.ranks) == state.header.version

    whole = f"{policy}{',' if ':' in policy else ':'}scaling=none"
    options = {"policy": whole, "samples": total, "averaged": [], "groups": {}}
    zeros = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    with Store.create("a", zeros, batches=BATCHES, **options) as store, workers("a") as joined:  # type: ignore[arg-type]
        states: list[StoreState] = []
        with ThreadPoolExecutor(2) as pool:
            running = [pool.submit(train, worker) for worker in joined]
            while store.status().samples_assigned < total and len(states) < 60:
                states.append(store.state())
            for future in running:
                future.result(60)
        states.append(store.state())
    for state in states:
        check_whole(state, 0.0)
    middle = states[len(states) // 2]
    with Store.create("b", state=middle) as again, workers("b") as joined, ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(train, worker) for worker in joined]:
            future.result(60)
        check_whole(again.state(), 0.0)
        assert sum(rank.samples for rank in again.ranks()) == total


def replaced(state: StoreState, **changes: Any) -> StoreState:
    return replace(state, header=replace(state.header, **changes))


HOSTILE = {
    "version": (1 << 40, "version"),
    "samples_assigned": (1 << 63, "samples_assigned"),
    "samples_dropped": (1 << 20, "samples_dropped"),
    "slowest": (1 << 20, "slowest"),
    "fastest": (1 << 63, "fastest"),
    "ranges": (((0, 2), (1, 2)), "range"),
    "policy_state": ((0,) * 15, "policy_state"),
    "steps": ((1, 2), "steps"),
    "hyper": ((), "hyper"),
}


@pytest.mark.parametrize("field", HOSTILE)
def test_an_impossible_header_is_refused(shm: Path, field: str) -> None:
    value, named = HOSTILE[field]
    with made("a", policy="asp", optimizer="adam") as store, workers("a") as joined:
        steps(joined, None, 1, together=False)
        state = store.state()
    with pytest.raises((InputError, InvalidArgument), match=named):
        Store.create("b", state=replaced(state, **{field: value}))


RANGES = st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)), max_size=5)
NUMBERS = st.one_of(st.integers(0, 60), st.integers(0, 2**64 - 1))


@given(NUMBERS, NUMBERS, RANGES, st.lists(NUMBERS, min_size=16, max_size=16), st.integers(0, 11), st.floats())
@settings(
    max_examples=examples(22, 150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_no_header_breaks_a_store(
    shm: Path, version: int, assigned: int, ranges: Any, words: Any, policy: int, mean: float
) -> None:
    """It is refused, or the store works: its workers get samples within the limit."""
    ranks = tuple(RankHistory(PushCounts(n, 0, 0, 0, 0, 0, 0), step_seconds=mean) for n in BATCHES)
    tensors = (Tensor("w", (3,)),)
    header = StateHeader(
        version=version,
        round=0,
        plan=0,
        samples=100,
        samples_assigned=assigned,
        samples_dropped=0,
        ranges=tuple(ranges),
        slowest=0,
        fastest=0,
        optimizer=Optimizer.SGD,
        policy=policy,
        policy_params=PolicyParams(splits=1, quantile=0.5, patience=1.0),
        policy_state=tuple(words),
        round_timeout_seconds=60.0,
        chunk_params=0,
        ranks=ranks,
        tensors=tensors,
        steps=(0,),
        hyper=(None,),
    )
    state = StoreState(header, {"w": np.zeros(3, np.float32)}, {}, {})
    try:
        made_again = Store.create("b", state=state, max_participants=3)
    except (InputError, StoreError):
        return
    with made_again, workers("b") as joined:
        left = 100 - assigned + sum(count for _, count in ranges)
        for worker in joined:
            with suppress(Ended, TimedOut):
                claim = worker.start(timeout=0.0)
                left -= claim.count
                assert claim.first + claim.count <= 100
        assert left >= 0
        assert made_again.state().header.version == version


def test_what_does_not_fit_the_state_is_named(shm: Path) -> None:
    with made("a", optimizer="adamw") as store:
        state = store.state()
    tensors = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for given_, named in (
        ({"tensors": {**tensors, "more": np.zeros(2)}}, "more.*not in the state"),
        ({"tensors": {**tensors, "bias": np.zeros(6)}}, r"bias.*found \[6\]; expected \[5\]"),
        ({"optimizer": "sgd"}, "optimizer: found sgd; expected adamw"),
        ({"tensors": tensors, "groups": {"bias": 0}}, "bias.*found 0; expected 1"),
        ({"state": replace(state, parameters={})}, "parameters.*weight"),
        ({"state": replace(state, vectors={})}, "vectors: found none; expected exp_avg, exp_avg_sq"),
        ({"state": replace(state, residuals={7: {}})}, "residuals: found rank 7"),
        ({"samples": 3, "state": replaced(state, samples_assigned=5)}, "samples_assigned"),
    ):
        with pytest.raises((InputError, InvalidArgument), match=named):
            Store.create("b", **{"state": state, **given_})  # type: ignore[arg-type]
    with Store.create("b", tensors, state=state, groups=GROUPS, averaged=["mean"]):
        pass
