"""Room in a store's file system for workers beyond its plan: planned ranks first, then a share a key."""

from __future__ import annotations

import os

from pyps import native
from pyps.errors import OutOfSpace
from pyps.native.local import LocalBackend
from pyps.native.status import MemberState
from pyps.remote.site import Site
from pyps.store.segments import folder

PEER_SHARE = 0.5  # of the room that planned ranks leave: what one peer's new workers may take


def worker_bytes(store: LocalBackend) -> int:
    """What a worker's staged gradients take of the file system at most, with their base parameters."""
    needs = native.policy_needs(store.layout.policy, store.policy_params)
    return 4 * store.layout.flat_elements * store.layout.staging_buffers * (1 + needs.needs_base_params)


def check_room(store: LocalBackend, site: Site, peer: str) -> None:
    """Raise OutOfSpace unless one more new worker of this peer leaves planned ranks and other peers theirs.

    A worker gets its memory when it first stages, so those that are there count as if they had none yet.
    """
    found = os.statvfs(folder())
    size, free = worker_bytes(store), found.f_bavail * found.f_frsize
    held, planned = list(site.new_workers.values()), store.layout.ranks
    alive = MemberState.ACTIVE, MemberState.FENCED
    present = {m.rank for m in store.members() if m.state in alive and m.rank is not None}
    absent = len(set(range(planned)) - present)
    left, mine = free - size * absent, held.count(peer)
    if left < size * (len(held) + 1) or (mine and size * (mine + 1) > PEER_SHARE * left):
        text = f"{free >> 20} MiB are free, and {absent} planned ranks and {len(held)} new workers may need"
        need = f"{size >> 20} MiB each ({mine} of {peer}); enlarge it or set PYPS_SHM_DIR"
        raise OutOfSpace("join", f"no room for one more new worker: {text} {need}")
