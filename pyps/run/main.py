"""`run`: train by a plan with one process for each rank on this machine, and report.

Afterwards the run's folder holds plan.json (as it was run), run.json (what it was started with), run.jsonl
(events), worker-<rank>-<pid>.jsonl (step records of a process), worker-<rank>.log (what it printed),
report.json, trace.json, model.safetensors (the result), and checkpoints/ (pyps.checkpoint).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from pyps.errors import InputError, NotReady, SegmentNotFound, StoreError
from pyps.formats import write_json
from pyps.formats.events import EVENTS, EventLog
from pyps.formats.records import read_run
from pyps.metrics import Sink, open_sink
from pyps.remote.address import is_address, is_sharded
from pyps.report.progress import OnProgress, Watch
from pyps.report.report import REPORT, Report, RunOutcome, make_report
from pyps.report.steps import applied_steps
from pyps.report.trace import make_trace
from pyps.run.before import Before
from pyps.run.launcher import Launcher, OnLine, OnNotice, RunInterrupted, Start, TrainingFailed, start_here
from pyps.run.options import RunOptions, StrPath
from pyps.run.spec import RunSpec, prepare, write_setup
from pyps.store.activity import StoreActivity
from pyps.worker.run.settings import check_agreed

USED_UP = (
    "no step was trained here: the store's samples were used up before these ranks could join, at version "
    "{}; for a new run end its server first, or serve another name"
)


def run(
    plan: StrPath | None,
    script: StrPath,
    options: RunOptions,
    *,
    on_line: OnLine | None = None,
    on_progress: OnProgress | None = None,
    on_notice: OnNotice | None = None,
    sinks: Sequence[Sink] = (),
) -> Report:
    """Run `script` once for each rank of the plan until `options.samples` are trained; the report.

    plan: path of a pyps.plan/1 file; None: the resumed run's.
    script: path of a Python script that calls pyps.join().
    options: how to train; only `samples` has no default.
    on_line: called with (rank, line, is_stderr) for each line that a worker prints.
    on_progress: called a few times a second with how far the run is (pyps.report.live).
    on_notice: called with a sentence for each worker that is restarted, for each checkpoint that failed, and
        before the start if the plan was made for another mode.
    sinks: for readings while it trains (pyps.metrics), beyond those of `options.metrics`; the caller closes
        them.

    Raises InputError before anything starts, TrainingFailed and Interrupted afterwards, when the run's folder
    holds a report too.
    """
    spec = prepare(plan, script, options)
    return run_prepared(spec, on_line=on_line, on_progress=on_progress, on_notice=on_notice, sinks=sinks)


def run_prepared(
    spec: RunSpec,
    *,
    on_line: OnLine | None = None,
    on_progress: OnProgress | None = None,
    on_notice: OnNotice | None = None,
    sinks: Sequence[Sink] = (),
    start: Start = start_here,
) -> Report:
    """Do as `run` does, for a run that is prepared. start: starts the process of a rank."""
    options, begins_anew = spec.options, not _may_exist(spec)
    if spec.departures and on_notice is not None:
        on_notice(
            f"{spec.plan_path}: its predictions do not hold for this run ({'; '.join(spec.departures)})"
        )
    if spec.differences and on_notice is not None:
        source = options.throttle_from
        on_notice(f"{spec.plan_path} is not the plan of {source}: {'; '.join(spec.differences)}")
    with ExitStack() as stack:
        folder = str(spec.run_dir / "tensorboard")
        own = [stack.enter_context(open_sink(text, folder)) for text in options.metrics]
        log = stack.enter_context(EventLog(spec.run_dir / EVENTS))
        before = stack.enter_context(Before(spec.run_dir)) if spec.resumed.run_dir is not None else None
        undone = write_setup(spec) - spec.resumed.version
        log.read_again()
        if before is not None:
            before.begin()
        if begins_anew and on_notice is not None and (notice := _where_it_goes_on(spec, undone)):
            on_notice(notice)
        if options.resume is not None:
            counted = begins_anew and undone > 0 and not is_sharded(spec.store)  # shards count theirs
            detail, pushes = str(spec.resumed.path or ""), undone if counted else None
            log.write("resumed", version=spec.resumed_version, detail=detail, pushes=pushes)
        watch = Watch(spec.setup, spec.run_dir, log.events, on_progress, [*own, *sinks])
        stack.callback(watch.finish)

        def tick(state: StoreActivity | None) -> None:
            watch.tick(state)
            if before is not None:
                before.look()

        return launch(Launcher(spec, log, on_line, tick, on_notice, start))


def _where_it_goes_on(spec: RunSpec, undone: int) -> str:
    """Return what a resumed run repeats; empty: nothing, or it is no resumed run."""
    if spec.options.resume is None:
        return ""
    if spec.resumed.path is None:
        return f"{spec.run_dir} has no checkpoint yet: the run begins again with its first sample"
    if undone <= 0:
        return ""
    versions = "version after it is" if undone == 1 else "versions after it are"
    again = f"{undone:,} {versions} undone, and their samples trained again"
    return f"goes on from the checkpoint of version {spec.resumed.version:,}: {again}"


def _may_exist(spec: RunSpec) -> bool:
    """Return whether the run's store may live on elsewhere. Raises InputError, before anything is written,
    if it is another run's.
    """
    if not is_address(spec.store):
        return False
    try:
        with spec.open_store() as store:
            check_agreed(store, spec.settings(spec.ranks[0]))
    except (SegmentNotFound, NotReady):
        return False
    except StoreError:
        pass  # the workers will say what it is
    return True


def launch(launcher: Launcher) -> Report:
    """Launch the ranks, and write the report and the trace however the run ends."""
    spec, log = launcher.spec, launcher.log
    outcome: RunOutcome = "failed"
    error = ""
    ended: BaseException | None = None
    try:
        with launcher:
            launcher.run()
        outcome = "finished"
    except RunInterrupted as stop:
        outcome, error, ended = "interrupted", str(stop), stop
        raise
    except BaseException as failure:
        error, ended = str(failure) or type(failure).__name__, failure
        raise
    finally:
        records = read_run(spec.run_dir)
        shared = is_address(
            spec.store
        )  # a store of this run's own is new, and a script need not keep records
        if outcome == "finished" and shared and launcher.totals.versions and not applied_steps(records):
            outcome, error = "failed", USED_UP.format(launcher.totals.versions)
        log.write("ended", detail=outcome)
        report = make_report(spec.setup, records, log.events, launcher.totals, outcome, error)
        try:
            write_json(spec.run_dir / "trace.json", make_trace(spec.setup.ranks, records, log.events))
            write_json(spec.run_dir / REPORT, report)  # last: with it, all is there
        except InputError as full:
            if ended is None:
                raise TrainingFailed(f"trained to the end, but its report is not written: {full}") from None
            ended.add_note(f"no report written: {full}")
    if outcome == "failed":
        raise TrainingFailed(error)
    return report
