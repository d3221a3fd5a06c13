"""Define what is measured: pyps.profile/1, one device with its cost model; pyps.noise/1, a run's gradient
noise.
"""

from __future__ import annotations

from statistics import median
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from pyps.errors import InputError
from pyps.formats.kinds import Batch, Bytes, Elapsed, Factor, Name, Seconds

PROFILE_SCHEMA = "pyps.profile/1"


class Device(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The timed device; emulated: a throttle made it that many times slower."""

    name: Name
    kind: str = "cpu"
    throttle: Factor = 1.0
    emulated: bool = False


class ModelInfo(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model that was trained while timing; optimizer: in words, such as "SGD with momentum 0.9".

    tokens_per_sample: for plans in tokens; 1: the profile's batches count tokens. trained: how many of the
    parameters are; null: all. parameter_bytes: of one, with which its gradient and state go; null: 4.
    """

    name: Name
    parameters: Annotated[int, Meta(ge=1)] | None = None
    autocast: Literal["bf16", "f16"] | None = None
    accumulate: Batch = 1
    compiled: bool = False
    optimizer: str | None = None
    tokens_per_sample: Batch | None = None
    trained: Annotated[int, Meta(ge=0)] | None = None
    parameter_bytes: Annotated[float, Meta(gt=0, le=16)] | None = None


class Parts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The seconds of a step's parts; `data`, making and moving a batch, comes before the step."""

    data: Elapsed
    forward: Elapsed
    backward: Elapsed
    optimizer: Elapsed


class Link(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A measured link to the store or to the process group: its latency, then its bytes a second."""

    via: Name
    latency_seconds: Elapsed
    bytes_per_second: Annotated[float, Meta(gt=0)]


class Point(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One batch size: the seconds of one training step, or of several, and the peak memory in bytes.

    tokens: of each sample, among points of several lengths.
    """

    batch: Batch
    seconds: Seconds | Annotated[list[Seconds], Meta(min_length=1)]
    peak_bytes: Bytes | None = None
    parts: Parts | None = None
    tokens: Batch | None = None


class Memory(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Memory model: a batch b needs fixed_bytes + bytes_per_sample * b, within budget_bytes."""

    fixed_bytes: Bytes
    bytes_per_sample: Annotated[float, Meta(gt=0)]
    budget_bytes: Bytes


class LengthCost(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The seconds that a sample of n tokens adds to a step: fixed + per_token n + per_square n^2."""

    fixed_seconds: Elapsed = 0.0
    per_token_seconds: Elapsed = 0.0
    per_square_seconds: Elapsed = 0.0

    def seconds(self, tokens: Any) -> Any:
        """Return those of a sample of so many tokens, or of each of an array."""
        return self.fixed_seconds + tokens * (self.per_token_seconds + tokens * self.per_square_seconds)

    def mean(self, tokens: float, squares: float) -> float:
        """Return those of samples with this mean, and this mean of the squares, of their tokens."""
        return self.fixed_seconds + self.per_token_seconds * tokens + self.per_square_seconds * squares


class Lengths(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cost of samples of unlike length. A step takes step_seconds and the cost of each of its samples; it
    holds fixed_bytes and, of each sample, per_token_bytes n + per_square_bytes n^2.
    """

    cost: LengthCost
    step_seconds: Elapsed
    fixed_bytes: Bytes
    per_token_bytes: Elapsed
    per_square_bytes: Elapsed
    points: Annotated[list[Point], Meta(min_length=1)]


class Fit(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cost model T(b) = max(t0, c + a*b), or a nondecreasing polygon through a table of (batch, seconds).

    A polygon goes on after its last batch by per_sample_seconds a sample; if that is 0, by the table's own
    slope. leave_one_out_error is the median relative error of predicting each point from the others; band
    has (batch, low, high) seconds between which 90 % of times near it lie; doubling_error is the relative
    standard error at twice the largest measured batch. optimizer_seconds, part of every time here, are taken
    once by a batch in micro-batches; null: not measured.
    """

    kind: Literal["affine", "knee", "convex", "table"]
    fixed_seconds: float = 0.0
    per_sample_seconds: Elapsed = 0.0
    floor_seconds: Elapsed = 0.0
    r2: float | None = None
    leave_one_out_error: Elapsed | None = None
    trusted_min_batch: Batch
    trusted_max_batch: Batch
    table: Annotated[list[tuple[Batch, Seconds]], Meta(min_length=1)] | None = None
    band: list[tuple[Batch, Seconds, Seconds]] | None = None
    doubling_error: Elapsed | None = None
    optimizer_seconds: Elapsed | None = None

    @property
    def end_slope(self) -> float:
        """The seconds of each sample after a table's last batch.

        Without per_sample_seconds it is the median slope from the batches of the table's last three quarters
        to its end, so that one disturbed time cannot tilt it.
        """
        table = self.table or []
        if self.per_sample_seconds > 0 or len(table) < 2:
            return self.per_sample_seconds
        last, longest = table[-1]
        upper = [point for point in table[:-1] if 4 * point[0] >= last] or table[-2:-1]
        return median((longest - seconds) / (last - batch) for batch, seconds in upper)


class Profile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measurements of one device with one model; the planner fits the points if `fit` is absent.

    min_batch: the fewest samples that the model trains on, 2 with batch normalization; every batch of a plan
    has as many. null: one. lengths: measured with samples of several lengths.
    """

    schema: Literal["pyps.profile/1"] = "pyps.profile/1"
    device: Device
    model: ModelInfo
    points: Annotated[list[Point], Meta(min_length=1)]
    max_batch: Batch | None = None
    cut_short: bool = False  # larger batches were not measured for want of time
    min_batch: Batch | None = None
    memory: Memory | None = None
    fit: Fit | None = None
    lengths: Lengths | None = None
    link: Link | None = None
    clocks: list[str] | None = None  # why a GPU ran below its clocks while it was timed


def check_profile(where: str, profile: Profile) -> None:
    fit = profile.fit
    if fit is None:
        return
    if fit.trusted_max_batch < fit.trusted_min_batch:
        raise InputError(
            where, "fit.trusted_max_batch", str(fit.trusted_max_batch), f"at least {fit.trusted_min_batch}"
        )
    if fit.kind in ("convex", "table"):
        if fit.table is None:
            raise InputError(
                where, "fit.table", "nothing", f'a list of [batch, seconds], as kind is "{fit.kind}"'
            )
        for k in range(1, len(fit.table)):
            (batch, seconds), (next_batch, next_seconds) = fit.table[k - 1], fit.table[k]
            if next_batch <= batch:
                raise InputError(where, f"fit.table[{k}][0]", str(next_batch), f"a batch above {batch}")
            if next_seconds < seconds:
                raise InputError(where, f"fit.table[{k}][1]", str(next_seconds), f"at least {seconds}")
    elif max(fit.floor_seconds, fit.fixed_seconds + fit.per_sample_seconds) <= 0:
        raise InputError(where, "fit.fixed_seconds", str(fit.fixed_seconds), "a positive time for one sample")


NOISE_SCHEMA = "pyps.noise/1"


class GradientNoiseRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The gradient noise scale that a run has measured.

    noise_scale: in samples. base_batch: the global batch with which the run began. steps: measured."""

    schema: Literal["pyps.noise/1"] = "pyps.noise/1"
    noise_scale: Seconds
    base_batch: Batch
    steps: Annotated[int, Meta(ge=1)]
