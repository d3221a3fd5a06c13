"""What is claimed of BOA, SaPS, R2SP and H-PS, who races whom for it, and whether the bars are met."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path

from record import table
from tuning import Course, Effort, Entry, Standing, ahead, by_seed, race, scenario

from pyps.simulate import Scenario, simulate

BOA_OVER_BACKUP, R2SP_OVER_BSP, HPS_OVER_PLAIN = 1.23, 1.25, 1.4
UNIFORM_MARGIN = 0.05
HPS_AIM = 3.5
INT8_SHARE = (1 + 4 / 256) / 4  # bytes of int8 with a scale for each 256, over those of f32
INT4_SHARE = (0.5 + 4 / 64) / 4
SIZES = (1.0, 2.0, 4.0)  # times the model of clusters/hps.toml

Curve = list[tuple[float, int, float]]  # seconds, samples, loss
EVEN = Entry("BSP, equal batches", ("bsp",))
PLANNED = Entry("BOA: BSP, planned batches", ("bsp",), planned=True)
BACKUP_ONE = Entry("backup, one", ("backup:k=1",))
BACKUP = Entry("backup, k tuned", ("backup:k=1", "backup:k=2", "backup:k=3"))
SSP = Entry("SSP", ("ssp:bound=3", "ssp:bound=8"))
ASP, DYNSGD = Entry("ASP", ("asp",)), Entry("DynSGD", ("dynsgd",))
SAPS = Entry("SaPS", ("saps", "saps:threshold=quantile"))
STRAGGLING = (
    SAPS, ASP, EVEN, BACKUP_ONE, BACKUP, SSP, DYNSGD,
    Entry("DSSP", ("dssp:bound=3,extra=12",)),
    Entry("n-softsync", ("softsync:n=1", "softsync:n=4")),
    Entry("ConSGD", ("consgd",)), Entry("DC-ASGD", ("dcasgd:lambda=0.04",)),
)  # fmt: skip
DRAWN = {entry.title for entry in STRAGGLING[:7]}
SEEDS_OF_SAPS, TUNING_OF_SAPS = tuple(range(1, 16)), (101, 102, 103)
BARS_OF_SAPS = (ASP, EVEN, BACKUP_ONE, BACKUP, SSP, DYNSGD)


@dataclass(frozen=True)
class Bar:
    """One line of what had to be shown."""

    what: str
    found: str
    asked: str
    met: bool

    def __str__(self) -> str:
        return f"- {'met' if self.met else '**missed**'}: {self.what}: {self.found} (asked: {self.asked})"


@dataclass(frozen=True)
class Findings:
    """A part's tables and bars; what is drawn, by panel: standings, or (real, simulated) curves."""

    tables: list[str]
    bars: list[Bar]
    curves: dict[str, list[Standing]] = field(default_factory=dict)
    pairs: dict[str, tuple[Curve, Curve]] = field(default_factory=dict)

    def text(self) -> str:
        return "\n\n".join([*self.tables, "\n".join(map(str, self.bars))])


def boa(effort: Effort, _: Path) -> Findings:
    """Planned batches against equal ones and backup workers; and where all are alike."""
    courses = (Course("three-types"), Course("uniform"))
    entries = (PLANNED, EVEN, BACKUP_ONE, BACKUP)
    found = race([(c, e) for c in courses for e in entries], effort)
    three, uniform = found[:4], found[4:]
    gain = three[2].median / three[0].median
    alike = uniform[0].median / min(s.median for s in uniform)
    lbb = [
        simulate(scenario(Course("lbb"), planned=planned), iterations=10).iteration_seconds
        for planned in (False, True)
    ]
    published = (
        f"LBB's four devices, their published times, 512 samples: {1e3 * lbb[0]:.1f} ms equal, "
        f"{1e3 * lbb[1]:.1f} ms planned ({lbb[0] / lbb[1]:.2f}x)."
    )
    bars = [
        Bar("one backup worker's time to the loss over BOA's, three types", f"{gain:.2f}",
            f">= {BOA_OVER_BACKUP}", gain >= BOA_OVER_BACKUP),
        Bar("BOA's time over the best one's on equal devices", f"{alike:.2f}",
            f"<= {1 + UNIFORM_MARGIN}", alike <= 1 + UNIFORM_MARGIN),
    ]  # fmt: skip
    return Findings([*standings(found), published], bars, panels(found))


