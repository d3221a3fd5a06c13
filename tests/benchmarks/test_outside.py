"""benchmarks/outside: each set is read, the planner sees a part of it, and plans no worse than its rivals."""

from __future__ import annotations

import measured
import numpy as np
import planners
import pytest

SEEDS = 3
LEVEL = 1.005  # of interpolation's mean regret: as many clusters as these differ by so much by chance


@pytest.mark.parametrize("name", measured.SETS)
def test_a_plan_is_no_slower_than_the_one_by_interpolation(name: str) -> None:
    found = measured.tried(measured.FOLDER / f"{name}.csv", SEEDS)
    for regret in found.regrets.values():
        assert np.nanmin(regret) >= 1 - 1e-9, "faster than the fastest split"
    assert found.over_interpolation <= LEVEL
    assert len(found.row()) == len(measured.HEADING)


def test_the_planner_sees_powers_of_two_where_a_curve_is_dense() -> None:
    (curve, *_), *_ = measured.read(measured.FOLDER / "vidur.csv")
    assert {b for b, _ in curve.seen} <= {2**k for k in range(20)}
    assert len(curve.unseen) > measured.DENSE / 2


def test_shares_by_speed_add_up_within_the_limits() -> None:
    seen = (((8, 1.0),), ((8, 2.0),), ((8, 8.0),))
    assert planners.by_speed(seen, 13, [100] * 3).tolist() == [8, 4, 1]
    assert planners.by_speed(seen, 13, [5, 100, 100]).tolist() == [5, 6, 2]
