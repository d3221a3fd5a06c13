"""Global-norm clipping: the norm is that of a round's mean gradient over all chunks, or of a push alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sampled import examples
from threads import in_threads

from pyps import errors
from pyps.native.values import Codec, Encoding, Hyper, Optimizer
from pyps.store import Store, codec

RELATIVE = 1e-6  # of the norm: fp32 rounds at 6e-8 an operation
DEADLINE_SECONDS = 60.0
SHAPES = {"weight": (70, 40), "bias": (1100,), "frozen": (0,), "scalar": ()}
CHUNK = 1024
F32 = Encoding(Codec.F32)
Gradient = dict[str, NDArray[np.float32]]
pytestmark = pytest.mark.usefixtures("shm")


def some(seed: int) -> Gradient:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def push(store: Store, gradient: Gradient, hyper: Hyper, encoding: Encoding = F32, **options: Any) -> None:
    claim = store.start()
    staging = store.stage()
    staging.flat.fill(0.0)
    for name, view in staging.tensors().items():
        view[...] = gradient[name]
    store.push(staging, claim.count, hyper, encoding=encoding, **options)


def mean(gradients: Sequence[Gradient], batches: Sequence[int]) -> Gradient:
    total = sum(batches)
    return {
        name: sum(b * np.asarray(g[name], np.float64) for b, g in zip(batches, gradients, strict=True))
        / total
        for name in SHAPES
    }


def by_torch(initial: Gradient, steps: Sequence[Gradient], hyper: Hyper) -> dict[str, torch.Tensor]:
    """The same steps by one process, in fp64."""
    rivals = {name: torch.tensor(value, dtype=torch.float64) for name, value in initial.items()}
    optimizer = torch.optim.SGD(rivals.values(), lr=hyper.lr, momentum=hyper.momentum)
    for gradient in steps:
        for name, tensor in rivals.items():
            tensor.grad = torch.tensor(gradient[name], dtype=torch.float64)
        torch.nn.utils.clip_grad_norm_(rivals.values(), hyper.clip_norm)
        optimizer.step()
    return rivals


def assert_same(store: Store, expected: dict[str, torch.Tensor]) -> None:
    found = store.snapshot().tensors
    for name, tensor in expected.items():
        np.testing.assert_allclose(found[name], tensor.numpy(), rtol=RELATIVE, atol=RELATIVE, err_msg=name)


def in_rounds(
    batches: Sequence[int], gradients: Sequence[Sequence[Gradient]], hyper: Hyper, how: Encoding
) -> None:
    """Each rank of the store "clip" pushes its gradient of each round."""

    def body(rank: int) -> None:
        with Store.open("clip") as mine:
            mine.join(rank)
            for of_round in gradients:
                push(mine, of_round[rank], hyper, how)

    in_threads(*(partial(body, rank) for rank in range(len(batches))))


@pytest.mark.parametrize("clip_norm", [0.5, 40.0, 1e6])
@pytest.mark.parametrize("policy", ["bsp", "hps"])
def test_a_round_is_clipped_by_the_norm_of_its_mean(clip_norm: float, policy: str) -> None:
    batches, hyper = [1, 5, 2], Hyper(lr=0.1, momentum=0.9, clip_norm=clip_norm)
    gradients = [
        [some(100 * step + rank) for rank in range(3)] for step in range(3 if policy == "bsp" else 1)
    ]
    with Store.create(
        "clip", some(0), batches=batches, optimizer=Optimizer.MOMENTUM, policy=policy, chunk_params=CHUNK
    ) as store:
        in_rounds(batches, gradients, hyper, F32)
        assert_same(store, by_torch(some(0), [mean(g, batches) for g in gradients], hyper))


@pytest.mark.parametrize("kind", [Codec.INT8, Codec.INT4, Codec.NF4, Codec.F16])
def test_the_norm_is_of_what_the_codes_hold(kind: Codec) -> None:
    """With error feedback: of the gradient and the residual, as far as the codes carry them."""
    batches, hyper = [3, 4], Hyper(lr=0.1, clip_norm=2.0)
    gradients = [[some(100 * step + rank) for rank in range(2)] for step in range(3)]
    with Store.create("clip", some(0), batches=batches, chunk_params=CHUNK) as store:
        residuals = [{name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()} for _ in batches]
        carried = []
        for of_round in gradients:
            decoded = [
                carry(store, kind, g, residual) for g, residual in zip(of_round, residuals, strict=True)
            ]
            carried.append(mean(decoded, batches))
        in_rounds(batches, gradients, hyper, Encoding(kind, error_feedback=True))
        assert_same(store, by_torch(some(0), carried, hyper))


def carry(store: Store, kind: Codec, gradient: Gradient, residual: Gradient) -> Gradient:
    """Return what the codes of a gradient and the residual hold; the rest becomes the residual."""
    flat = np.zeros(store.layout.flat_elements, np.float32)
    for name, view in store.views(flat).items():
        view[...] = gradient[name] + residual[name]
    decoded = codec.decode(codec.encode(flat, kind)[0], kind, flat.size)
    for name, view in store.views(decoded).items():
        residual[name] = store.views(flat)[name] - view
    return {name: view.copy() for name, view in store.views(decoded).items()}


@pytest.mark.parametrize("policy", ["asp", "ssp", "saps", "r2sp", "dssp"])
def test_a_gradient_that_is_applied_alone_is_clipped_by_its_own_norm(policy: str) -> None:
    hyper = Hyper(lr=0.1, momentum=0.9, clip_norm=3.0)
    gradients = [some(1), {name: 1e-3 * value for name, value in some(2).items()}, some(3)]
    with Store.create(
        "clip", some(0), batches=[4], policy=policy, optimizer=Optimizer.MOMENTUM, chunk_params=CHUNK
    ) as store:
        store.join()
        for gradient in gradients:
            push(store, gradient, hyper)
            store.pull()
        assert_same(store, by_torch(some(0), gradients, hyper))


def test_the_scale_of_a_push_counts_and_the_policys_does_not() -> None:
    hyper = Hyper(lr=1.0, clip_norm=3.0)
    gradient = some(1)
    with (
        Store.create("clip", some(0), batches=[1, 1], policy="asp", chunk_params=CHUNK) as store,
        Store.open("clip") as other,
    ):
        store.join()
        other.join()
        push(store, {name: 1024 * value for name, value in gradient.items()}, hyper, scale=1 / 1024)
        clipped = by_torch(some(0), [gradient], Hyper(lr=0.5, clip_norm=3.0))  # 1 / 2 workers
        assert_same(store, clipped)


def test_every_group_counts_and_averaged_tensors_do_not() -> None:
    gradient, initial = some(1), some(0)
    hyper = [Hyper(lr=0.1, clip_norm=2.0), Hyper(lr=0.2), Hyper(lr=1.0)]
    with Store.create(
        "clip",
        {**initial, "statistics": np.full(2000, 100.0)},
        batches=[4],
        groups={"bias": 1, "statistics": 2},
        averaged=["statistics"],
        chunk_params=CHUNK,
    ) as store:
        store.join()
        push(store, {**gradient, "statistics": np.full(2000, 1e6, np.float32)}, hyper)  # type: ignore[arg-type]
        norm = np.sqrt(sum(float(np.sum(np.float64(value) ** 2)) for value in gradient.values()))
        found = store.snapshot().tensors
        for name, lr in (("weight", 0.1 * 2.0 / (norm + 1e-6)), ("bias", 0.2)):
            np.testing.assert_allclose(found[name], initial[name] - lr * gradient[name], rtol=1e-5, atol=1e-6)
        assert set(found["statistics"]) == {np.float32(1e6)}
        assert store.hyper()[0] == Hyper(lr=0.1, betas=(0.9, 0.999), clip_norm=2.0)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_zeros_for_what_is_not_finite_count_in_the_norm(bad: float) -> None:
    hyper, taken = Hyper(lr=0.1, clip_norm=1.0), some(1)
    gradient = {name: value.copy() for name, value in taken.items()}
    taken["weight"][3, 7], gradient["weight"][3, 7] = 0.0, bad
    with Store.create("clip", some(0), batches=[4], chunk_params=CHUNK) as store:
        store.join()
        push(store, gradient, hyper, Encoding(Codec.F32, nonfinite="zero"))
        assert_same(store, by_torch(some(0), [taken], hyper))


def test_the_bound_belongs_to_the_runs_position() -> None:
    """A worker that began again, with another bound, does not bring it back before it is where the run is."""
    with Store.create("clip", some(0), batches=[1, 1], chunk_params=CHUNK) as store:

        def body(rank: int) -> None:
            with Store.open("clip") as mine:
                mine.join(rank)
                bound = Hyper(lr=0.1, clip_norm=(1.0, 5.0)[rank])
                push(mine, some(rank), bound, position=(7, 3)[rank])

        in_threads(partial(body, 0), partial(body, 1))
        assert_same(
            store, by_torch(some(0), [mean([some(0), some(1)], [1, 1])], Hyper(lr=0.1, clip_norm=1.0))
        )
        assert store.hyper()[0] == Hyper(lr=0.1, clip_norm=1.0)


RANK = """
import sys, time
import numpy as np
from pyps.native.values import Hyper
from pyps.store import Store
with Store.open("clip") as store:
    store.join(2)
    store.start()
    if sys.argv[1:]:
        staging = store.stage()
        staging.flat[:] = np.fromfile(sys.argv[1], np.float32)
        store.push(staging, 2, Hyper(lr=0.1, clip_norm=1.0), timeout=600.0)
    time.sleep(600)
