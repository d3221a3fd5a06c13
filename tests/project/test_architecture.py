"""docs/architecture.md leads to the code: each question names a file and a name in it, and both are there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from parsed import tree

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
RECORDS = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
MOST_RECORD_WORDS = 150

FILE = re.compile(r"`((?:csrc|pyps|solver|profiler|tests)/[\w./-]+\.(?:py|c|h|pml))`")
ANSWER = re.compile(rf"^\| (.+?) \|.* {FILE.pattern}: `([\w.]+)` \|$", re.MULTILINE)
ANSWERS = ANSWER.findall(PAGE)


def defined(path: Path) -> set[str]:
    """The names that a file defines: functions, classes and their methods."""
    if path.suffix == ".py":
        return set(_python_names(tree(path).body, ""))
    text = path.read_text(encoding="utf-8")
    heads = re.findall(r"^[A-Za-z][^;{}=#]*?\([^;{}]*\) \{", text, re.MULTILINE)
    return {name for head in heads for name in re.findall(r"\w+", head)}


def _python_names(body: list[ast.stmt], within: str) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield within + node.name
        if isinstance(node, ast.ClassDef):
            yield from _python_names(node.body, f"{within}{node.name}.")


def test_someone_new_finds_answers() -> None:
    assert len(ANSWERS) >= 20
    assert "a push times out?" in {question for question, _, _ in ANSWERS}
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and "file: name" not in line]
    assert len([row for row in rows if FILE.search(row)]) == len(ANSWERS), "a row without a file and a name"


@pytest.mark.parametrize(("question", "file", "name"), ANSWERS, ids=[q for q, _, _ in ANSWERS])
def test_a_question_leads_to_its_answer(question: str, file: str, name: str) -> None:
    assert (ROOT / file).is_file(), f"{question} {file} is not there"
    assert name in defined(ROOT / file), f"{question} {file} does not define {name}"


def test_every_file_that_the_page_names_exists() -> None:
    assert not {name for name in FILE.findall(PAGE) if not (ROOT / name).is_file()}


def test_every_source_file_says_what_it_is(reference: Path) -> None:
    """The reference has the first sentence of each."""
    page = (reference / "files.md").read_text(encoding="utf-8")
    entries = re.findall(r"^- \[`[\w.]+`\]\(../../([\w/.]+)\)(: .+)?$", page, re.MULTILINE)
    assert len(entries) > 100
    assert not {name for name, title in entries if not title}


def test_the_records_of_decisions() -> None:
    """Each has a number, a title, a date, what and why, in few words; the first page lists them in order."""
    index, *records = RECORDS
    listed = re.findall(r"^- \[(.+)\]\((.+)\), (\d{4}-\d\d-\d\d)$", index.read_text(), re.MULTILINE)
    assert [name for _, name, _ in listed] == [record.name for record in records]
    assert [date for _, _, date in listed] == sorted(date for _, _, date in listed)
    for number, (record, (title, _, date)) in enumerate(zip(records, listed, strict=True), 1):
        text = record.read_text(encoding="utf-8")
        assert text.startswith(f"# {number}. {title}\n\n{date}\n\n**What.** "), record.name
        assert "\n\n**Why.** " in text, record.name
        assert len(text.split()) <= MOST_RECORD_WORDS, record.name
