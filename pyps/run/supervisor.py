"""`run`: train by a plan with real processes on this machine, and say what came of it.

    report = pyps.run.supervisor.run("plan.json", "train.py", policy="bsp", samples=100_000)

The run's folder holds everything about it afterwards: plan.json (as it was run), run.jsonl (events), a
worker-<rank>-<pid>.jsonl of step records for each process, worker-<rank>.log of what it printed, report.json,
trace.json, parameters.npz (the result), and snapshots/ if asked for.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pyps.errors import InputError
from pyps.formats import Plan, read_plan, write_json
from pyps.formats.records import read_run
from pyps.native.values import Codec
from pyps.remote.address import parse_address
from pyps.run.events import EventLog
from pyps.run.launcher import Crew, Interrupted, Job, OnLine, OnTick
from pyps.run.ranks import Place, even_plan, line_up, throttles
from pyps.run.rebalance import Balancer
from pyps.run.report import Outcome, Report, make_report
from pyps.run.trace import make_trace
from pyps.store.codec import as_codec
from pyps.store.policies import Policy, check_pipeline, policy_named
from pyps.worker.sampling import MAX_SEED
from pyps.worker.settings import FROM_PLAN, plan_codecs

MAX_RESTARTS = 3
MAX_COUNT = 2**63 - 1
EVENTS = "run.jsonl"


def run(
    plan: str | os.PathLike[str],
    script: str | os.PathLike[str],
    policy: Policy | str = "bsp",
    *,
    samples: int,
    args: Sequence[str] = (),
    seed: int = 0,
    codec: Codec | str = Codec.F32,
    pipeline: bool = False,
    journal: bool = False,
    run_dir: str | os.PathLike[str] | None = None,
    throttle_from: str | os.PathLike[str] | None = None,
    even: bool = False,
    max_restarts: int = MAX_RESTARTS,
    snapshot_every: int = 0,
    connect: str | None = None,
    ranks: Sequence[int] | None = None,
    rebalance: bool = False,
    on_line: OnLine | None = None,
    on_tick: OnTick | None = None,
) -> Report:
    """Run `script` once for each rank of the plan until `samples` positions are trained; the report.

    samples: sample positions in all; 0: until the script ends by itself. run_dir: a folder without a run in
    it; None: pyps-runs/<time>-<pid>. codec: how gradients travel, with error feedback; "plan": gradients and
    parameters with the plan's bits. pipeline: transfers run beside the next step. journal: every decision
    goes to run_dir/journal, for pyps.simulate.replay. throttle_from: "plan" or a cluster file, to emulate its
    devices (see pyps.run.ranks). even: equal batches instead of the plan's, for
    comparison. max_restarts: of each rank, after it has joined; a worker that dies before ends the run.
    snapshot_every: versions between snapshots, 0: none. connect: the address of a store that is served
    elsewhere (see pyps.remote); None: on this machine. ranks: those to start here, of the plan's workers with
    a batch; None: all. rebalance: plan anew while it trains (pyps.run.rebalance). on_line, on_tick: called
    with each line that a worker prints, and about 20 times a second.

    Raises InputError for what is wrong before anything starts, TrainingFailed, Interrupted; after those two
    the folder has its report too.
    """
    _check(samples=samples, max_restarts=max_restarts, snapshot_every=snapshot_every)
    _check(MAX_SEED, seed=seed)
    rules = policy_named(policy) if isinstance(policy, str) else policy
    if not Path(script).is_file():
        raise InputError("run", "script", f"no file at {script}", "a Python script that calls pyps.join()")
    store = _store_name(connect)
    chosen, places = _planned(os.fspath(plan), throttle_from, even)
    places = _some(places, ranks, rebalance)
    if pipeline:
        check_pipeline(rules)
    if journal and connect is not None:
        raise InputError("run", "journal", f"on, with a store at {connect}", "off: its server decides")
    how = _codec(codec, chosen, os.fspath(plan))
    folder = _new_folder(run_dir)
    write_json(folder / "plan.json", chosen)
    job = Job(
        store=store,
        command=(sys.executable, os.fspath(script), *args),
        places=tuple(places),
        plan_path=folder / "plan.json",
        policy=rules,
        samples=samples,
        seed=seed,
        codec=how,
        pipeline=pipeline,
        journal=folder.absolute() / "journal" if journal else None,
        run_dir=folder,
        max_restarts=max_restarts,
        snapshot_every=snapshot_every,
        balancer=Balancer(chosen, folder) if rebalance else None,
    )
    return _supervise(job, chosen, even, on_line, on_tick)


def _check(most: int = MAX_COUNT, /, **values: int) -> None:
    for name, value in values.items():
        if not 0 <= value <= most:
            raise InputError("run", name, str(value), f"0 to {most}")


def _codec(codec: Codec | str, plan: Plan, where: str) -> Codec | None:
    """The codec of every rank; None: the plan's, which it has to name for each."""
    if codec != FROM_PLAN:
        return as_codec(codec)
    for worker in plan.workers:
        if worker.batch:
            plan_codecs(plan, worker, where)
    return None


