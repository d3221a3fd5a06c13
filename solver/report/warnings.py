"""Warns of what a reader should know before trusting a plan; one line a group, or one for many groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from pyps.formats import Cluster, Fit, PlanWorker, Point, Profile, R2spSchedule
from pyps.profiler.multiples import shown_multiple
from pyps.profiler.points_csv import IMPORTED, long_step
from pyps.solver.costs import cost_of
from pyps.solver.exact.minmax import Problem, rounded
from pyps.solver.ranks import PlannedRank, max_batch_of

FIT_ERROR_WORTH_A_WARNING = 0.05
MISSED_WORTH_A_WARNING = 0.10
NEAR = 2  # a measured batch within this factor of the planned one says something of it
SLOW_LINK = 1e5  # bytes a second: less may be meant in larger units
SHORT_STEP = 0.02  # seconds; steps of 11 ms on shared cores took SHORT_STEP_FACTOR times their plan, ...
SHORT_STEP_FACTOR = 1.4  # ... measured by benchmarks/prediction.py --short; those of 120 ms took 1.0
UNLIKELY_RATIO = 500.0  # of two devices' times: one may be in milliseconds
LONG_LATENCY = 1.0  # seconds: more may be meant in milliseconds
CONFIDENCE_FACTOR = 1.645  # from a standard error to the bound that 90 % are within
MOST_LINES = 4  # of one cause: more groups share one
NAMED = 3  # of these


class Remark(NamedTuple):
    """Hold a remark on a group. cause: what one line says of it and of others, where they are many."""

    name: str
    line: str
    cause: str


def in_lines(remarks: Sequence[Remark]) -> list[str]:
    """A line for each remark; one for all of a cause that many groups share, with a few of their names."""
    found: dict[str, dict[str, None]] = {}
    for name, _, cause in remarks:
        found.setdefault(cause, {})[name] = None
    names = {cause: list(sharing) for cause, sharing in found.items()}
    lines = []
    for name, line, cause in remarks:
        sharing = names[cause]
        if len(sharing) <= MOST_LINES:
            lines.append(f"{name}: {line}")
        elif name == sharing[0]:
            lines.append(f"{few_of(sharing)}: {cause}")
    return list(dict.fromkeys(lines))


def few_of(names: Sequence[str]) -> str:
    """The names, or a few of them and how many more there are."""
    if len(names) <= MOST_LINES:
        return ", ".join(names)
    return f"{', '.join(names[:NAMED])} and {len(names) - NAMED:,} more"


def warnings_of(
    ranks: Sequence[PlannedRank], workers: Sequence[PlanWorker], problem: Problem, may_forbid: bool
) -> list[str]:
    """Warnings about fits and about workers that are left out.

    ranks, workers, problem: what was planned, in rank order. may_forbid: a limit or a tie may be why a worker
    is left out.
    """
    remarks: list[Remark] = []
    groups: dict[str, list[tuple[PlannedRank, PlanWorker]]] = {}
    for rank, worker in zip(ranks, workers, strict=True):
        groups.setdefault(rank.group.name, []).append((rank, worker))
    bounds = rounded(problem)
    for name, members in groups.items():
        rank, used = members[0][0], [worker for _, worker in members if worker.batch]
        batches = sorted({worker.micro_batch // rank.group.ranks_each for worker in used})
        group = rank.group if rank.one is None else rank.one[0]
        multiple = shown_multiple(rank.one_profile)
        if used and multiple is not None and group.batch_multiple % multiple:
            line = f"other batches than multiples of {multiple} take longer: set batch_multiple = {multiple}"
            remarks.append(Remark(name, line, line))
        remarks += _of_batches(name, rank.one_profile, batches)
        error = rank.fit.leave_one_out_error or 0.0
        if used and error > FIT_ERROR_WORTH_A_WARNING:
            line = f"the fit misses left-out points by {error:.1%} (median)"
            general = f"the fit misses left-out points by over {FIT_ERROR_WORTH_A_WARNING:.0%} (median)"
            remarks.append(Remark(name, line, general))
        if rank.bandwidth is not None and rank.link is None:
            line = f"its transfers are not counted: {rank.group.profile} has no model.parameters"
            general = "transfers are not counted: the profiles have no model.parameters"
            remarks.append(Remark(name, line, general))
        if rank.profile.device.emulated:
            factor = rank.profile.device.throttle
            slower = "" if factor == 1 else f", {factor:g} times slower"
            remarks.append(Remark(name, f"emulated{slower} by a throttle", "emulated, slower by a throttle"))
        if out := [worker.name for _, worker in members if not worker.batch]:
            label = out[0] if len(out) == 1 else f"{len(out)} of {name}"
            remarks.append(_left_out(label, problem, bounds, members[0][1].rank, may_forbid))
    return in_lines(remarks)


def cut_short(samples: int, ranks: Sequence[PlannedRank]) -> str:
    """Where the ranks take less than these samples at once: the profiles that lack larger batches for want of
    time, as an addition to a refusal; else "".
    """
    if samples <= sum(max_batch_of(rank.group, rank.profile) for rank in ranks):
        return ""
    paths = list(dict.fromkeys(rank.group.profile for rank in ranks if rank.one_profile.cut_short))
    return f"; there was no time to measure larger batches for {few_of(paths)}" if paths else ""


def largest_measured(ranks: Sequence[PlannedRank], batches: Sequence[int]) -> list[str]:
    """Name the groups that take the largest batch that there was time to measure."""
    names = dict.fromkeys(
        rank.group.name
        for rank, batch in zip(ranks, batches, strict=True)
        if rank.one_profile.cut_short and batch and batch >= max_batch_of(rank.group, rank.profile)
    )
    if not names:
        return []
    return [f"{few_of(list(names))}: no time was left to measure larger batches; pyps-profile --seconds"]


def unlike_steps(cluster: Cluster, ranks: Sequence[PlannedRank]) -> Iterator[str]:
    """Warnings of profiles that did not time the same steps. An imported one does not say how it takes them,
    and groups that share devices may be choices of that.
    """
    groups = {rank.group.name: rank for rank in ranks}.values()
    names = sorted({rank.one_profile.model.name for rank in groups})
    if len(names) > 1:
        yield f"the profiles are of different models: {few_of(names)}"
    how = ["autocast", "compiled"]
    fields = how + ["parameters", "optimizer"] * (len(names) == 1)
    fields += ["tokens_per_sample"] * (cluster.job.unit == "samples")
    choices = {shared.name for shared in cluster.shared if shared.devices is not None}
    for field in fields:
        found: dict[str, str] = {}  # a file with each value
        for rank in groups:
            if field in how and (_is_imported(rank) or choices.intersection(rank.group.shares)):
                continue
            value = getattr(rank.one_profile.model, field)
            if value is not None or field == "autocast":  # null is fp32 there; elsewhere: not known
                found.setdefault("null" if value is None else str(value).lower(), rank.group.profile)
        if len(found) > 1:
            values = few_of([f"{value} in {path}" for value, path in found.items()])
            yield f"the profiles are of unlike steps, by model.{field}: {values}"


def unlike_times(ranks: Sequence[PlannedRank]) -> Iterator[str]:
    """Warnings of imported profiles whose times are perhaps in other units."""
    groups = {rank.group.name: rank for rank in ranks}
    doubts = [(name, line) for name, rank in groups.items() if (line := long_step(rank.one_profile))]
    if doubts:
        yield from in_lines(
            [Remark(name, line, "are the long steps in milliseconds?") for name, line in doubts]
        )
        return
    fastest = [
        (min(_median(p) / p.batch for p in rank.one_profile.points), name) for name, rank in groups.items()
    ]
    (quick, fast), (longest, slow) = min(fastest), max(fastest)
    if longest > UNLIKELY_RATIO * quick and (_is_imported(groups[fast]) or _is_imported(groups[slow])):
        times = f"{longest / quick:,.0f} times as long as on {fast}"
        yield f"{slow}: a sample takes {times}, by the profiles: are both in seconds?"


def _is_imported(rank: PlannedRank) -> bool:
    """Return whether its times were not measured by pyps-profile."""
    return rank.profile.device.kind == IMPORTED


def short_step(ranks: Sequence[PlannedRank], steps: Sequence[float]) -> Iterator[str]:
    """A warning of steps so short that the processes' own work counts. steps: seconds of each rank's; 0: left
    out.
    """
    on_cores = [s for rank, s in zip(ranks, steps, strict=True) if s and rank.profile.device.kind == "cpu"]
    if len(on_cores) > 1 and max(steps) < SHORT_STEP:  # a longer one elsewhere leaves them the time
        yield (
            f"steps of {1e3 * max(on_cores):.4g} ms are short: where the processes share CPU cores, they may "
            f"take {SHORT_STEP_FACTOR:g} times as long; with a larger global batch less"
        )


def _left_out(label: str, problem: Problem, bounds: Problem, k: int, tied: bool) -> Remark:
    """Why workers like worker k are left out. bounds: the problem's, rounded."""
    general = "no batch fits between the smallest, and what max_batch, memory and the global batch allow"
    if line := barred(problem, bounds, k):
        return Remark(label, f"left out, {line}", f"left out, {general}")
    reason = "the limits or ties require it" if tied else "the others finish sooner without it"
    return Remark(label, f"left out, {reason}", f"left out, {reason.replace('without it', 'without them')}")


