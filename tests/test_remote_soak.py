"""Workers over a link that breaks all the time, killed, stopped and replaced: every push counts once."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from remote_tools import PATIENCE_SECONDS, Relay

from pyps.remote.server import Server
from pyps.store import Store

SEED = 11
SECONDS = float(os.environ.get("PYPS_SOAK_SECONDS", "3"))
RANKS = 3
SILENCE = 0.5
SAMPLES_A_PUSH = 4

WORKER = """
import sys
import numpy as np
from pyps.errors import Busy, Ended, Fenced, LinkLost
from pyps.remote import open_store
from pyps.values import Hyper

with open_store(sys.argv[1]) as store:
    store.join(int(sys.argv[2]))
    while True:
        try:
            claim = store.start()
            area = store.stage()
            area.flat[:] = 1.0
            store.push(area, claim.count, Hyper(lr=1.0))
            print(".", end="", flush=True)
        except Fenced:
            try:
                store.rejoin()
            except Busy:
                break
"""


class Fleet:
    """A process a rank; what they say of their pushes goes to one file each."""

    def __init__(self, address: str, folder: Path) -> None:
        self.address, self.folder = address, folder
        self.started = 0
        self.workers: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, rank: int) -> None:
        self.started += 1
        with open(self.folder / f"pushes-{self.started}", "wb") as log:
            command = [sys.executable, "-c", WORKER, self.address, str(rank)]
            self.workers[rank] = subprocess.Popen(command, stdout=log, stderr=subprocess.DEVNULL)

    def end(self) -> None:
        for worker in self.workers.values():
            with contextlib.suppress(ProcessLookupError):
                worker.kill()
            worker.wait()

    def acknowledged(self) -> int:
        return sum(path.stat().st_size for path in self.folder.glob("pushes-*"))

    def harm(self, rng: random.Random) -> None:
        """One of them is killed and replaced, or stands still: for shorter or longer than is overlooked."""
        rank, worker = rng.choice(sorted(self.workers.items()))
        if rng.random() < 0.5:
            worker.kill()
            worker.wait()
            self.start(rank)
            return
        worker.send_signal(signal.SIGSTOP)
        time.sleep(rng.choice((0.1, 2 * SILENCE)))
        worker.send_signal(signal.SIGCONT)


def test_every_push_counts_once_whatever_happens(shm: Path, tmp_path: Path) -> None:
    rng = random.Random(SEED)
    tensors, batches = {"w": np.zeros(2000)}, [SAMPLES_A_PUSH] * RANKS
    with (
        Store.create("model", tensors, batches=batches, policy="asp") as store,
        Server("model", silence_seconds=SILENCE) as server,
        Relay(server.address, breaks_every=25) as relay,
    ):
        fleet = Fleet(relay.address, tmp_path)
        try:
            for rank in range(RANKS):
                fleet.start(rank)
            deadline = time.monotonic() + PATIENCE_SECONDS
            while store.status().version < 10:
                assert time.monotonic() < deadline, "they never began"
                time.sleep(0.05)
            harms, until = 0, time.monotonic() + SECONDS
            while time.monotonic() < until:
                time.sleep(rng.uniform(0.1, 0.5))
                fleet.harm(rng)
                harms += 1
        finally:
            fleet.end()
        version, deaths = store.status().version, fleet.started
        assert fleet.acknowledged() <= version <= fleet.acknowledged() + deaths
        assert set(store.snapshot().tensors["w"].tolist()) == {-float(version)}
        ranks = store.ranks()
        assert sum(r.pushes for r in ranks) == version
        assert sum(r.samples for r in ranks) == SAMPLES_A_PUSH * version
        assert server.counters.repeated > 0
    assert harms > 0
