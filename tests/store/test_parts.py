"""A push of b of B samples takes the part b / B of an optimizer step: closed forms, and NumPy in float64.

What a part is: docs/concepts/policies.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pyps.errors import Ended, InvalidArgument
from pyps.native.values import Hyper, Optimizer
from pyps.simulate.optimizer import OptimizerState
from pyps.store.store import Store

pytestmark = pytest.mark.usefixtures("shm")
Array = NDArray[np.float64]
WHOLE = 12  # the global batch
CASES = {
    "sgd": (Optimizer.SGD, Hyper(lr=0.1, weight_decay=0.01)),
    "momentum": (Optimizer.MOMENTUM, Hyper(lr=0.05, momentum=0.9)),
    "dampening": (Optimizer.MOMENTUM, Hyper(lr=0.05, momentum=0.8, dampening=0.3, weight_decay=0.01)),
    "nesterov": (Optimizer.MOMENTUM, Hyper(lr=0.05, momentum=0.9, nesterov=True)),
    "no momentum": (Optimizer.MOMENTUM, Hyper(lr=0.05, momentum=0.0)),
    "adamw": (Optimizer.ADAMW, Hyper(lr=0.01, weight_decay=0.5)),
    "adam": (Optimizer.ADAM, Hyper(lr=0.01, weight_decay=0.02, betas=(0.8, 0.95))),
    "no beta": (Optimizer.ADAM, Hyper(lr=0.01, betas=(0.0, 0.9))),
    "adagrad": (Optimizer.ADAGRAD, Hyper(lr=0.1, lr_decay=0.1, eps=1e-10)),
    "clipped": (Optimizer.MOMENTUM, Hyper(lr=0.05, momentum=0.9, clip=0.5)),
}
parts = st.lists(st.integers(1, WHOLE), min_size=1, max_size=8)


@contextmanager
def store_of(kind: Optimizer, w: Array, policy: str = "asp") -> Iterator[Store]:
    """One worker whose planned batch is the global batch."""
    sizes = {"batches": [WHOLE], "chunk_params": 1024, "max_participants": 2}
    with Store.create("parts", {"w": w}, optimizer=kind, policy=policy, **sizes) as store:  # type: ignore[arg-type]
        store.join()
        yield store


def push(store: Store, samples: int, gradient: Array, hyper: Hyper) -> None:
    while store.start().count < samples:  # what is left of a claim whose gradient was of fewer samples
        store.push(store.stage(), 0, hyper)
    staging = store.stage()
    staging["w"][:] = gradient
    store.push(staging, samples, hyper)


def weights(store: Store) -> Array:
    return store.views(store.pull(strict=True)[0])["w"].astype(np.float64)


def pushed(kind: Optimizer, hyper: Hyper, w: Array, pushes: Sequence[tuple[int, Array]]) -> Array:
    with store_of(kind, w) as store:
        for samples, gradient in pushes:
            push(store, samples, gradient, hyper)
        return weights(store)


@settings(max_examples=6, deadline=None)
@given(batches=parts, seed=st.integers(0, 99))
@pytest.mark.parametrize("case", CASES)
def test_any_parts_are_those_of_the_formulas(case: str, batches: list[int], seed: int) -> None:
    kind, hyper = CASES[case]
    draw = np.random.default_rng(seed)
    w = draw.standard_normal(100)
    rounded = Hyper(**{**values(hyper), "betas": tuple(float(np.float32(b)) for b in hyper.betas)})
    state, expected = OptimizerState(kind, rounded, w.size), w
    gradients = [(b, draw.standard_normal(w.size)) for b in batches]
    found = pushed(kind, hyper, w, gradients)
    for b, gradient in gradients:
        expected = state.step(expected, gradient, float(np.float32(b / WHOLE)))
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def values(hyper: Hyper) -> dict[str, object]:
    return {name: getattr(hyper, name) for name in Hyper.__slots__}


@settings(max_examples=4, deadline=None)
@given(cuts=st.sets(st.integers(1, WHOLE - 1), min_size=1))
@pytest.mark.parametrize("case", ["sgd", "momentum", "dampening", "nesterov", "no momentum", "adamw"])
def test_the_parts_of_a_global_batch_are_its_step(case: str, cuts: set[int]) -> None:
    """After any history, here of one step: with one gradient, all parts together move as far as one step."""
    kind, hyper = CASES[case]
    if case != "adamw":  # coupled decay sees the parameters of every push
        hyper = Hyper(**{**values(hyper), "weight_decay": 0.0})
    w, before, gradient = np.full(8, 2.0), np.linspace(1.0, 2.0, 8), np.linspace(-1.0, 3.0, 8)
    if case == "adamw":
        before = gradient  # else its second moment differs between the parts
    ends = [0, *sorted(cuts), WHOLE]
    batches = [b - a for a, b in pairwise(ends)]
    one = pushed(kind, hyper, w, [(WHOLE, before), (WHOLE, gradient)])
    many = pushed(kind, hyper, w, [(WHOLE, before), *((b, gradient) for b in batches)])
    close = 5e-5 if case == "adamw" else 3e-6  # its decay and its way mix in another order
    np.testing.assert_allclose(many, one, rtol=close, atol=close)


@pytest.mark.parametrize("case", ["momentum", "nesterov", "adam", "no beta"])
def test_steady_states_are_equal(case: str) -> None:
    """A gradient that stays the same moves the parameters as fast in parts as in steps."""
    kind, hyper = CASES[case]
    hyper = Hyper(**{**values(hyper), "weight_decay": 0.0})
    w, gradient = np.zeros(4), np.full(4, 0.5)
    far = {}
    for batch in (2, 4, WHOLE):
        with store_of(kind, w) as store:
            for _ in range(100 * WHOLE // batch):
                push(store, batch, gradient, hyper)
            middle = weights(store)
            for _ in range(10 * WHOLE // batch):
                push(store, batch, gradient, hyper)
            far[batch] = float((middle - weights(store))[0])
    assert far[2] == pytest.approx(far[WHOLE], rel=1e-3)
    assert far[4] == pytest.approx(far[WHOLE], rel=1e-3)


def test_adams_second_moment_is_that_of_the_global_batch() -> None:
    """A part's gradient holds more noise, by the ratio of the samples; the average must not."""
    draw = np.random.default_rng(3)
    mean, noise, size, batches = 0.2, 3.0, 4000, 60
    found = {}
    for batch in (1, 3, WHOLE):
        state = OptimizerState(Optimizer.ADAM, Hyper(lr=0.0, betas=(0.9, 0.95)), size)
        for _ in range(batches * WHOLE // batch):
            state.step(np.zeros(size), mean + noise / batch**0.5 * draw.standard_normal(size), batch / WHOLE)
        found[batch] = float(state.second.mean())
    expected = (mean**2 + noise**2 / WHOLE) * (1.0 - 0.95**batches)
    assert found[WHOLE] == pytest.approx(expected, rel=0.03)
    assert found[3] == pytest.approx(expected, rel=0.06)
    assert found[1] == pytest.approx(expected, rel=0.06)


def test_a_whole_batch_and_scaling_none_are_todays_step_bitwise() -> None:
    draw = np.random.default_rng(5)
    w, gradients = draw.standard_normal(50), draw.standard_normal((6, 50))
    for kind, hyper in CASES.values():
        bits = set()
        for policy, samples in (("bsp", WHOLE), ("asp", WHOLE), ("asp:scaling=none", 5)):
            with store_of(kind, w, policy) as store:
                for gradient in gradients:
                    push(store, samples, gradient, hyper)
                bits.add(weights(store).tobytes())
                assert set(store.snapshot().steps.tolist()) == {6.0}
        assert len(bits) == 1


def test_a_state_keeps_parts_of_steps() -> None:
    kind, hyper = CASES["adamw"]
    draw = np.random.default_rng(7)
    w, gradients = draw.standard_normal(50), draw.standard_normal((6, 50))
    with store_of(kind, w) as store:
        for gradient in gradients[:3]:
            push(store, 5, gradient, hyper)
        state = store.state()
        for gradient in gradients[3:]:
            push(store, 5, gradient, hyper)
        expected = weights(store)
    assert state.header.steps == pytest.approx((3 * 5 / WHOLE,))
    with Store.create("again", state=state) as store:
        store.join()
        for gradient in gradients[3:]:
            push(store, 5, gradient, hyper)
        assert weights(store).tobytes() == expected.tobytes()


def test_softsync_takes_the_part_that_its_gradients_are() -> None:
    """Two of four workers make a version: half a step of their mean."""
    with Store.create("soft", {"w": np.zeros(2)}, batches=[3] * 4, policy="softsync:n=2") as first:
        stores = [first, *(Store.open("soft") for _ in range(3))]
        for store in stores:
            store.join()
        for store, gradient in zip(stores[:2], (1.0, 3.0), strict=True):
            push(store, 3, np.full(2, gradient), Hyper(lr=1.0))
        # Fresh gradients count n times as much, as in the published rule: one in n is a step.
        assert weights(first).tolist() == [-2.0 * 2 * 0.5] * 2
        for store in stores[1:]:
            store.close()


def test_the_last_gradients_wait_for_none_that_cannot_come() -> None:
    """A worker with both of its staging buffers in a round, and the run's last samples."""
    with Store.create("last", {"w": np.zeros(2)}, batches=[3] * 3, policy="softsync", samples=9) as first:
        others = [Store.open("last") for _ in range(2)]
        for store in (first, *others):
            store.join()
        for _ in range(3):
            claim = first.start(timeout=10)
            first.push(first.stage(timeout=10), claim.count, Hyper(lr=1.0))
        for store in (first, *others):
            with pytest.raises(Ended):
                store.start(timeout=10)
        assert first.status().round == 2
        for store in others:
            store.close()


@pytest.mark.parametrize("constants", [{"momentum": 1.0 - 1e-9}, {"betas": (1.0 - 1e-9, 0.9)}])
def test_what_is_1_in_the_stores_precision_is_refused(constants: dict[str, object]) -> None:
    """A part of a step divides by what is left to 1: all parameters became NaN."""
    hyper = Hyper(lr=0.1, **constants)  # type: ignore[arg-type]
    with store_of(Optimizer.MOMENTUM, np.zeros(4)) as store:
        with pytest.raises(InvalidArgument, match=r"hyper\[0\]: found .* 1, .*; expected 0 to below 1"):
            push(store, 4, np.ones(4), hyper)
        assert (weights(store) == 0.0).all()
