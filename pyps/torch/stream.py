"""UnevenIterableDataset: the sampler's rounds for a data set that can only be read from its beginning.

    loader = DataLoader(UnevenIterableDataset(lines, "plan.json"), batch_size=None, num_workers=2)

Every rank, and every DataLoader worker in it, reads the whole stream and keeps its own part of each round; so
the stream should be cheap (names, offsets, raw records), and `transform`, which only the kept samples go
through, should do the work. The stream has to be the same on all ranks: it is what they agree by.

A round is B samples. What is left for the last one joins the round before if it is too little to go round.

DataLoader workers have copies of this object. What they and the training process have to tell each other (new
splits with their rounds, the rounds that were handed out) lies in memory that they share.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from pyps.errors import InputError
from pyps.torch.rounds import Rounds
from pyps.torch.schedule import Planned, Split, bounds, check_replan, pieces

REMEMBERED = 256  # rounds, and changes of the split: more than any loader fetches ahead
PASSES, WORKERS, CHANGES = range(3)  # where these stand among the shared numbers


class UnevenIterableDataset(Rounds, IterableDataset[Any]):
    """Collated batches of b_i samples for rank i, for DataLoader(batch_size=None, num_workers=any).

    dataset: an iterable that starts anew each time it is iterated; if it has set_epoch, that is called. plan,
    rank, accumulate and drop_last as in UnevenBatchSampler. transform: of one sample; collate: of a list of
    them. prefetch_factor: the DataLoader's, if it has workers and another one than its default.
    Raises InputError for a plan of another number of ranks, for a stream too short for all of them, and for
    persistent_workers, which would not learn of another epoch.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        plan: Planned,
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
        self.drawn = 0  # rounds that this process has handed out in this walk
        self._numbers = _shared(3)
        self._sizes = _shared(REMEMBERED, 2)
        self._coming = _shared(REMEMBERED, 1 + len(self.split))
        self._decided_here = 0  # changes by replan() of this very object
        self._known = 0  # those that are in force here
        self._process = 0  # that began the latest walk of this copy

    @property
    def latest(self) -> Split:
        """The split that was decided last, in force or to come."""
        changes = int(self._numbers[CHANGES])
        return self._change(changes - 1)[1] if changes > self._known else self.split

    @property
    def passes(self) -> int:
        """Walks that were begun, in whatever process."""
        return int(self._numbers[PASSES])

    @property
    def rounds(self) -> None:
        """Only the stream's end tells."""
        return None

    def begun(self, trained: int) -> int:
        """The most rounds that may have been handed out: DataLoader workers fetch ahead, but so many."""
        if not (workers := int(self._numbers[WORKERS])):
            return self.drawn
        return trained + -(-self.prefetch_factor * workers // self.accumulation) + 1

    def handed(self, number: int) -> tuple[int, int] | None:
        """A round that was trained lately: its samples, and this rank's."""
        size, own = self._sizes[number % REMEMBERED].tolist()
        return size, own

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        turn, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        self._begin_walk(turn, 0 if worker is None else workers)
        item = 0
        for number, samples in enumerate(self._rounds()):
            self._adopt(number)
            begin, end = bounds(len(samples), self.split, self.rank, self._least)
            self._sizes[number % REMEMBERED] = torch.tensor([len(samples), end - begin])
            self.drawn = number + 1
            for low, high in pieces(begin, end, self.accumulation):
                # The loader asks its workers in turn, so what it gets is in order.
                if item % workers == turn:
                    kept = samples[low:high]
                    yield self.collate([self.transform(x) for x in kept] if self.transform else kept)
                item += 1

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch, at its first sample; the same number again changes nothing."""
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0

    def replan(self, plan: Planned, epoch: int | None = None, number: int | None = None) -> None:
        """Take another split with the same B and ranks, from round `number` of the walk under way on.

        By default from the next round that is handed out, or with DataLoader workers when the loader is
        iterated next. Raises InputError if B would change, for another epoch, or if the round is past; a
        worker that has handed it out by then raises.
        """
        split = check_replan(plan, self.split, self._least)
        elsewhere = int(self._numbers[WORKERS]) > 0
        if epoch not in (None, self.epoch):
            raise InputError("replan", "epoch", str(epoch), f"{self.epoch}, this one")
        changes = int(self._numbers[CHANGES])
        if number is not None or not elsewhere:
            at = self.drawn if number is None else number
            if not elsewhere and at < self.drawn:
                raise InputError("replan", "round", str(at), f"{self.drawn} or later: it is handed out")
            self._coming[changes % REMEMBERED] = torch.tensor([at, *split])
            changes += 1
            self._numbers[CHANGES] = changes  # last: whoever sees it sees the split as well
        self._decided_here = changes
        if elsewhere:
            self.split, self._known = split, changes  # of this copy, for the workers to come
        else:
            self._adopt(self.drawn)

    def _change(self, number: int) -> tuple[int, Split]:
        """From which round on, and the split."""
        at, *split = self._coming[number % REMEMBERED].tolist()
        return at, tuple(split)

    def state_dict(self, rounds: int) -> dict[str, Any]:
        """Where the stream stands after `rounds` trained rounds, counted since it began or was loaded."""
        return {"epoch": self.epoch, "position": self.position + rounds * self.global_batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state, with this object's own split and ranks: what was consumed is skipped."""
        epoch, position = state.get("epoch"), state.get("position")
        if not isinstance(epoch, int) or not isinstance(position, int) or epoch < 0 or position < 0:
            raise InputError(
                "stream state", "epoch, position", repr((epoch, position)), "whole numbers from 0"
            )
        self.epoch, self.position = epoch, position

    def _begin_walk(self, turn: int, workers: int) -> None:
        """All that was decided before is in force, by what the training process knew when it began."""
        if workers and self._process == os.getpid():
            raise InputError(
                "UnevenIterableDataset", "persistent_workers", "True", "False: they have an old copy of this"
            )
        self._process = os.getpid()
        # A worker's copy knows as many changes as there were when it was made; the same in all of them.
        if self._decided_here > self._known:
            self._known, self.split = self._decided_here, self._change(self._decided_here - 1)[1]
        self.drawn = 0
        if turn == 0:
            self._numbers[WORKERS] = workers
            self._numbers[PASSES] += 1

    def _adopt(self, number: int) -> None:
        """Take the changes that are due at a round that is about to be handed out."""
        while self._known < int(self._numbers[CHANGES]):
            at, split = self._change(self._known)
            if at > number:
                return
            if at < number:
                raise InputError("replan", "round", str(at), f"{number} or later: it is handed out")
            self._known, self.split = self._known + 1, split

    def _rounds(self) -> Iterator[list[Any]]:
        """The samples of each round, read far enough ahead to know which one is the last."""
        if (set_epoch := getattr(self.dataset, "set_epoch", None)) is not None:
            set_epoch(self.epoch)
        source = islice(iter(self.dataset), self.position, None)
        size, needed = self.global_batch, sum(self._least)
        ahead = list(islice(source, size + needed))
        while len(ahead) == size + needed:
            yield ahead[:size]
            ahead = [*ahead[size:], *islice(source, size)]
        if self.drop_last:
            ahead = ahead[:size] if len(ahead) >= size else []
        elif 0 < len(ahead) < needed:
            raise InputError("stream", "length", f"{len(ahead)} samples", f"at least {needed}, for all ranks")
        if ahead:
            yield ahead


def _shared(*shape: int) -> torch.Tensor:
    """Zeros, int64, that processes share to which they are passed on."""
    zeros: torch.Tensor = torch.zeros(shape, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
    return zeros
