"""Changes that a script makes between its calls of the worker are honoured or refused, never lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from worker_tools import (
    DEVICE,
    RELATIVE,
    SAMPLES,
    X,
    Y,
    backward,
    distance,
    loss_of,
    make_model,
    run_threads,
)

from pyps.errors import InputError
from pyps.worker.data.sampling import indices
from pyps.worker.step.loop import Worker, join

SPLIT = (6, 4)
ROUNDS = 4
Change = Callable[[Worker, nn.Module], Any]


def nothing(worker: Worker, model: nn.Module) -> None:
    pass


def clip(worker: Worker, model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def clamp(worker: Worker, model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.1, 0.1)


def load(worker: Worker, model: nn.Module) -> None:
    model.load_state_dict(make_model(3).state_dict())


def move(worker: Worker, model: nn.Module) -> None:
    model.double()


def freeze(worker: Worker, model: nn.Module) -> None:
    next(model.parameters()).requires_grad_(requires_grad=False)


def train(
    *,
    before_backward: Change = nothing,
    after_backward: Change = nothing,
    after_step: Change = nothing,
    policy: str = "bsp",
    split: tuple[int, ...] = SPLIT,
    **attach: Any,
) -> list[nn.Module]:
    models = [make_model(0) for _ in split]
    options: dict[str, Any] = {"batches": list(split), "samples": ROUNDS * sum(split), "seed": 5}
    workers = [join("changes", rank, policy=policy, **options) for rank in range(len(split))]

    def body(rank: int) -> None:
        worker, model = workers[rank], models[rank]
        worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), **attach)
        for x, y in worker.batches((X, Y)):
            before_backward(worker, model)
            loss = loss_of(model, x, y)
            worker.backward(loss)
            after_backward(worker, model)
            worker.step(loss)
            after_step(worker, model)

    try:
        run_threads(len(split), body)
    finally:
        for worker in workers:
            worker.close()
    return models


def alone(
    change: Callable[[nn.Module], Any], hooked: Callable[[nn.Module], Any] = lambda _: None
) -> nn.Module:
    model = make_model(0)
    hooked(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for first in range(0, ROUNDS * sum(SPLIT), sum(SPLIT)):
        rows = torch.from_numpy(indices(first, sum(SPLIT), SAMPLES, 5))
        optimizer.zero_grad()
        backward(loss_of(model, X[rows], Y[rows]))
        change(model)
        optimizer.step()
    return model


def test_clipping_each_workers_gradient_is_refused_in_a_round(shm: Path) -> None:
    with pytest.raises(InputError, match="clip_norm"):
        train(after_backward=clip)
    clipped = alone(lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.05))
    assert distance(train(clip_norm=0.05)[0], clipped) < 10 * RELATIVE


def test_clipping_a_gradient_that_is_applied_alone_is_honoured(shm: Path) -> None:
    clipped = alone(lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.05))
    for policy in ("bsp", "asp"):
        (model,) = train(after_backward=clip, policy=policy, split=(sum(SPLIT),))
        assert distance(model, clipped) < 10 * RELATIVE


@pytest.mark.parametrize("change", [clamp, load, move])
@pytest.mark.parametrize("policy", ["bsp", "asp"])
def test_parameters_that_the_script_changes_are_refused(shm: Path, change: Change, policy: str) -> None:
    with pytest.raises(InputError, match=r"0\.weight"):
        train(after_step=change, policy=policy)


@pytest.mark.parametrize("change", [clamp, load])
def test_so_are_those_changed_before_a_step_or_the_first_batch(shm: Path, change: Change) -> None:
    with pytest.raises(InputError, match=r"0\.weight"):
        train(after_backward=change)
    model = make_model()
    with join("first", 0, batches=[4], samples=8) as worker:
        worker.attach(model)
        change(worker, model)
        with pytest.raises(InputError, match="before attach"):
            next(worker.batches((X, Y)))


@pytest.mark.parametrize("policy", ["bsp", "asp"])
def test_a_layer_that_is_frozen_later_is_refused(shm: Path, policy: str) -> None:
    with pytest.raises(InputError, match=r"0\.weight.*frozen"):
        train(after_step=freeze, policy=policy)


def test_hooks_of_parameters_are_honoured(shm: Path) -> None:
    hooked: set[int] = set()

    def triple(model: nn.Module) -> None:
        for p in model.parameters():
            p.register_hook(lambda gradient: 3.0 * gradient)

    def once(worker: Worker, model: nn.Module) -> None:
        if worker.rank not in hooked:
            hooked.add(worker.rank)
            triple(model)

    expected = alone(lambda _: None, triple)
    assert distance(train(before_backward=once)[0], expected) < 10 * RELATIVE


def test_a_scaler_that_skips_on_one_rank_leaves_the_others_mean(shm: Path) -> None:
    """Rank 1's gradient of the second round has an inf."""
    models = [make_model(0) for _ in SPLIT]
    workers = [
        join("skips", rank, batches=list(SPLIT), samples=2 * sum(SPLIT), seed=5) for rank in range(len(SPLIT))
    ]

    def body(rank: int) -> None:
        worker, model = workers[rank], models[rank]
        worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        scaler = torch.amp.GradScaler(DEVICE, init_scale=8.0)
        for number, (x, y) in enumerate(worker.batches((X, Y))):
            scaled = scaler.scale(loss_of(model, x, y))
            worker.backward(scaled * float("inf") if number == rank == 1 else scaled)
            worker.step(None, scaler)
            scaler.update()

    run_threads(len(SPLIT), body)
    assert [worker.skipped for worker in workers] == [0, 1]
    for worker in workers:
        worker.close()
    model = make_model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for first, count in ((0, sum(SPLIT)), (sum(SPLIT), SPLIT[0])):
        rows = torch.from_numpy(indices(first, count, SAMPLES, 5))
        optimizer.zero_grad()
        backward(loss_of(model, X[rows], Y[rows]))
        optimizer.step()
    assert distance(models[0], model) < 10 * RELATIVE
