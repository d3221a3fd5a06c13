"""What each rank did when: shares of pieces of a long run, and single spans of short windows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pyps.formats.records import SpanKind, StepRecord, split_spans
from pyps.report.charts import Bar

KINDS: tuple[SpanKind, ...] = ("compute", "data", "push", "pull", "skip", "wait")
MOST_PIECES, LEAST_PIECES = 240, 24
MOST_MARKS = 8000  # pieces of all ranks together, so that the page stays small


def kinds_in(records: Sequence[StepRecord]) -> list[SpanKind]:
    """The kinds of spans that there are, in the order in which they are shown."""
    found = {kind for r in records for kind, begin, end in r.spans if end > begin}
    return [kind for kind in KINDS if kind in found]


def shares(
    records: Sequence[StepRecord], begin: float, end: float, pieces: int
) -> list[tuple[str, list[float]]]:
    """Of one rank's steps, by kind: its share of each of `pieces` equal parts of the time; overlapped
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
    """Of one rank's steps, the spans that reach into a time window."""
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
