"""A hostile key plays every verb with another's identity: the other trains on, exactly and in time."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile import CASES, VERBS, Attacker, Known
from shard_tools import CHUNK, address_of

from pyps.native.values import Hyper
from pyps.remote import create_store
from pyps.remote.address import Address, parse_servers
from pyps.remote.keys import KeyFolder
from pyps.remote.server import Server
from pyps.shards.sharded import ShardedBackend
from pyps.store import Store

ELEMENTS = 4 * CHUNK
OPTIONS: dict[str, Any] = {
    "batches": [4],
    "policy": "asp:scaling=none",
    "optimizer": "adam",
    "chunk_params": CHUNK,
}
SLOWEST_SECONDS = 1.0
ATTACKERS = 3


def test_every_verb_has_a_case() -> None:
    assert CASES.keys() == VERBS.keys()


@contextmanager
def servers(folder: Path, count: int) -> Iterator[tuple[str, list[Server]]]:
    """Servers with the same keys; their address, without a key file."""
    keys = KeyFolder.open(folder)
    for name in ("victim", "hostile", "second"):
        keys.add(name)
    with ExitStack() as stack:
        found = [stack.enter_context(Server("model", keys=folder))]
        home = f"{found[0].address}?keys={folder / 'second.key'}"
        found += [stack.enter_context(Server("model", keys=folder, home=home)) for _ in range(count - 1)]
        yield address_of(*(one.address for one in found)).partition("?")[0], found


@dataclass
class Victim:
    """Trains alone; its slowest call, and why it ended if it should not have."""

    store: Store
    steps: int = 0
    slowest: float = 0.0
    errors: list[BaseException] = field(default_factory=list)

    def train(self, until: threading.Event) -> None:
        try:
            while not until.is_set() or self.steps < 5:
                self.step()
        except BaseException as error:
            self.errors.append(error)

    def step(self) -> None:
        draw = np.random.default_rng(self.steps)
        claim = self.timed(self.store.start)
        self.timed(self.store.pull)
        staging = self.store.stage()
        staging.flat[:] = draw.normal(size=staging.flat.shape)
        self.timed(lambda: self.store.push(staging, claim.count, Hyper(lr=0.01)))
        self.steps += 1

    def timed(self, call: Callable[[], Any]) -> Any:
        began = time.monotonic()
        found = call()
        self.slowest = max(self.slowest, time.monotonic() - began)
        return found


def known_of(store: Store) -> Known:
    calls = store.backend
    if isinstance(calls, ShardedBackend):
        sessions = (calls.client.session, *(shard.session for shard in calls._shards))
        return Known(calls._layouts[0].flat_elements, sessions, 0, calls._client, calls._cut.run)
    return Known(store.layout.flat_elements, (calls.client.session,))  # type: ignore[attr-defined]


def alone(steps: int) -> np.ndarray[Any, Any]:
    """The parameters of the same steps on a store of this machine."""
    with Store.create("alone", {"w": np.zeros(ELEMENTS)}, **OPTIONS) as store:
        store.join(0)
        victim = Victim(store)
        for _ in range(steps):
            victim.step()
        return store.snapshot().parameters


def attack(attacker: Attacker, seed: int, calls: int) -> None:
    draw, names = random.Random(seed), list(VERBS)
    for k in range(calls):
        attacker.play(names[k % len(names)] if k < len(names) else draw.choice(names))


@contextmanager
def attacked(hostile: tuple[Address, ...], known: Known, calls: int) -> Iterator[list[Attacker]]:
    """Attackers that make so many calls, some at a time, meanwhile."""
    with ExitStack() as stack:
        players = [stack.enter_context(Attacker(hostile, known, seed)) for seed in range(ATTACKERS)]
        threads = [
            threading.Thread(target=attack, args=(player, seed, calls // ATTACKERS))
            for seed, player in enumerate(players)
        ]
        for thread in threads:
            thread.start()
        try:
            yield players
        finally:
            for thread in threads:
                thread.join()


def hold(folder: Path, count: int, calls: int) -> None:
    tensors = {"w": np.zeros(ELEMENTS)}
    with (
        servers(folder, count) as (address, found),
        create_store(f"{address}?keys={folder / 'victim.key'}", tensors, **OPTIONS) as store,
    ):
        store.join(0)
        victim, done = Victim(store), threading.Event()
        training = threading.Thread(target=victim.train, args=(done,))
        training.start()
        hostile = parse_servers(f"{address}?keys={folder / 'hostile.key'}")
        with attacked(hostile, known_of(store), calls) as players:
            pass
        done.set()
        training.join()
        assert not victim.errors
        assert store.status().version == victim.steps
        np.testing.assert_array_equal(store.snapshot().parameters, alone(victim.steps))
        assert [server.counters.faults for server in found] == [0] * count
        assert sum(p.answered + p.refused for p in players) == ATTACKERS * (calls // ATTACKERS)
        print(f"{calls} calls, {victim.steps} steps, slowest {victim.slowest:.3f} s")
        assert victim.slowest < SLOWEST_SECONDS


@pytest.mark.promise("is an error for its sender alone")
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.promise("act as another key's session or worker")
def test_another_trains_on_exactly(shm: Path, tmp_path: Path, count: int) -> None:
    hold(tmp_path / "keys", count, 3 * len(VERBS))


@pytest.mark.thorough
@pytest.mark.parametrize("count", [1, 2])
def test_another_trains_on_exactly_through_10_000_calls(shm: Path, tmp_path: Path, count: int) -> None:
    hold(tmp_path / "keys", count, 10_000)
