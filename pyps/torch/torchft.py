"""UnevenReplica: uneven batches under torchft, where replicas die and come back and nothing restarts.

    replica = UnevenReplica(manager, network, ReplicaData(dataset, 96))
    optimizer = torchft.Optimizer(manager, torch.optim.SGD(network.parameters(), lr=0.05))
    while replica.epoch < 10:
        optimizer.zero_grad()                           # torchft: the step's quorum
        inputs, targets = replica.batch()
        replica.backward(loss(replica.model(inputs), targets))
        optimizer.step()                                # torchft: committed, or not
        replica.step()

Each step's samples are shared among the replicas of its quorum; their sum stays the global batch. The
gradient is that of the mean over all of them. Samples move to the replicas that are fast. Where the data
stand is a position in the epoch. All replicas share it, as they share the parameters: a replica that comes
gets both from the others. The samples of a step that was not committed come again, so each is trained once
an epoch.

All replicas decide alike: before a step in which one of them asks for it, each tells the others what it knows
of its device, and computes the same split from what all have said.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal

import msgspec
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from pyps.errors import Infeasible, InputError
from pyps.formats import MAX_BATCH, Profile
from pyps.solver.costs import Line
from pyps.solver.online.balancer import Balancer, Rules
from pyps.solver.online.decide import Bounds, Split, SplitChange, best_split
from pyps.solver.online.device import BalancedDevice, DeviceReading
from pyps.solver.ranks import prior_of
from pyps.torch.compute_timer import ComputeTimer
from pyps.torch.decisions import USUAL, Moves
from pyps.torch.replica_mean import ReplicaMean
from pyps.torch.sampler import UnevenBatchSampler
from pyps.torch.schedule import proportional_split, round_sizes

WARM_UP = 2  # first steps of a process that are not measured


class Said(msgspec.Struct, frozen=True):
    """The message of a replica to the others before they decide.

    joined: whether it has no split that holds: it, or others, came or went, or its last step failed. known:
    whether anything is known of its device. level, corrected: as a Balancer's, at the last change.
    """

    joined: bool
    known: bool
    reading: DeviceReading
    level: float = 1.0
    corrected: bool = False


@dataclass(frozen=True)
class Decided:
    """The split; what changed, if the same replicas go on; whether that corrected the split."""

    split: Split
    change: SplitChange | None = None
    corrected: bool = False


def decided(global_batch: int, said: Sequence[Said], rules: Rules, step: int) -> Decided:
    """The split of the global batch by what all replicas said, the same on each. Raises Infeasible."""
    readings = [one.reading for one in said]
    if any(one.joined for one in said):
        return Decided(_shared(global_batch, said, readings))
    split = tuple(reading.batch for reading in readings)
    balancer = Balancer([], split, rules)
    balancer.levels = [one.level for one in said]
    balancer.corrected = any(one.corrected for one in said)
    change, _ = balancer.decide_read(readings, step)
    return Decided(split if change is None else change.after, change, balancer.corrected)


def _shared(global_batch: int, said: Sequence[Said], readings: Sequence[DeviceReading]) -> Split:
    """The split among replicas of which one came or went. A device of which nothing is known counts as the
    median of the others. What does not fit at once is computed in micro-batches.
    """
    bounds = [replace(reading.bounds, required=True) for reading in readings]
    each = max(1, round(global_batch / len(said)))
    rates = [r.estimate.cost.seconds(each) / each for r, one in zip(readings, said, strict=True) if one.known]
    usual = Line(0.0, median(rates) if rates else 1.0)
    costs = [r.estimate.cost if one.known else usual for r, one in zip(readings, said, strict=True)]
    passes = 1
    while True:
        try:
            wide = [replace(bound, most=min(passes * bound.most, MAX_BATCH)) for bound in bounds]
            return best_split(global_batch, costs, wide)
        except Infeasible:
            if passes * sum(bound.most for bound in bounds) >= global_batch:
                raise
            passes += 1


class ReplicaData:
    """The data that the replicas train on, shuffled, each sample once an epoch, and where they stand in it.

    dataset: with a length. global_batch: the samples of a step, of all replicas together. seed, drop_last: as
    in UnevenBatchSampler. loading: of the DataLoader, such as num_workers and collate_fn. Raises InputError
    for a dataset without a length.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        global_batch: int,
        *,
        seed: int = 0,
        drop_last: bool = False,
        **loading: Any,
    ) -> None:
        if not isinstance(dataset, Sized):
            raise InputError("ReplicaData", "dataset", type(dataset).__name__, "one with a length")
        self.global_batch = global_batch
        self._dataset, self._drop_last, self._loading = dataset, drop_last, loading
        self._state = UnevenBatchSampler(len(dataset), [1], 0, seed=seed).state_dict()
        self._done = 0  # rounds since this sampler began
        self._sampler: UnevenBatchSampler | None = None
        self._batches: Iterator[Any] = iter(())

    @property
    def epoch(self) -> int:
        """The epoch of the next step."""
        return int(self._state["epoch"])

    @property
    def position(self) -> int:
        """The samples of that epoch that were trained."""
        return int(self._state["position"])

    @property
    def begun(self) -> bool:
        """Tell whether there are batches of this epoch."""
        return self._sampler is not None

    def state_dict(self) -> dict[str, Any]:
        """Where the data stand."""
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there. Raises InputError for the state of another data set."""
        UnevenBatchSampler(self._length, [1], 0).load_state_dict(state)
        self._state = dict(state)

    def begin(self, split: Split, rank: int) -> bool:
        """Draw from the position on by the split; whether this rank gets samples: at an epoch's end some get
        none, and compute without effect.
        """
        left = self._length - self.position
        split = split if left >= len(split) else (1,) * left
        drawn = min(rank, len(split) - 1)
        self._sampler = UnevenBatchSampler(self._length, split, drawn, drop_last=self._drop_last)
        self._sampler.load_state_dict(self._state)
        self._done = 0
        self._batches = iter(DataLoader(self._dataset, batch_sampler=self._sampler, **self._loading))
        return rank == drawn

    def draw(self) -> tuple[Any, tuple[int, int]]:
        """The step's batch; its samples, of all ranks and of this one."""
        assert self._sampler is not None
        found = next(self._batches)
        samples = self._sampler.round_samples(self._done)
        assert samples is not None
        return found, samples

    def advance(self, samples: int) -> None:
        """So many samples were trained by all replicas."""
        self._done += 1
        position = self.position + samples
        everything = (self.global_batch,)  # at the end of an epoch no split matters
        left = self._length - position
        if left < 1 or not round_sizes(left, everything, drop_last=self._drop_last):
            self._state = {**self._state, "epoch": self.epoch + 1, "position": 0}
            self._sampler = None
        else:
            self._state = {**self._state, "position": position}

    @property
    def _length(self) -> int:
        return int(self._state["length"])


