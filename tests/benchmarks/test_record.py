"""benchmarks/record.py: figures that are kept survive a kill in the middle of a line."""

from __future__ import annotations

from pathlib import Path

from record import Kept


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
