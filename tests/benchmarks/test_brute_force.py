"""Plans of small random clusters against every split: a sample; `make brute-force` runs thousands."""

from __future__ import annotations

import brute_force
import pytest

SAMPLES = {"shared": 12, "asp": 40, "accumulation": 12, "jobs": 12, "shares": 60, "remedies": 40}


@pytest.mark.parametrize("family", brute_force.NAMES)
def test_no_split_is_better_than_the_plan(family: str) -> None:
    found = brute_force.run_family(family, 100_000, SAMPLES[family])
    assert found.wrong == []
    assert found.tried > SAMPLES[family] / 2
