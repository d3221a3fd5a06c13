"""attach(resume=): a new store goes on from a checkpoint, on this machine and over a link."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from worker_tools import X, Y, backward, loss_of, make_model, run_threads

from pyps.checkpoint.state import save
from pyps.formats.plan import TurnSchedule
from pyps.remote.server import Server
from pyps.store import Store
from pyps.store.policies import R2SP
from pyps.worker.device.attach import hyper_of, inspect, open_or_create, set_planned_turns
from pyps.worker.run.settings import Settings
from pyps.worker.step.loop import join

SPLIT = [6, 4]
ROUNDS = 4  # of which the first half comes before the checkpoint


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(name: str, rounds: int, resume: Path | None = None, checkpoint: Path | None = None) -> bytes:
    """Some rounds of all ranks; the parameters then."""
    samples = sum(SPLIT) * ROUNDS
    models = [make_model(rank if resume else 0) for rank in range(len(SPLIT))]  # a checkpoint wins
    workers = [join(name, rank, batches=SPLIT, samples=samples, seed=5) for rank in range(len(SPLIT))]

    def body(rank: int) -> None:
        workers[rank].attach(models[rank], adam(models[rank]), resume=resume)
        for x, y in workers[rank].batches((X, Y)):
            backward(loss_of(models[rank], x, y))
            workers[rank].step()
            if workers[rank].steps == rounds:
                break
        workers[rank].refresh()

    run_threads(len(SPLIT), body)
    if checkpoint is not None:
        save(workers[0].store.state(), checkpoint, seed=5)
    found = workers[0].store.snapshot().parameters.tobytes()
    for worker in workers:
        worker.close()
    return found


@pytest.mark.parametrize("linked", [False, True])
def test_goes_on_bit_for_bit(shm: Path, tmp_path: Path, linked: bool) -> None:
    whole = train("whole", ROUNDS)
    train("half", ROUNDS // 2, checkpoint=tmp_path)
    if linked:
        with Server("again") as server:
            assert train(server.address, ROUNDS // 2, resume=tmp_path) == whole
    else:
        assert train("again", ROUNDS // 2, resume=tmp_path) == whole


def test_edited_turns_win_over_those_of_the_checkpoint(shm: Path, tmp_path: Path) -> None:
    """And are said; turns that are the same leave the ring where it was."""
    model = make_model()
    first, edited = (TurnSchedule(order, (0.02, 0.03, 0.01), 0.06) for order in ((2, 0, 1), (1, 2, 0)))
    settings = Settings("store", 0, R2SP(), batches=(1, 1, 1), schedule=first)
    attachment = inspect(model, adam(model))
    with open_or_create(settings, attachment, 10.0) as store:
        set_planned_turns(store, settings)
        with Store.open("store") as one, Store.open("store") as two:
            for rank, member in enumerate((store, one, two)):
                member.join(rank)
            two.start()
            two.push(two.stage(), 1, hyper_of(attachment))
            two.pull()
            save(store.state(), tmp_path, seed=0)
    settings = replace(settings, resume=tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with open_or_create(settings, attachment, 10.0) as store:
            set_planned_turns(store, settings)
            assert store.status().turn_rank == 0  # the second turn
    with pytest.warns(UserWarning, match="the plan's turns replace those of .*00000001"):
        store = open_or_create(replace(settings, schedule=edited), attachment, 10.0)
    with store:
        assert [rank.turn_rank for rank in store.state().header.ranks] == [1, 2, 0]
