"""The file formats that connect the parts: profile, cluster and plan, typed, versioned and checked.

profile.json  (pyps.profile/1)  one device: its measurements, and the cost model fitted to them
cluster.toml                    the devices, what they share, and the global batch
plan.json     (pyps.plan/1)     each worker's batch, and what follows from it
noise.json    (pyps.noise/1)    the gradient noise scale of a run
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from pyps.errors import InputError
from pyps.formats.checkpoint import Checkpoint
from pyps.formats.cluster import (
    Churn,
    Cluster,
    FaultSpec,
    GoodputInfo,
    Host,
    Jitter,
    Job,
    LengthMoments,
    Limits,
    Quantization,
    Sharding,
    Shared,
    Simulation,
    SyncCost,
    WorkerGroup,
    check_cluster,
)
from pyps.formats.files import MAX_FILE_BYTES, encode, read_json, read_toml, typed, write_json
from pyps.formats.kinds import MAX_BATCH, Bits, Unit
from pyps.formats.mode import Mode, Pace, PlannedRun, RunTable
from pyps.formats.plan import (
    PLAN_SCHEMA,
    CostEstimate,
    EvenSplit,
    Forecast,
    GoodputEstimate,
    HeldBytes,
    HpsEstimate,
    NoiseForecast,
    Plan,
    PlanWorker,
    R2spRemedies,
    R2spSchedule,
    SyncEstimate,
    TargetEstimate,
    check_plan,
)
from pyps.formats.profile import (
    NOISE_SCHEMA,
    PROFILE_SCHEMA,
    Device,
    Fit,
    GradientNoiseRecord,
    LengthCost,
    Lengths,
    Link,
    Memory,
    ModelInfo,
    Parts,
    Point,
    Profile,
    check_profile,
)

__all__ = [
    "FORMATS",
    "MAX_BATCH",
    "MAX_FILE_BYTES",
    "PLAN_SCHEMA",
    "PROFILE_SCHEMA",
    "Bits",
    "Checkpoint",
    "Churn",
    "Cluster",
    "CostEstimate",
    "Device",
    "EvenSplit",
    "FaultSpec",
    "Fit",
    "Forecast",
    "GoodputEstimate",
    "GoodputInfo",
    "GradientNoiseRecord",
    "HeldBytes",
    "Host",
    "HpsEstimate",
    "Jitter",
    "Job",
    "LengthCost",
    "LengthMoments",
    "Lengths",
    "Limits",
    "Link",
    "Memory",
    "Mode",
    "ModelInfo",
    "NoiseForecast",
    "Pace",
    "Parts",
    "Plan",
    "PlanWorker",
    "PlannedRun",
    "Point",
    "Profile",
    "Quantization",
    "R2spRemedies",
    "R2spSchedule",
    "RunTable",
    "Sharding",
    "Shared",
    "Simulation",
    "SyncCost",
    "SyncEstimate",
    "TargetEstimate",
    "Unit",
    "WorkerGroup",
    "check_cluster",
    "encode",
    "read_cluster",
    "read_noise",
    "read_plan",
    "read_profile",
    "schema",
    "write_json",
]

FORMATS: dict[str, type[Struct]] = {
    "profile": Profile,
    "cluster": Cluster,
    "plan": Plan,
    "checkpoint": Checkpoint,
    "noise": GradientNoiseRecord,
}


def read_profile(path: str | os.PathLike[str]) -> Profile:
    """Reads and checks a pyps.profile/1 file. Raises InputError."""
    raw = read_json(path, PROFILE_SCHEMA)
    return typed(str(path), raw, Profile, check_profile)


def read_plan(path: str | os.PathLike[str], unit: Unit | None = "samples") -> Plan:
    """Reads and checks a pyps.plan/1 file. unit: that batches count; None: any. Raises InputError."""
    raw = read_json(path, PLAN_SCHEMA)
    plan = typed(str(path), raw, Plan, check_plan)
    if unit is not None and plan.unit != unit:
        raise InputError(str(path), "unit", repr(plan.unit), f"a plan in {unit}")
    return plan


def read_noise(path: str | os.PathLike[str]) -> GradientNoiseRecord:
    """Reads a pyps.noise/1 file. Raises InputError."""
    raw = read_json(path, NOISE_SCHEMA)
    return typed(str(path), raw, GradientNoiseRecord, lambda _, __: None)


def read_cluster(path: str | os.PathLike[str]) -> Cluster:
    """Reads and checks a cluster file (TOML), and resolves the paths of its profiles, which must be some.

    Of a goodput table that names a run's noise, the numbers are that run's, unless the table has its own.
    Raises InputError.
    """
    where = str(path)
    raw = read_toml(path, "a cluster file")
    cluster = typed(where, raw, Cluster, check_cluster)
    groups: list[WorkerGroup] = []
    for k, group in enumerate(cluster.worker):
        profile = Path(path).parent / group.profile
        if not profile.is_file():
            raise InputError(where, f"worker[{k}].profile", f"no file at {profile}", "the path of a profile")
        if all(group.profile != str(profile) for group in groups):
            _check_schema(profile, where, f"worker[{k}].profile")
        trace = None if group.trace is None else Path(path).parent / group.trace
        if trace is not None and not trace.is_file():
            raise InputError(where, f"worker[{k}].trace", f"no file at {trace}", "the path of a trace")
        trace_path = None if trace is None else str(trace)
        groups.append(msgspec.structs.replace(group, profile=str(profile), trace=trace_path))
    return msgspec.structs.replace(cluster, worker=groups, goodput=_with_noise(path, cluster.goodput))


def _check_schema(profile: Path, where: str, field: str) -> None:
    """Raises InputError, naming the cluster file and its field too, if a file is no profile."""
    try:
        read_json(profile, PROFILE_SCHEMA)
    except InputError as error:
        found = ": ".join(filter(None, (error.where, error.field, error.found)))
        raise InputError(where, field, found, error.expected) from None


def _with_noise(path: str | os.PathLike[str], goodput: GoodputInfo | None) -> GoodputInfo | None:
    """The goodput table of a cluster file, with what the file of its `noise` says."""
    if goodput is None or goodput.noise is None:
        return goodput
    file = Path(path).parent / goodput.noise
    if not file.is_file():
        expected = "what GradientNoise writes: pyps.torch.save(..., noise=noise), or noise.save(file)"
        raise InputError(str(path), "goodput.noise", f"no file at {file}", expected)
    found = read_noise(file)
    return msgspec.structs.replace(
        goodput,
        noise=str(file),
        noise_scale=goodput.noise_scale or found.noise_scale,
        base_batch=goodput.base_batch or found.base_batch,
    )


def schema(name: str) -> dict[str, Any]:
    """The JSON schema of "profile", "cluster", "plan", "checkpoint" or "noise"."""
    if name not in FORMATS:
        raise InputError("schema", "name", repr(name), f"one of {', '.join(FORMATS)}")
    return msgspec.json.schema(FORMATS[name])
