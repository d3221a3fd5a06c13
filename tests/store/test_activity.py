"""Test what a member does at the moment, as an observer sees it: its wait, its claim's age, its bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from threads import background

from pyps.native.status import Member, MemberState, WaitKind
from pyps.native.values import Codec, Encoding, Hyper
from pyps.remote import open_store
from pyps.remote.server import Server
from pyps.store import Store
from pyps.store.codec import encoded_bytes

PATIENCE_SECONDS = 20.0
HYPER = Hyper(lr=0.1)


@pytest.fixture
def pair(shm: Path) -> Iterator[tuple[Store, Store, Store]]:
    """Two workers and a handle that only looks."""
    with (
        Store.create("pair", {"w": np.zeros(1000)}, batches=[3, 5]) as first,
        Store.open("pair") as second,
        Store.open("pair") as observer,
    ):
        first.join(0)
        second.join(1)
        yield first, second, observer


def member(observer: Store, rank: int) -> Member:
    """The rank's newest member."""
    return max((m for m in observer.members() if m.rank == rank), key=lambda m: m.id)


def eventually(observer: Store, rank: int, holds: Callable[[Member], bool]) -> Member:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds(found := member(observer, rank)):
        assert time.monotonic() < deadline, found
        time.sleep(0.002)
    return found


def push(store: Store, codec: Codec = Codec.F32) -> None:
    claim, staging = store.start(), store.stage()
    staging.flat.fill(0.5)
    store.push(staging, claim.count, HYPER, encoding=Encoding(codec))


def test_one_computes_the_other_waits_for_the_round(pair: tuple[Store, Store, Store]) -> None:
    slow, fast, observer = pair
    claim, staging = slow.start(), slow.stage()
    with background(lambda: push(fast)):
        waiting = eventually(observer, 1, lambda m: m.waits_for is WaitKind.ROUND and m.wait_seconds > 0.06)
        computing = member(observer, 0)
        assert (computing.waits_for, computing.wait_seconds) == (WaitKind.NOT, 0.0)
        assert computing.claim_seconds >= waiting.wait_seconds > 0.06
        assert waiting.staged
        slow.push(staging, claim.count, HYPER)
    done = member(observer, 1)
    assert (done.waits_for, done.wait_seconds) == (WaitKind.NOT, 0.0)
    assert 0.06 < done.waited_seconds <= done.joined_seconds
    assert member(observer, 0).step_seconds > 0.06


def test_bytes_as_they_are_encoded(pair: tuple[Store, Store, Store]) -> None:
    first, second, observer = pair
    whole, elements = first.layout.flat_elements, 1000
    with background(lambda: push(first, Codec.INT8)):
        push(second)
    first.pull()
    first.pull()
    second.pull_encoded(Codec.BF16, np.empty(encoded_bytes(Codec.BF16, whole), np.uint8))
    moved = [(m.bytes_pushed, m.bytes_pulled) for m in (member(observer, 0), member(observer, 1))]
    assert moved[0] == (encoded_bytes(Codec.INT8, elements), 8 * elements)
    assert moved[1] == (4 * elements, 2 * elements)


def test_a_rank_that_joins_again_starts_from_nothing(pair: tuple[Store, Store, Store]) -> None:
    first, _, observer = pair
    first.pull()
    before = member(observer, 0)
    first.leave()
    gone = member(observer, 0)
    assert (gone.state, gone.joined_seconds, gone.bytes_pulled) == (MemberState.LEFT, 0.0, 0)
    first.join(0)
    again = member(observer, 0)
    assert again.id != before.id
    assert (again.bytes_pulled, again.waited_seconds) == (0, 0.0)
    assert again.joined_seconds < PATIENCE_SECONDS


def test_the_same_over_a_link(pair: tuple[Store, Store, Store]) -> None:
    slow, fast, observer = pair
    claim, staging = slow.start(), slow.stage()
    with (
        Server("pair") as server,
        open_store(server.address) as remote,
        background(lambda: push(fast)),
    ):
        eventually(observer, 1, lambda m: m.waits_for is WaitKind.ROUND)
        assert member(remote, 1).waits_for is WaitKind.ROUND
        assert member(remote, 0).claim_seconds > 0.0
        slow.push(staging, claim.count, HYPER)
