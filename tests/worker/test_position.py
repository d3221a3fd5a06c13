"""A learning-rate schedule belongs to the run's position, not to a process."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedulers
from worker_tools import SAMPLES, X, Y, backward, loss_of, make_model, run_threads, train

import pyps
from pyps.errors import InputError
from pyps.formats.records import read_run
from pyps.worker.run.position import RunPosition, RunSchedule, warn_of_other_constants
from pyps.worker.step.loop import Worker

pytestmark = pytest.mark.usefixtures("shm")
Scheduler = schedulers.LRScheduler

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda o: schedulers.StepLR(o, 3, 0.7),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, 40),
    "restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 7),
    "lambda": lambda o: schedulers.LambdaLR(o, lambda n: 1 / (n + 1)),
    "one_cycle": lambda o: schedulers.OneCycleLR(o, 0.2, 40),
    "cyclic": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, 5),
    "chained": lambda o: schedulers.ChainedScheduler(
        [schedulers.LinearLR(o, total_iters=9), schedulers.ExponentialLR(o, 0.9)]
    ),
    "sequential": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, total_iters=9), schedulers.CosineAnnealingLR(o, 30)], [9]
    ),
    "list": lambda o: [schedulers.LinearLR(o, total_iters=9), schedulers.MultiStepLR(o, [4, 20])],
}


def sgd(lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(make_model().parameters(), lr=lr, momentum=0.9)


def constants(optimizer: torch.optim.Optimizer) -> tuple[float, float]:
    group = optimizer.param_groups[0]
    return group["lr"], group["momentum"]


def at(position: int) -> RunPosition:
    return RunPosition(position * 10, position, 0, 50)


def uninterrupted(name: str) -> list[tuple[float, float]]:
    """The constants before each of 40 steps of plain torch."""
    optimizer = sgd()
    made = SCHEDULES[name](optimizer)
    found = []
    for _ in range(40):
        found.append(constants(optimizer))
        optimizer.step()
        for one in made if isinstance(made, list) else [made]:
            one.step()
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_at_any_position_has_torchs_bits(name: str) -> None:
    expected = uninterrupted(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for start in (0, 1, 8, 9, 10, 33):
            optimizer = sgd()
            schedule = RunSchedule(SCHEDULES[name](optimizer), [optimizer])
            for position in (start, start, start + 1, start - 1, start + 5):
                schedule.follow(at(max(position, 0)))
                furthest = max(start, position, start + (position >= start + 1 or position == start - 1))
                assert constants(optimizer) == expected[furthest]


def test_epochs_are_counted_from_the_data_set() -> None:
    optimizer = sgd()
    schedule = RunSchedule(schedulers.MultiStepLR(optimizer, [2, 3]), [optimizer], "epoch")
    for position, rate in ((0, 0.1), (9, 0.1), (10, 0.01), (15, 0.001)):
        schedule.follow(at(position))
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)


def test_what_cannot_follow_a_position_is_refused() -> None:
    optimizer, other = sgd(), sgd()
    stepped = schedulers.StepLR(other, 3)
    other.step()
    stepped.step()
    cases: list[tuple[Any, str]] = [
        (schedulers.ReduceLROnPlateau(optimizer), "follows a loss"),
        ([schedulers.StepLR(optimizer, 3), schedulers.ReduceLROnPlateau(optimizer)], "follows a loss"),
        (schedulers.StepLR(other, 3), "another optimizer"),
        ("cosine", "torch.optim.lr_scheduler"),
    ]
    for given, message in cases:
        with pytest.raises(InputError, match=message):
            RunSchedule(given, [optimizer])
    with pytest.raises(InputError, match="last_epoch 1"):
        RunSchedule(stepped, [other])
    with pytest.raises(InputError, match="'batch' or 'epoch'"):
        RunSchedule(None, [optimizer], "week")  # type: ignore[arg-type]


def test_a_schedule_that_is_too_short_or_stepped_twice_is_refused() -> None:
    optimizer = sgd()
    short = RunSchedule(schedulers.OneCycleLR(optimizer, 0.1, 5), [optimizer])
    with pytest.raises(InputError, match="OneCycleLR: Tried to step"):
        short.follow(at(6))
    mine = schedulers.StepLR(optimizer, 3)
    schedule = RunSchedule(mine, [optimizer])
    schedule.follow(at(2))
    mine.step()
    with pytest.raises(InputError, match=r"a call of scheduler.step\(\)"):
        schedule.follow(at(3))


def test_position_in_a_script(worker: Worker) -> None:
    model = make_model()
    with pytest.raises(InputError, match="attach"):
        _ = worker.position
    worker.attach(model)
    assert worker.position == RunPosition(0, 0, 0)
    with pytest.raises(InputError, match="batches"):
        _ = worker.position.epoch
    for step, (x, y) in enumerate(worker.batches((X, Y))):
        assert worker.position == RunPosition(10 * step, step, step, SAMPLES)
        assert worker.position.epoch == 10 * step // SAMPLES
        backward(loss_of(model, x, y))
        worker.step()


def run_part(
    name: str, model: torch.nn.Module, steps: int, tmp_path: Any, scheduled: bool = True
) -> list[tuple[float, float]]:
    """A process of a run of one: it makes some steps and leaves. The constants of each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    worker = pyps.join("run", 0, batches=[10], samples=400, seed=5, run_dir=tmp_path)
    worker.attach(model, optimizer, scheduler=SCHEDULES[name](optimizer) if scheduled else None)
    found = []
    for x, y in worker.batches((X, Y)):
        found.append(constants(optimizer))
        backward(loss_of(model, x, y))
        worker.step()
        if len(found) == steps:
            break
    worker.close()
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_process_that_begins_again_goes_on_with_the_schedule(name: str, tmp_path: Any) -> None:
    model = make_model()
    with pyps.Store.create(
        "run", dict(model.named_parameters()), batches=[10], optimizer="momentum", samples=400
    ) as store:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = [pair for steps in (1, 7, 3) for pair in run_part(name, make_model(), steps, tmp_path)]
        expected = uninterrupted(name)[: len(found)]
        assert found == expected
        (hyper,) = store.hyper()
        assert hyper is not None
        assert hyper.lr == pytest.approx(expected[-1][0], rel=1e-6)
        assert hyper.momentum == pytest.approx(expected[-1][1], rel=1e-6)
        assert [record.lr for record in read_run(tmp_path)] == [lr for lr, _ in expected]


