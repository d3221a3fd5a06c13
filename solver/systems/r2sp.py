"""Schedules R2SP's turns: when each worker updates the server, and what would make turns fit that do not.

R2SP (Chen, Wang, Li, INFOCOM 2019): workers update the server in an evenly spaced round-robin, so that
transfers do not collide. Our model: the period is the slowest worker's step with its own transfer, each
of the N turns is a push and a pull, and the schedule is feasible if all N turns fit into a period one after
another. Every order has the same period; the worker that finishes first goes first, which makes the first
round shortest.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

from pyps.formats import MAX_BATCH, Bits, R2spRemedies, R2spSchedule
from pyps.formats.mode import Mode
from pyps.solver.links import WIRE_BYTES, LinkCost
from pyps.solver.mode import bits_of, step_of

At = Callable[[int], tuple[Sequence[float], Sequence[LinkCost]] | None]
FEWER_BITS: tuple[Bits, ...] = (16, 8, 4)


def slowest_alone(
    compute_seconds: Sequence[float], links: Sequence[LinkCost | None], modes: Sequence[Mode]
) -> float:
    """The longest step, with a worker's own transfers; an unknown link takes no time."""
    return max(
        step_of(t, [] if link is None else [link], mode)
        for t, link, mode in zip(compute_seconds, links, modes, strict=True)
    )


def r2sp_schedule(
    ranks: Sequence[int],
    compute_seconds: Sequence[float],
    links: Sequence[LinkCost | None],
    modes: Sequence[Mode] = (),
) -> R2spSchedule:
    """The ring of the given ranks. If a link is unknown, feasible is None and turns take no time.

    ranks: those in use. compute_seconds, links, modes: of each; by default serial, at 32 bits.
    """
    modes = modes or [Mode() for _ in ranks]
    known = [link for link in links if link is not None]
    complete = len(known) == len(ranks)
    turns = [x.seconds(*bits_of(mode)) if x else 0.0 for x, mode in zip(links, modes, strict=True)]
    alone = slowest_alone(compute_seconds, links, modes)
    period = max(alone, sum(turns)) if complete else max(compute_seconds)
    by_ready = sorted(range(len(ranks)), key=lambda k: (compute_seconds[k], ranks[k]))
    gap = period / len(ranks)
    return R2spSchedule(
        feasible=sum(turns) <= alone if complete else None,
        period_seconds=period,
        gap_seconds=gap,
        order=[ranks[k] for k in by_ready],
        turn_seconds=[turns[k] for k in by_ready] if complete else [],
        offsets_seconds=_offsets([turns[k] for k in by_ready] if complete else [0.0] * len(ranks), period),
    )


def _offsets(turns: Sequence[float], period: float) -> list[float]:
    """Even gaps if every turn fits into one; otherwise each turn plus an equal share of the spare time."""
    gap, spare = period / len(turns), max(0.0, period - sum(turns)) / len(turns)
    if max(turns) <= gap:
        return [k * gap for k in range(len(turns))]
    before = itertools.accumulate(turns[:-1], initial=0.0)
    return [start + k * spare for k, start in enumerate(before)]


def fits(compute_seconds: Sequence[float], turns: Sequence[float], overlap: bool = False) -> bool:
    """Return whether all turns in a row fit into the slowest worker's step; overlap: with its compute."""
    return sum(turns) <= _alone(compute_seconds, turns, overlap)


def _alone(compute_seconds: Sequence[float], turns: Sequence[float], overlap: bool) -> float:
    return max(max(t, x) if overlap else t + x for t, x in zip(compute_seconds, turns, strict=True))


def remedies(
    compute_seconds: Sequence[float],
    links: Sequence[LinkCost],
    global_batch: int,
    at: At | None,
    bits: Bits = 32,
    overlap: bool = False,
) -> R2spRemedies:
    """The changes that would each make the turns fit: a larger batch, fewer bits, or more links.

    compute_seconds, links: of each worker in use, the links as slow as with the codecs in use. at: maps a
    global batch to such seconds and links, or to None if that batch has no split. bits: the most in use.
    overlap: turns overlap with compute.
    """
    share = WIRE_BYTES[32] / WIRE_BYTES[bits]
    bare = [replace(link, model_seconds=link.model_seconds * share) for link in links]
    fewer = (b for b in FEWER_BITS if b < bits)
    in_time = (b for b in fewer if fits(compute_seconds, [x.seconds(b, b) for x in bare], overlap))
    return R2spRemedies(
        global_batch=_larger_batch(global_batch, at, overlap) if at else None,
        bits=next(in_time, None),
        links=_links_needed(compute_seconds, [link.seconds() for link in links], overlap),
    )


def _larger_batch(global_batch: int, at: At, overlap: bool) -> int | None:
    """The smallest fitting batch above global_batch that doubling and bisection find, or None."""

    def good(batch: int) -> bool | None:
        found = at(batch)
        return None if found is None else fits(found[0], [link.seconds() for link in found[1]], overlap)

    low, high = global_batch, global_batch
    while not (fit := good(high)):
        if fit is None and high > 2 * low:
            return None
        if fit is False:
            low = high
        high = 2 * high if fit is False else high + max(1, (high - low) // 2)
        if high > MAX_BATCH:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if good(middle) else (middle, high)
    return high


def _links_needed(compute_seconds: Sequence[float], turns: Sequence[float], overlap: bool) -> int:
    """Return how many such links suffice if the workers are spread over them, longest turns first."""
    alone = _alone(compute_seconds, turns, overlap)
    longest_first = sorted(turns, reverse=True)

    def enough(count: int) -> bool:
        loads = [0.0] * count
        for turn in longest_first:
            heapq.heapreplace(loads, loads[0] + turn)
        return max(loads) <= alone

    return bisect_left(range(len(turns)), True, lo=math.ceil(sum(turns) / alone), key=enough)
