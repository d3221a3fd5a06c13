"""Define the jobs of the rebalancing tests: train, each at its emulated speed, while the split follows.

The Rebalancer gets the emulated seconds in the place of a clock's: no decision depends on what the cores do.
"""

from __future__ import annotations

import time
import warnings
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ddp_tools import net, square
from device import DEVICE
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from pyps.agreement.consensus import Consensus
from pyps.errors import Infeasible, InputError
from pyps.formats import Device, ModelInfo, Point, Profile
from pyps.solver import Line
from pyps.solver.online.decide import Bounds, best_split, round_seconds
from pyps.torch import (
    GlobalMean,
    Moves,
    Rebalancer,
    UnevenBatchSampler,
    UnevenIterableDataset,
    UnevenSyncBatchNorm,
    agreed_split,
    rounds,
)
from pyps.torch.compute_timer import ComputeTimer

BATCH, FIXED, EACH = 64, 0.004, 0.0009  # seconds of the fastest device


def pace(speed: float, slowed: bool, times: float = 2.0) -> Line:
    factor = speed * (times if slowed else 1.0)
    return Line(FIXED * factor, EACH * factor)


def profile_of(cost: Line) -> Profile:
    points = [Point(batch=b, seconds=cost.seconds(b)) for b in (4, 16, 48)]
    return Profile(device=Device(name="emulated"), model=ModelInfo(name="net"), points=points)


def best_seconds(speeds: tuple[float, ...], slowed: bool) -> float:
    costs = [pace(speed, slowed and k == 0) for k, speed in enumerate(speeds)]
    return round_seconds(costs, best_split(BATCH, costs, [Bounds(most=BATCH, required=True)] * len(costs)))


class EmulatedTimer:
    """A ComputeTimer of steps that take what an emulated device takes."""

    def __init__(self, cost: Line) -> None:
        self.cost = cost
        self._finished: list[tuple[tuple[int, float] | None, float]] = []

    def start(self) -> None:
        pass

    def finish(self, trained: tuple[int, float] | None) -> None:
        self._finished.append((trained, self.cost.seconds(trained[0] if trained else 0)))

    def finished(self) -> list[tuple[tuple[int, float] | None, float]]:
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
    mean = GlobalMean(ddp, sampler)
    balance = Rebalancer(sampler, mean, profile)
    timer = balance.timer = EmulatedTimer(cost)  # type: ignore[assignment]
    seen, seconds, splits = [], [], []
    for step, (rows,) in enumerate(loader):
        seen += rows.tolist()
        timer.cost = pace(speeds[rank], rank == 0 and step in slow, times)
        splits.append(len(rows))
        inputs = rows[:, None].float().expand(-1, 8).to(DEVICE) / length
        mean.backward(square(ddp, inputs, inputs[:, :4]))
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
    """Return the timer's time of each step; rank 0 is slow before its last gradient. normed: the others wait
    for it within their passes, too. meets: and in a sum after the step, for which rank 0 is late.
    """
    norm = UnevenSyncBatchNorm.convert(nn.BatchNorm1d(4), group) if normed else nn.Identity()
    ddp = DistributedDataParallel(nn.Sequential(net(), norm).to(DEVICE), process_group=group)
    mean = GlobalMean(ddp)
    timer, inputs = ComputeTimer(mean), torch.ones(2, 8, device=DEVICE)
    for step in range(steps):
        timer.start()
        if meets:
            time.sleep(slow_seconds if dist.get_rank(group) == 0 else 0.0)
            dist.all_reduce(torch.ones(1, device=DEVICE), group=group)
        loss = square(ddp, inputs, inputs[:, :4])
        time.sleep(slow_seconds if dist.get_rank(group) == 0 else 0.0)
        mean.backward(loss)
        timer.finish(step)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    finished = timer.finished()
    assert [step for step, _ in finished] == list(range(steps))
    assert timer.finished() == []
    return [seconds for _, seconds in finished]


