"""Splits a global batch exactly so that the slowest worker finishes as early as possible.

    min  max_{i: b_i > 0} T_i(b_i)    s.t.  sum b_i = B,  b_i = 0 or min_i <= b_i <= max_i,  q_i divides b_i

with T_i nondecreasing; required workers must have b_i > 0. Where workers draw on one pool of memory,
sum each_i b_i <= at_most too. This is BOA's min-max integer program (Yang, Kang,
Youn, J. Supercomputing 76, 2020). The exact solution method is ours:

Whether B samples can be done by time t is monotone in t, and the optimum is one of the values T_i(b). So
`earliest` narrows t until few values remain, and then bisects these. The result is exact to the last bit.

If all batch multiples q_i are equal and the binding minima fit into B together, B can be done by time t if
the workers' largest batches by t sum to at least B (`_split_by_order`). Otherwise one integer from each of
several sets must sum to B, which pyps.solver.exact.subset_sum decides exactly (`_split_by_sums`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pyps.errors import Infeasible, PypsError
from pyps.formats import MAX_BATCH
from pyps.solver.costs import Costs, Floats, Ints
from pyps.solver.exact.subset_sum import Progression, nearest_sums, subset_sum

LIST_AT_MOST = 1024  # candidate times; sorting this few is cheaper than another pass over the workers
AIM_PAST = LIST_AT_MOST // 4
GUESSES = 8  # how many optional workers are tried before all their choices are
SAMPLED = 4096  # workers in the sample that gives a first estimate

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Pool:
    """Memory that all workers have together: sum each_i b_i <= at_most, `each` in bytes a sample."""

    each: Floats
    at_most: float

    def fits(self, batches: Ints) -> bool:
        """Return whether these batches take no more."""
        return float(self.each @ batches) <= self.at_most


class NotAlike(PypsError):
    """The splits within a pool are not those of one batch multiple, or a worker may be left out."""


@dataclass(frozen=True)
class Problem:
    """One instance; arrays have one entry a worker, batches are in samples.

    min_batch binds only a worker that is used. required: the worker must be used. Each batch is a multiple of
    the worker's batch_multiple. pool: what all batches may take together; None: any sum of memory. at_once:
    the samples of a micro-batch that a pool leaves each worker; None: as its costs say. local_steps: that a
    round's samples are split over: a cluster file says the samples of one.
    """

    costs: Costs
    global_batch: int
    min_batch: Ints
    max_batch: Ints
    batch_multiple: Ints
    required: Bools
    pool: Pool | None = None
    at_once: Ints | None = None
    local_steps: int = 1

    @property
    def named(self) -> str:
        """The batch as a refusal names it."""
        round_of = f", {self.global_batch} samples a round" * (self.local_steps > 1)
        return f"global_batch {self.global_batch // self.local_steps}{round_of}"

    @staticmethod
    def of(
        costs: Costs,
        global_batch: int,
        *,
        min_batch: npt.ArrayLike = 1,
        max_batch: npt.ArrayLike = MAX_BATCH,
        batch_multiple: npt.ArrayLike = 1,
        required: npt.ArrayLike = False,
    ) -> Problem:
        """A Problem from scalars (the same for all workers) or arrays with one entry a worker.

        costs: T_i of each worker. global_batch: samples to split. min_batch, max_batch, batch_multiple:
        bounds in samples. required: the worker must be used. Raises ValueError for values out of range.
        """
        n = len(costs)
        bounds = (np.broadcast_to(np.asarray(x, np.int64), n) for x in (min_batch, max_batch, batch_multiple))
        low, high, multiple = bounds
        in_range = all(((x >= 0) & (x <= MAX_BATCH)).all() for x in (low, high, multiple))
        if not n or not 1 <= global_batch <= MAX_BATCH or not in_range or (multiple < 1).any():
            raise ValueError(
                f"not a problem: {n} workers, B = {global_batch}, or a bound outside 0..{MAX_BATCH}"
            )
        must = np.broadcast_to(np.asarray(required, bool), n)
        return Problem(costs, global_batch, low, high, multiple, must)

    def keys(self) -> tuple[npt.NDArray[Any], ...]:
        """Sort keys, one entry a worker: workers with equal keys are interchangeable in this problem."""
        pooled = () if self.pool is None else (self.pool.each,)
        bounds = self.required, self.min_batch, self.max_batch, self.batch_multiple
        return *self.costs.keys(), *bounds, *pooled


@dataclass(frozen=True)
class Solution:
    """Batches (sum = global batch; 0 = left out), their predicted seconds (0 where left out), and the max."""

    batches: Ints
    seconds: Floats
    iteration_seconds: float


def solve(problem: Problem) -> Solution:
    """The optimum of the program above. Raises Infeasible with the reason and the nearest feasible B, and
    NotAlike where it is not found this way.

    Deterministic: permuting the workers gives the same times and the same multiset of batches.
    """
    bounds = rounded(problem)
    _check_range(bounds)
    tight = within_total(bounds)
    used = tight.max_batch > 0
    multiples = tight.batch_multiple[used]
    binding = used & (tight.required | (tight.min_batch > tight.batch_multiple))
    if (multiples != multiples[:1]).any() or int(tight.min_batch[binding].sum()) > problem.global_batch:
        batches = _split_by_sums(tight)
    else:
        fits = len(multiples) and int(tight.max_batch.sum()) >= problem.global_batch
        batches = _split_by_order(tight) if fits and problem.global_batch % multiples[0] == 0 else None
    if batches is None:
        raise _refusal(bounds, "no batches within the workers' minima, maxima and batch multiples sum to it")
    if tight.pool is not None and not tight.pool.fits(batches):
        batches = _split_by_pool(tight, tight.pool)
    seconds = times(problem.costs, batches)
    return Solution(batches, seconds, float(seconds.max()))


def times(costs: Costs, batches: Ints) -> Floats:
    """T_i(b_i) in seconds, and 0 where b_i = 0: a worker that is left out delays no other."""
    return np.where(batches > 0, costs.seconds(np.maximum(batches, 1)), 0.0)


def rounded(problem: Problem) -> Problem:
    """The bounds rounded to batch multiples; min_batch at least one multiple, max_batch 0 if no batch fits.

    Raises Infeasible if a required worker can take no batch.
    """
    q = problem.batch_multiple
    low = -(-np.maximum(problem.min_batch, 1) // q) * q
    defined = problem.costs.last_batch(problem.max_batch)
    high = problem.costs.largest_batch(np.finfo(float).max, defined) // q * q
    shut = high < low
    if (shut & problem.required).any():
        k = int(np.argmax(shut & problem.required))
        raise Infeasible(
            f"required worker {k} can take no batch: "
            f"at least {low[k]}, at most {high[k]}, in steps of {q[k]}",
            "lower its min_batch or batch_multiple, raise its max_batch, or do not require it",
        )
    return replace(problem, min_batch=low, max_batch=np.where(shut, 0, high))


def within_total(bounds: Problem) -> Problem:
    """The same bounds with no maximum above B; max_batch 0 where the minimum then no longer fits."""
    most = np.minimum(bounds.max_batch, bounds.global_batch // bounds.batch_multiple * bounds.batch_multiple)
    return replace(bounds, max_batch=np.where(most < bounds.min_batch, 0, most))


def _check_range(problem: Problem) -> None:
    least, most = int(problem.min_batch[problem.required].sum()), int(problem.max_batch.sum())
    if problem.global_batch > most:
        nearest = f"the largest feasible global_batch is {most}" if most else "no worker can take any batch"
        raise Infeasible(f"{problem.named}: the workers' maxima sum to {most}", nearest)
    if problem.global_batch < least:
        raise Infeasible(
            f"{problem.named}: the minima of the required workers sum to {least}",
            f"the smallest feasible global_batch is {least}",
        )


def _refusal(bounds: Problem, reason: str) -> Infeasible:
    sets, _ = _sets_of(bounds, bounds.max_batch)
    nearest = " or ".join(map(str, nearest_sums(sets, bounds.global_batch)))
    text = f"the nearest feasible global_batch is {nearest}" if nearest else ""
    return Infeasible(f"{bounds.named}: {reason}", text)


def most_by(problem: Problem, t: float) -> Ints:
    """Each worker's largest allowed batch with T_i <= t, 0 if none; at least its minimum if required."""
    batch = problem.costs.largest_batch(t, problem.max_batch)
    if (problem.batch_multiple > 1).any():
        # In floating point, five times as fast and exact: batches and multiples are below 2**31.
        batch = (np.floor(batch / problem.batch_multiple) * problem.batch_multiple).astype(np.int64)
    return np.where(batch < problem.min_batch, np.where(problem.required, problem.min_batch, 0), batch)


