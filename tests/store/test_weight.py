"""A round's mean is by what each gradient weighs; without a weight, by its samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from threads import in_threads

from pyps import errors
from pyps.native import replay
from pyps.native.values import Hyper
from pyps.remote import create_store, open_store
from pyps.remote.server import Server
from pyps.store import Store

SIZE = 3000  # elements, in three chunks
STEP = Hyper(lr=1.0)
RELATIVE = 4e-7  # fp32 rounds at 6e-8 an operation
pytestmark = pytest.mark.usefixtures("shm")
Flat = NDArray[np.float32]


def round_of(
    gradients: Sequence[Flat],
    batches: Sequence[int],
    weights: Sequence[float | None],
    policy: str = "bsp",
    journal: Path | None = None,
    encoding: str = "f32",
    where: str = "weights",
) -> Flat:
    """Return what a round of these gradients takes from parameters that are zero."""
    with create_store(
        where,
        {"w": np.zeros(SIZE, np.float32)},
        batches=batches,
        samples=sum(batches),
        policy=policy,
        chunk_params=1024,
    ) as made:

        def work(rank: int) -> None:
            with open_store(where) as store:
                if journal is not None:
                    store.journal(journal)
                store.join(rank)
                claim, staging = store.start(), store.stage()
                staging["w"][:] = gradients[rank]
                store.push(staging, claim.count, STEP, weight=weights[rank], encoding=encoding)
                store.leave()

        in_threads(*(lambda rank=rank: work(rank) for rank in range(len(batches))))
        return -made.snapshot().parameters[:SIZE].copy()


def test_weights_travel_over_a_link() -> None:
    gradients, weights = some(2), (2.5, 40.0)
    expected = np.average(np.array(gradients, np.float64), axis=0, weights=weights)
    with Server("weights") as server:
        found = round_of(gradients, (4, 4), weights, where=server.address)
    np.testing.assert_allclose(found, expected, rtol=RELATIVE, atol=RELATIVE)


def some(count: int) -> list[Flat]:
    rng = np.random.default_rng(3)
    return [rng.standard_normal(SIZE).astype(np.float32) for _ in range(count)]


@pytest.mark.parametrize("policy", ["bsp", "hps"])
def test_a_rounds_mean_is_by_weight(policy: str) -> None:
    gradients, weights = some(3), (57.0, 3.25, 1000.0)
    expected = np.average(np.array(gradients, np.float64), axis=0, weights=weights)
    found = round_of(gradients, (4, 8, 4), weights, policy)
    np.testing.assert_allclose(found, expected, rtol=RELATIVE, atol=RELATIVE)


def test_without_a_weight_a_gradient_counts_by_its_samples_to_the_bit() -> None:
    gradients, batches = some(3), (5, 7, 2)
    default = round_of(gradients, batches, (None, None, None))
    assert np.array_equal(default, round_of(gradients, batches, (5.0, 7.0, 2.0)))
    assert np.array_equal(default, round_of(gradients, batches, (None, 7.0, None)))
    assert not np.array_equal(default, round_of(gradients, batches, (None, 7.5, None)))


def test_a_gradient_of_weight_0_counts_for_nothing() -> None:
    gradients = some(2)
    found = round_of(gradients, (4, 4), (0.0, 6.0))
    np.testing.assert_allclose(found, gradients[1], rtol=RELATIVE, atol=RELATIVE)
    assert not round_of(gradients, (4, 4), (0.0, 0.0)).any()
    assert not round_of(gradients[:1], (4,), (0.0,)).any()


def test_codes_count_by_weight_too() -> None:
    gradients, weights = some(2), (1.0, 3.0)
    expected = np.average(np.array(gradients, np.float64), axis=0, weights=weights)
    found = round_of(gradients, (4, 4), weights, encoding="bf16")
    np.testing.assert_allclose(found, expected, rtol=0, atol=2.0**-8 * np.abs(gradients).max())


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_other_weights_are_refused_and_the_gradient_can_come_again(weight: float) -> None:
    with Store.create("one", {"w": np.zeros(4, np.float32)}, batches=[2], samples=2, policy="bsp") as store:
        store.join(0)
        claim, staging = store.start(), store.stage()
        staging["w"][:] = 1.0
        with pytest.raises(errors.InvalidArgument, match="weight"):
            store.push(staging, claim.count, STEP, weight=weight)
        store.push(staging, claim.count, STEP, weight=2.5)
        assert np.array_equal(store.pull()[0][:4], np.full(4, -1.0, np.float32))


def test_decisions_do_not_depend_on_weights(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    round_of(some(2), (3, 4), (2.0, 90.0), journal=path)
    again = replay(str(path))
    assert again.differences == 0
    assert again.decisions > 4
