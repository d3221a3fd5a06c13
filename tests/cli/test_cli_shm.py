"""`pyps shm`: what is listed, what is removed, and how it is said."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from pyps.cli.shm import app
from pyps.errors import InputError
from pyps.store import Store

runner = CliRunner()


def make_left_over(name: str) -> None:
    Store.create(name, {"w": np.zeros(5000)}, batches=[1], keep=True).close()


def test_ls_and_gc_in_json(shm: Path) -> None:
    make_left_over("left")
    with Store.create("used", {"w": np.zeros(3)}, batches=[1]):
        listed = json.loads(runner.invoke(app, ["ls", "--json"]).stdout)
        assert listed["folder"] == str(shm)
        left, used = listed["segments"]
        assert (left["name"], left["state"], left["in_use"]) == ("left", "free", False)
        assert (used["name"], used["state"], used["in_use"]) == ("used", "in use", True)
        assert left["bytes"] == (shm / "pyps-left").stat().st_size >= left["resident_bytes"] > 0
        collected = json.loads(runner.invoke(app, ["gc", "--json"]).stdout)
        assert [s["name"] for s in collected["removed"]] == ["left"]
        assert [s["name"] for s in collected["kept"]] == ["used"]
    assert not list(shm.iterdir())


def test_ls_and_gc_for_people(shm: Path) -> None:
    assert f"no segments in {shm}" in runner.invoke(app, ["ls"]).stdout
    make_left_over("left")
    (shm / "pyps-[bold]odd").write_bytes(b"not one")
    listed = runner.invoke(app, ["ls"]).stdout
    assert "left" in listed
    assert "[bold]odd" in listed
    assert "PYPS_" in listed
    collected = runner.invoke(app, ["gc"])
    assert collected.exit_code == 0
    assert "removed 1" in collected.stdout
    assert "kept [bold]odd" in collected.stdout
    (shm / "pyps-[bold]odd").unlink()


def test_a_folder_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYPS_SHM_DIR", "/nowhere/at/all")
    result = runner.invoke(app, ["ls"])
    assert isinstance(result.exception, InputError)
    assert "PYPS_SHM_DIR: found no folder at /nowhere/at/all" in str(result.exception)
