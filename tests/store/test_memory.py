"""Test what a store's workers take of its file system, and what they give back."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyps import Hyper, Store
from pyps.errors import InvalidArgument, SystemCallFailed
from pyps.native.local import LocalBackend
from pyps.native.values import Codec
from pyps.store.codec import encoded_bytes

SIZE = 4 << 20  # 16 MiB of parameters
MIB = 1 << 20


@pytest.fixture
def store(shm: Path) -> Any:
    initial = {"w": np.zeros(SIZE, np.float32)}
    with Store.create("memory", initial, batches=[4], policy="asp", max_participants=2) as made:
        yield made


def blocks(shm: Path) -> float:
    """MiB of the segment that have memory."""
    return (shm / "pyps-memory").stat().st_blocks * 512 / MIB


def test_a_worker_has_what_it_uses(store: Store, shm: Path) -> None:
    """A join, a range, codes, a whole gradient, and nothing after leave."""
    before = blocks(shm)
    store.join()
    joined = blocks(shm)
    assert joined - before < 2
    store.start()
    values = np.ones(SIZE // 100, np.float32)
    store.push(None, 4, Hyper(lr=1.0), ranges=[[5000, values.size]], gradient=values)
    assert blocks(shm) - joined < 2
    ranged, codes = blocks(shm), encoded_bytes(Codec.INT8, store.layout.flat_elements)
    staging = store.stage()
    assert isinstance(store.backend, LocalBackend)
    store.backend.staging_codes(staging.index, codes)
    assert codes / MIB <= blocks(shm) - ranged < 1.2 * codes / MIB
    coded = blocks(shm)
    assert staging.flat.size == store.layout.flat_elements
    assert 15 < blocks(shm) - coded < 18
    store.leave()
    assert blocks(shm) - joined < 1


def test_room_for_a_thousand_participants_is_small(shm: Path) -> None:
    """A view holds all of them, and each may need two views: only those in use have memory."""
    options: dict[str, Any] = {"batches": [4], "policy": "asp", "max_participants": 1000}
    with Store.create("memory", {"w": np.zeros(1024, np.float32)}, **options) as made:
        made.join()
        for _ in range(100):
            made.start()
            made.push(made.stage(), 4, Hyper(lr=1.0))
        assert blocks(shm) < 64


def huge_mib() -> int:
    """MiB of this process's shared memory that are mapped as huge pages."""
    found = re.search(
        r"ShmemPmdMapped: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text(encoding="utf-8")
    )
    return int(found[1]) // 1024 if found else 0


def has_huge_pages() -> bool:
    """Return whether the system makes huge pages of shared memory when it is asked to (Linux 6.1)."""
    enabled = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    release = tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])
    return release >= (6, 1) and enabled.exists() and "[deny]" not in enabled.read_text(encoding="utf-8")


def test_memory_comes_as_huge_pages_and_no_more_of_it(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, initial = {}, {"w": np.arange(SIZE, dtype=np.float32)}
    for wanted in ("0", "1"):
        monkeypatch.setenv("PYPS_HUGE_PAGES", wanted)
        before = huge_mib()
        with Store.create("memory", initial, batches=[4], policy="asp", max_participants=2) as store:
            store.join()
            store.start()
            gradient = np.ones(store.layout.flat_elements, np.float32)
            store.push(None, 4, Hyper(lr=1.0), gradient=gradient)
            assert np.array_equal(store.views(store.pull()[0])["w"], initial["w"] - 1)
            sizes[wanted] = blocks(shm)
            huge = huge_mib() - before
            if wanted == "0":
                assert huge == 0
    assert sizes["0"] == sizes["1"]
    if not has_huge_pages():
        pytest.skip("the system gives shared memory no huge pages")
    assert huge > 0  # how many depends on how much of its memory is in pieces


def test_parameters_are_spread_over_the_nodes_of_memory(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/proc/self/numa_maps").exists():
        pytest.skip("the kernel knows of no nodes")
    monkeypatch.setenv("PYPS_NUMA", "everywhere")
    with pytest.raises(InvalidArgument, match="PYPS_NUMA: found 'everywhere'; expected 'interleave'"):
        Store.create("memory", {"w": np.zeros(3)}, batches=[4])
    monkeypatch.setenv("PYPS_NUMA", "interleave")
    forbidden = contextlib.suppress(SystemCallFailed)  # as a container may do
    with forbidden, Store.create("memory", {"w": np.zeros(3)}, batches=[4]):
        maps = Path("/proc/self/numa_maps").read_text(encoding="utf-8")
        assert re.search(r" interleave:\d.*file=", maps)


def test_a_view_that_was_left_reads_zeros_of_its_own(store: Store, shm: Path) -> None:
    """It takes no memory of the segment."""
    store.join()
    flat = store.stage().flat
    flat.fill(1.0)
    store.leave()
    left = blocks(shm)
    assert not flat.any()
    assert blocks(shm) == left


def test_codes_have_room_for_halves_at_most(store: Store) -> None:
    store.join()
    assert isinstance(store.backend, LocalBackend)
    with pytest.raises(InvalidArgument, match="bytes"):
        store.backend.staging_codes(0, 3 * SIZE)


def test_core_files_leave_the_segment_out(store: Store) -> None:
    with Store.open("memory"):  # a creator's file has no name in the list
        maps = Path("/proc/self/smaps").read_text(encoding="utf-8")
    flags = maps.partition("pyps-memory")[2].partition("VmFlags:")[2].partition("\n")[0].split()
    assert "dd" in flags
    assert "dc" in flags  # no forked child has it
