"""UnevenStrategy: Lightning's Trainer and Fabric with a batch for each rank, and the gradient of one process.

    trainer = lightning.Trainer(strategy=UnevenStrategy(), ...)            # was strategy="ddp"
    fabric = lightning.Fabric(strategy=UnevenFabricStrategy(), ...)        # the same

The global batch is as under "ddp": the loader's batch size times ranks times accumulate_grad_batches. The
training loader gets uneven batches, backward passes are weighed as GlobalMean's, and each optimizer step ends
with the Rebalancer's. Validation loaders stay even.
"""

from __future__ import annotations

from typing import Any

from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from pyps.errors import InputError
from pyps.torch.adapter import UnevenRun, is_shuffled, uneven_loader
from pyps.torch.sampler import UnevenBatchSampler
from pyps.torch.wrapped import BY_VIEWS

KEY = "pyps"  # in a checkpoint


class UnevenStrategy(DDPStrategy):  # type: ignore[misc]
    """Lightning's DDPStrategy on unlike devices.

    Takes the options of UnevenRun, and DDPStrategy's. `run` is the UnevenRun while it trains.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.run = UnevenRun(options, shares=options.pop("shares", None))
        super().__init__(*arguments, **BY_VIEWS | options)
        self._loaded: dict[str, Any] = {}

    def configure_ddp(self) -> None:
        super().configure_ddp()
        if self.run.models:  # fit() again
            self.run = self.run.again()
        self.run.add(self.model, getattr(self.precision_plugin, "scaler", None))

    def setup_optimizers(self, trainer: Any) -> None:
        """Lightning's optimizers, with this rank's share of their state."""
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            self.run.shard(optimizer)

    def process_dataloader(self, dataloader: Any) -> Any:
        """The training loader with uneven batches; any other as it is."""
        found = super().process_dataloader(dataloader)
        if not self.run.models or not isinstance(found, DataLoader) or not _is_shuffled(found):
            return found
        loader = _uneven(found, self._parts(), self.run, self.world_size)
        self.run.load_state_dict(self._loaded)
        if self._loaded and self.run.sampler is not None:
            self.run.sampler.read_past(self._loaded["trained"])
        self.run.connect()
        return loader

    def backward(self, closure_loss: Any, *arguments: Any, **options: Any) -> Any:
        parts, sampler = self._parts(), self.run.sampler
        if sampler is not None and sampler.accumulation != parts:
            expected = f"{sampler.accumulation}, as at the beginning"
            raise InputError("UnevenStrategy", "accumulate_grad_batches", f"{parts}", expected)
        run, found = super().backward, []
        self.run.backward(closure_loss, lambda loss: found.append(run(loss, *arguments, **options)), parts)
        return (
            found[0] if found else closure_loss.detach()
        )  # what a micro-batch refuses, the round's last raises

    def optimizer_step(self, *arguments: Any, **options: Any) -> Any:
        found = super().optimizer_step(*arguments, **options)
        if arguments[0] is self.optimizers[0]:  # a GAN's second one is of the same round
            self.run.stepped()
        return found

    def save_checkpoint(self, checkpoint: dict[str, Any], *arguments: Any, **options: Any) -> None:
        if self.run.sampler is not None:
            # Of the sampler's epoch: after an epoch's last step the next one, unlike Lightning's count.
            checkpoint[KEY] = self.run.state_dict() | {"trained": self.run.sampler.trained}
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
    Takes the options of UnevenRun, and DDPStrategy's. `run.state_dict()`, called by all ranks, is for a
    checkpoint, and `run.load_state_dict()` and `run.skip(rounds)` for a resume.
    """

    def __init__(self, *arguments: Any, accumulate: int = 1, **options: Any) -> None:
        self.run, self._accumulate = UnevenRun(options, counts_anew=True), accumulate
        super().__init__(*arguments, **BY_VIEWS | options)

    def setup_module(self, module: Any) -> Any:
        """A module in DDP, whose gradients are weighed."""
        ddp = super().setup_module(module)
        self.run.add(ddp, getattr(self.precision, "scaler", None))
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

    def backward(self, tensor: Any, *arguments: Any, **options: Any) -> None:
        run = super().backward
        self.run.backward(tensor, lambda loss: run(loss, *arguments, **options))

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
    """Tell whether it is a loader for training: Lightning has given it a shuffling sampler, or it had one."""
    sampler: Any = loader.sampler
    if isinstance(loader.batch_sampler, UnevenBatchSampler) or is_shuffled(sampler):
        return True
    # Its subclass wraps a sampler of the script's own.
    return type(sampler) is DistributedSampler and bool(sampler.shuffle)
