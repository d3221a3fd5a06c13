"""What to run: the user's options (RunOptions), checked and resolved by a plan (RunSpec)."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pyps.errors import InputError
from pyps.formats import Plan, read_plan, write_json
from pyps.formats.setup import SETUP_FILE, RankSetup, RunSetup
from pyps.formats.turns import TurnSchedule, plan_turns
from pyps.native.values import Codec
from pyps.remote.address import parse_address
from pyps.run.ranks import RankSpec, even_plan, rank_specs, throttles
from pyps.store.policies import Policy
from pyps.worker.mode import ModeOptions, RankMode, departures, launched_mode, launched_policy
from pyps.worker.sampling import MAX_SEED
from pyps.worker.settings import Settings

MAX_RESTARTS = 3
MAX_COUNT = 2**63 - 1
EVENTS = "run.jsonl"
StrPath = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How to run a script by a plan. Each field has the name of its option of `pyps run`.

    samples: sample positions of the whole run; 0: until the script ends.
    policy: a synchronization policy, or its text, such as "ssp:bound=4"; None: the plan's, or bsp.
    round_timeout: seconds that one worker may delay the others, with a policy by text; None: the plan's.
    args: the script's arguments.
    dataset_size: samples of an epoch: a script with a data set of another length is refused; 0: any.
    seed: of the order of samples.
    codec: how gradients travel, with error feedback; "plan": gradients and parameters with the plan's bits;
        None: as the plan says, or f32.
    pipeline: overlap push and pull with the next step's compute; None: as the plan says.
    depth: steps under way, instead of pipeline.
    journal: write every decision to run_dir/journal, for pyps.simulate.replay.
    run_dir: a folder without a run in it; None: pyps-runs/<time>-<pid>.
    throttle_from: "plan" or a cluster file, to emulate its devices (pyps.run.ranks.throttles).
    even: equal batches instead of the plan's, for comparison.
    max_restarts: restarts allowed per rank; a worker that dies before it joined ends the run.
    snapshot_every: versions between snapshots; 0: none.
    connect: the address of a store that `pyps serve` serves (pyps.remote); None: a store on this machine.
    ranks: the ranks to start here, with connect; None: all.
    rebalance: move samples between ranks while the run trains (pyps.run.rebalance).
    allow_nonfinite: go on when the loss is not finite, instead of ending the run.
    metrics: sinks for figures while it trains, such as "prometheus:9100" (pyps.metrics.SINKS).
    """

    samples: int
    policy: Policy | str | None = None
    round_timeout: float | None = None
    args: Sequence[str] = ()
    dataset_size: int = 0
    seed: int = 0
    codec: Codec | str | None = None
    pipeline: bool | None = None
    depth: int | None = None
    journal: bool = False
    run_dir: StrPath | None = None
    throttle_from: StrPath | None = None
    even: bool = False
    max_restarts: int = MAX_RESTARTS
    snapshot_every: int = 0
    connect: str | None = None
    ranks: Sequence[int] | None = None
    rebalance: bool = False
    allow_nonfinite: bool = False
    metrics: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """A run, ready to start: the same command for every rank, with the rank's settings in its environment.

    plan: as it is run; its file is `plan_path`.
    ranks: those to start here.
    modes: of every rank.
    departures: in what they are not the plan's, so that its prediction does not hold.
    """

    plan: Plan
    policy: Policy
    options: RunOptions
    ranks: tuple[RankSpec, ...]
    modes: tuple[RankMode, ...]
    departures: tuple[str, ...]
    store: str
    run_dir: Path
    command: tuple[str, ...]

    @property
    def plan_path(self) -> Path:
        return self.run_dir / "plan.json"

    @property
    def journal(self) -> Path | None:
        """The file of every decision, where it is asked for."""
        return self.run_dir / "journal" if self.options.journal else None

    @property
    def turns(self) -> TurnSchedule | None:
        """The planned turns of all ranks, where the policy takes turns."""
        return plan_turns(self.plan, str(self.plan_path)) if self.policy.needs.uses_turns else None

    @property
    def setup(self) -> RunSetup:
        """What reports need to know of it."""
        ranks = [
            RankSetup(
                r.rank,
                r.name,
                r.batch,
                None if self.departures else r.predicted_seconds,
                r.throttle is not None,
            )
            for r in self.ranks
        ]
        return RunSetup(
            store=self.store,
            host=socket.gethostname(),
            script=self.command[1],
            policy=self.policy.name,
            even=self.options.even,
            seed=self.options.seed,
            samples=self.options.samples,
            predicted_iteration_seconds=None if self.departures else self.plan.iteration_seconds,
            ranks=tuple(ranks),
            turns=self.turns,
        )

    def settings(self, rank: RankSpec) -> Settings:
        """What the worker of a rank knows about the run."""
        settings = Settings(
            store=self.store,
            rank=rank.rank,
            policy=self.policy,
            samples=self.options.samples,
            dataset_size=self.options.dataset_size,
            seed=self.options.seed,
            allow_nonfinite=self.options.allow_nonfinite,
            throttle=rank.throttle,
            run_dir=self.run_dir,
            journal=self.journal,
            launched=True,
        )
        return settings.with_plan(self.plan, self.plan_path).with_mode(self.modes[rank.rank])

    def environment(self, rank: RankSpec) -> dict[str, str]:
        """The environment of a rank's process: this process's, with the rank's settings."""
        local_rank = self.ranks.index(rank)  # numbered as torchrun does
        env = os.environ | self.settings(rank).to_env()
        env |= {"LOCAL_RANK": str(local_rank), "PYTHONUNBUFFERED": "1"}
        if rank.throttle is not None:
            env |= {"OMP_NUM_THREADS": "1"}
        return env


