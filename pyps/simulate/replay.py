"""Replay the journal of a real run through the decision core that simulations use."""

from __future__ import annotations

import os

from pyps import native
from pyps.native.values import Replay
from pyps.store.policies import Policy, policy_named, register_policy


def replay(path: str | os.PathLike[str], policy: Policy | str | None = None) -> Replay:
    """Make every decision of a journal (Store.journal, `pyps run --journal`) again, in the run's order.

    policy: the run's policy, needed only if it is a custom one. Raises SegmentCorrupt if the file is not a
    journal.
    """
    if policy is not None:
        register_policy(policy_named(policy) if isinstance(policy, str) else policy)
    return native.replay(os.fspath(path))
