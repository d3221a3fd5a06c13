"""Reads the prior of a rank's device from its profile, before training has measured anything."""

from __future__ import annotations

import os
from pathlib import Path

from pyps.formats import MAX_BATCH, Profile, WorkerGroup, read_profile
from pyps.profiler.select import fit_of
from pyps.solver.costs import Cost
from pyps.solver.lengths import SampleLengths
from pyps.solver.ranks import cost_of, max_batch_of
from pyps.solver.units import scaled, tokens_worth


def prior_of(
    profile: Profile | str | os.PathLike[str] | None, lengths: SampleLengths | None = None
) -> tuple[Cost | None, int]:
    """The device's cost model and its largest batch; None and no bound without a profile.

    lengths: of samples; batches then count tokens of average cost. Fits the measured points if the profile
    has no fit. Raises InputError for a file that is no profile.
    """
    if profile is None:
        return None, MAX_BATCH
    if not isinstance(profile, Profile):
        profile = read_profile(Path(profile))
    if lengths is not None:
        profile = scaled(profile, tokens_worth(profile, lengths) or lengths.each)
    fit = fit_of(profile)
    return cost_of(fit), max_batch_of(WorkerGroup(name="rank", profile="profile"), profile)
