"""A worker of tests/helpers/soak.py: python soak_worker.py STORE RANK PACE_SECONDS CODEC.

Its gradient is 1 in its rank's own chunk and 0 elsewhere, so that the store counts each rank's pushes by
itself. It writes "(" before each push, and after it "." if it was taken, "x" if it was refused.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from pyps.errors import Busy, Fenced, LinkLost, PushRejected, TimedOut
from pyps.native.values import Hyper
from pyps.remote import open_store
from pyps.store import Store

JOIN_SECONDS = 10.0
LOST, TAKEN = 3, 4  # exit codes: the link is lost; the rank is another's


class Leaves:
    """Becomes true at SIGTERM."""

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, *_: object) -> None:
        self.asked = True


def say(mark: bytes) -> None:
    os.write(1, mark)


def join(store: Store, rank: int) -> None:
    """A dead predecessor may not have been noticed yet."""
    deadline = time.monotonic() + JOIN_SECONDS
    while True:
        try:
            store.join(rank)
            return
        except Busy:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def push(store: Store, rank: int, codec: str, samples: int) -> None:
    staging = store.stage()
    staging.flat[:] = 0.0
    staging[f"rank-{rank}"][:] = 1.0
    say(b"(")
    while True:
        try:
            store.push(staging, samples, Hyper(lr=1.0), encoding=codec)
            return say(b".")
        except TimedOut:
            continue  # its turn has not come
        except (Fenced, PushRejected):
            say(b"x")
            raise


def train(store: Store, rank: int, pace: float, codec: str, leaves: Leaves) -> None:
    chunk, pushed = store.layout.chunk_params, 0
    while not leaves.asked:
        try:
            claim = store.start()
            flat, _ = store.pull()
            own = flat[rank * chunk : (rank + 1) * chunk]
            if own.min() != own.max() or -own[0] < pushed or flat.max() > 0.0:
                raise SystemExit(f"rank {rank}: torn or lost: {own.min()}, {own.max()} after {pushed}")
            time.sleep(pace)
            push(store, rank, codec, claim.count)
            pushed += 1
        except TimedOut:
            continue
        except PushRejected:
            continue
        except Fenced:
            store.rejoin()


def main(name: str, rank: int, pace: float, codec: str) -> int:
    leaves = Leaves()
    try:
        with open_store(name) as store:
            join(store, rank)
            say(b"j")
            train(store, rank, pace, codec, leaves)
        return 0
    except LinkLost:
        return LOST
    except Busy:
        return TAKEN


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]))
