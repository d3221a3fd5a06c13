"""Cadence: when ranks that meet once a step report, decide and read, so that none waits for a message.

Every `window` steps each rank reports what its device costs. A step later one of them decides. Another step
later all read the decision, and it holds from a round that none has drawn. Between these steps all ranks have
met, so every message is there when it is read.

A rank that is sure of a change asks for a decision with what the ranks exchange anyway. All learn of it in
the same step, and report, decide and read within it: this once they wait.
"""

from __future__ import annotations

from typing import Protocol

LEAD = 2  # rounds that each rank draws between its report and the step at which it reads the decision


class Messenger(Protocol):
    """What a rank does with its messages. number: of the report and its decision."""

    def report(self, number: int, asked: bool) -> None:
        """Send what is known. asked: a rank asked for it."""

    def decide(self, number: int, lead: int) -> None:
        """Decide, if this is the rank that does; `lead` rounds are drawn before all read it."""

    def read(self, number: int) -> bool:
        """Read the decision; whether it is a change of the split."""


class Cadence:
    """One rank's steps between reports; every rank has one with the same window."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.since = 0  # steps since the latest report
        self._number = 0  # of that report
        self._under_way = False  # its decision is still to come

    def step(self, asked: bool, part: Messenger) -> bool:
        """A step has ended. asked: a rank asks for a decision, as all ranks know. Whether one was made on
        what is known now, so that this rank need not ask for another.
        """
        self.since += 1
        if self._under_way and self.since == 1:
            part.decide(self._number, 1 if asked else LEAD)
            due = asked and not self._read(part)
        elif self._under_way:
            due = not self._read(part) and asked
        else:
            due = asked or self.since >= self.window
        if due:
            self._report(part, asked)
        return due and asked

    def _report(self, part: Messenger, asked: bool) -> None:
        """Begin a decision; where a rank asked for it, end it, too."""
        self._number, self.since, self._under_way = self._number + 1, 0, True
        part.report(self._number, asked)
        if asked:
            part.decide(self._number, 0)
            self._read(part)

    def _read(self, part: Messenger) -> bool:
        self._under_way = False
        return part.read(self._number)
