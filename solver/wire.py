"""What a link does, for the planner, the simulator and the emulation of links alike.

A link is full duplex: pushes do not take bandwidth from pulls. A worker's messages follow one another in each
direction, but only for the time that their bytes take; latencies overlap. Where a [[shared]] link is theirs,
the messages of several workers divide its bandwidth evenly at any time: n that begin together end together,
as late as if they had followed one another. So a round's pushes take the sum of their times, and then its
pulls do.
"""

from __future__ import annotations

import msgspec

from pyps.formats import Cluster, WorkerGroup

NANOSECONDS = 1e9
ROUNDING = 1e-6  # bytes: the rounding error of a counter


class LinkSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A link: seconds of an empty message, bytes a second each way; `shared` names one that several workers
    use.
    """

    latency_seconds: float
    bytes_per_second: float
    shared: str = ""


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
        """When a message will have passed if no other comes, in nanoseconds; None: it has."""
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


def stated_links(cluster: Cluster, group: WorkerGroup) -> tuple[LinkSpec, ...]:
    """The links that the file states for a group's workers: those that they share, or their own."""
    shared = shared_links(cluster, group)
    if shared or group.bandwidth is None:
        return shared
    return (LinkSpec(group.latency or 0.0, group.bandwidth),)
