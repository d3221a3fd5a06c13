"""Parameters kept as bf16: rounded at random after each step, a function of seed, version and place alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import pyps
from pyps import errors
from pyps.checkpoint import state as checkpoints
from pyps.native.values import Agreement, Codec, Hyper, Optimizer
from pyps.remote import create_store
from pyps.remote.server import Server
from pyps.store import Store
from pyps.store.codec import decode, decode_vector, encode

pytestmark = pytest.mark.usefixtures("shm")
Floats = NDArray[np.float32]
SEED, SIZE, CHUNK = 2**40 + 9, 2500, 1024
ASP = "asp:scaling=none"


def rounded(values: Floats, seed: int, version: int, first: int = 0) -> Floats:
    """The store's rounding, from its description: Philox4x32-7, half a word for each value."""
    at = np.arange(first, first + values.size, dtype=np.uint64)
    group, place = at // 128, at % 128
    lane, word, upper = place % 16, place % 64 // 16, place // 64
    counter = 16 * group + lane
    c = [
        counter & 0xFFFFFFFF,
        counter >> 32,
        *(np.full_like(at, part) for part in divmod(version, 2**32)[::-1]),
    ]
    key = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint64)
    for _ in range(7):
        first_product, second_product = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [
            (second_product >> 32) ^ c[1] ^ key[0],
            second_product & 0xFFFFFFFF,
            (first_product >> 32) ^ c[3] ^ key[1],
            first_product & 0xFFFFFFFF,
        ]
        key = (key + np.array([0x9E3779B9, 0xBB67AE85], np.uint64)) & 0xFFFFFFFF
    noise = np.choose(word.astype(int), c) >> (16 * upper) & 0xFFFF
    bits = values.view(np.uint32).astype(np.uint64) + noise
    return (bits & 0xFFFF0000).astype(np.uint32).view(np.float32)


def nearest(values: Floats) -> Floats:
    bits = values.view(np.uint32).astype(np.uint64)
    kept = bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000
    return kept.astype(np.uint32).view(np.float32)


def normal(seed: int, size: int = SIZE) -> Floats:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def made(tensors: dict[str, Any], **options: Any) -> Store:
    options = {"batches": [1], "policy": ASP, "chunk_params": CHUNK, "master": "bf16"} | options
    return Store.create("master", tensors, agreement=Agreement(seed=SEED), **options)


def push(store: Store, gradient: Floats, hyper: Hyper, **options: Any) -> None:
    store.start()
    store.push(None, 1, hyper, gradient=gradient, **options)


def test_each_step_is_rounded_as_described() -> None:
    start, lr = normal(0), 0.01
    with made({"w": start}) as store:
        assert store.layout.master is Codec.BF16
        store.join()
        here = nearest(start)
        assert store.views(store.pull()[0])["w"].tobytes() == here.tobytes()
        for version in range(1, 5):
            gradient = np.zeros(store.layout.flat_elements, np.float32)
            gradient[:SIZE] = normal(version)
            push(store, gradient, Hyper(lr=lr))
            here = rounded(here - np.float32(lr) * gradient[:SIZE], SEED, version)
            assert store.views(store.pull()[0])["w"].tobytes() == here.tobytes()
        part = np.array([[1500, 900]], np.uint64)  # of two chunks, from the middle of a block on
        push(store, normal(9, 900), Hyper(lr=lr), ranges=part)
        here[1500:2400] = rounded(here[1500:2400] - np.float32(lr) * normal(9, 900), SEED, 5, 1500)
        assert store.views(store.pull()[0])["w"].tobytes() == here.tobytes()


@pytest.mark.parametrize("optimizer", Optimizer)
def test_every_way_out_shows_the_same(optimizer: Optimizer) -> None:
    """Pulls, exchanges, encoded pulls, ranges, snapshots and reads, looking ahead where there is momentum."""
    tensors = {"w": normal(0), "mean": normal(1, 70)}
    options: dict[str, Any] = {"groups": {"mean": 1}, "averaged": ["mean"], "optimizer": optimizer}
    with made(tensors, batches=[2, 2], policy="asp", **options) as store, Store.open("master") as other:
        store.join()
        other.join()
        flat = np.zeros(store.layout.flat_elements, np.float32)
        hyper = [Hyper(lr=0.01, momentum=0.9), Hyper(lr=0.1)]
        for k in range(3):
            for worker in (other, store):
                worker.start()
                staging = worker.stage()
                staging.flat[:] = 0
                staging["w"][:], staging["mean"][:] = normal(10 + k), normal(20 + k, 70)
                worker.exchange(staging, 2, hyper, flat)
            assert store.pull()[0].tobytes() == flat.tobytes()
        assert np.any(other.pull()[0] != store.pull(strict=True)[0]) == (optimizer in (1, 2, 3))
        trained = store.layout.trained_elements
        for codec in (Codec.BF16, Codec.INT8):
            sent = decode_vector(store.pull_encoded(codec)[0], codec, store.layout)
            alone, _ = encode(flat[:trained], codec)
            assert np.array_equal(sent, np.r_[decode(alone, codec, trained), flat[trained:]])
        part = np.array([[3, 40], [1000, 60], [trained + 1, 9]])
        pieces = np.concatenate([flat[first : first + count] for first, count in part])
        assert store.pull(ranges=part)[0].tobytes() == pieces.tobytes()
        shown = np.zeros_like(flat)
        store.read(lambda first, values: shown.__setitem__(slice(first, first + values.size), values))
        strict, _ = store.pull(strict=True)
        assert shown.tobytes() == strict.tobytes()
        assert not np.any(strict[:trained].view(np.uint32) & 0xFFFF)
        assert np.any(strict[trained:].view(np.uint32) & 0xFFFF)  # averaged tensors stay fp32


