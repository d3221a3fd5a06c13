"""What a reader should know before trusting a plan, one line a group."""

from __future__ import annotations

from collections.abc import Sequence

from pyps.formats import PlanWorker, R2spSchedule
from pyps.solver.links import Link
from pyps.solver.ranks import Member

FIT_ERROR_WORTH_A_WARNING = 0.05


def warnings_of(members: Sequence[Member], workers: Sequence[PlanWorker], loose: bool) -> list[str]:
    """Of fits and of who is left out; loose: no limit or tie had a say in that."""
    lines: list[str] = []
    for member, worker in zip(members, workers, strict=True):
        fit, name, batch = member.fit, member.group.name, worker.batch
        at_once = worker.micro_batch
        low, high = fit.trusted_min_batch, fit.trusted_max_batch
        if batch and not low <= at_once <= high:
            lines.append(f"{name}: batch {at_once} is outside {low}..{high}, where its fit is trusted")
        if batch and (fit.leave_one_out_error or 0.0) > FIT_ERROR_WORTH_A_WARNING:
            lines.append(f"{name}: the fit misses left-out points by {fit.leave_one_out_error:.1%} (median)")
        if member.bandwidth is not None and member.link is None:
            lines.append(
                f"{name}: its link is left out, as {member.group.profile} does not say model.parameters"
            )
        if member.profile.device.emulated:
            lines.append(f"{name}: emulated, {member.profile.device.throttle:g} times slower by a throttle")
        if not batch:
            why = "the others finish sooner without it" if loose else "as the limits or the time ask"
            lines.append(f"{worker.name}: left out, {why}")
    models = {member.profile.model.name for member in members}
    if len(models) > 1:
        lines.append(f"the profiles are of different models: {', '.join(sorted(models))}")
    return list(dict.fromkeys(lines))


def link_warnings(
    r2sp: R2spSchedule, compute_seconds: Sequence[float], links: Sequence[Link | None]
) -> list[str]:
    """Of turns that do not fit into a period, with what would make them fit."""
    if r2sp.feasible is not False:
        return []
    turns = [link.seconds() if link else 0.0 for link in links]
    alone = max(t + x for t, x in zip(compute_seconds, turns, strict=True))
    ways = []
    if r2sp.remedies:
        found = r2sp.remedies
        ways += [f"global_batch {found.global_batch}"] * (found.global_batch is not None)
        ways += [f"{found.bits} bits a number"] * (found.bits is not None)
        ways += [f"{found.links} such links"] * (found.links is not None)
    help_ = f"; it would fit with {' or '.join(ways)}" if ways else ""
    return [
        f"r2sp: transfers take {sum(turns):.4g} s of a {alone:.4g} s iteration: the link binds, "
        f"not the workers{help_}"
    ]
