"""One worker process as its supervisor sees it: in a group of its own, heard, and ended for certain.

A child leads a session, so that whatever it started itself (data loaders) dies with it, and a Ctrl-C in the
terminal reaches it through the supervisor alone. It gets SIGTERM from the kernel if the supervisor is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

TAIL_LINES = 20  # of stderr, kept to say why a worker died
READ_BYTES = 1 << 16
PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)  # loaded here: between fork and exec nothing may be imported


def _die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


class Child:
    """A started worker; `tail` holds the last lines of its stderr, a log file all that it printed."""

    def __init__(self, rank: int, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.rank = rank
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.code: int | None = None
        self.joined = False
        self._log = log.open("ab", buffering=0)
        self._popen = subprocess.Popen(
            command,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        self.pid = self._popen.pid
        self.pidfd = os.pidfd_open(self.pid)
        self._halves = {stream.fileno(): b"" for stream in self.streams()}
        for fd in self._halves:
            os.set_blocking(fd, False)

    def streams(self) -> list[IO[bytes]]:
        """The open pipes: stdout and stderr, in this order, until each has ended."""
        pipes = (self._popen.stdout, self._popen.stderr)
        return [pipe for pipe in pipes if pipe is not None and not pipe.closed]

    def is_stderr(self, stream: IO[bytes]) -> bool:
        return stream is self._popen.stderr

    def read(self, stream: IO[bytes]) -> list[str]:
        """The lines that are complete by now; closes the stream, with its last line, at its end."""
        fd = stream.fileno()
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return []
        if data:
            self._log.write(data)
        lines = (self._halves[fd] + data).split(b"\n")
        self._halves[fd] = lines.pop() if data else b""
        if not data:
            lines = [line for line in lines if line]
            stream.close()
        text = [line.decode(errors="replace").rstrip("\r") for line in lines]
        if self.is_stderr(stream):
            self.tail.extend(text)
        return text

    def poll(self) -> int | None:
        """The exit code once the process is dead (negative: the signal), None before.

        Its group is swept before the process is reaped, while the process id is certainly still its own.
        """
        if self.code is None:
            options = os.WEXITED | os.WNOWAIT | os.WNOHANG
            if os.waitid(os.P_PID, self.pid, options) is not None:
                _signal_group(self.pid, signal.SIGKILL)
                self.code = self._popen.wait()
        return self.code

    def signal(self, number: int) -> None:
        """Send a signal to the process and everything it started; nothing if it is dead."""
        if self.poll() is None:
            _signal_group(self.pid, number)

    def close(self) -> None:
        """Close the pipes and the log of a dead child."""
        for stream in self.streams():
            stream.close()
        self._log.close()
        os.close(self.pidfd)

    def verdict(self) -> str:
        """How it ended, in words: "exit code 1", "killed by SIGKILL"."""
        if self.code is None:
            return "running"
        if self.code >= 0:
            return f"exit code {self.code}"
        try:
            return f"killed by {signal.Signals(-self.code).name}"
        except ValueError:
            return f"killed by signal {-self.code}"


def end_all(children: Iterable[Child], first: int, grace_seconds: float) -> None:
    """End every child: `first` (a signal), then SIGTERM, then SIGKILL, with the grace between; returns when
    dead.

    SIGCONT goes with each, for a stopped process takes no other signal but SIGKILL. The pipes are emptied
    meanwhile, so that no child hangs writing its last words.
    """
    alive = [child for child in children if child.poll() is None]
    steps = dict.fromkeys((first, signal.SIGTERM, signal.SIGKILL))
    for number in steps:
        for child in alive:
            child.signal(number)
            child.signal(signal.SIGCONT)
        deadline = time.monotonic() + grace_seconds
        while alive and (number == signal.SIGKILL or time.monotonic() < deadline):
            for child in alive:
                for stream in child.streams():
                    child.read(stream)
            alive = [child for child in alive if child.poll() is None]
            time.sleep(0.01)


def _signal_group(group: int, number: int) -> None:
    # Refused where it is gone, or all that is left of it are zombies.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
