"""Which totals can be reached by picking one integer from each of several sets: exact, on big integers.

Bit s of a Python int says that the total s can be reached. Adding a set {low, low + step, .., high} is one
shift and a smear by doubling, so n sets and a total B cost about n * B/64 * log(high/step) operations on
words and, kept for backtracking, n * B/8 bytes. Subset sum is inside this problem: no method is known that
is always polynomial in the number of digits of B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

ABOVE_SLACK = 65536  # how far past 4 B the next reachable total is looked for


@dataclass(frozen=True)
class Choice:
    """The set {low, low + step, .., high}, and 0 as well where it may be skipped."""

    low: int
    high: int
    step: int
    skip: bool = False


def sums_to(choices: Sequence[Choice], total: int) -> list[int] | None:
    """One value a choice with sum `total`, the later choices as large as can be; None if there are none."""
    unit = _unit(choices)
    if total % unit:
        return None
    scaled = [_scaled(choice, unit) for choice in choices]
    prefixes = _reachable(scaled, total // unit)
    rest = total // unit
    if not prefixes[-1] >> rest & 1:
        return None
    values = []
    for choice, before in zip(reversed(scaled), reversed(prefixes[:-1]), strict=True):
        value = _largest(choice, before, rest)
        values.append(value * unit)
        rest -= value
    return values[::-1]


def nearest_sums(choices: Sequence[Choice], total: int) -> list[int]:
    """The nearest positive reachable totals: the largest below and the smallest above (at most one of each).

    Raising one value by one step raises a reachable total by at most the largest step or minimum, so the
    next total above lies within that of `total`, if there is one.
    """
    unit = _unit(choices)
    scaled = [_scaled(choice, unit) for choice in choices]
    middle = total // unit
    widest = max((max(c.step, c.low if c.skip else 0) for c in scaled), default=0)
    bits = _reachable(scaled, min(middle + widest + 1, 4 * middle + ABOVE_SLACK))[-1]
    below = (bits & ((1 << (middle + 1)) - 1)) >> 1 << 1
    above = bits >> (middle + 1)
    found = [(below.bit_length() - 1) * unit] if below else []
    return [*found, (middle + (above & -above).bit_length()) * unit] if above else found


def _unit(choices: Sequence[Choice]) -> int:
    return gcd(*(c.low for c in choices), *(c.step for c in choices if c.high > c.low)) or 1


def _scaled(choice: Choice, unit: int) -> Choice:
    step = choice.step // unit if choice.high > choice.low else 1
    return Choice(choice.low // unit, choice.high // unit, step, choice.skip)


def _reachable(choices: Sequence[Choice], limit: int) -> list[int]:
    """The totals up to `limit` after no choice, after the first, after the first two, .."""
    mask = (1 << (limit + 1)) - 1
    prefixes = [1]
    for choice in choices:
        before = prefixes[-1]
        shifted = (before << choice.low) & mask if choice.low <= limit else 0
        after = _smeared(shifted, choice.step, (choice.high - choice.low) // choice.step, mask)
        prefixes.append(after | before if choice.skip else after)
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


def _largest(choice: Choice, before: int, rest: int) -> int:
    """The largest value of a choice that leaves a total reachable before it; there is one."""
    top = choice.low + (min(choice.high, rest) - choice.low) // choice.step * choice.step
    if top >= choice.low:
        count = (top - choice.low) // choice.step
        window = (before >> (rest - top)) & _smeared(1, choice.step, count, (1 << (top - choice.low + 1)) - 1)
        if window:
            return top - (window & -window).bit_length() + 1
    return 0