def barred(problem: Problem, bounds: Problem, k: int) -> str:
    """Why worker k can take no batch whatever the others do; empty if it can. bounds: problem, rounded."""
    least = f"no batch fits: its smallest is {bounds.min_batch[k]}"
    if not bounds.max_batch[k]:
        return f"{least}, max_batch and memory allow {problem.max_batch[k]}"
    above = bounds.min_batch[k] > problem.global_batch
    return f"{least}, the global batch is {problem.global_batch}" if above else ""


def doubtful_links(cluster: Cluster, ranks: Sequence[PlannedRank]) -> list[str]:
    """Warnings about stated links that count for nothing, or that are perhaps stated in other units."""
    remarks = []
    for rank in ranks:
        group, name = rank.group, rank.group.name
        if group.latency and rank.bandwidth is None and cluster.sync is None:
            general = "latency is not counted: state the bandwidths, too"
            remarks.append(Remark(name, "its latency is not counted: state its bandwidth, too", general))
        remarks += _of_units(name, "", group.bandwidth, group.latency)
        remarks += _of_units(name, "inside_", group.inside_bandwidth, group.inside_latency)
    for shared in cluster.shared:
        remarks += _of_units(f"[[shared]] {shared.name}", "", shared.bandwidth, shared.latency)
    if (sync := cluster.sync) is not None:
        remarks += _of_units("[sync]", "", sync.bandwidth, sync.latency)
    return in_lines(remarks)


