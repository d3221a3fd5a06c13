"""Writes docs/reference/: pages made of docstrings, options of commands, csrc/pyps.h and titles of files; and
the JSON schemas of the formats.

`make reference` runs it, and so does `make site`. Git does not keep what it writes.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import typer
from typer.core import TyperGroup

from pyps.cli import COMMANDS
from pyps.cli.simulate import SimulateOptions
from pyps.formats import FORMATS, RunTable, options, schema
from pyps.formats.events import RunEvent
from pyps.formats.files import write_bytes, write_json
from pyps.formats.options import VARIABLES, declared
from pyps.formats.records import StepRecord
from pyps.report.report import Report
from pyps.run import RunOptions
from pyps.worker.step.loop import join

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "reference"
ROOMS = ("csrc", "pyps", "solver", "profiler")
MADE = "<!-- Written by `make reference`; change the sources and run it again. -->"
MODULES = {
    "pyps": "The public names. They are loaded when first used.",
    "pyps.torch": "Uneven data parallelism on DistributedDataParallel.",
    "pyps.simulate": "Training in virtual time.",
    "pyps.formats": "Profile, cluster and plan files.",
}
MOST_ARGUMENTS = 5  # shown of a signature
WITH_METHODS = ("Store", "Worker", "Rebalancer", "GlobalMean")
# A comment above or none, the function's name, and a comment behind or none.
COMMENT = r"/\*((?:[^*]|\*(?!/))*)\*/"
C_FUNCTION = re.compile(
    rf"(?:{COMMENT}\n)?^PYPS_API [^;(]*?(pyps_\w+)\([^;]*\);(?:[ \t]*{COMMENT})?", re.MULTILINE
)
FILE_PATTERNS = ("*.py", "*.pyi", "*.c", "*.h")
C_TITLE = re.compile(r"/\*\s*(?:[\w.]+: )?(.*?)\*/", re.DOTALL)


def write(folder: Path = PAGES) -> None:
    """Write the pages and the schemas, each entirely or not at all."""
    pages = {"python.md": python_page(), "cli.md": cli_page(), "options.md": options_page(), "c.md": c_page()}
    pages |= {"formats.md": formats_page(), "files.md": files_page(), "sizes.md": sizes_page()}
    (folder / "schemas").mkdir(parents=True, exist_ok=True)
    for name, text in pages.items():
        write_bytes(folder / name, text.encode())
    for name in FORMATS:
        write_json(folder / "schemas" / f"{name}.schema.json", schema(name))


def sizes_page() -> str:
    """Lines of each room beside its budget, and the other figures of benchmarks/size.py."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import size

    return str(size.page())


def python_page() -> str:
    """One line for each public name: signature, and its docstring's first sentence."""
    lines = ["# Python reference", "", MADE]
    for module, text in MODULES.items():
        lines += ["", f"## {module}", "", text, ""]
        found = importlib.import_module(module)
        names = getattr(found, "__all__", None) or public_names(found)
        entries = [(name, getattr(found, name)) for name in sorted(names)]
        plain = [name for name, value in entries if not shown(module, value)]
        lines += [line for name, value in entries if shown(module, value) for line in entry(name, value)]
        if plain:
            lines += ["", f"Constants and types: {', '.join(f'`{name}`' for name in plain)}."]
    lines += ["", "## Errors", "", "Classes of `pyps.errors`, the code in C, and what to do.", ""]
    lines += error_lines()
    return "\n".join(lines) + "\n"


def error_lines() -> Iterator[str]:
    """A line for each error of the store."""
    errors = importlib.import_module("pyps.errors")
    for name, kind in vars(errors).items():
        if inspect.isclass(kind) and issubclass(kind, errors.StoreError) and kind is not errors.StoreError:
            yield f"- `{name}` ({kind.code}): {kind.hint or 'the message names what is wrong'}."


def public_names(module: Any) -> list[str]:
    """The names of a module without __all__ that are pyps's own."""
    found = vars(module).items()
    return [n for n, v in found if n[0] != "_" and getattr(v, "__module__", "").startswith("pyps.formats")]


def shown(module: str, value: Any) -> bool:
    """Return whether a name has a line of its own: of the formats only functions do, since the schemas
    describe the types.
    """
    return documented(value) and (module != "pyps.formats" or inspect.isfunction(value))


def documented(value: Any) -> bool:
    """Return whether a value is a class or a function with a docstring of its own."""
    return (inspect.isclass(value) or inspect.isfunction(value)) and bool(first_sentence(value))


