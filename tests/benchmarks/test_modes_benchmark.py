"""benchmarks/modes.py, small: one run as planned, and the joint plan against two stages for every case."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import modes
import pytest

QUICK = next(case for case in modes.CASES if case.quick)


@pytest.mark.thorough
def test_a_run_as_planned(shm: Path, tmp_path: Path) -> None:
    devices = tuple(replace(one, fixed=one.fixed / 5, per_sample=one.per_sample / 5) for one in QUICK.devices)
    outcome = modes.run_case(replace(QUICK, devices=devices, iterations=6), tmp_path)
    assert all(outcome.batches)
    assert outcome.measured_seconds > 0.9 * outcome.predicted_seconds


@pytest.mark.parametrize("case", [*modes.CASES, modes.TWENTY], ids=lambda case: case.name)
def test_the_joint_plan_is_never_slower(tmp_path: Path, case: modes.Case) -> None:
    first, joint = modes.two_stages(case, tmp_path)
    assert joint <= first * (1 + 1e-9)
    if case is modes.TWENTY:
        assert modes.GAIN * joint <= first


def test_each_policy_is_among_them() -> None:
    from pyps.store.policies import Policy

    named = {case.run.partition('"')[2].partition('"')[0].partition(":")[0] for case in modes.CASES}
    assert named == set(Policy.known)
