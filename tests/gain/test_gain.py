"""`pyps gain`: a script that is not changed gets batches of other sizes, is timed, and is compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import typer

from pyps.cli.gain import app, gain_command
from pyps.errors import InputError, PypsError
from pyps.gain import Gain, TimedSplit, changes, measure_gain
from pyps.gain.measure import points_of
from pyps.gain.notes import BLOCK, ORDERS, Note, Orders
from pyps.gain.ranks import LocalDevice, Script

pytestmark = pytest.mark.usefixtures("quick_start")

PLAIN = Path(__file__).parents[2] / "benchmarks" / "foreign" / "plain"
DRAWS = """
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

data = TensorDataset(torch.arange(20))
trained = DataLoader(data, 4, sampler=DistributedSampler(data, 1, 0), num_workers=WORKERS)
judged = DataLoader(data, 4, shuffle=True)
print(len(next(iter(trained))[0]))
for k, (batch,) in enumerate(trained):
    print(len(batch))
    with torch.no_grad():
        for (whole,) in judged if k == 3 else ():
            print("judged", len(whole))
    for (whole,) in DataLoader(data, 4) if k == 4 else ():
        print("in order", len(whole))
    if k == 12:
        break
"""
OWN_BATCHES = """
import torch

weight = torch.zeros(2, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
while True:
    (weight * torch.randn(2)).sum().backward()
    optimizer.step()
"""
TRAINS = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
inputs = torch.randn(2000, 256)
data = TensorDataset(inputs, inputs[:, :10].argmax(1))
loader = DataLoader(data, 32, sampler=DistributedSampler(data))
model = DistributedDataParallel(nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for x, y in loader:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
"""


def context() -> typer.Context:
    return typer.Context(typer.main.get_command(app))


def test_options_after_the_script_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """The script gets them; where they were meant for the command, its message alone would lead astray."""
    with pytest.raises(InputError, match="--devices: found 1 of them"):
        gain_command(context(), Path(__file__), ["--throttle", "1,3"], "cpu", "", 1.0)
    assert "so for it and not for pyps gain: --throttle" in capsys.readouterr().err


def test_a_script_that_makes_its_batches_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OWN_BATCHES)
    with pytest.raises(InputError, match="steps on batches that the script makes itself; expected 8 or more"):
        measure_gain(Script(tmp_path / "train.py", (), 1.0), [LocalDevice("cpu")] * 2, print)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_script_gets_the_ordered_batches(workers: int, tmp_path: Path) -> None:
    """In turn and without an end, whatever is loaded ahead; what it does not train on stays as it is."""
    script, notes = tmp_path / "draws.py", tmp_path / "notes"
    script.write_text(DRAWS.replace("WORKERS", str(workers)))
    orders = msgspec.json.encode(Orders(str(notes), [6, 2])).decode()
    ran = [sys.executable, "-m", "pyps.gain.rank", str(script)]
    found = subprocess.run(
        ran, env=os.environ | {ORDERS: orders}, capture_output=True, text=True, timeout=120
    )
    assert not found.stderr, found.stderr
    sizes = [*[6] * BLOCK, *[2] * BLOCK, *[6] * BLOCK, 2]
    judged, in_order = ["judged 4"] * 5, ["in order 4"] * 5
    printed = [*map(str, sizes[:4]), *judged, str(sizes[4]), *in_order, *map(str, sizes[5:])]
    assert found.stdout.splitlines() == ["6", *printed]
    noted = [msgspec.json.decode(line, type=Note) for line in notes.read_bytes().splitlines()]
    assert [note.samples for note in noted] == sizes[:-1], "the last one had not ended"


def test_what_is_loaded_ahead_of_a_block_does_not_count() -> None:
    slow, fast = [Note(8, 9.0), *[Note(8, 0.2)] * 3], [Note(4, 9.0), Note(4, 0.1), Note(4, 0.1), Note(4, 0.4)]
    warm = [Note(8, 5.0)] * 3
    assert points_of([*warm, *fast, *slow, *fast]) == pytest.approx({8: 0.2, 4: 0.2})


