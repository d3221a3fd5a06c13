"""Define what to run: the user's options, checked and resolved by a plan (RunSpec)."""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from pyps.errors import InputError, reason_of
from pyps.formats import Mode, Plan, read_plan, write_json
from pyps.formats.events import EVENTS
from pyps.formats.files import encode, read_text
from pyps.formats.plan import TurnSchedule, plan_turns
from pyps.formats.setup import SETUP_FILE, RankSpec, RunSetup, read_setup
from pyps.native.values import STAGING_BUFFERS, CostModel
from pyps.remote import open_store
from pyps.remote.address import is_address, parse_servers
from pyps.run.options import RunOptions, StrPath, options_to_json
from pyps.run.ranks import (
    cost_model_of,
    even_plan,
    new_rank,
    other_cluster,
    other_devices,
    rank_specs,
    throttles,
    throttles_by_rank,
)
from pyps.run.resume import (
    Resumed,
    check_policy_named,
    check_unfinished,
    continue_folder,
    find_resumed,
    is_owned,
    new_store,
    run_of,
)
from pyps.solver.constrained import paced_seconds
from pyps.store.policies import Policy
from pyps.store.store import Store
from pyps.worker.run.mode import adapts, choices_of, departures, launched_mode, launched_policy
from pyps.worker.run.settings import Settings, ThrottleSpec

