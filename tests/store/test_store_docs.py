"""docs/concepts/store.md: its examples run; the reference that it names lists every error."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pyps import errors

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "concepts" / "store.md").read_text()


@pytest.mark.usefixtures("shm")
def test_the_examples_run() -> None:
    names: dict[str, Any] = {}
    examples = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    assert len(examples) == 3
    for example in examples:
        exec(compile(example, "docs/concepts/store.md", "exec"), names)


def test_every_error_is_in_the_reference(reference: Path) -> None:
    page = (reference / "python.md").read_text()
    for kind in errors.StoreError.__subclasses__():
        assert f"- `{kind.__name__}` ({kind.code}): " in page
