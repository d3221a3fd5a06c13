"""Define what every cell trains, for torch and for the simulator: a model whose parameters say what became
of it.

`counts` has one parameter for each sample, and each sample's gradient is 1 there: under SGD of rate B a run
that trains every sample once, and weighs none, ends at -1 everywhere. `state` is pulled to 1 from afar; its
gradient depends on where it is, so it shows on which parameters each gradient was computed, and not on which
samples, which workers that wake at once share out as they come. It is long enough for two servers to share.
"""

from __future__ import annotations

import numpy as np
import torch
from cells import Cell
from numpy.typing import NDArray
from torch import nn

from pyps.native.values import OUTER, Hyper
from pyps.simulate import LocalOptimizer
from pyps.worker.data.sampling import indices

SAMPLES = 64
LENGTH = 33_024  # of `state`: more than a chunk, in whole blocks of every codec
BATCHES = (4, 2, 2)
GLOBAL_BATCH = sum(BATCHES)
CURVATURE = 1 / 64
SEED = 5
CLIP_NORM = 0.5  # below the norm of most gradients
START = np.linspace(-1.0, 3.0, LENGTH, dtype=np.float32)

INPUTS = torch.arange(SAMPLES)
HYPERS = {  # as torch's defaults where nothing is said
    "sgd": Hyper(lr=float(GLOBAL_BATCH)),
    "momentum": Hyper(lr=1.0, momentum=0.9),
    "nesterov": Hyper(lr=1.0, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": Hyper(lr=0.05, weight_decay=0.01),
    "adam": Hyper(lr=0.05, weight_decay=0.01),
    "adagrad": Hyper(lr=0.1, eps=1e-10, lr_decay=0.1),
}
KINDS = {"nesterov": "momentum"}  # the store's names


def hyper_of(cell: Cell) -> Hyper:
    """The constants of the worker's torch optimizer."""
    hyper = HYPERS[cell.optimizer]
    if cell.optimizer == "sgd" and cell.local_steps:
        return Hyper(lr=hyper.lr / cell.accumulation)  # each micro-batch is a step of its own
    return hyper


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.state = nn.Parameter(torch.from_numpy(START.copy()))
        self.counts = nn.Parameter(torch.zeros(SAMPLES))

    def forward(self, chosen: torch.Tensor) -> torch.Tensor:
        away = self.state - 1.0
        return self.counts[chosen].mean() + 0.5 * CURVATURE * (away * away).sum()


def optimizer_of(cell: Cell, model: nn.Module) -> torch.optim.Optimizer:
    h, parameters = hyper_of(cell), list(model.parameters())
    if cell.optimizer in ("sgd", "momentum", "nesterov"):
        more = {"momentum": h.momentum, "nesterov": h.nesterov, "weight_decay": h.weight_decay}
        return torch.optim.SGD(parameters, lr=h.lr, **more)
    if cell.optimizer == "adagrad":
        return torch.optim.Adagrad(parameters, lr=h.lr, lr_decay=h.lr_decay)
    kind = torch.optim.AdamW if cell.optimizer == "adamw" else torch.optim.Adam
    return kind(parameters, lr=h.lr, weight_decay=h.weight_decay)


class Objective:
    """The same for the simulator; `last` are the parameters whose loss was asked for last."""

    def __init__(self) -> None:
        self.last = self.start()

    def start(self) -> NDArray[np.float64]:
        return np.concatenate([START.astype(np.float64), np.zeros(SAMPLES)])

    def gradient(self, w: NDArray[np.float64], first: int, count: int) -> tuple[NDArray[np.float64], float]:
        gradient = np.empty_like(w)
        chosen = indices(first, count, SAMPLES, SEED)
        gradient[LENGTH:] = np.bincount(chosen, minlength=SAMPLES) / count
        gradient[:LENGTH] = CURVATURE * (w[:LENGTH] - 1.0)
        return gradient, 0.0

    def loss(self, w: NDArray[np.float64]) -> float:
        self.last = w
        return 0.0


def store_step(cell: Cell) -> tuple[str, Hyper]:
    """The store's optimizer in a simulation: the user's, or the default for local steps."""
    if cell.local_steps:
        return "momentum", OUTER
    return KINDS.get(cell.optimizer, cell.optimizer), hyper_of(cell)


def local_step(cell: Cell) -> LocalOptimizer | None:
    if not cell.local_steps:
        return None
    return LocalOptimizer(KINDS.get(cell.optimizer, cell.optimizer), hyper_of(cell))
