"""What a worker is told about its run: by the launcher through the environment, or by arguments.

    PYPS_STORE          the segment's name               PYPS_POLICY          bsp, ssp:bound=4 ...
    PYPS_RANK           this worker's rank in the store  PYPS_ROUND_TIMEOUT   seconds
    PYPS_PLAN           path of plan.json                PYPS_SEED            of the order of samples
    PYPS_SAMPLES        sample positions in all          PYPS_RUN_DIR         where step records go
    PYPS_CODEC          how gradients travel: f32, int8 ...; plan: with its bits, each way
    PYPS_PIPELINE       1: transfers run beside the next step
    PYPS_JOURNAL        file of every decision, for pyps.simulate.replay; may be empty
    PYPS_KEYS           where PYPS_STORE is an address (pyps.remote): this client's key file
    PYPS_THROTTLE       {"factor": F} or {"fit": {...}}, to emulate a slower device; may be empty

Ranks in the store count the plan's workers that have a batch: those that are left out have none.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pyps.errors import InputError
from pyps.formats import Bits, Fit, Memory, Plan, PlanWorker, read_plan
from pyps.native.values import Codec, Encoding
from pyps.store.codec import as_codec, fed_back
from pyps.store.policies import DEFAULT_POLICY, Policy, check_pipeline, policy_named

if TYPE_CHECKING:
    from pyps.profiler.throttle import Throttle

ENVIRONMENT = "environment"
FROM_PLAN = "plan"
CODECS: dict[Bits, Codec] = {32: Codec.F32, 16: Codec.BF16, 8: Codec.INT8, 4: Codec.INT4}


class ThrottleSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to emulate a slower device: x times slower, or as slow as a fitted cost model says."""

    factor: float | None = None
    fit: Fit | None = None


@dataclass(frozen=True)
class Settings:
    """One worker's run; `launched`: by `pyps run`, which then also removes the segment."""

    store: str
    rank: int
    batches: tuple[int, ...]  # empty: not told
    micro_batch: int  # at most so many samples are computed at once; 0: the whole batch
    policy: Policy
    samples: int
    seed: int
    run_dir: Path | None
    throttle: ThrottleSpec | None
    encoding: Encoding
    launched: bool
    memory: Memory | None = None  # what samples take of it
    max_batch: int = 0  # the most samples at once that the plan allows; 0: no limit
    pull_codec: Codec = Codec.F32  # how parameters travel
    pipeline: bool = False
    journal: Path | None = None

    def planned_batches(self) -> tuple[int, ...]:
        """The batch of each rank. Raises InputError where nobody told."""
        if not self.batches:
            raise InputError(
                "join", "batches", "nothing", "the planned batch of each rank, for rank 0 to create"
            )
        return self.batches

    def make_throttle(self, *, on_gpu: bool) -> Throttle | None:
        """The throttle asked for; on a GPU, whose work costs the thread nothing, wall time is multiplied."""
        if self.throttle is None:
            return None
        from pyps.profiler.throttle import Throttle

        if self.throttle.fit is not None:
            return Throttle.from_fit(self.throttle.fit)
        clock = time.perf_counter if on_gpu else time.thread_time
        return Throttle(self.throttle.factor or 1.0, work_clock=clock)


def store_batches(plan: Plan) -> tuple[int, ...]:
    """The batch of each store rank: the plan's workers in order, without those that are left out."""
    return tuple(worker.batch for worker in plan.workers if worker.batch > 0)


def _planned(plan: Plan | None, rank: int) -> PlanWorker | None:
    workers = [worker for worker in plan.workers if worker.batch > 0] if plan else []
    return workers[rank] if rank < len(workers) else None


def _micro_batch(worker: PlanWorker | None) -> int:
    """The most at once: as planned where the batch is split, else what the worker may, as batches change."""
    if worker is None:
        return 0
    return worker.micro_batch if worker.accumulation > 1 else worker.max_batch or worker.micro_batch


