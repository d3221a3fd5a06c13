"""The best split where an iteration is known only by following its transfers over shared links.

round   without a pipeline, where nothing else ties the workers: exact, by slots. On a link of n workers
        the last to send may compute until one push before the end, the one before it until two, and so
        on, less n pulls. Which worker takes which slot, so that most samples are done by a time, is an
        assignment; the least such time is bisected
else    every split that may win is followed, depth first. A part of a split is given up where its own
        steps, the time of its transfers on a link, or the most samples a second of the rest leave it no
        chance. It begins with a local search, and ends after MOST_FOLLOWED or MOST_NODES: what is then
        proven is the bound of the problem in which transfers do not meet
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pyps.errors import Infeasible, needed
from pyps.solver.constrained import WITHIN, ConstrainedProblem, Limit, Resource, allowed, evaluate, observed
from pyps.solver.costs import Ints
from pyps.solver.exact.minmax import at_index, most_by, rounded, solve, times, within_total
from pyps.solver.goal import SetObjective
from pyps.solver.motion import MEASURED

MOST_NODES = 200_000  # parts of splits: about a second
MOST_ROUNDS, MOST_FOLLOWED = 60_000, 1_200  # splits, by workers: of rounds, which take 0.05 ms, and others
LEAST_FOLLOWED = 24
MOST_SLOTS = 96  # workers on a link
HALVINGS = 44
LEAST_STEP = 1e-13  # relative
SAME = 1e-12  # relative: by so much the same iteration differs where it is followed
AWAY = {"round": 0.0, "clock": 1 / MEASURED, "free": 2e-3, "turns": 0.0}  # a followed time may be so low


@dataclass(frozen=True)
class Followed:
    """A split's batches, its value by the goal, and the value below which none is proven to be."""

    batches: Ints
    value: float
    proven: float


def alone(constrained: ConstrainedProblem) -> ConstrainedProblem:
    """The problem in which each worker's transfers have their link for themselves: no split takes longer in
    it than in a run.
    """
    trips = constrained.trips
    if not trips or all(one.overlaps for one in constrained.resources):
        return replace(constrained, trips=())
    up, down, latency = (
        np.array([getattr(trip, key) for trip in trips])
        for key in ("up_seconds", "down_seconds", "latency_seconds")
    )
    resources = [one for one in constrained.resources if one.overlaps or one.samples_per_second is not None]
    resources = [replace(one, transfer_seconds=np.zeros(len(trips)), overlaps=True) for one in resources]
    for link in sorted({trip.link for trip in trips}):
        on = np.array([trip.link == link for trip in trips])
        if on.sum() > 1:
            even = len(set(up[on].tolist())) == len(set(down[on].tolist())) == 1  # all pulls end together
            ways = [up + down] if even else [up, down]
            resources += [Resource(f"link {link}", on, np.where(on, way, 0.0), None, True) for way in ways]
    own = 2 * latency + up + down
    costs = replace(constrained.problem.costs, transfer=own)
    problem = replace(constrained.problem, costs=costs)
    return replace(constrained, problem=problem, resources=tuple(resources), link_seconds=own, trips=())


def best_followed(
    constrained: ConstrainedProblem, goal: SetObjective, starts: Sequence[Ints], bound: float, plain: bool
) -> Followed | None:
    """The best split by the goal, where its iteration is followed; None if none is found.

    starts: splits to begin with. bound: a value below which no split is. plain: the goal is the shortest
    iteration.
    """
    searched = not constrained.pace.sized  # else only `starts` last
    if plain and searched and (found := _by_slots(constrained)) is not None:
        value = observed(constrained, found).iteration_seconds
        return Followed(found, value, value)
    if not plain:  # like workers are alike in these, too
        needs = [Limit(f"need {k}", need, math.inf) for k, need in enumerate(goal.needs)]
        constrained = replace(constrained, limits=(*constrained.limits, *needs))
    search = _Search(constrained, goal, bound)
    for batches in starts:
        search.try_(batches)
    search.leave_out()
    if searched:
        search.improve()
        search.descend()
    if search.best is None:
        return None
    proven = search.value if searched and search.whole else min(bound, search.value)
    return Followed(search.best, search.value, proven)


def _by_slots(constrained: ConstrainedProblem) -> Ints | None:
    """The optimum by assignments; None where more than the links of rounds ties the workers."""
    problem, trips = constrained.problem, constrained.trips
    links: dict[int, list[int]] = {}
    for k, trip in enumerate(trips):
        links.setdefault(trip.link, []).append(k)
    alike = [
        {(trips[k].up_seconds, trips[k].down_seconds, trips[k].latency_seconds) for k in mine}
        for mine in links.values()
    ]
    hosts = any(one.samples_per_second is not None for one in constrained.resources)
    multiple = int(problem.batch_multiple[0])
    simple = (problem.batch_multiple == multiple).all() and (problem.min_batch <= multiple).all()
    if (
        constrained.pace.kind != "round"
        or constrained.pace.spare
        or constrained.may_forbid
        or hosts
        or constrained.sync.kind != "none"
        or any(trip.depth > 1 for trip in trips)
        or any(len(found) > 1 for found in alike)
        or max(map(len, links.values())) > MOST_SLOTS
        or not simple
        or problem.required.any()
        or problem.global_batch % multiple
    ):
        return None
    return _Slots(constrained, list(links.values())).run()


