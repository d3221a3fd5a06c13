"""UnevenAccelerator: Hugging Face Accelerate with a batch for each rank, and the gradient of one process.

    accelerator = UnevenAccelerator(gradient_accumulation_steps=4)      # was Accelerator(...)

The script stays as it is. The batch size of its loaders is that of all ranks together, as if one process
trained. prepare() gives a shuffled DataLoader uneven batches, weights the model's gradients (weighted_hook)
and rebalances after each optimizer step. Loaders without shuffling, for evaluation, stay even.

Accelerate divides each loss by the number of micro-batches. backward() takes that back, because the hook
weights micro-batches itself. Each round has the same number of micro-batches on all ranks, in the epoch's
last round too, so no gradient is left over. Schedulers step once for each optimizer step.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import DataLoaderConfiguration, DistributedType
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from pyps.errors import InputError
from pyps.formats import Profile
from pyps.torch.adapter import UnevenRun, check_processes, even_loader, is_shuffled, uneven_loader
from pyps.torch.ddp_hook import Wire
from pyps.torch.hook import weighted_hook
from pyps.torch.sampler import UnevenBatchSampler
from pyps.torch.schedule import PlanLike
from pyps.torch.weighted import is_weighted

SUPPORTED = (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class UnevenAccelerator(Accelerator):  # type: ignore[misc]
    """An Accelerator for DDP on unlike devices; with one process it is a plain one.

    plan: a pyps.plan/1 file, a Plan, or the batches by rank; by default equal batches, or the best ones if
        each rank has a profile.
    profile, max_batch: of this rank's device, as in agreed_split and Rebalancer.
    rebalance: whether the split follows the devices' speed while training.
    count, reduction, wire: as in weighted_hook.
    All other arguments are Accelerator's. `run` has the sampler, the hook and the Rebalancer once all is
    prepared. Raises InputError for dispatched batches, a second shuffled loader, and FSDP.
    """

    dataloader_config: Any  # Accelerator's

    def __init__(
        self,
        *arguments: Any,
        plan: PlanLike | None = None,
        profile: Profile | str | os.PathLike[str] | None = None,
        max_batch: int | None = None,
        rebalance: bool = True,
        count: Callable[..., Any] | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        wire: Wire = "same",
        **options: Any,
    ) -> None:
        loading = copy.copy(options.pop("dataloader_config", None)) or DataLoaderConfiguration()
        if loading.dispatch_batches:
            raise InputError(
                "UnevenAccelerator", "dispatch_batches", "True", "False: each rank loads its own"
            )
        loading.split_batches = True
        super().__init__(*arguments, dataloader_config=loading, **options)
        check_processes("UnevenAccelerator", self.num_processes, "cpu=True where there are no GPUs")
        if self.num_processes > 1 and self.distributed_type not in SUPPORTED:
            expected = "DDP; loss_scale is for others"
            raise InputError("UnevenAccelerator", "distributed_type", self.distributed_type.value, expected)
        self.run = UnevenRun(profile, max_batch, rebalance, plan=plan)
        self._hooked: dict[str, Any] = {"count": count, "reduction": reduction, "wire": wire}

    def prepare(self, *objects: Any, **options: Any) -> Any:
        """As Accelerator's; all ranks together."""
        prepared = super().prepare(*objects, **options)
        if self.run.connect():
            self.register_save_state_pre_hook(self._save_run)  # what is registered as an object is a pickle
            self.register_load_state_pre_hook(lambda _, folder: self.run.load(folder))
        return prepared

    def _save_run(self, _: Any, __: Any, folder: str) -> None:
        each = self.project_configuration.save_on_each_node
        self.run.save(folder, writes=self.is_local_main_process if each else self.is_main_process)

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

    def prepare_optimizer(self, *arguments: Any, **options: Any) -> Any:
        optimizer = super().prepare_optimizer(*arguments, **options)
        check_processes("UnevenAccelerator", self.num_processes, "cpu=True where there are no GPUs")
        if self.num_processes > 1 and optimizer is self._optimizers[0]:
            inner = optimizer.step

            def step(closure: Any = None) -> None:
                inner(closure)
                if self.sync_gradients:
                    self.run.stepped()

            optimizer.step = step
        return optimizer

    def backward(self, loss: Any, **options: Any) -> None:
        """loss: the mean over its micro-batch; outside accumulate(), the script's own part of it."""
        self.run.check_plan()
        managed = any(hook.passes.managed for hook in self.run.hooks)
        super().backward(loss * self.gradient_accumulation_steps if managed else loss, **options)

    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        for hook in self.run.hooks:
            hook.passes.managed = self.gradient_accumulation_steps > 1
        try:
            with super().accumulate(*models):
                yield
        finally:
            for hook in self.run.hooks:
                hook.passes.managed = False

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        training = self.run.loader is not None and self.gradient_state.active_dataloader is self.run.loader
        if training and self.num_processes > 1 and not use_gather_object:
            expected = "use_gather_object=True: its batches are not equal"
            raise InputError("gather_for_metrics", "batch", "one of the training loader", expected)
        return super().gather_for_metrics(input_data, use_gather_object)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """As Accelerator's, after load_state(); the training loader then continues in its own epoch."""
        if self.run.sampler is None or dataloader is not self.run.loader:
            return super().skip_first_batches(dataloader, num_batches)
        rounds, rest = divmod(num_batches, self.run.sampler.accumulation)
        if rest:
            expected = f"a multiple of {self.run.sampler.accumulation}, the micro-batches of a round"
            raise InputError("skip_first_batches", "num_batches", str(num_batches), expected)
        self.run.skip(rounds)
        return dataloader

    def _train_loader(self, data_loader: DataLoader[Any]) -> Any:
        parts = self.gradient_accumulation_steps
        loader = uneven_loader(data_loader, parts, self.run)
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

    def prepare_model(self, *arguments: Any, **options: Any) -> Any:
        model = super().prepare_model(*arguments, **options)
        ddp = getattr(model, "_orig_mod", model)
        if isinstance(ddp, DistributedDataParallel) and not is_weighted(ddp):
            hook = weighted_hook(ddp, **self._hooked, scaler=self.scaler)
            self.run.weight(hook, managed=False)
        return model
