"""UnevenTrainer: transformers.Trainer with a batch for each rank, and the gradient of one process.

    trainer = UnevenTrainer(model, arguments, train_dataset=dataset)      # was Trainer(...)
    class Mine(UnevenTraining, SFTTrainer): ...                           # for a Trainer of another library

The global batch is as before: per_device_train_batch_size times ranks times gradient_accumulation_steps. Each
rank takes its part of it in as many micro-batches.

Trainer divides a loss by num_items_in_batch, the targets of all ranks, or lets the model do it: such a loss
is this rank's part of the mean already. Whether a loss was divided so is in its graph. One that was not is a
mean over its micro-batch, and is weighed as GlobalMean does, also where Trainer takes it for the other kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
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
from pyps.sharding import whole_state_dict
from pyps.sharding.modules import unit_of
from pyps.torch.accelerate_shards import ShardingAccelerator
from pyps.torch.adapter import UnevenRun, check_processes, is_shuffled, uneven_loader
from pyps.torch.wrapped import BY_VIEWS
from pyps.worker.step.terms import Term, terms_of

ALIKE = 1e-5  # relative: numbers that are one, in float32


class UnevenTraining:
    """A mix-in that stands before Trainer, or before a class made of it, among a class's bases.

    Takes the options of UnevenRun, and the Trainer's. `run` is the UnevenRun while it trains. Raises
    InputError for FSDP, DeepSpeed, DataParallel, and samplers of other orders than shuffled or plain.
    """

    def __init__(self: Any, *arguments: Any, **options: Any) -> None:
        self.run = UnevenRun(options, shares=options.pop("shares", None), stage=options.pop("stage", 1))
        self._whole: Any = None  # a sharded model's state, while it is saved
        self._by_items: dict[Any, bool] = {}  # what a loss of these terms is, once it was looked at
        self._items: Any = None  # of the round, in all ranks' batches
        self._part: Any = None  # of the round's loss, where it is in parts
        self._own_loss: Any = 0.0  # of the round's micro-batches on this rank, where it is not
        super().__init__(*arguments, **options)
        self.add_callback(_Steps(self))

    def create_accelerator_and_postprocess(self: Any) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        vars(self.accelerator.ddp_handler).update(BY_VIEWS)
        self.accelerator.backward = partial(self._uneven_backward, self.accelerator.backward)
        self.accelerator.__class__ = ShardingAccelerator
        self.accelerator.run = self.run

    def _move_model_to_device(self: Any, model: Any, device: Any) -> None:
        """Move it as Trainer does, unless shard() will move this rank's share of it."""
        if self.args.world_size == 1 or self.run.stage == 1:
            super()._move_model_to_device(model, device)  # type: ignore[misc]

    def save_model(self: Any, *arguments: Any, **options: Any) -> None:
        """Save as Trainer does; with stage=3 all ranks call it."""
        self._whole = None if unit_of(self.model) is None else whole_state_dict(self.model)
        super().save_model(*arguments, **options)  # type: ignore[misc]
        self._whole = None

    def _save(self: Any, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, self._whole if state_dict is None else state_dict)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self: Any, output_dir: str) -> None:
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        if self.run.shares is not None and hasattr(inner, "consolidate_state_dict"):
            inner.consolidate_state_dict(to=None if self.args.save_on_each_node else 0)
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]

    def get_train_dataloader(self: Any) -> Any:
        args = self.args
        even = super().get_train_dataloader()  # type: ignore[misc]
        check_processes("UnevenTrainer", args.world_size, "use_cpu=True where there are no GPUs")
        if args.world_size == 1:
            return even
        self._check()
        if args.auto_find_batch_size and self.run.options["plan"] is not None:
            expected = "no plan: it says what the batches are"
            raise InputError("UnevenTrainer", "auto_find_batch_size", "True", expected)
        if self.run.sampler is not None:  # train() again, or with another batch size
            self.run = self.accelerator.run = self.run.again()
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
            "total": self._train_batch_size * args.world_size * args.gradient_accumulation_steps,
            "shuffle": is_shuffled(order),
            "drop_last": args.dataloader_drop_last,
        }

    def training_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Returns the loss so that its mean over ranks, summed over a round, is the mean over its samples.

        Where GlobalMean.loss does not know that, it is this rank's own.
        """
        step = super().training_step  # type: ignore[misc]
        if self.run.sampler is None:
            return step(model, inputs, num_items_in_batch)
        if not self.run.models:
            self._add(model)
        self._items, self._part = num_items_in_batch, None
        with self._without_ranks():
            loss = step(model, inputs, num_items_in_batch)
        if self._part is not None:
            return self._part
        self._own_loss = self._own_loss + loss
        if not self.accelerator.sync_gradients:
            return torch.zeros_like(loss)
        own, self._own_loss = self._own_loss, 0.0
        whole = self.run.mean.loss
        return own if whole is None else whole.to(loss)

    def _add(self: Any, model: Any) -> None:
        ddp = getattr(model, "_orig_mod", model)
        if not isinstance(ddp, DistributedDataParallel) and unit_of(ddp) is None:
            raise InputError("UnevenTrainer", "model", type(ddp).__name__, "DistributedDataParallel")
        self.run.add(ddp, self.accelerator.scaler)
        self.run.connect()

    def _uneven_backward(self: Any, inner: Any, loss: Any, **options: Any) -> None:
        """Accelerator.backward() of Trainer's loss."""
        if self.run.sampler is None:
            inner(loss, **options)
            return
        run, ranks = partial(inner, **options), self.args.world_size
        if self._is_by_items(loss):
            self._part = loss.detach() * ranks
            self.run.backward(loss, run, is_part=True)
        else:
            divided = 1 if self._is_scaled(self._items) else self.current_gradient_accumulation_steps
            self.run.backward(loss, run, divided)

    def _is_by_items(self: Any, loss: torch.Tensor) -> bool:
        """Tell whether a loss was divided by the items of all ranks. Each kind of loss is looked at once.

        Raises InputError for a loss that was so in parts.
        """
        if self._items is None:
            return False
        terms = terms_of(loss)
        key = tuple((term.kind, term.is_mean, term.count is None) for term in terms)
        if key not in self._by_items:
            found = {_is_divided_by(term, self._items) for term in terms}
            if len(found) > 1:
                expected = "all of its terms divided by num_items_in_batch, or none"
                raise InputError("UnevenTrainer", "compute_loss", "a loss of both kinds", expected)
            self._by_items[key] = found == {True}
        return bool(self._by_items[key])

    def _finalize_training(self: Any, *arguments: Any, **options: Any) -> Any:
        if self.run.mean is not None:
            torch.distributed.all_reduce(self._tr_loss)
            self._tr_loss /= self.args.world_size
        return super()._finalize_training(*arguments, **options)  # type: ignore[misc]

    def _is_scaled(self: Any, num_items_in_batch: Any) -> bool:
        """Tell whether Trainer takes the loss for one that is divided by the targets of all ranks."""
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
                raise InputError("UnevenTrainer", name, "True", "DDP; FSDP2 is for GlobalMean")
        generates = getattr(args, "predict_with_generate", False) or hasattr(self, "num_generations")
        if self.run.stage == 3 and generates:  # as many passes as its own texts need
            expected = "stage=1, or generation of your own within pyps.sharding.gathered(model)"
            raise InputError("UnevenTrainer", "stage", "3 with a trainer that generates", expected)
        if not args.average_tokens_across_devices:
            expected = "True: else each rank divides by its own targets"
            raise InputError("UnevenTrainer", "average_tokens_across_devices", "False", expected)


def _is_divided_by(term: Term, items: Any) -> bool:
    """Tell whether a term is a sum that was divided by these items, or by so many for each class."""
    if term.is_mean or term.count is None:
        return False
    on_device = float(term.count) / math.prod(term.divisors)
    times = [divisor / float(items) for divisor in (*term.divisors, on_device)]
    return any(one > 0.5 and abs(one - round(one)) < ALIKE * one for one in times)


class _Steps(TrainerCallback):  # type: ignore[misc]
    """Ends the rounds, and keeps logging, evaluation and saving out of their times."""

    def __init__(self: Any, trainer: UnevenTraining) -> None:
        self._trainer = trainer

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._trainer.run.stepped()

    def on_log(self, *_: Any, **__: Any) -> None:
        self._trainer.run.restart_timer()

    on_evaluate = on_save = on_log


class UnevenTrainer(UnevenTraining, Trainer):  # type: ignore[misc]
    """transformers.Trainer on unlike devices; with one process it is a plain one."""
