"""`pyps run`: train by a plan with one process for each rank on this machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from pyps.checkpoint.folder import KEEP
from pyps.cli.progress import Screen
from pyps.errors import InputError
from pyps.formats import encode
from pyps.formats.setup import SETUP_FILE, read_setup
from pyps.metrics import SINKS
from pyps.report.ring import TurnsReport
from pyps.run import Report, RunOptions, run
from pyps.run.launcher import TrainingFailed
from pyps.run.resume import run_of
from pyps.run.spec import CHECKPOINT_EVERY, MAX_RESTARTS, options_from_json
from pyps.store.policies import Policy

app = typer.Typer(add_completion=False)
POLICY_HELP = f"Synchronization policy: {', '.join(Policy.known)}; parameters after a colon: ssp:bound=4."
CODEC_HELP = "Encoding of gradients; f32, bf16, f16, int8, int4, nf4; plan: the plan's bits, both ways."
AS_PLANNED = "Default: as planned."
RUN_DIR_HELP = "Folder of the run, by default pyps-runs/<time>-<pid>."
SCRIPT_HELP = "Python script that calls pyps.join()."
ARGS_HELP = "The script's arguments."
DEPTH_HELP = "Steps of a worker under way at once; 1: no pipeline."
PIPELINE_HELP = "Overlap push and pull with the next step's compute."
THROTTLE_HELP = "Emulate devices: by the plan's factors, or by the cost models of a cluster file."
ROUND_TIMEOUT_HELP = "Seconds that one worker may delay the others."
REBALANCE_HELP = "Move samples between workers that become slower or faster, on all hosts."
RANKS_HELP = "Start only these ranks here; ones that the plan does not have join its run."
PROFILE_HELP = "Profile of a rank that the plan does not have; without one it is measured."
CONNECT_HELP = "Address of a store served by `pyps serve`: tcp://host:port/name."
METRICS_HELP = f"Send figures while it trains: {', '.join(SINKS.values())}; may be repeated."
NONFINITE_HELP = "Go on when the loss is not finite."
MICRO_BATCH_HELP = "Most samples to compute at once; in between, saps:abort=true ends late steps."
CHECKPOINT_HELP = "Versions (500) or time (30s, 5m, 2h) between checkpoints; 0: only at the end."
KEEP_HELP = "Checkpoints to keep; 0: write none."
RESUME_HELP = "Go on from a run's newest checkpoint in its folder, or begin a new run with one checkpoint."
MOST_COLUMNS = 120  # of a table that no terminal limits
MIN_REPORTED_OVERRUN = 0.02  # of the compute time
SCRIPT_TAKES_THE_REST = {"allow_interspersed_args": False, "ignore_unknown_options": False}


@app.command("run", context_settings=SCRIPT_TAKES_THE_REST)
def run_command(
    ctx: typer.Context,
    script: Annotated[Path | None, typer.Argument(metavar="SCRIPT", help=SCRIPT_HELP)] = None,
    args: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help=ARGS_HELP)] = None,
    plan: Annotated[Path, typer.Option(help="Plan to train by (pyps.plan/1).")] = Path("plan.json"),
    policy: Annotated[str | None, typer.Option(help=f"{POLICY_HELP} {AS_PLANNED}")] = None,
    samples: Annotated[int | None, typer.Option(help="Samples to train; 0: until the script ends.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Epochs to train, instead of --samples.")] = None,
    dataset_size: Annotated[int | None, typer.Option(help="Samples in one epoch, with --epochs.")] = None,
    throttle_from: Annotated[str | None, typer.Option(metavar="plan|CLUSTER", help=THROTTLE_HELP)] = None,
    even: Annotated[bool, typer.Option("--even", help="Equal batches instead of the plan's.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the order of samples.")] = 0,
    codec: Annotated[str | None, typer.Option(help=f"{CODEC_HELP} {AS_PLANNED}")] = None,
    journal: Annotated[bool, typer.Option("--journal", help="Record each decision, to replay it.")] = False,
    pipeline: Annotated[
        bool | None, typer.Option("--pipeline/--no-pipeline", help=f"{PIPELINE_HELP} {AS_PLANNED}")
    ] = None,
    depth: Annotated[int | None, typer.Option(help=f"{DEPTH_HELP} {AS_PLANNED}")] = None,
    run_dir: Annotated[Path | None, typer.Option(help=RUN_DIR_HELP)] = None,
    round_timeout: Annotated[float | None, typer.Option(help=f"{ROUND_TIMEOUT_HELP} {AS_PLANNED}")] = None,
    max_restarts: Annotated[int, typer.Option(help="Restarts allowed per rank.")] = MAX_RESTARTS,
    checkpoint_every: Annotated[str, typer.Option(metavar="N|TIME", help=CHECKPOINT_HELP)] = CHECKPOINT_EVERY,
    keep_checkpoints: Annotated[int, typer.Option(help=KEEP_HELP)] = KEEP,
    resume: Annotated[Path | None, typer.Option(metavar="RUN|CHECKPOINT", help=RESUME_HELP)] = None,
    connect: Annotated[str | None, typer.Option(metavar="ADDRESS", help=CONNECT_HELP)] = None,
    ranks: Annotated[str | None, typer.Option(metavar="R,R...", help=RANKS_HELP)] = None,
    profile: Annotated[Path | None, typer.Option(help=PROFILE_HELP)] = None,
    rebalance: Annotated[bool, typer.Option("--rebalance", help=REBALANCE_HELP)] = False,
    allow_nonfinite: Annotated[bool, typer.Option("--allow-nonfinite", help=NONFINITE_HELP)] = False,
    micro_batch: Annotated[int | None, typer.Option(help=f"{MICRO_BATCH_HELP} {AS_PLANNED}")] = None,
    metrics: Annotated[list[str] | None, typer.Option(metavar="SINK", help=METRICS_HELP)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the report, as JSON.")] = False,
) -> None:
    """Train: start SCRIPT once for each rank of the plan, restart workers that die, and report.

    The run's folder then holds report.json, trace.json (for ui.perfetto.dev), model.safetensors,
    checkpoints, logs and step records. With --resume, what is not given is as it was in the resumed run.
    """
    if resume is not None and epochs is not None and dataset_size is None:
        dataset_size = _saved_options(resume).dataset_size or None
    wanted = _total_samples(samples, epochs, dataset_size, required=resume is None)
    options = RunOptions(
        samples=wanted,
        dataset_size=dataset_size or 0,
        policy=policy,
        round_timeout=round_timeout,
        args=args or (),
        seed=seed,
        codec=codec,
        pipeline=pipeline,
        depth=depth,
        journal=journal,
        run_dir=run_dir,
        throttle_from=throttle_from,
        even=even,
        max_restarts=max_restarts,
        checkpoint_every=checkpoint_every,
        keep_checkpoints=keep_checkpoints,
        resume=resume,
        connect=connect,
        ranks=None if ranks is None else _rank_list(ranks),
        profile=profile,
        rebalance=rebalance,
        allow_nonfinite=allow_nonfinite,
        micro_batch=micro_batch,
        metrics=metrics or (),
    )
    given = _given(ctx)
    if resume is not None:
        script, options = _resumed(resume, script, options, given)
    if script is None:
        raise InputError("SCRIPT", "", "nothing", "a Python script that calls pyps.join()")
    misplaced = _misplaced(ctx, options.args)
    with (
        Screen(quiet_stdout=as_json) as screen,
        _explain_failure(misplaced),
    ):
        if misplaced:
            screen.notice(f"after {script}, so for it and not for pyps run: {', '.join(misplaced)}")
        report = run(
            plan if resume is None or "plan" in given else None,
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


def _given(ctx: typer.Context) -> set[str]:
    """The parameters that stand on the command line."""
    sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
    given = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    return given | ({"samples"} if "epochs" in given else set())


def _saved_options(resume: Path) -> RunOptions:
    """Those of the run that is resumed; of a checkpoint outside a run, none."""
    run_dir = run_of(resume)
    if run_dir is None:
        return RunOptions(samples=0)
    return options_from_json(str(run_dir / SETUP_FILE), read_setup(run_dir).options)


def _resumed(
    resume: Path, script: Path | None, options: RunOptions, given: Set[str]
) -> tuple[Path | None, RunOptions]:
    """The script and the options of the run that is resumed, with those that were given in their place."""
    run_dir = run_of(resume)
    if run_dir is None:
        if "samples" not in given:
            expected = (
                f"a run's folder, which holds {SETUP_FILE}; for a checkpoint outside one give --samples, too"
            )
            raise InputError("--resume", "", str(resume), expected)
        return script, options
    saved = _saved_options(resume)
    names = {field.name for field in fields(options)} & given | {"run_dir", "resume"}
    names |= {"args"} if script is not None else set()
    changed = replace(saved, **{name: getattr(options, name) for name in names})
    return script or Path(read_setup(run_dir).script), changed


def _misplaced(ctx: typer.Context, args: Sequence[str]) -> list[str]:
    """The script's arguments that are options of `pyps run`."""
    own = {name for parameter in ctx.command.params for name in parameter.opts if name.startswith("--")}
    return [name for name in (arg.partition("=")[0] for arg in args) if name in own]


