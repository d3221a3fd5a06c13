"""A guard process: ends a run's processes if the launcher is killed.

A launcher that is killed ends nothing itself. The kernel then sends SIGTERM to the workers, but a worker can
ignore it, and what a worker started gets no signal. So the launcher keeps a pipe to a small process in a
session of its own, and writes there which workers run. When the pipe ends without a farewell, the guard kills
what is left of a worker's family as soon as the worker is gone, and everything after GRACE_SECONDS; then it
removes the run's segment.

The guard's process runs this file alone, without pyps: only the standard library is imported.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

GRACE_SECONDS = 4.0  # for workers to end after SIGTERM
LOOK_SECONDS = 0.05
FAREWELL = b"end\n"

Family = dict[int, int]  # pid -> start time in clock ticks, so that a reused pid is not taken for it


class Guard:
    """The launcher's side. A guard that is gone changes nothing for the run."""

    def __init__(self, segment: Path | None) -> None:
        """segment: the file that has no use after the run; None: the store is elsewhere."""
        command = [sys.executable, "-I", "-S", __file__, str(segment or "")]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0, start_new_session=True
        )

    def add(self, pid: int) -> None:
        """A worker was started, the leader of its session."""
        self._write(f"+{pid}\n".encode())

    def remove(self, pid: int) -> None:
        """A worker has ended, and its family with it."""
        self._write(f"-{pid}\n".encode())

    def close(self) -> None:
        """All workers have ended. Idempotent."""
        self._write(FAREWELL)
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()

    def _write(self, line: bytes) -> None:
        if self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(line)


def main(segment: str) -> None:
    """The guard's process: follow the pipe to its end, then end what the launcher left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    leaders: Family = {}
    for line in sys.stdin.buffer:
        pid = int(line[1:]) if line[:1] in b"+-" else 0
        if line == FAREWELL:
            return
        if line[:1] == b"+":
            leaders[pid] = start_of(pid)
        else:
            leaders.pop(pid, None)
    end(leaders)
    if segment:
        Path(segment).unlink(missing_ok=True)


def end(leaders: Family) -> None:
    """Kill the leaders' families: of a leader that has ended at once, of the others after the grace."""
    families = {leader: {leader: started} for leader, started in leaders.items()}
    deadline = time.monotonic() + GRACE_SECONDS
    while families:
        processes = read_processes()
        for leader, family in list(families.items()):
            grow(family, leader, processes)
            alive = {pid for pid, started in family.items() if processes.get(pid, (0, 0, 0))[2] == started}
            if leader not in alive or time.monotonic() >= deadline:
                for pid in alive:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
            if not alive:
                del families[leader]
        time.sleep(LOOK_SECONDS)


def grow(family: Family, leader: int, processes: dict[int, tuple[int, int, int]]) -> None:
    """Add the members of the leader's session, and the descendants of the family wherever they are."""
    found = True
    while found:
        found = False
        for pid, (parent, session, started) in processes.items():
            inside = session == leader and started >= family[leader]
            if pid not in family and (inside or started_by(parent, family, processes)):
                family[pid] = started
                found = True


def started_by(parent: int, family: Family, processes: dict[int, tuple[int, int, int]]) -> bool:
    """Return whether a process's parent is of the family, and not another one with a reused pid."""
    return parent in family and parent in processes and processes[parent][2] == family[parent]


def read_processes() -> dict[int, tuple[int, int, int]]:
    """Return for each process that is not a zombie its parent, its session and when it started."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := stat_of(int(name))) and fields[0] != "Z":
            found[int(name)] = (int(fields[1]), int(fields[3]), int(fields[19]))
    return found


def start_of(pid: int) -> int:
    """When a process started, in clock ticks; 0 if it is gone."""
    fields = stat_of(pid)
    return int(fields[19]) if fields else 0


def stat_of(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name, from the state on; empty if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


if __name__ == "__main__":
    main(sys.argv[1])
