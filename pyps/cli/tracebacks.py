"""Shows the same error of several ranks once: the first traceback whole, each further one as a line."""

from __future__ import annotations

from collections.abc import Iterator

BEGIN = "Traceback (most recent call last):"
MOST_LINES = 500  # of a traceback that is held back


class Tracebacks:
    """Passes on what ranks print to stderr; a traceback is held back until it is complete."""

    def __init__(self) -> None:
        self._held: dict[int, list[str]] = {}  # by rank
        self._first: dict[str, int] = {}  # the rank that had an error first

    def feed(self, rank: int, line: str) -> list[str]:
        """The lines to show now that a rank has printed one more."""
        held = self._held.get(rank)
        if held is None:
            if line != BEGIN:
                return [line]
            self._held[rank] = [line]
            return []
        held.append(line)
        if len(held) < MOST_LINES and (line.startswith((" ", "\t")) or not line):
            return []
        del self._held[rank]
        return self._complete(rank, held)

    def _complete(self, rank: int, held: list[str]) -> list[str]:
        error = held[-1]
        if error not in self._first:
            self._first[error] = rank
            return held
        return [f"{error} (as rank {self._first[error]} before)"]

    def rest(self) -> Iterator[tuple[int, str]]:
        """Each rank and line that is still held back."""
        for rank, held in self._held.items():
            yield from ((rank, line) for line in held)
        self._held = {}
