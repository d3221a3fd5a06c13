"""What a run's figures say, in sentences: what limits it, and what to know before trusting its medians."""

from __future__ import annotations

from collections.abc import Iterator

from pyps.report.report import RankReport
from pyps.report.run_data import RunData
from pyps.report.steps import Distribution

LITTLE = 0.1  # of the ranks' time: below, training is limited by compute
MIN_ABSENT_SECONDS = 1.0


def bottleneck(run: RunData) -> str:
    """Where the ranks' time goes apart from compute, and which rank is the slowest."""
    ranks = [r for r in run.report.ranks if r.steps]
    if not ranks:
        return "No rank has finished a step."
    totals = {kind: sum(_seconds(r, kind) for r in ranks) for kind in ("compute", "data", "transfer", "wait")}
    whole = sum(totals.values()) or 1.0
    share = {kind: seconds / whole for kind, seconds in totals.items()}
    slowest = max(ranks, key=_busy)
    name = f"rank {slowest.rank} ({slowest.name})"
    if share["data"] >= LITTLE and share["data"] >= share["transfer"]:
        rank = max(ranks, key=lambda r: _seconds(r, "data"))
        most = f"most on rank {rank.rank} ({rank.name})"
        return f"Loading data takes {share['data']:.0%} of the ranks' time, {most}."
    if share["transfer"] >= LITTLE:
        return f"Transfers take {share['transfer']:.0%} of the ranks' time."
    if share["wait"] >= LITTLE:
        busy = f"{_busy(slowest) * 1e3:,.1f} ms a step"
        return f"The ranks wait {share['wait']:.0%} of their time; {name} is the slowest, with {busy}."
    return f"Compute limits it: {share['compute']:.0%} of the ranks' time."


def findings(run: RunData) -> Iterator[str]:
    """What the medians hide."""
    report = run.report
    for r in report.ranks:
        if r.absent_seconds >= MIN_ABSENT_SECONDS:
            yield f"Rank {r.rank} ({r.name}) was absent for {r.absent_seconds:,.1f} s while others trained."
    if report.short_rounds:
        rounds = f"{report.short_rounds:,} of {report.versions:,} rounds"
        yield f"{rounds} had fewer samples than the global batch of {report.global_batch:,}."
    s = report.samples
    if s.returned or s.skipped or s.dropped:
        rest = f"{s.skipped:,} skipped, {s.dropped:,} dropped"
        yield f"{s.returned:,} samples were returned and assigned again, {rest}."
    yield from (f"{advice[0].upper()}{advice[1:]}." for advice in report.advice)
    yield from (f"Rebalanced: {why}." for why in report.replans)


def _seconds(rank: RankReport, kind: str) -> float:
    """All of a rank's seconds of one kind."""
    names = ("push", "pull") if kind == "transfer" else (kind,)
    found = [getattr(rank, name, None) for name in names]
    return sum((d.mean * d.count for d in found if isinstance(d, Distribution)), 0.0)


def _busy(rank: RankReport) -> float:
    """What a step takes without waits."""
    return sum(_seconds(rank, kind) for kind in ("compute", "data", "transfer")) / max(1, rank.steps)
