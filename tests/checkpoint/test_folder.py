"""A folder of checkpoints: whatever stops the writer, and whatever is damaged later, no wrong one is read."""

from __future__ import annotations

import os
import random
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled import examples

from pyps.checkpoint import folder
from pyps.checkpoint.folder import MODEL, checkpoints, find_checkpoint, read_folder, write_folder
from pyps.errors import InputError
from pyps.formats.checkpoint import Checkpoint, TensorFile

KILLED = 9
FILES = {MODEL, "optimizer.safetensors", "checkpoint.json"}


def write(parent: Path, version: int, keep: int = 2) -> Path:
    """A checkpoint whose values are all its version."""

    def describe(files: dict[str, TensorFile]) -> Checkpoint:
        return Checkpoint(made_with="1", unix_seconds=1.5, version=version, state={"x": [1]}, files=files)

    tensors = {"a.weight": np.full((3, 5), version, np.float32), "b": np.full(7, version, np.float32)}
    states = {"a.weight.0": np.full((3, 5), version, np.float32), "steps": np.full(2, version, np.uint64)}
    return write_folder(parent, version, {MODEL: tensors, "optimizer.safetensors": states}, describe, keep)


def check(path: Path) -> int:
    """The version of a checkpoint that must be whole."""
    manifest, files = read_folder(path)
    for tensors in files.values():
        for values in tensors.values():
            assert (values == manifest.version).all()
    assert {*manifest.files, "checkpoint.json"} == {p.name for p in path.iterdir()} == FILES
    return manifest.version


def test_the_last_ones_are_kept_and_latest_names_the_newest(tmp_path: Path) -> None:
    parent = tmp_path / "run" / "checkpoints"
    for version in (3, 10, 1_000_000_000, 1_000_000_007):
        path = write(parent, version, keep=3)
    assert [check(p) for p in checkpoints(parent)] == [10, 1_000_000_000, 1_000_000_007]
    for where in (tmp_path / "run", parent, parent / "latest", path):
        assert find_checkpoint(where) == path.resolve()
    assert {p.name for p in parent.iterdir()} == {"000000010", "1000000000", "1000000007", "latest"}


def test_a_run_that_went_back_goes_on_from_what_it_wrote_last(tmp_path: Path) -> None:
    for version in (100, 200, 300):
        write(tmp_path, version, keep=3)
    write(tmp_path, 150)  # loaded 100, since 200 was no good
    assert find_checkpoint(tmp_path).name == "000000150"
    assert [check(path) for path in checkpoints(tmp_path)] == [100, 150, 200, 300]
    write(tmp_path, 190)
    write(tmp_path, 250)
    assert find_checkpoint(tmp_path).name == "000000250"
    assert [check(path) for path in checkpoints(tmp_path)] == [190, 250, 300]
    shutil.rmtree(tmp_path / "000000250")
    assert find_checkpoint(tmp_path).name == "000000300", "latest leads nowhere"


def test_a_version_is_replaced(tmp_path: Path) -> None:
    write(tmp_path, 5)
    (write(tmp_path, 6) / MODEL).unlink()
    assert check(write(tmp_path, 6)) == 6
    assert [p.name for p in checkpoints(tmp_path)] == ["000000005", "000000006"]


@contextmanager
def stopping_at(event: int) -> Iterator[list[str]]:
    """Kill this process at its n-th operation on files."""
    seen: list[str] = []

    def hook(name: str, arguments: tuple[object, ...]) -> None:
        if name.startswith(("os.", "shutil.", "open")):
            seen.append(name)
            if len(seen) == event:
                os._exit(KILLED)

    sys.addaudithook(hook)
    yield seen


def killed_at(event: int, action: Callable[[], object]) -> bool:
    """Do it in a process that dies at its n-th operation on files; whether it did."""
    child = os.fork()
    if child == 0:
        with stopping_at(event):
            action()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED


