"""Folders of checkpoints: each is written whole or not at all, and the last ones are kept.

    checkpoints/
      000000100/  checkpoint.json  model.safetensors  optimizer.safetensors ...
      000000200/
      latest -> 000000200

A checkpoint is written to a hidden name; every file and the folder are synced, then it is renamed. `latest`
is replaced after that, and older checkpoints are removed last. So a crash leaves at most a hidden folder,
which the next writer removes. One process at a time writes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from numpy.typing import NDArray

from pyps.checkpoint.local_states import is_local, without_moments
from pyps.checkpoint.tensors import (
    Tensors,
    copy_file,
    read_tensors,
    verify_file,
    write_error,
    write_tensors,
    write_whole,
)
from pyps.errors import InputError
from pyps.formats.checkpoint import CHECKPOINT_SCHEMA, Checkpoint, TensorFile, check_signature, signed
from pyps.formats.files import encode, read_json, typed

FOLDER = "checkpoints"  # in a run's folder
LATEST = "latest"
MANIFEST = "checkpoint.json"
MODEL = "model.safetensors"
NAME = re.compile(r"\d{9,}")
TEMPORARY = re.compile(r"\.(\d{9,}|latest)\.(new|replaced|removed)")
KEEP = 2
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of linux/fcntl.h and linux/fs.h

Describe = Callable[[dict[str, TensorFile]], Checkpoint]
Fill = Callable[[Path], Checkpoint]


def write_folder(
    parent: Path,
    version: int,
    files: Mapping[str, Tensors],
    describe: Describe,
    keep: int = KEEP,
    copied: Mapping[str, IO[bytes]] | None = None,
) -> Path:
    """Write a checkpoint and remove all but the last `keep`; its folder, durable.

    parent: the folder of checkpoints, made if missing. version: the new one's name; a checkpoint of that
    version is replaced. files: tensors by name, by file. describe: checkpoint.json for the files written.
    copied: files to copy as they are. Raises InputError, naming the file, if it cannot be written; older
    checkpoints are then unchanged.
    """

    def fill(folder: Path) -> Checkpoint:
        written = {name: write_tensors(folder / name, tensors) for name, tensors in files.items()}
        written |= {name: copy_file(file, folder / name) for name, file in (copied or {}).items()}
        return describe(written)

    return fill_folder(parent, version, fill, keep)


def fill_folder(parent: Path, version: int, fill: Fill, keep: int = KEEP) -> Path:
    """Do as write_folder does, with files that `fill` writes, and syncs, in the folder that it gets."""
    target, temporary = parent / f"{version:09d}", parent / f".{version:09d}.new"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with only_writer(parent):
            _remove_temporaries(parent)
            last = newest_checkpoint(parent)
            try:
                temporary.mkdir()
                _write_manifest(temporary, fill(temporary))
                _put(temporary, target)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
            _point_latest(target)
            _remove_older(target, last, keep)
    except OSError as error:
        raise write_error(Path(error.filename or target), error, 0) from None
    return target


def _write_manifest(folder: Path, manifest: Checkpoint) -> None:
    with (folder / MANIFEST).open("xb") as file:
        file.write(encode(signed(manifest)))
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(folder)


def _put(temporary: Path, target: Path) -> None:
    """Rename; a checkpoint that stands there changes places with it, and is removed afterwards."""
    replaced = _hidden(target, "replaced")
    if not target.exists() or not _exchange(temporary, target):
        if target.exists():
            os.rename(target, replaced)
        os.rename(temporary, target)
    _sync_folder(target.parent)
    for old in (temporary, replaced):
        shutil.rmtree(old, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Let two names change places, so that a kill leaves both; False where the file system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    names = os.fsencode(one), os.fsencode(other)
    return rename is not None and rename(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) == 0


def _hidden(path: Path, state: str) -> Path:
    return path.with_name(f".{path.name}.{state}")


def _point_latest(target: Path) -> None:
    link, temporary = target.with_name(LATEST), target.with_name(f".{LATEST}.new")
    os.symlink(target.name, temporary)
    os.replace(temporary, link)
    _sync_folder(target.parent)


def _remove_older(newest: Path, last: Path | None, keep: int) -> None:
    """Hide each before it is removed, so that no half of it is ever taken for a checkpoint.

    last: written before the newest. A run that has gone back leaves later checkpoints where they are, until
    it passes them.
    """
    older = [path for path in checkpoints(newest.parent) if _version(path) < _version(newest)]
    older.sort(key=lambda path: (last is None or _version(path) <= _version(last), _version(path)))
    for path in older[: max(0, len(older) - (keep - 1))]:
        os.rename(path, _hidden(path, "removed"))
        shutil.rmtree(_hidden(path, "removed"), ignore_errors=True)


def _remove_temporaries(parent: Path) -> None:
    """Remove what a dead writer left: a checkpoint that was about to be replaced stays, all else goes."""
    for path in parent.iterdir():
        if (match := TEMPORARY.fullmatch(path.name)) is None:
            continue
        if path.is_symlink():
            path.unlink()
        elif match[2] == "replaced" and not (parent / match[1]).exists():
            os.rename(path, parent / match[1])
        else:
            shutil.rmtree(path)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def only_writer(parent: Path) -> Iterator[None]:
    """Hold the folder's lock, so that every temporary in it is a dead writer's. Raises InputError."""
    import fcntl  # Windows has none, and plans without it

    descriptor = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        found = "another process that is writing a checkpoint"
        raise InputError(str(parent), "", found, "one writer at a time") from None
    finally:
        os.close(descriptor)


def checkpoints(parent: Path) -> list[Path]:
    """The checkpoints in a folder, oldest version first; none if there is no such folder."""
    if not parent.is_dir():
        return []
    found = [path for path in parent.iterdir() if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=_version)


def _version(path: Path) -> int:
    return int(path.name)


def find_checkpoint(path: Path) -> Path:
    """A checkpoint's folder, or the newest in a run's folder or in a folder of checkpoints.

    Raises InputError if there is none.
    """
    real = Path(os.path.realpath(path))
    if (path / MANIFEST).exists() or NAME.fullmatch(real.name):
        return real
    if (found := newest_checkpoint(path)) is not None:
        return found
    kind = "no checkpoint" if path.is_dir() else "no folder"
    raise InputError(str(path), "", kind, "a run's folder, or a checkpoint's")


def newest_checkpoint(path: Path) -> Path | None:
    """The checkpoint written last in a run's folder or in a folder of checkpoints; None if there is none.

    It is the one of the highest version, unless a run has gone back to an earlier one.
    """
    found = checkpoints(path / FOLDER) or checkpoints(path)
    written = [one for one in found if os.path.realpath(one.parent / LATEST) == os.path.realpath(one)]
    return [None, *found, *written][-1]


def read_manifest(folder: Path) -> Checkpoint:
    """checkpoint.json, checked. Raises InputError, naming the file and the checkpoint before it."""
    with offering_previous(folder):
        path = folder / MANIFEST
        raw = read_json(path, CHECKPOINT_SCHEMA)
        check_signature(str(path), raw)
        return typed(str(path), raw, Checkpoint, lambda *_: None)


def read_folder(folder: Path) -> tuple[Checkpoint, dict[str, dict[str, NDArray[Any]]]]:
    """A checkpoint: checkpoint.json and the tensors of each file, all verified; those of workers' own
    optimizers are not read.

    Raises InputError, naming the file that is missing or damaged, and the checkpoint before it.
    """
    manifest = verify_folder(folder)
    return manifest, {name: read_tensors(folder / name) for name in manifest.files if not is_local(name)}


def verify_folder(folder: Path) -> Checkpoint:
    """checkpoint.json, all of whose files are as they were written. Raises InputError as read_folder."""
    manifest = read_manifest(folder)
    with offering_previous(folder):
        for name, file in manifest.files.items():
            if Path(name).name != name:
                raise InputError(str(folder / MANIFEST), "files", repr(name), "names without a folder")
            verify_file(folder / name, file)
    return manifest


@contextlib.contextmanager
def offering_previous(folder: Path) -> Iterator[None]:
    """Add the checkpoint before this one to an InputError about it."""
    try:
        yield
    except InputError as error:
        version = _version(folder) if NAME.fullmatch(folder.name) else 0
        older = [path for path in checkpoints(folder.parent) if _version(path) < version]
        if not older:
            raise
        expected = f"{error.expected}; the checkpoint before is {older[-1]}"
        raise InputError(error.where, error.field, error.found, expected) from None


def write_weights(source: str | os.PathLike[str], out: str | os.PathLike[str]) -> tuple[Path, int]:
    """Write a model's tensors by name as one file, which any library reads (safetensors).

    Returns the checkpoint that they are of, and how many there are.
    source: a checkpoint, or a folder of which the newest is taken; of pyps.checkpoint.state or of
    pyps.torch.save. Raises InputError for a damaged file, and where `out` cannot be written.
    """
    path = find_checkpoint(Path(source))
    checkpoint, files = read_folder(path)
    tensors = {name: values for file in files.values() for name, values in file.items()}
    try:
        names = _model_names(checkpoint.state)
        weights = {n: tensors[stored].reshape(shape) for n, (stored, shape) in without_moments(names).items()}
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise InputError(str(path / MANIFEST), "state", repr(error), "a model's tensors") from None
    written: dict[str, NDArray[Any]] = weights
    write_whole(Path(out), written, {"pyps.version": str(checkpoint.version)})
    return path, len(weights)


def _model_names(state: dict[str, Any]) -> dict[str, tuple[str, list[int]]]:
    """By name in the model: the name on file, and the shape. Checkpoints of DDP keep more than the model."""
    if "common" in state:
        return {name: (t["name"], t["shape"]) for name, t in state["common"]["model"].items()}
    return {tensor["name"]: (tensor["name"], tensor["shape"]) for tensor in state["tensors"]}
