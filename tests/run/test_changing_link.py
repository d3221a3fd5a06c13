"""A run whose emulated link shrinks and recovers: its bits fall and rise as in its simulation."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from pyps.formats import read_cluster, read_profile, write_json
from pyps.formats.mode import CODEC_BITS, Mode
from pyps.formats.records import read_run
from pyps.profiler.curve import fit_of
from pyps.run import RunOptions, run
from pyps.simulate import scenario_of, simulate
from pyps.solver.plan import make_plan
from pyps.store.policies import policy_named

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

TRAIN = """
import torch

import pyps

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 500), torch.nn.Tanh(), torch.nn.Linear(500, 10))
x, y = torch.randn(512, 64), torch.randint(10, (512,))
loss = torch.nn.CrossEntropyLoss()
with pyps.join() as worker:
    worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.05))
    for inputs, targets in worker.batches((x, y)):
        value = loss(model(inputs), targets)
        value.backward()
        worker.step(value)
"""
CLUSTER = """
[job]
global_batch = 16

[run]
policy = "hps"
depth = "auto"
codec = "plan"

[[worker]]
name = "near"
profile = "device.json"
bandwidth = 1.0e7
[[worker]]
name = "far"
profile = "device.json"
bandwidth = 1.0e7

[[simulation.fault]]
worker = "far"
kind = "link"
at = 3.0
seconds = 6.0
factor = 5.0
"""


PARAMETERS = 64 * 500 + 500 + 500 * 10 + 10
SHRINKS, RECOVERS = 3.0, 9.0


def widths(mode: Mode | None) -> int:
    assert mode is not None
    return CODEC_BITS[mode.push] + CODEC_BITS[mode.pull]


def test_bits_fall_and_rise_as_simulated(shm: Path, tmp_path: Path) -> None:
    points = [{"batch": b, "seconds": 0.02 + 0.005 * b} for b in (1, 8, 16, 32)]
    model = {"name": "m", "parameters": PARAMETERS}
    profile = {"schema": "pyps.profile/1", "device": {"name": "d"}, "model": model, "points": points}
    (tmp_path / "device.json").write_text(json.dumps(profile))
    cluster, plan = tmp_path / "cluster.toml", tmp_path / "plan.json"
    cluster.write_text(CLUSTER)
    profiles = [read_profile(tmp_path / "device.json")] * 2
    fitted = [msgspec.structs.replace(one, fit=fit_of(one)) for one in profiles]
    write_json(plan, make_plan(read_cluster(cluster), fitted, policy_named("hps").pace))
    scenario = scenario_of(cluster, plan_path=plan)
    changes = simulate(
        scenario, "hps", iterations=250, depth="auto", rebalance=True, codec="plan"
    ).mode_changes
    assert {one.rank for one in changes} == {1}
    least = min(widths(one.change.after) for one in changes)
    assert least <= 32
    options = RunOptions(
        samples=250 * 16, policy="hps", depth="auto", codec="plan", rebalance=True, throttle_from=cluster,
        run_dir=tmp_path / "out", seed=1,
    )  # fmt: skip
    train = tmp_path / "train.py"
    train.write_text(TRAIN)
    report = run(plan, train, options)
    assert report.outcome == "finished", report.error
    far = [record for record in read_run(tmp_path / "out") if record.rank == 1]
    began = far[0].spans[0][1]
    during = [widths(r.mode) for r in far if SHRINKS + 2 < r.spans[0][1] - began < RECOVERS]
    after = [widths(r.mode) for r in far if r.spans[0][1] - began > RECOVERS + 2]
    assert widths(far[0].mode) == 64
    assert min(during) <= least
    assert after[-1] == 64
    assert any("rank 1's transfers from step" in line for line in report.replans)
