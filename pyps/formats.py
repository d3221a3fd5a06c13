"""The files that pass between the parts: profile, cluster and plan, typed, versioned and checked.

    profile.json  (pyps.profile/1)  one device: what was measured, and the cost model fitted to it
    cluster.toml                    which devices there are, and the global batch
    plan.json     (pyps.plan/1)     who computes how much

Reading trusts nothing: a file that is missing, damaged, of another version, misspelt or out of range is an
InputError that names the file, the field, what was found and what would be right. Writing is atomic.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from pyps.errors import InputError

PROFILE_SCHEMA = "pyps.profile/1"
PLAN_SCHEMA = "pyps.plan/1"
MAX_BATCH = 2**31 - 1  # keeps every product of two batches inside 64 bits
MAX_FILE_BYTES = 1 << 28

Batch = Annotated[int, Meta(ge=1, le=MAX_BATCH)]
Share = Annotated[int, Meta(ge=0, le=MAX_BATCH)]
Seconds = Annotated[float, Meta(gt=0)]
Elapsed = Annotated[float, Meta(ge=0)]
Bytes = Annotated[int, Meta(ge=0)]
Name = Annotated[str, Meta(min_length=1, max_length=200)]
Factor = Annotated[float, Meta(ge=1)]


class Device(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was timed; `emulated`: a throttle (that many times slower) stands for the hardware."""

    name: Name
    kind: str = "cpu"
    throttle: Factor = 1.0
    emulated: bool = False