class UnevenReplica:
    """A replica's model, data and step. manager: its torchft.Manager, of one process a replica.

    model: the network, on its device. The replica's `model` is what trains it.
    data: a ReplicaData: the same data set, seed and global batch on all replicas.
    profile, max_batch: of this replica's device, as in Rebalancer. A larger batch comes in `parts`.
    moves: when samples move. reduction: as in GlobalMean.

    `epoch` and `position` say where the data stand, `split` and `batch_size` what was agreed last, `history`
    which changes were made for speed. Raises InputError for a model with UnevenSyncBatchNorm.
    """

    def __init__(
        self,
        manager: Any,
        model: torch.nn.Module,
        data: ReplicaData,
        *,
        profile: Profile | str | os.PathLike[str] | None = None,
        max_batch: int | None = None,
        moves: Moves = USUAL,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> None:
        self.manager, self.data = manager, data
        # Buckets that torch cut anew after the first step would differ on a replica that comes later.
        whole: dict[str, Any] = {"find_unused_parameters": True, "process_group": alone()}
        self.model = DistributedDataParallel(model, **whole)
        self.mean = ReplicaMean(self.model, manager, reduction)
        self.split: Split = ()
        self.history: list[SplitChange] = []
        prior, most = prior_of(profile)
        self._device = BalancedDevice(prior, Bounds(1, min(most, max_batch or MAX_BATCH), required=True))
        self._timer = ComputeTimer(self.mean)
        self._moves = moves
        self._at: tuple[int, int] | None = None  # this replica's place in the quorum that the split is for
        self._step, self._since, self._timed = -1, 0, 0
        self._asks, self._level, self._corrected = False, 1.0, False
        manager.register_state_dict_fn("pyps", self.load_state_dict, self.state_dict)

    @property
    def epoch(self) -> int:
        """The epoch of the next step."""
        return self.data.epoch

    @property
    def position(self) -> int:
        """The samples of that epoch that were trained."""
        return self.data.position

    @property
    def batch_size(self) -> int:
        """This replica's samples of the step."""
        return self.mean.rows

    @property
    def parts(self) -> int:
        """Micro-batches in which the batch fits the device."""
        return max(1, -(-self.batch_size // self._device.bounds.most))

    @property
    def loss(self) -> torch.Tensor | None:
        """The latest step's, over the samples of all replicas, as GlobalMean.loss."""
        return self.mean.loss

    def backward(self, loss: torch.Tensor, n: Any = None, **options: Any) -> None:
        """Add the gradient of the loss over all replicas' samples; as GlobalMean.backward()."""
        self.mean.backward(loss, n, **options)

    def micro_batches(self, batch: Any) -> Iterator[Any]:
        """The batch in `parts`, for a loop that calls backward() for each; as GlobalMean.accumulate()."""
        return iter([batch]) if self.parts == 1 else self.mean.accumulate(batch, self.parts)

    def state_dict(self) -> dict[str, Any]:
        """Where the data stand. torchft gives it to replicas that come; put it into checkpoints, too."""
        return self.data.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there. Raises InputError for the state of another data set."""
        self.data.load_state_dict(state)
        self._at = None

    def batch(self) -> Any:
        """This replica's samples of the step, once its quorum is there, as a DataLoader collates them."""
        rank, replicas = self.manager.participating_rank(), self.manager.num_participants()
        self._step = self.manager.current_step()
        here = None if rank is None else (rank, replicas)
        if self._agree(here) or not self.data.begun:
            drawn = self.data.begin(self.split, here[0] if here else 0)
            self.mean.idle = here is None or not drawn
        self._timer.start()
        found, samples = self.data.draw()
        self.mean.expected, self.mean.rows = (0 if here is None else samples[0]), samples[1]
        return found

    def step(self) -> bool:
        """Call it after the optimizer's step: whether that was committed. If not, its samples come again."""
        done = self.manager.current_step() > self._step
        self.mean.end_step()
        self._timer.finish(self.mean.rows if done and self.mean.trained == self.data.global_batch else None)
        for batch, seconds in self._timer.finished():
            self._timed += 1
            if batch is not None and self._timed > WARM_UP and not self.mean.idle:
                self._device.hear(batch, seconds)
        self._asks = self._moves.moves and self._device.tells(self._moves.window)
        if not done:
            self._at = None
            return False
        self._since += 1
        self.data.advance(self.mean.trained)
        return True

    def _agree(self, here: tuple[int, int] | None) -> bool:
        """Tell whether the step has another split than the one before.

        here: this replica's place among how many; None: it only looks on, until it has the others' state.
        """
        joined = here is None or here != self._at
        due = self._moves.moves and self._since >= self._moves.window
        asked = torch.tensor([float(joined or due or self._asks)], device=self.mean.device)
        if self.mean.sum(asked) and not bool(asked) and here is not None:
            return False
        said = self._exchanged(here, joined) if bool(asked) else None
        if said is None or here is None:  # or a replica is gone; the step will not be committed
            equal = (1,) * self.manager.num_participants()
            self._at, self.split = None, proportional_split(self.data.global_batch, equal)
            return True
        found = decided(self.data.global_batch, said, self._moves, self._step)
        changed = joined or found.split != self.split
        self.split, self._at, self._since = found.split, here, 0
        if changed:
            self._level, self._corrected = said[here[0]].reading.estimate.level, found.corrected
        if found.change is not None:
            self.history.append(found.change)
        return changed

    def _exchanged(self, here: tuple[int, int] | None, joined: bool) -> list[Said] | None:
        """The messages of the step's replicas; None if one is gone."""
        message = b"" if here is None else self._message(here, joined)
        lengths = self.mean.rows_of(torch.tensor([len(message)]))
        if lengths is None:
            return None
        padded = bytearray(message.ljust(int(lengths.max())))
        every = self.mean.rows_of(torch.frombuffer(padded, dtype=torch.uint8))
        return (
            None if every is None else [msgspec.json.decode(bytes(row), type=Said) for row in every.tolist()]
        )

    def _message(self, here: tuple[int, int], joined: bool) -> bytes:
        own = max(1, self.batch_size) if joined else self.split[here[0]]
        reading = self._device.read(self._moves.window, self._since < self._moves.window, own, own)
        online = self._device.online
        known = online.profiled or bool(online.known)
        found = replace(reading, batch=own)
        return msgspec.json.encode(Said(joined, known, found, self._level, self._corrected))


def alone() -> Any:
    """A process group of this replica: DDP's own messages go nowhere."""
    from torchft.process_group import ProcessGroupDummy

    return ProcessGroupDummy(0, 1)
