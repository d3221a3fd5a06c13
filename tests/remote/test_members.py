"""Launchers on several hosts, here folders, that share one store: each may die, come back, or come new."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from remote_tools import eventually
from run_scripts import PYPS
from run_tools import make_plan

from pyps.errors import NotReady, SegmentNotFound
from pyps.formats import write_json
from pyps.formats.events import read_events
from pyps.remote.server import Server
from pyps.store.store import Store

BATCHES = (12, 12, 12)
B = sum(BATCHES)
MINUTE = 120.0  # a busy machine needs the second one
# A step begins when the test lets its samples go; from the last position on the script ends.
SCRIPT = """
import os, time
from pathlib import Path
import torch, pyps
control = Path(os.environ["CONTROL"])
torch.set_num_threads(1)
model = torch.nn.Linear(4, 1)
def limits():
    return [int(n) for n in (control / "limits").read_text().split()]
with pyps.join() as worker:
    worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for x, y in worker.batches((torch.zeros(600, 4), torch.zeros(600, 1))):
        while limits()[0] <= worker.claim.first < limits()[1]:
            time.sleep(0.01)
        if worker.claim.first >= limits()[1]:
            break
        torch.nn.functional.mse_loss(model(x), y).backward()
        worker.step()
"""


class Hosts:
    """The launchers of one run, and the store they share."""

    def __init__(self, folder: Path, address: str) -> None:
        self._folder, self._address = folder, address
        self._store: Store | None = None
        self._launchers: dict[str, subprocess.Popen[str]] = {}
        self._limit = 0
        self._seen: tuple[tuple[int, ...], int, int] = ((), 0, 0)
        self.let(0)
        (folder / "train.py").write_text(SCRIPT)
        write_json(folder / "plan.json", make_plan(BATCHES))

    def let(self, first: int, last: int = 1 << 60) -> None:
        """Samples before `first` may be trained, and the script ends with `last`."""
        self._limit = first
        path = self._folder / "limits"
        path.with_suffix(".new").write_text(f"{first} {last}")
        os.replace(path.with_suffix(".new"), path)

    def start(self, name: str, ranks: str) -> None:
        command = [
            PYPS,
            "run",
            "--connect",
            self._address,
            "--ranks",
            ranks,
            "--plan",
            self._folder / "plan.json",
            "--samples",
            "0",
            "--run-dir",
            self._folder / name,
            "--rebalance",
            "--json",
            self._folder / "train.py",
        ]
        env = os.environ | {"CONTROL": str(self._folder)}
        self._launchers[name] = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
        )

    def kill(self, name: str) -> None:
        launcher = self._launchers.pop(name)
        launcher.kill()
        launcher.communicate(timeout=MINUTE)

    def train_until(self, what: Callable[[], bool]) -> None:
        """Let rounds go, one after another, until it is so."""

        def after_another_round() -> bool:
            if self.assigned >= self._limit:
                self.let(self._limit + B)
            return what()

        eventually(after_another_round, MINUTE)

    @property
    def store(self) -> Store:
        """The server's, which is of this machine, once rank 0 has made it."""
        if self._store is None:
            self._store = Store.open("model")
        return self._store

    @property
    def assigned(self) -> int:
        with suppress(SegmentNotFound, NotReady):
            return self.store.status().samples_assigned
        return 0

    def samples(self, rank: int) -> int:
        return self.store.ranks()[rank].samples

    def whole_rounds(self, count: int) -> bool:
        """Return whether the split in force has the global batch, and so many rounds were trained by it."""
        split, plan, version = self.split, self.store.status().plan, self.store.status().version
        if sum(split) != B:
            return False
        if (split, plan) != self._seen[:2]:
            self._seen = split, plan, version
        return version >= self._seen[2] + count

    @property
    def split(self) -> tuple[int, ...]:
        return tuple(rank.batch for rank in self.store.ranks())

    def pid(self, rank: int) -> int:
        """Return that of the launched worker, as its folder's events say."""
        found = [e for path in self._folder.glob("*/run.jsonl") for e in read_events(path) if e.rank == rank]
        started = [e for e in found if e.kind in ("started", "restarted")]
        assert started[-1].pid is not None
        return started[-1].pid

    def end(self) -> list[str]:
        """Let the script end everywhere; what each launcher reports of its re-plans."""
        self.let(self._limit, self._limit)
        replans = []
        for launcher in self._launchers.values():
            out, err = launcher.communicate(timeout=MINUTE)
            assert launcher.returncode == 0, err
            replans += json.loads(out)["replans"]
        return replans

    def close(self) -> None:
        for launcher in self._launchers.values():
            launcher.kill()
            launcher.communicate(timeout=MINUTE)
        if self._store is not None:
            self._store.close()


@pytest.mark.thorough
def test_launchers_die_return_and_come_new(shm: Path, tmp_path: Path) -> None:
    with Server("model", client_timeout_seconds=2.0) as server:
        hosts = Hosts(tmp_path, server.address)
        try:
            _live_through(hosts)
        finally:
            hosts.close()


def _live_through(hosts: Hosts) -> None:
    hosts.start("a", "0")
    hosts.start("b", "1,2")
    hosts.train_until(lambda: hosts.assigned > 4 * B)
    assert hosts.split == BATCHES

    # The launcher that re-plans dies, and a worker of the one that has to go on.
    hosts.kill("a")
    os.kill(hosts.pid(2), signal.SIGKILL)
    hosts.train_until(lambda: hosts.split[0] == 0)
    # It comes back, and another rank with it.
    hosts.start("a again", "0")
    hosts.start("c", "3")
    hosts.train_until(lambda: all(hosts.split[:3]) and hosts.whole_rounds(3))
    hosts.train_until(lambda: len(hosts.split) == 4 and hosts.samples(3) > B and hosts.whole_rounds(3))
    hosts.kill("c")
    hosts.train_until(lambda: hosts.split[3] == 0 and hosts.whole_rounds(3))

    replans = hosts.end()
    assert any("rank 0 is away" in why or "ranks 0, 2 are away" in why for why in replans), replans
    assert any("rank 3 has joined" in why for why in replans), replans
    state = hosts.store.state()
    trained = sum(rank.total.samples for rank in state.header.ranks)
    left = sum(count for _, count in state.header.ranges)
    assert trained + left == state.header.samples_assigned
    assert state.header.samples_dropped == 0
