"""Parts of a remote store's parameters: as those of a local one, whatever a client says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from remote_tools import RawClient, pushing

from pyps import Hyper
from pyps.errors import InvalidArgument, NotFinite
from pyps.native.values import Codec, Encoding, Role
from pyps.remote import open_store
from pyps.remote.server import Server
from pyps.remote.wire import PROTOCOL, Answer, Failure, PushHeader
from pyps.store import Store

TABLE, BIAS = (400, 10), 7  # two groups, each with a gap behind it
FLAT = 4096 + 1024
HYPER = (Hyper(lr=1.0), Hyper(lr=0.5))


def create(policy: str = "asp") -> Store:
    rng = np.random.default_rng(0)
    initial = {"table": rng.standard_normal(TABLE), "bias": rng.standard_normal(BIAS)}
    options: dict[str, Any] = {"groups": {"table": 0, "bias": 1}, "chunk_params": 1024}
    return Store.create("parts", initial, batches=[4], policy=policy, **options)


@pytest.fixture
def store(shm: Path) -> Iterator[Store]:
    with create() as one:
        yield one


@pytest.fixture
def server(store: Store) -> Iterator[Server]:
    with Server("parts", "tcp://127.0.0.1:*", insecure=True) as one:
        yield one


@st.composite
def some_ranges(draw: st.DrawFn) -> list[tuple[int, int]]:
    edges = sorted(draw(st.sets(st.integers(0, FLAT), min_size=2, max_size=12)))
    return [(a, b - a) for a, b in zip(edges[::2], edges[1::2], strict=False)]


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ranges=some_ranges())
def test_pulls_and_reads_are_those_of_the_store(
    store: Store, server: Server, ranges: list[tuple[int, int]]
) -> None:
    with Store.open("parts") as local, open_store(server.address) as remote:
        local.join(role="observer")
        remote.join(role="observer")
        for strict in (False, True):
            found, version = remote.pull(ranges=ranges, strict=strict)
            expected, there = local.pull(ranges=ranges, strict=strict)
            np.testing.assert_array_equal(found, expected)
            assert version == there
        for parts in (ranges, None):
            shown: list[list[tuple[int, list[float]]]] = [[], []]
            for one, into in zip((local, remote), shown, strict=True):
                one.read(lambda first, values, into=into: into.append((first, values.tolist())), ranges=parts)
            assert shown[0] == shown[1]


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ranges=some_ranges(), given_apart=st.booleans(), policy=st.sampled_from(["asp", "bsp"]))
def test_pushes_do_what_they_do_here(
    shm: Path, ranges: list[tuple[int, int]], given_apart: bool, policy: str
) -> None:
    found = []
    rng = np.random.default_rng(1)
    gradient = rng.standard_normal(FLAT).astype(np.float32)
    for far in (False, True):
        with create(policy) as store, Server("parts", "tcp://127.0.0.1:*", insecure=True) as server:
            one = open_store(server.address) if far else store
            one.join(0)
            one.start()
            staging = one.stage()
            options: dict[str, Any] = {}
            if given_apart:
                options["gradient"] = np.concatenate([gradient[a : a + n] for a, n in ranges])
            else:
                np.copyto(staging.flat, gradient)
            assert one.push(staging, 4, HYPER, ranges=ranges, **options).version == 1
            found.append(store.pull(strict=True)[0])
            if far:
                one.close()
    np.testing.assert_array_equal(*found)


def test_what_is_not_finite_is_refused_there_too(store: Store, server: Server) -> None:
    with open_store(server.address) as remote:
        remote.join(0)
        remote.start()
        staging = remote.stage()
        staging.flat.fill(1.0)
        staging.flat[[3, 4050]] = np.nan  # the second one in a gap
        with pytest.raises(NotFinite):
            remote.push(staging, 4, HYPER, ranges=[[0, 5]])
        with pytest.raises(InvalidArgument, match="codec"):
            remote.push(staging, 4, HYPER, ranges=[[0, 5]], encoding="int8")
        skipping = Encoding(Codec.F32, nonfinite="zero")
        assert remote.push(staging, 4, HYPER, ranges=[[0, 5]], encoding=skipping).version == 1
        assert np.isfinite(store.pull(strict=True)[0]).all()


WRONG: dict[str, Any] = {
    "outside": [(FLAT, 1)],
    "too long": [(0, FLAT + 1)],
    "one that wraps": [(8, 2**64 - 1)],
    "backwards": [(10, 5), (0, 5)],
    "upon another": [(0, 10), (9, 5)],
    "the same again and again": [(0, FLAT)] * 40,
    "empty": [(3, 0)],
    "none": [],
    "too many": [(k, 1) for k in range(FLAT)],
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_ranges_are_refused_and_take_no_memory(store: Store, server: Server, case: str) -> None:
    numbers = np.array(WRONG[case], np.uint64).reshape(-1, 2)
    push = PushHeader(4, HYPER, 1.0, 0.0, Encoding(Codec.F32), ranges=len(numbers))
    calls: dict[str, tuple[Any, ...]] = {
        "pull": (Codec.F32, len(numbers)),
        "read": (len(numbers), 1.0),
        "transfer": (pushing(push),),
    }
    with RawClient(server.address) as client:
        assert isinstance(client.ask("hello", PROTOCOL, "parts"), Answer)
        client.ask("join", Role.WORKER, 0)
        client.ask("start", 0.0)
        for verb, arguments in calls.items():
            if case == "too many" and verb != "transfer":
                continue  # a pull may be of any number of ranges
            client.send(client.message(verb, *arguments, follow=numbers.nbytes), numbers.tobytes())
            reply = client.reply()
            assert isinstance(reply, Failure), verb
            assert reply.code == "PYPS_EINVAL"
        assert isinstance(client.ask("status"), Answer)
    assert store.status().version == 0


def test_numbers_that_do_not_fit_the_ranges(store: Store, server: Server) -> None:
    ranges = np.array([(0, 8)], np.uint64)
    with RawClient(server.address) as client:
        assert isinstance(client.ask("hello", PROTOCOL, "parts"), Answer)
        client.ask("join", Role.WORKER, 0)
        client.ask("start", 0.0)
        for count, data in ((1, ranges[:, :1]), (2, ranges), (1, np.zeros(6, np.uint64)), (2**31, ranges)):
            client.send(
                client.message("pull", Codec.F32, count, follow=data.nbytes), np.ascontiguousarray(data)
            )
            assert isinstance(client.reply(), Failure)
        for values in (0, 7, 9):
            push = PushHeader(4, HYPER, 1.0, 0.0, Encoding(Codec.F32), ranges=1)
            data = ranges.tobytes() + bytes(4 * values)
            client.send(client.message("transfer", pushing(push), follow=len(data)), data)
            assert isinstance(client.reply(), Failure)
        push = PushHeader(4, HYPER, 1.0, 0.0, Encoding(Codec.F32), ranges=1)
        client.send(client.message("transfer", pushing(push), follow=16 + 32), ranges.tobytes() + bytes(32))
        assert isinstance(client.reply(), Answer)
    assert store.status().version == 1
