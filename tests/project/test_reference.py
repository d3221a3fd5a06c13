"""The reference is made from the code, is whole, and its links lead somewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest

import pyps
from pyps.cli import COMMANDS
from pyps.formats import FORMATS
from pyps.formats.options import VARIABLES, declared
from pyps.run import RunOptions

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("python.md", "cli.md", "options.md", "c.md", "formats.md", "files.md", "sizes.md")


def text_of(reference: Path, name: str) -> str:
    return (reference / name).read_text(encoding="utf-8")


def test_every_public_name_is_in_it(reference: Path) -> None:
    page = text_of(reference, "python.md")
    assert [name for name in pyps.__all__ if f"`{name}`" not in page] == []


def test_every_command_is_in_it(reference: Path) -> None:
    page = text_of(reference, "cli.md")
    assert [name for name in COMMANDS if f"## pyps {name}\n" not in page] == []


def test_every_function_of_the_header_is_in_it(reference: Path) -> None:
    header = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "csrc").glob("pyps*.h"))
    functions = re.findall(r"^PYPS_API [^;(]*?(pyps_\w+)\(", header, re.MULTILINE)
    page = text_of(reference, "c.md")
    assert len(functions) > 50
    assert [name for name in functions if f"`{name}`" not in page] == []


def test_every_option_and_variable_is_in_it(reference: Path) -> None:
    commands, page = text_of(reference, "cli.md"), text_of(reference, "options.md")
    for name, _, _ in declared(RunOptions):
        assert f"| `{name}` |" in page
        assert name == "args" or f"`--{name.replace('_', '-')}`" in commands
    assert [name for name in VARIABLES if f"`{name}`" not in page] == []


def test_every_source_file_is_in_it(reference: Path) -> None:
    page = text_of(reference, "files.md")
    paths = [p for room in ("pyps", "solver", "profiler") for p in (ROOT / room).rglob("*.py")]
    assert [p for p in paths if f"]({Path('../..') / p.relative_to(ROOT)})" not in page] == []


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_a_schema(reference: Path, name: str) -> None:
    assert f"## {name}" in text_of(reference, "formats.md")
    jsonschema.Draft202012Validator.check_schema(
        json.loads(text_of(reference, f"schemas/{name}.schema.json"))
    )


@pytest.mark.parametrize("name", PAGES)
def test_its_links_lead_somewhere(reference: Path, name: str) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text_of(reference, name)):
        assert "://" in target or (reference / target).exists(), target
