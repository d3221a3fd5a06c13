"""The workings of a link, for the planner, the simulator and the emulation alike, and the seconds that a
push and a pull take over a worker's, by the bits of a number on the wire.

A link is full duplex: pushes do not take bandwidth from pulls. A worker's messages follow one another in each
direction, but only for the time that their bytes take; latencies overlap. Where a [[shared]] link is theirs,
the messages of several workers divide its bandwidth evenly at any time: n that begin together end together,
as late as if they had followed one another. So a round's pushes take the sum of their times, and then its
pulls do. A store on the worker's own machine is reached without a link: one transfer follows the other.

Bytes and errors are those of the codecs: 32 is f32, 16 bf16, 8 int8 in blocks of 256, 4 int4 in blocks of 64,
with an fp32 scale a block. An error is the root mean square of the loss, relative to that of the numbers. It
was measured on normally distributed numbers; the tests measure it again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from pyps.formats import Bits, Cluster, WorkerGroup

WIRE_BYTES: dict[Bits, float] = {32: 4.0, 16: 2.0, 8: 1 + 4 / 256, 4: 0.5 + 4 / 64}
ERROR: dict[Bits, float] = {32: 0.0, 16: 0.0017, 8: 0.0070, 4: 0.108}
BYTES_PER_PARAMETER = 4
NANOSECONDS = 1e9
ROUNDING = 1e-6  # bytes: the rounding error of a counter


@dataclass(frozen=True)
class LinkCost:
    """One way: seconds of an empty message, and seconds of the model's parameters on the wire at 32 bits.

    duplex: several transfers travel at once, and pushes do not delay pulls. Otherwise one transfer follows
    the other. averaged_seconds: of what travels with the parameters at 32 bits, however these are encoded.
    """

    latency_seconds: float
    model_seconds: float
    duplex: bool = True
    averaged_seconds: float = 0.0

    def one_way_seconds(self, bits: Bits) -> float:
        """Seconds for which a message occupies the link in its direction."""
        return self.model_seconds * WIRE_BYTES[bits] / WIRE_BYTES[32] + self.averaged_seconds

    def wire_seconds(self, push: Bits = 32, pull: Bits = 32) -> float:
        """Seconds that one push and then one pull spend on the link, without latency."""
        return self.one_way_seconds(push) + self.one_way_seconds(pull)

    def busy_seconds(self, push: Bits = 32, pull: Bits = 32) -> float:
        """The least seconds from one transfer to the next: those of the busier direction."""
        if not self.duplex:
            return self.seconds(push, pull)
        return max(self.one_way_seconds(push), self.one_way_seconds(pull))

    def seconds(self, push: Bits = 32, pull: Bits = 32) -> float:
        """Seconds of a push followed by a pull of the whole model."""
        return 2 * self.latency_seconds + self.wire_seconds(push, pull)


def step_seconds(
    compute_seconds: float, links: Sequence[LinkCost], push: Bits = 32, pull: Bits = 32, depth: int = 1
) -> float:
    """Seconds from one step of a worker to its next; with `depth` steps under way, all but one in transfer.

    compute_seconds: of a step. links: that a push and a pull cross, one after another. push, pull: bits of a
    number. depth: 1: transfers follow compute.
    """
    if depth == 1:
        return compute_seconds + transfer_seconds(links, push, pull)
    return max(compute_seconds, overlapped_seconds(links, push, pull, depth))


def overlapped_seconds(links: Sequence[LinkCost], push: Bits, pull: Bits, depth: int) -> float:
    """The least seconds of a step of which depth - 1 >= 1 others are in transfer.

    links: that a push and a pull cross; each may carry another transfer. push, pull: bits of a number.
    """
    busy = max((link.busy_seconds(push, pull) for link in links), default=0.0)
    return max(busy, transfer_seconds(links, push, pull) / (depth - 1))


def in_series(links: Sequence[LinkCost]) -> LinkCost | None:
    """One link that takes as long as all of these, one after another; None: there are none."""
    if not links:
        return None
    names = ("latency_seconds", "model_seconds", "averaged_seconds")
    latency, model, averaged = (sum(getattr(x, name) for x in links) for name in names)
    return LinkCost(latency, model, all(x.duplex for x in links), averaged)


def transfer_seconds(links: Sequence[LinkCost], push: Bits = 32, pull: Bits = 32) -> float:
    """Seconds of a push followed by a pull over links that they cross one after another."""
    return sum(link.seconds(push, pull) for link in links)


def link_cost(
    parameters: int | None,
    bandwidth: float | None,
    latency: float | None,
    duplex: bool = True,
    averaged: int = 0,
) -> LinkCost | None:
    """The cost of a link with this bandwidth each way, in bytes a second, and latency, in seconds.

    averaged: fp32 values of each parameter that travel with it.
    Returns None if the number of parameters or the bandwidth is unknown; an unknown latency counts as 0.
    """
    if parameters is None or bandwidth is None:
        return None
    seconds = BYTES_PER_PARAMETER * parameters / bandwidth
    return LinkCost(latency or 0.0, seconds, duplex, averaged * seconds)


class LinkSlowdown(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From `begin` to `end`, in seconds of a run, a link carries a message in `factor` times the time."""

    begin: float
    end: float
    factor: float


class LinkSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A link: seconds of an empty message, bytes a second each way; `shared` names one that several workers
    use. slower: when it is, where it is one worker's own.
    """

    latency_seconds: float
    bytes_per_second: float
    shared: str = ""
    slower: tuple[LinkSlowdown, ...] = ()

    def passes(self, size: float, at: float) -> float:
        """Return when a message of `size` bytes has passed that begins to at `at`, in seconds of the run."""
        edges = sorted({edge for slow in self.slower for edge in (slow.begin, slow.end) if edge > at})
        for edge in [*edges, math.inf]:
            factors = [slow.factor for slow in self.slower if slow.begin <= at < slow.end]
            rate = self.bytes_per_second / math.prod(factors)
            if at + size / rate <= edge:
                return at + size / rate
            size, at = size - rate * (edge - at), edge
        raise AssertionError(size)


class FairShares(msgspec.Struct):
    """One direction of a link whose messages divide its bandwidth evenly.

    time: nanoseconds, of what follows. counter: bytes that each message has passed which has been here from
    the beginning. ends: of the messages here, the counter at which each has passed, and its number. count: of
    all messages until now.
    """

    time: int = 0
    counter: float = 0.0
    ends: list[tuple[float, int]] = []
    count: int = 0

    def add(self, now: int, size: float, bytes_per_second: float) -> int:
        """A message of `size` bytes comes; its number."""
        self.advance(now, bytes_per_second)
        self.count += 1
        self.ends = sorted([*self.ends, (self.counter + size, self.count)])
        return self.count

    def advance(self, now: int, bytes_per_second: float) -> None:
        """Let time pass until `now`: messages that have passed are gone."""
        left = max(0.0, (now - self.time) / NANOSECONDS * bytes_per_second)  # bytes, of all messages
        while self.ends:
            needed = (self.ends[0][0] - self.counter) * len(self.ends)
            if needed > left + ROUNDING:
                self.counter += left / len(self.ends)
                break
            self.counter, left = self.ends[0][0], max(0.0, left - needed)
            self.ends = self.ends[1:]
        self.time = max(now, self.time)

    def end(self, number: int, bytes_per_second: float) -> int | None:
        """Return when a message will have passed if no other comes, in nanoseconds; None: it has."""
        passed, counter = 0.0, self.counter
        for place, (end, one) in enumerate(self.ends):
            passed += (end - counter) * (len(self.ends) - place)
            counter = end
            if one == number:
                return self.time + max(1, round(passed / bytes_per_second * NANOSECONDS))
        return None


def shared_links(cluster: Cluster, group: WorkerGroup) -> tuple[LinkSpec, ...]:
    """The [[shared]] links that the transfers of a group's workers cross, in the file's order; with [sync],
    none.
    """
    return tuple(
        LinkSpec(one.latency, one.bandwidth, one.name)
        for one in cluster.shared
        if one.bandwidth is not None and one.name in group.shares and cluster.sync is None
    )


def link_slowdowns(cluster: Cluster, name: str) -> tuple[LinkSlowdown, ...]:
    """Return when the own link of the worker with this name is slower, as the file's faults say."""
    return tuple(
        LinkSlowdown(fault.at, fault.at + fault.seconds if fault.seconds else math.inf, fault.factor)
        for fault in cluster.simulation.fault
        if fault.kind == "link" and name in cluster.named(fault.worker)
    )


def stated_links(cluster: Cluster, group: WorkerGroup, name: str) -> tuple[LinkSpec, ...]:
    """The links that the file states for a group's worker: those that the group shares, or its own."""
    shared = shared_links(cluster, group)
    if shared or group.bandwidth is None:
        return shared
    return (LinkSpec(group.latency or 0.0, group.bandwidth, slower=link_slowdowns(cluster, name)),)
