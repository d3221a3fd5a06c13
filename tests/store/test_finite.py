"""A gradient with NaN or infinite values is refused before it changes anything, whichever way it comes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pyps import Hyper, Store
from pyps.errors import NotFinite
from pyps.native.values import Codec, Encoding

SIZE = 3000  # three chunks, the last one not full
PLACES = (0, 1023, 1024, SIZE - 1)


@pytest.fixture
def store(shm: Any) -> Any:
    initial = {"w": np.ones(SIZE, np.float32)}
    with Store.create("finite", initial, batches=[4], policy="asp", chunk_params=1024) as made:
        made.join()
        yield made


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("way", ["in the buffer", "given", "with a norm", "of a range"])
def test_a_value_that_is_not_finite_is_refused(store: Store, way: str, value: float, place: int) -> None:
    gradient = np.full(store.layout.flat_elements, 1e30, np.float32)  # whose squares are finite in fp64 alone
    gradient[place] = value
    store.start()
    staging = store.stage()
    np.copyto(staging.flat, gradient)
    hyper = Hyper(lr=1.0, clip_norm=1.0 if way == "with a norm" else 0.0)
    options: dict[str, Any] = {"gradient": gradient} if way == "given" else {}
    if way == "of a range":
        options = {"ranges": [[0, 10], [1000, SIZE - 1000]]}
    with pytest.raises(NotFinite, match="'w'"):
        store.push(staging, 4, hyper, **options)
    assert store.status().version == 0
    np.testing.assert_array_equal(store.pull()[0][:SIZE], 1)
    staging.flat.fill(1.0)
    assert store.push(staging, 4, hyper).version == 1


def test_what_belongs_to_no_tensor_does_not_count(store: Store) -> None:
    store.start()
    staging = store.stage()
    staging.flat.fill(np.nan)
    staging["w"][:] = 1
    assert store.push(staging, 4, Hyper(lr=1.0)).version == 1


def expected(gradient: Any, nonfinite: str) -> Any:
    """Return what a push takes instead, in blocks of 1024 values."""
    gradient = gradient.copy()
    for block in np.split(gradient, len(gradient) // 1024):
        bad = ~np.isfinite(block)
        block[bad | (bad.any() if nonfinite == "skip" else False)] = 0
    return gradient


@pytest.mark.parametrize("nonfinite", ["skip", "zero"])
@pytest.mark.parametrize("policy", ["asp", "bsp"])
@pytest.mark.parametrize("way", ["push", "exchange", "with a norm", "of a range"])
def test_values_that_are_not_finite_can_count_as_zeros(
    shm: Any, policy: str, way: str, nonfinite: Any
) -> None:
    initial = {"w": np.ones(SIZE, np.float32)}
    rng = np.random.default_rng(0)
    with Store.create("finite", initial, batches=[4], policy=policy, chunk_params=2048) as store:
        store.join()
        gradient = rng.standard_normal(store.layout.flat_elements).astype(np.float32)
        gradient[[5, 1500, 1501]] = np.inf, np.nan, -np.inf
        taken = expected(gradient, nonfinite)
        taken[SIZE:] = 0
        store.start()
        staging = store.stage()
        np.copyto(staging.flat, gradient)
        hyper, options = Hyper(lr=1.0), {"encoding": Encoding(Codec.F32, nonfinite=nonfinite)}
        if way == "with a norm":
            hyper = Hyper(lr=1.0, clip_norm=1.0)
            taken *= np.float32(1 / (np.sqrt(np.sum(np.square(taken, dtype=np.float64))) + 1e-6))
        if way == "of a range":
            options["ranges"] = [[0, 1024], [1024, SIZE - 1024]]
        if way == "exchange":
            flat = np.empty_like(gradient)
            store.exchange(staging, 4, hyper, flat, **options)
            np.testing.assert_allclose(flat[:SIZE], 1 - taken[:SIZE], rtol=1e-6)
        else:
            assert store.push(staging, 4, hyper, **options).version == 1
        np.testing.assert_allclose(store.pull()[0][:SIZE], 1 - taken[:SIZE], rtol=1e-6)


@pytest.mark.parametrize("nonfinite", ["skip", "zero"])
def test_what_is_mended_far_into_a_chunk_leaves_the_rest(shm: Any, nonfinite: Any) -> None:
    """A step takes a long chunk span by span, and takes again the spans that hold such values."""
    size, chunk = 60_000, 65_536
    gradient = np.random.default_rng(0).standard_normal(chunk).astype(np.float32)
    gradient[[16_383, 40_000, size - 1]] = np.nan, np.inf, -np.inf
    with Store.create("finite", {"w": np.ones(size)}, batches=[4], policy="asp", chunk_params=chunk) as store:
        store.join()
        store.start()
        staging, flat = store.stage(), np.empty(chunk, np.float32)
        np.copyto(staging.flat[:size], gradient[:size])
        encoding = Encoding(Codec.F32, nonfinite=nonfinite)
        store.exchange(staging, 4, Hyper(lr=1.0, clip=2.0), flat, encoding=encoding)
        taken = np.clip(expected(gradient, nonfinite), -2, 2)[:size]
        np.testing.assert_array_equal(flat[:size], 1 - taken)
        np.testing.assert_array_equal(store.pull()[0][:size], 1 - taken)


def test_pulls_that_look_ahead_take_the_same_gradient(shm: Any) -> None:
    """The worker's own last gradient, by which its pulls look ahead."""
    pulled = []
    for bad in (False, True):
        options: dict[str, Any] = {"optimizer": "momentum", "policy": "asp", "chunk_params": 2048}
        with Store.create("ahead", {"w": np.ones(SIZE, np.float32)}, batches=[4, 4], **options) as store:
            store.join(0)
            with Store.open("ahead") as other:
                other.join(1)
                for one in (store, other):
                    one.start()
                    staging = one.stage()
                    staging.flat.fill(0.5)
                    if one is store:
                        staging.flat[1024:2048] = 0
                        staging.flat[1500] = np.nan if bad else 0
                    encoding = Encoding(Codec.F32, nonfinite="skip")
                    one.push(staging, 4, Hyper(lr=0.1, momentum=0.9), encoding=encoding)
                pulled.append(store.pull()[0][:SIZE])
    assert np.isfinite(pulled[1]).all()
    np.testing.assert_array_equal(*pulled)
