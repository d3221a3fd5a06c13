"""A store made from another's state goes on bit for bit, here and over a link."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyps.native.state import VECTORS, StoreState
from pyps.native.values import Codec, Encoding, Hyper, Optimizer
from pyps.remote import create_store, open_store
from pyps.store import Store

SHAPES = {"weight": (70, 30), "bias": (5,), "mean": (3,)}
GROUPS = {"weight": 0, "bias": 1, "mean": 2}
BATCHES = (4, 3)
HYPER = Hyper(lr=0.01, weight_decay=0.01, momentum=0.9)


@contextmanager
def workers(name: str, count: int = len(BATCHES)) -> Iterator[list[Store]]:
    with ExitStack() as stack:
        joined = [stack.enter_context(open_store(name)) for _ in range(count)]
        for rank, worker in enumerate(joined):
            worker.join(rank)
        yield joined


def step(worker: Store, how: Encoding | None) -> tuple[int, int, int]:
    """A gradient that depends on samples and parameters; the push's place in the run."""
    claim = worker.start()
    flat, _ = worker.pull()
    staged = worker.stage()
    noise = np.random.default_rng(claim.first)
    for tensor in worker.tensors:
        at = slice(tensor.offset, tensor.offset + tensor.elements)
        staged.flat[at] = noise.standard_normal(tensor.elements, np.float32) + flat[at]
    result = worker.push(staged, claim.count, HYPER, encoding=how)
    worker.pull()  # ends its turn, if the policy has turns
    return claim.first, claim.count, result.version


def steps(
    joined: list[Store], how: Encoding | None, rounds: int, together: bool
) -> list[tuple[int, int, int]]:
    """All workers' steps, in turn or at once."""
    found: list[tuple[int, int, int]] = []
    with ThreadPoolExecutor(len(joined) if together else 1) as pool:
        for _ in range(rounds):
            found += pool.map(lambda worker: step(worker, how), joined)
    return sorted(found)


def assert_same(a: StoreState, b: StoreState) -> None:
    for name in ("version", "round", "samples_assigned", "ranges", "slowest", "fastest", "steps", "hyper"):
        assert getattr(a.header, name) == getattr(b.header, name), name
    assert [rank.clock for rank in a.header.ranks] == [rank.clock for rank in b.header.ranks]
    assert [rank.total for rank in a.header.ranks] == [rank.total for rank in b.header.ranks]
    assert a.vectors.keys() == b.vectors.keys() == set(VECTORS[a.header.optimizer])
    assert a.residuals.keys() == b.residuals.keys()
    pairs = [(a.parameters, b.parameters)]
    pairs += [(a.vectors[name], b.vectors[name]) for name in a.vectors]
    pairs += [(a.residuals[rank], b.residuals[rank]) for rank in a.residuals]
    for x, y in pairs:
        assert x.keys() == y.keys()
        assert all(x[name].tobytes() == y[name].tobytes() for name in x)


def made(name: str, **options: Any) -> Store:
    values = np.random.default_rng(1)
    tensors = {tensor: values.standard_normal(shape) for tensor, shape in SHAPES.items()}
    options = {"groups": GROUPS, "averaged": ["mean"], "batches": BATCHES, "chunk_params": 1024, **options}
    return create_store(name, tensors, **options)


INT4 = Encoding(Codec.INT4, error_feedback=True)


@pytest.mark.parametrize("how", [None, INT4], ids=["f32", "int4"])
@pytest.mark.parametrize("policy", ["bsp", "asp", "ssp:bound=2", "r2sp:slack=0", "saps", "softsync:n=2"])
@pytest.mark.parametrize("optimizer", list(Optimizer))
def test_goes_on_bit_for_bit(shm: Path, optimizer: Optimizer, policy: str, how: Encoding | None) -> None:
    together = policy == "bsp"
    with made("a", optimizer=optimizer, policy=policy) as store, workers("a") as joined:
        steps(joined, how, 3, together)
        state = store.state()
        expected = steps(joined, how, 3, together)
        end = store.state()
    with Store.create("b", state=state) as again, workers("b") as joined:
        assert_same(again.state(), state)
        assert steps(joined, how, 3, together) == expected
        assert_same(again.state(), end)
