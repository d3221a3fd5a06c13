"""UnevenBatchSampler: b_i samples of each round for rank i, every sample of an epoch exactly once.

    loader = DataLoader(dataset, batch_sampler=UnevenBatchSampler(dataset, "plan.json"))

An epoch is a permutation, given by the epoch's number and the seed, and cut into rounds of B samples
(pyps.torch.schedule). A new split starts at a round that no rank has handed out yet, not even to its
DataLoader workers. The state is a position in the epoch. It does not depend on the ranks, so any number of
them can resume from it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence, Sized
from itertools import accumulate as running_sums
from itertools import pairwise
from typing import Any
from weakref import ref

import numpy as np
import numpy.typing as npt
from torch.utils.data import BatchSampler, Sampler

from pyps.errors import InputError
from pyps.formats import LengthCost
from pyps.solver.lengths import SampleLengths, equal_parts
from pyps.solver.online.decide import Split
from pyps.torch.rounds import Reader, RoundIndex, Rounds, loader_of_caller
from pyps.torch.schedule import (
    PlanLike,
    by_tokens,
    check_minima,
    check_replan,
    micro_batches,
    rank_range,
    read_split,
    round_sizes,
)
from pyps.worker.data.sampling import MAX_SEED, permutation

OF_SAMPLES = BatchSampler.__iter__.__code__  # it makes batches of a sampler's samples
KNOWN_ROUNDS = 256  # more than are handed out, but not trained
TRAINED_ROUNDS = 100  # more than a DataLoader fetches ahead: by then some were trained


class UnevenBatchSampler(Rounds, Sampler[list[int]]):
    """Lists of dataset indices, b_i of them for rank i, for DataLoader(batch_sampler=...).

    dataset: anything with a length, or the length.
    plan: a pyps.plan/1 file, a Plan, or the batches by rank.
    rank: by default this process's rank.
    seed, shuffle: the permutation of each epoch; without shuffle the samples come in order.
    drop_last: leave out samples that do not fill a round; otherwise the last round is planned too.
    accumulate: the number of micro-batches of a rank in a round, one number or one for each rank.
    lengths: the tokens of each sample, [samples]. A round has the samples of B tokens on average, and each
        rank gets those whose cost is its share, the longest first; splits then count tokens of average cost,
        also those in `plan` if it gives batches by rank.
    cost: of a length, for all ranks or for each; by default the plan's, or tokens where that knows none.
    Raises InputError for a plan of another number of ranks, one in tokens without lengths, or a data set too
    small for all of them.
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
        lengths: npt.ArrayLike | None = None,
        cost: LengthCost | Sequence[LengthCost | None] | None = None,
    ) -> None:
        self.length = _length_of(dataset)
        self.lengths = None if lengths is None else SampleLengths(lengths, self.length)
        if self.lengths is not None:
            plan, self.costs = by_tokens(plan, self.lengths, cost)
            self._costs_digest = self.lengths.digest(self.costs)
        super().__init__(plan, rank, accumulate)
        self.seed, self.shuffle, self.drop_last = seed, shuffle, drop_last
        self._check()
        self._next: Split | None = None  # of another B, for the next epoch
        self._past: RoundIndex = (0, 0)
        self._loops = 0  # that have begun
        self._known_sizes: tuple[Any, list[int]] = (None, [])
        self._known_parts: dict[Any, npt.NDArray[np.int64]] = {}  # of the latest rounds, by length
        self._ends: tuple[list[int], list[int]] = ([], [0])  # rounds' samples, and where they begin
        self._check_rounds(self.split)

    costs: tuple[LengthCost, ...] = ()  # by rank
    _costs_digest = ""

    @property
    def global_batch(self) -> int:
        return self._samples_of(self.split)

    @property
    def sampler(self) -> UnevenBatchSampler:
        """Itself: libraries that know torch's BatchSampler call its sampler's set_epoch()."""
        return self

    @property
    def batch_size(self) -> int:
        """Samples of all ranks in one of a round's passes: libraries that know torch's BatchSampler ask."""
        return self.global_batch // self.accumulation

    @property
    def rounds(self) -> int:
        """Rounds from `position` to the epoch's end; the same on all ranks."""
        return len(self.sizes())

    def max_drawn(self) -> int:
        """Rounds that were handed out: indices are drawn in this process, even for DataLoader workers."""
        return self.drawn

    def round_samples(self, number: int) -> tuple[int, int] | None:
        """The samples of a round of this pass, and this rank's; None for any other."""
        sizes = self.sizes()
        if not 0 <= number < len(sizes):
            return None
        return sizes[number], len(self._part_now(number))

    def round_work(self, number: int) -> tuple[int, int, float] | None:
        found = super().round_work(number)
        if found is None or self.lengths is None:
            return found
        worth = self.lengths.tokens_worth(self.costs[self.rank], self._part_now(number)).sum()
        batch = self._split_at((self.epoch, number))[self.rank]
        return found[0], batch, batch / float(worth)

    @property
    def is_read(self) -> bool:
        """Return whether a loop over its batches has begun."""
        return self._loops > 0

    def __len__(self) -> int:
        return self.rounds * self.accumulation

    def __iter__(self) -> Iterator[list[int]]:
        caller = sys._getframe(1)
        if caller.f_code is OF_SAMPLES:
            expected = "batch_sampler=, without batch_size"
            raise InputError("DataLoader", "sampler", "an UnevenBatchSampler", expected)
        loader = loader_of_caller()
        reader = self._new_reader(loader)
        self._begin_reading(reader, loader)
        batches = self._batches(reader)
        reader.loop = ref(batches)
        return batches

    def _new_reader(self, loader: Any) -> Reader:
        """A loop from where training stands; of the next epoch, if the loop that trained this one is gone."""
        now = self._reader
        ended = now is not None and (not now.is_alive or (now.loader is not None and now.loader() is loader))
        if self._candidate is None and ended and self.trained:
            return Reader(self.epoch + 1, 0)
        return Reader(self.epoch, self.position, self._past[1] if self._past[0] == self.epoch else 0)

    def _batches(self, reader: Reader) -> Iterator[list[int]]:
        self._pass_begins()
        self._loops += 1
        if self._loops == 2:
            self._warn_without_weights()
        ends = self._ends_of(reader.epoch, reader.position)
        for number, (first, last) in enumerate(pairwise(ends)):
            if self._loops == 1 and number == TRAINED_ROUNDS:
                self._warn_without_weights()
            reader.drawn = number + 1
            if number >= reader.skipped:
                for batch in self._cut(self._part(reader.epoch, number, first, last)):
                    reader.items += 1
                    yield batch

    def _part_now(self, number: int) -> Any:
        """This rank's samples of a round of the pass in training."""
        ends = self._ends_of(self.epoch, self.position)
        return self._part(self.epoch, number, ends[number], ends[number + 1])

    def _part(self, epoch: int, number: int, first: int, last: int) -> Any:
        """This rank's samples of a round that has these of the epoch."""
        split = (
            self._next if epoch > self.epoch and self._next is not None else self._split_at((epoch, number))
        )
        if self.shuffle:
            samples = permutation(self.seed, epoch, self.length)[first:last]
        else:
            samples = np.arange(first, last)
        if self.lengths is None:
            begin, end = rank_range(last - first, split, self.rank, self._min_batches)
            return samples[begin:end]
        key = epoch, first, last, split
        if key not in self._known_parts:
            shares = self.lengths.shares(samples, split, self.costs, self._min_batches)
            self._known_parts[key] = shares[self.rank]
            if len(self._known_parts) > KNOWN_ROUNDS:
                del self._known_parts[next(iter(self._known_parts))]
        return self._known_parts[key]

    def _cut(self, part: Any) -> Iterator[list[int]]:
        """This rank's part of a round in its micro-batches; by length, of about equal cost."""
        if self.lengths is None:
            cuts = micro_batches(0, len(part), self.accumulation)
        else:
            cuts = equal_parts(self.lengths.tokens_worth(self.costs[self.rank], part), self.accumulation)
        for low, high in cuts:
            yield [int(k) for k in part[low:high]]

    def _ends_of(self, epoch: int, position: int) -> list[int]:
        """Where the rounds of a pass begin in the epoch, and where the last one ends."""
        sizes = self._sizes_of(epoch, position)
        if self._ends[0] is not sizes:
            self._ends = sizes, list(running_sums(sizes, initial=position))
        return self._ends[1]

    def _fields(self, reader: Reader | None, rounds: int) -> dict[str, Any]:
        epoch, position = (self.epoch, self.position) if reader is None else (reader.epoch, reader.position)
        ends = self._ends_of(epoch, position)
        return {
            "epoch": epoch,
            "position in the epoch": ends[min(rounds, len(ends) - 1)],
            "lengths and their costs": self._costs_digest,
            "split": self._split_at((epoch, max(0, rounds - 1))),
            "seed": (self.seed, self.shuffle),
            "samples of an epoch": (self.length, self.drop_last),
            "decided splits": tuple(self._splits),
        }

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
        self._splits = [*(item for item in self._splits if item[0] < start), (start, split)]

    def resize(self, plan: PlanLike, *, at_once: bool = False) -> None:
        """Take a split of another B, from the next epoch on; at_once: before any round was handed out.

        An epoch of which no round was handed out takes it at once. Changes of the split in force that were to
        come are dropped. All ranks call it with the same plan. Raises InputError for other ranks, too small
        batches, and a B that leaves an epoch without a round.
        """
        split = read_split(plan, len(self.split))
        check_minima(split, self._min_batches)
        self._check_rounds(split)
        if at_once or not (self.trained or self.drawn):
            self._splits, self._next = [((self.epoch, 0), split)], None
            if not self.sizes():  # the rest of an epoch that was resumed
                self._begin_epoch(self.epoch + 1)
        else:
            self._splits, self._next = [((self.epoch, 0), self.split)], split

    @property
    def next_split(self) -> Split | None:
        """The next epoch's split, if that has another B."""
        return self._next

    @property
    def next_batch(self) -> int:
        """B of the next epoch."""
        return self._samples_of(self._next or self.latest_split)

    def state_dict(self, rounds: int | None = None) -> dict[str, Any]:
        """The position after `rounds` trained rounds of the epoch, counted since it began or was loaded.

        By default those whose steps have ended.
        """
        done = self.trained if rounds is None else rounds
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
        rest = self._round_sizes(self.length - position, self.split)
        self.seed, self._past = seed, (0, 0)
        self._resumed(epoch, position)
        if not rest:
            self._begin_epoch(epoch + 1)

    def skip(self, rounds: int) -> None:
        """Begin the epoch after `rounds` rounds, with the split and the changes that are due then."""
        changes = self.changes(rounds)
        self.load_state_dict(self.state_dict(rounds))
        self.take_changes(changes)

    def read_past(self, rounds: int) -> None:
        """Passes of this epoch leave its first rounds out, but keep its length. After all, the next epoch."""
        if rounds >= self.rounds:
            self.set_epoch(self.epoch + 1 - self.first_epoch)
        else:
            self._past, self.trained = (self.epoch, rounds), rounds

    def sizes(self) -> list[int]:
        """The samples of each round from `position` to the epoch's end."""
        return self._sizes_of(self.epoch, self.position)

    def _sizes_of(self, epoch: int, position: int) -> list[int]:
        split = self._next if epoch > self.epoch and self._next is not None else self._splits[0][1]
        key = position, sum(split), sum(self._min_batches)
        if self._known_sizes[0] != key:
            sizes = self._round_sizes(self.length - position, split)
            self._known_sizes = key, sizes
        return self._known_sizes[1]

    def _begin_epoch(self, epoch: int) -> None:
        super()._begin_epoch(epoch)
        if self._next is not None:
            self._splits, self._next = [((epoch, 0), self._next)], None

    def _round_sizes(self, samples: int, split: Split) -> list[int]:
        return round_sizes(samples, (self._samples_of(split),), self._min_batches, self.drop_last)

    def _samples_of(self, split: Split) -> int:
        return sum(split) if self.lengths is None else round(sum(split) / self.lengths.each)

    def _check(self) -> None:
        if self.length < 1:
            raise InputError("sampler", "dataset", "no samples", "at least one")
        if not 0 <= self.seed <= MAX_SEED:
            raise InputError("sampler", "seed", str(self.seed), f"0 to {MAX_SEED}")

    def _check_rounds(self, split: Split) -> None:
        """Raise InputError for an epoch without a round."""
        batch = self._samples_of(split)
        if batch < sum(self._min_batches):  # only in tokens
            expected = f"{sum(self._min_batches)} samples of {self.lengths and self.lengths.each} or more"
            raise InputError("sampler", "plan", f"{sum(split)} tokens, as lengths= is given", expected)
        if not self._round_sizes(self.length, split):
            expected = f"at least {batch}, the global batch, with drop_last"
            raise InputError("sampler", "dataset", f"{self.length} samples", expected)


