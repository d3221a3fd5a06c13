"""Run a script once, with a process for each device, until enough of its batches were timed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pyps.errors import InputError, PypsError
from pyps.gain.notes import NO_LOADER, ORDERS, Note, Orders
from pyps.run.guard import Guard

LOOK_SECONDS = 0.05
START_SECONDS = 180.0  # until the first batch: imports, data, a first compilation
PATIENCE = 10.0  # times the seconds of a run: so long it may take until its least batches are there
LAST_LINES = 15  # of what a script printed before it failed


@dataclass(frozen=True)
class LocalDevice:
    """Where a rank runs: "cpu", or "cuda:0" and so on. pace: how many times longer an emulated one takes."""

    name: str
    pace: float = 1.0

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables by which a script finds this device, as its first and only one."""
        return {"CUDA_VISIBLE_DEVICES": self.name.partition(":")[2]} if self.name.startswith("cuda") else {}


@dataclass(frozen=True)
class Script:
    """A training script, its arguments, and for how many seconds each run of it is timed."""

    path: Path
    args: Sequence[str]
    seconds: float


def together(
    script: Script, devices: Sequence[LocalDevice], batches: Sequence[int], least: int
) -> list[list[Note]]:
    """Return the batches of all ranks of one run. batches: of each rank; none: the script's own.

    least: batches of each rank that there must be. Raises InputError if the script ends before, or draws
    its batches otherwise than by a DataLoader.
    """
    sizes = [[batch] for batch in batches] or [[]] * len(devices)
    port = _port()
    with tempfile.TemporaryDirectory(prefix="pyps-gain-") as folder:
        ranks = [
            _Rank(script, device, size, Path(folder) / str(rank), rank, len(devices), port)
            for rank, (device, size) in enumerate(zip(devices, sizes, strict=True))
        ]
        return _timed(script, ranks, least)


def alone(
    script: Script, devices: Sequence[LocalDevice], sizes: Sequence[int], least: int
) -> list[list[Note]]:
    """Return the batches of each device where it is the only rank of its run; all run at once."""
    with tempfile.TemporaryDirectory(prefix="pyps-gain-") as folder:
        ranks = [
            _Rank(script, device, list(sizes), Path(folder) / str(k), 0, 1, _port())
            for k, device in enumerate(devices)
        ]
        return _timed(script, ranks, least)


class _Rank:
    """A process that runs the script, and what it has noted."""

    def __init__(
        self,
        script: Script,
        device: LocalDevice,
        sizes: list[int],
        stem: Path,
        rank: int,
        world: int,
        port: int,
    ) -> None:
        self.device = device
        self._notes, self._log = stem.with_suffix(".notes"), stem.with_suffix(".log")
        self._notes.touch()
        orders = Orders(str(self._notes), sizes, device.pace)
        place = {"RANK": rank, "LOCAL_RANK": 0 if device.name.startswith("cuda") else rank}
        place |= {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
        usual = {"OMP_NUM_THREADS": "1"}  # as torchrun has it
        environment = (
            usual | os.environ | device.environment | {name: str(value) for name, value in place.items()}
        )
        environment |= {"TMPDIR": str(stem.parent)}  # what a rank that is killed leaves there goes, too
        environment |= {"MASTER_ADDR": "127.0.0.1", ORDERS: msgspec.json.encode(orders).decode()}
        command = [sys.executable, "-m", "pyps.gain.rank", str(script.path), *script.args]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def count(self) -> int:
        """Return how many batches have ended."""
        return self._notes.read_bytes().count(b"\n")

    def notes(self) -> list[Note]:
        """Return the batches that have ended, in order."""
        whole = self._notes.read_bytes().rpartition(b"\n")[0]
        return [msgspec.json.decode(line, type=Note) for line in whole.splitlines()]

    def last_lines(self) -> str:
        """Return what the script printed last."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-LAST_LINES:])

    def kill(self) -> None:
        """End the process and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _timed(script: Script, ranks: Sequence[_Rank], least: int) -> list[list[Note]]:
    """Wait until the ranks were timed for long enough, and end them."""
    guard = Guard(None)
    try:
        for rank in ranks:
            guard.add(rank.process.pid)
        _wait(script, ranks, least)
        return [rank.notes() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            guard.remove(rank.process.pid)
        guard.close()


def _wait(script: Script, ranks: Sequence[_Rank], least: int) -> None:
    started, timed_since = time.monotonic(), None
    while True:
        time.sleep(LOOK_SECONDS)
        now, counts = time.monotonic(), [rank.count() for rank in ranks]
        if timed_since is None and all(counts):
            timed_since = now
        if timed_since is not None and now - timed_since >= script.seconds and min(counts) >= least:
            return
        for rank in ranks:
            if rank.process.poll() is not None:
                _gone(script, rank, least)
        if all(rank.process.poll() is not None for rank in ranks):
            return
        limit = START_SECONDS if timed_since is None else START_SECONDS + PATIENCE * script.seconds
        if now - started > limit:
            _silent(script, counts, least, now - started)


def _gone(script: Script, rank: _Rank, least: int) -> None:
    """Raise what a rank that has ended says, unless it ended well and with batches enough."""
    code = rank.process.returncode
    expected = f"{least} or more, drawn by a DataLoader that shuffles, or that has a DistributedSampler"
    if code == NO_LOADER:
        raise InputError(str(script.path), "", "steps on batches that the script makes itself", expected)
    if code:
        error = PypsError(f"{script.path} on {rank.device.name} ended with {code}; its last lines follow")
        error.add_note(rank.last_lines())
        raise error
    if (found := rank.count()) < least:
        raise InputError(str(script.path), "", f"{found} batches until the script ended", expected)


def _silent(script: Script, counts: list[int], least: int, seconds: float) -> None:
    found = f"{min(counts)} batches on the slowest device in {seconds:.0f} s"
    expected = f"{least} or more, drawn by a DataLoader that shuffles, or that has a DistributedSampler"
    raise InputError(str(script.path), "", found, expected)


def _port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
