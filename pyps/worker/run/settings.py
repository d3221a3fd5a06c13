"""The settings of one worker of a run, and the environment variable that carries them from the launcher.

`Settings.to_env` writes the variable and `Settings.from_env` reads it: JSON, with the version of its layout.

All workers of a run have the plan, the seed, the policy and the samples alike. The worker that creates the
store brings them, and every other one is compared with the store. A plan is known by the batches of its
ranks: what it predicts may differ between hosts.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from pyps.errors import InputError
from pyps.formats import Fit, Memory, Plan, PlanWorker, read_plan
from pyps.formats.files import learnt
from pyps.formats.mode import Mode
from pyps.formats.plan import TurnSchedule, plan_turns
from pyps.formats.setup import VARIABLE
from pyps.native.decisions import PolicyParams
from pyps.native.values import STAGING_BUFFERS, Agreement, Codec, CostModel, Encoding
from pyps.solver.links import LinkSpec
from pyps.solver.mode import ModeChoices
from pyps.store.codec import as_codec, fed_back, name_of
from pyps.store.policies import Policy, policy_named
from pyps.store.store import Store
from pyps.worker.run.emulated_link import EmulatedLinks, FarStore
from pyps.worker.run.mode import ModeOptions, choices_of, launched_mode, launched_policy

if TYPE_CHECKING:
    from pyps.profiler.throttle import Throttle

VERSION = 1  # of the variable's layout
UNENCODED = Encoding(Codec.F32)


class PolicyText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A policy in the variable, and the seconds that one worker may delay the others."""

    name: str
    round_timeout: float


class ThrottleSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How to emulate a slower device: `factor` times slower, or as slow as a fitted cost model says, behind
    these links.
    """

    factor: float | None = None
    fit: Fit | None = None
    links: tuple[LinkSpec, ...] = ()

    def __post_init__(self) -> None:
        if (self.factor is None) == (self.fit is None):
            raise InputError("throttle", "", "not one of factor and fit", '{"factor": F} or {"fit": {...}}')


@dataclass(frozen=True)
class Settings:
    """Hold what one worker knows about its run.

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
    local_steps: each micro-batch is a step of the worker's own optimizer; their number between two pushes,
        on average over the workers; 0: the store steps.
    average_moments: of these optimizers, that are averaged as planned.
    allow_nonfinite: go on when the loss is not finite.
    schedule: the plan's turns, under a policy that takes turns.
    staging_buffers: of each worker, if this one creates the store: at least the depth of any.
    launched: by `pyps run`, which then also removes the segment.
    may_be_new: the rank may be one that the plan does not have, as of launched workers.
    resume: the checkpoint that the store is made from; None: it begins with the model's parameters.
    cost_model: of this device, for a rank that the plan does not have; None: to be measured.
    threads: of this process that share the chunks of pushes and pulls.
    adapts: codecs and depth, as planned at first, follow this worker's link and device.
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
    average_moments: int = 0
    allow_nonfinite: bool = False
    staging_buffers: int = STAGING_BUFFERS
    throttle: ThrottleSpec | None = None
    run_dir: Path | None = None
    journal: Path | None = None
    plan_path: Path | None = None
    schedule: TurnSchedule | None = None
    launched: bool = False
    may_be_new: bool = False
    resume: Path | None = None
    cost_model: CostModel | None = None
    threads: int = 1
    adapts: bool = False

    @property
    def choices(self) -> ModeChoices | None:
        """The codecs and depths that it may change to; None: its mode stays."""
        if not self.adapts or self.plan_path is None:
            return None
        return choices_of(read_plan(self.plan_path), self.policy)

    @property
    def most_depth(self) -> int:
        """The most steps under way."""
        choices = self.choices
        return self.depth if choices is None else choices.depths[1]

    @classmethod
    def from_env(cls) -> Settings:
        """Return those that the launcher gave this process. Raises InputError if there are none, or of
        another version.
        """
        if not (text := os.environ.get(VARIABLE)):
            expected = (
                "a run: start the script with `pyps run`, or call pyps.join(store=..., rank=..., batches=...)"
            )
            raise InputError("environment", VARIABLE, "nothing", expected)
        values = settings_values(text)
        if values.pop("version", None) != VERSION:
            found = f"{text[:60]!r}, of another version of pyps"
            raise InputError("environment", VARIABLE, found, "a worker that has its launcher's version")
        if unknown := values.keys() - {field.name for field in fields(cls)}:
            _refuse(text, f"an unknown key {min(unknown)!r}")
        try:
            said = msgspec.convert(values.pop("policy", None), PolicyText)
            policy = policy_named(said.name, said.round_timeout, f"{VARIABLE}: policy")
            plain = values | {"policy": {}}  # which msgspec would read as the base class
            settings = msgspec.convert(plain, learnt(cls), dec_hook=lambda kind, value: kind(value))
        except msgspec.ValidationError as error:
            _refuse(text, str(error))
        return replace(settings, policy=policy)

    def to_env(self) -> dict[str, str]:
        """The variable, for the worker's process; from_env makes the same settings of it."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        policy = PolicyText(str(self.policy), self.policy.round_timeout_seconds)
        plain = {"version": VERSION, **values, "policy": policy}
        return {VARIABLE: msgspec.json.encode(plain, enc_hook=os.fspath).decode()}

    def with_arguments(self, mode: ModeOptions, **given: Any) -> Settings:
        """These settings with the arguments of pyps.join(), which override them; None: not given.

        mode: the arguments that the plan may answer. given: the others, by the names of fields. Raises
        InputError.
        """
        changes = {name: value for name, value in given.items() if value is not None}
        batches = changes.pop("batches", None)
        settings = self
        if mode != ModeOptions() or "rank" in changes:
            rank = changes.get("rank", self.rank)
            settings = replace(self, rank=rank)._in_mode(mode)
        if batches is not None and tuple(batches) != settings.batches:
            changes |= {"batches": tuple(batches), "schedule": None}  # that of other batches
        return replace(settings, **changes)

    def _in_mode(self, wanted: ModeOptions) -> Settings:
        """Return what the plan says for this rank, with the wanted mode; what is not asked for stays."""
        plan = read_plan(self.plan_path) if self.plan_path is not None else None
        worker = _planned_worker(plan, self.rank) if plan is not None else None
        wanted = replace(wanted, round_timeout=self.policy.round_timeout_seconds)
        policy = launched_policy(wanted, None) if wanted.policy is not None else self.policy
        if wanted.depth is None:
            wanted = replace(wanted, depth=self.depth)
        mode = launched_mode(wanted, policy, plan, worker)
        if wanted.codec is None:
            mode = Mode(push=name_of(self.encoding.codec), pull=name_of(self.pull_codec), depth=mode.depth)
        settings = replace(self, policy=policy)
        if plan is not None and self.plan_path is not None:
            settings = settings.with_plan(plan, self.plan_path)
        return replace(settings.with_mode(mode), micro_batch=self.micro_batch or settings.micro_batch)

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
            local_steps=(plan.run.local_steps or 0) if plan.run else 0,
            average_moments=(plan.run.average_moments or 0) if plan.run else 0,
            schedule=plan_turns(plan, str(path)) if self.policy.needs.uses_turns else None,
        )

    def with_mode(self, mode: Mode) -> Settings:
        """These settings with a mode's depth and codecs; gradients are encoded with error feedback."""
        return replace(
            self,
            encoding=fed_back(as_codec(mode.push)),
            pull_codec=as_codec(mode.pull),
            depth=mode.depth,
            staging_buffers=max(self.staging_buffers, mode.depth),
        )

    def planned_batches(self) -> tuple[int, ...]:
        """The batch of each rank. Raises InputError where it is unknown."""
        if not self.batches:
            expected = "the planned batch of each rank, which rank 0 needs to create the store"
            raise InputError("join", "batches", "nothing", expected)
        return self.batches

    def across_links(self, store: Store) -> Store:
        """Return the store behind the emulated links to it; itself if there are none."""
        links = self.throttle.links if self.throttle else ()
        return FarStore(store, EmulatedLinks(links, self.run_dir)) if links else store

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
    """The most samples at once. A worker that the plan does not have takes the smallest local steps of it."""
    if worker is None:
        is_local = plan.run is not None and plan.run.local_steps is not None
        return min(one.most_at_once for one in plan.workers if one.batch) if is_local else 0
    return worker.most_at_once


