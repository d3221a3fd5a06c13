"""Text of files and other hosts on a terminal, files that are none, and what a hostile run folder may do."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from input_fuzz import CLUSTER, PROFILE, in_process
from run_scripts import options_for, pyps_run, script
from run_tools import make_plan, make_setup

import pyps
from pyps.checkpoint.folder import find_checkpoint, write_weights
from pyps.checkpoint.state import load, save
from pyps.checkpoint.tensors import read_tensors
from pyps.errors import InputError, PypsError, shown
from pyps.formats import read_plan, write_json
from pyps.formats.events import EVENTS, UNDONE, EventLog, read_events, read_undone
from pyps.formats.records import read_records
from pyps.formats.setup import SETUP_FILE, read_setup
from pyps.profiler.points_csv import import_points
from pyps.report.report import read_report
from pyps.run.before import BEFORE, Before
from pyps.run.options import options_from_json
from pyps.run.resume import find_resumed

ROOT = Path(__file__).resolve().parents[2]
ODD = "a\x1b]0;owned\x07\u202eb\x9b2J"
HARMLESS = re.compile(r"[^\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]*")


def test_control_and_direction_signs_are_escaped() -> None:
    assert shown("é☃ a\x1b[31m\u202eb\n") == "é☃ a\\x1b[31m\\u202eb\\n"
    assert shown("a\nb\tc\x00", keep="\n\t") == "a\nb\tc\\x00"


@pytest.mark.promise("control characters in names, paths and keys are shown escaped")
@pytest.mark.parametrize(
    "line",
    [
        "plan c.toml",
        "plan pareto c.toml",
        "profile show p.json",
        "profile compare p.json p.json",
        "plan \x1b[J",
    ],
)
def test_names_of_a_file_reach_no_terminal_as_they_are(tmp_path: Path, line: str) -> None:
    (tmp_path / "c.toml").write_text(CLUSTER.replace('"a"', json.dumps(ODD)).replace('"q.json"', '"p.json"'))
    named = {**PROFILE, "device": {"name": ODD}, "model": {**PROFILE["model"], "name": ODD}}  # type: ignore[dict-item]
    (tmp_path / "p.json").write_text(json.dumps(named))
    done = in_process(line.split()[0], line.split()[1:], tmp_path)
    assert HARMLESS.fullmatch(done.out + done.err)
    assert "\\x1b" in done.out + done.err


def test_all_that_a_command_prints_passes_the_terminal() -> None:
    """No other console, print() or echo() in the commands; JSON and what typer prints go their own way."""
    for path in sorted((ROOT / "pyps" / "cli").glob("*.py")):
        if path.name not in ("terminal.py", "__init__.py"):
            found = re.findall(r"(?<![\w.])(?<!def )(?:Console|print|typer\.echo)\(", path.read_text())
            assert not found, path.name


FIFO_READERS = {
    "run.json": lambda p: read_setup(p.parent),
    "report.json": read_report,
    "run.jsonl": read_events,
    "worker-0-1.jsonl": read_records,
    "undone.jsonl": lambda p: read_undone(p.parent),
    "model.safetensors": read_tensors,
    "events of a start": lambda p: EventLog(p),
    "plan.json": read_plan,
    "points.csv": lambda p: import_points(p),
}


@pytest.mark.promise("a pipe in place of one")
@pytest.mark.parametrize("name", FIFO_READERS)
def test_a_pipe_in_place_of_a_file_is_refused_soon(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / name)
    monkeypatch.setattr(
        "pyps.formats.files.PIPE_SECONDS", 0.1
    )  # pipes may be a command's input, but not idle
    began = time.monotonic()
    with pytest.raises(InputError):
        FIFO_READERS[name](tmp_path / name)
    assert time.monotonic() - began < 1.0


@pytest.mark.parametrize(
    "values",
    [
        {"samples": "many"},
        {"samples": 8, "seed": []},
        {"samples": 8, "args": {"a": 1}},
        {"samples": 8, "ranks": "0"},
        {"samples": 8, "policy": 3},
        {"samples": 8, "checkpoint_every": None, "even": 1},
        {"samples": 8, "metrics": [1]},
        {"samples": 8, "profile": {"x": [[]]}},
    ],
)
def test_options_of_a_wrong_type_are_named(values: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"run\.json: options\.\w+: found"):
        options_from_json("run.json", values)


def test_deep_nesting_is_refused(tmp_path: Path) -> None:
    deep = '{"schema": "pyps.run/1", "options": ' + '{"a":' * 100_000
    for name, reader in (("run.json", lambda p: read_setup(p.parent)), ("report.json", read_report)):
        (tmp_path / name).write_text(deep)
        with pytest.raises(InputError):
            reader(tmp_path / name)
    (tmp_path / "run.jsonl").write_text('{"kind":' + "[" * 100_000 + "\n")
    with pytest.raises(InputError):
        read_events(tmp_path / "run.jsonl")


def test_loops_of_links_are_refused(tmp_path: Path) -> None:
    os.symlink("loop", tmp_path / "loop")
    for use in (find_checkpoint, find_resumed, load, read_plan, read_setup):
        with pytest.raises(InputError):
            use(tmp_path / "loop")
    (tmp_path / "run").mkdir()
    os.symlink("latest", tmp_path / "run" / "latest")
    with pytest.raises(InputError, match="no checkpoint"):
        find_checkpoint(tmp_path / "run")


def digest(raw: dict[str, Any]) -> str:
    values = {key: value for key, value in raw.items() if key != "sha256"}
    return hashlib.sha256(msgspec.json.encode(values, order="sorted")).hexdigest()


WRONG = [None, -1, 2**70, 1.5, "x", [], {}, [[]], {"$": "tensor"}, True]


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where each value of plain data is."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*place, key))
    yield place


def put(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    if not place:
        return new
    changed = dict(value) if isinstance(value, dict) else list(value)
    changed[place[0]] = put(changed[place[0]], place[1:], new)
    return changed


@pytest.mark.slow
def test_a_checkpoint_signed_anew_with_wrong_values_is_refused(shm: Path, tmp_path: Path) -> None:
    """Each value of its state in turn is of another type or size: an error of pyps, or a store."""
    tensors = {"a": np.ones((2, 3), np.float32)}
    with pyps.Store.create("run", tensors, batches=[4]) as store:
        path = save(store.state(), tmp_path / "checkpoints")
    manifest = path / "checkpoint.json"
    raw = json.loads(manifest.read_bytes())
    for number, place in enumerate(places(raw["state"])):
        for wrong in WRONG:
            with contextlib.suppress(OverflowError):  # what JSON cannot hold
                changed = {**raw, "state": put(raw["state"], place, wrong)}
                manifest.write_bytes(msgspec.json.encode({**changed, "sha256": digest(changed)}))
            with contextlib.suppress(PypsError):
                state = load(path).state
                pyps.Store.create(f"{number}", tensors, batches=[4], state=state).close()
            with contextlib.suppress(PypsError):
                write_weights(path, tmp_path / "w.safetensors")


def test_a_module_of_a_policy_that_does_not_compile_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken_policy.py").write_text("def f(:\n")
    with pytest.raises(InputError, match="SyntaxError"):
        pyps.store.policies.policy_named("broken_policy.Mine")


def test_a_round_timeout_has_a_least_value(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(CLUSTER.replace('"q.json"', '"p.json"'))
    (tmp_path / "p.json").write_text(json.dumps(PROFILE))
    done = in_process("simulate", ["c.toml", "--iterations", "1", "--round-timeout", "1e-9"], tmp_path)
    assert done.code == 2
    assert "--round-timeout: found 1e-09; expected 0.001 to" in done.err
    assert (
        in_process("simulate", ["c.toml", "--iterations", "1", "--round-timeout", "0.001"], tmp_path).code
        == 0
    )


def test_a_picture_of_odd_names(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for number, name in enumerate(("a\0b", "$x_{", ODD)):
        profile = {**PROFILE, "device": {"name": name}}
        (tmp_path / f"{number}.json").write_text(json.dumps(profile))
        done = in_process("profile", ["show", f"{number}.json", "--plot", f"{number}.png"], tmp_path)
        assert done.code == 0, done.err


INTERRUPTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, sys.argv[1])
from pyps import cli
sys.argv = ["pyps", "plan"]
cli.main()
"""