@contextmanager
def _explain_failure(misplaced: Sequence[str]) -> Iterator[None]:
    """Of a failure whose error names one of `misplaced`, say where the options of pyps run go."""
    try:
        yield
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


def _rank_list(text: str) -> list[int]:
    if not all(part.isascii() and part.isdigit() for part in text.split(",")):
        raise InputError("--ranks", "", repr(text), "ranks separated by commas, such as 0,2")
    return [int(part) for part in text.split(",")]


def show(report: Report) -> None:
    """The report as a table on stdout."""
    console = Console(highlight=False, markup=False)
    emulated = ", emulated devices" if report.emulated else ""
    batches = ", equal batches" if report.even else ""
    table = Table(title=f"{report.policy}{batches}{emulated}; median ms a step")
    phases = ["data", "compute", "push", "pull", "wait"]
    phases += ["overlapped"] if any(r.overlapped.mean for r in report.ranks) else []
    table.add_column("rank", overflow="fold")
    for heading in ("batch", "steps", "samples", *phases, "idle"):
        table.add_column(heading, justify="right", no_wrap=True)
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
        console.print(line, markup=False, soft_wrap=True)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if seconds < 1.0 else f"{seconds * 1e3:.0f}"


def summary(report: Report) -> Iterator[str]:
    """The lines below the table."""
    times = report.iteration_seconds
    if not times.count:
        yield from report.advice
        if report.global_batch and any(rank.steps for rank in report.ranks):
            yield "too short to time an iteration: this needs two global batches or more"
        yield from (f"rebalanced: {why}" for why in report.replans)
        return
    lower, upper = times.lower_quartile * 1e3, times.upper_quartile * 1e3
    line = f"iteration {times.median * 1e3:.1f} ms ({lower:.1f} to {upper:.1f})"
    if report.measured_over_predicted is not None and report.predicted_iteration_seconds is not None:
        predicted = f"{report.predicted_iteration_seconds * 1e3:.1f} ms"
        line += f", {report.measured_over_predicted:.2f} times the predicted {predicted}"
    yield line
    if report.turns is not None:
        yield _turns(report.turns)
    yield from (f"rebalanced: {why}" for why in report.replans)
    yield from report.advice
    yield from _overruns(report)
    yield from (f"resumed at version {version}" for version in report.resumed_at)
    if report.undone:
        yield f"{report.undone} pushes undone: a server's host was lost, with all since the last checkpoint"
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
