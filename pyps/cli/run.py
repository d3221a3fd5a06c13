"""`pyps run`: train by a plan with one process a worker on this machine."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from pyps.errors import InputError
from pyps.formats import encode
from pyps.native.values import Status
from pyps.run.launcher import TrainingFailed
from pyps.run.report import Report
from pyps.run.supervisor import MAX_RESTARTS, run
from pyps.store.policies import Policy, policy_named

app = typer.Typer(add_completion=False)
POLICY_HELP = f"{', '.join(Policy.known)}; numbers after a colon: ssp:bound=4."
OVERRUN_WORTH_SAYING = 0.02  # of the time that was computed
SCRIPT_TAKES_THE_REST = {"allow_interspersed_args": False, "ignore_unknown_options": False}


@app.command("run", context_settings=SCRIPT_TAKES_THE_REST)
def run_command(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="Python script that calls pyps.join().")],
    args: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="The script's own.")] = None,
    plan: Annotated[Path, typer.Option(help="The plan to train by (pyps.plan/1).")] = Path("plan.json"),
    policy: Annotated[str, typer.Option(help=POLICY_HELP)] = "bsp",
    samples: Annotated[
        int | None, typer.Option(help="Samples to train in all; 0: as the script says.")
    ] = None,
    epochs: Annotated[float | None, typer.Option(help="Instead of --samples, with --dataset-size.")] = None,
    dataset_size: Annotated[int | None, typer.Option(help="Samples in one epoch.")] = None,
    throttle_from: Annotated[
        str | None,
        typer.Option(
            metavar="plan|CLUSTER",
            help="Emulate devices: by the plan's factors, or a cluster file's cost models.",
        ),
    ] = None,
    even: Annotated[bool, typer.Option("--even", help="Equal batches instead of the plan's.")] = False,
    seed: Annotated[int, typer.Option(help="Of the order of samples.")] = 0,
    codec: Annotated[
        str,
        typer.Option(help="How gradients travel: f32, bf16, f16, int8, int4, nf4; plan: its bits, each way."),
    ] = "f32",
    journal: Annotated[
        bool, typer.Option("--journal", help="Keep every decision, for pyps.simulate.replay.")
    ] = False,
    pipeline: Annotated[
        bool, typer.Option("--pipeline", help="Transfers run beside the next step, not between two.")
    ] = False,
    run_dir: Annotated[Path | None, typer.Option(help="Default: pyps-runs/<time>-<pid>.")] = None,
    round_timeout: Annotated[float, typer.Option(help="Seconds that one worker may hold up others.")] = 60.0,
    max_restarts: Annotated[int, typer.Option(help="Of each rank, after it has joined.")] = MAX_RESTARTS,
    snapshot_every: Annotated[int, typer.Option(help="Versions between snapshots; 0: none.")] = 0,
    connect: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Of a store that `pyps serve` serves: tcp://host:port/name."),
    ] = None,
    ranks: Annotated[
        str | None, typer.Option(metavar="R,R...", help="Start only these of the plan's ranks here.")
    ] = None,
    rebalance: Annotated[
        bool, typer.Option("--rebalance", help="Move samples between workers that turn slower or faster.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON, alone, on stdout.")
    ] = False,
) -> None:
    """Train: start SCRIPT once for each rank of the plan, restart what dies, and report.

    Everything about the run is in its folder afterwards: report.json, trace.json (for ui.perfetto.dev),
    parameters.npz, logs and step records.
    """
    total = _total(samples, epochs, dataset_size)
    rules = policy_named(policy, round_timeout)
    with _Screen(total, quiet_stdout=as_json) as screen, _last_words():
        report = run(
            plan,
            script,
            rules,
            samples=total,
            args=args or (),
            seed=seed,
            codec=codec,
            journal=journal,
            pipeline=pipeline,
            run_dir=run_dir,
            throttle_from=throttle_from,
            even=even,
            max_restarts=max_restarts,
            snapshot_every=snapshot_every,
            connect=connect,
            ranks=None if ranks is None else _rank_list(ranks),
            rebalance=rebalance,
            on_line=screen.line,
            on_tick=screen.tick,
        )
    if as_json:
        sys.stdout.write(encode(report).decode())
    else:
        show(report)


@contextmanager
def _last_words() -> Iterator[None]:
    """Show the end of a failed worker's stderr by itself: above, it is mixed with the others'."""
    try:
        yield
    except TrainingFailed as failure:
        console = Console(stderr=True, highlight=False)
        for line in failure.words:
            console.print(Text(f"  {line}"), soft_wrap=True)
        raise


def _overruns(report: Report) -> Iterator[str]:
    """Ranks whose emulation did not hold: this machine was slower than the device."""
    for r in report.ranks:
        computed = r.compute.mean * r.compute.count
        if computed and r.overrun_seconds > OVERRUN_WORTH_SAYING * computed:
            yield (
                f"rank {r.rank} ({r.name}) took {r.overrun_seconds / computed:.0%} longer than the device "
                "that it emulates: this machine is too busy, or too slow, for that"
            )


def _total(samples: int | None, epochs: float | None, dataset_size: int | None) -> int:
    """How many samples, said in one of two ways."""
    if samples is not None:
        if epochs is not None or dataset_size is not None:
            raise InputError("--samples", "", "--epochs or --dataset-size as well", "one of the two ways")
        return samples
    if epochs is None or dataset_size is None:
        expected = "--samples N, or --epochs E --dataset-size N"
        raise InputError("--samples", "", "nothing that says how long to train", expected)
    if not (0 < epochs <= 1e12 and 0 < dataset_size <= 1 << 40):
        raise InputError("--epochs", "", f"{epochs} of {dataset_size} samples", "positive numbers")
    return max(1, round(epochs * dataset_size))


def _rank_list(text: str) -> list[int]:
    if not all(part.isascii() and part.isdigit() for part in text.split(",")):
        raise InputError("--ranks", "", repr(text), "ranks with commas between, such as 0,2")
    return [int(part) for part in text.split(",")]


class _Screen:
    """What is seen of a run: the workers' lines, and below them a bar if stderr is a terminal."""

    def __init__(self, total: int, *, quiet_stdout: bool) -> None:
        self._errors = Console(stderr=True, highlight=False)
        self._lines = self._errors if quiet_stdout else Console(highlight=False)
        self._quiet_stdout = quiet_stdout
        self._total = total
        self._began: tuple[float, int] | None = None
        self._bar: Progress | None = None
        self._task: Any = None

    def __enter__(self) -> _Screen:
        if self._errors.is_terminal:
            columns = (
                TextColumn("samples"), BarColumn(), MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"), TimeElapsedColumn(),
            )  # fmt: skip
            self._bar = Progress(*columns, console=self._errors, transient=True)
            self._task = self._bar.add_task("samples", total=self._total or None, note="starting")
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def line(self, rank: int, text: str, is_stderr: bool) -> None:
        """One line of a worker, with its rank before it."""
        console = self._errors if is_stderr or self._bar is not None else self._lines
        console.print(Text(f"[{rank}] {text}"), soft_wrap=True)

    def tick(self, status: Status | None) -> None:
        if self._bar is None or status is None:
            return
        done, now = status.samples_assigned, time.monotonic()
        if status.all_joined and self._began is None:
            self._began = (now, done)
        note = f"{status.active} workers, version {status.version}"
        if self._began is not None and now - self._began[0] > 1.0:
            note += f", {(done - self._began[1]) / (now - self._began[0]):,.0f} samples/s"
        self._bar.update(self._task, completed=done, note=note)


