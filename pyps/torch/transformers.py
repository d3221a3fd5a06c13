"""UnevenTrainer: transformers.Trainer with a batch for each rank, and the gradient of one process.

    trainer = UnevenTrainer(model, arguments, train_dataset=dataset)      # was Trainer(...)
    class Mine(UnevenTraining, SFTTrainer): ...                           # for a Trainer of another library

The global batch is as before: per_device_train_batch_size times ranks times gradient_accumulation_steps. Each
rank takes its part of it in as many micro-batches.

Trainer has two ways to weight losses. Where it divides by the number of targets of all ranks, sums over
ranks are right whatever their batches are. Where it divides by the number of micro-batches, this is taken
back, and the hook weights micro-batches and ranks by their samples.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import RandomSampler, SequentialSampler
from transformers import Trainer, TrainerCallback

from pyps.errors import InputError
from pyps.formats import Profile
from pyps.torch.adapter import UnevenRun, check_processes, uneven_loader
from pyps.torch.hook import weighted_hook
from pyps.torch.schedule import PlanLike

STATE = "uneven.pt"  # in a checkpoint's folder


class UnevenTraining:
    """A mix-in that stands before Trainer, or before a class made of it, among a class's bases.

    plan: a pyps.plan/1 file, a Plan, or the batches by rank; by default equal batches, or the best ones if
        each rank has a profile.
    profile, max_batch: of this rank's device, as in agreed_split and Rebalancer.
    rebalance: whether the split follows the devices' speed while training.
    All other arguments are the Trainer's. `run` has the sampler, the hook and the Rebalancer while it trains.
    Raises InputError for FSDP, DeepSpeed, DataParallel and samplers of other orders than shuffled or plain.
    """

    def __init__(
        self: Any,
        *arguments: Any,
        plan: PlanLike | None = None,
        profile: Profile | str | os.PathLike[str] | None = None,
        max_batch: int | None = None,
        rebalance: bool = True,
        **options: Any,
    ) -> None:
        self.run = UnevenRun(profile, max_batch, rebalance)
        self._uneven_plan = plan
        super().__init__(*arguments, **options)
        self.add_callback(_Steps(self.run))

    def get_train_dataloader(self: Any) -> Any:
        args = self.args
        even = super().get_train_dataloader()  # type: ignore[misc]
        check_processes("UnevenTrainer", args.world_size, "use_cpu=True where there are no GPUs")
        if args.world_size == 1:
            return even
        self._check()
        self.accelerator._dataloaders.remove(even)
        order = self._get_train_sampler(self.train_dataset)
        if not isinstance(order, RandomSampler | SequentialSampler):
            expected = "a shuffled or a plain order"
            raise InputError("UnevenTrainer", "train_sampling_strategy", type(order).__name__, expected)
        parts = args.gradient_accumulation_steps
        loader = uneven_loader(
            even,
            parts,
            self._uneven_plan,
            self.run,
            total=args.per_device_train_batch_size * args.world_size * parts,
            seed=args.seed if args.data_seed is None else args.data_seed,
            shuffle=isinstance(order, RandomSampler),
            drop_last=args.dataloader_drop_last,
        )
        self.run.loader = prepare_data_loader(
            loader, args.device, num_processes=1, process_index=0, rng_types=[], use_seedable_sampler=False
        )
        return self.run.loader

    def training_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        if self.run.sampler is not None and self.run.hook is None:
            self._weight(model, num_items_in_batch)
        return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]

    def _weight(self: Any, model: Any, num_items_in_batch: Any) -> None:
        """Register the hook for the way in which this Trainer weights losses."""
        ddp = getattr(model, "_orig_mod", model)
        if not isinstance(ddp, DistributedDataParallel):
            raise InputError("UnevenTrainer", "model", type(ddp).__name__, "DistributedDataParallel")
        by_targets = getattr(self, "loss_is_scaled_for_ga", None)  # newer than transformers 5.17
        if by_targets is None:
            has_count = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            by_targets = has_count or self.compute_loss_func is not None
        parts = self.args.gradient_accumulation_steps
        scaler = self.accelerator.scaler
        if by_targets:
            # Each loss is N times its part of the mean over all targets, so the ranks' average is right.
            hook = weighted_hook(ddp, count=lambda *_, **__: 1 / parts, reduction="sum", scaler=scaler)
        else:
            hook = weighted_hook(ddp, scaler=scaler)
            inner = self.accelerator.backward

            def backward(loss: Any, **options: Any) -> None:
                inner(loss * self.current_gradient_accumulation_steps, **options)

            self.accelerator.backward = backward
        self.run.weight(hook)
        self.run.connect()

    def _save_checkpoint(self: Any, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)  # type: ignore[misc]
        if self.run.sampler is None:
            return
        state = self.run.state_dict()
        if self.args.should_save:
            folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
            torch.save(state, folder / STATE)

    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        sampler = self.run.sampler
        if checkpoint is None or sampler is None or not (path := Path(checkpoint) / STATE).exists():
            return
        self.run.load_state_dict(torch.load(path, map_location="cpu", weights_only=False))
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
