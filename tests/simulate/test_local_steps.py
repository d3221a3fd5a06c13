"""Local steps in virtual time: by hand, as in the runtime, and planned against equal ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from worker_tools import X, Y, backward, loss_of, make_model, run_threads

from pyps import Hyper
from pyps.errors import InputError
from pyps.simulate import Fault, LocalOptimizer, Logistic, Scenario, SimWorker, TorchObjective, simulate
from pyps.simulate.optimizer import Vector
from pyps.tasks import TrainingTask
from pyps.worker.step.loop import join

SPLIT, SIZE = (12, 4, 8), 4


def scenario(batches: tuple[int, ...] = SPLIT, speeds: tuple[float, ...] = (3, 1, 2)) -> Scenario:
    workers = tuple(
        SimWorker(f"w{k}", batch, lambda b, s=speed: b / s, micro_batch=SIZE)
        for k, (batch, speed) in enumerate(zip(batches, speeds, strict=True))
    )
    return Scenario(workers, local=True)


def test_by_hand() -> None:
    """One worker, plain SGD inside, rate 1 outside: the steps of plain SGD."""
    objective, w = Logistic(), Logistic().start()
    result = simulate(
        scenario((12,), (1,)), iterations=5, objective=objective, lr=1.0, local=LocalOptimizer(lr=0.2)
    )
    for first in range(0, 60, SIZE):
        w = w - 0.2 * objective.gradient(w, first, SIZE)[0]
    assert result.loss == pytest.approx(objective.loss(w), rel=1e-12)
    assert result.seconds == pytest.approx(60)


@pytest.mark.parametrize("outer", [Hyper(1.0), Hyper(0.7, momentum=0.9, nesterov=True)])
def test_as_in_the_runtime(shm: object, outer: Hyper) -> None:
    """Rounds of three unequal workers with AdamW inside: the same loss."""
    task = TrainingTask(make_model(), lambda n: (X[:n], Y[:n]), torch.nn.functional.mse_loss)
    objective = TorchObjective(task, X, Y, seed=5)
    kind = "momentum" if outer.momentum else "sgd"
    inner = LocalOptimizer("adamw", Hyper(0.01, weight_decay=0.01))
    found = simulate(scenario(), iterations=10, objective=objective, lr=outer, optimizer=kind, local=inner)

    models = [make_model() for _ in SPLIT]
    batches = list(SPLIT)
    workers = [
        join("r", k, batches=batches, samples=10 * sum(SPLIT), seed=5, micro_batch=SIZE) for k in range(3)
    ]

    def body(rank: int) -> None:
        parameters = list(models[rank].parameters())
        store = torch.optim.SGD(parameters, lr=outer.lr, momentum=outer.momentum, nesterov=outer.momentum > 0)
        workers[rank].attach(models[rank], torch.optim.AdamW(parameters, lr=0.01), local_steps=1, outer=store)
        for x, y in workers[rank].batches((X, Y)):
            backward(loss_of(models[rank], x, y))
            workers[rank].step()

    run_threads(3, body)
    assert float(loss_of(models[0], X, Y).detach()) == pytest.approx(found.loss, rel=1e-4)
    for worker in workers:
        worker.close()


@pytest.mark.parametrize("merges", [0, 1])
def test_merging_by_hand(merges: int) -> None:
    """The slow worker takes in what the fast one pushed when half of its steps are over."""
    objective, start = Logistic(), Logistic().start()
    chosen = replace(scenario((8, 4), (1, 4)), merges=merges)
    inner = LocalOptimizer(lr=0.2)
    found = simulate(chosen, "asp", iterations=1, objective=objective, lr=1.0, local=inner)

    def step(w: Vector, first: int) -> Vector:
        return w - 0.2 * objective.gradient(w, first, SIZE)[0]

    newest = start - (start - step(start, 0)) * 4 / 12
    base = newest if merges else start
    at = step(base - (start - step(start, 4)), 8)
    assert found.loss == pytest.approx(objective.loss(newest - (base - at) * 8 / 12), rel=1e-6)
    assert found.staleness == ({0: 2} if merges else {0: 1, 1: 1})


@pytest.mark.parametrize("depth", [2, 4])
@pytest.mark.parametrize("policy", ["asp", "hps"])
def test_in_a_pipeline_one_worker_takes_the_steps_of_one_without(policy: str, depth: int) -> None:
    """It is where its own steps have brought it, whenever its transfers arrive."""
    one = scenario((12,), (1,))
    slow = replace(one, up_bytes=1.0, down_bytes=1.0, server_bandwidth=0.3)
    inner = LocalOptimizer("adamw", Hyper(0.01))
    options = {"iterations": 6, "objective": Logistic(), "lr": 1.0, "local": inner}
    plain = simulate(one, policy, **options)
    piped = simulate(slow, policy, depth=depth, **options)
    assert piped.loss == pytest.approx(plain.loss, rel=1e-12)
    assert piped.seconds < simulate(slow, policy, **options).seconds


def test_an_overlapped_round_by_hand() -> None:
    """Two workers of H-PS, the second behind a link. They begin alike: it waits for the first round's result.
    Then it takes the first of its two steps of a round from where it is, the second from the last result.
    """
    objective, w = Logistic(), Logistic().start()
    near, far = (SimWorker(f"w{k}", 8, lambda b: b / 4, micro_batch=SIZE) for k in range(2))
    near, far = replace(near, up_share=0.0, down_share=0.0), replace(far, up_share=1.0, down_share=0.0)
    chosen = Scenario((near, far), up_bytes=1.0, down_bytes=1.0, server_bandwidth=2.0, local=True)
    inner = LocalOptimizer(lr=0.2)
    found = simulate(chosen, "hps", iterations=3, objective=objective, lr=1.0, local=inner, depth="auto")

    def step(w: Vector, first: int) -> Vector:
        return w - 0.2 * objective.gradient(w, first, SIZE)[0]

    for start in (0, 16):
        ends = [step(step(w, first), first + SIZE) for first in (start, start + 8)]
        w = sum(ends) / 2
    ways = [step(end, first) - end for end, first in zip(ends, (32, 40), strict=True)]
    ends = [step(w + way, first) for way, first in zip(ways, (36, 44), strict=True)]
    assert found.loss == pytest.approx(objective.loss(sum(ends) / 2), rel=1e-6)


@pytest.mark.parametrize("policy", ["bsp", "r2sp"])
def test_workers_that_wait_do_not_merge(policy: str) -> None:
    plain, merging = (
        simulate(
            replace(scenario(), merges=merges),
            policy,
            iterations=5,
            objective=Logistic(),
            lr=1.0,
            local=LocalOptimizer(),
        )
        for merges in (0, 2)
    )
    assert merging == plain


def test_a_killed_worker_leaves_nothing_of_a_merge_behind() -> None:
    """Its successor begins with the parameters as they are."""
    fault = Fault(rank=0, at=5.0, kind="kill", seconds=1.0)
    chosen = replace(scenario((8, 4), (1, 4)), merges=1, faults=(fault,))
    found = simulate(chosen, "asp", iterations=4, objective=Logistic(), lr=1.0, local=LocalOptimizer(lr=0.2))
    assert found.samples == 48
    assert found.loss < Logistic().loss(Logistic().start())


def test_planned_local_steps_wait_for_nobody() -> None:
    planned = simulate(scenario(), iterations=20)
    equal = simulate(scenario((8, 8, 8)), iterations=20)
    assert planned.idle_share == pytest.approx(0.0, abs=1e-6)
    assert equal.seconds == pytest.approx(2 * planned.seconds)


def test_a_scenario_of_local_steps_needs_their_optimizer() -> None:
    with pytest.raises(InputError, match="local: found nothing; expected one in a scenario of local steps"):
        simulate(scenario(), objective=Logistic())
    plain = Scenario((SimWorker("w", 4, lambda _: 1.0),))
    with pytest.raises(InputError, match="local: found an optimizer"):
        simulate(plain, objective=Logistic(), local=LocalOptimizer())
    assert np.isnan(simulate(scenario()).loss)