def test_an_interrupt_while_modules_are_imported_is_quiet(tmp_path: Path) -> None:
    """The module turns the exception into its own."""
    (tmp_path / "typer.py").write_text(
        "import os, signal\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    import time; time.sleep(5)\n"
        "except KeyboardInterrupt:\n    raise ImportError('failed')\n"
    )
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, str(tmp_path)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


@pytest.mark.promise("you have to name the script")
def test_a_run_that_others_may_write_to_starts_no_script_of_its_own(tmp_path: Path) -> None:
    out, path = tmp_path / "out", script(tmp_path)
    out.mkdir()
    write_json(tmp_path / "plan.json", make_plan())
    setup = make_setup({0: 5, 1: 3}, script=str(path), options={"samples": 8})
    write_json(out / SETUP_FILE, setup)
    write_json(out / "plan.json", make_plan())
    for place in (out, out / SETUP_FILE):
        os.chmod(place, os.stat(place).st_mode | 0o020)
        done = in_process("run", ["--resume", str(out)], tmp_path)
        assert done.code == 2
        assert "found a run that others own or may write to; expected" in done.err
        assert "--resume RUN SCRIPT" in done.err
        os.chmod(place, os.stat(place).st_mode & ~0o022)
    if os.geteuid() == 0:
        os.chown(out, 12345, -1)
        assert "others own" in in_process("run", ["--resume", str(out)], tmp_path).err


