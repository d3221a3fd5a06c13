"""`pyps export`: the weights of a run or a checkpoint as one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pyps.checkpoint.folder import write_weights
from pyps.cli.outputs import check_writable
from pyps.cli.terminal import say
from pyps.errors import InputError

app = typer.Typer(add_completion=False)


@app.command("export")
def export_command(
    source: Annotated[
        Path, typer.Argument(metavar="RUN|CHECKPOINT", help="Folder of a run, of checkpoints, or of one.")
    ],
    out: Annotated[Path, typer.Argument(metavar="FILE", help="File to write: model.safetensors.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace FILE if it exists.")] = False,
) -> None:
    """Write the parameters and buffers of the newest checkpoint by name (safetensors), once verified."""
    if out.exists() and not overwrite:
        raise InputError(str(out), "", "a file", "a new name, or --overwrite")
    check_writable("FILE", out)
    path, tensors = write_weights(source, out)
    say(f"{out}: {tensors} tensors of {path}")
