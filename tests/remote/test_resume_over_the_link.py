"""A run of two hosts, here folders, that share a served store: all of it killed with -9, and resumed.

Local steps, whose differences travel in eight bits: besides the store's state there are each worker's own
optimizers and what its codes have not carried yet.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray
from remote_tools import eventually
from run_scripts import PYPS
from run_tools import make_local_plan
from safetensors.numpy import load_file

from pyps.checkpoint.local_states import without_moments
from pyps.formats import write_json
from pyps.formats.records import read_run
from pyps.remote.server import Server
from pyps.store import Store

MINUTE = 60.0
STEPS, SIZE = (3, 2), 4  # local steps of a round by rank, and their samples
BATCHES = tuple(SIZE * steps for steps in STEPS)
B, ROUNDS = sum(BATCHES), 6
SAVED = 4  # the only checkpoint's version
TRAIN = """
import os, time
from pathlib import Path
import torch, pyps
limit = Path(os.environ["LIMIT"])
torch.set_num_threads(1)
draws = torch.Generator().manual_seed(0)
inputs, targets = torch.randn(40, 4, generator=draws), torch.randn(40, 2, generator=draws)
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
matrices, biases = ([p for p in model.parameters() if p.ndim == n] for n in (2, 1))
optimizer = [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(biases, lr=0.01)]
with pyps.join() as worker:
    worker.attach(model, optimizer)
    for x, y in worker.batches((inputs, targets)):
        while worker.claim.first >= int(limit.read_text()):
            time.sleep(0.01)
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        worker.step(loss)
    while int(limit.read_text()) < 1000:
        time.sleep(0.01)
"""


class Hosts:
    """The commands of a run. Its steps begin once the test lets their samples go, and so it ends."""

    def __init__(self, folder: Path, script: str = TRAIN) -> None:
        self.folder = folder
        write_json(folder / "plan.json", make_local_plan(STEPS, SIZE))
        (folder / "train.py").write_text(script)

    def let(self, samples: int) -> None:
        new = self.folder / "limit.new"
        new.write_text(str(samples))
        os.replace(new, self.folder / "limit")

    def start(self, stack: ExitStack, *options: str) -> psutil.Popen:
        """`pyps` with these options, which ends with the stack."""
        env = os.environ | {"LIMIT": str(self.folder / "limit")}
        pipe = subprocess.PIPE
        process = psutil.Popen(
            [PYPS, *options], cwd=self.folder, env=env, stdout=pipe, stderr=pipe, text=True
        )
        stack.callback(kill, process)
        return process

    def run(self, stack: ExitStack, rank: int, address: str) -> None:
        """A host's launcher."""
        whole = ["--plan", "plan.json", "--samples", str(ROUNDS * B), "--codec", "int8"]
        whole += ["--checkpoint-every", str(SAVED), "--connect", address]
        self.start(stack, "run", *whole, "--ranks", str(rank), "--run-dir", f"host{rank}", "train.py")

    def records(self, rank: int) -> list[int]:
        return [record.version for record in read_run(self.folder / f"host{rank}")]


def kill(process: psutil.Popen) -> None:
    """SIGKILL, and to all that it has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        victims = [process, *process.children(recursive=True)]
        for victim in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.send_signal(signal.SIGKILL)
        psutil.wait_procs(victims, MINUTE)
    process.communicate(timeout=MINUTE)


@pytest.mark.thorough
@pytest.mark.parametrize("more", ["", ", average_moments=True"])
def test_all_killed_and_resumed_ends_as_left_alone(shm: Path, tmp_path: Path, more: str) -> None:
    """Bit for bit, and each host's report has all of its steps."""
    hosts = Hosts(tmp_path, TRAIN.replace("(model, optimizer)", f"(model, optimizer{more})"))
    left_alone = _killed_at_the_end(hosts)
    for path in shm.iterdir():  # the segment, and the server's socket
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.rmtree(tmp_path / "host0" / "local")  # the checkpoint has it; host 1 has its own
    hosts.let(1000)
    with ExitStack() as stack, Server("model") as server:
        again = ("--connect", server.address, "--json")
        resumed = [hosts.start(stack, "run", "--resume", f"host{rank}", *again) for rank in (0, 1)]
        said = [launcher.communicate(timeout=MINUTE) for launcher in resumed]
        assert [launcher.returncode for launcher in resumed] == [0, 0], said
    for rank, (out, errors) in enumerate(said):
        ended = load_file(tmp_path / f"host{rank}" / "model.safetensors")
        weights = without_moments(left_alone)
        assert ended.keys() == weights.keys()
        assert all(np.array_equal(ended[name], values) for name, values in weights.items())
        assert "begins anew" not in errors
        assert hosts.records(rank) == list(range(1, ROUNDS + 1))
        report = json.loads(out)
        assert report["resumed_at"] == [SAVED]
        assert report["ranks"][0]["steps"] == ROUNDS
        assert report["samples"]["trained"] == report["loss"][-1][1] == ROUNDS * BATCHES[rank]
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(p.info["cmdline"])]


def _killed_at_the_end(hosts: Hosts) -> dict[str, NDArray[np.float32]]:
    """The parameters after the last round of a run that is killed then, with its server."""
    hosts.let(SAVED * B)
    with ExitStack() as stack:
        server = hosts.start(stack, "serve", "model", "--json")
        address = json.loads(server.stdout.readline())["address"]
        for rank in (0, 1):
            hosts.run(stack, rank, address)
        eventually((hosts.folder / "host0" / "checkpoints" / f"{SAVED:09d}").exists, MINUTE)
        hosts.let(ROUNDS * B)
        eventually(lambda: all(hosts.records(rank)[-1:] == [ROUNDS] for rank in (0, 1)), MINUTE)
        with Store.open("model") as store:
            return store.snapshot().tensors
