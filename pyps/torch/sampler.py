"""UnevenBatchSampler: b_i samples of each round for rank i, every sample of the epoch exactly once.

    loader = DataLoader(dataset, batch_sampler=UnevenBatchSampler(dataset, "plan.json"))

An epoch is the permutation that its number and the seed give, cut in rounds of B samples
(pyps.torch.schedule). A new split takes effect at a round's edge that lies ahead on all ranks, also of what
DataLoader workers fetched in advance. The state is a position in the epoch: it says nothing of ranks, so any
number of them can go on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from pyps.errors import InputError
from pyps.torch.rounds import Edge, Rounds
from pyps.torch.schedule import Planned, Split, bounds, check_replan, pieces, round_sizes
from pyps.worker.sampling import MAX_SEED, permutation


class UnevenBatchSampler(Rounds, Sampler[list[int]]):
    """Lists of dataset indices, b_i of them for rank i, for DataLoader(batch_sampler=...).

    dataset: anything with a length, or the length. plan: a pyps.plan/1 file, a Plan, or the batches by rank.
    rank: this process's, by default. drop_last: leave out what does not fill a round, else the last round is
    planned too. accumulate: micro-batches that a rank's share is cut in (one number, or one for each rank).
    Raises InputError for a plan of another number of ranks, or a data set too small for all of them.
    """

    def __init__(
        self,
        dataset: Sized | int,
        plan: Planned,
        rank: int | None = None,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        accumulate: int | list[int] = 1,
    ) -> None:
        super().__init__(plan, rank, accumulate)
        self.length = dataset if isinstance(dataset, int) else len(dataset)
        self.seed, self.shuffle, self.drop_last = seed, shuffle, drop_last
        self._check()
        self.drawn = 0  # rounds of this epoch that were handed out, counted from `position`
        self._handed: list[tuple[int, int]] = []  # of each of these: its samples, and this rank's among them
        self._passes = 0
        self._coming: list[tuple[Edge, Split]] = []
        self.sizes()

    @property
    def latest(self) -> Split:
        """The split that was decided last, in force or to come."""
        return self._coming[-1][1] if self._coming else self.split

    @property
    def passes(self) -> int:
        """Walks that were begun."""
        return self._passes

    @property
    def rounds(self) -> int:
        """Rounds from `position` to the epoch's end; the same on all ranks."""
        return len(self.sizes())

    def begun(self, trained: int) -> int:
        """Rounds that were handed out: indices are drawn in this process, whoever fetches the samples."""
        return self.drawn

    def handed(self, number: int) -> tuple[int, int] | None:
        """A round that was handed out: its samples, and this rank's."""
        return self._handed[number] if number < len(self._handed) else None

    def __len__(self) -> int:
        return self.rounds * self.accumulation

    def __iter__(self) -> Iterator[list[int]]:
        if self.drawn and self.drawn == self.rounds:
            self.position = 0  # the same epoch again, from its first sample, also where a state began it late
        order = self._order()
        first = self.position
        self.drawn, self._handed = 0, []
        self._passes += 1
        for number, size in enumerate(self.sizes()):
            self._adopt((self.epoch, number))
            self.drawn = number + 1
            begin, end = bounds(size, self.split, self.rank, self._least)
            self._handed.append((size, end - begin))
            for low, high in pieces(first + begin, first + end, self.accumulation):
                yield [int(k) for k in order[low:high]]
            first += size

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch, at its first sample; the same number again changes nothing."""
        if epoch != self.epoch:
            self.epoch, self.position, self.drawn = epoch, 0, 0
            self._adopt((epoch, 0))

    def replan(self, plan: Planned, epoch: int | None = None, number: int | None = None) -> None:
        """Take another split with the same B and ranks, from round `number` of `epoch` on.

        By default from the first round that this rank has not handed out. All ranks must name the same one.
        Raises InputError if B would change or the round is past.
        """
        split = check_replan(plan, self.split, self._least)
        edge = (self.epoch if epoch is None else epoch, self.drawn if number is None else number)
        if edge < (self.epoch, self.drawn):
            raise InputError(
                "replan", "round", f"{edge}", f"{(self.epoch, self.drawn)} or later: it is handed out"
            )
        self._coming = sorted([*(item for item in self._coming if item[0] < edge), (edge, split)])
        if edge == (self.epoch, self.drawn):
            self._adopt(edge)

    def state_dict(self, rounds: int | None = None) -> dict[str, Any]:
        """Where the epoch stands after `rounds` trained rounds of it, counted since it began or was loaded.

        By default all rounds handed out, which is right without DataLoader workers: these fetch ahead.
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
        """Go on from a state, with this sampler's own split and ranks.

        Raises InputError for a state of another data set, and if what is left of the epoch does not go round.
        """
        for field, mine in (("length", self.length), ("shuffle", self.shuffle)):
            if state.get(field) != mine:
                raise InputError("sampler state", field, repr(state.get(field)), repr(mine))
        epoch, position, seed = (state.get(field) for field in ("epoch", "position", "seed"))
        if not isinstance(epoch, int) or epoch < 0 or not isinstance(seed, int):
            raise InputError("sampler state", "epoch, seed", repr((epoch, seed)), "whole numbers from 0")
        if not isinstance(position, int) or not 0 <= position <= self.length:
            raise InputError("sampler state", "position", repr(position), f"0 to {self.length}")
        round_sizes(self.length - position, self.split, self._least, self.drop_last)
        self.epoch, self.position, self.seed, self.drawn = epoch, position, seed, 0
        self._coming = []

    def sizes(self) -> list[int]:
        """The samples of each round from `position` to the epoch's end."""
        return round_sizes(self.length - self.position, self.split, self._least, self.drop_last)

    def _order(self) -> Any:
        return permutation(self.seed, self.epoch, self.length) if self.shuffle else range(self.length)

    def _adopt(self, edge: Edge) -> None:
        """Take the newest split that is due at an edge."""
        while self._coming and self._coming[0][0] <= edge:
            self.split = self._coming.pop(0)[1]

    def _check(self) -> None:
        if self.length < 1:
            raise InputError("sampler", "dataset", "no samples", "at least one")
        if not 0 <= self.seed <= MAX_SEED:
            raise InputError("sampler", "seed", str(self.seed), f"0 to {MAX_SEED}")
