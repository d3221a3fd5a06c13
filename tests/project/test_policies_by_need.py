"""Policies are known by what they need: only the policy files know one of them by name or number."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from parsed import holding, nodes

from pyps.store.policies import Custom, Policy

ROOT = Path(__file__).resolve().parents[2]
MAY_NAME_THEM = {"pyps/store/policies.py", "pyps/__init__.py"}
CLASSES = {kind.__name__ for kind in (*Policy.known.values(), Custom)}
NUMBERS = re.compile(rf"\bPYPS_({'|'.join([*Policy.known, 'custom'])})\b", re.IGNORECASE)
DECLARES_THEM = {"csrc/pyps.h", "csrc/build_ffi.py"}


def test_no_python_outside_the_policies_imports_one() -> None:
    files = [p for folder in ("pyps", "solver", "profiler") for p in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 100
    found = []
    for path in holding(rf"\b({'|'.join(CLASSES)})\b", files):
        name = path.relative_to(ROOT).as_posix()
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and node.module in ("pyps", "pyps.store.policies"):
                found += [(name, alias.name) for alias in node.names if alias.name in CLASSES]
            if isinstance(node, ast.Attribute) and node.attr in CLASSES and ast.unparse(node.value) == "pyps":
                found.append((name, ast.unparse(node)))
    assert {name for name, _ in found} <= MAY_NAME_THEM, found


def test_no_c_outside_the_policies_asks_for_a_number() -> None:
    files = [p for p in sorted((ROOT / "csrc").rglob("*.[ch]")) if p.parent.name != "policy"]
    assert files
    named = {p.relative_to(ROOT).as_posix() for p in files if NUMBERS.search(p.read_text())}
    assert named <= DECLARES_THEM
