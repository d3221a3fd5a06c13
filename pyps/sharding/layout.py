"""Layouts: where flat vectors of several tensors are cut among ranks, in proportion to shares.

The tensors of a bucket or block lie one behind the other in a flat vector. It may be cut at any element, so
that each rank's part is its share of the vector to one element. Of a tensor, a rank has one piece, which may
be empty. Everything here is a value that all ranks compute alike; nothing needs torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from math import isfinite, prod
from numbers import Real
from pathlib import Path
from typing import Any

from pyps.errors import InputError
from pyps.formats import Plan, read_plan

SUM_TOLERANCE = 1e-6  # shares that were rounded to six digits sum to one
SharesLike = Plan | str | os.PathLike[str] | Sequence[float]
TensorBox = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes in a tensor's dimensions


def read_shares(shares: SharesLike, ranks: int) -> tuple[float, ...]:
    """Return each rank's share of the memory, which sum to one.

    shares: one number for each rank, or a plan or its file, whose workers with a batch have a `share`. Raises
    InputError for another number of them than `ranks`, a negative one, a sum that is not one, and a plan
    without shares.
    """
    where = "shares"
    if isinstance(shares, str | os.PathLike):
        shares, where = read_plan(Path(shares)), str(shares)
    if isinstance(shares, Plan):
        where = "plan" if where == "shares" else where
        shares = _planned(shares, where)
    if not isinstance(shares, Sequence):
        raise InputError(where, "", repr(shares), "a plan, its file, or one number for each rank")
    found: list[Any] = list(shares)
    for rank, share in enumerate(found):
        known = isinstance(share, Real) and not isinstance(share, bool)
        if not known or not isfinite(share) or share < 0:
            raise InputError(where, f"shares[{rank}]", repr(share), "a number from 0 to 1")
    if len(found) != ranks:
        raise InputError(where, "shares", f"{len(found)} of them", f"{ranks}, one for each rank")
    total = float(sum(found))
    if abs(total - 1) > SUM_TOLERANCE:
        scaled = ", ".join(f"{share / total:.6f}" for share in found) if total else "1"
        raise InputError(where, "shares", f"a sum of {total:g}", f"a sum of 1, such as [{scaled}]")
    return tuple(float(share) for share in found)


def _planned(plan: Plan, where: str) -> list[Any]:
    """The shares of a plan's workers with a batch."""
    found: list[Any] = []
    for k, worker in enumerate(plan.workers):
        if worker.batch and worker.share is None:
            expected = '[sharding] with shares = "memory" in the cluster file that it is made from'
            raise InputError(where, f"workers[{k}].share", "none", expected)
        if worker.batch:
            found.append(worker.share)
    return found


def cut(count: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Return how many of `count` elements each rank gets: the largest remainders get one more.

    No rank is off its share by one element or more, a share of 0 gets none, and equal remainders go to the
    lower rank.
    """
    exact = [Fraction(share) for share in shares]
    wanted = [share * count / sum(exact) for share in exact]
    lengths = [int(one) for one in wanted]
    order = sorted(range(len(shares)), key=lambda rank: lengths[rank] - wanted[rank])
    for rank in order[: count - sum(lengths)]:
        lengths[rank] += 1
    return tuple(lengths)


@dataclass(frozen=True)
class PieceLayout:
    """A flat vector of tensors of these sizes, in elements, whose parts have these lengths by rank.

    Raises InputError for sizes and lengths with unlike sums.
    """

    sizes: tuple[int, ...]
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if sum(self.sizes) != sum(self.lengths) or min((*self.sizes, *self.lengths), default=0) < 0:
            found = f"parts of {sum(self.lengths)} elements"
            raise InputError("layout", "lengths", found, f"{sum(self.sizes)}, those of the tensors")

    @classmethod
    def by_shares(cls, sizes: Sequence[int], shares: Sequence[float]) -> PieceLayout:
        """Return the layout of tensors of these sizes, cut by shares."""
        return cls(tuple(sizes), cut(sum(sizes), shares))

    @property
    def count(self) -> int:
        """The elements of the vector."""
        return sum(self.sizes)

    def part(self, rank: int) -> slice:
        """Return the rank's part of the vector."""
        first = sum(self.lengths[:rank])
        return slice(first, first + self.lengths[rank])

    def places(self) -> Iterator[slice]:
        """Yield where in the vector each tensor lies."""
        return (slice(a, b) for a, b in pairwise(accumulate(self.sizes, initial=0)))

    def pieces(self, rank: int) -> list[slice]:
        """Return the rank's piece of each tensor, counted in that tensor's elements; an empty one is 0:0."""
        part, found = self.part(rank), []
        for place in self.places():
            low, high = max(place.start, part.start), min(place.stop, part.stop)
            found.append(slice(low - place.start, high - place.start) if low < high else slice(0, 0))
        return found


def boxes(shape: Sequence[int], piece: slice) -> list[TensorBox]:
    """Return the boxes of a tensor that hold a piece of its elements, in the piece's order.

    Rows that the piece has in part are boxes of their own, so there are fewer than twice as many boxes as
    dimensions.
    """
    if piece.start >= piece.stop:
        return []
    if not shape:
        return [((), ())]
    row = prod(shape[1:])
    first, last = piece.start // row, (piece.stop - 1) // row
    if len(shape) == 1 or (piece.start % row == 0 and piece.stop % row == 0):
        return [((first, *[0] * (len(shape) - 1)), (last + 1 - first, *shape[1:]))]
    whole_from, whole_to = -(-piece.start // row), piece.stop // row
    if whole_from > whole_to:  # within one row
        return _in_row(shape, first, slice(piece.start - first * row, piece.stop - first * row))
    return [
        *_in_row(shape, first, slice(piece.start - first * row, (whole_from - first) * row)),
        *boxes(shape, slice(whole_from * row, whole_to * row)),
        *_in_row(shape, whole_to, slice(0, piece.stop - whole_to * row)),
    ]


def _in_row(shape: Sequence[int], row: int, piece: slice) -> list[TensorBox]:
    """The boxes of a piece of one row."""
    return [((row, *offsets), (1, *sizes)) for offsets, sizes in boxes(shape[1:], piece)]
