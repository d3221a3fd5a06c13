"""An exchange tells, while it goes on, which of its copy is final: in order, all of it, and nothing early."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from threads import background

from pyps import Hyper, Store
from pyps.errors import NotFinite
from pyps.native.local import ARRIVAL_ELEMENTS
from pyps.store.staging import push_request

ELEMENTS = 3 * ARRIVAL_ELEMENTS + 70_000


def staged(store: Store, value: float) -> int:
    store.start()
    staging = store.stage()
    staging.flat.fill(value)
    return staging.index


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_runs_come_in_order_and_are_final(shm: Path, threads: int, optimizer: str) -> None:
    initial = {"w": np.ones(ELEMENTS, np.float32)}
    with Store.create("run", initial, batches=[1], policy="asp", optimizer=optimizer) as store:
        store.join(0)
        store.set_threads(threads)
        flat = np.zeros(store.layout.flat_elements, np.float32)
        copied, told, callers = np.zeros_like(flat), [], set()

        def arrived(first: int, count: int) -> None:
            told.append((first, count))
            callers.add(threading.get_ident())
            copied[first : first + count] = flat[first : first + count]

        for _ in range(3):
            told.clear()
            request = push_request(staged(store, 0.5), 1, Hyper(lr=0.1), groups=1)
            _, version = store.send_and_pull(request, flat, arrived)
            assert version == store.status().version
            np.testing.assert_array_equal(copied, flat)
            np.testing.assert_array_equal(flat, store.pull()[0])
            ends = [first + count for first, count in told]
            assert [first for first, _ in told] == [0, *ends[:-1]]
            assert ends[-1] == flat.size
            assert len(told) <= 4
            assert all(count >= ARRIVAL_ELEMENTS for _, count in told[:-1])
            assert threads > 1 or len(told) > 2
        assert callers == {threading.get_ident()}


def test_two_members_of_a_round_are_both_told_all(shm: Path) -> None:
    initial = {"w": np.ones(ELEMENTS, np.float32)}
    with Store.create("run", initial, batches=[1, 1], policy="bsp") as one, Store.open("run") as two:
        copies = []

        def member(store: Store, rank: int) -> None:
            store.join(rank)
            flat = np.zeros(store.layout.flat_elements, np.float32)
            copied = np.zeros_like(flat)

            def arrived(first: int, count: int) -> None:
                copied[first : first + count] = flat[first : first + count]

            request = push_request(staged(store, 1.0 + rank), 1, Hyper(lr=1.0), groups=1)
            assert store.send_and_pull(request, flat, arrived)[1] == 1
            copies.append(copied[:ELEMENTS])

        threads = [
            threading.Thread(target=member, args=(store, rank)) for rank, store in enumerate((one, two))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for copied in copies:
            np.testing.assert_array_equal(copied, -0.5)


def test_what_arrived_raises_is_raised_after_the_push(shm: Path) -> None:
    initial = {"w": np.ones(ELEMENTS, np.float32)}
    calls = []

    def arrived(first: int, count: int) -> None:
        calls.append(first)
        raise RuntimeError("the bus is gone")

    with Store.create("run", initial, batches=[1], policy="asp") as store:
        store.join(0)
        flat = np.zeros(store.layout.flat_elements, np.float32)
        request = push_request(staged(store, 1.0), 1, Hyper(lr=1.0), groups=1)
        with pytest.raises(RuntimeError, match="the bus is gone"):
            store.send_and_pull(request, flat, arrived)
        assert calls == [0]
        assert store.status().version == 1
        np.testing.assert_array_equal(flat[:ELEMENTS], 0.0)


def test_a_refused_push_tells_nothing(shm: Path) -> None:
    initial = {"w": np.ones(ELEMENTS, np.float32)}
    with Store.create("run", initial, batches=[1], policy="asp") as store:
        store.join(0)
        flat = np.zeros(store.layout.flat_elements, np.float32)
        request = push_request(staged(store, float("nan")), 1, Hyper(lr=1.0), groups=1)
        with pytest.raises(NotFinite):
            store.send_and_pull(request, flat, lambda first, count: pytest.fail("told"))


def test_what_is_raised_reaches_its_own_caller(shm: Path) -> None:
    """Calls of other threads end while the exchange goes on, and leave it alone."""
    initial, done = {"w": np.ones(ELEMENTS, np.float32)}, threading.Event()

    def refuse(first: int, count: int) -> None:
        raise TimeoutError(first)

    def look(store: Store) -> None:
        while not done.is_set():
            store.status()

    with Store.create("run", initial, batches=[1], policy="asp") as store, Store.open("run") as other:
        store.join(0)
        flat = np.zeros(store.layout.flat_elements, np.float32)
        with background(partial(look, other)):
            try:
                for _ in range(3):
                    request = push_request(staged(store, 0.5), 1, Hyper(lr=0.1), groups=1)
                    with pytest.raises(TimeoutError):
                        store.send_and_pull(request, flat, refuse)
            finally:
                done.set()
