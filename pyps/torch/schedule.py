"""Which samples of an epoch each rank takes in each round: a pure function of the split and the position.

A round is what all ranks compute between two updates: B samples, b_i of them for rank i. Rounds follow one
another through the epoch's permutation. So a position alone says where an epoch stands, and another split or
another number of ranks continues from there.

The last round is planned too. It has T < B samples, shared in proportion to b_i (largest remainder). Each
rank gets at least one, so that every rank joins every reduction, and two where its batch is larger than one:
batch normalization cannot train on one sample. If T is too small for that, the last two rounds share their
B + T samples evenly. If even that leaves a rank with too few, the last round takes all B + T.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import accumulate as running_sums
from pathlib import Path

from pyps.errors import InputError
from pyps.formats import MAX_BATCH, LengthCost, Plan, read_plan
from pyps.solver.lengths import BY_TOKENS, SampleLengths
from pyps.solver.online.decide import Split

PlanLike = Plan | str | os.PathLike[str] | Sequence[int]


def planned_bytes(plan: object) -> tuple[int, ...]:
    """Return what a plan with bytes, or its file, says that each rank holds at most; else nothing."""
    if isinstance(plan, str | os.PathLike):
        plan = read_plan(Path(plan), None)
    workers = [worker for worker in plan.workers if worker.batch] if isinstance(plan, Plan) else []
    return tuple(worker.bytes.total for worker in workers if worker.bytes is not None)


def read_split(plan: PlanLike, ranks: int | None = None, in_tokens: bool = False) -> Split:
    """The batches by rank, from a plan, a plan's file, or a sequence.

    Ranks count the workers that the plan uses, in order; a worker that it leaves out has no rank. Raises
    InputError for a file that is no plan, one in tokens unless in_tokens, a batch below 1, or a number of
    batches other than `ranks`.
    """
    if isinstance(plan, str | os.PathLike):
        plan, where = read_plan(Path(plan), None), str(plan)
    else:
        where = "plan"
    if isinstance(plan, Plan):
        if plan.unit == "tokens" and not in_tokens:
            raise InputError(where, "unit", '"tokens"', "lengths= of the samples, for a plan in tokens")
        batches = [worker.batch for worker in plan.workers if worker.batch]
        left_out = [worker.name for worker in plan.workers if not worker.batch]
    else:
        if not isinstance(plan, Iterable):
            raise InputError(where, "", repr(plan), "a plan, its file, or the batches by rank")
        batches, left_out = list(plan), []
    for rank, batch in enumerate(batches):
        if isinstance(batch, bool) or not isinstance(batch, int) or not 1 <= batch <= MAX_BATCH:
            raise InputError(where, f"batches[{rank}]", repr(batch), f"a whole number from 1 to {MAX_BATCH}")
    if not batches:
        raise InputError(where, "batches", "none", "at least one")
    if ranks is not None and ranks != len(batches):
        note = f" (it leaves out {', '.join(left_out)})" if left_out else ""
        found = f"{len(batches)} with a batch{note}"
        raise InputError(where, "workers", found, f"{ranks}, as many as there are processes")
    return tuple(batches)


def by_tokens(
    plan: PlanLike, lengths: SampleLengths, cost: LengthCost | Sequence[LengthCost | None] | None
) -> tuple[Split, tuple[LengthCost, ...]]:
    """The split in tokens of a plan in tokens or samples, or of tokens by rank; and the cost of each rank.

    Raises InputError where the plan knows the cost of some ranks alone, or there are not as many costs as
    ranks.
    """
    if isinstance(plan, str | os.PathLike):
        plan = read_plan(Path(plan), None)
    split = read_split(plan, in_tokens=True)
    known = list(cost) if isinstance(cost, Sequence) else [cost] * len(split)
    if isinstance(plan, Plan):
        split = split if plan.unit == "tokens" else tuple(batch * lengths.each for batch in split)
        known = [worker.length_cost for worker in plan.workers if worker.batch] if cost is None else known
    costs = [one for one in known if one is not None]
    if len(known) != len(split) or len(costs) not in (0, len(known)):
        found = f"{len(costs)} for {len(split)} ranks"
        raise InputError("sampler", "cost", found, "one for each rank: profiles measured with --lengths")
    return split, tuple(costs) or (BY_TOKENS,) * len(split)


def check_replan(plan: PlanLike, split: Split, min_batches: Split) -> Split:
    """The split that follows `split`. Raises InputError for other ranks, another B, or too small batches."""
    after = read_split(plan, len(split))
    if sum(after) != sum(split):
        found = f"batches that sum to {sum(after)}"
        raise InputError("replan", "plan", found, f"{sum(split)}, the global batch")
    check_minima(after, min_batches)
    return after


def check_minima(split: Split, min_batches: Split) -> None:
    """Raise InputError if a rank's batch is too small to accumulate."""
    for rank, (batch, least) in enumerate(zip(split, min_batches, strict=True)):
        if batch < least:
            raise InputError("replan", f"batches[{rank}]", str(batch), f"at least {least}, to accumulate")


