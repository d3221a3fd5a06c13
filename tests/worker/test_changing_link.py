"""A worker whose link shrinks and recovers while it trains: its codecs and depth follow."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from worker_tools import SAMPLES, X, Y, backward, loss_of, make_model, plan_with, train

from pyps.formats.mode import CODEC_BITS, Mode
from pyps.formats.records import StepRecord, read_run
from pyps.solver.links import LinkSlowdown, LinkSpec
from pyps.solver.online.mode import ModeBalancer, TimedStep
from pyps.store.policies import policy_named
from pyps.worker.run.settings import Settings, ThrottleSpec
from pyps.worker.step.loop import Worker

pytestmark = pytest.mark.slow

MOVED = 4 * (6 * 8 + 8 + 8 * 2 + 2)  # bytes of one way at 32 bits
COMPUTE, ONE_WAY = 0.03, 0.01
SHRUNK = LinkSlowdown(begin=0.8, end=2.2, factor=6.0)
STEPS = 110


def records_of(
    folder: Path, *slow: LinkSlowdown, adapts: bool = True, policy: str = "hps"
) -> list[StepRecord]:
    plan = folder / "plan.json"
    plan.write_text(json.dumps(plan_with([SAMPLES])))
    link = LinkSpec(0.001, MOVED / ONE_WAY, slower=slow)
    settings = Settings(
        "run", 0, policy_named(policy), STEPS * SAMPLES, 5, batches=(SAMPLES,), depth=2, staging_buffers=3,
        throttle=ThrottleSpec(factor=1.0, links=(link,)), run_dir=folder, plan_path=plan, adapts=adapts,
    )  # fmt: skip
    model = make_model()
    with Worker(settings) as worker:
        worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.2))
        before = float(loss_of(model, X, Y).detach())
        for x, y in worker.batches((X, Y)):
            time.sleep(COMPUTE)
            backward(loss_of(model, x, y))
            worker.step()
        assert float(loss_of(model, X, Y).detach()) < 0.8 * before
    records = read_run(folder)
    assert sum(record.samples for record in records) == STEPS * SAMPLES
    return records


def bits_of(mode: Mode | None) -> tuple[int, int]:
    assert mode is not None
    return CODEC_BITS[mode.push], CODEC_BITS[mode.pull]


def test_bits_fall_and_rise_with_the_link(shm: Path, tmp_path: Path) -> None:
    """The shrunk link takes 60 ms each way at 32 bits, and 15 at 8: less than the compute."""
    records = records_of(tmp_path, SHRUNK)
    bits = [bits_of(record.mode) for record in records]
    assert bits[0] == (32, 32)
    fell = next(k for k, found in enumerate(bits) if sum(found) < 64)
    assert sum(min(bits[fell:], key=sum)) <= 32
    rose = next(k for k, found in enumerate(bits) if k > fell and found == (32, 32))
    shrunk_at = records[0].spans[0][1] + SHRUNK.begin
    assert records[fell].spans[0][1] > shrunk_at
    assert records[rose].spans[0][1] < shrunk_at + 3.5
    assert {record.depth for record in records} <= {2, 3}


def test_a_mode_that_was_not_left_to_the_plan_stays(shm: Path, tmp_path: Path) -> None:
    assert {record.mode for record in records_of(tmp_path, adapts=False)} == {None}


def test_a_step_that_pushed_nothing_tells_nothing_of_the_link(
    shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[TimedStep] = []
    monkeypatch.setattr(ModeBalancer, "hear", lambda _, one: heard.append(one))
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(plan_with([10])))
    throttle = ThrottleSpec(factor=1.0, links=(LinkSpec(0.001, 1e9),))
    settings = Settings(
        "run", 0, policy_named("hps"), 60, 5, batches=(10,), depth=2, staging_buffers=3,
        throttle=throttle, run_dir=tmp_path, plan_path=plan, adapts=True, allow_nonfinite=True,
    )  # fmt: skip
    model = make_model()
    with Worker(settings) as worker:
        worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.02))
        assert train(worker, model, spoil=2) == 6
    assert [record.skipped for record in read_run(tmp_path)] == [False, False, True, False, False, False]
    assert len(heard) == 5
