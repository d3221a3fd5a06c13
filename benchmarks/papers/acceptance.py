"""The papers' claims about BOA, R2SP and H-PS, and the measurements for them."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmark_tools import record
from null import Claim, Null
from tuning import (
    TANH,
    Budget,
    Competitor,
    TuningResult,
    TuningScenario,
    ceiling,
    cluster_of,
    tune_with_copies,
)

from pyps.simulate import Scenario, simulate

HPS_OVER_PLAIN, HPS_AIM = 1.4, 3.5
INT8_SHARE = (1 + 4 / 256) / 4  # bytes of int8 with a scale for each 256, over those of f32
INT4_SHARE = (0.5 + 4 / 64) / 4
SIZES = (1.0, 2.0, 4.0)  # times the model of clusters/hps.toml

Curve = list[tuple[float, int, float]]  # seconds, samples, loss
EVEN = Competitor("BSP, equal batches", ("bsp",))
PLANNED = Competitor("BOA: BSP, planned batches", ("bsp",), planned=True)
SHARES = (2.0, 1.0, 0.5, 0.25, 0.125, 0.0625)  # of the global batch
FEWER = Competitor("BOA, global batch tuned", ("bsp",), planned=True, shares=SHARES)
BACKUP_ONE = Competitor("backup, one", ("backup:k=1",))
COUNTS = tuple(f"backup:k={k}" for k in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48))
BACKUP = Competitor("backup, k tuned", COUNTS, ends=("backup:k=1",))  # 0 is BSP
BACKUP_FEWER = replace(BACKUP, title="backup, k and global batch tuned", shares=SHARES)
QUORUMS = tuple(count.replace("backup", "quorum") for count in COUNTS)
QUORUM = Competitor(
    "quorum on planned batches, k and global batch tuned",
    QUORUMS,
    planned=True,
    shares=SHARES,
    ends=QUORUMS[:1],
)
BOUNDS = (0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233)
SSP = Competitor("SSP", tuple(f"ssp:bound={bound}" for bound in BOUNDS), ends=("ssp:bound=0",))
SLACKS = tuple(f"r2sp:slack={slack}" for slack in ("0.8", "1.0", "1.2", "1.5", "0"))  # 0: no gaps
RING = Competitor("R2SP", SLACKS, planned=True, ends=SLACKS[-1:])
ASP, DYNSGD = Competitor("ASP", ("asp",)), Competitor("DynSGD", ("dynsgd",))
SAPS = Competitor("SaPS", ("saps",))


@dataclass(frozen=True)
class Criterion:
    """One line of acceptance: a figure, its value, the threshold, and whether it is met."""

    figure: str
    value: str
    threshold: str
    met: bool

    @staticmethod
    def at_least(figure: str, value: float, threshold: float) -> Criterion:
        return Criterion(figure, f"{value:.2f}", f">= {threshold}", value >= threshold)

    @staticmethod
    def at_most(figure: str, value: float, threshold: float) -> Criterion:
        return Criterion(figure, f"{value:.2f}", f"<= {threshold}", value <= threshold)

    def __str__(self) -> str:
        verdict = "met" if self.met else "**missed**"
        return f"- {verdict}: {self.figure}: {self.value} (threshold: {self.threshold})"


@dataclass(frozen=True)
class Findings:
    """The tables of a part, what is claimed by them, and what to draw by panel: results, or (real, simulated)
    curves.
    """

    tables: list[str]
    criteria: list[Criterion | Claim]
    curves: dict[str, list[TuningResult]] = field(default_factory=dict)
    pairs: dict[str, tuple[Curve, Curve]] = field(default_factory=dict)

    def text(self) -> str:
        return "\n\n".join([*self.tables, "\n".join(map(str, self.criteria))])


def all_inside(found: list[TuningResult]) -> Criterion:
    """Return whether each chosen value has worse ones on both sides, or lies at an end that the policy
    has.
    """
    each = [one for s in found for one in (s, s.copy) if one is not None]
    edges = [f"`{s.policy}` on {s.scenario.title}" for s in each if s.place == "edge"]
    ends = sum(s.place == "natural end" for s in each)
    value = f"{', '.join(edges) or 'none'}; at an end of the policy's own: {ends} of {len(each)}"
    return Criterion("chosen values beyond which nothing was tried", value, "none", not edges)


def boa(budget: Budget, _: Path) -> Findings:
    """Planned batches against equal ones and backup workers."""
    competitors = PLANNED, EVEN, BACKUP_ONE, BACKUP, FEWER, BACKUP_FEWER, QUORUM
    names = budget.among(("three-types", "three-stalls", "five"), quick="five")
    found = tune_with_copies([(TuningScenario(n), c) for n in names for c in competitors], budget)
    null, by = (
        Null.of(found),
        {n: {s.competitor.title: s for s in found if s.scenario.cluster == n} for n in names},
    )
    claims = [claim for results in by.values() for claim in _planned_and_backup(results, null)]
    tables = [*result_tables(found), _published(), str(null)]
    return Findings(tables, [*claims, all_inside(found)], panels(found))


def _published() -> str:
    times = [
        simulate(cluster_of(TuningScenario("lbb"), planned=planned), iterations=10).iteration_seconds
        for planned in (False, True)
    ]
    return (
        f"LBB's four devices, their published times, 512 samples: {1e3 * times[0]:.1f} ms equal, "
        f"{1e3 * times[1]:.1f} ms planned ({times[0] / times[1]:.2f}x)."
    )


def _planned_and_backup(results: dict[str, TuningResult], null: Null) -> list[Claim]:
    """BOA against equal batches and tuned backup workers, and both ideas together against the better of each
    alone; the global batch is the cluster's for all of them, or tuned for all of them.
    """
    planned, fewer, backup, quorum = (results[c.title] for c in (PLANNED, FEWER, BACKUP_FEWER, QUORUM))
    return [
        *(Claim.of(planned, results[rival.title], null) for rival in (EVEN, BACKUP_ONE, BACKUP)),
        Claim.of(fewer, backup, null),
        Claim.of(quorum, min(fewer, backup, key=lambda s: s.mean), null),
    ]


def r2sp(budget: Budget, _: Path) -> Findings:
    """A ring of turns, on a link that limits the others and without transfer times."""
    competitors = (
        RING,
        replace(PLANNED, title="BSP"),
        replace(ASP, planned=True),
        replace(SSP, planned=True),
    )
    scenarios = (TuningScenario("link"), TuningScenario("link", link=False))
    found = tune_with_copies([(s, c) for s in scenarios for c in competitors], budget)
    null, ring = Null.of(found), found[0]
    peak = int(ring.median_of("peak_transfers"))
    staleness = [run.staleness_quantile(0.5) for run in ring.runs]
    claims = [Claim.of(some[0], rival, null) for some in (found[:4], found[4:]) for rival in some[1:]]
    criteria = [
        Criterion("R2SP's transfers at once", str(peak), "1", peak == 1),
        Criterion("R2SP's staleness, median", str(max(staleness)), "7", set(staleness) == {7}),
        all_inside(found),
    ]
    return Findings([*result_tables(found), str(null)], [*claims, *criteria], panels(found))


@dataclass(frozen=True)
class HpsVariant:
    """Which of H-PS's three techniques are on; without task sizes by speed all workers get equal tasks."""

    title: str
    sized: bool = False
    byte_share: float = 1.0  # of f32's bytes, both ways
    depth: int = 1

    def scenario(self, even: Scenario, size: float) -> Scenario:
        """The cluster with this variant; equal tasks come from a memory that holds an equal share only."""
        factor = size * self.byte_share
        made = replace(even, up_bytes=even.up_bytes * factor, down_bytes=even.down_bytes * factor)
        if self.sized:
            return made
        return replace(made, workers=tuple(replace(w, max_samples=w.batch) for w in made.workers))


