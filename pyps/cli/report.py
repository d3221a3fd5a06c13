"""`pyps report`: a page about a run, also while it trains; over the folders of several hosts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from pyps.cli.outputs import check_writable
from pyps.cli.terminal import say
from pyps.errors import InputError
from pyps.formats.files import temporary_beside
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
    page = make_page(loaded, path)
    temporary = temporary_beside(path)
    try:
        temporary.write_text(page, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise InputError("--output", "", f"{path}: {error.strerror}", "a file to write") from None
    finally:
        temporary.unlink(missing_ok=True)
    say(f"wrote {path}")
