"""The optimum under side constraints where workers are alike: exact, and searched by counts of each kind.

Workers that nothing distinguishes are a kind, and a choice of workers is a count of each. Workers that are
used all or not at all are one switch. Branch and bound over boxes of such levels: the best split in a box is
no better than that of its relaxation, in which every worker takes its largest batch by the time to beat,
waits only for the workers that all choices in the box use, and may be used in part. For each limit alone
this relaxation is a fractional knapsack: the workers with the most samples for their need come first. The
relaxation rounded down is tried as a choice; the exact solver splits the batch over the choices that win.

Hosts that prepare samples are left to the program of pyps.solver.milp, and so is a problem of so unlike
workers that MOST_BOXES do not settle it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pyps.errors import PypsError
from pyps.solver.constrained import (
    WITHIN,
    ConstrainedProblem,
    ConstrainedSolution,
    allowed,
    evaluate,
    split_among,
)
from pyps.solver.costs import Floats
from pyps.solver.exact.cardinality import meets
from pyps.solver.exact.minmax import at_index, most_by, rounded, within_total
from pyps.solver.exact.subset import solve_subset
from pyps.solver.exact.subset_sum import Progression

MOST_BOXES = 20_000
LATEST = 1e300  # seconds: later than any split
FIRST_GUESS = 10.0  # of the time without side constraints: far enough to find a first solution soon
ROUNDING = 1e-12  # relative: a better time is better by more than this
SAMPLE = 1e-6  # samples: the rounding error allowed in a sum of parts
HALF = 0.5
WORTH_COUNTING = 1e-3  # of the time to beat: counts that synchronise so much later are searched apart


class TooManyKinds(PypsError):
    """The search ended without an answer, after MOST_BOXES boxes."""


@dataclass(frozen=True)
class Switch:
    """Workers that are used together: at each level, `workers` of each of the `kinds`; 0 to `most` levels."""

    kinds: tuple[int, ...]
    workers: tuple[int, ...]
    least: int
    most: int


@dataclass(frozen=True)
class Box:
    """The choices with levels low..high of each switch, and `first` to `last` workers in all."""

    low: tuple[int, ...]
    high: tuple[int, ...]
    first: int
    last: int


@dataclass
class Room:
    """Hold what is left of a limit: the need of one worker of each kind, and the most that all may need."""

    need: list[float]
    at_most: float


def handles(constrained: ConstrainedProblem) -> bool:
    """Return whether the search covers these side constraints."""
    return all(one.samples_per_second is None for one in constrained.resources)


def fastest(
    constrained: ConstrainedProblem,
    spend: tuple[Floats, float] | None = None,
    not_before: float | None = None,
    step: float = 0.0,
) -> ConstrainedSolution | None:
    """The solution with the shortest longest step; None if the side constraints allow none.

    spend: a need of each worker, and what need times seconds must not exceed. not_before: seconds that no
    solution is below; None: those without side constraints. step: relative: times that differ by less count
    as equal. Raises Infeasible if no split exists even without side constraints, TooManyKinds.
    """
    if not_before is None:
        free = _without_ties(constrained)
        bare = replace(constrained, resources=())
        not_before = evaluate(bare, free.batches).longest_seconds
        if free.longest_seconds <= not_before and spend is None and allowed(constrained, free.batches):
            return free
    search = _Search(constrained)
    search.step = step
    if spend is not None:
        need, at_most = spend
        search.spend = Room(search.of_kinds(need), at_most)
        search.rooms.append(Room(search.spend.need, at_most / not_before))
    for factor in (FIRST_GUESS, LATEST):
        search.target = min(not_before * factor, LATEST)
        if search.run():
            break
    return search.winner


def cheapest(
    constrained: ConstrainedProblem, need: Floats, seconds: float, below: float = math.inf, step: float = 0.0
) -> ConstrainedSolution | None:
    """The solution with the least sum of needs, and with its workers the fastest; None if there is none.

    need: of each worker. seconds: the longest step that it may have. below: only sums below this. step:
    relative: sums that differ by less count as equal. Raises TooManyKinds.
    """
    search = _Search(constrained)
    search.target = seconds
    search.goal = Room(search.of_kinds(need), below)
    search.step = step
    search.run()
    return search.winner


def _without_ties(constrained: ConstrainedProblem) -> ConstrainedSolution:
    """In an order that the file's does not decide: a tie is then broken as in the search."""
    order = np.concatenate([np.array(kind) for kind in constrained.kinds()])
    batches = np.zeros(len(order), np.int64)
    found = solve_subset(at_index(constrained.problem, order), constrained.sync.take(order))
    batches[order] = found.batches
    return evaluate(constrained, batches)


