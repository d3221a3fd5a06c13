"""`pyps-plan`: who computes how much, why, what a change is worth, and what time costs."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from typer.core import TyperCommand, TyperGroup

from pyps.errors import Infeasible, InputError
from pyps.formats import Cluster, Plan, Profile, WorkerGroup, encode, read_cluster, read_profile, write_json
from pyps.profiler.select import select_fit
from pyps.solver.milp.constrained import Limit
from pyps.solver.plan import best_global_batch, even_split, make_plan, program_for
from pyps.solver.ranks import members_of, needs


class _FileOrCommand(TyperGroup):
    """A group whose first argument may be a file: `pyps-plan a.toml` is `pyps-plan plan a.toml`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in self.commands:
            args = ["plan", *args]
        rest: list[str] = super().parse_args(ctx, args)
        return rest


class _Plan(TyperCommand):
    """The command that is meant where none is named; its usage line shows the short form."""

    def get_usage(self, ctx: Any) -> str:
        return super().get_usage(ctx).replace(" plan ", " ", 1)


app = typer.Typer(
    cls=_FileOrCommand, add_completion=False, no_args_is_help=False, help="Plan the batches of a cluster."
)
File = Annotated[Path, typer.Argument(metavar="CLUSTER", show_default=False, help="Cluster file, TOML.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, alone, on stdout.")]


@app.command("plan", cls=_Plan)
def plan_command(
    cluster: File,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Plan to write, e.g. plan.json.", show_default=False)
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Solve it a second time with HiGHS, and say that both agree.")
    ] = False,
    global_batch: Annotated[
        str | None,
        typer.Option(metavar="N|auto", help="Instead of the file's; auto: the highest goodput."),
    ] = None,
    quantile: Annotated[
        float | None, typer.Option(metavar="Q", help="Plan for this quantile of the measured noise, as 0.95.")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say what binds, and what it is worth.")] = False,
    timeline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Picture of an iteration, PNG or SVG.")
    ] = None,
    ring: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Picture of R2SP's turns, PNG or SVG.")
    ] = None,
    curves: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="A picture of each profile with its batches.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Find the batch of every worker such that the slowest one is done as early as it can be, exactly.

    pyps-plan what-if CLUSTER says what workers more or fewer are worth, pyps-plan front what time costs.
    """
    from pyps.cli.plan_view import working

    read = read_cluster(cluster)
    for option, path in (("--output", output), ("--timeline", timeline), ("--ring", ring)):
        _not_an_input(option, path, cluster, read)
    profiles = fitted(read)
    read = _with_options(read, profiles, cluster, global_batch, quantile)
    with working("solving"):
        plan = _planned(cluster, read, profiles)
    notes = []
    if check:
        with working("checking with HiGHS"):
            notes.append(_checked(read, profiles, plan))
    if output is not None:
        write_json(output, plan)
    _draw(read, profiles, plan, timeline, ring)
    drawn = _draw_curves(read, profiles, plan, curves) if curves is not None else []
    notes += [f"wrote {path}" for path in (output, timeline, ring, *drawn) if path is not None]
    _print(read, profiles, plan, explain, as_json)
    for line in notes:
        typer.echo(line, err=as_json)


@app.command("what-if")
def what_if(
    cluster: File,
    add: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[*N]", help="Workers more: of a group, or of a profile file."),
    ] = None,
    drop: Annotated[
        list[str] | None, typer.Option(metavar="NAME[*N]", help="A group less, or N workers of it.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Gain or loss in time, price and utilisation if workers come or go."""
    from pyps.cli.plan_view import show_change
    from pyps.solver.report.whatif import changed, outcome_of, verdict

    read = read_cluster(cluster)
    names = {group.name for group in read.worker}
    more = dict(_counted("--add", text) for text in add or ())
    new = [
        _new_group(name, count) for name, count in more.items() if name not in names and os.path.isfile(name)
    ]
    known = {name: count or 1 for name, count in more.items() if name not in {g.profile for g in new}}
    other = changed(read, known, dict(_counted("--drop", text) for text in drop or ()), new)
    before = outcome_of(_planned(cluster, read, fitted(read)))
    after = outcome_of(_planned(cluster, other, fitted(other)))
    sentence = verdict(before, after)
    if as_json:
        sys.stdout.write(encode({"before": before, "after": after, "verdict": sentence}).decode())
    else:
        show_change(before, after, sentence)


@app.command("front")
def front(
    cluster: File,
    picture: Annotated[Path | None, typer.Option(metavar="FILE", help="Picture, PNG or SVG.")] = None,
    as_json: Json = False,
) -> None:
    """The choices of workers that no other beats in time and in price, the fastest first."""
    from pyps.cli.plan_view import show_front, working
    from pyps.solver.milp.pareto import pareto

    read = read_cluster(cluster)
    _not_an_input("--picture", picture, cluster, read)
    profiles = fitted(read)
    members = members_of(read, profiles)
    price = needs(members, "price_per_hour")
    if price is None:
        silent = next(k for k, group in enumerate(read.worker) if group.price_per_hour is None)
        raise InputError(
            str(cluster), f"worker[{silent}].price_per_hour", "nothing", "a price for each group"
        )
    with working("walking the front") as say:
        points = []
        for point in pareto(program_for(read, profiles), price):
            points.append(point)
            say(f"walking the front: {len(points)} points")
    if picture is not None:
        from pyps.solver.report.plots import draw_front

        draw_front(points, picture)
        typer.echo(f"wrote {picture}", err=True)
    if as_json:
        rows = [
            {
                "iteration_seconds": point.split.iteration_seconds,
                "price_per_hour": point.price_per_hour,
                "price_per_million_samples": point.price_per_million_samples,
                "batches": point.split.batches.tolist(),
            }
            for point in points
        ]
        sys.stdout.write(encode(rows).decode())
    else:
        show_front(points, [member.group.name for member in members])


