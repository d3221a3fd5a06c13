"""The adapters of training libraries share this: loaders, and the sampler, mean and Rebalancer of one run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save
from torch.utils.data import DataLoader, RandomSampler

from pyps.errors import InputError
from pyps.formats.files import write_bytes
from pyps.sharding import shard_optimizer
from pyps.sharding.optimizer import sharded_optimizer
from pyps.torch.global_mean import GlobalMean
from pyps.torch.initial_split import agreed_split
from pyps.torch.rebalance import Rebalancer
from pyps.torch.sampler import UnevenBatchSampler, UnevenGroupSampler, least_groups
from pyps.worker.data.sampling import MAX_SEED
from pyps.worker.local.packing import for_file, from_file

STATE = "uneven.safetensors"  # in the folder of a library's checkpoint
OPTIONS = {  # of a run, with their defaults
    "plan": None,
    "profile": None,
    "max_batch": None,
    "rebalance": True,
    "reduction": "mean",
    "wire": "same",
}
# What a loader with other batches takes over.
KEPT = {"num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"}
KEPT |= {"generator", "prefetch_factor", "persistent_workers"}


class UnevenRun:
    """The sampler, mean and Rebalancer of a run under a library, and their state.

    Takes its own options out of the library's:
    plan: a pyps.plan/1 file, a Plan, or the batches by rank; by default equal batches, or the best ones if
        each rank has a profile.
    profile, max_batch: of this rank's device, as in agreed_split and Rebalancer.
    rebalance: whether the split follows the devices' speed while training.
    reduction, wire: as in GlobalMean.
    counts_anew: whether the library calls this process's first epoch 0, also where a run goes on.
    shares: of the optimizers' state that each rank holds, as in shard_optimizer, for libraries that save it.
    stage: 3 for shares of the parameters and gradients, too, as in shard(); Accelerate and Trainer have it.

    `sampler`, `mean` and `balance` are None until all that they need was prepared.
    """

    def __init__(
        self, options: dict[str, Any], counts_anew: bool = False, shares: Any = None, stage: int = 1
    ) -> None:
        self.options = {name: options.pop(name, usual) for name, usual in OPTIONS.items()}
        self.counts_anew, self.shares, self.stage = counts_anew, shares, stage
        if stage not in (1, 3):
            raise InputError("shares", "stage", repr(stage), "1 (the optimizer's state) or 3 (all)")
        if stage == 3 and shares is None:
            raise InputError("shares", "stage", "3 without shares", "shares=, of the ranks or a plan's")
        self.sampler: UnevenBatchSampler | None = None
        self.loader: Any = None
        self.models: list[torch.nn.Module] = []
        self.mean: GlobalMean | None = None
        self.balance: Rebalancer | None = None
        self.scaler: Any = None
        self._skipped = 0, 0  # an epoch, and the rounds of it that were trained before this process
        self._own_state: dict[str, Any] | None = None  # of this rank, until there is a mean
        self._is_open = False  # whether there was a gradient since the last round ended
        self.read_ahead = 0  # rounds that the library reads first and does not train

    def again(self) -> UnevenRun:
        """A new run with the same options; this one ends."""
        self.close()
        return UnevenRun(dict(self.options), self.counts_anew, self.shares, self.stage)

    def close(self) -> None:
        """Let go of what was made."""
        self.mean = self.balance = None

    def add(self, model: torch.nn.Module, scaler: Any = None) -> None:
        """A model that is trained; the gradients of all are weighed."""
        self.close()
        self.models.append(model)
        self.scaler = scaler

    def shard(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep this rank's share of an optimizer's state alone, if there are shares; once."""
        inner = getattr(optimizer, "optimizer", optimizer)
        if self.shares is not None and self.stage == 1 and sharded_optimizer(inner) is None:
            shard_optimizer(inner, self.shares)

    def connect(self) -> None:
        """Once there are models and a sampler, make the mean and the Rebalancer."""
        if self.mean is not None or self.sampler is None or not self.models:
            return
        mean = self._made()
        if self.options["rebalance"]:
            limits: dict[str, Any] = {"max_batch": self.options["max_batch"]}
            self.balance = Rebalancer(self.sampler, mean, self.options["profile"], **limits)
        self._load_own()

    def _made(self) -> GlobalMean:
        options = {name: self.options[name] for name in ("reduction", "wire")}
        self.mean = GlobalMean(self.models, self.sampler, scaler=self.scaler, **options)
        return self.mean

    def backward(
        self,
        loss: torch.Tensor,
        run: Callable[[torch.Tensor], Any],
        parts: int = 1,
        n: Any = None,
        is_part: bool = False,
    ) -> None:
        """Let the library's own backward pass give the gradient of the loss over all ranks' samples.

        run: that pass, of a loss. parts: what the library divides the loss of a micro-batch by; that is taken
        back, because the mean is over all of a round's. n, is_part: as in GlobalMean.run().
        Raises InputError for a plan that no loader follows, for a round of another number of micro-batches,
        and as GlobalMean.backward().
        """
        if self.options["plan"] is not None and self.sampler is None:
            expected = "a shuffled DataLoader, or one with an UnevenBatchSampler"
            raise InputError("plan", "loader", "none that it is for", expected)
        mean = self.mean or self._made()
        if parts > 1 and not is_part and (mean.held or not mean.reduces):  # a micro-batch
            if mean.reduces and mean.held + 1 != parts:
                found = f"{mean.held + 1} in a round"
                raise InputError("backward", "micro-batches", found, f"{parts}, by which the library divides")
            loss = loss * parts
        mean.run(loss, lambda: run(loss), n, is_part=is_part)
        self._is_open = True

    def stepped(self) -> None:
        """An optimizer has stepped; the first one after a gradient ends a round."""
        if not self._is_open:
            return
        self._is_open, mean = False, self.mean
        assert mean is not None
        if self.sampler is not None and self.read_ahead:
            self.sampler.end_step(self.read_ahead)
            self.read_ahead = 0
        # Libraries draw ahead of what is trained.
        rounds = None if self.sampler is None else max(1, mean.passes // self.sampler.accumulation)
        if self.balance is not None:
            self.balance.step(rounds)
        else:
            mean.end_step(rounds)

    def restart_timer(self) -> None:
        """Leave what was done since the last round ended out of the next one's time."""
        if self.balance is not None:
            self.balance.restart_timer()

    def skip(self, rounds: int) -> None:
        """Begin the sampler's epoch after that many rounds."""
        if self.sampler is not None:
            self.sampler.skip(rounds)
            self._skipped = self.sampler.epoch, rounds

    def state_dict(self) -> dict[str, Any]:
        """The epoch, its splits by round, and what belongs to a rank, of all ranks; all of them call it."""
        if self.sampler is None or self.mean is None:
            return {}
        own = {
            "mean": self.mean.state_dict(),
            "balance": None if self.balance is None else self.balance.state_dict(),
        }
        ranks: list[Any] = [None] * dist.get_world_size(self.mean.group)
        dist.all_gather_object(ranks, own, group=self.mean.group)
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
        if sampler.take_changes(state["changes"]):
            self._own_state = own[sampler.rank]
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
        if (state := self._own_state) is None or self.mean is None:
            return
        self._own_state = None
        self.mean.load_state_dict(state["mean"])
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
        expected = "one, prepared once; others without shuffling"
        raise InputError("prepare", "loader", "a second shuffled loader", expected)
    sampler: Any = loader.batch_sampler
    if isinstance(sampler, UnevenBatchSampler):
        if sampler.accumulation != parts:
            raise InputError("UnevenBatchSampler", "accumulate", str(sampler.accumulation), f"{parts}")
    else:
        if total is None and loader.batch_size is None:
            expected = "the batch of all ranks, or an UnevenBatchSampler"
            raise InputError("prepare", "loader", "no batch_size", expected)
        split = run.options["plan"]
        if split is None:
            total = total or (loader.batch_size or 1) * parts
            least = least_groups(group, parts)
            device = {name: run.options[name] for name in ("profile", "max_batch")}
            split = agreed_split(total, **device, accumulate=least)
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
    """Tell whether each sample comes once an epoch, in an order that is drawn."""
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
