"""Docstrings begin with a sentence that has a verb, or name a thing: a tired reader need not guess the
subject.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from parsed import nodes

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("pyps", "solver", "profiler", "tests", "benchmarks", "examples", "docs", "csrc")
WITHOUT_A_VERB = {"Of", "As", "Those", "They", "What", "Whether"}


def first_words(folder: Path) -> Iterator[tuple[str, str]]:
    """The room and the first word of every docstring."""
    for path in folder.rglob("*.py"):
        room = "/".join(path.relative_to(ROOT).parts[:2]) if folder.name in ("pyps", "tests") else folder.name
        for node in nodes(path):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                continue
            if text := ast.get_docstring(node, clean=False):
                yield room, text.split(maxsplit=1)[0].rstrip(".,:;")


def test_docstrings_begin_with_a_verb_or_a_thing() -> None:
    words = [found for folder in FOLDERS for found in first_words(ROOT / folder)]
    assert len(words) > 1000
    found = Counter(room for room, word in words if word in WITHOUT_A_VERB)
    assert not found, "begin with a verb, as in `Return whether ...`"
