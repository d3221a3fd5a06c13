"""`pyps shm ls|gc`: the shared-memory segments on this machine."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from pyps.cli.terminal import figures, plain_table, say, terminal
from pyps.store.segments import Segment, collect_garbage, folder, segments

app = typer.Typer(no_args_is_help=True, help="List and remove shared-memory segments.")
JsonLines = Annotated[bool, typer.Option("--json", help="Print only JSON.")]


@app.command("ls")
def list_segments(json: JsonLines = False) -> None:
    """List the segments in PYPS_SHM_DIR (default /dev/shm): size, memory held, and whether in use."""
    found = segments()
    if json:
        _print_json({"folder": str(folder()), "segments": [_plain(s) for s in found]})
    elif not found:
        say(f"no segments in {folder()}")
    else:
        terminal(highlight=True).print(_table(found))


@app.command("gc")
def remove_unused(json: JsonLines = False) -> None:
    """Remove the segments that no live process uses."""
    removed, kept = collect_garbage()
    if json:
        _print_json({"removed": [_plain(s) for s in removed], "kept": [_plain(s) for s in kept]})
        return
    freed = sum(s.resident_bytes for s in removed)
    say(f"removed {len(removed)} ({_size(freed)} freed), kept {len(kept)}")
    for segment in kept:
        say(f"kept {segment.name}: {segment.detail or segment.state}")


def _plain(segment: Segment) -> dict[str, object]:
    return {**asdict(segment), "in_use": segment.in_use}


def _print_json(value: object) -> None:
    say(msgspec.json.encode(value).decode())


def _table(found: list[Segment]) -> Table:
    table = plain_table("name", "state", *figures("size", "memory"))
    for s in found:
        state = s.state if not s.detail else f"{s.state}: {s.detail}"
        table.add_row(Text(s.name), Text(state), _size(s.bytes), _size(s.resident_bytes))
    return table


def _size(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
