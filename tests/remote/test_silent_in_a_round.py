"""A worker that falls silent while its push waits in a round: the push counts, and its answer says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from remote_tools import eventually

from pyps import BSP
from pyps.errors import Fenced, TimedOut
from pyps.native.transfer import TransferRequest
from pyps.native.values import Codec, Encoding, Hyper, PushRequest, PushResult
from pyps.remote import open_store
from pyps.remote.clients import ClientRecord, Clients
from pyps.remote.server import Server
from pyps.store import Store
from pyps.store.staging import push_request

SIZE = 3000
HYPER = Hyper(lr=1.0)
SILENCE = 10.0


@contextmanager
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Store, Store, Callable[[], None]]]:
    """A worker on the store's machine, one over a link, and what lets the server hear nothing of that one."""
    records: list[ClientRecord] = []
    open_session, rules = Clients.open, BSP(round_timeout_seconds=30.0)

    def opened(self: Clients, session: bytes, peer: str) -> ClientRecord:
        records.append(open_session(self, session, peer))
        return records[-1]

    monkeypatch.setattr(Clients, "open", opened)
    with (
        Store.create("model", {"w": np.zeros(SIZE)}, batches=[4, 4], policy=rules) as store,
        Server("model", client_timeout_seconds=SILENCE) as server,
        open_store(server.address) as far,
    ):

        def fall_silent() -> None:
            def is_late() -> bool:
                records[0].heard = time.monotonic() - 2.0 * SILENCE
                return server.counters.timed_out > 0

            eventually(is_late)

        store.join(1)
        far.join(0)
        yield store, far, fall_silent


def push(store: Store, request: PushRequest, verb: str) -> PushResult:
    """By that call of the link."""
    out = np.empty(store.layout.flat_elements, np.float32)
    if verb == "push":
        return store.send(request)
    if verb == "exchange":
        result, version = store.send_and_pull(request, out)
        assert version is None
        return result
    done = store.begin_transfer(TransferRequest(request))(out)
    assert (done.version, done.claims) == (None, ())
    assert done.result is not None
    return done.result


@pytest.mark.parametrize("verb", ["push", "exchange", "transfer"])
def test_its_push_counts_once_and_so_does_what_its_codes_did_not_carry(
    shm: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    how = Encoding(Codec.INT8, error_feedback=True)
    whole = np.random.default_rng(5).normal(size=SIZE).astype(np.float32)
    with pair(monkeypatch) as (store, far, fall_silent):
        make = partial(push_request, samples=4, hyper=HYPER, groups=1, encoding=how)
        for one in (store, far):
            one.start()
        staging = far.stage()
        staging["w"][:] = whole
        threading.Thread(target=once_staged, args=(store, fall_silent)).start()
        result = push(far, make(staging), verb)
        assert (result.version, result.samples, result.rank_pushes) == (0, 4, 1)
        with pytest.raises(Fenced, match="nothing was heard"):
            far.start()
        far.rejoin()

        follow(store, 1)
        assert [far.start().first, store.start().first] == [8, 12]
        staging = far.stage()
        staging["w"][:] = 0.0
        both = threading.Thread(target=follow, args=(store, 2))
        both.start()
        far.push(staging, 4, HYPER, encoding=how)
        both.join()
        first_error = np.abs(whole).max() / 127.0 / 2.0
        assert np.abs(store.pull()[0][:SIZE] + whole / 2.0).max() < first_error / 10.0


def once_staged(store: Store, then: Callable[[], Any]) -> None:
    eventually(lambda: any(member.staged for member in store.members()))
    then()


def follow(store: Store, version: int) -> None:
    """Push zeros into the round that makes this version."""
    staging = store.stage()
    staging["w"][:] = 0.0
    result = store.push(staging, 4, HYPER)
    assert (result.version, result.sources) == (version, 2)


@pytest.mark.parametrize("verb", ["push", "exchange", "transfer"])
def test_a_push_that_timed_out_in_its_round_and_is_resumed_after_a_silence_counts(
    shm: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    with pair(monkeypatch) as (store, far, fall_silent):
        for one in (store, far):
            one.start()
        staging = far.stage()
        staging["w"][:] = 1.0
        make = partial(push_request, samples=4, hyper=HYPER, groups=1)
        with pytest.raises(TimedOut):
            push(far, make(staging, timeout=0.05), verb)
        fall_silent()
        result = push(far, make(staging), verb)
        assert (result.version, result.samples, result.rank_pushes) == (0, 4, 1)
        with pytest.raises(Fenced, match="nothing was heard"):
            far.start()
        far.rejoin()
        follow(store, 1)
        assert np.abs(store.pull()[0][:SIZE] + 0.5).max() < 1e-6
