"""A run whose workers fail, are killed or never join, and one that is itself stopped or killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run_scripts import (
    KILLED_ONCE,
    PATIENCE_SECONDS,
    PYPS,
    SAMPLES,
    TRAIN,
    alive,
    options_for,
    pyps_run,
    script,
    until,
)
from sampled import sampled

from pyps.formats.events import read_events
from pyps.report.report import read_report
from pyps.run import RunOptions, run
from pyps.run.launcher import TrainingFailed
from pyps.run.process import STARTUP_BACKOFF_SECONDS, Restarts, WorkerProcess, end_processes, last_error

# Under a policy that does not wait, rank 0 alone could use up the samples.
WAITS_FOR_THE_KILL = """
        while rank == 0 and step > 3 and not (run_dir / "killed").exists():
            time.sleep(0.01)
"""
RAISES = """
        if rank == 1 and step == 2:
            error = RuntimeError("the cat sat on the keyboard")
            error.add_note("    asdf\\n    ^")
            raise error
"""
SLOW = """
        (run_dir / f"pid-{rank}").write_text(str(os.getpid())); time.sleep(0.2)
"""
SLEEPS = """
import json, os, subprocess, sys, time
from pathlib import Path
settings = json.loads(os.environ["PYPS_RUN"])
pids = [os.getpid()]
if sys.argv[1:] == ["with-a-child"]:
    pids.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)
note = Path(settings["run_dir"]) / f"pid-{settings['rank']}"
note.with_suffix(".tmp").write_text(" ".join(map(str, pids)))
note.with_suffix(".tmp").rename(note)
time.sleep(600)
"""


@pytest.mark.parametrize("policy", sampled(["bsp", "asp"], 1))
def test_a_killed_worker_comes_back_and_every_sample_is_accounted_for(
    shm: Path, plan: Path, tmp_path: Path, policy: str
) -> None:
    options = RunOptions(samples=SAMPLES, policy=policy, run_dir=tmp_path / "out")
    report = run(plan, script(tmp_path, KILLED_ONCE + WAITS_FOR_THE_KILL), options)
    assert report.outcome == "finished"
    assert report.restarts == 1
    assert report.samples.trained + report.samples.dropped == SAMPLES
    assert report.samples.dropped == 0
    events = read_events(tmp_path / "out" / "run.jsonl")
    assert [e.detail for e in events if e.kind == "died"] == ["killed by SIGKILL"]
    assert [e.rank for e in events if e.kind == "restarted"] == [1]
    assert [rank.processes for rank in report.ranks] == [1, 2]


def test_a_script_that_raises_ends_the_run_with_its_last_words(shm: Path, plan: Path, tmp_path: Path) -> None:
    done = pyps_run(*options_for(plan, 0, tmp_path), script(tmp_path, RAISES))
    assert done.returncode == 1
    assert "rank 1 (device-1): exit code 1 at train.py:" in done.stderr
    assert "after 1 restart, with the same error: " in done.stderr
    assert done.stderr.count("Traceback") == 1
    error, hint = done.stderr.splitlines()[-2:]
    assert error.endswith("with the same error: RuntimeError: the cat sat on the keyboard")
    assert hint.endswith(f"continue with pyps run --resume {tmp_path / 'out'}")
    report = read_report(tmp_path / "out" / "report.json")
    assert (report.outcome, report.restarts) == ("failed", 1)
    assert "the cat sat" in report.error
    assert (tmp_path / "out" / "trace.json").is_file()


@pytest.mark.thorough
def test_a_death_is_announced_when_it_happens(shm: Path, plan: Path, tmp_path: Path) -> None:
    done = pyps_run(*options_for(plan, SAMPLES, tmp_path), script(tmp_path, KILLED_ONCE))
    assert done.returncode == 0, done.stderr
    assert "rank 1 (device-1): killed by SIGKILL; restarting (1 of 3)\n" in done.stderr
    assert "\n1 restart; 3 samples returned, 0 skipped, 0 dropped\n" in done.stdout


def test_an_option_after_the_script_is_explained(shm: Path, plan: Path, tmp_path: Path) -> None:
    text = "import argparse\nargparse.ArgumentParser().parse_args()"
    path = script(tmp_path, text=text)
    done = pyps_run(*options_for(plan, SAMPLES, tmp_path), path, "--throttle-from", "plan")
    assert done.returncode == 1
    assert "unrecognized arguments: --throttle-from plan" in done.stderr
    assert done.stderr.rstrip().endswith("; options of pyps run go before the script")
    other = tmp_path / "other"
    done = pyps_run(*options_for(plan, SAMPLES, other), path, "--width", "3")
    assert "go before the script" not in done.stderr
    done = pyps_run("--plan", plan, path, "--samples", "96", "--width", "3")
    assert done.returncode == 2
    assert "--samples: found nothing before the script, and --samples after it; expected" in done.stderr


FAILS_AT_ONCE = """
        (run_dir / f"gpu-{rank}").write_text(os.environ["LOCAL_RANK"])
        if rank == 1:
            raise NameError("criterion")
