"""Modes of running: codecs and steps under way, and what a plan and [run] of a cluster file say of a run."""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct, field

from pyps.errors import InputError
from pyps.formats import options
from pyps.formats.kinds import Batch, Bits, Name, Seconds, Share
from pyps.formats.options import AUTO, MAX_DEPTH, CodecName

# Of a number on the wire.
CODEC_BITS: Final[dict[CodecName, Bits]] = {"f32": 32, "bf16": 16, "f16": 16, "int8": 8, "int4": 4, "nf4": 4}
PLANNED_CODECS: Final[tuple[CodecName, ...]] = ("f32", "bf16", "int8", "int4")  # the planner chooses of these
FROM_PLAN: Final = "plan"
PaceKind = Literal["round", "clock", "turns", "free"]


class Pace(Struct, frozen=True):
    """Hold what a policy's workers wait for, which decides how long an iteration takes.

    round: for all gradients of a round, or all but those of the `spare` slowest. clock: for the slowest, but
    some steps later. turns: each for its turn. free: for nothing. sized: the store sizes a round's batches by
    speed, so that no split lasts in which some compute for longer than others.
    """

    kind: PaceKind = "round"
    spare: Share = 0
    sized: bool = False


ROUND: Final = Pace()


class RunTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[run]: the mode to plan for. codec "plan": of both ways; pull_codec is f32 by default."""

    policy: options.PolicyOption | None = None
    codec: options.CodecOption | None = None
    pull_codec: options.PullCodecOption | None = None
    depth: options.DepthOption | None = None
    accumulation: options.AccumulationOption | None = None
    local_steps: options.LocalStepsOption | None = None
    local_batch: options.LocalBatchOption | None = None
    average_moments: options.AverageMomentsOption | None = None
    round_timeout: options.RoundTimeoutOption | None = None

    @property
    def is_stated(self) -> bool:
        """Return whether the table states a mode, and not only what else a plan allows."""
        return any(getattr(self, key) is not None for key in self.__struct_fields__ if key != "accumulation")

    @property
    def depths(self) -> tuple[int, int]:
        """The least and the most steps under way that the planner may choose."""
        return (1, MAX_DEPTH) if self.depth == AUTO else (self.depth or 1, self.depth or 1)


class Mode(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker's codecs, and its steps under way in a pipeline (1: none helps)."""

    push: CodecName = field(default="f32", name="push_codec")
    pull: CodecName = field(default="f32", name="pull_codec")
    depth: Batch = 1


class PlannedRun(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The run that a plan was made for; its predictions hold in this one.

    policy: as in `pyps run --policy`. depth: of [run]; 1: steps follow one another; else as deep as each
    worker's mode says. local_steps: steps of a worker's own optimizer between two pushes, on average; each
    worker takes its `accumulation`, of micro_batch samples. null: none, the store steps with their gradients.
    local_batch: the samples of a local step, and local_steps then the global batches of a round; null: the
    even share of one. average_moments: so many moments of each parameter travel with it each way, in fp32.
    """

    policy: Name
    round_timeout: Seconds | None = None
    depth: options.DepthOption = 1
    local_steps: options.LocalStepsOption | None = None
    local_batch: Batch | None = None
    average_moments: options.AverageMomentsOption | None = None


def check_run_table(where: str, run: RunTable) -> None:
    """Raises InputError, naming the file `where`, if keys of [run] contradict each other."""
    if run.local_steps is not None and (run.accumulation or 1) > 1:
        raise InputError(where, "run.accumulation", str(run.accumulation), "1 with local_steps")
    if run.local_batch is not None and run.local_steps is None:
        raise InputError(where, "run.local_batch", str(run.local_batch), "nothing without local_steps")
    if run.average_moments and (run.local_steps is None or run.depths[1] > 1):
        expected = "0 in a pipeline" if run.local_steps else "0 without local_steps"
        raise InputError(where, "run.average_moments", str(run.average_moments), expected)
    options.as_depth(run.depth, f"{where}: run.depth")
