"""A worker without the C core, and without what Windows lacks, trains with one that has it."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from remote_tools import make_keys

from pyps.remote.server import Server

HIDDEN = [sys.executable, str(Path(__file__).resolve().parents[1] / "helpers" / "elsewhere.py")]
TRAIN = """
import sys
import torch
from torch import nn
import pyps

def train(address, rank, **options):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    draws = torch.Generator().manual_seed(0)
    data = torch.randn(60, 6, generator=draws), torch.randn(60, 2, generator=draws)
    with pyps.join(address, rank, batches=[7, 3], samples=600, seed=5, **options) as worker:
        worker.attach(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        for inputs, targets in worker.batches(data):
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            worker.step(loss)
        print(worker.steps, "steps")
    return torch.cat([value.detach().flatten() for value in model.parameters()])

if __name__ == "__main__":
    options = {} if len(sys.argv) < 4 else dict(one.split("=") for one in sys.argv[3:])
    torch.save(train(sys.argv[1], 1, **options), sys.argv[2])
"""


def script(folder: Path) -> Path:
    path = folder / "train.py"
    path.write_text(TRAIN, encoding="utf-8")
    return path


def parameters(address: str, folder: Path, command: list[str]) -> torch.Tensor:
    """Train rank 1 by the command and rank 0 in this process; the parameters, which are alike."""
    names: dict[str, Any] = {"__name__": "train"}
    exec(TRAIN, names)
    out = folder / "out.pt"
    found: list[torch.Tensor] = []
    here = threading.Thread(target=lambda: found.append(names["train"](address, 0)), daemon=True)
    here.start()
    train = [*command, str(script(folder)), address, str(out)]
    done = subprocess.run(train, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "60 steps\n"
    here.join(60)
    assert torch.equal(found[0], torch.load(out))
    return found[0]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_start")
def test_it_trains_with_one_that_has_it_and_changes_no_bit(shm: Path, tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    found = []
    for command in ([sys.executable], HIDDEN):
        with Server("model", "tcp://127.0.0.1:*", keys=tmp_path / "keys") as server:
            address = f"{server.address}?keys={tmp_path}/keys/client.key"
            found.append(parameters(address, tmp_path, command))
    assert torch.equal(*found)


NEEDING = (
    "pyps.store.codec.as_codec('int8')",
    "pyps.Store.open('x')",
    "pyps.Store.create('x', {}, batches=[4])",
    "pyps.remote.open_store('tcp://127.0.0.1:1/x?insecure=1&pull=bf16')",
)


@pytest.mark.usefixtures("quick_start")
def test_what_needs_it_says_so(tmp_path: Path) -> None:
    path = tmp_path / "asks.py"
    imports = "import pyps, pyps.remote, pyps.store.codec\n"
    tries = [f"try:\n    {what}\nexcept pyps.PypsError as error:\n    print(error)\n" for what in NEEDING]
    path.write_text(imports + "".join(tries))
    done = subprocess.run([*HIDDEN, str(path)], capture_output=True, text=True, timeout=60)
    assert done.stdout.count("this installation has no C core") == len(NEEDING), done.stdout + done.stderr


def test_the_modules_that_a_worker_imports_are_the_same_elsewhere() -> None:
    """Import all that a worker, its keys, DDP and the planner need."""
    names = "pyps.worker.step.loop, pyps.remote, pyps.torch, pyps.remote.keys, pyps.cli.plan"
    code = f"import elsewhere; elsewhere.hide(); import {names}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(HIDDEN[1]).parent, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
