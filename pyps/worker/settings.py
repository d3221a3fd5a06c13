"""The settings of one worker of a run, and the environment variables that carry them from the launcher.

`Settings.to_env` and `Settings.from_env` are the only readers and writers of these variables. Two others
belong to the user: PYPS_KEYS (pyps.remote.address) and PYPS_SHM_DIR (pyps.store.segments).
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pyps.errors import InputError
from pyps.formats import Fit, Memory, Plan, PlanWorker, read_plan
from pyps.formats.learnt import learnt
from pyps.formats.turns import TurnSchedule, plan_turns
from pyps.native.values import Codec, CostModel, Encoding
from pyps.store.codec import as_codec, fed_back
from pyps.store.policies import Policy
from pyps.worker.emulated_link import EmulatedLinks, LinkSpec
from pyps.worker.mode import ModeOptions, RankMode, launched_mode, launched_policy

if TYPE_CHECKING:
    from pyps.profiler.throttle import Throttle

ENVIRONMENT = "environment"
UNENCODED = Encoding(Codec.F32)
STAGING_BUFFERS = 2  # of a worker, at least


class Variable(StrEnum):
    """The environment variables of a worker; an empty one counts as absent."""

    STORE = "PYPS_STORE"  # the segment's name, or tcp://host:port/name
    RANK = "PYPS_RANK"  # this worker's rank in the store
    PLAN = "PYPS_PLAN"  # path of plan.json
    POLICY = "PYPS_POLICY"  # bsp, ssp:bound=4 ...
    ROUND_TIMEOUT = "PYPS_ROUND_TIMEOUT"  # seconds
    SAMPLES = "PYPS_SAMPLES"  # sample positions of the whole run; 0: without end
    DATASET_SIZE = "PYPS_DATASET_SIZE"  # samples of an epoch; 0: not said
    SEED = "PYPS_SEED"  # of the order of samples
    RUN_DIR = "PYPS_RUN_DIR"  # folder of the step records
    CODEC = "PYPS_CODEC"  # of gradients: f32, int8 ...; plan: of gradients and parameters, as planned
    PULL_CODEC = "PYPS_PULL_CODEC"  # of parameters, where CODEC is set
    DEPTH = "PYPS_DEPTH"  # steps under way; 2: push and pull overlap with the next step's compute
    ALLOW_NONFINITE = "PYPS_ALLOW_NONFINITE"  # 1: go on when the loss is not finite
    MICRO_BATCH = "PYPS_MICRO_BATCH"  # the most samples to compute at once; 0: as planned
    STAGING_BUFFERS = "PYPS_STAGING_BUFFERS"  # of each worker: the greatest depth of any
    JOURNAL = "PYPS_JOURNAL"  # file of every decision, for pyps.simulate.replay
    RESUME = "PYPS_RESUME"  # checkpoint that the store is made from
    COST_MODEL = "PYPS_COST_MODEL"  # {"fixed_seconds": ...}: of a rank that the plan does not have
    THROTTLE = "PYPS_THROTTLE"  # {"factor": F} or {"fit": {...}}: emulate a slower device


class ThrottleSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How to emulate a slower device: `factor` times slower, or as slow as a fitted cost model says, behind
    these links.
    """

    factor: float | None = None
    fit: Fit | None = None
    links: tuple[LinkSpec, ...] = ()


