"""benchmarks/record.py: figures that are kept survive a kill, and each table has its place in docs/."""

from __future__ import annotations

import ast
from pathlib import Path

from record import DOCS, Kept

BENCHMARKS = DOCS.parent / "benchmarks"


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


def test_each_section_that_a_benchmark_writes_has_its_markers() -> None:
    """Before hours of measuring have gone by."""
    pages = "".join(page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md"))
    named = set()
    for path in BENCHMARKS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("write_section"):
                first = node.args[0]
                chosen = [first.body, first.orelse] if isinstance(first, ast.IfExp) else [first]
                named |= {one.value for one in chosen if isinstance(one, ast.Constant)}
    assert len(named) > 40
    assert not {name for name in named if f"<!-- {name}: begin -->" not in pages}
