"""What a profile says of the device of a rank, before anything was measured in training."""

from __future__ import annotations

import os
from pathlib import Path

from pyps.formats import MAX_BATCH, Profile, WorkerGroup, read_profile
from pyps.profiler.select import select_fit
from pyps.solver.costs import Cost
from pyps.solver.ranks import cap_of, cost_of


def prior_of(profile: Profile | str | os.PathLike[str] | None) -> tuple[Cost | None, int]:
    """(its cost model, fitted if it has none; its largest batch), or (None, no bound) without a profile.

    Raises InputError for a file that is no profile.
    """
    if profile is None:
        return None, MAX_BATCH
    if not isinstance(profile, Profile):
        profile = read_profile(Path(profile))
    fit = profile.fit or select_fit(profile.points)
    return cost_of(fit), cap_of(WorkerGroup(name="rank", profile="profile"), profile)
