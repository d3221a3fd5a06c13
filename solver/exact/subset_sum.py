"""Finds which totals can be reached by picking one integer from each of several sets; exact, on big integers.

Bit s of a Python int is set if the total s can be reached. Adding a set {first, first + step, .., last} is
one shift and a smear by doubling, so n sets and a total B cost about n * B/64 * log(last/step) operations on
words and, kept for backtracking, n * B/8 bytes. Subset sum is a special case, so no method is known that is
always polynomial in the number of digits of B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

ABOVE_SLACK = 65536  # how far past 4 B the search for the next reachable total goes


@dataclass(frozen=True)
class Progression:
    """The set {first, first + step, .., last}, and 0 as well if `skip`."""

    first: int
    last: int
    step: int
    skip: bool = False


def subset_sum(sets: Sequence[Progression], total: int) -> list[int] | None:
    """One value a one with sum `total`, the later sets as large as can be; None if there are none."""
    unit = _unit(sets)
    if total % unit:
        return None
    scaled = [_scaled(one, unit) for one in sets]
    prefixes = _reachable(scaled, total // unit)
    rest = total // unit
    if not prefixes[-1] >> rest & 1:
        return None
    values = []
    for one, before in zip(reversed(scaled), reversed(prefixes[:-1]), strict=True):
        value = _largest(one, before, rest)
        values.append(value * unit)
        rest -= value
    return values[::-1]


def nearest_sums(sets: Sequence[Progression], total: int) -> list[int]:
    """The nearest positive reachable totals: the largest below and the smallest above (at most one of each).

    Raising one value by one step raises a reachable total by at most the largest step or minimum, so the
    next total above lies within that of `total`, if there is one.
    """
    unit = _unit(sets)
    scaled = [_scaled(one, unit) for one in sets]
    middle = total // unit
    widest = max((max(c.step, c.first if c.skip else 0) for c in scaled), default=0)
    bits = _reachable(scaled, min(middle + widest + 1, 4 * middle + ABOVE_SLACK))[-1]
    below = (bits & ((1 << (middle + 1)) - 1)) >> 1 << 1
    above = bits >> (middle + 1)
    found = [(below.bit_length() - 1) * unit] if below else []
    return [*found, (middle + (above & -above).bit_length()) * unit] if above else found


def _unit(sets: Sequence[Progression]) -> int:
    return gcd(*(c.first for c in sets), *(c.step for c in sets if c.last > c.first)) or 1


def _scaled(one: Progression, unit: int) -> Progression:
    step = one.step // unit if one.last > one.first else 1
    return Progression(one.first // unit, one.last // unit, step, one.skip)


def _reachable(sets: Sequence[Progression], limit: int) -> list[int]:
    """The totals up to `limit` after no one, after the first, after the first two, .."""
    mask = (1 << (limit + 1)) - 1
    prefixes = [1]
    for one in sets:
        before = prefixes[-1]
        shifted = (before << one.first) & mask if one.first <= limit else 0
        after = _smeared(shifted, one.step, (one.last - one.first) // one.step, mask)
        prefixes.append(after | before if one.skip else after)
    return prefixes


def _smeared(bits: int, step: int, times: int, mask: int) -> int:
    """The union of `bits` shifted by 0, step, .., times * step, within the mask."""
    times = min(times, mask.bit_length() // step)
    covered = 0
    while covered < times:
        more = min(covered + 1, times - covered)
        bits |= (bits << (more * step)) & mask
        covered += more
    return bits


def _largest(one: Progression, before: int, rest: int) -> int:
    """The largest value of a one that leaves a total reachable before it; there is one."""
    top = one.first + (min(one.last, rest) - one.first) // one.step * one.step
    if top >= one.first:
        count = (top - one.first) // one.step
        window = (before >> (rest - top)) & _smeared(1, one.step, count, (1 << (top - one.first + 1)) - 1)
        if window:
            return top - (window & -window).bit_length() + 1
    return 0
