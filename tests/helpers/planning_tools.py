"""Profiles for tests of plans."""

from __future__ import annotations

from pyps.formats import Device, Fit, ModelInfo, Point, Profile

PARAMETERS = 100_000


def profile(per_sample: float, fixed: float, most: int | None = None) -> Profile:
    """A device on a line: `fixed` seconds a step, `per_sample` more for each sample, at most `most`."""
    fit = Fit(
        kind="affine",
        fixed_seconds=fixed,
        per_sample_seconds=per_sample,
        trusted_min_batch=1,
        trusted_max_batch=512,
    )
    return Profile(
        device=Device(name="d"),
        model=ModelInfo(name="m", parameters=PARAMETERS),
        points=[Point(batch=1, seconds=1.0)],
        fit=fit,
        max_batch=most,
    )
