"""Pushes, pulls and reads of parts of the parameters, against NumPy."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampled import examples

from pyps import Hyper, Store
from pyps.errors import InvalidArgument, NotFinite

ROWS, COLUMNS = 40, 100  # of the table: four chunks
BIAS = 30  # in a group of its own
CHUNK = 1024
F = np.float32
HYPERS = {
    "sgd": Hyper(lr=0.1, weight_decay=0.01),
    "momentum": Hyper(lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adamw": Hyper(lr=0.01, weight_decay=0.1),
    "adagrad": Hyper(lr=0.1, lr_decay=0.1),
}


@pytest.fixture
def name(shm: Any) -> str:
    return f"ranges-{os.getpid()}"


def tensors(seed: int = 0) -> dict[str, Any]:
    noise = np.random.default_rng(seed)
    table = noise.standard_normal((ROWS, COLUMNS)).astype(np.float32)
    return {"table": table, "bias": noise.standard_normal(BIAS).astype(np.float32)}


def made(name: str, **options: Any) -> Store:
    usual = {"batches": [4], "policy": "asp", "groups": {"table": 0, "bias": 1}, "max_participants": 4}
    store = Store.create(name, tensors(), **{**usual, "chunk_params": CHUNK, **options})
    store.join()
    return store


def packed(flat: Any, ranges: Any) -> Any:
    return np.concatenate([flat[int(a) : int(a + n)] for a, n in ranges])


class Reference:
    """The optimizers' formulas in NumPy, each operation rounded; a step touches what has a gradient."""

    def __init__(self, flat: Any, optimizer: str) -> None:
        self.x, self.m, self.v = flat.copy(), np.zeros_like(flat), np.zeros_like(flat)
        self.optimizer, self.hyper, self.steps = optimizer, HYPERS[optimizer], 0

    def step(self, gradient: Any, touched: Any) -> None:
        """gradient: [elements] of all; touched: a mask of them."""
        x, m, v = self.x[touched], self.m[touched], self.v[touched]
        x, m, v = getattr(self, self.optimizer)(gradient[touched], x, m, v)
        self.x[touched], self.m[touched], self.v[touched] = x, m, v
        self.steps += 1

    def sgd(self, g: Any, x: Any, m: Any, v: Any) -> Any:
        h = self.hyper
        return x - F(h.lr) * (g + F(h.weight_decay) * x), m, v

    def momentum(self, g: Any, x: Any, m: Any, v: Any) -> Any:
        h = self.hyper
        d = g + F(h.weight_decay) * x
        m = F(h.momentum) * m + d
        return x - F(h.lr) * (d + F(h.momentum) * m), m, v

    def adagrad(self, g: Any, x: Any, m: Any, v: Any) -> Any:
        h = self.hyper
        m = m + g * g
        lr = F(float(F(h.lr)) / (1 + self.steps * float(F(h.lr_decay))))
        return x - lr * g / (np.sqrt(m) + F(h.eps)), m, v

    def adamw(self, g: Any, x: Any, m: Any, v: Any) -> Any:
        h, t = self.hyper, self.steps + 1
        beta1, beta2, lr = (float(F(value)) for value in (*h.betas, h.lr))
        m = m + F(1 - beta1) * (g - m)
        v = F(beta2) * v + F(1 - beta2) * (g * g)
        below = np.sqrt(v) / F(np.sqrt(1 - beta2**t)) + F(h.eps)
        shrink = F(1 - lr * float(F(h.weight_decay)))
        return shrink * x - F(lr / (1 - beta1**t)) * m / below, m, v


@pytest.fixture
def stores(name: str) -> Iterator[list[Store]]:
    opened: list[Store] = []
    yield opened
    for store in reversed(opened):
        store.close()


def check(store: Store, reference: Reference) -> None:
    shot = store.snapshot()
    for found, expected in zip(
        (shot.parameters, *shot.state), (reference.x, reference.m, reference.v), strict=False
    ):
        np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))
    np.testing.assert_array_equal(shot.steps, reference.steps)


def used(store: Store) -> Any:
    """Which elements of the flat vector tensors have."""
    mask = np.zeros(store.layout.flat_elements, bool)
    for first, count in store.ranges(["table", "bias"]):
        mask[int(first) : int(first + count)] = True
    return mask


