"""Threads of a test: all at once, and what one of them raises is raised."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def in_threads(*bodies: Callable[[], None]) -> None:
    """Run all at once; the first exception of any of them is raised here."""
    failures: list[BaseException] = []

    def guarded(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive(), "a worker hangs"
    if failures:
        raise failures[0]


@contextmanager
def background(body: Callable[[], object]) -> Iterator[None]:
    """Run `body` in a thread meanwhile; it has to end when the block does."""
    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    yield
    thread.join(timeout=60)
    assert not thread.is_alive(), "a worker hangs"