HPS_VARIANTS = (
    HpsVariant("plain: equal tasks, f32"),
    HpsVariant("task sizes by speed", sized=True),
    HpsVariant("int8 both ways", byte_share=INT8_SHARE),
    HpsVariant("pipeline", depth=2),
    HpsVariant("task sizes, int8", sized=True, byte_share=INT8_SHARE),
    HpsVariant("task sizes, pipeline", sized=True, depth=2),
    HpsVariant("int8, pipeline", byte_share=INT8_SHARE, depth=2),
    HpsVariant("all three", sized=True, byte_share=INT8_SHARE, depth=2),
    HpsVariant("all three, int4 both ways", sized=True, byte_share=INT4_SHARE, depth=2),
)


def hps(budget: Budget, _: Path) -> Findings:
    """Task sizes, bits and the pipeline, one by one and together, against a plain server: times only."""
    even = cluster_of(TuningScenario("hps"), planned=False)
    iterations = 3 if budget.quick else 100
    link = [size * len(even.workers) * 2 * even.up_bytes / even.server_bandwidth for size in SIZES]
    rows = [["variant", *(f"link {1e3 * seconds:.0f} ms" for seconds in link)]]
    plain: dict[float, float] = {}
    gains: dict[tuple[str, float], float] = {}
    for variant in HPS_VARIANTS:
        cells = []
        for size in SIZES:
            cluster, depth = variant.scenario(even, size), variant.depth
            seconds = [_iteration(cluster, seed, iterations, depth) for seed in budget.seeds]
            middle = statistics.median(seconds)
            gain = gains[variant.title, size] = plain.setdefault(size, middle) / middle
            spread = f"{1e3 * min(seconds):.0f} to {1e3 * max(seconds):.0f}"
            cells.append(f"{1e3 * middle:.0f} ({spread}), {gain:.2f}x")
        rows.append([variant.title, *cells])
    criteria = [Criterion.at_least("plain over all three", gains["all three", SIZES[0]], HPS_OVER_PLAIN)]
    for size, seconds in list(zip(SIZES, link, strict=True))[1:]:
        gain, figure = gains["all three", size], f"plain over all three, link {1e3 * seconds:.0f} ms"
        criteria.append(Criterion(figure, f"{gain:.2f}", f">= {HPS_AIM}, the aim", gain >= HPS_AIM))
    legend = "Milliseconds an iteration (range over seeds), and how many times as fast as the plain server."
    return Findings([legend, record.table(rows)], criteria)


