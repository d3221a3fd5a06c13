"""`pyps gain`: measure what batches that fit the devices would gain for a DDP script as it is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from pyps.cli.options import misplaced_options
from pyps.cli.profile_views import note
from pyps.cli.terminal import figures, say, terminal
from pyps.errors import InputError
from pyps.gain import Gain, changes, measure_gain
from pyps.gain.ranks import LocalDevice, Script

app = typer.Typer(add_completion=False)
SCRIPT_TAKES_THE_REST = {"allow_interspersed_args": False}


@app.command("gain", context_settings=SCRIPT_TAKES_THE_REST)
def gain_command(
    ctx: typer.Context,
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="Script as torchrun would start it.")],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="The script's arguments.")
    ] = None,
    devices: Annotated[
        str, typer.Option(help="Such as cuda:0,cuda:2 or cpu,cpu. Default: every GPU of this machine.")
    ] = "",
    throttle: Annotated[
        str, typer.Option(help="Emulate slower CPUs: 1,3 makes the second take three times its CPU time.")
    ] = "",
    seconds: Annotated[float, typer.Option(help="How long each of three runs is timed.", min=0.1)] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON.")] = False,
) -> None:
    """Run SCRIPT for a while with equal batches and with batches that fit the devices, and compare.

    The script is not changed, nor its folder, but for what it writes itself in its first epoch. The gradients
    of these runs have no use; the last lines say how to train on unequal batches with exact ones.
    """
    if not script.is_file():
        raise InputError("SCRIPT", "", str(script), "a Python script that torchrun starts")
    if after := misplaced_options(ctx, args or ()):
        note(f"after {script}, so for it and not for pyps gain: {', '.join(after)}")
    found = _devices(devices, throttle)
    gain = measure_gain(Script(script, args or (), seconds), found, note)
    if as_json:
        say(msgspec.json.encode(_plain(gain, found)).decode())
    else:
        _show(gain, found, script)


def _devices(names: str, throttle: str) -> list[LocalDevice]:
    """Return the devices of the options. Raises InputError."""
    listed = names.split(",") if names else _gpus()
    for name in listed:
        if name != "cpu" and not (name.startswith("cuda:") and name[5:].isdecimal()):
            raise InputError("--devices", "", repr(name), "cpu, or cuda: and a number")
    try:
        paces = [float(pace) for pace in throttle.split(",")] if throttle else [1.0] * len(listed)
    except ValueError:
        raise InputError("--throttle", "", repr(throttle), "numbers of at least 1, with commas") from None
    if len(paces) != len(listed) or not all(1.0 <= pace < 1e6 for pace in paces):
        raise InputError("--throttle", "", throttle, f"{len(listed)} numbers of at least 1, one a device")
    if throttle and any(name != "cpu" for name in listed):
        raise InputError("--throttle", "", ",".join(listed), "CPUs: --devices cpu,cpu")
    return [LocalDevice(name, pace) for name, pace in zip(listed, paces, strict=True)]


def _gpus() -> list[str]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves, by the numbers that it lists, if it does."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    listed = all(part.isdecimal() for part in visible)
    return [f"cuda:{k}" for k in (visible if listed else range(torch.cuda.device_count()))]


def _plain(gain: Gain, devices: list[LocalDevice]) -> dict[str, object]:
    alone = [
        {"device": device.name, "throttle": device.pace, "seconds_by_batch": dict(sorted(points.items()))}
        for device, points in zip(devices, gain.points, strict=True)
    ]
    return {"alone": alone, "equal": gain.equal, "planned": gain.planned, "faster": gain.faster}


def _show(gain: Gain, devices: list[LocalDevice], script: Path) -> None:
    sizes = sorted(gain.points[0])
    table = Table("one device alone", *figures(*(f"{size} samples" for size in sizes)))
    for device, points in zip(devices, gain.points, strict=True):
        name = device.name if device.pace == 1.0 else f"{device.name}, throttle {device.pace:g}"
        table.add_row(name, *(f"{1e3 * points[size]:.1f} ms" if size in points else "-" for size in sizes))
    terminal().print(table)
    table = Table("all devices", *figures("batches", "a batch", "range", "samples/s"))
    for name, way in (("equal", gain.equal), ("planned", gain.planned)):
        if way is not None:
            times = f"{1e3 * way.seconds:.1f} ms", f"{1e3 * way.low:.1f}-{1e3 * way.high:.1f}"
            row = " ".join(map(str, way.batches)), *times, f"{way.samples_per_second:,.0f}"
            table.add_row(name, *row)
    terminal().print(table)
    for line in _verdict(gain, script):
        say(line)


def _verdict(gain: Gain, script: Path) -> list[str]:
    """Return what the figures mean, and the lines that change."""
    if gain.planned is None:
        return ["these devices are alike for this script: equal batches are right, pyps would gain nothing"]
    own = f"by each device's own times {gain.predicted:.2f}x"
    lines = [f"planned batches train {gain.faster:.2f}x as fast ({own})"]
    if not gain.certain:
        lines.append(
            "unsure, as times vary or differ from the prediction: --seconds 60, while nothing else runs"
        )
    found = changes(script, sum(gain.equal.batches))
    if found:
        lines.append(f"what changes in {script}, after `from pyps.torch import uneven`:")
        lines += [f"  {change.number}: {change.text}  ->  {change.becomes}" for change in found]
    lines.append("other loops and trainers: docs/how-to/train-ddp.md, train-fsdp.md, train-libraries.md")
    return lines
