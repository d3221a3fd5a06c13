"""What the adapters of training libraries share: loaders, and the sampler, hook and Rebalancer of one run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save
from torch.utils.data import DataLoader, RandomSampler

from pyps.errors import InputError
from pyps.formats import Profile
from pyps.formats.files import write_bytes
from pyps.torch.ddp_hook import DDPHook
from pyps.torch.groups import UnevenGroupSampler, least_groups
from pyps.torch.initial_split import agreed_split
from pyps.torch.rebalance import Rebalancer
from pyps.torch.sampler import UnevenBatchSampler
from pyps.torch.schedule import PlanLike
from pyps.worker.packing import for_file, from_file
from pyps.worker.sampling import MAX_SEED

STATE = "uneven.safetensors"  # in the folder of a library's checkpoint
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

    plan: of the batches, or None. profile, max_batch: of this rank's device. rebalance: whether there is a
    Rebalancer. counts_anew: whether the library calls this process's first epoch 0, also where a run goes on.
    """

    def __init__(
        self,
        profile: Profile | str | os.PathLike[str] | None,
        max_batch: int | None,
        rebalance: bool,
        counts_anew: bool = False,
        plan: PlanLike | None = None,
    ) -> None:
        self.plan = plan
        self.counts_anew = counts_anew
        self.profile, self.max_batch, self.rebalance = profile, max_batch, rebalance
        self.sampler: UnevenBatchSampler | None = None
        self.loader: Any = None
        self.hooks: list[DDPHook] = []
        self.balance: Rebalancer | None = None
        self._skipped = 0, 0  # an epoch, and the rounds of it that were trained before this process
        self._connected = False
        self._own_state: dict[str, Any] | None = None  # of this rank, until there is a hook
        self._is_reduced = False  # whether there was a gradient since the last round ended
        self.read_ahead = 0  # rounds that the first pass reads and does not train

    def weight(self, hook: DDPHook, managed: bool) -> None:
        """Take a model's hook; the first one's rounds are the run's. managed: as in Passes."""
        hook.passes.managed = managed
        self.hooks.append(hook)
        if hook is self.hook:
            hook.on_ready.append(self._reduced)

    @property
    def hook(self) -> DDPHook | None:
        """The first model's."""
        return self.hooks[0] if self.hooks else None

    def check_plan(self) -> None:
        """Raise InputError if there is a plan and no loader that follows it."""
        if self.plan is not None and self.sampler is None and self.hook is not None:
            expected = "a shuffled DataLoader, or one with an UnevenBatchSampler"
            raise InputError("plan", "loader", "none that it is for", expected)

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

    def save(self, folder: str | os.PathLike[str], *, writes: bool) -> None:
        """Write the state into a library's checkpoint, as tensors and JSON; all ranks call it, one `writes`.

        Raises InputError where it cannot be written.
        """
        tensors, rest = for_file(self.state_dict())
        if writes:
            write_bytes(Path(folder) / STATE, save(tensors, rest))

    def load(self, folder: str | os.PathLike[str]) -> bool:
        """Continue from what save() wrote; False if there is none. Raises InputError for another file."""
        path = Path(folder) / STATE
        if not path.exists():
            return False
        expected = "what UnevenRun.save() wrote"
        state = from_file(path, expected)
        try:
            self.load_state_dict(state)
        except (LookupError, TypeError, ValueError) as error:
            raise InputError(str(path), "state", repr(error), expected) from error
        return True

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
    run: UnevenRun,
    *,
    total: int | None = None,
    seed: int | None = None,
    shuffle: bool = True,
    drop_last: bool | None = None,
    group: int = 1,
) -> DataLoader[Any]:
    """The loader with uneven batches, in `parts` micro-batches a round.

    total: B; by default the loader's batch size, that of all ranks, for each of the parts. run: gets the
    sampler. group: above 1, B counts indices that come so often, as in UnevenGroupSampler. A loader that has
    an UnevenBatchSampler keeps it. All ranks call it. Raises InputError for a sampler of another number of
    micro-batches, for a loader without a batch size, and for a second one.
    """
    if run.sampler is not None:
        raise InputError(
            "prepare", "loader", "a second shuffled loader", "one, prepared once; others without shuffling"
        )
    sampler: Any = loader.batch_sampler
    if isinstance(sampler, UnevenBatchSampler):
        if sampler.accumulation != parts:
            raise InputError("UnevenBatchSampler", "accumulate", str(sampler.accumulation), f"{parts}")
    else:
        if total is None and loader.batch_size is None:
            expected = "the batch of all ranks, or an UnevenBatchSampler"
            raise InputError("prepare", "loader", "no batch_size", expected)
        split = run.plan
        if split is None:
            total = total or (loader.batch_size or 1) * parts
            least = least_groups(group, parts)
            split = agreed_split(total, run.profile, max_batch=run.max_batch, accumulate=least)
        seeds = [torch.initial_seed() % (MAX_SEED + 1) if seed is None else seed]
        dist.broadcast_object_list(seeds)
        length = len(loader.dataset)  # type: ignore[arg-type]
        last = loader.drop_last if drop_last is None else drop_last
        order: dict[str, Any] = {"seed": seeds[0], "shuffle": shuffle, "drop_last": last}
        if group > 1:
            sampler = UnevenGroupSampler(length, split, group=group, passes=parts, **order)
        else:
            sampler = UnevenBatchSampler(length, split, accumulate=parts, **order)
    run.sampler = sampler
    return DataLoader(loader.dataset, batch_sampler=sampler, **_kept(loader))


def is_shuffled(sampler: Any) -> bool:
    """Whether each sample comes once an epoch, in an order that is drawn."""
    if not isinstance(sampler, RandomSampler) or sampler.replacement:
        return False
    return sampler.num_samples == len(sampler.data_source)


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
