"""uneven: sampler, GlobalMean and Rebalancer of the common DDP loop, in one call.

    model, loader, step = uneven(model, dataset, 256, optimizer=optimizer)
    for epoch in range(10):
        for x, y in loader:
            optimizer.zero_grad()
            step.backward(loss(model(x), y))            # was loss(...).backward()
            step()                                      # was optimizer.step()

It is composed of what a script can also write out, in five lines: docs/how-to/train-ddp.md.
"""

from __future__ import annotations

import os
from collections.abc import Sized
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal
from weakref import WeakSet

import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from pyps.errors import InputError
from pyps.formats import LengthCost, Profile, read_profile
from pyps.sharding import shard_optimizer
from pyps.solver.lengths import SampleLengths
from pyps.torch.checkpoint import load, save
from pyps.torch.global_mean import GlobalMean
from pyps.torch.initial_split import agreed_split
from pyps.torch.rebalance import Rebalancer
from pyps.torch.sampler import UnevenBatchSampler
from pyps.torch.schedule import planned_bytes
from pyps.torch.wire import Wire
from pyps.torch.wrapped import BY_VIEWS

KNOWN = (bool, int, float, str, tuple, type(None))  # of an optimizer's constants: a tensor may be on a device
_stepping: WeakSet[torch.optim.Optimizer] = WeakSet()  # those that the end of a step calls now


