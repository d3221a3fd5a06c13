"""A push after one that timed out: the same once more, or that of another step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyps import Hyper, Store
from pyps.errors import InvalidArgument, NotFinite, TimedOut

SIZE = 8
ONE = Hyper(lr=1.0)


@pytest.fixture
def workers(request: pytest.FixtureRequest, shm: Path) -> Iterator[tuple[Store, Store]]:
    """Two of a store, each with a step begun."""
    options: dict[str, Any] = {"batches": [1, 1], "policy": request.param, "chunk_params": 1024}
    with (
        Store.create("again", {"w": np.zeros(SIZE, np.float32)}, **options) as one,
        Store.open("again") as two,
    ):
        for worker in (one, two):
            worker.join()
        for worker in (one, two):
            worker.start()
        yield one, two


def gradient(store: Store, value: float) -> Any:
    return np.full(store.layout.flat_elements, value, np.float32)


def value(store: Store) -> float:
    return float(store.pull()[0][0])


@pytest.mark.parametrize("workers", ["bsp"], indirect=True)
def test_a_push_without_a_buffer_goes_on_with_its_own(workers: tuple[Store, Store]) -> None:
    one, two = workers
    for _ in range(3):
        with pytest.raises(TimedOut):
            one.push(None, 1, ONE, timeout=0.01, gradient=gradient(one, 1.0))
    two.push(None, 1, ONE, gradient=gradient(two, 3.0))
    result = one.push(None, 1, ONE, gradient=gradient(one, 1.0))
    assert (result.version, result.sources, value(one)) == (1, 2, -2.0)


@pytest.mark.parametrize("workers", ["r2sp:slack=0"], indirect=True)
def test_a_push_that_waits_for_its_turn_keeps_its_buffer(workers: tuple[Store, Store]) -> None:
    one, two = workers
    for _ in range(3):
        with pytest.raises(TimedOut):
            two.push(None, 1, ONE, timeout=0.01, gradient=gradient(two, 1.0))
    with pytest.raises(NotFinite):
        two.push(None, 1, ONE, timeout=0.01, gradient=gradient(two, np.nan))
    assert one.push(None, 1, ONE, gradient=gradient(one, 1.0)).version == 1
    one.pull()
    assert two.push(None, 1, ONE, gradient=gradient(two, 1.0)).version == 2
    buffers = [two.stage(), two.stage()]
    assert {buffer.index for buffer in buffers} == {0, 1}


@pytest.mark.parametrize("workers", ["bsp"], indirect=True)
@pytest.mark.parametrize("named", [False, True])
def test_the_next_step_has_its_own_gradient(workers: tuple[Store, Store], named: bool) -> None:
    """Though no call has asked for the outcome of the push that timed out."""
    one, two = workers
    for version in (1, 2):
        staging = one.stage() if named else None
        with pytest.raises(TimedOut):
            one.push(staging, 1, ONE, timeout=0.01, gradient=gradient(one, version))
        assert two.push(None, 1, ONE, gradient=gradient(two, version)).version == version
        for worker in (one, two):
            worker.start()
        if staging is not None:
            with pytest.raises(InvalidArgument, match="expected one that pyps_stage returned"):
                one.push(staging, 1, ONE, gradient=gradient(one, 100.0))
    assert value(two) == -3.0


@pytest.mark.parametrize("workers", ["r2sp:slack=0"], indirect=True)
def test_what_timed_out_has_waited_not_computed(workers: tuple[Store, Store]) -> None:
    one, two = workers
    with pytest.raises(TimedOut):
        two.push(None, 1, ONE, timeout=0.3, gradient=gradient(two, 1.0))
    with pytest.raises(TimedOut):
        two.await_turn(timeout=0.1)
    one.push(None, 1, ONE, gradient=gradient(one, 1.0))
    one.pull()
    two.push(None, 1, ONE, gradient=gradient(two, 1.0))
    assert 0 < two.costs()[1].sample_seconds < 0.2
