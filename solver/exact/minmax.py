"""The exact batch split: every worker as much as it can finish by the earliest time at which all is done.

    min  max_{i: b_i > 0} T_i(b_i)    s.t.  sum b_i = B,  b_i in {0} or [low_i, cap_i],  b_i a multiple of q_i

with T_i nondecreasing and b_i = 0 barred for required workers. This is BOA's min-max integer program (Yang,
Kang, Youn, J. Supercomputing 76, 2020); how to solve it exactly is ours:

Whether B can be done by time t is monotone in t, and the answer is one of the values T_i(b), so t is bisected
until the values left can be listed, and then these are: exact to the last bit, no tolerance (`earliest`).

Where all quanta are equal and all minima fit together, "by time t" asks whether the workers' largest batches
sum to B or more (`_split_by_order`). Where quanta differ, or minima exclude one another, it asks whether one
integer from each of several sets sums to B, which pyps.solver.exact.subset_sum answers exactly
(`_split_by_sums`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pyps.errors import Infeasible
from pyps.solver.costs import Costs, Floats, Ints
from pyps.solver.exact.subset_sum import Choice, nearest_sums, sums_to

NO_CAP = 2**31 - 1
LIST_AT_MOST = 1024  # candidate times; sorting so few is cheaper than another pass over the workers

AIM_PAST = LIST_AT_MOST // 4
SAMPLED = 4096  # workers that stand for all in a first estimate

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Problem:
    """One instance; arrays have one entry a worker, batches are in samples.

    low binds only a worker that is used; required workers are used; batches are multiples of quantum.
    """

    costs: Costs
    global_batch: int
    low: Ints
    cap: Ints
    quantum: Ints
    required: Bools

    @staticmethod
    def of(
        costs: Costs,
        global_batch: int,
        *,
        low: npt.ArrayLike = 1,
        cap: npt.ArrayLike = NO_CAP,
        quantum: npt.ArrayLike = 1,
        required: npt.ArrayLike = False,
    ) -> Problem:
        """A Problem in which a scalar stands for all workers. Raises ValueError for values out of range."""
        n = len(costs)
        lows, caps, quanta = (np.broadcast_to(np.asarray(x, np.int64), n) for x in (low, cap, quantum))
        in_range = all(((x >= 0) & (x <= NO_CAP)).all() for x in (lows, caps, quanta))
        if not n or not 1 <= global_batch <= NO_CAP or not in_range or (quanta < 1).any():
            raise ValueError(
                f"not a problem: {n} workers, B = {global_batch}, or a bound outside 0..{NO_CAP}"
            )
        return Problem(
            costs, global_batch, lows, caps, quanta, np.broadcast_to(np.asarray(required, bool), n)
        )


@dataclass(frozen=True)
class Solution:
    """Batches (sum = global batch; 0 = left out), their predicted seconds (0 where left out), and the max."""

    batches: Ints
    seconds: Floats
    iteration_seconds: float


def solve(problem: Problem) -> Solution:
    """The optimum of the program above. Raises Infeasible with the reason and the nearest feasible B.

    Deterministic: permuting the workers gives the same times and the same multiset of batches.
    """
    bounds = rounded(problem)
    check_range(bounds)
    cap = np.minimum(bounds.cap, problem.global_batch // bounds.quantum * bounds.quantum)
    tight = replace(bounds, cap=np.where(cap < bounds.low, 0, cap))
    used = tight.cap > 0
    quanta = tight.quantum[used]
    binding = used & (tight.required | (tight.low > tight.quantum))
    if (quanta != quanta[:1]).any() or int(tight.low[binding].sum()) > problem.global_batch:
        batches = _split_by_sums(tight)
    else:
        fits = len(quanta) and int(tight.cap.sum()) >= problem.global_batch
        batches = _split_by_order(tight) if fits and problem.global_batch % quanta[0] == 0 else None
    if batches is None:
        raise refusal_of(bounds, "no batches within the minima, maxima and quanta of the workers sum to it")
    seconds = times(problem.costs, batches)
    return Solution(batches, seconds, float(seconds.max()))


def times(costs: Costs, batches: Ints) -> Floats:
    """T_i(b_i) in seconds, and 0 where b_i = 0: a worker that is left out holds nobody up."""
    return np.where(batches > 0, costs.seconds(np.maximum(batches, 1)), 0.0)


def rounded(problem: Problem) -> Problem:
    """Bounds as multiples of the quantum, at least one quantum if used; cap 0 for who can take no batch."""
    q = problem.quantum
    low = -(-np.maximum(problem.low, 1) // q) * q
    cap = problem.costs.largest_batch(np.finfo(float).max, problem.costs.last_batch(problem.cap)) // q * q
    shut = cap < low
    if (shut & problem.required).any():
        k = int(np.argmax(shut & problem.required))
        raise Infeasible(
            f"required worker {k} can take no batch: at least {low[k]}, at most {cap[k]}, in steps of {q[k]}",
            "lower its minimum or quantum, raise its maximum, or do not require it",
        )
    return replace(problem, low=low, cap=np.where(shut, 0, cap))


def check_range(problem: Problem) -> None:
    least, most = int(problem.low[problem.required].sum()), int(problem.cap.sum())
    if problem.global_batch > most:
        nearest = f"the largest feasible global_batch is {most}" if most else "no worker can take any batch"
        raise Infeasible(f"global_batch {problem.global_batch}: the workers' maxima sum to {most}", nearest)
    if problem.global_batch < least:
        raise Infeasible(
            f"global_batch {problem.global_batch}: the minima of the required workers sum to {least}",
            f"the smallest feasible global_batch is {least}",
        )


def refusal_of(bounds: Problem, reason: str) -> Infeasible:
    choices, _ = _choices(bounds, bounds.cap)
    nearest = " or ".join(map(str, nearest_sums(choices, bounds.global_batch)))
    text = f"the nearest feasible global_batch is {nearest}" if nearest else ""
    return Infeasible(f"global_batch {bounds.global_batch}: {reason}", text)


def most_by(problem: Problem, t: float) -> Ints:
    """Each worker's largest allowed batch with T_i <= t, 0 if none; a required worker's least anyway."""
    batch = problem.costs.largest_batch(t, problem.cap)
    if (problem.quantum > 1).any():
        # In floating point, five times as fast and exact: batches and quanta are below 2**31.
        batch = (np.floor(batch / problem.quantum) * problem.quantum).astype(np.int64)
    return np.where(batch < problem.low, np.where(problem.required, problem.low, 0), batch)


def earliest(problem: Problem, enough: Callable[[Ints], bool], latest: float = math.inf) -> float | None:
    """The smallest t <= latest for which enough(most_by(t)), which is monotone in t; None if there is none.

    The bracket of t is narrowed until few values of T lie in it; among these it is bisected.
    """
    slow, shigh = 0.0, min(latest, float(times(problem.costs, problem.cap).max()))
    below, above = most_by(problem, slow), most_by(problem, shigh)
    if enough(below):
        return slow
    if not enough(above):
        return None
    for t in _about(problem, slow, shigh):
        if slow < t < shigh:
            batch = most_by(problem, t)
            if enough(batch):
                shigh, above = t, batch
            else:
                slow, below = t, batch
    below, above, shigh = _narrowed(problem, enough, (below, above), slow, shigh)
    if _count_between(problem, below, above) > LIST_AT_MOST:
        return shigh
    candidates = np.unique(_times_between(problem, below, above))
    low, high = -1, len(candidates) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if enough(_most_between(problem, below, above, float(candidates[middle]))):
            high = middle
        else:
            low = middle
    return float(candidates[high])


def _about(problem: Problem, slow: float, shigh: float) -> tuple[float, ...]:
    """Two times that are likely to enclose the answer, from some of many workers; none for few workers."""
    n = len(problem.costs)
    if n < 4 * SAMPLED:
        return ()
    some = at_index(problem, np.arange(0, n, n // SAMPLED))
    some = replace(some, global_batch=problem.global_batch * len(some.costs) // n)
    ends = most_by(some, slow), most_by(some, shigh)
    t = _narrowed(some, lambda batch: int(batch.sum()) >= some.global_batch, ends, slow, shigh)[2]
    return t * (1 - SAMPLED**-0.5), t * (1 + SAMPLED**-0.5)


def _narrowed(
    problem: Problem, enough: Callable[[Ints], bool], ends: tuple[Ints, Ints], slow: float, shigh: float
) -> tuple[Ints, Ints, float]:
    """Batches below and above the answer with few values of T between, or none in floating point, and the
    time of the latter.

    Two steps of three are regula falsi on the sum of the batches, which B is expected to meet, with the
    Illinois rule (an end that stays counts half), aimed a little past B so that the other end moves next; the
    third halves, whatever `enough` asks for.
    """
    below, above = ends
    missing = float(problem.global_batch - int(below.sum()))
    excess = float(int(above.sum()) - problem.global_batch)
    moved_up: bool | None = None
    step = 0
    while _count_between(problem, below, above) > LIST_AT_MOST:
        aim = 0 if moved_up is None else AIM_PAST if moved_up else -AIM_PAST
        share = (missing + aim) / max(missing + excess, 1) if step % 3 < 2 else 0.5
        t = slow + (shigh - slow) * share
        if not slow < t < shigh:
            t = slow + (shigh - slow) / 2
            if not slow < t < shigh:
                break
        batch = _most_between(problem, below, above, t)
        up = not enough(batch)
        if up:
            slow, below, missing = t, batch, float(problem.global_batch - int(batch.sum()))
            excess = excess / 2 if moved_up is True else excess
        else:
            shigh, above, excess = t, batch, float(int(batch.sum()) - problem.global_batch)
            missing = missing / 2 if moved_up is False else missing
        moved_up, step = up, step + 1
    return below, above, shigh


def _most_between(problem: Problem, below: Ints, above: Ints, t: float) -> Ints:
    """most_by(t) for a t between those of `below` and `above`: only those who differ have to be asked."""
    open_ = np.flatnonzero(above > below)
    if 2 * len(open_) > len(below):
        return most_by(problem, t)
    batch = below.copy()
    batch[open_] = most_by(at_index(problem, open_), t)
    return batch


def _first_above(problem: Problem, below: Ints) -> Ints:
    """Each worker's next allowed batch."""
    following: Ints = np.maximum(below + problem.quantum, problem.low)
    return following


