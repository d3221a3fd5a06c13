"""Prints the table of the cells that were run; with --write-docs it goes to docs/concepts/matrix.md, too."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest
from matrix import Judged, table
from zygote import Zygote, zygote

PAGE = Path(__file__).resolve().parents[2] / "docs" / "concepts" / "matrix.md"
BEGIN, END = "<!-- matrix: begin -->\n", "<!-- matrix: end -->\n"
RUN = pytest.StashKey[list[Judged]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-docs", action="store_true", help="write the table of the matrix into docs/")


@pytest.fixture
def run_cells(pytestconfig: pytest.Config) -> list[Judged]:
    """Return what was judged until now, for the table."""
    return pytestconfig.stash.setdefault(RUN, [])


@pytest.fixture(scope="session")
def worker_processes() -> Iterator[Zygote]:
    with zygote() as found:
        yield found


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if found := config.stash.get(RUN, []):
        terminalreporter.section(f"{len(found)} cells of the matrix")
        lines = list(table(found))
        for line in lines:
            terminalreporter.write_line(line)
        if config.getoption("--write-docs", default=False):
            before, _, rest = PAGE.read_text().partition(BEGIN)
            text = "\n".join([f"{date.today()}: {len(found)} cells.", "", *lines, ""])
            PAGE.write_text(before + BEGIN + text + END + rest.partition(END)[2])
