"""Reads and writes files.

Reading trusts nothing: anything missing, damaged, of another version, misspelt or out of range raises an
InputError that names the file, the field, what was found and what was expected. Writing is atomic.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import os
import re
import secrets
import select
import stat
import threading
import tomllib
from collections.abc import Callable, Iterable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from pyps.errors import InputError, one_of, reason_of

MAX_FILE_BYTES = 1 << 28
PIPE_SECONDS = 5.0
LONGEST_KEY = 100  # characters of an unknown key for which a like one is looked for
LONGEST_PART = 50  # characters of a file's name in that of a temporary one: at most 200 bytes of 255
RENAMED = {"quantum": "batch_multiple"}  # keys of earlier cluster files, for the error message
T = TypeVar("T", bound=Struct)
Learnt = TypeVar("Learnt")


def encode(value: Any) -> bytes:
    """Indented JSON of a format's value or of plain data. Raises InputError on NaN and infinity."""
    refuse_non_finite("", msgspec.to_builtins(value))
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write `value` as JSON, entirely or not at all.

    Raises InputError if it is not what reading would accept, or as write_bytes does.
    """
    data = encode(value)
    if isinstance(value, Struct):
        typed(str(path), msgspec.json.decode(data), type(value), lambda _, __: None)
    write_bytes(path, data)


def write_lines(path: Path, values: Iterable[Struct]) -> None:
    """Write values as JSON, one a line, entirely or not at all. Raises InputError as write_bytes does."""
    write_bytes(path, b"".join(msgspec.json.encode(value) + b"\n" for value in values))


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file, entirely or not at all: a temporary file in the same folder, fsync, rename.

    Raises InputError if the path cannot be written or is not a plain file.
    """
    target = Path(path)
    try:
        os.fsencode(target).index(0)
    except ValueError:
        pass
    else:
        raise InputError(repr(str(path)), "", "a name with a NUL", "a file name")
    if target.exists() and not target.is_file():
        raise InputError(str(path), "", "something that is not a plain file", "a file name to write to")
    temporary = temporary_beside(target)
    try:
        with open(temporary, "xb", opener=_writable_by_owner) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        with contextlib.suppress(OSError):  # its folder may be none
            temporary.unlink()
        raise InputError(str(path), "", reason_of(error), "a place to write to") from None


def temporary_beside(target: Path) -> Path:
    """A name in a file's folder that no other writer has: a thread, or a process that has the same pid on
    another host or in another container. It is no longer than names may be, however long the file's is.
    """
    return target.with_name(f".{target.name[:LONGEST_PART]}.{secrets.token_hex(8)}.tmp")


def _writable_by_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o644)


def open_plain(
    path: str | os.PathLike[str], expected: str = "a readable file", *, links: bool = True
) -> BufferedReader:
    """A file, opened. Raises InputError if it is missing, or a pipe or a device, for which one would wait.

    links: False: a link is refused, as of a file that is written to next.
    """
    found = "something that is not a plain file"
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return os.fdopen(descriptor, "rb")
        os.close(descriptor)
    except (OSError, ValueError) as error:
        found = reason_of(error)
    raise InputError(str(path), "", found, expected)


def read_struct(path: str | os.PathLike[str], kind: type[T], expected: str) -> T:
    """A plain file's JSON as a value; `expected`: what it should be. Raises InputError."""
    with open_plain(path, expected) as file:
        data = file.read()
    try:
        return msgspec.json.decode(data, type=learnt(kind))
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InputError(str(path), "", str(error), expected) from None


def read_text(path: str | os.PathLike[str]) -> str:
    """The UTF-8 text of a file, without a byte order mark. Raises InputError if it is unreadable or larger
    than MAX_FILE_BYTES.
    """
    where = str(path)
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if stat.S_ISDIR(mode):
                raise IsADirectoryError(0, "a directory")
            data = file.read(MAX_FILE_BYTES + 1) if stat.S_ISREG(mode) else _piped(file.fileno())
    except (OSError, ValueError) as error:
        raise InputError(where, "", reason_of(error), "a readable file") from None
    if len(data) > MAX_FILE_BYTES:
        raise InputError(where, "", f"more than {MAX_FILE_BYTES} bytes", "a smaller file")
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        found = f"byte 0x{data[error.start]:02x} at offset {error.start}"
        raise InputError(where, "", found, "UTF-8 text") from None