@pytest.mark.parametrize("optimizer", HYPERS)
def test_steps_of_ranges_are_those_of_numpy(name: str, stores: list[Store], optimizer: str) -> None:
    """Any ranges, whole pushes among them; what a push does not touch keeps its bits and its state."""
    store = made(name, optimizer=optimizer)
    stores.append(store)
    reference, noise = Reference(store.pull()[0], optimizer), np.random.default_rng(1)
    size, all_used = store.layout.flat_elements, used(store)
    for turn in range(12):
        store.start()
        gradient = noise.standard_normal(size).astype(np.float32)
        if turn % 4 == 3:
            staging = store.stage()
            np.copyto(staging.flat, gradient)
            store.push(staging, 4, reference.hyper)
            reference.step(gradient, all_used)
        else:
            cuts = np.sort(noise.choice(size, size=2 * int(noise.integers(1, 9)), replace=False))
            ranges = np.stack([cuts[::2], cuts[1::2] - cuts[::2]], axis=1)
            touched = np.zeros(size, bool)
            for first, count in ranges:
                touched[first : first + count] = True
            store.push(None, 4, reference.hyper, ranges=ranges, gradient=packed(gradient, ranges))
            reference.step(gradient, touched & all_used)
        check(store, reference)


def test_rows_of_a_table(name: str, stores: list[Store]) -> None:
    """An embedding's step: a push of the rows that the batch had, and a pull of those of the next one."""
    store = made(name)
    stores.append(store)
    rows = [0, 1, 17, 39]
    before = store.views(store.pull()[0])["table"].copy()
    store.start()
    values = np.full((len(rows), COLUMNS), 2, np.float32)
    result = store.push(
        None, 4, Hyper(lr=1.0), ranges=store.ranges("table", rows=rows), gradient=values.ravel()
    )
    assert (result.version, result.sources, result.samples) == (1, 1, 4)
    found, version = store.pull(ranges=store.ranges("table", rows=[1, 2, 39]))
    assert version == 1
    expected = before[[1, 2, 39]] - np.array([[2], [0], [2]], np.float32)
    np.testing.assert_array_equal(found.reshape(3, COLUMNS), expected)
    assert store.status().version == 1


def test_tensors_without_elements_hide_no_others(name: str) -> None:
    initial = {"none": np.zeros((0, 4)), "w": np.ones(3), "nothing": np.zeros(0), "v": np.ones(2)}
    with Store.create(name, initial, batches=[4]) as store:
        assert store.ranges(["w", "none"]).tolist() == [[0, 3]]
        assert store.ranges(["v", "nothing", "w"]).tolist() == [[0, 5]]


