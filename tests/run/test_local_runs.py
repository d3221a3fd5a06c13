"""Runs with local steps, from the command line: by the plan, a worker killed, and over a link.

All of a run killed and resumed: tests/remote/test_resume_over_the_link.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import kill_and_resume
import pytest
import torch
from run_scripts import pyps_run
from run_tools import make_local_plan
from safetensors.torch import load_file
from sampled import sampled

from pyps.formats import write_json
from pyps.formats.records import read_run
from pyps.remote.server import Server
from pyps.run import RunOptions, run

SAMPLES = 400


KILLS_ITSELF = """
import os, signal, time
from pathlib import Path
import torch
import pyps

torch.set_num_threads(1)
draws = torch.Generator().manual_seed(0)
inputs, targets = torch.randn(40, 4, generator=draws), torch.randn(40, 2, generator=draws)
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
with pyps.join() as worker:
    rank, mark = worker.rank, worker.settings.run_dir / "killed"
    worker.attach(model, optimizer)
    back = mark.exists()
    if rank == 1 and back:
        (mark.parent / "back").touch()
    for step, (x, y) in enumerate(worker.batches((inputs, targets))):
        while rank == 0 and step > 12 and not (mark.parent / "back").exists():
            time.sleep(0.01)  # rank 0 alone could use up the samples
        if rank == 1 and back and step == 0:
            (mark.parent / "steps").write_text(str(int(next(iter(optimizer.state.values()))["step"])))
        torch.nn.functional.mse_loss(model(x), y).backward()
        if rank == 1 and not back and step == 7:  # in the fourth round of two local steps
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        worker.step()
"""


@pytest.mark.thorough
def test_a_killed_worker_goes_on_with_its_optimizer(shm: Path, tmp_path: Path) -> None:
    """It had pushed three rounds of two local steps: its successor's Adam has taken six."""
    write_json(tmp_path / "plan.json", make_local_plan())
    (tmp_path / "train.py").write_text(KILLS_ITSELF)
    options = RunOptions(samples=SAMPLES, run_dir=tmp_path / "run")
    report = run(tmp_path / "plan.json", tmp_path / "train.py", options)
    assert report.restarts == 1
    assert (tmp_path / "run" / "steps").read_text() == "6"
    assert report.samples.trained == SAMPLES


@pytest.mark.parametrize("options", sampled([[], ["--even"]]))
def test_the_plan_says_how_many_local_steps(shm: Path, tmp_path: Path, options: list[str]) -> None:
    """Equal ones with --even; each push is worth the samples of all its local steps."""
    write_json(tmp_path / "plan.json", make_local_plan((3, 1)))
    (tmp_path / "train.py").write_text(kill_and_resume.TRAIN)
    out = tmp_path / "run"
    done = pyps_run(
        "--plan",
        tmp_path / "plan.json",
        "--samples",
        160,
        "--run-dir",
        out,
        *options,
        tmp_path / "train.py",
        0,
    )
    assert done.returncode == 0, done.stderr
    records = read_run(out)
    expected = {0: 12, 1: 4} if not options else {0: 8, 1: 8}
    assert {(r.rank, r.samples) for r in records} == set(expected.items())
    local = {(r.rank, sum(kind == "compute" for kind, _, _ in r.spans)) for r in records}
    assert local == {(rank, samples // 4) for rank, samples in expected.items()}
    assert json.loads((out / "report.json").read_text())["samples"]["trained"] == 160


def test_over_a_link_in_four_bits_and_a_pipeline(shm: Path, tmp_path: Path) -> None:
    write_json(tmp_path / "plan.json", make_local_plan(policy="asp"))
    (tmp_path / "train.py").write_text(kill_and_resume.TRAIN)
    out = tmp_path / "run"
    with Server("model") as server:
        options = RunOptions(
            samples=SAMPLES, connect=server.address, codec="int4", depth="auto", run_dir=out, args=["0"]
        )
        report = run(tmp_path / "plan.json", tmp_path / "train.py", options)
    assert report.samples.trained == SAMPLES
    trained = sorted(p for r in read_run(out) for p in range(r.first, r.first + r.samples))
    assert trained == list(range(SAMPLES))
    assert loss_of(load_file(out / "model.safetensors")) < 0.9 * loss_of({})


def loss_of(weights: dict[str, torch.Tensor]) -> float:
    """On all data of the script, of its first model with these weights."""
    draws = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(40, 4, generator=draws), torch.randn(40, 2, generator=draws)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    model.load_state_dict(weights, strict=False)
    return float(torch.nn.functional.mse_loss(model(inputs), targets).detach())
