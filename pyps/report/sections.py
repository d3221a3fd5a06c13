"""The charts of a run's page, one function each; a chart without data is left out."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import numpy as np
from numpy.typing import NDArray

from pyps.formats.records import SpanKind, StepRecord, split_spans
from pyps.formats.setup import RankSpec
from pyps.report.charts import Bar, bars, lanes_chart, line_chart, share_bar, stacked
from pyps.report.report import rank_time
from pyps.report.run_data import RunData
from pyps.report.steps import between, by_rank, passings, pauses, training_time, version_times

MOST_LANES = 64
CLOSE_UP_STEPS = 10.0
MOST_CLOSE_UP_SPANS = 2500
POINTS = 240
KINDS: tuple[SpanKind, ...] = ("compute", "data", "push", "pull", "skip", "wait")
MOST_PIECES, LEAST_PIECES = 240, 24
MOST_MARKS = 8000  # pieces of all ranks together, so that the page stays small


@dataclass(frozen=True)
class Section:
    """A part of the page, with HTML as its body."""

    key: str
    title: str
    body: str


def sections(run: RunData) -> list[Section]:
    """All charts for which there is data."""
    if not any(r.spans for r in run.records):
        return []
    makers: tuple[tuple[str, str, Callable[[RunData], str]], ...] = (
        ("timeline", "Timeline of each rank", _timeline),
        ("loss", "Loss", _loss),
        ("steps", "Step time against the plan", _steps),
    )
    made = [Section(key, title, make(run)) for key, title, make in makers]
    return [section for section in made if section.body]


def _timeline(run: RunData) -> str:
    records = [r for r in run.records if r.spans]
    begin, end = training_time(records)
    if end <= begin:
        return ""
    ranks, kinds = run.setup.ranks[:MOST_LANES], kinds_in(records)
    parts, mine = [_shares_table(run, ranks)], by_rank(records, [r.rank for r in ranks])
    pieces = pieces_for(len(ranks))
    whole = [(_lane(r), stacked(shares(mine[r.rank], begin, end, pieces))) for r in ranks]
    parts.append(f"<h3>The whole run</h3>{lanes_chart(whole, 0.0, end - begin, kinds)}")
    a, b = _close_up(run, records, begin, end)
    lanes = [(_lane(r), bars(window(mine[r.rank], a, b), a, b)) for r in ranks]
    parts.append(f"<h3>A few steps in the middle</h3>{lanes_chart(lanes, a - begin, b - begin)}")
    if len(run.setup.ranks) > MOST_LANES:
        parts.append(f"<p>The first {MOST_LANES} of {len(run.setup.ranks)} ranks.</p>")
    return "".join(parts)


def _close_up(run: RunData, records: Sequence[StepRecord], begin: float, end: float) -> tuple[float, float]:
    """From when to when a few steps are shown; all of a short run."""
    times, spans = run.report.iteration_seconds, sum(len(r.spans) for r in records)
    length = CLOSE_UP_STEPS * times.median if times.count and times.median else end - begin
    length = min(length, (end - begin) * MOST_CLOSE_UP_SPANS / spans, end - begin)
    middle = (begin + end) / 2
    return middle - length / 2, middle + length / 2


def _shares_table(run: RunData, ranks: Sequence[RankSpec]) -> str:
    """One bar a rank: where its time went, as a share."""
    rows = []
    for report in (r for r in run.report.ranks if r.rank in {rank.rank for rank in ranks}):
        seconds = rank_time(report).seconds
        total = sum(seconds.values())
        bar = share_bar([(p, s / total) for p, s in seconds.items()]) if total else ""
        rows.append(
            f'<div class="lane-name">{report.rank} {html.escape(report.name)}</div>{bar or "<div></div>"}'
        )
    return f'<h3>Where the time went</h3><div class="lanes">{"".join(rows)}</div>'


def _lane(rank: RankSpec) -> str:
    return f"{rank.rank} {rank.name}"


def _loss(run: RunData) -> str:
    points = run.report.loss
    if not points:
        return ""
    positive = min(p.loss for p in points) > 0.0
    wide = positive and max(p.loss for p in points) > 10.0 * min(p.loss for p in points)
    return line_chart("loss", [p.seconds for p in points], [p.loss for p in points], "", log=wide, height=220)


def _steps(run: RunData) -> str:
    """The time of a global batch, as the median of pieces of the run."""
    origin, _ = training_time(run.records)
    resumed = [event.monotonic_seconds for event in run.events if event.kind == "resumed"]
    paused = pauses(run.records, resumed)
    done = (done for _, done in sorted(version_times([r for r in run.records if r.spans]).items()))
    ends = [moment for moment, _ in passings(done, run.report.global_batch)]
    if len(ends) < 3:
        return ""
    times = [1e3 * between(a, b, paused) for a, b in pairwise(ends)]
    xs, ys = _thinned([end - origin for end in ends[1:]], times)
    predicted = run.report.predicted_iteration_seconds
    reference = ("plan", 1e3 * predicted) if predicted else None
    return line_chart("measured", xs, ys, "ms", reference=reference)


def _thinned(xs: Sequence[float], ys: Sequence[float]) -> tuple[list[float], list[float]]:
    """At most POINTS points, each the median of as many that follow one another."""
    size = -(-len(xs) // POINTS)
    groups = [slice(k, k + size) for k in range(0, len(xs), size)]
    return [xs[g][-1] for g in groups], [float(median(ys[g])) for g in groups]


def kinds_in(records: Sequence[StepRecord]) -> list[SpanKind]:
    """The kinds of spans that there are, in the order in which they are shown."""
    found = {kind for r in records for kind, begin, end in r.spans if end > begin}
    return [kind for kind in KINDS if kind in found]


def shares(
    records: Sequence[StepRecord], begin: float, end: float, pieces: int
) -> list[tuple[str, list[float]]]:
    """Return for one rank's steps, by kind, its share of each of `pieces` equal parts of the time; overlapped
    transfers are left out.
    """
    edges = np.linspace(begin, end, pieces + 1)
    spans = [span for r in records for span in split_spans(r)[0]]
    found = []
    for kind in KINDS:
        mine = sorted((b, e) for name, b, e in spans if name == kind and e > b)
        if mine:
            covered = np.diff(_covered(np.array(mine), edges))
            found.append((str(kind), [float(x) for x in covered / (edges[1] - edges[0])]))
    return found


def pieces_for(ranks: int) -> int:
    """Into how many pieces a run of this many ranks is cut."""
    return max(LEAST_PIECES, min(MOST_PIECES, MOST_MARKS // max(1, ranks)))


def window(records: Sequence[StepRecord], begin: float, end: float) -> list[Bar]:
    """Return the spans of one rank's steps that reach into a time window."""
    found = []
    for r in records:
        if not r.spans or r.spans[-1][2] < begin or r.spans[0][1] > end:
            continue
        own, overlapped = split_spans(r)
        for spans, below in ((own, False), (overlapped, True)):
            for kind, b, e in spans:
                what = (
                    f"{kind} {(e - b) * 1e3:.1f} ms, step {r.step}, version {r.version}, {r.samples} samples"
                )
                found.append(Bar(kind, b, e, what, below))
    return found


def _covered(spans: NDArray[np.float64], times: NDArray[np.float64]) -> NDArray[np.float64]:
    """For each time, the seconds before it that spans (begin, end), in order, cover."""
    lengths = spans[:, 1] - spans[:, 0]
    total = np.concatenate([[0.0], np.cumsum(lengths)])
    before = np.searchsorted(spans[:, 0], times)
    last = np.maximum(before - 1, 0)
    inside = np.clip(times - spans[last, 0], 0.0, lengths[last])
    return np.where(before > 0, total[last] + inside, 0.0)
