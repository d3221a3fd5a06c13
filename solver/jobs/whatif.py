"""Compares the plans before and after a change of the workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import msgspec

from pyps.errors import InputError
from pyps.formats import Cluster, Plan, Unit, WorkerGroup, check_cluster
from pyps.formats.files import typed
from pyps.solver.report.warnings import few_of


@dataclass(frozen=True)
class PlanSummary:
    """The main figures of a plan. utilisation: the share of the iteration in which the workers compute.

    Prices are None if a worker in use states none. unit: what all that are called samples here count. hours,
    price: of the job's target; None: it has none.
    """

    iteration_seconds: float
    samples_per_second: float
    utilisation: float
    price_per_hour: float | None
    price_per_million_samples: float | None
    unit: Unit = "samples"
    hours: float | None = None
    price: float | None = None


def summary_of(plan: Plan, waits: bool = True) -> PlanSummary:
    """The main figures of a plan. waits: workers wait for the slowest; else those in use always compute."""
    longest = plan.iteration_seconds
    busy = sum(min(w.predicted_seconds, longest) if waits else longest for w in plan.workers if w.batch)
    return PlanSummary(
        iteration_seconds=plan.iteration_seconds,
        samples_per_second=plan.global_batch / plan.iteration_seconds,
        utilisation=busy / (len(plan.workers) * plan.iteration_seconds),
        price_per_hour=plan.cost.price_per_hour if plan.cost else None,
        price_per_million_samples=plan.cost.price_per_million_samples if plan.cost else None,
        unit=plan.unit,
        hours=plan.target.seconds / 3600 if plan.target else None,
        price=plan.target.price if plan.target else None,
    )


def changed(
    cluster: Cluster, add: Mapping[str, int], drop: Mapping[str, int | None], new: Sequence[WorkerGroup] = ()
) -> Cluster:
    """The cluster after adding and removing workers.

    add: workers to add, by group name. drop: workers to remove, by group name; None removes the whole group.
    new: groups to append. Raises InputError for an unknown group, for more workers dropped than there are, or
    if no worker is left.
    """
    names = [group.name for group in cluster.worker]
    for option, name in [*(("--add", name) for name in add), *(("--drop", name) for name in drop)]:
        if name not in names:
            near = sorted(names, key=lambda known: -SequenceMatcher(None, name, known).ratio())
            raise InputError(option, "", repr(name), f"a group of the cluster file: {few_of(near)}")
    groups = []
    for group in cluster.worker:
        fewer = drop.get(group.name, 0)
        count = 0 if fewer is None else group.count + add.get(group.name, 0) - fewer
        if count < 0:
            raise InputError("--drop", "", f"{fewer} of {group.name!r}", f"at most {group.count}")
        if count:
            groups.append(msgspec.structs.replace(group, count=count))
    if not (groups or new):
        raise InputError("--drop", "", "every worker", "at least one worker left")
    whole = msgspec.structs.replace(cluster, worker=[*groups, *new])
    check_cluster("the changed cluster", whole)
    return whole


def with_values(cluster: Cluster, values: Mapping[str, str]) -> Cluster:
    """The cluster with other values of its keys.

    values: by `GROUP.key` for a key of `[[worker]]`, or `table.key`, as job.global_batch; each as it stands
    in a cluster file, a name without quotes. Raises InputError.
    """
    plain: dict[str, Any] = msgspec.to_builtins(cluster)
    groups = {group["name"]: group for group in plain["worker"]}
    tables = [name for name in cluster.__struct_fields__ if name not in ("worker", "shared")]
    shared = {one["name"]: one for one in plain["shared"]}
    for key, text in values.items():
        table, _, field = key.rpartition(".")
        where = groups.get(table) or shared.get(table)
        if where is None and table in tables:
            where = plain[table] = plain[table] or {}
        if where is None:
            near = ", ".join([*groups, *shared, *tables])
            raise InputError("--set", key, repr(table), f"a group or a table of the cluster file: {near}")
        try:
            where[field] = msgspec.json.decode(text)
        except msgspec.DecodeError:
            where[field] = text
        try:
            typed("--set", plain, Cluster, lambda *_: None)
        except InputError as error:
            raise InputError("--set", key, error.found, error.expected) from None
    whole = msgspec.convert(plain, Cluster)
    check_cluster("the changed cluster", whole)
    return whole


def verdict(before: PlanSummary, after: PlanSummary) -> str:
    """The gain or loss in time, price and utilisation, in one sentence."""
    time = after.iteration_seconds / before.iteration_seconds - 1
    parts = [f"an iteration takes {abs(time):.1%} {'less' if time < 0 else 'more'} time"]
    if time == 0:
        parts = ["an iteration takes as long"]
    old, new = before.price_per_million_samples, after.price_per_million_samples
    if old and new is not None:
        parts.append(f"a million {after.unit} cost {new:.4g} instead of {old:.4g}")
    if before.hours and after.hours:
        parts.append(f"the target takes {after.hours:.4g} hours instead of {before.hours:.4g}")
    busy = [f"{x.utilisation:.1%}" for x in (after, before)]
    if busy[0] != busy[1]:
        parts.append(f"workers compute {busy[0]} of the time instead of {busy[1]}")
    return f"With the change {', '.join(parts)}."
