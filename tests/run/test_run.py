"""`pyps run`: real processes through the store, and everything that can go wrong with them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from run_tools import make_plan
from safetensors.numpy import load, load_file

from pyps.checkpoint.folder import checkpoints
from pyps.errors import InputError
from pyps.formats import Fit, write_json
from pyps.formats.events import read_events
from pyps.native.values import Codec, Encoding
from pyps.report.report import read_report
from pyps.run import RunOptions, run
from pyps.run.launcher import TrainingFailed
from pyps.run.process import WorkerProcess, end_processes
from pyps.run.ranks import even_plan, rank_specs, throttles
from pyps.run.spec import prepare, write_setup
from pyps.store.policies import BSP
from pyps.worker.settings import Settings, ThrottleSpec, Variable

PYPS = str(Path(sys.executable).parent / "pyps")
BATCHES = (5, 3)
B = sum(BATCHES)
ROUNDS = 12
SAMPLES = B * ROUNDS
LENGTH = 40
PATIENCE_SECONDS = 60.0

TRAIN = """
import os, signal, sys, time
from pathlib import Path
import torch
import pyps

torch.set_num_threads(1)
draws = torch.Generator().manual_seed(0)
inputs, targets = torch.randn(40, 4, generator=draws), torch.randn(40, 1, generator=draws)
torch.manual_seed(1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
rank, run_dir = int(os.environ["PYPS_RANK"]), Path(os.environ["PYPS_RUN_DIR"])
with pyps.join() as worker:
    worker.attach(model, optimizer)
    print("attached", *sys.argv[1:])
    for step, (x, y) in enumerate(worker.batches((inputs, targets))):
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        {within}
        worker.step(loss)
"""
KILLED_ONCE = """
        if rank == 1 and step == 3 and not (run_dir / "killed").exists():
            (run_dir / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""
# Under a policy that does not wait, rank 0 alone could use up the samples.
WAITS_FOR_THE_KILL = """
        while rank == 0 and step > 3 and not (run_dir / "killed").exists():
            time.sleep(0.01)
"""
RAISES = """
        if rank == 1 and step == 2:
            raise RuntimeError("the cat sat on the keyboard")
"""
SLOW = """
        (run_dir / f"pid-{rank}").write_text(str(os.getpid())); time.sleep(0.2)
"""
SLEEPS = """
import os, subprocess, sys, time
from pathlib import Path
pids = [os.getpid()]
if sys.argv[1:] == ["with-a-child"]:
    pids.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)
note = Path(os.environ["PYPS_RUN_DIR"]) / f"pid-{os.environ['PYPS_RANK']}"
note.with_suffix(".tmp").write_text(" ".join(map(str, pids)))
note.with_suffix(".tmp").rename(note)
time.sleep(600)
"""


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    write_json(tmp_path / "plan.json", make_plan())
    return tmp_path / "plan.json"


def script(folder: Path, within: str = "", text: str = TRAIN) -> Path:
    path = folder / "train.py"
    path.write_text(text.replace("{within}", within.strip()) if text is TRAIN else text)
    return path


def options_for(plan: Path, samples: int, folder: Path) -> list[object]:
    """The options of a run of so many samples, whose folder is `folder`/out."""
    return ["--plan", plan, "--samples", str(samples), "--run-dir", folder / "out"]


def pyps_run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PYPS, "run", *map(str, arguments)], capture_output=True, text=True)


def until(condition: Callable[[], object]) -> None:
    """Wait for a condition, with a deadline."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def reference() -> dict[str, torch.Tensor]:
    """The same training by one process, with full batches and torch's own optimizer."""
    from pyps.worker.sampling import indices

    draws = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(LENGTH, 4, generator=draws), torch.randn(LENGTH, 1, generator=draws)
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    for k in range(ROUNDS):
        chosen = torch.from_numpy(np.array(indices(k * B, B, LENGTH, 7)))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs[chosen]), targets[chosen]).backward()
        optimizer.step()
    return dict(model.state_dict())


