"""Plans: caps and bounds from cluster and profile, the even split, turns, transfers and warnings."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pyps.errors import Infeasible, InputError
from pyps.formats import Cluster, Device, Fit, Job, Memory, ModelInfo, Plan, Point, Profile, WorkerGroup
from pyps.solver.members import cap_of, cost_of, problem_of
from pyps.solver.plan import even_batches, make_plan
from pyps.solver.schedule import hps_estimate, r2sp_schedule, transfer_seconds

PARAMETERS = 1_000_000


def profile(a: float, c: float = 0.01, **changes: Any) -> Profile:
    fit = Fit(
        kind="affine", fixed_seconds=c, per_sample_seconds=a, trusted_min_batch=1, trusted_max_batch=4096
    )
    base = Profile(
        device=Device(name="d"),
        model=ModelInfo(name="mlp", parameters=PARAMETERS),
        points=[Point(batch=1, seconds=1.0)],
        fit=fit,
    )
    return msgspec.structs.replace(base, **changes)


def plan(B: int, *groups: tuple[dict[str, Any], Profile]) -> Plan:
    workers = [WorkerGroup(**{"name": f"w{k}", "profile": "p.json", **g}) for k, (g, _) in enumerate(groups)]
    return make_plan(Cluster(job=Job(global_batch=B), worker=workers), [p for _, p in groups])


def test_a_plan_is_consistent() -> None:
    made = plan(300, ({"count": 2}, profile(0.001)), ({}, profile(0.002)))
    assert [w.name for w in made.workers] == ["w0-0", "w0-1", "w1"]
    assert [w.rank for w in made.workers] == [0, 1, 2]
    assert [w.batch for w in made.workers] == [120, 120, 60]
    assert sum(w.weight for w in made.workers) == pytest.approx(1.0)
    assert made.iteration_seconds == max(w.predicted_seconds for w in made.workers) == pytest.approx(0.13)
    assert made.lower_bound_seconds == pytest.approx(0.13)
    assert made.even_split.feasible
    assert made.speedup_over_even == pytest.approx(0.21 / 0.13)
    assert made.warnings == []


def test_the_even_split_gives_what_is_over_to_the_first() -> None:
    assert even_batches(11, 4) == [3, 3, 3, 2]
    assert even_batches(2, 4) == [1, 1, 0, 0]


@pytest.mark.parametrize("bound", [{"max_batch": 10}, {"min_batch": 60}, {"quantum": 8}])
def test_an_even_split_that_breaks_a_bound_is_not_feasible(bound: dict[str, int]) -> None:
    made = plan(100, (bound, profile(0.001)), ({}, profile(0.002)))
    assert not made.even_split.feasible
    assert made.even_split.seconds is None
    assert made.speedup_over_even is None


def test_the_cap_is_the_least_of_all_that_bound_it() -> None:
    memory = Memory(fixed_bytes=100, bytes_per_sample=3.0, budget_bytes=200)
    group = WorkerGroup(name="a", profile="p", max_batch=50)
    assert cap_of(group, profile(1.0)) == 50
    assert cap_of(group, profile(1.0, max_batch=40)) == 40
    assert cap_of(group, profile(1.0, max_batch=40, memory=memory)) == 33
    tiny = Memory(fixed_bytes=300, bytes_per_sample=3.0, budget_bytes=200)
    assert cap_of(group, profile(1.0, memory=tiny)) == 0


def test_every_kind_of_fit_is_a_cost() -> None:
    bounds = {"trusted_min_batch": 1, "trusted_max_batch": 9}
    knee = Fit(kind="knee", fixed_seconds=1.0, per_sample_seconds=0.5, floor_seconds=2.0, **bounds)
    assert [cost_of(knee).seconds(b) for b in (1, 2, 4)] == [2.0, 2.0, 3.0]
    assert cost_of(msgspec.structs.replace(knee, kind="affine")).seconds(1) == 1.5
    table = Fit(kind="table", table=[(1, 1.0), (3, 2.0)], **bounds)
    assert cost_of(table).seconds(2) == 1.5


def test_required_workers_that_cannot_take_part_are_named() -> None:
    with pytest.raises(Infeasible, match=r"worker\[1\] 'w1' is required.*at least 8 and at most 5"):
        plan(
            100,
            ({}, profile(0.1)),
            ({"required": True, "min_batch": 3, "quantum": 8, "max_batch": 5}, profile(0.1)),
        )


def test_a_profile_without_a_fit_is_refused() -> None:
    with pytest.raises(InputError, match=r"p\.json: fit"):
        plan(10, ({}, profile(0.1, fit=None)))


def test_warnings_say_what_not_to_trust() -> None:
    fit = Fit(
        kind="affine",
        per_sample_seconds=0.001,
        trusted_min_batch=1,
        trusted_max_batch=16,
        leave_one_out_error=0.2,
    )
    emulated = profile(0.1, fit=fit, device=Device(name="slow", emulated=True, throttle=2.9))
    made = plan(100, ({"count": 2}, emulated), ({}, profile(9.0, model=ModelInfo(name="cnn"))))
    assert made.warnings == [
        "w0: batch 50 is outside 1..16, where its fit is trusted",
        "w0: the fit misses left-out points by 20.0% (median)",
        "w0: emulated, 2.9 times slower by a throttle",
        "w1: left out, the others finish sooner without it",
        "the profiles are of different models: cnn, mlp",
    ]
    assert [w.throttle for w in made.workers] == [2.9, 2.9, 1.0]
    assert made.r2sp.order == [0, 1]


def test_transfers_are_pushed_and_pulled() -> None:
    assert transfer_seconds(PARAMETERS, 8e6, 0.25) == pytest.approx(2 * (0.25 + 0.5))
    assert transfer_seconds(PARAMETERS, 8e6, None) == pytest.approx(1.0)
    assert transfer_seconds(None, 8e6, 0.1) is None
    assert transfer_seconds(PARAMETERS, None, 0.1) is None


def test_turns_are_evenly_spaced_and_feasible_where_they_fit() -> None:
    ring = r2sp_schedule([0, 2, 3, 5], [1.0, 2.0, 1.5, 1.0], [0.1, 0.5, 0.1, 0.1])
    assert ring.feasible is True
    assert (ring.period_seconds, ring.gap_seconds) == (2.5, 0.625)
    assert ring.order == [0, 2, 3, 5]
    assert ring.offsets_seconds == [0.0, 0.625, 1.25, 1.875]
    jammed = r2sp_schedule([0, 1], [1.0, 1.0], [3.0, 3.0])
    assert jammed.feasible is False
    assert jammed.period_seconds == 6.0
    assert r2sp_schedule([0, 1], [1.0, 2.0], [0.5, None]).feasible is None


def test_a_link_that_binds_is_said() -> None:
    made = plan(100, ({"count": 2, "bandwidth": 1e6}, profile(0.001)))
    assert made.r2sp.feasible is False
    assert "the link binds" in made.warnings[-1]
    assert made.hps.serial_seconds == pytest.approx(8.06)
    assert made.hps.pipelined_seconds == pytest.approx(8.0)


def test_overlap_is_estimated_only_where_transfers_are_known() -> None:
    assert msgspec.to_builtins(hps_estimate([1.0, 2.0], [0.5, None])) == {}
    both = hps_estimate([1.0, 2.0], [1.5, 0.25])
    assert (both.serial_seconds, both.pipelined_seconds) == (2.5, 2.0)


def test_the_problem_takes_every_bound_from_the_cluster() -> None:
    group = WorkerGroup(name="a", profile="p", min_batch=3, max_batch=9, quantum=2, required=True, count=2)
    built = problem_of(Cluster(job=Job(global_batch=12), worker=[group]), [profile(1.0)])
    assert built.global_batch == 12
    assert [built.low.tolist(), built.cap.tolist(), built.quantum.tolist()] == [[3, 3], [9, 9], [2, 2]]
    assert built.required.tolist() == [True, True]