def _of_units(name: str, key: str, bandwidth: float | None, latency: float | None) -> Iterator[Remark]:
    """About a link's numbers that are rather those of other units. key: what begins the names of its keys."""
    if bandwidth is not None and bandwidth < SLOW_LINK:
        unit = f"{key}bandwidth is in bytes a second (1 Gbit/s is 1.25e8)"
        line = f"{key}bandwidth {bandwidth:g}: {unit}"
        yield Remark(name, line, f"{key}bandwidth below {SLOW_LINK:g}: {unit}")
    if latency is not None and latency > LONG_LATENCY:
        line = f"{key}latency {latency:g}: {key}latency is in seconds"
        general = f"{key}latency above {LONG_LATENCY:g}: {key}latency is in seconds"
        yield Remark(name, line, general)


def _of_batches(name: str, profile: Profile, batches: Sequence[int]) -> Iterator[Remark]:
    """About a group's planned batches: those farthest outside the trusted range, and contradicted ones."""
    if (fit := profile.fit) is None:
        return
    low, high = fit.trusted_min_batch, fit.trusted_max_batch
    general = "batches are outside what was measured, where fits are trusted"
    for batch in dict.fromkeys([*batches[:1], *batches[-1:]]):
        outside = batch < low if batch == batches[0] else False
        if outside or (batch > high and batch == batches[-1]):
            yield Remark(name, _outside(fit, batch), general)
    general = f"fits are over {MISSED_WORTH_A_WARNING:.0%} off what was measured near the planned batches"
    for batch in batches:
        for line in _overruled(fit, profile.points, batch):
            yield Remark(name, line, general)


def _outside(fit: Fit, batch: int) -> str:
    """That a batch is outside the trusted range, and what its time is taken from."""
    low, high = fit.trusted_min_batch, fit.trusted_max_batch
    line = f"batch {batch} is outside {low}..{high}, where its fit is trusted"
    if batch < low and fit.kind == "table":
        return f"{line}: little gain below {low} is counted on"
    if batch > high and fit.doubling_error is not None:
        where = f"at {2 * high}{' already' if batch > 2 * high else ''}"
        return f"{line}: {where}, its time may be off by {CONFIDENCE_FACTOR * fit.doubling_error:.0%}"
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
