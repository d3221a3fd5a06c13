"""UnevenBatchSampler: b_i samples of each round for rank i, every sample of an epoch exactly once.

    loader = DataLoader(dataset, batch_sampler=UnevenBatchSampler(dataset, "plan.json"))

An epoch is a permutation, given by the epoch's number and the seed, and cut into rounds of B samples
(pyps.torch.schedule). A new split starts at a round that no rank has handed out yet, not even to its
DataLoader workers. The state is a position in the epoch. It does not depend on the ranks, so any number of
them can resume from it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence, Sized
from typing import Any

from torch.utils.data import BatchSampler, Sampler

from pyps.errors import InputError
from pyps.solver.online.decide import Split
from pyps.torch.rounds import RoundIndex, Rounds
from pyps.torch.schedule import (
    PlanLike,
    check_minima,
    check_replan,
    micro_batches,
    rank_range,
    read_split,
    round_sizes,
)
from pyps.torch.weighting import warn_without_weights
from pyps.worker.sampling import MAX_SEED, permutation

OF_SAMPLES = BatchSampler.__iter__.__code__  # it makes batches of a sampler's samples
TRAINED_ROUNDS = 100  # more than a DataLoader fetches ahead: by then some were trained


class UnevenBatchSampler(Rounds, Sampler[list[int]]):
    """Lists of dataset indices, b_i of them for rank i, for DataLoader(batch_sampler=...).

    dataset: anything with a length, or the length.
    plan: a pyps.plan/1 file, a Plan, or the batches by rank.
    rank: by default this process's rank.
    seed, shuffle: the permutation of each epoch; without shuffle the samples come in order.
    drop_last: leave out samples that do not fill a round; otherwise the last round is planned too.
    accumulate: the number of micro-batches of a rank in a round, one number or one for each rank.
    Raises InputError for a plan of another number of ranks, or a data set too small for all of them.
    """

    def __init__(
        self,
        dataset: Sized | int,
        plan: PlanLike,
        rank: int | None = None,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        accumulate: int | list[int] = 1,
    ) -> None:
        super().__init__(plan, rank, accumulate)
        self.length = _length_of(dataset)
        self.seed, self.shuffle, self.drop_last = seed, shuffle, drop_last
        self._check()
        self.first_epoch = 0  # the epoch that set_epoch() calls 0: some libraries count anew in each process
        self.drawn = 0  # rounds of this epoch that were handed out, counted from `position`
        self._round_samples: list[tuple[int, int]] = []  # for each of these: its samples, and this rank's
        self._round_splits: list[Split] = []
        self._passes = 0
        self._planned: list[tuple[RoundIndex, Split]] = []
        self._next: Split | None = None  # of another B, for the next epoch
        self._past: RoundIndex = (0, 0)
        self.sizes()

    @property
    def sampler(self) -> UnevenBatchSampler:
        """Itself: libraries that know torch's BatchSampler call its sampler's set_epoch()."""
        return self

    @property
    def batch_size(self) -> int:
        """Samples of all ranks in one of a round's passes: libraries that know torch's BatchSampler ask."""
        return self.global_batch // self.accumulation

    @property
    def latest_split(self) -> Split:
        """The split that was decided last, current or still to come."""
        return self._planned[-1][1] if self._planned else self.split

    @property
    def passes(self) -> int:
        """How many passes were begun."""
        return self._passes

    @property
    def rounds(self) -> int:
        """Rounds from `position` to the epoch's end; the same on all ranks."""
        return len(self.sizes())

    def max_drawn(self, trained: int) -> int:
        """Rounds that were handed out: indices are drawn in this process, even for DataLoader workers."""
        return self.drawn

    def round_samples(self, number: int) -> tuple[int, int] | None:
        """The samples of a round that was handed out, and this rank's; None for any other."""
        return self._round_samples[number] if number < len(self._round_samples) else None

    def __len__(self) -> int:
        return self.rounds * self.accumulation

    def __iter__(self) -> Iterator[list[int]]:
        caller = inspect.currentframe()
        if caller is not None and caller.f_back is not None and caller.f_back.f_code is OF_SAMPLES:
            raise InputError(
                "DataLoader", "sampler", "an UnevenBatchSampler", "batch_sampler=, without batch_size"
            )
        return self._batches()

    def _batches(self) -> Iterator[list[int]]:
        self._pass_begins()
        if self.drawn:
            self._begin_again()
        order = self._order()
        first = self.position
        self.drawn, self._round_samples, self._round_splits = 0, [], []
        self.trained = None
        self._passes += 1
        if self._passes == 2:
            warn_without_weights(self.split)
        for number, size in enumerate(self.sizes()):
            if self._passes == 1 and number == TRAINED_ROUNDS:
                warn_without_weights(self.split)
            self._adopt((self.epoch, number))
            self.drawn = number + 1
            begin, end = rank_range(size, self.split, self.rank, self._min_batches)
            self._round_samples.append((size, end - begin))
            self._round_splits.append(self.split)
            if (self.epoch, number) < self._past and self.epoch == self._past[0]:
                first += size
                continue
            yield from self._cut(order[first + begin : first + end])
            first += size

    def _cut(self, part: Sequence[int]) -> Iterator[list[int]]:
        """This rank's part of a round in its micro-batches."""
        for low, high in micro_batches(0, len(part), self.accumulation):
            yield [int(k) for k in part[low:high]]

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch, at its first sample; the same number again changes nothing.

        Raises InputError for an epoch before that of a state that was loaded.
        """
        epoch += self.first_epoch
        self._check_epoch(epoch)
        if epoch != self.epoch:
            self.epoch, self.position, self.drawn, self.trained = epoch, 0, 0, None
            self._round_samples, self._round_splits = [], []  # those of the epoch before
            self._take_next()
            self._adopt((epoch, 0))

    def replan(self, plan: PlanLike, epoch: int | None = None, number: int | None = None) -> None:
        """Take another split with the same B and ranks, from round `number` of `epoch` on.

        By default from the first round that this rank has not handed out. All ranks must name the same one.
        Raises InputError if B would change or the round is past.
        """
        split = check_replan(plan, self.split, self._min_batches)
        start = (self.epoch if epoch is None else epoch, self.drawn if number is None else number)
        if start < (self.epoch, self.drawn):
            expected = f"{(self.epoch, self.drawn)} or later: it is handed out"
            raise InputError("replan", "round", f"{start}", expected)
        self._planned = sorted([*(item for item in self._planned if item[0] < start), (start, split)])
        if start == (self.epoch, self.drawn):
            self._adopt(start)

    def resize(self, plan: PlanLike, *, at_once: bool = False) -> None:
        """Take a split of another B, from the next epoch on; at_once: before any round was handed out.

        Changes of the split in force that were to come are dropped. All ranks call it with the same plan.
        Raises InputError for other ranks, or too small batches.
        """
        split = read_split(plan, len(self.split))
        check_minima(split, self._min_batches)
        round_sizes(self.length, split, self._min_batches, self.drop_last)
        self._planned, self._next = [], split
        if at_once:
            self._take_next()

    @property
    def next_split(self) -> Split | None:
        """The next epoch's split, if that has another B."""
        return self._next

    @property
    def next_batch(self) -> int:
        """B of the next epoch."""
        return sum(self._next or self.latest_split)

    def state_dict(self, rounds: int | None = None) -> dict[str, Any]:
        """The position after `rounds` trained rounds of the epoch, counted since it began or was loaded.

        By default all rounds that were handed out. With DataLoader workers, which fetch ahead, give `rounds`.
        """
        done = self.drawn if rounds is None else rounds
        if not 0 <= done <= len(sizes := self.sizes()):
            raise InputError("sampler", "rounds", str(done), f"0 to {len(sizes)}, the rounds of this epoch")
        return {
            "epoch": self.epoch,
            "position": self.position + sum(sizes[:done]),
            "seed": self.seed,
            "shuffle": self.shuffle,
            "length": self.length,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state, with this sampler's own split and ranks.

        Raises InputError for a state of another data set, or if too few samples of the epoch are left.
        """
        for field, own in (("length", self.length), ("shuffle", self.shuffle)):
            if state.get(field) != own:
                raise InputError("sampler state", field, repr(state.get(field)), repr(own))
        epoch, position, seed = (state.get(field) for field in ("epoch", "position", "seed"))
        if not isinstance(epoch, int) or epoch < 0 or not isinstance(seed, int):
            raise InputError("sampler state", "epoch, seed", repr((epoch, seed)), "whole numbers from 0")
        if not isinstance(position, int) or not 0 <= position <= self.length:
            raise InputError("sampler state", "position", repr(position), f"0 to {self.length}")
        round_sizes(self.length - position, self.split, self._min_batches, self.drop_last)
        self.epoch, self.position, self.seed, self.drawn = epoch, position, seed, 0
        self.resumed_epoch, self.trained = epoch, None
        self._planned, self._past = [], (0, 0)

    def skip(self, rounds: int) -> None:
        """Begin the epoch after `rounds` rounds, with the split and the changes that are due then."""
        planned = self._planned
        self.load_state_dict(self.state_dict(rounds))
        for (epoch, number), split in planned:
            self.replan(split, epoch, max(number - rounds, 0) if epoch == self.epoch else number)

    def read_past(self, rounds: int) -> None:
        """Passes of this epoch leave its first rounds out, but keep its length. After all, the next epoch."""
        if rounds >= self.rounds:
            self.set_epoch(self.epoch + 1 - self.first_epoch)
        else:
            self._past = self.epoch, rounds

    def changes(self, rounds: int) -> list[tuple[int, int, Split]]:
        """The split after `rounds` trained rounds of this pass, and those to come: (epoch, round, split)."""
        splits = [*self._round_splits[rounds:], self.split]
        found = [(self.epoch, k, split) for k, split in enumerate(splits) if k == 0 or split != splits[k - 1]]
        planned = [(e, number - rounds if e == self.epoch else number, s) for (e, number), s in self._planned]
        return [*found, *planned]

    def sizes(self) -> list[int]:
        """The samples of each round from `position` to the epoch's end."""
        return round_sizes(self.length - self.position, self.split, self._min_batches, self.drop_last)

    def _take_next(self) -> None:
        """The split of another B that was to come."""
        self.split, self._next = self._next or self.split, None

    def _begin_again(self) -> None:
        """Another pass over the same epoch, without set_epoch(): what was to hold from the last one's rounds
        on, or from the next epoch's first, holds now. All ranks know the same of it between two passes.
        """
        if self.drawn == self.rounds:
            self.position = 0  # from the first sample, even after a resumed part
        now, next_one = (self.epoch, 0), (self.epoch + 1, 0)
        self._planned = [(now if start <= next_one else start, split) for start, split in self._planned]
        self._take_next()

    def _order(self) -> Any:
        return permutation(self.seed, self.epoch, self.length) if self.shuffle else range(self.length)

    def _adopt(self, start: RoundIndex) -> None:
        """Take the newest split that starts at this round or before."""
        while self._planned and self._planned[0][0] <= start:
            self.split = self._planned.pop(0)[1]

    def _check(self) -> None:
        if self.length < 1:
            raise InputError("sampler", "dataset", "no samples", "at least one")
        if not 0 <= self.seed <= MAX_SEED:
            raise InputError("sampler", "seed", str(self.seed), f"0 to {MAX_SEED}")


def _length_of(dataset: Sized | int) -> int:
    if isinstance(dataset, int):
        return dataset
    try:
        return len(dataset)
    except TypeError:
        expected = "one with a length, or the length; UnevenIterableDataset is for streams"
        raise InputError("sampler", "dataset", type(dataset).__name__, expected) from None
