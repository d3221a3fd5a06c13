"""A thread that runs one job at a time, and hands out what each came to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from pyps.errors import TimedOut

CLOSE_SECONDS = 10.0  # that transfers under way may take in the end
T = TypeVar("T")


class BackgroundThread(Generic[T]):
    """A thread that runs one job at a time. What a job raises is raised where its result is taken."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], T] | None] = SimpleQueue()
        self._results: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()
        self._last: Callable[[], None] | None = None
        # A daemon: a process that ends without close() must not wait for a transfer.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T]) -> None:
        """Run a job after those submitted before."""
        self._jobs.put(job)

    @property
    def results_ready(self) -> int:
        """How often take() would return at once."""
        return self._results.qsize()

    def take(self, timeout: float | None = None) -> T:
        """The result of the oldest job. Raises what it raised, TimedOut if it is not done by then."""
        try:
            result, error = self._results.get(timeout=timeout)
        except Empty:
            raise TimedOut("pipeline", f"a transfer took longer than {timeout:g} s") from None
        if error is not None:
            raise error
        return result  # type: ignore[return-value]  # a job without an error has a result

    def close(self, last: Callable[[], None], timeout: float) -> None:
        """Run `last` in the thread after the job under way, and end it.

        Raises TimedOut if that takes longer; `last` still runs, later.
        """
        self.end(last)
        self.join(timeout)

    def end(self, last: Callable[[], None]) -> None:
        """Run `last` in the thread after the jobs submitted before, and end it. Does not wait for that."""
        if self._last is None:
            self._last = last
            self._jobs.put(None)

    def join(self, timeout: float) -> None:
        """After end(): wait for the thread. Raises TimedOut."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimedOut("close", f"a transfer is still under way after {timeout:g} s")

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._results.put((job(), None))
            except BaseException as error:
                self._results.put((None, error))
        if self._last is not None:
            self._last()
