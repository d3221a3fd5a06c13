"""UnevenAccelerator: Hugging Face Accelerate with a batch for each rank, and the gradient of one process.

    accelerator = UnevenAccelerator(gradient_accumulation_steps=4)      # was Accelerator(...)

The script stays as it is. The batch size of its loaders is that of all ranks together, as if one process
trained. prepare() gives a shuffled DataLoader uneven batches. backward() weighs the loss as GlobalMean does,
and each optimizer step rebalances. Loaders without shuffling, for evaluation, stay even.

Each round has the same number of micro-batches on all ranks, in the epoch's last round too, so no gradient is
left over. Schedulers step once for each optimizer step.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs, DistributedType
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

from pyps.errors import InputError
from pyps.sharding.modules import unit_of
from pyps.torch.accelerate_shards import ShardingAccelerator, load_weights
from pyps.torch.adapter import UnevenRun, check_processes, even_loader, is_shuffled, uneven_loader
from pyps.torch.sampler import UnevenBatchSampler
from pyps.torch.wrapped import BY_VIEWS
from pyps.worker.step.terms import terms_of

SUPPORTED = (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
WITHOUT_GPUS = "cpu=True where there are no GPUs"


class UnevenAccelerator(ShardingAccelerator):
    """An Accelerator for DDP on unlike devices; with one process it is a plain one.

    Takes the options of UnevenRun, and Accelerator's. `run` is the UnevenRun. With `shares` save_state()
    gathers the optimizers' whole state in each rank's RAM, and with stage=3 the models'. Raises InputError
    for dispatched batches, a second shuffled loader, and FSDP.
    """

    dataloader_config: Any  # Accelerator's
    ddp_handler: Any

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.run = UnevenRun(options, shares=options.pop("shares", None), stage=options.pop("stage", 1))
        loading = copy.copy(options.pop("dataloader_config", None)) or DataLoaderConfiguration()
        if loading.dispatch_batches:
            expected = "False: each rank loads its own"
            raise InputError("UnevenAccelerator", "dispatch_batches", "True", expected)
        loading.split_batches = True
        super().__init__(*arguments, dataloader_config=loading, **options)
        self.ddp_handler = self.ddp_handler or DistributedDataParallelKwargs(**BY_VIEWS)
        check_processes("UnevenAccelerator", self.num_processes, WITHOUT_GPUS)
        if self.num_processes > 1 and self.distributed_type not in SUPPORTED:
            found = self.distributed_type.value
            raise InputError("UnevenAccelerator", "distributed_type", found, "DDP; FSDP2 is for GlobalMean")
        self._counts: deque[torch.Tensor] = deque(maxlen=4)  # that were gathered since the last round
        self.register_save_state_pre_hook(self._save_run)  # what is registered as an object is a pickle
        self.register_load_state_pre_hook(self._load_run)

    def prepare(self, *objects: Any, **options: Any) -> Any:
        """Prepare as Accelerator does; all ranks call it together."""
        prepared = super().prepare(*objects, **options)
        self.run.connect()
        return prepared

    def _save_run(self, _: Any, __: Any, folder: str) -> None:
        for one in self._optimizers:
            if hasattr(one.optimizer, "consolidate_state_dict"):
                one.optimizer.consolidate_state_dict(to=None)
        each = self.project_configuration.save_on_each_node
        if self.run.sampler is not None:
            self.run.save(folder, writes=self.is_local_main_process if each else self.is_main_process)

    def _load_run(self, models: list[Any], folder: str) -> None:
        """Load what Accelerate does not: what it loads of models stays in the list."""
        for number, model in enumerate(models.copy()):
            if unit_of(model) is not None:
                load_weights(model, Path(folder), number)
                models.remove(model)
        self.run.load(folder)

    def prepare_data_loader(self, data_loader: Any, *arguments: Any, **options: Any) -> Any:
        if self.num_processes == 1 or getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader, *arguments, **options)
        given = isinstance(data_loader.batch_sampler, UnevenBatchSampler)
        if given or is_shuffled(data_loader.sampler):
            return self._train_loader(data_loader)
        loading, even = self.dataloader_config, copy.copy(self.dataloader_config)
        even.split_batches = False
        self.dataloader_config = even
        try:
            loader = even_loader(data_loader, self.num_processes)
            return super().prepare_data_loader(loader, *arguments, **options)
        finally:
            self.dataloader_config = loading

    def prepare_model(self, *arguments: Any, **options: Any) -> Any:
        model = super().prepare_model(*arguments, **options)
        ddp = getattr(model, "_orig_mod", model)
        is_trained = isinstance(ddp, DistributedDataParallel) or unit_of(ddp) is not None
        if is_trained and not any(ddp is one for one in self.run.models):
            self.run.add(ddp, self.scaler)
        return model

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        optimizer = super().prepare_optimizer(optimizer, device_placement)
        check_processes("UnevenAccelerator", self.num_processes, WITHOUT_GPUS)
        if self.num_processes > 1 and optimizer is self._optimizers[0]:
            optimizer.__class__, optimizer.uneven = _Optimizer, self
        return optimizer

    def backward(self, loss: Any, **options: Any) -> None:
        """Do as Accelerator's. loss: of this rank's micro-batch, its mean, say."""
        run = partial(super().backward, **options)
        if self.num_processes == 1:
            run(loss)
        elif self._is_part(loss):
            self.run.backward(loss * (1 / self.num_processes), run, is_part=True)
        else:
            self.run.backward(loss, run, self.gradient_accumulation_steps)

    def _is_part(self, loss: torch.Tensor) -> bool:
        """Tell whether a loss is this rank's part of the mean already: sums that were divided by a count of
        all ranks, as in Accelerate's recipe for tokens.

        Raises InputError for one that was not multiplied by the ranks, of which DDP takes the average.
        """
        terms = terms_of(loss) if self._counts else []
        if not terms or any(term.is_mean or not term.count for term in terms):  # or divided by 0 items
            return False
        ranks, parts = self.num_processes, self.gradient_accumulation_steps
        totals = [float(count.sum()) for count in self._counts]
        factors = [[total / float(term.count) for total in totals] for term in terms]  # type: ignore[arg-type]
        if all(any(_close(factor, ranks * parts) for factor in one) for one in factors):
            return True
        if any(_close(factor, wrong) for one in factors for factor in one for wrong in (1, parts)):
            expected = f"{ranks * parts} times it: num_processes * gradient_accumulation_steps"
            raise InputError("backward", "loss", "a sum over a count that was gathered", expected)
        return False

    def gather(self, tensor: Any) -> Any:
        """Gather as Accelerator does."""
        return self._noted(super().gather(tensor))

    def reduce(self, tensor: Any, *arguments: Any, **options: Any) -> Any:
        """Reduce as Accelerator does."""
        return self._noted(super().reduce(tensor, *arguments, **options))

    def _noted(self, found: Any) -> Any:
        """A count of all ranks, by which a loss may be divided, comes from here."""
        if isinstance(found, torch.Tensor) and found.numel() <= self.num_processes:
            self._counts.append(found)
        return found

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        training = self.run.loader is not None and self.gradient_state.active_dataloader is self.run.loader
        if training and self.num_processes > 1 and not use_gather_object:
            expected = "use_gather_object=True: its batches are not equal"
            raise InputError("gather_for_metrics", "batch", "one of the training loader", expected)
        return super().gather_for_metrics(input_data, use_gather_object)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Skip as Accelerator does, after load_state(); the training loader goes on in its own epoch."""
        sampler = self.run.sampler
        if sampler is None or dataloader is not self.run.loader:
            return super().skip_first_batches(dataloader, num_batches)
        rounds, rest = divmod(num_batches, sampler.accumulation)
        if rest:
            expected = f"a multiple of {sampler.accumulation}, the micro-batches of a round"
            raise InputError("skip_first_batches", "num_batches", str(num_batches), expected)
        if rounds < sampler.rounds:
            self.run.skip(rounds)
            return dataloader
        dataloader.set_epoch(dataloader.iteration + 1)
        return DataLoader(Subset(dataloader.dataset, []))

    def _train_loader(self, data_loader: DataLoader[Any]) -> Any:
        loader = uneven_loader(data_loader, self.gradient_accumulation_steps, self.run)
        prepared = prepare_data_loader(
            loader,
            self.device,
            num_processes=1,
            process_index=0,
            put_on_device=self.device_placement,
            rng_types=[],
            non_blocking=self.non_blocking,
            use_seedable_sampler=False,
        )
        self.run.loader = prepared
        self._dataloaders.append(prepared)
        return prepared


def _close(left: float, right: float) -> bool:
    return math.isclose(left, right, rel_tol=1e-5)


class _Optimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """The first optimizer of an UnevenAccelerator, whose steps end rounds."""

    uneven: UnevenAccelerator

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        if self.uneven.sync_gradients:
            self.uneven._counts.clear()
            self.uneven.run.stepped()
