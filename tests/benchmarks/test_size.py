"""benchmarks/size.py counts what it says, in a small tree that has each thing once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import size

METHODS = "\n".join(f"    def method_{k}(self) -> None: ...\n" for k in range(21))
FILES = {
    "pyps/__init__.py": '_HOME = {"Wide": "pyps.a.wide"}\n__all__ = sorted(_HOME)\n',
    "pyps/a/__init__.py": '__all__ = ["Wide", "Tall"]\n',
    "pyps/a/wide.py": f"class Wide:\n    def __init__(self, a, b, c, d, e, f, g, h, i): ...\n{METHODS}",
    "pyps/a/round.py": "from pyps.a import circle\n\nNAME = 'PYPS_SEED'\nERROR = 'PYPS_EBUSY'\n",
    "pyps/a/circle.py": "def late():\n    from pyps.a.round import NAME\n    return NAME\n",
    "pyps/a/long.py": "def long():\n" + "    x = 1\n" * 60 + "\n\ndef short():\n" + "    x = 1\n" * 59,
    "pyps/a/options.py": "def run(policy, codec, depth, seed, samples): ...\n" * 2 + "\n" * 699,
    "pyps/formats/schemas/plan.schema.json": "{}\n",
    "pyps/_native.c": "built\n",
    "solver/__init__.py": "from pyps.solver import used\n",
    "solver/used.py": "",
    "csrc/pyps.h": "enum { PYPS_EBUSY = -1 };\nPYPS_API int pyps_open(\n    int x);\n\nint there(void);\n",
    "csrc/here.c": '#include "pyps.h"\nint here(void) {\n    return there();\n}\n',
    "csrc/there.c": "int there(void) {\n    return here() + last(); /* here() */\n}\n",
    "csrc/last.c": 'int last(void) {\n    /* here() */ getenv("PYPS_ISA");\n    return 0;\n}\n',
    "tests/test_it.py": "\n" * 1000,
}
COUNTED = {
    "lines of pyps": 2 + 875,
    "lines of pyps/a": 1 + 43 + 4 + 3 + 123 + 701,  # in the order of FILES
    "lines of solver": 1,
    "lines of csrc": 5 + 4 + 3 + 4,
    "Python files": 9,
    "C files": 4,
    "functions past 60 lines": 1,
    "files past 700 lines": 1,
    "classes past 20 public methods": 1,
    "constructors past 8 parameters": 1,
    "places that list a run's options": 2,
    "PYPS_* variables": 2,
    "Python files in circles of imports": 2,
    "C files in circles of calls": 2,
    "public names of pyps": 1,
    "public names of its packages": 2,
    "functions of pyps.h": 1,
    "generated files in git": 1,
    "modules under 70 lines with one importer": 3,
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_each_figure_counts_what_its_name_says(tree: Path) -> None:
    found = {name: int(count.replace(",", "")) for name, count in size.rows([size.read_tree(str(tree))])}
    assert found == COUNTED


def test_a_column_for_each_version(tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A revision of git, which has one file fewer, beside the folder."""
    for room in (*size.ROOMS, "docs"):
        (tree / room).mkdir(exist_ok=True)
        (tree / room / "page.md").touch()
    (tree / "csrc" / "last.c").rename(tree / "last.c")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", *size.ROOMS, "docs"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], cwd=tree, check=True)
    (tree / "last.c").rename(tree / "csrc" / "last.c")
    monkeypatch.setattr(size, "ROOT", tree)
    monkeypatch.setattr(sys, "argv", ["size.py", "HEAD", str(tree)])
    size.main()
    heading, _, *rows = capsys.readouterr().out.splitlines()
    assert [cell.strip() for cell in heading.split("|")[2:-1]] == ["HEAD", str(tree)]
    found = {cells[0].strip(): [c.strip() for c in cells[1:]] for cells in (r.split("|")[1:-1] for r in rows)}
    assert found["C files"] == ["3", "4"]
    assert found["lines of csrc"] == ["12", "16"]
    assert len(rows) > len(size.MEASURES)
