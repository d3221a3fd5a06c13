"""Define what the ranks of the rebalancing tests do: train, each at its emulated speed, while the split
follows.

The Rebalancer gets the emulated seconds in the place of a clock's: no decision depends on what the cores do.
"""

from __future__ import annotations

import time
import warnings
from typing import Any
from unittest import mock

import msgspec
import torch
import torch.distributed as dist
from ddp_jobs import net, square
from device import DEVICE
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from pyps.errors import Infeasible, InputError
from pyps.formats import Device, ModelInfo, Point, Profile
from pyps.solver import Line
from pyps.solver.online.decide import best_split, round_seconds
from pyps.torch import (
    Moves,
    Rebalancer,
    UnevenBatchSampler,
    UnevenIterableDataset,
    UnevenSyncBatchNorm,
    agreed_split,
    weighted_hook,
    weighting,
)
from pyps.torch.consensus import Consensus
from pyps.torch.waiting import ComputeTimer

BATCH, FIXED, EACH = 64, 0.004, 0.0009  # seconds of the fastest device


def pace(speed: float, slowed: bool, times: float = 2.0) -> Line:
    factor = speed * (times if slowed else 1.0)
    return Line(FIXED * factor, EACH * factor)


def profile_of(cost: Line) -> Profile:
    points = [Point(batch=b, seconds=cost.seconds(b)) for b in (4, 16, 48)]
    return Profile(device=Device(name="emulated"), model=ModelInfo(name="net"), points=points)


def best_seconds(speeds: tuple[float, ...], slowed: bool) -> float:
    costs = [pace(speed, slowed and k == 0) for k, speed in enumerate(speeds)]
    return round_seconds(costs, best_split(BATCH, costs, [1] * len(costs), [BATCH] * len(costs)))


class EmulatedTimer:
    """A ComputeTimer of steps that take what an emulated device takes."""

    def __init__(self, cost: Line) -> None:
        self.cost = cost
        self._finished: list[tuple[int | None, float]] = []

    def start(self) -> None:
        pass

    def finish(self, batch: int | None) -> None:
        self._finished.append((batch, self.cost.seconds(batch or 0)))

    def finished(self) -> list[tuple[int | None, float]]:
        finished, self._finished = self._finished, []
        return finished


def in_list(rows: list[int]) -> list[torch.Tensor]:
    return [torch.tensor(rows)]


def balanced(
    group: dist.ProcessGroup,
    speeds: tuple[float, ...],
    slow: range,
    steps: int,
    loaders: int,
    profiled: bool,
    streamed: bool,
    times: float = 2.0,
) -> dict[str, Any]:
    """One epoch, in equal batches at first or as profiled; rank 0 takes `times` as long in the slow steps."""
    rank = dist.get_rank(group)
    length = BATCH * steps + 20
    cost = pace(speeds[rank], False)
    profile = profile_of(cost) if profiled else None
    split = agreed_split(BATCH, profile, group=group)
    sampler: Any
    if streamed:
        sampler = UnevenIterableDataset(range(length), split, rank, collate=in_list)
        loader = DataLoader(sampler, batch_size=None, num_workers=loaders)
    else:
        sampler = UnevenBatchSampler(length, split, rank)
        loader = DataLoader(TensorDataset(torch.arange(length)), batch_sampler=sampler, num_workers=loaders)
    ddp = DistributedDataParallel(net(), process_group=group)
    hook = weighted_hook(ddp)
    balance = Rebalancer(sampler, hook, profile)
    timer = balance.timer = EmulatedTimer(cost)  # type: ignore[assignment]
    seen, seconds, splits = [], [], []
    for step, (rows,) in enumerate(loader):
        seen += rows.tolist()
        timer.cost = pace(speeds[rank], rank == 0 and step in slow, times)
        splits.append(len(rows))
        inputs = rows[:, None].float().expand(-1, 8).to(DEVICE) / length
        square(ddp, inputs, inputs[:, :4]).backward()
        seconds.append(timer.cost.seconds(len(rows)))
        balance.step()
    every: list[Any] = [None] * len(speeds)
    dist.all_gather_object(every, splits, group=group)
    return {
        "history": [str(change) for change in balance.history],
        "splits": list(zip(*every, strict=True))[:steps],
        "seen": seen,
        "length": length,
        "seconds": seconds[:steps],
        "scalars": balance.scalars(),
        "report": balance.report(),
    }