def check_accumulation(split: Split, rank: int, accumulate: int | Sequence[int]) -> Split:
    """Micro-batches by rank. Raises InputError unless each is 1 to its rank's batch, or for a wrong rank."""
    if not 0 <= rank < len(split):
        raise InputError("sampler", "rank", str(rank), f"0 to {len(split) - 1}")
    parts = (accumulate,) * len(split) if isinstance(accumulate, int) else tuple(accumulate)
    if len(parts) != len(split) or any(
        not isinstance(n, int) or not 1 <= n <= b for n, b in zip(parts, split, strict=False)
    ):
        expected = f"1 up to the rank's batch, for each of {len(split)} ranks"
        raise InputError("sampler", "accumulate", repr(parts), expected)
    return parts


def least_round(global_batch: int, min_batches: Sequence[int]) -> int:
    """The least samples of a round after a full one: two for each micro-batch, if B has as many."""
    return max(sum(min_batches), min(global_batch, 2 * sum(min_batches)))


def round_sizes(
    samples: int, split: Split, min_batches: Split | None = None, drop_last: bool = False
) -> list[int]:
    """The sizes of the rounds that `samples` make. They sum to `samples`, with drop_last to a multiple of B.

    min_batches: the least samples of each rank in a round, 1 by default: its micro-batches. Raises InputError
    if there are too few samples for all ranks.
    """
    minima = min_batches or (1,) * len(split)
    total, needed = sum(split), least_round(sum(split), minima)
    full, tail = divmod(samples, total)
    sizes = [total] * full
    if not tail or drop_last:
        return sizes
    if tail >= needed:
        return [*sizes, tail]
    if not sizes:
        if tail >= sum(minima):
            return [tail]
        expected = f"at least {sum(minima)}, for all ranks"
        raise InputError("dataset", "length", f"{samples} samples left", expected)
    both = total + tail
    if both // 2 >= needed:
        return [*sizes[:-1], both - both // 2, both // 2]
    return [*sizes[:-1], both]


def proportional_split(size: int, split: Split, min_batches: Split | None = None) -> Split:
    """`size` samples in proportion to the split, largest remainders first: at least `min_batches` each, and
    twice as many, where its batch allows, if there are enough.
    """
    total = sum(split)
    if size == total:
        return split
    minima = min_batches or (1,) * len(split)
    twice = tuple(
        2 * least if batch >= 2 * least else least for batch, least in zip(split, minima, strict=True)
    )
    minima = twice if sum(twice) <= size else minima
    shares = [max(size * batch // total, least) for batch, least in zip(split, minima, strict=True)]
    while (missing := size - sum(shares)) != 0:
        # One sample to the rank furthest below its proportion, or from the one furthest above; ties by rank.
        step = 1 if missing > 0 else -1
        candidates = [k for k in range(len(split)) if step > 0 or shares[k] > minima[k]]
        chosen = max(candidates, key=lambda k: step * (size * split[k] - shares[k] * total))
        shares[chosen] += step
    return tuple(shares)


def rank_range(size: int, split: Split, rank: int, min_batches: Split | None = None) -> tuple[int, int]:
    """The rank's samples among the `size` of a round: from, to."""
    ends = list(running_sums(proportional_split(size, split, min_batches)))
    return (ends[rank - 1] if rank else 0), ends[rank]


def micro_batches(first: int, last: int, parts: int) -> list[tuple[int, int]]:
    """A range cut into `parts` ranges that are as equal as possible; the first ones are longer by one."""
    length = last - first
    cuts = list(running_sums(length // parts + (k < length % parts) for k in range(parts)))
    return [(first + (cuts[k - 1] if k else 0), first + cuts[k]) for k in range(parts)]
