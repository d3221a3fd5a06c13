"""Journals: a replay finds what was changed, says what is missing, and takes no file at its word."""

from __future__ import annotations

import contextlib
import resource
import struct
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyps
from pyps.errors import Ended, InvalidArgument, PushRejected, SegmentCorrupt, SegmentNotFound, StoreError
from pyps.native.decisions import Advice
from pyps.native.values import Hyper
from pyps.simulate import replay
from pyps.store.policies import Policy

BYTES, SEQUENCE, VERDICT, KIND, NOW = 4, 16, 32, 40, 48  # offsets into an entry, as csrc/policy/runs.h has it
PUSH = 6


def work(store: pyps.Store, rank: int, journal: Path) -> None:
    store.journal(journal)
    store.join(rank)
    flat = np.empty(store.layout.flat_elements, np.float32)
    while True:
        try:
            claim = store.start()
            staging = store.stage()
            store.pull(flat)
            if store.should_continue(1, 1) is Advice.ABORT:
                continue
            staging.flat[:] = 1.0
            store.push(staging, claim.count, Hyper(lr=1e-3), grad_norm_squared=1.0 + rank)
        except PushRejected:
            pass
        except Ended:
            break
    store.leave()


def journalled(tmp_path: Path, policy: str, ranks: int = 3) -> Path:
    """A run of threads, each with its own handle."""
    journal, name = tmp_path / "journal", f"replay-{tmp_path.name[-40:]}"
    batches = [4, 2, 3][:ranks]
    with pyps.Store.create(
        name, {"w": np.zeros(64)}, batches=batches, policy=policy, samples=120, max_participants=ranks
    ) as first:
        stores = [first, *(pyps.Store.open(name) for _ in range(ranks - 1))]
        threads = [threading.Thread(target=work, args=(s, k, journal)) for k, s in enumerate(stores)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        for store in stores[1:]:
            store.close()
    return journal


def entries(data: bytes) -> list[int]:
    at, found = 0, []
    while at < len(data):
        found.append(at)
        at += struct.unpack_from("<I", data, at + BYTES)[0]
    return found


def commits_a_push(data: bytes, at: int) -> bool:
    return struct.unpack_from("<I", data, at + KIND)[0] == PUSH and data[at + VERDICT] == 0


@pytest.mark.parametrize("policy", [name for name in Policy.known if name != "custom"])
def test_every_policy_decides_the_same_again(shm: Path, tmp_path: Path, policy: str) -> None:
    again = replay(journalled(tmp_path, policy))
    assert (again.differences, again.missing_events, again.first) == (0, 0, "")
    assert again.decisions > again.events >= 120 // 4


def test_a_time_that_was_changed_is_found(shm: Path, tmp_path: Path) -> None:
    journal = journalled(tmp_path, "r2sp")
    data = bytearray(journal.read_bytes())
    at = [at for at in entries(data) if commits_a_push(data, at)][9]
    now = struct.unpack_from("<Q", data, at + NOW)[0]
    struct.pack_into("<Q", data, at + NOW, now + 10**9)
    journal.write_bytes(data)
    again = replay(journal)
    assert again.differences > 0
    assert "event 6" in again.first


def test_an_event_that_is_missing_is_counted(shm: Path, tmp_path: Path) -> None:
    journal = journalled(tmp_path, "asp")
    data = journal.read_bytes()
    at = [at for at in entries(data) if commits_a_push(data, at)][-2]
    size = struct.unpack_from("<I", data, at + BYTES)[0]
    journal.write_bytes(data[:at] + data[at + size :])
    assert replay(journal).missing_events > 0
    journal.write_bytes(data[:-3])  # the last entry, cut short
    assert replay(journal).differences == 0


def test_a_disk_that_was_full_for_a_while_leaves_whole_entries(shm: Path, tmp_path: Path) -> None:
    """Later entries of the other worker are not taken for the rest of half an entry. A refusal
    that is not written is the same refusal.
    """
    journal, before = tmp_path / "journal", resource.getrlimit(resource.RLIMIT_FSIZE)
    options: dict[str, Any] = {"batches": [4, 4], "policy": "asp"}
    with pyps.Store.create("full", {"w": np.zeros(64)}, **options) as one, pyps.Store.open("full") as two:
        for rank, store in enumerate((one, two)):
            store.journal(journal)
            store.join(rank)
        one.start()
        resource.setrlimit(resource.RLIMIT_FSIZE, (journal.stat().st_size + 40, before[1]))
        try:
            with pytest.raises(InvalidArgument, match="samples: found 9"):
                one.push(one.stage(), 9, Hyper(lr=1.0))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        size = journal.stat().st_size
        two.start()
        two.pull()
    assert entries(journal.read_bytes())[-1] >= size
    again = replay(journal)
    assert (again.differences, again.missing_events) == (0, 0)


def test_stores_that_share_a_journal_are_decided_again_each(shm: Path, tmp_path: Path) -> None:
    """A run that is resumed appends to its journal, and its new store counts some views again."""
    journal, options = tmp_path / "journal", {"policy": "asp"}
    plans = [[4], [5], [6]]
    with contextlib.ExitStack() as stack:
        stores = [
            stack.enter_context(pyps.Store.create(f"one-{k}", {"w": np.zeros(64)}, batches=plan, **options))
            for k, plan in enumerate(plans)
        ]
        for store in stores:
            store.join(0)
            store.journal(journal)
        for _ in range(20):
            for store in stores:
                store.push(store.stage(), store.start().count, Hyper(lr=1e-3))
    again = replay(journal)
    assert (again.differences, again.missing_events, again.first) == (0, 0, "")
    assert again.events >= 3 * 20


def test_no_file_is_trusted(tmp_path: Path, shm: Path) -> None:
    with pytest.raises(SegmentNotFound):
        replay(tmp_path / "none")
    bad = tmp_path / "bad"
    bad.write_bytes(bytes(4096))
    with pytest.raises(SegmentCorrupt):
        replay(bad)
    data = journalled(tmp_path, "saps", ranks=2).read_bytes()
    draw = np.random.default_rng(0)
    for _ in range(300):
        changed = bytearray(data)
        for at in draw.integers(0, len(data), 8):
            changed[at] = draw.integers(256)
        bad.write_bytes(changed)
        with contextlib.suppress(StoreError):
            replay(bad)
