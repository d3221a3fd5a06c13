"""Runs that are stopped, killed or fail, and go on: from the command line, and piece by piece."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import kill_and_resume
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_scripts import SAMPLES, B, options_for, pyps_run, script, until
from run_tools import make_plan, make_record
from safetensors.numpy import load_file
from typer.testing import CliRunner

import pyps
from pyps.checkpoint.folder import checkpoints
from pyps.checkpoint.state import save
from pyps.cli.export import app
from pyps.cli.run import app as run_app
from pyps.errors import InputError
from pyps.formats import PlannedRun, read_plan, write_json
from pyps.formats.events import EventLog, read_events
from pyps.formats.files import write_lines
from pyps.formats.plan import check_plan
from pyps.formats.records import RecordWriter, drop_undone, read_run, record_path
from pyps.native.status import Status
from pyps.run import run
from pyps.run.before import Before
from pyps.run.checkpoints import Checkpointer
from pyps.run.launcher import Launcher, TrainingFailed
from pyps.run.main import run_prepared
from pyps.run.options import Interval, RunOptions, interval_of, options_from_json, options_to_json
from pyps.run.ranks import with_split
from pyps.run.resume import continue_folder
from pyps.run.spec import prepare, write_setup
from pyps.store.policies import SSP

PYPS = str(Path(sys.executable).parent / "pyps")
KILLED_SAMPLES = 1200  # more than are trained before the run is killed


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    write_json(tmp_path / "plan.json", make_plan())
    return tmp_path / "plan.json"


@pytest.mark.thorough
def test_a_run_that_has_finished_is_left_as_it_is(shm: Path, plan: Path, tmp_path: Path) -> None:
    """No process is started. More samples are trained."""
    out = tmp_path / "out"
    options = RunOptions(samples=SAMPLES, dataset_size=40, policy="ssp", run_dir=out)
    report = run(plan, script(tmp_path), options)
    files = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    done = pyps_run("--resume", out, "--policy", "bsp")
    assert done.returncode == 2
    finished = f"samples: found {SAMPLES}: this run has finished ({SAMPLES} of {SAMPLES} samples)"
    assert finished in done.stderr
    assert finished in pyps_run("--resume", out, "--epochs", str(SAMPLES / 40)).stderr, (
        "the data set's size is known"
    )
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == files
    newest = checkpoints(out / "checkpoints")[-1]
    with pytest.raises(InputError, match="this run has finished"):
        run(plan, script(tmp_path), RunOptions(samples=SAMPLES, resume=newest, run_dir=tmp_path / "new"))
    assert not (tmp_path / "new").exists()
    more = RunOptions(samples=SAMPLES + B, policy="ssp", resume=out)
    planned = (out / "plan.json").read_text()
    (out / "plan.json").write_text(planned.replace('"iteration_seconds": ', '"iteration_seconds": 1'))
    with pytest.raises(InputError, match="a plan that was changed since the run began; expected --plan"):
        run(None, script(tmp_path), more)
    assert (out / "plan.json").read_text() != planned
    (out / "plan.json").unlink()
    assert run(None, script(tmp_path), more).versions > report.versions


RAISES = """        if worker.steps == 9:
            raise RuntimeError("the cat sat on the keyboard")
        worker.step(loss)"""


def test_a_run_killed_and_resumed_ends_as_one_that_was_not(shm: Path, tmp_path: Path) -> None:
    """Bit for bit. Many more kills: python tests/helpers/kill_and_resume.py."""
    killed = kill_and_resume.prove(tmp_path, "bsp", KILLED_SAMPLES, kills=1, seed=0)
    report = json.loads((killed.run_dir / "report.json").read_text())
    assert report["outcome"] == "finished"
    assert killed.had_finished or len(report["resumed_at"]) == 1
    assert report["samples"]["trained"] == KILLED_SAMPLES
    trained = sorted(p for r in read_run(killed.run_dir) for p in range(r.first, r.first + r.samples))
    assert len(trained) == len(set(trained)) <= KILLED_SAMPLES


@pytest.mark.thorough
def test_a_failed_run_keeps_what_it_learned(shm: Path, plan: Path, tmp_path: Path) -> None:
    path, out = tmp_path / "train.py", tmp_path / "out"
    path.write_text(kill_and_resume.TRAIN.replace("        worker.step(loss)", RAISES))
    options = RunOptions(samples=600, run_dir=out, max_restarts=0, checkpoint_every=2, args=["0.004"])
    with pytest.raises(TrainingFailed, match="the cat sat") as caught:
        run(plan, path, options)
    newest = checkpoints(out / "checkpoints")[-1]
    assert f"the last checkpoint is {newest}: continue with pyps run --resume {out}" in caught.value.__notes__
    events = read_events(out / "run.jsonl")
    assert [e.version for e in events if e.kind == "checkpoint"][-1] == int(newest.name) >= 8


def test_a_signal_ends_a_run_with_a_checkpoint(shm: Path, plan: Path, tmp_path: Path) -> None:
    """Under asp, with every sample counted; the checkpoint begins a new run with other ranks and batches."""
    out = tmp_path / "out"
    (tmp_path / "train.py").write_text(kill_and_resume.COUNT)
    options = [*options_for(plan, 0, tmp_path), "--policy", "asp:scaling=none", "--checkpoint-every", "1000"]
    command = [PYPS, "run", *map(str, options), str(tmp_path / "train.py"), "0.05"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until(lambda: len([p for p in out.glob("worker-*.jsonl") if p.stat().st_size]) == 2)
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert [e.kind for e in read_events(out / "run.jsonl")].count("left") == 2, "they finished their steps"
    (path,) = checkpoints(out / "checkpoints")
    assert f"the last checkpoint is {path}: continue with pyps run --resume {out}\n" in errors
    assert json.loads((out / "report.json").read_text())["checkpoint"] == path.name

    write_json(tmp_path / "other.json", make_plan((4,)))
    more = ["--plan", str(tmp_path / "other.json"), "--samples", "400", "--run-dir", tmp_path / "new"]
    done = pyps_run("--resume", path, *more, tmp_path / "train.py", "0")
    assert done.returncode == 0, done.stderr
    assert f"resumed at version {path.name.lstrip('0')}\n" in done.stdout
    counts = load_file(tmp_path / "new" / "model.safetensors")["weight"]
    np.testing.assert_array_equal(counts, -10.0)
    assert [p.name for p in checkpoints(out / "checkpoints")] == [path.name]


def test_export(shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    with pyps.Store.create("run", {"a": np.ones((2, 3), np.float32), "m": np.zeros(2)}, batches=[4]) as store:
        path = save(store.state(), tmp_path / "checkpoints")
    monkeypatch.chdir(tmp_path)
    app(["checkpoints/latest", "x.safetensors"], standalone_mode=False)
    assert capsys.readouterr().out == f"x.safetensors: 2 tensors of {path}\n"
    found = load_file("x.safetensors")
    assert {name: values.shape for name, values in found.items()} == {"a": (2, 3), "m": (2,)}
    with pytest.raises(
        InputError, match=r"x\.safetensors: found a file; expected a new name, or --overwrite"
    ):
        app([".", "x.safetensors"], standalone_mode=False)
    (path / "model.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match=r"model\.safetensors: size: found 0 bytes"):
        app([".", "x.safetensors", "--overwrite"], standalone_mode=False)


@given(st.integers(0, 10**18 - 1), st.sampled_from("smh"), st.floats(0.001, 1e6))
def test_intervals(versions: int, unit: str, time_: float) -> None:
    assert interval_of(versions, "x") == interval_of(str(versions), "x") == Interval(versions)
    seconds = round(time_, 3) * {"s": 1, "m": 60, "h": 3600}[unit]
    assert interval_of(f"{round(time_, 3):f}{unit}", "x").seconds == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "5 m", "-1", "1d", "m", "1e3", "0x1", "nan"])
def test_what_is_no_interval(text: str) -> None:
    with pytest.raises(InputError, match=r"x: found .*; expected a number of versions \(500\) or a time"):
        interval_of(text, "x")


def test_options_are_read_back_as_they_were_written(plan: Path, tmp_path: Path) -> None:
    policy = SSP(bound=7, round_timeout_seconds=3.5)
    options = RunOptions(samples=9, policy=policy, args=("--x", "1"), seed=4, codec="int8", max_restarts=1)
    values = json.loads(json.dumps(options_to_json(options)))
    found = options_from_json("run.json", values)
    assert options_to_json(found) == options_to_json(options)
    assert (found.policy, found.round_timeout) == ("ssp:bound=7", 3.5)
    with pytest.raises(InputError, match=r"run.json: options.colour: found an unknown option"):
        options_from_json("run.json", {**values, "colour": 1})


def test_a_resumed_run_may_leave_its_pipeline(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another depth in place of the one that it began with; run.json of earlier versions says `pipeline`."""
    begun = RunOptions(samples=8, run_dir=tmp_path / "out", policy="hps", depth=3)
    write_setup(prepare(plan, script(tmp_path), begun))
    asked: list[RunOptions] = []

    def record(plan: Any, script: Any, options: RunOptions, **_: Any) -> None:
        asked.append(options)
        raise TrainingFailed("not now")

    monkeypatch.setattr("pyps.cli.run.run", record)
    for more in (["--depth", "1"], ["--depth", "2"], []):
        CliRunner().invoke(run_app, ["--resume", str(tmp_path / "out"), *more])
    assert [one.depth for one in asked] == [1, 2, 3]
    with pytest.raises(InputError, match="depth: found 9; expected 1 to 8, or auto"):
        RunOptions(samples=8, depth=9).check()
    for pipeline, depth, found in ((False, 3, 3), (False, None, 1), (True, None, "auto"), (None, None, None)):
        earlier = options_to_json(begun) | {"pipeline": pipeline, "depth": depth}
        assert options_from_json("run.json", earlier).depth == found


