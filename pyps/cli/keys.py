"""`pyps keys add|revoke|ls`: the clients that a server admits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from pyps.cli.options import rank_list
from pyps.cli.terminal import say
from pyps.errors import InputError, how_to_install

if TYPE_CHECKING:
    from pyps.remote.keys import KeyFolder

app = typer.Typer(no_args_is_help=True, help="Admit and revoke the clients of `pyps serve --keys DIR`.")
Folder = Annotated[Path, typer.Option("--keys", metavar="DIR", help="Folder of the server's keys.")]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the client, such as its host's.")]


@app.command("add")
def add_client(
    name: NameArgument,
    keys: Folder = Path("keys"),
    ranks: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Ranks that it may join as, e.g. 0,1; it then may not re-plan."),
    ] = None,
) -> None:
    """Admit a client: write DIR/NAME.key, to be moved to its host. Makes missing server's keys."""
    bound = None if ranks is None else rank_list(ranks)
    say(f"admitted {name}: move {_open(keys).add(name, bound)} to its host")


@app.command("revoke")
def revoke_client(name: NameArgument, keys: Folder = Path("keys")) -> None:
    """Admit a client no more. A server that runs ends its sessions at once."""
    _open_existing(keys).revoke(name)
    say(f"revoked {name}")


@app.command("ls")
def list_clients(
    keys: Folder = Path("keys"),
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON.")] = False,
) -> None:
    """List the admitted clients with their public keys."""
    found = _open_existing(keys).keys
    if as_json:
        say(msgspec.json.encode({"clients": found.clients, "ranks": found.ranks}).decode())
        return
    for name in sorted(found.clients):
        bound = f"  ranks {', '.join(map(str, found.ranks[name]))}" if name in found.ranks else ""
        say(f"{name}  {found.clients[name]}{bound}")


def _open(folder: Path) -> KeyFolder:
    try:
        from pyps.remote.keys import KeyFolder
    except ModuleNotFoundError as error:
        raise InputError("keys", "", f"no {error.name}", how_to_install("remote")) from None
    return KeyFolder.open(folder)


def _open_existing(folder: Path) -> KeyFolder:
    found = _open(folder)
    if not (folder / "server.key").exists():
        raise InputError(str(folder), "server.key", "none", "a folder of keys (`pyps keys add` makes one)")
    return found
