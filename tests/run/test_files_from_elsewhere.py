"""A run's folder or a checkpoint that another has made: it runs nothing, and leads nowhere else."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from run_scripts import script
from run_tools import make_plan
from sampled import examples
from typer.testing import CliRunner

import pyps
from pyps.checkpoint.folder import MANIFEST, verify_folder
from pyps.checkpoint.state import load, save
from pyps.cli.run import app
from pyps.errors import InputError, PypsError
from pyps.formats import Plan, PlannedRun, read_plan, write_json
from pyps.formats.setup import SETUP_FILE, read_setup
from pyps.run.options import RunOptions
from pyps.run.resume import continue_folder, new_store
from pyps.run.spec import prepare, write_setup
from pyps.store.store import Store

WRONG = (None, True, -1, 1.5, 10**30, "x", [], {}, [{}])
EVIL = "from pathlib import Path\nPath('ran').touch()\n"


@pytest.fixture
def run_dir(shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a run that has not begun to train; a module lies in the current folder."""
    (tmp_path / "evilmod.py").write_text(EVIL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    write_json(tmp_path / "plan.json", make_plan())
    spec = prepare(tmp_path / "plan.json", script(tmp_path), RunOptions(samples=8, run_dir=tmp_path / "out"))
    write_setup(spec)
    return spec.run_dir


def make_store(name: str, keep: bool = False) -> Store:
    return pyps.Store.create(name, {"w": np.ones(8, np.float32)}, batches=[4], keep=keep)


def change_setup(run_dir: Path, **changes: Any) -> None:
    raw = json.loads((run_dir / SETUP_FILE).read_bytes())
    raw.update(changes)
    (run_dir / SETUP_FILE).write_text(json.dumps(raw), encoding="utf-8")


@pytest.mark.promise("remove no store but one of a run alone")
def test_a_store_that_run_json_names_is_not_removed(run_dir: Path, shm: Path) -> None:
    """But one of a run alone, by a name that only that run has."""
    own = new_store()
    for name in ("precious", "run-1-precious", own):
        make_store(name, keep=True).close()
        change_setup(run_dir, store=name)
        continue_folder(run_dir, 0, run_dir / "run.jsonl")
        left = shm / f"pyps-{name}"
        assert left.exists() == (name != own)
        left.unlink(missing_ok=True)


@pytest.mark.promise("a policy of your own needs `--policy` again")
@pytest.mark.parametrize("where", ["options", "plan", "checkpoint", "plan of a checkpoint"])
def test_a_policy_is_imported_only_if_the_user_names_it(run_dir: Path, tmp_path: Path, where: str) -> None:
    evil = msgspec.structs.replace(make_plan(), run=PlannedRun(policy="evilmod.P"))
    resume, more = run_dir, []
    if where == "options":
        change_setup(run_dir, options=read_setup(run_dir).options | {"policy": "evilmod.P"})
    elif where == "plan":
        write_json(run_dir / "plan.json", evil)
        change_setup(run_dir, plan_digest="")
    else:
        plan: Plan = evil if where.startswith("plan") else make_plan()
        policy = None if plan is evil else "evilmod.P"
        with make_store("run") as store:
            resume = save(store.state(), tmp_path / "checkpoints", seed=4, policy=policy, plan=plan)
        more = ["--samples", "100"]
    done = CliRunner().invoke(app, ["--resume", str(resume), *more, str(tmp_path / "train.py")])
    assert isinstance(done.exception, InputError)
    assert "evilmod.P" in done.exception.found
    assert "--policy evilmod.P" in done.exception.expected
    assert not Path("ran").exists()


@pytest.mark.promise("A link or a pipe in a resumed folder is refused")
@pytest.mark.parametrize("name", ["run.jsonl", "journal", "checkpoints", "undone.jsonl", "worker-0-7.jsonl"])
def test_a_link_in_a_resumed_folder_is_not_followed(run_dir: Path, tmp_path: Path, name: str) -> None:
    target = tmp_path / "mine"
    target.mkdir() if name == "checkpoints" else target.write_bytes(b"12345678")
    (run_dir / name).symlink_to(target)
    with pytest.raises(InputError, match="a link"):
        prepare(None, script(tmp_path), RunOptions(samples=8, resume=run_dir))
    (run_dir / name).unlink()
    if name != "checkpoints":
        os.mkfifo(run_dir / name)
        with pytest.raises(InputError, match="neither a file nor a folder"):
            prepare(None, script(tmp_path), RunOptions(samples=8, resume=run_dir))
        assert target.read_bytes() == b"12345678"


@pytest.mark.parametrize(
    "files",
    [
        {"model.safetensors": 5},
        {"model.safetensors": {}},
        {"model.safetensors": {"bytes": 1}},
        {"a.b": {"bytes": "x"}},
        {"": {}},
        {"a": {"bytes": 1, "sha256": 5}},
        {"a": {"bytes": 1, "sha256": "0" * 64, "more": 5}},
        [],
        7,
        None,
    ],
)
def test_wrong_files_of_a_checkpoint_are_an_error(shm: Path, tmp_path: Path, files: Any) -> None:
    with make_store("run") as store:
        path = save(store.state(), tmp_path / "checkpoints")
    raw = json.loads((path / MANIFEST).read_bytes())
    raw["files"] = files
    (path / MANIFEST).write_text(json.dumps(signed_again(raw)), encoding="utf-8")
    with pytest.raises(InputError, match="files"):
        verify_folder(path)


def signed_again(raw: Any) -> Any:
    """A changed checkpoint.json, as one writes it who wants it to be taken."""
    if not isinstance(raw, dict) or "sha256" not in raw:
        return raw
    rest = {name: value for name, value in raw.items() if name != "sha256"}
    return rest | {"sha256": hashlib.sha256(msgspec.json.encode(rest, order="sorted")).hexdigest()}


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the ways to all values in a value, of a list's items to the first two."""
    yield ()
    inner = (
        value.items() if isinstance(value, dict) else enumerate(value[:2] if isinstance(value, list) else ())
    )
    for key, one in inner:
        yield from ((key, *rest) for rest in places(one))


def changed(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    """The value with another one in that place."""
    if not place:
        return new
    value, key = value.copy(), place[0]
    value[key] = changed(value[key], place[1:], new)
    return value


@pytest.mark.promise("every field is checked")
def test_a_wrong_type_anywhere_is_a_message(run_dir: Path, shm: Path, tmp_path: Path) -> None:
    with make_store("run") as store:
        saved = save(store.state(), tmp_path / "checkpoints", seed=4, plan=make_plan())
    readers: list[tuple[Path, Callable[[], object]]] = [
        (tmp_path / "plan.json", lambda: read_plan(tmp_path / "plan.json")),
        (run_dir / SETUP_FILE, lambda: read_setup(run_dir)),
        (saved / MANIFEST, lambda: load(saved)),
    ]
    refused = 0
    for path, read in readers:
        raw = json.loads(path.read_bytes())
        cases = list(itertools.product(places(raw), WRONG))
        for place, new in random.Random(45).sample(cases, examples(min(150, len(cases)), len(cases))):
            path.write_text(json.dumps(signed_again(changed(raw, place, new))), encoding="utf-8")
            try:  # some values are as good as those that they replace
                read()
            except PypsError:
                refused += 1
    assert refused > 200
