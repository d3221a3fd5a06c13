"""Averaged tensors (BatchNorm's running statistics) against NumPy, and the constants in force."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled import examples

import pyps
from pyps.errors import InputError, InvalidArgument, NotFinite
from pyps.native.values import Codec, Encoding, Flat, Optimizer, PushResult
from pyps.store.codec import decode_vector, encoded_vector_bytes

pytestmark = pytest.mark.usefixtures("shm")

N, M = 1500, 700  # trained and averaged elements: more than one block, and no whole ones
LR = 0.25  # of the averaged group
HYPER = (pyps.Hyper(lr=0.1, weight_decay=0.5, clip=1e-3), pyps.Hyper(lr=LR))
WHOLE = (HYPER[0], pyps.Hyper(lr=1.0))
START = np.full(M, 0.3, np.float32)


def store_of(policy: str, batches: list[int], optimizer: str = "adamw") -> pyps.Store:
    return pyps.Store.create(
        "averaged",
        {"w": np.ones(N), "s": START},
        batches=batches,
        policy=policy,
        optimizer=optimizer,
        groups={"s": 1},
        averaged=["s"],
        chunk_params=1024,
    )


def opened(first: pyps.Store, count: int) -> list[pyps.Store]:
    """All ranks' handles of one store, joined."""
    stores = [first, *(pyps.Store.open(first.name) for _ in range(count - 1))]
    for rank, store in enumerate(stores):
        store.join(rank)
    return stores


def push(store: pyps.Store, gradient: Flat, values: Flat, samples: int, **options: Any) -> PushResult:
    """A gradient for the trained tensor, and this worker's values for the averaged one."""
    buffer = store.stage()
    buffer.flat.fill(0.0)
    buffer["w"][:], buffer["s"][:] = gradient, values
    return store.push(buffer, samples, options.pop("hyper", HYPER), **options)


def merged(x: Flat, values: list[Flat], samples: list[int], part: np.float32) -> Flat:
    """csrc/store/averaged.c in NumPy."""
    if len(values) == 1:
        return values[0] if part == 1 else x - part * (x - values[0])
    total = np.zeros_like(x)
    for value, count in zip(values, samples, strict=True):
        total += np.float32(count) * (x - value)
    return np.asarray(x - part * (total / np.float32(sum(samples))))