class _Slots:
    """Rounds whose links' workers take slots, one after another. links: the workers of each link."""

    def __init__(self, constrained: ConstrainedProblem, links: list[list[int]]) -> None:
        self.constrained, self.links = constrained, links
        problem = within_total(rounded(constrained.problem))
        self.problem = replace(problem, costs=replace(problem.costs, transfer=None))
        self.total = problem.global_batch

    def run(self) -> Ints:
        first = solve(self.constrained.problem).batches  # raises where nothing fits
        best = first
        high, low = observed(self.constrained, first).iteration_seconds, 0.0
        for _ in range(HALVINGS):
            middle = low + (high - low) / 2
            if high - low <= LEAST_STEP * high:
                break
            if (found := self._by(middle)) is None:
                low = middle
            else:
                seconds = observed(self.constrained, found).iteration_seconds
                best, high = (found, seconds) if seconds < high else (best, middle)
        return best

    def _by(self, t: float) -> Ints | None:
        """Batches that are done by t; None if there are none."""
        batches = np.zeros(len(self.problem.max_batch), np.int64)
        for mine in self.links:
            batches[mine] = self._on_link(np.array(mine), t)
        over = int(batches.sum()) - self.total
        if over < 0:
            return None
        for k in np.argsort(-batches):
            less = min(int(batches[k]), over)
            batches[k] -= less
            over -= less
        return batches

    def _on_link(self, mine: Ints, t: float) -> Ints:
        """The most samples that a link's workers can do by t, by worker."""
        trip = self.constrained.trips[int(mine[0])]
        problem, count = at_index(self.problem, mine), len(mine)
        found: dict[float, Ints] = {}

        def by(seconds: float) -> Ints:
            if seconds not in found:
                found[seconds] = most_by(problem, seconds) if seconds > 0 else np.zeros(count, np.int64)
            return found[seconds]

        assign = needed("scipy.optimize", "plan").linear_sum_assignment
        best = np.zeros(count, np.int64)
        for used in range(1, count + 1):
            left = t - 2 * trip.latency_seconds - used * trip.down_seconds
            table = np.stack([by(left - slot * trip.up_seconds) for slot in range(1, used + 1)])
            if np.sort(table[0])[::-1][:used].sum() <= best.sum():
                continue
            slots, workers = assign(table, maximize=True)
            values = table[slots, workers]
            if values.sum() > best.sum():
                best = np.zeros(count, np.int64)
                best[workers] = values
        return best


