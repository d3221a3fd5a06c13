"""Define what a user can combine in a run, and what each combination must do, from what the parts declare.

A cell is one combination. `expected` never looks at a run: it asks the policy for its needs, and knows which
policies decide by time and which weigh gradients, as docs/concepts/policies.md says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import lru_cache

from pyps.store.policies import Policy, policy_named, register_policy

CUSTOM = "halving.Halving:bound=1"
POLICIES = (
    "bsp", "asp", "backup:k=1", "softsync:n=1", "ssp:bound=1", "dssp", "dynsgd",
    "saps", "saps:threshold=fixed,bound=1,late=drop", "saps:abort=true", "r2sp", "quorum:k=1",
    "r2sp:slack=0,patience=1000000", "hps", CUSTOM,
)  # fmt: skip
BY_TIME = {"dssp", "saps", "saps:abort=true", "r2sp", "hps", "quorum:k=1"}  # decide by how long things took
WEIGH = {"softsync:n=1", "dynsgd", "saps", "saps:abort=true", CUSTOM}  # by more than their samples
DETERMINED_DEPTH = 2  # deeper, what a step is computed on depends on when transfers end


@dataclass(frozen=True)
class Cell:
    """One combination; the first value of each field in AXES is the plainest.

    clip: of the gradient's norm. accumulation: micro-batches of a step. rebalance: the split changes twice.
    fault: "kill": a worker is killed, and another process takes its rank; "resume": the run ends early, and
    another goes on from its checkpoint. modes: codecs and depth of each worker change twice; only in
    named cells.
    """

    policy: str = "bsp"
    optimizer: str = "sgd"
    clip: bool = False
    codec: str = "f32"
    master: str = "f32"
    depth: int = 1
    local_steps: int = 0
    accumulation: int = 1
    backend: str = "local"
    rebalance: bool = False
    fault: str = "none"
    modes: bool = False

    def __str__(self) -> str:
        """The policy, and what differs from a plain run."""
        named = ((f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default)
        words = [name if value is True else f"{name}={value}" for name, value in named if name != "policy"]
        return " ".join([self.policy, *words])


AXES: dict[str, tuple[object, ...]] = {
    "policy": POLICIES,
    "optimizer": ("sgd", "momentum", "nesterov", "adamw", "adam", "adagrad"),
    "clip": (False, True),
    "codec": ("f32", "bf16", "f16", "int8", "int4", "nf4"),
    "master": ("f32", "bf16"),
    "depth": (1, 2, 4),
    "local_steps": (0, 2),
    "accumulation": (1, 2),
    "backend": ("local", "link", "shards"),
    "rebalance": (False, True),
    "fault": ("none", "kill", "resume"),
}


class Verdict(StrEnum):
    """Name what a cell must do.

    REFUSED: before anything trains, in one line.
    COUNTED: its decisions come out the same when they are made again, and every sample counts once.
    EQUAL: that, and it equals its simulation: each worker pushes as often and as much, and where nothing but
        the order of pushes decides, as stale, and to the same parameters.
    BITS: that, and it ends in the same bits as its twin: the same run on a store of this machine, or, of a
        run that is resumed, one that was not.
    """

    REFUSED = "refused"
    COUNTED = "counted"
    EQUAL = "equal"
    BITS = "same bits"


@dataclass(frozen=True)
class Expectation:
    """refusals: a word of each line that may refuse it. twin: whose bits the cell must have."""

    verdict: Verdict
    refusals: tuple[str, ...] = ()
    twin: Cell | None = None


def policy_of(cell: Cell) -> Policy:
    """The cell's policy; pulls from several servers never look ahead, so nor do those of its twin."""
    return _policy(cell.policy, looks_ahead=cell.backend != "shards")


@lru_cache
def _policy(text: str, looks_ahead: bool) -> Policy:
    policy = replace(policy_named(text), lookahead=looks_ahead)
    register_policy(policy)
    return policy


def expected(cell: Cell) -> Expectation:
    """Return what a cell must do."""
    if words := tuple(_refusals(cell)):
        return Expectation(Verdict.REFUSED, words)
    encodes = cell.codec != "f32" and not cell.local_steps
    begins_anew = encodes and cell.backend != "local"  # a client's residuals end with it: stop-and-resume.md
    if cell.policy == "bsp" and cell.fault == "resume" and not cell.rebalance and not begins_anew:
        return Expectation(Verdict.BITS, twin=replace(cell, fault="none"))
    if not is_ordered(cell):
        return Expectation(Verdict.COUNTED)
    twin = replace(cell, backend="local")
    rounds = cell.backend == "shards" and cell.master == "bf16"  # at random, each server by its own positions
    if cell.backend == "local" or not is_ordered(twin) or may_lag(cell) or rounds:
        return Expectation(Verdict.EQUAL)
    return Expectation(Verdict.BITS, twin=twin)


def _refusals(cell: Cell) -> Iterator[str]:
    """Yield what is refused of it, in a word each."""
    needs = policy_of(cell).needs
    if cell.depth > 1 and not needs.allows_pipeline:
        yield "pipeline"
    if cell.backend == "shards" and needs.collects_pushes:
        yield "policy"
    if cell.backend == "shards" and cell.clip and not cell.local_steps:
        yield "clip_norm"


def is_ordered(cell: Cell) -> bool:
    """Return whether the order of its pushes decides everything, so that a run can follow its simulation."""
    if (
        cell.rebalance
        or cell.modes
        or cell.fault != "none"
        or cell.policy in BY_TIME
        or cell.depth > DETERMINED_DEPTH
    ):
        return False
    if cell.depth > 1 and (cell.local_steps or cell.backend == "shards"):
        return False  # parameters come between local steps; and a shard does not say what it sent
    needs = policy_of(cell).needs
    if needs.checks_between_micro_batches and (cell.accumulation > 1 or cell.local_steps):
        return False  # what they find depends on when the others push meanwhile
    # A round without a barrier may hold all staging buffers of a worker. On this machine it then waits before
    # it computes, in a simulation and over a link after.
    return needs.waits_for_rounds or not needs.collects_pushes or cell.backend == "link"


def may_lag(cell: Cell) -> bool:
    """Return whether a push lets another worker start, which then pulls while that push may still be
    applied: its parameters may be one version older than in the simulation, where applying takes no time.
    """
    needs = policy_of(cell).needs
    return not (needs.starts_at_once or needs.waits_for_rounds or needs.uses_turns or needs.collects_pushes)


def is_weighed(cell: Cell) -> bool:
    """Return whether gradients count for other than their samples: as the policy says, or in a round that a
    dead worker is missing from, whose mean is of those that are there.
    """
    is_short = cell.fault == "kill" and policy_of(cell).needs.waits_for_rounds
    return cell.policy in WEIGH or is_short
