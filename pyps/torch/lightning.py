"""UnevenStrategy: Lightning's Trainer and Fabric with a batch for each rank, and the gradient of one process.

    trainer = lightning.Trainer(strategy=UnevenStrategy(), ...)            # was strategy="ddp"
    fabric = lightning.Fabric(strategy=UnevenFabricStrategy(), ...)        # the same

The global batch is as under "ddp": the loader's batch size times ranks times accumulate_grad_batches. The
training loader gets uneven batches, the model weighted_hook, and each optimizer step ends with the
Rebalancer's. Validation loaders stay even.

Lightning divides each loss by accumulate_grad_batches. That is taken back, because the hook weights
micro-batches itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Literal

from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from pyps.errors import InputError
from pyps.formats import Profile
from pyps.torch.adapter import UnevenRun, is_shuffled, uneven_loader
from pyps.torch.hook import weighted_hook
from pyps.torch.sampler import UnevenBatchSampler
from pyps.torch.schedule import PlanLike

KEY = "pyps"  # in a checkpoint


class UnevenStrategy(DDPStrategy):  # type: ignore[misc]
    """Lightning's DDPStrategy on unlike devices.

    plan: a pyps.plan/1 file, a Plan, or the batches by rank; by default equal batches, or the best ones if
        each rank has a profile.
    profile, max_batch: of this rank's device, as in agreed_split and Rebalancer.
    rebalance: whether the split follows the devices' speed while training.
    count: computes a micro-batch's weight from (batch, number), what training_step gets; by default its rows.
    reduction: whether a loss is the mean over these, or their sum.
    All other arguments are DDPStrategy's. `run` has the sampler, the hook and the Rebalancer while it trains.
    """

    def __init__(
        self,
        *arguments: Any,
        plan: PlanLike | None = None,
        profile: Profile | str | os.PathLike[str] | None = None,
        max_batch: int | None = None,
        rebalance: bool = True,
        count: Callable[..., Any] | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.run = UnevenRun(profile, max_batch, rebalance, plan=plan)
        self._hooked: dict[str, Any] = {"count": count, "reduction": reduction}
        self._loaded: dict[str, Any] = {}

    def configure_ddp(self) -> None:
        super().configure_ddp()
        scaler = getattr(self.precision_plugin, "scaler", None)
        if self.run.hook is not None:  # fit() again
            run = self.run
            self.run = UnevenRun(run.profile, run.max_batch, run.rebalance, plan=run.plan)
        hook = weighted_hook(self.model, **self._hooked, scaler=scaler)
        self.run.weight(hook, managed=self._parts() > 1)
        self.run.connect()

    def process_dataloader(self, dataloader: Any) -> Any:
        """The training loader with uneven batches; any other as it is."""
        found = super().process_dataloader(dataloader)
        if self.run.hook is None or not isinstance(found, DataLoader) or not _is_shuffled(found):
            return found
        loader = _uneven(found, self._parts(), self.run, self.world_size)
        self.run.load_state_dict(self._loaded)
        if self._loaded:
            self.run.read_past(self._loaded["trained"])
        self.run.connect()
        return loader

    def backward(self, closure_loss: Any, *arguments: Any, **options: Any) -> Any:
        self.run.check_plan()
        if self.run.sampler is not None and self.run.sampler.accumulation != self._parts():
            found, expected = f"{self._parts()}", f"{self.run.sampler.accumulation}, as at the beginning"
            raise InputError("UnevenStrategy", "accumulate_grad_batches", found, expected)
        return super().backward(closure_loss * self._parts(), *arguments, **options)

    def optimizer_step(self, *arguments: Any, **options: Any) -> Any:
        found = super().optimizer_step(*arguments, **options)
        if arguments[0] is self.optimizers[0]:  # a GAN's second one is of the same round
            self.run.stepped()
        return found

    def save_checkpoint(self, checkpoint: dict[str, Any], *arguments: Any, **options: Any) -> None:
        if self.run.sampler is not None:
            trained = self._trainer().fit_loop.epoch_loop.batch_progress.current.ready // self._parts()
            checkpoint[KEY] = self.run.state_dict() | {"trained": trained}
        super().save_checkpoint(checkpoint, *arguments, **options)

    def load_checkpoint(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        found: dict[str, Any] = super().load_checkpoint(*arguments, **options)
        self._loaded = found.get(KEY, {})
        return found

    def _trainer(self) -> Any:
        return self.lightning_module.trainer

    def _parts(self) -> int:
        return int(self._trainer().accumulate_grad_batches)


class UnevenFabricStrategy(FabricDDPStrategy):  # type: ignore[misc]
    """Fabric's DDPStrategy on unlike devices.

    accumulate: micro-batches of a round, all but the last in fabric.no_backward_sync(). Each loss is the
        plain mean over its micro-batch, not divided by their number.
    All other arguments are UnevenStrategy's, and DDPStrategy's. `run.state_dict()`, called by all ranks, is
    for a checkpoint, and `run.load_state_dict()` and `run.skip(rounds)` for a resume.
    """

    def __init__(
        self,
        *arguments: Any,
        accumulate: int = 1,
        plan: PlanLike | None = None,
        profile: Profile | str | os.PathLike[str] | None = None,
        max_batch: int | None = None,
        rebalance: bool = True,
        count: Callable[..., Any] | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.run = UnevenRun(profile, max_batch, rebalance, counts_anew=True, plan=plan)
        self._accumulate = accumulate
        self._hooked: dict[str, Any] = {"count": count, "reduction": reduction}

    def setup_module(self, module: Any) -> Any:
        """A module in DDP with a hook; the first one's rounds are the run's."""
        ddp = super().setup_module(module)
        self.run.weight(weighted_hook(ddp, **self._hooked), managed=self._accumulate > 1)
        self.run.connect()
        return ddp

    def process_dataloader(self, dataloader: Any) -> Any:
        """The training loader with uneven batches; any other as it is."""
        found = super().process_dataloader(dataloader)
        if not isinstance(found, DataLoader) or not _is_shuffled(found):
            return found
        loader = _uneven(found, self._accumulate, self.run, self.world_size)
        self.run.connect()
        return loader

    def backward(self, *arguments: Any, **options: Any) -> Any:
        self.run.check_plan()
        return super().backward(*arguments, **options)

    def optimizer_step(self, *arguments: Any, **options: Any) -> Any:
        found = super().optimizer_step(*arguments, **options)
        self.run.stepped()
        return found


def _uneven(loader: DataLoader[Any], parts: int, run: UnevenRun, ranks: int) -> DataLoader[Any]:
    """The loader, whose batch size is that of one rank's micro-batch, with uneven batches."""
    total = (loader.batch_size or 0) * ranks * parts
    drop_last = bool(getattr(loader.batch_sampler, "drop_last", False))
    return uneven_loader(loader, parts, run, total=total or None, drop_last=drop_last)


def _is_shuffled(loader: DataLoader[Any]) -> bool:
    """Whether it is a loader for training: Lightning has given it a shuffling sampler, or it had one."""
    sampler: Any = loader.sampler
    if isinstance(loader.batch_sampler, UnevenBatchSampler) or is_shuffled(sampler):
        return True
    # Its subclass wraps a sampler of the script's own.
    return type(sampler) is DistributedSampler and bool(sampler.shuffle)