def test_a_run_from_the_command_line(shm: Path, plan: Path, tmp_path: Path) -> None:
    """JSON alone on stdout, the workers' lines on stderr, and what one process would have trained."""
    options = [
        *options_for(plan, SAMPLES, tmp_path),
        "--seed",
        "7",
        "--checkpoint-every",
        "1",
        "--keep-checkpoints",
        "99",
        "--json",
    ]
    done = pyps_run(*options, script(tmp_path), "--width", "3")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report == json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["samples"] == {
        "requested": SAMPLES,
        "trained": SAMPLES,
        "skipped": 0,
        "returned": 0,
        "dropped": 0,
    }
    assert report["versions"] == ROUNDS
    assert [rank["samples"] for rank in report["ranks"]] == [5 * ROUNDS, 3 * ROUNDS]
    assert "[0] attached --width 3" in done.stderr
    assert "[1] attached --width 3" in done.stderr
    arrays = load_file(tmp_path / "out" / "model.safetensors")
    for name, expected in reference().items():
        np.testing.assert_allclose(arrays[name], expected.numpy(), rtol=1e-5, atol=1e-6)
    kinds = [event.kind for event in read_events(tmp_path / "out" / "run.jsonl")]
    assert kinds.count("started") == kinds.count("joined") == kinds.count("finished") == 2
    found = checkpoints(tmp_path / "out" / "checkpoints")
    assert len(found) == kinds.count("checkpoint") >= 1
    assert found[-1].name == report["checkpoint"] == f"{ROUNDS:09d}"
    last = (found[-1] / "model.safetensors").read_bytes()
    assert load(last).keys() == arrays.keys()
    trace = json.loads((tmp_path / "out" / "trace.json").read_text())
    assert sum(e["ph"] == "X" and e["name"] == "compute" for e in trace["traceEvents"]) == 2 * ROUNDS


@pytest.mark.parametrize("policy", ["bsp", "asp"])
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
    assert "rank 1 (device-1): exit code 1 after 1 restart, with the same error: " in done.stderr
    assert done.stderr.count("Traceback") == 1
    error, hint = done.stderr.splitlines()[-2:]
    assert error.endswith("RuntimeError: the cat sat on the keyboard")
    assert hint.endswith(f"continue with pyps run --resume {tmp_path / 'out'}")
    report = read_report(tmp_path / "out" / "report.json")
    assert (report.outcome, report.restarts) == ("failed", 1)
    assert "the cat sat" in report.error
    assert (tmp_path / "out" / "trace.json").is_file()


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


FAILS_AT_ONCE = """
        (run_dir / f"gpu-{rank}").write_text(os.environ["LOCAL_RANK"])
        if rank == 1:
            raise NameError("criterion")
"""


def test_a_rank_that_fails_by_itself_before_its_first_step_is_tried_twice(
    shm: Path, plan: Path, tmp_path: Path
) -> None:
    with pytest.raises(TrainingFailed, match="after 1 restart, with the same error: NameError: criterion"):
        run(plan, script(tmp_path, FAILS_AT_ONCE), RunOptions(samples=0, run_dir=tmp_path / "out"))
    assert (tmp_path / "out" / "gpu-1").read_text() == "1"


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
if os.environ["PYPS_RANK"] == "0":
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
    code = "import sys; [print(k, file=sys.stderr) for k in range(100)]; sys.stderr.write('no newline')"
    process = WorkerProcess(0, [sys.executable, "-c", code], os.environ, tmp_path / "log")
    until(lambda: process.poll() is not None)
    seen: list[str] = []
    for stream in process.streams():
        while not stream.closed:
            seen += process.read(stream)
    process.close()
    assert seen == [*map(str, range(100)), "no newline"]
    assert list(process.stderr_tail) == [*map(str, range(81, 100)), "no newline"]
    assert (tmp_path / "log").read_text().endswith("99\nno newline")


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


