"""The screen of a run that trains: the workers' lines, and how far it is.

On a terminal the last rows of stderr show a bar and the figures, redrawn in one write a few times a second.
Elsewhere stderr gets a line every few seconds. Workers' lines go to stdout and stderr as they came.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Self

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from pyps.cli.terminal import terminal
from pyps.report.live import LiveRun

LINE_SECONDS = (5.0, 60.0, 30.0)  # between two lines: in the first minute, how long that is, later
FLUSH_SECONDS = 0.1
MOST_HELD_LINES = 200
BAR_CELLS = 24
MIN_BAR_WIDTH = 60  # of the terminal: below, the figures are all
CURSOR_UP = "\x1b[{}F"
CLEAR_BELOW = "\x1b[J"


class Screen:
    """Shows one run; a context manager.

    errors: where progress goes, stderr by default. quiet_stdout: stdout is for the report alone.
    """

    def __init__(self, *, quiet_stdout: bool, errors: Console | None = None) -> None:
        self._errors = errors or terminal(stderr=True)
        self._lines = self._errors if quiet_stdout else terminal()
        self._area = _Area(self._errors) if self._errors.is_terminal else None
        if self._area is not None and self._lines.is_terminal:
            self._lines = self._errors  # one terminal, one writer
        self._held: list[Text] = []
        self._tracebacks = Tracebacks()
        self._flush_at = 0.0
        self._began = self._next_line = time.monotonic()
        self._stalled = self._ended = False  # as the last line says

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for rank, text in self._tracebacks.rest():
            self._hold(_line(rank, text))
        self._flush()
        if self._area is not None:
            self._area.clear()

    def line(self, rank: int, text: str, is_stderr: bool) -> None:
        """One line of a worker, after its rank."""
        if not is_stderr and self._lines is not self._errors:
            self._lines.print(_line(rank, text), soft_wrap=True)
            return
        for shown in self._tracebacks.feed(rank, text) if is_stderr else [text]:
            self._hold(_line(rank, shown))

    def notice(self, text: str) -> None:
        """A line of the launcher."""
        self._hold(Text(text))
        self._flush()

    def progress(self, now: LiveRun) -> None:
        """Show how far the run is."""
        if self._area is not None:
            self._flush()
            self._area.draw(rows(now, self._errors.width))
            return
        stalled, ended = bool(now.stalled), 0 < now.requested <= now.samples
        if ended and self._ended:
            return
        if time.monotonic() >= self._next_line or stalled != self._stalled:
            self._stalled, self._ended = stalled, ended
            self._print_line(now)

    def _print_line(self, now: LiveRun) -> None:
        early, until, late = LINE_SECONDS
        seconds = time.monotonic() - self._began
        self._next_line = time.monotonic() + (early if seconds < until else late)
        if now.samples or now.stalled:
            parts = [done(now), *figures(now), *([now.stalled] if now.stalled else [])]
            self._errors.print(Text(", ".join(parts)), soft_wrap=True)

    def _hold(self, line: Text) -> None:
        """On a terminal lines are printed together, so that a worker that prints much does not flood it."""
        self._held.append(line)
        if self._area is None or time.monotonic() >= self._flush_at or len(self._held) >= MOST_HELD_LINES:
            self._flush()

    def _flush(self) -> None:
        self._flush_at = time.monotonic() + FLUSH_SECONDS
        if not self._held:
            return
        if self._area is not None:
            self._area.print(self._held)
        else:
            for text in self._held:
                self._errors.print(text, soft_wrap=True)
        self._held = []


class _Area:
    """The last rows of a terminal. Each change is one write: erase, print what is new, draw again."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: list[Text] = []

    def draw(self, texts: list[Text]) -> None:
        self._write([], texts)

    def print(self, lines: list[Text]) -> None:
        self._write(lines, self._shown)

    def clear(self) -> None:
        self._write([], [])

    def _write(self, lines: list[Text], texts: list[Text]) -> None:
        with self._console.capture() as captured:
            for line in lines:
                self._console.print(line, soft_wrap=True)
            for text in texts:
                self._console.print(text, no_wrap=True, overflow="ellipsis", crop=True)
        erase = ""
        if self._shown:
            # A terminal that became narrower has wrapped the rows that are there.
            width = max(1, self._console.width)
            taken = sum(max(1, -(-cell_len(text.plain) // width)) for text in self._shown)
            erase = CURSOR_UP.format(taken) + CLEAR_BELOW
        self._shown = texts
        if erase or lines or texts:
            self._console.file.write(erase + captured.get())
            self._console.file.flush()


def _line(rank: int, text: str) -> Text:
    """A worker's line; of its escape sequences, colours stay."""
    return Text(f"[{rank}] ") + (Text.from_ansi(text) if "\x1b" in text else Text(text))


def rows(now: LiveRun, width: int) -> list[Text]:
    """Return what a terminal of `width` cells shows: a bar with how much is done, the figures, and a
    stall.
    """
    first = Text()
    if now.requested and width >= MIN_BAR_WIDTH:
        share = min(1.0, now.samples / now.requested)
        filled = round(share * BAR_CELLS)
        first.append("━" * filled, style="green")
        first.append("━" * (BAR_CELLS - filled) + " ", style="bright_black")
    first.append(done(now), style="bold")
    first.append(f", {clock(now.seconds)}")
    if now.eta_seconds is not None and not now.stalled:
        first.append(f", {clock(now.eta_seconds)} left")
    found = [first, Text(", ".join(figures(now)) or "starting")]
    if now.stalled:
        found.append(Text(now.stalled, style="yellow"))
    for text in found:
        text.truncate(max(1, width - 1), overflow="ellipsis")
    return found


def done(now: LiveRun) -> str:
    """How many samples are trained, of how many."""
    if not now.requested:
        return f"{now.samples:,} samples"
    return f"{now.samples:,} of {now.requested:,} samples ({now.samples / now.requested:.0%})"


def figures(now: LiveRun) -> list[str]:
    """Return what is known of the last seconds."""
    found = []
    if now.loss is not None:
        found.append(f"loss {now.loss:.4g}")
    if now.iteration_seconds is not None:
        plan = f" (plan {duration(now.predicted_seconds)})" if now.predicted_seconds else ""
        found.append(f"{duration(now.iteration_seconds)} a step{plan}")
    if now.samples_per_second is not None:
        found.append(f"{now.samples_per_second:,.0f} samples/s")
    if now.staleness >= 0.05:
        found.append(f"staleness {now.staleness:.1f}")
    if now.restarts:
        found.append(f"{now.restarts} restart{'s' * (now.restarts != 1)}")
    return found


def duration(seconds: float) -> str:
    """A step's time: milliseconds below ten seconds."""
    return f"{seconds * 1e3:,.1f} ms" if seconds < 10.0 else f"{seconds:,.1f} s"


def clock(seconds: float) -> str:
    """A time as 1:23 or 4:05:06."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


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
