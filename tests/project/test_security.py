"""SECURITY.md: its tables are made from the code and the tests, and every section has promises with tests."""

from __future__ import annotations

import re
from pathlib import Path

import promises_table
from roles_table import VERBS, filled, table

ROOT = Path(__file__).resolve().parents[2]
LEAST = 46  # promises: none goes with its test


def test_each_promise_stands_there_with_its_test() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    found = promises_table.promises()
    assert not [promise for promise in found if promise not in promises_table.prose(text)]
    assert len(found) >= LEAST
    assert promises_table.filled(text) == text, "python tests/helpers/promises_table.py"


def test_each_section_has_a_promise_that_a_test_holds() -> None:
    """All but those of the page's own tables, and of where to report."""
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    sections = {part.partition("\n")[0]: part for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]}
    made = {name for name in sections if name in ("Reporting", "Tests")}
    held = promises_table.promises()
    for name in sections.keys() - made:
        assert any(promise in promises_table.prose(sections[name]) for promise in held), name


def test_the_table_of_roles_is_that_of_the_code() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert filled(text) == text, "python tests/helpers/roles_table.py"
    assert all(f"`{name}`" in table() for name in VERBS)