class UnevenGroupSampler(UnevenBatchSampler):
    """Lists of dataset indices: b_i different ones for rank i, each `group` times.

        sampler = UnevenGroupSampler(prompts, plan, group=8, passes=4)

    Reinforcement learning compares the completions of one prompt, so the unit of the split is a prompt.

    group: how often an index comes in a round.
    passes: how many micro-batches the round is computed in. A rank gets its whole round for each of them, as
        TRL's trainers want it, which generate completions at the first and cut them themselves.
    dataset, plan, rank, seed, shuffle, drop_last: as in UnevenBatchSampler; plan counts different indices.
    Raises InputError as that, and for numbers below 1.
    """

    def __init__(
        self,
        dataset: Sized | int,
        plan: PlanLike,
        rank: int | None = None,
        *,
        group: int,
        passes: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        for name, number in (("group", group), ("passes", passes)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise InputError("UnevenGroupSampler", name, repr(number), "a whole number from 1")
        self.group, self._round_passes = group, passes
        super().__init__(
            dataset,
            plan,
            rank,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
            accumulate=least_groups(group, passes),
        )

    @property
    def accumulation(self) -> int:
        return self._round_passes

    @property
    def accumulations(self) -> Split:
        return (self._round_passes,) * len(self.split)

    @property
    def least(self) -> int:
        return least_groups(self.group, self._round_passes)

    def samples_now(self) -> int | None:
        found = super().samples_now()
        return None if found is None else self.group * found

    def _cut(self, part: Sequence[int]) -> Iterator[list[int]]:
        whole = [int(k) for k in part for _ in range(self.group)]
        for _ in range(self._round_passes):
            yield whole


def least_groups(group: int, passes: int) -> int:
    """The fewest groups that have a sample for each pass."""
    return -(-passes // group)


def _length_of(dataset: Sized | int) -> int:
    if isinstance(dataset, int):
        return dataset
    try:
        return len(dataset)
    except TypeError:
        expected = "one with a length, or the length; UnevenIterableDataset is for streams"
        raise InputError("sampler", "dataset", type(dataset).__name__, expected) from None
