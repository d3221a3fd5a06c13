"""attach(clip_norm=): unequal workers train as one process that clips the whole batch's gradient."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from shard_tools import serving
from torch import nn
from worker_tools import (
    OPTIMIZERS,
    RELATIVE,
    SAMPLES,
    distance,
    make_model,
    run_threads,
    train,
    train_alone,
)

from pyps.errors import InputError
from pyps.remote.server import Server
from pyps.worker.device.attach import inspect
from pyps.worker.step.loop import join

CLIP_NORM = 0.3  # of a norm of about 1


def clipping(model: nn.Module, case: str) -> torch.optim.Optimizer:
    optimizer = OPTIMIZERS[case](model)

    def clip(*_: object) -> None:
        assert float(nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)) > CLIP_NORM

    optimizer.register_step_pre_hook(clip)
    return optimizer


@pytest.mark.usefixtures("shm")
@pytest.mark.parametrize(("case", "linked"), [("nesterov", False), ("groups", False), ("adamw", True)])
def test_unequal_workers_clip_as_one_process(case: str, linked: bool) -> None:
    split = [11, 2, 5]
    models = [make_model(0) for _ in split]

    def train_all(store: str) -> None:
        def body(rank: int) -> None:
            with join(store, rank, batches=split, samples=2 * SAMPLES, seed=5) as worker:
                worker.attach(models[rank], OPTIMIZERS[case](models[rank]), clip_norm=CLIP_NORM)
                train(worker, models[rank])
                assert {h.clip_norm for h in worker.store.hyper() if h} == {CLIP_NORM}

        run_threads(len(split), body)

    if linked:
        with Server("clip") as server:
            train_all(server.address)
    else:
        train_all("clip")
    rival = make_model()
    train_alone(rival, clipping(rival, case), sum(split), samples=2 * SAMPLES)
    assert distance(models[0], rival) < 20 * RELATIVE


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_bound_that_is_none_is_refused(bad: float) -> None:
    model = make_model()
    with pytest.raises(InputError, match=r"clip_norm: found .*; expected a finite number above 0"):
        inspect(model, OPTIMIZERS["sgd"](model), bad)


def test_several_servers_are_refused_before_there_is_a_store(shm: Path) -> None:
    """No server has the whole gradient."""
    model = make_model(0)
    with serving(2) as (address, _), join(address, 0, batches=[4], policy="asp") as worker:
        with pytest.raises(InputError, match="on several servers; expected None"):
            worker.attach(model, OPTIMIZERS["nesterov"](model), clip_norm=CLIP_NORM)
        assert not list(shm.iterdir())
