"""`pyps-profile`: measures a device and writes its profile, or imports measurements."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn

from pyps.cli import profile_files
from pyps.cli.options import DefaultCommand, DefaultGroup, NamesValue
from pyps.cli.outputs import PICTURES, check_outputs
from pyps.cli.profile_files import profile_in, refined_for, sizes_lacking
from pyps.cli.profile_machine import check_cluster_options, plan_machine
from pyps.cli.profile_views import note, show_profile
from pyps.cli.terminal import terminal
from pyps.errors import InputError, how_to_install
from pyps.formats import Profile, encode, read_profile, write_json
from pyps.profiler.budget import SECONDS
from pyps.profiler.measure import MAX_STEP_SECONDS, REPEATS, profile_model
from pyps.profiler.plot import matplotlib_present, plot_profile
from pyps.profiler.points_csv import import_points
from pyps.profiler.stepper import StepOptions

DEFAULT_OUTPUT = Path("profile.json")
LINE_SECONDS = 5.0  # between two lines of progress, where stderr is no terminal


app = typer.Typer(
    cls=DefaultGroup,
    add_completion=False,
    no_args_is_help=True,
    help="Measure a device: time a model's training steps, fit T(b), write a profile.",
)

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        show_default=False,
        help="mlp, cnn, transformer, digits_mlp, digits_cnn; script.py; module:factory of a "
        "TrainingTask; torchvision:NAME; transformers:NAME.",
    ),
]
EveryDevice = Annotated[
    bool, typer.Option("--all", help="Measure every CUDA device (else the CPU), into one file each.")
]
MaxBatch = Annotated[
    int | None, typer.Option(help="Largest batch; default: as memory and --max-step-seconds allow.")
]
Repeats = Annotated[int, typer.Option(help="Least timed steps of a batch; more if their times scatter.")]
MaxStepSeconds = Annotated[float, typer.Option(help="Without --max-batch: the longest step to measure.")]
MostSeconds = Annotated[
    float, typer.Option(help="Time that a device may take; what does not fit is left out.")
]
ForCluster = Annotated[
    Path | None,
    typer.Option(
        "--for", metavar="CLUSTER", help="Measure more sizes, until no split of this cluster can win 1 %."
    ),
]
NewCluster = Annotated[
    Path | None,
    typer.Option(
        "--cluster", metavar="FILE", help="With --all: write a cluster file of these devices, and plan it."
    ),
]
GlobalBatch = Annotated[
    int | None, typer.Option("--global-batch", "-B", help="Samples of a step, for --cluster.")
]
Accumulated = Annotated[
    int, typer.Option(help="Micro-batches before each optimizer step; not for plans: they choose their own.")
]
ThrottleFactor = Annotated[
    float | None, typer.Option(metavar="F", help="Emulate a device F times slower; the profile records it.")
]
BudgetGib = Annotated[
    float | None, typer.Option(metavar="GIB", help="Memory that a step may use; default: the free memory.")
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Profile to write; default profile.json (nothing with --json)."),
]
Plot = Annotated[
    Path | None, typer.Option("--plot", help="Picture to write; default: the profile's name, as PNG.")
]
MOST_GIB = 2**20  # of a memory budget
NoPlot = Annotated[bool, typer.Option("--no-plot", help="Write no picture.")]
JsonProfile = Annotated[
    bool, typer.Option("--json", help="Print the profile as JSON on stdout, and nothing else.")
]


@app.command("measure", cls=DefaultCommand)
def measure(
    model: ModelName,
    device: Annotated[str, typer.Option(help="cpu or cuda:N.")] = "cpu",
    every: EveryDevice = False,
    max_batch: MaxBatch = None,
    batches: Annotated[str | None, typer.Option(help="Measure exactly these batches, as in 1,2,4,8.")] = None,
    repeats: Repeats = REPEATS,
    max_step_seconds: MaxStepSeconds = MAX_STEP_SECONDS,
    seconds: MostSeconds = SECONDS,
    lengths: Annotated[
        str | None, typer.Option(help="Measure what samples of these tokens cost, too, as in 128,512,2048.")
    ] = None,
    throttle: ThrottleFactor = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads for torch; default: torch's own.")] = None,
    autocast: Annotated[str | None, typer.Option(help="bf16 or f16: mixed precision.")] = None,
    cluster: ForCluster = None,
    new_cluster: NewCluster = None,
    global_batch: GlobalBatch = None,
    accumulate: Accumulated = 1,
    compiled: Annotated[bool, typer.Option("--compile", help="Use torch.compile.")] = False,
    memory_budget: BudgetGib = None,
    output: Output = None,
    plot: Plot = None,
    no_plot: NoPlot = False,
    as_json: JsonProfile = False,
) -> None:
    """Time real training steps of MODEL over a ladder of batch sizes and fit T(b) = max(t0, c + a*b).

    To import measurements from a CSV file: pyps-profile import CSV (see pyps-profile import --help).
    """
    if cluster is not None:
        if accumulate > 1:
            raise InputError("--accumulate", "", str(accumulate), "1 with --for: plans choose their own")
        output = profile_in(cluster, output, every)
    if new_cluster is not None:
        given = {"--for": cluster, "--output": output, "--json": as_json or None, "--batches": batches}
        if wrong := next((option for option, value in given.items() if value is not None), None):
            raise InputError("--cluster", "", f"{wrong} as well", "one of the two")
        global_batch = check_cluster_options(new_cluster, global_batch, every=every)
    targets = _targets(device, every, output, plot, as_json)
    places = [_output_files(path, plot, no_plot, as_json) for _, path in targets]
    measured = partial(
        profile_model,
        model,
        repeats=repeats,
        throttle=throttle,
        threads=threads,
        max_step_seconds=max_step_seconds,
        options=_step_options(autocast, accumulate, compiled),
        memory_budget=_budget_bytes(memory_budget),
        seconds=seconds,
        lengths=None if lengths is None else _parse_whole("--lengths", lengths),
        notify=note,
    )
    first = None if batches is None else _parse_whole("--batches", batches)

    def at(name: str, sizes: Sequence[int] | None, most: int | None = None) -> Profile:
        with _progress(name) as advance:
            return measured(device=name, batches=sizes, max_batch=most, progress=advance)

    names = [name for name, _ in targets]
    if new_cluster is not None and global_batch is not None:
        plan_machine(new_cluster, global_batch, names, lambda name, b: at(name, b, None if b else max_batch))
        return
    for name, files in zip(names, places, strict=True):
        if cluster is not None and files[0] is not None:
            profile = _for_cluster(cluster, files[0], partial(at, name), first, max_batch)
        else:
            profile = at(name, first, max_batch)
        _finish(profile, *files, as_json)


def _for_cluster(
    cluster: Path, path: Path, at: Callable[..., Profile], first: list[int] | None, max_batch: int | None
) -> Profile:
    """Measure a device of a cluster, or go on with the profile in `path`. at: times sizes, up to a batch."""
    known = read_profile(path) if path.exists() else None
    profile = at(first, max_batch) if known is None else known
    lacking = sizes_lacking(path, known, first or (), max_batch)
    write_json(path, profile)
    return refined_for(cluster, path, at, lacking)


@app.command("import", cls=NamesValue)
def import_csv(
    csv_file: Annotated[
        Path, typer.Argument(metavar="CSV", show_default=False, help="Rows with the header batch,seconds.")
    ],
    max_batch: Annotated[
        int | None, typer.Option(help="Largest batch that fits the device; default: unknown.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The device's name; default: the file's.")] = None,
    model: Annotated[str, typer.Option(help="The model's name.")] = "imported",
    parameters: Annotated[
        int | None,
        typer.Option(help="The model's number of parameters; without it a plan ignores transfers."),
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="The optimizer, as AdamW, for plans of sharded models.")
    ] = None,
    tokens_per_sample: Annotated[
        int | None, typer.Option(help="For plans in tokens; 1: the file's batches count tokens.")
    ] = None,
    memory_budget: BudgetGib = None,
    output: Output = None,
    plot: Plot = None,
    no_plot: NoPlot = False,
    as_json: JsonProfile = False,
) -> None:
    """Make a profile from a CSV file with the columns batch,seconds.

    Three more columns are read if they are there: peak_bytes, a step's most memory, and link_bytes and
    link_seconds, a message's way to the store or to a peer.
    """
    files = _output_files(output, plot, no_plot, as_json, csv_file)
    profile = import_points(
        csv_file,
        max_batch=max_batch,
        name=name,
        model=model,
        parameters=parameters,
        optimizer=optimizer,
        tokens_per_sample=tokens_per_sample,
        budget_bytes=_budget_bytes(memory_budget),
    )
    _finish(profile, *files, as_json)


app.command("show")(profile_files.show)
app.command("compare")(profile_files.compare)
app.command("merge")(profile_files.merge)
app.command("link")(profile_files.link)


def _budget_bytes(gib: float | None) -> int | None:
    """--memory-budget in bytes. Raises InputError for what is no amount of memory."""
    if gib is not None and not 0 < gib < MOST_GIB:
        raise InputError("--memory-budget", "", f"{gib:g}", f"GiB, above 0 and below {MOST_GIB:,}")
    return None if gib is None else int(gib * 2**30)


def _step_options(autocast: str | None, accumulate: int, compiled: bool) -> StepOptions:
    if autocast not in (None, "bf16", "f16"):
        raise InputError("--autocast", "", repr(autocast), "bf16 or f16")
    if accumulate < 1:
        raise InputError("--accumulate", "", str(accumulate), "a whole number of at least 1")
    return StepOptions(autocast, accumulate, compiled)


def _targets(
    device: str, every: bool, output: Path | None, plot: Path | None, as_json: bool
) -> list[tuple[str, Path | None]]:
    """Devices and their profile files: with --all in the folder of `output`, with the device in the name."""
    if not every:
        return [(device, output)]
    if device != "cpu":
        raise InputError("--all", "", f"--device {device} as well", "one of the two")
    if plot is not None:
        raise InputError("--all", "", "--plot as well", "no --plot: each picture gets its profile's name")
    import torch

    names = [f"cuda:{k}" for k in range(torch.cuda.device_count())] or ["cpu"]
    base = output or (None if as_json else DEFAULT_OUTPUT)
    return [(name, base and base.with_stem(f"{base.stem}-{name.replace(':', '')}")) for name in names]


def _parse_whole(option: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"-?\d{1,12}", part) for part in parts):
        raise InputError(option, "", repr(text), "whole numbers with commas between, as in 1,2,4,8")
    return [int(part) for part in parts]


def _output_files(
    output: Path | None, plot: Path | None, no_plot: bool, as_json: bool, source: Path | None = None
) -> tuple[Path | None, Path | None]:
    """The files of profile and picture, checked now rather than after minutes of measuring. source: what is
    read. Raises InputError.
    """
    if output is None and not as_json:
        output = DEFAULT_OUTPUT
    if plot is not None and no_plot:
        raise InputError("--plot", "", "--no-plot as well", "one of the two")
    if plot is not None and not matplotlib_present():
        raise InputError("--plot", "", "no matplotlib", f"matplotlib: {how_to_install('plot')}")
    if plot is None and output is not None and output.name and not no_plot and matplotlib_present():
        plot = output.with_suffix(".png")
        if plot == output:
            plot = output.with_suffix(".plot.png")
    check_outputs({"--output": [output], "--plot": [plot]}, [source], {"--plot": PICTURES})
    return output, plot


@contextmanager
def _progress(device: str) -> Iterator[Callable[[float, float], None]]:
    """Shows how far the timing is, and says of an interrupt that nothing is written."""
    try:
        with _shown(device) as update:
            yield update
    except KeyboardInterrupt:
        note("interrupted: nothing of this measurement was written")
        raise


@contextmanager
def _shown(device: str) -> Iterator[Callable[[float, float], None]]:
    """Shows how far the timing is on stderr: a bar on a terminal, else lines; yields the update function."""
    console = terminal(stderr=True)
    if not console.is_terminal:
        yield progress_lines(device, note)
        return
    columns = (TextColumn(f"timing {device}"), BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("")
        yield lambda gone, most: bar.update(task, completed=gone, total=most, description=_left(gone, most))


def progress_lines(
    device: str, show: Callable[[str], None], clock: Callable[[], float] = time.monotonic
) -> Callable[[float, float], None]:
    """An update function, called with the seconds gone and at most, that shows a line every LINE_SECONDS."""
    shown = -math.inf

    def advance(gone: float, most: float) -> None:
        nonlocal shown
        if clock() - shown >= LINE_SECONDS:
            shown = clock()
            show(f"timing {device}: {gone:.0f} s, {_left(gone, most)}")

    return advance


def _left(gone: float, most: float) -> str:
    return f"at most {most - gone:.0f} s left"


def _finish(profile: Profile, output: Path | None, plot: Path | None, as_json: bool) -> None:
    """Writes the profile and its picture, and prints the table or the JSON; names what was written, also
    where the rest fails.
    """
    written: list[Path] = []
    try:
        if output is not None:
            write_json(output, profile)
            written.append(output)
        if plot is not None:
            plot_profile(profile, plot)
            written.append(plot)
        if as_json:
            sys.stdout.write(encode(profile).decode())
        else:
            show_profile(profile)
    finally:
        for path in written:
            note(f"wrote {path}")