def settings_values(text: str) -> dict[str, Any]:
    """The variable's values as plain data. Raises InputError if it is not a JSON object."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        _refuse(text, str(error))


def stored_elsewhere(env: Mapping[str, str], address: str) -> dict[str, str]:
    """A worker's environment, but for the store's address."""
    values = settings_values(env[VARIABLE]) | {"store": address}
    return {**env, VARIABLE: msgspec.json.encode(values).decode()}


def _refuse(text: str, why: str) -> NoReturn:
    expected = "JSON as the launcher writes it; to start a worker by hand, give pyps.join() its arguments"
    raise InputError("environment", VARIABLE, f"{text[:60]!r} ({why})", expected)


def agreement_of(settings: Settings) -> Agreement:
    """Return what a store is created with."""
    if not settings.batches:
        return Agreement()
    text = ",".join(map(str, settings.batches)).encode()
    return Agreement(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()), settings.seed)


def check_agreed(store: Store, settings: Settings) -> None:
    """Raise InputError, naming what differs, if the store belongs to a run with other settings than these."""
    layout, mine = store.layout, agreement_of(settings)
    if layout.plan and mine.plan and layout.plan != mine.plan:
        found = f"batches {', '.join(map(str, settings.batches))}"
        _refuse_unlike(store, "plan", found, "the plan of the host that created it")
    if layout.plan and layout.seed != settings.seed:
        _refuse_unlike(store, "seed", str(settings.seed), f"{layout.seed}, as in the store")
    if (settings.launched or settings.samples) and layout.samples != settings.samples:
        _refuse_unlike(store, "samples", str(settings.samples), f"{layout.samples}, as in the store")
    if settings.launched and (expected := _other_policy(store, settings.policy)):
        _refuse_unlike(store, "policy", str(settings.policy), f"{expected}, as in the store")


def _other_policy(store: Store, mine: Policy) -> str:
    """Return what the store's policy has where `mine` has something else; empty: they are the same."""
    number = store.layout.policy
    if mine.number != number:
        names = [name for name, kind in Policy.known.items() if kind.number == number]
        return names[0] if names else "the policy that its creator wrote"
    params = store.policy_params()
    for field in fields(PolicyParams):
        theirs = getattr(params, field.name)
        if theirs != getattr(mine.params(), field.name):
            return f"{mine.name} with {field.name.rstrip('_')} {theirs}"
    return ""


def _refuse_unlike(store: Store, field: str, found: str, expected: str) -> None:
    give = "give all hosts and workers of a run the same plan, seed, policy and samples"
    raise InputError(f"store {store.name!r}", field, found, f"{expected}; {give}")