def saps(effort: Effort, _: Path) -> Findings:
    """Who is first where some are slow, and where nobody is."""
    clusters = ("four", "eight", "sixteen", "heavy", "uniform")
    if not effort.quick:
        effort = replace(effort, seeds=SEEDS_OF_SAPS, tuning=TUNING_OF_SAPS)
    found = race([(Course(c), e) for c in clusters for e in STRAGGLING], effort)
    bars = []
    for name in clusters[:-1]:
        by = {
            entry: s
            for entry, s in zip(STRAGGLING * len(clusters), found, strict=True)
            if s.course.cluster == name
        }
        for rival in BARS_OF_SAPS:
            ratio = by[rival].median / by[SAPS].median
            low, high = by_seed(by[rival], by[SAPS])
            found_text = f"{ratio:.2f}; by seed {low:.2f} to {high:.2f}"
            bars.append(
                Bar(f"{name}: {rival.title}'s time over SaPS's", found_text, "95 % intervals apart",
                    ahead(by[SAPS], by[rival]))
            )  # fmt: skip
        waited = max(r.idle_share for r in by[SAPS].results)
        bars.append(Bar(f"{name}: share of time that SaPS waits", f"{waited:.3f}", "0", waited == 0.0))
        least = min(rank.samples for r in by[SAPS].results for rank in r.ranks)
        bars.append(Bar(f"{name}: samples of SaPS's least heard worker", str(least), "> 0", least > 0))
    alike = [s for s in found if s.course.cluster == "uniform"]
    over = alike[0].median / min(s.median for s in alike)
    bars.append(
        Bar("uniform: SaPS's time over the best one's", f"{over:.2f}", f"<= {1 + UNIFORM_MARGIN}",
            over <= 1 + UNIFORM_MARGIN)
    )  # fmt: skip
    return Findings(standings(found), bars, panels([s for s in found if s.entry.title in DRAWN]))


def r2sp(effort: Effort, _: Path) -> Findings:
    """A ring of turns on a link that binds, and with no link at all."""
    slacks = Entry("R2SP", ("r2sp:slack=1.0", "r2sp:slack=1.2", "r2sp:slack=0"), planned=True)
    entries = (
        slacks, replace(PLANNED, title="BSP"), replace(ASP, planned=True), replace(SSP, planned=True)
    )  # fmt: skip
    courses = (Course("link"), Course("link", link=False))
    found = race([(c, e) for c in courses for e in entries], effort)
    bound, free = found[:4], found[4:]
    gain = bound[1].median / bound[0].median
    compute = f"BSP's time over R2SP's where transfers take none: {free[1].median / free[0].median:.2f}."
    peaks = [int(s.middle("peak_transfers")) for s in bound]
    late = [r.staleness_quantile(0.5) for r in bound[0].results]
    bars = [
        Bar("BSP's time to the loss over R2SP's, link binds (simulated)", f"{gain:.2f}",
            f">= {R2SP_OVER_BSP}", gain >= R2SP_OVER_BSP),
        Bar("R2SP's transfers at once", str(peaks[0]), "1", peaks[0] == 1),
        Bar("R2SP's staleness, median", str(max(late)), "7", set(late) == {7}),
    ]  # fmt: skip
    return Findings([*standings(found), compute], bars, panels(found))


@dataclass(frozen=True)
class Way:
    """Which of H-PS's three factors are on; without task sizes all get equal tasks."""

    title: str
    sized: bool = False
    share: float = 1.0  # of f32's bytes, both ways
    pipeline: bool = False

    def scenario(self, even: Scenario, size: float) -> Scenario:
        """Equal tasks under the same policy: nobody's memory holds more than an equal share."""
        times = size * self.share
        made = replace(even, up_bytes=even.up_bytes * times, down_bytes=even.down_bytes * times)
        if self.sized:
            return made
        return replace(made, workers=tuple(replace(w, most=w.batch) for w in made.workers))


