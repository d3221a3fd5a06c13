"""The one list of what a store does: `Backend`, which pyps.Store holds and every kind of store implements.

    pyps.native.local.LocalBackend       a segment of this machine
    pyps.remote.link.LinkBackend         a store behind a server
    pyps.shards.sharded.ShardedBackend   a store over several servers

A type checker compares each with this list where a Store is made of it; the link makes its calls from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Protocol

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from pyps.formats.plan import TurnSchedule
from pyps.native import STORE_TIMEOUT
from pyps.native.decisions import Advice, PolicyNeeds, PolicyParams
from pyps.native.ranges import Ranges, Visitor
from pyps.native.state import FlatState
from pyps.native.status import Member, PushCounts, Status
from pyps.native.transfer import FinishTransfer, TransferRequest
from pyps.native.values import (
    Claim,
    Codec,
    CostModel,
    DataSet,
    Flat,
    Hyper,
    Layout,
    PushRequest,
    RankCost,
    Role,
    Tensor,
    Traffic,
)

MAX_CALL_SECONDS = 3600.0  # no call over a link waits longer, whatever was asked

# What a server accepts of a client it does not trust; on this machine the core checks.
Timeout = Annotated[float, Meta(ge=STORE_TIMEOUT, le=MAX_CALL_SECONDS)]
Count = Annotated[int, Meta(ge=0, lt=1 << 32)]
Position = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class Backend(Protocol):
    """An open store. pyps.Store checks what its user gives, and makes one call at a time; only what looks
    (status, members, ranks, costs, hyper, wait for none of them) and a transfer's end may come meanwhile.

    Every verb raises a StoreError whose class says what happened (pyps.errors); over a link also LinkLost.
    Flat vectors are contiguous fp32 [flat_elements], chunk padding included. Timeouts are seconds;
    STORE_TIMEOUT: twice the store's round_timeout_seconds. Attributes do not change while the store is open.
    """

    @property
    def layout(self) -> Layout:
        """The store's sizes."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The parts of the flat vector, in the order in which they were given."""

    @property
    def policy_params(self) -> PolicyParams:
        """The numbers of the store's policy."""

    @property
    def policy_needs(self) -> PolicyNeeds:
        """Return what the store's policy asks of its workers."""

    @property
    def servers(self) -> int:
        """How many servers hold the store; 0: it is on this machine."""

    @property
    def undone(self) -> int:
        """Pushes that making this store has undone: of one that had lost shards, after the state given."""

    @property
    def traffic(self) -> Traffic:
        """Return what went over links so far."""

    def close(self) -> None:
        """Leave and let go of the store; what this handle made and does not keep is removed."""

    # Taking part.

    def join(self, role: Role, rank: Annotated[int, Meta(ge=-1, lt=1 << 31)]) -> int:
        """Become a participant; the rank, -1 for an observer. rank -1: the lowest that no live worker has.

        Raises Busy, StoreFull, InvalidArgument.
        """

    def leave(self) -> None:
        """Stop participating: claims go back, staging buffers are given up."""

    def rejoin(self) -> None:
        """After Fenced: become active again under the same rank, without claims and staging buffers."""

    def reap(self) -> int:
        """Remove dead participants and complete their admitted pushes; how many there were."""

    # Claims.

    def start(self, timeout: Timeout) -> Claim:
        """Claim the next samples, waiting as the policy says. Raises Ended, Fenced, TimedOut."""

    def start_ahead(self, after: Position | None) -> Claim:
        """With a step under way, claim the next one's samples without waiting; count 0: nothing now.
        after: where the last claim that the caller has begins; None: the last that was given.

        Raises Fenced, InvalidArgument under a policy that waits.
        """

    def should_continue(self, done: Count, following: Count) -> Advice:
        """Between two micro-batches: go on, push the `done` samples now, or give them up. Raises Fenced."""

    def await_turn(self, timeout: Timeout) -> None:
        """Under a policy with turns, wait until this worker's push may be sent; else nothing.

        A push waits for its turn in any case; after this its gradient has the link for itself. Raises Fenced,
        TimedOut.
        """

    def set_max_samples(self, most: Count) -> None:
        """Samples that fit this worker's memory at once, from the next claim on; 0: no limit."""

    def set_data_set(self, data: DataSet) -> None:
        """The data set that this worker reads. Raises InvalidArgument, naming the rank that has another."""

    def set_cost_model(self, model: CostModel) -> None:
        """Say what this worker's steps are expected to cost."""

    # Parameters.

    def pull(self, out: Flat, ranges: Ranges | None = None, codec: Codec = Codec.F32) -> int:
        """Copy the parameters, each chunk whole, to `out`; the oldest version among the chunks.

        ranges: uint64 [n, 2], parts of the flat vector, whose values `out` then has one after the other.
        codec: of the numbers on their way, without ranges. Raises NotFinite where they cannot be encoded.
        """

    def pull_encoded(self, codec: Codec, out: NDArray[np.uint8]) -> int:
        """The parameters encoded from fp32, averaged ones as fp32 behind them; the version. Raises NotFinite.

        out: uint8 [encoded_vector_bytes].
        """

    def read(self, visit: Visitor, ranges: Ranges | None, timeout: Timeout) -> int:
        """Show `visit` one version's parameters of the ranges (None: all), piece by piece; the version.

        For a participant. Raises SnapshotCancelled, Busy, and what `visit` raises.
        """

    def snapshot(self, out: Flat, state: Sequence[Flat], steps: NDArray[np.float64], timeout: Timeout) -> int:
        """Fill the arrays with one version's parameters, optimizer vectors (all or none) and steps of each
        chunk; the version. For a participant. Raises SnapshotCancelled, Busy.
        """

    def state(self, timeout: Timeout) -> FlatState:
        """All that a store needs to go on from the present version. For a participant. As `snapshot`."""

    # Gradients.

    def stage(self, timeout: Timeout) -> int:
        """The index of a staging buffer that is free to be filled. Raises Fenced."""

    def unstage(self, staging: int) -> None:
        """Give a staging buffer back. Raises InvalidArgument if it waits in a round."""

    def staging(self, staging: int) -> Flat:
        """A staging buffer's fp32 [flat_elements], without a copy. Raises OutOfSpace."""

    def begin_transfer(self, request: TransferRequest[PushRequest]) -> FinishTransfer:
        """Send a push, claims of later steps and a pull; what is returned waits for their end, and writes the
        parameters. Several may be under way, to be finished in order, in another thread if need be. A store
        on this machine does all of it at the end. After one has failed later ones fail alike, until the
        worker rejoins or starts.

        Raises Fenced, TimedOut, OutOfSpace, InvalidArgument; one that is alone (pyps.native.transfer.Ask)
        also PushRejected, NotFinite: a store elsewhere has been sent nothing then.
        """

    def keep_residual(self, start: Flat | None, keep: Callable[[int, Flat], None]) -> None:
        """Where this process keeps what its codes do not carry: begin with `start`, fp32 [trained_elements]
        (None: nothing), and give `keep` each push's staging buffer and residual before it is sent. A store on
        this machine keeps residuals itself. Raises InvalidArgument for one of another size.
        """

    # Looking.

    def status(self) -> Status:
        """The store's counters."""

    def members(self) -> list[Member]:
        """Every participant slot that was ever used, in slot order."""

    def ranks(self) -> list[PushCounts]:
        """Return what each rank has done, in rank order."""

    def costs(self) -> list[RankCost]:
        """Return what each rank's steps cost, in rank order."""

    def hyper(self) -> list[Hyper | None]:
        """The constants of each group's last step; None: no step yet, or an averaged group."""

    def wait(self, sequence: Position, timeout: Timeout) -> None:
        """Sleep until the view is later than `sequence`. Raises TimedOut."""

    # Planning.

    def replan(self, batches: Sequence[Count], plan: Position | None) -> None:
        """Change the planned batch of every rank. plan: that this was decided on; None: any.

        Raises PlanChanged, InvalidArgument.
        """

    def set_schedule(self, schedule: TurnSchedule) -> None:
        """The policy's turns from the next cycle on. For a participant. Raises InvalidArgument."""

    def journal(self, path: str | None) -> None:
        """Append every decision taken through this handle to a file; None: no longer.

        Raises InvalidArgument over a link: decisions are taken where the server is.
        """
