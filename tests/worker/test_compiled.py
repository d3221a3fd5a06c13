"""A compiled model is the plain one to the store: names, other ranks, checkpoints, and what is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from worker_tools import RELATIVE, X, Y, distance, loss_of, make_model, run_threads

from pyps.worker.device.attach import load_parameters
from pyps.worker.step.loop import join

SPLIT = (6, 4)


class Normed(nn.Module):
    """A model with buffers, and a part that is compiled by itself."""

    def __init__(self, *, part: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        first = nn.Linear(6, 8)
        self.first = torch.compile(first, backend="eager") if part else first
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))  # type: ignore[no-any-return]


def train(models: list[nn.Module], resume: Path | None = None, name: str = "compiled") -> list[str]:
    """The names of the store's tensors."""
    options = {"batches": list(SPLIT), "samples": 4 * sum(SPLIT), "seed": 5}
    workers = [join(name, rank, **options) for rank in range(len(SPLIT))]

    def body(rank: int) -> None:
        worker, model = workers[rank], models[rank]
        worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), resume=resume)
        for x, y in worker.batches((X, Y)):
            worker.backward(loss := loss_of(model, x, y))
            worker.step(loss)

    run_threads(len(SPLIT), body)
    names = [tensor.name for tensor in workers[0].store.tensors]
    assert set(names) <= set(workers[0].state_dict())
    for worker in workers:
        worker.close()
    return names


def test_one_rank_may_compile_its_model(shm: Path) -> None:
    plain = [make_model(0), make_model(0)]
    names = train(plain)
    one, other = make_model(0), make_model(0)
    assert train([torch.compile(one, backend="eager"), other], name="mixed") == names
    assert distance(one, plain[0]) < RELATIVE
    assert distance(other, one) == 0.0


@pytest.mark.filterwarnings("ignore:.*normaliz")
@pytest.mark.filterwarnings("ignore:the model.s BatchNorm takes its statistics")
def test_a_part_may_be_compiled_and_buffers_keep_their_names(shm: Path) -> None:
    models = [Normed(part=True), Normed(part=False)]
    names = train(models)
    assert {"first.weight", "norm.running_mean"} <= set(names)
    assert not [name for name in names if "_orig_mod" in name]


def test_what_a_compiled_model_has_trained_is_loaded_by_either(shm: Path) -> None:
    compiled = torch.compile(make_model(0), backend="eager")
    with join("one", 0, batches=[4], samples=8) as worker:
        worker.attach(compiled)
        for x, y in worker.batches((X, Y)):
            worker.backward(loss_of(compiled, x, y))
            worker.step()
        plain = make_model(1)
        load_parameters(worker.store, plain)
        plain.load_state_dict(worker.state_dict())
        again = torch.compile(make_model(2), backend="eager")
        load_parameters(worker.store, again)
    assert distance(plain, compiled) == 0.0
    assert distance(again, compiled) == 0.0
