"""Bits per worker and direction: pushes and pulls in the codecs that a plan has chosen."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_scripts import KILLED_ONCE, script
from worker_tools import SAMPLES, X, Y, backward, loss_of, make_model, plan_with

import pyps
from pyps.errors import InputError
from pyps.formats.mode import CODEC_BITS, PLANNED_CODECS, Mode
from pyps.formats.records import read_run
from pyps.native.values import Codec
from pyps.store.codec import decode, name_of
from pyps.store.policies import ASP, BSP, policy_named
from pyps.worker.run.mode import ModeOptions
from pyps.worker.run.settings import Settings
from pyps.worker.step.loop import Worker

pytestmark = pytest.mark.slow
NAMES = {bits: name for name, bits in CODEC_BITS.items() if name in PLANNED_CODECS}


def plan_of_bits(batches: list[int], bits: dict[int, tuple[int, int]]) -> dict[str, Any]:
    plan = plan_with(batches)
    for rank, (push, pull) in bits.items():
        plan["workers"][rank]["mode"] = {"push_codec": NAMES[push], "pull_codec": NAMES[pull], "depth": 2}
    return plan


def by_plan(path: Path, plan: dict[str, Any], rank: int) -> Settings:
    path.write_text(json.dumps(plan))
    launched = Settings("run", rank, BSP(), plan_path=path)
    return launched.with_arguments(ModeOptions(codec="plan"))


def test_each_rank_has_its_own_each_way(tmp_path: Path) -> None:
    """Ranks of the store count workers with a batch; the plan's are the plan's."""
    plan = plan_of_bits([4, 0, 4, 4], {0: (32, 16), 2: (8, 4), 3: (4, 32)})
    expected = [(Codec.F32, Codec.BF16), (Codec.INT8, Codec.INT4), (Codec.INT4, Codec.F32)]
    for rank, (push, pull) in enumerate(expected):
        settings = by_plan(tmp_path / "plan.json", plan, rank)
        assert (settings.encoding.codec, settings.pull_codec) == (push, pull)
        assert settings.encoding.error_feedback == (push is not Codec.F32)


def test_a_plan_without_bits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"workers\[1\]\.mode: found nothing; expected codecs"):
        by_plan(tmp_path / "plan.json", plan_with([4, 4]), 1)
    with pytest.raises(InputError, match="'plan' without a plan"):
        pyps.join("run", 0, batches=[1], codec="plan")


@pytest.mark.parametrize("codec", [Codec.INT8, Codec.INT4, Codec.BF16])
@pytest.mark.parametrize("depth", [1, "auto"])
@pytest.mark.parametrize("policy", ["asp", "r2sp"])
def test_parameters_are_what_the_code_carries_of_the_fp32_ones(
    shm: Path, codec: Codec, depth: Any, policy: str
) -> None:
    model = make_model()
    settings = Settings(
        "run",
        0,
        policy_named(policy),
        SAMPLES,
        5,
        batches=(10,),
        depth=2 if depth == "auto" else 1,
        pull_codec=codec,
    )
    expected: list[np.ndarray] = []
    with Worker(settings) as worker:
        worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for k, (x, y) in enumerate(worker.batches((X, Y))):
            if depth == 1:  # nothing else is going on
                codes, _ = worker.store.pull_encoded(codec)
                expected.append(decode(codes, codec, worker.store.layout.flat_elements))
                flat = worker._require().binding.flat
                np.testing.assert_array_equal(flat, expected[k])
            backward(loss_of(model, x, y))
            worker.step()
        np.testing.assert_array_equal(worker.store.pull()[0], worker._require().binding.flat)
        assert worker.steps == 6


def test_few_bits_both_ways_train_as_well(shm: Path) -> None:
    losses = {}
    for codec in (Codec.F32, Codec.INT8):
        model = make_model()
        base = Settings("run", 0, ASP(), 300 * SAMPLES, 5, batches=(SAMPLES,))
        with Worker(base.with_mode(Mode(push=name_of(codec), pull=name_of(codec), depth=2))) as worker:
            worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for x, y in worker.batches((X, Y)):
                backward(loss_of(model, x, y))
                worker.step()
            losses[codec] = float(loss_of(model, X, Y).detach())
    assert abs(losses[Codec.INT8] / losses[Codec.F32] - 1) < 0.02


def pyps_run(tmp_path: Path, plan: dict[str, Any], *options: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    path = script(tmp_path, KILLED_ONCE)
    command = [sys.executable, "-m", "pyps", "run", "--plan", "plan.json", "--samples", "240", *options]
    return subprocess.run(
        [*command, "--run-dir", "out", str(path)], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )


def test_pyps_run_pipes_with_the_plans_bits_and_survives_a_kill(shm: Path, tmp_path: Path) -> None:
    plan = plan_of_bits([6, 4], {0: (8, 8), 1: (4, 16)})
    done = pyps_run(tmp_path, plan, "--policy", "hps", "--depth", "auto", "--codec", "plan")
    assert done.returncode == 0, done.stderr
    records = read_run(tmp_path / "out")
    assert {record.depth for record in records} == {2}
    assert max(record.staleness for record in records) == 1
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert (report["outcome"], report["restarts"]) == ("finished", 1)
    assert (report["samples"]["trained"], report["samples"]["dropped"]) == (240, 0)
    rows = json.loads((tmp_path / "out/trace.json").read_text())["traceEvents"]
    names = {row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    assert {"rank 0: transfers", "rank 1: transfers"} <= names


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--policy", "bsp", "--depth", "auto"), "where every step waits for the one before it"),
        (("--codec", "plan"), "workers[0].mode: found nothing"),
    ],
)
def test_pyps_run_refuses_before_it_starts(tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    done = pyps_run(tmp_path, plan_with([6, 4]), *options)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())
    assert not (tmp_path / "out").exists()
