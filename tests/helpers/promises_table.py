"""SECURITY.md's promises, each with the tests that hold it, from their marks: `@pytest.mark.promise("...")`.

python tests/helpers/promises_table.py      writes it into SECURITY.md
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "SECURITY.md"
MARKED = re.compile(r"(<!-- promises: begin -->\n).*?(<!-- promises: end -->)", re.DOTALL)


def promises() -> dict[str, list[str]]:
    """The tests that hold each promise, as path::name in tests/."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if "mark.promise(" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            for mark in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.promise":
                    name = f"{path.relative_to(TESTS)}::{node.name}"
                    found.setdefault(ast.literal_eval(mark.args[0]), []).append(name)
    return found


def prose(text: str) -> str:
    """The page without its tables that commands write, in one line."""
    return " ".join(re.sub(r"<!-- (\S+): begin -->.*?<!-- \1: end -->", "", text, flags=re.DOTALL).split())


def table(text: str) -> str:
    """In the order in which the promises stand in the page."""
    there, found = prose(text), promises()
    rows = [
        f"| {promise} | {', '.join(f'`{name}`' for name in found[promise])} |"
        for promise in sorted(found, key=there.index)
    ]
    return "\n".join(["| promise | test |", "|---|---|", *rows, ""])


def filled(text: str) -> str:
    """The page with the table as it is now. Raises ValueError where a test's promise does not stand in it."""
    return MARKED.sub(lambda match: match[1] + table(text) + match[2], text)


if __name__ == "__main__":
    sys.exit(not PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8"))
