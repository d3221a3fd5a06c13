"""Uneven batches under torchft, where replicas leave and come without a restart:

    torchft_lighthouse --min_replicas 1
    TORCHFT_LIGHTHOUSE=http://host0:29510 python with_torchft.py [speed]      # on each host

The split is that of the replicas of the step's quorum, by their speeds; B stays. The sampler's state is a
position in the epoch that all replicas share, like the parameters: a new one gets both from the others, and a
step that was not committed is done again, its samples too. torchft averages, so the loss carries its weight.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from common import digits, network
from torch.nn.functional import cross_entropy
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from pyps.solver import Line
from pyps.solver.online.decide import best_split
from pyps.torch import UnevenBatchSampler, loss_scale

GLOBAL_BATCH, TIMEOUT = 96, timedelta(seconds=15)


class Replica:
    """This replica among those of the step: its batch, from the position in the epoch that all share."""

    def __init__(self, manager: Manager, samples: int, speed: float) -> None:
        self.manager, self.samples, self.speed = manager, samples, speed
        self.state = UnevenBatchSampler(samples, [1], 0).state_dict()
        self.sampler: UnevenBatchSampler | None = None
        self._here: tuple[int | None, int] = (None, 0)
        self._batches: Iterator[list[int]] = iter(())

    def batch(self) -> list[int]:
        """The indices of this step, by the quorum it began with."""
        here = self.manager.participating_rank(), self.manager.num_participants()
        if here != self._here or self.sampler is None:
            self._here = here
            self.sampler = UnevenBatchSampler(self.samples, self._split(*here), here[0])
            self.sampler.load_state_dict(self.state)
            self._batches = iter(self.sampler)
        return next(self._batches)

    def committed(self, done: bool) -> None:
        """The step's samples count, or come again."""
        if done and self.sampler is not None:
            self.state = self.sampler.state_dict()
        else:
            self.sampler = None

    def load(self, state: dict[str, Any]) -> None:
        """Go on where the others are."""
        self.state, self.sampler = state, None

    def _split(self, rank: int, ranks: int) -> tuple[int, ...]:
        speeds = torch.zeros(ranks, dtype=torch.float64)
        speeds[rank] = self.speed
        self.manager.allreduce(speeds).wait()  # an average: only the proportions of the speeds count
        costs = [Line(0.0, 1 / max(speed, 1e-9)) for speed in speeds.tolist()]
        return best_split(GLOBAL_BATCH, costs, [1] * ranks, [GLOBAL_BATCH] * ranks)


def train(speed: float, observe: Callable[[dict[str, Any]], None]) -> None:
    """One epoch; `observe` gets what each committed step was."""
    torch.manual_seed(0)
    train_set, _ = digits()
    images, labels = train_set.tensors
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    network_ = network()
    optimizer_ = torch.optim.SGD(network_.parameters(), lr=0.05)

    def state() -> dict[str, Any]:
        return {
            "model": network_.state_dict(),
            "optimizer": optimizer_.state_dict(),
            "sampler": replica.state,
        }

    def load(state: dict[str, Any]) -> None:
        network_.load_state_dict(state["model"])
        optimizer_.load_state_dict(state["optimizer"])
        replica.load(state["sampler"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        use_async_quorum=False,
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        replica_id=f"{socket.gethostname()}-{os.getpid()}-",
    )
    replica = Replica(manager, len(labels), speed)
    model, optimizer = DistributedDataParallel(manager, network_), Optimizer(manager, optimizer_)
    while replica.state["position"] < len(labels):
        optimizer.zero_grad()  # the step's quorum
        step, rows = manager.current_step(), replica.batch()
        loss = cross_entropy(model(images[rows]), labels[rows])
        total = replica.sampler.round_samples(replica.sampler.drawn - 1)[0]
        (loss * loss_scale(len(rows), total, ranks=manager.num_participants())).backward()
        optimizer.step()
        done = manager.current_step() > step
        replica.committed(done)
        if done:
            observe({"step": step, "rows": rows, "total": total, "loss": loss.item()})
    manager.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(float(sys.argv[1]) if len(sys.argv) > 1 else 1.0, lambda step: print(step["step"], step["loss"]))
