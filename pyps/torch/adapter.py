"""What the adapters of training libraries share: loaders, and the sampler, hook and Rebalancer of one run."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from pyps.errors import InputError
from pyps.formats import Profile
from pyps.torch.ddp_hook import DDPHook
from pyps.torch.initial_split import agreed_split
from pyps.torch.rebalance import Rebalancer
from pyps.torch.sampler import UnevenBatchSampler
from pyps.torch.schedule import PlanLike
from pyps.worker.sampling import MAX_SEED

KEPT = (  # what a loader with other batches takes over
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
)


class UnevenRun:
    """The sampler, hook and Rebalancer of a run under a library, and their state.

    profile, max_batch: of this rank's device. rebalance: whether there is a Rebalancer. counts_anew: whether
    the library calls this process's first epoch 0, also where a run goes on.
    """

    def __init__(
        self,
        profile: Profile | str | os.PathLike[str] | None,
        max_batch: int | None,
        rebalance: bool,
        counts_anew: bool = False,
    ) -> None:
        self.counts_anew = counts_anew
        self.profile, self.max_batch, self.rebalance = profile, max_batch, rebalance
        self.sampler: UnevenBatchSampler | None = None
        self.loader: Any = None
        self.hook: DDPHook | None = None
        self.balance: Rebalancer | None = None
        self._skipped = 0, 0  # an epoch, and the rounds of it that were trained before this process
        self._connected = False
        self._own_state: dict[str, Any] | None = None  # of this rank, until there is a hook
        self._is_reduced = False  # whether there was a gradient since the last round ended
        self.read_ahead = 0  # rounds that the first pass reads and does not train

    def weight(self, hook: DDPHook) -> None:
        """Take the model's hook. Each loss is the mean over its micro-batch."""
        self.hook = hook
        hook.micro_batches.managed = True
        hook.on_ready.append(self._reduced)

    def connect(self) -> bool:
        """Once there are a hook and a sampler, make the Rebalancer; whether this call did that."""
        if self._connected or self.hook is None or self.sampler is None:
            return False
        self._connected = True
        self.hook.lockstep.sampler = self.sampler
        if self.rebalance:
            limits: dict[str, Any] = {"max_batch": self.max_batch}
            self.balance = Rebalancer(self.sampler, self.hook, self.profile, **limits)
            self.balance.skip(self.read_ahead)
        self._load_own()
        return True

    def stepped(self) -> None:
        """An optimizer has stepped; the first one after a gradient ends a round."""
        if self.balance is not None and self._is_reduced:
            self._is_reduced = False
            self.balance.step()

    def _reduced(self) -> None:
        self._is_reduced = True

    def restart_timer(self) -> None:
        """What was done since the last round ended does not count."""
        if self.balance is not None:
            self.balance.restart_timer()

    def read_past(self, rounds: int) -> None:
        """Leave the epoch's first rounds out, with a length as if they were there."""
        if self.sampler is not None:
            self.read_ahead = rounds % self.sampler.rounds
            self.sampler.read_past(rounds)

    def skip(self, rounds: int) -> None:
        """Begin the sampler's epoch after that many rounds."""
        if self.sampler is not None:
            self.sampler.skip(rounds)
            self._skipped = self.sampler.epoch, rounds

    def state_dict(self) -> dict[str, Any]:
        """The epoch, its splits by round, and what belongs to a rank, of all ranks; all of them call it."""
        if self.sampler is None or self.hook is None:
            return {}
        own = {
            "hook": self.hook.state_dict(),
            "balance": None if self.balance is None else self.balance.state_dict(),
        }
        ranks: list[Any] = [None] * dist.get_world_size(self.hook.group)
        dist.all_gather_object(ranks, own, group=self.hook.group)
        sampler, (epoch, skipped) = self.sampler, self._skipped
        before = skipped if epoch == sampler.epoch else 0
        changes = [(e, k + before if e == sampler.epoch else k, list(s)) for e, k, s in sampler.changes(0)]
        changes[0] = (changes[0][0], 0, changes[0][2])
        epoch = getattr(self.loader, "iteration", sampler.epoch)  # the sampler is read ahead
        return {"seed": sampler.seed, "epoch": epoch, "changes": changes, "ranks": ranks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the beginning of the state's epoch; skip() goes further. All ranks call it.

        With another number of ranks the split stays this run's, and what belongs to a rank starts anew.
        """
        if self.sampler is None or not state:
            return
        sampler, own = self.sampler, state["ranks"]
        sampler.seed = state["seed"]
        sampler.set_epoch(state["epoch"] - sampler.first_epoch)
        if self.counts_anew:
            sampler.first_epoch = state["epoch"]
        if self.loader is not None and hasattr(self.loader, "iteration"):
            self.loader.iteration = state["epoch"]
        if len(own) != len(sampler.split) or sum(state["changes"][0][2]) != sampler.global_batch:
            return
        for epoch, number, split in state["changes"]:
            sampler.replan(split, *max((epoch, number), (sampler.epoch, 0)))
        self._own_state = own[sampler.rank]
        if self._connected:
            self._load_own()

    def _load_own(self) -> None:
        state, self._own_state = self._own_state, None
        if state is None or self.hook is None:
            return
        self.hook.load_state_dict(state["hook"])
        if self.balance is not None and state["balance"] is not None:
            self.balance.load_state_dict(state["balance"])


def check_processes(where: str, processes: int, expected: str) -> None:
    """Raise InputError where a launcher started more processes than the library trains together."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if processes == 1 < started:
        raise InputError(where, "processes", f"{started} that train apart", expected)


def uneven_loader(
    loader: DataLoader[Any],
    parts: int,
    plan: PlanLike | None,
    run: UnevenRun,
    *,
    total: int | None = None,
    seed: int | None = None,
    shuffle: bool = True,
    drop_last: bool | None = None,
) -> DataLoader[Any]:
    """The loader with uneven batches, in `parts` micro-batches a round.

    total: B; by default the loader's batch size, that of all ranks, for each of the parts. run: gets the
    sampler. A loader that has an UnevenBatchSampler keeps it. All ranks call it. Raises InputError for a
    sampler of another number of micro-batches, and for a loader without a batch size.
    """
    sampler: Any = loader.batch_sampler
    if isinstance(sampler, UnevenBatchSampler):
        if sampler.accumulation != parts:
            raise InputError("UnevenBatchSampler", "accumulate", str(sampler.accumulation), f"{parts}")
    else:
        if total is None and loader.batch_size is None:
            expected = "the batch of all ranks, or an UnevenBatchSampler"
            raise InputError("prepare", "loader", "no batch_size", expected)
        split = plan
        if split is None:
            total = total or (loader.batch_size or 1) * parts
            split = agreed_split(total, run.profile, max_batch=run.max_batch, accumulate=parts)
        seeds = [torch.initial_seed() % (MAX_SEED + 1) if seed is None else seed]
        dist.broadcast_object_list(seeds)
        length = len(loader.dataset)  # type: ignore[arg-type]
        last = loader.drop_last if drop_last is None else drop_last
        sampler = UnevenBatchSampler(
            length, split, seed=seeds[0], shuffle=shuffle, drop_last=last, accumulate=parts
        )
    run.sampler = sampler
    return DataLoader(loader.dataset, batch_sampler=sampler, **_kept(loader))


def even_loader(loader: DataLoader[Any], ranks: int) -> DataLoader[Any]:
    """The loader with a share of its batch for each rank; as it is without a batch size."""
    if loader.batch_size is None:
        return loader
    share = -(-loader.batch_size // ranks)
    return DataLoader(
        loader.dataset, batch_size=share, sampler=loader.sampler, drop_last=loader.drop_last, **_kept(loader)
    )


def _kept(loader: DataLoader[Any]) -> dict[str, Any]:
    return {name: getattr(loader, name) for name in KEPT}