def earliest(problem: Problem, enough: Callable[[Ints], bool], latest: float = math.inf) -> float | None:
    """The smallest t <= latest for which enough(most_by(t)), which is monotone in t; None if there is none.

    The bracket of t is narrowed until few values of T lie in it; then these values are bisected.
    """
    t_low, t_high = 0.0, min(latest, float(times(problem.costs, problem.max_batch).max()))
    below, above = most_by(problem, t_low), most_by(problem, t_high)
    if enough(below):
        return t_low
    if not enough(above):
        return None
    for t in _about(problem, t_low, t_high):
        if t_low < t < t_high:
            batch = most_by(problem, t)
            if enough(batch):
                t_high, above = t, batch
            else:
                t_low, below = t, batch
    below, above, t_high = _narrowed(problem, enough, (below, above), t_low, t_high)
    if _count_between(problem, below, above) > LIST_AT_MOST:
        return t_high
    candidates = np.unique(_times_between(problem, below, above))
    low, high = -1, len(candidates) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if enough(_most_between(problem, below, above, float(candidates[middle]))):
            high = middle
        else:
            low = middle
    return float(candidates[high])


def _about(problem: Problem, t_low: float, t_high: float) -> tuple[float, ...]:
    """Two times that probably enclose the answer, from a sample of the workers; none if there are few."""
    n = len(problem.costs)
    if n < 4 * SAMPLED:
        return ()
    some = at_index(problem, np.arange(0, n, n // SAMPLED))
    some = replace(some, global_batch=problem.global_batch * len(some.costs) // n)
    ends = most_by(some, t_low), most_by(some, t_high)
    t = _narrowed(some, lambda batch: int(batch.sum()) >= some.global_batch, ends, t_low, t_high)[2]
    return t * (1 - SAMPLED**-0.5), t * (1 + SAMPLED**-0.5)


def _narrowed(
    problem: Problem, enough: Callable[[Ints], bool], ends: tuple[Ints, Ints], t_low: float, t_high: float
) -> tuple[Ints, Ints, float]:
    """Narrows the bracket until few values of T lie in it: the batches at both ends, and the upper end's
    time.

    problem: the bounds. enough: the monotone question. ends: the batches at the times t_low and t_high,
    seconds. Two steps of three are regula falsi on the sum of the batches, with the Illinois rule (the
    deviation of an end that stays is halved), aimed slightly past B so that the other end moves next. Every
    third step halves the bracket.
    """
    below, above = ends
    missing = float(problem.global_batch - int(below.sum()))
    excess = float(int(above.sum()) - problem.global_batch)
    moved_up: bool | None = None
    step = 0
    while _count_between(problem, below, above) > LIST_AT_MOST:
        aim = 0 if moved_up is None else AIM_PAST if moved_up else -AIM_PAST
        share = (missing + aim) / max(missing + excess, 1) if step % 3 < 2 else 0.5
        t = t_low + (t_high - t_low) * share
        if not t_low < t < t_high:
            t = t_low + (t_high - t_low) / 2
            if not t_low < t < t_high:
                break
        batch = _most_between(problem, below, above, t)
        up = not enough(batch)
        if up:
            t_low, below, missing = t, batch, float(problem.global_batch - int(batch.sum()))
            excess = excess / 2 if moved_up is True else excess
        else:
            t_high, above, excess = t, batch, float(int(batch.sum()) - problem.global_batch)
            missing = missing / 2 if moved_up is False else missing
        moved_up, step = up, step + 1
    return below, above, t_high


def _most_between(problem: Problem, below: Ints, above: Ints, t: float) -> Ints:
    """most_by(t) for a t between the times of `below` and `above`; computed only where these differ."""
    open_ = np.flatnonzero(above > below)
    if 2 * len(open_) > len(below):
        return most_by(problem, t)
    batch = below.copy()
    batch[open_] = most_by(at_index(problem, open_), t)
    return batch


def _first_above(problem: Problem, below: Ints) -> Ints:
    """Each worker's next allowed batch."""
    following: Ints = np.maximum(below + problem.batch_multiple, problem.min_batch)
    return following


def _count_between(problem: Problem, below: Ints, above: Ints) -> int:
    steps = (above - _first_above(problem, below)) // problem.batch_multiple + 1
    return int(np.where(above > below, steps, 0).sum())


def _times_between(problem: Problem, below: Ints, above: Ints) -> Floats:
    """T_i of every allowed batch above below_i and up to above_i."""
    first = _first_above(problem, below)
    count = np.where(above > below, (above - first) // problem.batch_multiple + 1, 0)
    owner = np.repeat(np.arange(len(count)), count)
    position = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    return problem.costs.take(owner).seconds(first[owner] + position * problem.batch_multiple[owner])


def _split_by_order(problem: Problem) -> Ints:
    """The optimum where one multiple divides B, B is within range and the binding minima fit together.

    Takes all samples that finish before t, and shares the rest in proportion to what finishes exactly at t.
    """
    total = problem.global_batch
    t = earliest(problem, lambda batch: int(batch.sum()) >= total)
    if t is None:
        raise ValueError("the maxima sum to less than the global batch")
    full = most_by(problem, t)
    used = full > 0
    gap = ~problem.required & (problem.min_batch > problem.batch_multiple)
    if (used & gap).any():
        # Below a minimum lies only 0: require the workers in use, drop the unused ones, and split again.
        low, high = np.where(gap & ~used, 0, problem.min_batch), np.where(gap & ~used, 0, problem.max_batch)
        return _split_by_order(
            replace(problem, min_batch=low, max_batch=high, required=problem.required | (used & gap))
        )
    under = most_by(problem, math.nextafter(t, -math.inf))
    multiple = int(problem.batch_multiple[used][0]) if used.any() else 1
    missing = (total - int(under.sum())) // multiple
    return under + multiple * _share(missing, (full - under) // multiple, np.lexsort((full, under)))


def _split_by_pool(problem: Problem, pool: Pool) -> Ints:
    """The optimum where the pool binds: by the earliest time at which B fits it, by those that need least."""
    if (pool.each == pool.each[0]).all():  # then it matters what the batches sum to, not how they are split
        raise too_large(problem.global_batch, float(pool.each[0]) * problem.global_batch, pool.at_most)
    if not problem.required.all() or (problem.batch_multiple != problem.batch_multiple[0]).any():
        raise NotAlike("a pool of unlike needs, and unlike batch multiples")

    def fits(most: Ints) -> bool:
        return pool.fits(_leanest(problem, most, pool)) and int(most.sum()) >= problem.global_batch

    t = earliest(problem, fits)
    if t is None:
        leanest = _leanest(problem, problem.max_batch, pool)
        raise too_large(problem.global_batch, float(pool.each @ leanest), pool.at_most)
    batches = _leanest(problem, most_by(problem, t), pool)
    for each in np.unique(pool.each):  # among workers of like needs, those that end last set the split
        like = np.flatnonzero(pool.each == each)
        part = replace(at_index(problem, like), pool=None, global_batch=int(batches[like].sum()))
        batches[like] = _split_by_order(part)
    return batches


def _leanest(problem: Problem, most: Ints, pool: Pool) -> Ints:
    """B or, if they are fewer, all samples up to `most`, at those workers that need least of the pool."""
    order = np.argsort(pool.each, kind="stable")
    spare = (most - problem.min_batch)[order]
    left = problem.global_batch - int(problem.min_batch.sum())
    batches = problem.min_batch.copy()
    batches[order] += np.clip(left - (np.cumsum(spare) - spare), 0, spare)
    return batches


def too_large(total: int, need: float, at_most: float) -> Infeasible:
    """Return the refusal of a global batch that needs more of a pool than there is; in bytes."""
    return Infeasible(
        f"global_batch {total}: all memory together is {(need - at_most) / 2**30:.3g} GiB too little"
    )


def _share(missing: int, spare: Ints, order: Ints) -> Ints:
    """Shares `missing` units in proportion to `spare`, never above it; remainders go one each, in `order`."""
    given = missing * spare // max(int(spare.sum()), 1)
    rest = missing - int(given.sum())
    open_ = order[(given < spare)[order]]
    given[open_[:rest]] += 1
    return given


def _split_by_sums(problem: Problem) -> Ints | None:
    """The optimum for any batch multiples and minima; None where no batches sum to B.

    Subset sum settles t, which workers are used and the total of each multiple; `_split_by_order` shares
    these.
    """
    order = np.lexsort(problem.keys())  # by the workers' values, not by their positions
    problem = at_index(problem, order)
    total = problem.global_batch

    def enough(batch: Ints) -> bool:
        return int(batch.sum()) >= total and _shares(problem, batch) is not None

    t = earliest(problem, enough)
    if t is None:
        return None
    batches = np.zeros(len(order), np.int64)
    for workers, held, share in _shares(problem, most_by(problem, t)) or []:
        group = at_index(problem, workers)
        group = replace(group, global_batch=share, required=group.required | held)
        batches[order[workers]] = _split_by_order(group)
    return batches


def _shares(problem: Problem, most: Ints) -> list[tuple[Ints, Bools, int]] | None:
    """How B can be shared by the workers of each multiple: the workers, which of them must be used, and their
    samples; None if no batches up to `most` sum to B.
    """
    sets, owners = _sets_of(problem, most)
    total = problem.global_batch
    optional = sorted((k for k, one in enumerate(sets) if one.skip), key=lambda k: -sets[k].last)
    always = [k for k, one in enumerate(sets) if not one.skip]
    whole = np.cumsum([sum(sets[k].last for k in always), *(sets[k].last for k in optional)])
    fewest = int(np.searchsorted(whole, total))
    for count in range(fewest, min(fewest + GUESSES, len(optional) + 1)):
        picked = [*always, *optional[:count]]
        joint = _joint([sets[k] for k in picked])
        if (values := subset_sum(joint, total)) is not None:
            shares = {one.step: value for one, value in zip(joint, values, strict=True)}
            return _by_multiple(shares, [(owners[k], sets[k]) for k in picked])
    if optional and fewest == len(optional) and total > int(whole[-1]) - sets[optional[-1]].last:
        return None  # no worker can be left out, and all together do not sum to it
    if (values := subset_sum(sets, total)) is None:
        return None
    used = [(owner, one, value) for owner, one, value in zip(owners, sets, values, strict=True) if value]
    shares = {step: sum(v for _, one, v in used if one.step == step) for step in {one.step for one in sets}}
    return _by_multiple(shares, [(owner, one) for owner, one, _ in used])


def _joint(sets: Sequence[Progression]) -> list[Progression]:
    """One set for each step, of the sums of one value a set without 0."""
    return [
        Progression(
            sum(x.first for x in sets if x.step == step), sum(x.last for x in sets if x.step == step), step
        )
        for step in sorted({one.step for one in sets})
    ]


def _by_multiple(
    shares: Mapping[int, int], used: Sequence[tuple[Ints, Progression]]
) -> list[tuple[Ints, Bools, int]]:
    """The workers of each multiple, whether each must be used, and their samples.

    shares: the samples by multiple. used: the workers in use, and the set of each group of them.
    """
    found = []
    for step, share in shares.items():
        mine = [(owner, one.skip) for owner, one in used if one.step == step]
        if mine and share:
            held = np.concatenate([np.full(len(owner), skip) for owner, skip in mine])
            found.append((np.concatenate([owner for owner, _ in mine]), held, share))
    return found


def _sets_of(problem: Problem, most: Ints) -> tuple[list[Progression], list[Ints]]:
    """The sets that the batches come from, and the workers that each set belongs to.

    Workers without a gap between 0 and their minimum, or without a 0, share one set a multiple, since their
    sums have no gap either. Every other worker has a set to itself.
    """
    sets, owners = [], []
    gapless = problem.required | (problem.min_batch <= problem.batch_multiple)
    for multiple in np.unique(problem.batch_multiple):
        workers = np.flatnonzero(gapless & (problem.batch_multiple == multiple) & (most > 0))
        if len(workers):
            least = int(problem.min_batch[workers][problem.required[workers]].sum())
            sets.append(Progression(least, int(most[workers].sum()), int(multiple)))
            owners.append(workers)
    for k in np.flatnonzero(~gapless & (most > 0)):
        low, step = int(problem.min_batch[k]), int(problem.batch_multiple[k])
        sets.append(Progression(low, int(most[k]), step, skip=True))
        owners.append(np.array([k]))
    return sets, owners


def at_index(problem: Problem, index: Ints) -> Problem:
    """The problem of the workers at `index` alone, with the same global batch."""
    return replace(
        problem,
        costs=problem.costs.take(index),
        min_batch=problem.min_batch[index],
        max_batch=problem.max_batch[index],
        batch_multiple=problem.batch_multiple[index],
        required=problem.required[index],
        pool=None if problem.pool is None else replace(problem.pool, each=problem.pool.each[index]),
        at_once=None if problem.at_once is None else problem.at_once[index],
    )