def run_round(stores: list[pyps.Store], values: list[Flat], samples: list[int], **options: list[Any]) -> None:
    """Every rank's step of a round at once; options: one value for each rank."""

    def step(k: int) -> None:
        stores[k].start()
        own = {name: each[k] for name, each in options.items()}
        push(stores[k], np.full(N, 0.5 + k, np.float32), values[k], samples[k], **own)

    threads = [threading.Thread(target=step, args=(k,)) for k in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("optimizer", [kind.name.lower() for kind in Optimizer])
def test_a_round_gives_the_mean_by_samples_under_every_optimizer(optimizer: str) -> None:
    batches, rng = [5, 2, 1], np.random.default_rng(1)
    with store_of("bsp", batches, optimizer) as first:
        stores, x = opened(first, 3), START
        for _ in range(3):
            values = [rng.standard_normal(M).astype(np.float32) for _ in batches]
            run_round(stores, values, batches, scale=[0.1, 0.2, 0.3])  # of gradients alone
            x = merged(x, values, batches, np.float32(LR))
            snapshot = first.snapshot()
            assert np.array_equal(snapshot.tensors["s"], x)
            for state in snapshot.state:
                assert not state[first.layout.trained_elements :].any()
        assert not np.array_equal(snapshot.tensors["w"], np.ones(N))
        for store in stores[1:]:
            store.close()


numbers = st.integers(0, 2**32 - 1)


@settings(max_examples=examples(10, 30), deadline=None)
@given(seed=numbers, batches=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_a_push_alone_goes_its_share_of_the_way(seed: int, batches: list[int]) -> None:
    rng = np.random.default_rng(seed)
    with store_of("asp", batches, "sgd") as first:
        stores, x = opened(first, len(batches)), START
        for _ in range(4):
            rank = int(rng.integers(len(batches)))
            value = rng.standard_normal(M).astype(np.float32)
            stores[rank].start()
            push(stores[rank], np.zeros(N, np.float32), value, batches[rank])
            share = np.float32(batches[rank]) / np.float32(sum(batches))
            x = merged(x, [value], [batches[rank]], share * np.float32(LR))
            assert np.array_equal(stores[-1].snapshot().tensors["s"], x)
        for store in stores[1:]:
            store.close()


def test_a_variance_stays_positive_and_a_constant_keeps_its_bits() -> None:
    """However stale: 20 pushes bring a variance of 0.9, 20 one of a millionth."""
    constant = np.float32(0.1)
    with store_of("asp", [1] * 8, "sgd") as store:
        stores = opened(store, 8)
        for k in range(40):
            stores[k % 8].start()
            values = np.full(M, 0.9 if k < 20 else 1e-6, np.float32)
            values[0] = START[0] if k % 2 else constant
            push(stores[k % 8], np.zeros(N, np.float32), values, 1)
            found = store.snapshot().tensors["s"]
            assert (found > 0).all()
        values[:] = found
        stores[0].start()
        push(stores[0], np.zeros(N, np.float32), values, 1)
        assert np.array_equal(store.snapshot().tensors["s"], found)
        for other in stores[1:]:
            other.close()


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4", "nf4"])
@pytest.mark.parametrize("given_as", ["staged", "array", "codes"])
def test_under_every_codec_averaged_tensors_travel_exactly(codec: str, given_as: str) -> None:
    rng = np.random.default_rng(3)
    gradient, value = rng.standard_normal(N).astype(np.float32), rng.random(M, np.float32) * 1e-6
    with store_of("bsp", [4]) as store:
        store.join()
        store.start()
        buffer = store.stage()
        buffer.flat.fill(0.0)
        buffer["w"][:], buffer["s"][:] = gradient, value
        options: dict[str, Any] = {}
        if given_as == "array":
            options["gradient"] = buffer.flat.copy()
            buffer.flat.fill(np.nan)
        elif given_as == "codes":
            trained = buffer.flat[: store.layout.trained_elements].copy()
            options["gradient"] = pyps.store.codec.encode(trained, codec)[0]
            buffer["w"][:] = np.nan
        store.push(buffer, 4, WHOLE, encoding=codec, **options)
        assert np.array_equal(store.snapshot().tensors["s"], value)
        data, version = store.pull_encoded(codec)
        assert version == 1
        assert data.size == encoded_vector_bytes(codec, store.layout)
        flat = decode_vector(data, codec, store.layout)
        assert np.array_equal(store.views(flat)["s"], value)
        exact, _ = store.pull()
        assert np.abs(flat - exact).max() < np.abs(exact).max() / 5


def test_an_exchange_brings_them_back() -> None:
    value = np.linspace(0, 1, M, dtype=np.float32)
    with store_of("asp", [4]) as store:
        store.join()
        store.start()
        buffer = store.stage()
        buffer.flat.fill(0.0)
        buffer["s"][:] = value
        flat = np.full(store.layout.flat_elements, np.nan, np.float32)
        store.exchange(buffer, 4, WHOLE, flat)
        assert np.array_equal(store.views(flat)["s"], value)
        assert np.array_equal(flat, store.pull()[0])


ISA_PROBE = """
import numpy as np, pyps
from test_averaged import LR, M, N, START, merged, opened, run_round, store_of
rng = np.random.default_rng(5)
with store_of("bsp", [3, 4, 5]) as first:
    stores, x = opened(first, 3), START
    for _ in range(2):
        values = [rng.standard_normal(M).astype(np.float32) for _ in stores]
        run_round(stores, values, [3, 4, 5])
        x = merged(x, values, [3, 4, 5], np.float32(LR))
    assert np.array_equal(first.snapshot().tensors["s"], x)
    for store in stores[1:]:
        store.close()
print(pyps.native.isa())
"""


@pytest.mark.usefixtures("quick_start")
def test_every_instruction_set_gives_numpys_bits() -> None:
    here = os.pathsep.join(str(Path(__file__).parents[k] / name) for k, name in ((0, ""), (1, "helpers")))
    for isa in ("scalar", "avx2", "avx512", "neon"):
        env = {**os.environ, "PYPS_ISA": isa, "PYTHONPATH": here}
        done = subprocess.run([sys.executable, "-c", ISA_PROBE], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_groups_of_one_kind_averaged_ones_last() -> None:
    tensors = {"a": np.zeros(3), "b": np.zeros(3)}
    for groups, averaged in (({"b": 0}, ["b"]), ({"a": 0, "b": 1}, ["a"])):
        with pytest.raises(InvalidArgument, match=r"tensor b: (kind|group)"):
            pyps.Store.create("kinds", tensors, batches=[1], groups=groups, averaged=averaged)
    with pytest.raises(InputError, match="averaged"):
        pyps.Store.create("kinds", tensors, batches=[1], averaged=["c"])


def test_the_store_knows_the_constants_in_force() -> None:
    with store_of("asp", [4]) as store:
        assert store.hyper() == [None, None]  # before a participant has joined
        store.join()
        for lr in (0.5, 0.25):
            store.start()
            hyper = pyps.Hyper(lr=lr, betas=(0.5, 0.75), nesterov=True, momentum=0.5, clip=2.0)
            push(store, np.ones(N, np.float32), START, 4, hyper=hyper)
            assert store.hyper() == [hyper, None]


@pytest.mark.parametrize("leader", [0, 1, 2])
def test_a_round_takes_the_constants_of_the_greatest_position(leader: int) -> None:
    """A rank that has begun again does not bring back its first learning rate, whichever rank it is."""
    batches = [2, 2, 2]
    with store_of("bsp", batches, "sgd") as first:
        stores = opened(first, 3)
        rates = [0.5, 0.25, 0.125]
        hypers = [pyps.Hyper(lr=lr) for lr in rates]
        positions = [7 if rank == leader else 3 for rank in range(3)]
        run_round(stores, [START] * 3, batches, hyper=hypers, position=positions)
        assert first.hyper()[0] == hypers[leader]
        expected = np.float32(1) - np.float32(rates[leader]) * np.float32(1.5)
        assert np.array_equal(first.snapshot().tensors["w"], np.full(N, expected))
        run_round(stores, [START] * 3, batches, hyper=hypers, position=[4, 4, 4])
        assert first.hyper()[0] == hypers[0]  # of equal positions the lowest rank's
        for store in stores[1:]:
            store.close()


@pytest.mark.parametrize("codec", [Codec.F32, Codec.INT8])
@pytest.mark.parametrize("nonfinite", ["error", "skip", "zero"])
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_an_average_that_is_not_finite_is_refused_or_changes_nothing(
    value: float, nonfinite: Any, codec: Codec
) -> None:
    encoding = Encoding(codec, nonfinite=nonfinite)
    with store_of("bsp", [4], "sgd") as store:
        store.join()
        store.start()
        buffer = store.stage()
        buffer.flat.fill(0.0)
        buffer["s"][:] = 0.5
        buffer["s"][3] = value
        if nonfinite == "error":
            with pytest.raises(NotFinite, match="average of 's'"):
                store.push(buffer, 4, HYPER, encoding=encoding)
            buffer["s"][3] = 0.5
        store.push(buffer, 4, HYPER, encoding=encoding)
        moved = merged(START, [np.full(M, 0.5, np.float32)], [4], np.float32(LR))
        if nonfinite != "error":
            moved[3] = START[3]
        assert np.array_equal(store.snapshot().tensors["s"], moved)


@pytest.mark.parametrize("policy", ["bsp", "asp"])
def test_a_stored_infinity_stays_one(policy: str) -> None:
    start = np.array([np.inf, -np.inf, 1.0], np.float32)
    tensors: dict[str, Any] = {"groups": {"s": 1}, "averaged": ["s"], "optimizer": "sgd"}
    with pyps.Store.create(
        "infinite", {"w": np.ones(3), "s": start}, batches=[4], policy=policy, **tensors
    ) as store:
        store.join()
        for hyper in (HYPER, WHOLE):
            store.start()
            push(store, np.zeros(3, np.float32), np.full(3, 0.5, np.float32), 4, hyper=hyper)
        assert store.snapshot().tensors["s"].tolist() == [np.inf, -np.inf, 0.5]
