"""A push that waits too long for its round counts once, whatever its worker does then."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from remote_tools import HYPER, SIZE, eventually, open_remote, push_ones, value

from pyps import BSP
from pyps.errors import InvalidArgument, TimedOut
from pyps.native.local import LocalBackend
from pyps.native.transfer import TransferRequest
from pyps.native.values import Codec, Encoding, PushRequest
from pyps.remote.server import Server
from pyps.store import Store
from pyps.store.staging import push_request


def test_a_push_that_waits_too_long_can_be_resumed(shm: Path) -> None:
    rules = BSP(round_timeout_seconds=30.0)
    with Store.create("model", {"w": np.zeros(SIZE)}, batches=[4, 4], policy=rules) as store:
        store.join(1)
        with Server("model") as server, open_remote(server.address) as far:
            far.join(0)
            claim = far.start()
            store.start()
            staging = far.stage()
            staging["w"][:] = 1.0
            with pytest.raises(TimedOut):
                far.push(staging, claim.count, HYPER, timeout=0.05)
            staging["w"][:] = 77.0  # what was staged counts
            other = store.stage()
            other["w"][:] = 3.0
            both = threading.Thread(target=store.push, args=(other, 4, HYPER))
            both.start()
            assert far.push(staging, claim.count, HYPER).sources == 2
            both.join()
            assert value(far) == -1.0


def test_after_a_push_that_waited_too_long_another_step_counts(shm: Path) -> None:
    rules = BSP(round_timeout_seconds=30.0)
    with Store.create("model", {"w": np.zeros(SIZE)}, batches=[4, 4], policy=rules) as store:
        store.join(1)
        with Server("model") as server, open_remote(server.address) as far:
            far.join(0)
            for version, gradient in ((1, 1.0), (2, 3.0)):
                claim = far.start()
                store.start()
                staging, other = far.stage(), store.stage()
                staging["w"][:] = other["w"][:] = gradient
                with pytest.raises(TimedOut):
                    far.push(staging, claim.count, HYPER, timeout=0.05)
                with pytest.raises(InvalidArgument, match="and that waits in no round"):
                    far.unstage(staging)
                assert store.push(other, 4, HYPER).version == version
            assert value(far) == -2.0


@contextmanager
def pair(linked: bool) -> Iterator[tuple[Store, Store]]:
    """The two workers of a store that trains in rounds, the second over a link or on this machine."""
    rules = BSP(round_timeout_seconds=30.0)
    with (
        Store.create("model", {"w": np.zeros(SIZE)}, batches=[4, 4], policy=rules) as store,
        Server("model") as server,
        open_remote(server.address) if linked else Store.open("model") as other,
    ):
        store.join(1)
        other.join(0)
        yield store, other


@pytest.mark.parametrize("then", ["start", "rejoin", "leave", "transfer", "refused", "again"])
def test_what_codes_did_not_carry_counts_once_where_a_push_waited_too_long(shm: Path, then: str) -> None:
    """It is part of that push, which counts whatever its worker does then: on a link as on this machine."""
    found = []
    for linked in (False, True):
        how = Encoding(Codec.INT8, error_feedback=True)
        with pair(linked) as (store, other):
            numbers = np.random.default_rng(5)
            for k in range(4):
                for one in (store, other):
                    one.start()
                waits, zeros = other.stage(), store.stage()
                waits["w"][:], zeros["w"][:] = numbers.normal(size=SIZE), 0.0
                if k == 1 and then == "refused":
                    with pytest.raises(InvalidArgument, match="timeout"):
                        other.push(waits, 4, HYPER, timeout=-1.0, encoding=how)
                elif k == 1 and then == "again":  # the first call's encoding counts
                    with pytest.raises(TimedOut):
                        other.push(waits, 4, HYPER, timeout=0.05, encoding=how)
                    sent = other.traffic.sent
                    with pytest.raises(TimedOut):
                        other.push(waits, 4, HYPER, timeout=0.05)
                    assert other.traffic.sent - sent < SIZE, "the gradient is there"
                elif k == 1:
                    time_out(other, push_request(waits, 4, HYPER, timeout=0.05, groups=1, encoding=how), then)
                    store.push(zeros, 4, HYPER)
                    continue
                thread = threading.Thread(target=store.push, args=(zeros, 4, HYPER))
                thread.start()
                other.push(
                    waits, 4, HYPER, encoding=Encoding(Codec.F32) if k == 1 and then == "again" else how
                )
                thread.join()
            found.append(other.snapshot().tensors["w"])
            buffers = [other.stage().index for _ in range(other.layout.staging_buffers)]
            assert sorted(buffers) == [*range(len(buffers))]
    assert np.array_equal(*found)


def time_out(store: Store, request: PushRequest, then: str) -> None:
    """Push into a round that does not close in time, and do not wait for it any more."""
    out = np.empty(store.layout.flat_elements, np.float32)
    transfer = partial(store.begin_transfer(TransferRequest(request)), out) if then == "transfer" else None
    with pytest.raises(TimedOut):
        (transfer or partial(store.send, request))()
    if then == "rejoin":
        store.rejoin()
    if then == "leave":
        store.leave()
        store.join(0)


def test_a_push_that_a_signal_interrupted_is_not_made_twice(shm: Path) -> None:
    """The server goes on with it, and the next start says that it has ended."""

    class Stop(Exception):
        pass

    def stop(*_: object) -> None:
        raise Stop

    def once_staged() -> None:
        eventually(lambda: any(member.staged for member in store.members()))
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    with pair(linked=True) as (store, other):
        for one in (store, other):
            one.start()
        staging = other.stage()
        staging["w"][:] = 1.0
        before = signal.signal(signal.SIGUSR1, stop)
        thread = threading.Thread(target=once_staged)
        thread.start()
        try:
            with pytest.raises(Stop):
                other.push(staging, 4, HYPER)
        finally:
            signal.signal(signal.SIGUSR1, before)
            thread.join()
        with pytest.raises(InvalidArgument, match="was interrupted, and may count"):
            other.push(staging, 4, HYPER, timeout=0.05)
        push_ones(store, 4)
        assert [one.start().round for one in (store, other)] == [1, 1]
        assert {other.stage().index for _ in range(other.layout.staging_buffers)} == {0, 1}
        assert value(store) == -0.5


def test_a_push_that_waits_too_long_can_be_resumed_by_a_transfer(shm: Path) -> None:
    with pair(linked=True) as (store, other):
        for one in (store, other):
            one.start()
        staging = other.stage()
        staging["w"][:] = 1.0
        request = push_request(staging, 4, HYPER, timeout=0.05, groups=1)
        with pytest.raises(TimedOut):
            other.send(request)
        thread = threading.Thread(target=push_ones, args=(store, 4))
        thread.start()
        whole = TransferRequest(replace(request, timeout=None))
        done = other.begin_transfer(whole)(np.empty_like(staging.flat))
        thread.join()
        assert done.result is not None
        assert done.result.sources == 2
        for _ in range(2):
            for buffer in [other.stage() for _ in range(other.layout.staging_buffers)]:
                other.unstage(buffer)


@pytest.mark.parametrize("call", ["stage", "push"])
def test_a_push_that_timed_out_before_its_round_is_in_none(
    shm: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Its buffer is its worker's, and what its codes did not carry is no part of the next gradient."""
    how = Encoding(Codec.INT8, error_feedback=True)
    whole = np.random.default_rng(5).normal(size=SIZE)

    def late(*_: object) -> None:
        raise TimedOut(call, "waited 0.050 s")

    def both_push(gradient: Any) -> None:
        staging = other.stage()
        staging["w"][:] = gradient
        thread = threading.Thread(target=push_ones, args=(store, 4))
        thread.start()
        other.push(staging, 4, HYPER, encoding=how)
        thread.join()
        for one in (store, other):
            one.start()

    with pair(linked=True) as (store, other):
        for one in (store, other):
            one.start()
        both_push(whole)
        staging = other.stage()
        staging["w"][:] = 1000.0 * whole
        with monkeypatch.context() as patch:
            patch.setattr(LocalBackend, call, late)
            with pytest.raises(TimedOut):
                other.push(staging, 4, HYPER, encoding=how)
        other.unstage(staging)
        both_push(0.0)
        error = np.abs(other.pull()[0][:SIZE] + 0.25 * whole + 0.5).max()
        assert error < np.abs(whole).max() / 127.0 / 10.0


