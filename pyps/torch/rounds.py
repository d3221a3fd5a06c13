"""Rounds: what the sampler and the stream have in common, and all that a Rebalancer uses of them."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from pyps.errors import InputError
from pyps.solver.online.decide import Split
from pyps.torch.schedule import PlanLike, check_accumulation, read_split

RoundIndex = tuple[int, int]  # an epoch and a round of it


def default_rank() -> tuple[int, int]:
    """This rank and the number of ranks, from the process group, else the environment, else 0 and 1."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Rounds(ABC):
    """A split, this rank's part of it, and its passes over the data, round by round.

    epoch and position say where the next pass begins; drawn rounds of this one were handed out. The three
    parameters are described in UnevenBatchSampler.
    """

    def __init__(self, plan: PlanLike, rank: int | None, accumulate: int | Sequence[int]) -> None:
        own, ranks = default_rank()
        self.split: Split = read_split(plan, ranks if rank is None else None)
        self.rank = own if rank is None else rank
        self._min_batches = check_accumulation(self.split, self.rank, accumulate)
        self.epoch = 0
        self.position = 0  # samples of this epoch that were consumed before the pass begins
        self.drawn = 0
        self.trained: int | None = None  # rounds of this pass, where a hook or a Rebalancer counts them
        self.resumed_epoch = 0  # of the state that was loaded: samples of earlier ones were trained
        self.before_pass: Callable[[], None] | None = None  # called once, when the next pass begins

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
    def latest_split(self) -> Split:
        """The split that was decided last, current or still to come."""

    @property
    @abstractmethod
    def passes(self) -> int:
        """How many passes were begun; the same on all ranks."""

    @property
    def begun(self) -> bool:
        """Whether rounds were handed out since the position was set."""
        return self.drawn > 0

    @property
    @abstractmethod
    def rounds(self) -> int | None:
        """Rounds from `position` to the epoch's end, the same on all ranks; None if unknown until then."""

    @abstractmethod
    def max_drawn(self, trained: int) -> int:
        """The most rounds of this pass that may have been handed out by now, `trained` of them trained."""

    @abstractmethod
    def round_samples(self, number: int) -> tuple[int, int] | None:
        """A recently trained round of this pass: its samples, and this rank's; None for any other."""

    @abstractmethod
    def state_dict(self, rounds: int) -> dict[str, Any]:
        """The position after `rounds` trained rounds of this pass."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a position, with this object's own split."""

    def _check_epoch(self, epoch: int) -> None:
        """Raise InputError for an epoch before that of the state that was loaded."""
        if epoch < self.resumed_epoch:
            expected = f"{self.resumed_epoch} or later, as in the checkpoint: range(sampler.epoch, ...)"
            raise InputError("set_epoch", "epoch", str(epoch), expected)

    def _pass_begins(self) -> None:
        self.trained = None if self.trained is None else 0
        function, self.before_pass = self.before_pass, None
        if function is not None:
            function()

    def changes(self, rounds: int) -> list[tuple[int, int, Split]]:
        """The split after `rounds` trained rounds of this pass, and those to come: (epoch, round, split).

        The rounds of this epoch are counted from there on, as after load_state_dict().
        """
        return [(self.epoch, 0, self.latest_split)]

    @abstractmethod
    def replan(self, plan: PlanLike, epoch: int | None = None, number: int | None = None) -> None:
        """Take another split with the same B and ranks, from round `number` of `epoch` on."""


class TrainedRounds:
    """The rounds of a sampler's pass that were trained, counted after each: `trained` in this pass."""

    def __init__(self, sampler: Rounds) -> None:
        self._sampler = sampler
        self.passes = self.trained = 0
        self.per_step = 1  # rounds of the latest step: more in a loop that accumulates several of them
        self._before_pass = 0

    def skip(self, rounds: int) -> None:
        """The next pass begins with that many rounds that are read but not trained."""
        self._before_pass = rounds

    def has_gradient(self) -> None:
        """The round after those that were counted has its gradient: what is saved now holds it."""
        same = self._sampler.passes == self.passes
        self._sampler.trained = self.per_step + (self.trained if same else self._before_pass)

    def count(self, backwards: int = 1, samples: int | None = None) -> tuple[int, int] | None:
        """A step was trained, of so many passes and samples of this rank: the samples of its last round, and
        this rank's; None if they are not known any more.
        """
        if self._sampler.passes != self.passes:
            self.passes, self.trained, self._before_pass = self._sampler.passes, self._before_pass, 0
        self.per_step = self._rounds_of(max(1, backwards // self._sampler.accumulation), samples)
        self.trained += self.per_step
        self._sampler.trained = self.trained
        return self._sampler.round_samples(self.trained - 1)

    def _rounds_of(self, most: int, samples: int | None) -> int:
        """How many rounds a step of so many samples was: fewer than `most` where a script has cut batches."""
        total = 0
        for number in range(most if samples is not None else 0):
            found = self._sampler.round_samples(self.trained + number)
            if found is None:
                break
            total += found[1]
            if total >= samples:  # type: ignore[operator]
                return number + 1
        return most
