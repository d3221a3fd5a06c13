"""The pages are true: Python blocks run, commands exist with the options shown, links lead somewhere.

A ```python block whose first line is a comment with a file name (`# train.py`) is that file: it is written to
the page's folder. Every other one is executed there, in order, in one namespace. Docs that run processes are
left to the tests of those commands; here each option that a ```console block shows has to be in its help.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = ("pyps", "pyps-profile", "pyps-plan")
SUBCOMMANDS = {
    "pyps": ("run", "serve", "profile", "plan", "simulate", "shm"),
    "pyps-profile": ("import", "show", "compare", "merge", "link"),
    "pyps-plan": ("what-if", "pareto"),
}
NESTED = {("pyps", "shm"): ("ls", "gc")}
FILE_NAME = re.compile(r"# ([\w/.-]+\.\w+)\n")

torch.set_num_threads(1)


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language, in order."""
    pattern = rf"^```{language}\n(.*?)^```"
    return re.findall(pattern, page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[str]:
    """The commands of the page's console blocks, continuation lines joined."""
    found = []
    for block in blocks(page, "console"):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                found += [part.strip() for part in line[2:].partition(" # ")[0].split("&&")]
    return found


@cache
def help_text(program: str, *subcommands: str) -> str:
    """What `program subcommands --help` prints, on wide paper."""
    done = subprocess.run(
        [str(Path(sys.executable).parent / program), *subcommands, "--help"],
        capture_output=True, text=True, env={**os.environ, "COLUMNS": "300", "NO_COLOR": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def named_subcommands(program: str, words: list[str]) -> list[str]:
    """The subcommands that a command line names."""
    chosen: list[str] = []
    if words and words[0] in SUBCOMMANDS.get(program, ()):
        chosen.append(words[0])
        if len(words) > 1 and words[1] in NESTED.get((program, words[0]), ()):
            chosen.append(words[1])
    return chosen


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (found := blocks(page, "python")):
        pytest.skip("no Python on this page")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    names: dict[str, object] = {"__name__": "page"}
    for block in found:
        code = compile(block, str(page), "exec")
        if name := FILE_NAME.match(block):
            Path(name[1]).write_text(block)
        else:
            exec(code, names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist_with_their_options(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in commands(page):
        program, *words = command.split()
        if program == "make":
            assert set(words) <= targets, f"{page.name}: {command}"
        if program not in PROGRAMS:
            continue
        chosen = named_subcommands(program, words)
        script = next((k for k, word in enumerate(words) if word.endswith(".py")), len(words))
        for option in re.findall(r"(?<!\S)--?[a-z][a-z-]*", " ".join(words[:script])):
            known = re.findall(r"(?<![\w-])--?[a-z][a-z-]*", help_text(program, *chosen))
            assert option in known, f"{page.name}: {command}: no {option}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_readme_is_there() -> None:
    assert len((ROOT / "README.md").read_text()) > 1000