class UnevenStep:
    """The backward pass of a step, and its end: the optimizer's, the sampler's and the Rebalancer's. From
    the first gradient on, other calls of the optimizer's step() raise InputError, unless its learning rates
    are 0.

    sampler, mean, balance: what uneven() has made, for all else that they can do.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        sampler: UnevenBatchSampler,
        mean: GlobalMean,
        balance: Rebalancer,
    ) -> None:
        self.sampler, self.mean, self.balance = sampler, mean, balance
        self._model, self._optimizer, self._has_stepped = model, optimizer, False
        mean.compared.append(self._rule)
        with suppress(AttributeError):  # a wrapper of an optimizer may have no hooks
            optimizer.register_step_pre_hook(self._check_caller)

    def backward(self, loss: torch.Tensor, n: Any = None, **options: Any) -> None:
        """Add the gradient, as GlobalMean.backward. Raises InputError, too, for batches of another loader."""
        if not self.sampler.is_read:
            expected = "a loop over the loader that uneven() returned, which gives each rank its batch"
            raise InputError("uneven", "loader", "a step without a batch of it", expected)
        self.mean.backward(loss, n, **options)

    @property
    def loss(self) -> torch.Tensor | None:
        """The loss of the step over all ranks' samples, as GlobalMean.loss."""
        return self.mean.loss

    def __call__(self) -> None:
        """End the step, on all ranks."""
        scaler = self.mean.scaler
        _stepping.add(self._optimizer)
        try:
            if scaler is None:
                self._optimizer.step()
            else:
                scaler.step(self._optimizer)
        finally:
            _stepping.discard(self._optimizer)
        if scaler is not None:
            scaler.update()
        self.balance.step()
        self._has_stepped = True

    def _check_caller(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer in _stepping or not (self.mean.calls or self._has_stepped):
            return
        rates = [group.get("lr", 1.0) for group in optimizer.param_groups]
        if any(float(rate) for rate in rates):  # torch.distributed.checkpoint makes a state with rates of 0
            raise InputError("optimizer", "step", "a call of optimizer.step()", "step() alone: it calls that")

    def _rule(self) -> dict[str, Any]:
        """Return what the optimizer has alike on all ranks, whose models would drift apart otherwise."""
        numbered = enumerate(self._optimizer.param_groups)
        found = ((name, k, value) for k, group in numbered for name, value in group.items())
        return {f"optimizer's {name} of group {k}": v for name, k, v in found if isinstance(v, KNOWN)}

    def save(self, folder: str | os.PathLike[str], **more: Any) -> Path:
        """Write a checkpoint of all that a run needs; more: as in pyps.torch.save. All ranks call it."""
        return save(folder, self._model, self._optimizer, self.sampler, **self._own(), **more)

    def load(self, folder: str | os.PathLike[str], **more: Any) -> dict[str, Any] | None:
        """Go on from the newest checkpoint, as pyps.torch.load; None if there is none yet."""
        return load(folder, self._model, self._optimizer, self.sampler, **self._own(), **more)

    def _own(self) -> dict[str, Any]:
        scaler = {} if self.mean.scaler is None else {"scaler": self.mean.scaler}
        return {"mean": self.mean, "balance": self.balance, **scaler}


def uneven(
    model: torch.nn.Module,
    dataset: Dataset[Any],
    global_batch: int,
    *,
    optimizer: torch.optim.Optimizer,
    shares: Any = None,
    profile: Profile | str | os.PathLike[str] | None = None,
    max_batch: int | None = None,
    lengths: npt.ArrayLike | None = None,
    seed: int = 0,
    drop_last: bool = False,
    reduction: Literal["mean", "sum"] = "mean",
    wire: Wire = "same",
    scaler: Any = None,
    **loading: Any,
) -> tuple[DistributedDataParallel, DataLoader[Any], UnevenStep]:
    """The model, its data and the end of a step, for ranks on unlike devices; all ranks call it.

    model: on this rank's device; it is put into DistributedDataParallel unless it is there.
    dataset: with a length; shuffled. Each loop over the loader is the next epoch, or the rest of one loaded.
    global_batch: the samples of a step, of all ranks together. optimizer: of the model's parameters.
    shares: of the optimizer's state that each rank holds, as in shard_optimizer; by default each has all.
    profile, max_batch: of this rank's device, as in agreed_split. seed, drop_last: as in UnevenBatchSampler.
    lengths: as there, with which max_batch counts tokens; each rank's profile may know what they cost.
    reduction, wire, scaler: as in GlobalMean. loading: of the DataLoader, such as num_workers and collate_fn.
    Raises InputError for a dataset without length, an optimizer of other parameters, a plan, and batch_size.
    """
    if not isinstance(dataset, Sized) or isinstance(dataset, DataLoader):
        expected = (
            "uneven(model, dataset, ...), a dataset with a length; UnevenIterableDataset is for streams"
        )
        raise InputError("uneven", "dataset", type(dataset).__name__, expected)
    if given := {"batch_size", "shuffle", "sampler", "batch_sampler"} & loading.keys():
        raise InputError("uneven", sorted(given)[0], "a value", "none: global_batch is of all ranks")
    if "plan" in loading:
        expected = "profile= of this rank's device; UnevenBatchSampler(dataset, plan) takes a plan"
        raise InputError("uneven", "plan", "a value", expected)
    ddp = model if isinstance(model, DistributedDataParallel) else DistributedDataParallel(model, **BY_VIEWS)
    _check_optimizer(ddp, optimizer)
    if shares is not None:
        shard_optimizer(optimizer, shares, ddp.process_group)
    known = None if lengths is None else SampleLengths(lengths, len(dataset))
    total = global_batch if known is None else global_batch * known.each
    split = agreed_split(total, profile, max_batch=max_batch, lengths=known)
    costs = None if known is None else _agreed_costs(profile)
    sampler = UnevenBatchSampler(dataset, split, seed=seed, drop_last=drop_last, lengths=lengths, cost=costs)
    sampler.planned_bytes = planned_bytes(shares)
    loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=sampler, **loading)
    mean = GlobalMean(ddp, sampler, reduction=reduction, wire=wire, scaler=scaler)
    balance = Rebalancer(sampler, mean, profile, max_batch=max_batch)
    return ddp, loader, UnevenStep(ddp, optimizer, sampler, mean, balance)


def _agreed_costs(profile: Profile | str | os.PathLike[str] | None) -> list[LengthCost | None]:
    """The cost of lengths on each rank, as the profiles say, which all ranks could read."""
    if profile is not None and not isinstance(profile, Profile):
        profile = read_profile(Path(profile))
    every: list[LengthCost | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, profile.lengths.cost if profile and profile.lengths else None)
    return every


def _check_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise InputError for one that would not move this model."""
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
        expected = "one of the model's parameters, made after .to(device)"
        raise InputError("uneven", "optimizer", "one of other parameters", expected)
