"""Rounds: what the sampler and the stream have in common, and all that a Rebalancer uses of them.

Loops over the data move nothing. Each is a Reader, which knows where it began and how many batches its loop
has taken. When a step ends, the position becomes that of the reader whose batches were trained: what
DataLoader workers fetch ahead does not count, nor does a second loop that only looks at the data.
"""

from __future__ import annotations

import os
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ReferenceType, ref

from torch.utils.data.dataloader import _BaseDataLoaderIter

from pyps.errors import InputError
from pyps.solver.lengths import SampleLengths
from pyps.solver.online.decide import Split
from pyps.torch.schedule import PlanLike, check_accumulation, planned_bytes, read_split
from pyps.torch.waiting import watch_fetches

RoundIndex = tuple[int, int]  # an epoch and a round of it
FRAMES = 8  # from a sampler's __iter__ up to the DataLoader's iterator, with wrappers between
_weighted = False  # whether this process weighs its gradients


def note_weights() -> None:
    """Note that this process weighs its gradients."""
    global _weighted
    _weighted = True


def default_rank() -> tuple[int, int]:
    """This rank and the number of ranks, from the process group, else the environment, else 0 and 1."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Reader:
    """One loop over the data.

    epoch, position: where it begins. skipped: rounds that it leaves out at first. drawn: rounds that it has
    handed out; items: batches of these, of which DataLoader workers may hold some that the loop has not
    taken.
    """

    def __init__(self, epoch: int, position: int, skipped: int = 0) -> None:
        self.epoch, self.position, self.skipped = epoch, position, skipped
        self.drawn = self.items = self.seen = 0
        self.loader: ReferenceType[Any] | None = None
        self.loop: ReferenceType[Any] | None = None
        self._taken: int | None = None  # once it has ended

    @property
    def is_alive(self) -> bool:
        """Return whether the loop may go on."""
        return self._taken is None and (self.loop is None or self.loop() is not None)

    @property
    def taken(self) -> int:
        """Batches that the loop has taken."""
        if self._taken is not None:
            return self._taken
        loader = None if self.loader is None else self.loader()
        if self.loader is not None and loader is None:
            return self.seen
        sent = None if loader is None else getattr(loader, "_send_idx", None)
        ahead = 0 if sent is None or loader is None else sent - loader._num_yielded
        return self.items - max(0, ahead)

    def close(self) -> None:
        """The loop has ended: its loader begins another one."""
        self._taken = self.taken


class StreamReader(Reader):
    """A loop over a stream in a DataLoader's workers, which is known by the loader's iterator alone."""

    @property
    def taken(self) -> int:
        loader = None if self.loader is None else self.loader()
        return self.seen if loader is None else int(loader._num_yielded)


def loader_of_caller() -> Any:
    """The DataLoader's iterator that is beginning a loop in a frame above, or None."""
    frame = sys._getframe(1)
    for _ in range(FRAMES):
        if frame is None or frame.f_back is None:
            return None
        frame = frame.f_back
        if isinstance(found := frame.f_locals.get("self"), _BaseDataLoaderIter):
            return found
    return None


