"""`pyps run`: train by a plan with one process for each rank on this machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from pyps.checkpoint.folder import find_checkpoint, read_manifest
from pyps.cli.options import misplaced_options, rank_list, with_options
from pyps.cli.progress import Screen
from pyps.cli.terminal import figures, terminal
from pyps.errors import InputError
from pyps.formats import encode, read_plan
from pyps.formats.options import as_depth
from pyps.formats.setup import SETUP_FILE, read_setup
from pyps.metrics import SINKS
from pyps.report.report import absences
from pyps.report.ring import TurnsReport
from pyps.run import Report, RunOptions, run
from pyps.run.launcher import TrainingFailed
from pyps.run.options import options_from_json
from pyps.run.resume import check_policy_named, is_owned, run_of
from pyps.store.policies import Policy

app = typer.Typer(add_completion=False)
MOST_COLUMNS = 120  # of a table that no terminal limits
MIN_REPORTED_OVERRUN = 0.02  # of the compute time
SCRIPT_TAKES_THE_REST = {"allow_interspersed_args": False, "ignore_unknown_options": False}


@app.command("run", context_settings=SCRIPT_TAKES_THE_REST)
@with_options(RunOptions, without=["args"], choices={"policy": Policy.known, "metrics": SINKS.values()})
def run_command(
    ctx: typer.Context,
    script: Annotated[
        Path | None, typer.Argument(metavar="SCRIPT", help="Python script that calls pyps.join().")
    ] = None,
    args: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="The script's arguments.")
    ] = None,
    plan: Annotated[Path, typer.Option(help="Plan to train by (pyps.plan/1).")] = Path("plan.json"),
    epochs: Annotated[float | None, typer.Option(help="Epochs to train, instead of --samples.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the report, as JSON.")] = False,
    **given: Any,
) -> None:
    """Train: start SCRIPT once for each rank of the plan, restart workers that die, and report.

    The run's folder then holds report.json, trace.json (for ui.perfetto.dev), model.safetensors,
    checkpoints, logs and step records. With --resume, what is not given is as it was in the resumed run.
    """
    resume: Path | None = given["resume"]
    given_script = script
    with _explain_failure(misplaced_options(ctx, args or ())):
        options = _options(given, args, epochs)
    on_command_line = _given(ctx)
    planned = plan if resume is None or "plan" in on_command_line else None
    if resume is not None:
        script, options = _resumed(resume, script, options, on_command_line, planned)
    if script is None:
        raise InputError("SCRIPT", "", "nothing", "a Python script that calls pyps.join()")
    misplaced = misplaced_options(ctx, options.args)
    with (
        Screen(quiet_stdout=as_json) as screen,
        _explain_failure(misplaced),
    ):
        if given_script is None:
            screen.notice(f"starts {script}, as {run_of(resume or '')} says")
        if misplaced:
            screen.notice(f"after {script}, so for it and not for pyps run: {', '.join(misplaced)}")
        report = run(
            planned,
            script,
            options,
            on_line=screen.line,
            on_progress=screen.progress,
            on_notice=screen.notice,
        )
    if as_json:
        sys.stdout.write(encode(report).decode())
    else:
        show(report)


def _options(given: dict[str, Any], args: list[str] | None, epochs: float | None) -> RunOptions:
    """The options of the command line; of those that have more forms there, what they stand for."""
    resume, dataset_size = given["resume"], given["dataset_size"] or None
    if resume is not None and epochs is not None and dataset_size is None:
        dataset_size = _saved_options(resume).dataset_size or None
    more = {
        "samples": _total_samples(given["samples"], epochs, dataset_size, required=resume is None),
        "dataset_size": dataset_size or 0,
        "args": args or (),
        "ranks": None if given["ranks"] is None else rank_list(given["ranks"]),
        "metrics": given["metrics"] or (),
        "depth": as_depth(given["depth"], "--depth"),
    }
    return RunOptions(**given | more)


def _given(ctx: typer.Context) -> set[str]:
    """The parameters that stand on the command line."""
    sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
    given = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    return given | ({"samples"} if "epochs" in given else set())


def _saved_options(resume: Path) -> RunOptions:
    """Return those of the run that is resumed; of a checkpoint outside a run, none."""
    run_dir = run_of(resume)
    if run_dir is None:
        return RunOptions(samples=0)
    return options_from_json(str(run_dir / SETUP_FILE), read_setup(run_dir).options)


def _resumed(
    resume: Path, script: Path | None, options: RunOptions, given: Set[str], plan: Path | None
) -> tuple[Path | None, RunOptions]:
    """The script and the options of the run that is resumed, with those that were given in their place.

    plan: a given one; None: that of the run, or of the checkpoint.
    """
    run_dir = run_of(resume)
    if run_dir is None:
        if "samples" not in given:
            expected = (
                f"a run's folder, which holds {SETUP_FILE}; for a checkpoint outside one give --samples, too"
            )
            raise InputError("--resume", "", str(resume), expected)
        return script, _as_in_checkpoint(resume, options, given, plan)
    saved = _saved_options(resume)
    names = {field.name for field in fields(options)} & given | {"run_dir", "resume"}
    names |= {"args"} if script is not None else set()
    changed = replace(saved, **{name: getattr(options, name) for name in names})
    if "policy" not in given:
        check_policy_named(saved.policy, str(run_dir / SETUP_FILE))
    if script is None and not is_owned(run_dir):
        expected = (
            "a run that only you may write to (chmod go-w), or the script: pyps run --resume RUN SCRIPT"
        )
        raise InputError(str(run_dir), "", "a run that others own or may write to", expected)
    return script or Path(read_setup(run_dir).script), changed


def _as_in_checkpoint(resume: Path, options: RunOptions, given: Set[str], plan: Path | None) -> RunOptions:
    """The options with the checkpoint's order of samples, of which it has the position, and with its policy,
    which may not be that of its plan. A given plan that names a policy wins.
    """
    saved = read_manifest(find_checkpoint(resume))
    if saved.seed is not None and "seed" not in given:
        options = replace(options, seed=saved.seed)
    if saved.policy is None or "policy" in given or (plan is not None and read_plan(plan).run is not None):
        return options
    check_policy_named(saved.policy, str(resume))
    return replace(options, policy=saved.policy)


@contextmanager
def _explain_failure(misplaced: Sequence[str]) -> Iterator[None]:
    """Say of a missing option, and of a failure whose error names one of `misplaced`, where the
    options of pyps run go.
    """
    try:
        yield
    except InputError as error:
        after = [name for name in misplaced if name in f"{error.where} {error.expected}"]
        if not after or error.found != "nothing":
            raise
        found = f"nothing before the script, and {', '.join(after)} after it"
        raise InputError(error.where, error.field, found, f"{error.expected}, before the script") from error
    except TrainingFailed as failure:
        if any(name in failure.error for name in misplaced):
            raise TrainingFailed(f"{failure}; options of pyps run go before the script") from failure
        raise


def _turns(turns: TurnsReport) -> str:
    """Planned against actual turns, in a line."""
    order = ", ".join(map(str, turns.order))
    missed = f"{turns.out_of_order} of {turns.turns} passed over a rank that was away or late"
    gap = f"gap planned {turns.planned_gap_seconds * 1e3:.1f} ms"
    line = f"turns {order}: {'order kept' if turns.kept else missed}; {gap}"
    if turns.gap_seconds is None:
        return line
    deviation = f" ({turns.gap_deviation:+.1%})" if turns.gap_deviation is not None else ""
    return f"{line}, measured {turns.gap_seconds * 1e3:.1f} ms{deviation}"


def _overruns(report: Report) -> Iterator[str]:
    """A line for each rank whose emulation did not hold, because this machine was slower than the device."""
    for r in report.ranks:
        computed = r.compute.mean * r.compute.count
        if computed and r.overrun_seconds > MIN_REPORTED_OVERRUN * computed:
            yield (
                f"rank {r.rank} ({r.name}) took {r.overrun_seconds / computed:.0%} longer than the device "
                "that it emulates: this machine is too busy or too slow"
            )


def _total_samples(
    samples: int | None, epochs: float | None, dataset_size: int | None, *, required: bool
) -> int:
    """The samples to train, from --samples or from --epochs and --dataset-size; 0 if none are required."""
    if samples is not None:
        if epochs is not None or dataset_size is not None:
            raise InputError("--samples", "", "--epochs or --dataset-size as well", "only one of them")
        return samples
    if epochs is None and dataset_size is None:
        if not required:
            return 0
        expected = "--samples N, or --epochs E --dataset-size N"
        raise InputError("--samples", "", "nothing", expected)
    if dataset_size is None:
        raise InputError("--dataset-size", "", "nothing", "the samples of an epoch, as --epochs is given")
    if epochs is None:
        raise InputError("--epochs", "", "nothing", "the epochs to train, as --dataset-size is given")
    if not (0 < epochs <= 1e12 and 0 < dataset_size <= 1 << 40):
        raise InputError("--epochs", "", f"{epochs} of {dataset_size} samples", "positive numbers")
    return max(1, round(epochs * dataset_size))


def show(report: Report) -> None:
    """The report as a table on stdout."""
    console = terminal()
    emulated = ", emulated devices" if report.emulated else ""
    batches = ", equal batches" if report.even else ""
    phases = ["data", "compute", "push", "pull", "wait"]
    phases += ["overlapped"] if any(r.overlapped.mean for r in report.ranks) else []
    columns = Column("rank", overflow="fold"), *figures("batch", "steps", "samples", *phases, "idle")
    table = Table(*columns, title=f"{report.policy}{batches}{emulated}; median ms a step")
    for r in report.ranks:
        medians = (_milliseconds(getattr(r, phase).median) for phase in phases)
        table.add_row(
            f"{r.rank} {r.name}", str(r.batch), str(r.steps), str(r.samples), *medians, f"{r.idle_share:.1%}"
        )
    if not console.is_terminal:
        console.width = max(console.width, MOST_COLUMNS)
    elif console.measure(table).maximum > console.width - 1:
        table.padding = 0
    console.print(table)
    for line in summary(report):
        console.print(line, soft_wrap=True)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if seconds < 1.0 else f"{seconds * 1e3:.0f}"


def summary(report: Report) -> Iterator[str]:
    """The lines below the table."""
    yield from _summary(report)
    s = report.samples
    if report.outcome == "finished" and s.left:
        done = f"{s.trained + s.elsewhere:,} of {s.requested:,}"
        yield f"trained {done} samples: the script left its loop before the end"


def _summary(report: Report) -> Iterator[str]:
    times = report.iteration_seconds
    if not times.count:
        yield from report.advice
        if report.global_batch and any(rank.steps for rank in report.ranks):
            yield "too short to time an iteration: this needs two global batches or more"
        yield from absences(report)
        yield from (f"rebalanced: {why}" for why in report.replans)
        return
    lower, upper = times.lower_quartile * 1e3, times.upper_quartile * 1e3
    line = f"iteration {times.median * 1e3:.1f} ms ({lower:.1f} to {upper:.1f})"
    if report.measured_over_predicted is not None and report.predicted_iteration_seconds is not None:
        predicted = f"{report.predicted_iteration_seconds * 1e3:.1f} ms"
        line += f", {report.measured_over_predicted:.2f} times the predicted {predicted}"
    yield line
    yield from absences(report)
    if report.turns is not None:
        yield _turns(report.turns)
    yield from (f"rebalanced: {why}" for why in report.replans)
    yield from report.advice
    yield from _overruns(report)
    yield from (f"resumed at version {version}" for version in report.resumed_at)
    if report.undone:
        versions = f"{report.undone:,} version{'s' * (report.undone != 1)}"
        yield f"{versions} after a checkpoint undone, and trained again"
    s = report.samples
    seconds = f"{report.training_seconds:.1f} s of training, {report.wall_seconds:.1f} s in all"
    trained = (
        f"{s.trained} samples here, of {s.trained + s.elsewhere}" if s.elsewhere else f"{s.trained} samples"
    )
    yield f"{trained} in {report.versions} versions: {seconds}"
    if s.skipped or s.returned or s.dropped or report.restarts:
        restarts = f"{report.restarts} restart{'s' * (report.restarts != 1)}"
        returned = f"{s.returned} sample{'s' * (s.returned != 1)} returned"
        yield f"{restarts}; {returned}, {s.skipped} skipped, {s.dropped} dropped"
