"""Options of a run on command lines: made of their declarations in pyps.formats.options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
import typer
from msgspec import Meta
from typer.core import TyperCommand, TyperGroup

from pyps.errors import InputError
from pyps.formats import RunTable
from pyps.formats.options import declared

PLAIN = (bool, int, float, str, Path)  # types that the command line reads; of others it takes the text
PLANNED = (*RunTable.__struct_fields__, "micro_batch")  # as the plan says, where they are not given
Command = Callable[..., None]


class NamesValue(TyperCommand):
    """A command whose errors name the value that an option was given, which typer's own may leave out."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        try:
            rest: list[str] = super().parse_args(ctx, args)
        except Exception as error:
            names = getattr(getattr(error, "param", None), "opts", ())
            for k, word in enumerate(given):
                name, _, value = word.partition("=")
                value = value or "".join(given[k + 1 : k + 2])
                if name in names and repr(value) not in getattr(error, "message", ""):
                    error.message = f"found {value!r}: {error.message}"  # type: ignore[attr-defined]
            raise
        return rest


class DefaultGroup(TyperGroup):
    """Commands, of which the first is meant where no word names one: `pyps-plan a.toml`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in self.commands:
            args = [next(iter(self.commands)), *(args or ["--help"] * self.no_args_is_help)]
        rest: list[str] = super().parse_args(ctx, args)
        return rest


class _Short(typer.Context):
    @property
    def command_path(self) -> str:
        return super().command_path if self.parent is None else self.parent.command_path


class DefaultCommand(NamesValue):
    """Hold what a program does where no command is named; usage and errors show the short form."""

    context_class = _Short


def with_options(
    kind: type,
    *,
    without: Sequence[str] = (),
    choices: Mapping[str, Iterable[str]] = MappingProxyType({}),
    unset: str = "Default: as planned.",
) -> Callable[[Command], Command]:
    """A command whose `**given` are the options of a class, by name, each with its default there.

    without: those that it does not take. choices: what the help of an option lists. unset: what it says of an
    option that is the plan's where it is not given.
    """

    def decorate(command: Command) -> Command:
        parameters = inspect.signature(command, eval_str=True).parameters.values()
        own = [p.replace(kind=p.KEYWORD_ONLY) for p in parameters if p.kind != p.VAR_KEYWORD]
        defaults = _defaults(kind)
        made = [
            _parameter(name, type_, meta, defaults[name], choices.get(name, ()), unset)
            for name, type_, meta in declared(kind)
            if name not in without
        ]
        shown = sorted([*own, *made], key=lambda p: p.name == "as_json")  # that is the last

        @wraps(command)
        def run(**values: Any) -> None:
            command(**values)

        run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in shown}
        return run

    return decorate


def _parameter(
    name: str, type_: Any, meta: Meta, default: Any, choices: Iterable[str], unset: str
) -> inspect.Parameter:
    """An option as typer takes it."""
    said, extra = meta.description or "", meta.extra or {}
    if listed := ", ".join(choices):
        said = f"{said.removesuffix('.')}; one of {listed}."
    if default is None and name in PLANNED:
        said = f"{said} {unset}"
    if type_ == Sequence[str]:
        type_, default = list[str], None
    elif type_ not in PLAIN:
        type_ = str
    flag = f"--{name.replace('_', '-')}"
    names = [f"{flag}/--no-{flag[2:]}" if default is None else flag] if type_ is bool else []
    shown = typer.Option(
        *names, metavar=extra["text"] or None, help=said.strip(), show_default=default is not None
    )
    taken: Any = type_ if default is not None else type_ | None
    annotation = Annotated[taken, shown]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _defaults(kind: type) -> Mapping[str, Any]:
    """The default of each field; None where it has none."""
    if is_dataclass(kind):
        return {field.name: None if field.default is MISSING else field.default for field in fields(kind)}
    return {field.name: field.default for field in msgspec.structs.fields(kind)}


def misplaced_options(ctx: typer.Context, args: Sequence[str]) -> list[str]:
    """Return a script's arguments that are options of the command that starts it."""
    own = {name for parameter in ctx.command.params for name in parameter.opts if name.startswith("--")}
    return [name for name in (arg.partition("=")[0] for arg in args) if name in own]


def rank_list(text: str) -> list[int]:
    """The ranks of "0,2". Raises InputError."""
    if not all(part.isascii() and part.isdigit() for part in text.split(",")):
        raise InputError("--ranks", "", repr(text), "ranks separated by commas, such as 0,2")
    return [int(part) for part in text.split(",")]
