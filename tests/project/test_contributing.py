"""Define what a contributor meets first is true: hooks run tools that are there, forms are whole, commands
exist.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PAGES = [
    ROOT / name for name in ("CONTRIBUTING.md", "CODE_OF_CONDUCT.md", ".github/pull_request_template.md")
]


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_hooks_run_the_tools_that_constraints_pin() -> None:
    (local,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert local["repo"] == "local"
    pinned = re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    for hook in local["hooks"]:
        program, argument, *_ = hook["entry"].split()
        if program == "make":
            assert re.search(rf"^{argument}:", MAKEFILE, re.MULTILINE), hook["entry"]
        else:
            assert program.removeprefix(".venv/bin/") in pinned, hook["entry"]


@pytest.mark.parametrize("form", [f for f in FORMS if f.name != "config.yml"], ids=lambda form: form.name)
def test_a_form_has_a_name_and_fields(form: Path) -> None:
    read_form = read(form)
    assert read_form["name"]
    assert read_form["description"]
    fields = [field for field in read_form["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields) > 0
    assert all(field["attributes"]["label"] for field in fields)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_links_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = {*re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE), "test-solver", "test-store"}
    assert set(re.findall(r"`make ([\w-]+)`", text)) <= targets
    for link in re.findall(r"\]\(([^)#\s]+)", text):
        assert (page.parent / link).exists(), link


def test_no_address_of_a_place_that_may_not_exist() -> None:
    """The repository has no address of its own yet: these files name none."""
    for path in [*FORMS, *PAGES, ROOT / ".pre-commit-config.yaml"]:
        assert "://" not in path.read_text(encoding="utf-8"), path.name
