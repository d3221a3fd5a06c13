"""SIGTERM as a notice to a worker: it finishes its step, pushes it, leaves the run and exits.

Schedulers send SIGTERM some seconds before they take a machine away. Without a handler it would end the
process in the middle of a step, whose samples others would train again, over a link after the client timeout.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

LEFT = 128 + signal.SIGTERM  # the exit code of a worker that has left on notice, as a shell says it
T = TypeVar("T")
AGAIN_SECONDS = 1.0  # a scheduler, srun and a launcher may each send the notice; a later one is impatience


class Signals:
    """The signals that asked a process to end. `first`: the number of the first one, 0 before it came.
    `count`: how many came; SIGTERMs within a second of the first one are the same notice.
    """

    def __init__(self) -> None:
        self.first = self.count = 0
        self._asked_at = 0.0

    def note(self, number: int) -> bool:
        """Count a signal; whether it is not one more copy of the first."""
        now = time.monotonic()
        if self.count and number == signal.SIGTERM == self.first and now - self._asked_at <= AGAIN_SECONDS:
            return False
        self.first, self._asked_at = self.first or number, self._asked_at or now
        self.count += 1
        return True


class Notice:
    """Tell whether this process was asked to leave. `busy`: it trains, and ends at the next call of
    `leave_if_asked`, or within `idle`; otherwise at once. Always by SystemExit.

    A SIGTERM that comes more than a second after the first one ends a busy process, too.
    """

    def __init__(self) -> None:
        self.busy = False
        self._signals = Signals()
        self._listens = False

    @property
    def received(self) -> bool:
        """Return whether the process was asked to leave."""
        return self._signals.count > 0

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
        if self.received:
            raise SystemExit(LEFT)

    def idle(self, wait: Callable[[], T]) -> T:
        """Return what a wait for a step gives, which a signal ends."""
        before, self.busy = self.busy, False
        try:
            self.leave_if_asked()
            return wait()
        finally:
            self.busy = before

    def _on_signal(self, _: int, __: FrameType | None) -> None:
        self._signals.note(signal.SIGTERM)
        if self._signals.count > 1 or not self.busy:
            raise SystemExit(LEFT)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
