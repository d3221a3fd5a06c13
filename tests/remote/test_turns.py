"""Over a link a gradient waits for its turn before it travels: the link carries one at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyps.errors import TimedOut
from pyps.native.transfer import TransferRequest
from pyps.native.values import Codec, Hyper, PushRequest
from pyps.remote import create_store, open_store
from pyps.remote.server import Server
from pyps.store import Store
from pyps.store.policies import ASP, BSP, R2SP
from pyps.worker.step.client import StoreClient

HYPER = Hyper(lr=0.1)


def make(where: str, policy: object, count: int) -> list[Store]:
    tensors = {"w": np.zeros(8, np.float32)}
    first = (create_store if "://" in where else Store.create)(  # type: ignore[operator]
        where, tensors, batches=[1] * count, samples=40, policy=policy
    )
    stores = [first, *((open_store if "://" in where else Store.open)(where) for _ in range(count - 1))]
    for rank, store in enumerate(stores):
        store.join(rank)
    for store in stores:
        store.start()
    return stores


@pytest.fixture(params=["here", "link"])
def where(request: pytest.FixtureRequest, shm: Path) -> Iterator[str]:
    if request.param == "here":
        yield "ring"
        return
    with Server("ring") as server:
        yield server.address


def push(store: Store) -> None:
    staging = store.stage()
    staging.flat[:] = 1.0
    store.push(staging, 1, HYPER)
    store.pull()
    store.start()


def test_a_turn_comes_after_those_before_it(where: str) -> None:
    stores = make(where, R2SP(slack=0.0), 3)
    for turn in range(6):
        following = stores[(turn + 1) % 3]
        with pytest.raises(TimedOut):
            following.await_turn(0.0)
        stores[turn % 3].await_turn(10.0)
        push(stores[turn % 3])
    assert [rank.pushes for rank in stores[0].ranks()] == [2, 2, 2]
    assert stores[0].status().version == 6
    for store in stores:
        store.close()


@pytest.mark.parametrize("encoding", ["f32", "int8"])
def test_a_push_that_waited_too_long_for_its_turn_brings_its_gradient_again(
    where: str, encoding: str
) -> None:
    stores = make(where, R2SP(slack=0.0), 2)
    staging = stores[1].stage()
    staging.flat[:] = 5.0
    with pytest.raises(TimedOut):
        stores[1].push(staging, 1, HYPER, timeout=0.05, encoding=encoding)
    push(stores[0])
    before = stores[0].snapshot().parameters
    staging.flat[:] = 3.0  # nothing of it was staged
    assert stores[1].push(staging, 1, HYPER, encoding=encoding).version == 2
    np.testing.assert_allclose(stores[0].snapshot().tensors["w"], 4 * before[:8], rtol=1e-5)
    for store in stores:
        store.close()


def test_pushes_that_waited_too_long_leave_their_buffers_free(where: str) -> None:
    stores = make(where, R2SP(slack=0.0), 2)
    gradient = np.ones(stores[1].layout.flat_elements, np.float32)
    for _ in range(stores[1].layout.staging_buffers + 1):
        with pytest.raises(TimedOut):
            stores[1].push(None, 1, HYPER, timeout=0.01, gradient=gradient)
    push(stores[0])
    assert stores[1].push(None, 1, HYPER, gradient=gradient).version == 2
    for store in stores:
        store.close()


class Turning:
    """A store behind a server, whose first turn does not come."""

    servers, rank = 1, 0

    def __init__(self) -> None:
        self.turns, self.sent = 0, 0

    def policy_needs(self) -> Any:
        return R2SP().needs

    def await_turn(self) -> None:
        self.turns += 1
        if self.turns == 1:
            raise TimedOut("await_turn", "it did not come")

    def begin_transfer(self, _: object) -> Any:
        self.sent += 1

    def start(self) -> None: ...


def test_behind_a_gradient_whose_turn_did_not_come_none_leaves() -> None:
    """It would be taken for the one that did not leave, whose samples the worker still has."""
    store: Any = Turning()
    client = StoreClient(store, Codec.F32, budget=None)
    request = PushRequest(0, 1, (HYPER,))
    for _ in range(2):
        with pytest.raises(TimedOut):
            client.begin_transfer(TransferRequest(request))
    assert store.sent == 0
    client.claim()
    client.begin_transfer(TransferRequest(request))
    assert store.sent == 1


@pytest.mark.parametrize("policy", [ASP(), BSP()])
def test_without_turns_there_is_nothing_to_wait_for(shm: Path, policy: object) -> None:
    (store,) = make("one", policy, 1)
    store.await_turn(0.0)
    push(store)
    store.close()


def test_the_wait_for_a_turn_is_no_computing(shm: Path) -> None:
    """The ring's period follows from what steps cost: a wait in it would lengthen all later ones."""
    stores = make("ring", R2SP(slack=0.0), 2)
    for _ in range(4):
        waiting = threading.Thread(target=stores[1].await_turn, args=(20.0,))
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
        stores[0].await_turn()
        push(stores[0])
        waiting.join(20.0)
        push(stores[1])
    slowest = 0.35  # rank 0's cycle, which really takes so long
    assert 0 < stores[0].status().period_nanoseconds * 1e-9 < slowest
    assert stores[0].costs()[1].sample_seconds < 0.1
    for store in stores:
        store.close()
