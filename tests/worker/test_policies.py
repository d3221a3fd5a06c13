"""Test what pyps.Worker and pyps.Store do for policies: turns, versions, advice between micro-batches."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from worker_tools import SAMPLES, X, Y, backward, loss_of, make_model, run_threads, train_beside

from pyps.errors import PushRejected
from pyps.formats.records import read_run
from pyps.native.decisions import Advice
from pyps.native.values import Hyper, PushResult
from pyps.store import Store
from pyps.store.policies import R2SP, Policy, SaPS, Softsync
from pyps.store.staging import StagingBuffer
from pyps.worker.step.loop import Worker, join

LR = 0.5


@pytest.mark.parametrize("name", Policy.known)
def test_every_policy_trains_through_workers(shm: Path, name: str) -> None:
    split = [6, 4, 5]
    models = [make_model() for _ in split]
    before = float(loss_of(models[0], X, Y).detach())
    total = 6 * SAMPLES
    workers = [
        join("threads", rank, batches=split, samples=total, seed=5, policy=name, micro_batch=3)
        for rank in range(len(split))
    ]

    train_beside(workers, models)
    assert sum(r.samples for r in workers[0].store.ranks()) == total
    assert float(loss_of(models[0], X, Y).detach()) < before
    for worker in workers:
        worker.close()


def alone_with_turns(shm: Path, policy: str) -> bytes:
    model = make_model()
    with join("one", 0, batches=[10], samples=2 * SAMPLES, seed=5, policy=policy) as worker:
        worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for x, y in worker.batches((X, Y)):
            backward(loss_of(model, x, y))
            worker.step()
        return b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())


def test_one_worker_is_plain_sgd_bitwise(shm: Path) -> None:
    results = {policy: alone_with_turns(shm, policy) for policy in Policy.known}
    assert len(set(results.values())) == 1, {k: hash(v) for k, v in results.items()}


def filled(store: Store, values: np.ndarray) -> StagingBuffer:
    staging = store.stage()
    staging.flat.fill(0.0)
    staging["w"][:] = values
    return staging


def push(store: Store, samples: int, values: np.ndarray, **more: object) -> PushResult:
    return store.push(filled(store, values), samples, Hyper(lr=LR), **more)  # type: ignore[arg-type]


def step(store: Store, values: np.ndarray) -> None:
    claim = store.start()
    store.pull()
    push(store, claim.count, values)


def two(
    name: str, policy: Policy | str, start: np.ndarray, batches: tuple[int, int] = (1, 1)
) -> tuple[Store, Store]:
    one = Store.create(name, {"w": start}, batches=batches, policy=policy)
    other = Store.open(name)
    one.join(0)
    other.join(1)
    return one, other


def test_a_rejected_push_leaves_the_parameters_bitwise_unchanged(shm: Path) -> None:
    one, other = two("late", SaPS(threshold="fixed", bound=1), np.ones(3000), (2, 8))
    with one, other:
        step(one, np.full(3000, 0.1))
        for _ in range(4):  # more often than there are buffers: a refusal gives its buffer back
            other.start()
            before = other.pull()[0].tobytes()
            for _ in range(2):
                step(one, np.zeros(3000))
            with pytest.raises(PushRejected):
                push(other, 1, np.full(3000, 7.0))
            assert other.pull()[0].tobytes() == before
        assert other.ranks()[1].pushes == 0


def test_a_check_says_what_to_do_and_frees_the_area(shm: Path) -> None:
    one, other = two("checks", SaPS(threshold="fixed", bound=2, abort=True), np.zeros(10), (1, 6))
    with one, other:
        for round_ in range(3):
            assert other.start().count == 6 if round_ == 0 else other.start().count >= 1
            other.pull()
            filled(other, np.zeros(10))
            assert other.should_continue(1, 1) is Advice.CONTINUE
            for _ in range(2):
                step(one, np.zeros(10))
            assert other.should_continue(2, 2) is Advice.PUSH_NOW
            step(one, np.zeros(10))
            assert other.should_continue(2, 2) is Advice.ABORT


def test_softsync_areas_come_back_when_their_round_has_closed(shm: Path) -> None:
    one, other = two("gather", Softsync(n=1), np.zeros(10))
    with one, other:
        one.start()
        one.pull()
        result = push(one, 1, np.full(10, 1.0))
        assert (result.version, result.samples) == (0, 1), "nothing yet: it gathers"
        other.start()
        other.pull()
        result = push(other, 1, np.full(10, 3.0))
        assert (result.version, result.sources, result.samples) == (1, 2, 2)
        np.testing.assert_allclose(one.views(one.pull()[0])["w"], -LR * 2.0)
        for _ in range(4):
            step(one, np.zeros(10))


def slow_worker(worker: Worker, seconds: float) -> None:
    model = make_model()
    worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for x, y in worker.batches((X, Y)):
        time.sleep(seconds)
        backward(loss_of(model, x, y))
        worker.step()


def test_r2sp_in_real_threads_has_staleness_one_less_than_its_members(shm: Path, tmp_path: Path) -> None:
    policy = R2SP(patience=1e6)  # else a thread that a busy machine stops for 0.1 s is passed over
    workers = [
        join("ring", rank, batches=[3, 3, 3], samples=180, policy=policy, run_dir=tmp_path)
        for rank in range(3)
    ]
    run_threads(3, lambda rank: slow_worker(workers[rank], 0.01 * (rank + 1)))
    for worker in workers:
        worker.close()
    records = sorted(read_run(tmp_path), key=lambda r: r.version)
    assert [r.rank for r in records] == [k % 3 for k in range(60)]
    assert [r.staleness for r in records[3:]] == [2] * 57


@pytest.mark.timed
def test_a_late_worker_pushes_the_micro_batches_that_it_has(shm: Path, tmp_path: Path) -> None:
    policy = SaPS(threshold="fixed", bound=2)
    workers = [
        join("late", rank, batches=[2, 12], samples=240, policy=policy, run_dir=tmp_path, micro_batch=2)
        for rank in range(2)
    ]
    run_threads(2, lambda rank: slow_worker(workers[rank], 0.01))
    for worker in workers:
        worker.close()
    late = [r for r in read_run(tmp_path) if r.rank == 1]
    taken = [r for r in late if not r.rejected]
    assert len(taken) > len(late) / 2
    assert max(r.samples for r in taken) < 12, "six micro-batches would be three pushes of the other too late"
    assert all(r.staleness <= 2 for r in taken)
