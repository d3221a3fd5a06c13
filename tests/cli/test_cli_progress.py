"""The screen of a run, in an emulated terminal: what is read there, whatever workers print and however it is
resized.
"""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from pyps.cli.progress import Screen, clock, duration
from pyps.report.live import LiveRun

pyte = pytest.importorskip("pyte")

NOW = LiveRun(
    samples=12_800,
    requested=25_600,
    versions=50,
    seconds=62.0,
    iterations=50,
    samples_per_second=2207.0,
    iteration_seconds=0.1164,
    predicted_seconds=0.116,
    loss=0.41237,
    staleness=0.8,
    eta_seconds=5.8,
    restarts=1,
)
FIGURES = "loss 0.4124, 116.4 ms a step (plan 116.0 ms), 2,207 samples/s, staleness 0.8, 1 restart"


class Terminal:
    """A console whose output goes to an emulated terminal."""

    def __init__(self, width: int = 100, **options: object) -> None:
        self.screen = pyte.Screen(width, 12)
        self._stream = pyte.Stream(self.screen)
        self._file = io.StringIO()
        self.console = Console(
            file=self._file,
            force_terminal=True,
            width=width,
            highlight=False,
            legacy_windows=False,
            **options,
        )  # type: ignore[arg-type]

    def rows(self) -> list[str]:
        """Return what is to be read now, without empty rows at the end."""
        text = self._file.getvalue().replace("\n", "\r\n")
        self._file.seek(0)
        self._file.truncate()
        self._stream.feed(text)
        rows = [row.rstrip() for row in self.screen.display]
        while rows and not rows[-1]:
            rows.pop()
        return rows

    def written(self) -> str:
        return self._file.getvalue()


def test_two_rows_that_are_redrawn_in_place() -> None:
    terminal = Terminal()
    with Screen(quiet_stdout=False, errors=terminal.console) as screen:
        for _ in range(3):
            screen.progress(NOW)
            first, second = terminal.rows()
            assert first == "━" * 24 + " 12,800 of 25,600 samples (50%), 1:02, 0:05 left"
            assert second == FIGURES
    assert terminal.rows() == []


def test_workers_lines_stand_above_and_stay() -> None:
    terminal = Terminal()
    with Screen(quiet_stdout=True, errors=terminal.console) as screen:
        screen.progress(NOW)
        screen.line(0, "step 1 [not markup]", False)
        screen.line(1, "a warning", True)
        screen.progress(NOW)
        assert terminal.rows()[:2] == ["[0] step 1 [not markup]", "[1] a warning"]
        assert terminal.rows()[3] == FIGURES
        screen.line(0, "step 2", False)
        screen.notice("rank 1 (slow): killed by SIGKILL; restarting (1 of 3)")
    rows = terminal.rows()
    assert rows[2:] == ["[0] step 2", "rank 1 (slow): killed by SIGKILL; restarting (1 of 3)"]


def test_each_change_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    writes: list[str] = []
    with Screen(quiet_stdout=True, errors=terminal.console) as screen:
        screen.progress(NOW)
        monkeypatch.setattr(terminal.console.file, "write", writes.append)
        screen.line(0, "step", False)
        screen.progress(NOW)
        monkeypatch.undo()
    written = [write for write in writes if write]
    assert len(written) <= 2
    assert all(write.endswith("\n") for write in written)


def test_a_stall_has_a_row_of_its_own() -> None:
    terminal = Terminal()
    stalled = LiveRun(7, 10, 1, 30.0, 1, stalled="no step for 13 s: rank 2 has been computing for 13.2 s")
    with Screen(quiet_stdout=True, errors=terminal.console) as screen:
        screen.progress(stalled)
        assert terminal.rows()[-1] == "no step for 13 s: rank 2 has been computing for 13.2 s"
        screen.progress(NOW)
        assert len(terminal.rows()) == 2


@pytest.mark.parametrize("width", [1, 8, 20, 40, 59, 60, 79])
def test_any_width_has_one_row_a_line(width: int) -> None:
    terminal = Terminal(width)
    with Screen(quiet_stdout=True, errors=terminal.console) as screen:
        for _ in range(3):
            screen.progress(NOW)
        assert len(terminal.rows()) <= 2


def test_a_terminal_that_became_narrower_is_left_clean() -> None:
    terminal = Terminal(100)
    with Screen(quiet_stdout=True, errors=terminal.console) as screen:
        screen.progress(NOW)
        terminal.rows()
        terminal.console.width = 60
        terminal.screen.reset()
        for row in (
            "━" * 24 + " 12,800 of 25,600 samples (50%), 1:02",
            ", 0:05 left",
            FIGURES[:60],
            FIGURES[60:],
        ):
            terminal._stream.feed(row + "\r\n")  # as a terminal wraps the rows that are there
        screen.progress(NOW)
        assert len(terminal.rows()) == 2


def test_no_colour_is_kept() -> None:
    terminal = Terminal(no_color=True, color_system=None)
    with Screen(quiet_stdout=True, errors=terminal.console) as screen:
        screen.progress(NOW)
        assert "\x1b[3" not in terminal.written()


def test_without_a_terminal_there_are_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 0.0, 1.0, 1.0, 1.0, 4.0, 6.5, 6.5, 6.5, 7.0, 8.0, 8.0, 8.0])
    monkeypatch.setattr("pyps.cli.progress.time.monotonic", lambda: next(times, 9.0))
    out = io.StringIO()
    console = Console(file=out, force_terminal=False, width=60)
    with Screen(quiet_stdout=True, errors=console) as screen:
        for _ in range(4):
            screen.progress(NOW)
    lines = out.getvalue().splitlines()
    assert lines == [f"12,800 of 25,600 samples (50%), {FIGURES}"] * 2


def test_the_end_is_one_line_however_slowly_ranks_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyps.cli.progress.LINE_SECONDS", (0.0, 0.0, 0.0))
    out = io.StringIO()
    with Screen(quiet_stdout=True, errors=Console(file=out, force_terminal=False)) as screen:
        for samples in (3, 5, 6, 6, 6):
            screen.progress(LiveRun(samples, 6, 1, 30.0, 1))
    assert [line.split(" of")[0] for line in out.getvalue().splitlines()] == ["3", "5", "6"]


def test_a_stall_is_a_line_at_once() -> None:
    out = io.StringIO()
    with Screen(quiet_stdout=True, errors=Console(file=out, force_terminal=False)) as screen:
        screen.progress(NOW)
        screen.progress(LiveRun(7, 0, 1, 30.0, 1, stalled="no step for 13 s"))
    assert out.getvalue().splitlines()[1:] == ["7 samples, no step for 13 s"]


def test_times() -> None:
    assert [clock(s) for s in (0, 59.9, 3600 + 62)] == ["0:00", "0:59", "1:01:02"]
    assert [duration(s) for s in (0.0116, 9.99, 12.5)] == ["11.6 ms", "9,990.0 ms", "12.5 s"]