@dataclass(frozen=True)
class Settings:
    """What one worker knows about its run.

    store: the segment's name, or the address of a remote store.
    rank: in the store; ranks count the plan's workers that have a batch.
    policy, samples, seed: of the whole run; samples 0: without end.
    dataset_size: samples of an epoch, as the user counts epochs; 0: not said.
    batches: the planned batch of each rank; empty: unknown.
    micro_batch: the most samples to compute at once; 0: the whole batch.
    max_batch: the most samples at once that the plan allows; 0: no limit.
    memory: what samples take of it, as profiled.
    encoding, pull_codec: how gradients and parameters travel.
    depth: steps under way; 1: one after another, 2: push and pull overlap with the next step's compute.
    local_steps: each micro-batch is a step of the worker's own optimizer; of the workers so many on average
        between two pushes; 0: the store steps.
    allow_nonfinite: go on when the loss is not finite.
    schedule: the plan's turns, under a policy that takes turns.
    staging_buffers: of each worker, if this one creates the store: at least the depth of any.
    launched: by `pyps run`, which then also removes the segment.
    resume: the checkpoint that the store is made from; None: it begins with the model's parameters.
    cost_model: of this device, for a rank that the plan does not have; None: to be measured.
    """

    store: str
    rank: int
    policy: Policy
    samples: int = 0
    seed: int = 0
    dataset_size: int = 0
    batches: tuple[int, ...] = ()
    micro_batch: int = 0
    max_batch: int = 0
    memory: Memory | None = None
    encoding: Encoding = UNENCODED
    pull_codec: Codec = Codec.F32
    depth: int = 1
    local_steps: int = 0
    allow_nonfinite: bool = False
    staging_buffers: int = STAGING_BUFFERS
    throttle: ThrottleSpec | None = None
    run_dir: Path | None = None
    journal: Path | None = None
    plan_path: Path | None = None
    schedule: TurnSchedule | None = None
    launched: bool = False
    resume: Path | None = None
    cost_model: CostModel | None = None

    @classmethod
    def from_env(
        cls,
        store: str | None = None,
        rank: int | None = None,
        batches: Sequence[int] | None = None,
        policy: Policy | str | None = None,
        samples: int | None = None,
        seed: int | None = None,
        run_dir: str | Path | None = None,
        micro_batch: int | None = None,
        codec: Codec | str | None = None,
        pipeline: bool | int | None = None,
        allow_nonfinite: bool | None = None,
    ) -> Settings:
        """The launcher's settings: arguments override the environment, and this the plan.

        With `store` the environment is not read.

        The arguments are those of pyps.join(). Raises InputError, naming the variable or argument that is
        missing or wrong.
        """
        env: Mapping[str, str] = os.environ if store is None else {}
        name = store or env.get(Variable.STORE)
        if not name:
            expected = (
                "a run: start the script with `pyps run`, or call pyps.join(store=..., rank=..., batches=...)"
            )
            raise InputError(ENVIRONMENT, Variable.STORE, "nothing", expected)
        if rank is None:
            rank = _integer(env, Variable.RANK)
        if micro_batch is None:
            micro_batch = _integer(env, Variable.MICRO_BATCH, 0) or None
        if micro_batch is not None and micro_batch < 1:
            raise InputError("join", "micro_batch", str(micro_batch), "at least 1")
        plan_path = _path(env, Variable.PLAN)
        plan = read_plan(plan_path) if plan_path is not None else None
        wanted = ModeOptions(
            policy=policy or env.get(Variable.POLICY) or None,
            codec=codec if codec is not None else env.get(Variable.CODEC) or None,
            pipeline=pipeline if isinstance(pipeline, bool) else None,
            depth=_depth(pipeline, env),
            round_timeout=_round_timeout(env),
        )
        settings = cls(
            store=name,
            rank=rank,
            policy=launched_policy(wanted, plan, str(plan_path)),
            samples=samples if samples is not None else _integer(env, Variable.SAMPLES, 0),
            dataset_size=_integer(env, Variable.DATASET_SIZE, 0),
            seed=seed if seed is not None else _integer(env, Variable.SEED, 0),
            allow_nonfinite=(
                allow_nonfinite
                if allow_nonfinite is not None
                else _integer(env, Variable.ALLOW_NONFINITE, 0) > 0
            ),
            throttle=_throttle(env),
            run_dir=Path(run_dir) if run_dir else _path(env, Variable.RUN_DIR),
            journal=_path(env, Variable.JOURNAL),
            staging_buffers=_integer(env, Variable.STAGING_BUFFERS, STAGING_BUFFERS),
            launched=store is None,
            resume=_path(env, Variable.RESUME),
            cost_model=_cost_model(env),
        )
        if plan is not None and plan_path is not None:
            settings = settings.with_plan(plan, plan_path)
        if batches is not None and tuple(batches) != settings.batches:
            settings = replace(settings, batches=tuple(batches), schedule=None)  # that of other batches
        if micro_batch is not None:
            settings = replace(settings, micro_batch=micro_batch)
        worker = _planned_worker(plan, rank) if plan is not None else None
        mode = launched_mode(wanted, settings.policy, plan, worker)
        if codec is None and (pull := env.get(Variable.PULL_CODEC)):
            mode = replace(mode, pull=as_codec(pull))
        return settings.with_mode(mode)

    def to_env(self) -> dict[str, str]:
        """Every variable, for the worker's process; from_env makes the same settings of them."""
        throttle, model = ("" if v is None else _json(v) for v in (self.throttle, self.cost_model))
        values = {
            Variable.STORE: self.store,
            Variable.RANK: self.rank,
            Variable.PLAN: self.plan_path or "",
            Variable.POLICY: self.policy,
            Variable.ROUND_TIMEOUT: repr(self.policy.round_timeout_seconds),
            Variable.SAMPLES: self.samples,
            Variable.DATASET_SIZE: self.dataset_size,
            Variable.SEED: self.seed,
            Variable.RUN_DIR: self.run_dir or "",
            Variable.CODEC: self.encoding.codec.name.lower(),
            Variable.PULL_CODEC: self.pull_codec.name.lower(),
            Variable.DEPTH: self.depth,
            Variable.ALLOW_NONFINITE: int(self.allow_nonfinite),
            Variable.MICRO_BATCH: self.micro_batch,
            Variable.STAGING_BUFFERS: self.staging_buffers,
            Variable.JOURNAL: self.journal or "",
            Variable.RESUME: self.resume or "",
            Variable.COST_MODEL: model,
            Variable.THROTTLE: throttle,
        }
        return {variable.value: str(value) for variable, value in values.items()}

    def with_plan(self, plan: Plan, path: Path) -> Settings:
        """These settings with what a plan gives this rank: batches, micro-batch, memory limits, turns.

        Raises InputError if the policy takes turns and the plan's are not of its workers.
        """
        worker = _planned_worker(plan, self.rank)
        return replace(
            self,
            plan_path=path,
            batches=store_batches(plan),
            micro_batch=_micro_batch(worker, plan),
            max_batch=(worker.max_batch or 0) if worker else 0,
            memory=worker.memory if worker else None,
            schedule=plan_turns(plan, str(path)) if self.policy.needs.uses_turns else None,
        )

    def with_mode(self, mode: RankMode) -> Settings:
        """These settings with a mode's depth and codecs; gradients are encoded with error feedback."""
        return replace(
            self,
            encoding=fed_back(mode.push),
            pull_codec=mode.pull,
            depth=mode.depth,
            local_steps=mode.local_steps,
            staging_buffers=max(self.staging_buffers, mode.depth),
        )

    def planned_batches(self) -> tuple[int, ...]:
        """The batch of each rank. Raises InputError where it is unknown."""
        if not self.batches:
            expected = "the planned batch of each rank, which rank 0 needs to create the store"
            raise InputError("join", "batches", "nothing", expected)
        return self.batches

    def make_links(self) -> EmulatedLinks:
        """The emulated links to the store, if any."""
        return EmulatedLinks(self.throttle.links if self.throttle else (), self.run_dir)

    def make_throttle(self, *, on_gpu: bool) -> Throttle | None:
        """The throttle, if any; on a GPU it multiplies wall time, since the thread computes nothing there."""
        if self.throttle is None:
            return None
        from pyps.profiler.throttle import Throttle

        if self.throttle.fit is not None:
            return Throttle.from_fit(self.throttle.fit)
        clock = time.perf_counter if on_gpu else time.thread_time
        return Throttle(self.throttle.factor or 1.0, work_clock=clock)


