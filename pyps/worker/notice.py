"""SIGTERM as a notice to a worker: it finishes its step, pushes it, leaves the run and exits.

Schedulers send SIGTERM some seconds before they take a machine away. Without a handler it would end the
process in the middle of a step, whose samples others would train again, over a link after the client timeout.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

LEFT = 128 + signal.SIGTERM  # the exit code of a worker that has left on notice, as a shell says it
AGAIN_SECONDS = 1.0  # a scheduler and a launcher may both send the notice; a later one is impatience


class Notice:
    """Whether this process was asked to leave. `busy`: it trains, and ends at the next call of
    `leave_if_asked`, or within `idle`; otherwise at once. Always by SystemExit.

    A SIGTERM that comes more than a second after the first one ends a busy process, too.
    """

    def __init__(self) -> None:
        self.busy = False
        self._asked_at: float | None = None
        self._listens = False

    @property
    def came(self) -> bool:
        """Whether the process was asked to leave."""
        return self._asked_at is not None

    def listen(self) -> None:
        """Take SIGTERM, unless the script has a handler of its own, or this is not the main thread."""
        if _in_main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_signal)
            self._listens = True

    def close(self) -> None:
        """SIGTERM ends the process again, as before. Idempotent."""
        if self._listens and _in_main_thread() and signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._listens = False

    def leave_if_asked(self) -> None:
        """Between two steps: raise SystemExit if the process was asked to leave."""
        if self.came:
            raise SystemExit(LEFT)

    @contextmanager
    def idle(self) -> Iterator[None]:
        """A wait for a step, which a signal ends."""
        before, self.busy = self.busy, False
        try:
            self.leave_if_asked()
            yield
        finally:
            self.busy = before

    def _on_signal(self, _: int, __: FrameType | None) -> None:
        now = time.monotonic()
        again = self._asked_at is not None and now - self._asked_at > AGAIN_SECONDS
        self._asked_at = self._asked_at or now
        if again or not self.busy:
            raise SystemExit(LEFT)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