def test_a_run_that_goes_on_may_have_equal_batches(plan: Path, tmp_path: Path) -> None:
    """Without another plan, too. One that had them goes on with those that it came to have."""
    path, out = script(tmp_path), tmp_path / "out"
    write_setup(prepare(plan, path, RunOptions(samples=8, run_dir=out)))
    spec = prepare(None, path, RunOptions(samples=8, resume=out, even=True))
    assert [worker.batch for worker in spec.plan.workers] == [4, 4]
    write_setup(spec)
    write_json(out / "plan.json", with_split(spec.plan, (6, 2)))
    again = prepare(None, path, RunOptions(samples=8, resume=out, even=True))
    assert [worker.batch for worker in again.plan.workers] == [6, 2]


def test_a_checkpoint_from_elsewhere_goes_on_in_its_order_of_samples(
    shm: Path, plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its position is one in this order; another one can be asked for. So with its policy, which `--policy`
    may have made another one than its plan's.
    """
    named = msgspec.structs.replace(read_plan(plan), run=PlannedRun(policy="ssp"))
    write_json(tmp_path / "named.json", named)
    with pyps.Store.create("run", {"a": np.ones(3, np.float32)}, batches=[4]) as store:
        path = save(store.state(), tmp_path / "checkpoints", seed=4, policy="asp:lookahead=false", plan=named)
    asked: list[RunOptions] = []

    def record(plan: Any, script: Any, options: RunOptions, **_: Any) -> None:
        asked.append(options)
        raise TrainingFailed("not now")

    monkeypatch.setattr("pyps.cli.run.run", record)
    other = ["--plan", plan]
    wins = ["--plan", tmp_path / "named.json"], ["--policy", "bsp"]
    for more in ([], other, [*other, "--seed", "5"], *wins):
        options = ["--resume", path, "--samples", "8", *more, script(tmp_path)]
        CliRunner().invoke(run_app, [str(option) for option in options])
    assert [one.seed for one in asked] == [4, 4, 5, 4, 4]
    kept = "asp:lookahead=false"
    assert [one.policy for one in asked] == [kept, kept, kept, None, "bsp"]


def test_a_run_under_nohup_survives_its_terminal(shm: Path, plan: Path, tmp_path: Path) -> None:
    spec = prepare(plan, script(tmp_path), RunOptions(samples=8, run_dir=tmp_path / "out"))
    usual = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with EventLog(spec.run_dir / "run.jsonl") as log, Launcher(spec, log):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert callable(signal.getsignal(signal.SIGTERM))
    finally:
        signal.signal(signal.SIGHUP, usual)


def test_a_folder_goes_on_on_one_clock_and_without_undone_steps(tmp_path: Path, plan: Path) -> None:
    """The machine was started anew: its clock began at 0 again."""
    spec = prepare(plan, script(tmp_path), RunOptions(samples=8, run_dir=tmp_path / "out"))
    write_setup(spec)
    with RecordWriter(spec.run_dir / "worker-0-11.jsonl") as writer:
        for version in (1, 2, 3):
            record = make_record(0, version, 5, [("compute", 1e6 + version, 1e6 + version + 0.5)])
            writer.write(record)
    with (spec.run_dir / "worker-0-11.jsonl").open("ab") as file:
        file.write(b'{"rank":0,"pi')
    offset = time.time() - time.monotonic()
    raw = {"kind": "started", "monotonic_seconds": 1e6, "unix_seconds": offset + 500.0, "rank": 0, "pid": 11}
    (spec.run_dir / "run.jsonl").write_bytes(json.dumps(raw).encode() + b'\n{"kin')
    for _ in range(2):
        continue_folder(spec.run_dir, 2, spec.run_dir / "run.jsonl")
        assert [r.version for r in read_run(spec.run_dir)] == [1, 2]
        assert read_run(spec.run_dir)[0].spans[0][1] == pytest.approx(501.0, abs=1.0)
        (event,) = read_events(spec.run_dir / "run.jsonl")
        assert event.monotonic_seconds == pytest.approx(500.0, abs=1.0)


def test_what_a_resume_undoes_is_counted(tmp_path: Path, plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time: a later part may be lost too."""
    out, events = tmp_path / "out", []
    write_setup(prepare(plan, script(tmp_path), RunOptions(samples=8, run_dir=out)))
    monkeypatch.setattr("pyps.run.main.launch", lambda launcher: events.append(launcher.log.events[-1]))
    for pid, versions in ((11, 3), (12, 2), (13, 0)):
        with RecordWriter(out / f"worker-0-{pid}.jsonl") as writer:
            for version in range(1, versions + 1):
                writer.write(make_record(0, version, 5, [("compute", version, version + 0.5)]))
        run_prepared(prepare(plan, script(tmp_path), RunOptions(samples=8, resume=out)))
    assert [(event.kind, event.pushes) for event in events] == [
        ("resumed", 3),
        ("resumed", 2),
        ("resumed", None),
    ]


def test_a_rank_drops_what_its_store_does_not_have(tmp_path: Path) -> None:
    """From the first undone step on, also those that were never admitted; other ranks' are left."""
    for name, pushes in (("0-11", (1, 2, 0)), ("0-12", (3, 0, 4, 0)), ("1-13", (9,))):
        with RecordWriter(tmp_path / f"worker-{name}.jsonl") as writer:
            for number in pushes:
                record = make_record(int(name[0]), 1, 5, [("compute", float(number), 9.0)])
                writer.write(msgspec.structs.replace(record, pushes=number, rejected=not number))
    drop_undone(tmp_path, 0, 4)
    assert [r.pushes for r in read_run(tmp_path)] == [0, 0, 0, 1, 2, 3, 4, 9]
    drop_undone(tmp_path, 0, 3)
    assert [r.pushes for r in read_run(tmp_path)] == [0, 0, 1, 2, 3, 9]
    drop_undone(tmp_path, 0, 0)
    assert [r.pushes for r in read_run(tmp_path)] == [9]


def test_a_folder_on_a_full_disk_is_named_and_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "worker-0-11.jsonl"
    with RecordWriter(path) as writer:
        writer.write(make_record(0, 1, 5, [("compute", 1.0, 2.0)]))
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match=r"worker-0-11\.jsonl: found no space left on device"):
        write_lines(path, [])
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == before
    drop_undone(tmp_path, 0, -1)  # a worker's own needs no room
    assert not read_run(tmp_path)


