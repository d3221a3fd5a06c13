"""The commands of `pyps`. An error becomes one line on stderr and an exit code here, and nowhere else.

Exit codes: 0 done, 2 wrong use or bad input, 3 well-formed but infeasible. Each subcommand is the `app` of a
module, which is imported only when it is called: planning needs no torch, listing segments no solver.
"""

from __future__ import annotations

import importlib
import io
import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pyps.errors import CoreMissing, PypsError, shown

if TYPE_CHECKING:
    import typer

COMMANDS = {
    "profile": "Measure a device: time a model's training steps and fit T(b), the time of a batch of b.",
    "plan": "Find the best batch for every worker of a cluster.",
    "gain": "Measure what batches that fit the devices would gain for a DDP script as it is.",
    "run": "Train by a plan on this machine, with one process for each rank.",
    "join": "Train as one more worker of a run that a server shares.",
    "top": "Show what every rank of a store does.",
    "report": "Write a page about a run: report.html.",
    "export": "Write the weights of a run or a checkpoint as one file.",
    "simulate": "Compare synchronization policies on a cluster, in virtual time.",
    "serve": "Share a store of this machine with workers on other hosts.",
    "keys": "Admit and revoke the clients of a server.",
    "shm": "List and remove shared-memory segments.",
}
NEED_CORE = {"run", "simulate", "serve", "shm"}


def main() -> None:
    """`pyps COMMAND ...`. Exits."""
    arguments = sys.argv[1:]
    if arguments and arguments[0] in COMMANDS:
        call_command(arguments[0], f"pyps {arguments[0]}", arguments[1:])
    with _quietly_interrupted():
        app = _overview()
    _invoke(app, "pyps", arguments)


def main_plan() -> None:
    """`pyps-plan ...`, the same as `pyps plan`. Exits."""
    call_command("plan", "pyps-plan", sys.argv[1:])


def main_profile() -> None:
    """`pyps-profile ...`, the same as `pyps profile`. Exits."""
    call_command("profile", "pyps-profile", sys.argv[1:])


def call_command(name: str, program: str, arguments: Sequence[str]) -> None:
    """Run the `app` of a subcommand's module and exit with its code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a sign shows another one
    try:
        with _quietly_interrupted():
            if name in NEED_CORE and not importlib.import_module("pyps.native.compiled").HAS_CORE:
                raise CoreMissing()
            app: typer.Typer = importlib.import_module(f"pyps.cli.{name}").app
        _invoke(app, program, arguments)
    except PypsError as error:
        if "--json" in arguments:
            print(json.dumps({"error": described(error)}))
        _complain(program, str(error), *getattr(error, "__notes__", ()))
        sys.exit(error.exit_code)
    except UnicodeError as error:  # an argument that is no text in this locale
        _complain(program, f"found {getattr(error, 'reason', error)}; expected text")
        sys.exit(PypsError.exit_code)
    except OSError as error:  # from outside the program: a full disk, a closed terminal
        _complain(program, str(error))
        sys.exit(PypsError.exit_code)


@contextmanager
def _quietly_interrupted() -> Iterator[None]:
    """Ctrl-C ends the process as a signal does: modules that are imported turn its exception into theirs."""
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if usual is signal.default_int_handler:
            signal.signal(signal.SIGINT, usual)


def _complain(program: str, *messages: str) -> None:
    """Print errors on stderr, each in a line."""
    for message in messages:
        print(shown(f"{program}: {' '.join(message.split())}"), file=sys.stderr)


def _invoke(app: typer.Typer, program: str, arguments: Sequence[str]) -> None:
    """Run a command and exit. With --json, wrong use is JSON on stdout, too; typer itself has only a panel.

    typer's errors have no public base class: they are known by their `format_message`.
    """
    import typer

    if "--json" not in arguments:
        app(args=arguments, prog_name=program)
    try:
        code = app(args=arguments, prog_name=program, standalone_mode=False)
    except typer.Abort:
        sys.exit(1)
    except Exception as error:
        if (message := getattr(error, "format_message", None)) is None:
            raise
        code = getattr(error, "exit_code", PypsError.exit_code)
        found = {"kind": "UsageError", "exit_code": code, "message": " ".join(message().split())}
        print(json.dumps({"error": found}))
        _complain(program, str(found["message"]))
    sys.exit(code or 0)


def described(error: PypsError) -> dict[str, str | int]:
    """An error for programs: its kind, exit code and message; of bad input, where it is and what is right."""
    found: dict[str, str | int] = {"kind": type(error).__name__, "exit_code": error.exit_code}
    for name in ("where", "field", "found", "expected", "reason", "nearest"):
        if isinstance(value := getattr(error, name, None), str) and value:
            found[name] = value
    return found | {"message": " ".join(str(error).split())}


def _overview() -> typer.Typer:
    """The command without a known subcommand: help, and the error of an unknown one."""
    import typer

    def print_version(wanted: bool) -> None:
        if wanted:
            print(importlib.import_module("importlib.metadata").version("pyps-train"))
            for other in importlib.import_module("pyps_commands").others():
                _complain("pyps", f"{other} is installed too, with files of the same names: pip uninstall it")
            raise typer.Exit

    printed = typer.Option(
        False, "--version", help="Print the version.", is_eager=True, callback=print_version
    )
    app = typer.Typer(no_args_is_help=True, add_completion=False, help="Train on devices of unequal speed.")

    def options(version: bool = printed) -> None:
        """Train on devices of unequal speed."""

    app.callback()(options)
    for name, text in COMMANDS.items():
        app.command(name, help=text)(_caller(name))
    return app


def _caller(name: str) -> Callable[[], None]:
    def call() -> None:
        call_command(name, f"pyps {name}", ())

    return call