def entry(name: str, value: Any) -> Iterator[str]:
    """The line of a class or function, and those of a central class's methods."""
    file = Path(inspect.getsourcefile(value) or "").resolve().relative_to(ROOT).as_posix()
    yield f"- [`{name}`](../../{file}){arguments(value)}: {first_sentence(value)}"
    if name in WITH_METHODS:
        for method, found in methods(value):
            function = found.__func__ if isinstance(found, classmethod | staticmethod) else found
            if method[0] != "_" and inspect.isfunction(function) and function.__doc__:
                yield f"  - `.{method}`{arguments(function)}: {first_sentence(function)}"
            elif method[0] != "_" and isinstance(found, property) and found.__doc__:
                yield f"  - `.{method}`: {first_sentence(found)}"


def methods(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield what a class and the base classes of its own module's folder define."""
    room = kind.__module__.rpartition(".")[0]
    for base in kind.__mro__:
        if base is kind or base.__module__.startswith(f"{room}."):
            yield from vars(base).items()


def arguments(value: Any) -> str:
    """The names of its arguments, without types; nothing for values that are only read."""
    if inspect.isclass(value) and (issubclass(value, Exception) or not wanted(value)):
        return ""
    parameters = inspect.signature(value).parameters.values()
    names = [p.name for p in parameters if p.name not in ("self", "cls") and p.name[0] != "_"]
    shown = [*names[:MOST_ARGUMENTS], "..."] if len(names) > MOST_ARGUMENTS else names
    return f" `({', '.join(shown)})`" if names else ""


def wanted(kind: type) -> bool:
    """Return whether users make values of a class by calling it: policies, samplers and the like."""
    return dataclasses.is_dataclass(kind) or kind.__module__.startswith("pyps.torch")


def first_sentence(value: Any) -> str:
    """The first sentence of a docstring, on one line; empty for those that dataclasses make."""
    own = value.__dict__.get("__doc__") if inspect.isclass(value) else value.__doc__
    text = " ".join((inspect.cleandoc(own or "").split("\n\n") or [""])[0].split())
    if text.startswith(f"{getattr(value, '__name__', '')}("):
        return ""
    return sentence(text)


def sentence(text: str) -> str:
    """The first sentence; of one that goes on after a semicolon, or after a colon and four words, the part
    before it.
    """
    first = re.split(r"(?<=[.;])\s(?![^(]*\))", text, maxsplit=1)[0]
    head, colon, _ = first.partition(": ")
    shown = head if colon and len(head.split()) >= 4 else first
    return shown.rstrip(".:;,") + "." if shown else ""


def clause(text: str) -> str:
    """A sentence up to its first comma or bracket, where four words stand before it."""
    first = sentence(text)
    head = re.split(r", | \(", first, maxsplit=1)[0]
    return (head.rstrip(".") + ".") if len(head.split()) >= 4 else first


def cli_page() -> str:
    """Every command with its options, and the first sentence of each one's help."""
    lines = ["# Command line reference", "", MADE, "", "`COMMAND --help` says more."]
    for name in COMMANDS:
        app = importlib.import_module(f"pyps.cli.{name}").app
        lines += command_lines(f"pyps {name}", typer.main.get_command(app))
    return "\n".join(lines) + "\n"


def command_lines(title: str, command: Any) -> list[str]:
    """A command's heading, purpose and options, then those of its subcommands."""
    purpose = sentence(" ".join((command.help or "").split("\n\n")[0].split()))
    lines = ["", f"## {title}", "", purpose, ""] if purpose else ["", f"## {title}", ""]
    for option in command.params:
        shown = [o for o in option.opts if o.startswith("--")] or option.opts
        if option.name in ("help", "json_output") or getattr(option, "hidden", False):
            continue
        text = clause(" ".join((getattr(option, "help", None) or "").split()))
        label = shown[0] if shown[0].startswith("-") else option.name.upper()
        lines.append(f"- `{label}`{': ' + text if text else ''}")
    if isinstance(command, TyperGroup):
        for name, sub in sorted(command.commands.items()):
            lines += command_lines(f"{title} {name}", sub)
    return lines


def options_page() -> str:
    """Every option of a run: what it is, its limits, and what may set it; then the user's variables."""
    holders = {"`[run]`, pyps-plan": RunTable, "pyps run, Trainer": RunOptions}
    holders |= {"pyps simulate": SimulateOptions, "pyps.join": join}
    found: dict[str, tuple[msgspec.Meta, list[str]]] = {}
    for title, holder in holders.items():
        for name, _, meta in declared(holder):
            found.setdefault(name, (meta, []))[1].append(title)
    lines = ["# Options of a run", "", MADE, ""]
    lines += [
        "What sets an option takes it under its name; on a command line `micro_batch` is `--micro-batch`."
    ]
    lines += ["", "| option | | set by |", "|---|---|---|"]
    for name, (meta, titles) in sorted(found.items()):
        lines.append(f"| `{name}` | {meta.description}{limits(meta)} | {'; '.join(titles)} |")
    lines += ["", "## Environment variables", ""]
    lines += [f"- `{name}`: {text}" for name, text in VARIABLES.items()]
    lines += ["", "`PYPS_RUN` is the launcher's: JSON that tells a worker of its run."]
    return "\n".join(lines) + "\n"


def limits(meta: msgspec.Meta) -> str:
    """The unit and the limits of a number, behind what it is."""
    unit = (meta.extra or {}).get("unit") or ""
    most = f"at most {meta.le:,}" if meta.le is not None and meta.le < options.MAX_SECONDS else ""
    said = ", ".join(filter(None, (unit, most)))
    return f" ({said})" if said else ""


def c_page() -> str:
    """The functions of pyps.h in its order, with the comment above or behind each."""
    header = (ROOT / "csrc" / "pyps.h").read_text(encoding="utf-8")
    lines = ["# C reference", "", MADE, ""]
    lines += ["[`pyps.h`](../../csrc/pyps.h) holds the structs and conventions. Functions return 0 or a"]
    lines += ["negative `PYPS_E...`. [Linking](../how-to/link-c.md) shows how to build with it.", ""]
    for above, function, behind in C_FUNCTION.findall(header):
        text = sentence(" ".join((behind or above).replace("\n *", " ").split()))
        if above and not behind and len(text.split()) <= 3:  # the title of a group of functions
            lines += ["", f"**{text}**", ""]
            text = ""
        lines.append(f"- `{function}`{': ' + text if text else ''}")
    return "\n".join(lines) + "\n"


def formats_page() -> str:
    """The tables and objects of each file: what they hold, and their fields."""
    formats = importlib.import_module("pyps.formats")
    lines = ["# File formats", "", MADE, ""]
    lines += [
        "`python -m pyps.formats NAME` prints a format's JSON schema, with types and limits; the site has"
    ]
    lines += [f"them: {', '.join(f'[{name}](schemas/{name}.schema.json)' for name in FORMATS)}."]
    of_a_run = {"report": Report, "step record": StepRecord, "run event": RunEvent}
    for name, form in (formats.FORMATS | of_a_run).items():
        lines += ["", f"## {name}"]
        seen: list[type] = []
        for kind in structs_of(form, seen):
            text = "\n".join(inspect.cleandoc(kind.__doc__ or "").splitlines())
            fields = ", ".join(f"`{field.encode_name}`" for field in msgspec.structs.fields(kind))
            lines += ["", f"**{kind.__name__}**: {text}", "", f"Fields: {fields}."]
    return "\n".join(lines) + "\n"


def structs_of(kind: type, seen: list[type]) -> list[type]:
    """A format's struct and those that it holds, each once, in the order of the fields."""
    if kind in seen:
        return seen
    seen.append(kind)
    for hint in get_type_hints(kind).values():
        for inner in (hint, *parts_of(hint)):
            if inspect.isclass(inner) and issubclass(inner, msgspec.Struct):
                structs_of(inner, seen)
    return seen


def parts_of(hint: Any) -> Iterator[Any]:
    """The types inside a hint such as list[X] or X | None."""
    for inner in get_args(hint):
        yield inner
        yield from parts_of(inner)


def files_page() -> str:
    """Every source file, and the first sentence of what it says it is."""
    lines = ["# Source files", "", MADE, ""]
    lines += ["Each file in one line; [the architecture](../architecture.md) shows how they fit together."]
    paths = {path for room in ROOMS for kind in FILE_PATTERNS for path in (ROOT / room).rglob(kind)}
    tracked = sorted(p for p in paths if not is_built(p))
    for folder in sorted({path.parent for path in tracked}):
        lines += ["", f"## {folder.relative_to(ROOT).as_posix()}", ""]
        for path in (p for p in tracked if p.parent == folder):
            link = path.relative_to(ROOT).as_posix()
            lines.append(f"- [`{path.name}`](../../{link}){title(path)}")
    return "\n".join(lines) + "\n"


def is_built(path: Path) -> bool:
    """Return whether a build made the file."""
    name = path.relative_to(ROOT).as_posix()
    return name == "pyps/_native.c" or name.startswith("pyps/include/")


def title(path: Path) -> str:
    """Return what a file says of itself in its first sentence, after a colon; empty for one that says
    nothing.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix in (".c", ".h"):
        found = C_TITLE.match(text)
        said = found[1].replace("\n *", " ") if found else ""
    else:
        said = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0]
    short = sentence(" ".join(said.split()))
    return f": {short}" if short else ""


if __name__ == "__main__":
    write()
