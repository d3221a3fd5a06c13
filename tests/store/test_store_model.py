"""pyps.Store against a small model in Python: any sequence of calls, from two workers and an observer."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sampled import examples

from pyps import errors
from pyps.native.status import Member, MemberState
from pyps.native.values import Codec, Encoding, Hyper
from pyps.store.codec import decode
from pyps.store.store import StagingBuffer, Store

SHAPES = {"weight": (700, 3), "bias": (5,)}
SAMPLES = 40
HANDLES = 3
AREAS = 2
# Values that each codec carries exactly, in fp32 arithmetic too.
EXACT = {Codec.F32: 3, Codec.BF16: 5, Codec.F16: 11, Codec.INT8: 127, Codec.INT4: 7, Codec.NF4: 13}
HYPER = Hyper(lr=1.0)


@dataclass
class Worker:
    """A handle, and what the model thinks of it."""

    store: Store
    rank: int | None = None  # -1: an observer
    claim: tuple[int, int] | None = None
    pulled: int = 0
    clock: int = 0
    staged: list[StagingBuffer] = field(default_factory=list)


@dataclass
class Rank:
    batch: int
    pushes: int = 0
    samples: int = 0
    skipped: int = 0
    returned: int = 0
    staleness: list[int] = field(default_factory=list)


def claim_size(left: int, batch: int, batches: list[int]) -> int:
    """No claim leaves a single sample behind, unless a rank is planned one, or this one two."""
    return batch - 1 if left - batch == 1 and batch > 2 and 1 not in batches else min(left, batch)


class StoreMachine(RuleBasedStateMachine):
    @initialize()
    def create(self) -> None:
        parent = "/dev/shm" if Path("/dev/shm").is_dir() else None
        self.folder = tempfile.mkdtemp(prefix="test-pyps-", dir=parent)
        self.patch = pytest.MonkeyPatch()
        self.patch.setenv("PYPS_SHM_DIR", self.folder)
        zeros = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        self.owner = Store.create(
            "model",
            zeros,
            batches=[3, 2],
            policy="asp:scaling=none",
            samples=SAMPLES,
            chunk_params=1024,
            max_participants=HANDLES + 1,
            staging_buffers=AREAS,
            groups={"weight": 0, "bias": 1},
        )
        self.workers = [Worker(Store.open("model")) for _ in range(HANDLES)]
        self.ranks = [Rank(3), Rank(2)]
        self.joined: set[int] = set()
        self.values = dict.fromkeys(SHAPES, 0.0)
        self.history = [dict(self.values)]
        self.cursor = self.lost = self.plan = self.min_clock = 0
        self.back: list[tuple[int, int]] = []

    def teardown(self) -> None:
        if hasattr(self, "owner"):
            for worker in self.workers:
                worker.store.close()
            self.owner.close()
            self.patch.undo()
            left = list(Path(self.folder).iterdir())
            shutil.rmtree(self.folder)
            assert not left, "a segment is left"

    @property
    def version(self) -> int:
        return len(self.history) - 1

    @property
    def opened(self) -> bool:
        return self.joined == {0, 1}

    def follow_min_clock(self) -> None:
        """A worker that joins late starts at the clock of the slowest, or of the last one that left."""
        clocks = [w.clock for w in self.workers if w.rank in (0, 1)]
        self.min_clock = min(clocks, default=self.min_clock)

    def outstanding(self) -> bool:
        return any(w.claim for w in self.workers)

    # Membership.

    @rule(i=st.integers(0, HANDLES - 1), rank=st.sampled_from([None, 0, 1]))
    def join(self, i: int, rank: int | None) -> None:
        worker, held = self.workers[i], {w.rank for w in self.workers}
        free = [r for r in (0, 1) if r not in held]
        if worker.rank is not None:
            with pytest.raises(errors.InvalidArgument):
                worker.store.join(rank)
        elif (rank is None and not free) or (rank is not None and rank in held):
            with pytest.raises((errors.StoreFull, errors.Busy)):
                worker.store.join(rank)
        else:
            worker.rank = worker.store.join(rank)
            worker.pulled, worker.clock = 0, self.min_clock
            assert worker.rank == (min(free) if rank is None else rank)
            self.joined.add(worker.rank)

    @rule(i=st.integers(0, HANDLES - 1))
    def observe(self, i: int) -> None:
        worker = self.workers[i]
        if worker.rank is None:
            worker.rank = worker.store.join(role="observer")
            worker.pulled = 0
        if worker.rank == -1:
            with pytest.raises(errors.InvalidArgument):
                worker.store.start(timeout=0)

    @rule(i=st.integers(0, HANDLES - 1))
    def leave(self, i: int) -> None:
        worker = self.workers[i]
        if worker.rank is None:
            with pytest.raises(errors.InvalidArgument):
                worker.store.leave()
            return
        worker.store.leave()
        self.give_back(worker, 0)
        worker.rank, worker.staged = None, []
        self.follow_min_clock()

    def give_back(self, worker: Worker, keep: int) -> None:
        if worker.claim is None:
            return
        first, count = worker.claim
        worker.claim = (first, keep) if keep else None
        if count <= keep:
            return
        assert worker.rank is not None
        self.ranks[worker.rank].returned += count - keep
        merged: list[tuple[int, int]] = []
        for start, length in sorted([*self.back, (first + keep, count - keep)]):
            if merged and sum(merged[-1]) == start:
                start, length = merged[-1][0], merged.pop()[1] + length
            merged.append((start, length))
        self.back = merged

    # The training step.

    def take(self, batch: int) -> tuple[int, int]:
        if self.back:
            first, count = self.back[0]
            taken = claim_size(count, batch, [rank.batch for rank in self.ranks])
            self.back[:1] = [(first + taken, count - taken)] if count > taken else []
            return first, taken
        taken = claim_size(SAMPLES - self.cursor, batch, [rank.batch for rank in self.ranks])
        self.cursor += taken
        return self.cursor - taken, taken

    @rule(i=st.integers(0, HANDLES - 1))
    def start(self, i: int) -> None:
        worker = self.workers[i]
        if worker.rank is None or worker.rank < 0:
            return
        if not self.opened:
            with pytest.raises(errors.TimedOut):
                worker.store.start(timeout=0)
            return
        if worker.claim is None and not self.back and self.cursor == SAMPLES:
            with pytest.raises(errors.TimedOut if self.outstanding() else errors.Ended):
                worker.store.start(timeout=0)
            return
        worker.claim = worker.claim or self.take(self.ranks[worker.rank].batch)
        claim = worker.store.start(timeout=0)
        assert (claim.first, claim.count) == worker.claim
        assert (claim.batch, claim.plan) == (self.ranks[worker.rank].batch, self.plan)

    @rule(i=st.integers(0, HANDLES - 1))
    def pull(self, i: int) -> None:
        worker = self.workers[i]
        if worker.rank is None:
            with pytest.raises(errors.InvalidArgument):
                worker.store.pull()
            return
        flat, version = worker.store.pull()
        self.check(worker.store, flat, version)
        worker.pulled = version

    @rule(i=st.integers(0, HANDLES - 1), codec=st.sampled_from([Codec.F32, Codec.F16]))
    def pull_encoded(self, i: int, codec: Codec) -> None:
        worker = self.workers[i]
        if worker.rank is None:
            return
        data, version = worker.store.pull_encoded(codec)
        flat = decode(data, codec, worker.store.layout.flat_elements)
        if all(abs(value) < 2048 for value in self.values.values()):  # integers that f16 has
            self.check(worker.store, flat, version)
        worker.pulled = version

    @rule(i=st.integers(0, HANDLES - 1))
    def stage(self, i: int) -> None:
        worker = self.workers[i]
        if worker.rank is None or worker.rank < 0 or len(worker.staged) == AREAS:
            with pytest.raises(errors.InvalidArgument):
                worker.store.stage(timeout=0)
            return
        staging = worker.store.stage(timeout=0)
        assert staging.index not in [a.index for a in worker.staged]
        worker.staged.append(staging)

    @rule(
        i=st.integers(0, HANDLES - 1),
        codec=st.sampled_from(Codec),
        sign=st.sampled_from([-1.0, 1.0, 2.0]),
        samples=st.integers(0, 4),
        exchange=st.booleans(),
        error_feedback=st.booleans(),
    )
    def push(
        self, i: int, codec: Codec, sign: float, samples: int, exchange: bool, error_feedback: bool
    ) -> None:
        worker = self.workers[i]
        if worker.rank is None or worker.rank < 0:
            return
        if not worker.staged:
            self.stage(i)
        staging = worker.staged[0]
        staging.flat.fill(0.0)
        staging["weight"].fill(EXACT[codec])
        how = Encoding(codec, error_feedback=error_feedback and codec is not Codec.F32)
        if worker.claim is None or samples > worker.claim[1]:
            with pytest.raises(errors.InvalidArgument, match="samples"):
                worker.store.push(staging, samples, HYPER, sign, timeout=0, encoding=how)
            return
        out, version = np.empty_like(staging.flat), 0
        if exchange:
            result, version = worker.store.exchange(staging, samples, HYPER, out, sign, 0, encoding=how)
        else:
            result = worker.store.push(staging, samples, HYPER, sign, 0, encoding=how)
        worker.staged.pop(0)
        self.pushed(worker, samples, EXACT[codec] * sign)
        assert result.version == (self.version if samples else 0)
        if exchange:
            assert version == self.version
            self.check(worker.store, out, version)
            worker.pulled = version

    def pushed(self, worker: Worker, samples: int, step: float) -> None:
        assert worker.claim is not None
        assert worker.rank is not None
        rank = self.ranks[worker.rank]
        if samples:
            self.give_back(worker, samples)
            rank.pushes += 1
            rank.samples += samples
            rank.staleness.append(self.version - worker.pulled)
            self.values["weight"] -= step
            self.history.append(dict(self.values))
        else:
            rank.skipped += worker.claim[1]
        worker.claim = None
        worker.clock += 1
        self.follow_min_clock()

    # Watching and steering.

    @rule(i=st.integers(0, HANDLES - 1))
    def snapshot(self, i: int) -> None:
        taken = self.workers[i].store.snapshot(timeout=5)
        assert taken.version == self.version
        self.check(self.workers[i].store, taken.parameters, self.version)
        assert set(taken.steps.tolist()) == {self.version}

    @rule(i=st.integers(0, HANDLES - 1), batches=st.lists(st.integers(1, 5), min_size=2, max_size=2))
    def replan(self, i: int, batches: list[int]) -> None:
        worker = self.workers[i]
        if worker.rank is None:
            with pytest.raises(errors.InvalidArgument):
                worker.store.replan(batches)
            return
        worker.store.replan(batches)
        self.plan += 1
        for rank, batch in zip(self.ranks, batches, strict=True):
            rank.batch = batch

    @precondition(lambda self: any(w.rank is None for w in self.workers))
    @rule()
    def another_handle(self) -> None:
        worker = next(w for w in self.workers if w.rank is None)
        worker.store.close()
        with pytest.raises(errors.StoreClosed):
            worker.store.status()
        worker.store = Store.open("model")

    def check(self, store: Store, flat: np.ndarray[tuple[int], np.dtype[np.float32]], version: int) -> None:
        assert version == self.version
        for name, view in store.views(flat).items():
            assert (view == self.history[version][name]).all(), name

    @invariant()
    def counters(self) -> None:
        if not hasattr(self, "owner"):
            return
        status = self.owner.status()
        active = sum(w.rank is not None and w.rank >= 0 for w in self.workers)
        found = (status.version, status.plan, status.samples_dropped, status.active, status.all_joined)
        assert found == (self.version, self.plan, self.lost, active, self.opened)
        for rank, counted in zip(self.ranks, self.owner.ranks(), strict=True):
            assert counted.batch == rank.batch
            assert (counted.pushes, counted.samples) == (rank.pushes, rank.samples)
            assert (counted.skipped, counted.returned) == (rank.skipped, rank.returned)
            assert counted.staleness_sum == sum(rank.staleness)
            assert counted.staleness_max == max(rank.staleness, default=0)

    @invariant()
    def members(self) -> None:
        if not hasattr(self, "owner"):
            return

        def described(m: Member) -> tuple[int, int, int, tuple[int, int] | None]:
            claim = (m.claim_first, m.claim_count) if m.claim_count else None
            return (-1 if m.rank is None else m.rank, m.clock, m.pulled_version * (m.rank is not None), claim)

        found = [described(m) for m in self.owner.members() if m.state is MemberState.ACTIVE]
        expected = [
            (w.rank, w.clock * (w.rank >= 0), w.pulled * (w.rank >= 0), w.claim)
            for w in self.workers
            if w.rank is not None
        ]
        assert sorted(found, key=str) == sorted(expected, key=str)

    @invariant()
    def every_sample_is_somewhere(self) -> None:
        if hasattr(self, "owner"):
            done = sum(rank.samples + rank.skipped for rank in self.ranks)
            held = sum(w.claim[1] for w in self.workers if w.claim)
            assert self.cursor == done + held + self.lost + sum(count for _, count in self.back)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(
    derandomize=True, deadline=None, max_examples=examples(25, 150), stateful_step_count=80
)