def fitted(cluster: Cluster) -> list[Profile]:
    """One profile a group, with a fit: measured points are fitted here where the file brings none."""
    cache: dict[str, Profile] = {}
    for group in cluster.worker:
        if group.profile not in cache:
            cache[group.profile] = _fitted(group.profile)
    return [cache[group.profile] for group in cluster.worker]


def _fitted(path: str) -> Profile:
    profile = read_profile(path)
    if profile.fit is not None:
        return profile
    try:
        return msgspec.structs.replace(profile, fit=select_fit(profile.points))
    except InputError as error:
        raise InputError(path, "points", error.found, error.expected) from None


def _not_an_input(option: str, output: Path | None, cluster: Path, read: Cluster) -> None:
    """Refuse to write over the files that the plan is made from."""
    for path in (cluster, *(Path(group.profile) for group in read.worker)):
        if output is not None and output.exists() and os.path.samefile(output, path):
            raise InputError(option, "", f"{output}, which is an input", "another file")


def _with_options(
    read: Cluster, profiles: list[Profile], cluster: Path, global_batch: str | None, quantile: float | None
) -> Cluster:
    """The cluster with what the command line says instead."""
    job = read.job
    if quantile is not None:
        if not 0 < quantile < 1:
            raise InputError("--quantile", "", f"{quantile:g}", "a number between 0 and 1, as 0.95")
        job = msgspec.structs.replace(job, quantile=quantile)
    if global_batch == "auto":
        if read.goodput is None:
            raise InputError(str(cluster), "goodput", "nothing", "noise_scale and base_batch, for auto")
        job = msgspec.structs.replace(job, global_batch=best_global_batch(read, profiles))
    elif global_batch is not None:
        if not re.fullmatch(r"[1-9]\d{0,8}", global_batch):
            raise InputError("--global-batch", "", repr(global_batch), "a number of samples, or auto")
        job = msgspec.structs.replace(job, global_batch=int(global_batch))
    return msgspec.structs.replace(read, job=job)


def _planned(path: Path, cluster: Cluster, profiles: list[Profile]) -> Plan:
    try:
        return make_plan(cluster, profiles)
    except Infeasible as error:
        raise Infeasible(f"{path}: {error.reason}", error.nearest) from None


def _checked(cluster: Cluster, profiles: list[Profile], plan: Plan) -> str:
    from pyps.solver.milp.checks import agreement

    program, members = program_for(cluster, profiles), members_of(cluster, profiles)
    price = needs(members, "price_per_hour")
    if cluster.limits.price_per_million_samples is not None and price is not None and plan.cost:
        # Of all that cost no more an hour, the plan is the fastest.
        hourly = Limit("price_per_hour", price, plan.cost.price_per_hour or 0.0)
        program = replace(program, limits=(*program.limits, hourly))
    return agreement(program, [worker.batch for worker in plan.workers])


def _draw(
    cluster: Cluster, profiles: list[Profile], plan: Plan, timeline: Path | None, ring: Path | None
) -> None:
    if timeline is None and ring is None:
        return
    from pyps.solver.report.plots import draw_ring, draw_timeline

    if timeline is not None:
        draw_timeline(plan, even_split(program_for(cluster, profiles))[1], timeline)
    if ring is not None:
        draw_ring(plan, ring)


def _draw_curves(cluster: Cluster, profiles: list[Profile], plan: Plan, folder: Path) -> list[Path]:
    """A picture of every group's profile, with the batches that the plan gives its workers."""
    from pyps.profiler.plot import plot_profile

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError("--curves", "", error.strerror or str(error), "a folder to write to") from None
    names = iter(plan.workers)
    drawn = []
    for group, profile in zip(cluster.worker, profiles, strict=True):
        mine = [next(names).micro_batch for _ in range(group.count)]
        drawn.append(folder / f"{Path(group.name).name}.png")
        plot_profile(profile, drawn[-1], sorted({batch for batch in mine if batch}))
    return drawn


def _print(cluster: Cluster, profiles: list[Profile], plan: Plan, explain: bool, as_json: bool) -> None:
    from pyps.cli.plan_view import show_explanation, show_plan

    coupled = program_for(cluster, profiles)
    if as_json:
        sys.stdout.write(encode(plan).decode())
    else:
        show_plan(plan, even_split(coupled)[1])
    if explain:
        from pyps.solver.report.explain import explain as explained

        show_explanation(explained(plan, members_of(cluster, profiles), coupled), err=as_json)


def _counted(option: str, text: str) -> tuple[str, int | None]:
    """A name, or a name and how many: "p100*2"."""
    found = re.fullmatch(r"(.+?)(?:\*([1-9]\d{0,5}))?", text)
    if found is None:
        raise InputError(option, "", repr(text), "a name, or a name and a number as in p100*2")
    return found[1], int(found[2]) if found[2] else None


def _new_group(path: str, count: int | None) -> WorkerGroup:
    """Workers like the profile's that the cluster file does not have."""
    return WorkerGroup(name=Path(path).stem, profile=path, count=count or 1)
