"""A killed worker comes back: the schedule and BatchNorm's statistics are the run's, not a process's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from run_tools import make_plan
from safetensors.torch import load_file
from sampled import sampled
from small_resnet import make_data, make_resnet, rates

from pyps.formats import write_json
from pyps.formats.records import read_run
from pyps.run import RunOptions, run

HELPERS = Path(__file__).resolve().parents[1] / "helpers"
BATCHES = (5, 3)
B = sum(BATCHES)
ROUNDS = 30
TRAIN = f"""
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {str(HELPERS)!r})
import torch
import pyps
from small_resnet import make_data, make_resnet, make_schedule

torch.set_num_threads(1)
model, (x, y) = make_resnet(), make_data()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
with pyps.join() as worker:
    rank, run_dir = worker.rank, worker.settings.run_dir
    worker.attach(model, optimizer, scheduler=make_schedule(optimizer))
    if rank == 1 and (run_dir / "killed").exists():
        (run_dir / "back").touch()
    for step, (inputs, targets) in enumerate(worker.batches((x, y))):
        assert worker.position.epoch == worker.position.samples // 48
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        while rank == 0 and step > 12 and not (run_dir / "back").exists():
            time.sleep(0.01)  # rank 0 alone could use up the samples
        if rank == 1 and not (run_dir / "killed").exists() and step == 10:
            (run_dir / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        worker.step(loss)
    state = worker.state_dict()
    torch.save({{"state": state, "out": model.eval()(x)}}, run_dir / f"model-{{rank}}.pt")
"""


@pytest.fixture(params=sampled(["bsp", "asp"], 1))
def folder(request: pytest.FixtureRequest, shm: Path, tmp_path: Path) -> Path:
    """The folder of a run whose rank 1 was killed in the middle."""
    write_json(tmp_path / "plan.json", make_plan(BATCHES))
    (tmp_path / "train.py").write_text(TRAIN)
    options = RunOptions(samples=ROUNDS * B, policy=request.param, run_dir=tmp_path / "run")
    report = run(tmp_path / "plan.json", tmp_path / "train.py", options)
    assert report.restarts == 1
    assert (tmp_path / "run" / "killed").exists()
    return tmp_path / "run"


def test_a_killed_worker_goes_on_with_the_schedule_and_the_statistics(folder: Path) -> None:
    _check_schedule(folder)
    _check_model(folder)


def _check_schedule(folder: Path) -> None:
    """Each step was pushed with the uninterrupted schedule's rate at its position."""
    expected, furthest = rates(ROUNDS + 1), dict[int, int]()
    records = read_run(folder)
    assert len({record.pid for record in records}) == 3
    for record in records:
        furthest[record.pid] = max(furthest.get(record.pid, 0), record.first // B)
        assert record.lr == expected[furthest[record.pid]]
    second = [record.pid for record in records if record.rank == 1][-1]
    assert all(record.lr != expected[0] for record in records if record.pid == second)


def _check_model(folder: Path) -> None:
    """The model that the run left evaluates bit for bit as its workers did, which all have the same model."""
    inputs, _ = make_data()
    saved = [torch.load(folder / f"model-{rank}.pt", weights_only=True) for rank in range(2)]
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith("num_batches_tracked"):
            tensors[name] = tensors[name].round()  # a mean, where workers do not wait
    model = make_resnet()
    assert tensors.keys() == model.state_dict().keys()
    fresh = {name: value.clone() for name, value in model.named_buffers()}
    model.load_state_dict(tensors)
    torch.set_num_threads(1)
    for one in saved:
        assert torch.equal(model.eval()(inputs), one["out"])
        assert all(torch.equal(one["state"][name], value) for name, value in model.state_dict().items())
    for name, value in model.named_buffers():
        assert not torch.equal(value, fresh[name])
        if name.endswith("num_batches_tracked"):
            assert abs(int(value) - ROUNDS) <= 3
