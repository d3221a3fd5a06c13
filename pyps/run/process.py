"""One worker process as the launcher sees it: started in a session, read from, and ended for certain.

A worker process leads a session: what it started itself (data loaders) ends with it, and a Ctrl-C in the
terminal reaches it through the launcher alone. The kernel sends it SIGTERM if the launcher is killed, and
pyps.run.guard ends what does not follow. Restarts says whether a rank whose process died is started again.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

from pyps.errors import Diverged, InputError, InvalidArgument, LinkLost, OtherABI, UnknownPolicy
from pyps.formats.records import append_whole

TAIL_LINES = 100  # of stderr, kept for the error message
READ_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 20  # a longer line is passed on in parts
PR_SET_PDEATHSIG = 1
FRAME = '  File "'  # begins a frame of a traceback
MARKS = " \t|+-"  # around the lines of exception groups
BACKOFF_SECONDS = 0.2  # before the first restart of a rank; doubled for each further one
MAX_BACKOFF_SECONDS = 5.0
STARTUP_BACKOFF_SECONDS = 1.0  # after an error before the first step: meanwhile the others may fail alike
MAX_STARTUP_FAILURES = 1  # of a rank in a row: the next one ends the run
SOON_SECONDS = 60.0  # an error that comes back later than this after the start may be another one
OWN_ERRORS = "pyps.errors."
LINK_LOST = f"{LinkLost.__module__}.{LinkLost.__qualname__}"  # of its server, which may come back
FINAL_ERRORS = frozenset(
    f"{kind.__module__}.{kind.__qualname__}"
    for kind in (InputError, Diverged, InvalidArgument, UnknownPolicy, OtherABI)
)

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
        """Return what its stderr ends with, as last_error says."""
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


class Restarts:
    """Decide whether a rank whose process died is started again, and when; `most` restarts of each are
    allowed.

    A process that was killed may be unlucky. One that failed with an exit code has an error of its own:
    misuse, as with a data set unlike the others', and divergence are final, and the same error twice, soon
    after the start, would come a third time. So does one that all ranks of this machine meet before their
    first step.
    """

    def __init__(self, most: int, ranks: int = 0) -> None:
        self.counts: Counter[int] = Counter()
        self._most, self._ranks = most, ranks
        self._at_startup: dict[int, str] = {}  # by rank, errors before any step
        self._startup_failures: Counter[int] = Counter()
        self._last_error: dict[int, str] = {}

    def refusal(self, process: RankProcess, has_steps: bool) -> str | None:
        """Why the rank of a dead process is not started again, as the end of a sentence; None: it is.

        has_steps: the process has reported a step.
        """
        rank, count = process.rank, self.counts[process.rank]
        after = f" after {count} restart{'s' * (count != 1)}" if count else ""
        error = process.error
        if (process.exit_code or 0) > 0:
            if error.partition(":")[0] in FINAL_ERRORS:
                return after
            again = error == self._last_error.get(rank) and error.partition(":")[0] not in ("", LINK_LOST)
            self._last_error[rank] = error
            if again and process.lived_seconds < SOON_SECONDS:
                return f"{after}, with the same error"
            if not has_steps and not error.startswith(OWN_ERRORS):
                self._at_startup[rank] = error
                if list(self._at_startup.values()) == [error] * self._ranks:
                    return f"{after}, as all ranks did before their first step"
        if has_steps:
            self._at_startup.pop(rank, None)
        if has_steps or (process.exit_code or 0) <= 0:
            self._startup_failures[rank] = 0
        else:
            self._startup_failures[rank] += 1
        if self._startup_failures[rank] > MAX_STARTUP_FAILURES or count >= self._most:
            return after
        return None

    def count(self, rank: int) -> float:
        """The rank is started again: the seconds to wait before."""
        least = STARTUP_BACKOFF_SECONDS if rank in self._at_startup else 0.0
        backoff: float = max(least, self._backoff(rank))
        self.counts[rank] += 1
        return backoff

    def _backoff(self, rank: int) -> float:
        return min(MAX_BACKOFF_SECONDS, BACKOFF_SECONDS * 2.0 ** self.counts[rank])
