"""A real run decided again: its journal through the functions that simulations decide by."""

from __future__ import annotations

import os

from pyps import native
from pyps.native.values import Replay
from pyps.store.policies import Policy, policy_named, register_policy


def replay(path: str | os.PathLike[str], policy: Policy | str | None = None) -> Replay:
    """Every decision of a journal (Store.journal, `pyps run --journal`) once more, in the run's order.

    `policy`: the run's, where it is one of one's own. Raises SegmentCorrupt if the file is no journal.
    """
    if policy is not None:
        register_policy(policy_named(policy) if isinstance(policy, str) else policy)
    return native.replay(os.fspath(path))