def test_zero_copy_in_the_staging_buffer(name: str, stores: list[Store]) -> None:
    """A gradient that lies in the buffer at its place: only its ranges are read, no NaN elsewhere."""
    store = made(name)
    stores.append(store)
    store.start()
    staging = store.stage()
    staging.flat.fill(np.nan)
    staging["bias"][:] = 1
    before = store.pull()[0].copy()
    store.push(staging, 4, Hyper(lr=1.0), ranges=store.ranges("bias"))
    before[store.ranges("bias")[0, 0] :][:BIAS] -= 1
    np.testing.assert_array_equal(store.pull()[0], before)
    assert np.all(np.from_dlpack(store.staging(staging.index))[: ROWS * COLUMNS] != 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
def test_a_round_takes_the_mean_over_all_samples(name: str, stores: list[Store], clip_norm: float) -> None:
    """Workers with other ranges each: missing values count as zeros, what no worker has stays as it is."""
    lead = made(name, batches=[1, 3], policy="bsp")
    other = Store.open(name)
    stores += [lead, other]
    other.join()
    size = lead.layout.flat_elements
    parts = (np.array([[5, 10], [2000, 100]]), np.array([[10, 10], [2050, 1000]]))
    noise = np.random.default_rng(2)
    dense = [np.zeros(size, np.float32) for _ in parts]
    for ranges, gradient in zip(parts, dense, strict=True):
        for first, count in ranges:
            gradient[first : first + count] = noise.standard_normal(count)
    before, hyper = lead.pull()[0].copy(), Hyper(lr=0.5, clip_norm=clip_norm)

    def push(k: int) -> None:
        store = (lead, other)[k]
        store.start()
        store.push(None, (1, 3)[k], hyper, ranges=parts[k], gradient=packed(dense[k], parts[k]), timeout=60)

    thread = threading.Thread(target=push, args=(1,))
    thread.start()
    push(0)
    thread.join()
    mean = (F(1) * dense[0] + F(3) * dense[1]) / F(4)
    norm = float(np.sqrt(np.sum(np.square(mean, dtype=np.float64))))
    factor = F(min(1.0, clip_norm / (norm + 1e-6))) if clip_norm else F(1)
    found, _ = other.pull()
    np.testing.assert_allclose(found, before - F(0.5) * (factor * mean), rtol=0 if not clip_norm else 1e-6)


@pytest.mark.parametrize("optimizer", sorted(HYPERS))
@pytest.mark.parametrize("kept", ["f32", "bf16"])
def test_an_exchange_in_a_round_with_ranges(
    name: str, stores: list[Store], optimizer: str, kept: str
) -> None:
    """One worker has all of the gradient, one has parts that begin at odd places."""
    lead = made(name, batches=[1, 1], policy="bsp", optimizer=optimizer, master=kept)
    other = Store.open(name)
    stores += [lead, other]
    other.join()
    ranges = np.array([[5, 10], [1027, 1], [2049, 3]])
    copy, hyper = np.zeros(lead.layout.flat_elements, np.float32), HYPERS[optimizer]
    parts: dict[str, Any] = {"ranges": ranges, "gradient": np.ones(14, np.float32), "timeout": 60}
    for version in (1, 2):
        lead.start()
        staging = lead.stage()
        staging.flat[:] = 0.5
        other.start()
        thread = threading.Thread(target=other.push, args=(None, 1, hyper), kwargs=parts)
        thread.start()
        assert lead.exchange(staging, 1, hyper, copy, timeout=60)[1] == version
        thread.join()
        np.testing.assert_array_equal(copy, lead.pull()[0])


@pytest.mark.parametrize("policy", ["ssp:bound=1", "softsync:n=1", "dynsgd", "backup:k=0"])
def test_every_kind_of_policy_takes_ranges(name: str, stores: list[Store], policy: str) -> None:
    """One ticket as any other."""
    store = made(name, policy=policy)
    stores.append(store)
    ranges = store.ranges("table", rows=[3])
    base, _ = store.pull(ranges=ranges)
    store.start()
    store.push(None, 4, Hyper(lr=1.0), ranges=ranges, gradient=np.ones(COLUMNS, np.float32))
    np.testing.assert_array_equal(store.pull(ranges=ranges)[0], base - 1)
    assert store.status().version == 1


def test_a_refused_push_of_ranges_changes_nothing(name: str, stores: list[Store]) -> None:
    """NaN is refused before anything is written, and the buffer taken for it is free again."""
    store = made(name)
    stores.append(store)
    store.start()
    before = store.pull()[0].copy()
    ranges, values = store.ranges("table", rows=[0, 5]), np.ones(2 * COLUMNS, np.float32)
    values[150] = np.inf
    for _ in range(3):  # more often than there are buffers
        with pytest.raises(NotFinite, match="table"):
            store.push(None, 4, Hyper(lr=1.0), ranges=ranges, gradient=values)
    np.testing.assert_array_equal(store.pull()[0], before)
    assert store.status().version == 0


@pytest.mark.parametrize(
    "ranges",
    [
        [],
        [[0, 0]],
        [[5, 5], [9, 2]],
        [[5, 2], [0, 1]],
        [[1 << 63, 1 << 63]],
        [[0, 1 << 40]],
        [[2**64 - 1, 2]],
    ],
)
def test_wrong_ranges_are_refused(name: str, stores: list[Store], ranges: Any) -> None:
    store = made(name)
    stores.append(store)
    given = np.array(ranges, np.uint64).reshape(-1, 2)
    with pytest.raises(InvalidArgument, match="range"):
        store.pull(ranges=given)
    store.start()
    staging = store.stage()
    with pytest.raises(InvalidArgument, match="range"):
        store.push(staging, 4, Hyper(lr=1.0), ranges=given)
    with pytest.raises(InvalidArgument, match="range"):
        store.read(lambda first, values: None, ranges=given)


def test_wrong_use_is_refused(name: str, stores: list[Store]) -> None:
    store = made(name)
    stores.append(store)
    one = np.ones(1, np.float32)
    for wrong in ({"rows": [1, 1]}, {"rows": [2, 1]}, {"rows": [ROWS]}, {"rows": [-1]}, {"rows": [[1]]}):
        with pytest.raises(InvalidArgument, match="rows"):
            store.ranges("table", **wrong)
    with pytest.raises(InvalidArgument, match="rows"):
        store.ranges(["table"], rows=[1])
    with pytest.raises(InvalidArgument, match="absent"):
        store.ranges("absent")
    store.start()
    for options in ({"encoding": "int8"}, {"ranges": [[0, 2]]}, {"ranges": [0, 1]}, {"ranges": [[0.5, 1.0]]}):
        with pytest.raises(InvalidArgument):
            store.push(None, 4, Hyper(lr=1.0), **{"ranges": [[0, 1]], "gradient": one, **options})
    with pytest.raises(InvalidArgument, match="gradient"):
        store.push(None, 4, Hyper(lr=1.0))
    store.push(store.stage(), 4, Hyper(lr=1.0))  # both buffers are still free


def test_a_read_shows_one_version_in_place(name: str, stores: list[Store]) -> None:
    """Pushes that come between two pieces do not show; what the visitor raises ends the read."""
    store, reader = made(name), Store.open(name)
    stores += [store, reader]
    expected = store.pull()[0].copy()
    seen: list[tuple[int, Any]] = []

    def look(first: int, values: Any) -> None:
        if len(seen) < 2:
            store.start()
            store.push(None, 4, Hyper(lr=1.0), gradient=np.ones(store.layout.flat_elements, np.float32))
        with pytest.raises(ValueError, match="read-only"):
            values[0] = 0
        seen.append((first, values.copy()))

    ranges = np.array([[10, 2000], [3000, 500]])
    assert reader.read(look, ranges=ranges) == 0
    assert store.status().version == 2
    np.testing.assert_array_equal(np.concatenate([values for _, values in seen]), packed(expected, ranges))
    assert [first for first, _ in seen] == [10, 1024, 3000, 3072]
    with pytest.raises(ZeroDivisionError):
        reader.read(lambda first, values: 1 // 0)
    assert reader.rank is None
    strict, version = reader.pull(ranges=ranges, strict=True)
    np.testing.assert_array_equal(strict, packed(store.pull()[0], ranges))
    assert version == 2


def test_a_restored_store_goes_on_alike(name: str, stores: list[Store]) -> None:
    """Adam's t is the store's, also of chunks that pushes left out, and after a restore."""
    store = made(name, optimizer="adamw")
    stores.append(store)
    hyper, noise = HYPERS["adamw"], np.random.default_rng(3)

    def step(each: Store, seed: int) -> None:
        rows = [seed % ROWS, seed % ROWS + 1]
        values = np.random.default_rng(seed).standard_normal(2 * COLUMNS).astype(np.float32)
        each.start()
        each.push(None, 4, hyper, ranges=each.ranges("table", rows=rows), gradient=values)

    for seed in noise.integers(0, ROWS - 2, 5):
        step(store, int(seed))
    twin = Store.create(f"{name}-twin", state=store.state())
    stores.append(twin)
    twin.join()
    for each in (store, twin):
        for seed in (4, 30, 12):
            step(each, seed)
    found, expected = twin.snapshot(), store.snapshot()
    np.testing.assert_array_equal(found.parameters, expected.parameters)
    np.testing.assert_array_equal(found.steps, expected.steps)
    for mine, theirs in zip(found.state, expected.state, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@settings(
    max_examples=examples(12, 40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 300)), min_size=1, max_size=8), st.integers(0, 7)
)
def test_pulled_ranges_are_parts_of_a_pull(
    pulled: dict[str, Any], gaps: list[tuple[int, int]], seed: int
) -> None:
    store, flat = pulled["store"], pulled["flat"]
    first, ranges = seed * 100, []
    for gap, count in gaps:
        ranges.append((first + gap, count))
        first += gap + count
    ranges = [(a, n) for a, n in ranges if a + n <= flat.size] or [(0, flat.size)]
    found, version = store.pull(ranges=ranges)
    assert version == 1
    np.testing.assert_array_equal(found, packed(flat, ranges))


@pytest.fixture(params=["f32", "int8"])
def pulled(name: str, stores: list[Store], request: pytest.FixtureRequest) -> dict[str, Any]:
    """A store whose pulls look ahead along the worker's own last gradient, and what one brings."""
    store = made(name, batches=[4, 4], optimizer="momentum")
    stores.append(store)
    with Store.open(name) as other:
        other.join()
        store.start()
        gradient = np.random.default_rng(5).standard_normal(store.layout.flat_elements).astype(np.float32)
        store.push(None, 4, HYPERS["momentum"], gradient=gradient, encoding=request.param)
    return {"store": store, "flat": store.pull()[0]}
