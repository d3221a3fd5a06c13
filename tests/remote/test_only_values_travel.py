"""The ends of chunks, where no parameter lies, do not cross the link, and both ends take them for zero."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from shard_tools import serving

from pyps import Hyper
from pyps.errors import InvalidArgument
from pyps.native.values import Codec
from pyps.remote import create_store, open_store
from pyps.remote.framing import FRAME_BYTES, from_frames, to_frames
from pyps.remote.parts import Extents
from pyps.remote.server import Server
from pyps.store import Store
from pyps.store.codec import encode, encoded_bytes

SHARE = 1.05  # of the values' bytes; the scales of a codec's blocks are values
HEADERS = 700  # bytes of a step's messages with one server, one way, beside their numbers
ONE = Hyper(lr=1.0)
CODECS = ("f32", "bf16", "f16", "int8", "int4", "nf4")


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("codec", ["f32", "int8"])
@pytest.mark.parametrize("parameters", [1_000, 8_192, 100_000, 1_000_000])
def test_a_step_sends_its_values_and_no_more(shm: Path, servers: int, codec: str, parameters: int) -> None:
    tensors = {"a": np.zeros(parameters - 15), "b": np.zeros(15)}
    options: dict[str, Any] = {"batches": [1], "policy": "asp", "groups": {"b": 1}}
    values = {"f32": 4 * parameters, "int8": parameters + 4 * -(-parameters // 256)}[codec]
    most = HEADERS * (1 + servers * (servers > 1))
    with serving(servers) as (address, _), create_store(address, tensors, **options) as store:
        store.join()
        claim, staging = store.start(), store.stage()
        sent, received = store.traffic.sent, store.traffic.received
        staging.flat[:] = 1.0
        store.push(staging, claim.count, [ONE, ONE], encoding=codec)
        store.pull(codec=codec)
        assert values <= store.traffic.sent - sent <= SHARE * values + most
        assert values <= store.traffic.received - received <= SHARE * values + most
        received, snapshot = store.traffic.received, store.snapshot()
        assert store.traffic.received - received <= SHARE * 4 * parameters + most
        assert {set(one.tolist()) == {-1.0} for one in snapshot.tensors.values()} == {True}


@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
def test_codecs_that_alternate_leave_nothing_behind_in_the_ends(shm: Path, optimizer: str) -> None:
    """A buffer holds the push before: what is in the ends would count in the norm that is clipped."""
    sizes = {"a": 1_070, "b": 33, "c": 257, "mean": 70}
    options: dict[str, Any] = {"groups": {"b": 1, "c": 2, "mean": 3}, "averaged": ["mean"], "batches": [1]}
    options |= {"policy": "asp", "optimizer": optimizer, "chunk_params": 1024}
    found: list[list[NDArray[np.float32]]] = []
    for k in range(2):
        tensors = {name: np.linspace(-1.0, 1.0, size) for name, size in sizes.items()}
        with Store.create(f"model-{k}", tensors, **options) as store, Server(store.name) as server:
            with open_store(server.address if k else store.name) as worker:
                worker.join()
                found.append(train(worker))
            found[-1] += [*store.snapshot().tensors.values()]
    for near, far in zip(*found, strict=True):
        np.testing.assert_array_equal(near, far)


def train(worker: Store) -> list[NDArray[np.float32]]:
    """Push and pull in each codec; all that was pulled."""
    draw, found = np.random.default_rng(5), []
    for codec in (*CODECS, *reversed(CODECS)):
        claim, staging = worker.start(), worker.stage()
        staging.flat[:] = 0.0
        for view in worker.views(staging.flat).values():
            view[:] = draw.standard_normal(view.size)
        hyper = Hyper(lr=0.1, weight_decay=0.01, clip_norm=0.5)
        worker.push(staging, claim.count, [hyper] * 4, encoding=codec)
        found.append(worker.pull()[0])
        found.append(worker.pull_encoded(codec)[0])
    return found


@pytest.mark.parametrize("codec", CODECS)
def test_what_travels_is_the_codes_of_the_values(codec: str) -> None:
    """The codes are those of each group by itself; the rest is what zeros are encoded as."""
    kind, chunk, sizes = Codec[codec.upper()], 1024, (1_024, 300, 2_049, 7)
    firsts = [0, 1_024, 2_048, 5_120]
    extents = Extents(tuple((a, a + n) for a, n in zip(firsts, sizes, strict=True)), 5_120, 5_120 + chunk)
    flat = np.zeros(extents.elements, np.float32)
    draw = np.random.default_rng(2)
    for a, b in extents.parts:
        flat[a:b] = draw.standard_normal(b - a)
    codes, _ = encode(flat[: extents.trained], kind)
    vector = (codes, flat[extents.trained :]) if kind is not Codec.F32 else (flat,)
    held = extents.held(vector, kind)
    own = [encode(flat[a:b], kind)[0] for a, b in extents.parts[:3]]
    assert sum(part.size for part in held) == extents.size(kind) <= sum(one.size for one in own) + 4 * 7
    whole = np.concatenate([array.view(np.uint8) for array in vector])
    arrived = np.full(whole.size, 0xAA, np.uint8)
    frames = [bytes(frame) for frame in to_frames(held)]
    extents.fill("pull", frames, (arrived,), codec=kind)
    np.testing.assert_array_equal(arrived, whole)
    assert whole.size == encoded_bytes(kind, 5_120) + 4 * chunk
    before = arrived.copy()
    for wrong in ([*frames, b"x"], [frames[0][:-1]], []):
        with pytest.raises(InvalidArgument, match="numbers: found"):
            extents.fill("pull", wrong, (arrived,), codec=kind)
    np.testing.assert_array_equal(arrived, before)


def test_frames_are_few_however_many_arrays_there_are() -> None:
    draw, whole = np.random.default_rng(1), FRAME_BYTES
    for sizes in (
        [0],
        [5, 0, 7],
        [whole, 3],
        [3, 2 * whole, 1],
        [1] * 3000,
        [whole - 1, 1, 9],
        [whole + 1] * 5,
    ):
        arrays = [draw.integers(0, 256, size).astype(np.uint8) for size in sizes]
        frames, total = to_frames(arrays), sum(sizes)
        assert len(frames) <= 2 * (total // whole) + 2
        assert all(0 < len(frame) <= whole for frame in frames)
        out = np.empty(total, np.uint8)
        from_frames("call", frames, out)
        np.testing.assert_array_equal(out, np.concatenate(arrays))
