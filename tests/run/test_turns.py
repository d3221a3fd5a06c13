"""Planned turns drive a run: other turns in plan.json, another order and other gaps of real processes."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from run_scripts import pyps_run
from run_tools import make_plan
from worker_tools import X, Y, backward, loss_of, make_model, run_threads

import pyps
import pyps.remote
from pyps.errors import InputError
from pyps.formats import Plan, R2spSchedule, write_json
from pyps.formats.plan import plan_turns
from pyps.formats.records import read_run
from pyps.remote.server import Server
from pyps.report.steps import applied_steps
from pyps.run import RunOptions, run
from pyps.run.ranks import even_plan
from pyps.store.policies import BSP, R2SP
from pyps.worker.run.settings import Settings
from pyps.worker.step.loop import Worker

STEP_SECONDS = 0.12  # of the slowest rank
TRAIN = """
import os, time
import torch
import pyps

torch.set_num_threads(1)
torch.manual_seed(1)
model = torch.nn.Linear(4, 1)
inputs, targets = torch.randn(40, 4), torch.randn(40, 1)
with pyps.join() as worker:
    seconds = [0.08, 0.12, 0.04][worker.rank]
    worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for x, y in worker.batches((inputs, targets)):
        begun = time.monotonic()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        time.sleep(max(0.0, begun + seconds - time.monotonic()))
        worker.step(loss)
"""


def plan_of(order: list[int], batches: tuple[int, ...] = (4, 4, 4), period: float = STEP_SECONDS) -> Plan:
    """A plan whose ring has this order, in equal gaps."""
    gap = period / len(order)
    ring = R2spSchedule(
        feasible=None,
        period_seconds=period,
        gap_seconds=gap,
        order=order,
        offsets_seconds=[k * gap for k in range(len(order))],
    )
    return msgspec.structs.replace(make_plan(batches), r2sp=ring)


def script(folder: Path) -> Path:
    (folder / "train.py").write_text(TRAIN)
    return folder / "train.py"


def pushed_by(run_dir: Path) -> list[int]:
    """The rank of each version."""
    return [record.rank for record in applied_steps(read_run(run_dir))]


@pytest.mark.thorough
@pytest.mark.timed
@pytest.mark.slow
def test_turns_follow_the_plan_and_another_plan_makes_another_run(shm: Path, tmp_path: Path) -> None:
    for order in ([2, 0, 1], [1, 0, 2]):
        folder = tmp_path / "".join(map(str, order))
        folder.mkdir()
        write_json(folder / "plan.json", plan_of(order))
        options = ["--plan", folder / "plan.json", "--samples", "96", "--run-dir", folder / "out"]
        done = pyps_run(*options, "--policy", "r2sp", script(folder))
        assert done.returncode == 0, done.stderr
        assert pushed_by(folder / "out") == [order[k % 3] for k in range(24)]
        turns = json.loads((folder / "out" / "report.json").read_text())["turns"]
        assert (turns["order"], turns["turns"], turns["out_of_order"]) == (order, 23, 0)
        assert abs(turns["gap_deviation"]) < 0.1
        assert turns["period_seconds"] == pytest.approx(STEP_SECONDS, rel=0.1)
        assert f"turns {', '.join(map(str, order))}: order kept; gap planned 40.0 ms, measured" in done.stdout


def test_workers_over_a_link_follow_the_plan_s_turns(shm: Path, tmp_path: Path) -> None:
    """One worker of the plan has no batch: its rank in the plan is none of the store's."""
    plan = plan_of([3, 0, 2], (4, 0, 4, 4), period=0.06)
    with Server("model") as server:
        common = Settings(store=server.address, rank=0, policy=R2SP(), samples=72, run_dir=tmp_path)
        workers = [
            Worker(replace(common, rank=rank).with_plan(plan, tmp_path / "plan.json")) for rank in range(3)
        ]

        def body(rank: int) -> None:
            model = make_model()
            workers[rank].attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
            for x, y in workers[rank].batches((X, Y)):
                time.sleep(0.05)
                backward(loss_of(model, x, y))
                workers[rank].step()

        run_threads(3, body)
        with pyps.remote.open_store(server.address) as store:
            assert store.status().scheduled
        for worker in workers:
            worker.close()
    assert pushed_by(tmp_path) == [[2, 0, 1][k % 3] for k in range(18)]


# From a plan to turns.


def test_a_plan_s_ranks_become_those_of_the_store() -> None:
    turns = plan_turns(plan_of([4, 0, 2], (3, 0, 5, 0, 2), period=0.3))
    assert turns.order == (2, 0, 1)
    assert turns.gaps_seconds == pytest.approx((0.1,) * 3)
    assert turns.period_seconds == 0.3


def test_transfers_longer_than_a_gap_begin_at_their_offsets() -> None:
    ring = R2spSchedule(
        feasible=True,
        period_seconds=1.0,
        gap_seconds=0.25,
        order=[1, 0, 3, 2],
        turn_seconds=[0.5, 0.1, 0.1, 0.1],
        offsets_seconds=[0.0, 0.55, 0.7, 0.85],
    )
    plan = msgspec.structs.replace(make_plan((1, 1, 1, 1)), r2sp=ring)
    assert plan_turns(plan).gaps_seconds == pytest.approx((0.55, 0.15, 0.15, 0.15))
    for offsets in ([0.0, 0.55], [0.0, 0.55, 0.3, 0.85], [0.0, 0.55, 0.7, 1.1]):
        changed = msgspec.structs.replace(ring, offsets_seconds=offsets)
        with pytest.raises(InputError, match=r"r2sp.offsets_seconds: .*4 times that do not go back"):
            plan_turns(msgspec.structs.replace(plan, r2sp=changed), "plan.json")


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 1], [0, 1, 3], []])
def test_a_ring_of_other_workers_is_refused_before_anything_starts(order: list[int], tmp_path: Path) -> None:
    plan = plan_of([0, 1, 2])
    plan = msgspec.structs.replace(plan, r2sp=msgspec.structs.replace(plan.r2sp, order=order))
    write_json(tmp_path / "plan.json", plan)
    options = RunOptions(samples=12, policy="r2sp", run_dir=tmp_path / "out")
    with pytest.raises(
        InputError, match=r"plan.json: r2sp.order: found .*each worker with a batch once: 0, 1, 2"
    ):
        run(tmp_path / "plan.json", script(tmp_path), options)
    assert not (tmp_path / "out").exists()


def test_equal_batches_have_turns_of_their_own() -> None:
    plan = plan_of([2, 0], (6, 0, 3))
    turns = plan_turns(even_plan(plan, "plan.json"))
    assert turns.order == (0, 1, 2)
    assert turns.period_seconds == plan.even_split.seconds


def test_settings_carry_the_turns_of_a_policy_that_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    plan = plan_of([2, 0, 1])
    write_json(path, plan)
    made = {
        policy.name: Settings(store="x", rank=0, policy=policy).with_plan(plan, path)
        for policy in (R2SP(), BSP())
    }
    assert made["bsp"].schedule is None
    assert made["r2sp"].schedule == plan_turns(plan)
    for name in list(os.environ):
        if name.startswith("PYPS_"):
            monkeypatch.delenv(name)
    for name, value in made["r2sp"].to_env().items():
        monkeypatch.setenv(name, value)
    assert Settings.from_env().schedule == plan_turns(plan)
    assert pyps.join(batches=[4, 4, 4]).settings.schedule == plan_turns(plan)
    assert pyps.join(batches=[4, 4, 5]).settings.schedule is None