def read_settings(
    store: str | None,
    rank: int | None,
    batches: Sequence[int] | None,
    policy: Policy | str | None,
    samples: int | None,
    seed: int | None,
    run_dir: str | Path | None,
    micro_batch: int | None = None,
    codec: Codec | str | None = None,
    pipeline: bool | None = None,
) -> Settings:
    """From the launcher's environment, with arguments before it; with `store` given, from arguments alone.

    Raises InputError, naming the variable or argument that is missing or wrong.
    """
    env: Mapping[str, str] = os.environ if store is None else {}
    name = store or env.get("PYPS_STORE")
    if not name:
        expected = (
            "a run: start the script with `pyps run`, or call pyps.join(store=..., rank=..., batches=...)"
        )
        raise InputError(ENVIRONMENT, "PYPS_STORE", "nothing", expected)
    if rank is None:
        rank = _integer(env, "PYPS_RANK")
    plan = read_plan(path) if (path := env.get("PYPS_PLAN")) else None
    planned = _planned(plan, rank)
    if micro_batch is not None and micro_batch < 1:
        raise InputError("join", "micro_batch", str(micro_batch), "at least 1")
    how = _policy(policy, env)
    piped = pipeline if pipeline is not None else _integer(env, "PYPS_PIPELINE", 0) > 0
    if piped:
        check_pipeline(how)
    push, pull = _codecs(codec if codec is not None else env.get("PYPS_CODEC") or Codec.F32, plan, planned)
    return Settings(
        store=name,
        rank=rank,
        batches=tuple(batches) if batches is not None else store_batches(plan) if plan else (),
        micro_batch=micro_batch if micro_batch is not None else _micro_batch(planned),
        policy=how,
        samples=samples if samples is not None else _integer(env, "PYPS_SAMPLES", 0),
        seed=seed if seed is not None else _integer(env, "PYPS_SEED", 0),
        run_dir=Path(d) if (d := run_dir or env.get("PYPS_RUN_DIR")) else None,
        throttle=_throttle(env),
        encoding=fed_back(push),
        launched=store is None,
        memory=planned.memory if planned else None,
        max_batch=(planned.max_batch or 0) if planned else 0,
        pull_codec=pull,
        pipeline=piped,
        journal=Path(path) if (path := env.get("PYPS_JOURNAL")) else None,
    )


def plan_codecs(plan: Plan, worker: PlanWorker, where: str = "plan") -> tuple[Codec, Codec]:
    """A worker's codecs for pushes and for pulls. Raises InputError where the plan has none."""
    for found in plan.hps.workers:
        if found.rank == worker.rank:
            return CODECS[found.push_bits], CODECS[found.pull_bits]
    expected = f"bits for rank {worker.rank}: plan again with bandwidths and an error budget"
    raise InputError(where, "hps.workers", f"{len(plan.hps.workers)} workers", expected)


def _codecs(codec: Codec | str, plan: Plan | None, worker: PlanWorker | None) -> tuple[Codec, Codec]:
    """For pushes and for pulls; a codec by its name is for pushes alone."""
    if codec != FROM_PLAN:
        return as_codec(codec), Codec.F32
    if plan is None or worker is None:
        raise InputError("join", "codec", "'plan' without a plan", "a codec's name, or a run by a plan")
    return plan_codecs(plan, worker)


def _integer(env: Mapping[str, str], variable: str, default: int | None = None) -> int:
    text = env.get(variable, "")
    if text == "" and default is not None:
        return default
    if not text.isascii() or not text.isdigit():
        where, field = (ENVIRONMENT, variable) if env else ("join", variable.removeprefix("PYPS_").lower())
        raise InputError(where, field, repr(text) if text else "nothing", "a whole number of at least 0")
    return int(text)


def _policy(policy: Policy | str | None, env: Mapping[str, str]) -> Policy:
    if isinstance(policy, Policy):
        return policy
    text = env.get("PYPS_ROUND_TIMEOUT") or str(DEFAULT_POLICY.round_timeout_seconds)
    try:
        seconds = float(text)
    except ValueError:
        raise InputError(
            ENVIRONMENT, "PYPS_ROUND_TIMEOUT", repr(text), "seconds, a positive number"
        ) from None
    return policy_named(policy or env.get("PYPS_POLICY") or DEFAULT_POLICY.name, seconds)


def _throttle(env: Mapping[str, str]) -> ThrottleSpec | None:
    text = env.get("PYPS_THROTTLE")
    if not text:
        return None
    expected = '{"factor": F} or {"fit": {...}}'
    try:
        spec = msgspec.json.decode(text, type=ThrottleSpec)
    except msgspec.DecodeError as error:
        raise InputError(ENVIRONMENT, "PYPS_THROTTLE", f"{text[:60]!r} ({error})", expected) from None
    if (spec.factor is None) == (spec.fit is None):
        raise InputError(ENVIRONMENT, "PYPS_THROTTLE", repr(text[:60]), expected)
    return spec
