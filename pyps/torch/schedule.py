"""Which samples of an epoch each rank takes in each round: a pure function of the split and the position.

A round is what all ranks compute between two updates: B samples, b_i of them rank i's. Rounds follow one
another through the epoch's permutation, so a position says where an epoch stands whatever the split was on
the way: a changed split or a changed number of ranks goes on from there.

The last round is planned too. T samples are left, T < B: they are shared in proportion to b_i, at least one
each (largest remainder), so that every rank joins every reduction. If T is too small for that, the last two
rounds share their B + T samples evenly; if even that gives somebody nothing, the last round takes all B + T.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import accumulate as running_sums
from pathlib import Path

from pyps.errors import InputError
from pyps.formats import MAX_BATCH, Plan, read_plan

Split = tuple[int, ...]  # samples a round, by rank
Planned = Plan | str | os.PathLike[str] | Sequence[int]


def read_split(plan: Planned, ranks: int | None = None) -> Split:
    """The batches of the ranks that train: of a plan, of a plan's file, or as they are given.

    Workers that the plan leaves out have no rank here: ranks count those that it uses, in order. Raises
    InputError for a file that is no plan, a batch below 1, or a number of batches other than `ranks`.
    """
    if isinstance(plan, str | os.PathLike):
        plan, where = read_plan(Path(plan)), str(plan)
    else:
        where = "plan"
    if isinstance(plan, Plan):
        batches = [worker.batch for worker in plan.workers if worker.batch]
        left_out = [worker.name for worker in plan.workers if not worker.batch]
    else:
        batches, left_out = list(plan), []
    for rank, batch in enumerate(batches):
        if isinstance(batch, bool) or not isinstance(batch, int) or not 1 <= batch <= MAX_BATCH:
            raise InputError(where, f"batches[{rank}]", repr(batch), f"a whole number from 1 to {MAX_BATCH}")
    if not batches:
        raise InputError(where, "batches", "none", "at least one")
    if ranks is not None and ranks != len(batches):
        note = f" (it leaves out {', '.join(left_out)})" if left_out else ""
        raise InputError(
            where, "workers", f"{len(batches)} with a batch{note}", f"{ranks}, as many as there are processes"
        )
    return tuple(batches)


def check_replan(plan: Planned, split: Split, least: Split) -> Split:
    """The split that follows `split`: as many ranks, the same B, at least `least` each, or InputError."""
    after = read_split(plan, len(split))
    if sum(after) != sum(split):
        raise InputError(
            "replan", "plan", f"batches that sum to {sum(after)}", f"{sum(split)}, the global batch"
        )
    for rank, (batch, low) in enumerate(zip(after, least, strict=True)):
        if batch < low:
            raise InputError("replan", f"batches[{rank}]", str(batch), f"at least {low}, to accumulate")
    return after


def check_accumulation(split: Split, rank: int, accumulate: int | Sequence[int]) -> Split:
    """Micro-batches by rank, from 1 to the rank's batch each; InputError otherwise or for no such rank."""
    if not 0 <= rank < len(split):
        raise InputError("sampler", "rank", str(rank), f"0 to {len(split) - 1}")
    parts = (accumulate,) * len(split) if isinstance(accumulate, int) else tuple(accumulate)
    if len(parts) != len(split) or any(
        not isinstance(n, int) or not 1 <= n <= b for n, b in zip(parts, split, strict=False)
    ):
        expected = f"1 up to the rank's batch, for each of {len(split)} ranks"
        raise InputError("sampler", "accumulate", repr(parts), expected)
    return parts


def round_sizes(samples: int, split: Split, least: Split | None = None, drop_last: bool = False) -> list[int]:
    """The samples of each round that `samples` make; they sum to it, or to a multiple of B with drop_last.

    `least`: what each rank takes at least (1). Raises InputError if that many samples do not go round.
    """
    total, needed = sum(split), sum(least or (1,) * len(split))
    full, tail = divmod(samples, total)
    sizes = [total] * full
    if not tail or drop_last:
        return sizes
    if tail >= needed:
        return [*sizes, tail]
    if not sizes:
        raise InputError(
            "dataset", "length", f"{samples} samples left", f"at least {needed}, so many for all ranks"
        )
    both = total + tail
    if both // 2 >= needed:
        return [*sizes[:-1], both - both // 2, both // 2]
    return [*sizes[:-1], both]


def share(size: int, split: Split, least: Split | None = None) -> Split:
    """`size` samples in proportion to the split, exactly; at least `least` each, largest remainders first."""
    total = sum(split)
    if size == total:
        return split
    floor = least or (1,) * len(split)
    given = [max(size * batch // total, low) for batch, low in zip(split, floor, strict=True)]
    while (missing := size - sum(given)) != 0:
        # Who is furthest below, or above and able to give: one sample at a time, so that ties go by rank.
        step = 1 if missing > 0 else -1
        open_ = [k for k in range(len(split)) if step > 0 or given[k] > floor[k]]
        chosen = max(open_, key=lambda k: step * (size * split[k] - given[k] * total))
        given[chosen] += step
    return tuple(given)


def bounds(size: int, split: Split, rank: int, least: Split | None = None) -> tuple[int, int]:
    """Where rank's samples begin and end among the round's `size`."""
    ends = list(running_sums(share(size, split, least)))
    return (ends[rank - 1] if rank else 0), ends[rank]


def pieces(first: int, last: int, parts: int) -> list[tuple[int, int]]:
    """A range cut in `parts` as equal as whole samples allow, the first ones taking what is over."""
    length = last - first
    cuts = list(running_sums(length // parts + (k < length % parts) for k in range(parts)))
    return [(first + (cuts[k - 1] if k else 0), first + cuts[k]) for k in range(parts)]