MAX_RANKS = 1000  # of any store
ANEW = Resumed(None, None, None)
PLAN = "plan.json"
MOST_THREADS = 4  # of a worker that share its chunks: these few reach what the memory can carry
CONTROL_GROUPS = Path("/sys/fs/cgroup")
OWN_FOLDER = 0o755  # what a resume starts stands in it


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """A run, ready to start: the same command for every rank, with the rank's settings in its environment.

    plan: as it is run; its file is `plan_path`.
    ranks: those to start here. throttles: of the ranks whose pace the real device does not set.
    modes: of every rank.
    departures: in what they are not the plan's, so that its prediction does not hold. differences: in what
    the plan is not that of the cluster file whose devices are emulated.
    folder: where its processes start.
    resumed: what it goes on from.
    cost_model: of ranks that the plan does not have.
    where: gives the address of a store whose servers may move; None: it stays at `store`.
    """

    plan: Plan
    policy: Policy
    options: RunOptions
    ranks: tuple[RankSpec, ...]
    throttles: Mapping[int, ThrottleSpec]
    modes: tuple[Mode, ...]
    departures: tuple[str, ...]
    differences: tuple[str, ...]
    store: str
    run_dir: Path
    command: tuple[str, ...]
    folder: str
    resumed: Resumed = ANEW
    cost_model: CostModel | None = None
    where: Callable[[], str] | None = None

    def open_store(self) -> Store:
        """The run's store, wherever it is now. Raises as pyps.remote.open_store."""
        return open_store(self.store if self.where is None else self.where())

    @property
    def plan_path(self) -> Path:
        return self.run_dir / PLAN

    @property
    def journal(self) -> Path | None:
        """The file of every decision, where it is asked for."""
        return self.run_dir / "journal" if self.options.journal else None

    @property
    def turns(self) -> TurnSchedule | None:
        """The planned turns of all ranks, where the policy takes turns."""
        return plan_turns(self.plan, str(self.plan_path)) if self.policy.needs.uses_turns else None

    @property
    def resumed_version(self) -> int | None:
        """The version that the run goes on from; None: what the store has, which may live on elsewhere."""
        return None if is_address(self.store) else self.resumed.version

    @property
    def setup(self) -> RunSetup:
        """Return what reports need to know of it."""
        ranks = self.ranks
        if self.departures:
            ranks = tuple(msgspec.structs.replace(rank, predicted_seconds=None) for rank in ranks)
        return RunSetup(
            store=self.store,
            host=socket.gethostname(),
            script=os.path.abspath(self.command[1]),
            policy=self.policy.name,
            even=self.options.even,
            seed=self.options.seed,
            samples=self.options.samples,
            predicted_iteration_seconds=None
            if self.departures
            else paced_seconds(self.plan, self.policy.pace),
            ranks=ranks,
            turns=self.turns,
            plan_digest=_digest(self.plan),
            cpus=len(os.sched_getaffinity(0)),
            folder=self.folder,
            options=options_to_json(self.options),
        )

    def settings(self, rank: RankSpec) -> Settings:
        """Return what the worker of a rank knows about the run."""
        settings = Settings(
            store=self.store,
            rank=rank.rank,
            policy=self.policy,
            samples=self.options.samples,
            dataset_size=self.options.dataset_size,
            seed=self.options.seed,
            allow_nonfinite=self.options.allow_nonfinite,
            staging_buffers=max(STAGING_BUFFERS, *self._depths()),
            throttle=self.throttles.get(rank.rank),
            run_dir=self.run_dir,
            journal=self.journal,
            launched=True,
            resume=self.resumed.path,
            cost_model=self.cost_model if rank.batch == 0 else None,
            adapts=self._adapts(rank.rank),
            threads=1 if rank.emulated else min(MOST_THREADS, max(1, cores() // len(self.ranks))),
        )
        settings = settings.with_plan(self.plan, self.plan_path).with_mode(self.modes[rank.rank])
        return replace(settings, micro_batch=self.options.micro_batch or settings.micro_batch)

    def _adapts(self, rank: int) -> bool:
        """Return whether a rank's codecs and depth follow its link."""
        return self.options.rebalance and adapts(self.options, self.policy, self.modes[rank], self.plan)

    def _depths(self) -> list[int]:
        """The most steps under way of each rank."""
        most = choices_of(self.plan, self.policy).depths[1]
        return [most if self._adapts(rank) else mode.depth for rank, mode in enumerate(self.modes)]

    def environment(self, rank: RankSpec) -> dict[str, str]:
        """The environment of a rank's process: this process's, with the rank's settings."""
        local_rank = self.ranks.index(rank)  # numbered as torchrun does
        env = os.environ | self.settings(rank).to_env()
        env |= {"LOCAL_RANK": str(local_rank), "PYTHONUNBUFFERED": "1"}
        if rank.emulated:
            env |= {"OMP_NUM_THREADS": "1"}
        else:
            env.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // len(self.ranks))))
        return env


def cores() -> int:
    """Whole cores that this process may use: by its affinity, and by the quota of its control groups."""
    found = len(os.sched_getaffinity(0))
    try:
        group = Path("/proc/self/cgroup").read_text(encoding="utf-8").rpartition("::/")[2].strip()
        for folder in (CONTROL_GROUPS / group, *(CONTROL_GROUPS / group).parents):
            if folder.is_relative_to(CONTROL_GROUPS) and (limit := folder / "cpu.max").is_file():
                quota, _, period = limit.read_text(encoding="utf-8").partition(" ")
                if quota != "max":
                    found = min(found, int(quota) // int(period))
    except (OSError, ValueError):
        pass  # no control groups of version 2, or none that this process may read
    return max(1, found)


def prepare(plan: StrPath | None, script: StrPath, options: RunOptions) -> RunSpec:
    """Check everything, then make the run's folder. plan None: that of the resumed run. Raises InputError."""
    options.check()
    path, expected = Path(script), "a Python script that calls pyps.join()"
    if not path.is_file():
        raise InputError("script", "", f"no file at {script}", expected)
    if path.suffix in (".toml", ".json"):
        raise InputError("script", "", str(script), expected)
    store = _store_name(options.connect)
    resumed = find_resumed(options.resume) if options.resume is not None else ANEW
    check_unfinished(resumed, options.samples)
    planned, specs, where = _load_plan(plan, resumed, options)
    if plan is None and options.policy is None and planned.run is not None:
        check_policy_named(planned.run.policy, where)
    ranks = rank_specs(planned, specs)
    ranks_here = _ranks_to_start(ranks, options)
    policy = launched_policy(options, planned, where)
    if policy.needs.uses_turns:
        plan_turns(planned, where)
    used = [worker for worker in planned.workers if worker.batch > 0]
    modes = [launched_mode(options, policy, planned, worker, where) for worker in used]
    by_rank = {worker.rank: mode for worker, mode in zip(used, modes, strict=True)}
    modes += modes[:1] * (1 + max(rank.rank for rank in ranks_here) - len(modes))  # of ranks beyond the plan
    if options.journal and options.connect is not None:
        found = f"on, with a store at {options.connect}"
        raise InputError("journal", "", found, "off: the store's server takes the decisions")
    return RunSpec(
        plan=planned,
        policy=policy,
        options=options,
        ranks=tuple(ranks_here),
        throttles=throttles_by_rank(planned, specs),
        modes=tuple(modes),
        departures=(
            *departures(planned, policy, by_rank),
            *other_devices(planned, specs, options.throttle_from),
        ),
        differences=tuple(other_cluster(planned, options.throttle_from)),
        store=store,
        run_dir=_make_run_folder(options.run_dir, resumed),
        command=(
            sys.executable,
            os.path.abspath(script) if options.resume else os.fspath(script),
            *options.args,
        ),
        folder=_folder(script, options.resume),
        resumed=resumed,
        cost_model=cost_model_of(options.profile) if options.profile is not None else None,
    )


def _folder(script: StrPath, resume: StrPath | None) -> str:
    """Where the processes start: here, or where those of the resumed run did, if it is the same script."""
    if resume is not None and (run_dir := run_of(resume)) is not None:
        before = read_setup(run_dir)
        if before.script == os.path.abspath(script) and is_owned(run_dir) and os.path.isdir(before.folder):
            return before.folder
    return os.getcwd()


def write_setup(spec: RunSpec) -> int:
    """Make the run's folder ready: what earlier parts of the run left, plan.json and run.json. The last
    version that the records of a run that goes on knew.
    """
    last = 0
    if spec.resumed.run_dir is not None:
        last = continue_folder(spec.run_dir, spec.resumed_version, spec.run_dir / EVENTS)
    write_json(spec.plan_path, spec.plan)
    write_json(spec.run_dir / SETUP_FILE, spec.setup)
    return last


def _store_name(connect: str | None) -> str:
    """The address, if it is one, or a name for a segment of this run alone."""
    if connect is None:
        return new_store()
    parse_servers(connect)
    return connect


def _load_plan(
    path: StrPath | None, resumed: Resumed, options: RunOptions
) -> tuple[Plan, list[ThrottleSpec | None], str]:
    """The plan as it is run, the throttle of each of its workers, and its place for errors."""
    saved = resumed.checkpoint.plan if resumed.checkpoint is not None else None
    if path is None and saved is not None:
        plan, where = saved, f"{resumed.path}: plan"
        _check_unchanged(resumed.run_dir, saved)
    else:
        where = os.fspath(path if path is not None else (resumed.run_dir or Path()) / PLAN)
        plan = read_plan(where)
    specs = throttles(plan, where, options.throttle_from)
    if options.even and (path is not None or not _was_even(options.resume)):
        plan = even_plan(plan, where, [spec.fit if spec else None for spec in specs])
    return plan, specs, where


def _was_even(resume: StrPath | None) -> bool:
    """Return whether the run that goes on had equal batches: its plan has those that it came to have."""
    run_dir = run_of(resume) if resume is not None else None
    return run_dir is not None and read_setup(run_dir).even


def _check_unchanged(run_dir: Path | None, saved: Plan) -> None:
    """Raise InputError if a run's plan.json was edited: the checkpoint's plan would overwrite the edits."""
    if run_dir is None or not (path := run_dir / PLAN).exists():
        return
    began, found = read_setup(run_dir).plan_digest, _digest(read_plan(path))
    as_written = hashlib.sha256(read_text(path).encode()).hexdigest()  # by a version with other fields
    if began and began not in (found, as_written) and found != _digest(saved):
        expected = f"--plan {path} to go on with the changed plan, or no file there to go on with the old one"
        raise InputError(str(path), "", "a plan that was changed since the run began", expected)


def _digest(plan: Plan) -> str:
    return hashlib.sha256(encode(plan)).hexdigest()


def _ranks_to_start(all_ranks: list[RankSpec], options: RunOptions) -> list[RankSpec]:
    """Return those of `options.ranks`, or all of them. Raises InputError."""
    ranks = options.ranks
    if options.profile is not None and not set(ranks or ()) - {spec.rank for spec in all_ranks}:
        expected = "ranks that the plan does not have: it has the profiles of its own"
        raise InputError("profile", "", str(options.profile), expected)
    if ranks is None:
        return all_ranks
    known = {spec.rank for spec in all_ranks}
    most = MAX_RANKS if options.connect is not None else len(all_ranks)
    if not ranks or min(ranks) < 0 or max(ranks) >= most or len(set(ranks)) != len(ranks):
        found, expected = ", ".join(map(str, ranks)), f"different ones of 0 to {most - 1}"
        raise InputError("ranks", "", found or "none", expected)
    if options.connect is None and (missing := sorted(known - set(ranks))):
        found = f"{', '.join(map(str, ranks))}; nothing would start {', '.join(map(str, missing))}"
        raise InputError("ranks", "", found, "all ranks, or --connect with a store that the other ranks join")
    beyond = [new_rank(rank, options.profile) for rank in sorted(set(ranks) - known)]
    return [spec for spec in all_ranks if spec.rank in ranks] + beyond


def _make_run_folder(run_dir: StrPath | None, resumed: Resumed) -> Path:
    """The run's folder as an absolute path, made where it is missing. Raises InputError if it holds a run,
    unless that is resumed.
    """
    default = f"pyps-runs/{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder = Path(run_dir if run_dir is not None else resumed.run_dir or default).absolute()
    try:
        folder.mkdir(OWN_FOLDER, parents=True, exist_ok=True)
    except OSError as error:
        raise InputError("run_dir", "", f"{folder}: {reason_of(error)}", "a folder to write to") from None
    if resumed.run_dir is not None and os.path.realpath(folder) != os.path.realpath(resumed.run_dir):
        expected = f"{resumed.run_dir}, which is resumed; one of its checkpoints can begin a new run"
        raise InputError("run_dir", "", str(folder), expected)
    if resumed.run_dir is None and (folder / SETUP_FILE).exists():
        expected = f"a folder without one, or --resume {folder}"
        raise InputError("run_dir", "", f"{folder}, which holds a run", expected)
    return folder