class _Search:
    """One search. target: the seconds to beat. goal: the need to minimise; None: the time is minimised.

    spend: what need times seconds must not exceed. winner: the best solution found.
    """

    def __init__(self, constrained: ConstrainedProblem) -> None:
        self.constrained = constrained
        self.kinds = [np.array(kind) for kind in constrained.kinds()]
        heads = np.array([kind[0] for kind in self.kinds])
        bounds = at_index(within_total(rounded(constrained.problem)), heads)
        self.required = bounds.required.tolist()
        self.bounds = replace(bounds, required=np.zeros(len(heads), bool))
        self.least_batch: list[int] = bounds.min_batch.tolist()
        self.multiple: list[int] = bounds.batch_multiple.tolist()
        self.total = bounds.global_batch
        self.switches = self._switches()
        self.rooms = [Room(self.of_kinds(x.need), x.at_most * WITHIN) for x in constrained.limits]
        shared = [
            (x.overlaps, self.of_kinds(np.where(x.workers, x.transfer_seconds, 0.0)), x.workers[heads])
            for x in constrained.resources
        ]
        self.links = [seconds for overlaps, seconds, _ in shared if overlaps and any(seconds)]
        self.waits = [
            (seconds, on.tolist()) for overlaps, seconds, on in shared if not overlaps and any(seconds)
        ]
        self.heads = heads
        self.target, self.step = LATEST, 0.0
        self.goal: Room | None = None
        self.spend: Room | None = None
        self.winner: ConstrainedSolution | None = None
        self._caps: dict[float, list[int]] = {}
        self._links: dict[int, list[float]] = {}

    def of_kinds(self, need: Floats) -> list[float]:
        """The need of one worker of each kind."""
        return [float(need[kind[0]]) for kind in self.kinds]

    def _switches(self) -> list[Switch]:
        """One switch for each set of workers that is used all or not at all, one for each other kind."""
        place = {int(worker): k for k, kind in enumerate(self.kinds) for worker in kind}
        tied: list[set[int]] = []
        for group in self.constrained.together:
            mine = {place[int(worker)] for worker in group}
            for other in [one for one in tied if one & mine]:
                tied.remove(other)
                mine |= other
            tied.append(mine)
        found = []
        for mine in tied:
            kinds = tuple(sorted(mine))
            must = any(self.required[k] for k in kinds)
            found.append(Switch(kinds, tuple(len(self.kinds[k]) for k in kinds), int(must), 1))
        for k in sorted(set(range(len(self.kinds))) - set().union(*tied)):
            most = len(self.kinds[k])
            found.append(Switch((k,), (1,), most if self.required[k] else 0, most))
        return found

    def run(self) -> bool:
        """Return whether a solution beats the target and the goal; the best is then the winner."""
        found = False
        low = tuple(one.least for one in self.switches)
        high = tuple(one.most for one in self.switches)
        boxes = [Box(low, high, 1, sum(map(len, self.kinds)))]
        visited = 0
        while boxes:
            box = boxes.pop()
            while True:
                visited += 1
                if visited > MOST_BOXES:
                    raise TooManyKinds(f"no proof within {MOST_BOXES} boxes")
                relaxed = self._relaxed(box)
                if relaxed is None:
                    break
                box, levels = relaxed
                choice = self._whole(levels)
                if not (self._wins(choice) and self._take(choice)):
                    boxes += self._halves(box, levels)
                    break
                found = True
        return found

    def _whole(self, levels: Sequence[float]) -> list[int]:
        """The levels as whole numbers: up if a need is minimised, so that they still do B, else down."""
        return [math.ceil(x) if self.goal else math.floor(x) for x in levels]

    def _counts(self, levels: Sequence[int]) -> list[int]:
        """Workers of each kind."""
        counts = [0] * len(self.kinds)
        for switch, level in zip(self.switches, levels, strict=True):
            for kind, workers in zip(switch.kinds, switch.workers, strict=True):
                counts[kind] = level * workers
        return counts

    def _to_beat(self, counts: Sequence[int]) -> float:
        """The latest end of an iteration with at least these workers."""
        if self.spend is None:
            return self.target
        spent = _sum(self.spend.need, counts)
        return min(self.target, self.spend.at_most / spent) if spent > 0 else self.target

    def _left(self, counts: Sequence[int], sync_seconds: float) -> float:
        """The seconds of compute that these workers have, at most."""
        return self.constrained.sync.compute_by(self._to_beat(counts), sync_seconds)

    def _sync(self, count: int, counts: Sequence[int]) -> float:
        """The synchronisation of `count` workers, at least, with these among them."""
        if self.constrained.sync.kind == "none":
            return 0.0
        if count not in self._links:
            self._links[count] = self.constrained.sync.by_link(count)[self.heads].tolist()
        links = self._links[count]
        used = [seconds for seconds, n in zip(links, counts, strict=True) if n]
        return max(used) if used else min(links)

    def _largest(self, left: float, counts: Sequence[int]) -> list[int]:
        """The largest batch of each kind by `left` seconds, apart from the waits for these workers."""
        if not self.waits:
            return self._by(left)
        behind = [left] * len(counts)
        for seconds, on in self.waits:
            others = _sum(seconds, counts)
            for k, mine in enumerate(on):
                if mine:
                    behind[k] -= others if counts[k] else others + seconds[k]
        return [self._by(by)[k] for k, by in enumerate(behind)]

    def _by(self, left: float) -> list[int]:
        if left not in self._caps:
            if len(self._caps) > MOST_BOXES:
                self._caps.clear()
            self._caps[left] = most_by(self.bounds, left).tolist() if left > 0 else [0] * len(self.kinds)
        return self._caps[left]

    def _relaxed(self, box: Box) -> tuple[Box, list[float]] | None:
        """The box without choices that cannot win, and the levels of its relaxation; None if none can win."""
        counts = self._counts(box.low)
        first, last = max(box.first, sum(counts)), min(box.last, sum(self._counts(box.high)))
        if first > last:
            return None
        left = self._left(counts, self._sync(first, counts))
        rooms = [Room(x.need, x.at_most - _sum(x.need, counts)) for x in self._rooms(left, last)]
        batches = self._largest(left, counts)
        late = any(n and not b for n, b in zip(counts, batches, strict=True))
        if late or any(room.at_most < 0 for room in rooms) or _sum(self.least_batch, counts) > self.total:
            return None
        worth = [_level(s, batches) if all(batches[k] for k in s.kinds) else 0.0 for s in self.switches]
        high = tuple(h if w else m for h, w, m in zip(box.high, worth, box.low, strict=True))
        box = Box(box.low, high, first, last)
        levels = self._filled(box, worth, rooms, self.total - _sum(batches, counts))
        return None if levels is None else (box, levels)

    def _rooms(self, left: float, last: int) -> list[Room]:
        """All limits: of needs, of the links' `left` seconds, and of the count of workers; the goal first."""
        rooms = [*self.rooms, *(Room(seconds, left) for seconds in self.links)]
        if self.goal is not None:
            rooms.insert(0, self.goal)
        return [*rooms, Room([1.0] * len(self.kinds), last)]

    def _filled(
        self, box: Box, worth: Sequence[float], rooms: Sequence[Room], missing: float
    ) -> list[float] | None:
        """The levels that do the missing samples within the tightest limit, in part; None if one cannot.

        box: the levels to choose from. worth: samples of one more level. rooms: what is left of each limit.
        """
        if missing <= 0:
            return [float(level) for level in box.low]
        tightest, found = math.inf, None
        for k, room in enumerate(rooms):
            enough = missing if self.goal is not None and k == 0 else math.inf
            need = [_level(switch, room.need) for switch in self.switches]
            total, levels = _knapsack(box, worth, need, room.at_most, enough)
            if total < missing - SAMPLE:
                return None
            if total < tightest:
                tightest, found = total, levels
        return found

    def _wins(self, levels: Sequence[int]) -> bool:
        """Return whether these levels keep every limit, and their workers can end before the time to beat."""
        counts = self._counts(levels)
        count = sum(counts)
        if not count:
            return False
        left = self._left(counts, self._sync(count, counts))
        if any(_sum(x.need, counts) > x.at_most for x in self._rooms(left, count)):
            return False
        batches = self._largest(left, counts)
        used = [k for k, n in enumerate(counts) if n]
        if any(not batches[k] for k in used):
            return False
        sets = [
            Progression(counts[k] * self.least_batch[k], counts[k] * batches[k], self.multiple[k])
            for k in used
        ]
        return meets(sets, self.total)

    def _take(self, levels: Sequence[int]) -> bool:
        """Make the best split over these levels' workers the winner, if it is better."""
        counts = self._counts(levels)
        workers = np.concatenate([k[:n] for k, n in zip(self.kinds, counts, strict=True)])
        found = evaluate(self.constrained, split_among(self.constrained, workers))
        if self.goal is not None:
            less = _sum(self.goal.need, counts) * (1 - max(self.step, ROUNDING))
            self.goal.at_most = math.nextafter(less, -math.inf)
        elif found.longest_seconds < self.target:
            self.target = found.longest_seconds * (1 - max(self.step, ROUNDING))
        else:
            return False
        self.winner = found
        return True

    def _halves(self, box: Box, levels: Sequence[float]) -> list[Box]:
        """The box in two parts, the one to search first last; none of a box with one choice."""
        if box.first < box.last and self._spread(box) > WORTH_COUNTING * self.target:
            middle, likely = (box.first + box.last) // 2, sum(self._counts(self._whole(levels)))
            parts = [replace(box, last=middle), replace(box, first=middle + 1)]
            return parts if likely > middle else parts[::-1]
        partly = [k for k, level in enumerate(levels) if level != math.floor(level)]
        k = partly[0] if partly else max(range(len(levels)), key=lambda k: box.high[k] - box.low[k])
        low, high = box.low[k], box.high[k]
        if low == high:
            return []
        at = math.floor(levels[k]) if partly else (low + high) // 2
        below = replace(box, high=(*box.high[:k], at, *box.high[k + 1 :]))
        above = replace(box, low=(*box.low[:k], at + 1, *box.low[k + 1 :]))
        return [below, above] if levels[k] - at > HALF else [above, below]

    def _spread(self, box: Box) -> float:
        """Return how many seconds later the most workers in the box synchronise than the fewest."""
        ones = [1] * len(self.kinds)
        return self._sync(box.last, ones) - self._sync(box.first, ones)


def _sum(need: Sequence[float], counts: Sequence[int]) -> float:
    return sum(x * n for x, n in zip(need, counts, strict=True) if n)


def _level(switch: Switch, need: Sequence[float]) -> float:
    """The need of one level of a switch."""
    return sum(need[kind] * workers for kind, workers in zip(switch.kinds, switch.workers, strict=True))


def _knapsack(
    box: Box, worth: Sequence[float], need: Sequence[float], left: float, enough: float
) -> tuple[float, list[float]]:
    """The most samples that levels, also in part, can add within what is left of a limit, and the levels.

    box: the levels to choose from. worth, need: of one more level. enough: samples, after which it stops.
    """
    levels = [float(level) for level in box.low]
    total = 0.0
    best = sorted(
        (k for k, w in enumerate(worth) if w), key=lambda k: -worth[k] / need[k] if need[k] else -math.inf
    )
    for k in best:
        more = float(box.high[k] - box.low[k])
        if need[k]:
            more = min(more, left / need[k])
        more = max(0.0, min(more, (enough - total) / worth[k]))  # rounding put a level below its box
        levels[k] += more
        left -= more * need[k]
        total += more * worth[k]
    return total, levels
