"""`pyps-plan`: from a cluster file to the batch of every worker, with the even split beside it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pyps.errors import Infeasible, InputError
from pyps.formats import Cluster, Plan, Profile, encode, read_cluster, read_profile, write_json
from pyps.profiler.fit import fit_profile_points
from pyps.solver.members import coupled_of
from pyps.solver.plan import even_batches, even_split, make_plan

ROWS_AT_MOST = 64  # of a terminal's patience; the plan file has them all

app = typer.Typer(add_completion=False)


@app.command("plan")
def plan_command(
    cluster: Annotated[
        Path, typer.Argument(metavar="CLUSTER", show_default=False, help="Cluster file, TOML.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Plan to write, e.g. plan.json.", show_default=False)
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Solve it a second time with HiGHS, and say that both agree.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the plan as JSON, alone, on stdout.")
    ] = False,
) -> None:
    """Find the batch of every worker such that the slowest one is done as early as it can be, exactly."""
    read = read_cluster(cluster)
    _not_an_input(output, cluster, read)
    profiles = fitted(read)
    try:
        plan = make_plan(read, profiles)
    except Infeasible as error:
        raise Infeasible(f"{cluster}: {error.reason}", error.nearest) from None
    note = _checked(read, profiles, plan) if check else ""
    if output is not None:
        write_json(output, plan)
    if as_json:
        sys.stdout.write(encode(plan).decode())
        if note:
            typer.echo(note, err=True)
    else:
        _show(read, profiles, plan, note, output)


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
        return msgspec.structs.replace(profile, fit=fit_profile_points(profile.points))
    except InputError as error:
        raise InputError(path, "points", error.found, error.expected) from None


def _not_an_input(output: Path | None, cluster: Path, read: Cluster) -> None:
    """Refuse to write the plan over the files that it is made from."""
    for path in (cluster, *(Path(group.profile) for group in read.worker)):
        if output is not None and output.exists() and os.path.samefile(output, path):
            raise InputError("--output", "", f"{output}, which is an input", "another file")


def _checked(cluster: Cluster, profiles: list[Profile], plan: Plan) -> str:
    from pyps.solver.checks import agreement

    return agreement(coupled_of(cluster, profiles), [worker.batch for worker in plan.workers])


def _show(cluster: Cluster, profiles: list[Profile], plan: Plan, note: str, output: Path | None) -> None:
    console = Console()
    console.print(_table(cluster, profiles, plan))
    if len(plan.workers) > ROWS_AT_MOST:
        console.print(f"(and {len(plan.workers) - ROWS_AT_MOST} more; --json prints them all)")
    bound = plan.lower_bound_seconds
    console.print(f"iteration  {_ms(plan.iteration_seconds)} (no split can be below {_ms(bound)})")
    even = plan.even_split
    if even.seconds and plan.speedup_over_even:
        console.print(f"even split {_ms(even.seconds)}: the plan is {plan.speedup_over_even:.2f}x faster")
    else:
        console.print("even split not feasible: it breaks a minimum, a maximum or a quantum")
    for warning in plan.warnings:
        console.print(Text(f"warning: {warning}", style="yellow"), soft_wrap=True)
    for line in (note, f"wrote {output}" if output else ""):
        if line:
            console.print(Text(line), soft_wrap=True)


def _table(cluster: Cluster, profiles: list[Profile], plan: Plan) -> Table:
    table = Table(box=None, header_style="bold")
    table.add_column("rank", justify="right")
    table.add_column("worker")
    for title in ("even", "time", "planned", "time", "weight"):
        table.add_column(title, justify="right")
    _, even_seconds = even_split(coupled_of(cluster, profiles))
    even = even_batches(plan.global_batch, len(plan.workers))
    for worker in plan.workers[:ROWS_AT_MOST]:
        table.add_row(
            str(worker.rank),
            Text(worker.name),
            str(even[worker.rank]),
            _ms(even_seconds[worker.rank]),
            str(worker.batch) if worker.batch else "out",
            _ms(worker.predicted_seconds) if worker.batch else "-",
            f"{worker.weight:.4f}",
        )
    return table


def _ms(seconds: float) -> str:
    return "-" if seconds in (0.0, float("inf")) else f"{1000 * seconds:.2f} ms"