class ModelInfo(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The network that was trained while timing."""

    name: Name
    parameters: Annotated[int, Meta(ge=1)] | None = None


class Point(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One batch size: the seconds of one training step, or of several, and the peak memory in bytes."""

    batch: Batch
    seconds: Seconds | Annotated[list[Seconds], Meta(min_length=1)]
    peak_bytes: Bytes | None = None


class Memory(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Memory model: a batch b needs fixed_bytes + bytes_per_sample * b, within budget_bytes."""

    fixed_bytes: Bytes
    bytes_per_sample: Annotated[float, Meta(gt=0)]
    budget_bytes: Bytes


class Fit(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cost model T(b) = max(t0, c + a*b), or a monotone table of (batch, seconds).

    leave_one_out_error is the median relative error of predicting each point from the others.
    """

    kind: Literal["affine", "knee", "table"]
    fixed_seconds: float = 0.0
    per_sample_seconds: Elapsed = 0.0
    floor_seconds: Elapsed = 0.0
    r2: float | None = None
    leave_one_out_error: Elapsed | None = None
    trusted_min_batch: Batch
    trusted_max_batch: Batch
    table: Annotated[list[tuple[Batch, Seconds]], Meta(min_length=1)] | None = None


class Profile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measurements of one device with one model; `fit` is optional: whoever plans fits when it is absent."""

    schema: Literal["pyps.profile/1"] = "pyps.profile/1"
    device: Device
    model: ModelInfo
    points: Annotated[list[Point], Meta(min_length=1)]
    max_batch: Batch | None = None
    memory: Memory | None = None
    fit: Fit | None = None


class Job(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What has to be computed in one iteration."""

    global_batch: Batch


class WorkerGroup(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`count` like workers; bandwidth in bytes per second, latency in seconds, price in any one currency.

    min_batch binds only if the worker is used; `required` workers may not be left out.
    """

    name: Name
    profile: Name
    count: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    max_batch: Batch | None = None
    min_batch: Batch | None = None
    quantum: Batch = 1
    price_per_hour: Elapsed | None = None
    bandwidth: Annotated[float, Meta(gt=0)] | None = None
    latency: Elapsed | None = None
    required: bool = False

    def worker_names(self) -> list[str]:
        """The names of its ranks: v100-0 .. v100-3, or the plain name of a group of one."""
        return [self.name] if self.count == 1 else [f"{self.name}-{k}" for k in range(self.count)]


class Cluster(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The devices at hand, in rank order; `profile` paths are resolved against the cluster file's folder."""

    job: Job
    worker: Annotated[list[WorkerGroup], Meta(min_length=1)]


class EvenSplit(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The same batch for everyone, for comparison; `seconds` is absent where it breaks a bound."""

    feasible: bool
    seconds: Seconds | None = None


class PlanWorker(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank's share: batch 0 means left out; weight = batch / global batch.

    throttle repeats the profile's, so that a run can emulate the devices that the plan was made for.
    """

    rank: Share
    name: Name
    batch: Share
    micro_batch: Share
    accumulation: Share
    weight: Annotated[float, Meta(ge=0, le=1)]
    predicted_seconds: Elapsed
    fit_error: Elapsed | None = None
    throttle: Factor = 1.0


class R2spSchedule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Evenly gapped turns in the ring `order` (ranks); feasible is null where no bandwidth is known."""

    feasible: bool | None
    period_seconds: Seconds
    gap_seconds: Seconds
    order: list[Share]
    offsets_seconds: list[Elapsed]


class HpsEstimate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Period with and without overlapping transfer and compute; empty where no bandwidth is known."""

    compute_seconds: Seconds | None = None
    transfer_seconds: Elapsed | None = None
    serial_seconds: Seconds | None = None
    pipelined_seconds: Seconds | None = None


class Plan(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The answer of the planner; `lower_bound_seconds` is the optimum with fractional batches."""

    schema: Literal["pyps.plan/1"] = "pyps.plan/1"
    global_batch: Batch
    iteration_seconds: Seconds
    lower_bound_seconds: Elapsed
    even_split: EvenSplit
    speedup_over_even: Seconds | None
    workers: Annotated[list[PlanWorker], Meta(min_length=1)]
    r2sp: R2spSchedule
    hps: HpsEstimate
    warnings: list[str]


FORMATS: dict[str, type[Struct]] = {"profile": Profile, "cluster": Cluster, "plan": Plan}
T = TypeVar("T", bound=Struct)


def read_profile(path: str | os.PathLike[str]) -> Profile:
    """Read and check a pyps.profile/1 file. Raises InputError."""
    raw = _read_json(path, PROFILE_SCHEMA)
    return _typed(str(path), raw, Profile, _check_profile)


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Read and check a pyps.plan/1 file. Raises InputError."""
    raw = _read_json(path, PLAN_SCHEMA)
    return _typed(str(path), raw, Plan, _check_plan)


def read_cluster(path: str | os.PathLike[str]) -> Cluster:
    """Read and check a cluster file (TOML); its profiles must exist and come back as resolved paths.

    Raises InputError.
    """
    where = str(path)
    try:
        raw = tomllib.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise InputError(where, "", f"text that is not TOML ({error})", "a cluster file in TOML") from None
    cluster = _typed(where, raw, Cluster, _check_cluster)
    groups = []
    for k, group in enumerate(cluster.worker):
        profile = Path(path).parent / group.profile
        if not profile.is_file():
            raise InputError(where, f"worker[{k}].profile", f"no file at {profile}", "the path of a profile")
        groups.append(msgspec.structs.replace(group, profile=str(profile)))
    return msgspec.structs.replace(cluster, worker=groups)


def encode(value: Any) -> bytes:
    """Indented JSON of a format's value or of plain data. Raises InputError on NaN and infinity."""
    _refuse_non_finite("", msgspec.to_builtins(value))
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write `value` as JSON, entirely or not at all: a temporary file beside it, fsync, rename.

    Raises InputError where the place cannot be written or is not a plain file.
    """
    target, data = Path(path), encode(value)
    if target.exists() and not target.is_file():
        raise InputError(str(path), "", "something that is not a plain file", "a file name to write to")
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise InputError(str(path), "", error.strerror or str(error), "a place to write to") from None


def schema(name: str) -> dict[str, Any]:
    """The JSON schema of "profile", "cluster" or "plan"."""
    if name not in FORMATS:
        raise InputError("schema", "name", repr(name), f"one of {', '.join(FORMATS)}")
    return msgspec.json.schema(FORMATS[name])


def _read_text(path: str | os.PathLike[str]) -> str:
    where = str(path)
    try:
        with open(path, "rb") as file:
            if stat.S_ISDIR(os.fstat(file.fileno()).st_mode):
                raise IsADirectoryError(0, "a directory")
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        found = getattr(error, "strerror", None) or str(error)
        raise InputError(where, "", found.lower(), "a readable file") from None
    if len(data) > MAX_FILE_BYTES:
        raise InputError(where, "", f"more than {MAX_FILE_BYTES} bytes", "a smaller file")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        found = f"byte 0x{data[error.start]:02x} at offset {error.start}"
        raise InputError(where, "", found, "UTF-8 text") from None


def _read_json(path: str | os.PathLike[str], expected: str) -> dict[str, Any]:
    where = str(path)
    try:
        raw = msgspec.json.decode(_read_text(path).encode())
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InputError(where, "", f"damaged JSON ({error})", f"a {expected} file") from None
    if not isinstance(raw, dict):
        raise InputError(where, "", _shown(raw), f"a JSON object with schema {expected!r}")
    found = raw.get("schema")
    if found != expected:
        raise InputError(where, "schema", "nothing" if found is None else _shown(found), repr(expected))
    return raw


def _typed(where: str, raw: dict[str, Any], kind: type[T], check: Callable[[str, T], None]) -> T:
    _refuse_non_finite(where, raw)
    try:
        value = msgspec.convert(raw, kind)
    except (msgspec.ValidationError, OverflowError) as error:
        raise _explain(where, raw, kind, str(error)) from None
    check(where, value)
    return value


def _refuse_non_finite(where: str, raw: Any) -> None:
    for place, value in _leaves(raw, ""):
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(where, place, str(value), "a finite number")


def _leaves(raw: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(raw, dict):
        for key, value in raw.items():
            yield from _leaves(value, f"{place}.{key}" if place else str(key))
    elif isinstance(raw, list | tuple):
        for k, value in enumerate(raw):
            yield from _leaves(value, f"{place}[{k}]")
    else:
        yield place, raw


def _explain(where: str, raw: Any, kind: type[Struct], message: str) -> InputError:
    """Turn "Expected `int` >= 1 - at `$.points[3].batch`" (msgspec) into field, found and expected."""
    problem, _, place = message.partition(" - at ")
    place = place.strip("`").removeprefix("$").removeprefix(".")
    if unknown := re.match(r"Object contains unknown field `(.*)`", problem):
        return _unknown_key(where, place, unknown[1], kind)
    if missing := re.match(r"Object missing required field `(.*)`", problem):
        field = f"{place}.{missing[1]}" if place else missing[1]
        return InputError(where, field, "nothing", "a value: this field is required")
    expected = problem.partition(", got ")[0].replace("`", "").removeprefix("Expected ")
    if problem.startswith("Invalid enum value"):
        expected = "a value that the format knows"
    return InputError(where, place, _shown(_at(raw, place)), expected)


def _unknown_key(where: str, place: str, key: str, kind: type[Struct]) -> InputError:
    fields = _fields_at(kind, place)
    near = difflib.get_close_matches(key, fields, n=1)
    expected = f"{near[0]!r}" if near else f"one of {', '.join(fields)}"
    return InputError(where, f"{place}.{key}" if place else key, "an unknown key", expected)


def _fields_at(kind: type[Struct], place: str) -> list[str]:
    """The field names of the struct that lies at a place such as `worker[2]` of a format."""
    node: Any = msgspec.inspect.type_info(kind)
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+|\.\.\.)\]", place):
        node = node.item_type if index else next(field.type for field in node.fields if field.name == name)
        if isinstance(node, msgspec.inspect.UnionType):
            node = next(t for t in node.types if not isinstance(t, msgspec.inspect.NoneType))
    return [field.name for field in node.fields]


def _at(raw: Any, place: str) -> Any:
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", place):
        raw = raw[int(index)] if index else raw[name]
    return raw


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return f"an object with {', '.join(map(str, value)) or 'no fields'}"[:80]
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _check_profile(where: str, profile: Profile) -> None:
    fit = profile.fit
    if fit is None:
        return
    if fit.trusted_max_batch < fit.trusted_min_batch:
        raise InputError(
            where, "fit.trusted_max_batch", str(fit.trusted_max_batch), f"at least {fit.trusted_min_batch}"
        )
    if fit.kind == "table":
        if fit.table is None:
            raise InputError(where, "fit.table", "nothing", 'a list of [batch, seconds], as kind is "table"')
        for k in range(1, len(fit.table)):
            (batch, seconds), (next_batch, next_seconds) = fit.table[k - 1], fit.table[k]
            if next_batch <= batch:
                raise InputError(where, f"fit.table[{k}][0]", str(next_batch), f"a batch above {batch}")
            if next_seconds < seconds:
                raise InputError(where, f"fit.table[{k}][1]", str(next_seconds), f"at least {seconds}")
    elif max(fit.floor_seconds, fit.fixed_seconds + fit.per_sample_seconds) <= 0:
        raise InputError(where, "fit.fixed_seconds", str(fit.fixed_seconds), "a positive time for one sample")


def _check_cluster(where: str, cluster: Cluster) -> None:
    names: set[str] = set()
    for k, group in enumerate(cluster.worker):
        for name in group.worker_names():
            if name in names:
                raise InputError(where, f"worker[{k}].name", f"{name!r} a second time", "a name of its own")
            names.add(name)
        if group.min_batch and group.max_batch and group.min_batch > group.max_batch:
            raise InputError(
                where,
                f"worker[{k}].min_batch",
                str(group.min_batch),
                f"at most max_batch = {group.max_batch}",
            )


def _check_plan(where: str, plan: Plan) -> None:
    total = 0
    names: set[str] = set()
    for k, worker in enumerate(plan.workers):
        if worker.rank != k:
            raise InputError(where, f"workers[{k}].rank", str(worker.rank), f"{k}: ranks count from 0")
        if worker.name in names:
            raise InputError(
                where, f"workers[{k}].name", f"{worker.name!r} a second time", "a name of its own"
            )
        names.add(worker.name)
        if worker.micro_batch * worker.accumulation != worker.batch:
            found = f"{worker.micro_batch} x {worker.accumulation}"
            raise InputError(
                where, f"workers[{k}].micro_batch", found, f"micro_batch x accumulation = {worker.batch}"
            )
        if not math.isclose(worker.weight, worker.batch / plan.global_batch, rel_tol=1e-9, abs_tol=1e-12):
            expected = f"batch / global_batch = {worker.batch / plan.global_batch}"
            raise InputError(where, f"workers[{k}].weight", str(worker.weight), expected)
        total += worker.batch
    if total != plan.global_batch:
        raise InputError(
            where, "global_batch", str(plan.global_batch), f"the sum of the workers' batches, {total}"
        )
