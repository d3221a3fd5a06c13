"""The pages are true: Python blocks run, commands exist with the options shown, links lead somewhere.

A ```python block whose first line is a comment with a file name (`# train.py`) is that file: it is written to
the page's folder. Every other one is executed there, in order, in one namespace. A ```console block after
`<!-- executed -->` is executed too, and its output has to be the one shown; "..." stands for lines left out.
Of all other commands, each option has to be in the command's help.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
import traceback
from functools import cache
from pathlib import Path

import pytest
import torch

import pyps_commands

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
WRITTEN = [page for page in sorted(DOCS.rglob("*.md")) if DOCS / "reference" not in page.parents]
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *WRITTEN]
EXECUTED = [page for page in PAGES if "<!-- executed -->" in page.read_text(encoding="utf-8")]
MOST_WORDS = (
    26_257  # sentences that were read twice: 106; `pyps join`: 52; `pyps gain`: 140; shares by memory: 1,300
)
MOST_RESULTS_WORDS = 12_000
MOST_SECURITY_WORDS = 900
PROGRAMS = {
    "pyps": pyps_commands.main,
    "pyps-profile": pyps_commands.main_profile,
    "pyps-plan": pyps_commands.main_plan,
}
SUBCOMMANDS = {
    "pyps": (
        "gain",
        "run",
        "join",
        "top",
        "report",
        "serve",
        "profile",
        "plan",
        "simulate",
        "export",
        "keys",
        "shm",
    ),
    "pyps-profile": ("import", "show", "compare", "merge", "link"),
    "pyps-plan": ("what-if", "pareto", "which"),
}
NESTED = {("pyps", "shm"): ("ls", "gc"), ("pyps", "keys"): ("add", "revoke", "ls")}
FILE_NAME = re.compile(r"# ([\w/.-]+\.\w+)\n")

torch.set_num_threads(1)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str, after: str = "") -> list[str]:
    """The fenced blocks of one language, in order; only those right behind the line `after`, if given."""
    pattern = rf"^{after}```{language}\n(.*?)^```"
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
    """Return what `program subcommands --help` prints, on wide paper."""
    code, said = forked([program, *subcommands, "--help"], ROOT, columns=300)
    assert code == 0, said
    return said


def forked(words: list[str], folder: Path, columns: int = 100) -> tuple[int, str]:
    """The exit code and the output of one of our programs, in a fork: its imports are there already."""
    importlib.import_module("pyps.cli.profile"), importlib.import_module("pyps.cli.plan")
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        if not (child := os.fork()):
            with contextlib.suppress(BaseException):
                os.dup2(out.fileno(), 1), os.dup2(err.fileno(), 2)
                sys.stdout, sys.stderr = (os.fdopen(file, "w", closefd=False) for file in (1, 2))
                os.environ |= {"COLUMNS": str(columns), "NO_COLOR": "1"}
                os.chdir(folder)
                _exit_as(words)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return os.waitstatus_to_exitcode(status), "".join(texts)


def _exit_as(words: list[str]) -> None:
    sys.argv, code = words, 1
    try:
        PROGRAMS[words[0]]()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def output_of(command: str, folder: Path) -> str:
    """Return what a command prints; ours are forked, unless they need a shell."""
    words = shlex.split(command)
    if words[0] in PROGRAMS and not set("|;&<>$*") & set(command):
        return forked(words, folder)[1]
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": programs, "COLUMNS": "100", "NO_COLOR": "1"}
    done = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True)
    return done.stdout + done.stderr


def named_subcommands(program: str, words: list[str]) -> list[str]:
    """The subcommands that a command line names."""
    chosen: list[str] = []
    if words and words[0] in SUBCOMMANDS.get(program, ()):
        chosen.append(words[0])
        if len(words) > 1 and words[1] in NESTED.get((program, words[0]), ()):
            chosen.append(words[1])
    return chosen


@pytest.mark.parametrize("page", PAGES, ids=name_of)
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


@pytest.mark.parametrize("page", PAGES, ids=name_of)
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


@pytest.mark.parametrize("page", EXECUTED, ids=name_of)
def test_outputs_are_real(page: Path, tmp_path: Path) -> None:
    for name, text in re.findall(r"^```toml\n# (\S+)\n(.*?)^```", page.read_text("utf-8"), re.M | re.S):
        (tmp_path / name).write_text(text)
    for block in blocks(page, "console", after="<!-- executed -->\n"):
        for entry in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *shown = entry.splitlines()
            printed = [line.split() for line in output_of(command, tmp_path).splitlines() if line.strip()]
            expected = [line.split() for line in shown if line != "..."]
            assert not expected or printed[-len(expected) :] == expected, command
            assert len(printed) == len(expected) or not shown or "..." in shown, command


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    """In a fresh clone, too, where docs/reference is not yet made."""
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert "reference/" not in target, f"{page.name}: {target}: git has no such page"
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_one_page_says_how_to_install() -> None:
    """The one to change when a registry has the package; the others name extras and link there."""
    page = DOCS / "how-to" / "install.md"
    told = re.compile(r"pip install [^\n`]*(?:pyps|\.\[)")
    assert [one for one in PAGES if told.search(one.read_text(encoding="utf-8"))] == [page]
    text = page.read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    table = re.findall(r"^\| (`.*`) \|", text, re.MULTILINE)
    named = set(re.findall(r"`([\w-]+)`", " ".join(table)))
    assert named == project["optional-dependencies"].keys() - {"bench", "oldest", "site", "wheels"}
    wheel = "cp311-abi3-manylinux2014_x86_64.manylinux_2_17_x86_64.whl"
    assert f"pyps_train-{project['version']}-{wheel}" in text


def test_the_diff_of_the_readme() -> None:
    """It shows all that differs between the two example scripts, except epochs and measurements."""
    before, after = (
        (ROOT / "examples" / "ddp" / f"{name}.py").read_text(encoding="utf-8").splitlines()
        for name in ("before", "after")
    )
    (diff,) = blocks(ROOT / "README.md", "diff")
    shown = [line for line in diff.splitlines() if line[:1] in ("-", "+")]
    real = [line for line in difflib.ndiff(before, after) if line[:1] in "-+" and line[2:].strip()]
    real = [line[0] + line[2:] for line in real]
    measuring = re.compile(r"""^."{3}|device|history|EPOCHS""")
    assert sorted(shown) == sorted(line for line in real if not measuring.search(line))
    kept = [line[1:].strip() for line in diff.splitlines() if line[:1] == " " and line.strip() != "..."]
    assert {line for line in kept if line} <= {line.strip() for line in before if line in after}


