"""pyps.noise/1: the gradient noise scale that a training run has measured."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from pyps.formats.kinds import Batch, Seconds

NOISE_SCHEMA = "pyps.noise/1"


class GradientNoiseRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """noise_scale: in samples. base_batch: the global batch with which the run began. steps: measured."""

    schema: Literal["pyps.noise/1"] = "pyps.noise/1"
    noise_scale: Seconds
    base_batch: Batch
    steps: Annotated[int, Meta(ge=1)]
