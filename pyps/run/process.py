"""One worker process as the launcher sees it: started in a session, read from, and ended for certain.

A worker process leads a session: what it started itself (data loaders) ends with it, and a Ctrl-C in the
terminal reaches it through the launcher alone. The kernel sends it SIGTERM if the launcher is killed, and
pyps.run.guard ends what does not follow.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

from pyps.formats.records import append_whole

TAIL_LINES = 100  # of stderr, kept for the error message
READ_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 20  # a longer line is passed on in parts
PR_SET_PDEATHSIG = 1
FRAME = '  File "'  # begins a frame of a traceback
MARKS = " \t|+-"  # around the lines of exception groups

_libc = ctypes.CDLL(None, use_errno=True)  # loaded here: between fork and exec nothing may be imported


def _die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


class RankProcess(ABC):
    """A rank's process, here or on another machine. `stderr_tail` holds the last lines of its stderr."""

    is_here = True  # its pid is one of this machine, and it prints into pipes
    pid = 0  # 0: it waits for a place elsewhere
    pidfd = -1  # of a process here
    is_lost = False  # it ended with its node, or was killed there

    def __init__(self, rank: int, script: str) -> None:
        """script: the file whose lines errors name."""
        self.rank, self._script = rank, script
        self.stderr_tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.exit_code: int | None = None
        self.joined = False
        self._started = time.monotonic()

    @abstractmethod
    def poll(self) -> int | None:
        """The exit code once the process is dead (negative: the signal), None before."""

    @abstractmethod
    def signal(self, number: int) -> None:
        """Send a signal to the process and everything it started; nothing if it is dead."""

    @abstractmethod
    def close(self) -> None:
        """Give up what the launcher holds of a dead process."""

    def streams(self) -> list[IO[bytes]]:
        """The open pipes: stdout and stderr, in this order, until each has ended."""
        return []

    def is_stderr(self, stream: IO[bytes]) -> bool:
        return False

    def read(self, stream: IO[bytes]) -> list[str]:
        """The lines completed by now; at the stream's end its last line too, and the stream is closed."""
        return []

    @property
    def error(self) -> str:
        """What its stderr ends with, as last_error says."""
        return last_error(self.stderr_tail)

    @property
    def error_line(self) -> str:
        """Where in the script its last traceback is, such as "train.py:27"; "" if it is not there."""
        return line_in(self._script, self.stderr_tail)

    @property
    def lived_seconds(self) -> float:
        """Since it was started."""
        return time.monotonic() - self._started

    def exit_reason(self) -> str:
        """How it ended: "exit code 1", "killed by SIGKILL"."""
        if self.exit_code is None:
            return "running"
        if self.exit_code >= 0:
            return f"exit code {self.exit_code}"
        try:
            return f"killed by {signal.Signals(-self.exit_code).name}"
        except ValueError:
            return f"killed by signal {-self.exit_code}"


class WorkerProcess(RankProcess):
    """A worker started on this machine. A log file holds all its output."""

    def __init__(
        self, rank: int, command: Sequence[str], env: Mapping[str, str], log: Path, folder: str | None = None
    ) -> None:
        """rank; command; env: of the process; log: its file; folder: where it starts, by default here."""
        super().__init__(rank, os.path.join(folder or os.getcwd(), command[1]) if len(command) > 1 else "")
        self._log = log.open("ab", buffering=0)
        self._popen = subprocess.Popen(
            command,
            env=dict(env),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        self.pid = self._popen.pid
        self.pidfd = os.pidfd_open(self.pid)
        self._partial_lines = {stream.fileno(): bytearray() for stream in self.streams()}
        for fd in self._partial_lines:
            os.set_blocking(fd, False)

    def streams(self) -> list[IO[bytes]]:
        pipes = (self._popen.stdout, self._popen.stderr)
        return [pipe for pipe in pipes if pipe is not None and not pipe.closed]

    def is_stderr(self, stream: IO[bytes]) -> bool:
        return stream is self._popen.stderr

    def read(self, stream: IO[bytes]) -> list[str]:
        fd = stream.fileno()
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return []
        if data:
            append_whole(self._log, data)
        partial = self._partial_lines[fd]
        *ended, rest = data.split(b"\n")
        lines = [bytes(partial + ended[0]), *ended[1:]] if ended else []
        if ended:
            partial.clear()
        partial += rest
        if partial and (not data or len(partial) >= MAX_LINE_BYTES):
            lines.append(bytes(partial))
            partial.clear()
        if not data:
            stream.close()
        text = [line.decode(errors="replace").rstrip("\r") for line in lines]
        if self.is_stderr(stream):
            self.stderr_tail.extend(text)
        return text

    def poll(self) -> int | None:
        """Its process group is killed before the process is reaped, while no other can have its id."""
        if self.exit_code is None:
            options = os.WEXITED | os.WNOWAIT | os.WNOHANG
            if os.waitid(os.P_PID, self.pid, options) is not None:
                _signal_group(self.pid, signal.SIGKILL)
                self.exit_code = self._popen.wait()
        return self.exit_code

    def signal(self, number: int) -> None:
        if self.poll() is None:
            _signal_group(self.pid, number)

    def close(self) -> None:
        for stream in self.streams():
            stream.close()
        self._log.close()
        os.close(self.pidfd)


def last_error(lines: Sequence[str]) -> str:
    """The line that names the exception of the last traceback; without one, the last line with words; or "".

    After a traceback's last frame this is the first line at the margin: notes and further lines of the
    message come after it.
    """
    frames = [k for k, line in enumerate(lines) if line.startswith(FRAME)]
    after = list(lines)[frames[-1] + 1 :] if frames else []
    named = (line for line in after if line and not line[0].isspace())
    with_words = (line.strip(MARKS) for line in reversed(lines) if any(map(str.isalnum, line)))
    return next(named, next(with_words, ""))


def line_in(script: str, lines: Iterable[str]) -> str:
    """The last frame of a script in tracebacks, as file:line; "" if there is none."""
    begin = f'{FRAME}{script}", line '
    numbers = [line.removeprefix(begin).partition(",")[0] for line in lines if line.startswith(begin)]
    return f"{Path(script).name}:{numbers[-1]}" if numbers else ""


def end_processes(processes: Iterable[RankProcess], first: int, grace_seconds: float) -> None:
    """End every process and return when all are dead.

    Each gets the signal `first`, then SIGTERM, then SIGKILL, with the grace between. SIGCONT goes with each:
    a stopped process takes no other signal but SIGKILL. The pipes are emptied meanwhile, so that no process
    hangs while it prints.
    """
    alive = [process for process in processes if process.poll() is None]
    for number in dict.fromkeys((first, signal.SIGTERM, signal.SIGKILL)):
        for process in alive:
            process.signal(number)
            process.signal(signal.SIGCONT)
        deadline = time.monotonic() + grace_seconds
        while alive and (number == signal.SIGKILL or time.monotonic() < deadline):
            for process in alive:
                for stream in process.streams():
                    process.read(stream)
            alive = [process for process in alive if process.poll() is None]
            time.sleep(0.01)


def _signal_group(group: int, number: int) -> None:
    # Refused where the group is gone, or where only zombies are left of it.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
