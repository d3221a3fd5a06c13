"""`pyps-profile` on existing profiles: shows one, compares two, merges several runs, adds the link."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated

import msgspec
import typer

from pyps.cli.outputs import PICTURES, check_outputs, check_writable
from pyps.cli.profile_views import note, show_comparison, show_profile
from pyps.cli.terminal import say
from pyps.errors import InputError
from pyps.formats import Memory, Profile, read_cluster, read_profile, write_json
from pyps.profiler.curve import select_fit
from pyps.profiler.fit import point_seconds
from pyps.profiler.plot import plot_profile

CHANGED = 0.10  # relative: a size that takes so much more or less time when it is measured again
ProfileFile = Annotated[
    Path, typer.Argument(metavar="PROFILE", show_default=False, help="A profile, in JSON.")
]


def show(
    profile: ProfileFile,
    plot: Annotated[Path | None, typer.Option(help="Picture to write: PNG, SVG or PDF.")] = None,
    chosen: Annotated[
        list[int] | None, typer.Option(help="A batch to mark in the picture; may be repeated.")
    ] = None,
) -> None:
    """Show a profile: its points, a text plot, and which batches to trust."""
    check_outputs({"--plot": [plot]}, [profile], {"--plot": PICTURES})
    found = read_profile(profile)
    show_profile(found, bars=True)
    if plot is not None:
        plot_profile(found, plot, chosen or ())
        note(f"wrote {plot}")


def compare(first: ProfileFile, second: ProfileFile) -> None:
    """Show two profiles side by side, batch by batch."""
    show_comparison(read_profile(first), read_profile(second))


def merge(
    profiles: Annotated[
        list[Path], typer.Argument(metavar="PROFILE...", show_default=False, help="Profiles of one device.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Profile to write.")],
) -> None:
    """Merge profiles of the same device and model: all measurements, fitted together."""
    check_outputs({"--output": [output]}, profiles)
    runs = [read_profile(path) for path in profiles]
    merged = merged_profile([str(path) for path in profiles], runs)
    write_json(output, merged)
    show_profile(merged)
    note(f"wrote {output}")


def link(
    profile: Annotated[
        Path | None,
        typer.Argument(metavar="[PROFILE]", show_default=False, help="Profile to add the link to."),
    ] = None,
    via: Annotated[
        str, typer.Option(help="store: shared memory on this machine. gloo: a process group over TCP.")
    ] = "store",
    to: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="With gloo: the peer; default: a process on this machine."),
    ] = None,
    answer: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Act as the peer: answer one probe at this address, then exit."
        ),
    ] = None,
) -> None:
    """Measure latency and bandwidth to the store or to a peer. With PROFILE, add them to it.

    The store's are those of a worker on the profile's device: what its steps take more than torch's.
    """
    from pyps.worker import link_speed as probes

    if answer is not None:
        probes.answer(answer)
        return
    if via not in ("store", "gloo"):
        raise InputError("--via", "", repr(via), "store or gloo")
    if to is not None and via != "gloo":
        raise InputError("--to", "", "--via store", "--via gloo: the store is on this machine")
    known = read_profile(profile) if profile else None
    check_writable("PROFILE", profile)
    device = known.device.kind if known is not None else "cpu"
    found = probes.probe_store(device=device) if via == "store" else probes.probe_group(to)
    speed, latency = found.bytes_per_second / 1e9, found.latency_seconds * 1e6
    say(f"{found.via}: {latency:.0f} us, then {speed:.2f} GB/s")
    if profile and known:
        write_json(profile, msgspec.structs.replace(known, link=found))
        note(f"wrote {profile}")


def profile_in(cluster: Path, output: Path | None, every: bool) -> Path:
    """The profile of a cluster that is the measured device's: `output`, or the only one there is.

    every: whether all devices are measured. Raises InputError if it is not one of the cluster's.
    """
    if every:
        raise InputError("--for", "", "--all as well", "one device: each has a profile of its own")
    if output is not None and not output.exists():
        return output  # the cluster file can be read once it does
    named = list(dict.fromkeys(group.profile for group in read_cluster(cluster).worker))
    if output is None and len(named) == 1:
        return Path(named[0])
    return Path(_named(named, output))


def _named(named: list[str], output: Path | None) -> str:
    """The profile of a cluster that is this file."""
    for path in named:
        if output is not None and os.path.abspath(path) == os.path.abspath(output):
            return path
    raise InputError("--output", "", str(output or "nothing"), f"this device's profile: {', '.join(named)}")


def sizes_lacking(
    path: Path, known: Profile | None, sizes: Sequence[int], max_batch: int | None
) -> list[int]:
    """Return those of `sizes` that a profile lacks which goes on; None: it is new, and has those that fit.

    Raises InputError if the profile allows less than `sizes`, or more than `max_batch`.
    """
    if known is None:
        return []
    most = known.max_batch
    if most is not None and max(sizes, default=0) > most:
        expected = f"at most {most}, max_batch of {path}, or no file there"
        raise InputError("--batches", "", str(max(sizes)), expected)
    if max_batch is not None and (most is None or max_batch < most):
        expected = f"max_batch of {path}, which is {most or 'not known'}, or no file there"
        raise InputError("--max-batch", "", str(max_batch), expected)
    return sorted(set(sizes) - {point.batch for point in known.points})


def refined_for(
    cluster: Path, path: Path, measure: Callable[[list[int]], Profile], wanted: Sequence[int] = ()
) -> Profile:
    """A device's profile, measured at more sizes until no split of a cluster can win 1 %; written after each.

    path: of the profile, which is one of the cluster's. measure: times steps of these sizes, two or more.
    wanted: sizes to measure first. Raises InputError if another profile of the cluster is missing,
    Infeasible if it has no plan.
    """
    from pyps.cli.plan import fitted_profiles
    from pyps.cli.plan_mode import names_file, pace_of
    from pyps.cli.plan_view import lines_of_next
    from pyps.solver.report.measure import measured_for

    read = read_cluster(cluster)
    name = _named([group.profile for group in read.worker], path)

    def with_sizes(known: Profile, sizes: list[int]) -> Profile:
        sizes = [size for size in sizes if known.max_batch is None or size <= known.max_batch]
        note(f"for {cluster}: measuring {', '.join(map(str, sizes))}")
        again = min((point.batch for point in known.points), key=lambda b: abs(b - sizes[0]))
        run = measure(sorted({*sizes, again}))
        _compare_again(known, run, again)
        run = msgspec.structs.replace(run, max_batch=None, min_batch=None, memory=None)
        merged = merged_profile([str(path), "now"], [known, run])
        write_json(path, merged)
        return merged

    with names_file(cluster):
        if wanted:
            with_sizes(read_profile(path), list(wanted))
        profiles, left = measured_for(read, fitted_profiles(read), name, with_sizes, pace_of(cluster, read))
    for line in lines_of_next(left):
        note(line)
    return next(p for group, p in zip(read.worker, profiles, strict=True) if group.profile == name)


def _compare_again(known: Profile, run: Profile, batch: int) -> None:
    """Say so if the device is not as it was when it was measured first."""
    then, now = (
        median([s for p in one.points if p.batch == batch for s in point_seconds(p)]) for one in (known, run)
    )
    if abs(now / then - 1) > CHANGED:
        note(
            f"batch {batch} takes {1e3 * now:.4g} ms now, {1e3 * then:.4g} ms before: measure all sizes again"
        )


def merged_profile(names: list[str], runs: list[Profile]) -> Profile:
    """One profile of several runs. Raises InputError if they are not of one device and model."""
    first = runs[0]
    for name, run in zip(names, runs, strict=True):
        for part in ("device", "model"):
            found, expected = (msgspec.structs.asdict(getattr(p, part)) for p in (run, first))
            for field in found:
                if found[field] != expected[field]:
                    as_there = f"{expected[field]!r}, as in {names[0]}"
                    raise InputError(name, f"{part}.{field}", repr(found[field]), as_there)
    batches = sorted({p.batch for run in runs for p in run.points})
    points = []
    for batch in batches:
        same = [p for run in runs for p in run.points if p.batch == batch]
        peaks = [p.peak_bytes for p in same if p.peak_bytes is not None]
        points.append(
            msgspec.structs.replace(
                same[-1],
                seconds=[s for p in same for s in point_seconds(p)],
                peak_bytes=max(peaks, default=None),
            )
        )
    largest = max((run.max_batch for run in runs if run.max_batch is not None), default=None)
    return Profile(
        device=first.device,
        model=first.model,
        points=points,
        max_batch=largest,
        cut_short=all(run.cut_short for run in runs if run.max_batch == largest),
        min_batch=max((run.min_batch for run in runs if run.min_batch is not None), default=None),
        memory=min((run.memory for run in runs if run.memory is not None), key=_samples, default=None),
        fit=select_fit(points) if len(points) > 1 else None,
        link=next((run.link for run in reversed(runs) if run.link is not None), None),
        clocks=sorted({reason for run in runs for reason in run.clocks or ()}) or None,
    )


def _samples(memory: Memory) -> float:
    """The samples that fit the budget: the model that allows the fewest is the safest."""
    return (memory.budget_bytes - memory.fixed_bytes) / memory.bytes_per_sample
