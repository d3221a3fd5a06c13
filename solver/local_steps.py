"""Rounds of local steps: each worker takes steps of its own optimizer between two pushes, H on average.

A round has H global batches. A worker's local step has the even share of a global batch, or what its memory
holds, and the planner gives it as many steps, H_i, as let all workers end together. So its batch, H_i b_i, is
a batch in micro-batches of b_i, which take their time one after the other, with one transfer. Steps are a
little smaller where whole ones do not come out even; a worker with a batch_multiple takes whole ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pyps.errors import InputError
from pyps.formats import MAX_BATCH, Cluster, PlanWorker, WorkerGroup
from pyps.formats.cluster import CLUSTER_FILE

MAX_PARTS = 1_000_000  # of a batch, as WorkerGroup has it
IDLE_WORTH_A_WARNING = 0.10


def round_samples(cluster: Cluster) -> int:
    """The samples of an iteration: a global batch, or a round of local steps. Raises InputError."""
    samples = cluster.job.global_batch * (cluster.run.local_steps or 1)
    if samples > MAX_BATCH:
        found = f"{cluster.run.local_steps}, of {cluster.job.global_batch} samples"
        raise InputError(CLUSTER_FILE, "run.local_steps", found, f"at most {MAX_BATCH} in a round")
    return samples


def local_groups(cluster: Cluster, at_once: Sequence[int]) -> list[WorkerGroup]:
    """The cluster's groups, where they take local steps: bounds for batches of whole local steps.

    at_once: the most samples of each group at once. Without local steps the groups are unchanged.
    """
    groups = cluster.worker
    if cluster.run.local_steps is None:
        return groups
    samples, workers = round_samples(cluster), sum(group.count for group in groups)
    even = max(1, cluster.job.global_batch // workers)
    sizes = [_local_batch(group, min(even, most)) for group, most in zip(groups, at_once, strict=True)]
    whole = len(set(sizes)) == 1 and samples % sizes[0] == 0
    return [
        msgspec.structs.replace(
            group,
            max_batch=size,
            max_accumulation=min(MAX_PARTS, -(-samples // size)),
            batch_multiple=size if whole and group.batch_multiple > 1 else group.batch_multiple,
        )
        for group, size in zip(groups, sizes, strict=True)
    ]


def idle_warning(cluster: Cluster, workers: Sequence[PlanWorker], iteration_seconds: float) -> list[str]:
    """A warning about the worker that waits longest for the others of a round, if that is long."""
    count = cluster.run.local_steps
    worker = min((w for w in workers if w.batch), key=lambda w: w.predicted_seconds)
    idle = 1.0 - worker.predicted_seconds / iteration_seconds
    if count is None or idle < IDLE_WORTH_A_WARNING:
        return []
    steps = f"{count} local step{'s' * (count > 1)} of {worker.micro_batch} samples on average"
    remedy = "more of them, or a smaller global_batch, would fit better"
    return [f"{worker.name}: idle for {idle:.1%} of a round, which has {steps}: {remedy}"]


def _local_batch(group: WorkerGroup, most: int) -> int:
    """At most `most` samples, in whole multiples; at least one multiple, which then may not fit."""
    multiple = group.batch_multiple
    return max(multiple, most // multiple * multiple)