class SlowData(torch.utils.data.Dataset[torch.Tensor]):
    """Samples, of which a batch takes so many seconds to load."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 240

    def __getitems__(self, rows: list[int]) -> list[torch.Tensor]:
        time.sleep(self.seconds)
        return [torch.full((8,), float(row)) for row in rows]


def timed_loading(group: dist.ProcessGroup, seconds: float, workers: int, every: int) -> list[float]:
    """Return the timer's time of each step; rank 0's data is slow. Ranks meet in DDP's broadcast of buffers,
    and in the sum of a logged loss after every so many steps.
    """
    rank = dist.get_rank(group)
    model = nn.Sequential(net(), nn.BatchNorm1d(4)).to(DEVICE)
    ddp = DistributedDataParallel(model, process_group=group)
    sampler = UnevenBatchSampler(240, [6, 4], rank)
    mean = GlobalMean(ddp, sampler)
    data = SlowData(seconds if rank == 0 else 0.0)
    loader = DataLoader(
        data, batch_sampler=sampler, num_workers=workers, prefetch_factor=1 if workers else None
    )
    timer = ComputeTimer(mean)
    for step, inputs in enumerate(loader):
        loss = square(ddp, inputs.to(DEVICE), inputs[:, :4].to(DEVICE) / 240)
        mean.backward(loss)
        mean.end_step()
        timer.finish(step)
        timer.start()
        if step % every == every - 1:
            dist.all_reduce(loss.detach().clone(), group=group)
        if step == 13:
            break
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return [took for step, took in timer.finished() if step > 3]


class Emulated(nn.Module):
    """A layer on a device that takes so many seconds for each sample; its buffer is sent by DDP's forward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.inner, self._seconds = nn.Linear(8, 4), seconds
        self.register_buffer("mask", torch.ones(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(self._seconds * len(inputs))
        found: torch.Tensor = self.inner(inputs) * self.mask
        return found


def followed(
    group: dist.ProcessGroup, split: list[int], best: list[int], round_seconds: float, logs: int
) -> list[int]:
    """The last split of a run towards the one in which all ranks take as long; its Rebalancer's state goes
    through torch's checkpoint into an earlier one.

    logs: after how many steps a loss is summed over the ranks.
    """
    rank = group.rank()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Emulated(round_seconds / best[rank]), process_group=group)
    sampler = UnevenBatchSampler(40 * sum(split), split, rank)
    mean = GlobalMean(ddp, sampler)
    balance = Rebalancer(sampler, mean)
    state = {"balance": balance.state_dict()}
    for step, rows in enumerate(DataLoader(range(40 * sum(split)), batch_sampler=sampler)):  # type: ignore[arg-type]
        loss = ddp(torch.ones(len(rows), 8)).square().mean()
        mean.backward(loss)
        balance.step()
        if step % logs == logs - 1:
            dist.all_reduce(loss.detach().clone(), group=group)
    changes = list(balance.history)
    with TemporaryDirectory() as folder:
        dcp.save({"balance": balance.state_dict()}, checkpoint_id=folder, no_dist=True)
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    balance.load_state_dict(state["balance"])
    assert balance.history == changes
    return list(sampler.split)


def timed_gan(group: dist.ProcessGroup, slow_seconds: float, steps: int, meets: bool) -> list[float]:
    """The same for a GAN's step, whose two reductions rank 0 is late for. meets: and for a sum in between."""
    makes, judges = (
        DistributedDataParallel(model.to(DEVICE), process_group=group)
        for model in (nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
    )
    mean = GlobalMean([makes, judges])
    timer = ComputeTimer(mean)
    late = slow_seconds / 2 if dist.get_rank(group) == 0 else 0.0
    for step in range(steps):
        timer.start()
        made = makes(torch.ones(2, 4, device=DEVICE))
        time.sleep(late)
        loss = judges(torch.ones(2, 8, device=DEVICE)).mean() - judges(made.detach()).mean()
        mean.backward(loss)
        if meets:
            time.sleep(late)
            dist.all_reduce(torch.ones(1, device=DEVICE), group=group)
        fools = judges(made).mean()
        time.sleep(late)
        mean.backward(fools)
        timer.finish(step)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return [seconds for _, seconds in timer.finished()]


def balanced_gan(group: dist.ProcessGroup, speeds: list[float], steps: int, of: int) -> dict[str, Any]:
    """A GAN's loop with two optimizers. of: whose GlobalMean the Rebalancer has: 1 for the critic's."""
    rank = dist.get_rank(group)
    makes, judges = (
        DistributedDataParallel(model.to(DEVICE), process_group=group)
        for model in (nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
    )
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (makes, judges)]
    sampler = UnevenBatchSampler(BATCH * steps, [BATCH // 2] * 2, rank)
    means = [GlobalMean(model, sampler) for model in (makes, judges)]
    balance = Rebalancer(sampler, means[of])
    balance.timer = EmulatedTimer(pace(speeds[rank], False))  # type: ignore[assignment]
    seen: list[int] = []
    for rows in sampler:
        seen += rows
        made = makes(torch.ones(len(rows), 4, device=DEVICE))
        real = torch.ones(len(rows), 8, device=DEVICE)
        for k, loss in (
            (1, lambda r=real, m=made: judges(r).mean() - judges(m.detach()).mean()),
            (0, lambda m=made: judges(m).mean()),
        ):
            optimizers[k].zero_grad()
            means[k].backward(loss())
            optimizers[k].step()
        balance.step()
    return {
        "seen": seen,
        "split": list(sampler.split),
        "changes": len(balance.history),
        "epoch": sampler.epoch,
    }


def store_is_gone(group: dist.ProcessGroup) -> list[str]:
    """Return what a step says whose decision cannot be read, and the next step."""

    def gone(*_: Any) -> Any:
        raise dist.DistNetworkError("Connection reset by peer")

    sampler = UnevenBatchSampler(64, [5, 3], dist.get_rank(group))
    ddp = DistributedDataParallel(net(), process_group=group)
    mean = GlobalMean(ddp, sampler)
    balance = Rebalancer(sampler, mean, moves=Moves(window=3))
    said = []
    with mock.patch.object(Consensus, "decision", gone):
        for rows in sampler:
            inputs = torch.tensor(rows, device=DEVICE)[:, None].float().expand(-1, 8)
            mean.backward(square(ddp, inputs, inputs[:, :4]))
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
    """Return what GlobalMean warns of, for a model with BatchNorm."""
    model: nn.Module = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)).to(DEVICE)
    if converts:
        model = UnevenSyncBatchNorm.convert(model, group)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        GlobalMean(DistributedDataParallel(model, process_group=group))
    return [str(warning.message) for warning in found if "BatchNorm" in str(warning.message)]


def unlike_profile(group: dist.ProcessGroup, more: int | None) -> list[str]:
    """Return the warnings of a Rebalancer whose profile has so many more parameters; None: unknown."""
    model = net()
    own = sum(parameter.numel() for parameter in model.parameters())
    known = ModelInfo(name="other", parameters=None if more is None else own + more)
    sampler = UnevenBatchSampler(96, (4, 4), dist.get_rank(group))
    mean = GlobalMean(DistributedDataParallel(model, process_group=group))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        Rebalancer(sampler, mean, msgspec.structs.replace(profile_of(pace(1.0, False)), model=known))
    return [str(one.message) for one in found]


def forgets(group: dist.ProcessGroup, weighs: bool, split: list[int]) -> list[str]:
    """The warnings of two epochs in a loop that does not call what it should."""
    rounds._weighted = False
    sampler = UnevenBatchSampler(sum(split) * 12, split, dist.get_rank(group))
    ddp = DistributedDataParallel(net(), process_group=group)
    mean = GlobalMean(ddp) if weighs else None
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            for rows in sampler:
                inputs = torch.tensor(rows, device=DEVICE)[:, None].float().expand(-1, 8)
                loss = square(ddp, inputs, inputs[:, :4])
                if mean is None:
                    loss.backward()
                else:
                    mean.backward(loss)
    return [str(one.message) for one in seen]


def agreed(group: dist.ProcessGroup, total: int, profiles: list[Any], caps: list[int | None]) -> Any:
    """Return what agreed_split gives, or says."""
    rank = dist.get_rank(group)
    try:
        return agreed_split(total, profiles[rank], max_batch=caps[rank], group=group)
    except (InputError, Infeasible) as error:
        return f"{type(error).__name__}: {error}"


class TimerOfTwo(EmulatedTimer):
    """A timer of steps of two rounds."""

    def finish(self, trained: tuple[int, float] | None) -> None:
        self._finished.append((trained, 2 * self.cost.seconds(trained[0] if trained else 0)))


def accumulated_by_hand(group: dist.ProcessGroup, speeds: list[float], steps: int) -> dict[str, Any]:
    """A loop of the script's own that takes two rounds a step: samples by rank and round, and the changes."""
    rank = dist.get_rank(group)
    sampler = UnevenBatchSampler(BATCH * 2 * steps, [BATCH // 2] * 2, rank)
    ddp = DistributedDataParallel(net(), process_group=group)
    mean = GlobalMean(ddp, sampler)
    balance = Rebalancer(sampler, mean)
    balance.timer = TimerOfTwo(pace(speeds[rank], False))  # type: ignore[assignment]
    seen: list[list[int]] = []
    for number, rows in enumerate(sampler, 1):
        inputs = torch.tensor(rows)[:, None].float().expand(-1, 8).to(DEVICE) / len(sampler)
        seen.append(rows)
        if number % 2:
            with ddp.no_sync():
                mean.backward(square(ddp, inputs, inputs[:, :4]))
        else:
            mean.backward(square(ddp, inputs, inputs[:, :4]))
            balance.step()
    return {"seen": seen, "split": sampler.split, "changes": len(balance.history), "epoch": sampler.epoch}
