"""Over the link a policy decides as it does in shared memory: the same gradients, of the same staleness."""

from __future__ import annotations

import time
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from remote_tools import eventually
from worker_tools import X, Y, backward, loss_of, make_model

from pyps.formats.records import read_run
from pyps.native.local import LocalBackend
from pyps.native.values import Flat, Hyper, PushRequest, PushResult
from pyps.remote import open_store
from pyps.remote.server import Server
from pyps.store import Store
from pyps.store.policies import R2SP, Policy, SaPS, Softsync
from pyps.worker.step.loop import Worker, join

STEPS = 8  # of each worker
LINK_SECONDS = 0.5  # that a pull takes
ROUNDS = ("bsp", "backup", "hps")  # a worker waits for the other within a push: here it trains alone
IN_TURN: dict[str, Policy] = {  # none waits for the other, nor weighs by times, however slow the machine is
    "r2sp": R2SP(slack=0.0, patience=1e6),
    "saps": SaPS(threshold="fixed", bound=1, late="weigh"),  # measured times are new each time
    "softsync": Softsync(n=2),
}
CASES = [(name, 1) for name in Policy.known] + [
    (name, 2) for name, kind in Policy.known.items() if kind().needs.allows_pipeline
]


def idle(worker: Worker) -> bool:
    """Return whether no transfer is under way."""
    return worker._require().transport.idle


def train_in_turn(
    store: str, policy: Policy, depth: int, folder: Path
) -> tuple[list[tuple[Any, ...]], bytes]:
    """Each gradient's worker, step, staleness and whether it was dropped; and the parameters at the end.

    One thread drives both workers in turn, so that the order is always the same.
    """
    count = 1 if policy.name in ROUNDS else 2
    options: dict[str, Any] = {"batches": [5] * count, "seed": 5, "policy": policy, "run_dir": folder}
    workers = [join(store, rank, depth=depth, **options) for rank in range(count)]
    models = [make_model() for _ in workers]
    for worker, model in zip(workers, models, strict=True):
        worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.02))
    batches = [worker.batches((X, Y)) for worker in workers]
    for _ in range(STEPS):
        for worker, model, data in zip(workers, models, batches, strict=True):
            x, y = next(data)
            backward(loss_of(model, x, y))
            worker.step()
            eventually(lambda worker=worker: idle(worker))  # type: ignore[misc]
    parameters = workers[0].store.snapshot().parameters.tobytes()
    for worker in workers:
        worker.close()
    return sorted((r.rank, r.step, r.staleness, r.rejected) for r in read_run(folder)), parameters


@pytest.mark.parametrize(("name", "depth"), CASES)
def test_staleness_over_the_link_is_the_local_one(shm: Path, tmp_path: Path, name: str, depth: int) -> None:
    policy = IN_TURN.get(name) or Policy.known[name]()
    local, parameters = train_in_turn("near", policy, depth, tmp_path / "local")
    with Server("far") as server:
        remote, remote_parameters = train_in_turn(server.address, policy, depth, tmp_path / "remote")
    assert remote == local
    assert remote_parameters == parameters, "whatever the policy does with what a gradient was computed on"
    assert len(local) == STEPS * (1 if name in ROUNDS else 2)
    if depth > 1:
        assert max(found for _, _, found, _ in local) >= 1, "computed on parameters one more step old"


def test_the_link_does_not_count_as_compute(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's seconds are its own: from the parameters that have come to the gradient that goes."""
    arrived: list[PushRequest] = []
    pull, push = LocalBackend.pull, LocalBackend.push

    @wraps(pull)
    def slow_pull(store: LocalBackend, flat: Flat) -> int:
        time.sleep(LINK_SECONDS)
        return pull(store, flat)

    @wraps(push)
    def noted_push(store: LocalBackend, request: PushRequest) -> PushResult:
        arrived.append(request)
        return push(store, request)

    monkeypatch.setattr(LocalBackend, "pull", slow_pull)
    monkeypatch.setattr(LocalBackend, "push", noted_push)
    with (
        Store.create("far", {"w": np.ones(5)}, batches=[4], policy="hps"),
        Server("far") as server,
        open_store(server.address) as store,
    ):
        store.join()
        for seconds in (0.0, 7.0):
            claim = store.start()
            store.pull()
            store.push(store.stage(), claim.count, Hyper(lr=0.1), compute_seconds=seconds)
    measured, given = arrived
    assert 0.0 < measured.compute_seconds < LINK_SECONDS
    assert given.compute_seconds == 7.0
