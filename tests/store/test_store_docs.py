"""docs/concepts/store.md: its examples run, and its table of errors is complete."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pyps import errors

TEXT = (Path(__file__).parents[2] / "docs" / "concepts" / "store.md").read_text()


@pytest.mark.usefixtures("shm")
def test_the_examples_run() -> None:
    names: dict[str, Any] = {}
    examples = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    assert len(examples) == 3
    for example in examples:
        exec(compile(example, "docs/concepts/store.md", "exec"), names)


def test_every_error_is_in_the_table() -> None:
    for kind in errors.StoreError.__subclasses__():
        assert f"`{kind.__name__}`" in TEXT
        assert kind.code in TEXT