def _piped(pipe: int) -> bytes:
    """Return what comes through a pipe until its other end closes. Raises OSError if nothing comes for a
    while.
    """
    found = bytearray()
    while len(found) <= MAX_FILE_BYTES:
        if not select.select([pipe], [], [], PIPE_SECONDS)[0]:
            raise OSError(0, f"a pipe from which nothing came for {PIPE_SECONDS:g} s")
        if not (part := os.read(pipe, 1 << 16)):
            break
        found += part
    return bytes(found)


def read_json(path: str | os.PathLike[str], expected: str) -> dict[str, Any]:
    """The JSON object in a file whose `schema` field is `expected`. Raises InputError."""
    where = str(path)
    try:
        raw = msgspec.json.decode(read_text(path).encode())
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        damage = f"damaged JSON ({error}){_resemblance(where)}"
        raise InputError(where, "", damage, f"a {expected} file") from None
    if not isinstance(raw, dict):
        raise InputError(where, "", _shown(raw), f"a JSON object with schema {expected!r}")
    found = raw.get("schema")
    if found != expected:
        raise InputError(where, "schema", "nothing" if found is None else _shown(found), repr(expected))
    return raw


def read_toml(path: str | os.PathLike[str], expected: str) -> dict[str, Any]:
    """The table in a TOML file; `expected`: what it should be, for the error. Raises InputError."""
    where = str(path)
    try:
        return tomllib.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        found = f"text that is not TOML ({error}){_resemblance(where)}"
        raise InputError(where, "", found, f"{expected} in TOML") from None


def _resemblance(path: str) -> str:
    """Names the other kind of file that this one is, as an addition to an error; "" if that is not clear."""
    text = read_text(path)
    with contextlib.suppress(ValueError, RecursionError):
        if {"job", "worker"} & tomllib.loads(text).keys():
            return "; this looks like a cluster file (TOML)"
    with contextlib.suppress(ValueError, RecursionError):
        raw = msgspec.json.decode(text.encode())
        kind = re.match(r"pyps\.(\w+)/", str(raw.get("schema"))) if isinstance(raw, dict) else None
        return f"; this looks like a {kind[1]} (JSON)" if kind else ""
    return ""


def typed(where: str, raw: dict[str, Any], kind: type[T], check: Callable[[str, T], None]) -> T:
    """`raw` as a value of a format, after `check`. Raises InputError, naming the file `where`."""
    try:
        refuse_non_finite(where, raw)
    except RecursionError:
        raise InputError(where, "", "values nested too deeply", "a file of this format") from None
    try:
        value = msgspec.convert(raw, learnt(kind))
    except (msgspec.ValidationError, OverflowError) as error:
        raise _explain(where, raw, kind, str(error)) from None
    check(where, value)
    return value


def refuse_non_finite(where: str, raw: Any) -> None:
    """Raises InputError if NaN or an infinity is in `raw`."""
    for place, value in _leaves(raw, ""):
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(where, place, str(value), "a finite number")