@pytest.mark.promise("its path is shown first")
@pytest.mark.slow
def test_a_start_that_fails_leaves_the_run_as_it_was(shm: Path, tmp_path: Path) -> None:
    """Also one that was killed: the next start puts everything back. Then the advice works."""
    path, out = script(tmp_path), tmp_path / "out"
    write_json(tmp_path / "plan.json", make_plan([8]))
    old = os.umask(0o002)
    try:
        first = pyps_run(*options_for(tmp_path / "plan.json", 16, tmp_path), path)
    finally:
        os.umask(old)
    assert first.returncode == 0, first.stderr
    files = {p.name: p.read_bytes() for p in out.iterdir() if p.is_file() and p.suffix != ".log"}
    (tmp_path / "other.py").write_text("import pyps\nraise SystemExit('the wrong one')\n")
    failed = pyps_run("--resume", out, "--samples", "32", tmp_path / "other.py")
    assert failed.returncode == 1
    assert "the wrong one" in failed.stderr
    assert f"nothing was trained: {out} is as it was" in failed.stderr
    kept = {p.name: p.read_bytes() for p in out.iterdir() if p.is_file() and p.suffix != ".log"}
    assert kept == files
    assert read_setup(out).script == str(path)

    Before(out).__enter__()  # a launcher is killed after it has changed the folder
    write_json(out / SETUP_FILE, make_setup({0: 1}))
    (out / "worker-0-1.jsonl").write_bytes(b"{}\n")
    (out / EVENTS).write_bytes(b"")
    again = pyps_run("--resume", out, "--samples", "32")
    assert again.returncode == 0, again.stderr
    assert f"starts {path}, as {out} says" in again.stderr
    assert not (out / BEFORE).exists()
    assert not (out / "worker-0-1.jsonl").exists()
    assert [e.kind for e in read_events(out / EVENTS)].count("resumed") == 1
    assert read_setup(out).samples == 32
    assert UNDONE not in os.listdir(out)
