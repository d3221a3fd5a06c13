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


def test_a_trainer_that_has_looked_itself_can_say_so(store: Store) -> None:
    store.start()
    staging = store.stage()
    staging.flat.fill(np.inf)
    unchecked = Encoding(Codec.F32, nonfinite="skip")
    assert store.push(staging, 4, Hyper(lr=1.0), encoding=unchecked).version == 1
    np.testing.assert_array_equal(store.pull()[0][:SIZE], -np.inf)
