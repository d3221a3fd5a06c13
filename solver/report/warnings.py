"""Warns of what a reader should know before trusting a plan; one line a group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from pyps.formats import Cluster, Fit, PlanWorker, Point, Profile, R2spSchedule
from pyps.solver.exact.minmax import Problem, rounded
from pyps.solver.ranks import PlannedRank, cost_of

FIT_ERROR_WORTH_A_WARNING = 0.05
MISSED_WORTH_A_WARNING = 0.10
NEAR = 2  # a measured batch within this factor of the planned one says something of it
SLOW_LINK = 1e5  # bytes a second: less may be meant in larger units
LONG_LATENCY = 1.0  # seconds: more may be meant in milliseconds
CONFIDENCE_FACTOR = 1.645  # from a standard error to the bound that 90 % are within


def warnings_of(
    ranks: Sequence[PlannedRank], workers: Sequence[PlanWorker], problem: Problem, has_side_constraints: bool
) -> list[str]:
    """Warnings about fits and about workers that are left out.

    ranks, workers, problem: what was planned, in rank order. has_side_constraints: limits or ties between
    workers may be the reason why one is left out.
    """
    lines: list[str] = []
    groups: dict[str, list[tuple[PlannedRank, PlanWorker]]] = {}
    for rank, worker in zip(ranks, workers, strict=True):
        groups.setdefault(rank.group.name, []).append((rank, worker))
    for name, members in groups.items():
        rank, used = members[0][0], [worker for _, worker in members if worker.batch]
        batches = sorted({worker.micro_batch // rank.group.ranks_each for worker in used})
        lines += [f"{name}: {line}" for line in _of_batches(rank.one_profile, batches)]
        error = rank.fit.leave_one_out_error or 0.0
        if used and error > FIT_ERROR_WORTH_A_WARNING:
            lines.append(f"{name}: the fit misses left-out points by {error:.1%} (median)")
        if rank.bandwidth is not None and rank.link is None:
            lines.append(
                f"{name}: its transfers are not counted: {rank.group.profile} has no model.parameters"
            )
        if rank.profile.device.emulated:
            lines.append(f"{name}: emulated, {rank.profile.device.throttle:g} times slower by a throttle")
        if out := [worker.name for _, worker in members if not worker.batch]:
            tied = "the limits or ties require it"
            sooner = tied if has_side_constraints else "the others finish sooner without it"
            reason = barred(problem, members[0][1].rank) or sooner
            lines.append(f"{out[0] if len(out) == 1 else f'{len(out)} of {name}'}: left out, {reason}")
    models = {rank.profile.model.name for rank in ranks}
    if len(models) > 1:
        lines.append(f"the profiles are of different models: {', '.join(sorted(models))}")
    return list(dict.fromkeys(lines))


def barred(problem: Problem, k: int) -> str:
    """Why worker k can take no batch whatever the others do; empty if it can."""
    bounds = rounded(problem)
    least = f"no batch fits: its smallest is {bounds.min_batch[k]}"
    if not bounds.max_batch[k]:
        return f"{least}, max_batch and memory allow {problem.max_batch[k]}"
    above = bounds.min_batch[k] > problem.global_batch
    return f"{least}, the global batch is {problem.global_batch}" if above else ""


def doubtful_links(cluster: Cluster, ranks: Sequence[PlannedRank]) -> list[str]:
    """Warnings about stated links that count for nothing, or that are perhaps stated in other units."""
    lines = []
    for rank in ranks:
        group, name = rank.group, rank.group.name
        if group.latency and rank.bandwidth is None and cluster.sync is None:
            lines.append(f"{name}: its latency is not counted: state its bandwidth, too")
        if group.bandwidth is not None and group.bandwidth < SLOW_LINK:
            unit = "bandwidth is in bytes a second (1 Gbit/s is 1.25e8)"
            lines.append(f"{name}: bandwidth {group.bandwidth:g}: {unit}")
        if group.latency is not None and group.latency > LONG_LATENCY:
            lines.append(f"{name}: latency {group.latency:g}: latency is in seconds")
    return list(dict.fromkeys(lines))


def _of_batches(profile: Profile, batches: Sequence[int]) -> Iterator[str]:
    """About a group's planned batches: those farthest outside the trusted range, and contradicted ones."""
    if (fit := profile.fit) is None:
        return
    low, high = fit.trusted_min_batch, fit.trusted_max_batch
    for batch in dict.fromkeys([*batches[:1], *batches[-1:]]):
        outside = batch < low if batch == batches[0] else False
        if outside or (batch > high and batch == batches[-1]):
            yield _outside(fit, batch)
    for batch in batches:
        yield from _overruled(fit, profile.points, batch)


def _outside(fit: Fit, batch: int) -> str:
    """That a batch is outside the trusted range, and what its time is taken from."""
    low, high = fit.trusted_min_batch, fit.trusted_max_batch
    line = f"batch {batch} is outside {low}..{high}, where its fit is trusted"
    if batch < low and fit.kind == "table":
        return f"{line}: little gain below {low} is counted on"
    if batch > high and fit.doubling_error is not None:
        return f"{line}: at {2 * high}, its time may be off by {CONFIDENCE_FACTOR * fit.doubling_error:.0%}"
    return line


def _overruled(fit: Fit, points: Sequence[Point], batch: int) -> Iterator[str]:
    """The measured batches on either side of this one whose times the fit contradicts."""
    cost, sizes = cost_of(fit), sorted((p.batch, _median(p)) for p in points)
    around = [p for p in sizes if p[0] <= batch][-1:] + [p for p in sizes if p[0] >= batch][:1]
    for at, measured in dict.fromkeys(p for p in around if batch <= NEAR * p[0] and p[0] <= NEAR * batch):
        fitted = cost.seconds(at)
        if abs(fitted / measured - 1) > MISSED_WORTH_A_WARNING:
            yield f"batch {at} was measured at {1e3 * measured:.4g} ms, its fit says {1e3 * fitted:.4g} ms"


def _median(point: Point) -> float:
    return median(point.seconds) if isinstance(point.seconds, list) else point.seconds


def link_warnings(r2sp: R2spSchedule, slowest_seconds: float) -> list[str]:
    """A warning about turns that do not fit into the slowest worker's step, with what would make them fit."""
    if r2sp.feasible is not False:
        return []
    ways = []
    if r2sp.remedies:
        found = r2sp.remedies
        ways += [f"global_batch {found.global_batch}"] * (found.global_batch is not None)
        ways += [f"{found.bits} bits a number"] * (found.bits is not None)
        ways += [f"{found.links} such links"] * (found.links is not None)
    help_ = f"; it would fit with {' or '.join(ways)}" if ways else ""
    return [
        f"r2sp: transfers take {sum(r2sp.turn_seconds):.4g} s of a {slowest_seconds:.4g} s iteration: "
        f"the link binds, not the workers{help_}"
    ]
