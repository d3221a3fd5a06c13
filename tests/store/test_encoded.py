"""Encoded pushes, error feedback, exchange and encoded pulls, through the store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pyps import errors
from pyps.native.values import Hyper
from pyps.store import Store
from pyps.store.codec import Codec, Encoding, decode, encode, encoded_bytes

Array = NDArray[np.float32]
LOSSY = (Codec.BF16, Codec.F16, Codec.INT8, Codec.INT4, Codec.NF4)
SIZE = 5000
ONE = Hyper(lr=1.0)


@pytest.fixture(autouse=True)
def segments(shm: Path) -> Iterator[None]:
    yield
    assert not list(shm.iterdir())


def randn(count: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def make(name: str, policy: str = "asp", batches: tuple[int, ...] = (1,), **options: object) -> Store:
    """Each push is a whole step."""
    sizes = {"batches": batches, "chunk_params": 1024}
    return Store.create(name, {"w": np.zeros(SIZE)}, policy=f"{policy}:scaling=none", **sizes, **options)  # type: ignore[arg-type]


def weights(store: Store) -> Array:
    return store.views(store.pull()[0])["w"].copy()


def give(store: Store, gradient: Array, samples: int = 1, **options: object) -> None:
    store.start()
    staging = store.stage()
    staging["w"][:] = gradient
    store.push(staging, samples, ONE, **options)  # type: ignore[arg-type]


def flat_of(store: Store, w: Array) -> Array:
    flat = np.zeros(store.layout.flat_elements, np.float32)
    store.views(flat)["w"][:] = w
    return flat


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("policy", ["asp", "bsp"])
def test_a_push_applies_what_the_codec_carries(codec: Codec, policy: str) -> None:
    gradient = randn(SIZE)
    with make("carry", policy) as store:
        store.join()
        give(store, gradient, encoding=codec, scale=0.5)
        data, _ = encode(flat_of(store, gradient), codec, scale=0.5)
        carried = store.views(decode(data, codec, store.layout.flat_elements))["w"]
        np.testing.assert_array_equal(weights(store), -carried)


@pytest.mark.parametrize("codec", LOSSY)
def test_what_was_encoded_elsewhere_is_applied_as_it_is(codec: Codec) -> None:
    gradient = randn(SIZE)
    with make("elsewhere") as store:
        store.join()
        data, _ = encode(flat_of(store, gradient), codec)
        store.start()
        store.push(store.stage(), 1, Hyper(lr=1.0), 2.0, encoding=codec, gradient=data)
        carried = store.views(decode(data, codec, store.layout.flat_elements))["w"]
        np.testing.assert_array_equal(weights(store), -2 * carried)
        store.start()
        staging = store.stage()
        with pytest.raises(errors.InvalidArgument, match="gradient: found 4 bytes"):
            store.push(staging, 1, ONE, encoding=codec, gradient=data[:4])
        if codec >= Codec.INT8:
            data[-4:] = np.array([np.nan], np.float32).view(np.uint8)
            with pytest.raises(errors.NotFinite, match="scale that is not finite"):
                store.push(staging, 1, ONE, encoding=codec, gradient=data)
        store.push(staging, 0, ONE)


@settings(derandomize=True, deadline=None, max_examples=20)
@given(st.lists(st.tuples(st.sampled_from(LOSSY), st.integers(1, 9)), min_size=2, max_size=3))
def test_a_round_reduces_every_codec_in_rank_order(workers: list[tuple[Codec, int]]) -> None:
    gradients = [randn(SIZE, seed) for seed in range(len(workers))]
    samples = [count for _, count in workers]
    with make("round", "bsp", tuple(samples)) as first:
        handles = [first, *(Store.open("round") for _ in workers[1:])]
        for store in handles:
            store.join()
        expected = np.zeros(first.layout.flat_elements, np.float32)
        for (codec, count), gradient in zip(workers, gradients, strict=True):
            flat = flat_of(first, gradient)
            carried = decode(encode(flat, codec)[0], codec, flat.size)
            expected = expected + np.float32(count) * carried
        expected = expected / np.float32(sum(samples))
        import threading

        def work(k: int) -> None:
            give(handles[k], gradients[k], samples[k], encoding=workers[k][0])

        threads = [threading.Thread(target=work, args=(k,)) for k in reversed(range(len(workers)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        np.testing.assert_array_equal(weights(first), -first.views(expected)["w"])
        for store in handles[1:]:
            store.close()


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("policy", ["asp", "bsp"])
def test_feedback_telescopes(codec: Codec, policy: str) -> None:
    """All that was applied is all that was given, save the last residual; without feedback it is not."""
    how = Encoding(codec, error_feedback=True)
    ends = []
    for name, encoding in (("kept", how), ("lost", codec)):
        with make(name, policy) as store:
            store.join()
            for step in range(40):
                give(store, randn(SIZE, step) + np.float32(0.01), encoding=encoding)
            ends.append(-weights(store))
    total = sum(randn(SIZE, step).astype(np.float64) + np.float32(0.01) for step in range(40))
    kept, lost = (np.abs(end - total).mean() for end in ends)
    assert kept < lost / 2


def residual_is(store: Store, codec: Codec, expected: Array) -> None:
    """A gradient of zeros brings out what was kept."""
    before = weights(store)
    give(store, np.zeros(SIZE, np.float32), encoding=Encoding(codec, error_feedback=True))
    carried = decode(encode(flat_of(store, expected), codec)[0], codec, store.layout.flat_elements)
    np.testing.assert_array_equal(weights(store), before - store.views(carried)["w"])


def left_by(store: Store, codec: Codec, gradient: Array) -> Array:
    rest = np.empty(store.layout.flat_elements, np.float32)
    encode(flat_of(store, gradient), codec, residual_out=rest)
    return store.views(rest)["w"]


def test_a_push_that_fails_leaves_the_residual_as_it_was() -> None:
    gradient, how = randn(SIZE), Encoding(Codec.INT8, error_feedback=True)
    with make("refused") as store:
        store.join()
        give(store, gradient, encoding=how)
        store.start()
        staging = store.stage()
        staging.flat.fill(np.nan)
        with pytest.raises(errors.NotFinite, match="value 0"):
            store.push(staging, 1, ONE, encoding=how)
        staging.flat.fill(3.0)
        with pytest.raises(errors.InvalidArgument, match="samples: found 5"):
            store.push(staging, 5, ONE, encoding=how)
        store.push(staging, 0, ONE, encoding=how)  # skipped: nothing is encoded
        residual_is(store, Codec.INT8, left_by(store, Codec.INT8, gradient))


def test_counts_of_what_was_not_finite_come_back() -> None:
    gradient = randn(SIZE)
    gradient[[5, 700]] = np.inf
    with make("counts") as store:
        store.join()
        store.start()
        staging = store.stage()
        staging["w"][:] = gradient
        result = store.push(staging, 1, ONE, encoding=Encoding(Codec.INT4, nonfinite="skip"))
        assert (result.nonfinite, result.blocks_skipped) == (2, 2)
        assert np.isfinite(weights(store)).all()


def test_a_successor_inherits_the_residual() -> None:
    """Wherever it lies: the next one in that rank may sit in another slot."""
    gradient, how = randn(SIZE), Encoding(Codec.INT4, error_feedback=True)
    with make("inherit", max_participants=4) as owner:
        with Store.open("inherit") as first:
            first.join()
            give(first, gradient, encoding=how)
        with Store.open("inherit") as other, Store.open("inherit") as second:
            other.join(role="observer")  # not in the slot that holds the residual
            second.join()
            residual_is(second, Codec.INT4, left_by(second, Codec.INT4, gradient))
            assert second.ranks()[0].residuals_dropped == 0
        owner.reap()


def test_a_worker_takes_the_slot_of_its_residual() -> None:
    how = Encoding(Codec.INT8, error_feedback=True)
    with make("own", batches=(1, 1), max_participants=2):
        with Store.open("own") as one, Store.open("own") as two:
            one.join(0)
            two.join(1)
            give(one, randn(SIZE), encoding=how)
            give(two, randn(SIZE), encoding=how)
            left = left_by(two, Codec.INT8, randn(SIZE))
        with Store.open("own") as one, Store.open("own") as two:
            one.join(1)  # in the slot that comes second
            two.join(0)
            assert [rank.residuals_dropped for rank in store_ranks(one)] == [0, 0]
            residual_is(one, Codec.INT8, left)


def test_a_residual_in_a_slot_that_is_needed_is_dropped_and_counted() -> None:
    how = Encoding(Codec.INT8, error_feedback=True)
    with make("drop", batches=(1, 1, 1), max_participants=3):
        with ExitStack() as stack:
            joined = [stack.enter_context(Store.open("drop")) for _ in range(3)]
            for rank, worker in enumerate(joined):
                worker.join(rank)
            for worker in joined[:2]:
                give(worker, randn(SIZE), encoding=how)
        with Store.open("drop") as observer, Store.open("drop") as third, Store.open("drop") as first:
            observer.join(role="observer")  # in the one slot without a residual
            third.join(2)
            first.join(0)
            dropped = [rank.residuals_dropped for rank in store_ranks(first)]
            assert dropped == [1, 1, 0]  # each of the two took the slot of another rank's


def store_ranks(store: Store) -> list:  # type: ignore[type-arg]
    return store.ranks()


@pytest.mark.parametrize("policy", ["asp", "bsp"])
@pytest.mark.parametrize("codec", [Codec.F32, Codec.INT8])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_exchange_is_push_then_pull(policy: str, codec: Codec, optimizer: str) -> None:
    results = []
    for exchanging in (True, False):
        with make("exchange", policy, optimizer=optimizer) as store:
            store.join()
            flat = np.empty(store.layout.flat_elements, np.float32)
            for step in range(3):
                store.start()
                staging = store.stage()
                staging.flat.fill(0.0)
                staging["w"][:] = randn(SIZE, step)
                hyper = Hyper(lr=0.1)
                if exchanging:
                    result, version = store.exchange(staging, 1, hyper, flat, encoding=codec)
                    assert (result.version, version) == (step + 1, step + 1)
                else:
                    store.push(staging, 1, hyper, encoding=codec)
                    flat, version = store.pull(flat)
                np.testing.assert_array_equal(flat, store.pull()[0])
            assert store.members()[0].pulled_version == 3
            results.append(flat.copy())
    np.testing.assert_array_equal(*results)


def test_exchange_of_several_is_never_torn() -> None:
    """Workers push whole numbers and exchange at once: every chunk is one number, and none is lost."""
    import threading

    rounds, count = 40, 3
    with make("several", batches=(1,) * count) as first:
        handles = [first, *(Store.open("several") for _ in range(count - 1))]
        for store in handles:
            store.join()

        def work(store: Store) -> None:
            flat = np.empty(store.layout.flat_elements, np.float32)
            for _ in range(rounds):
                store.start()
                staging = store.stage()
                staging.flat.fill(-1.0)
                result, version = store.exchange(staging, 1, ONE, flat)
                assert version >= result.version
                w = store.views(flat)["w"]
                assert w.min() >= version
                for at in range(0, SIZE, 1024):
                    assert len(set(w[at : at + 1024].tolist())) == 1

        threads = [threading.Thread(target=work, args=(store,)) for store in handles]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert (weights(first) == rounds * count).all()
        for store in handles[1:]:
            store.close()


def test_a_skipped_exchange_is_a_pull() -> None:
    with make("skip") as store:
        store.join()
        give(store, randn(SIZE))
        store.start()
        flat = np.empty(store.layout.flat_elements, np.float32)
        result, version = store.exchange(store.stage(), 0, ONE, flat)
        assert (result.version, version) == (0, 1)
        np.testing.assert_array_equal(flat, store.pull()[0])


@pytest.mark.parametrize("codec", list(Codec))
def test_an_encoded_pull_is_quantized_from_fp32(codec: Codec) -> None:
    initial = randn(SIZE)
    groups = {"b": 1}  # its only chunk is nearly empty
    with Store.create(
        "pull", {"w": initial, "b": randn(3)}, batches=[1], groups=groups, chunk_params=1024
    ) as store:
        store.join()
        data, version = store.pull_encoded(codec)
        flat, _ = store.pull()
        assert version == 0
        assert data.size == encoded_bytes(codec, flat.size)
        np.testing.assert_array_equal(data, encode(flat, codec)[0])
        with pytest.raises(errors.InvalidArgument, match="out: found uint8"):
            store.pull_encoded(codec, data[:8])


def test_parameters_that_are_not_finite_are_not_encoded() -> None:
    with make("nan") as store:
        store.join()
        give(store, np.full(SIZE, 3e38, np.float32), scale=2.0)
        with pytest.raises(errors.NotFinite, match="value 0"):
            store.pull_encoded("int8")


def test_wrong_encodings_are_refused_before_anything_happens() -> None:
    with make("wrong") as store:
        store.join()
        store.start()
        staging = store.stage()
        with pytest.raises(errors.InputError, match="'int3'"):
            store.push(staging, 1, ONE, encoding="int3")
        with pytest.raises(errors.InvalidArgument, match="gradient: found float64"):
            store.push(staging, 1, ONE, gradient=np.zeros(3))  # type: ignore[arg-type]
        with pytest.raises(errors.InvalidArgument, match="out: found float32"):
            store.exchange(staging, 1, ONE, np.zeros(3, np.float32))
        assert store.status().version == 0


HALVES = {  # NaN and infinities
    Codec.BF16: np.array([0x7FC0, 0x7F80, 0xFF80], np.uint16),
    Codec.F16: np.array([0x7E00, 0x7C00, 0xFC00], np.uint16),
}


@pytest.mark.parametrize("codec", HALVES)
@pytest.mark.parametrize("nonfinite", ["error", "zero"])
def test_halves_that_are_not_finite_are_refused(codec: Codec, nonfinite: str) -> None:
    """Such halves have no scale that tells. What belongs to no parameter does not count."""
    how = Encoding(codec, nonfinite=nonfinite)  # type: ignore[arg-type]
    with make("halves") as store:
        store.join()
        store.start()
        whole, _ = encode(flat_of(store, randn(SIZE)), codec)
        for bad in HALVES[codec]:
            for place in (0, 1023, 1024, SIZE - 1):
                data = whole.copy()
                data.view(np.uint16)[place] = bad
                with pytest.raises(errors.NotFinite, match="the gradient of 'w' has a value"):
                    store.push(None, 1, ONE, encoding=how, gradient=data)
        assert store.status().version == 0
        whole.view(np.uint16)[SIZE:] = HALVES[codec][0]
        assert store.push(None, 1, ONE, encoding=how, gradient=whole).version == 1
        assert np.isfinite(weights(store)).all()


@pytest.mark.parametrize("looked", [[[0, 1024]], [[0, 1025], [1030, SIZE - 1030]], [[1024, SIZE - 1024]]])
def test_halves_are_read_where_not_all_of_a_chunk_was_looked_at(looked: list[list[int]]) -> None:
    with make("looked") as store:
        store.join()
        store.start()
        data, _ = encode(flat_of(store, randn(SIZE)), Codec.BF16)
        data.view(np.uint16)[0 if looked[0][0] else 1027] = 0x7FC0
        with pytest.raises(errors.NotFinite):
            store.push(None, 1, ONE, encoding="bf16", gradient=data, looked=looked)
        data, _ = encode(flat_of(store, randn(SIZE)), Codec.BF16)
        assert store.push(None, 1, ONE, encoding="bf16", gradient=data, looked=[[0, SIZE]]).version == 1


@pytest.mark.parametrize("codec", LOSSY)
def test_codes_are_of_no_ranges(codec: Codec) -> None:
    with make("ranges") as store:
        store.join()
        store.start()
        data, _ = encode(flat_of(store, randn(SIZE)), codec)
        with pytest.raises(errors.InvalidArgument, match="with ranges; expected PYPS_F32"):
            store.push(None, 1, ONE, encoding=codec, gradient=data, ranges=[[0, 10]])
        assert store.push(None, 1, ONE, encoding=codec, gradient=data).version == 1