WAYS = (
    Way("plain: equal tasks, f32"),
    Way("task sizes by speed", sized=True),
    Way("int8 both ways", share=INT8_SHARE),
    Way("pipeline", pipeline=True),
    Way("task sizes, int8", sized=True, share=INT8_SHARE),
    Way("task sizes, pipeline", sized=True, pipeline=True),
    Way("int8, pipeline", share=INT8_SHARE, pipeline=True),
    Way("all three", sized=True, share=INT8_SHARE, pipeline=True),
    Way("all three, int4 both ways", sized=True, share=INT4_SHARE, pipeline=True),
)


def hps(effort: Effort, _: Path) -> Findings:
    """Task sizes, bits and the pipeline, apart and together, beside a plain server: times alone."""
    even, iterations = scenario(Course("hps"), planned=False), 3 if effort.quick else 100
    link = [size * len(even.workers) * 2 * even.up_bytes / even.server_bandwidth for size in SIZES]
    rows = [["what", *(f"link {1e3 * seconds:.0f} ms" for seconds in link)]]
    plain: dict[float, float] = {}
    gains: dict[tuple[str, float], float] = {}
    for way in WAYS:
        cells = []
        for size in SIZES:
            cluster = way.scenario(even, size)
            seconds = [_iteration(cluster, seed, iterations, pipeline=way.pipeline) for seed in effort.seeds]
            middle = statistics.median(seconds)
            gain = gains[way.title, size] = plain.setdefault(size, middle) / middle
            spread = f"{1e3 * min(seconds):.0f} to {1e3 * max(seconds):.0f}"
            cells.append(f"{1e3 * middle:.0f} ({spread}), {gain:.2f}x")
        rows.append([way.title, *cells])
    least = gains["all three", SIZES[0]]
    bars = [Bar("plain over all three", f"{least:.2f}", f">= {HPS_OVER_PLAIN}", least >= HPS_OVER_PLAIN)]
    for size, seconds in list(zip(SIZES, link, strict=True))[1:]:
        gain = gains["all three", size]
        what = f"plain over all three, link {1e3 * seconds:.0f} ms"
        bars.append(Bar(what, f"{gain:.2f}", f">= {HPS_AIM}, the aim", gain >= HPS_AIM))
    alike = "Milliseconds an iteration (range over seeds), and how many times as fast as the plain server."
    return Findings([alike, table(rows)], bars)


def _iteration(cluster: Scenario, seed: int, iterations: int, *, pipeline: bool) -> float:
    return simulate(cluster, "hps", iterations=iterations, seed=seed, pipeline=pipeline).iteration_seconds


def standings(found: list[Standing]) -> list[str]:
    """A table for each course, the first one first."""
    courses = list(dict.fromkeys(s.course for s in found))
    return [_table(course, [s for s in found if s.course == course]) for course in courses]


def _table(course: Course, found: list[Standing]) -> str:
    heading = ["way", "chosen", "step size", "s to the loss", "95 % interval", "global batches"]
    rows = [[*heading, "ms a batch", "waiting", "staleness", "dropped", "transfers at once"]]
    for s in sorted(found, key=lambda s: s.median):
        batches = statistics.median(r.samples / s.global_batch for r in s.results)
        rows.append([
            s.entry.title, f"`{s.policy}`", f"{s.lr:.3g}", _seconds(s.median),
            " to ".join(map(_seconds, s.interval)), f"{batches:.0f}",
            f"{1e3 * s.middle('iteration_seconds'):.0f}", f"{s.middle('idle_share'):.0%}",
            f"{s.middle('staleness_mean'):.1f}", f"{s.middle('rejected'):.0f}",
            f"{s.middle('peak_transfers'):.0f}" if course.link else "-",
        ])  # fmt: skip
    trials = sum(s.trials for s in found)
    named = f"`{course.cluster}`{'' if course.link else ', transfers taking no time'}"
    seeds = len(found[0].results)
    return f"**{named}**: loss {course.target:g}, {seeds} seeds, {trials} trials to tune.\n\n{table(rows)}"


def _seconds(value: float) -> str:
    return f"{value:.1f}" if math.isfinite(value) else "never"


def panels(found: list[Standing]) -> dict[str, list[Standing]]:
    """Standings by the course's name."""
    named: dict[str, list[Standing]] = {}
    for s in found:
        named.setdefault(s.course.cluster + ("" if s.course.link else ", no link"), []).append(s)
    return named
