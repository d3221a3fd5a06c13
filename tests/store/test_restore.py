"""Any sequence of steps, of any policy and with any codecs, goes on in a restored store as in the first one.

Hypothesis draws the sequence. One thread makes every call and waits in none, and the seconds that a step
took are an input, so no result depends on time. What DSSP grants beyond its bound depends on measured times,
and so do SaPS's bounds unless they are fixed: neither is asked for here.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pyps.errors import Ended, PushRejected, TimedOut
from pyps.formats.plan import TurnSchedule
from pyps.native.state import StoreState
from pyps.native.values import Agreement, Codec, Encoding, Hyper, Optimizer
from pyps.store import Store
from pyps.store.creation import MASTERS
from pyps.store.policies import policy_named

pytestmark = pytest.mark.usefixtures("shm")
SHAPES = {"weight": (70, 30), "bias": (5,), "mean": (3,)}
BATCHES = (4, 3, 6)
STAGING_BUFFERS = 4  # gradients of one rank that may wait for a round
ROUND_TIMEOUT_SECONDS = 3600.0  # nothing here is ever late
POLICIES = (
    "bsp",
    "asp",
    "backup:k=1",
    "softsync:n=1",
    "ssp:bound=2",
    "dssp:bound=1,extra=2",
    "dynsgd",
    "saps:threshold=fixed,bound=2",
    "r2sp:slack=0,patience=1000000",
    "hps",
)
OF_TIMES = ("r2sp", "saps")  # policies whose own state has times in it


@dataclass(frozen=True)
class Turn:
    """Tell what a rank does next, if it can: it begins a step, or ends the one it is in."""

    rank: int
    codec: Codec
    feedback: bool
    stochastic: bool
    seconds: float
    clip_norm: float
    memory: int  # samples that it has memory for; 0: no limit


TURNS = st.lists(
    st.builds(
        Turn,
        rank=st.integers(0, len(BATCHES) - 1),
        codec=st.sampled_from(Codec),
        feedback=st.booleans(),
        stochastic=st.booleans(),
        seconds=st.sampled_from([0.01, 0.02, 0.05, 0.3]),
        clip_norm=st.sampled_from([0.0, 0.0, 5.0]),
        memory=st.sampled_from([0, 0, 2, 5]),
    ),
    min_size=6,
    max_size=30,
)


class Drive:
    """Workers of one store, driven by turns; `seen` is what each turn led to."""

    def __init__(self, stack: ExitStack, name: str, policy: str) -> None:
        self.workers = [stack.enter_context(Store.open(name)) for _ in BATCHES]
        self.flats: list[NDArray[np.float32]] = []
        for rank, worker in enumerate(self.workers):
            worker.join(rank)
            self.flats.append(np.zeros(worker.layout.flat_elements, np.float32))
        self.held: dict[int, tuple[Any, Any]] = {}  # by rank, its step: (claim, staging buffer)
        self.pushed: set[int] = set()  # whose push waits for the others
        self.seen: list[tuple[Any, ...]] = []
        self.policy = policy
        self.needs = self.workers[0].policy_needs()

    def take(self, turn: Turn) -> None:
        what = self._end(turn) if turn.rank in self.held else self._begin(turn)
        self.seen.append((turn.rank, *what))

    def settle(self) -> None:
        """End all steps, so that nothing is under way."""
        for _ in range(20 * len(BATCHES)):
            for rank in range(len(BATCHES)):
                if rank in self.held or self.pushed or self._waited_for():
                    self.take(Turn(rank, Codec.INT8, True, False, 0.02, 0.0, 0))
            if not self.held and not self._waited_for():
                return
        raise AssertionError(f"steps that never end: {self.seen[-10:]}")

    def forget(self) -> None:
        """Pulls that look ahead know a worker's last gradient until its buffer is given back, or it ends."""
        for worker in self.workers:
            for staging in [worker.stage() for _ in range(STAGING_BUFFERS)]:
                worker.unstage(staging)

    def _waited_for(self) -> bool:
        return any(member.staged for member in self.workers[0].members())

    def _begin(self, turn: Turn) -> tuple[Any, ...]:
        worker = self.workers[turn.rank]
        if self.needs.resizes_batches:
            worker.set_max_samples(turn.memory)
        ranks = {member.rank: member.clock for member in worker.members() if member.rank is not None}
        if self.policy == "dssp" and ranks[turn.rank] > min(ranks.values()) + 1:
            return ("too far ahead",)
        try:
            claim = worker.start(timeout=0.0)
        except (TimedOut, Ended) as error:
            return (type(error).__name__,)
        _, version = worker.pull(self.flats[turn.rank])
        self.held[turn.rank] = claim, worker.stage()
        return claim.first, claim.count, version

    def _end(self, turn: Turn) -> tuple[Any, ...]:
        worker, flat = self.workers[turn.rank], self.flats[turn.rank]
        claim, staging = self.held[turn.rank]
        if turn.rank not in self.pushed:
            noise = np.random.default_rng(claim.first)
            for name, view in staging.tensors().items():
                view[...] = noise.standard_normal(view.shape, np.float32) + worker.views(flat)[name]
        quantized = turn.codec >= Codec.INT8
        how = Encoding(
            turn.codec,
            rounding="stochastic" if turn.stochastic and quantized else "nearest",
            error_feedback=turn.feedback and turn.codec is not Codec.F32,
            seed=claim.first,
        )
        options: dict[str, Any] = {"compute_seconds": turn.seconds}
        if self.needs.needs_grad_norm:
            options["grad_norm_squared"] = 1.0 + claim.first % 5
        hyper = Hyper(lr=0.01, weight_decay=0.01, momentum=0.9, clip_norm=turn.clip_norm)
        try:
            result = worker.push(
                staging,
                claim.count,
                hyper,
                encoding=how,
                timeout=0.0,
                **options,
            )
        except TimedOut:
            self.pushed.add(turn.rank)
            return ("waits",)
        except PushRejected:
            result = None
        del self.held[turn.rank]
        self.pushed.discard(turn.rank)
        if self.needs.uses_turns:
            worker.pull(flat)
        if result is None:
            return ("rejected",)
        return result.version, result.staleness, result.sources, result.samples