class Rounds(ABC):
    """A split, this rank's part of it, and its passes over the data, round by round.

    epoch and position say where the pass in training began; trained: its rounds whose steps have ended.
    per_step: rounds of the latest step. passes: how many were begun in training. The three parameters are
    described in UnevenBatchSampler.
    """

    lengths: SampleLengths | None = None  # with which splits count tokens

    def __init__(self, plan: PlanLike, rank: int | None, accumulate: int | Sequence[int]) -> None:
        own, ranks = default_rank()
        self._splits: list[tuple[RoundIndex, Split]] = [
            ((0, 0), read_split(plan, ranks if rank is None else None))
        ]
        self.rank = own if rank is None else rank
        self.planned_bytes = planned_bytes(plan)  # of each rank
        self.epoch = self.position = self.trained = self.passes = 0
        self.per_step = 1
        self.first_epoch = 0  # the epoch that set_epoch() calls 0: some libraries count anew in each process
        self.resumed_epoch = 0  # of the state that was loaded: samples of earlier ones were trained
        self.before_pass: Callable[[], None] | None = None  # called once, when the next pass begins
        self._readers: list[Reader] = []
        self._reader: Reader | None = None  # whose batches are trained
        self._min_batches = check_accumulation(self.split, self.rank, accumulate)

    @property
    def split(self) -> Split:
        """The split of the latest round that was handed out for training."""
        return self._split_at((self.epoch, max(0, self.drawn - 1)))

    @property
    def latest_split(self) -> Split:
        """The split that was decided last, current or still to come."""
        return self._splits[-1][1]

    @property
    def drawn(self) -> int:
        """Rounds of the pass in training that this process has handed out."""
        return 0 if self._reader is None else self._reader.drawn

    @property
    def global_batch(self) -> int:
        """B, the samples of a full round."""
        return sum(self.split)

    @property
    def batch(self) -> int:
        """b_i, this rank's samples of a full round, by the current split."""
        return self.split[self.rank]

    @property
    def accumulation(self) -> int:
        """Micro-batches of this rank in a round."""
        return self._min_batches[self.rank]

    @property
    def least(self) -> int:
        """The least samples of this rank in a round: one for each micro-batch."""
        return self.accumulation

    @property
    def accumulations(self) -> Split:
        """Micro-batches of every rank in a round."""
        return self._min_batches

    @property
    @abstractmethod
    def rounds(self) -> int | None:
        """Rounds from `position` to the epoch's end, the same on all ranks; None if unknown until then."""

    @abstractmethod
    def max_drawn(self) -> int:
        """The most rounds of this pass that may have been handed out by now."""

    @abstractmethod
    def round_samples(self, number: int) -> tuple[int, int] | None:
        """A recently trained round of this pass: its samples, and this rank's; None for any other."""

    def round_work(self, number: int) -> tuple[int, int, float] | None:
        """Return a round's samples, this rank's batch in what splits count, and by what to multiply its time
        for that of samples of average cost; as round_samples().
        """
        known = self.round_samples(number)
        return None if known is None else (*known, 1.0)

    @abstractmethod
    def state_dict(self, rounds: int | None = None) -> dict[str, Any]:
        """The position after `rounds` rounds of this pass; by default, those whose steps have ended."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a position, with this object's own split."""

    @abstractmethod
    def replan(self, plan: PlanLike, epoch: int | None = None, number: int | None = None) -> None:
        """Take another split with the same B and ranks, from round `number` of `epoch` on."""

    @abstractmethod
    def _fields(self, reader: Reader | None, rounds: int) -> dict[str, Any]:
        """Return what all ranks have alike after a reader's loop has taken so many rounds."""

    def changes(self, rounds: int) -> list[tuple[int, int, Split]]:
        """The split after `rounds` trained rounds of this pass, and those to come: (epoch, round, split).

        The rounds of this epoch are counted from there on, as after load_state_dict().
        """
        now = self.epoch, rounds
        later = [
            (epoch, number - rounds if epoch == self.epoch else number, split)
            for (epoch, number), split in self._splits
            if (epoch, number) > now
        ]
        return [(self.epoch, 0, self._split_at(now)), *later]

    def take_changes(self, changes: Sequence[tuple[int, int, Split]]) -> bool:
        """Take what changes() gave, after load_state_dict(): False for another number of ranks, or B."""
        _, _, split = changes[0]
        if len(split) != len(self.split) or sum(split) != sum(self.split):
            return False
        for epoch, number, split in changes:  # a state of an epoch's end begins the next one
            self.replan(split, *max((epoch, number), (self.epoch, 0)))
        return True

    def last_round(self) -> tuple[int, int, float] | None:
        """Return round_work() of the latest trained round; None if it is not known any more."""
        return self._last_round

    _last_round: tuple[int, int, float] | None = None

    def samples_now(self) -> int | None:
        """This rank's samples of the round that is computed now; None where that is not known."""
        reader = self._training()
        if reader is None or reader.epoch != self.epoch or reader.position != self.position:
            return None
        found = self.round_samples(self._rounds_of(reader) - 1)
        return None if found is None else found[1]

    def has_read(self) -> bool:
        """Return whether a loop that goes on has taken batches."""
        return any(one.is_alive and one.taken for one in self._readers)

    def position_now(self) -> dict[str, Any]:
        """Return what ranks compare in each step: where the loop is whose batches are computed now."""
        reader = self._training()
        fields = self._fields(reader, self.trained if reader is None else self._rounds_of(reader))
        return {**fields, "rounds whose steps have ended": self.trained}

    def end_step(self, rounds: int | None = None, passes: int = 1) -> None:
        """A step has ended: the position moves on.

        rounds: how many were trained; by default those that the loop has taken since the step before. passes:
        micro-batches of the step, which say it where the data is read by no DataLoader that is known.
        """
        reader = self._training()
        if reader is not self._reader and reader is not None:
            self._adopt(reader)
        if rounds is not None:
            done = self.trained + rounds
        elif reader is not None:
            done = self._rounds_of(reader)
        else:
            done = self.trained + max(1, passes // self.accumulation)
        if done == self.trained:
            return
        self.per_step, self.trained = done - self.trained, done
        self._last_round = self.round_work(done - 1)
        if self.rounds is not None and done >= self.rounds:
            self._begin_epoch(self.epoch + 1)

    def _rounds_of(self, reader: Reader) -> int:
        """The rounds that a reader's loop has taken."""
        return reader.skipped + -(-reader.taken // self.accumulation)

    def _training(self) -> Reader | None:
        """The reader whose batches are computed now: the one so far if its loop has taken some since this was
        asked last, else the one that began last.
        """
        self._find_readers()
        self._readers = [one for one in self._readers if one.is_alive or one is self._reader]
        moved = [one for one in self._readers if one.taken > one.seen]
        for one in moved:
            one.seen = one.taken
        known = self._candidate if self._candidate is not None else self._reader
        if moved and known not in moved:
            self._candidate = moved[-1]
        return self._candidate if self._candidate is not None else self._reader

    _candidate: Reader | None = None  # a reader whose first step has not ended

    def _find_readers(self) -> None:  # noqa: B027 - a sampler sees all of its own
        """Note loops that began where this object could not see it."""

    def _adopt(self, reader: Reader) -> None:
        """The reader's loop is the one in training from now on."""
        if reader.epoch != self.epoch:
            self._begin_epoch(reader.epoch)
        elif self.trained:
            self.passes += 1
        self.position, self.trained = reader.position, reader.skipped
        self._reader, self._candidate = reader, None

    def _begin_epoch(self, epoch: int) -> None:
        """Training stands at the first sample of an epoch."""
        forward = epoch > self.epoch
        split = self._split_at((epoch, 0)) if forward else self.latest_split
        later = [(start, other) for start, other in self._splits if forward and start > (epoch, 0)]
        self._splits = [((epoch, 0), split), *later]
        self.epoch, self.position, self.trained = epoch, 0, 0
        self._reader = self._candidate = None
        self.passes += 1

    def _split_at(self, start: RoundIndex) -> Split:
        """The newest split that starts at this round or before."""
        found = self._splits[0][1]
        for at, split in self._splits[1:]:
            if at > start:
                break
            found = split
        return found

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch, at its first sample; the same number again changes nothing.

        Raises InputError for an epoch before that of a state that was loaded.
        """
        epoch += self.first_epoch
        if epoch < self.resumed_epoch:
            expected = f"{self.resumed_epoch} or later, as in the checkpoint: range(sampler.epoch, ...)"
            raise InputError("set_epoch", "epoch", str(epoch), expected)
        if epoch != self.epoch:
            self._begin_epoch(epoch)

    def _resumed(self, epoch: int, position: int) -> None:
        """Training stands where a state that was loaded says."""
        split = self.split
        self._reader = self._candidate = None
        self._readers = []
        self.epoch = self.resumed_epoch = epoch
        self.position, self.trained = position, 0
        self._splits = [((epoch, 0), split)]
        self.passes += 1

    def _begin_reading(self, reader: Reader, loader: Any) -> None:
        """A loop begins, in a DataLoader's iterator if that is known."""
        if loader is not None:
            for other in self._readers:
                if other.loader is not None and other.loader() is loader:
                    other.close()
            reader.loader = ref(loader)
            watch_fetches(loader)
        self._readers.append(reader)

    def _pass_begins(self) -> None:
        """A loop asks for its first batch: its DataLoader has drawn its own random number by then."""
        function, self.before_pass = self.before_pass, None
        if function is not None:
            function()

    def _warn_without_weights(self) -> None:
        """Warn where ranks with unequal batches train without weights."""
        import torch.distributed as dist

        grouped = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if grouped and not _weighted and (self.lengths is not None or len(set(self.split)) > 1):
            warnings.warn(
                f"batches {list(self.split)} differ, but no GlobalMean is in use: "
                "the average over ranks is not the gradient of all samples",
                stacklevel=3,
            )
