"""`pyps join`: a worker of a run that a server shares, by its address alone."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from run_scripts import PYPS, until
from torch import nn

import pyps
from pyps.native.status import MemberState
from pyps.remote import open_store
from pyps.remote.server import Server
from pyps.store.segments import segments

ELSEWHERE = str(Path(__file__).resolve().parents[1] / "helpers" / "elsewhere.py")
TRAIN = """
import sys
import torch
from torch import nn
import pyps

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Linear(6, 2)
draws = torch.Generator().manual_seed(0)
data = torch.randn(60, 6, generator=draws), torch.randn(60, 2, generator=draws)
with pyps.join() as worker:
    worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for inputs, targets in worker.batches(data):
        worker.step(nn.functional.mse_loss(model(inputs), targets).backward())
    print(*sys.argv[1:], worker.rank, worker.settings.samples, worker.settings.seed, worker.steps)
sys.exit(7)
"""
COMMAND = "import sys; {hide}from pyps.cli import main; sys.argv[0] = 'pyps'; main()"


def join(*arguments: object, hides: bool = False) -> subprocess.CompletedProcess[str]:
    code = COMMAND.format(hide="import elsewhere; elsewhere.hide(); " if hides else "")
    return subprocess.run(
        [sys.executable, "-c", code, "join", *map(str, arguments)],
        cwd=Path(ELSEWHERE).parent, capture_output=True, text=True, timeout=150,
    )  # fmt: skip


def train(address: str, rank: int, **options: Any) -> None:
    model = nn.Linear(6, 2)
    draws = torch.Generator().manual_seed(0)
    data = torch.randn(60, 6, generator=draws), torch.randn(60, 2, generator=draws)
    with pyps.join(address, rank, batches=[7, 3], samples=200, seed=5, **options) as worker:
        worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for inputs, targets in worker.batches(data):
            nn.functional.mse_loss(model(inputs), targets).backward()
            worker.step()


@pytest.mark.usefixtures("quick_start")
@pytest.mark.slow
@pytest.mark.parametrize("hides", [False, True], ids=["", "no core"])
def test_a_planned_rank_joins_by_the_address_alone(shm: Path, tmp_path: Path, hides: bool) -> None:
    """Samples and seed come from the store; the script's exit code is the command's."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN, encoding="utf-8")
    with Server("model", "tcp://127.0.0.1:*", insecure=True) as server:
        address = f"{server.address}?insecure=1"
        here = threading.Thread(target=train, args=(address, 0), daemon=True)
        here.start()
        until(lambda: list(segments()))
        done = join("--rank", 1, address, script, "one", hides=hides)
        here.join(60)
    assert done.returncode == 7, done.stderr
    assert done.stdout == "one 1 200 5 20\n"
    assert "rank 1: 3 of 10 samples of a round (30%)" in done.stderr


@pytest.mark.thorough
def test_a_new_rank_is_measured_and_given_samples(shm: Path, plan: Path, tmp_path: Path) -> None:
    """Its host has no plan: the launcher of the others plans anew for all."""
    script = tmp_path / "train.py"
    pause = "        time.sleep(0.01)\n        worker.step("
    text = TRAIN.replace("import sys\n", "import sys, time\n").replace("        worker.step(", pause)
    script.write_text(text.replace("sys.exit(7)\n", ""), encoding="utf-8")
    with Server("model", "tcp://127.0.0.1:*", insecure=True) as server:
        address = f"{server.address}?insecure=1"
        run = ["--plan", plan, "--connect", address, "--ranks", "0,1", "--samples", 8_000]
        launched = subprocess.Popen(
            [PYPS, "run", *map(str, run), "--run-dir", str(tmp_path / "run"), str(script)]
        )
        until(lambda: list(segments()))
        done = join(address, script)
        assert (launched.wait(150), done.returncode) == (0, 0), done.stderr
    assert re.search(r"rank 2: [1-9]\d* of 8 samples of a round", done.stderr), done.stderr
    assert int(done.stdout.split()[-1]) > 10


def test_a_new_rank_is_one_that_nobody_has(shm: Path, tmp_path: Path) -> None:
    from pyps.cli.join import free_rank

    with pyps.Store.create("model", {"w": torch.ones(3).numpy()}, batches=[4, 0, 4], policy="asp") as store:
        store.join(1)
        assert [one.rank for one in store.members() if one.state is MemberState.ACTIVE] == [1]
        server = Server("model", "tcp://127.0.0.1:*", insecure=True)
        with server, open_store(f"{server.address}?insecure=1") as far:
            assert free_rank(far) == 3


def test_a_script_that_is_not_there_is_refused() -> None:
    done = join("tcp://127.0.0.1:1/x?insecure=1", "no.py")
    assert (done.returncode, "SCRIPT: found no.py" in done.stderr) == (2, True), done.stderr