"""


@pytest.mark.thorough
def test_a_rank_that_fails_by_itself_before_its_first_step_is_tried_twice(
    shm: Path, plan: Path, tmp_path: Path
) -> None:
    with pytest.raises(TrainingFailed, match="after 1 restart, with the same error: NameError: criterion"):
        run(plan, script(tmp_path, FAILS_AT_ONCE), RunOptions(samples=0, run_dir=tmp_path / "out"))
    assert (tmp_path / "out" / "gpu-1").read_text() == "1"


class Died(WorkerProcess):
    """A process that has ended, as far as Restarts asks."""

    exit_code, error, lived_seconds = 1, "KeyError: 'x'", 0.1  # type: ignore[assignment]

    def __init__(self, rank: int, error: str = error) -> None:
        self.rank, self.error = rank, error  # type: ignore[misc]


def test_no_rank_is_started_again_when_all_fail_alike_before_a_step() -> None:
    restarts = Restarts(3, ranks=3)
    assert [restarts.refusal(Died(rank), False) for rank in (0, 2)] == [None, None]
    assert restarts.count(0) >= STARTUP_BACKOFF_SECONDS
    assert restarts.refusal(Died(1), False) == ", as all ranks did before their first step"


@pytest.mark.parametrize(
    ("errors", "steps"),
    [
        (["KeyError: 'x'", "KeyError: 'y'"], False),
        (["pyps.errors.LinkLost: gone"] * 2, False),
        (["KeyError: 'x'"] * 2, True),
    ],
)
def test_ranks_that_fail_otherwise_are_started_again(errors: list[str], steps: bool) -> None:
    restarts = Restarts(3, ranks=2)
    assert [restarts.refusal(Died(k, error), steps) for k, error in enumerate(errors)] == [None, None]


def test_a_link_may_be_lost_twice() -> None:
    restarts = Restarts(3, ranks=2)
    lost = [restarts.refusal(Died(0, "pyps.errors.LinkLost: gone"), True) for _ in range(2)]
    assert lost == [None, None]


@pytest.mark.thorough
def test_a_script_that_fails_on_all_ranks_is_not_tried_again(
    shm: Path, plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names its line."""
    monkeypatch.setattr("pyps.run.process.STARTUP_BACKOFF_SECONDS", PATIENCE_SECONDS)
    path = script(tmp_path, "{}['label']")
    line = 1 + path.read_text().splitlines().index("        {}['label']")
    words = f"exit code 1 at train.py:{line}, as all ranks did before their first step: KeyError: 'label'"
    with pytest.raises(TrainingFailed, match=words):
        run(plan, path, RunOptions(samples=SAMPLES, run_dir=tmp_path / "out"))
    assert not [e for e in read_events(tmp_path / "out" / "run.jsonl") if e.kind == "restarted"]


@pytest.mark.thorough
def test_a_misuse_shows_the_scripts_frames_alone(shm: Path, plan: Path, tmp_path: Path) -> None:
    for within, words in (("optimizer.step()", "optimizer.step()"), ("continue", "no step()")):
        path = script(tmp_path, within)
        folder = tmp_path / within[:4]
        folder.mkdir()
        done = pyps_run(*options_for(plan, SAMPLES, folder), path)
        assert done.returncode == 1
        files = {line.split('"')[1] for line in done.stderr.splitlines() if '  File "' in line}
        assert files == {str(path)}, done.stderr
        assert words in done.stderr


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("raise SystemExit('no data here')", 1, "no data here"),
        ("print('done')", 0, "has to call pyps.join()"),
    ],
)
def test_a_worker_that_never_joined_is_not_restarted(
    shm: Path, plan: Path, tmp_path: Path, text: str, code: int, words: str
) -> None:
    with pytest.raises(TrainingFailed, match="before it had joined") as caught:
        run(plan, script(tmp_path, text=text), RunOptions(samples=SAMPLES, run_dir=tmp_path / "out"))
    assert words in str(caught.value)
    assert f"exit code {code}" in str(caught.value)
    report = read_report(tmp_path / "out" / "report.json")
    assert (report.outcome, report.restarts) == ("failed", 0)


