"""In what a plan is not the plan of a cluster file, field by field."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pyps.formats import Cluster, Plan, PlannedRun, Profile
from pyps.profiler.multiples import fit_at
from pyps.solver.costs import cost_of
from pyps.solver.mode import stated_policy
from pyps.solver.ranks import max_batch_of

SAME_COST = 0.02  # relative: of a step's seconds that are called the same
OTHERWISE = {"policy", "local_batch"}  # a plan says its own: with parameters, and in samples


def differences(plan: Plan, cluster: Cluster, profiles: Sequence[Profile]) -> list[str]:
    """A line for each field in which the plan differs, the first of like workers alone; none: it fits.

    profiles: one with a fit for each group of the cluster. Links and prices are not compared: a plan does not
    say them.
    """
    return [*_of_job(plan, cluster), *_of_workers(plan, cluster, profiles)]


def _of_job(plan: Plan, cluster: Cluster) -> Iterator[str]:
    """Compare what both state, also of [run]: a mode may come from options of pyps-plan."""
    run = cluster.run
    if plan.global_batch != cluster.job.global_batch and cluster.run.local_steps is None:
        yield _line("job.global_batch", cluster.job.global_batch, plan.global_batch)
    if plan.unit != cluster.job.unit:
        yield _line("job.unit", cluster.job.unit, plan.unit)
    if plan.run is None or not run.is_stated:
        return
    if run.policy is not None and not plan.run.policy.startswith(stated_policy(run).partition(":")[0]):
        yield _line("run.policy", run.policy, plan.run.policy)
    for key in PlannedRun.__struct_fields__:
        stated, planned = getattr(run, key), getattr(plan.run, key)
        if key not in OTHERWISE and stated is not None and stated != planned:
            yield _line(f"run.{key}", stated, planned)


def _of_workers(plan: Plan, cluster: Cluster, profiles: Sequence[Profile]) -> Iterator[str]:
    names = [name for group in cluster.worker for name in group.worker_names()]
    planned = {worker.name: worker for worker in plan.workers}
    if set(names) != set(planned):
        yield _line("worker", ", ".join(names), ", ".join(planned))
    if cluster.job.unit != "samples" or plan.unit != "samples":
        return
    for k, (group, profile) in enumerate(zip(cluster.worker, profiles, strict=True)):
        worker = next((planned[name] for name in group.worker_names() if name in planned), None)
        if worker is None or profile.fit is None:
            continue
        batch = max(1, worker.batch)
        if worker.fit is not None and plan.noise is None:
            fits = fit_at(profile, group.batch_multiple), worker.fit
            now, then = (cost_of(fit).seconds(batch) for fit in fits)
            if not math.isclose(now, then, rel_tol=SAME_COST):
                found = f"{1e3 * now:.4g} ms for {batch} samples"
                yield _line(f"worker[{k}].profile", found, f"{1e3 * then:.4g} ms")
        whole = cluster.sharding is None and cluster.run.local_steps is None
        most = max_batch_of(group, profile) if whole else None
        if most is not None and worker.max_batch is not None and most != worker.max_batch:
            yield _line(f"worker[{k}].max_batch", most, worker.max_batch)
        for key, stated in (
            ("batch_multiple", group.batch_multiple),
            ("required", group.required or cluster.sharding is not None),
        ):
            if stated != getattr(worker, key):
                yield _line(f"worker[{k}].{key}", stated, getattr(worker, key))


def _line(field: str, stated: object, planned: object) -> str:
    return f"{field}: {stated} in the cluster file, {planned} in the plan"
