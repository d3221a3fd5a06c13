"""Test what a store survives of its own process: views that outlive it, signals, threads, copies."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyps import errors
from pyps.native.status import WaitKind
from pyps.native.values import Codec, Encoding, Hyper
from pyps.store import Store

TENSORS = {"w": np.zeros(3000, np.float32)}


@pytest.mark.parametrize("end", [Store.leave, Store.close])
def test_a_view_that_is_left_reaches_no_other_worker(shm: Path, end: Any) -> None:
    with Store.create("views", TENSORS, batches=[1], max_participants=1, staging_buffers=1) as other:
        first = Store.open("views")
        first.join()
        area = first.stage()
        views = area["w"], area.torch(), area.flat
        end(first)
        other.join()
        staged = other.stage()
        staged.flat[:] = 1.0
        for view in views[:2]:
            view[:] = 7.0
        np.testing.assert_array_equal(staged.flat, 1.0)
        other.start()
        other.push(staged, 1, Hyper(lr=1.0))
        assert set(other.pull()[0][:3000]) == {-1.0}
        other.leave()
        first.close()


def test_a_handle_that_joins_again_has_a_mapping_that_works(shm: Path) -> None:
    with Store.create("again", TENSORS, batches=[1], staging_buffers=1) as store:
        left = []
        for _ in range(3):
            store.join()
            store.start()
            area = store.stage()
            area.flat[:] = 1.0
            store.push(area, 1, Hyper(lr=1.0))
            left.append(area["w"])
            store.leave()
            for view in left:
                view[:] = 9.0
        store.join()
        assert set(store.pull()[0][:3000]) == {-3.0}
        assert store.stage()["w"][0] == 1.0


def waits(store: Store) -> bool:
    return any(member.waits_for is WaitKind.START for member in store.members())


def test_a_look_does_not_wait_for_a_call_that_waits(shm: Path) -> None:
    with Store.create("look", TENSORS, batches=[1, 1]) as store, Store.open("look") as other:
        store.join(0)
        thread = threading.Thread(target=store.start, args=(60.0,))
        thread.start()
        while not waits(store):  # these calls return while start() waits
            assert thread.is_alive()
        assert store.status().active == 1
        assert len(store.ranks()) == 2
        assert store.hyper() == [None]
        other.join(1)
        thread.join()


class Alarm(Exception):
    """Raised by a signal's handler."""


def test_what_a_signals_handler_raises_ends_a_wait(shm: Path) -> None:
    def handler(*_: object) -> None:
        raise Alarm

    def send() -> None:
        while not waits(store):
            pass
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    thread = threading.Thread(target=send)
    try:
        with Store.create("signal", TENSORS, batches=[1, 1]) as store:
            store.join(0)
            thread.start()
            with pytest.raises(Alarm):
                store.start(600.0)
            thread.join()
            with pytest.raises(errors.TimedOut):
                store.start(0.01)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_refused_push_can_be_unstaged(shm: Path) -> None:
    with Store.create("unstage", TENSORS, batches=[1], staging_buffers=1) as store:
        store.join()
        store.start()
        area = store.stage()
        area.flat[:] = np.nan
        with pytest.raises(errors.NotFinite):
            store.push(area, 1, Hyper(lr=1.0), encoding="int8")
        store.unstage(area)
        with pytest.raises(errors.InvalidArgument, match="unstage"):
            store.unstage(area)
        store.stage()


def test_a_handle_is_not_copied(shm: Path) -> None:
    with Store.create("copy", TENSORS, batches=[1]) as store:
        for way in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="open the store again"):
                way(store)


def trained_with_a_refused_push(name: str, batches: list[int], role: Any) -> Any:
    """The parameters after encoded pushes of rank 1, one of which was refused in its second chunk."""
    rng = np.random.default_rng(3)
    with (
        Store.create(
            name, {"w": np.zeros(2048)}, batches=batches, chunk_params=1024, policy="asp:scaling=none"
        ) as store,
        Store.open(name) as other,
    ):
        other.join(0)
        store.join(1, role=role)
        other.replan([1, 1])
        for turn in range(4):
            gradient = rng.standard_normal(2048).astype(np.float32)
            store.start()
            area = store.stage()
            area.flat[:] = gradient
            if turn == 1:
                area.flat[-1] = np.nan
                with pytest.raises(errors.NotFinite):
                    store.push(area, 1, Hyper(lr=1.0), encoding=Encoding(Codec.INT4, error_feedback=True))
                area.flat[:] = gradient
            store.push(area, 1, Hyper(lr=1.0), encoding=Encoding(Codec.INT4, error_feedback=True))
        return store.pull()[0]


def test_a_refused_push_leaves_the_residual_of_a_rank_that_came_later(shm: Path) -> None:
    planned = trained_with_a_refused_push("planned", [1, 1], "worker")
    later = trained_with_a_refused_push("later", [1], "new_worker")
    np.testing.assert_array_equal(planned, later)