def store_batches(plan: Plan) -> tuple[int, ...]:
    """The batch of each store rank: those of the plan's workers that have one, in order."""
    return tuple(worker.batch for worker in plan.workers if worker.batch > 0)


def _planned_worker(plan: Plan, rank: int) -> PlanWorker | None:
    """The plan's worker that has this rank in the store."""
    workers = [worker for worker in plan.workers if worker.batch > 0]
    return workers[rank] if rank < len(workers) else None


def _micro_batch(worker: PlanWorker | None, plan: Plan) -> int:
    """The most samples at once: as planned where the batch is split, else what the worker's memory holds.

    The latter leaves room for a batch that grows while the run trains. A local step of a worker that the plan
    does not have is one of its smallest.
    """
    if worker is None:
        is_local = plan.run is not None and plan.run.local_steps is not None
        return min(_micro_batch(one, plan) for one in plan.workers if one.batch) if is_local else 0
    return worker.micro_batch if worker.accumulation > 1 else worker.max_batch or worker.micro_batch


def _path(env: Mapping[str, str], variable: Variable) -> Path | None:
    return Path(text) if (text := env.get(variable)) else None


def _integer(env: Mapping[str, str], variable: Variable, default: int | None = None) -> int:
    text = env.get(variable, "")
    if text == "" and default is not None:
        return default
    if not text.isascii() or not text.isdigit():
        where, field = (ENVIRONMENT, variable.value) if env else ("join", variable.name.lower())
        raise InputError(where, field, repr(text) if text else "nothing", "a whole number of at least 0")
    return int(text)


def _depth(pipeline: bool | int | None, env: Mapping[str, str]) -> int | None:
    """The number of steps under way that is asked for, if one is."""
    if pipeline is None:
        return _integer(env, Variable.DEPTH) if env.get(Variable.DEPTH) else None
    return None if isinstance(pipeline, bool) else int(pipeline)


def _round_timeout(env: Mapping[str, str]) -> float | None:
    text = env.get(Variable.ROUND_TIMEOUT)
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        expected = "seconds, a positive number"
        raise InputError(ENVIRONMENT, Variable.ROUND_TIMEOUT, repr(text), expected) from None


def _json(value: ThrottleSpec | CostModel) -> str:
    return msgspec.json.encode(value).decode()


def _cost_model(env: Mapping[str, str]) -> CostModel | None:
    text = env.get(Variable.COST_MODEL)
    if not text:
        return None
    try:
        return msgspec.json.decode(text, type=learnt(CostModel))
    except msgspec.DecodeError as error:
        expected = '{"fixed_seconds": C, "sample_seconds": A}'
        raise InputError(ENVIRONMENT, Variable.COST_MODEL, f"{text[:60]!r} ({error})", expected) from None


def _throttle(env: Mapping[str, str]) -> ThrottleSpec | None:
    text = env.get(Variable.THROTTLE)
    if not text:
        return None
    expected = '{"factor": F} or {"fit": {...}}'
    try:
        spec = msgspec.json.decode(text, type=learnt(ThrottleSpec))
    except msgspec.DecodeError as error:
        raise InputError(ENVIRONMENT, Variable.THROTTLE, f"{text[:60]!r} ({error})", expected) from None
    if (spec.factor is None) == (spec.fit is None):
        raise InputError(ENVIRONMENT, Variable.THROTTLE, repr(text[:60]), expected)
    return spec
