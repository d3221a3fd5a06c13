"""The stragglers of a finished run, by version and by time, in words: see pyps.store.stragglers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from pyps.formats.records import StepRecord
from pyps.formats.setup import RankSpec
from pyps.report.steps import PHASES, is_applied, phase_seconds
from pyps.store.stragglers import StepPace, stragglers

OFTEN = 0.95  # a dynamic straggler has one such step in twenty
ENOUGH = 20  # steps, for that


def straggler_lines(ranks: Sequence[RankSpec], records: Mapping[int, Sequence[StepRecord]]) -> Iterator[str]:
    """A line for each straggler. records: by rank."""
    trained = [rank for rank in ranks if any(map(is_applied, records[rank.rank]))]
    paces = [_pace(records[rank.rank]) for rank in trained]
    applied = [record.version for rank in trained for record in records[rank.rank] if is_applied(record)]
    pushes = len(applied) / max(1, len({version for version in applied if version}))
    for rank, pace, found in zip(trained, paces, stragglers(paces, len(trained), pushes), strict=True):
        if kind := str(found):
            usual, worst = pace.seconds * 1e3, pace.seconds_now / pace.seconds
            times = f"a step computes for {usual:,.1f} ms"
            times += f", one in twenty {worst:.1f} times as long" if worst >= 1.05 else ""
            versions = f"{pace.versions:.1f} versions late, one in twenty {pace.versions_now:.1f}"
            yield f"rank {rank.rank} ({rank.name}): {kind}: its gradients are {versions}; {times}"


def _pace(records: Sequence[StepRecord]) -> StepPace:
    """The usual step, and one of the worst: of too few the usual one. A step is long by those of its batch: a
    worker is not late that took over the samples of others.
    """
    applied = [r for r in records if is_applied(r)]
    seconds = phase_seconds(applied)[PHASES.index("compute")]
    versions = [r.staleness for r in applied]
    median, mean = float(np.median(seconds)), float(np.mean(versions))
    by_batch = defaultdict(list)
    for record, took in zip(applied, seconds, strict=True):
        by_batch[record.samples].append(took)
    times = [took / np.median(by_batch[r.samples]) for r, took in zip(applied, seconds, strict=True)]
    if len(applied) < ENOUGH:
        return StepPace(median, mean, median, mean)
    worst = median * float(np.quantile(times, OFTEN))
    return StepPace(median, mean, worst, float(np.quantile(versions, OFTEN)))
