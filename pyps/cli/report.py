"""`pyps report`: a page about a run, also while it trains; over the folders of several hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pyps.cli.outputs import check_writable
from pyps.cli.terminal import say
from pyps.formats.files import write_bytes
from pyps.report.page import make_page
from pyps.report.run_data import load_run

app = typer.Typer(add_completion=False)
PAGE = "report.html"


@app.command("report")
def report_command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folder of a run; one a host.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help=f"By default RUN/{PAGE}, in the first folder.")
    ] = None,
) -> None:
    """Write a page about a run: the plan against what was measured, a timeline of each rank, loss, batches,
    staleness. It needs no network and no other file.
    """
    path = output if output is not None else runs[0] / PAGE
    loaded = load_run(runs)
    check_writable("--output", path)
    write_bytes(path, make_page(loaded, path).encode())
    say(f"wrote {path}")