def _iteration(cluster: Scenario, seed: int, iterations: int, depth: int) -> float:
    return simulate(cluster, "hps", iterations=iterations, seed=seed, depth=depth).iteration_seconds


def result_tables(found: list[TuningResult], *, with_ceiling: bool = False) -> list[str]:
    """A table for each scenario, in order; with_ceiling: and what bounding staleness can gain there."""
    scenarios = list(dict.fromkeys(s.scenario for s in found))
    return [
        _table(scenario, [s for s in found if s.scenario == scenario], with_ceiling) for scenario in scenarios
    ]


def _table(scenario: TuningScenario, found: list[TuningResult], with_ceiling: bool) -> str:
    heading = [
        "competitor",
        "chosen",
        "step size",
        "s to the loss",
        "95 % interval",
        "copy",
        "global batches",
    ]
    rows = [[*heading, "ms a batch", "waiting", "staleness", "dropped", "transfers at once"]]
    rows += [_row(s) for s in sorted(found, key=lambda s: s.median)]
    trials, seeds = sum(s.trials for s in found), len(found[0].runs)
    named = f"`{scenario.cluster}`{'' if scenario.link else ', transfers taking no time'}"
    named += "" if scenario.learner == TANH else f", {scenario.learner.title}"
    gain = f", H = {ceiling(cluster_of(scenario, planned=False)):.1f}" if with_ceiling else ""
    title = f"**{named}**{gain}: loss {scenario.target:g}, {seeds} seeds, {trials} trials to tune."
    return f"{title}\n\n{record.table(rows)}"


def _row(s: TuningResult) -> list[str]:
    low, high = map(_seconds, s.interval)
    batches = statistics.median(run.samples / s.global_batch for run in s.runs)
    first, copy = s.halves
    times = [_seconds(s.median), f"{low} to {high}", f"{copy / first:.2f}", f"{batches:.0f}"]
    iteration, idle = 1e3 * s.median_of("iteration_seconds"), s.median_of("idle_share")
    late, dropped = s.median_of("staleness_mean"), s.median_of("rejected")
    peak = f"{s.median_of('peak_transfers'):.0f}" if s.scenario.link else "-"
    figures = [f"{iteration:.0f}", f"{idle:.0%}", f"{late:.1f}", f"{dropped:.0f}", peak]
    step_size = s.lr * s.scenario.learner.hyper.lr
    return [s.competitor.title, f"`{s.policy}`", f"{step_size:.3g}", *times, *figures]


def _seconds(value: float) -> str:
    return f"{value:.1f}" if math.isfinite(value) else "never"


def panels(found: list[TuningResult]) -> dict[str, list[TuningResult]]:
    """Results by the scenario's title."""
    named: dict[str, list[TuningResult]] = {}
    for s in found:
        named.setdefault(s.scenario.title, []).append(s)
    return named
