"""The seconds of one gradient synchronisation, by the number of workers and the slowest link.

For k workers, each with a one-way message of the whole model in x_i = bytes / bandwidth_i and a latency l_i,

    ring    2 (k-1) l + 2 (k-1)/k x    all-reduce in k-1 steps out and back, each of a k-th of the model
    tree    2 ceil(log2 k) (l + x)     reduce and broadcast, the whole model at each level
    server  2 k (l + x)                push and pull of every worker through the server's one link, in turn
    none    0

for the slowest link in use, in the usual latency-bandwidth model (Thakur, Rabenseifner, Gropp, Int. J. High
Perform. Comput. Appl. 19, 2005, section 2, for ring and tree). Each is nondecreasing in k, in l and in x.

A sharded model (FSDP) is gathered and reduced in p passes, each around a ring: p = 3 if parameters are
gathered forward and backward, p = 2 if once, p = 3 under DDP: an all-reduce, and a gather of what owners have
stepped. In r replicas of n = k / r ranks each (HSDP), every rank then reduces its n-th of the model with the
same rank of the other replicas:

    p (n-1) l + p (n-1)/n x + 2 (r-1) l + 2 (r-1)/r x/n

Where ranks have unlike shares of it, the link of the one with the least share m carries 1 - m, not (n-1)/n,
but for the q passes of an all-reduce, whose parts are equal.

Gradients may travel while others are still computed. If the first of them are ready with a share o of the
compute to go, and a share e of the synchronisation is left to do after the last one, t seconds of compute and
s of synchronisation end after

    max(t + e s, (1 - o) t + s)

With o = 0 this is t + s: nothing overlaps. The end is nondecreasing in t and in s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from pyps.solver.costs import Floats, Ints

SyncKind = Literal["none", "ring", "tree", "server"]


@dataclass(frozen=True)
class Sync:
    """Hold how workers synchronise; latency_seconds and message_seconds (the model one way) of each worker.

    overlap: the share o of the compute above. tail: the share e of the synchronisation. passes, replicas,
    equal_passes: p, r and q above, of a ring. least_share: m; None: shares are equal.
    """

    kind: SyncKind
    latency_seconds: Floats
    message_seconds: Floats
    overlap: float = 0.0
    tail: float = 0.0
    passes: int = 2
    replicas: int = 1
    equal_passes: int = 0
    least_share: float | None = None

    @staticmethod
    def of(
        kind: SyncKind,
        count: int,
        latency: npt.ArrayLike = 0.0,
        message: npt.ArrayLike = 0.0,
        *,
        overlap: float = 0.0,
        tail: float = 0.0,
        passes: int = 2,
        replicas: int = 1,
    ) -> Sync:
        """A Sync of workers. Raises ValueError if a time is negative or not finite, or a share not in 0..1.

        kind: how they synchronise. count: how many there are. latency, message: seconds; a scalar applies to
        all. overlap, tail: shares, as above. passes, replicas: of a sharded model, as above.
        """
        if not (0 <= overlap <= 1 and 0 <= tail <= 1):
            raise ValueError("overlap and tail must be shares, from 0 to 1")
        links = [np.broadcast_to(np.asarray(x, float), count) for x in (latency, message)]
        if any((~np.isfinite(x) | (x < 0)).any() for x in links):
            raise ValueError("latency and message seconds must be finite and not negative")
        return Sync(kind, links[0], links[1], overlap, tail, passes, replicas)

    def exposed(self, compute_seconds: float, sync_seconds: float) -> float:
        """Return what the synchronisation adds to so much compute."""
        return max(self._after(sync_seconds), sync_seconds - self.overlap * compute_seconds)

    def _after(self, sync_seconds: float) -> float:
        """Return what is left of the synchronisation after the compute; also of an infinite one."""
        return self.tail * sync_seconds if self.tail else 0.0

    def end(self, compute_seconds: float, sync_seconds: float) -> float:
        """Return when a step of so much compute and synchronisation ends."""
        return compute_seconds + self.exposed(compute_seconds, sync_seconds)

    def compute_by(self, end: float, sync_seconds: float) -> float:
        """The most seconds of compute with which a step ends by `end`; negative if there are none."""
        left = end - sync_seconds
        if self.overlap < 1:
            left /= 1 - self.overlap
        elif left >= 0:
            left = math.inf
        return min(end - self._after(sync_seconds), left)

    def by_link(self, count: int) -> Floats:
        """Seconds of one synchronisation of `count` >= 1 workers if worker i's link is the slowest."""
        latency, message = self.latency_seconds, self.message_seconds
        if self.kind == "ring":
            shards, replicas = max(1.0, count / self.replicas), min(self.replicas, count)
            steps = self.passes * (shards - 1) + 2 * (replicas - 1)
            least, unlike = 1 / shards, self.passes - self.equal_passes
            most = 1 - (least if self.least_share is None else self.least_share)
            parts = self.equal_passes * (1 - least) + unlike * most + 2 * ((replicas - 1) / replicas) / shards
            return steps * latency + parts * message
        if self.kind == "tree":
            return 2 * (count - 1).bit_length() * (latency + message)
        return (2 * count if self.kind == "server" else 0) * (latency + message)

    def take(self, index: Ints) -> Sync:
        """That of the workers at `index`."""
        return replace(
            self, latency_seconds=self.latency_seconds[index], message_seconds=self.message_seconds[index]
        )

    def seconds(self, batches: npt.ArrayLike) -> float:
        """Seconds of one synchronisation of the workers with a batch above 0."""
        used = np.asarray(batches) > 0
        count = int(used.sum())
        return float(self.by_link(count)[used].max()) if count else 0.0
