"""Rebalancer: the split follows the devices while they train. One line at the end of a step:

    balance = Rebalancer(sampler, weighted_hook(model), profile="v100.json")
    ...
        optimizer.step()
        balance.step()

Each rank times its own part of its steps. Every `window` steps it posts what its device costs by now; a
step later the first rank decides; another step later all read the decision, and from the same round on, one
that no rank's DataLoader has fetched yet, the batches are others. B stays what it is. Between these steps
all ranks have met in a reduction, so nobody waits for a message.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import msgspec

from pyps.errors import InputError
from pyps.formats import MAX_BATCH, Profile
from pyps.solver.online.decide import Move, decide
from pyps.solver.online.prior import prior_of
from pyps.solver.online.refit import OnlineCost
from pyps.torch.consensus import CostMessage, Meeting
from pyps.torch.hook import WeightedHook
from pyps.torch.rounds import Edge, Rounds
from pyps.torch.timer import OwnTime

WARM_UP = 2  # steps at the beginning that say nothing: allocations, the buckets of DDP
DOUBTS = 2.0  # standard errors: a gain of less may be none
LEAD = 2  # rounds that each rank draws between a post and the step at which the decision is read


class _Post(msgspec.Struct, frozen=True):
    """A rank at the end of a window. seconds: of its own part of a step, None if nothing new was measured."""

    batch: int
    seconds: float | None
    doubt: float  # the standard error of these seconds, relative
    cost: CostMessage
    level: float
    cap: int
    low: int
    epoch: int
    trained: int  # rounds of the walk, those that may be handed out, and how many it has, if that is known
    begun: int
    rounds: int | None
    changing: bool  # what was measured is not the split to come


class _Answer(msgspec.Struct, frozen=True):
    """What all ranks read: how each of them does; and if the split changes, to which, from which round."""

    states: list[RankState]
    split: list[int] | None = None
    edge: Edge | None = None
    reasons: list[str] = []
    seconds_before: float = 0.0
    seconds_after: float = 0.0


class RankState(msgspec.Struct, frozen=True):
    """One rank in the latest window: its batch, the seconds of its own part of a step, how many times slower
    it is than it was at first, and the share of a round that it waits for others.
    """

    rank: int
    batch: int
    seconds: float
    slowdown: float
    waiting: float


@dataclass(frozen=True)
class Replan:
    """A change of the split: decided by the measurements up to `step`, in force from round `edge`."""

    step: int
    edge: Edge
    before: tuple[int, ...]
    after: tuple[int, ...]
    seconds_before: float
    seconds_after: float
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return "; ".join(self.reasons)


class Rebalancer:
    """See the module's text. `history` holds every Replan, `states` the ranks as of the latest window; those
    in `observers` are called when the result of a window is known.

    sampler: the UnevenBatchSampler or UnevenIterableDataset in use. profile: this device's pyps.profile/1 (a
    file or a Profile), with which one window is enough to know it; max_batch: the most that fits it, if the
    profile does not say. window: steps between decisions, odd; deadband: the least share of a round's time
    that a change must save. Every rank makes one, with the same window and deadband. Raises InputError for a
    batch above this rank's maximum.
    """

    def __init__(
        self,
        sampler: Rounds,
        hook: WeightedHook,
        profile: Profile | str | os.PathLike[str] | None = None,
        *,
        max_batch: int | None = None,
        window: int = 5,
        deadband: float = 0.03,
        store: Any = None,
    ) -> None:
        if window < 3 or window % 2 == 0:
            raise InputError("Rebalancer", "window", str(window), "an odd number of steps from 3")
        prior, cap = prior_of(profile)
        self.cap = min(cap, max_batch or MAX_BATCH)
        if sampler.batch > self.cap:
            raise InputError("Rebalancer", "max_batch", str(self.cap), f"at least the batch, {sampler.batch}")
        self.window, self.deadband = window, deadband
        self.history: list[Replan] = []
        self.states: list[RankState] = []
        self.observers: list[Callable[[Rebalancer], None]] = []
        self.steps = 0
        self._sampler = sampler
        self._device = OnlineCost(prior)
        self._meeting = Meeting("rebalance", hook.group, store)
        self._clock = OwnTime(hook)
        self._times: list[tuple[int, float]] = []  # batch and seconds of the window's full rounds
        self._walk, self._trained = 0, 0  # the sampler's walk under way, and its rounds that were trained
        self._posted_walk = 0
        self._planned_at: list[float] | None = None  # by rank, the level when the split was made

    def step(self) -> None:
        """Call at the end of every step, on all ranks: where samples move, this does it."""
        self.steps += 1
        self._clock.finish(self._trained_now())
        self._times += [(b, s) for b, s in self._clock.taken() if b is not None]
        number, turn = divmod(self.steps, self.window)
        if turn == 0:
            self._meeting.post(number, self._window_ended())
        elif turn == 1 and number and self._meeting.rank == 0:
            self._meeting.answer(number, self._decide(self._meeting.posted(number, _Post)))
        elif turn == 2 and number:
            self._adopt(self._meeting.answered(number, _Answer))
            for observe in self.observers:
                observe(self)
        self._clock.start()

    def scalars(self) -> dict[str, float]:
        """For any logger: batch, seconds, slowdown and waiting by rank; imbalance; changes so far."""
        found = {"replans": float(len(self.history))}
        for state in self.states:
            fields = ("batch", "seconds", "slowdown", "waiting")
            found |= {f"rank{state.rank}/{field}": float(getattr(state, field)) for field in fields}
        if self.states:
            seconds = [state.seconds for state in self.states]
            found["imbalance"] = max(seconds) / (sum(seconds) / len(seconds)) - 1
        return found

    def report(self) -> str:
        """Who holds whom up, a line a rank, as of the latest window."""
        rows = (
            f"{s.rank:4d} {s.batch:6d} {s.seconds:12.4f} {s.slowdown:8.2f}x {s.waiting:8.1%}"
            for s in self.states
        )
        return "\n".join(["rank  batch  own seconds  slowdown  waiting", *rows])

    def _trained_now(self) -> int | None:
        """This rank's batch in the round that was just trained; None if that says nothing of the device."""
        if self._sampler.passes != self._walk:
            self._walk, self._trained = self._sampler.passes, 0
        self._trained += 1
        trained = self._sampler.handed(self._trained - 1)
        if self.steps <= WARM_UP or trained is None:
            return None
        size, own = trained
        return own if size == self._sampler.global_batch else None

    def _window_ended(self) -> _Post:
        """This rank's post; what it measured is taken in."""
        batch = self._times[-1][0] if self._times else self._sampler.batch
        seconds = [s for b, s in self._times if b == batch]
        self._times = []
        middle, doubt = _median(seconds) if len(seconds) > self.window // 2 else (None, 0.0)
        if middle is not None:
            self._device.observe(batch, middle)
        sampler, self._posted_walk = self._sampler, self._walk
        return _Post(
            batch, middle, doubt, CostMessage.of(self._device.cost), self._device.level, self.cap,
            sampler.accumulation, sampler.epoch, self._trained, sampler.begun(self._trained), sampler.rounds,
            batch != sampler.latest[sampler.rank],
        )  # fmt: skip

    def _decide(self, posts: Sequence[_Post]) -> _Answer:
        states, edge = _states(posts), _edge(posts)
        if edge is None or any(post.changing or post.seconds is None for post in posts):
            return _Answer(states)
        levels = [post.level for post in posts]
        before = self._planned_at = self._planned_at or levels
        move = decide(
            tuple(post.batch for post in posts),
            [post.cost.cost() for post in posts],
            [now / then for now, then in zip(levels, before, strict=True)],
            [post.low for post in posts],
            [post.cap for post in posts],
            max(self.deadband, *(DOUBTS * post.doubt for post in posts)),
            self.steps - 1,
        )
        if move is None:
            return _Answer(states)
        self._planned_at = levels
        return _answer(states, move, edge)

    def _adopt(self, answer: _Answer) -> None:
        self.states = answer.states
        if answer.split is None or answer.edge is None:
            return
        if self._sampler.passes != self._posted_walk:
            return  # a stream has ended meanwhile, on all ranks: the round that was meant did not come
        before = tuple(state.batch for state in answer.states)
        self._sampler.replan(answer.split, *answer.edge)
        seconds = answer.seconds_before, answer.seconds_after
        change = Replan(
            self.steps - LEAD, answer.edge, before, tuple(answer.split), *seconds, tuple(answer.reasons)
        )
        self.history.append(change)


