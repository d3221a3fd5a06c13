"""Threads that share a worker's chunks: the same bits with any number, and nothing of them left behind."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from pyps import Hyper, Store
from pyps.errors import InvalidArgument, NotFinite

PARAMETERS = 40_000  # 40 chunks of 1024
COUNTS = (1, 2, 5)


def store(name: str, **options: object) -> Store:
    values = np.random.default_rng(1).standard_normal(PARAMETERS).astype(np.float32)
    plain = {"batches": [1], "policy": "asp", "chunk_params": 1024}
    return Store.create(name, {"w": values}, **(plain | options))


def threads_here() -> int:
    return len(os.listdir("/proc/self/task"))


def pulled(one: Store) -> bytes:
    out = np.zeros(one.layout.flat_elements, np.float32)
    one.pull(out)
    return out.tobytes()


def history(name: str, threads: int, exchanges: bool, clip_norm: float, **options: object) -> list[bytes]:
    """The parameters after each of some steps."""
    random, found = np.random.default_rng(2), []
    with store(name, **options) as one:
        one.join(0)
        assert one.set_threads(threads) == threads
        out = np.zeros(one.layout.flat_elements, np.float32)
        for _ in range(4):
            one.start()
            staging = one.stage()
            staging.flat[:PARAMETERS] = random.standard_normal(PARAMETERS)
            hyper = Hyper(lr=1e-2, momentum=0.9, clip_norm=clip_norm)
            if exchanges:
                one.exchange(staging, 1, hyper, out)
            else:
                one.push(staging, 1, hyper)
                one.pull(out)
            found.append(out.tobytes())
    return found


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
@pytest.mark.parametrize("policy", ["asp", "bsp"])
@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
@pytest.mark.parametrize("exchanges", [False, True])
def test_the_bits_are_the_same(
    shm: Path, optimizer: str, policy: str, clip_norm: float, exchanges: bool
) -> None:
    master = "bf16" if optimizer == "sgd" else "f32"
    first, *others = (
        history("threads", count, exchanges, clip_norm, optimizer=optimizer, policy=policy, master=master)
        for count in COUNTS
    )
    assert all(other == first for other in others)
    assert len(set(first)) == len(first)


def test_a_refused_gradient_is_named_alike_and_changes_nothing(shm: Path) -> None:
    messages = set()
    for count in COUNTS:
        with store("threads") as one:
            one.join(0)
            one.set_threads(count)
            before = pulled(one)
            for copied in (False, True):
                one.start()
                staging = one.stage()
                bad = np.zeros(one.layout.flat_elements, np.float32)
                bad[[77, 20_000, 39_000]] = np.nan, np.inf, -np.inf
                staging.flat[:] = 0 if copied else bad
                with pytest.raises(NotFinite) as refused:
                    one.push(staging, 1, Hyper(lr=1), gradient=bad if copied else None)
                messages.add(str(refused.value))
                assert pulled(one) == before
                one.leave()
                one.join(0)
    assert len(messages) == 1


def test_threads_end_at_leave_and_come_again(shm: Path) -> None:
    before = threads_here()
    with store("threads") as one:
        assert one.set_threads(3) == 1  # not before it joins
        one.join(0)
        assert threads_here() == before + 2
        assert one.set_threads(2) == 2
        one.leave()
        assert threads_here() == before
        one.join(0)
        assert threads_here() == before + 1
    assert threads_here() == before


def test_a_store_without_slots_for_threads_has_none(shm: Path) -> None:
    with store("threads", max_participants=9) as one:
        one.join(0)
        assert one.set_threads(4) == 1
        with pytest.raises(InvalidArgument, match="threads: found 0; expected 1 to 64"):
            one.set_threads(0)
    with store("threads", max_participants=11) as one:
        one.join(0)
        assert one.set_threads(4) == 3


def test_a_forked_child_has_no_threads_and_the_parent_keeps_them(shm: Path, tmp_path: Path) -> None:
    with store("threads") as one:
        one.join(0)
        one.set_threads(3)
        child = os.fork()
        if not child:
            code = 1
            try:
                one.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        one.start()
        assert one.push(one.stage(), 1, Hyper(lr=1)).version == 1


def test_signals_are_the_callers(shm: Path) -> None:
    with store("threads") as one:
        before = set(os.listdir("/proc/self/task"))
        one.join(0)
        one.set_threads(2)
        (new,) = set(os.listdir("/proc/self/task")) - before
        status = Path(f"/proc/self/task/{new}/status").read_text(encoding="utf-8")
        blocked = next(line for line in status.splitlines() if line.startswith("SigBlk"))
        assert int(blocked.split()[1], 16) & 1 << 1, "SIGINT is not blocked"


def test_threads_that_have_worked_can_become_more(shm: Path) -> None:
    """Threads that come wait for the next call, not for one that was before they came."""
    found = []
    for counts in ((1, 1, 1, 1), (2, 3, 5, 2)):
        with store("threads") as one:
            one.join(0)
            for threads in counts:
                assert one.set_threads(threads) == threads
                for _ in range(2):
                    one.start()
                    staging = one.stage()
                    staging.flat[:] = 1 + one.status().version
                    one.push(staging, 1, Hyper(lr=0.5))
            found.append(pulled(one))
    assert found[0] == found[1]


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("exchanges", [False, True])
def test_the_callers_rounding_of_the_smallest_numbers_does_not_matter(
    shm: Path, optimizer: str, exchanges: bool
) -> None:
    """A thread may flush what is smaller than 1e-38 to zero; a store's steps do not."""
    found = []
    for threads, flushes in ((1, False), (1, True), (3, True)):
        with store("threads", optimizer=optimizer) as one:
            one.join(0)
            one.set_threads(threads)
            out = np.zeros(one.layout.flat_elements, np.float32)
            if not torch.set_flush_denormal(flushes):
                pytest.skip("this processor flushes nothing")
            try:
                for _ in range(2):
                    one.start()
                    staging = one.stage()
                    staging.flat.view(np.uint32)[:] = np.arange(staging.flat.size) + 1  # 1e-45 to 6e-41
                    if exchanges:
                        one.exchange(staging, 1, Hyper(lr=1.0), out)
                    else:
                        one.push(staging, 1, Hyper(lr=1.0))
            finally:
                torch.set_flush_denormal(False)
            snapshot = one.snapshot()
            found.append(
                (out.tobytes(), [vector.tobytes() for vector in (snapshot.parameters, *snapshot.state)])
            )
    assert found[0] == found[1] == found[2]
