"""A push that says what of its gradient is finite reads the rest alone, and is told if that was wrong."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from pyps import Hyper, Store
from pyps.errors import FalseLook, InvalidArgument, NotFinite
from pyps.native import finite
from pyps.native.ranges import tensor_ranges

SIZE = 3000  # of each tensor; together three chunks, the last one not full
CHUNK = 2048
ALL = [[0, 2 * SIZE]]


def store(name: str = "looked", **options: Any) -> Store:
    initial = {"a": np.ones(SIZE, np.float32), "b": np.ones(SIZE, np.float32)}
    return Store.create(name, initial, **{"batches": [4], "policy": "asp", "chunk_params": CHUNK, **options})


@pytest.fixture
def made(shm: Any) -> Iterator[Store]:
    with store() as one:
        one.join()
        yield one


def staged(one: Store, *, bad: int | None = None, value: float = np.nan) -> Any:
    """A gradient of ones, but for one value."""
    one.start()
    staging = one.stage()
    staging.flat.fill(1.0)
    if bad is not None:
        staging.flat[bad] = value
    return staging


@pytest.mark.parametrize("place", [0, CHUNK, SIZE - 1])
@pytest.mark.parametrize("looked", [None, [[SIZE, SIZE]], [[SIZE - 1 + 1, 10]], [[5, 20], [SIZE, 1]]])
def test_what_is_not_said_to_be_finite_is_looked_at(made: Store, looked: Any, place: int) -> None:
    with pytest.raises(NotFinite, match="'a'"):
        made.push(staged(made, bad=place), 4, Hyper(lr=1.0), looked=looked)
    assert made.status().version == 0


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("policy", ["asp", "bsp"])
def test_the_same_bits_with_and_without_a_look(shm: Any, policy: str, threads: int) -> None:
    found = []
    gradient = np.random.default_rng(0).standard_normal(2 * SIZE).astype(np.float32)
    for looked in (None, [[10, 2000]], ALL):
        with store(policy=policy, optimizer="adamw") as one:
            one.join()
            one.set_threads(threads)
            for _ in range(2):
                staging = staged(one)
                staging.flat[: 2 * SIZE] = gradient
                one.push(staging, 4, Hyper(lr=0.1, weight_decay=0.1), looked=looked)
            found.append(one.pull()[0].tobytes())
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("policy", ["asp", "bsp"])
@pytest.mark.parametrize("exchanges", [False, True])
@pytest.mark.parametrize("master", ["f32", "bf16"])
def test_a_false_look_is_told_and_changes_nothing_but_its_block(
    shm: Any, policy: str, value: float, exchanges: bool, master: Any
) -> None:
    hyper = Hyper(lr=0.5, clip=2.0)  # which makes something finite of an infinity
    taken = np.full(2 * SIZE, 0.5, np.float32)
    taken[CHUNK : CHUNK + 1024] = 1.0
    with store(policy=policy, master=master) as one:
        one.join()
        staging, flat = staged(one, bad=CHUNK + 7, value=value), np.empty(3 * CHUNK, np.float32)
        call = partial(one.exchange, out=flat) if exchanges else one.push
        with pytest.raises(FalseLook, match="looked"):
            call(staging, 4, hyper, looked=ALL)
        assert one.status().version == 1
        np.testing.assert_array_equal(one.pull()[0][: 2 * SIZE], taken)
        assert one.push(staged(one), 4, hyper, looked=ALL).version == 2  # it goes on
        np.testing.assert_array_equal(one.pull()[0][: 2 * SIZE], taken - 0.5)


def test_in_a_round_the_one_with_the_false_look_is_told(shm: Any) -> None:
    from threading import Thread

    told: dict[int, bool] = {}
    with store(policy="bsp", batches=[2, 2]) as one, Store.open("looked") as other:
        one.join(0)
        other.join(1)

        def push(number: int, worker: Store) -> None:
            staging = staged(worker, bad=3 if number else None)
            try:
                worker.push(staging, 2, Hyper(lr=1.0), looked=ALL)
                told[number] = False
            except FalseLook:
                told[number] = True

        threads = [Thread(target=push, args=pair) for pair in enumerate((one, other))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert told == {0: False, 1: True}
        pulled = one.pull()[0]
        assert (pulled[:1024] == 0.5).all()
        assert (pulled[1024 : 2 * SIZE] == 0).all()


def test_what_looks_anyway_does_not_believe(shm: Any, made: Store) -> None:
    """A norm, an encoder, a copy, averaged tensors, and a round that no call waits for."""
    ways: list[dict[str, Any]] = [
        {"hyper": Hyper(lr=1.0, clip_norm=1.0)},
        {"encoding": "int8"},
        {"gradient": np.full(3 * CHUNK, np.nan, np.float32)},
    ]
    for way in ways:
        hyper = way.pop("hyper", Hyper(lr=1.0))
        staging = staged(made, bad=5)
        with pytest.raises(NotFinite):
            made.push(staging, 4, hyper, looked=ALL, **way)
        made.leave()
        made.join()
    with store("averaged", groups={"b": 1}, averaged=["b"]) as one, store("later", policy="softsync") as late:
        for worker, place in ((one, CHUNK * 2), (late, 3)):
            worker.join()
            with pytest.raises(NotFinite):
                worker.push(staged(worker, bad=place), 4, (Hyper(lr=1.0),) * worker.layout.groups, looked=ALL)


def test_ranges_are_checked(made: Store) -> None:
    staging = staged(made)
    for wrong in ([[0, 3 * CHUNK + 1]], [[10, 5], [12, 3]], [[5, 0]]):
        with pytest.raises(InvalidArgument, match="looked"):
            made.push(staging, 4, Hyper(lr=1.0), looked=wrong)
    every = tensor_ranges(made.tensors, ["b", "a"])
    assert made.push(staging, 4, Hyper(lr=1.0), looked=every).version == 1


@pytest.mark.parametrize("count", [0, 1, 7, 64, 1000])
def test_finite_says_whether_all_are(count: int) -> None:
    values = np.full(count, 3e38, np.float32)
    assert finite(values)
    for place in {0, count // 2, count - 1} if count else ():
        for value in (np.nan, np.inf, -np.inf):
            other = values.copy()
            other[place] = value
            assert not finite(other)
