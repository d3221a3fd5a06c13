"""Local steps in virtual time: by hand, as in the runtime, and planned against equal ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from worker_tools import X, Y, backward, loss_of, make_model, run_threads

from pyps import Hyper
from pyps.errors import InputError
from pyps.simulate import LocalOptimizer, Logistic, Scenario, SimWorker, TorchObjective, simulate
from pyps.tasks import TrainingTask
from pyps.worker.loop import join

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