def prepare(plan: StrPath, script: StrPath, options: RunOptions) -> RunSpec:
    """Check everything, then make the run's folder with its plan.json. Raises InputError."""
    _check_range("samples", options.samples)
    _check_range("max_restarts", options.max_restarts)
    _check_range("snapshot_every", options.snapshot_every)
    _check_range("seed", options.seed, MAX_SEED)
    if not Path(script).is_file():
        raise InputError("script", "", f"no file at {script}", "a Python script that calls pyps.join()")
    store = _store_name(options.connect)
    planned, ranks = _load_ranks(os.fspath(plan), options)
    ranks_here = _ranks_to_start(ranks, options)
    wanted = _mode_options(options)
    policy = launched_policy(wanted, planned)
    if policy.needs.uses_turns:
        plan_turns(planned, os.fspath(plan))
    used = [worker for worker in planned.workers if worker.batch > 0]
    modes = [launched_mode(wanted, policy, planned, worker, os.fspath(plan)) for worker in used]
    by_rank = {worker.rank: mode for worker, mode in zip(used, modes, strict=True)}
    if options.journal and options.connect is not None:
        found = f"on, with a store at {options.connect}"
        raise InputError("journal", "", found, "off: the store's server takes the decisions")
    spec = RunSpec(
        plan=planned,
        policy=policy,
        options=options,
        ranks=tuple(ranks_here),
        modes=tuple(modes),
        departures=tuple(departures(planned, policy, by_rank)),
        store=store,
        run_dir=_make_run_folder(options.run_dir),
        command=(sys.executable, os.fspath(script), *options.args),
    )
    write_json(spec.plan_path, planned)
    write_json(spec.run_dir / SETUP_FILE, spec.setup)
    return spec


def _mode_options(options: RunOptions) -> ModeOptions:
    return ModeOptions(
        policy=options.policy,
        codec=options.codec,
        pipeline=options.pipeline,
        depth=options.depth,
        round_timeout=options.round_timeout,
    )


def _check_range(name: str, value: int, most: int = MAX_COUNT) -> None:
    if not 0 <= value <= most:
        raise InputError(name, "", str(value), f"0 to {most}")


def _store_name(connect: str | None) -> str:
    """The address, if it is one, or a name for a segment of this run alone."""
    if connect is None:
        return f"run-{os.getpid()}-{secrets.token_hex(6)}"
    parse_address(connect)
    return connect


def _load_ranks(where: str, options: RunOptions) -> tuple[Plan, list[RankSpec]]:
    """The plan as it is run, and all its ranks."""
    plan = read_plan(where)
    specs = throttles(plan, where, options.throttle_from)
    if options.even:
        plan = even_plan(plan, where, [spec.fit if spec else None for spec in specs])
    return plan, rank_specs(plan, specs)


def _ranks_to_start(all_ranks: list[RankSpec], options: RunOptions) -> list[RankSpec]:
    """Those of `options.ranks`, or all of them. Raises InputError."""
    ranks = options.ranks
    if ranks is None:
        return all_ranks
    if options.rebalance:
        expected = "all ranks on this machine: rebalancing needs their measurements"
        raise InputError("rebalance", "", "True with ranks", expected)
    known = {spec.rank for spec in all_ranks}
    if not ranks or set(ranks) - known or len(set(ranks)) != len(ranks):
        found, expected = ", ".join(map(str, ranks)), f"different ones of 0 to {len(all_ranks) - 1}"
        raise InputError("ranks", "", found or "none", expected)
    if options.connect is None and (missing := sorted(known - set(ranks))):
        found = f"{', '.join(map(str, ranks))}; nothing would start {', '.join(map(str, missing))}"
        raise InputError("ranks", "", found, "all ranks, or --connect with a store that the other ranks join")
    return [spec for spec in all_ranks if spec.rank in ranks]


def _make_run_folder(run_dir: StrPath | None) -> Path:
    """The run's folder as an absolute path, made where it is missing. Raises InputError if it holds a run."""
    default = f"pyps-runs/{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder = Path(run_dir if run_dir is not None else default).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError("run_dir", "", f"{folder}: {error.strerror}", "a folder to write to") from None
    if (folder / EVENTS).exists():
        raise InputError("run_dir", "", f"{folder}, which holds a run", "a folder without one")
    return folder