def _count_between(problem: Problem, below: Ints, above: Ints) -> int:
    steps = (above - _first_above(problem, below)) // problem.quantum + 1
    return int(np.where(above > below, steps, 0).sum())


def _times_between(problem: Problem, below: Ints, above: Ints) -> Floats:
    """T_i of every allowed batch above below_i and up to above_i."""
    first = _first_above(problem, below)
    count = np.where(above > below, (above - first) // problem.quantum + 1, 0)
    owner = np.repeat(np.arange(len(count)), count)
    position = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    return problem.costs.take(owner).seconds(first[owner] + position * problem.quantum[owner])


def _split_by_order(problem: Problem) -> Ints:
    """The optimum where one quantum divides B, B is within range and the binding minima fit together.

    All that is done strictly before t, and of what ends exactly at t, to each in proportion, what is missing.
    """
    total = problem.global_batch
    t = earliest(problem, lambda batch: int(batch.sum()) >= total)
    if t is None:
        raise ValueError("the caps sum to less than the global batch")
    full = most_by(problem, t)
    used = full > 0
    gap = ~problem.required & (problem.low > problem.quantum)
    if (used & gap).any():
        # Below their minimum lies only 0: hold those that are used to it, let the others go, share out again.
        low, cap = np.where(gap & ~used, 0, problem.low), np.where(gap & ~used, 0, problem.cap)
        return _split_by_order(replace(problem, low=low, cap=cap, required=problem.required | (used & gap)))
    under = most_by(problem, math.nextafter(t, -math.inf))
    quantum = int(problem.quantum[used][0]) if used.any() else 1
    missing = (total - int(under.sum())) // quantum
    return under + quantum * _share(missing, (full - under) // quantum, np.lexsort((full, under)))


def _share(missing: int, spare: Ints, order: Ints) -> Ints:
    """`missing` units in proportion to the spare ones, never above them; remainders one each, in `order`."""
    given = missing * spare // max(int(spare.sum()), 1)
    rest = missing - int(given.sum())
    open_ = order[(given < spare)[order]]
    given[open_[:rest]] += 1
    return given


def _split_by_sums(problem: Problem) -> Ints | None:
    """The optimum for any quanta and minima; None where no batches sum to B.

    Sums settle t, who is used and what each quantum's workers do together; these then share by order.
    """
    order = _canonical_order(problem)
    problem = at_index(problem, order)
    total = problem.global_batch

    def enough(batch: Ints) -> bool:
        return int(batch.sum()) >= total and sums_to(_choices(problem, batch)[0], total) is not None

    t = earliest(problem, enough)
    if t is None:
        return None
    choices, owners = _choices(problem, most_by(problem, t))
    values = sums_to(choices, total) or []
    batches = np.zeros(len(order), np.int64)
    for quantum in np.unique(problem.quantum):
        picked = [
            (owner, choice, value)
            for owner, choice, value in zip(owners, choices, values, strict=True)
            if problem.quantum[owner[0]] == quantum and value
        ]
        if not picked:
            continue
        members = np.concatenate([owner for owner, _, _ in picked])
        group = at_index(problem, members)
        held = np.concatenate([np.full(len(owner), choice.skip) for owner, choice, _ in picked])
        share = sum(value for _, _, value in picked)
        group = replace(group, global_batch=share, required=group.required | held)
        batches[order[members]] = _split_by_order(group)
    return batches


def _choices(problem: Problem, most: Ints) -> tuple[list[Choice], list[Ints]]:
    """The sets that the batches come from, and whose they are: one a quantum for those without a gap between
    0 and their minimum (or without a 0), whose sums have none either; one each for the others."""
    choices, owners = [], []
    gapless = problem.required | (problem.low <= problem.quantum)
    for quantum in np.unique(problem.quantum):
        members = np.flatnonzero(gapless & (problem.quantum == quantum) & (most > 0))
        if len(members):
            least = int(problem.low[members][problem.required[members]].sum())
            choices.append(Choice(least, int(most[members].sum()), int(quantum)))
            owners.append(members)
    for k in np.flatnonzero(~gapless & (most > 0)):
        choices.append(Choice(int(problem.low[k]), int(most[k]), int(problem.quantum[k]), skip=True))
        owners.append(np.array([k]))
    return choices, owners


def at_index(problem: Problem, index: Ints) -> Problem:
    return replace(
        problem,
        costs=problem.costs.take(index),
        low=problem.low[index],
        cap=problem.cap[index],
        quantum=problem.quantum[index],
        required=problem.required[index],
    )


def _canonical_order(problem: Problem) -> Ints:
    """Workers by what they are, not by where they stand: equal ones alone keep their order."""
    costs = problem.costs
    keys = (*costs.keys(), problem.required, problem.low, problem.cap, problem.quantum)
    return np.lexsort(keys)
