"""Covering arrays: few rows of a large product, in which all pairs or all triples of values come together."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]
Part = tuple[tuple[str, Any], ...]  # values of some axes, in the order of the axes
Axes = Mapping[str, Sequence[Any]]
CANDIDATES = 10  # rows of which the one that covers most is taken
TRIES = 60  # rows that are tried before a part is held to be in no allowed one


@dataclass(frozen=True)
class Covering:
    """rows: allowed ones, which hold every part that any allowed row holds. barred: rows for the parts that
    no allowed row holds, each with one such part, and no smaller one, in it.
    """

    rows: tuple[Row, ...]
    barred: tuple[Row, ...]


def covering(axes: Axes, strength: int, seed: int, allowed: Callable[[Row], bool]) -> Covering:
    """Rows with every combination of values of any `strength` axes. The same seed gives the same rows."""
    return _Search(axes, random.Random(seed), allowed).run(strength)


class _Search:
    def __init__(self, axes: Axes, draw: random.Random, allowed: Callable[[Row], bool]) -> None:
        self.axes, self.draw, self.allowed = axes, draw, allowed

    def run(self, strength: int) -> Covering:
        never: list[Part] = []
        barred: list[Row] = []
        rows: list[Row] = []
        for size in range(1, strength + 1):
            rows = []
            left = dict.fromkeys(p for p in self._parts(size) if not any(set(n) <= set(p) for n in never))
            while left:
                part = next(iter(left))
                row = self._best(part, left, size)
                if row is None:
                    never.append(part)
                    barred.append(self._grown(part, {}, size))
                    left = {p: None for p in left if p != part}
                    continue
                rows.append(row)
                for found in combinations(row.items(), size):
                    left.pop(found, None)
        return Covering(tuple(rows), tuple(barred))

    def _parts(self, size: int) -> Iterator[Part]:
        for names in combinations(self.axes, size):
            for values in product(*(self.axes[name] for name in names)):
                yield tuple(zip(names, values, strict=True))

    def _best(self, part: Part, left: Mapping[Part, None], size: int) -> Row | None:
        """The allowed row with this part that covers most; None: there is none."""
        found: list[Row] = []
        for _ in range(TRIES):
            row = self._grown(part, left, size)
            if self.allowed(row):
                found.append(row)
            if len(found) == CANDIDATES:
                break
        if not found:
            return None
        return max(found, key=lambda row: sum(p in left for p in combinations(row.items(), size)))

    def _grown(self, part: Part, left: Mapping[Part, None], size: int) -> Row:
        """A row from a part of it: axis by axis, in any order, the value that covers most."""
        row = dict(part)
        others = [name for name in self.axes if name not in row]
        self.draw.shuffle(others)
        for name in others:
            values = list(self.axes[name])
            self.draw.shuffle(values)
            if self.draw.random() < 0.8:
                around = self._around(row, name, size)
                covered = [sum((*a, (name, value), *b) in left for a, b in around) for value in values]
                row[name] = values[covered.index(max(covered))]
            else:
                row[name] = values[0]
        return {name: row[name] for name in self.axes}

    def _around(self, row: Row, name: str, size: int) -> list[tuple[Part, Part]]:
        """Return what comes before and after this axis in each part of the row with it."""
        axes = list(self.axes)
        place = axes.index(name)
        before, after = (
            [(a, row[a]) for a in some if a in row] for some in (axes[:place], axes[place + 1 :])
        )
        return [
            (some, others)
            for count in range(size)
            for some in combinations(before, count)
            for others in combinations(after, size - 1 - count)
        ]