def test_small_steps_count_on_average() -> None:
    """Steps of 1/64 of the distance between two halves: to nearest, each would be lost."""
    step, pushes = np.float32(2.0**-13), 256
    with made({"w": np.ones(SIZE)}) as store:
        store.join()
        gradient = np.full(store.layout.flat_elements, -step, np.float32)
        for _ in range(pushes):
            push(store, gradient, Hyper(lr=1.0))
        values = store.views(store.pull()[0])["w"].astype(np.float64)
    assert nearest(np.float32([1 + step]))[0] == 1
    way = pushes * float(step)
    assert abs(values.mean() - 1 - way) < 5 * values.std() / SIZE**0.5 < 0.1 * way


def test_a_checkpoint_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """And a state of either kind goes on in a store of the other."""

    def drive(store: Store, steps: range) -> Floats:
        for k in steps:
            gradient = np.zeros(store.layout.flat_elements, np.float32)
            gradient[:SIZE] = normal(k)
            push(store, gradient, Hyper(lr=0.01))
        return store.pull(strict=True)[0]

    with made({"w": normal(0)}, optimizer="adamw") as store:
        store.join()
        drive(store, range(3))
        checkpoints.save(store.state(), tmp_path)
        expected = drive(store, range(3, 6))
    saved = checkpoints.load(tmp_path).state
    assert (saved.header.master, saved.header.rounding_seed) == (Codec.BF16, SEED)
    with Store.create("again", state=saved) as store:
        store.join()
        assert drive(store, range(3, 6)).tobytes() == expected.tobytes()
    with Store.create("wide", state=saved, master="f32") as store:
        assert store.layout.master is Codec.F32
        wide = store.state()
    with Store.create("narrow", state=wide, master="bf16") as store:
        assert store.state().parameters["w"].tobytes() == saved.parameters["w"].tobytes()


def test_a_chunk_takes_fewer_bytes() -> None:
    """Half of its parameters' memory; where tensors are averaged, plain SGD's is that of fp32."""
    whole, chunks = 32768, 20
    segment = Path(os.environ["PYPS_SHM_DIR"]) / "pyps-master"
    for optimizer, averaged in (("sgd", []), ("adamw", []), ("adamw", ["v"]), ("sgd", ["v"])):
        given = {"w": np.zeros(chunks * whole)} | {name: np.zeros(3) for name in averaged}
        options: dict[str, Any] = {"groups": dict.fromkeys(averaged, 1), "averaged": averaged}
        options |= {"chunk_params": whole, "snapshot_spares": 1, "max_participants": 1}
        sizes = {}
        for master in ("f32", "bf16"):
            with made(given, optimizer=optimizer, master=master, **options):
                sizes[master] = segment.stat().st_blocks * 512
        saved = 0 if averaged and optimizer == "sgd" else 2 * whole * (chunks + 1 + len(averaged))
        assert sizes["f32"] - sizes["bf16"] == saved


def test_what_is_refused() -> None:
    for master in ("f16", "int8", Codec.F16, "half"):
        with pytest.raises(errors.InputError, match=r"master: found .*; expected f32 or bf16"):
            made({"w": np.zeros(3)}, master=master)
    with made({"w": np.zeros(3)}), pytest.raises(errors.StoreError):
        pyps.Store.create("master", {"w": np.zeros(3)}, batches=[1])


def test_a_store_made_over_the_link_is_the_same(shm: Path) -> None:
    with Server("model", "tcp://127.0.0.1:*", insecure=True) as server:
        start, options = normal(0), {"batches": [1], "policy": ASP, "agreement": Agreement(seed=SEED)}
        with create_store(server.address, {"w": start}, master="bf16", **options) as store:
            assert store.layout.master is Codec.BF16
            store.join()
            gradient = np.zeros(store.layout.flat_elements, np.float32)
            gradient[:SIZE] = normal(1)
            push(store, gradient, Hyper(lr=0.01))
            expected = rounded(nearest(start) - np.float32(0.01) * gradient[:SIZE], SEED, 1)
            assert store.views(store.pull()[0])["w"].tobytes() == expected.tobytes()
            assert store.state().header.master is Codec.BF16
        with Store.open("model") as store:
            assert store.layout.master is Codec.BF16


def test_a_worker_says_how_its_store_keeps_parameters(shm: Path) -> None:
    model = torch.nn.Linear(6, 2)
    with pyps.join(store="kept", rank=0, batches=[8, 8]) as worker:
        worker.attach(model, master="bf16")
        assert worker.store.layout.master is Codec.BF16
        assert not np.any(worker.store.pull()[0].view(np.uint32) & 0xFFFF)
        refused = pytest.raises(errors.InputError, match="master: found f32; expected bf16, as in the store")
        with pyps.join(store="kept", rank=1, batches=[8, 8]) as other, refused:
            other.attach(torch.nn.Linear(6, 2), master="f32")