@pytest.mark.parametrize("linked", [False, True])
def test_a_push_has_a_buffer_that_its_worker_staged(shm: Path, linked: bool) -> None:
    """Not one that the next start took back, nor one of an earlier push."""
    refusal = r"staging: found \d; expected one that \w+(\(\))? returned"
    with pair(linked) as (store, other):
        for one in (store, other):
            one.start()
        waits = other.stage()
        waits["w"][:] = 1.0
        with pytest.raises(TimedOut):
            other.push(waits, 4, HYPER, timeout=0.05)
        push_ones(store, 4)
        for one in (store, other):
            one.start()
        for staging in (waits.index, other.layout.staging_buffers - 1):
            with pytest.raises(InvalidArgument, match=refusal):
                other.push(staging, 4, HYPER, timeout=0.05)
            request = push_request(staging, 4, HYPER, timeout=0.05, groups=1)
            with pytest.raises(InvalidArgument, match=refusal):
                other.begin_transfer(TransferRequest(request))(np.empty_like(waits.flat))
        assert value(store) == -0.5


@pytest.mark.parametrize("linked", [False, True])
def test_a_round_that_was_waited_for_too_long_ends_with_the_push_that_waited(shm: Path, linked: bool) -> None:
    """Another buffer is refused: it would get that round's result, and its gradient would be lost."""
    with pair(linked) as (store, other):
        for one in (store, other):
            one.start()
        waits, following = other.stage(), other.stage()
        waits["w"][:], following["w"][:] = 1.0, 5.0
        with pytest.raises(TimedOut):
            other.push(waits, 4, HYPER, timeout=0.05)
        refusal = f"staging: found {following.index}; expected {waits.index}, whose round"
        with pytest.raises(InvalidArgument, match=refusal):
            other.push(following, 4, HYPER)
        push_ones(store, 4)
        assert other.push(waits, 4, HYPER).version == 1
        for one in (store, other):
            one.start()
        both = threading.Thread(target=push_ones, args=(store, 4))
        both.start()
        assert other.push(following, 4, HYPER).version == 2
        both.join()
        assert value(store) == -0.5 - 0.5 * 3.0