def test_results_begin_with_what_was_found() -> None:
    for page in (DOCS / "results").glob("*.md"):
        title, found, _ = re.split(r"\n\n(?=\*\*Found|[^-*])", page.read_text(encoding="utf-8"), maxsplit=2)
        assert found.startswith("**Found.**"), page.name
        assert len(f"{title}\n\n{found}".splitlines()) <= 20, page.name


def test_results_say_what_was_measured() -> None:
    """Not what we had wanted: whether a bound of ours was met means nothing to a user."""
    ours = re.compile(r"\b(missed|threshold|wanted|bar:|met:)|\(expected", re.IGNORECASE)
    texts = {page.name: page.read_text(encoding="utf-8") for page in (DOCS / "results").glob("*.md")}
    assert not {name: found for name, text in texts.items() if (found := ours.findall(text))}
    assert sum(len(text.split()) for text in texts.values()) <= MOST_RESULTS_WORDS


def test_the_pages_are_short() -> None:
    # tests/project/test_architecture.py counts the words of decisions.
    apart = {DOCS / "results", DOCS / "decisions"}
    pages = [page for page in PAGES if not apart & {*page.parents}]
    made = re.compile(r"<!-- (\S+): begin -->.*?<!-- \1: end -->", re.DOTALL)  # tables that commands write
    words = {name_of(page): len(made.sub("", page.read_text(encoding="utf-8")).split()) for page in pages}
    assert words.pop("SECURITY.md") <= MOST_SECURITY_WORDS
    assert sum(words.values()) <= MOST_WORDS, words
