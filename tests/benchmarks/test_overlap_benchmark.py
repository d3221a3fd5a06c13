"""benchmarks/overlap.py plans what its formulas say; the steps themselves need root and shaped links."""

from __future__ import annotations

import overlap
import pytest


def test_the_plan_has_the_overlap_of_its_buckets() -> None:
    links = [(1e6, 0.02), (8e6, 0.09)]  # 2 ranks: 100 MB/s with both passes, 10 ms
    hidden = overlap.plan(500, links, (0.5, 0.0), 2, overlapped=True)
    after = overlap.plan(500, links, (0.5, 0.0), 2, overlapped=False)
    compute, size = max(overlap.seconds_of(after)), overlap.LAYERS * 500**2 * 4
    reduced = 0.01 + size / 1e8
    assert after.iteration_seconds == pytest.approx(compute + reduced)
    assert hidden.iteration_seconds == pytest.approx(compute + reduced / overlap.LAYERS)
    short = overlap.plan(500, links, (0.01, 0.0), 2, overlapped=True)
    ready = overlap.FORWARD + (1 - overlap.FORWARD) / overlap.LAYERS
    assert short.iteration_seconds == pytest.approx(ready * max(overlap.seconds_of(short)) + reduced)