def timed(
    group: dist.ProcessGroup, slow_seconds: float, steps: int, normed: bool, meets: bool = False
) -> list[float]:
    """Return what the timer gives for each step; rank 0 is slow before its last gradient. normed: the
    others wait for it within their passes, too. meets: and in a sum after the step, for which rank 0 is
    late.
    """
    norm = UnevenSyncBatchNorm.convert(nn.BatchNorm1d(4), group) if normed else nn.Identity()
    ddp = DistributedDataParallel(nn.Sequential(net(), norm).to(DEVICE), process_group=group)
    hook = weighted_hook(ddp)
    timer, inputs = ComputeTimer(hook), torch.ones(2, 8, device=DEVICE)
    for step in range(steps):
        timer.start()
        if meets:
            time.sleep(slow_seconds if dist.get_rank(group) == 0 else 0.0)
            dist.all_reduce(torch.ones(1, device=DEVICE), group=group)
        loss = square(ddp, inputs, inputs[:, :4])
        time.sleep(slow_seconds if dist.get_rank(group) == 0 else 0.0)
        loss.backward()
        timer.finish(step)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    finished = timer.finished()
    assert [step for step, _ in finished] == list(range(steps))
    assert timer.finished() == []
    return [seconds for _, seconds in finished]


def timed_gan(group: dist.ProcessGroup, slow_seconds: float, steps: int, meets: bool) -> list[float]:
    """The same for a GAN's step, whose two reductions rank 0 is late for. meets: and for a sum in between."""
    makes, judges = (
        DistributedDataParallel(model.to(DEVICE), process_group=group)
        for model in (nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
    )
    timer = ComputeTimer(weighted_hook(makes))
    weighted_hook(judges)
    late = slow_seconds / 2 if dist.get_rank(group) == 0 else 0.0
    for step in range(steps):
        timer.start()
        made = makes(torch.ones(2, 4, device=DEVICE))
        time.sleep(late)
        loss = judges(torch.ones(2, 8, device=DEVICE)).mean() - judges(made.detach()).mean()
        loss.backward()
        if meets:
            time.sleep(late)
            dist.all_reduce(torch.ones(1, device=DEVICE), group=group)
        fools = judges(made).mean()
        time.sleep(late)
        fools.backward()
        timer.finish(step)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return [seconds for _, seconds in timer.finished()]


def balanced_gan(group: dist.ProcessGroup, speeds: list[float], steps: int, of: int) -> dict[str, Any]:
    """A GAN's loop with two optimizers. of: whose hook the Rebalancer has: 1 for the critic's."""
    rank = dist.get_rank(group)
    makes, judges = (
        DistributedDataParallel(model.to(DEVICE), process_group=group)
        for model in (nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
    )
    hooks = [weighted_hook(model) for model in (makes, judges)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (makes, judges)]
    sampler = UnevenBatchSampler(BATCH * steps, [BATCH // 2] * 2, rank)
    balance = Rebalancer(sampler, hooks[of])
    balance.timer = EmulatedTimer(pace(speeds[rank], False))  # type: ignore[assignment]
    seen: list[int] = []
    for rows in sampler:
        seen += rows
        made = makes(torch.ones(len(rows), 4, device=DEVICE))
        real = torch.ones(len(rows), 8, device=DEVICE)
        for optimizer, loss in (
            (optimizers[1], lambda r=real, m=made: judges(r).mean() - judges(m.detach()).mean()),
            (optimizers[0], lambda m=made: judges(m).mean()),
        ):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
        balance.step()
    return {
        "seen": seen,
        "split": list(sampler.split),
        "changes": len(balance.history),
        "trained": sampler.trained,
    }


def store_is_gone(group: dist.ProcessGroup) -> list[str]:
    """Return what a step says whose decision cannot be read, and the next step."""

    def gone(*_: Any) -> Any:
        raise dist.DistNetworkError("Connection reset by peer")

    sampler = UnevenBatchSampler(64, [5, 3], dist.get_rank(group))
    ddp = DistributedDataParallel(net(), process_group=group)
    balance = Rebalancer(sampler, weighted_hook(ddp), moves=Moves(window=3))
    said = []
    with mock.patch.object(Consensus, "decision", gone):
        for rows in sampler:
            inputs = torch.tensor(rows, device=DEVICE)[:, None].float().expand(-1, 8)
            square(ddp, inputs, inputs[:, :4]).backward()
            balance.step()
            if balance.steps == 5:  # two of warming up, and a window; its decision is read two steps later
                said.append("")
                break
        try:
            balance.step()
        except dist.DistNetworkError as error:
            said.append(str(error))
    return said


def warned(group: dist.ProcessGroup, converts: bool) -> list[str]:
    """Return what weighted_hook warns of, for a model with BatchNorm."""
    model: nn.Module = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)).to(DEVICE)
    if converts:
        model = UnevenSyncBatchNorm.convert(model, group)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        weighted_hook(DistributedDataParallel(model, process_group=group))
    return [str(warning.message) for warning in found if "BatchNorm" in str(warning.message)]


def unlike_profile(group: dist.ProcessGroup, more: int | None) -> list[str]:
    """Return what a Rebalancer warns of, whose profile is of a model with so many more parameters; None:
    unknown.
    """
    model = net()
    own = sum(parameter.numel() for parameter in model.parameters())
    known = ModelInfo(name="other", parameters=None if more is None else own + more)
    sampler = UnevenBatchSampler(96, (4, 4), dist.get_rank(group))
    hook = weighted_hook(DistributedDataParallel(model, process_group=group))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        Rebalancer(sampler, hook, msgspec.structs.replace(profile_of(pace(1.0, False)), model=known))
    return [str(one.message) for one in found]


def forgets(group: dist.ProcessGroup, weighs: bool, balances: bool, split: list[int]) -> list[str]:
    """The warnings of two epochs in a loop that does not call what it should."""
    weighting._weighted = False
    sampler = UnevenBatchSampler(sum(split) * 12, split, dist.get_rank(group))
    ddp = DistributedDataParallel(net(), process_group=group)
    if balances:
        Rebalancer(sampler, weighted_hook(ddp))
    elif weighs:
        weighted_hook(ddp)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            for rows in sampler:
                inputs = torch.tensor(rows, device=DEVICE)[:, None].float().expand(-1, 8)
                square(ddp, inputs, inputs[:, :4]).backward()
    return [str(one.message) for one in seen]


def agreed(group: dist.ProcessGroup, total: int, profiles: list[Any], caps: list[int | None]) -> Any:
    """Return what agreed_split gives, or says."""
    rank = dist.get_rank(group)
    try:
        return agreed_split(total, profiles[rank], max_batch=caps[rank], group=group)
    except (InputError, Infeasible) as error:
        return f"{type(error).__name__}: {error}"


class TimerOfTwo(EmulatedTimer):
    """Of steps of two rounds."""

    def finish(self, batch: int | None) -> None:
        self._finished.append((batch, 2 * self.cost.seconds(batch or 0)))


def accumulated_by_hand(group: dist.ProcessGroup, speeds: list[float], steps: int) -> dict[str, Any]:
    """A loop of the script's own that takes two rounds a step: samples by rank and round, and the changes."""
    rank = dist.get_rank(group)
    sampler = UnevenBatchSampler(BATCH * 2 * steps, [BATCH // 2] * 2, rank)
    ddp = DistributedDataParallel(net(), process_group=group)
    balance = Rebalancer(sampler, weighted_hook(ddp, sampler))
    balance.timer = TimerOfTwo(pace(speeds[rank], False))  # type: ignore[assignment]
    seen: list[list[int]] = []
    for number, rows in enumerate(sampler, 1):
        inputs = torch.tensor(rows)[:, None].float().expand(-1, 8).to(DEVICE) / len(sampler)
        seen.append(rows)
        if number % 2:
            with ddp.no_sync():
                (square(ddp, inputs, inputs[:, :4]) / 2).backward()
        else:
            (square(ddp, inputs, inputs[:, :4]) / 2).backward()
            balance.step()
    return {"seen": seen, "split": sampler.split, "changes": len(balance.history), "trained": sampler.trained}
