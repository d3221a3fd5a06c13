"""When to move samples between ranks, and how many: a pure function of what the ranks have measured.

The split is the exact one for the costs as they are believed now. It replaces the one in force only if it
makes the round shorter by more than the deadband, which is taken for noise; what was moved is not moved
back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyps.errors import Infeasible
from pyps.solver.costs import Cost, Costs
from pyps.solver.exact.minmax import Problem, solve

Split = tuple[int, ...]  # samples a round, by rank

WORTH_SAYING = 0.05  # a rank whose pace changed by less is no reason


@dataclass(frozen=True)
class SplitChange:
    """A change of the split, decided at `step`, with its reasons.

    The seconds are those of a round, by the ranks' costs. start: (epoch, round) from which the change holds,
    in runs that count rounds.
    """

    step: int
    before: Split
    after: Split
    seconds_before: float
    seconds_after: float
    reasons: tuple[str, ...]
    start: tuple[int, int] | None = None

    def __str__(self) -> str:
        return "; ".join(self.reasons)


def best_split(global_batch: int, costs: Sequence[Cost], low: Sequence[int], caps: Sequence[int]) -> Split:
    """The split with the shortest round in which every rank has a part. Raises Infeasible."""
    stacked = Costs.stack(costs)
    found = solve(Problem.of(stacked, global_batch, low=low, cap=caps, required=True))
    return tuple(int(batch) for batch in found.batches)


def decide(
    split: Split,
    costs: Sequence[Cost],
    paces: Sequence[float],
    low: Sequence[int],
    caps: Sequence[int],
    deadband: float,
    step: int,
) -> SplitChange | None:
    """The change that is worth it, or None. paces: how much longer each rank takes than when last planned."""
    try:
        after = best_split(sum(split), costs, low, caps)
    except Infeasible:
        return None  # what runs, runs
    was, will = round_seconds(costs, split), round_seconds(costs, after)
    if after == split or will > was * (1 - deadband):
        return None
    return SplitChange(step, split, after, was, will, _reasons(split, after, paces, step))


def round_seconds(costs: Sequence[Cost], split: Split) -> float:
    """Until the last rank is done."""
    return max(cost.seconds(batch) for cost, batch in zip(costs, split, strict=True))


def _reasons(split: Split, after: Split, paces: Sequence[float], step: int) -> tuple[str, ...]:
    said = []
    for rank, pace in enumerate(paces):
        because = after[rank] < split[rank] if pace > 1 else after[rank] > split[rank]
        if max(pace, 1 / pace) > 1 + WORTH_SAYING and because:
            how = f"slowed by {pace:.1f}x" if pace > 1 else f"sped up by {1 / pace:.1f}x"
            said.append(f"rank {rank} {how} at step {step}: {split[rank]} -> {after[rank]}")
    if not said:
        said.append(f"better known costs at step {step}: {list(split)} -> {list(after)}")
    return tuple(said)
