"""Define what ranks do in the tests of a run's position: each function runs on all ranks of a group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from pyps.errors import InputError
from pyps.torch import GlobalMean, UnevenBatchSampler, UnevenIterableDataset, load, save

SAMPLES, SPLIT = 40, [5, 3]  # five rounds of eight


class Rows(Dataset[tuple[int, torch.Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, k: int) -> tuple[int, torch.Tensor]:
        return k, torch.full((2,), float(k), dtype=torch.float64)


class Run:
    """A model, a sampler and a loop whose steps end as the kind of optimizer says."""

    def __init__(self, group: dist.ProcessGroup, workers: int, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(nn.Linear(2, 1).double(), process_group=group)
        self.sampler = UnevenBatchSampler(Rows(), SPLIT, group.rank(), **options)
        self.loader = DataLoader(Rows(), batch_sampler=self.sampler, num_workers=workers)
        self.mean, self.group = GlobalMean(self.model, self.sampler, timeout=20.0), group
        self.seen: list[int] = []

    def backward(self, x: torch.Tensor) -> None:
        self.mean.backward(self.model(x * 0.01).square().mean())

    def epoch(self, backwards: int = 1, stops_at: int | None = None) -> bool:
        """The rest of an epoch; stops_at: the steps after which it stops, as if it were killed."""
        for number, (rows, x) in enumerate(self.loader, 1):
            for _ in range(backwards):
                self.backward(x)
            self.mean.end_step()
            self.seen += rows.tolist()
            if number == stops_at:
                return False
        return True


def everywhere(run: Run) -> list[int]:
    every: list[Any] = [None] * run.group.size()
    dist.all_gather_object(every, run.seen, group=run.group)
    return sorted(k for one in every for k in one)


def resumed(group: dist.ProcessGroup, folder: str, workers: int, backwards: int, peeks: bool) -> list[int]:
    """An epoch that is stopped after two of five steps, saved and resumed: the samples of both."""
    first = Run(group, workers)
    first.epoch(backwards, stops_at=2)
    save(folder, first.model, None, first.sampler, mean=first.mean, group=group)
    second = Run(group, workers)
    load(folder, second.model, None, second.sampler, mean=second.mean, group=group)
    if peeks and group.rank() == 0:
        next(iter(second.loader))  # on one rank alone, too
    second.epoch(backwards)
    first.seen += second.seen
    assert (second.sampler.epoch, second.sampler.position) == (1, 0)
    return everywhere(first)


def readers(group: dist.ProcessGroup, workers: int) -> dict[str, Any]:
    """Loops beside the one in training: an evaluation in mid-epoch, and one that is only begun."""
    run = Run(group, workers)
    evaluated: list[int] = []
    for number, (rows, x) in enumerate(run.loader):
        run.backward(x)
        run.mean.end_step()
        run.seen += rows.tolist()
        if number == 1:
            evaluated = [k for some, _ in run.loader for k in some.tolist()]
            held = iter(run.loader)
            next(held)
        if number == 2:
            assert run.sampler.state_dict()["position"] == 24
    first = everywhere(run)
    run.seen = evaluated
    whole = everywhere(run)
    run.seen = []
    run.epoch()
    second = everywhere(run)
    run.seen = []
    for _, x in run.loader:
        run.backward(x)
        run.mean.end_step()
        break
    run.epoch()  # after a loop that was left: the next epoch
    return {"first": first, "evaluated": whole, "second": second, "epoch": run.sampler.epoch}


def odd(group: dist.ProcessGroup, what: str, folder: str) -> str:
    """Return what all ranks hear where the first one does something alone."""
    run = Run(group, 0)
    batches = iter(run.loader)
    first = group.rank() == 0
    try:
        for _ in range(2):  # in the second step DDP makes its buckets anew
            _, x = next(batches)
            run.backward(x)
            run.mean.end_step()
        if first and what == "a batch":
            next(batches)
        if first and what == "set_epoch":
            run.sampler.set_epoch(3)
            batches = iter(run.loader)
        if first and what == "seed":
            run.sampler.seed = 7
        if first and what == "replan":
            run.sampler.replan([4, 4])
        if first and what == "load":
            run.sampler.load_state_dict({**run.sampler.state_dict(), "position": 32})
            batches = iter(run.loader)
        if first and what == "end_step":
            run.sampler.end_step(rounds=1)
        if first and what == "save":
            save(folder, run.model, None, run.sampler, mean=run.mean, group=group)
        _, x = next(batches)
        run.backward(x)
    except InputError as error:
        return str(error)
    return "nothing"


class Stream(torch.utils.data.IterableDataset[Any]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        return iter([(k, torch.full((2,), float(k), dtype=torch.float64)) for k in range(self.length)])


def stream(group: dist.ProcessGroup, workers: int, shorter: bool) -> Any:
    """Two epochs of a stream with a look into a second loop; or a stream that is shorter on one rank."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(2, 1).double(), process_group=group)
    data = UnevenIterableDataset(Stream(SAMPLES - 3 * (shorter and group.rank())), SPLIT, group.rank())
    loader = DataLoader(data, batch_size=None, num_workers=workers)
    mean, positions = GlobalMean(model, data, timeout=20.0), []
    try:
        for epoch in range(2):
            data.set_epoch(epoch)
            for number, (_, x) in enumerate(loader):
                if number == 1 and not shorter:
                    next(iter(loader))
                mean.backward(model(x * 0.01).square().mean())
                mean.end_step()
                positions.append((data.state_dict()["epoch"], data.state_dict()["position"]))
    except InputError as error:
        return str(error)
    return positions


def gan(group: dist.ProcessGroup) -> list[int]:
    """Two models on one sampler, each with its own GlobalMean."""
    run = Run(group, 2)
    other = DistributedDataParallel(nn.Linear(1, 1).double(), process_group=group)
    judge = GlobalMean(other, run.sampler, timeout=20.0)
    for rows, x in run.loader:
        judge.backward(other(run.model(x * 0.01).detach()).square().mean())
        run.mean.backward(other(run.model(x * 0.01)).square().mean())
        run.mean.end_step()
        run.seen += rows.tolist()
    assert run.sampler.epoch == 1
    return everywhere(run)


def lbfgs(group: dist.ProcessGroup) -> list[int]:
    """An optimizer that calls its closure as often as it likes."""
    run = Run(group, 2)
    optimizer = torch.optim.LBFGS(run.model.parameters(), max_iter=3)
    for rows, x in run.loader:

        def closure(x: torch.Tensor = x) -> Any:
            optimizer.zero_grad()
            run.backward(x)
            return run.mean.loss

        optimizer.step(closure)
        run.mean.end_step()
        run.seen += rows.tolist()
    return everywhere(run)
