"""Pulls look ahead: where momentum will have moved the parameters when the worker's gradient is admitted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pyps.native.values import Hyper, Optimizer
from pyps.simulate.optimizer import OptimizerState
from pyps.store.codec import decode_vector
from pyps.store.store import Store

pytestmark = pytest.mark.usefixtures("shm")
Array = NDArray[np.float64]
SIZE = 2500  # three chunks, of which the last is not full
BATCHES = (2, 4, 2)
CASES = {
    "momentum": (Optimizer.MOMENTUM, Hyper(lr=0.05, momentum=0.9)),
    "nesterov": (Optimizer.MOMENTUM, Hyper(lr=0.05, momentum=0.75, nesterov=True)),
    "adamw": (Optimizer.ADAMW, Hyper(lr=0.01, weight_decay=0.1)),
    "adam": (Optimizer.ADAM, Hyper(lr=0.01, betas=(0.75, 0.875))),
    "sgd": (Optimizer.SGD, Hyper(lr=0.1)),
    "adagrad": (Optimizer.ADAGRAD, Hyper(lr=0.1)),
}


@contextmanager
def stores_of(kind: Optimizer, w: Array, policy: str = "asp") -> Iterator[list[Store]]:
    sizes = {
        "batches": BATCHES,
        "chunk_params": 1024,
        "max_participants": 8,
    }  # tickets are kept for 16 pushes
    with Store.create("ahead", {"w": w}, optimizer=kind, policy=policy, **sizes) as first:  # type: ignore[arg-type]
        stores = [first, *(Store.open("ahead") for _ in BATCHES[1:])]
        for rank, store in enumerate(stores):
            store.join(rank)
        yield stores
        for store in stores[1:]:
            store.close()


def values(store: Store, flat: NDArray[np.float32]) -> Array:
    return store.views(flat)["w"].astype(np.float64)


@settings(max_examples=5, deadline=None)
@given(order=st.lists(st.integers(0, 2), min_size=4, max_size=14), seed=st.integers(0, 99))
@pytest.mark.parametrize("case", CASES)
def test_a_pull_is_the_way_of_momentum_and_the_own_gradient(case: str, order: list[int], seed: int) -> None:
    """Plain, encoded or with the push: over as many global batches as were admitted between the worker's
    pulls and its pushes so far. A strict pull brings the parameters as they are.
    """
    kind, hyper = CASES[case]
    draw = np.random.default_rng(seed)
    w = draw.standard_normal(SIZE)
    state, true, steps = OptimizerState(kind, hyper, SIZE), w, 0.0
    based = [0.0] * 3
    lags: list[list[float]] = [[], [], []]
    with stores_of(kind, w) as stores:
        for k in order:
            store, gradient = stores[k], draw.standard_normal(SIZE)
            store.start()
            staging = store.stage()
            staging["w"][:] = gradient
            lags[k].append(steps - based[k])
            flat = np.empty(store.layout.flat_elements, np.float32)
            store.exchange(staging, BATCHES[k], hyper, flat)
            true = state.step(true, gradient, BATCHES[k] / sum(BATCHES))
            steps += BATCHES[k] / sum(BATCHES)
            based[k] = steps
            expected = state.ahead(true, average(lags[k]), gradient)
            np.testing.assert_allclose(values(store, flat), expected, rtol=2e-4, atol=2e-4)
            np.testing.assert_array_equal(store.pull()[0], flat, "a pull after it is the same")
            codes, _ = store.pull_encoded("bf16")
            decoded = np.empty_like(flat)
            decode_vector(codes, "bf16", store.layout, decoded)
            np.testing.assert_allclose(values(store, decoded), expected, rtol=0.01, atol=0.01)
            exact = values(store, store.pull(strict=True)[0])
            np.testing.assert_allclose(exact, true, rtol=2e-4, atol=2e-4)


def average(lags: list[float], window: int = 8) -> float:
    """Average as the view keeps it."""
    mean = 0.0
    for count, lag in enumerate(lags, 1):
        mean = mean + (lag - mean) / min(count, window) if mean > 0 else lag
    return mean


def push_ones(store: Store, hyper: Hyper) -> None:
    store.start()
    store.pull()
    staging = store.stage()
    staging.flat.fill(1.0)
    store.push(staging, 4, hyper)


PLAIN = Hyper(lr=0.05, momentum=0.9)
PUSHES: dict[str, tuple[str, dict[str, object], Hyper]] = {
    "int8": ("asp", {"encoding": "int8"}, PLAIN),
    "scaled": ("asp", {"scale": 0.5}, Hyper(lr=0.05, momentum=0.9, dampening=0.25)),
    "clamped": ("asp", {}, Hyper(lr=0.05, momentum=0.9, clip=0.5)),
    "norm": ("asp", {"scale": 2.0}, Hyper(lr=0.05, momentum=0.9, clip_norm=10.0)),
    "late": ("saps:threshold=fixed,bound=1,late=weigh", {}, PLAIN),
}


@pytest.mark.parametrize("case", PUSHES)
def test_the_own_gradient_is_the_one_that_was_applied(case: str) -> None:
    """Decoded, scaled, weighed and clipped; until its staging buffer is given back, when momentum remains."""
    policy, options, hyper = PUSHES[case]
    draw = np.random.default_rng(5)
    w = draw.standard_normal(SIZE)
    state, true, steps = OptimizerState(Optimizer.MOMENTUM, hyper, SIZE), w, 0.0
    based = [0.0] * 3
    with stores_of(Optimizer.MOMENTUM, w, policy) as stores:
        for k in (0, 1, 0, 2):
            store, gradient = stores[k], draw.standard_normal(SIZE)
            store.start()
            staging = store.stage()
            staging["w"][:] = gradient
            flat = np.empty(store.layout.flat_elements, np.float32)
            pushed, _ = store.exchange(staging, BATCHES[k], hyper, flat, **options)  # type: ignore[arg-type]
            weight = 1.0 / max(pushed.staleness, 1) if case == "late" else 1.0
            applied = applied_of(gradient, options, hyper, weight)
            true = state.step(true, applied, BATCHES[k] / sum(BATCHES))
            lag, steps = steps - based[k], steps + BATCHES[k] / sum(BATCHES)
            based[k] = steps
            again = store.stage()
            close = {"rtol": 2e-3, "atol": 0.01 if case == "int8" else 2e-4}
            np.testing.assert_allclose(values(store, flat), state.ahead(true, lag, applied), **close)
            np.testing.assert_array_equal(store.pull()[0], flat)
            store.unstage(again)
            np.testing.assert_allclose(values(store, store.pull()[0]), state.ahead(true, lag), **close)


def applied_of(gradient: Array, options: dict[str, object], hyper: Hyper, weight: float) -> Array:
    scaled = gradient * float(options.get("scale", 1.0))  # type: ignore[arg-type]
    if hyper.clip_norm:
        scaled = scaled * min(1.0, hyper.clip_norm / float(np.linalg.norm(scaled)))
    return scaled * weight


def test_a_gradient_that_is_not_applied_as_it_is_does_not_count() -> None:
    """It is summed in a round: momentum alone moves what is pulled."""
    kind, hyper = CASES["momentum"]
    pulled = []
    for gradient in (1.0, -1.0):
        with stores_of(kind, np.ones(SIZE), "softsync:n=3") as stores:
            for k, value in ((0, 2.0), (1, 1.0), (2, gradient)):
                store = stores[k]
                store.start()
                staging = store.stage()
                store.pull()
                staging.flat.fill(value)
                store.push(staging, BATCHES[k], hyper)
            pulled.append(values(store, store.pull()[0]) - values(store, store.pull(strict=True)[0]))
            store.unstage(store.stage())
            kept = values(store, store.pull()[0]) - values(store, store.pull(strict=True)[0])
            np.testing.assert_array_equal(pulled[-1], kept)


@pytest.mark.parametrize("policy", ["bsp", "asp:lookahead=false", "asp:scaling=none"])
def test_others_pull_the_parameters_as_they_are(policy: str) -> None:
    kind, hyper = CASES["momentum"]
    with Store.create("plain", {"w": np.ones(SIZE)}, batches=[4], optimizer=kind, policy=policy) as store:
        store.join()
        for _ in range(3):
            push_ones(store, hyper)
        np.testing.assert_array_equal(store.pull()[0], store.pull(strict=True)[0])


@pytest.mark.parametrize("case", ["momentum", "nesterov", "adamw", "adam"])
def test_in_rounds_a_late_workers_pulls_look_ahead(case: str) -> None:
    """By momentum; Adam's by its mean. A worker that is never late gets the parameters as they are."""
    kind, hyper = CASES[case]
    draw = np.random.default_rng(3)
    w = draw.standard_normal(SIZE)
    for late in (False, True):
        state, true = OptimizerState(kind, hyper, SIZE), w
        with Store.create("rounds", {"w": w}, batches=[4], optimizer=kind, policy="hps") as store:
            store.join()
            for count in range(4):
                store.start()
                if count == 0 or not late:
                    store.pull()
                staging, gradient = store.stage(), draw.standard_normal(SIZE)
                staging["w"][:] = gradient
                store.push(staging, 4, hyper)
                true = state.step(true, gradient, 1.0)
            expected = state.ahead(true, 3.0, rounds=True) if late else true
            np.testing.assert_allclose(values(store, store.pull()[0]), expected, rtol=2e-4, atol=2e-4)
            np.testing.assert_allclose(values(store, store.pull(strict=True)[0]), true, rtol=2e-4, atol=2e-4)


def test_one_worker_alone_does_not_look_ahead() -> None:
    """Nothing happens between its pull and its push."""
    kind, hyper = CASES["adamw"]
    with Store.create("alone", {"w": np.ones(SIZE)}, batches=[4], optimizer=kind, policy="asp") as store:
        store.join()
        for _ in range(3):
            push_ones(store, hyper)
            np.testing.assert_array_equal(store.pull()[0], store.pull(strict=True)[0])