def test_a_resume_on_a_full_disk_says_so_and_leaves_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.jsonl").write_bytes(b"")

    def full(source: Path, target: Path) -> None:
        target.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(source), None, str(target))

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(InputError, match=f"^{tmp_path}: found no space left on device; expected a folder"):
        Before(tmp_path).__enter__()
    assert os.listdir(tmp_path) == ["run.jsonl"]


def test_a_line_that_was_cut_is_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with EventLog(path) as log:
        log.write("started", rank=0)
        with pytest.raises(InputError, match="a run that is still going on"):
            EventLog(path)
    path.write_bytes(path.read_bytes() + b'{"kind":"joi')
    with EventLog(path) as log:
        log.write("resumed", version=3)
        assert [e.kind for e in log.events] == ["started", "resumed"]
    assert [e.kind for e in read_events(path)] == ["started", "resumed"]


def test_what_cannot_be_resumed_is_said(shm: Path, plan: Path, tmp_path: Path) -> None:
    path, out = script(tmp_path), tmp_path / "out"
    write_setup(prepare(plan, path, RunOptions(samples=8, run_dir=out)))
    with pytest.raises(InputError, match="which holds a run; expected a folder without one, or --resume "):
        prepare(plan, path, RunOptions(samples=8, run_dir=out))
    with pytest.raises(InputError, match="which is resumed; one of its checkpoints can begin a new run"):
        prepare(plan, path, RunOptions(samples=8, run_dir=tmp_path / "x", resume=out))
    spec = prepare(None, path, RunOptions(samples=8, resume=out))
    assert (spec.resumed.version, spec.resumed.path, spec.run_dir) == (0, None, out)
    heard: list[str] = []
    run_prepared(spec, on_notice=heard.append)
    assert heard[0] == f"{out} has no checkpoint yet: the run begins again with its first sample"
    with pytest.raises(InputError, match="no checkpoint; expected a run's folder"):
        prepare(plan, path, RunOptions(samples=8, resume=tmp_path))
    with pytest.raises(InputError, match="checkpoint_every: found '5x'"):
        prepare(plan, path, RunOptions(samples=8, checkpoint_every="5x"))