def show(report: Report) -> None:
    """The report as a table on stdout."""
    console = Console(highlight=False)
    emulated = ", emulated devices" if report.emulated else ""
    batches = ", equal batches" if report.even else ""
    table = Table(title=f"{report.policy}{batches}{emulated}; median ms a step")
    phases = ("compute", "push", "pull", "wait")
    for heading in ("rank", "batch", "steps", "samples", *phases, "idle"):
        table.add_column(heading, justify="left" if heading == "rank" else "right")
    for r in report.ranks:
        medians = (f"{phase.median * 1e3:.1f}" for phase in (r.compute, r.push, r.pull, r.wait))
        table.add_row(
            f"{r.rank} {r.name}", str(r.batch), str(r.steps), str(r.samples), *medians, f"{r.idle_share:.1%}"
        )
    console.print(table)
    for line in summary(report):
        console.print(line, markup=False, soft_wrap=True)


def summary(report: Report) -> Iterator[str]:
    """What the table does not say."""
    times = report.iteration_seconds
    if not times.count:
        yield "too short for an iteration to be timed: two or more global batches are needed"
        return
    line = f"iteration {times.median * 1e3:.1f} ms ({times.low * 1e3:.1f} to {times.high * 1e3:.1f})"
    if report.ratio is not None and report.predicted_iteration_seconds is not None:
        line += f", {report.ratio:.2f} times the predicted {report.predicted_iteration_seconds * 1e3:.1f} ms"
    yield line
    yield from (f"planned anew: {why}" for why in report.replans)
    yield from _overruns(report)
    s = report.samples
    yield f"{s.trained} samples in {report.versions} versions and {report.wall_seconds:.1f} s"
    if s.skipped or s.returned or s.lost or report.restarts:
        counts = f"{s.returned} returned, {s.skipped} skipped, {s.lost} lost"
        yield f"{report.restarts} restarts; samples: {counts}"