def test_a_worker_with_other_constants_and_no_schedule_warns_once(tmp_path: Any) -> None:
    model = make_model()
    with pyps.Store.create(
        "run", dict(model.named_parameters()), batches=[10], optimizer="momentum", samples=400
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run_part("step", make_model(), 5, tmp_path)
        with pytest.warns(
            UserWarning, match=r"version 5: group 0 is trained with lr 0\.07; .* 0\.1"
        ) as caught:
            run_part("step", make_model(), 1, tmp_path, scheduled=False)
        assert len(caught) == 1


def test_other_betas_are_said_as_well() -> None:
    mine, theirs = pyps.Hyper(lr=0.1, betas=(0.9, 0.99)), pyps.Hyper(lr=0.1)
    said = r"is trained with betas 0\.9, 0\.999; this worker begins with 0\.9, 0\.99; a hint"
    with pyps.Store.create(
        "run", {"w": torch.zeros(4)}, batches=[1], optimizer="adam", policy="asp"
    ) as store:
        store.join(0)
        store.start()
        gradient = store.stage()
        gradient["w"][:] = 1.0
        store.push(gradient, 1, theirs)
        with pytest.warns(UserWarning, match=said):
            assert warn_of_other_constants(store, [mine], "begins with", "a hint")


def rules_of_two(policy: str, scheduled: bool, **other: float) -> list[str]:
    """Return what two ranks of a run warn of whose optimizers differ by `other`."""
    workers = [pyps.join("run", r, batches=[4, 4], samples=120, seed=5, policy=policy) for r in range(2)]
    models, together = [make_model() for _ in workers], threading.Barrier(2, timeout=30)

    def body(rank: int) -> None:
        given = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0} | (other if rank else {})
        optimizer = torch.optim.SGD(models[rank].parameters(), **given)
        scheduler = schedulers.ExponentialLR(optimizer, 0.9) if scheduled else None
        workers[rank].attach(models[rank], optimizer, scheduler=scheduler)
        for step, (x, y) in enumerate(workers[rank].batches((X, Y))):
            backward(loss_of(models[rank], x, y))
            workers[rank].step()
            if step < 3:  # so that both have pushed before one of them compares
                together.wait()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_threads(2, body)
        for worker in workers:
            worker.close()
    return [str(one.message) for one in caught if "is trained with" in str(one.message)]


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize(("field", "value"), [("lr", 0.2), ("weight_decay", 0.01), ("momentum", 0.5)])
def test_a_round_with_the_rule_of_one_rank_is_said(field: str, value: float, scheduled: bool) -> None:
    (said,) = rules_of_two("bsp", scheduled, **{field: value})
    assert "version 1: group 0 is trained with" in said
    assert f"{field} " in said
    assert "give all ranks the same constants" in said


def test_ranks_that_wait_for_none_are_compared_too() -> None:
    said = rules_of_two("asp", False, weight_decay=0.01)
    assert said
    assert all("weight_decay" in one for one in said)


@pytest.mark.parametrize("policy", ["bsp", "asp"])
@pytest.mark.parametrize("scheduled", [False, True])
def test_ranks_of_one_rule_say_nothing(policy: str, scheduled: bool) -> None:
    assert rules_of_two(policy, scheduled) == []


def test_a_round_does_not_take_the_constants_of_a_worker_that_began_again() -> None:
    """By hand, without scheduler=: rank 0 begins again and its first rate would be everyone's."""
    workers = [pyps.join("run", rank, batches=[4, 4], samples=240, seed=5) for rank in range(2)]
    rates = []

    def body(rank: int) -> None:
        for part in (range(5), range(500)) if rank == 0 else (range(500),):
            model = make_model()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scheduler = schedulers.ExponentialLR(optimizer, 0.9)
            worker = workers[rank]
            worker.attach(model, optimizer)
            for _, (x, y) in zip(part, worker.batches((X, Y)), strict=False):
                backward(loss_of(model, x, y))
                worker.step()
                scheduler.step()
                if rank == 1:
                    (hyper,) = worker.store.hyper()
                    rates.append(hyper.lr if hyper is not None else 0.0)
            if part == range(5):
                worker.store.leave()
                workers.append(worker)  # whose close() removes the segment
                workers[0] = pyps.join("run", 0, batches=[4, 4], samples=240, seed=5)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        run_threads(2, body)
    for worker in workers:
        worker.close()
    both = rates[:-1]  # the run's last samples may be rank 0's alone
    assert both == sorted(both, reverse=True)
    assert both[-1] < 0.1 * 0.9**15


def test_without_a_schedule_nothing_changes(worker: Worker) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    worker.attach(model, optimizer)
    assert train(worker, model, after=lambda: optimizer.param_groups[0].update(lr=0.05)) > 1
    assert worker.store.hyper()[0].lr == 0.05  # type: ignore[union-attr]