def kept(state: StoreState, times: bool) -> Any:
    """Return what of a state is to be equal; times: without what has times in it."""
    h = state.header
    ranks = [
        (
            rank.total,
            rank.clock,
            rank.step_seconds,
            rank.sample_seconds,
            rank.staleness_per_sample,
            rank.next_batch,
            rank.max_samples,
            rank.extra_steps,
            rank.turn_rank,
            rank.turn_gap,
        )
        for rank in h.ranks
    ]
    arrays = {("parameters", name): value.tobytes() for name, value in state.parameters.items()}
    for kind, nested in (("vector", state.vectors), ("residual", state.residuals)):
        for outer, values in nested.items():
            arrays |= {(kind, outer, name): value.tobytes() for name, value in values.items()}
    header = (h.version, h.round, h.samples_assigned, h.ranges, h.slowest, h.fastest, h.steps, h.hyper)
    header += (h.master, h.rounding_seed)
    return header, ranks, arrays, () if times else h.policy_state


def drive_both(
    policy: str, optimizer: Optimizer, master: Codec, before: Sequence[Turn], after: Sequence[Turn]
) -> None:
    values = np.random.default_rng(1)
    tensors = {tensor: values.standard_normal(shape) for tensor, shape in SHAPES.items()}
    chosen = policy_named(policy, ROUND_TIMEOUT_SECONDS)
    times = chosen.name in OF_TIMES
    with ExitStack() as stack:
        first = stack.enter_context(
            Store.create(
                "first",
                tensors,
                groups={"weight": 0, "bias": 1, "mean": 2},
                averaged=["mean"],
                batches=BATCHES,
                samples=160,
                policy=chosen,
                optimizer=optimizer,
                master=master,
                agreement=Agreement(seed=3),
                chunk_params=1024,
                staging_buffers=STAGING_BUFFERS,
            )
        )
        if chosen.name == "r2sp":
            first.set_schedule(TurnSchedule((2, 0, 1), (1e-6, 1e-6, 1e-6), 3e-6))
        drive = Drive(stack, "first", chosen.name)
        for turn in before:
            drive.take(turn)
        drive.settle()
        drive.forget()
        state = first.state()
        second = stack.enter_context(Store.create("second", state=state, staging_buffers=STAGING_BUFFERS))
        again = Drive(stack, "second", chosen.name)
        assert kept(second.state(), times) == kept(state, times)
        drive.seen.clear()
        for one in (drive, again):
            for turn in after:
                one.take(turn)
            one.settle()
        assert again.seen == drive.seen
        for ours, theirs in zip(kept(second.state(), times), kept(first.state(), times), strict=True):
            assert ours == theirs


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(optimizer=st.sampled_from(Optimizer), master=st.sampled_from(MASTERS), before=TURNS, after=TURNS)
def test_goes_on_as_if_nothing_had_happened(
    policy: str, optimizer: Optimizer, master: Codec, before: list[Turn], after: list[Turn]
) -> None:
    drive_both(policy, optimizer, master, before, after)
