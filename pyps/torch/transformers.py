"""UnevenTrainer: transformers.Trainer with a batch for each rank, and the gradient of one process.

    trainer = UnevenTrainer(model, arguments, train_dataset=dataset)      # was Trainer(...)
    class Mine(UnevenTraining, SFTTrainer): ...                           # for a Trainer of another library

The global batch is as before: per_device_train_batch_size times ranks times gradient_accumulation_steps. Each
rank takes its part of it in as many micro-batches.

Trainer takes a loss to be divided by the targets of all ranks if the model's forward() takes keywords, also
where compute_loss or the model ignores that number. So the first batch's loss is tried (loss_kind.py). Where
it follows the number, sums over ranks are right whatever their batches are. Where it is a mean over rows or
targets, the hook weights micro-batches and ranks by these.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback

from pyps.errors import InputError
from pyps.formats import Profile
from pyps.torch.adapter import UnevenRun, check_processes, is_shuffled, uneven_loader
from pyps.torch.hook import weighted_hook
from pyps.torch.loss_kind import follows, means_over
from pyps.torch.schedule import PlanLike
from pyps.torch.weighting import count_targets, not_zero, rows_of

# Relative differences of equal losses: on a CPU, on a GPU (tf32), in 16 bits.
EXACT, NEAR, ROUGH = 1e-5, 1e-4, 2e-2


class UnevenTraining:
    """A mix-in that stands before Trainer, or before a class made of it, among a class's bases.

    plan: a pyps.plan/1 file, a Plan, or the batches by rank; by default equal batches, or the best ones if
        each rank has a profile.
    profile, max_batch: of this rank's device, as in agreed_split and Rebalancer.
    rebalance: whether the split follows the devices' speed while training.
    count: computes from a micro-batch's inputs how many its loss is the mean over. Without it, the first
        batch is tried: rows or targets.
    All other arguments are the Trainer's. `run` has the sampler, the hook and the Rebalancer while it trains.
    Raises InputError for FSDP, DeepSpeed, DataParallel, samplers of other orders than shuffled or plain, and
    losses that are a mean over neither.
    """

    def __init__(
        self: Any,
        *arguments: Any,
        plan: PlanLike | None = None,
        profile: Profile | str | os.PathLike[str] | None = None,
        max_batch: int | None = None,
        rebalance: bool = True,
        count: Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> None:
        self._count, self._uneven_count, self._uneven_weight, self._uneven_sum = count, None, None, 0.0
        self.run = UnevenRun(profile, max_batch, rebalance, plan=plan)
        super().__init__(*arguments, **options)
        self.add_callback(_Steps(self.run))

    def get_train_dataloader(self: Any) -> Any:
        args = self.args
        even = super().get_train_dataloader()  # type: ignore[misc]
        check_processes("UnevenTrainer", args.world_size, "use_cpu=True where there are no GPUs")
        if args.world_size == 1:
            return even
        self._check()
        if even in self.accelerator._dataloaders:  # some libraries' trainers do not prepare it
            self.accelerator._dataloaders.remove(even)
        seed = args.seed if args.data_seed is None else args.data_seed
        loader = uneven_loader(
            even, args.gradient_accumulation_steps, self.run, seed=seed, **self._uneven_order()
        )
        self.run.loader = prepare_data_loader(
            loader, args.device, num_processes=1, process_index=0, rng_types=[], use_seedable_sampler=False
        )
        return self.run.loader

    def _uneven_order(self: Any) -> dict[str, Any]:
        """The global batch, and in what order samples come, as in uneven_loader. Raises InputError."""
        args, order = self.args, self._get_train_sampler(self.train_dataset)
        if not (is_shuffled(order) or isinstance(order, SequentialSampler)):
            found = "an IterableDataset" if order is None else type(order).__name__
            expected = "a data set with a length, in a shuffled or a plain order"
            raise InputError("UnevenTrainer", "train_dataset, its sampler", found, expected)
        return {
            "total": args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps,
            "shuffle": is_shuffled(order),
            "drop_last": args.dataloader_drop_last,
        }

    def training_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Returns the loss so that its mean over ranks, summed over a round, is the mean over its samples."""
        step = super().training_step  # type: ignore[misc]
        if self.run.sampler is None:
            return step(model, inputs, num_items_in_batch)
        if self.run.hook is None:
            self._weight(model, self._prepare_inputs(inputs), num_items_in_batch)
        if self._uneven_count is None:
            return step(model, inputs, num_items_in_batch)
        self._uneven_weight = weight = self._uneven_count(inputs)
        with self._without_ranks():
            loss = step(model, inputs, num_items_in_batch).double()
        self._uneven_weight = None
        divided = not self._is_scaled(num_items_in_batch)
        self._uneven_sum += loss * weight * (self.current_gradient_accumulation_steps if divided else 1)
        if not self.accelerator.sync_gradients:
            return torch.zeros_like(loss)
        total, self._uneven_sum = self._uneven_sum, 0.0
        return total * self.args.world_size / not_zero(self.run.hook.total)

    def _finalize_training(self: Any, *arguments: Any, **options: Any) -> Any:
        if self.run.hook is not None:
            torch.distributed.all_reduce(self._tr_loss)
            self._tr_loss /= self.args.world_size
        return super()._finalize_training(*arguments, **options)  # type: ignore[misc]

    def _is_scaled(self: Any, num_items_in_batch: Any) -> bool:
        """Whether Trainer takes the loss for one that is divided by the targets of all ranks."""
        found = getattr(self, "loss_is_scaled_for_ga", None)  # newer than transformers 5.17
        if found is None:
            found = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            found = found or self.compute_loss_func is not None
        return bool(found)

    @contextmanager
    def _without_ranks(self: Any) -> Iterator[None]:
        """Within it, Trainer does not multiply the loss by the number of ranks."""
        before, self.args.average_tokens_across_devices = self.args.average_tokens_across_devices, False
        try:
            yield
        finally:
            self.args.average_tokens_across_devices = before

    def _weight(self: Any, model: Any, inputs: Any, items: Any) -> None:
        """Register the hook for what this Trainer's loss is a mean over."""
        ddp = getattr(model, "_orig_mod", model)
        if not isinstance(ddp, DistributedDataParallel):
            raise InputError("UnevenTrainer", "model", type(ddp).__name__, "DistributedDataParallel")
        by_items, count, factor = self._kind(ddp.module, inputs, items)
        inner, scaler = self.accelerator.backward, self.accelerator.scaler
        if by_items:
            # Each loss is N times its part of the mean over all targets, so the ranks' average is right.
            parts = self.args.gradient_accumulation_steps
            hook = weighted_hook(ddp, count=lambda *_, **__: 1 / parts, reduction="sum", scaler=scaler)
        else:
            self._uneven_count = count

            def counted(*arguments: Any, **named: Any) -> Any:
                weight = self._uneven_weight
                return count(named or arguments) if weight is None else weight

            hook = weighted_hook(ddp, count=counted, scaler=scaler)
            factor = 1 if self._is_scaled(items) else 0  # 0: Trainer divides by the micro-batches

        def backward(loss: Any, **options: Any) -> None:
            inner(loss * (factor or self.current_gradient_accumulation_steps), **options)

        self.accelerator.backward = backward
        self.run.weight(hook, managed=True)
        self.run.connect()

    def _counts(self: Any, inputs: Any) -> dict[str, Any]:
        """What the loss may be a mean over: functions of a micro-batch's inputs."""
        counts: dict[str, Any] = {"rows": rows_of}
        labels = inputs.get("labels")
        if self._count is not None:
            counts = {"count": self._count}
        elif isinstance(labels, torch.Tensor) and not labels.is_floating_point():
            for shift in (False, True)[: labels.dim()]:
                counts = {f"targets, shift={shift}": partial(count_targets, shift=shift), **counts}
        return counts

    def _kind(self: Any, module: Any, inputs: Any, items: Any) -> tuple[bool, Any, float]:
        """Whether the loss is divided by the items; what counts that which it is a mean over; what it lacks
        to N parts.

        Raises InputError on all ranks for a loss that is neither.
        """
        counts = self._counts(inputs)
        trained = module.training
        tolerance = EXACT if self.args.device.type == "cpu" else NEAR
        tolerance = ROUGH if self.args.bf16 or self.args.fp16 else tolerance

        def loss(batch: Any, of: Any = items) -> float:
            return float(self.compute_loss(module, dict(batch), num_items_in_batch=of))

        module.eval()  # without dropout
        try:
            with torch.no_grad(), torch.random.fork_rng(), self.compute_loss_context_manager():
                by_items = None if items is None else follows(lambda n: loss(inputs, n), items, tolerance)
                whole = loss(inputs)
                with self._without_ranks():
                    lacks = self.args.world_size * loss(inputs) / whole if whole else 1.0
                    known = items is None or by_items is False
                    fitting = means_over(loss, inputs, counts, tolerance) if known else []
        finally:
            module.train(trained)
        every: list[Any] = [None] * self.args.world_size
        torch.distributed.all_gather_object(every, (by_items, fitting))
        common = [name for name in counts if all(name in one[1] for one in every)]
        if all(one[0] is True for one in every):
            return True, None, lacks
        if not common:
            expected = "a mean over rows or targets, or what is divided by num_items_in_batch"
            raise InputError("UnevenTrainer", "compute_loss", "a loss of unknown weights", expected)
        return False, counts[common[0]], 1.0

    def _save_checkpoint(self: Any, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)  # type: ignore[misc]
        if self.run.sampler is None:
            return
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        self.run.save(folder, writes=self.args.should_save)

    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        sampler = self.run.sampler
        if checkpoint is None or sampler is None or not self.run.load(checkpoint):
            return
        if not self.args.ignore_data_skip:
            self.run.read_ahead = self.state.global_step % sampler.rounds

    def _check(self: Any) -> None:
        """Raise InputError for what would be silently wrong."""
        args = self.args
        for name in ("is_fsdp_enabled", "is_deepspeed_enabled"):
            if getattr(self, name):
                raise InputError("UnevenTrainer", name, "True", "DDP; loss_scale is for others")
        if not args.average_tokens_across_devices:
            expected = "True: else each rank divides by its own targets"
            raise InputError("UnevenTrainer", "average_tokens_across_devices", "False", expected)


class _Steps(TrainerCallback):  # type: ignore[misc]
    """Ends the rounds, and keeps logging, evaluation and saving out of their times."""

    def __init__(self: Any, run: UnevenRun) -> None:
        self._run = run

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._run.stepped()

    def on_log(self, *_: Any, **__: Any) -> None:
        self._run.restart_timer()

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self._run.restart_timer()

    def on_save(self, *_: Any, **__: Any) -> None:
        self._run.restart_timer()


class UnevenTrainer(UnevenTraining, Trainer):  # type: ignore[misc]
    """transformers.Trainer on unlike devices; with one process it is a plain one."""