@pytest.mark.parametrize("again", [False, True])
def test_a_writer_killed_at_any_operation_leaves_a_whole_checkpoint(tmp_path: Path, again: bool) -> None:
    """One with a new version, and one that replaces the newest; the next writer removes what is left."""
    parent, event = tmp_path / "checkpoints", 0
    while True:
        event += 1
        shutil.rmtree(parent, ignore_errors=True)
        write(parent, 1)
        write(parent, 2)
        died = killed_at(event, lambda: write(parent, 2 if again else 3))
        assert check(find_checkpoint(parent)) in ((1, 2) if again else (2, 3)), event
        if (parent / "latest").exists():
            assert check(parent / "latest") in (2, 3), event
        for path in checkpoints(parent):
            check(path)
        write(parent, 4)
        assert {check(path) for path in checkpoints(parent)} <= {2, 3, 4}
        assert {p.name for p in parent.iterdir()} == {*(p.name for p in checkpoints(parent)), "latest"}
        assert len(checkpoints(parent)) == 2
        if not died:
            break
    assert event > 20


def test_a_checkpoint_that_is_written_again_is_there_whenever_its_writer_is_killed(tmp_path: Path) -> None:
    """The only one, of a run that ended where it had saved last."""
    path = write(tmp_path, 2)
    event, died = 0, True
    while died:
        event += 1
        died = killed_at(event, lambda: write(tmp_path, 2))
        assert check(path) == 2, event
    assert event > 20


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_damaged_file_is_named_and_the_previous_checkpoint_offered(tmp_path: Path, name: str) -> None:
    draws = random.Random(name)
    before, path = write(tmp_path, 1), write(tmp_path, 2)
    whole = (path / name).read_bytes()

    def refused(data: bytes | None) -> None:
        (path / name).unlink()
        if data is not None:
            (path / name).write_bytes(data)
        with pytest.raises(InputError) as caught:
            read_folder(path)
        assert caught.value.where == str(path / name)
        assert f"the checkpoint before is {before}" in caught.value.expected
        (path / name).write_bytes(whole)

    refused(None)
    for length in {0, 1, 7, 8, len(whole) // 2, len(whole) - 2}:
        refused(whole[:length])
    refused(whole + b"x")
    for _ in range(60):
        flipped = bytearray(whole)
        place = draws.randrange(len(whole))
        flipped[place] ^= 1 << draws.randrange(8)
        if (
            name == "checkpoint.json"
            and not flipped[place : place + 1].isspace() | whole[place : place + 1].isspace()
        ):
            refused(bytes(flipped))
    assert check(before) == 1
    assert check(path) == 2


@given(st.binary(max_size=200))
@settings(max_examples=examples(18, 60), deadline=None)
def test_no_bytes_pass_for_a_manifest(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("c") / "000000001"
    path.mkdir()
    (path / "checkpoint.json").write_bytes(data)
    with pytest.raises(InputError):
        read_folder(path)


def test_a_full_disk_is_an_error_and_leaves_what_there_was(tmp_path: Path) -> None:
    """The kernel refuses a file above a limit as a full disk does: in the middle of a write."""
    write(tmp_path, 1)
    before = sorted(tmp_path.rglob("*"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(InputError, match=r"\.new/model\.safetensors: found .*\(os error 27\)") as caught:
            write(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "a place to write 88 bytes to" in caught.value.expected
    assert sorted(tmp_path.rglob("*")) == before
    assert check(find_checkpoint(tmp_path)) == 1


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with folder.only_writer(tmp_path), pytest.raises(InputError, match="one writer at a time"):
        write(tmp_path, 1)
    assert check(write(tmp_path, 1)) == 1


def test_what_is_no_checkpoint_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no checkpoint; expected a run's folder, or a checkpoint's"):
        find_checkpoint(tmp_path)
    with pytest.raises(InputError, match="no folder"):
        find_checkpoint(tmp_path / "nowhere")
    path = write(tmp_path, 1)
    text = (path / "checkpoint.json").read_text()
    (path / "checkpoint.json").write_text(text.replace("checkpoint/1", "checkpoint/2"))
    with pytest.raises(InputError, match=r"schema: found 'pyps.checkpoint/2'; expected 'pyps.checkpoint/1'"):
        read_folder(path)


def test_a_manifest_names_no_file_elsewhere(tmp_path: Path) -> None:
    def describe(files: dict[str, TensorFile]) -> Checkpoint:
        named = {"../x": next(iter(files.values()))}
        return Checkpoint(made_with="1", unix_seconds=0, version=1, state={}, files=named)

    path = write_folder(tmp_path, 1, {MODEL: {"a": np.zeros(1, np.float32)}}, describe)
    with pytest.raises(InputError, match=r"found '\.\./x'; expected names without a folder"):
        read_folder(path)
