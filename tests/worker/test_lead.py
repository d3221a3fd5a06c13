"""A worker that ran ahead while another stood still goes on level with it."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import pytest
import torch
from worker_tools import X, Y, backward, loss_of, make_model, run_threads

from pyps.formats.records import read_run
from pyps.simulate import Fault, Scenario, SimWorker, simulate
from pyps.step.machine import StepRules, has_run_ahead
from pyps.store.policies import Policy
from pyps.worker.step.loop import join

DEPTH, ROUNDS, LAST, BATCH = 4, 30, 11, 4
STEP_SECONDS, AWAY_SECONDS, AWAY_ROUND = 0.04, 0.8, 8


@pytest.mark.parametrize("local", [True, False])
def test_a_worker_is_not_ahead_for_good(shm: Path, tmp_path: Path, local: bool) -> None:
    """Rank 2 stands still between two steps, as if it were restarted."""
    begun, done = [0] * 3, [0] * 3  # the latest round that each has begun, and its samples
    models = [make_model() for _ in range(3)]
    run = {"batches": [BATCH] * 3, "samples": 3 * BATCH * ROUNDS, "seed": 5, "policy": "hps"}
    workers = [join("r", rank, depth=DEPTH, run_dir=tmp_path, **run) for rank in range(3)]

    def body(rank: int) -> None:
        model, worker = models[rank], workers[rank]
        options = {"local_steps": 1} if local else {}
        worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.01), **options)
        for x, y in worker.batches((X, Y)):
            assert worker.claim is not None
            now = worker.claim.round
            done[rank] = len(x) + (done[rank] if now == begun[rank] else 0)
            begun[rank], is_last = now, done[rank] == worker.claim.count
            time.sleep(STEP_SECONDS * len(x) / BATCH)
            backward(loss_of(model, x, y))
            worker.step()
            if rank == 2 and now == AWAY_ROUND and is_last:
                time.sleep(AWAY_SECONDS)

    run_threads(3, body)
    for worker in workers:
        worker.close()
    found = [[r.staleness for r in read_run(tmp_path) if r.rank == rank] for rank in range(3)]
    for mine in found:
        assert median(mine[-LAST:]) < DEPTH - 1, found


@pytest.mark.parametrize("local", [True, False])
def test_in_virtual_time_too(local: bool) -> None:
    """A step that stands still counts as slow: H-PS gives its rank less to do, and then that one is ahead."""
    made = tuple(SimWorker(f"w{k}", BATCH, lambda b: 0.1 * b, micro_batch=2) for k in range(3))
    away = Scenario(made, local=local, faults=(Fault(2, 3.1, "stop", 6.0),))
    long, longer = (simulate(away, "hps", iterations=n, depth=8) for n in (60, 160))
    assert max(long.staleness) == 7
    last = {age: n - long.staleness.get(age, 0) for age, n in longer.staleness.items()}
    assert {age for age, n in last.items() if n} <= {0, 1}, "all since"


@pytest.mark.parametrize("depth", [2, 3])
def test_two_steps_under_way_are_one_version_late_in_any_case(depth: int) -> None:
    rounds, free = Policy.known["hps"]().needs, Policy.known["asp"]().needs
    assert StepRules(depth, rounds, 3).may_run_ahead is (depth > 2)
    assert StepRules(depth, rounds, 3, local=True).may_run_ahead
    assert not StepRules(depth, free, 3, local=True).may_run_ahead


@pytest.mark.parametrize(("waited", "way", "ahead"), [(1.5, 0.1, True), (1.5, 0.6, False), (0.9, 0.0, False)])
def test_a_long_wait(waited: float, way: float, ahead: bool) -> None:
    assert has_run_ahead(waited, way, 1.0) is ahead
