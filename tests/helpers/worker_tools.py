"""Define what tests of pyps.Worker share: a small model, its data, a training loop, and the same by plain
torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from device import DEVICE
from threads import in_threads
from torch import nn

from pyps.worker.data.sampling import indices
from pyps.worker.step.loop import Worker

RELATIVE = 1e-6
SAMPLES = 60
torch.set_num_threads(1)

X = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(0)).to(DEVICE)
Y = torch.randn(SAMPLES, 2, generator=torch.Generator().manual_seed(1)).to(DEVICE)
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).to(DEVICE)


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    weights = [p for p in model.parameters() if p.ndim > 1]
    biases = [p for p in model.parameters() if p.ndim <= 1]
    return torch.optim.SGD(
        [{"params": weights, "weight_decay": 0.01}, {"params": biases, "lr": 0.02}], lr=0.1, momentum=0.9
    )


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "nesterov": lambda m: torch.optim.SGD(
        m.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, weight_decay=0.01),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.01, lr_decay=0.1),
    "groups": two_groups,
}


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), y)


def backward(loss: torch.Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def train(
    worker: Worker, model: nn.Module, after: Callable[[], Any] = lambda: None, spoil: int | None = None
) -> int:
    """Return how many steps there were. spoil: the step whose gradient has a value that is not finite."""
    steps = 0
    for x, y in worker.batches((X, Y)):
        loss = loss_of(model, x, y)
        backward(loss)
        if steps == spoil:
            next(p.grad for p in model.parameters() if p.grad is not None).view(-1)[3] = float("nan")
        worker.step(loss)
        after()
        steps += 1
    return steps


def train_alone(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: int,
    after: Callable[[], Any] = lambda: None,
    *,
    samples: int = 3 * SAMPLES,
) -> None:
    for first in range(0, samples, batch):
        index = torch.from_numpy(indices(first, min(batch, samples - first), SAMPLES, 5))
        optimizer.zero_grad()
        backward(loss_of(model, X[index], Y[index]))
        optimizer.step()
        after()


def distance(one: nn.Module, two: nn.Module) -> float:
    a = torch.cat([p.detach().double().flatten() for p in one.parameters()])
    b = torch.cat([p.detach().double().flatten() for p in two.parameters()])
    return float((a - b).norm() / b.norm())


def run_threads(names: int, body: Callable[[int], None]) -> None:
    in_threads(*(partial(body, rank) for rank in range(names)))


def train_beside(workers: Sequence[Worker], models: Sequence[nn.Module]) -> None:
    """Each worker trains its model in a thread of its own, the later ones slower, to the run's end."""

    def body(rank: int) -> None:
        workers[rank].attach(models[rank], torch.optim.SGD(models[rank].parameters(), lr=0.02))
        for x, y in workers[rank].batches((X, Y)):
            backward(loss_of(models[rank], x, y))
            time.sleep(0.001 * (1 + rank))
            workers[rank].step()

    run_threads(len(workers), body)


def plan_with(batches: list[int]) -> dict[str, Any]:
    total = sum(batches)
    workers = [
        {
            "rank": rank, "name": f"w{rank}", "batch": b, "micro_batch": b, "accumulation": int(b > 0),
            "weight": b / total, "predicted_seconds": 0.1,
        }
        for rank, b in enumerate(batches)
    ]  # fmt: skip
    return {
        "schema": "pyps.plan/1", "global_batch": total, "iteration_seconds": 0.1, "lower_bound_seconds": 0.1,
        "even_split": {"feasible": True, "seconds": 0.1}, "speedup_over_even": 1.0, "workers": workers,
        "r2sp": {"feasible": None, "period_seconds": 0.1, "gap_seconds": 0.05,
                 "order": list(range(len(batches))),
                 "offsets_seconds": [0.05 * k for k in range(len(batches))]},
        "hps": {}, "warnings": [],
    }  # fmt: skip
