"""Rounds of local steps: each worker takes steps of its own optimizer between two pushes, H on average.

A round has H global batches. A worker's local step has the even share of a global batch, or what its memory
holds, and the planner gives it as many steps, H_i, as let all workers end together. So its batch, H_i b_i, is
a batch in micro-batches of b_i, which take their time one after the other, with one transfer. Steps are a
little smaller where whole ones do not come out even; a worker with a batch_multiple takes whole ones.

A smaller local step needs fewer samples to a loss, and more time for each: what a step costs whatever its
samples, like Muon's orthogonalization, is in the profile. How many samples it saves depends on the model, and
no file says so. `local_batch = "auto"` therefore takes the smallest step that is nearly as fast as any.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pyps.errors import InputError
from pyps.formats import MAX_BATCH, Cluster, PlanWorker, WorkerGroup
from pyps.formats.cluster import CLUSTER_FILE
from pyps.formats.options import AUTO
from pyps.solver.costs import Cost

MAX_PARTS = 1_000_000  # of a batch, as WorkerGroup has it
IDLE_WORTH_A_WARNING = 0.10
SLOWER = 0.05  # in samples a second, that an automatic local step may be
MOST_SIZES = 1024  # of a local step, that are compared; more are so many, evenly spaced


def round_samples(cluster: Cluster) -> int:
    """The samples of an iteration: a global batch, or a round of local steps. Raises InputError."""
    samples = cluster.job.global_batch * (cluster.run.local_steps or 1)
    if samples > MAX_BATCH:
        found = f"{cluster.run.local_steps}, of {cluster.job.global_batch} samples"
        raise InputError(CLUSTER_FILE, "run.local_steps", found, f"at most {MAX_BATCH} in a round")
    return samples


def local_groups(
    cluster: Cluster, at_once: Sequence[int], costs: Sequence[Cost], least: Sequence[int]
) -> list[WorkerGroup]:
    """The cluster's groups, where they take local steps: bounds for batches of whole local steps.

    at_once, least: the most and the fewest samples of each group at once. costs: of a step of one rank of
    each. Without local steps the groups are unchanged. Raises InputError for a local batch that is less than
    a group's batch_multiple, or than its model trains on.
    """
    groups = cluster.worker
    if cluster.run.local_steps is None:
        return groups
    samples, workers = round_samples(cluster), sum(group.count for group in groups)
    even = max(1, cluster.job.global_batch // workers)
    wanted = cluster.run.local_batch or even
    if wanted == AUTO:
        wanted = _smallest_fast(groups, at_once, costs, least, even)
    elif cluster.run.local_batch is not None:
        most = max(groups, key=lambda group: group.batch_multiple)
        if wanted < most.batch_multiple:
            expected = f"at least {most.batch_multiple}, the batch_multiple of {most.name}"
            raise InputError(CLUSTER_FILE, "run.local_batch", str(wanted), expected)
        if wanted < max(least):
            expected = f"at least {max(least)}: {groups[least.index(max(least))].name} trains on no fewer"
            raise InputError(CLUSTER_FILE, "run.local_batch", str(wanted), expected)
    each = zip(groups, at_once, least, strict=True)
    sizes = [_local_batch(group, min(wanted, most), few) for group, most, few in each]
    whole = len(set(sizes)) == 1 and samples % sizes[0] == 0
    return [
        msgspec.structs.replace(
            group,
            max_batch=min(size, most),
            max_accumulation=min(MAX_PARTS, -(-samples // max(1, min(size, most)))),
            # Steps all have `size` samples where smaller ones may have fewer than the least.
            batch_multiple=size
            if whole and (group.batch_multiple > 1 or size < 2 * few - 1)
            else group.batch_multiple,
        )
        for group, size, most, few in zip(groups, sizes, at_once, least, strict=True)
    ]


def idle_warning(cluster: Cluster, workers: Sequence[PlanWorker], iteration_seconds: float) -> list[str]:
    """A warning about the worker that waits longest for the others of a round, if that is long."""
    count = cluster.run.local_steps
    worker = min((w for w in workers if w.batch), key=lambda w: w.predicted_seconds)
    idle = 1.0 - worker.predicted_seconds / iteration_seconds
    if count is None or idle < IDLE_WORTH_A_WARNING:
        return []
    if cluster.run.local_batch is not None:
        steps_each = [w.accumulation for w in workers if w.batch]
        count = max(1, round(sum(steps_each) / len(steps_each)))
    steps = f"{count} local step{'s' * (count > 1)} of {worker.micro_batch} samples on average"
    remedy = "more of them, or a smaller global_batch, would fit better"
    return [f"{worker.name}: idle for {idle:.1%} of a round, which has {steps}: {remedy}"]


def _smallest_fast(
    groups: Sequence[WorkerGroup],
    at_once: Sequence[int],
    costs: Sequence[Cost],
    least: Sequence[int],
    even: int,
) -> int:
    """The least samples of a local step, up to the even share, with which all workers together compute nearly
    as many samples a second as with any.
    """

    def rate(size: int) -> float:
        found = 0.0
        for group, most, cost, few in zip(groups, at_once, costs, least, strict=True):
            own = _local_batch(group, min(size, most), few)
            found += group.count * group.ranks_each * own / cost.seconds(own)
        return found

    count = min(even, MOST_SIZES)
    rates = {size: rate(size) for size in (1 + k * (even - 1) // max(1, count - 1) for k in range(count))}
    return min(size for size, found in rates.items() if found >= (1.0 - SLOWER) * max(rates.values()))


def _local_batch(group: WorkerGroup, most: int, least: int) -> int:
    """At most `most` samples, in whole multiples; at least `least`, and one multiple: these may not fit."""
    multiple = group.batch_multiple
    return max(-(-least // multiple) * multiple, most // multiple * multiple)