def _leaves(raw: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(raw, dict):
        for key, value in raw.items():
            yield from _leaves(value, f"{place}.{key}" if place else str(key))
    elif isinstance(raw, list | tuple):
        for k, value in enumerate(raw):
            yield from _leaves(value, f"{place}[{k}]")
    else:
        yield place, raw


def _explain(where: str, raw: Any, kind: type[Struct], message: str) -> InputError:
    """Turns "Expected `int` >= 1 - at `$.points[3].batch`" (msgspec) into field, found and expected."""
    problem, _, place = message.partition(" - at ")
    place = place.replace("`", "").removeprefix("$").removeprefix(".")
    if unknown := re.match(r"Object contains unknown field `(.*)`", problem):
        return _unknown_key(where, place, unknown[1], kind)
    if missing := re.match(r"Object missing required field `(.*)`", problem):
        field = f"{place}.{missing[1]}" if place else missing[1]
        return InputError(where, field, "nothing", "a value: this field is required")
    expected = problem.partition(", got ")[0].replace("`", "").removeprefix("Expected ")
    try:
        found = _at(raw, place)
    except (LookupError, TypeError):  # within a table of any keys, of which msgspec does not say which
        return InputError(where, place, problem.partition("got ")[2].replace("`", "") or "another", expected)
    if problem.startswith("Invalid enum value"):
        expected = one_of(str(found), map(str, _choices_at(kind, place)))
    return InputError(where, place, _shown(found), _in_words(expected))


def _in_words(expected: str) -> str:
    """msgspec's description of a type, without its notation."""
    words = re.sub(r" \| null$", "", expected)
    words = "a name" if words == "str of length >= 1" else words
    return {"str": "text", "bool": "true or false", "int": "a whole number", "float": "a number"}.get(
        words, words
    )


def _unknown_key(where: str, place: str, key: str, kind: type[Struct]) -> InputError:
    fields = _fields_at(kind, place)
    near = [RENAMED[key]] if RENAMED.get(key) in fields else _nearest(key, fields)
    expected = f"{near[0]!r}" if near else f"one of {', '.join(fields)}"
    return InputError(where, f"{place}.{key}" if place else key, "an unknown key", expected)


def _nearest(key: str, fields: list[str]) -> list[str]:
    """The field that the key is most like, as a list of one; empty if it is like none.

    One that begins with the key, or the other way round, is nearer than one with as many equal letters.
    """
    if not 2 < len(key) < LONGEST_KEY:
        return []
    begins = [name for name in fields if name.startswith(key) or key.startswith(name)]
    if begins:
        return [min(begins, key=lambda name: abs(len(name) - len(key)))]
    return difflib.get_close_matches(key, fields, n=1)


def _fields_at(kind: type[Struct], place: str) -> list[str]:
    """The field names of the struct at a place such as `worker[2]` of a format."""
    return [field.name for field in _type_at(kind, place).fields]


def _type_at(kind: type[Struct], place: str) -> Any:
    """The type at a place of a format; of an optional one what it is if it is given."""
    node: Any = msgspec.inspect.type_info(kind)
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+|\.\.\.)\]", place):
        if index:
            node = node.value_type if isinstance(node, msgspec.inspect.DictType) else node.item_type
        else:
            node = next(field.type for field in node.fields if field.name == name)
        node = next(t for t in _parts(node) if not isinstance(t, msgspec.inspect.NoneType))
    return node


def _parts(node: Any) -> Iterator[Any]:
    """The types of a union, or the type itself, without what is said of them."""
    if isinstance(node, msgspec.inspect.Metadata):
        yield from _parts(node.type)
    elif isinstance(node, msgspec.inspect.UnionType):
        for part in node.types:
            yield from _parts(part)
    else:
        yield node


def _choices_at(kind: type[Struct], place: str) -> Iterator[Any]:
    """The values that may stand at a place of a format."""
    name, _, field = place.rpartition(".")
    node: Any = next(item.type for item in _type_at(kind, name).fields if item.name == field)
    for part in _parts(node):
        yield from getattr(part, "values", ())


def _at(raw: Any, place: str) -> Any:
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", place):
        raw = raw[int(index)] if index else raw[name]
    return raw


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return f"an object with {', '.join(map(str, value)) or 'no fields'}"[:80]
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


_learning = threading.Lock()


def learnt(kind: type[Learnt]) -> type[Learnt]:
    """The type itself, of which a value can be read in any thread from now on.

    msgspec learns the fields of a type when it first reads one, and the process dies where two threads make
    it learn the same type at once (msgspec 0.22). What is learnt is kept with the type.
    """
    with _learning:
        msgspec.json.Decoder(kind)
    return kind