DIVERGES = """
        if step == 4:
            loss = loss * float("nan")
"""


@pytest.mark.thorough
def test_a_loss_that_is_not_finite_ends_the_run(shm: Path, plan: Path, tmp_path: Path) -> None:
    text = TRAIN.replace("{within}\n", DIVERGES.strip() + "\n")
    options = [*options_for(plan, SAMPLES, tmp_path), "--policy", "asp"]
    done = pyps_run(*options, script(tmp_path, text=text))
    assert done.returncode == 1
    assert "Diverged: the loss is nan (samples " in done.stderr
    assert "restarting" not in done.stderr
    assert "--allow-nonfinite" in done.stderr
    report = read_report(tmp_path / "out" / "report.json")
    assert (report.outcome, report.restarts) == ("failed", 0)
    other = options_for(plan, SAMPLES, tmp_path / "other")
    assert pyps_run(*other, "--allow-nonfinite", script(tmp_path, text=text)).returncode == 0


def test_a_misuse_is_not_tried_again_and_is_said_once(shm: Path, plan: Path, tmp_path: Path) -> None:
    text = TRAIN.replace("loss.backward()", "").replace("{within}", "")
    done = pyps_run(*options_for(plan, SAMPLES, tmp_path), script(tmp_path, text=text))
    assert done.returncode == 1
    assert "found no gradient since the last batch; expected loss.backward() before" in done.stderr
    assert done.stderr.count("Traceback") == 1
    assert "restarting" not in done.stderr


OTHER_DATA = """
    data = inputs[:40 - rank], targets[:40 - rank]
    for step, (x, y) in enumerate(worker.batches(data)):"""


@pytest.mark.thorough
def test_a_rank_with_another_data_set_is_not_tried_again(shm: Path, plan: Path, tmp_path: Path) -> None:
    begin, _, end = TRAIN.partition("\n    for step, (x, y) in enumerate(worker.batches((inputs, targets))):")
    text = (begin + OTHER_DATA + end).replace("{within}", "")
    options = RunOptions(samples=SAMPLES, run_dir=tmp_path / "out")
    with pytest.raises(
        TrainingFailed, match=r"exit code 1 at train.py:\d+: pyps.errors.InvalidArgument: .* samples"
    ):
        run(plan, script(tmp_path, text=text), options)
    assert read_report(tmp_path / "out" / "report.json").restarts == 0


FRAMES = [
    "Traceback (most recent call last):",
    '  File "train.py", line 3, in <module>',
    "    x()",
    "    ^^^",
]


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ([], ""),
        (["no data here"], "no data here"),
        (["usage: train.py", "train.py: error: unrecognized"], "train.py: error: unrecognized"),
        ([*FRAMES, "NameError: x"], "NameError: x"),
        ([*FRAMES, "NameError: x", "a note", "   ^"], "NameError: x"),
        ([*FRAMES, "RuntimeError: several:", "\tMissing keys", ""], "RuntimeError: several:"),
        (
            ['  File "a.py", line 1', "    a b", "      ^", "SyntaxError: invalid syntax"],
            "SyntaxError: invalid syntax",
        ),
        ([*FRAMES, "KeyError: 1", "", "During the above:", "", *FRAMES, "OSError: 2"], "OSError: 2"),
        (["  | ExceptionGroup: two (1 sub-exception)", "    | ValueError: y", "    +---"], "ValueError: y"),
        (["failed here", "    ^"], "failed here"),
        (["^", "---"], ""),
    ],
)
def test_the_error_of_a_process(lines: list[str], error: str) -> None:
    assert last_error(lines) == error


def test_an_interrupt_leaves_nothing(shm: Path, plan: Path, tmp_path: Path) -> None:
    command = [PYPS, "run", *options_for(plan, 0, tmp_path), script(tmp_path, SLOW)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        notes = [tmp_path / "out" / f"pid-{rank}" for rank in (0, 1)]
        until(lambda: all(note.exists() and note.read_text() for note in notes))
        pids = [int(note.read_text()) for note in notes]
        assert len(list(shm.iterdir())) == 1
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_SECONDS) == 130
        assert process.stderr is not None
        assert "interrupted by SIGINT" in process.stderr.read()
    assert not any(map(alive, pids))
    assert not list(shm.iterdir())
    assert read_report(tmp_path / "out" / "report.json").outcome == "interrupted"


