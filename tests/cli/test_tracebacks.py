"""The same error of several ranks is shown once."""

from __future__ import annotations

from pyps.cli.progress import Tracebacks

TRACEBACK = ["Traceback (most recent call last):", '  File "train.py", line 3', "    x()", "", "NameError: x"]


def fed(shown: Tracebacks, rank: int, lines: list[str]) -> list[str]:
    return [line for text in lines for line in shown.feed(rank, text)]


def test_the_first_is_whole_and_the_others_are_a_line() -> None:
    shown = Tracebacks()
    for line in TRACEBACK[:3]:
        assert not shown.feed(0, line)
        assert not shown.feed(1, line)
    assert fed(shown, 2, ["warning"]) == ["warning"]
    assert fed(shown, 1, TRACEBACK[3:]) == TRACEBACK
    assert fed(shown, 0, TRACEBACK[3:]) == ["NameError: x (as rank 1 before)"]
    other = [*TRACEBACK[:-1], "ValueError: y"]
    assert fed(shown, 0, other) == other


def test_half_a_traceback_is_shown_at_the_end() -> None:
    shown = Tracebacks()
    assert not fed(shown, 0, TRACEBACK[:2])
    assert list(shown.rest()) == [(0, TRACEBACK[0]), (0, TRACEBACK[1])]
    assert not list(shown.rest())
