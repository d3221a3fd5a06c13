"""`pyps serve`: share a store of this machine with workers of other processes and on other hosts."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from pyps.cli.terminal import say
from pyps.errors import InputError, how_to_install
from pyps.remote.address import CLIENT_TIMEOUT_SECONDS, endpoint_parts, is_loopback
from pyps.worker.run.notice import Signals

if TYPE_CHECKING:
    from pyps.remote.server import Server

app = typer.Typer(add_completion=False)
GRACE_SECONDS = 25.0  # less than the 30 s that schedulers leave between their signals
LOOK_SECONDS = 0.05


StoreName = Annotated[str, typer.Argument(metavar="STORE", help="Name of the store; rank 0 creates it.")]
BindTo = Annotated[
    str | None,
    typer.Option(
        help="Address to listen on: tcp://host:port; port *: a free one, host *: all. Default: a unix "
        "socket for processes of this user."
    ),
]
KeysFolder = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Folder of the keys, created if missing; see `pyps keys`."),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Listen on TCP without encryption or authentication.")
]
SessionsPerClient = Annotated[
    int, typer.Option(help="Sessions that one key, or without keys one host or process, may have.")
]
ClientTimeout = Annotated[
    float, typer.Option(help="Seconds without a message from a worker before it counts as dead.")
]
HomeOption = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Address of the first of several servers of a model: this one holds a further shard.",
    ),
]
Grace = Annotated[
    float, typer.Option(help="Seconds after SIGTERM in which workers may finish their steps and leave.")
]


@app.command("serve")
def serve_command(
    store: StoreName,
    bind: BindTo = None,
    keys: KeysFolder = None,
    insecure: Insecure = False,
    sessions_per_client: SessionsPerClient = 32,
    client_timeout: ClientTimeout = CLIENT_TIMEOUT_SECONDS,
    home: HomeOption = None,
    grace: Grace = GRACE_SECONDS,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the address, as JSON.")] = False,
) -> None:
    """Serve STORE until interrupted. Workers join it with pyps.join(ADDRESS, rank=...)."""
    try:
        from pyps.remote.server import Server
    except ModuleNotFoundError as error:
        raise InputError("serve", "", f"no {error.name}", how_to_install("remote")) from None
    _end_on_signals()
    with Server(
        store,
        bind,
        keys=keys,
        insecure=insecure,
        client_timeout_seconds=client_timeout,
        sessions_per_client=sessions_per_client,
        home=home,
    ) as server:
        if insecure and bind is not None:
            near = is_loopback(endpoint_parts(bind)[0])
            peers = "every user of this machine" if near else "everyone on its network"
            say(f"pyps serve: insecure: {peers} can read and change the store", stderr=True)
        if as_json:
            sys.stdout.write(msgspec.json.encode({"address": server.address}).decode() + "\n")
        else:
            say(f"serving {server.address}")
        sys.stdout.flush()
        try:
            server.wait()
        except SystemExit as end:
            if end.code == 128 + signal.SIGTERM:
                _let_workers_leave(server, grace)
            raise
    sys.exit(f"pyps serve: the server ended by a fault of its own; the store {store} stays: serve it again")


def _let_workers_leave(server: Server, seconds: float) -> None:
    """A scheduler that ends the server ends its workers too: they still push, and write a checkpoint."""
    if server.sessions:
        text = f"pyps serve: ends when its {server.sessions} clients have left, or in {seconds:g} s"
        say(f"{text}; a second signal ends it at once", stderr=True)
    deadline = time.monotonic() + seconds
    while server.sessions and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)


def _end_on_signals() -> None:
    """Exit with 128 + the signal on Ctrl-C, SIGTERM and SIGHUP."""
    signals = Signals()

    def end(number: int, frame: FrameType | None) -> None:
        if signals.note(number):
            sys.exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, end)
