"""Tensors by name in a file (safetensors), durable when written and verified when read."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from pyps.errors import InputError, reason_of
from pyps.formats.checkpoint import TensorFile
from pyps.formats.files import open_plain, temporary_beside

Tensors = Mapping[str, NDArray[Any]]
RESERVED = "__metadata__"  # the file's own, in place of a tensor's name


def write_tensors(path: Path, tensors: Tensors, metadata: Mapping[str, str] | None = None) -> TensorFile:
    """Write and fsync; what was written. Raises InputError if the file system refuses, as when it is full."""
    if RESERVED in tensors:
        raise InputError(
            str(path), "", f"a tensor named {RESERVED!r}", "another name: it is the format's own"
        )
    arrays = {name: np.asarray(values, order="C") for name, values in tensors.items()}
    try:
        save_file(arrays, path, {"format": "pt", **(metadata or {})})
        return sync_file(path)
    except (OSError, SafetensorError) as error:
        raise write_error(path, error, sum(array.nbytes for array in arrays.values())) from None


def copy_file(source: IO[bytes], path: Path) -> TensorFile:
    """Copy an open file and fsync; what was written. Raises InputError if the file system refuses."""
    try:
        with path.open("xb") as file:
            shutil.copyfileobj(source, file)
        return sync_file(path)
    except OSError as error:
        raise write_error(path, error, os.fstat(source.fileno()).st_size) from None


def sync_file(path: Path) -> TensorFile:
    """Make a file durable; its size and digest. Raises OSError."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return TensorFile(bytes=file.tell(), sha256=digest)


def write_whole(path: Path, tensors: Tensors, metadata: Mapping[str, str] | None = None) -> None:
    """Write a file that appears whole or not at all. Raises InputError as write_tensors."""
    temporary = temporary_beside(path)
    try:
        write_tensors(temporary, tensors, metadata)
        os.replace(temporary, path)
    except OSError as error:
        raise write_error(path, error, 0) from None
    finally:
        temporary.unlink(missing_ok=True)


def write_error(path: Path, error: Exception, needed: int) -> InputError:
    """The error of a file that cannot be written; needed: its bytes."""
    reason = reason_of(error).removeprefix("error while serializing: ")
    return InputError(str(path), "", reason, f"a place to write {needed} bytes to")


def read_tensors(path: Path) -> dict[str, NDArray[Any]]:
    """The tensors of a file. Raises InputError if it is missing or no such file."""
    open_plain(path, "a file of tensors (safetensors)").close()
    try:
        return dict(load_file(path))
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise InputError(str(path), "", reason_of(error), "a file of tensors (safetensors)") from None


def verify_file(path: Path, expected: TensorFile) -> None:
    """Raises InputError if a file is missing, or is not the one that was written."""
    try:
        with open_plain(path, "a file of the checkpoint") as file:
            size = os.fstat(file.fileno()).st_size
            if size != expected.bytes:
                wanted = f"{expected.bytes}, as checkpoint.json says: the file is not whole"
                raise InputError(str(path), "size", f"{size} bytes", wanted)
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(str(path), "", reason_of(error), "a file of the checkpoint") from None
    if found != expected.sha256:
        wanted = f"{expected.sha256[:12]}..., as checkpoint.json says: the file is damaged"
        raise InputError(str(path), "sha256", f"{found[:12]}...", wanted)
