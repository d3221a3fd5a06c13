"""`pyps-plan`: plans the batches of a cluster, explains a plan, and compares plans in time and price."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from pyps.cli.options import DefaultCommand, DefaultGroup, with_options
from pyps.cli.outputs import (
    PLAN_PICTURES,
    check_folder,
    check_outputs,
    inputs_of,
)
from pyps.cli.plan_mode import names_file, pace_of, with_mode
from pyps.cli.terminal import say
from pyps.errors import InputError
from pyps.formats import (
    Cluster,
    Job,
    Profile,
    RunTable,
    WorkerGroup,
    check_cluster,
    encode,
    read_cluster,
    write_json,
)
from pyps.formats.files import typed
from pyps.formats.options import AUTO
from pyps.profiler.curve import fitted_profile
from pyps.solver.planner import Planner

app = typer.Typer(
    cls=DefaultGroup, add_completion=False, no_args_is_help=False, help="Plan the batches of a cluster."
)
ClusterFile = Annotated[
    Path, typer.Argument(metavar="CLUSTER", show_default=False, help="The cluster file, in TOML.")
]
JsonOnly = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else.")]


PlanOutput = Annotated[
    Path | None, typer.Option("--output", "-o", help="Plan to write, as plan.json.", show_default=False)
]
Checked = Annotated[bool, typer.Option("--check", help="Solve again with HiGHS and confirm the optimum.")]
GlobalBatchText = Annotated[
    str | None,
    typer.Option(
        metavar="N|auto", help="Global batch instead of the file's; auto: the one of highest goodput."
    ),
]
PlannedQuantile = Annotated[
    float | None,
    typer.Option(metavar="Q", help="Plan for this quantile of the time of an iteration, as 0.95."),
]
TargetSamples = Annotated[
    float | None,
    typer.Option(metavar="N", help="Say how long N samples (or tokens) take, and their price."),
]
DeadlineHours = Annotated[
    float | None,
    typer.Option(metavar="HOURS", help="Use the cheapest workers that train the target by then."),
]
BudgetPrice = Annotated[
    float | None,
    typer.Option(metavar="PRICE", help="Use the workers that train the target soonest at that price."),
]
Confidence = Annotated[
    float | None,
    typer.Option(metavar="P", help="Keep the deadline with this probability, as 0.95, despite preemptions."),
]
Explained = Annotated[
    bool,
    typer.Option(
        "--explain",
        help="Explain which workers and bounds determine the time. share: how much of it, from 0 to 1; "
        "saved by room: what a bound that is looser by one sample saves.",
    ),
]
TimelineFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Draw an iteration to FILE, PNG or SVG.")
]
RingFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Draw R2SP's turns to FILE, PNG or SVG.")]
CurvesFolder = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Draw each profile and its planned batches into FOLDER."),
]


@app.command("plan", cls=DefaultCommand)
@with_options(RunTable, unset="")
def plan_command(
    cluster: ClusterFile,
    output: PlanOutput = None,
    check: Checked = False,
    global_batch: GlobalBatchText = None,
    quantile: PlannedQuantile = None,
    target: TargetSamples = None,
    deadline: DeadlineHours = None,
    budget: BudgetPrice = None,
    confidence: Confidence = None,
    explain: Explained = False,
    timeline: TimelineFile = None,
    ring: RingFile = None,
    curves: CurvesFolder = None,
    as_json: JsonOnly = False,
    **given: Any,
) -> None:
    """Find the batches with which the slowest worker finishes as early as possible. The optimum is exact.

    The plan is for the mode of running that the file's run table states, or the options --policy to
    --round-timeout; it names the mode, and `pyps run` takes it from there.

    pyps-plan what-if CLUSTER compares plans with more or fewer workers, pyps-plan pareto CLUSTER time and
    price.
    """
    from pyps.cli.plan_view import working

    read = read_cluster(cluster)
    drawn = [_curve(curves, group.name) for group in read.worker if curves is not None]
    check_folder("--curves", curves)
    check_outputs(
        {"--output": [output], "--timeline": [timeline], "--ring": [ring], "--curves": drawn},
        inputs_of(cluster, read),
        {"--timeline": PLAN_PICTURES, "--ring": PLAN_PICTURES},
    )
    read = with_mode(cluster, read, given)
    profiles = fitted_profiles(read)
    with names_file(cluster):
        job = {"quantile": quantile, "target": target, "budget": budget, "confidence": confidence}
        read = _with_job(cluster, read, profiles, global_batch, job | {"deadline_hours": deadline})
    planner, notes = Planner(read, profiles, pace_of(cluster, read)), []
    with working("solving"), names_file(cluster):
        plan = planner.plan()
    if check:
        with working("checking with HiGHS"):
            notes.append(planner.check())
    if output is not None:
        write_json(output, plan)
    _draw(planner, timeline, ring)
    if curves is not None:
        _draw_curves(planner, curves)
    notes += [f"wrote {path}" for path in (output, timeline, ring, *drawn) if path is not None]
    _print(planner, explain, as_json)
    for line in notes:
        say(line, stderr=as_json)


def print_plan(path: Path) -> None:
    """Print the plan of a cluster file as `pyps-plan FILE` does."""
    read = read_cluster(path)
    with names_file(path):
        planner = Planner(read, fitted_profiles(read), pace_of(path, read))
        _print(planner, explain=False, as_json=False)


@app.command("what-if")
def what_if(
    cluster: ClusterFile,
    add: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[*N]", help="Workers to add: of a group, or of a profile file."),
    ] = None,
    drop: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[*N]", help="Workers to remove: N of a group, or the whole group."),
    ] = None,
    values: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Another value: job.global_batch=512, v100.price_per_hour=1.9."
        ),
    ] = None,
    as_json: JsonOnly = False,
) -> None:
    """Compare time, price and utilisation before and after a change: of the workers, or of any key."""
    from pyps.cli.plan_view import show_change
    from pyps.solver.jobs.whatif import changed, with_values

    read = read_cluster(cluster)
    names = {group.name for group in read.worker}
    more = {name: sum(n or 1 for n in counts) for name, counts in _counted("--add", add).items()}
    fewer = {n: None if None in c else sum(filter(None, c)) for n, c in _counted("--drop", drop).items()}
    new = [
        _new_group(name, count) for name, count in more.items() if name not in names and os.path.isfile(name)
    ]
    known = {name: count for name, count in more.items() if name not in {g.profile for g in new}}
    other = changed(read, known, fewer, new)
    other = with_values(other, dict(_key_and_value(text) for text in values or ()))
    with names_file(cluster):
        now, then = (Planner(c, fitted_profiles(c), pace_of(cluster, c)) for c in (read, other))
        change = now.what_if(then)
    if as_json:
        sys.stdout.write(encode(change).decode())
    else:
        show_change(change.before, change.after, change.verdict, read.job.unit)


@app.command("measure-next")
def measure_next(cluster: ClusterFile, as_json: JsonOnly = False) -> None:
    """Name the batch sizes to measure next: those whose uncertainty may move the plan.

    Measure them with pyps-profile --batches, add them with pyps-profile merge, and ask again, until no split
    can win more than 1 %.
    """
    from pyps.cli.plan_view import show_next

    read = read_cluster(cluster)
    with names_file(cluster):
        found = Planner(read, fitted_profiles(read), pace_of(cluster, read)).next_sizes()
    if as_json:
        sys.stdout.write(encode(found).decode())
    else:
        show_next(found)


@app.command("which")
def which(
    cluster: ClusterFile,
    losses: Annotated[
        list[str] | None,
        typer.Option(
            "--loss", metavar="NAME=LOSS", help="What a way of the pilot reached; nan: it diverged."
        ),
    ] = None,
    as_json: JsonOnly = False,
) -> None:
    """Rank the ways to train: DDP on fewer devices, planned DDP or FSDP2, and the store under its policies.

    The pace is simulated. The samples that a way needs are a range; where ranges meet, a pilot tells: train
    the ways that it names, with their samples, and give what each has reached with --loss.
    """
    from pyps.cli.plan_view import working
    from pyps.cli.plan_which import answer

    read = read_cluster(cluster)
    with working("simulating"), names_file(cluster):
        answer(read, fitted_profiles(read), losses, as_json)


@app.command("pareto")
def pareto(
    cluster: ClusterFile,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the front to FILE, PNG or SVG.")
    ] = None,
    batches: Annotated[
        bool, typer.Option("--batches", help="Choose the global batch, too: of useful samples, by [goodput].")
    ] = False,
    as_json: JsonOnly = False,
) -> None:
    """List the Pareto front of time and price: the choices of workers that no other beats in both."""
    from pyps.cli.plan_view import show_batches, show_pareto, working

    read = read_cluster(cluster)
    check_outputs({"--picture": [picture]}, inputs_of(cluster, read), {"--picture": PLAN_PICTURES})
    if batches and picture is not None:
        raise InputError("--picture", "", "with --batches", "one of the two: it is of one global batch")
    if batches and read.run.local_steps is not None:
        raise InputError("--batches", "", "with local steps", "a cluster without run.local_steps")
    with names_file(cluster):
        planner = Planner(read, fitted_profiles(read), pace_of(cluster, read))
    with working("computing the front") as progress, names_file(cluster):
        front = planner.front_over_batches(progress) if batches else []
        points = [one.point for one in front] if batches else planner.front(progress)
    if picture is not None:
        from pyps.solver.report.plots import draw_pareto

        draw_pareto(points, picture)
        say(f"wrote {picture}", stderr=True)
    if as_json:
        rows = [planner.row_of(point) for point in points]
        for row, one in zip(rows, front, strict=False):
            row["global_batch"] = one.global_batch
            row["seconds_per_million_useful"] = one.seconds_per_million
            row["price_per_million_useful"] = one.price_per_million
        sys.stdout.write(encode(rows).decode())
    elif batches:
        show_batches(front, planner.names(), read.job.unit)
    else:
        show_pareto(points, planner.names(), read.job.unit)


def fitted_profiles(cluster: Cluster) -> list[Profile]:
    """The profile of each group, with a fit; a profile without one is fitted here."""
    read = {path: fitted_profile(path) for path in dict.fromkeys(group.profile for group in cluster.worker)}
    return [read[group.profile] for group in cluster.worker]


def _with_job(
    path: Path, read: Cluster, profiles: list[Profile], global_batch: str | None, given: dict[str, Any]
) -> Cluster:
    """The cluster with the given values of its job: `given` by key, None where an option is not given.

    path, profiles: the cluster's. global_batch: as the option says it.
    """
    if global_batch not in (None, AUTO):
        if not re.fullmatch(r"[1-9]\d{0,8}", str(global_batch)):
            raise InputError("--global-batch", "", repr(global_batch), "a number of samples, or auto")
        given["global_batch"] = int(str(global_batch))
    plain = msgspec.to_builtins(read.job) | {key: one for key, one in given.items() if one is not None}
    try:
        job = typed("", plain, Job, lambda *_: None)
    except InputError as error:
        option = f"--{error.field.removesuffix('_hours').replace('_', '-')}"
        raise InputError(option, "", error.found, error.expected) from None
    read = msgspec.structs.replace(read, job=job)
    check_cluster(str(path), read)
    if global_batch != AUTO:
        return read
    if read.run.local_steps is not None:
        raise InputError("--global-batch", "", "auto, with local steps", "a number of samples")
    if read.goodput is None:
        expected = "noise, a file of a run; or noise_scale and base_batch"
        raise InputError(str(path), "goodput", "nothing", expected)
    found = Planner(read, profiles, pace_of(path, read)).best_global_batch()
    return msgspec.structs.replace(read, job=msgspec.structs.replace(job, global_batch=found))


def _draw(planner: Planner, timeline: Path | None, ring: Path | None) -> None:
    """Draw the pictures that have a file to go to."""
    if timeline is None and ring is None:
        return
    from pyps.solver.report.plots import draw_ring, draw_timeline

    if timeline is not None:
        draw_timeline(planner.plan(), planner.even_seconds(), timeline)
    if ring is not None:
        draw_ring(planner.plan(), ring)


def _draw_curves(planner: Planner, folder: Path) -> None:
    """A picture of every group's profile, with the batches that the plan gives its workers."""
    from pyps.profiler.plot import plot_profile

    ranks, plan = planner.planned.ranks, planner.plan()
    workers, batches = iter(plan.workers), dict[str, set[int]]()
    for rank in ranks:
        mine = [next(workers).micro_batch for _ in range(rank.group.ranks_each)]
        batches.setdefault(rank.group.name, set()).update(batch for batch in mine if batch)
    for group, profile in {r.group.name: (r.one or (r.group, r.profile)) for r in ranks}.values():
        plot_profile(profile, _curve(folder, group.name), sorted(batches[group.name]))


