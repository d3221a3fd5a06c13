"""One name, one meaning: no two public classes or type aliases of the packages share a name."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from parsed import tree

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("pyps", "solver", "profiler")


def definitions(path: Path) -> Iterator[tuple[str, str]]:
    """A module's public classes and aliases: each name, and what it means."""
    for node in tree(path).body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name, f"class in {path.relative_to(ROOT)}"
        elif isinstance(node, ast.Assign):
            names = (target.id for target in node.targets if isinstance(target, ast.Name))
            yield from ((n, ast.unparse(node.value)) for n in names if n[0].isupper() and not n.isupper())


def test_no_two_classes_or_aliases_share_a_name() -> None:
    """An alias of a library's type may stand in two modules, if it means the same in both."""
    meanings: dict[str, set[str]] = defaultdict(set)
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            for name, meaning in definitions(path):
                meanings[name].add(meaning.replace("npt.", ""))
    assert not {name: found for name, found in meanings.items() if len(found) > 1}