# -- What is refused before anything starts --


def refused(default: Path, tmp_path: Path, **changes: object) -> InputError:
    """What run() says; nothing may have been started or left."""
    path = changes.pop("plan", default)
    train = changes.pop("script", None) or script(tmp_path)
    options = {"samples": SAMPLES, "run_dir": tmp_path / "out", **changes}
    with pytest.raises(InputError) as caught:
        run(path, train, RunOptions(**options))  # type: ignore[arg-type]
    assert not (tmp_path / "out" / "run.jsonl").exists()
    return caught.value


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"policy": "bulk"}, ("policy", "bulk", "bsp")),
        ({"script": "nowhere.py"}, ("script", "nowhere.py")),
        ({"samples": -1}, ("samples", "-1")),
        ({"seed": -1}, ("seed", "-1")),
        ({"max_restarts": -1}, ("max_restarts", "-1")),
        ({"throttle_from": "plan"}, ("plan.json", "throttle", "emulated")),
        ({"throttle_from": "nowhere.toml"}, ("nowhere.toml",)),
        ({"plan": "nowhere.json"}, ("nowhere.json", "no such file")),
    ],
)
def test_refusals(plan: Path, tmp_path: Path, changes: dict[str, object], words: tuple[str, ...]) -> None:
    text = str(refused(plan, tmp_path, **changes))
    for word in words:
        assert word in text


def test_an_even_split_that_breaks_a_bound_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_json(path, make_plan(feasible=False))
    error = refused(path, tmp_path, even=True)
    assert (error.where, error.field) == (str(path), "even_split.feasible")


def test_a_folder_that_holds_a_run_is_refused(plan: Path, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "run.json").write_text("")
    assert "holds a run" in str(refused(plan, tmp_path, run_dir=tmp_path / "old"))
    assert sorted(p.name for p in (tmp_path / "old").iterdir()) == ["run.json"]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("global_batch", 9, ("workers[0].weight", "0.625", "global_batch")),
        ("schema", "pyps.plan/2", ("schema", "pyps.plan/2", "pyps.plan/1")),
        ("iteration_seconds", -1.0, ("iteration_seconds", "-1.0")),
    ],
)
def test_a_bad_plan_is_exit_2_and_one_message(
    plan: Path, tmp_path: Path, field: str, value: object, words: tuple[str, ...]
) -> None:
    raw = json.loads(plan.read_text())
    plan.write_text(json.dumps({**raw, field: value}))
    done = pyps_run(*options_for(plan, 8, tmp_path), script(tmp_path))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    for word in (str(plan), *words):
        assert word in done.stderr.replace("\n", "")
    assert not (tmp_path / "out").exists()


def test_how_long_has_to_be_said(plan: Path, tmp_path: Path) -> None:
    done = pyps_run("--plan", plan, script(tmp_path))
    assert done.returncode == 2
    assert "--samples" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ((), "pyps run: --samples: found nothing; expected --samples N, or --epochs E --dataset-size N"),
        (("--epochs", "1"), "pyps run: --dataset-size: found nothing"),
        (("--dataset-size", "8"), "pyps run: --epochs: found nothing"),
        (("--samples", "8"), "pyps run: script: found no file at gone.py"),
    ],
)
def test_an_error_names_what_is_missing(plan: Path, options: tuple[str, ...], error: str) -> None:
    done = pyps_run("--plan", plan, *options, "gone.py")
    assert done.returncode == 2
    assert done.stderr.startswith(error)


# -- Ranks and settings --


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any))
@settings(derandomize=True, deadline=None)
def test_even_batches_keep_the_sum_and_differ_by_one(batches: list[int]) -> None:
    plan = make_plan(batches)
    if len(batches) > plan.global_batch:
        with pytest.raises(InputError):
            even_plan(plan, "plan.json")
        return
    even = [worker.batch for worker in even_plan(plan, "plan.json").workers]
    assert sum(even) == sum(batches)
    assert max(even) - min(even) <= 1
    assert sorted(even, reverse=True) == even