def _median(seconds: Sequence[float]) -> tuple[float, float]:
    """The median and its relative standard error, from the median deviation; as of a normal distribution."""
    middle = median(seconds)
    deviation = 1.4826 * median(abs(s - middle) for s in seconds)
    return middle, 1.2533 * deviation / (middle * math.sqrt(len(seconds)))


def _answer(states: list[RankState], move: Move, edge: Edge) -> _Answer:
    seconds = move.seconds_before, move.seconds_after
    return _Answer(states, list(move.after), edge, list(move.reasons), *seconds)


def _edge(posts: Sequence[_Post]) -> Edge | None:
    """The first round that no rank will have handed out when it reads the answer; None if there is none."""
    epoch, rounds, trained = posts[0].epoch, posts[0].rounds, posts[0].trained
    number = max(post.begun for post in posts) + LEAD
    if rounds is None or number < rounds:
        return epoch, number
    # In the next epoch, if all have read the answer before that begins.
    return (epoch + 1, 0) if trained + LEAD <= rounds else None


def _states(posts: Sequence[_Post]) -> list[RankState]:
    seconds = [p.seconds if p.seconds is not None else p.cost.cost().seconds(p.batch) for p in posts]
    longest = max(seconds)
    return [
        RankState(k, p.batch, own, p.level, 1 - own / longest)
        for k, (p, own) in enumerate(zip(posts, seconds, strict=True))
    ]
