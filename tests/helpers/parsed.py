"""Python files of the project as trees, each parsed and walked once for all tests of a process."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path


def holding(pattern: str, paths: Iterable[Path]) -> Iterator[Path]:
    """The files whose text matches somewhere: the others need not be parsed."""
    matches = re.compile(pattern, re.MULTILINE).search
    return (path for path in paths if matches(path.read_text(encoding="utf-8")))


@cache
def tree(path: Path) -> ast.Module:
    """A file's tree. No caller may change it."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file."""
    return tuple(ast.walk(tree(path)))
