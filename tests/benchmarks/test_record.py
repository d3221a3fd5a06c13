"""benchmarks/record.py: figures and tables that are kept survive a kill."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import record
from record import Kept

BENCHMARKS = Path(record.__file__).parent


def test_a_line_that_was_cut_is_left_out_and_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    Kept(path).add("first", [1.0, 2.0])
    Kept(path).add("second", {"loss": 3.0})
    path.write_text(path.read_text()[:-5])
    again = Kept(path)
    assert (again.get("first"), again.get("second")) == ([1.0, 2.0], None)
    again.add("second", {"loss": 4.0})
    last = Kept(path)
    assert (last.get("first"), last.get("second")) == ([1.0, 2.0], {"loss": 4.0})


def test_a_table_is_kept_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the name of its page, beside those of other benchmarks; a later one replaces it."""
    monkeypatch.setattr(record, "OUT", tmp_path / "out")
    record.save_table("core", "| first |")
    record.save_table("deep", "| of another page |", "papers.md")
    record.save_table("core", "| second |")
    kept = {path.name: path.read_text() for path in (tmp_path / "out").iterdir()}
    assert kept == {"benchmarks-core.md": "| second |\n", "papers-deep.md": "| of another page |\n"}


def test_make_runs_every_benchmark() -> None:
    """Each file is a command of a target or of the reference, or such a command needs it."""
    files = {
        p.stem: p for p in BENCHMARKS.rglob("*.py") if p.parent.parent.name != "foreign"
    }  # foreign.py runs these
    run = re.findall(r"benchmarks/(?:\w+/)?(\w+)\.py", (BENCHMARKS.parent / "Makefile").read_text())
    reached, ahead = set[str](), {*run, "size"}
    while ahead:
        text = files[name := ahead.pop()].read_text()
        reached.add(name)
        needed = re.findall(r"^\s*(?:import|from) (\w+)|(\w+)\.py\"", text, re.MULTILINE)
        ahead |= {one for pair in needed for one in pair if one in files} - reached
    assert files.keys() - reached == set()