def test_even_batches_predict_with_the_fits() -> None:
    fit = Fit(
        kind="affine", fixed_seconds=0.1, per_sample_seconds=0.01, trusted_min_batch=1, trusted_max_batch=99
    )
    even = even_plan(make_plan(), "plan.json", [fit, None])
    assert even.workers[0].predicted_seconds == pytest.approx(0.1 + 0.01 * B / 2)
    assert even.workers[1].predicted_seconds == 0.0
    assert even.iteration_seconds == 0.2


def test_workers_without_a_batch_do_not_run() -> None:
    specs = rank_specs(make_plan([5, 0, 3]), [None] * 3)
    assert [(s.rank, s.name, s.batch) for s in specs] == [(0, "device-0", 5), (1, "device-2", 3)]


def test_throttles_come_from_the_plan_or_from_the_clusters_profiles(tmp_path: Path) -> None:
    emulated = make_plan(throttle=3.0)
    assert throttles(emulated, "plan.json", None) == [None, None]
    assert throttles(emulated, "plan.json", "plan") == [ThrottleSpec(factor=3.0)] * 2
    points = [{"batch": b, "seconds": 0.1 + 0.01 * b} for b in (1, 10, 20, 40)]
    profile = {"schema": "pyps.profile/1", "device": {"name": "d"}, "model": {"name": "m"}, "points": points}
    (tmp_path / "p.json").write_text(json.dumps(profile))
    cluster = "[job]\nglobal_batch = 8\n[[worker]]\nname = 'device'\ncount = 2\nprofile = 'p.json'\n"
    (tmp_path / "cluster.toml").write_text(cluster)
    found = throttles(emulated, "plan.json", tmp_path / "cluster.toml")
    assert all(spec is not None and spec.fit is not None for spec in found)
    assert found[0].fit.per_sample_seconds == pytest.approx(0.01)
    with pytest.raises(InputError, match=r"workers\[2\]\.name.*device-2"):
        throttles(make_plan([2, 3, 3]), "plan.json", tmp_path / "cluster.toml")


@pytest.mark.parametrize("codec", ["int8", "f32"])
@pytest.mark.parametrize("throttle", [None, "plan"])
def test_the_worker_reads_what_the_launcher_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, throttle: str | None, codec: str
) -> None:
    monkeypatch.setenv("PYPS_THROTTLE", '{"factor": 99}')
    monkeypatch.setenv("PYPS_JOURNAL", "of-another-run")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    write_json(tmp_path / "plan.json", make_plan(throttle=2.5))
    options = RunOptions(
        samples=80,
        policy=BSP(round_timeout_seconds=7.5),
        seed=11,
        dataset_size=40,
        codec=codec,
        run_dir=tmp_path / "out",
        throttle_from=throttle,
    )
    spec = prepare(tmp_path / "plan.json", script(tmp_path), options)
    write_setup(spec)
    written = spec.settings(spec.ranks[1])
    env = spec.environment(spec.ranks[1])
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    found = Settings.from_env()
    assert found == written
    assert (found.store, found.rank, found.batches) == (spec.store, 1, BATCHES)
    assert (found.policy, found.samples, found.seed) == (options.policy, 80, 11)
    assert found.encoding == Encoding(Codec[codec.upper()], error_feedback=codec == "int8")
    assert found.throttle == (ThrottleSpec(factor=2.5) if throttle else None)
    assert (found.run_dir, found.journal, found.launched) == (tmp_path / "out", None, True)
    assert env.get("OMP_NUM_THREADS") == ("1" if throttle else None)


def test_to_env_writes_every_variable(tmp_path: Path) -> None:
    """A variable that another run left in the environment must not reach a worker."""
    assert Settings("store", 0, BSP()).to_env().keys() == {variable.value for variable in Variable}
