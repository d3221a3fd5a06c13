"""`pyps serve`: share a store of this machine with workers on other hosts."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated

import msgspec
import typer

from pyps.errors import InputError

app = typer.Typer(add_completion=False)


@app.command("serve")
def serve_command(
    store: Annotated[str, typer.Argument(metavar="STORE", help="Name of the store; rank 0 creates it.")],
    bind: Annotated[
        str, typer.Option(help="Address to listen on: tcp://host:port; port *: a free one, host *: all.")
    ] = "tcp://127.0.0.1:*",
    keys: Annotated[
        Path | None, typer.Option(help="Folder of the keys, created if missing; workers need its client.key.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen without encryption or authentication.")
    ] = False,
    client_timeout: Annotated[
        float, typer.Option(help="Seconds without a message from a worker before it counts as dead.")
    ] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the address, as JSON.")] = False,
) -> None:
    """Serve STORE until interrupted. Workers join it with pyps.join("tcp://host:port/STORE", rank=...)."""
    try:
        from pyps.remote.keys import make_keys
        from pyps.remote.server import Server
    except ModuleNotFoundError as error:
        raise InputError("serve", "", f"no {error.name}", "pip install 'pyps-train[remote]'") from None
    pair = make_keys(keys) if keys is not None else None
    _end_on_signals()
    with Server(store, bind, keys=pair, insecure=insecure, client_timeout_seconds=client_timeout) as server:
        if as_json:
            sys.stdout.write(msgspec.json.encode({"address": server.address}).decode() + "\n")
        else:
            print(f"serving {server.address}")
        sys.stdout.flush()
        server.wait()
    sys.exit("pyps serve: the server ended by itself")


def _end_on_signals() -> None:
    """Exit with 128 + the signal on Ctrl-C, SIGTERM and SIGHUP."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
