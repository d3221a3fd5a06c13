"""Parameters and drawn examples of which `make test` takes a sample; `make test-all` takes all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

thorough = True  # conftest.py: whether thorough tests run


def examples(few: int, many: int) -> int:
    """For hypothesis: how many examples it draws, `many` where thorough tests run."""
    return many if thorough else few


def sampled(values: Iterable[Any], *kept: int) -> list[Any]:
    """For parametrize: the values at `kept` (the first if none is named), and the others marked thorough.

    A tuple that is no named one holds one value for each argument, as parametrize takes it.
    """
    listed = list(values)
    places = {place % len(listed) for place in kept or (0,)}
    return [
        value
        if place in places
        else pytest.param(*(value if type(value) is tuple else (value,)), marks=pytest.mark.thorough)
        for place, value in enumerate(listed)
    ]
