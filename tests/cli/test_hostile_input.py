"""Hostile input: one message that names the file and the field; no output overwrites an input."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from input_fuzz import CLUSTER, CSV, PROFILE, Outcome, fuzz, in_process

from pyps.errors import InputError
from pyps.formats import read_cluster, read_profile

INPUTS = {"c.toml": CLUSTER, "p.json": json.dumps(PROFILE), "q.json": json.dumps(PROFILE), "m.csv": CSV}
Command = Callable[..., Outcome]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.chdir(tmp_path)
    for name, text in INPUTS.items():
        Path(name).write_text(text)
    return lambda name, *arguments: in_process(name, list(arguments), tmp_path)


@pytest.mark.promise("every field is checked")
def test_a_hundred_hostile_inputs() -> None:
    """`make fuzz-input` tries thousands."""
    assert fuzz(range(100_000, 100_100)) == []


@pytest.mark.parametrize(
    "line",
    [
        "plan c.toml -o c.toml",
        "plan c.toml -o p.json",
        "profile import m.csv -o m.csv --no-plot",
        "profile import m.csv -o out.json --plot m.csv",
        "profile show p.json --plot p.json",
        "profile merge p.json q.json -o q.json",
        "simulate c.toml --iterations 1 --policies bsp --trace c.toml",
        "simulate c.toml --iterations 1 --policies bsp --trace q.json",
        "simulate c.toml --iterations 1 --policies bsp --trace ./../{folder}/c.toml",
    ],
)
def test_no_output_overwrites_an_input(command: Command, tmp_path: Path, line: str) -> None:
    name, *arguments = line.format(folder=tmp_path.name).split()
    done = command(name, *arguments)
    assert done.code == 2
    assert "expected" in done.err
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == INPUTS


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("price", "price_per_hour"),
        ("quantum", "batch_multiple"),
        ("max_bach", "max_batch"),
        ("cuont", "count"),
    ],
)
def test_the_nearest_key_is_proposed(tmp_path: Path, key: str, meant: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(CLUSTER.replace("count = 2", f"{key} = 2"))
    with pytest.raises(InputError, match=rf"worker\[0\]\.{key}: found an unknown key; expected '{meant}'"):
        read_cluster(path)


def test_a_key_like_none_gets_the_list(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(CLUSTER.replace("count = 2", "zzz = 2"))
    with pytest.raises(InputError, match="one of name, "):
        read_cluster(path)


def test_errors_are_json_too(command: Command) -> None:
    Path("c.toml").write_text(CLUSTER.replace("count = 2", "count = 0"))
    done = command("plan", "c.toml", "--json")
    error = json.loads(done.out)["error"]
    assert done.code == error["exit_code"] == 2
    assert error["kind"] == "InputError"
    assert (error["where"], error["field"], error["found"]) == ("c.toml", "worker[0].count", "0")
    assert error["message"] in done.err


def test_no_split_is_json_too(command: Command) -> None:
    done = command("plan", "c.toml", "--json", "--global-batch", "1000000")
    assert done.code == json.loads(done.out)["error"]["exit_code"] == 3


@pytest.mark.parametrize(
    "line",
    [
        "plan --json --nosuch c.toml",
        "plan --json",
        "plan --json c.toml --quantile x",
        "plan pareto --json --nosuch",
        "profile show --json",
        "simulate --json c.toml --iterations many",
        "shm ls --json --nosuch",
    ],
)
def test_wrong_use_is_json_too(command: Command, line: str) -> None:
    name, *arguments = line.split()
    done = command(name, *arguments)
    error = json.loads(done.out)["error"]
    assert done.code == error["exit_code"] == 2
    assert error["kind"] == "UsageError"
    assert error["message"] in done.err


def test_names_are_shown_as_they_are(command: Command) -> None:
    Path("c.toml").write_text(CLUSTER.replace('"a"', '"[/x]"'))
    assert "[/x]" in command("plan", "c.toml").out


def test_what_could_not_be_read_again_is_not_written(command: Command) -> None:
    done = command("profile", "import", "m.csv", "--name", "x" * 300, "-o", "out.json", "--no-plot")
    assert done.code == 2
    assert "device.name" in done.err
    assert not Path("out.json").exists()


def test_a_pipe_is_read_and_an_idle_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.write(write, json.dumps(PROFILE).encode())
    os.close(write)
    assert read_profile(f"/dev/fd/{read}").max_batch == 32
    os.close(read)
    monkeypatch.setattr("pyps.formats.files.PIPE_SECONDS", 0.01)
    read, write = os.pipe()
    with pytest.raises(InputError, match="a pipe from which nothing came"):
        read_profile(f"/dev/fd/{read}")
    os.close(read)
    os.close(write)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(InputError):
        read_profile(tmp_path / "fifo")


def test_deep_keys_are_refused(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(".".join(["a"] * 2000) + " = 1\n")
    with pytest.raises(InputError, match=r"c\.toml"):
        read_cluster(tmp_path / "c.toml")


@pytest.mark.parametrize("budget", ["nan", "inf", "-1", "0"])
def test_a_memory_budget_is_an_amount(command: Command, budget: str) -> None:
    done = command("profile", "digits_mlp", "--memory-budget", budget)
    assert done.code == 2
    assert "--memory-budget" in done.err