class _Search:
    """The search of all splits; `best` has the value `value`. whole: nothing was left out."""

    def __init__(self, constrained: ConstrainedProblem, goal: SetObjective, bound: float) -> None:
        self.constrained, self.goal, self.bound = constrained, goal, bound
        self.lower = alone(constrained)
        self.problem = within_total(rounded(self.lower.problem))
        self.count, self.total = len(self.problem.max_batch), self.problem.global_batch
        self.kind, self.away = constrained.pace.kind, AWAY[constrained.pace.kind]
        self.best: Ints | None = None
        self.value = math.inf
        self.whole, self.nodes = True, 0
        rounds = self.kind == "round" and all(trip.depth == 1 for trip in constrained.trips)
        self.follows = max(LEAST_FOLLOWED, (MOST_ROUNDS if rounds else MOST_FOLLOWED) // self.count)
        self.known: set[tuple[int, ...]] = set()

    @property
    def wins(self) -> float:
        """The bound of a better split's value; of those that take the same, the first one found stays."""
        return self.value * (1 - SAME)

    def try_(self, batches: Ints) -> bool:
        """Follow a split; whether it is better than the best."""
        key = tuple(batches.tolist())
        if key in self.known or not self._fits(batches):
            return False
        self.known.add(key)
        least = evaluate(self.lower, batches).iteration_seconds * (1 - self.away)
        if self.goal.of(batches, least) >= self.wins:
            return False
        self.follows -= 1
        value = self.goal.of(batches, observed(self.constrained, batches).iteration_seconds)
        if value < self.wins:
            self.best, self.value = batches.copy(), value
            return True
        return False

    def _fits(self, batches: Ints) -> bool:
        problem, used = self.problem, batches > 0
        within = (batches <= problem.max_batch) & (batches % problem.batch_multiple == 0)
        within &= np.where(used, batches >= problem.min_batch, ~problem.required)
        return bool(within.all()) and int(batches.sum()) == self.total and allowed(self.lower, batches)

    def leave_out(self) -> None:
        """Leave another worker out while that helps; all others end together."""
        if self.best is None:
            return
        used, before = self.best > 0, self.value
        for k in np.flatnonzero(used & ~self.problem.required)[:16]:
            most = np.where(used & (np.arange(self.count) != k), self.problem.max_batch, 0)
            with contextlib.suppress(Infeasible):
                self.try_(solve(replace(self.problem, max_batch=most)).batches)
        if self.value < before and self.follows > 0:
            self.leave_out()

    def improve(self) -> None:
        """Move samples from worker to worker while that helps."""
        if self.best is None:
            return
        step = max(1, self.total // 8)
        share = self.follows // 2
        while step and self.follows > share:
            if not any(
                self.try_(batches) for batches in self._moved(self.best, step) if self.follows > share
            ):
                step //= 2

    def _moved(self, batches: Ints, step: int) -> Iterator[Ints]:
        """The splits with about `step` samples of one worker at another; of like workers the first alone."""
        firsts: dict[tuple[int, int], int] = {}
        for place, kind in enumerate(self.constrained.kinds()):
            for k in kind:
                firsts.setdefault((place, int(batches[k])), k)
        for one, other in itertools.permutations(firsts.values(), 2):
            unit = math.lcm(*self.problem.batch_multiple[[one, other]].tolist())
            moved = min(-(-step // unit) * unit, int(batches[one]))
            following = batches.copy()
            following[one] -= moved
            following[other] += moved
            yield following

    def descend(self) -> None:
        """Follow every split that may win, while there is time."""
        kinds = self.constrained.kinds()
        self.order = [k for kind in kinds for k in kind]
        self.alike = [j > 0 for kind in kinds for j in range(len(kind))]
        costs, problem = self.problem.costs, self.problem
        self.own: list[list[float]] = []
        if self.total * self.count > MOST_NODES:
            self.whole = False
            return
        for k in self.order:
            batches = np.arange(1, int(problem.max_batch[k]) + 1, dtype=np.int64)
            own = times(costs.take(np.full(len(batches), k)), batches).tolist() if len(batches) else []
            self.own.append([0.0, *own])
        self.most = [len(own) - 1 for own in self.own]
        self.links = [
            [float(x) for x in np.where(one.workers, one.transfer_seconds, 0.0)[self.order]]
            for one in self.lower.resources
            if one.overlaps and self.kind != "free"
        ]
        self.suffix = self._most_rates() if self.kind == "free" else []
        self._bound()
        self._down(0, self.total, [], 0.0, 0.0)

    def _bound(self) -> None:
        """Find the most samples of each worker in a step that may win, and of all from each on."""
        if self.kind != "free":
            none = [0.0] * len(self.goal.needs)
            for place, own in enumerate(self.own):
                steps = np.array(own[: self.most[place] + 1]) * (1 - self.away)
                may_win = np.flatnonzero(self.goal.value(steps, *none) < self.wins)
                self.most[place] = int(may_win.max(initial=0))
        self.rest = np.cumsum([0, *self.most[::-1]])[::-1].tolist()

    def _most_rates(self) -> list[list[float]]:
        """The most samples a second that the workers from each on can do with each sum."""
        suffix = [[0.0] + [-math.inf] * self.total]
        for own in reversed(self.own):
            before, found = np.array(suffix[-1]), np.array(suffix[-1])
            for batch in range(1, min(len(own) - 1, self.total) + 1):
                trial = before[: self.total + 1 - batch] + batch / own[batch]
                np.maximum(found[batch:], trial, out=found[batch:])
            suffix.append(found.tolist())
        return suffix[::-1]

    def _down(self, place: int, left: int, batches: list[int], longest: float, rate: float) -> None:
        """Every split that begins with these batches of the first workers."""
        self.nodes += 1
        if self.nodes > MOST_NODES or self.follows <= 0:
            self.whole = False
            return
        if not self._may_win(place, left, batches, longest, rate):
            return
        if place == self.count:
            found = np.zeros(self.count, np.int64)
            found[self.order] = batches
            if self.try_(found):
                self._bound()
            return
        k = self.order[place]
        low, step = int(self.problem.min_batch[k]), int(self.problem.batch_multiple[k])
        most = min(left, self.most[place])
        if self.alike[place]:
            most = min(most, batches[-1])
        for batch in [*range(most // step * step, max(low, 1) - 1, -step), 0]:
            if left - batch > self.rest[place + 1] or (batch == 0 and self.problem.required[k]):
                break
            own = self.own[place][batch]
            more = rate + (batch / own if batch else 0.0)
            self._down(place + 1, left - batch, [*batches, batch], max(longest, own), more)

    def _may_win(self, place: int, left: int, batches: list[int], longest: float, rate: float) -> bool:
        """Return whether a split that begins with these batches may be better than the best."""
        used = [self.order[j] for j, batch in enumerate(batches) if batch]
        for limit in self.lower.limits:
            if limit.need[used].sum() > limit.at_most * WITHIN:
                return False
        if self.kind == "free":
            most = rate + self.suffix[place][left]
            if most <= 0:
                return False
            seconds = self.total / most
        else:
            busy = [sum(one[j] for j, batch in enumerate(batches) if batch) for one in self.links]
            seconds = max([longest, *busy])
        needs = (float(need[used].sum()) for need in self.goal.needs)
        return float(self.goal.value(seconds * (1 - self.away), *needs)) < self.wins
