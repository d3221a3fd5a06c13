"""Docstrings begin with a sentence that has a verb, or name a thing: a tired reader need not guess the
subject.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("pyps", "solver", "profiler", "tests", "benchmarks", "examples", "docs", "csrc")
WITHOUT_A_VERB = {"Of", "As", "Those", "They", "What", "Whether"}


def first_words(folder: Path) -> Iterator[tuple[str, str]]:
    """The room and the first word of every docstring."""
    for path in folder.rglob("*.py"):
        room = "/".join(path.relative_to(ROOT).parts[:2]) if folder.name in ("pyps", "tests") else folder.name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                continue
            if text := ast.get_docstring(node):
                yield room, text.split()[0].rstrip(".,:;")


FOUND = Counter(
    room for folder in FOLDERS for room, word in first_words(ROOT / folder) if word in WITHOUT_A_VERB
)


def test_docstrings_begin_with_a_verb_or_a_thing() -> None:
    assert not FOUND, "begin with a verb, as in `Return whether ...`"
