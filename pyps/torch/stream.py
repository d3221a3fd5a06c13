"""UnevenIterableDataset: the sampler's rounds for a data set that can only be read from its beginning.

    loader = DataLoader(UnevenIterableDataset(lines, "plan.json"), batch_size=None, num_workers=2)

Every rank, and every DataLoader worker in it, reads the whole stream and keeps its own part of each round; so
the stream should be cheap (names, offsets, raw records), and `transform`, which only the kept samples go
through, should do the work. The stream has to be the same on all ranks: it is what they agree by.

A round is B samples. What is left for the last one joins the round before if it is too little to go round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset, default_collate, get_worker_info

from pyps.errors import InputError
from pyps.torch.sampler import default_rank
from pyps.torch.schedule import Planned, bounds, check_accumulation, check_replan, pieces, read_split


class UnevenIterableDataset(IterableDataset[Any]):
    """Collated batches of b_i samples for rank i, for DataLoader(batch_size=None, num_workers=any).

    dataset: an iterable that starts anew each time it is iterated; if it has set_epoch, that is called. plan,
    rank, accumulate and drop_last as in UnevenBatchSampler. transform: of one sample; collate: of a list of
    them. Raises InputError for a plan of another number of ranks, and for a stream too short for all of them.
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
    ) -> None:
        own, ranks = default_rank()
        self.dataset = dataset
        self.split = read_split(plan, ranks if rank is None else None)
        self.rank = own if rank is None else rank
        self.transform, self.collate, self.drop_last = transform, collate, drop_last
        self._least = check_accumulation(self.split, self.rank, accumulate)
        self.epoch = 0
        self.position = 0  # samples at the stream's beginning that were consumed before

    @property
    def global_batch(self) -> int:
        """B, the samples of a full round."""
        return sum(self.split)

    @property
    def batch(self) -> int:
        """b_i, this rank's samples of a full round."""
        return self.split[self.rank]

    @property
    def accumulation(self) -> int:
        """Micro-batches of this rank in a round."""
        return self._least[self.rank]

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        turn, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        item = 0
        for samples in self._rounds():
            begin, end = bounds(len(samples), self.split, self.rank, self._least)
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

    def replan(self, plan: Planned) -> None:
        """Take another split with the same B and ranks.

        Without DataLoader workers from the next round on, else when the loader is iterated next: its workers
        have copies of this object. Raises InputError if B would change.
        """
        self.split = check_replan(plan, self.split, self._least)

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