def _store_name(connect: str | None) -> str:
    """The address, if it is one, or a name for a segment of this run's own."""
    if connect is None:
        return f"run-{os.getpid()}-{secrets.token_hex(6)}"
    parse_address(connect)
    return connect


def _planned(
    where: str, throttle_from: str | os.PathLike[str] | None, even: bool
) -> tuple[Plan, list[Place]]:
    """The plan to run by, and its ranks."""
    plan = read_plan(where)
    specs = throttles(plan, where, throttle_from)
    if even:
        plan = even_plan(plan, where, [spec.fit if spec else None for spec in specs])
    return plan, line_up(plan, specs)


def _some(places: list[Place], ranks: Sequence[int] | None, rebalance: bool) -> list[Place]:
    """The places of these ranks, None: of all. Raises InputError."""
    if ranks is None:
        return places
    if rebalance:
        raise InputError("run", "rebalance", "True with ranks", "all ranks here: it needs their measurements")
    known = {place.rank for place in places}
    if not ranks or set(ranks) - known or len(set(ranks)) != len(ranks):
        found, expected = ", ".join(map(str, ranks)), f"different ones of 0 to {len(places) - 1}"
        raise InputError("run", "ranks", found or "none", expected)
    return [place for place in places if place.rank in ranks]


def _new_folder(run_dir: str | os.PathLike[str] | None) -> Path:
    """The run's folder, made if need be, as an absolute path. Raises InputError if it holds a run already."""
    named = f"pyps-runs/{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder = Path(run_dir if run_dir is not None else named).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError("run", "run_dir", f"{folder}: {error.strerror}", "a folder to write to") from None
    if (folder / EVENTS).exists():
        raise InputError("run", "run_dir", f"{folder}, which holds a run", "a folder without one")
    return folder


def _supervise(job: Job, plan: Plan, even: bool, on_line: OnLine | None, on_tick: OnTick | None) -> Report:
    """Let the crew work, and write down how it went, however it went."""
    outcome: Outcome = "failed"
    error = ""
    with EventLog(job.run_dir / EVENTS) as log:
        crew = Crew(job, log, on_line, on_tick)
        try:
            with crew:
                crew.work()
            outcome = "finished"
        except Interrupted as stop:
            outcome, error = "interrupted", str(stop)
            raise
        except BaseException as failure:
            error = str(failure) or type(failure).__name__
            raise
        finally:
            log.write("ended", detail=outcome)
            records = read_run(job.run_dir)
            report = make_report(
                job.places, records, log.events, crew.totals,
                outcome=outcome, policy=job.policy.name, even=even, seed=job.seed,
                global_batch=sum(place.batch for place in job.places), samples=job.samples,
                predicted_seconds=plan.iteration_seconds, error=error,
            )  # fmt: skip
            write_json(job.run_dir / "report.json", report)
            write_json(job.run_dir / "trace.json", make_trace(job.places, records, log.events))
    return report