def status(version: int) -> Any:
    fields = dict.fromkeys(Status.__dataclass_fields__, 0)
    return Status(**{**fields, "version": version, "all_joined": True})


def test_when_checkpoints_are_written(
    shm: Path, plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every so many versions, one at a time; again after one that failed, which is said whatever it was."""
    written: list[int] = []
    failed: list[Exception] = []
    write_json(plan, make_plan((4,)))
    options = RunOptions(samples=8, run_dir=tmp_path / "out", checkpoint_every=10, keep_checkpoints=9)
    spec = prepare(plan, script(tmp_path), options)
    writer = Checkpointer(spec, lambda version, _: written.append(version), failed.append)
    with pyps.Store.create(spec.store, {"a": np.ones(3, np.float32)}, batches=[4]) as store:
        store.join(0)
        for version in range(1, 35):
            store.start()
            store.push(store.stage(), 4, pyps.Hyper(lr=0.1))
            writer.update(status(version))
            assert writer.wait(10.0)
        monkeypatch.setattr("pyps.run.checkpoints.save", lambda *_, **__: 1 / 0)
        writer.update(status(40))
        assert writer.wait(10.0)
    assert written == [10, 20, 30]
    assert [str(error) for error in failed] == ["ZeroDivisionError('division by zero')"]
    failed.clear()
    writer.update(status(50))  # the store is gone
    assert writer.wait(10.0)
    assert [type(error).__name__ for error in failed] == ["SegmentNotFound"]
    assert (writer.version, writer.path) == (30, spec.run_dir / "checkpoints" / "000000030")


def test_the_rank_that_makes_the_store_writes(plan: Path, tmp_path: Path) -> None:
    """Rank 0's launcher writes it; with keep_checkpoints=0, none."""
    for changes in ({"ranks": [1], "connect": "tcp://127.0.0.1:1/x?insecure=1"}, {"keep_checkpoints": 0}):
        options = RunOptions(samples=8, run_dir=tmp_path / str(len(changes)), checkpoint_every=1, **changes)
        spec = prepare(plan, script(tmp_path), options)
        writer = Checkpointer(spec, lambda *_: None, lambda _: None)
        writer.update(status(5))
        writer.begin_last(5, 1.0)
        assert writer.wait(0.0)
        assert writer.path is None


def test_a_checkpoints_plan_has_the_batches_in_force() -> None:
    plan = make_plan((5, 3, 0))
    moved = with_split(plan, (6, 2))
    assert [worker.batch for worker in moved.workers] == [6, 2, 0]
    check_plan("moved", moved)
    assert with_split(plan, (5, 3)) == with_split(plan, (8, 3)) == plan


def test_workers_with_the_pids_of_earlier_ones_have_trained_too(tmp_path: Path) -> None:
    """It is so in a container, where each start counts from 1: their records are in files that were there."""
    path, record = record_path(tmp_path, 0, 7), make_record(0, 1, 4, [("compute", 0.0, 1.0)])
    write_lines(path, [record, record])

    def start(trains: bool) -> None:
        with Before(tmp_path) as before:
            write_lines(path, [record])  # the other is undone
            before.begin()
            if trains:
                with RecordWriter(path) as writer:
                    writer.write(msgspec.structs.replace(record, step=2))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(trains=False)
    assert [one.step for one in read_run(tmp_path)] == [1, 1]
    with pytest.raises(KeyboardInterrupt):
        start(trains=True)
    assert [one.step for one in read_run(tmp_path)] == [1, 2]
    assert os.listdir(tmp_path) == [path.name]
