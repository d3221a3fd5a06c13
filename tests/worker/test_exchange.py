"""A serial worker's pushes bring the next step's parameters back, unless a start waits for others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from worker_tools import X, Y, backward, loss_of, make_model

from pyps.formats.records import read_run
from pyps.native.transfer import TransferRequest
from pyps.native.values import PushRequest
from pyps.store.policies import Policy
from pyps.worker.step.loop import Worker, join


class Counted:
    """A store that notes which of its transfers were called."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name == "pull":
            self.calls.append(name)
        return getattr(self._store, name)

    def begin_transfer(self, request: TransferRequest[PushRequest]) -> Any:
        """Note what it asks for."""
        self.calls.append("exchange" if request.ask.exchanges else "push")
        return self._store.begin_transfer(request)


def joined(policy: str, ranks: int, folder: Path) -> list[Worker]:
    workers = []
    for rank in range(ranks):
        worker = join("run", rank, batches=[4] * ranks, samples=0, seed=5, policy=policy, run_dir=folder)
        model = make_model()
        worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
        workers.append(worker)
    return workers


def steps_of(worker: Worker) -> Any:
    """Takes one step each time it is advanced."""
    model = worker._require().model
    for x, y in worker.batches((X, Y)):
        backward(loss_of(model, x, y))
        worker.step()
        yield


@pytest.mark.parametrize("name", sorted(Policy.known))
def test_one_call_brings_a_gradient_and_the_next_parameters(shm: Path, tmp_path: Path, name: str) -> None:
    (worker,) = joined(name, 1, tmp_path)
    counted = Counted(worker.store)
    worker._require().client.store = counted  # type: ignore[assignment]
    steps = steps_of(worker)
    for _ in range(3):
        next(steps)
    worker.close()
    needs = Policy.known[name]().needs
    exchanges = needs.starts_at_once or needs.lets_ranks_rest or needs.uses_turns
    assert exchanges == (name not in ("ssp", "dssp", "softsync", "hps"))
    assert counted.calls == (["pull", *["exchange"] * 3] if exchanges else ["pull", "push"] * 3)


def test_a_gradient_is_of_the_oldest_parameters_of_its_micro_batches(shm: Path, tmp_path: Path) -> None:
    """A look at newer ones in the middle of a step does not make it any younger."""
    worker, other = joined("asp", 2, tmp_path)
    worker.settings = replace(worker.settings, micro_batch=1)
    store, bases, model = worker.store, [], worker._require().model
    batches, others = worker.batches((X, Y)), steps_of(other)

    class Based(Counted):
        def begin_transfer(self, request: TransferRequest[PushRequest]) -> Any:
            bases.append(request.push.base_version)
            return store.begin_transfer(request)

    worker._require().client.store = Based(store)  # type: ignore[assignment]
    for looks_at, version in ((1, 1), (0, 3)):
        for micro in range(4):
            x, y = next(batches)
            if micro == looks_at:
                next(others)
                assert worker.refresh() == version
            backward(loss_of(model, x, y))
            worker.step()
    for one in (worker, other):
        one.close()
    assert bases == [0, 3], "which the whole gradient is of, or at least its first part"


@pytest.mark.parametrize(("others", "staleness"), [(2, 2), (3, 0)])
def test_after_a_pause_the_parameters_are_pulled_anew(
    shm: Path, tmp_path: Path, others: int, staleness: int
) -> None:
    """A script that evaluates between two steps does not go on with parameters of before. A push of each rank
    is what happens without a pause too.
    """
    workers = joined("asp", 2, tmp_path)
    one, two = map(steps_of, workers)
    next(one)
    for _ in range(others):
        next(two)
    next(one)
    for worker in workers:
        worker.close()
    last = [record.staleness for record in read_run(tmp_path) if record.rank == 0][-1]
    assert last == staleness