"""


@pytest.mark.parametrize("staged", [False, True])
def test_a_killed_rank_counts_if_its_gradient_was_staged(tmp_path: Path, staged: bool) -> None:
    batches, hyper = [1, 5, 2], Hyper(lr=0.1, clip_norm=1.0)
    gradients = [some(rank) for rank in range(3)]
    with (
        Store.create("clip", some(0), batches=batches, chunk_params=CHUNK) as store,
        Store.open("clip") as two,
    ):
        store.join(0)
        two.join(1)
        flat = np.zeros(store.layout.flat_elements, np.float32)
        for name, view in store.views(flat).items():
            view[...] = gradients[2][name]
        flat.tofile(tmp_path / "gradient")
        arguments = [str(tmp_path / "gradient")] if staged else []
        with subprocess.Popen([sys.executable, "-c", RANK, *arguments]) as rank:
            deadline = time.monotonic() + DEADLINE_SECONDS
            while not any(m.rank == 2 and (m.staged if staged else m.claim_count) for m in store.members()):
                assert time.monotonic() < deadline
                assert rank.poll() is None
                time.sleep(0.01)
            os.kill(rank.pid, signal.SIGKILL)
        in_threads(partial(push, store, gradients[0], hyper), partial(push, two, gradients[1], hyper))
        counted = 3 if staged else 2
        assert_same(store, by_torch(some(0), [mean(gradients[:counted], batches[:counted])], hyper))


@settings(
    max_examples=examples(10, 25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    length=st.integers(1, 5000),
    exponent=st.integers(-20, 18),
    bound=st.floats(2.0**-10, 1000.0, width=32),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_length_and_magnitude(length: int, exponent: int, bound: float, seed: int) -> None:
    gradient = (np.random.default_rng(seed).standard_normal(length) * 10.0**exponent).astype(np.float32)
    with Store.create("clip", {"w": np.zeros(length)}, batches=[1], chunk_params=CHUNK) as store:
        store.join()
        store.start()
        staging = store.stage()
        staging.flat[:length] = gradient
        staging.flat[length:] = 0.0
        store.push(staging, 1, Hyper(lr=1.0, clip_norm=bound))
        found = -store.snapshot().tensors["w"].astype(np.float64)
    exact = gradient.astype(np.float64)
    factor = min(1.0, bound / (np.sqrt(np.sum(exact**2)) + 1e-6))
    np.testing.assert_allclose(found, factor * exact, rtol=3e-7, atol=1e-44)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_a_bound_is_a_finite_number(bad: float) -> None:
    with pytest.raises(errors.InputError, match="clip_norm"):
        Hyper(lr=0.1, clip_norm=bad)