DEAF = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
import numpy as np
import pyps
store = pyps.join().settings.store
if settings["rank"] == 0:
    pyps.Store.create(store, {"w": np.zeros(4, np.float32)}, batches=[5, 3], keep=True)
"""


@pytest.mark.timed
@pytest.mark.parametrize("deaf", [False, True], ids=["obeys", "ignores SIGTERM"])
def test_nothing_outlives_a_killed_launcher(shm: Path, plan: Path, tmp_path: Path, deaf: bool) -> None:
    text = SLEEPS.replace("pids = [", DEAF + "pids = [") if deaf else SLEEPS
    path = script(tmp_path, text=text)
    command = [PYPS, "run", *options_for(plan, 0, tmp_path), path, "with-a-child"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        notes = [tmp_path / "out" / f"pid-{rank}" for rank in (0, 1)]
        until(lambda: all(note.exists() for note in notes))
        assert len(list(shm.iterdir())) == deaf
        process.kill()
    killed = time.monotonic()
    pids = [int(pid) for note in notes for pid in note.read_text().split()]
    assert len(pids) == 4
    until(lambda: not any(map(alive, pids)))
    until(lambda: not list(shm.iterdir()))
    assert time.monotonic() - killed < 10.0


def test_an_exception_in_the_launcher_ends_the_workers_and_their_children(
    shm: Path, plan: Path, tmp_path: Path
) -> None:
    notes = [tmp_path / "out" / f"pid-{rank}" for rank in (0, 1)]

    def fail(_: object) -> None:
        if all(note.exists() for note in notes):
            raise ZeroDivisionError

    path = script(tmp_path, text=SLEEPS)
    with pytest.raises(ZeroDivisionError):
        run(
            plan,
            path,
            RunOptions(samples=0, args=["with-a-child"], run_dir=tmp_path / "out"),
            on_progress=fail,
        )
    pids = [int(pid) for note in notes for pid in note.read_text().split()]
    assert len(pids) == 4
    until(lambda: not any(map(alive, pids)))
    assert read_report(tmp_path / "out" / "report.json").error == "ZeroDivisionError"


@pytest.mark.timed
def test_a_process_that_ignores_signals_or_is_stopped_is_killed(tmp_path: Path) -> None:
    deaf = ["sh", "-c", "trap '' INT TERM; echo ready; while :; do sleep 0.05; done"]
    processes = [WorkerProcess(rank, deaf, os.environ, tmp_path / f"{rank}.log") for rank in (0, 1)]
    for process in processes:
        until(lambda process=process: b"ready" in (process.read(process.streams()[0]) and b"ready"))
    os.kill(processes[1].pid, signal.SIGSTOP)
    began = time.monotonic()
    end_processes(processes, signal.SIGINT, grace_seconds=0.1)
    assert time.monotonic() - began < 5.0
    assert [process.exit_reason() for process in processes] == ["killed by SIGKILL"] * 2
    for process in processes:
        process.close()


def test_the_tail_of_stderr_is_kept_to_its_last_half_line(tmp_path: Path) -> None:
    code = "import sys; [print(k, file=sys.stderr) for k in range(300)]; sys.stderr.write('no newline')"
    process = WorkerProcess(0, [sys.executable, "-c", code], os.environ, tmp_path / "log")
    until(lambda: process.poll() is not None)
    seen: list[str] = []
    for stream in process.streams():
        while not stream.closed:
            seen += process.read(stream)
    process.close()
    assert seen == [*map(str, range(300)), "no newline"]
    assert list(process.stderr_tail) == [*map(str, range(201, 300)), "no newline"]
    assert (tmp_path / "log").read_text().endswith("299\nno newline")


def test_a_line_without_end_costs_linear_time(tmp_path: Path) -> None:
    code = "import os; [os.write(1, b'x' * 65536) for _ in range(800)]; os.write(1, b'\\nlast')"
    process = WorkerProcess(0, [sys.executable, "-c", code], os.environ, tmp_path / "log")
    stream = process.streams()[0]
    lines: list[str] = []
    began = time.thread_time()
    while not stream.closed:
        lines += process.read(stream)
    until(lambda: process.poll() is not None)
    process.close()
    assert time.thread_time() - began < 2.0  # 50 MB; joined again for each piece: 20 GB
    assert "".join(lines) == "x" * 65536 * 800 + "last"
    assert max(map(len, lines)) < 1.2e6
