"""Counts of a running simulation, and its result."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from pyps.native.status import PushCounts
from pyps.simulate.scenario import Scenario
from pyps.solver.online.mode import ModeChange

KINDS = ("wait", "pull", "compute", "push")
WAIT, PULL, COMPUTE, PUSH = range(4)
NANOSECOND = 1e-9
Slice = tuple[
    int, str, float, float, int
]  # rank (N + rank: its transfers), kind, begin and end in s, version


@dataclass(frozen=True)
class SimulatedModeChange:
    """A change of one worker's codecs or depth, at time `at` (seconds)."""

    at: float
    rank: int
    change: ModeChange

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.change}"


@dataclass
class Metrics:
    """Nanoseconds by rank and kind, staleness of the pushes, the loss curve and counts.

    ranks: rows of `spent` and the others; in a pipeline the transfer processes follow the compute processes,
    so that overlapped transfers cost a worker no time. keep_timeline: also record slices.
    """

    ranks: int
    keep_timeline: bool = False
    spent: list[list[int]] = field(init=False)
    timeline: list[Slice] = field(default_factory=list)
    staleness: Counter[int] = field(default_factory=Counter)
    curve: list[tuple[float, int, float]] = field(default_factory=list)  # seconds, samples, loss
    pushed_at: list[tuple[int, float]] = field(default_factory=list)  # rank, seconds; with the timeline
    rejected: int = 0
    aborted: int = 0
    fenced: int = 0
    moved_bytes: float = 0.0
    events: int = 0
    counted: list[int] = field(init=False)  # of the compute time, what was admitted
    present: list[int] = field(init=False)  # from join to end
    trained: array[int] = field(
        default_factory=lambda: array("q")
    )  # of each push its first sample, and how many
    mode_changes: list[SimulatedModeChange] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.spent = [[0] * len(KINDS) for _ in range(self.ranks)]
        self.counted, self.present = [0] * self.ranks, [0] * self.ranks

    def count(self, rank: int, first: int, samples: int, nanoseconds: int) -> None:
        """A gradient was admitted; nanoseconds: what it took to compute."""
        self.counted[rank] += nanoseconds
        self.trained.extend((first, samples))

    def repeated(self) -> int:
        """Samples that were admitted more than once."""
        pushes = np.asarray(self.trained, np.int64).reshape(-1, 2)
        first, samples = pushes[np.argsort(pushes[:, 0], kind="stable")].T
        ends = np.maximum.accumulate(first + samples)
        return int(np.clip(ends[:-1] - first[1:], 0, samples[1:]).sum())

    def add(self, rank: int, kind: int, begin: int, end: int, version: int) -> None:
        """Count the time from `begin` to `end` (ns) for a rank; `version` was the latest at its end."""
        self.spent[rank][kind] += end - begin
        if self.keep_timeline and end > begin:
            self.timeline.append((rank, KINDS[kind], begin * NANOSECOND, end * NANOSECOND, version))


@dataclass(frozen=True)
class SimulatedRank:
    """Hold what one rank did: pushes, samples, staleness and seconds of each kind.

    counted_seconds: of the compute time, that of admitted gradients. present_seconds: from its workers' joins
    to their ends.
    """

    name: str
    batch: int
    pushes: int
    samples: int
    returned: int
    staleness_mean: float
    staleness_max: int
    compute_seconds: float
    transfer_seconds: float
    wait_seconds: float
    counted_seconds: float = 0.0
    present_seconds: float = 0.0

    @property
    def idle_share(self) -> float:
        """Share of its time that the rank waited."""
        total = self.compute_seconds + self.transfer_seconds + self.wait_seconds
        return self.wait_seconds / total if total else 0.0


@dataclass(frozen=True)
class SimulatedReplan:
    """A change of the split at time `at` (seconds), with its reasons.

    expected_seconds: of a round before and after it, by what the Balancer knew. iteration_seconds: for one
    global batch, from the change before it until this one, and from this one until the next.
    """

    at: float
    before: tuple[int, ...]
    after: tuple[int, ...]
    reasons: tuple[str, ...]
    expected_seconds: tuple[float, float]
    iteration_seconds: tuple[float, float]


@dataclass(frozen=True)
class Result:
    """One policy in one scenario. `iteration_seconds`: mean time for one global batch of samples. `replans`:
    the changes of the split; None: the run was not rebalanced. `repeated`: samples that counted twice.
    `mode_changes`: of codecs and depths.
    """

    policy: str
    seed: int
    seconds: float
    versions: int
    rounds: int
    samples: int
    iteration_seconds: float
    ranks: tuple[SimulatedRank, ...]
    staleness: dict[int, int]  # staleness -> pushes
    curve: tuple[tuple[float, int, float], ...]  # seconds, samples, loss
    loss: float
    rejected: int
    aborted: int
    fenced: int
    moved_bytes: float
    peak_transfers: int
    events: int
    timeline: tuple[Slice, ...]
    pushed_at: tuple[tuple[int, float], ...]
    replans: tuple[SimulatedReplan, ...] | None = None
    repeated: int = 0
    mode_changes: tuple[SimulatedModeChange, ...] = ()

    @property
    def useful_share(self) -> float:
        """Share of the time that their workers were there in which ranks computed what counts."""
        present = sum(r.present_seconds for r in self.ranks)
        return sum(r.counted_seconds for r in self.ranks) / present if present else 0.0

    @property
    def idle_share(self) -> float:
        """Share of their time that all ranks together waited."""
        waited = sum(r.wait_seconds for r in self.ranks)
        total = waited + sum(r.compute_seconds + r.transfer_seconds for r in self.ranks)
        return waited / total if total else 0.0

    @property
    def staleness_mean(self) -> float:
        pushes = sum(self.staleness.values())
        return sum(tau * n for tau, n in self.staleness.items()) / pushes if pushes else 0.0

    def staleness_quantile(self, q: float) -> int:
        """The smallest staleness that a share q of the pushes does not exceed."""
        if not self.staleness:
            return 0
        keys = sorted(self.staleness)
        running = np.cumsum([self.staleness[k] for k in keys])
        return keys[int(np.searchsorted(running, q * running[-1]))]

    def seconds_to(self, loss: float) -> float | None:
        """Seconds until the loss was first at most `loss`; None: never."""
        return next((seconds for seconds, _, value in self.curve if value <= loss), None)


def rank_results(
    scenario: Scenario, metrics: Metrics, counters: list[PushCounts]
) -> tuple[SimulatedRank, ...]:
    """The result of each rank, from the engine's metrics and the core's counters."""
    results = []
    own = zip(metrics.counted, metrics.present, strict=True)
    for w, spent, (counted, present), c in zip(scenario.workers, metrics.spent, own, counters, strict=False):
        wait, pull, compute, push = (NANOSECOND * value for value in spent)
        mean = c.staleness_sum / c.pushes if c.pushes else 0.0
        results.append(
            SimulatedRank(
                name=w.name,
                batch=w.batch,
                pushes=c.pushes,
                samples=c.samples,
                returned=c.returned,
                staleness_mean=mean,
                staleness_max=c.staleness_max,
                compute_seconds=compute,
                transfer_seconds=pull + push,
                wait_seconds=wait,
                counted_seconds=NANOSECOND * counted,
                present_seconds=NANOSECOND * present,
            )
        )
    return tuple(results)
