"""The way of a worker's values: to the store, and to a peer."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from pyps.errors import InputError
from pyps.worker import link_speed as link

pytestmark = pytest.mark.slow

SIZES = (4096, 65536, 1 << 20, 1 << 23)


def test_the_way_to_the_store(shm: Path) -> None:
    found = link.probe_store(SIZES, repeats=3)
    assert found.via == "store"
    assert 0 <= found.latency_seconds < 1
    assert 1e6 < found.bytes_per_second < 1e13


def test_a_worker_whose_steps_seem_no_slower_than_torchs(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time torch on a machine that is busier meanwhile: the difference says that the way is free."""
    steps = 3 + link.WARM_UP
    alone, worked = itertools.repeat(0.010, steps), itertools.repeat(0.009, steps)
    clock = itertools.accumulate([*alone, *worked] * len(SIZES))
    monkeypatch.setattr(link, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert 1e6 < link.probe_store(SIZES, repeats=3).bytes_per_second < 1e13


def test_the_way_to_a_peer() -> None:
    found = link.probe_group(None, SIZES, repeats=3)
    assert found.via == "gloo"
    assert 0 < found.bytes_per_second < 1e13


@pytest.mark.parametrize("address", ["nowhere", "host:", "host:99999", ":80"])
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(InputError, match="host:port"):
        link.probe_group(address)


def test_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "TIMEOUT_SECONDS", 1.0)
    caught: list[BaseException] = []

    def ask() -> None:
        with pytest.raises(InputError, match="--answer") as raised:
            link.probe_group("127.0.0.1:9")
        caught.append(raised.value)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(30)
    assert caught
