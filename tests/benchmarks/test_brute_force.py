"""Plans of small random clusters against every split: a sample; `make brute-force` runs thousands."""

from __future__ import annotations

import brute_force
import pytest

SAMPLES = {"shared": 12, "asp": 40, "accumulation": 12, "jobs": 12, "shares": 24, "remedies": 12}


@pytest.mark.parametrize("family", brute_force.NAMES)
def test_no_split_is_better_than_the_plan(family: str) -> None:
    found = brute_force.run_family(family, 100_000, SAMPLES[family])
    assert found.wrong == []
    assert found.tried > SAMPLES[family] / 2


@pytest.mark.parametrize("seed", [1104, 2535, 4625, 4987, 5369])
def test_what_a_refusal_proposes_helps(seed: int) -> None:
    """A proposed batch keeps the job's deadline and budget, too; a message that has none has no gap there."""
    found = brute_force.Found()
    brute_force.remedies(seed, found)
    assert found.refused == 1
    assert not found.wrong
