"""The choices that a mode leaves to the planner: codecs and depth of each worker, chosen with its batch.

The split is solved with the fewest bits and the deepest pipeline that the mode allows, so no other choice has
a shorter longest step. Afterwards each worker takes the most exact codecs, and then the shallowest pipeline,
with which the iteration stays as short.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from pyps.errors import InputError
from pyps.formats import Bits, Cluster
from pyps.formats.cluster import CLUSTER_FILE
from pyps.formats.mode import CODEC_BITS, FROM_PLAN, PLANNED_CODECS, Mode, Pace, RunTable
from pyps.formats.options import CodecName
from pyps.solver.constrained import ConstrainedSolution
from pyps.solver.links import ERROR, WIRE_BYTES, LinkCost, step_seconds

SAME = 1 + 1e-12  # relative: the rounding error allowed in a step
MEETING = 1.005  # relative: on a shared link, what a shallower pipeline may cost
PLANNED_ERROR = 0.01  # the error budget where bits are planned and the cluster file states none: 8 bits
DEFAULT_POLICY = "bsp"


@dataclass(frozen=True)
class ModeChoices:
    """The codecs and depths that the planner may choose from, and what the policy's workers wait for.

    unlinked_depth: the one to choose where no link is known.
    """

    pace: Pace
    push: tuple[CodecName, ...]
    pull: tuple[CodecName, ...]
    depths: tuple[int, int]
    unlinked_depth: int

    def options(self) -> list[Mode]:
        """Every choice for one worker, the most exact and then the shallowest first."""
        depths = range(self.depths[0], self.depths[1] + 1)
        found = [
            Mode(push=push, pull=pull, depth=depth)
            for push, pull, depth in itertools.product(self.push, self.pull, depths)
        ]
        return sorted(found, key=lambda option: (*_error(option), option.depth))

    @property
    def fastest(self) -> Mode:
        """The choice with the fewest bits and the deepest pipeline."""
        return min(self.options(), key=lambda option: (_wire_bytes(option), -option.depth))

    @property
    def unlinked(self) -> Mode:
        """The choice where no link is known: the fewest bits."""
        return msgspec.structs.replace(self.fastest, depth=self.unlinked_depth)


def mode_of(cluster: Cluster, pace: Pace) -> ModeChoices:
    """The mode that a cluster file's [run] states. Raises InputError where [sync] contradicts it."""
    run = cluster.run
    codec, pull = run.codec or "f32", run.pull_codec or (FROM_PLAN if run.codec == FROM_PLAN else "f32")
    least, most = run.depths
    # Local steps learn the less the later they are, so nothing unknown is hidden at that price.
    unlinked = max(least, min(most, 1 if run.local_steps else 2))
    mode = ModeChoices(pace, _allowed(codec, cluster), _allowed(pull, cluster), run.depths, unlinked)
    if cluster.sync is not None and cluster.sync.kind != "none":
        if pace.kind != "round":
            expected = "a policy of rounds with [sync], or bandwidths instead of [sync]"
            raise InputError(CLUSTER_FILE, "run.policy", repr(run.policy), expected)
        if mode.depths[1] > 1:
            expected = "1 with [sync], or bandwidths instead of [sync]"
            raise InputError(CLUSTER_FILE, "run.depth", str(run.depth), expected)
    return mode


def choices_while_running(modes: Sequence[Mode], pace: Pace) -> ModeChoices:
    """The codecs and depths that workers in a pipeline may change to: those of the plan's modes, and others
    with errors that the planner allows by itself, or that these have; at most 3 steps under way, or as many
    as the deepest of these.

    modes: of the plan's workers.
    """
    most = max([PLANNED_ERROR, *(ERROR[bits] for mode in modes for bits in bits_of(mode))])
    used = {codec for mode in modes for codec in (mode.push, mode.pull)}
    either = (name for name in CODEC_BITS if name in used.union(codecs_within(most)))
    codecs = tuple(sorted(either, key=lambda name: (ERROR[CODEC_BITS[name]], name not in used)))
    return ModeChoices(pace, codecs, codecs, (2, max(3, *(mode.depth for mode in modes))), 2)


def _allowed(codec: CodecName | str, cluster: Cluster) -> tuple[CodecName, ...]:
    if codec != FROM_PLAN:
        return tuple(name for name in CODEC_BITS if name == codec)
    budget = cluster.quantization.error_budget
    return codecs_within(PLANNED_ERROR if budget is None else budget)


def codecs_within(error: float) -> tuple[CodecName, ...]:
    """The codecs that the planner chooses of, where the error of a number may be so much."""
    return tuple(name for name in PLANNED_CODECS if ERROR[CODEC_BITS[name]] <= error)


def bits_of(worker: Mode) -> tuple[Bits, Bits]:
    """The bits of a number in a worker's pushes and pulls."""
    return CODEC_BITS[worker.push], CODEC_BITS[worker.pull]


def _error(worker: Mode) -> tuple[float, float, float]:
    """Sort key: the larger error, then the sum, then the pull's, because pushes have error feedback."""
    push, pull = (ERROR[bits] for bits in bits_of(worker))
    return max(push, pull), push + pull, pull


def _wire_bytes(worker: Mode) -> float:
    push, pull = bits_of(worker)
    return WIRE_BYTES[push] + WIRE_BYTES[pull]


def most_exact(
    mode: ModeChoices,
    links: Sequence[Sequence[LinkCost]],
    solution: ConstrainedSolution,
    valued: Callable[[Sequence[Mode]], ConstrainedSolution],
) -> list[Mode]:
    """The most exact choice of each worker with which the solution's iteration takes no longer; a worker
    without a link, next to others with one, transfers nothing.

    links: that each worker's transfers cross. solution: of the fastest choices. valued: the same batches with
    other choices, by rank. Where transfers meet on a shared link, a shallow pipeline may be slower than each
    worker's own step says: then all are deeper.
    """
    options, fastest = mode.options(), mode.fastest
    if options == [fastest] or not any(links):
        return [mode.unlinked] * len(links)
    waits = mode.pace.kind != "free" and not mode.pace.spare
    longest = solution.longest_seconds - solution.sync_seconds
    for most_bytes in sorted({_wire_bytes(option) for option in options}, reverse=True):
        for depth in range(mode.depths[0], mode.depths[1] + 1 if solution.meets else mode.depths[0] + 1):
            fitting = [o for o in options if _wire_bytes(o) <= most_bytes and o.depth >= depth]
            chosen = []
            for k, crossed in enumerate(links):
                limit = longest if waits else float(solution.step_seconds[k])
                compute = float(solution.seconds[k])
                within = (o for o in fitting if step_of(compute, crossed, o) <= limit * SAME)
                chosen.append(next(within, fastest) if solution.batches[k] > 0 else fastest)
            found = valued(chosen)
            if (
                found.iteration_seconds <= solution.iteration_seconds * (MEETING if solution.meets else SAME)
                and found.longest_seconds <= solution.longest_seconds * SAME
            ):
                return chosen
    return [fastest] * len(links)


def step_of(compute_seconds: float, links: Sequence[LinkCost], option: Mode) -> float:
    """Seconds from one step to the next of a worker with these codecs and this depth."""
    return step_seconds(compute_seconds, links, *bits_of(option), option.depth)


def stated_policy(run: RunTable) -> str:
    """The policy that [run] states, or the default one."""
    return run.policy or DEFAULT_POLICY
