"""The imports of benchmarks and examples, which run rarely: a moved name is found here."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from parsed import nodes, tree

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path for folder in ("benchmarks", "examples") for path in (ROOT / folder).rglob("*.py"))


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """Module and name of each import from pyps in a script, wherever in it the import stands."""
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "pyps":
            yield from ((node.module, name.name) for name in node.names)


@cache
def defined(module: str) -> set[str]:
    """The names at the top of a module's file, which is not run: some import a library for seconds."""
    spec = importlib.util.find_spec(module)
    if spec is None or not (spec.origin or "").endswith(".py"):
        return set()
    found = set()
    for node in tree(Path(spec.origin or "")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def is_there(module: str, name: str) -> bool:
    """Look for a name, or for a module. What wants a library that is not installed passes."""
    if name in defined(module):
        return True
    try:
        if hasattr(importlib.import_module(module), name):
            return True
    except ModuleNotFoundError as error:
        return error.name is not None and not error.name.startswith("pyps")
    return importlib.util.find_spec(f"{module}.{name}") is not None


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_script_imports_is_there(path: Path) -> None:
    missing = [f"{module}.{name}" for module, name in imported(path) if not is_there(module, name)]
    assert not missing