def _curve(folder: Path, group: str) -> Path:
    """The picture of a group's profile."""
    return folder / f"{Path(group).name}.png"


def _print(planner: Planner, explain: bool, as_json: bool) -> None:
    """Print the plan on stdout; with JSON there, the explanation goes to stderr."""
    from pyps.cli.plan_view import show_explanation, show_plan

    if as_json:
        sys.stdout.write(encode(planner.plan()).decode())
    else:
        show_plan(planner.plan(), planner.even_seconds())
    if explain:
        show_explanation(planner.explain(), err=as_json)


def _counted(option: str, texts: Sequence[str] | None) -> dict[str, list[int | None]]:
    """By name, the numbers in texts such as "p100*2"; None in "p100"."""
    counts = dict[str, list[int | None]]()
    for text in texts or ():
        found = re.fullmatch(r"(.+?)(?:\*([1-9]\d{0,5}))?", text)
        if found is None:
            raise InputError(option, "", repr(text), "a name, or a name and a number as in p100*2")
        counts.setdefault(found[1], []).append(int(found[2]) if found[2] else None)
    return counts


def _key_and_value(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals and value):
        raise InputError("--set", "", repr(text), "KEY=VALUE, as job.global_batch=512")
    return key, value


def _new_group(path: str, count: int) -> WorkerGroup:
    """A group of workers with a profile that the cluster file does not name."""
    return WorkerGroup(name=Path(path).stem, profile=path, count=count)
