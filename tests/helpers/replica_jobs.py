"""Replicas that die and come back, with a manager that does as torchft's does, on groups of test ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from pyps.torch import torchft as adapter
from pyps.torch.torchft import ReplicaData, UnevenReplica

B, SAMPLES, RATE = 24, 150, 0.05
mse = nn.functional.mse_loss
Attempt = tuple[tuple[int, ...], int | None]  # the ranks in it, and the sum from which on all fail


class Done:
    def wait(self) -> bool:
        return True


class Manager:
    """torchft's, as far as a replica uses it. attempts: all steps, committed or not, alike on all ranks."""

    def __init__(self, attempts: list[Attempt], groups: dict[tuple[int, ...], Any], number: int) -> None:
        self.attempts, self.groups, self.number = attempts, groups, number - 1
        self._loads: dict[str, Any] = {}
        self._states: dict[str, Any] = {}
        self._committed, self._error, self._sums = 0, None, 0
        self._fresh = True

    def register_state_dict_fn(self, key: str, load: Callable[[Any], None], state: Callable[[], Any]) -> None:
        self._loads[key], self._states[key] = load, state

    def start_quorum(self, joins: set[int]) -> None:
        """joins: ranks that get the state of the others."""
        self.number += 1
        self._ranks, self._fails = self.attempts[self.number]
        self._error, self._sums, self._group = None, 0, self.groups[self._ranks]
        if joins:
            source = next(rank for rank in self._ranks if rank not in joins)
            found = [(self._committed, {k: copy.deepcopy(f()) for k, f in self._states.items()})]
            dist.broadcast_object_list(found, src=source, group=self._group)
            if dist.get_rank() in joins:
                self._committed, states = found[0]
                for key, load in self._loads.items():
                    load(states[key])

    def allreduce(self, tensor: torch.Tensor, reduce_op: Any) -> Done:
        self._sums += 1
        if self._fails is not None and self._sums >= self._fails:
            self._error = ConnectionError("a replica is gone")
        elif self._error is None:
            dist.all_reduce(tensor, op=reduce_op, group=self._group)
        return Done()

    def errored(self) -> Any:
        return self._error

    def report_error(self, error: Exception) -> None:
        self._error = error

    def participating_rank(self) -> int:
        return self._ranks.index(dist.get_rank())

    def num_participants(self) -> int:
        return len(self._ranks)

    def current_step(self) -> int:
        return self._committed

    def should_commit(self) -> bool:
        self._committed += self._error is None
        return self._error is None


def data() -> TensorDataset:
    draws = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 6, generator=draws, dtype=torch.float64)
    return TensorDataset(inputs, inputs[:, :3].square() + torch.linspace(-2, 2, SAMPLES)[:, None])


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def begun(manager: Any, seed: int, **options: Any) -> tuple[UnevenReplica, torch.optim.Optimizer]:
    """A new process's replica and optimizer."""
    model = network(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)

    def load(state: Any) -> None:
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])

    replica = UnevenReplica(manager, model, ReplicaData(data(), B), **options)
    manager.register_state_dict_fn("model", load, lambda: [model.state_dict(), optimizer.state_dict()])
    return replica, optimizer


def trained(
    group: Any, attempts: list[Attempt], speeds: list[float], max_batch: int | None
) -> dict[str, Any]:
    """This rank's part: (position, epoch, split, rows) of each committed step, and the parameters."""
    rank, groups = dist.get_rank(), {}
    singles = [dist.new_group([k]) for k in range(len(speeds))]
    for ranks in sorted({ranks for ranks, _ in attempts}):
        groups[ranks] = dist.new_group(list(ranks))
    manager = replica = optimizer = None
    steps: list[Any] = []
    with mock.patch.object(adapter, "alone", return_value=singles[rank]):
        for number, (ranks, _) in enumerate(attempts):
            if rank not in ranks:
                manager = None
                continue
            before = attempts[number - 1][0] if number else ranks
            joins = set(ranks) - set(before)
            if manager is None:
                manager = Manager(attempts, groups, number)
                replica, optimizer = begun(manager, 0 if number == 0 else 5, max_batch=max_batch)
            assert replica is not None
            assert optimizer is not None
            timed(replica, speeds[rank])
            optimizer.zero_grad()
            manager.start_quorum(joins)
            at = (replica.epoch, replica.position)
            batch = replica.batch()
            for x, y in replica.micro_batches(batch):
                replica.backward(mse(replica.model(x), y))
            if manager.should_commit():
                optimizer.step()
            if replica.step():
                steps.append([*at, list(replica.split), replica.mean.trained, len(batch[0])])
    final = None if replica is None else [p.detach() for p in replica.model.parameters()]
    return {"steps": steps, "parameters": final, "history": [str(c) for c in replica.history]}


def timed(replica: UnevenReplica, speed: float) -> None:
    """Steps take what they would on an emulated device."""
    timer = replica._timer
    timer.finished = lambda: [(label, 0.001 * speed * label) for label in taken(timer)]  # type: ignore[method-assign]


def taken(timer: Any) -> list[int]:
    found = [label for label, _ in timer._pending if label is not None]
    timer._pending.clear()
    return found


def alone(steps: list[Any]) -> list[torch.Tensor]:
    """One process over the samples of these steps: the parameters."""
    from pyps.worker.data.sampling import permutation

    model, every = network(0), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    for epoch, position, _, samples, _ in steps:
        rows = torch.tensor(permutation(0, epoch, SAMPLES).copy())[position : position + samples]
        optimizer.zero_grad()
        mse(model(every.tensors[0][rows]), every.tensors[1][rows]).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]
