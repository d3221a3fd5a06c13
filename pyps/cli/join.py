"""`pyps join`: train as one more worker of a run that a server shares. It needs no C core."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from pyps.cli.terminal import say
from pyps.errors import InputError, PypsError
from pyps.native.status import MemberState
from pyps.remote import open_store
from pyps.store.policies import DEFAULT_POLICY
from pyps.store.store import Store
from pyps.worker.run.settings import Settings, agreement_of

app = typer.Typer(add_completion=False)
SCRIPT_TAKES_THE_REST = {"allow_interspersed_args": False}
LOOK_SECONDS = 1.0  # from one look at the rank's share to the next


@app.command("join", context_settings=SCRIPT_TAKES_THE_REST)
def join_command(
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="The store's, with ?keys=FILE: tcp://HOST:PORT/NAME.")
    ],
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="Python script that calls pyps.join().")],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="The script's arguments.")
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(help="Rank to train. Default: a new one, that the plan does not have.", min=0),
    ] = None,
) -> None:
    """Run SCRIPT here as a worker of a run that trains elsewhere, and say its share of a round.

    Samples, seed and policy come from the store. The first steps of a new rank are measured, and the run's
    launcher gives it the samples that fit. The exit code is the script's.
    """
    if not script.is_file():
        expected = "a Python script that calls pyps.join(); options of pyps join go before ADDRESS"
        raise InputError("SCRIPT", "", str(script), expected)
    with open_store(address) as store:
        settings = _settings(store, address, free_rank(store) if rank is None else rank)
        say(f"rank {settings.rank} of {address.partition('?')[0]}", stderr=True)
        worker = subprocess.Popen(
            [sys.executable, str(script), *(args or ())], env=os.environ | settings.to_env()
        )
        code = _followed(worker, store, settings.rank)
    raise typer.Exit(code if code >= 0 else 128 - code)


def free_rank(store: Store) -> int:
    """Return a rank that no worker trains and that the plan does not have. Raises InputError."""
    taken = {one.rank for one in store.members() if one.state in (MemberState.ACTIVE, MemberState.FENCED)}
    taken |= {rank for rank, counters in enumerate(store.ranks()) if counters.batch}
    free = [rank for rank in range(store.layout.max_participants) if rank not in taken]
    if not free:
        expected = "--rank and a rank that nobody trains"
        raise InputError("--rank", "", "no rank that the plan does not have", expected)
    return free[0]


def _settings(store: Store, address: str, rank: int) -> Settings:
    """Return the settings that the store's other workers have."""
    layout, batches = store.layout, tuple(one.batch for one in store.ranks())
    settings = Settings(
        address, rank, DEFAULT_POLICY, layout.samples, layout.seed, batches=batches, may_be_new=True
    )
    if agreement_of(settings).plan != layout.plan:  # the run has been planned anew since it began
        settings = replace(settings, batches=())
    return settings


def _followed(worker: subprocess.Popen[bytes], store: Store, rank: int) -> int:
    """Say the rank's share whenever it changes, until the worker ends; its exit code."""
    shown: tuple[int, int] | None = None
    while True:
        try:
            code = worker.wait(LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        except KeyboardInterrupt:  # the worker has it, too: it gives back what it holds
            continue
        with suppress(PypsError):  # the worker says what has become of the server
            batches = [one.batch for one in store.ranks()]
            share = sum(batches[rank : rank + 1]), sum(batches)
            if share[0] and share != shown:
                of = f"{share[0]} of {share[1]} samples of a round ({share[0] / share[1]:.0%})"
                say(f"rank {rank}: {of}{_pace(store, rank)}", stderr=True)
                shown = share
        if code is not None:
            return code


def _pace(store: Store, rank: int) -> str:
    """Return what the rank's steps take, in words; none are measured yet: nothing."""
    seconds = store.costs()[rank].seconds
    return f", {1000 * median(seconds):.0f} ms a step" if seconds else ""
