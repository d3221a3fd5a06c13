"""A pipeline: delay-1 SGD bitwise where it is alone, overlap, errors that surface, deadlines that hold."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from run_scripts import PATIENCE_SECONDS, until
from worker_tools import (
    RELATIVE,
    SAMPLES,
    X,
    Y,
    backward,
    distance,
    loss_of,
    make_model,
    run_threads,
    train,
    train_alone,
    train_beside,
)

from pyps.errors import Fenced, InputError, TimedOut
from pyps.formats.records import StepRecord, read_run
from pyps.native.status import MemberState
from pyps.native.transfer import Transferred, TransferRequest
from pyps.native.values import PushRequest
from pyps.report.trace import make_trace
from pyps.store import Store
from pyps.store.policies import Policy
from pyps.worker.background import BackgroundThread
from pyps.worker.data.sampling import indices
from pyps.worker.step.client import Landed
from pyps.worker.step.loop import Worker, join
from pyps.worker.step.transport import Overlapped

pytestmark = pytest.mark.slow

DEEP = ["asp", "ssp", "softsync", "r2sp", "hps"]
OVERLAPPING = [name for name, kind in Policy.known.items() if kind().needs.allows_pipeline]
CLOSE = 0.05  # of the longer of the two: what the period may be more


class Slow:
    """A store over a link that takes so many seconds each way; anything with a store's methods will do."""

    def __init__(self, store: Store, seconds: float) -> None:
        self._store, self._seconds = store, seconds

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name == "begin_transfer":
            return lambda request: self._timed(self._late(found(request), 1 + request.ask.pulls))
        return self._late(found, 1) if name == "pull" else found

    def _late(self, call: Callable[..., Any], ways: int) -> Callable[..., Any]:
        def late(*args: Any, **more: Any) -> Any:
            time.sleep(ways * self._seconds)
            return call(*args, **more)

        return late

    def _timed(self, finish: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Transferred:
            began, done = time.monotonic(), finish(*args)
            return msgspec.structs.replace(done, spans=(("push", began, done.spans[-1][2]),))

        return timed


def over(worker: Worker, wrapped: Any) -> None:
    """From here on the worker's transfers go over this one."""
    worker._require().client.store = wrapped


def test_alone_it_is_sgd_with_a_delay_of_one_bitwise(shm: Path) -> None:
    model, rival = make_model(), make_model()
    with join("run", 0, batches=[10], samples=3 * SAMPLES, seed=5, policy="asp", depth="auto") as worker:
        worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for x, y in worker.batches((X, Y)):
            backward(loss_of(model, x, y))
            worker.step()
        assert worker.steps == 18
        assert worker.store.ranks()[0].staleness_max == 1
        assert worker.store.ranks()[0].staleness_sum == 17, "every step but the first"
    master = [p.detach().clone() for p in rival.parameters()]
    before = [p.clone() for p in master]
    for first in range(0, 3 * SAMPLES, 10):
        with torch.no_grad():
            for p, old in zip(rival.parameters(), before, strict=True):
                p.copy_(old)
        rival.zero_grad()
        rows = torch.from_numpy(indices(first, 10, SAMPLES, 5))
        backward(loss_of(rival, X[rows], Y[rows]))
        before = [p.clone() for p in master]
        for p, now in zip(rival.parameters(), master, strict=True):
            assert p.grad is not None
            now.sub_(p.grad * 0.1)
    for p, expected in zip(model.parameters(), master, strict=True):
        assert torch.equal(p.detach(), expected)


@pytest.mark.parametrize(
    ("policy", "depth"), [(name, 2) for name in OVERLAPPING] + [(name, 5) for name in DEEP]
)
def test_every_policy_that_need_not_wait_trains(shm: Path, tmp_path: Path, policy: str, depth: int) -> None:
    split, total = [6, 4, 5], 6 * SAMPLES
    models = [make_model() for _ in split]
    before = float(loss_of(models[0], X, Y).detach())
    workers = [
        join(
            "threads", rank, batches=split, samples=total, seed=5, policy=policy, micro_batch=3,
            run_dir=tmp_path, depth=depth,
        )
        for rank in range(len(split))
    ]  # fmt: skip

    train_beside(workers, models)
    counters = workers[0].store.ranks()
    for worker in workers:
        worker.close()
    assert sum(r.samples for r in counters) == total
    assert float(loss_of(models[0], X, Y).detach()) < before
    taken = [r for r in read_run(tmp_path) if not r.rejected]
    positions = sorted(p for r in taken for p in range(r.first, r.first + r.samples))
    assert positions == list(range(total)), "each sample once"
    if policy == "hps":
        assert 1 <= max(r.staleness for r in taken) <= depth - 1, "the rounds before"
    assert no_transfer_threads()


def no_transfer_threads() -> bool:
    return not [t for t in threading.enumerate() if t.name.startswith("pyps-transfer")]


@pytest.mark.parametrize("name", ["bsp", "backup"])
def test_policies_that_wait_refuse_it_by_name(name: str) -> None:
    with pytest.raises(
        InputError, match=f"depth: found a pipeline under {name}, where every step waits"
    ) as failed:
        join("run", 0, batches=[1], policy=name, depth="auto")
    assert "asp" in str(failed.value)


def timed(shm: Path, folder: Path, compute: float, one_way: float, depth: Any) -> list[StepRecord]:
    model = make_model()
    with join(
        "run", 0, batches=[10], samples=120, seed=5, policy="asp", run_dir=folder, depth=depth
    ) as worker:
        worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
        over(worker, Slow(worker.store, one_way))
        for x, y in worker.batches((X, Y)):
            backward(loss_of(model, x, y))
            time.sleep(compute)
            worker.step()
    return read_run(folder)


def period(records: list[StepRecord]) -> float:
    begins = [next(b for kind, b, _ in r.spans if kind == "compute") for r in records]
    return float(np.median(np.diff(begins)[2:]))


@pytest.mark.timed
@pytest.mark.parametrize(("compute", "one_way"), [(0.08, 0.02), (0.04, 0.05)])
def test_the_period_is_the_longer_of_compute_and_transfer(
    shm: Path, tmp_path: Path, compute: float, one_way: float
) -> None:
    piped = timed(shm, tmp_path / "piped", compute, one_way, depth="auto")
    assert {r.staleness for r in piped[1:]} == {1}
    longer = max(compute, 2 * one_way)
    overlaps = 0
    for now, following in pairwise(piped):
        kind, sent, back = now.spans[-1]
        assert kind == "push", "with the pull, in an exchange"
        begin, end = next((b, e) for kind, b, e in following.spans if kind == "compute")
        overlaps += sent < end and begin < back
    assert overlaps == len(piped) - 1, "each transfer overlaps with the next compute"
    assert longer <= period(piped) < longer * (1 + CLOSE) + 0.006
    serial = timed(shm, tmp_path / "serial", compute, one_way, depth=1)
    assert period(serial) > compute + 2 * one_way


def test_the_trace_has_a_track_for_transfers(shm: Path, tmp_path: Path) -> None:
    from pyps.formats.setup import RankSpec

    records = timed(shm, tmp_path, 0.0, 0.0, depth="auto")
    rows = make_trace([RankSpec(0, "a", 10)], records, [])["traceEvents"]
    names = {row["tid"]: row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    kinds = {(names[row["tid"]], row["name"]) for row in rows if row["ph"] == "X"}
    assert ("rank 0: transfers", "push") in kinds
    assert ("rank 0: a, b = 10", "compute") in kinds
    assert ("rank 0: a, b = 10", "push") not in kinds


class Broken(Slow):
    def _late(self, call: Callable[..., Any], ways: int) -> Callable[..., Any]:
        raise ConnectionError("the link is cut")


def test_an_error_of_a_transfer_surfaces_at_the_next_step(shm: Path) -> None:
    model = make_model()
    worker = join("run", 0, batches=[10], samples=0, policy="asp", depth="auto")
    worker.attach(model)
    transport = worker._require().transport
    batches = worker.batches((X, Y))
    for k in range(4):
        x, y = next(batches)
        backward(loss_of(model, x, y))
        if k == 2:
            while not transport.idle:  # the transfer of the step before must not fail
                time.sleep(0.001)
            over(worker, Broken(worker.store, 0.0))
        if k == 3:
            with pytest.raises(ConnectionError, match="the link is cut"):
                worker.step()
        else:
            worker.step()
    worker.close()
    assert no_transfer_threads()


@pytest.mark.timed
def test_close_waits_for_a_transfer_but_not_for_ever(shm: Path) -> None:
    model = make_model()
    worker = join("run", 0, batches=[10], samples=0, policy="asp", depth="auto")
    worker.attach(model)
    over(worker, Slow(worker.store, 0.4))
    x, y = next(iter(worker.batches((X, Y))))
    backward(loss_of(model, x, y))
    worker.step()
    transport = worker._require().transport
    began = time.monotonic()
    with pytest.raises(TimedOut, match="still under way after"):
        transport.close(0.05)
    assert time.monotonic() - began < 0.3
    worker.close()
    assert worker.store.closed
    worker.close()
    assert no_transfer_threads()


class Held(Slow):
    """A store whose pushes wait until they may go on, or fail."""

    def __init__(self, store: Store, error: Exception | None) -> None:
        super().__init__(store, 0.0)
        self.go_on, self._error = threading.Event(), error

    def _late(self, call: Callable[..., Any], ways: int) -> Callable[..., Any]:
        def late(*args: Any, **more: Any) -> Any:
            assert self.go_on.wait(PATIENCE_SECONDS)
            if self._error is not None:
                raise self._error
            return call(*args, **more)

        return late


def two_under_way(folder: Path, error: Exception | None = None) -> tuple[Worker, Held]:
    """A worker that has taken two steps, whose transfers wait."""
    worker = join("run", 0, batches=[10], samples=0, policy="asp", depth=3, run_dir=folder)
    model = make_model()
    worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    held, batches = Held(worker.store, error), worker.batches((X, Y))
    for _ in range(2):
        x, y = next(batches)
        over(worker, held)
        backward(loss_of(model, x, y))
        worker.step()
    return worker, held


def test_what_fails_while_a_worker_closes_is_raised_once(shm: Path, tmp_path: Path) -> None:
    worker, held = two_under_way(tmp_path, ConnectionError("the link is cut"))
    held.go_on.set()
    with pytest.raises(ConnectionError, match="the link is cut"):
        worker.close()
    worker.close()
    assert no_transfer_threads()


def test_steps_that_end_after_a_worker_closed_too_early_are_recorded(
    shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, held = two_under_way(tmp_path)
    transport = worker._require().transport
    with monkeypatch.context() as patch:
        patch.setattr(transport, "close", partial(transport.close, 0.05))
        with pytest.raises(TimedOut):
            worker.close()
    held.go_on.set()
    worker.close()
    assert [(record.version, record.rejected) for record in read_run(tmp_path)] == [(1, False), (2, False)]


def test_a_worker_leaves_when_what_left_late_has_ended() -> None:
    """Its gradient waits for a turn, longer than close() does."""
    turn, gone, order = threading.Event(), threading.Event(), []

    def begin(*_: object) -> Any:
        assert turn.wait(PATIENCE_SECONDS)
        return end

    def end(*_: object) -> Landed:
        order.append("transfer")
        return Transferred(version=1), []

    def leave() -> None:
        order.append("left")
        gone.set()

    store = SimpleNamespace(rank=0, close=leave)
    client: Any = SimpleNamespace(store=store, begin_transfer=begin)
    binding: Any = SimpleNamespace(vector=lambda: None, land=lambda finish, vector: finish(vector, None))
    way = Overlapped(client, binding, PATIENCE_SECONDS)
    way.send(TransferRequest(PushRequest(0, 1, ())))
    with pytest.raises(TimedOut):
        way.close(0.01)
    turn.set()
    assert gone.wait(PATIENCE_SECONDS)
    assert order == ["transfer", "left"]
    way.close(PATIENCE_SECONDS)
    assert no_transfer_threads()


def at_once(self: BackgroundThread[Any], job: Callable[[], Any]) -> None:
    """submit(), in the thread that calls it."""
    try:
        self._results.put((job(), None))
    except BaseException as error:
        self._results.put((None, error))


def test_local_steps_load_no_parameters_of_a_transfer_that_was_not_taken(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a round has a step whose way the worker would take once more. Each transfer comes back at once,
    but is seen only when the worker waits for it.
    """
    monkeypatch.setattr(BackgroundThread, "submit", at_once)
    monkeypatch.setattr(Overlapped, "ready", 0)
    model, rival = make_model(), make_model()
    with join("run", 0, batches=[5], samples=3 * SAMPLES, seed=5, policy="asp", depth=3) as worker:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        outer = torch.optim.SGD(model.parameters(), lr=1.0)
        worker.attach(model, optimizer, local_steps=2, outer=outer)
        train(worker, model)
        assert worker.steps == 18
    train_alone(rival, torch.optim.SGD(rival.parameters(), lr=0.05, momentum=0.9), 5)
    assert distance(model, rival) < 10 * RELATIVE


class FencedOnce(Slow):
    """A store that finds its worker late when it looks at one version."""

    def _late(self, call: Callable[..., Any], ways: int) -> Callable[..., Any]:
        def late(*args: Any, strict: bool = False, **more: Any) -> Any:
            if strict and self._seconds:
                self._seconds = 0.0
                raise Fenced("snapshot", "the worker missed a deadline")
            return call(*args, **({"strict": True} if strict else {}), **more)

        return late


def test_a_worker_that_is_fenced_when_it_refreshes_rejoins_and_drops_its_step(shm: Path) -> None:
    """This happens after a long validation, with samples in hand."""
    worker, model = join("run", 0, batches=[10], samples=60, policy="asp"), make_model()
    worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for number, (x, y) in enumerate(worker.batches((X, Y))):
        if number == 2:
            over(worker, FencedOnce(worker.store, 1.0))
            assert worker.refresh() == 2
        backward(loss_of(model, x, y))
        worker.step()
    assert (worker.fenced, worker.rejected, worker.steps) == (1, 1, 6)
    worker.close()
    assert no_transfer_threads()


@pytest.mark.parametrize("depth", [2, 4])
def test_a_fenced_worker_drops_all_and_goes_on(shm: Path, tmp_path: Path, depth: int) -> None:
    """Rank 1 stands still with its claims; rank 0 needs their samples and fences it."""
    policy = Policy.known["asp"](round_timeout_seconds=0.3)
    total = 30 * 4
    workers = [
        join("run", r, batches=[4, 4], samples=total, policy=policy, run_dir=tmp_path, depth=depth)
        for r in range(2)
    ]

    stands = threading.Event()

    def body(rank: int) -> None:
        model = make_model()
        workers[rank].attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
        for x, y in workers[rank].batches((X, Y)):
            backward(loss_of(model, x, y))
            if rank == 0 and workers[0].steps:
                stands.wait(PATIENCE_SECONDS)
            elif rank == 1 and workers[1].steps and not stands.is_set():
                stands.set()
                until(lambda: MemberState.FENCED in {m.state for m in workers[0].store.members()})
            workers[rank].step()

    run_threads(2, body)
    counters = workers[0].store.ranks()
    for worker in workers:
        worker.close()
    assert sum(r.samples for r in counters) == total
    assert workers[1].fenced >= 1
    records = read_run(tmp_path)
    taken = [r for r in records if not r.rejected]
    assert sorted(p for r in taken for p in range(r.first, r.first + r.samples)) == list(range(total))
    assert {r.rank for r in records if r.fenced} == {1}


@pytest.mark.parametrize("depth", [1, "auto"])
def test_a_worker_that_was_found_dead_hears_why(shm: Path, depth: Any) -> None:
    """Its place is gone, so that it cannot rejoin either. `pyps run` starts it again."""

    class Dead(Slow):
        def start(self, *_: object) -> Any:
            raise Fenced("start", "this participant was found dead")

        rejoin = start

    worker = join("run", 0, batches=[10], samples=100, policy="asp", depth=depth)
    model = make_model()
    worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    over(worker, Dead(worker.store, 0.0))
    with pytest.raises(Fenced, match="found dead"):
        next(iter(worker.batches((X, Y))))
    worker.close()
    assert no_transfer_threads()


def test_a_state_dict_in_the_middle_of_a_run_is_of_one_version(shm: Path) -> None:
    model = make_model()
    with join("run", 0, batches=[10], samples=8 * 10, policy="asp", depth="auto") as worker:
        worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for x, y in worker.batches((X, Y)):
            backward(loss_of(model, x, y))
            worker.step()
            state = worker.state_dict()
            flat = worker.store.snapshot().tensors
            for name, values in flat.items():
                np.testing.assert_array_equal(state[name].cpu().numpy(), values)
        assert worker.steps == 8


def test_a_depth_that_the_store_was_not_made_for_is_refused(shm: Path) -> None:
    with pytest.raises(InputError, match=r"depth: found 9; expected 1 to 8"):
        join("run", 0, batches=[1], policy="asp", depth=9)
    with (
        Store.create("run", {"weight": np.ones((1, 2))}, batches=[1], policy="asp"),
        join("run", 0, batches=[1], policy="asp", depth=3) as worker,
        pytest.raises(InputError, match=r"depth: found 3, in a store made for at most 2"),
    ):
        worker.attach(torch.nn.Linear(2, 1, bias=False))


def test_a_background_thread_runs_jobs_in_order_and_raises_what_they_raise() -> None:
    thread: BackgroundThread[int] = BackgroundThread("pyps-transfer-test")
    thread.submit(lambda: 1)
    thread.submit(lambda: 1 // 0)
    assert thread.take(5.0) == 1
    with pytest.raises(ZeroDivisionError):
        thread.take(5.0)
    with pytest.raises(TimedOut, match=r"longer than 0\.01 s"):
        thread.take(0.01)
    done = threading.Event()
    thread.close(done.set, 5.0)
    assert done.is_set()