@pytest.mark.parametrize(
    ("seconds", "range_", "predicted", "certain"),
    [(0.5, (0.4, 0.6), 2.1, True), (0.5, (0.4, 0.95), 2.1, False), (0.5, (0.4, 0.6), 1.2, False)],
)
def test_a_gain_is_certain_where_times_agree(
    seconds: float, range_: tuple[float, float], predicted: float, certain: bool
) -> None:
    equal = TimedSplit((4, 4), 1.0, 0.9, 1.1)
    gain = Gain([], equal, TimedSplit((6, 2), seconds, *range_), predicted)
    assert gain.faster == pytest.approx(2.0)
    assert gain.certain is certain


def test_the_lines_of_a_tutorial() -> None:
    found = {
        change.text.split("=")[0].strip(): change.becomes for change in changes(PLAIN / "tutorial.py", 32)
    }
    assert found["self.model"] == "model, loader, step = uneven(model, train, 32, optimizer=optimizer)"
    assert found["self.optimizer.step()"] == "step()"
    assert found["cross_entropy(self.model(images), labels).backward()"].startswith("step.backward(cross_")
    assert len(found) == 6


@pytest.mark.parametrize("name", ["gpt", "glue", "segmentation", "recommender", "diffusion"])
def test_every_script_has_lines_that_change(name: str) -> None:
    becomes = [change.becomes for change in changes(PLAIN / f"{name}.py", 32)]
    assert any("uneven" in one for one in becomes)
    assert any("step.backward" in one for one in becomes)


@pytest.mark.parametrize(
    ("script", "devices", "throttle", "message"),
    [
        ("nowhere.py", "cpu,cpu", "", "SCRIPT: found nowhere.py; expected a Python script"),
        (__file__, "gpu0", "", "--devices: found 'gpu0'; expected cpu, or cuda: and a number"),
        (__file__, "cpu", "", "--devices: found 1 of them; expected two or more"),
        (__file__, "cpu,cpu", "1", "--throttle: found 1; expected 2 numbers"),
        (__file__, "cpu,cpu", "1,x", "--throttle: found '1,x'; expected numbers"),
        (__file__, "cuda:0,cpu", "1,2", "--throttle: found cuda:0,cpu; expected CPUs"),
    ],
)
def test_wrong_use_is_one_message(script: str, devices: str, throttle: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        gain_command(context(), Path(script), None, devices, throttle, 1.0)


def test_a_script_that_fails_shows_its_last_lines(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('so far')\nraise SystemExit('no data')\n")
    with pytest.raises(PypsError, match="ended with 1; its last lines follow") as found:
        measure_gain(Script(tmp_path / "train.py", (), 1.0), [LocalDevice("cpu")] * 2, print)
    assert found.value.__notes__ == ["so far\nno data"]


def test_a_script_without_a_loader_is_told_what_is_needed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('done')\n")
    said: list[str] = []
    with pytest.raises(InputError, match="found 0 batches until the script ended; expected 8 or more"):
        measure_gain(Script(tmp_path / "train.py", (), 1.0), [LocalDevice("cpu")] * 2, said.append)
    assert said == [f"{tmp_path / 'train.py'} on 2 devices, as it is"]


@pytest.mark.thorough
def test_unlike_devices_gain(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    options = ["--devices", "cpu,cpu", "--throttle", "1,4", "--seconds", "4", "--json"]
    ran = [sys.executable, "-m", "pyps", "gain", *options, str(tmp_path / "train.py")]
    found = subprocess.run(ran, capture_output=True, text=True, timeout=300)
    assert not found.returncode, found.stderr
    gain = json.loads(found.stdout)
    assert gain["equal"]["batches"] == [32, 32]
    fast, slow = gain["planned"]["batches"]
    assert fast + slow == 64
    assert fast > 1.5 * slow
    assert gain["faster"] > 1.1
    assert not list(tmp_path.glob("pyps-gain-*"))
