"""The commands. Here alone errors become one line on stderr and an exit code.

Exit codes: 0 done, 2 wrong use or bad input, 3 well-formed but infeasible. Each subcommand lives in a module
of its own with an `app`, imported only when it is the one called: planning needs no torch, listing segments
no solver.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

import typer

from pyps.errors import PypsError

COMMANDS = {
    "profile": "Measure a device: time a model's training steps, fit T(b), write a profile.",
    "plan": "Find the batch of every worker of a cluster, exactly.",
    "run": "Train a script on this machine, one process a worker, as a plan says.",
    "simulate": "Compare policies on a cluster in virtual time.",
    "serve": "Let workers on other hosts train with a store of this machine.",
    "shm": "List and clean up shared-memory segments.",
}


def main() -> None:
    """`pyps COMMAND ...`. Exits."""
    arguments = sys.argv[1:]
    if arguments and arguments[0] in COMMANDS:
        _call(arguments[0], f"pyps {arguments[0]}", arguments[1:])
    _overview()(args=arguments, prog_name="pyps")


def main_plan() -> None:
    """`pyps-plan ...`, the same as `pyps plan`. Exits."""
    _call("plan", "pyps-plan", sys.argv[1:])


def main_profile() -> None:
    """`pyps-profile ...`, the same as `pyps profile`. Exits."""
    _call("profile", "pyps-profile", sys.argv[1:])


def _call(name: str, program: str, arguments: Sequence[str]) -> None:
    """Run the `app` of a subcommand's module and exit with its code."""
    try:
        app: typer.Typer = importlib.import_module(f"pyps.cli.{name}").app
        app(args=arguments, prog_name=program)
    except PypsError as error:
        print(f"{program}: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:  # of the machine, not of the program: a full disk, a terminal that went away
        print(f"{program}: {error}", file=sys.stderr)
        sys.exit(PypsError.exit_code)


def _overview() -> typer.Typer:
    """What `pyps` says when no subcommand comes first: help, and the error of an unknown command."""
    app = typer.Typer(no_args_is_help=True, add_completion=False, help="Train on devices that are not alike.")
    for name, text in COMMANDS.items():
        app.command(name, help=text)(_caller(name))
    return app


def _caller(name: str) -> Callable[[], None]:
    def call() -> None:
        _call(name, f"pyps {name}", ())

    return call
