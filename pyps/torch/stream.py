"""UnevenIterableDataset: the sampler's rounds for a data set that can only be read from its start.

    loader = DataLoader(UnevenIterableDataset(lines, "plan.json"), batch_size=None, num_workers=2)

Every rank, and every DataLoader worker of it, reads the whole stream and keeps its own part of each round. So
the stream should be cheap (names, offsets, raw records), and `transform`, which is applied to the kept
samples only, should do the work. The stream has to be the same on all ranks.

A round is B samples. Samples left at the end that are too few for all ranks join the round before.

DataLoader workers have copies of this object. New splits with their rounds, and the rounds that were handed
out, are in memory that these processes share.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any
from weakref import ref

import torch
from torch.utils.data import IterableDataset, default_collate, get_worker_info
from torch.utils.data.dataloader import _BaseDataLoaderIter

from pyps.errors import InputError
from pyps.solver.online.decide import Split
from pyps.torch.rounds import Reader, Rounds, StreamReader, loader_of_caller
from pyps.torch.schedule import PlanLike, check_replan, least_round, micro_batches, rank_range

REMEMBERED = 256  # rounds, and changes of the split: more than any loader fetches ahead
PASSES, WORKERS, CHANGES = range(3)  # indices of `_numbers`


class UnevenIterableDataset(Rounds, IterableDataset[Any]):
    """Collated batches of b_i samples for rank i, for DataLoader(batch_size=None, num_workers=any).

    dataset: an iterable that restarts each time it is iterated; its set_epoch is called if it has one.
    plan, rank, drop_last, accumulate: as in UnevenBatchSampler.
    transform: applied to each kept sample. collate: makes a batch of a list of samples.
    prefetch_factor: the DataLoader's, if it has workers and does not use the default.
    Raises InputError for a plan of another number of ranks, for a stream too short for all of them, and for
    persistent_workers, which would miss a change of the epoch.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        plan: PlanLike,
        rank: int | None = None,
        *,
        transform: Callable[[Any], Any] | None = None,
        collate: Callable[[list[Any]], Any] = default_collate,
        drop_last: bool = False,
        accumulate: int | list[int] = 1,
        prefetch_factor: int = 2,
    ) -> None:
        super().__init__(plan, rank, accumulate)
        self.dataset = dataset
        self.transform, self.collate, self.drop_last = transform, collate, drop_last
        self.prefetch_factor = prefetch_factor
        self._numbers = _shared(3)
        self._sizes = _shared(REMEMBERED, 2)
        self._changes = _shared(REMEMBERED, 1 + len(self.split))
        self._decided_here = 0  # changes by replan() of this copy
        self._applied = 0  # changes that this copy has taken
        self._process = 0  # the one that began the latest pass of this copy
        self._current: Split | None = None  # of the pass that this copy has begun
        self._known_loops = 0  # passes of all processes when loops were looked for

    @property
    def split(self) -> Split:
        """The split of the latest round that this copy has handed out."""
        current: Split | None = getattr(self, "_current", None)
        return self._splits[0][1] if current is None else current

    @property
    def latest_split(self) -> Split:
        """The split that was decided last, current or still to come."""
        changes = int(self._numbers[CHANGES])
        return self._change(changes - 1)[1] if changes > self._applied else self.split

    @property
    def rounds(self) -> None:
        """Unknown until the stream ends."""
        return None

    def max_drawn(self) -> int:
        """The most rounds that may have been handed out, with those that DataLoader workers fetch ahead."""
        if not (workers := int(self._numbers[WORKERS])):
            return self.drawn
        return self.trained + -(-self.prefetch_factor * workers // self.accumulation) + 1

    def round_samples(self, number: int) -> tuple[int, int] | None:
        """A recently trained round: its samples, and this rank's."""
        size, own = self._sizes[number % REMEMBERED].tolist()
        return size, own

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        index, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        reader = Reader(self.epoch, self.position)
        if worker is None:
            self._begin_reading(reader, loader_of_caller())
        batches = self._batches(reader, index, workers, worker is None)
        reader.loop = ref(batches)
        return batches

    def _batches(self, reader: Reader, index: int, workers: int, is_here: bool) -> Iterator[Any]:
        self._begin_pass(index, 0 if is_here else workers)
        if is_here:
            self._pass_begins()
            self._known_loops = int(self._numbers[PASSES])
        item = 0
        for number, samples in enumerate(self._rounds()):
            self._adopt_changes(number)
            begin, end = rank_range(len(samples), self.split, self.rank, self._min_batches)
            self._sizes[number % REMEMBERED] = torch.tensor([len(samples), end - begin])
            reader.drawn = number + 1
            for low, high in micro_batches(begin, end, self.accumulation):
                # The loader asks its workers in order, so the batches are in order too.
                if item % workers == index:
                    kept = samples[low:high]
                    reader.items += 1
                    yield self.collate([self.transform(x) for x in kept] if self.transform else kept)
                item += 1

    def _find_readers(self) -> None:
        """Find loops in DataLoader workers, which begin out of sight, by their iterators in this process."""
        passes = int(self._numbers[PASSES])
        if not int(self._numbers[WORKERS]) or passes == self._known_loops:
            return
        self._known_loops = passes
        known = [one.loader() for one in self._readers if one.loader is not None]
        for found in gc.get_referrers(self):
            holders = gc.get_referrers(found) if isinstance(found, dict) else [found]
            for loader in holders:
                if isinstance(loader, _BaseDataLoaderIter) and not any(loader is one for one in known):
                    reader = StreamReader(self.epoch, self.position)
                    reader.loader = reader.loop = ref(loader)
                    self._readers.append(reader)
                    known.append(loader)

    def _fields(self, reader: Reader | None, rounds: int) -> dict[str, Any]:
        size, _ = self.round_samples(rounds - 1) or (0, 0)
        return {
            "epoch": self.epoch,
            "position in the stream": self.position + (rounds - 1) * self.global_batch if rounds else 0,
            "samples of the round": size if rounds else 0,
            "split": self.latest_split,
        }

    def replan(self, plan: PlanLike, epoch: int | None = None, number: int | None = None) -> None:
        """Take another split with the same B and ranks, from round `number` of the current pass on.

        By default from the next round that is handed out, or with DataLoader workers from the next pass.
        Raises InputError if B would change, for another epoch, or if the round is past. A DataLoader worker
        that has handed the round out already raises it too.
        """
        split = check_replan(plan, self.split, self._min_batches)
        has_workers = int(self._numbers[WORKERS]) > 0
        if epoch not in (None, self.epoch):
            raise InputError("replan", "epoch", str(epoch), f"{self.epoch}, this one")
        changes = int(self._numbers[CHANGES])
        if number is not None or not has_workers:
            at = self.drawn if number is None else number
            if not has_workers and at < self.drawn:
                raise InputError("replan", "round", str(at), f"{self.drawn} or later: it is handed out")
            self._changes[changes % REMEMBERED] = torch.tensor([at, *split])
            changes += 1
            self._numbers[CHANGES] = changes  # last: a process that sees it sees the split too
        self._decided_here = changes
        if has_workers:
            self._current, self._applied = split, changes  # of this copy, for workers started later
        else:
            self._adopt_changes(self.drawn)

    def _change(self, number: int) -> tuple[int, Split]:
        """The round at which a change starts, and its split."""
        at, *split = self._changes[number % REMEMBERED].tolist()
        return at, tuple(split)

    def state_dict(self, rounds: int | None = None) -> dict[str, Any]:
        """The position after `rounds` rounds of this pass; by default, those whose steps have ended."""
        done = self.trained if rounds is None else rounds
        last = int(self._sizes[(done - 1) % REMEMBERED][0]) or self.global_batch  # or the tail too
        before = (done - 1) * self.global_batch + last if done else 0
        return {"epoch": self.epoch, "position": self.position + before}

    def changes(self, rounds: int) -> list[tuple[int, int, Split]]:
        """The split that was decided last, from the next round on."""
        return [(self.epoch, 0, self.latest_split)]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state, with this object's own split and ranks; consumed samples are skipped."""
        epoch, position = state.get("epoch"), state.get("position")
        if not isinstance(epoch, int) or not isinstance(position, int) or epoch < 0 or position < 0:
            found = repr((epoch, position))
            raise InputError("stream state", "epoch, position", found, "whole numbers from 0")
        self._resumed(epoch, position)

    def _begin_pass(self, index: int, workers: int) -> None:
        """Take all changes that the training process had decided when the pass began."""
        if workers and self._process == os.getpid():
            expected = "False: they have an old copy of this"
            raise InputError("UnevenIterableDataset", "persistent_workers", "True", expected)
        self._process = os.getpid()
        # All workers' copies were made at the same time, so they take the same changes here.
        if self._decided_here > self._applied:
            self._applied, self._current = self._decided_here, self._change(self._decided_here - 1)[1]
        if index == 0:
            self._numbers[WORKERS] = workers
            self._numbers[PASSES] += 1

    def _adopt_changes(self, number: int) -> None:
        """Take the changes that start at a round that is about to be handed out."""
        while self._applied < int(self._numbers[CHANGES]):
            at, split = self._change(self._applied)
            if at > number:
                return
            if at < number:
                raise InputError("replan", "round", str(at), f"{number} or later: it is handed out")
            self._applied, self._current = self._applied + 1, split

    def _rounds(self) -> Iterator[list[Any]]:
        """The samples of each round, read far enough ahead to recognize the last one."""
        if (set_epoch := getattr(self.dataset, "set_epoch", None)) is not None:
            set_epoch(self.epoch)
        source = islice(iter(self.dataset), self.position, None)
        size, least = self.global_batch, sum(self._min_batches)
        needed = least_round(size, self._min_batches)
        ahead = list(islice(source, size + needed))
        any_round = False
        while len(ahead) == size + needed:
            any_round = True
            yield ahead[:size]
            ahead = [*ahead[size:], *islice(source, size)]
        if self.drop_last:
            ahead = ahead[:size] if len(ahead) >= size else []
            if not ahead and not any_round and not self.position:
                raise InputError("stream", "length", "no round", f"at least {size} samples, with drop_last")
        elif 0 < len(ahead) < least:
            raise InputError("stream", "length", f"{len(ahead)} samples", f"at least {least}, for all ranks")
        elif not ahead and not any_round and not self.position:
            raise InputError("stream", "length", "no samples", f"at least {least}, for all ranks")
        if ahead:
            yield ahead


def _shared(*shape: int) -> torch.Tensor:
    """Zeros, int64, in memory shared with processes that get a copy of the tensor."""
    zeros: torch.Tensor = torch.zeros(shape, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
    return zeros
