"""Docstrings begin with a sentence that has a verb, or name a thing: a tired reader need not guess the
subject.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from parsed import holding, nodes

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("pyps", "solver", "profiler", "tests", "benchmarks", "examples", "docs", "csrc")
WITHOUT_A_VERB = {"Of", "As", "Those", "They", "What", "Whether"}


def first_words(path: Path) -> Iterator[str]:
    """The first word of each docstring of a file."""
    for node in nodes(path):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield from (ast.get_docstring(node, clean=False) or "").split(maxsplit=1)[:1]


def bare(word: str) -> bool:
    return word.rstrip(".,:;") in WITHOUT_A_VERB


def test_docstrings_begin_with_a_verb_or_a_thing() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 500
    begun = rf'"""\s*({"|".join(WITHOUT_A_VERB)})\b'  # or else a string that is no docstring
    found = {str(path) for path in holding(begun, files) for word in first_words(path) if bare(word)}
    assert not found, "begin with a verb, as in `Return whether ...`"
